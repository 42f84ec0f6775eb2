//! S3-FIFO: blocks that were never hit pass through a small queue, the others stay in a main one.

use super::counted::Counted;
use super::ghosts::Ghosts;
use super::{Departure, Evictor};
use crate::id::BlockId;
use std::fmt;

const SMALL: usize = 0;
const MAIN: usize = 1;
/// Most hits that are counted.
const MAX_HITS: u8 = 3;

/// What of a pool is whose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct S3FifoSettings {
    /// Percent of the pool that the small queue keeps.
    pub small_percent: u8,
    /// Pools whose blocks are remembered once they have gone.
    pub ghost_pools: u8,
}

impl S3FifoSettings {
    pub(super) const DEFAULT: Self = Self { small_percent: 10, ghost_pools: 1 };
    const MOST_GHOST_POOLS: u8 = 16;

    /// Reads `SMALL:GHOSTS`, 1 to 99 percent and 1 to 16 pools.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (small, ghosts) = text.split_once(':')?;
        let settings = Self { small_percent: small.parse().ok()?, ghost_pools: ghosts.parse().ok()? };
        let is_valid =
            (1..100).contains(&settings.small_percent) && (1..=Self::MOST_GHOST_POOLS).contains(&settings.ghost_pools);
        is_valid.then_some(settings)
    }

    fn small(self, blocks: usize) -> usize {
        blocks / 100 * usize::from(self.small_percent) + blocks % 100 * usize::from(self.small_percent) / 100
    }

    fn ghosts(self, blocks: usize) -> usize {
        blocks * usize::from(self.ghost_pools)
    }
}

impl Default for S3FifoSettings {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl fmt::Display for S3FifoSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.small_percent, self.ghost_pools)
    }
}

/// A small queue for blocks without hits, a main queue with second chances, and a table of what the small queue let go.
///
/// Along a chain no block goes before one that needs it: a block counts at least as many hits as those behind it.
/// Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023; the table of ghosts has one place
/// a key and forgets by being overwritten.
#[derive(Debug, Clone)]
pub(crate) struct S3Fifo {
    counted: Counted,
    tags: Vec<u32>,
    ghosts: Ghosts,
    settings: S3FifoSettings,
    /// Blocks in the small queue, and how many it keeps while the main queue has any.
    small: usize,
    small_target: usize,
}

impl S3Fifo {
    pub(crate) fn new(blocks: usize, settings: S3FifoSettings) -> Self {
        Self {
            counted: Counted::new(blocks, 2, MAX_HITS),
            tags: vec![0; blocks],
            ghosts: Ghosts::new(settings.ghosts(blocks)),
            settings,
            small: 0,
            small_target: settings.small(blocks),
        }
    }

    fn pop_small(&mut self) -> Option<BlockId> {
        let block = self.counted.rings.pop(SMALL)?;
        self.small -= 1;
        self.ghosts.insert(self.tags[block.index()]);
        Some(block)
    }
}

impl Evictor for S3Fifo {
    fn len(&self) -> usize {
        self.counted.rings.len()
    }

    fn contains(&self, block: BlockId) -> bool {
        self.counted.rings.contains(block)
    }

    fn insert(&mut self, block: BlockId) {
        let ring = if self.counted.release(block) == 0 { SMALL } else { MAIN };
        self.small += usize::from(ring == SMALL);
        self.counted.rings.push(ring, block);
    }

    fn remove(&mut self, block: BlockId, departure: Departure) -> bool {
        let was_small = self.counted.hits(block) == 0;
        let was = self.counted.remove(block, departure);
        self.small -= usize::from(was && was_small);
        was
    }

    fn pop(&mut self) -> Option<BlockId> {
        loop {
            // What is in the main queue may be needed by older blocks of the small one, never by younger ones.
            if self.small > self.small_target || self.counted.rings.age(MAIN) <= self.counted.rings.age(SMALL) {
                return self.pop_small();
            }
            let block = self.counted.rings.pop(MAIN)?;
            let hits = self.counted.hits(block).saturating_sub(1);
            self.counted.set_hits(block, hits);
            if hits == 0 {
                return Some(block);
            }
            self.counted.rings.push(MAIN, block);
        }
    }

    fn publish(&mut self, block: BlockId, _: u32, tag: u32) {
        self.tags[block.index()] = tag;
        self.counted.set_hits(block, u8::from(self.ghosts.take(tag)));
    }

    fn resize(&mut self, blocks: usize) {
        if self.counted.make_room(blocks) {
            self.tags.resize(blocks, 0);
            // A tag's place depends on the size of the table.
            self.ghosts = Ghosts::new(self.settings.ghosts(blocks));
        }
        self.small_target = self.settings.small(blocks);
    }

    fn begin_chain(&mut self) {
        self.counted.begin_chain();
    }

    fn hold(&mut self, block: BlockId) {
        self.counted.hold(block);
    }

    fn relocate(&mut self, from: BlockId, to: BlockId) {
        self.counted.relocate(from, to);
        self.tags[to.index()] = self.tags[from.index()];
    }

    fn boxed_clone(&self) -> Box<dyn Evictor> {
        Box::new(self.clone())
    }
}
