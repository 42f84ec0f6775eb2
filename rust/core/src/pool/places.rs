//! Where the blocks of a pool lie, and the moves under way. Nothing of it is kept before the first call that asks for it.
//!
//! A move has a source and a target. The target is written under the ticket's lease, and nobody's; the source stays whose
//! it is, and is not held: whatever ends or changes its bytes, or takes a lease on it, ends the move's effect.

use super::Pool;
use super::resize::id;
use crate::block::{Block, LeaseKind, TierBlock};
use crate::defrag::{BlockMap, Occupancy};
use crate::error::Result;
use crate::group::NULL_BLOCK;
use crate::id::BlockId;
use crate::memory;
use crate::reuse::BlockSet;
use std::cell::Cell;
use std::ops::Range;

/// The table that a block was last known to be in, and where. All tables that share a block have it in the same place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hint {
    pub(crate) row: u32,
    pub(crate) index: u32,
}

const UNKNOWN: Hint = Hint { row: u32::MAX, index: u32::MAX };

/// What moving blocks needs to know of a pool.
#[derive(Debug, Clone)]
pub(super) struct Moves {
    places: BlockMap,
    /// Blocks that are cached and in no table, and what they count as; those that move are fixed.
    idle: BlockSet,
    idle_as: Occupancy,
    /// By block, the step that last gave it out or wrote it in place. Only a few are ever asked for.
    written: Vec<u32>,
    /// The present one.
    step: u32,
    /// Sources of moves that still count, and by source the target.
    moving: BlockSet,
    targets: Vec<BlockId>,
    /// By block.
    hints: Vec<Hint>,
    /// Whether block 0 is in the tables of many.
    null: bool,
    /// Blocks of the pool: those from here on are no destination.
    end: usize,
}

impl Moves {
    fn place(&self, id: BlockId, block: Block) -> Occupancy {
        if block.is_leased() || (self.null && id == NULL_BLOCK) {
            Occupancy::Fixed
        } else if block.is_empty() {
            if id.index() < self.end { Occupancy::Hole } else { Occupancy::Fixed }
        } else if self.moving.contains(id) {
            Occupancy::Fixed
        } else if !block.is_used() {
            self.idle_as
        } else {
            Occupancy::Live
        }
    }

    /// Says what neighbours are that are alike; a block that is free or leased moves no more.
    fn put(&mut self, run: Range<u32>, like: Like) {
        let Like { place, leased, empty, idle } = like;
        if empty || leased {
            self.moving.remove_run(run.clone());
        }
        if idle {
            self.idle.insert_run(run.clone());
        } else {
            self.idle.remove_run(run.clone());
        }
        self.places.set_run(run, place);
    }

    fn like(&self, id: BlockId, block: Block) -> Like {
        let (leased, empty) = (block.is_leased(), block.is_empty());
        Like { place: self.place(id, block), leased, empty, idle: is_idle(block) }
    }
}

/// Whether a block is cached, and in no table and no transfer.
fn is_idle(block: Block) -> bool {
    !block.is_used() && block.is_published() && !block.is_leased()
}

/// What neighbours have in common.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Like {
    place: Occupancy,
    leased: bool,
    empty: bool,
    idle: bool,
}

/// What a planner of moves sees of single blocks.
#[derive(Clone, Copy)]
pub(crate) struct PlannerView<'a> {
    blocks: &'a [Block],
    written: &'a [u32],
    step: u32,
    hints: &'a [Cell<Hint>],
    /// Cached blocks that are in no table.
    pub(crate) idle: &'a BlockSet,
}

impl PlannerView<'_> {
    /// Whether the bytes of a block stay as they are: it can be found by its key, or is in no table.
    pub(crate) fn is_settled(self, block: BlockId) -> bool {
        let block = self.blocks[block.index()];
        block.is_published() || !block.is_used()
    }

    /// Whether the present step is known to write a block; what it writes without asking the pool is not.
    pub(crate) fn is_dirty(self, block: BlockId) -> bool {
        self.written[block.index()] == self.step
    }

    /// The table that a block was last known to be in.
    pub(crate) fn hint(self, block: BlockId) -> Hint {
        self.hints[block.index()].get()
    }

    /// Says which table a block is in.
    pub(crate) fn set_hint(self, block: BlockId, hint: Hint) {
        self.hints[block.index()].set(hint);
    }
}

impl Pool {
    /// Fails unless there is memory to keep the places of so many blocks.
    pub(super) fn require_places(blocks: usize) -> Result<()> {
        // Three words, and five sets of bits.
        const BLOCK: usize = size_of::<u32>() + size_of::<BlockId>() + size_of::<Hint>() + 1;
        memory::require(blocks.saturating_mul(BLOCK))
    }

    /// Keeps the places of all blocks from now on, if it does not yet; `written` are blocks that the present step writes.
    ///
    /// # Errors
    /// There is no memory for that.
    pub(crate) fn follow_places(&mut self, null: bool, written: impl FnOnce(&Self) -> Vec<BlockId>) -> Result<()> {
        if self.moves.is_some() {
            return Ok(());
        }
        let known = self.extent();
        Self::require_places(known)?;
        let (step, mut steps) = (1, vec![0; known]);
        for block in written(self) {
            steps[block.index()] = step;
        }
        self.moves = Some(Box::new(Moves {
            places: BlockMap::new(known),
            idle: BlockSet::empty(known),
            idle_as: Occupancy::Live,
            written: steps,
            step,
            moving: BlockSet::empty(known),
            targets: vec![NULL_BLOCK; known],
            hints: vec![UNKNOWN; known],
            null,
            end: self.len,
        }));
        self.refresh_run(0..id(self.blocks.len().min(known)));
        Ok(())
    }

    /// Follows a change of the pool's size: blocks beyond its end are no destination, and what moves there stays.
    pub(super) fn resize_places(&mut self, former: usize) {
        let (blocks, taken) = (self.len, self.blocks.len());
        let Some(moves) = &mut self.moves else { return };
        moves.end = blocks;
        let known = moves.hints.len().max(blocks);
        moves.places.grow(id(known));
        moves.written.resize(known, 0);
        moves.idle.grow(known);
        moves.moving.grow(known);
        moves.targets.resize(known, NULL_BLOCK);
        moves.hints.resize(known, UNKNOWN);
        let (low, high) = (blocks.min(former), blocks.max(former));
        if taken < high {
            let place = if blocks > former { Occupancy::Hole } else { Occupancy::Fixed };
            moves.places.set_run(id(taken.max(low))..id(high), place);
        }
        let lost: Vec<_> = self.moving().filter(|&[_, to]| self.is_beyond(BlockId(to))).collect();
        for [from, _] in lost {
            self.stay(BlockId(from));
        }
        self.refresh_run(id(low)..id(high.min(taken)));
    }

    /// Whether the places of blocks are kept.
    #[inline]
    pub(crate) fn follows_places(&self) -> bool {
        self.moves.is_some()
    }

    /// The places of all blocks, where they are kept.
    pub(crate) fn places(&self) -> Option<&BlockMap> {
        self.moves.as_ref().map(|moves| &moves.places)
    }

    /// As [`Pool::places`], for a planner, and what else it asks of blocks.
    pub(crate) fn planning(&mut self) -> Option<(&mut BlockMap, PlannerView<'_>)> {
        let Moves { places, written, step, hints, idle, .. } = &mut **self.moves.as_mut()?;
        let hints = Cell::from_mut(&mut hints[..]).as_slice_of_cells();
        Some((places, PlannerView { blocks: &self.blocks, written, step: *step, hints, idle }))
    }

    /// Brings up to date what a block is.
    #[inline]
    pub(super) fn refresh(&mut self, block: BlockId) {
        if self.moves.is_some() {
            self.refresh_run(block.0..block.0 + 1);
        }
    }

    /// As [`Pool::refresh`], of neighbours.
    #[inline(never)]
    pub(super) fn refresh_run(&mut self, run: Range<u32>) {
        let Some(moves) = &mut self.moves else { return };
        let mut from = run.start;
        while from < run.end {
            let like = moves.like(BlockId(from), self.blocks[from as usize]);
            let mut end = from + 1;
            while end < run.end && moves.like(BlockId(end), self.blocks[end as usize]) == like {
                end += 1;
            }
            moves.put(from..end, like);
            from = end;
        }
    }

    /// As [`Pool::refresh`], of any blocks.
    pub(super) fn refresh_all(&mut self, blocks: &[BlockId]) {
        for run in blocks.chunk_by(|a, b| a.0 + 1 == b.0) {
            self.refresh_run(run[0].0..run[run.len() - 1].0 + 1);
        }
    }

    /// Notes that free blocks have been given out, which the present step writes, itself or by transfers.
    #[inline(never)]
    pub(super) fn note_taken(&mut self, blocks: &[BlockId], leased: bool) {
        let Some(moves) = &mut self.moves else { return };
        let place = if leased { Occupancy::Fixed } else { Occupancy::Live };
        for run in blocks.chunk_by(|a, b| a.0 + 1 == b.0) {
            let run = run[0].0..run[run.len() - 1].0 + 1;
            moves.written[run.start as usize..run.end as usize].fill(moves.step);
            moves.places.set_run(run, place);
        }
    }

    /// Notes that the present step writes a block, whatever it was before.
    #[inline]
    pub(crate) fn note_written(&mut self, block: BlockId) {
        if let Some(moves) = &mut self.moves {
            moves.written[block.index()] = moves.step;
            moves.moving.remove(block);
            self.refresh(block);
        }
    }

    /// Ends the step: what it writes can be moved from now on.
    pub(crate) fn end_step(&mut self) {
        if let Some(moves) = &mut self.moves {
            moves.step = moves.step.wrapping_add(1);
        }
    }

    /// Says what cached blocks in no table count as, until the next call.
    pub(crate) fn count_idle_as(&mut self, place: Occupancy) {
        let Some(moves) = self.moves.as_mut().filter(|moves| moves.idle_as != place) else { return };
        moves.idle_as = place;
        let runs = |from: u32| moves.idle.next_run(from, u32::MAX);
        let runs: Vec<_> = std::iter::successors(runs(0), |run| runs(run.end)).collect();
        for run in runs {
            self.refresh_run(run);
        }
    }

    /// The places of all blocks, found again where they are not kept.
    ///
    /// # Errors
    /// There is no memory for them.
    pub(crate) fn survey(&self, null: bool) -> Result<BlockMap> {
        memory::require(BlockMap::bytes(self.extent()))?;
        if let Some(moves) = &self.moves {
            let mut places = moves.places.clone();
            for block in moves.idle.iter().filter(|&block| !moves.moving.contains(block)) {
                places.set(block, Occupancy::Live);
            }
            return Ok(places);
        }
        let mut places = BlockMap::new(self.len);
        for (id, block) in (0..).map(BlockId).zip(&self.blocks).take(self.len) {
            if block.is_leased() || (null && id == NULL_BLOCK) {
                places.set(id, Occupancy::Fixed);
            } else if !block.is_empty() {
                places.set(id, Occupancy::Live);
            }
        }
        Ok(places)
    }

    /// Begins a move of a live or cached block into a hole.
    pub(crate) fn begin_move(&mut self, from: BlockId, to: BlockId) {
        self.take_target(to);
        if let Some(moves) = &mut self.moves {
            moves.moving.insert(from);
            moves.targets[from.index()] = to;
        }
        self.refresh(from);
    }

    /// Whether a block is the source of a move that still counts.
    #[inline]
    pub(crate) fn is_moving(&self, block: BlockId) -> bool {
        self.moves.as_ref().is_some_and(|moves| moves.moving.contains(block))
    }

    /// Whether that move still counts.
    pub(crate) fn moves_to(&self, from: BlockId, to: BlockId) -> bool {
        let counts = |moves: &Moves| moves.moving.contains(from) && moves.targets[from.index()] == to;
        self.moves.as_deref().is_some_and(counts)
    }

    /// Moves that still count, `[from, to]`.
    pub(crate) fn moving(&self) -> impl Iterator<Item = [u32; 2]> + '_ {
        let moves = self.moves.iter();
        moves.flat_map(|moves| moves.moving.iter().map(|from| [from.0, moves.targets[from.index()].0]))
    }

    /// Gives up a move that counts: its source stays.
    pub(crate) fn stay(&mut self, from: BlockId) {
        if let Some(moves) = &mut self.moves {
            moves.moving.remove(from);
        }
        self.refresh(from);
    }

    /// Gives back the target of a move that counts no more.
    pub(crate) fn give_back(&mut self, to: BlockId) {
        self.end_lease(to, LeaseKind::Write);
    }

    /// Ends a move that counts: the target takes over all that the source had, except its copy in another tier, which is
    /// returned. The source is free.
    pub(crate) fn finish_move(&mut self, from: BlockId, to: BlockId) -> Option<TierBlock> {
        let (mut source, mut target) = (self.block(from), self.block(to));
        let before = source;
        let copy = source.move_into(&mut target);
        (self.blocks[from.index()], self.blocks[to.index()]) = (source, target);
        if let (Some(cache), true) = (&mut self.cache, before.is_published()) {
            cache.rename(from, to, before.tag(), copy.is_some());
        }
        self.free.used(from);
        if let Some(moves) = &mut self.moves {
            moves.hints[to.index()] = moves.hints[from.index()];
        }
        self.moved(from, before);
        self.refresh(to);
        copy
    }

    /// Notes which table blocks are in, from which entry on.
    pub(crate) fn note_owner(&mut self, row: u32, from: usize, blocks: &[BlockId]) {
        if let Some(moves) = &mut self.moves {
            for (index, block) in (u32::try_from(from).unwrap_or(u32::MAX)..).zip(blocks) {
                moves.hints[block.index()] = Hint { row, index };
            }
        }
    }

    /// The table that a block was last known to be in.
    pub(crate) fn hint(&self, block: BlockId) -> Hint {
        self.moves.as_ref().map_or(UNKNOWN, |moves| moves.hints[block.index()])
    }

    /// What does not hold of a block's place.
    pub(super) fn check_place(&self, id: BlockId, block: Block) -> Option<String> {
        let moves = self.moves.as_ref()?;
        let (found, place, moving) = (moves.places.get(id), moves.place(id, block), moves.moving.contains(id));
        if moves.idle.contains(id) != is_idle(block) {
            Some(format!("in no table is {}", moves.idle.contains(id)))
        } else if found != place {
            Some(format!("its place is {found:?}, counted {place:?}"))
        } else if moving && (block.is_leased() || block.is_empty()) {
            Some("moving without bytes, or leased".to_owned())
        } else if moving && !self.block(moves.targets[id.index()]).is_only_filling() {
            Some(format!("moving to {}, which is not being filled", moves.targets[id.index()]))
        } else {
            None
        }
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
        pool.follow_places(false, |_| vec![BlockId(3)]).unwrap();
        pool
    }

    fn check(pool: &Pool) {
        for block in (0..8).map(BlockId) {
            assert_eq!(pool.check_place(block, pool.block(block)), None);
        }
    }

    fn places(pool: &Pool) -> Vec<Occupancy> {
        (0..8).map(|block| pool.places().unwrap().get(BlockId(block))).collect()
    }

    #[test]
    fn what_a_step_writes_is_known_until_it_ends() {
        use Occupancy::{Fixed, Hole, Live};
        let mut pool = pool();
        let dirty = |pool: &mut Pool| {
            let (_, seen) = pool.planning().unwrap();
            (0..8).filter(|&block| seen.is_dirty(BlockId(block))).collect::<Vec<_>>()
        };
        assert_eq!(dirty(&mut pool), [3]);
        pool.note_written(BlockId(0));
        pool.take(1, false, &mut Vec::new());
        pool.take(1, true, &mut Vec::new());
        assert_eq!(dirty(&mut pool), [0, 3, 5, 6]);
        assert_eq!(places(&pool), [Live, Live, Live, Live, Live, Live, Fixed, Hole]);
        pool.release(BlockId(5));
        pool.lease(BlockId(3), LeaseKind::Read).unwrap();
        pool.end_step();
        assert_eq!(places(&pool), [Live, Live, Live, Fixed, Live, Hole, Fixed, Hole]);
        assert!(dirty(&mut pool).is_empty());
        check(&pool);
    }

    #[test]
    fn a_move_ends_with_what_was_read_being_written_freed_given_out_or_leased() {
        let ends: [fn(&mut Pool); 4] = [
            |pool| pool.note_written(BlockId(2)),
            |pool| {
                pool.release(BlockId(2));
            },
            |pool| {
                pool.release(BlockId(2));
                pool.take(1, false, &mut Vec::new());
            },
            |pool| pool.lease(BlockId(2), LeaseKind::OverlappableRead).unwrap(),
        ];
        for end in ends {
            let mut pool = pool();
            pool.begin_move(BlockId(2), BlockId(6));
            assert!(pool.moves_to(BlockId(2), BlockId(6)) && !pool.moves_to(BlockId(2), BlockId(5)));
            check(&pool);
            end(&mut pool);
            assert!(!pool.is_moving(BlockId(2)));
            pool.give_back(BlockId(6));
            check(&pool);
            assert_eq!(pool.places().unwrap().get(BlockId(6)), Occupancy::Hole);
        }
    }

    #[test]
    fn a_target_takes_over_references_key_and_place_among_the_evictable() {
        let mut pool = pool();
        let key = pool.key(BlockId(4)).unwrap();
        pool.share(BlockId(2), 1);
        for (from, to) in [(2, 7), (4, 6)] {
            pool.begin_move(BlockId(from), BlockId(to));
            assert_eq!(pool.finish_move(BlockId(from), BlockId(to)), None);
            check(&pool);
        }
        assert_eq!((pool.refs(BlockId(7)), pool.refs(BlockId(2)), pool.block(BlockId(2)).generation()), (2, 0, 1));
        assert_eq!((pool.find(&key), pool.evictable_blocks()), (Some(BlockId(6)), vec![BlockId(6)]));
        assert_eq!(pool.free_blocks().collect::<Vec<_>>(), [2, 4, 5].map(BlockId));
    }
}
