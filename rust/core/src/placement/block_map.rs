//! Occupancy of each block of a pool, for moves.

use super::Occupancy;
use crate::id::BlockId;
use crate::reuse::BlockSet;
use std::ops::Range;

/// The blocks of a pool by [`Occupancy`]; each is in exactly one set.
#[derive(Clone, Debug)]
pub struct BlockMap {
    holes: BlockSet,
    live: BlockSet,
    fixed: BlockSet,
}

/// Up to this many fixed blocks are visited one by one.
const FEW: usize = 64;

impl BlockMap {
    /// `blocks` holes.
    #[must_use]
    pub fn new(blocks: usize) -> Self {
        let (live, fixed) = (BlockSet::empty(blocks), BlockSet::empty(blocks));
        Self { holes: BlockSet::full(blocks), live, fixed }
    }

    /// Maximum memory for `blocks` blocks.
    #[must_use]
    pub fn bytes(blocks: usize) -> usize {
        // Three sets of bits.
        blocks / 2
    }

    /// Blocks of the pool.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        u32::try_from(self.holes.capacity()).unwrap_or(u32::MAX)
    }

    /// Adds holes at the end, up to `blocks` in total.
    pub fn grow(&mut self, blocks: u32) {
        let before = self.capacity();
        if blocks > before {
            for set in [&mut self.holes, &mut self.live, &mut self.fixed] {
                set.grow(blocks as usize);
            }
            self.holes.insert_run(before..blocks);
        }
    }

    /// The occupancy of a block, which must be below the capacity.
    #[must_use]
    pub fn get(&self, block: BlockId) -> Occupancy {
        if self.live.contains(block) {
            Occupancy::Live
        } else if self.holes.contains(block) {
            Occupancy::Hole
        } else {
            Occupancy::Fixed
        }
    }

    /// Sets the occupancy of a block, which must be below the capacity.
    pub fn set(&mut self, block: BlockId, place: Occupancy) {
        let before = self.get(block);
        if before != place {
            self.of_mut(before).remove(block);
            self.of_mut(place).insert(block);
        }
    }

    /// Sets the occupancy of a run, which must be below the capacity.
    pub fn set_run(&mut self, run: Range<u32>, place: Occupancy) {
        for other in [Occupancy::Hole, Occupancy::Live, Occupancy::Fixed].into_iter().filter(|&other| other != place) {
            self.of_mut(other).remove_run(run.clone());
        }
        self.of_mut(place).insert_run(run);
    }

    /// Turns a live run into holes.
    pub(crate) fn free_run(&mut self, run: Range<u32>) {
        self.live.remove_run(run.clone());
        self.holes.insert_run(run);
    }

    /// Turns a run of holes live.
    pub(crate) fn fill_run(&mut self, run: Range<u32>) {
        self.holes.remove_run(run.clone());
        self.live.insert_run(run);
    }

    /// Hides the two blocks of a planned pair, so that no further pair names them. See [`BlockMap::resume`].
    pub(crate) fn suspend(&mut self, [from, to]: [u32; 2]) {
        self.live.remove(BlockId(from));
        self.holes.remove(BlockId(to));
    }

    /// Undoes [`BlockMap::suspend`]: nothing has moved yet.
    pub(crate) fn resume(&mut self, [from, to]: [u32; 2]) {
        self.live.insert(BlockId(from));
        self.holes.insert(BlockId(to));
    }

    /// The blocks that are holes.
    #[must_use]
    pub fn holes(&self) -> &BlockSet {
        &self.holes
    }

    /// The blocks that are in use and can be moved.
    #[must_use]
    pub fn live(&self) -> &BlockSet {
        &self.live
    }

    /// The blocks that must stay.
    #[must_use]
    pub fn fixed(&self) -> &BlockSet {
        &self.fixed
    }

    /// The highest block that is not a hole.
    #[must_use]
    pub fn highest(&self) -> Option<BlockId> {
        self.live.highest().max(self.fixed.highest())
    }

    /// The highest id in use if all live blocks were packed as low as the fixed ones allow; `None` if there are no live
    /// blocks.
    #[must_use]
    pub fn densest(&self) -> Option<BlockId> {
        let mut top = u32::try_from(self.live.len()).ok()?.checked_sub(1)?;
        let mut from = 0;
        while self.fixed.len() > FEW {
            let passed = u32::try_from(self.fixed.count(from..top + 1)).unwrap_or(u32::MAX);
            if passed == 0 {
                return Some(BlockId(top));
            }
            (from, top) = (top + 1, top + passed);
        }
        while let Some(fixed) = self.fixed.next(from).filter(|fixed| fixed.0 <= top) {
            top += 1;
            from = fixed.0 + 1;
        }
        Some(BlockId(top))
    }

    /// Distance between the highest live block and the highest of a dense layout.
    #[must_use]
    pub fn gap(&self) -> u32 {
        let top = self.live.highest();
        top.zip(self.densest()).map_or(0, |(top, densest)| top.0.saturating_sub(densest.0))
    }

    fn of_mut(&mut self, place: Occupancy) -> &mut BlockSet {
        match place {
            Occupancy::Hole => &mut self.holes,
            Occupancy::Live => &mut self.live,
            Occupancy::Fixed => &mut self.fixed,
        }
    }
}
