//! ARC: blocks used once and blocks used again, in shares that follow what is missed.

use super::counted::Counted;
use super::ghosts::Ghosts;
use super::{Departure, Evictor};
use crate::id::BlockId;

const ONCE: usize = 0;
const AGAIN: usize = 1;

/// Two rings in order of use, and the tags of what each of them let go.
///
/// A block that comes back after it was let go of one ring moves the target in favour of that ring. Along a chain a block
/// that another one needs is used again if that one is.
/// Source: Megiddo and Modha, "ARC: A self-tuning, low overhead replacement cache", FAST 2003; the lists of ghosts are
/// tables with one place a tag.
#[derive(Debug, Clone)]
pub(crate) struct Arc {
    /// A block that was used again has one hit.
    counted: Counted,
    tags: Vec<u32>,
    ghosts: [Ghosts; 2],
    /// Tags in each table.
    remembered: [usize; 2],
    /// Blocks used once.
    once: usize,
    /// How many of those it keeps.
    target: usize,
    blocks: usize,
}

impl Arc {
    pub(crate) fn new(blocks: usize) -> Self {
        Self {
            counted: Counted::new(blocks, 2, 1),
            tags: vec![0; blocks],
            ghosts: [Ghosts::new(blocks), Ghosts::new(blocks)],
            remembered: [0; 2],
            once: 0,
            target: 0,
            blocks,
        }
    }

    /// Remembers what a ring let go.
    fn remember(&mut self, ring: usize, block: BlockId) {
        let is_more = self.ghosts[ring].insert(self.tags[block.index()]);
        self.remembered[ring] += usize::from(is_more);
    }

    /// Whether a tag was let go a short while ago, which moves the target.
    fn came_back(&mut self, tag: u32) -> bool {
        for ring in [ONCE, AGAIN] {
            if self.ghosts[ring].take(tag) {
                let step = (self.remembered[1 - ring] / self.remembered[ring].max(1)).max(1);
                self.remembered[ring] -= 1;
                self.target = match ring {
                    ONCE => (self.target + step).min(self.blocks),
                    _ => self.target.saturating_sub(step),
                };
                return true;
            }
        }
        false
    }
}

impl Evictor for Arc {
    fn len(&self) -> usize {
        self.counted.rings.len()
    }

    fn contains(&self, block: BlockId) -> bool {
        self.counted.rings.contains(block)
    }

    fn insert(&mut self, block: BlockId) {
        let ring = usize::from(self.counted.release(block));
        self.once += usize::from(ring == ONCE);
        self.counted.rings.push(ring, block);
    }

    fn remove(&mut self, block: BlockId, departure: Departure) -> bool {
        let was_once = self.counted.hits(block) == 0;
        let was = self.counted.remove(block, departure);
        self.once -= usize::from(was && was_once);
        was
    }

    fn pop(&mut self) -> Option<BlockId> {
        // What was used again may be needed by older blocks used once, never by younger ones.
        let ages = (self.counted.rings.age(ONCE), self.counted.rings.age(AGAIN));
        let ring = if self.once > self.target || ages.1 <= ages.0 { ONCE } else { AGAIN };
        let block = self.counted.rings.pop(ring)?;
        self.once -= usize::from(ring == ONCE);
        self.remember(ring, block);
        self.counted.set_hits(block, 0);
        Some(block)
    }

    fn publish(&mut self, block: BlockId, _: u32, tag: u32) {
        self.tags[block.index()] = tag;
        let hits = u8::from(self.came_back(tag));
        self.counted.set_hits(block, hits);
    }

    fn resize(&mut self, blocks: usize) {
        if self.counted.make_room(blocks) {
            self.tags.resize(blocks, 0);
            // A tag's place depends on the size of the table.
            self.ghosts = [Ghosts::new(blocks), Ghosts::new(blocks)];
            self.remembered = [0; 2];
        }
        self.blocks = blocks;
        self.target = self.target.min(blocks);
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
