//! Blocks that move within a pool.

use super::Pool;
use crate::block::{Block, LeaseKind, Membership, TierBlock};
use crate::error::Result;
use crate::group::NULL_BLOCK;
use crate::id::BlockId;
use crate::memory;
use crate::placement::{BlockMap, Occupancy, PlannerView, Tracker};

impl Pool {
    /// Starts tracking the placement of all blocks, if not started yet; `written` are the blocks that the current step
    /// writes.
    pub(crate) fn track_moves(&mut self, null: bool, written: impl FnOnce(&Self) -> Vec<BlockId>) -> Result<()> {
        if self.tracker.is_none() {
            Tracker::require_memory(self.extent())?;
            let written = written(self);
            self.tracker = Some(Box::new(Tracker::new(&self.blocks, self.extent(), self.len, null, &written)));
        }
        Ok(())
    }

    /// The tracker, if tracking has started.
    #[inline]
    pub(crate) fn tracker(&self) -> Option<&Tracker> {
        self.tracker.as_deref()
    }

    /// Like [`Pool::tracker`], mutable, with the blocks that it follows.
    #[inline]
    pub(crate) fn tracker_mut(&mut self) -> Option<(&mut Tracker, &[Block])> {
        Some((self.tracker.as_deref_mut()?, &self.blocks))
    }

    /// The tracker, if tracking has started, and what a planner sees of the blocks.
    pub(crate) fn tracked(&self) -> Option<(&Tracker, PlannerView<'_>)> {
        self.tracker().map(|tracker| (tracker, tracker.view(&self.blocks)))
    }

    /// The placement of the blocks, recomputed if it is not tracked.
    pub(crate) fn survey(&self, null: bool) -> Result<BlockMap> {
        memory::require(BlockMap::bytes(self.extent()))?;
        if let Some(tracker) = self.tracker() {
            return Ok(tracker.survey());
        }
        let mut map = BlockMap::new(self.len);
        for (id, block) in (0..).map(BlockId).zip(&self.blocks).take(self.len) {
            if block.is_leased() || (null && id == NULL_BLOCK) {
                map.set(id, Occupancy::Fixed);
            } else if !block.is_empty() {
                map.set(id, Occupancy::Live);
            }
        }
        Ok(map)
    }

    /// Begins a move of a live or cached block into a hole.
    pub(crate) fn begin_move(&mut self, from: BlockId, to: BlockId) {
        self.take_target(to);
        if let Some((tracker, blocks)) = self.tracker_mut() {
            tracker.begin(from, to, blocks);
        }
    }

    /// Like [`Pool::begin_move`], into a block that was taken to be filled.
    pub(crate) fn begin_move_to_taken(&mut self, from: BlockId, to: BlockId) {
        self.release(to);
        if let Some((tracker, blocks)) = self.tracker_mut() {
            tracker.begin(from, to, blocks);
        }
    }

    /// Whether a block is the source of a valid move.
    #[inline]
    pub(crate) fn is_moving(&self, block: BlockId) -> bool {
        self.tracker().is_some_and(|tracker| tracker.is_moving(block))
    }

    /// Frees the target of a cancelled move.
    pub(crate) fn give_back(&mut self, to: BlockId) {
        self.end_lease(to, LeaseKind::Write);
    }

    /// Finishes a valid move: the target takes over the source's state, except its copy in another tier, which is
    /// returned. The source becomes free.
    pub(crate) fn finish_move(&mut self, from: BlockId, to: BlockId) -> Option<TierBlock> {
        let (mut source, mut target) = (self.block(from), self.block(to));
        let before = source;
        let copy = source.move_into(&mut target);
        (self.blocks[from.index()], self.blocks[to.index()]) = (source, target);
        if let (Some(cache), true) = (&mut self.cache, before.is_published()) {
            cache.rename(from, to, before.tag(), copy.is_some());
        }
        let class = self.classes.of(from);
        self.sets[class].free.used(from);
        self.moved(from, before);
        // It was being filled; its source may have been left to the cache in the meantime.
        self.note_moved(to, Membership::Neither, target.membership());
        self.refresh(to.0..to.0 + 1);
        copy
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{Chain, KeySpec};
    use crate::id::Tier;

    /// Blocks 0 to 4 of 8 are taken; block 4 is cached and in no table.
    fn pool() -> Pool {
        let mut pool = Pool::new(Tier::Device, 8, true).unwrap();
        let mut blocks = Vec::new();
        pool.take(5, false, &mut blocks);
        let key = Chain::new(&KeySpec::default(), 1, 0).block(&[4], &[]).unwrap();
        pool.publish(BlockId(4), key, 0);
        pool.release(BlockId(4));
        pool.track_moves(false, |_| vec![BlockId(3)]).unwrap();
        pool
    }

    #[test]
    fn a_target_takes_over_references_key_and_place_among_the_evictable() {
        let mut pool = pool();
        let key = pool.key(BlockId(4)).unwrap();
        pool.share(BlockId(2), 1);
        for (from, to) in [(2, 7), (4, 6)] {
            pool.begin_move(BlockId(from), BlockId(to));
            assert_eq!(pool.finish_move(BlockId(from), BlockId(to)), None);
            assert_eq!(pool.tracker().unwrap().check(BlockId(to), pool.block(BlockId(to)), &pool.blocks), None);
        }
        assert_eq!((pool.refs(BlockId(7)), pool.refs(BlockId(2)), pool.block(BlockId(2)).generation()), (2, 0, 1));
        assert_eq!((pool.find(&key), pool.evictable_blocks()), (Some(BlockId(6)), vec![BlockId(6)]));
        assert_eq!(pool.free_blocks().collect::<Vec<_>>(), [2, 4, 5].map(BlockId));
    }
}
