//! The named eviction policies.

use super::leveled::Leveled;
use super::rank::{Guide, Rank, Rule};
use super::{Departure, Evictor, MAX_PRIORITY};
use crate::id::BlockId;
use crate::ring::Rings;

/// Least recently used first.
#[derive(Debug, Clone)]
pub(crate) struct Lru(Rings);

impl Lru {
    pub(crate) fn new(blocks: usize) -> Self {
        Self(Rings::new(blocks, 1))
    }

    /// Takes out the block that goes first, with its rank.
    pub(super) fn pop_ranked(&mut self) -> Option<(BlockId, Rank)> {
        let stamp = self.0.clock().wrapping_sub(self.0.age(0)?);
        Some((self.0.pop(0)?, Rank { ring: 0, stamp }))
    }

    /// How the host continues this order.
    pub(super) fn guide(&self) -> Guide {
        Guide { rule: Rule::Oldest, clock: self.0.clock() }
    }

    /// Continues at a stamp of the host's order.
    pub(super) fn set_clock(&mut self, clock: u32) {
        self.0.set_clock(clock);
    }

    /// Blocks in their order.
    pub(super) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.0.iter(0)
    }
}

impl Evictor for Lru {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn contains(&self, block: BlockId) -> bool {
        self.0.contains(block)
    }

    #[inline]
    fn insert(&mut self, block: BlockId) {
        self.0.push(0, block);
    }

    #[inline]
    fn remove(&mut self, block: BlockId, _: Departure) -> bool {
        self.0.remove(block)
    }

    #[inline]
    fn pop(&mut self) -> Option<BlockId> {
        self.0.pop(0)
    }

    fn pop_into(&mut self, count: usize, out: &mut Vec<BlockId>) {
        self.0.pop_into(0, count, out);
    }

    fn resize(&mut self, blocks: usize) {
        self.0.make_room(blocks);
    }

    fn relocate(&mut self, from: BlockId, to: BlockId) {
        self.0.rename(from, to);
    }

    fn boxed_clone(&self) -> Box<dyn Evictor> {
        Box::new(self.clone())
    }
}

/// The caller's priorities, as decaying levels.
#[derive(Debug, Clone)]
pub(crate) struct Priority {
    pub(super) levels: Leveled,
    /// Highest priority that a user of the block has asked for since it was last evictable.
    wanted: Vec<u8>,
}

impl Priority {
    pub(crate) fn new(blocks: usize) -> Self {
        Self { levels: Leveled::new(blocks, u32::from(MAX_PRIORITY) + 1), wanted: vec![0; blocks] }
    }
}

impl Evictor for Priority {
    fn len(&self) -> usize {
        self.levels.rings().len()
    }

    fn contains(&self, block: BlockId) -> bool {
        self.levels.rings().contains(block)
    }

    fn insert(&mut self, block: BlockId) {
        let level = std::mem::take(&mut self.wanted[block.index()]);
        self.levels.insert(block, u32::from(level));
    }

    fn remove(&mut self, block: BlockId, departure: Departure) -> bool {
        if departure == Departure::Gone {
            self.wanted[block.index()] = 0;
            self.levels.forget(block);
        }
        self.levels.remove(block)
    }

    fn pop(&mut self) -> Option<BlockId> {
        self.levels.pop()
    }

    fn begin_chain(&mut self) {
        self.levels.begin_chain();
    }

    fn hold(&mut self, block: BlockId) {
        self.levels.hold(block);
    }

    fn resize(&mut self, blocks: usize) {
        self.levels.resize(blocks);
        self.wanted.resize(blocks.max(self.wanted.len()), 0);
    }

    fn prioritise(&mut self, block: BlockId, priority: u8) {
        let wanted = &mut self.wanted[block.index()];
        *wanted = (*wanted).max(priority.min(MAX_PRIORITY));
    }

    fn relocate(&mut self, from: BlockId, to: BlockId) {
        self.levels.rename(from, to);
        self.wanted[to.index()] = std::mem::take(&mut self.wanted[from.index()]);
    }

    fn boxed_clone(&self) -> Box<dyn Evictor> {
        Box::new(self.clone())
    }
}
