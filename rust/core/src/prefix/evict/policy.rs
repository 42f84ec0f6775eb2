//! The eviction policies that have names: which cached block goes first.

use super::leveled::Leveled;
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

/// The caller's priorities, as levels that decay.
#[derive(Debug, Clone)]
pub(crate) struct Priority {
    levels: Leveled,
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

/// Depths that are told apart: 0, 1, 2 to 3, 4 to 7, ...
const CLASSES: usize = 33;
/// Hits that are told apart.
const MAX_HITS: u8 = 3;

/// By how often a block was hit, and, before its first hit, by how often blocks as deep in their prompts are.
///
/// Prompts that begin alike part somewhere. A block before that depth is worth more than one behind it, and the cache
/// learns which depths are hit: those that are hit one and a half times as often as the mean get a level ahead.
#[derive(Debug, Clone)]
pub(crate) struct Adaptive {
    levels: Leveled,
    hits: Vec<u8>,
    classes: Vec<u8>,
    /// By class: blocks that became evictable for the first time, and those of them that were hit.
    released: [u64; CLASSES],
    reused: [u64; CLASSES],
    /// Sums of both.
    sums: [u64; 2],
    /// Releases until the counts are halved, so that what was long ago counts less.
    until_halved: usize,
}

impl Adaptive {
    pub(crate) fn new(blocks: usize) -> Self {
        Self {
            levels: Leveled::new(blocks, u32::from(MAX_HITS) + 1),
            hits: vec![0; blocks],
            classes: vec![0; blocks],
            released: [0; CLASSES],
            reused: [0; CLASSES],
            sums: [0; 2],
            until_halved: 4 * blocks,
        }
    }

    /// Level of a block without hits, which is counted.
    fn first_level(&mut self, class: usize) -> u32 {
        self.released[class] += 1;
        self.sums[0] += 1;
        self.until_halved = self.until_halved.saturating_sub(1);
        if self.until_halved == 0 {
            self.halve();
        }
        let [released, reused] = self.sums;
        u32::from(2 * self.reused[class] * released > 3 * reused * self.released[class])
    }

    fn halve(&mut self) {
        for (released, reused) in self.released.iter_mut().zip(&mut self.reused) {
            (*released, *reused) = (*released / 2, *reused / 2);
        }
        self.sums = [self.released.iter().sum(), self.reused.iter().sum()];
        self.until_halved = 4 * self.hits.len();
    }
}

impl Evictor for Adaptive {
    fn len(&self) -> usize {
        self.levels.rings().len()
    }

    fn contains(&self, block: BlockId) -> bool {
        self.levels.rings().contains(block)
    }

    fn insert(&mut self, block: BlockId) {
        let level = match self.hits[block.index()] {
            0 => self.first_level(usize::from(self.classes[block.index()])),
            hits => u32::from(hits),
        };
        self.levels.insert(block, level);
    }

    fn remove(&mut self, block: BlockId, departure: Departure) -> bool {
        let was = self.levels.remove(block);
        let hits = &mut self.hits[block.index()];
        if departure == Departure::Gone {
            *hits = 0;
            self.levels.forget(block);
        } else if was {
            if *hits == 0 {
                self.reused[usize::from(self.classes[block.index()])] += 1;
                self.sums[1] += 1;
            }
            *hits = (*hits + 1).min(MAX_HITS);
        }
        was
    }

    fn pop(&mut self) -> Option<BlockId> {
        let block = self.levels.pop()?;
        self.hits[block.index()] = 0;
        Some(block)
    }

    fn resize(&mut self, blocks: usize) {
        self.levels.resize(blocks);
        self.hits.resize(blocks.max(self.hits.len()), 0);
        self.classes.resize(self.hits.len(), 0);
    }

    fn publish(&mut self, block: BlockId, depth: u32, _: u32) {
        #[expect(clippy::cast_possible_truncation, reason = "at most 32")]
        let class = (u32::BITS - depth.leading_zeros()) as u8;
        self.classes[block.index()] = class;
        self.hits[block.index()] = 0;
    }

    fn begin_chain(&mut self) {
        self.levels.begin_chain();
    }

    fn hold(&mut self, block: BlockId) {
        self.levels.hold(block);
    }

    fn relocate(&mut self, from: BlockId, to: BlockId) {
        self.levels.rename(from, to);
        self.hits[to.index()] = std::mem::take(&mut self.hits[from.index()]);
        self.classes[to.index()] = self.classes[from.index()];
    }

    fn boxed_clone(&self) -> Box<dyn Evictor> {
        Box::new(self.clone())
    }
}
