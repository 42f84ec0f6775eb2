//! Pools whose number of blocks changes while they are in use.
//!
//! With several page classes, the numbers that a class can ever have are fixed; what changes is how many of them are in the
//! pool. In an arena, extents beyond the end belong to no class, but for those that still have blocks in use.
//!
//! Both growing and shrinking take effect at once: blocks beyond the new end are never allocated again, and blocks only
//! cached there are dropped. Blocks in use there stay until their last user is gone. Until then, each of them
//! referenced by tables counts as one free block less, so that the pool never uses more blocks than its new size.

use super::{ClassSets, Pool};
use crate::block::{Block, Membership};
use crate::error::Result;
use crate::id::BlockId;
use crate::page::PerClass;
use crate::placement::Tracker;
use std::ops::Range;

/// Blocks in use beyond the end of a pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tail {
    /// Those that tables refer to.
    pub(crate) live: usize,
    /// Those that only leases hold.
    pub(crate) held: usize,
    /// With one page class, one past the highest of both, if there are any.
    end: usize,
    /// Those that tables refer to, and those that only leases hold, by page class.
    pub(crate) by_class: PerClass,
    pub(crate) held_by_class: PerClass,
}

impl Tail {
    /// Counts blocks of a class, in tables and with leases only, in or out.
    fn count(&mut self, class: usize, came: [usize; 2], went: [usize; 2]) {
        self.live = self.live + came[0] - went[0];
        self.held = self.held + came[1] - went[1];
        for (all, at) in [&mut self.by_class, &mut self.held_by_class].into_iter().zip(0..) {
            *all.at(class) = all.get(class) + came[at] - went[at];
        }
    }
}

/// An index as a block number; pools are small enough for it.
pub(super) fn id(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

impl Pool {
    /// Number of blocks that are neither referenced nor leased, including evictable ones; minus one for each block
    /// still referenced beyond the end of a shrunken pool.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free_with(0, false, 0)
    }

    /// Number of free and overlappable blocks; device work ordered after the readers may take the latter.
    #[must_use]
    pub fn available(&self) -> usize {
        self.free_with(0, true, 0)
    }

    /// Whether the first reference to a block with contents leaves one available block fewer. A leased block is not
    /// available in the first place.
    pub(crate) fn costs(&self, block: BlockId, overlappable_too: bool) -> bool {
        let now = self.block(block);
        match now.membership() {
            _ if self.is_beyond(block) => !now.is_used(),
            Membership::Overlappable => overlappable_too,
            membership => membership == Membership::Evictable,
        }
    }

    /// Number of free blocks that are not cached: taking them evicts nothing and waits for no reader.
    pub(crate) fn uncached(&self) -> usize {
        self.sets.iter().map(|sets| sets.free.len()).sum::<usize>().saturating_sub(self.tail.live)
    }

    /// Blocks still in use beyond the pool's end.
    pub(crate) fn tail(&self) -> Tail {
        self.tail
    }

    /// One past the highest block that is in the pool or still in use.
    pub(crate) fn extent(&self) -> usize {
        self.len.max(self.tail.end)
    }

    /// Whether something is in use beyond the pool's end.
    pub(crate) fn resized(&self) -> bool {
        self.tail != Tail::default()
    }

    /// Blocks that are referenced or leased, those beyond the end included.
    pub(crate) fn used(&self) -> usize {
        // Free and evictable blocks are different blocks, none beyond the end: see `check_totals`.
        let free: usize = self.sets.iter().map(|sets| sets.free.len()).sum();
        self.len - self.num_absent() - free - self.evictable() + self.tail.live + self.tail.held
    }

    /// Whether none of the pool's blocks is in use or leased, and none beyond its end in use.
    pub(crate) fn is_idle(&self) -> bool {
        let null = usize::from(self.has_null);
        self.tail.live == 0 && self.used() == null + self.tail.held
    }

    /// Whether a block lies beyond the pool's end.
    #[inline]
    pub(crate) fn is_beyond(&self, block: BlockId) -> bool {
        block.index() >= self.inside && self.is_beyond_class(block)
    }

    #[cold]
    fn is_beyond_class(&self, block: BlockId) -> bool {
        self.classes.len() == 1 || block.0 >= self.ends[self.classes.of(block)]
    }

    /// Whether a block is beyond the end and in no table, so must no longer be found.
    #[inline]
    pub(super) fn is_stranded(&self, block: BlockId) -> bool {
        self.is_beyond(block) && !self.block(block).is_used()
    }

    /// Forgets the contents of such a block.
    pub(super) fn drop_stranded(&mut self, block: BlockId) {
        if self.is_stranded(block) && self.block(block).is_published() {
            self.retire(block);
            self.evict_bytes(block);
        }
    }

    /// Blocks of a run that are beyond the end.
    #[inline]
    pub(super) fn beyond(&self, run: &Range<u32>) -> usize {
        let all = (run.end as usize).saturating_sub(self.inside.max(run.start as usize));
        if all > 0 && self.classes.len() > 1 { self.beyond_class(run) } else { all }
    }

    #[cold]
    fn beyond_class(&self, run: &Range<u32>) -> usize {
        run.end.saturating_sub(self.ends[self.classes.of(BlockId(run.start))].max(run.start)) as usize
    }

    /// Fails unless there is memory for `blocks` blocks.
    pub(crate) fn require_growth(&self, blocks: usize) -> Result<()> {
        if blocks <= self.len {
            return Ok(());
        }
        // A vector may double its capacity.
        Self::require_memory(blocks.saturating_mul(2), self.is_caching())?;
        if self.tracker.is_some() { Tracker::require_memory(blocks.saturating_mul(2)) } else { Ok(()) }
    }

    /// Resizes the pool to `blocks` blocks, at most [`crate::block::MAX_BLOCKS`]. Copies of dropped blocks are left in
    /// [`Pool::take_orphans`].
    pub(crate) fn resize(&mut self, blocks: usize) {
        debug_assert!(self.classes.len() == 1, "a resize of several page classes");
        self.classes.resize(blocks);
        self.inside = blocks;
        let former = std::mem::replace(&mut self.len, blocks);
        if blocks < former {
            self.shrink(former);
        } else {
            self.grow(former);
        }
        if let Some(cache) = &mut self.cache {
            cache.resize(blocks);
        }
        self.lower_tail();
        if let Some(tracker) = &mut self.tracker {
            tracker.resize(former, blocks, &self.blocks);
        }
    }

    fn shrink(&mut self, former: usize) {
        if let Some(last) = self.leave(0, id(self.len)..id(former)) {
            self.tail.end = self.tail.end.max(last.index() + 1);
        }
    }

    fn grow(&mut self, former: usize) {
        self.sets[0].overlappable.grow(self.len);
        self.rejoin(0, id(former)..id(self.len));
    }

    /// Numbers of a class leave the pool, whose ends have been lowered. Returns the last one that is in use.
    fn leave(&mut self, class: usize, gone: Range<u32>) -> Option<BlockId> {
        let sets = &mut self.sets[class];
        sets.free.cut(gone.clone());
        sets.overlappable.remove_run(gone.clone());
        let mut last = None;
        for block in (gone.start..gone.end.min(id(self.blocks.len()))).map(BlockId) {
            self.drop_stranded(block);
            let users = users(self.blocks[block.index()]);
            if users != [0, 0] {
                self.tail.count(class, users, [0, 0]);
                last = Some(block);
            }
        }
        last
    }

    /// Numbers of a class come back to the pool, whose ends have been raised, or are new.
    fn rejoin(&mut self, class: usize, new: Range<u32>) {
        let mut busy = Vec::new();
        let end = if self.resized() { new.end.min(id(self.blocks.len())) } else { new.start };
        for number in (new.start..end).map(BlockId) {
            let block = self.blocks[number.index()];
            let users = users(block);
            if users != [0, 0] {
                self.tail.count(class, [0, 0], users);
                busy.push(number);
            }
            if block.membership() == Membership::Overlappable {
                self.sets[class].overlappable.insert(number);
            }
        }
        self.sets[class].free.extend(new, &busy);
    }

    /// Notes how many numbers of each of several classes are in the pool.
    pub(super) fn set_ends(&mut self, blocks: PerClass) {
        if self.classes.len() > 1 {
            let all = 0..self.classes.len();
            all.clone().for_each(|class| self.ends[class] = self.classes.first(class) + id(blocks.get(class)));
            let are_whole = { all }.all(|class| self.ends[class] == self.classes.range(class).end);
            self.inside = if are_whole { self.len } else { 0 };
        }
    }

    /// Resizes several page classes to numbers of blocks for which they have room; in an arena, those of `extents` extents.
    /// Copies of dropped blocks are left in [`Pool::take_orphans`].
    pub(crate) fn resize_classes(&mut self, blocks: PerClass, extents: usize) {
        let former = self.ends;
        self.set_ends(blocks);
        if self.extents.is_some() {
            self.resize_extents(extents);
        } else {
            for (class, former) in former.into_iter().enumerate().take(self.classes.len()) {
                let end = self.ends[class];
                if end < former {
                    self.leave(class, end..former);
                } else {
                    self.rejoin(class, former..end);
                }
            }
        }
        // What moves to a block that has left stays.
        let moving: Vec<_> = self.tracker().map(|tracker| tracker.moving().collect()).unwrap_or_default();
        for [from, to] in moving {
            if let (true, Some((tracker, blocks))) = (self.is_beyond(BlockId(to)), self.tracker_mut()) {
                tracker.stay(BlockId(from), blocks);
            }
        }
        self.refresh(0..id(self.blocks.len()));
    }

    /// Follows a resize of an arena: extents leave with what is only cached there, or come.
    fn resize_extents(&mut self, count: usize) {
        let Some(extents) = self.extents.as_deref_mut() else { return };
        let former = extents.set_len(count);
        for extent in count..former.max(count) {
            // The blocks go first: an extent that has left no longer knows whose they are.
            let place = self.extents.as_deref().and_then(|extents| extents.place(&self.classes, extent));
            if let Some((class, gone)) = place {
                self.leave(class, gone);
            }
            if let Some(extents) = self.extents.as_deref_mut() {
                extents.leave(extent);
            }
        }
        for extent in former..count.max(former) {
            let place = self.extents.as_deref().and_then(|extents| extents.place(&self.classes, extent));
            if let Some((class, new)) = place {
                self.rejoin(class, new);
            }
            if let Some(extents) = self.extents.as_deref_mut() {
                extents.join(extent);
            }
        }
        if let Some(extents) = self.extents.as_deref_mut() {
            extents.repack();
        }
    }

    /// Counts blocks of a class beyond the end that changed from `before` to `now`.
    #[cold]
    pub(super) fn moved_beyond(&mut self, run: Range<u32>, before: Block, now: Block) {
        let (class, [was_live, was_held], [live, held]) =
            (self.classes.of(BlockId(run.start)), users(before), users(now));
        let count = run.len();
        self.tail.count(class, [count * live, count * held], [count * was_live, count * was_held]);
        if let (true, Some(extents)) = (live + held != was_live + was_held, self.extents.as_deref_mut()) {
            run.map(BlockId).for_each(|block| extents.note_left(&self.classes, block, live + held > 0));
        }
        if live + held < was_live + was_held {
            self.lower_tail();
        }
    }

    /// With several page classes: of the blocks in use beyond the end, one past the highest extent, or the sum over classes
    /// of one past the highest id; with the extents or ids that are in the pool.
    pub(crate) fn extent_of_classes(&self) -> usize {
        let last = |range: Range<u32>| {
            let used = |block: &u32| users(self.block(BlockId(*block))) != [0, 0];
            range.rev().find(used)
        };
        let ends = (0..self.classes.len()).map(|class| {
            let all = self.classes.range(class);
            let end = last(self.ends[class]..all.end).map_or(self.ends[class], |block| block + 1);
            (class, end)
        });
        match self.extents.as_deref() {
            Some(extents) => {
                let at = |(class, end): (usize, u32)| {
                    if end == self.ends[class] { 0 } else { extents.at(&self.classes, class, BlockId(end - 1)) + 1 }
                };
                ends.map(at).max().unwrap_or(0).max(extents.len())
            }
            None => ends.map(|(class, end)| (end - self.classes.first(class)) as usize).sum(),
        }
    }

    fn lower_tail(&mut self) {
        let used = |index: usize| self.blocks.get(index).is_some_and(|block| users(*block) != [0, 0]);
        while self.tail.end > self.len && !used(self.tail.end - 1) {
            self.tail.end -= 1;
        }
        if self.tail.end <= self.len {
            self.tail.end = 0;
        }
    }

    /// One past the highest block that is in the pool or has ever been taken.
    pub(crate) fn known(&self) -> usize {
        self.len.max(self.blocks.len())
    }

    /// Checks the blocks beyond the end, and that the sets contain only blocks of the pool.
    pub(crate) fn check_totals(&self) -> Option<String> {
        let (mut counted, mut sets) = (Tail::default(), [0; 4]);
        for (index, block) in self.blocks.iter().enumerate() {
            sets[3] += usize::from(block.is_published());
            if !self.is_beyond(BlockId(id(index))) {
                if self.is_absent(BlockId(id(index))) {
                    continue;
                }
                let sizes = [Membership::Free, Membership::Evictable, Membership::Overlappable];
                sizes.iter().zip(&mut sets).for_each(|(set, size)| *size += usize::from(block.membership() == *set));
                continue;
            }
            let users = users(*block);
            if users != [0, 0] {
                counted.count(self.classes.of(BlockId(id(index))), users, [0, 0]);
                counted.end = if self.classes.len() == 1 { index + 1 } else { 0 };
            }
        }
        let unknown = self.blocks.len()..self.len.max(self.blocks.len());
        sets[0] += if self.classes.len() == 1 {
            unknown.len()
        } else {
            { unknown }.filter(|&index| self.is_there(BlockId(id(index)))).count()
        };
        let all = |of: fn(&ClassSets) -> usize| self.sets.iter().map(of).sum();
        let (free, overlappable) = (all(|sets| sets.free.len()), all(|sets| sets.overlappable.len()));
        let found = [free, self.evictable(), overlappable, self.published()];
        let tier = self.tier;
        if counted != self.tail {
            return Some(format!("{tier}: {:?} beyond the end, counted {counted:?}", self.tail));
        }
        if let Some(block) = self.stray_in_sample() {
            return Some(format!("{tier}: block {block} is sampled for residency, but not cached"));
        }
        if let Some(what) = self.check_classes().or_else(|| self.check_extents()) {
            return Some(format!("{tier}: {what}"));
        }
        let what = "free, evictable, overlappable and cached blocks";
        (sets != found).then(|| format!("{tier}: {found:?} {what}, counted {sets:?}"))
    }
}

/// 1 and 0 if tables refer to a block, 0 and 1 if only leases hold it.
fn users(block: Block) -> [usize; 2] {
    let live = usize::from(block.is_used());
    [live, usize::from(block.is_leased()) * (1 - live)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::LeaseKind;
    use crate::hash::{Chain, Key, KeySpec};
    use crate::id::Tier;
    use crate::prefix::Published;

    fn key(n: u32) -> Key {
        Chain::new(&KeySpec::default(), 1, 0).block(&[n], &[]).unwrap()
    }

    /// A pool of ten blocks, all of them taken.
    fn pool() -> (Pool, Vec<BlockId>) {
        let mut pool = Pool::new(Tier::Device, 10, true).unwrap();
        let mut blocks = Vec::new();
        pool.take(10, false, &mut blocks);
        (pool, blocks)
    }

    #[test]
    fn blocks_in_use_beyond_the_end_go_with_their_last_user_and_are_never_free() {
        let (mut pool, blocks) = pool();
        pool.resize(4);
        assert_eq!((pool.len(), pool.extent(), pool.used(), pool.free()), (4, 10, 10, 0));
        pool.release(blocks[9]);
        assert_eq!((pool.extent(), pool.tail().live), (9, 5));
        pool.lease(blocks[8], LeaseKind::Read);
        pool.release(blocks[8]);
        assert_eq!((pool.extent(), pool.tail().live, pool.tail().held), (9, 4, 1));
        pool.release(blocks[0]);
        assert_eq!((pool.free(), pool.available()), (0, 0), "a place for one that is beyond the end");
        pool.release_all(&blocks[4..8]);
        assert_eq!((pool.free(), pool.extent()), (1, 9));
        pool.end_lease(blocks[8], LeaseKind::Read);
        assert_eq!((pool.extent(), pool.tail(), pool.check_totals()), (4, Tail::default(), None));
    }

    #[test]
    fn blocks_cached_beyond_the_end_are_dropped_at_once_or_with_their_last_user() {
        let (mut pool, blocks) = pool();
        for &block in &blocks {
            assert_eq!(pool.publish(block, key(block.0), 0), Published::Now);
            pool.set_tier_copy(block, Some((Tier::Host, block)));
        }
        pool.release(blocks[6]);
        pool.lease(blocks[7], LeaseKind::OverlappableRead);
        pool.release(blocks[7]);
        pool.resize(5);
        let mut orphans = pool.take_orphans();
        orphans.sort_unstable();
        assert_eq!(orphans, [(Tier::Host, blocks[6]), (Tier::Host, blocks[7])]);
        assert_eq!((pool.published(), pool.evictable(), pool.tail().held), (8, 0, 1));
        assert_eq!(pool.find(&key(9)), Some(blocks[9]), "its user may share it");
        pool.release(blocks[9]);
        assert_eq!((pool.find(&key(9)), pool.take_orphans()), (None, vec![(Tier::Host, blocks[9])]));
        assert_eq!(pool.check_totals(), None);
    }

    #[test]
    fn a_pool_that_grows_again_takes_back_the_blocks_beyond_its_end() {
        let (mut pool, blocks) = pool();
        pool.lease(blocks[8], LeaseKind::OverlappableRead);
        pool.release(blocks[8]);
        pool.release(blocks[5]);
        pool.resize(3);
        pool.resize(7);
        assert_eq!((pool.free(), pool.tail().live, pool.tail().held), (0, 2, 1));
        pool.resize(200);
        assert_eq!((pool.free(), pool.available(), pool.used()), (191, 192, 9));
        let mut taken = Vec::new();
        assert!(pool.take(192, false, &mut taken));
        assert_eq!((taken[0], taken[191], pool.check_totals()), (blocks[5], blocks[8], None));
    }

    #[test]
    fn runs_across_the_end_are_split() {
        for kind in [LeaseKind::OverlappableRead, LeaseKind::Read] {
            let (mut pool, _) = pool();
            pool.resize(4);
            pool.depart(2..8, kind);
            let overlappable = if kind == LeaseKind::OverlappableRead { 2 } else { 0 };
            assert_eq!((pool.tail().live, pool.tail().held, pool.sets[0].overlappable.len()), (2, 4, overlappable));
            pool.end_leases(2..8, kind);
            assert_eq!((pool.tail().live, pool.tail().held, pool.sets[0].free.len(), pool.free()), (2, 0, 2, 0));
            assert_eq!(pool.check_totals(), None);
        }
    }
}
