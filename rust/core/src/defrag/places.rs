//! What is in each block of a pool, as far as moving goes.

use crate::id::BlockId;
use crate::reuse::BlockSet;
use std::ops::Range;

/// What may be done with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Nobody refers to it: it can be moved into.
    Hole,
    /// In use, and can be moved.
    Live,
    /// Leased, pinned or the null block: stays, and is nobody's destination.
    Fixed,
}

/// The blocks of a pool by [`Place`]; each is in exactly one set.
#[derive(Clone, Debug)]
pub struct Places {
    holes: BlockSet,
    live: BlockSet,
    fixed: BlockSet,
}

impl Places {
    /// `blocks` holes.
    #[must_use]
    pub fn new(blocks: usize) -> Self {
        Self { holes: BlockSet::full(blocks), live: BlockSet::empty(blocks), fixed: BlockSet::empty(blocks) }
    }

    /// Blocks of the pool.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        u32::try_from(self.holes.capacity()).unwrap_or(u32::MAX)
    }

    /// Adds holes at the end, so that there are `blocks` in all.
    pub fn grow(&mut self, blocks: u32) {
        let before = self.capacity();
        if blocks > before {
            for set in [&mut self.holes, &mut self.live, &mut self.fixed] {
                set.grow(blocks as usize);
            }
            self.holes.insert_run(before..blocks);
        }
    }

    /// What the block is; it must be below the capacity.
    #[must_use]
    pub fn get(&self, block: BlockId) -> Place {
        if self.live.contains(block) {
            Place::Live
        } else if self.holes.contains(block) {
            Place::Hole
        } else {
            Place::Fixed
        }
    }

    /// Says what the block is from now on; it must be below the capacity.
    pub fn set(&mut self, block: BlockId, place: Place) {
        let before = self.get(block);
        if before != place {
            self.of_mut(before).remove(block);
            self.of_mut(place).insert(block);
        }
    }

    /// Says what neighbours are from now on; they must be below the capacity.
    pub(crate) fn set_run(&mut self, run: Range<u32>, place: Place) {
        for other in [Place::Hole, Place::Live, Place::Fixed].into_iter().filter(|&other| other != place) {
            self.of_mut(other).remove_run(run.clone());
        }
        self.of_mut(place).insert_run(run);
    }

    /// Live neighbours become holes.
    pub(super) fn free_run(&mut self, run: Range<u32>) {
        self.live.remove_run(run.clone());
        self.holes.insert_run(run);
    }

    /// Neighbours that are holes become live.
    pub(super) fn fill_run(&mut self, run: Range<u32>) {
        self.holes.remove_run(run.clone());
        self.live.insert_run(run);
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

    /// The blocks that stay.
    #[must_use]
    pub fn fixed(&self) -> &BlockSet {
        &self.fixed
    }

    /// The highest block that is no hole.
    #[must_use]
    pub fn highest(&self) -> Option<BlockId> {
        self.live.highest().max(self.fixed.highest())
    }

    /// The highest id in use once all live blocks lie as low as the fixed ones let them; none if nothing is live.
    #[must_use]
    pub fn densest(&self) -> Option<BlockId> {
        let mut top = u32::try_from(self.live.len()).ok()?.checked_sub(1)?;
        let mut from = 0;
        while let Some(fixed) = self.fixed.next(from).filter(|fixed| fixed.0 <= top) {
            top += 1;
            from = fixed.0 + 1;
        }
        Some(BlockId(top))
    }

    /// Blocks between the highest live one and the highest there need be.
    #[must_use]
    pub fn gap(&self) -> u32 {
        let top = self.live.highest();
        top.zip(self.densest()).map_or(0, |(top, densest)| top.0.saturating_sub(densest.0))
    }

    /// Live blocks for each run of neighbours that all are live.
    #[must_use]
    pub fn live_runs(&self) -> Vec<Range<u32>> {
        let next = |from: u32| self.live.next_run(from, u32::MAX);
        std::iter::successors(next(0), |run| next(run.end)).collect()
    }

    fn of_mut(&mut self, place: Place) -> &mut BlockSet {
        match place {
            Place::Hole => &mut self.holes,
            Place::Live => &mut self.live,
            Place::Fixed => &mut self.fixed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_densest_arrangement_goes_around_fixed_blocks() {
        let mut places = Places::new(10);
        assert_eq!((places.densest(), places.gap()), (None, 0));
        for block in [0, 2] {
            places.set(BlockId(block), Place::Fixed);
        }
        for block in [1, 8] {
            places.set(BlockId(block), Place::Live);
        }
        assert_eq!(places.densest(), Some(BlockId(3)));
        assert_eq!(places.gap(), 5);
        places.set(BlockId(9), Place::Fixed);
        assert_eq!((places.highest(), places.gap()), (Some(BlockId(9)), 5));
        assert_eq!(places.live_runs(), [1..2, 8..9]);
    }

    #[test]
    fn growing_adds_holes() {
        let mut places = Places::new(3);
        places.set(BlockId(1), Place::Live);
        places.grow(70);
        places.grow(5);
        assert_eq!((places.capacity(), places.holes().len()), (70, 69));
        assert_eq!((places.get(BlockId(1)), places.get(BlockId(69))), (Place::Live, Place::Hole));
    }
}
