//! Operations on runs of adjacent blocks: most sequences take theirs in one go, lowest ids first.
//!
//! Most blocks are private: one reference, and no lease, key or copy in another tier. A run of private blocks changes
//! without a check per block; other runs go block by block.

use super::Pool;
use super::cached::NO_KEY;
use crate::block::{Block, LeaseKind, Membership};
use crate::group::NULL_BLOCK;
use crate::id::BlockId;
use crate::page::PerClass;
use crate::reuse::indices;
use std::hint::black_box;
use std::ops::Range;

/// Blocks that are read before the first of them is changed.
const LOOK_AHEAD: usize = 64;

/// The blocks as one run, if they are adjacent and ascending.
#[inline]
fn as_run(blocks: &[BlockId]) -> Option<Range<u32>> {
    let rising = blocks.windows(2).fold(true, |rising, pair| rising & (pair[0].0.wrapping_add(1) == pair[1].0));
    rising.then_some(blocks.first()?.0..blocks.last()?.0 + 1)
}

impl Pool {
    /// Whether each block has one reference, and no lease, key or copy in another tier.
    pub(crate) fn are_private(&self, blocks: &[BlockId]) -> bool {
        blocks.iter().all(|&block| self.block(block).is_private())
    }

    /// Drops one reference to each block, last one first, like [`Pool::release`].
    pub(crate) fn release_all(&mut self, blocks: &[BlockId]) {
        for blocks in blocks.rchunks(LOOK_AHEAD) {
            let beyond = self.tail().live > 0 && blocks.iter().any(|&block| self.is_beyond(block));
            if beyond {
                blocks.iter().rev().for_each(|&block| self.release(block));
            } else if !self.are_private(blocks) {
                if self.points().is_some() {
                    self.release_runs(blocks);
                } else {
                    self.look_at(blocks);
                    blocks.iter().rev().for_each(|&block| self.release(block));
                }
            } else if let Some(run) = as_run(blocks) {
                self.release_private(run);
            } else {
                // Blocks of one table are of one class.
                let class = blocks.first().map_or(0, |&block| self.classes.of(block));
                let (all, free) = (&mut self.blocks, &mut self.sets[class].free);
                for &block in blocks.iter().rev() {
                    Block::release_run(std::slice::from_mut(&mut all[block.index()]));
                    free.used(block);
                    free.insert(block);
                }
                self.note_all(blocks, Membership::Neither, Membership::Free);
                if let Some((tracker, all)) = self.tracker_mut() {
                    tracker.refresh_all(blocks, all);
                }
            }
        }
    }

    /// Drops one reference to each block, run by run of blocks that are alike, last one first.
    fn release_runs(&mut self, mut blocks: &[BlockId]) {
        while let Some((&last, rest)) = blocks.split_last() {
            if self.has_key(last) {
                self.release(last);
                blocks = rest;
                continue;
            }
            let run = self.last_run(blocks);
            blocks = &blocks[..blocks.len() - run.len()];
            if self.block(last).is_private() {
                self.release_private(run);
            } else if self.hang(&run, 1) {
                self.release_hanging(run);
            } else {
                run.map(BlockId).rev().for_each(|block| self.release(block));
            }
        }
    }

    /// Whether a block is published under a key, which no other block has.
    #[inline]
    fn has_key(&self, block: BlockId) -> bool {
        self.blocks[block.index()].tag() > NO_KEY
    }

    /// The neighbours at the end of some blocks that are alike.
    #[inline]
    fn last_run(&self, blocks: &[BlockId]) -> Range<u32> {
        let Some((&BlockId(last), rest)) = blocks.split_last() else { return 0..0 };
        let (mut first, state) = (last, self.blocks[last as usize]);
        for block in rest.iter().rev() {
            if block.0.wrapping_add(1) != first || !self.blocks[block.index()].is_like(state) {
                break;
            }
            first = block.0;
        }
        first..last + 1
    }

    /// Frees neighbours that have one reference and nothing else.
    fn release_private(&mut self, run: Range<u32>) {
        let before = self.blocks[run.start as usize];
        Block::release_run(&mut self.blocks[indices(&run)]);
        self.sets[self.classes.of(BlockId(run.start))].free.used_run(run.clone());
        self.moved_run(run, before);
    }

    /// Whether neighbours that are alike have `refs` references each, are found with others, and nothing else holds them.
    fn hang(&self, run: &Range<u32>, refs: u32) -> bool {
        self.block(BlockId(run.start)).is_only(refs, NO_KEY)
            && self.beyond(run) == 0
            && self.cache.as_ref().is_some_and(|cache| cache.hang(run.clone()))
    }

    /// Drops the one reference to each of such neighbours.
    fn release_hanging(&mut self, run: Range<u32>) {
        Block::release_run(&mut self.blocks[indices(&run)]);
        self.sets[self.classes.of(BlockId(run.start))].free.used_run(run.clone());
        if let Some(cache) = &mut self.cache {
            cache.park_run(run.clone());
        }
        self.note_run(&run, Membership::Neither, Membership::Evictable);
    }

    /// The number of null blocks that a table begins with, and the rest of it.
    #[inline]
    pub(crate) fn split_nulls<'a>(&self, table: &'a [BlockId]) -> (usize, &'a [BlockId]) {
        let is_null = |&&block: &&BlockId| self.has_null && block == NULL_BLOCK;
        let nulls = table.iter().take_while(is_null).count();
        (nulls, &table[nulls..])
    }

    /// Takes a reference to each block of a table, like [`Pool::claim`].
    pub(crate) fn claim_all(&mut self, table: &[BlockId]) {
        if self.points().is_none() {
            for &block in table {
                self.claim(block);
            }
            return;
        }
        let (nulls, mut blocks) = self.split_nulls(table);
        if nulls > 0 {
            self.share(NULL_BLOCK, u32::try_from(nulls).unwrap_or(u32::MAX));
        }
        while let Some((&last, rest)) = blocks.split_last() {
            if self.has_key(last) {
                self.claim(last);
                blocks = rest;
                continue;
            }
            let run = self.last_run(blocks);
            blocks = &blocks[..blocks.len() - run.len()];
            let is_parked = self.hang(&run, 0);
            if self.block(last).is_used() {
                Block::share_run(&mut self.blocks[indices(&run)]);
            } else if is_parked && self.cache.as_mut().is_some_and(|cache| cache.unpark_run(run.clone())) {
                Block::share_run(&mut self.blocks[indices(&run)]);
                self.note_run(&run, Membership::Evictable, Membership::Neither);
            } else {
                run.map(BlockId).rev().for_each(|block| self.claim(block));
            }
        }
    }

    /// Publishes blocks in use that are found with others, without keys.
    pub(crate) fn add_keyless_all(&mut self, mut blocks: &[BlockId]) {
        while !blocks.is_empty() {
            let run = self.last_run(blocks);
            blocks = &blocks[..blocks.len() - run.len()];
            let first = BlockId(run.start);
            if let (false, false, Some(cache)) =
                (self.block(first).is_published(), self.is_stranded(first), &mut self.cache)
            {
                Block::set_tags(&mut self.blocks[indices(&run)], NO_KEY);
                cache.add_keyless_run(run);
            }
        }
    }

    /// Forgets the contents of popped blocks that are being reallocated.
    pub(super) fn evict_all(&mut self, mut blocks: &[BlockId]) {
        while !blocks.is_empty() {
            let run = self.last_run(blocks);
            blocks = &blocks[..blocks.len() - run.len()];
            let is_plain = self.block(BlockId(run.start)).is_only(0, NO_KEY);
            if is_plain && self.cache.as_mut().is_some_and(|cache| cache.remove_evicted_run(run.clone())) {
                Block::set_tags(&mut self.blocks[indices(&run)], 0);
                self.evictions += run.len() as u64;
            } else {
                run.map(BlockId).rev().for_each(|block| self.evict_bytes(block));
            }
        }
    }

    /// How many blocks of a table are currently available.
    pub(crate) fn cost(&self, table: &[BlockId], overlappable_too: bool) -> PerClass {
        let (mut count, mut class, mut blocks) = (0, 0, self.split_nulls(table).1);
        while let Some((&last, rest)) = blocks.split_last() {
            let alike = if self.has_key(last) { 1 } else { self.last_run(blocks).len() };
            blocks = &rest[..rest.len() + 1 - alike];
            if self.costs(last, overlappable_too) {
                (count, class) = (count + alike, self.classes.of(last));
            }
        }
        PerClass::of(class, count)
    }

    /// Follows neighbours of one class from a set to another.
    fn note_run(&mut self, run: &Range<u32>, from: Membership, to: Membership) {
        run.clone().map(BlockId).for_each(|block| self.note_moved(block, from, to));
        self.refresh(run.clone());
    }

    /// Gives free blocks their first reference, and a write lease if they will be filled.
    pub(super) fn open(&mut self, blocks: &[BlockId], filling: bool) {
        for blocks in blocks.chunks(LOOK_AHEAD) {
            if let Some(run) = as_run(blocks) {
                Block::take_run(&mut self.blocks[indices(&run)], filling);
                continue;
            }
            self.look_at(blocks);
            for &block in blocks {
                Block::take_run(std::slice::from_mut(&mut self.blocks[block.index()]), filling);
            }
        }
    }

    /// Reads blocks before the first of them is changed, so that cache misses overlap.
    #[inline]
    fn look_at(&self, blocks: &[BlockId]) {
        black_box(blocks.iter().fold(0, |all, &block| all | self.block(block).refs()));
    }

    /// Replaces the references to a private run by the leases of a transfer that reads it.
    pub(crate) fn depart(&mut self, run: Range<u32>, reads: LeaseKind) {
        let before = self.blocks[run.start as usize];
        Block::depart_run(&mut self.blocks[indices(&run)], reads);
        self.sets[self.classes.of(BlockId(run.start))].free.used_run(run.clone());
        self.moved_run(run, before);
    }

    /// Ends one lease on each block of a run, last one first, like [`Pool::end_lease`].
    pub(crate) fn end_leases(&mut self, run: Range<u32>, kind: LeaseKind) {
        let before = self.blocks[run.start as usize];
        let blocks = &mut self.blocks[indices(&run)];
        if kind == LeaseKind::Write && Block::land_run(blocks) {
            self.refresh(run);
        } else if Block::end_run(blocks, kind) {
            self.moved_run(run, before);
        } else {
            for block in run.rev().map(BlockId) {
                self.end_lease(block, kind);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{Chain, KeySpec};
    use crate::id::Tier;
    use crate::pool::Policies;
    use crate::reuse::ReuseOrder;
    use proptest::prelude::*;

    const BLOCKS: u32 = 200;

    /// A pool of which `count` blocks are taken, some of them shared, leased or published.
    fn pool(reuse: ReuseOrder, count: usize, marks: &[(u8, usize)]) -> (Pool, Vec<BlockId>) {
        let policies = Policies { reuse, ..Policies::default() };
        let mut pool = Pool::with_policies(Tier::Device, BLOCKS as usize, true, policies).unwrap();
        let mut blocks = Vec::new();
        pool.take(count, false, &mut blocks);
        for &(mark, at) in marks {
            let block = blocks[at % count];
            match mark {
                0 => pool.share(block, 1),
                1 => pool.lease(block, LeaseKind::Read),
                2 => pool.lease(block, LeaseKind::OverlappableRead),
                3 if pool.block(block).is_filling() => {}
                3 => pool.lease(block, LeaseKind::Write),
                _ => {
                    let key = Chain::new(&KeySpec::default(), 1, 0).block(&[block.0], &[]).unwrap();
                    pool.publish(block, key, 0);
                    pool.set_tier_copy(block, Some((Tier::Host, block)));
                }
            }
        }
        (pool, blocks)
    }

    /// The observable state of a pool, and its allocation order.
    fn state(mut pool: Pool) -> impl PartialEq + std::fmt::Debug {
        let blocks = pool.blocks.clone();
        let (free, available) = (pool.free(), pool.available());
        let mut next = Vec::new();
        pool.take(available, false, &mut next);
        (blocks, free, available, next)
    }

    fn orders() -> impl Strategy<Value = ReuseOrder> {
        prop::sample::select(ReuseOrder::ALL.to_vec())
    }

    proptest! {
        #[test]
        fn many_blocks_are_released_as_one_by_one(
            reuse in orders(), count in 1usize..200, step in 1usize..4,
            marks in prop::collection::vec((0u8..5, any::<usize>()), 0..6),
        ) {
            let (mut one, blocks) = pool(reuse, count, &marks);
            let mut all = one.clone();
            let table: Vec<_> = blocks.into_iter().step_by(step).collect();
            table.iter().rev().for_each(|&block| one.release(block));
            all.release_all(&table);
            prop_assert_eq!(all.take_orphans(), one.take_orphans());
            prop_assert_eq!(state(all), state(one));
        }

        #[test]
        fn leases_of_a_run_end_as_one_by_one(
            reuse in orders(), count in 1usize..200, kind in 0usize..3, released in any::<bool>(),
            marks in prop::collection::vec((0u8..5, any::<usize>()), 0..3),
        ) {
            let kind = [LeaseKind::OverlappableRead, LeaseKind::Read, LeaseKind::Write][kind];
            let marks: Vec<_> = marks.into_iter().filter(|mark| mark.0 != 3).collect();
            let (mut one, blocks) = pool(reuse, count, &marks);
            for &block in &blocks {
                one.lease(block, kind);
                if released {
                    one.release(block);
                }
            }
            let mut all = one.clone();
            blocks.iter().rev().for_each(|&block| one.end_lease(block, kind));
            all.end_leases(blocks[0].0..blocks[0].0 + u32::try_from(count).unwrap(), kind);
            prop_assert_eq!(state(all), state(one));
        }

        #[test]
        fn departing_is_a_lease_and_a_release(reuse in orders(), count in 1usize..200, drains in any::<bool>()) {
            let kind = if drains { LeaseKind::OverlappableRead } else { LeaseKind::Read };
            let (mut one, blocks) = pool(reuse, count, &[]);
            let mut all = one.clone();
            prop_assert!(all.are_private(&blocks));
            for &block in blocks.iter().rev() {
                one.lease(block, kind);
                one.release(block);
            }
            all.depart(blocks[0].0..blocks[0].0 + u32::try_from(count).unwrap(), kind);
            prop_assert_eq!(state(all.clone()), state(one));
            prop_assert!(!all.are_private(&blocks[..1]));
        }
    }

    #[test]
    fn blocks_taken_to_be_filled_hold_no_bytes_yet_wherever_they_come_from() {
        let (mut pool, blocks) = pool(ReuseOrder::Lowest, BLOCKS as usize, &[(2, 7), (4, 9)]);
        pool.release_all(&blocks[..10]);
        let mut taken = Vec::new();
        assert!(pool.take(10, true, &mut taken));
        assert_eq!(taken.len(), 10);
        assert!(taken.iter().all(|&block| pool.block(block).is_filling() && pool.refs(block) == 1));
    }
}
