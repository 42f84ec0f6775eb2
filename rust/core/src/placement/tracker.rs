//! Tracks the placement of a pool's blocks and the moves in flight. Tracking starts with the first call that needs it.
//!
//! A move has a source and a target. The target is written under the ticket's lease and belongs to no sequence. The
//! source keeps its owner and is not held: anything that frees or changes its bytes, or leases it, cancels the move.

use super::{BlockMap, Occupancy};
use crate::block::Block;
use crate::error::Result;
use crate::group::NULL_BLOCK;
use crate::id::BlockId;
use crate::memory;
use crate::reuse::{BlockSet, runs};
use std::ops::Range;

/// The state that moves need of a pool. Calls that follow its blocks take them as an argument.
#[derive(Debug, Clone)]
pub(crate) struct Tracker {
    map: BlockMap,
    /// Cached blocks in no table, and what they count as; moving ones are fixed.
    cached: BlockSet,
    cached_as: Occupancy,
    /// For each block, the step that last allocated it or wrote it in place. Few are ever read.
    written_in: Vec<u32>,
    /// The current step.
    step: u32,
    /// Sources of valid moves, and the target of each.
    moving: BlockSet,
    targets: Vec<BlockId>,
    /// Whether block 0 is the null block.
    null: bool,
    /// Size of the pool: blocks from here on are not destinations.
    end: usize,
}

/// The common state of a run.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Like {
    place: Occupancy,
    leased: bool,
    empty: bool,
    cached: bool,
}

/// A planner's view of single blocks.
#[derive(Clone, Copy)]
pub(crate) struct PlannerView<'a> {
    blocks: &'a [Block],
    written_in: &'a [u32],
    step: u32,
    /// Cached blocks that are in no table.
    pub(crate) cached: &'a BlockSet,
}

impl PlannerView<'_> {
    /// Whether the bytes of a block stay as they are: it can be found by its key, or is in no table.
    pub(crate) fn is_settled(self, block: BlockId) -> bool {
        let block = self.blocks[block.index()];
        block.is_published() || !block.is_used()
    }

    /// Whether the current step is known to write a block; writes that bypass the pool are not known.
    pub(crate) fn is_dirty(self, block: BlockId) -> bool {
        self.written_in[block.index()] == self.step
    }
}

/// Whether a block is cached, and in no table and no transfer.
fn is_idle(block: Block) -> bool {
    !block.is_used() && block.is_published() && !block.is_leased()
}

fn id(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

impl Tracker {
    /// Fails unless there is memory to track `blocks` blocks.
    pub(crate) fn require_memory(blocks: usize) -> Result<()> {
        // Two words, and five sets of bits.
        const BLOCK: usize = size_of::<u32>() + size_of::<BlockId>() + 1;
        memory::require(blocks.saturating_mul(BLOCK))
    }

    /// Tracks `known` blocks. The first `blocks.len()` have been taken before; those from `end` on are not
    /// destinations. The current step writes `written`.
    pub(crate) fn new(blocks: &[Block], known: usize, end: usize, null: bool, written: &[BlockId]) -> Self {
        let (step, mut written_in) = (1, vec![0; known]);
        for block in written {
            written_in[block.index()] = step;
        }
        let (cached, moving) = (BlockSet::empty(known), BlockSet::empty(known));
        let (map, targets) = (BlockMap::new(known), vec![NULL_BLOCK; known]);
        let mut tracker =
            Self { map, cached, cached_as: Occupancy::Live, written_in, step, moving, targets, null, end };
        tracker.refresh(0..id(blocks.len().min(known)), blocks);
        tracker
    }

    /// Follows a resize of the pool: blocks beyond its end are not destinations, and moves to them are cancelled.
    pub(crate) fn resize(&mut self, former: usize, end: usize, blocks: &[Block]) {
        self.end = end;
        let known = self.targets.len().max(end);
        self.map.grow(id(known));
        self.written_in.resize(known, 0);
        self.cached.grow(known);
        self.moving.grow(known);
        self.targets.resize(known, NULL_BLOCK);
        let (low, high, taken) = (end.min(former), end.max(former), blocks.len());
        if taken < high {
            let place = if end > former { Occupancy::Hole } else { Occupancy::Fixed };
            self.map.set_run(id(taken.max(low))..id(high), place);
        }
        let lost: Vec<_> = self.moving().filter(|&[_, to]| to as usize >= end).collect();
        for [from, _] in lost {
            self.stay(BlockId(from), blocks);
        }
        self.refresh(id(low)..id(high.min(taken)), blocks);
    }

    /// The occupancy of each block.
    pub(crate) fn map(&self) -> &BlockMap {
        &self.map
    }

    /// As [`Tracker::map`], but cached blocks in no table count as live.
    pub(crate) fn survey(&self) -> BlockMap {
        let mut map = self.map.clone();
        for block in self.cached.iter().filter(|&block| !self.moving.contains(block)) {
            map.set(block, Occupancy::Live);
        }
        map
    }

    /// As [`Tracker::map`], for a planner, with its view of single blocks.
    pub(crate) fn planning<'a>(&'a mut self, blocks: &'a [Block]) -> (&'a mut BlockMap, PlannerView<'a>) {
        let Self { map, written_in, step, cached, .. } = self;
        (map, PlannerView { blocks, written_in, step: *step, cached })
    }

    /// A planner's view of single blocks.
    pub(crate) fn view<'a>(&'a self, blocks: &'a [Block]) -> PlannerView<'a> {
        PlannerView { blocks, written_in: &self.written_in, step: self.step, cached: &self.cached }
    }

    /// Sets what cached blocks in no table count as, until the next call.
    pub(crate) fn count_cached_as(&mut self, place: Occupancy, blocks: &[Block]) {
        if self.cached_as != place {
            self.cached_as = place;
            let next = |from: u32| self.cached.next_run(from, u32::MAX);
            let runs: Vec<_> = std::iter::successors(next(0), |run| next(run.end)).collect();
            for run in runs {
                self.refresh(run, blocks);
            }
        }
    }

    /// Updates the state of a run.
    #[inline(never)]
    pub(crate) fn refresh(&mut self, run: Range<u32>, blocks: &[Block]) {
        let mut from = run.start;
        while from < run.end {
            let like = self.like(BlockId(from), blocks[from as usize]);
            let mut end = from + 1;
            while end < run.end && self.like(BlockId(end), blocks[end as usize]) == like {
                end += 1;
            }
            self.put(from..end, like);
            from = end;
        }
    }

    /// As [`Tracker::refresh`], for any blocks.
    pub(crate) fn refresh_all(&mut self, ids: &[BlockId], blocks: &[Block]) {
        runs(ids).for_each(|run| self.refresh(run, blocks));
    }

    /// Records allocated blocks, which the current step writes, itself or by transfers.
    #[inline(never)]
    pub(crate) fn note_taken(&mut self, ids: &[BlockId], leased: bool) {
        let place = if leased { Occupancy::Fixed } else { Occupancy::Live };
        for run in runs(ids) {
            self.written_in[run.start as usize..run.end as usize].fill(self.step);
            self.map.set_run(run, place);
        }
    }

    /// Records that the current step writes a block, whatever its state was.
    pub(crate) fn note_written(&mut self, block: BlockId, blocks: &[Block]) {
        self.written_in[block.index()] = self.step;
        self.stay(block, blocks);
    }

    /// Ends the step: the blocks it wrote can be moved from now on.
    pub(crate) fn end_step(&mut self) {
        self.step = self.step.wrapping_add(1);
    }

    /// Begins a move of a live or cached block; the target is being filled.
    pub(crate) fn begin(&mut self, from: BlockId, to: BlockId, blocks: &[Block]) {
        self.moving.insert(from);
        self.targets[from.index()] = to;
        self.refresh(from.0..from.0 + 1, blocks);
    }

    /// Cancels a block's move, if any: the block stays.
    pub(crate) fn stay(&mut self, from: BlockId, blocks: &[Block]) {
        self.moving.remove(from);
        self.refresh(from.0..from.0 + 1, blocks);
    }

    /// Whether a block is the source of a valid move.
    #[inline]
    pub(crate) fn is_moving(&self, block: BlockId) -> bool {
        self.moving.contains(block)
    }

    /// Whether that move is still valid.
    pub(crate) fn moves_to(&self, from: BlockId, to: BlockId) -> bool {
        self.is_moving(from) && self.targets[from.index()] == to
    }

    /// Valid moves, `[from, to]`.
    pub(crate) fn moving(&self) -> impl Iterator<Item = [u32; 2]> + '_ {
        self.moving.iter().map(|from| [from.0, self.targets[from.index()].0])
    }

    fn place(&self, id: BlockId, block: Block) -> Occupancy {
        if block.is_leased() || (self.null && id == NULL_BLOCK) {
            Occupancy::Fixed
        } else if block.is_empty() {
            if id.index() < self.end { Occupancy::Hole } else { Occupancy::Fixed }
        } else if self.moving.contains(id) {
            Occupancy::Fixed
        } else if !block.is_used() {
            self.cached_as
        } else {
            Occupancy::Live
        }
    }

    /// Sets the state of a uniform run; free or leased blocks stop moving.
    fn put(&mut self, run: Range<u32>, like: Like) {
        let Like { place, leased, empty, cached } = like;
        if empty || leased {
            self.moving.remove_run(run.clone());
        }
        if cached {
            self.cached.insert_run(run.clone());
        } else {
            self.cached.remove_run(run.clone());
        }
        self.map.set_run(run, place);
    }

    fn like(&self, id: BlockId, block: Block) -> Like {
        let (leased, empty) = (block.is_leased(), block.is_empty());
        Like { place: self.place(id, block), leased, empty, cached: is_idle(block) }
    }

    /// Checks a block's placement.
    pub(crate) fn check(&self, id: BlockId, block: Block, blocks: &[Block]) -> Option<String> {
        let (found, place, moving) = (self.map.get(id), self.place(id, block), self.moving.contains(id));
        let target = self.targets[id.index()];
        if self.cached.contains(id) != is_idle(block) {
            Some(format!("in no table is {}", self.cached.contains(id)))
        } else if found != place {
            Some(format!("its place is {found:?}, counted {place:?}"))
        } else if moving && (block.is_leased() || block.is_empty()) {
            Some("moving without bytes, or leased".to_owned())
        } else if moving && !blocks.get(target.index()).is_some_and(|block| block.is_only_filling()) {
            Some(format!("moving to {target}, which is not being filled"))
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::block::LeaseKind;
    use crate::hash::{Chain, KeySpec};
    use crate::id::BlockId;
    use crate::id::Tier;
    use crate::placement::Occupancy;
    use crate::pool::Pool;

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

    fn note_written(pool: &mut Pool, block: BlockId) {
        let (tracker, blocks) = pool.tracker_mut().unwrap();
        tracker.note_written(block, blocks);
    }

    fn check(pool: &Pool) {
        for block in (0..8).map(BlockId) {
            assert_eq!(pool.check(block, pool.refs(block), pool.block(block).leases()), None);
        }
    }

    fn places(pool: &Pool) -> Vec<Occupancy> {
        (0..8).map(|block| pool.tracker().unwrap().map().get(BlockId(block))).collect()
    }

    #[test]
    fn the_blocks_that_a_step_writes_are_known_until_it_ends() {
        use Occupancy::{Fixed, Hole, Live};
        let mut pool = pool();
        let dirty = |pool: &mut Pool| {
            let (tracker, blocks) = pool.tracker_mut().unwrap();
            let (_, seen) = tracker.planning(blocks);
            (0..8).filter(|&block| seen.is_dirty(BlockId(block))).collect::<Vec<_>>()
        };
        assert_eq!(dirty(&mut pool), [3]);
        note_written(&mut pool, BlockId(0));
        pool.take(1, false, &mut Vec::new());
        pool.take(1, true, &mut Vec::new());
        assert_eq!(dirty(&mut pool), [0, 3, 5, 6]);
        assert_eq!(places(&pool), [Live, Live, Live, Live, Live, Live, Fixed, Hole]);
        pool.release(BlockId(5));
        pool.lease(BlockId(3), LeaseKind::Read);
        pool.tracker_mut().unwrap().0.end_step();
        assert_eq!(places(&pool), [Live, Live, Live, Fixed, Live, Hole, Fixed, Hole]);
        assert!(dirty(&mut pool).is_empty());
        check(&pool);
    }

    #[test]
    fn a_move_is_cancelled_when_its_source_is_written_freed_reallocated_or_leased() {
        let ends: [fn(&mut Pool); 4] = [
            |pool| note_written(pool, BlockId(2)),
            |pool| {
                pool.release(BlockId(2));
            },
            |pool| {
                pool.release(BlockId(2));
                pool.take(1, false, &mut Vec::new());
            },
            |pool| pool.lease(BlockId(2), LeaseKind::OverlappableRead),
        ];
        for end in ends {
            let mut pool = pool();
            pool.begin_move(BlockId(2), BlockId(6));
            assert!(
                pool.tracker().unwrap().moves_to(BlockId(2), BlockId(6))
                    && !pool.tracker().unwrap().moves_to(BlockId(2), BlockId(5))
            );
            check(&pool);
            end(&mut pool);
            assert!(!pool.is_moving(BlockId(2)));
            pool.give_back(BlockId(6));
            check(&pool);
            assert_eq!(pool.tracker().unwrap().map().get(BlockId(6)), Occupancy::Hole);
        }
    }
}
