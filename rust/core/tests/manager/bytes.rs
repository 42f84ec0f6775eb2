//! The memory of all tiers, in words. Blocks of a page class lie at one stride; the classes of an arena share its words.

use super::BLOCK;
use blockyard_core::{BlockId, Group, Manager, PagedGroup, Space, Tier};
use proptest::prelude::*;

/// What the tokens of a block hold; smaller blocks use the first words.
pub(crate) type Bytes = [u64; BLOCK as usize];

pub(crate) const GARBAGE: Bytes = [u64::MAX; BLOCK as usize];

/// A block: its tier, page class and id there.
pub(crate) type At = (Tier, usize, u32);

/// A token's place on the device: page class, block, and offset there.
pub(crate) type Slot = (usize, u32, u32);

/// Words of a block of each class.
const STRIDES: [usize; 4] = [4, 7, 5, 12];

/// Blocks of each class, or extents, that the device has at most.
pub(crate) const MOST: usize = 40;

/// Words of an extent.
const EXTENT: usize = 12;

/// How many tokens the blocks of each group hold, and which strides they have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pages {
    tokens: [u32; 9],
    strides: [usize; 9],
    has_extents: bool,
}

impl Pages {
    /// Blocks of one size.
    pub(crate) const EQUAL: Self = Self { tokens: [BLOCK; 9], strides: [STRIDES[0]; 9], has_extents: false };

    /// Blocks of these strides over extents.
    pub(crate) const fn of(strides: [usize; 9]) -> Self {
        Self { tokens: [BLOCK; 9], strides, has_extents: true }
    }

    pub(crate) fn groups(self, groups: &[Group]) -> Vec<PagedGroup> {
        let sizes = groups.iter().zip(self.tokens.into_iter().zip(self.strides));
        sizes
            .map(|(&group, (tokens, stride))| {
                let block_tokens = if group == Group::Recurrent { BLOCK } else { tokens };
                PagedGroup { group, block_tokens, block_bytes: stride as u64 * 8 }
            })
            .collect()
    }

    /// As many blocks of each class, or extents for all.
    pub(crate) fn space(self, groups: &[Group], blocks: [usize; 3]) -> Space {
        if self.has_extents {
            return Space::Extents { bytes: EXTENT as u64 * 8, counts: blocks, most: MOST };
        }
        let mut strides = self.strides[..groups.len()].to_vec();
        strides.sort_unstable();
        strides.dedup();
        Space::Split { blocks: vec![blocks; strides.len()], most: vec![MOST; strides.len()] }
    }
}

pub(crate) fn pages() -> impl Strategy<Value = Pages> {
    let tokens = prop_oneof![
        1 => Just([BLOCK; 9]),
        2 => prop::array::uniform9(prop::sample::select(&[1, 2, BLOCK, BLOCK][..])),
    ];
    let classes = 1usize..5;
    let strides = classes.prop_flat_map(|classes| prop::array::uniform9(prop::sample::select(&STRIDES[..classes])));
    (tokens, strides, any::<bool>()).prop_map(|(tokens, strides, has_extents)| Pages { tokens, strides, has_extents })
}

/// The words of all tiers.
pub(crate) struct Memory {
    words: [Vec<u64>; 3],
    /// By class: words of a block, and those before its first block, in each tier.
    strides: Vec<usize>,
    first: [Vec<usize>; 3],
    has_extents: bool,
}

impl Memory {
    pub(crate) fn new(manager: &Manager, pages: Pages, blocks: [usize; 3]) -> Self {
        let page = |class| (0..9).filter_map(|group| manager.page(group)).find(|page| page.0 == class);
        let strides: Vec<usize> = (0..manager.num_classes())
            .filter_map(page)
            .map(|(.., bytes)| usize::try_from(bytes).unwrap() / 8)
            .collect();
        let (mut first, mut words) = ([const { Vec::new() }; 3], [const { Vec::new() }; 3]);
        for tier in Tier::ALL {
            let (at, mut end) = (tier.index(), 0);
            let blocks = if tier == Tier::Device && strides.len() > 1 { MOST } else { blocks[at] };
            for &stride in &strides {
                first[at].push(end);
                end += if pages.has_extents { 0 } else { stride * blocks };
            }
            words[at] = vec![u64::MAX; if pages.has_extents { EXTENT * blocks } else { end }];
        }
        Self { words, strides, first, has_extents: pages.has_extents }
    }

    pub(crate) fn has_extents(&self) -> bool {
        self.has_extents
    }

    fn offset(&self, (tier, class, id): At) -> usize {
        let id = id as usize;
        if self.has_extents {
            return id * self.stride(class);
        }
        self.first[tier.index()][class] + id * self.strides[class]
    }

    pub(crate) fn get(&self, at: At) -> Bytes {
        let first = self.offset(at);
        self.words[at.0.index()][first..first + BLOCK as usize].try_into().unwrap()
    }

    /// Writes all words of a block.
    pub(crate) fn put(&mut self, at: At, bytes: Bytes) {
        let (first, stride) = (self.offset(at), self.strides[at.1]);
        let words = &mut self.words[at.0.index()][first..first + stride];
        words.fill(u64::MAX);
        words[..BLOCK as usize].copy_from_slice(&bytes);
    }

    /// Whether two blocks have words in common.
    pub(crate) fn overlap(&self, one: At, other: At) -> bool {
        let [a, b] = [one, other].map(|at| (self.offset(at), self.offset(at) + self.strides[at.1]));
        one.0 == other.0 && a.0 < b.1 && b.0 < a.1
    }

    /// Makes room for blocks of the device, which has one class.
    pub(crate) fn grow(&mut self, blocks: usize) {
        let words = (blocks * self.stride(0)).max(self.words[0].len());
        self.words[0].resize(words, u64::MAX);
    }

    /// Forgets what lies behind the first blocks of the device, which has one class, or behind the first extents.
    pub(crate) fn clear_behind(&mut self, blocks: usize) {
        let first = blocks * if self.has_extents && self.strides.len() > 1 { EXTENT } else { self.stride(0) };
        self.words[0][first..].fill(u64::MAX);
    }

    /// Words from a block of a class to the next.
    fn stride(&self, class: usize) -> usize {
        if self.has_extents { EXTENT / (EXTENT / self.strides[class]) } else { self.strides[class] }
    }
}

/// The place of a block that a manager names by its number.
pub(crate) fn place(manager: &Manager, tier: Tier, block: BlockId) -> At {
    let (class, id) = manager.pool(tier).local(block);
    (tier, class, id)
}
