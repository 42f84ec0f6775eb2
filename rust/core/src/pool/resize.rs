//! Pools whose number of blocks changes while they are in use.
//!
//! A pool grows at once. It shrinks at once, too, as far as anybody asks: blocks beyond the new end are never given out
//! again, and what is only cached there is dropped. Those in use stay known until their last user goes, and then are gone;
//! until then each that tables refer to takes the place of one that could be given out, so that the new size is kept.

use super::Pool;
use crate::error::Result;
use crate::id::BlockId;
use crate::pool::Twin;
use std::ops::Range;

/// Blocks in use beyond the end of a pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tail {
    /// Those that tables refer to.
    pub(crate) live: usize,
    /// Those that only leases hold.
    pub(crate) held: usize,
    /// One past the highest of both, if there are any.
    end: usize,
}

/// What a block is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockUse {
    /// Nothing: it is given out next, or beyond the end.
    Free = 0,
    /// It can be found by its key, and given out.
    Cached = 1,
    /// Only transfers or pins hold it.
    Held = 2,
    /// Tables refer to it.
    Live = 3,
}

/// As the number of a block; pools are smaller than that.
pub(super) fn id(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

impl Pool {
    /// Blocks that nothing references and nothing leases; those count that are cached and can be evicted. One fewer for
    /// each block that is still referenced beyond the end of a pool that has shrunk.
    #[must_use]
    pub fn free(&self) -> usize {
        (self.free.len() + self.evictable()).saturating_sub(self.tail.live)
    }

    /// Free blocks, and those that device work ordered after their readers may have.
    #[must_use]
    pub fn available(&self) -> usize {
        (self.free.len() + self.evictable() + self.draining.len()).saturating_sub(self.tail.live)
    }

    /// What is still in use beyond the pool's end.
    pub(crate) fn tail(&self) -> Tail {
        self.tail
    }

    /// One past the highest block that is in the pool or still in use.
    pub(crate) fn extent(&self) -> usize {
        self.blocks.max(self.tail.end)
    }

    /// Whether something is in use beyond the pool's end.
    pub(crate) fn resized(&self) -> bool {
        self.tail != Tail::default()
    }

    /// Blocks that are referenced or leased, those beyond the end included.
    pub(crate) fn used(&self) -> usize {
        self.blocks - self.free.len() - self.evictable() + self.tail.live + self.tail.held
    }

    /// What a block is used for.
    pub(crate) fn usage(&self, block: BlockId) -> BlockUse {
        let node = self.node(block);
        match (node.refs, node.is_leased(), node.tag) {
            (1.., _, _) => BlockUse::Live,
            (0, true, _) => BlockUse::Held,
            (0, false, 0) => BlockUse::Free,
            (0, false, _) => BlockUse::Cached,
        }
    }

    /// Whether a block has no place in the pool any more.
    #[inline]
    pub(super) fn is_beyond(&self, block: BlockId) -> bool {
        block.index() >= self.blocks
    }

    /// Blocks of a run that are beyond the end.
    #[inline]
    pub(super) fn beyond(&self, run: &Range<u32>) -> usize {
        (run.end as usize).saturating_sub(self.blocks.max(run.start as usize))
    }

    /// Fails unless there is memory for so many blocks.
    pub(crate) fn require_growth(&self, blocks: usize) -> Result<()> {
        if blocks <= self.blocks {
            return Ok(());
        }
        // A vector may get twice the room that it had.
        Self::require_memory(blocks.saturating_mul(2), self.is_caching())?;
        if self.moves.is_some() { Self::require_places(blocks.saturating_mul(2)) } else { Ok(()) }
    }

    /// Gives the pool so many blocks from now on, at most [`super::MAX_BLOCKS`]; twins of what is dropped wait for
    /// [`Pool::take_orphans`].
    pub(crate) fn resize(&mut self, blocks: usize) {
        let former = std::mem::replace(&mut self.blocks, blocks);
        if blocks < former {
            self.shrink(former);
        } else {
            self.grow(former);
        }
        if let Some(cache) = &mut self.cache {
            cache.index.grow(blocks);
            cache.policy.resize(blocks);
        }
        self.lower_tail();
        self.resize_places(former);
    }

    fn shrink(&mut self, former: usize) {
        let gone = id(self.blocks)..id(former);
        self.free.cut(gone.clone());
        self.draining.remove_run(gone);
        for index in self.blocks..former.min(self.nodes.len()) {
            let (node, block) = (self.nodes[index], BlockId(id(index)));
            if node.refs == 0 && node.tag != 0 {
                self.retire(block);
                self.drop_bytes(block);
            }
            let live = node.refs > 0;
            if live || node.is_leased() {
                self.tail.live += usize::from(live);
                self.tail.held += usize::from(!live);
                self.tail.end = self.tail.end.max(index + 1);
            }
        }
    }

    fn grow(&mut self, former: usize) {
        self.draining.grow(self.blocks);
        let mut busy = Vec::new();
        for index in former..self.blocks.min(self.tail.end) {
            let (node, block) = (self.nodes[index], BlockId(id(index)));
            let live = node.refs > 0;
            if live || node.is_leased() {
                self.tail.live -= usize::from(live);
                self.tail.held -= usize::from(!live);
                busy.push(block);
            }
            if node.is_draining() {
                self.draining.insert(block);
            }
        }
        self.free.extend(id(former)..id(self.blocks), &busy);
    }

    /// The last reference to a block beyond the end is gone; returns the twin of its bytes.
    #[cold]
    pub(super) fn leave(&mut self, block: BlockId) -> Option<Twin> {
        let twin = self.twin(block);
        self.retire(block);
        self.drop_bytes(block);
        if twin.is_some() {
            self.orphans.pop();
        }
        self.tail.live -= 1;
        self.tail.held += usize::from(self.nodes[block.index()].is_leased());
        self.lower_tail();
        self.refresh(block);
        twin
    }

    /// A block beyond the end that had so many references has moved.
    pub(super) fn left(&mut self, refs: u32) {
        self.tail.live -= usize::from(refs > 0);
        self.lower_tail();
    }

    /// The last leases on so many unreferenced blocks beyond the end are gone.
    #[inline]
    pub(super) fn let_go(&mut self, count: usize) {
        if count > 0 {
            self.tail.held -= count;
            self.lower_tail();
        }
    }

    /// So many references to blocks beyond the end have become leases.
    #[inline]
    pub(super) fn hold_beyond(&mut self, count: usize) {
        self.tail.live -= count;
        self.tail.held += count;
    }

    fn lower_tail(&mut self) {
        let used = |index: usize| self.nodes.get(index).is_some_and(|node| node.refs > 0 || node.is_leased());
        while self.tail.end > self.blocks && !used(self.tail.end - 1) {
            self.tail.end -= 1;
        }
        if self.tail.end <= self.blocks {
            self.tail.end = 0;
        }
    }

    /// What does not hold of the blocks beyond the end.
    pub(crate) fn check_tail(&self) -> Option<String> {
        let mut counted = Tail::default();
        for (index, node) in self.nodes.iter().enumerate().skip(self.blocks) {
            let live = node.refs > 0;
            if live || node.is_leased() {
                counted.live += usize::from(live);
                counted.held += usize::from(!live);
                counted.end = index + 1;
            }
        }
        (counted != self.tail).then(|| format!("{}: {:?} beyond the end, counted {counted:?}", self.tier, self.tail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{Chain, Key, KeySpec};
    use crate::id::Tier;
    use crate::lease::LeaseKind;
    use crate::pool::Published;

    fn key(n: u32) -> Key {
        Chain::new(&KeySpec::default(), 1, 0).block(&[n], &[]).unwrap()
    }

    /// Ten taken blocks of ten.
    fn pool() -> (Pool, Vec<BlockId>) {
        let mut pool = Pool::new(Tier::Device, 10, true).unwrap();
        let mut blocks = Vec::new();
        pool.take(10, &mut blocks);
        (pool, blocks)
    }

    #[test]
    fn blocks_in_use_beyond_the_end_go_with_their_last_user_and_are_never_free() {
        let (mut pool, blocks) = pool();
        pool.resize(4);
        assert_eq!((pool.len(), pool.extent(), pool.used(), pool.free()), (4, 10, 10, 0));
        pool.release(blocks[9]);
        assert_eq!((pool.extent(), pool.tail().live), (9, 5));
        pool.lease(blocks[8], LeaseKind::Read).unwrap();
        pool.release(blocks[8]);
        assert_eq!((pool.extent(), pool.tail().live, pool.tail().held), (9, 4, 1));
        pool.release(blocks[0]);
        assert_eq!((pool.free(), pool.available()), (0, 0), "a place for one that is beyond the end");
        pool.release_all(&blocks[4..8]);
        assert_eq!((pool.free(), pool.extent()), (1, 9));
        pool.end_lease(blocks[8], LeaseKind::Read);
        assert_eq!((pool.extent(), pool.tail(), pool.check_tail()), (4, Tail::default(), None));
    }

    #[test]
    fn what_is_cached_beyond_the_end_is_dropped_now_or_when_its_user_goes() {
        let (mut pool, blocks) = pool();
        for &block in &blocks {
            assert_eq!(pool.publish(block, key(block.0), 0), Published::Now);
            pool.set_twin(block, Some((Tier::Host, block)));
        }
        pool.release(blocks[6]);
        pool.lease(blocks[7], LeaseKind::Drain).unwrap();
        pool.release(blocks[7]);
        pool.resize(5);
        let mut orphans = pool.take_orphans();
        orphans.sort_unstable();
        assert_eq!(orphans, [(Tier::Host, blocks[6]), (Tier::Host, blocks[7])]);
        assert_eq!((pool.published(), pool.evictable(), pool.tail().held), (8, 0, 1));
        assert_eq!(pool.find(&key(9)), Some(blocks[9]), "its user may share it");
        assert_eq!(pool.release(blocks[9]), Some((Tier::Host, blocks[9])));
        assert_eq!((pool.find(&key(9)), pool.take_orphans()), (None, vec![]));
        assert_eq!(pool.check_tail(), None);
    }

    #[test]
    fn a_pool_that_grows_again_takes_back_what_was_beyond_its_end() {
        let (mut pool, blocks) = pool();
        pool.lease(blocks[8], LeaseKind::Drain).unwrap();
        pool.release(blocks[8]);
        pool.release(blocks[5]);
        pool.resize(3);
        pool.resize(7);
        assert_eq!((pool.free(), pool.tail().live, pool.tail().held), (0, 2, 1));
        pool.resize(200);
        assert_eq!((pool.free(), pool.available(), pool.used()), (191, 192, 9));
        let mut taken = Vec::new();
        assert!(pool.take(192, &mut taken));
        assert_eq!((taken[0], taken[191], pool.check_tail()), (blocks[5], blocks[8], None));
    }

    #[test]
    fn runs_across_the_end_are_parted() {
        for kind in [LeaseKind::Drain, LeaseKind::Read] {
            let (mut pool, _) = pool();
            pool.resize(4);
            pool.depart(2..8, kind);
            let drains = if kind == LeaseKind::Drain { 2 } else { 0 };
            assert_eq!((pool.tail().live, pool.tail().held, pool.draining.len()), (2, 4, drains));
            pool.end_leases(2..8, kind);
            assert_eq!((pool.tail().live, pool.tail().held, pool.free.len(), pool.free()), (2, 0, 2, 0));
            assert_eq!(pool.check_tail(), None);
        }
    }
}
