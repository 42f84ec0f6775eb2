//! Page classes: cache groups whose blocks have equal bytes share the blocks of one class, and all classes share the
//! bytes of their tier.
//!
//! Within the core a block of any class has one number in its tier, so that its state, leases and key need no class: the
//! numbers of a class follow those of the class before it. Outside, a block has an id in its class, see
//! [`Space::Extents`].

use crate::error::{Result, invalid};
use crate::id::BlockId;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Range};

/// Maximum number of page classes in a manager.
pub const MAX_CLASSES: usize = 4;

/// How the page classes of a tier share it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Space {
    /// A fixed number of blocks of each class in each tier.
    Split {
        /// By class: blocks of each tier.
        blocks: Vec<[usize; 3]>,
        /// By class: the device blocks that a resize can reach, if those are more; none means no more.
        most: Vec<usize>,
    },
    /// Extents of equal bytes, which classes take and give back; a single class has them all. The ids of a class are
    /// `extent * per_extent + i`: block `id` lies at `id * bytes / per_extent` in the tier. If tables have null blocks,
    /// extent 0 belongs to no class: block 0 of each class lies there.
    Extents {
        /// Bytes of an extent: at least those of the largest block, and a multiple of the number of blocks of each class
        /// that lie in it, which is nearly as many as there is room for; see [`extent_bytes`].
        bytes: u64,
        /// Extents of each tier: device, host, external.
        counts: [usize; 3],
        /// Device extents that a resize can reach, if those are more.
        most: usize,
    },
}

/// One number for each page class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PerClass([usize; MAX_CLASSES]);

impl PerClass {
    /// A number for one class, and 0 for the others.
    #[inline]
    pub(crate) fn of(class: usize, count: usize) -> Self {
        let mut all = Self::default();
        all.0[class] = count;
        all
    }

    /// The number of a class.
    #[inline]
    #[must_use]
    pub fn get(self, class: usize) -> usize {
        self.0[class]
    }

    /// The number of a class, mutable.
    #[inline]
    pub(crate) fn at(&mut self, class: usize) -> &mut usize {
        &mut self.0[class]
    }

    /// One number for each of the first classes; at most [`MAX_CLASSES`] of them count.
    #[must_use]
    pub fn from_slice(counts: &[usize]) -> Self {
        Self(std::array::from_fn(|class| counts.get(class).copied().unwrap_or(0)))
    }

    /// All numbers together.
    #[inline]
    #[must_use]
    pub fn total(self) -> usize {
        self.0.into_iter().fold(0, usize::saturating_add)
    }

    /// Joins the numbers of two, class by class.
    #[inline]
    pub(crate) fn with(self, other: Self, join: impl Fn(usize, usize) -> usize) -> Self {
        Self(std::array::from_fn(|class| join(self.0[class], other.0[class])))
    }

    #[inline]
    pub(crate) fn saturating_sub(self, other: Self) -> Self {
        self.with(other, usize::saturating_sub)
    }
}

impl Add for PerClass {
    type Output = Self;

    #[inline]
    fn add(self, other: Self) -> Self {
        self.with(other, usize::saturating_add)
    }
}

impl AddAssign for PerClass {
    #[inline]
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for PerClass {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), Add::add)
    }
}

/// Use of one tier by one page class, in bytes with their padding; 1 a block if blocks have no bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassUse {
    /// Bytes of the blocks that the class has now, without the null block.
    pub total: u64,
    /// Bytes of those that are not free now: referenced, or held by a transfer.
    pub used: u64,
    /// Bytes of those that can be found now, used or not.
    pub cached: u64,
}

/// Which numbers of a tier's blocks belong to which class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Classes {
    count: u8,
    /// Where the numbers of each class but the last end; `u32::MAX` after those.
    ends: [u32; MAX_CLASSES - 1],
    /// One past the last number.
    end: u32,
}

impl Classes {
    /// Classes with these numbers of blocks.
    pub(crate) fn new(blocks: &[usize]) -> Self {
        let (mut ends, mut end) = ([u32::MAX; MAX_CLASSES - 1], 0u32);
        for (class, &count) in blocks.iter().enumerate() {
            end = end.saturating_add(u32::try_from(count).unwrap_or(u32::MAX));
            if class + 1 < blocks.len() {
                ends[class] = end;
            }
        }
        Self { count: u8::try_from(blocks.len()).unwrap_or(1), ends, end }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        usize::from(self.count)
    }

    /// The class of a block.
    #[inline]
    pub(crate) fn of(&self, block: BlockId) -> usize {
        if self.count == 1 {
            return 0;
        }
        self.ends.iter().map(|&end| usize::from(block.0 >= end)).sum()
    }

    /// The first number of a class.
    #[inline]
    pub(crate) fn first(&self, class: usize) -> u32 {
        class.checked_sub(1).map_or(0, |before| self.ends[before])
    }

    /// The numbers of a class.
    pub(crate) fn range(&self, class: usize) -> Range<u32> {
        let end = if class + 1 < self.len() { self.ends[class] } else { self.end };
        self.first(class)..end
    }

    /// Follows a resize of the only class.
    pub(crate) fn resize(&mut self, blocks: usize) {
        self.end = u32::try_from(blocks).unwrap_or(u32::MAX);
    }
}

/// Strides are multiples of this many bytes.
const ALIGNMENT: u64 = 16;

/// Extents of at most this many of the largest blocks are considered.
const MAX_LARGEST: u64 = 256;

/// A good size of the extents for blocks of these bytes in an arena of `arena` bytes: one that loses little to padding, as
/// extents are not whole numbers of blocks, and to extents that are filled in part, one for each class. Blocks then lie at
/// strides of whole multiples of 16 bytes.
#[must_use]
pub fn extent_bytes(block_bytes: &[u64], arena: u64) -> u64 {
    let largest = block_bytes.iter().copied().max().unwrap_or(1).max(1);
    let candidates = (1..=MAX_LARGEST).map(|blocks| aligned(block_bytes, largest.saturating_mul(blocks)));
    candidates.min_by_key(|&extent| lost(block_bytes, extent, arena)).unwrap_or(largest)
}

/// The next larger extent that has as many blocks of each class as one of these bytes, at aligned strides.
fn aligned(block_bytes: &[u64], extent: u64) -> u64 {
    let step = block_bytes.iter().fold(ALIGNMENT, |step, &block| lcm(step, (extent / block.max(1)).max(1) * ALIGNMENT));
    extent.div_ceil(step).saturating_mul(step)
}

/// At most this many numbers of blocks, or strides, are tried for an extent.
const MAX_TRIED: usize = 1 << 14;

/// Blocks of some bytes that lie in an extent at one stride, which is aligned if extent and blocks are; 1 if these are far
/// fewer than there is room for, or not found soon.
fn blocks_in(extent: u64, block: u64) -> u64 {
    let unit = if extent % ALIGNMENT == 0 && block % ALIGNMENT == 0 { ALIGNMENT } else { 1 };
    let (units, most) = (extent / unit, (extent / block.max(1)).max(1));
    let (least, narrowest) = (most - most / 4, units.div_ceil(most));
    // Look among the numbers of blocks, or among the strides, whichever are fewer.
    let found = if most < narrowest {
        (least..=most).rev().take(MAX_TRIED).find(|blocks| units % blocks == 0)
    } else {
        (narrowest..=units / least).take(MAX_TRIED).find(|stride| units % stride == 0).map(|stride| units / stride)
    };
    found.unwrap_or(1)
}

/// What a size of extents loses, in billionths of the arena.
fn lost(block_bytes: &[u64], extent: u64, arena: u64) -> u128 {
    let billionths = |part: u128, of: u64| part * 1_000_000_000 / u128::from(of.max(1));
    let padding = |&block: &u64| {
        let blocks = u128::from(blocks_in(extent, block));
        billionths(u128::from(extent).saturating_sub(blocks * u128::from(block)), extent)
    };
    let classes = block_bytes.len().max(1) as u128;
    let padding: u128 = block_bytes.iter().map(padding).sum();
    padding / classes + billionths(classes * u128::from(extent), arena) / 2
}

fn lcm(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x).saturating_mul(b)
}

/// How many blocks of each class a tier has, and of what they are made.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    /// Numbers of blocks, by class, as many as a resize can reach.
    pub(crate) ids: Vec<usize>,
    /// How many of them blocks have now.
    pub(crate) now: Vec<usize>,
    /// `None` if each class has its own blocks for good.
    pub(crate) extents: Option<ExtentShape>,
    /// Whether tables have null blocks.
    pub(crate) has_null: bool,
    /// Bytes from a block to the next, by class.
    pub(crate) strides: [u64; MAX_CLASSES],
}

/// The extents of a tier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExtentShape {
    /// Blocks of each class in an extent.
    pub(crate) per_extent: PerClass,
    pub(crate) bytes: u64,
    /// Extents now, and as many as a resize can reach.
    pub(crate) count: usize,
    pub(crate) most: usize,
}

impl Shape {
    /// One class.
    pub(crate) fn single(blocks: usize, has_null: bool) -> Self {
        Self { ids: vec![blocks], now: vec![blocks], extents: None, has_null, strides: [1; MAX_CLASSES] }
    }

    /// The shape of each tier.
    ///
    /// # Errors
    /// There is not one number of blocks for each class; a class has too few; an extent is smaller than a block.
    pub(crate) fn of_tiers(space: &Space, bytes: &[u64], has_null: bool) -> Result<[Self; 3]> {
        match space {
            Space::Split { blocks, most } => {
                if blocks.len() != bytes.len() {
                    let must = format!("{}, one for each page class", bytes.len());
                    return Err(invalid("numbers of blocks", blocks.len() as i128, must));
                }
                Ok(std::array::from_fn(|tier| {
                    let now: Vec<usize> = blocks.iter().map(|of| of[tier]).collect();
                    let mut ids = now.clone();
                    if tier == 0 && blocks.len() > 1 {
                        ids.iter_mut().zip(most).for_each(|(ids, &most)| *ids = most.max(*ids));
                    }
                    Self { ids, now, extents: None, has_null, strides: by_class(|class| bytes[class], bytes) }
                }))
            }
            Space::Extents { bytes: extent, counts, most } => {
                let largest = bytes.iter().copied().max().unwrap_or(1);
                if *extent < largest {
                    return Err(invalid("extent_bytes", *extent, format!("at least {largest}, those of a block")));
                }
                let mut per_extent = PerClass::default();
                for (class, &block) in bytes.iter().enumerate() {
                    let (blocks, room) = (blocks_in(*extent, block), *extent / block);
                    if blocks * 4 < room * 3 {
                        let must = format!("a multiple of {room}, the blocks of {block} bytes in it");
                        return Err(invalid("extent_bytes", *extent, must));
                    }
                    *per_extent.at(class) = usize::try_from(blocks).unwrap_or(usize::MAX);
                }
                Ok(std::array::from_fn(|tier| {
                    let count = counts[tier];
                    if bytes.len() == 1 {
                        let strides = by_class(|class| bytes[class], bytes);
                        return Self { strides, ..Self::single(per_extent.get(0).saturating_mul(count), has_null) };
                    }
                    let strides = by_class(|class| extent / per_extent.get(class).max(1) as u64, bytes);
                    let most = if tier == 0 { count.max(*most) } else { count };
                    let of =
                        |count| (0..bytes.len()).map(|class| per_extent.get(class).saturating_mul(count)).collect();
                    let extents = Some(ExtentShape { per_extent, bytes: *extent, count, most });
                    Self { ids: of(most), now: of(count), extents, has_null, strides }
                }))
            }
        }
    }
}

/// A number for each class that there is; 1 for the others.
fn by_class(of: impl Fn(usize) -> u64, classes: &[u64]) -> [u64; MAX_CLASSES] {
    std::array::from_fn(|class| if class < classes.len() { of(class) } else { 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_belongs_to_the_class_whose_range_has_it() {
        for blocks in [&[5][..], &[3, 4], &[1, 2, 3, 4], &[4, 0, 2]] {
            let classes = Classes::new(blocks);
            let total: usize = blocks.iter().sum();
            for block in (0..).map(BlockId).take(total) {
                assert!(classes.range(classes.of(block)).contains(&block.0), "{block} of {blocks:?}");
            }
            assert!((0..classes.len()).all(|class| classes.range(class).len() == blocks[class]));
        }
    }

    #[test]
    fn blocks_without_a_common_measure_are_refused_or_fit_and_neither_takes_long() {
        let odd = [2_097_152, 16, 1_031_379, 37_248, (1 << 31) - 1, (1 << 40) - 87];
        for bytes in odd.windows(4) {
            for arena in [3_048_944_094, 1 << 40, u64::MAX] {
                assert!(extent_bytes(bytes, arena) >= bytes.iter().copied().max().unwrap());
            }
            let space = Space::Extents { bytes: (1 << 61) - 1, counts: [2, 0, 0], most: 0 };
            assert!(Shape::of_tiers(&space, bytes, true).is_err(), "2^61 - 1 is prime");
        }
    }

    #[test]
    fn an_extent_holds_whole_strides_of_every_class_and_loses_little() {
        const GIB: u64 = 1 << 30;
        let drafter = [1_048_576, 327_680, 153_931_776];
        for bytes in [&[327_680, 64_389_120][..], &[584 * 64, 1_002_240, 8_640], &drafter, &[70_000, 50_000, 30_000]] {
            let extent = extent_bytes(bytes, 40 * GIB);
            let space = Space::Extents { bytes: extent, counts: [9, 0, 0], most: 0 };
            assert!(Shape::of_tiers(&space, bytes, true).is_ok(), "{bytes:?} in {extent}");
            assert!(lost(bytes, extent, 40 * GIB) < 20_000_000, "{bytes:?} lose over 2 % in {extent}");
        }
        for (extent, block, blocks) in [(960, 64, 15), (960, 48, 20), (100, 14, 1), (100, 20, 5), (1 << 40, 1, 1 << 40)]
        {
            assert_eq!(blocks_in(extent, block), blocks, "blocks of {block} in {extent}");
        }
        let space = Space::Extents { bytes: 101, counts: [9, 0, 0], most: 0 };
        assert!(Shape::of_tiers(&space, &[14, 100], true).is_err(), "101 is prime");
    }
}
