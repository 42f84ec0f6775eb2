//! The eviction order of the host's copies, which continues the device's: one order spans both tiers.
//!
//! A block that the device evicts keeps its rank: its segment or level, and the stamp of its last release. The device's
//! policy also picks the host's victim, as if both tiers were one pool. A copy of a block that the device still has goes
//! before all others: it is worth nothing until the device evicts that block.

use super::leveled;
use super::rank::{Guide, RANKS, Rank, Rule};
use super::segments;
use super::{Departure, Evictor};
use crate::id::BlockId;
use crate::page::{Classes, PerClass};
use crate::ring::Rings;

/// Ring of the copies of blocks that the device has, too; each page class has its own, from here on.
const COPIES: usize = RANKS;
/// Bit of a rank: the block is in that ring.
const IS_COPY: u8 = 1 << 7;
/// Bit of a rank: something uses or leases the block. It keeps its place: a hit counts where its bytes are used, on the
/// device.
const IS_HELD: u8 = 1 << 6;
const RING: u8 = !(IS_COPY | IS_HELD);

impl Rule {
    /// The ring of a block that did not come from the device: of segments, the one of blocks used once.
    pub(super) fn newcomers(self) -> u8 {
        if matches!(self, Self::Segments { .. }) { segments::NEWCOMERS } else { 0 }
    }

    /// The ring of a block that goes after equally old ones of either ring.
    fn join(self, ring: u8, other: u8) -> u8 {
        if matches!(self, Self::Segments { .. }) { segments::join(ring, other) } else { ring.max(other) }
    }

    /// The ring whose head goes first: `lens` are the numbers of blocks, `ages` those of the heads.
    fn first(self, lens: &[usize; RANKS], ages: &[Option<u32>; RANKS]) -> Option<usize> {
        let held = |ring: usize| ages[ring].map(|age| (ring, u64::from(age)));
        let oldest = |rank: &dyn Fn(usize, u64) -> u64| {
            // Of equal ranks, that of the higher ring was inserted first.
            (0..RANKS).filter_map(held).max_by_key(|&(ring, age)| (rank(ring, age), ring)).map(|(ring, _)| ring)
        };
        match self {
            Self::Oldest => oldest(&|_, age| age),
            Self::Levels { credit } => oldest(&|ring, age| leveled::overdue(ring, age, credit, RANKS)),
            Self::Segments { rule, credits, blocks, once } => {
                let mut lens = *lens;
                lens[usize::from(segments::NEWCOMERS)] += once;
                segments::goes_first((rule, &credits), blocks, lens, ages)
            }
        }
    }
}

/// The host's copies in the order in which they are evicted.
#[derive(Debug, Clone)]
pub(crate) struct HostOrder {
    rings: Rings,
    /// Ring of each block, also of one that is in none now.
    ranks: Vec<u8>,
    /// Stamps of blocks that will keep the rank that they had on the device; 0 for others.
    stamps: Vec<u32>,
    /// Evictable blocks in each ring; held ones do not count.
    lens: [usize; RANKS],
    classes: Classes,
    /// Evictable blocks of each page class.
    evictable: PerClass,
    /// Blocks of other classes that were popped before one of the wanted class.
    passed: Vec<BlockId>,
    /// Number of held blocks that are in a ring.
    held: usize,
    rule: Rule,
    /// Tags of the copies evicted since the device's policy last heard of them.
    evicted: Vec<u32>,
}

impl HostOrder {
    pub(crate) fn new(blocks: usize, classes: Classes) -> Self {
        Self {
            rings: Rings::new(blocks, COPIES + classes.len()),
            ranks: vec![0; blocks],
            stamps: vec![0; blocks],
            lens: [0; RANKS],
            classes,
            evictable: PerClass::default(),
            passed: Vec::new(),
            held: 0,
            rule: Rule::Oldest,
            evicted: Vec::new(),
        }
    }

    /// Follows the device's policy.
    #[inline]
    pub(crate) fn follow(&mut self, guide: Guide) {
        self.rule = guide.rule;
        self.rings.set_clock(guide.clock);
    }

    /// Stamp of the last insertion, and the tags of the copies evicted since the last call.
    #[inline]
    pub(crate) fn report(&mut self) -> (u32, Vec<u32>) {
        (self.rings.clock(), std::mem::take(&mut self.evicted))
    }

    /// Gives a block the rank that its bytes have on the device, now or when it becomes evictable.
    pub(crate) fn set_rank(&mut self, block: BlockId, rank: Rank) {
        // A point's blocks share a stamp, and no block may be inserted twice with one.
        if self.ring(block) == rank.ring && self.rings.has_stamp(block, rank.stamp) {
            return;
        }
        let was_here = self.take_out(block);
        (self.ranks[block.index()], self.stamps[block.index()]) = (rank.ring, rank.stamp);
        if was_here {
            self.insert(block);
        }
    }

    /// The segment or level of a block.
    pub(crate) fn ring(&self, block: BlockId) -> u8 {
        self.ranks[block.index()] & RING
    }

    /// The segment or level of a block that depends on none of that ring, and on which one of it may depend.
    pub(crate) fn join(&self, block: BlockId, ring: Option<u8>) -> u8 {
        let own = self.ring(block);
        ring.map_or(own, |ring| self.rule.join(own, ring))
    }

    /// Whether a block of a ring may come after one of another in its prompt.
    pub(crate) fn may_follow(&self, ring: u8, before: u8) -> bool {
        self.rule.join(ring, before) == before
    }

    /// Adds a copy of a block that the device has, too.
    pub(crate) fn insert_copy(&mut self, block: BlockId) {
        self.take_out(block);
        self.stamps[block.index()] = 0;
        self.ranks[block.index()] |= IS_COPY;
        let class = self.count(block, true);
        self.rings.push(COPIES + class, block);
    }

    /// Counts a block that has become evictable, or no longer is; returns its class.
    fn count(&mut self, block: BlockId, is_evictable: bool) -> usize {
        let class = self.classes.of(block);
        let count = self.evictable.at(class);
        *count = if is_evictable { *count + 1 } else { *count - 1 };
        class
    }

    /// Evictable blocks of a page class.
    pub(crate) fn evictable_of(&self, class: usize) -> usize {
        self.evictable.get(class)
    }

    /// Takes out the first block of a class, and with it all before it in the order: these are passed.
    pub(crate) fn pop_of(&mut self, class: usize) -> Option<BlockId> {
        if let Some(copy) = self.pop_copy(class) {
            return Some(copy);
        }
        while self.evictable_of(class) > 0 {
            let block = self.pop_first()?;
            if self.classes.of(block) == class {
                return Some(block);
            }
            self.passed.push(block);
        }
        None
    }

    /// The next block that was passed, which is in no ring and serves nobody any longer.
    pub(crate) fn take_passed(&mut self) -> Option<BlockId> {
        self.passed.pop()
    }

    /// Takes out the first copy of a class whose block the device has.
    fn pop_copy(&mut self, class: usize) -> Option<BlockId> {
        let copy = self.rings.pop(COPIES + class)?;
        self.ranks[copy.index()] &= RING;
        self.count(copy, false);
        Some(copy)
    }

    /// Takes out the first of the other blocks.
    fn pop_first(&mut self) -> Option<BlockId> {
        let ages = self.ages();
        let ring = self.rule.first(&self.lens, &ages)?;
        self.lens[ring] -= 1;
        let first = self.rings.pop(ring)?;
        self.count(first, false);
        Some(first)
    }

    /// Notes that the device has, or no longer has, the bytes of an evictable copy.
    pub(crate) fn set_copied(&mut self, block: BlockId, is_copied: bool) {
        let is_here = self.contains(block) && (self.ranks[block.index()] & IS_COPY != 0) != is_copied;
        if is_here && self.take_out(block) {
            if is_copied {
                self.insert_copy(block);
            } else {
                self.insert(block);
            }
        }
    }

    /// Whether a block of this rank would be evicted before every other one, copies of its class included.
    pub(crate) fn is_first(&mut self, rank: Rank, class: usize) -> bool {
        if rank.stamp == 0 || self.rings.age(COPIES + class).is_some() {
            return false;
        }
        let (mut lens, mut ages) = (self.lens, self.ages());
        let (ring, age) = (usize::from(rank.ring), self.rings.clock().wrapping_sub(rank.stamp));
        let goes_before = ages[ring].is_none_or(|head| head <= age);
        lens[ring] += 1;
        ages[ring] = ages[ring].max(Some(age));
        goes_before && self.rule.first(&lens, &ages) == Some(ring)
    }

    fn ages(&mut self) -> [Option<u32>; RANKS] {
        std::array::from_fn(|ring| if self.lens[ring] > 0 { self.age(ring) } else { None })
    }

    /// Age of the first block of a ring that is not held.
    fn age(&mut self, ring: usize) -> Option<u32> {
        loop {
            let (first, age) = self.rings.first(ring)?;
            if self.ranks[first.index()] & IS_HELD == 0 {
                return Some(age);
            }
            self.stamps[first.index()] = self.rings.clock().wrapping_sub(age);
            self.rings.remove(first);
            self.held -= 1;
        }
    }

    /// Takes a block out; returns whether it was evictable.
    fn take_out(&mut self, block: BlockId) -> bool {
        let was_in = self.rings.remove(block);
        let rank = self.ranks[block.index()];
        self.ranks[block.index()] &= RING;
        if was_in && rank & IS_HELD != 0 {
            self.held -= 1;
        } else if was_in && rank & IS_COPY == 0 {
            self.lens[usize::from(rank)] -= 1;
        }
        let was_evictable = was_in && rank & IS_HELD == 0;
        if was_evictable {
            self.count(block, false);
        }
        was_evictable
    }
}

impl Evictor for HostOrder {
    fn len(&self) -> usize {
        self.rings.len() - self.held
    }

    fn contains(&self, block: BlockId) -> bool {
        self.rings.contains(block) && self.ranks[block.index()] & IS_HELD == 0
    }

    fn insert(&mut self, block: BlockId) {
        let rank = &mut self.ranks[block.index()];
        *rank &= RING;
        let ring = usize::from(*rank);
        self.lens[ring] += 1;
        self.count(block, true);
        if self.rings.contains(block) {
            self.held -= 1;
            return;
        }
        match std::mem::take(&mut self.stamps[block.index()]) {
            0 => self.rings.push(ring, block),
            stamp => self.rings.push_stamped(ring, block, stamp),
        }
    }

    fn remove(&mut self, block: BlockId, departure: Departure) -> bool {
        let rank = self.ranks[block.index()];
        if departure == Departure::Gone || rank & IS_COPY != 0 || !self.contains(block) {
            return self.take_out(block);
        }
        self.ranks[block.index()] |= IS_HELD;
        self.lens[usize::from(rank)] -= 1;
        self.held += 1;
        self.count(block, false);
        true
    }

    fn pop(&mut self) -> Option<BlockId> {
        (0..self.classes.len()).find_map(|class| self.pop_copy(class)).or_else(|| self.pop_first())
    }

    fn evicted(&mut self, tags: &[u32]) {
        self.evicted.extend_from_slice(tags);
    }

    fn publish(&mut self, block: BlockId, _: u32, _: u32) {
        self.take_out(block);
        (self.ranks[block.index()], self.stamps[block.index()]) = (self.rule.newcomers(), 0);
    }

    fn boxed_clone(&self) -> Box<dyn Evictor> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    const BLOCKS: u32 = 24;

    /// What a host block is, for a device that evicts the least recently used block first.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Model {
        Unknown,
        /// Evictable, with its stamp.
        Alone(u32),
        /// Evictable, as a copy of a block that the device has.
        Copy,
        /// Held, with the stamp that it will have again; 0 for a new one.
        Held(u32),
    }

    /// The host's order, and what its blocks are.
    struct World {
        order: HostOrder,
        blocks: [Model; BLOCKS as usize],
    }

    impl World {
        /// A copy arrives, with the rank of the device's block or as the youngest.
        fn arrive(&mut self, block: BlockId, stamp: u32) {
            self.order.publish(block, 0, 1);
            if stamp != 0 {
                self.order.set_rank(block, Rank { ring: 0, stamp });
            }
            self.blocks[block.index()] = Model::Held(stamp);
        }

        /// Nothing holds a block any longer.
        fn park(&mut self, block: BlockId, stamp: u32, is_copy: bool) {
            if is_copy {
                self.order.insert_copy(block);
                self.blocks[block.index()] = Model::Copy;
            } else {
                self.order.insert(block);
                let stamp = if stamp == 0 { self.order.rings.clock() } else { stamp };
                self.blocks[block.index()] = Model::Alone(stamp);
            }
        }

        /// The device gets or loses the bytes of a copy.
        fn set_copied(&mut self, block: BlockId, is_copied: bool) {
            let was = self.blocks[block.index()];
            self.order.set_copied(block, is_copied);
            self.blocks[block.index()] = match was {
                _ if is_copied => Model::Copy,
                Model::Copy => Model::Alone(self.order.rings.clock()),
                other => other,
            };
        }

        /// The first half of the blocks are of one class, the others of another.
        fn pop(&mut self, class: usize) {
            let popped = self.order.pop_of(class).map(BlockId::index);
            let passed: Vec<usize> = std::iter::from_fn(|| self.order.take_passed()).map(BlockId::index).collect();
            let stamp = |at: usize| if let Model::Alone(stamp) = self.blocks[at] { Some((stamp, at)) } else { None };
            let range = if class == 0 { 0..self.blocks.len() / 2 } else { self.blocks.len() / 2..self.blocks.len() };
            match popped {
                Some(at) if self.blocks[range.clone()].contains(&Model::Copy) => {
                    assert!(self.blocks[at] == Model::Copy && range.contains(&at) && passed.is_empty());
                }
                _ => {
                    let first = range.clone().filter_map(stamp).min();
                    assert_eq!(popped, first.map(|(_, at)| at));
                    let is_before = |at: &usize| !range.contains(at) && stamp(*at) < first && stamp(*at).is_some();
                    let before = (0..self.blocks.len()).filter(is_before);
                    assert_eq!(before.collect::<HashSet<_>>(), passed.iter().copied().collect());
                }
            }
            for at in passed.into_iter().chain(popped) {
                self.blocks[at] = Model::Unknown;
            }
        }

        fn check(&self) {
            let is_evictable = |model: &Model| matches!(model, Model::Alone(_) | Model::Copy);
            let halves = self.blocks.chunks(self.blocks.len() / 2);
            let counted: Vec<_> = halves.map(|half| half.iter().filter(|model| is_evictable(model)).count()).collect();
            assert_eq!([0, 1].map(|class| self.order.evictable_of(class)).to_vec(), counted);
            assert_eq!(self.order.len(), counted.iter().sum::<usize>());
            for (at, model) in (0..).zip(&self.blocks) {
                assert_eq!(self.order.contains(BlockId(at)), is_evictable(model), "block {at}: {model:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn copies_go_first_and_then_what_the_device_evicted_first(
            ops in prop::collection::vec((0u8..7, 0..BLOCKS, any::<bool>()), 0..500),
        ) {
            let blocks = [Model::Unknown; BLOCKS as usize];
            let classes = Classes::new(&[blocks.len() / 2; 2]);
            let (mut world, mut clock) = (World { order: HostOrder::new(blocks.len(), classes), blocks }, 0);
            for (op, number, flag) in ops {
                let block = BlockId(number);
                clock += 1;
                world.order.follow(Guide { rule: Rule::Oldest, clock });
                match (op, world.blocks[block.index()]) {
                    (0 | 1, Model::Unknown) => world.arrive(block, if flag { clock } else { 0 }),
                    (2, Model::Held(stamp)) => world.park(block, stamp, flag),
                    (3, held @ (Model::Alone(_) | Model::Copy)) => {
                        assert!(world.order.remove(block, Departure::Hit));
                        let stamp = if let Model::Alone(stamp) = held { stamp } else { 0 };
                        world.blocks[block.index()] = Model::Held(stamp);
                    }
                    (4, Model::Alone(_) | Model::Copy) => world.set_copied(block, flag),
                    (5, _) => {
                        world.order.remove(block, Departure::Gone);
                        world.blocks[block.index()] = Model::Unknown;
                    }
                    (6, _) => world.pop(usize::from(flag)),
                    _ => {}
                }
                clock = world.order.report().0;
                world.check();
            }
        }
    }
}
