//! The blocks of one tier: which of them are free, which are in use, and which still hold bytes that a prompt can find.
//!
//! Invariant: a block is in the set that its state names (`Block::membership`): free, evictable, overlappable, or in
//! none of them. `Pool::moved` keeps this for one block, and `Pool::moved_run` for neighbours that are alike. A block
//! beyond the end of a shrunken pool is in no set, and once unused it holds nothing that can be found.

use crate::block::{Block, LeaseKind, Leases, MAX_BLOCKS, MAX_LEASES, Membership, TierBlock};
use crate::error::fault;
use crate::error::{Error, Result};
use crate::group::NULL_BLOCK;
use crate::id::{BlockId, Tier};
use crate::memory;
use crate::page::{Classes, MAX_CLASSES, PerClass, Shape};
use crate::placement::Tracker;
use crate::prefix::evict::Eviction;
use crate::prefix::{PrefixCache, grown};
use crate::reuse::ReuseOrder;
use classes::ClassSets;
use extents::Extents;
use std::ops::Range;

mod cached;
mod classes;
mod extents;
mod moves;
mod resize;
mod runs;
pub(crate) use classes::Room;
pub(crate) use extents::BusyExtent;
pub(crate) use resize::Tail;

/// Allocation order of a pool.
#[derive(Clone, Copy, Debug, Default)]
pub struct Policies {
    /// Order of free blocks.
    pub reuse: ReuseOrder,
    /// Order of cached blocks, which are evicted when none is free.
    pub eviction: Eviction,
}

/// The blocks of one tier.
#[derive(Debug, Clone)]
pub struct Pool {
    tier: Tier,
    /// Blocks in the pool.
    len: usize,
    /// Indexed by block id, up to the highest block ever taken: memory grows with use.
    blocks: Vec<Block>,
    /// Which blocks are of which page class.
    classes: Classes,
    /// All blocks below this number are in the pool: with one class those are all, with several 0 if some class has less
    /// than it had room for.
    inside: usize,
    /// With several classes: one past the last number of each that is in the pool.
    ends: [u32; MAX_CLASSES],
    /// By class: its free blocks.
    sets: Box<[ClassSets]>,
    /// Set if classes take and give back their blocks.
    extents: Option<Box<Extents>>,
    /// Bytes from a block to the next, by class; 1 if blocks have no bytes.
    strides: [u64; MAX_CLASSES],
    /// Whether block 0 is the null block.
    has_null: bool,
    cache: Option<PrefixCache>,
    /// Copies in other tiers of blocks whose bytes are gone. The owner of all pools unlinks them.
    orphans: Vec<TierBlock>,
    evictions: u64,
    /// Peak number of blocks in use.
    peak: usize,
    /// Blocks in use beyond the end of a shrunken pool.
    tail: Tail,
    /// Set once moves have been requested.
    tracker: Option<Box<Tracker>>,
}

impl Pool {
    /// A pool of `blocks` free blocks. With `caching`, prompts find released blocks by their keys until they are
    /// evicted.
    ///
    /// # Errors
    /// More than [`MAX_BLOCKS`] blocks, or than there is memory for.
    pub fn new(tier: Tier, blocks: usize, caching: bool) -> Result<Self> {
        Self::with_policies(tier, blocks, caching, Policies::default())
    }

    /// Like [`Pool::new`], with the given policies.
    ///
    /// # Errors
    /// As [`Pool::new`].
    pub fn with_policies(tier: Tier, blocks: usize, caching: bool, policies: Policies) -> Result<Self> {
        Self::with_shape(tier, &Shape::single(blocks, false), caching, policies)
    }

    /// Like [`Pool::with_policies`], for the blocks of several classes; the null block, if there is one, is taken.
    ///
    /// # Errors
    /// As [`Pool::new`].
    pub(crate) fn with_shape(tier: Tier, shape: &Shape, caching: bool, policies: Policies) -> Result<Self> {
        let blocks = shape.ids.iter().copied().fold(0, usize::saturating_add);
        if blocks > MAX_BLOCKS {
            let must = format!("at most {MAX_BLOCKS}");
            return Err(Error::InvalidArgument { what: "num_blocks", found: blocks as i128, must });
        }
        Self::require_memory(blocks, caching)?;
        let classes = Classes::new(&shape.ids);
        let extents = shape.extents.map(|extents| Box::new(Extents::new(extents, shape.has_null)));
        let mut pool = Self {
            tier,
            len: blocks,
            blocks: Vec::with_capacity(blocks),
            classes,
            inside: blocks,
            ends: [u32::MAX; MAX_CLASSES],
            sets: ClassSets::all(&classes, shape, policies.reuse),
            extents,
            strides: shape.strides,
            has_null: shape.has_null && blocks > 0,
            cache: caching.then(|| PrefixCache::new(blocks, policies.eviction)),
            orphans: Vec::new(),
            evictions: 0,
            peak: 0,
            tail: Tail::default(),
            tracker: None,
        };
        pool.set_ends(PerClass::from_slice(&shape.now));
        if pool.has_null {
            pool.know(NULL_BLOCK);
            pool.blocks[NULL_BLOCK.index()].take(false);
            pool.note_peak();
        }
        Ok(pool)
    }

    /// Fails unless there is memory for a pool of `blocks` blocks, whatever its policies.
    pub(crate) fn require_memory(blocks: usize, caching: bool) -> Result<()> {
        // Free and overlappable blocks are bits, or a queue.
        const PLAIN: usize = size_of::<Block>() + 10;
        let block = if caching { PLAIN + PrefixCache::BYTES } else { PLAIN };
        memory::require(blocks.saturating_mul(block))
    }

    /// The tier that the blocks are in.
    #[must_use]
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Blocks in the pool.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the pool has no blocks at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Empty free blocks in allocation order, class by class; takes none.
    pub fn free_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.sets.iter().flat_map(|sets| sets.free.iter())
    }

    /// The state of a block; the default if it was never taken.
    #[inline]
    #[must_use]
    pub fn block(&self, block: BlockId) -> Block {
        self.blocks.get(block.index()).copied().unwrap_or_default()
    }

    /// References to a block.
    #[must_use]
    pub fn refs(&self, block: BlockId) -> u32 {
        self.block(block).refs()
    }

    /// Fails unless `wanted` blocks are available.
    pub(crate) fn require(&self, wanted: usize, overlappable_too: bool) -> Result<()> {
        fault::point()?;
        let free = self.free_with(0, overlappable_too, 0);
        if wanted <= free {
            return Ok(());
        }
        Err(Error::OutOfBlocks { tier: self.tier, wanted, free, total: self.len(), page_class: None })
    }

    /// Takes `count` blocks with one reference each, and with a write lease if they will be filled: free ones first,
    /// then overlappable ones, then evictable ones. Returns whether any was overlappable. The caller has called
    /// [`Pool::require`].
    #[inline]
    pub(crate) fn take(&mut self, count: usize, filling: bool, out: &mut Vec<BlockId>) -> bool {
        self.take_of(0, count, filling, out)
    }

    /// Like [`Pool::take`], of one class.
    #[inline]
    pub(crate) fn take_of(&mut self, class: usize, count: usize, filling: bool, out: &mut Vec<BlockId>) -> bool {
        let (mut first, mut count) = (out.len(), count);
        if self.is_packing() {
            self.take_packed(class, count, filling, out);
            count -= out.len() - first;
            first = out.len();
        }
        let mut end = 0;
        self.sets[class].free.take_runs(count, |run| {
            end = end.max(run.end);
            out.extend(run.map(BlockId));
        });
        if end as usize > self.blocks.len() {
            self.know(BlockId(end - 1));
        }
        self.open(&out[first..], filling);
        let ready = out.len() - first;
        self.note_all(&out[first..], Membership::Free, Membership::Neither);
        if ready == count {
            if let Some(tracker) = &mut self.tracker {
                tracker.note_taken(&out[first..], filling);
            }
            self.note_peak();
            return false;
        }
        // Only when no block is free: what fills these must wait until those who read them are done.
        self.sets[class].overlappable.take_lowest(count - ready, |block| out.push(block));
        let overlapped = out.len() > first + ready;
        for &block in &out[first + ready..] {
            self.retire(block);
            self.evict_bytes(block);
            self.blocks[block.index()].take(filling);
        }
        self.evict(class, first + count - out.len(), filling, out);
        debug_assert!(out.len() == first + count, "{} of {count} blocks of class {class} are there", out.len() - first);
        if let Some((tracker, blocks)) = self.tracker_mut() {
            tracker.note_taken(&out[first..first + ready], filling);
            out[first + ready..].iter().for_each(|&block| tracker.note_written(block, blocks));
        }
        self.note_peak();
        overlapped
    }

    /// Takes a free block as the target of a move: it has no owner and is being filled.
    pub(crate) fn take_target(&mut self, block: BlockId) {
        self.know(block);
        self.change(block, Block::fill);
        self.note_peak();
    }

    /// Sets or clears the copy of a block's bytes in another tier; returns the one before.
    pub(crate) fn set_tier_copy(&mut self, block: BlockId, copy: Option<TierBlock>) -> Option<TierBlock> {
        if let Some(order) = self.cache.as_mut().and_then(PrefixCache::host_order) {
            order.set_copied(block, copy.is_some_and(|(tier, _)| tier == Tier::Device));
        }
        self.blocks[block.index()].set_tier_copy(copy)
    }

    /// Copies in other tiers of blocks whose bytes have gone since the last call.
    pub(crate) fn take_orphans(&mut self) -> Vec<TierBlock> {
        std::mem::take(&mut self.orphans)
    }

    /// Updates the peak, after a call that may have raised the number of blocks in use.
    pub(crate) fn note_peak(&mut self) {
        self.peak = self.peak.max(self.used());
    }

    /// Adds references to a block that has some.
    pub(crate) fn share(&mut self, block: BlockId, count: u32) {
        let block = &mut self.blocks[block.index()];
        debug_assert!(block.is_used(), "sharing a block that nothing references");
        block.add_refs(count);
    }

    /// Takes a reference to a block that is referenced or cached.
    #[inline]
    pub(crate) fn claim(&mut self, block: BlockId) {
        let now = &mut self.blocks[block.index()];
        debug_assert!(!now.is_empty(), "claiming a block that holds nothing");
        if now.is_used() {
            now.add_refs(1);
            return;
        }
        if let Some(cache) = &mut self.cache {
            cache.note_use(block, true);
        }
        self.change(block, |block| block.add_refs(1));
    }

    /// Drops one reference. The last one frees the block, or leaves it to the cache or its leases; the copy in another
    /// tier of a block whose bytes are gone is left in [`Pool::take_orphans`].
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a finished prompt releases thousands; a call adds a third")]
    pub(crate) fn release(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        let before = *block;
        if !block.drop_ref() {
            if block.is_published() {
                self.hold(id);
            }
            return;
        }
        if self.sets[0].free.follows_uses() {
            self.sets[self.classes.of(id)].free.used(id);
        }
        if !before.is_published() {
            self.orphans.extend(self.blocks[id.index()].set_tier_copy(None));
        } else if let Some(cache) = &mut self.cache {
            cache.note_use(id, false);
        }
        self.moved(id, before);
    }

    /// Drops references to a block that keeps others.
    pub(crate) fn unshare(&mut self, block: BlockId, count: u32) {
        self.blocks[block.index()].drop_refs(count);
    }

    /// Fails unless a block has room for this many more leases of a kind.
    pub(crate) fn require_leases(&self, id: BlockId, kind: LeaseKind, count: usize) -> Result<()> {
        fault::point()?;
        if count <= self.block(id).lease_room(kind) {
            return Ok(());
        }
        Err(Error::TooManyLeases { tier: self.tier, block: id, limit: u32::from(MAX_LEASES) })
    }

    /// Takes a lease, for which there is room.
    pub(crate) fn lease(&mut self, id: BlockId, kind: LeaseKind) {
        self.change(id, |block| block.add_lease(kind));
    }

    /// Ends a lease; an unused block becomes free with its last lease.
    pub(crate) fn end_lease(&mut self, block: BlockId, kind: LeaseKind) {
        if !self.block(block).is_used() && !self.is_beyond(block) {
            self.begin_chain();
        }
        self.change(block, |block| block.end_lease(kind));
    }

    /// Takes a reference and a lease, and drops the reference: leasing a cached block counts as a hit.
    pub(crate) fn lease_cached(&mut self, block: BlockId, kind: LeaseKind) {
        self.claim(block);
        self.lease(block, kind);
        self.release(block);
    }

    /// Makes room for a block that may never have been taken.
    fn know(&mut self, block: BlockId) {
        if block.index() >= self.blocks.len() {
            self.blocks.resize(grown(block, self.blocks.capacity()), Block::default());
        }
    }

    /// Changes a block, and puts it where it belongs now.
    #[inline]
    fn change(&mut self, id: BlockId, change: impl FnOnce(&mut Block)) {
        let before = self.blocks[id.index()];
        change(&mut self.blocks[id.index()]);
        self.moved(id, before);
    }

    /// The only place where the sets, the tail and the block map follow a changed block. A block that lost its key has
    /// left the eviction order with it.
    #[inline]
    fn moved(&mut self, id: BlockId, before: Block) {
        if self.is_beyond(id) {
            self.drop_stranded(id);
            self.moved_beyond(id.0..id.0 + 1, before, self.blocks[id.index()]);
        } else {
            let now = self.blocks[id.index()];
            let (from, to) = (before.membership(), now.membership());
            if from != to {
                if let Some(extents) = &mut self.extents {
                    extents.note(&self.classes, id, from, to);
                }
                match (from, &mut self.cache) {
                    (Membership::Free, _) => {
                        let was_free = self.sets[self.classes.of(id)].free.remove(id);
                        debug_assert!(was_free, "taking a block that is not free");
                    }
                    (Membership::Evictable, Some(cache)) if now.is_published() => {
                        cache.unpark(id);
                    }
                    (Membership::Overlappable, _) => {
                        self.sets[self.classes.of(id)].overlappable.remove(id);
                    }
                    _ => {}
                }
                match (to, &mut self.cache) {
                    (Membership::Free, _) => self.sets[self.classes.of(id)].free.insert(id),
                    (Membership::Evictable, Some(cache)) => cache.park_with(id, now),
                    (Membership::Overlappable, _) => {
                        self.sets[self.classes.of(id)].overlappable.insert(id);
                    }
                    _ => {}
                }
            }
        }
        self.refresh(id.0..id.0 + 1);
    }

    /// Like [`Pool::moved`], for a run of blocks of one class in equal states before and after; none of them is or was
    /// evictable.
    #[inline]
    fn moved_run(&mut self, run: Range<u32>, before: Block) {
        let now = self.blocks[run.start as usize];
        let beyond = self.beyond(&run);
        let inside = run.start..run.end - resize::id(beyond);
        if beyond > 0 {
            self.moved_beyond(inside.end..run.end, before, now);
        }
        let (from, to) = (before.membership(), now.membership());
        if self.extents.is_some() && from != to {
            inside.clone().map(BlockId).for_each(|block| self.note_moved(block, from, to));
        }
        let sets = &mut self.sets[self.classes.of(BlockId(run.start))];
        if from == Membership::Overlappable {
            sets.overlappable.remove_run(run.clone());
        }
        match to {
            Membership::Free => sets.free.insert_run(inside),
            Membership::Overlappable => sets.overlappable.insert_run(inside),
            _ => {}
        }
        self.refresh(run);
    }

    /// Updates the placement of a run.
    #[inline]
    fn refresh(&mut self, run: Range<u32>) {
        if let Some((tracker, blocks)) = self.tracker_mut() {
            tracker.refresh(run, blocks);
        }
    }

    /// Compares a block with the references and leases counted externally.
    pub(crate) fn check(&self, id: BlockId, refs: u32, leases: Leases) -> Option<String> {
        let block = self.block(id);
        let (is_beyond, published) = (self.is_beyond(id), block.is_published());
        let is = |membership| !is_beyond && block.membership() == membership;
        let what = if let Some(what) = block.check(refs, leases) {
            what
        } else if is_beyond && refs == 0 && published {
            "cached, unused and beyond the end".to_owned()
        } else if (is_beyond || self.is_absent(id)) && block.is_empty() && !block.is_leased() {
            // `check_totals` verifies that no set has it.
            return None;
        } else if self.is_absent(id) {
            format!("{:?}, and no class has it", block.state())
        } else if self.free_of(id).free.contains(id) != is(Membership::Free) {
            format!("free is {}", self.free_of(id).free.contains(id))
        } else if self.is_evictable(id) != is(Membership::Evictable) {
            format!("evictable is {}", self.is_evictable(id))
        } else if self.finds(id) != published {
            format!("found by its key is {}", self.finds(id))
        } else if self.free_of(id).overlappable.contains(id) != is(Membership::Overlappable) {
            format!("overlappable is {}", self.free_of(id).overlappable.contains(id))
        } else {
            self.tracker().and_then(|tracker| tracker.check(id, block, &self.blocks))?
        };
        Some(format!("{} block {id}: {what}", self.tier))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(blocks: usize) -> Pool {
        Pool::new(Tier::Device, blocks, false).unwrap()
    }

    fn take(pool: &mut Pool, count: usize) -> Vec<BlockId> {
        let mut out = Vec::new();
        pool.take(count, false, &mut out);
        out
    }

    #[test]
    fn released_blocks_are_reused_lowest_first() {
        let mut pool = pool(4);
        let blocks = take(&mut pool, 4);
        pool.release(blocks[2]);
        pool.release(blocks[0]);
        assert_eq!(take(&mut pool, 2), [BlockId(0), BlockId(2)]);
    }

    #[test]
    fn a_shared_block_is_free_only_after_its_last_reference() {
        let mut pool = pool(1);
        let block = take(&mut pool, 1)[0];
        pool.share(block, 1);
        pool.release(block);
        assert_eq!(pool.free(), 0);
        pool.release(block);
        assert_eq!(pool.free(), 1);
        assert_eq!(pool.block(block).generation(), 1);
    }

    #[test]
    fn too_large_a_pool_is_refused_before_memory_is_taken() {
        assert!(Pool::new(Tier::Host, MAX_BLOCKS + 1, false).is_err());
    }

    #[test]
    fn a_read_lease_keeps_a_released_block_and_an_overlappable_one_lets_ordered_work_take_it() {
        let mut pool = pool(2);
        let blocks = take(&mut pool, 2);
        pool.lease(blocks[0], LeaseKind::Read);
        pool.lease(blocks[1], LeaseKind::OverlappableRead);
        pool.release(blocks[0]);
        pool.release(blocks[1]);
        assert_eq!((pool.free(), pool.available()), (0, 1));
        assert!(pool.require(1, false).is_err());
        let mut out = Vec::new();
        assert!(pool.take(1, false, &mut out));
        assert_eq!(out, [blocks[1]]);
        pool.end_lease(blocks[1], LeaseKind::OverlappableRead);
        pool.end_lease(blocks[0], LeaseKind::Read);
        assert_eq!((pool.free(), pool.refs(blocks[1])), (1, 1));
    }
}
