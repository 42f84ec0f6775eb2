//! Least frequently used first, of those the least recently used.

use super::{Departure, Evictor};
use crate::id::BlockId;
use crate::ring::Rings;

/// Most hits that are counted.
const MAX_HITS: u8 = 15;

/// Blocks by hits, one ring a number. Along a chain a block counts at least as many hits as those behind it.
#[derive(Debug, Clone)]
pub(crate) struct Lfu {
    rings: Rings,
    hits: Vec<u8>,
    /// Most hits in the chain that is being released.
    floor: u8,
}

impl Lfu {
    pub(crate) fn new(blocks: usize) -> Self {
        Self { rings: Rings::new(blocks, usize::from(MAX_HITS) + 1), hits: vec![0; blocks], floor: 0 }
    }
}

impl Evictor for Lfu {
    fn len(&self) -> usize {
        self.rings.len()
    }

    fn contains(&self, block: BlockId) -> bool {
        self.rings.contains(block)
    }

    fn insert(&mut self, block: BlockId) {
        self.hold(block);
        self.floor = self.hits[block.index()];
        self.rings.push(usize::from(self.floor), block);
    }

    fn remove(&mut self, block: BlockId, departure: Departure) -> bool {
        let was = self.rings.remove(block);
        let hits = &mut self.hits[block.index()];
        match departure {
            Departure::Gone => *hits = 0,
            Departure::Hit => *hits = (*hits + u8::from(was)).min(MAX_HITS),
        }
        was
    }

    fn pop(&mut self) -> Option<BlockId> {
        (0..=usize::from(MAX_HITS)).find_map(|hits| self.rings.pop(hits))
    }

    fn publish(&mut self, block: BlockId, _: u32, _: u32) {
        self.hits[block.index()] = 0;
    }

    fn resize(&mut self, blocks: usize) {
        self.rings.make_room(blocks);
        self.hits.resize(blocks.max(self.hits.len()), 0);
    }

    fn begin_chain(&mut self) {
        self.floor = 0;
    }

    fn hold(&mut self, block: BlockId) {
        let hits = &mut self.hits[block.index()];
        *hits = (*hits).max(self.floor);
    }

    fn relocate(&mut self, from: BlockId, to: BlockId) {
        self.rings.rename(from, to);
        self.hits[to.index()] = std::mem::take(&mut self.hits[from.index()]);
    }

    fn boxed_clone(&self) -> Box<dyn Evictor> {
        Box::new(self.clone())
    }
}
