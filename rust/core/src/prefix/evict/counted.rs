//! Evictable blocks in rings, and how often each was used: what `lfu`, `arc` and `s3fifo` have in common.

use super::Departure;
use crate::id::BlockId;
use crate::ring::Rings;

/// Along a chain a block counts at least as many hits as those behind it, so that it never goes before them.
#[derive(Debug, Clone)]
pub(super) struct Counted {
    pub(super) rings: Rings,
    /// By block, evictable or not.
    hits: Vec<u8>,
    /// Most hits that are counted.
    most: u8,
    /// Most hits in the chain that is being released.
    floor: u8,
}

impl Counted {
    pub(super) fn new(blocks: usize, rings: usize, most: u8) -> Self {
        Self { rings: Rings::new(blocks, rings), hits: vec![0; blocks], most, floor: 0 }
    }

    pub(super) fn hits(&self, block: BlockId) -> u8 {
        self.hits[block.index()]
    }

    pub(super) fn set_hits(&mut self, block: BlockId, hits: u8) {
        self.hits[block.index()] = hits;
    }

    pub(super) fn begin_chain(&mut self) {
        self.floor = 0;
    }

    /// A block of the chain that stays in use.
    pub(super) fn hold(&mut self, block: BlockId) {
        let hits = &mut self.hits[block.index()];
        *hits = (*hits).max(self.floor);
    }

    /// The hits of a block of the chain that becomes evictable.
    pub(super) fn release(&mut self, block: BlockId) -> u8 {
        self.hold(block);
        self.floor = self.hits(block);
        self.floor
    }

    /// A block leaves its ring, or stays out; returns whether it was in one.
    pub(super) fn remove(&mut self, block: BlockId, departure: Departure) -> bool {
        let was = self.rings.remove(block);
        let hits = &mut self.hits[block.index()];
        match departure {
            Departure::Gone => *hits = 0,
            Departure::Hit => *hits = (*hits + u8::from(was)).min(self.most),
        }
        was
    }

    /// Makes room for blocks up to so many; returns whether there was less.
    pub(super) fn make_room(&mut self, blocks: usize) -> bool {
        let is_more = blocks > self.hits.len();
        if is_more {
            self.rings.make_room(blocks);
            self.hits.resize(blocks, 0);
        }
        is_more
    }

    pub(super) fn relocate(&mut self, from: BlockId, to: BlockId) {
        self.rings.rename(from, to);
        self.hits[to.index()] = std::mem::take(&mut self.hits[from.index()]);
    }
}
