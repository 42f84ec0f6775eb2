//! A pool's use of its prefix cache: publishes blocks, forgets them, and evicts cached ones.

use super::Pool;
use crate::block::{BlockState, LeaseKind, Leases, Membership};
use crate::error::Result;
use crate::hash::Key;
use crate::id::BlockId;
use crate::memory;
use crate::prefix::evict::{Hint, HintCount, HostOrder};
use crate::prefix::{CachedIdentity, Departing, Points, PrefixCache, Published, Reason, Removals, Residency};
use std::time::Duration;

/// Blocks evicted at a time: their memory is read before the first of them changes, so that cache misses overlap.
const LOOK_AHEAD: usize = 128;

/// The tag of blocks that are published without a key.
pub(super) const NO_KEY: u32 = 1;

impl Pool {
    /// Turns caching on in the host's pool, whose eviction order continues that of the device.
    pub(crate) fn start_caching(&mut self, device: &mut Self) -> Result<()> {
        // Besides what a cached block takes: rank and stamps on the host, the link to the block before it in both tiers.
        let both = self.len.saturating_add(device.len).saturating_mul(size_of::<u64>());
        memory::require(self.len.saturating_mul(PrefixCache::BYTES + 13).saturating_add(both))?;
        self.cache = Some(PrefixCache::of_host(self.len, self.classes));
        if let Some(cache) = &mut device.cache {
            cache.extend(self.len_of(cache.ordered()));
        }
        Ok(())
    }

    /// Lets the host's eviction order follow the device's, before the host's blocks change; see [`Pool::report`].
    #[inline]
    pub(crate) fn follow(&mut self, device: &Self) {
        let guide = device.cache.as_ref().and_then(PrefixCache::guide);
        if let (Some(guide), Some(order)) = (guide, self.cache.as_mut().and_then(PrefixCache::host_order)) {
            order.follow(guide);
        }
    }

    /// Lets the device's eviction order follow the host's, after the host's blocks have changed.
    #[inline]
    pub(crate) fn report(&mut self, device: &mut Self) {
        let order = self.cache.as_mut().and_then(PrefixCache::host_order);
        if let (Some(order), Some(cache)) = (order, &mut device.cache) {
            cache.follow_host(order.report());
        }
    }

    /// Removes the first device block of the eviction order, with the rank that its copy on the host will have: one of a
    /// class, or what comes with it.
    pub(crate) fn pop_ranked(&mut self, class: Option<usize>, is_ahead: bool) -> Option<Departing> {
        self.cache.as_mut()?.pop_ranked(class, is_ahead)
    }

    /// The page class of the blocks with keys.
    pub(crate) fn keyed_class(&self) -> usize {
        self.cache.as_ref().map_or(0, PrefixCache::ordered)
    }

    /// Number of blocks to be popped next that must not stay behind.
    pub(crate) fn num_going(&self) -> usize {
        self.cache.as_ref().map_or(0, PrefixCache::num_going)
    }

    /// The host does not get all of what is leaving: the rest serves nobody.
    pub(crate) fn stop_departing(&mut self) {
        if let Some(cache) = &mut self.cache {
            cache.stop_departing();
        }
    }

    /// Whether a block is found with others, not by its key.
    pub(crate) fn is_keyless(&self, block: BlockId) -> bool {
        self.cache.as_ref().is_some_and(|cache| cache.is_keyless(block))
    }

    /// Whether a block of this pool is found with others, and would have this key on the host.
    pub(crate) fn is_owned_as(&self, block: BlockId, key: &Key) -> bool {
        let cache = self.cache.as_ref().filter(|cache| block.index() < self.blocks.len() && cache.is_owned(block));
        cache.is_some() && self.own_key(block).as_ref() == Some(key)
    }

    /// The key by which the host finds a copy of a published block.
    pub(crate) fn own_key(&self, block: BlockId) -> Option<Key> {
        self.cache.as_ref().filter(|_| self.block(block).is_published())?.own_key(block)
    }

    /// The host's eviction order.
    #[inline]
    pub(crate) fn host_order(&mut self) -> Option<&mut HostOrder> {
        self.cache.as_mut()?.host_order()
    }

    /// Notes that a published block was loaded from the host, where it had this segment or level.
    pub(crate) fn restore(&mut self, block: BlockId, ring: u8) {
        if let Some(cache) = &mut self.cache {
            cache.restore(block, ring);
        }
    }

    /// Whether the pool keeps keys.
    pub(crate) fn is_caching(&self) -> bool {
        self.cache.is_some()
    }

    /// Cached blocks that nothing references and nothing leases.
    #[must_use]
    pub fn evictable(&self) -> usize {
        self.cache.as_ref().map_or(0, PrefixCache::evictable)
    }

    /// Evictable blocks in eviction order; takes none.
    #[must_use]
    pub fn evictable_blocks(&self) -> Vec<BlockId> {
        self.cache.as_ref().map_or_else(Vec::new, PrefixCache::order)
    }

    /// Blocks that can be found by their keys.
    #[must_use]
    pub fn published(&self) -> usize {
        self.cache.as_ref().map_or(0, PrefixCache::published)
    }

    /// Cached blocks that were evicted.
    #[must_use]
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Peak number of blocks in use.
    #[must_use]
    pub fn peak(&self) -> usize {
        self.peak
    }

    /// Key of a published block.
    pub(crate) fn key(&self, block: BlockId) -> Option<Key> {
        self.cache.as_ref().filter(|cache| self.block(block).is_published() && !cache.is_keyless(block))?.key(block)
    }

    /// Starts to keep resume points, with `companions` other blocks at each block with a key, which are of the page class
    /// `ordered`; `is_dense`: each of these is a point without a tail.
    pub(crate) fn use_points(&mut self, ordered: usize, companions: usize, is_dense: bool) -> Result<()> {
        let Some(cache) = &mut self.cache else { return Ok(()) };
        memory::require(self.len.saturating_mul(Points::BYTES))?;
        cache.use_points(Points::new(self.len, self.classes, companions, is_dense), ordered);
        Ok(())
    }

    /// The resume points, if the groups have any.
    #[inline]
    pub(crate) fn points(&self) -> Option<&Points> {
        self.cache.as_ref().and_then(PrefixCache::points)
    }

    /// Link to the block before one with a key; 0 for the first, and without points.
    pub(crate) fn parent(&self, anchor: BlockId) -> u64 {
        self.cache.as_ref().map_or(0, |cache| cache.parent(anchor))
    }

    /// Notes the block before a published one.
    #[inline]
    pub(crate) fn set_parent(&mut self, anchor: BlockId, parent: u64) {
        if let Some(cache) = &mut self.cache {
            cache.set_parent(anchor, parent);
        }
    }

    /// Publishes a block in use that is found with others, not by its key; returns whether it was not published before.
    pub(crate) fn add_keyless(&mut self, block: BlockId, key: Key) -> bool {
        if self.block(block).is_published() || self.is_stranded(block) {
            return false;
        }
        let Some(cache) = &mut self.cache else { return false };
        cache.add_keyless(block, key);
        self.blocks[block.index()].set_tag(NO_KEY);
        true
    }

    /// Hangs the blocks of the other groups on a published block that lacks them.
    pub(crate) fn add_companions(&mut self, anchor: BlockId, companions: &[BlockId]) {
        if let Some(cache) = &mut self.cache {
            cache.add_companions(anchor, companions);
        }
    }

    /// Makes a resume point of published blocks in use.
    pub(crate) fn add_point(
        &mut self,
        anchor: BlockId,
        point: (&[BlockId], bool),
        before: impl Iterator<Item = BlockId>,
    ) {
        if let Some(cache) = &mut self.cache {
            // The key of one that another block took the place of is that of its bytes, but it may be found no more.
            let blocks = &self.blocks;
            let found = before.map(|block| Some(block).filter(|block| blocks[block.index()].is_published()));
            cache.add_point(anchor, point, found);
        }
    }

    /// Drops the resume point of a block, if it has one.
    pub(crate) fn drop_point(&mut self, anchor: BlockId) {
        if let Some(cache) = &mut self.cache {
            cache.drop_point(anchor);
        }
    }

    /// Checks the resume points.
    pub(crate) fn check_points(&self) -> Option<String> {
        self.cache.clone().and_then(|mut cache| cache.check_points())
    }

    /// The block that holds the bytes of a key.
    #[inline]
    pub(crate) fn find(&self, key: &Key) -> Option<BlockId> {
        self.cache.as_ref().and_then(|cache| cache.find(key))
    }

    /// The block whose key has this link.
    pub(crate) fn find_link(&self, link: u64) -> Option<BlockId> {
        self.cache.as_ref().and_then(|cache| cache.find_link(link))
    }

    /// Prefetches the memory that publishing under a key will need.
    #[inline]
    pub(crate) fn look_ahead(&self, key: &Key) {
        if let Some(cache) = &self.cache {
            cache.prefetch(&[key.tag()]);
        }
    }

    /// Publishes a block under its key, `depth` blocks into its prompt, unless another block has that key, or the pool
    /// has shrunk since the block was taken and nothing uses it.
    pub(crate) fn publish(&mut self, block: BlockId, key: Key, depth: u32) -> Published {
        if self.is_stranded(block) {
            return Published::Beyond;
        }
        let Some(cache) = &mut self.cache else { return Published::Before };
        let published = cache.publish(block, self.blocks[block.index()].tag(), key, depth);
        if published == Published::Now {
            self.blocks[block.index()].set_tag(key.tag());
        }
        published
    }

    /// Reports that the blocks published next follow this one in their prompt.
    pub(crate) fn continue_chain(&mut self, parent: Option<BlockId>) {
        if let Some(cache) = &mut self.cache {
            cache.continue_chain(parent);
        }
    }

    /// Publishes a taken, empty block under a key that no block has.
    #[inline]
    pub(crate) fn add(&mut self, block: BlockId, key: Key) {
        debug_assert!(self.find(&key).is_none() && !self.block(block).is_published());
        if let Some(cache) = &mut self.cache {
            cache.add(block, key, 0);
            self.blocks[block.index()].set_tag(key.tag());
        }
    }

    /// Forgets a block whose bytes are lost.
    pub(crate) fn unpublish(&mut self, block: BlockId) {
        if let (Some(cache), true) = (&mut self.cache, self.blocks[block.index()].is_published()) {
            cache.note_removal(block, Reason::Lost, false);
        }
        self.forget(block);
    }

    /// Forgets all keys without recording each; blocks in use stay in use.
    pub(crate) fn unpublish_all(&mut self) {
        for block in (0..).map(BlockId).take(self.blocks.len()) {
            self.forget(block);
        }
    }

    fn forget(&mut self, id: BlockId) {
        let before = self.blocks[id.index()];
        let tag = self.blocks[id.index()].take_tag();
        if !before.is_used() {
            self.orphans.extend(self.blocks[id.index()].set_tier_copy(None));
        }
        if let (Some(cache), true) = (&mut self.cache, tag != 0) {
            cache.remove(id, tag);
            self.moved(id, before);
        }
    }

    /// Takes up to `count` cached blocks of a class with one reference each, in eviction order.
    pub(crate) fn evict(&mut self, class: usize, count: usize, filling: bool, out: &mut Vec<BlockId>) {
        let end = out.len() + count;
        while out.len() < end {
            let first = out.len();
            let Some(cache) = &mut self.cache else { return };
            cache.pop_into(class, LOOK_AHEAD.min(end - first), out);
            if out.len() == first {
                return;
            }
            let (mut tags, mut keyed, have_keys) = ([0; LOOK_AHEAD], out.len() - first, cache.points().is_none());
            for (tag, &block) in tags.iter_mut().zip(&out[first..]) {
                *tag = self.blocks[block.index()].tag();
            }
            if !have_keys {
                keyed = 0;
                for (at, &block) in out[first..].iter().enumerate() {
                    tags[keyed] = tags[at];
                    keyed += usize::from(tags[at] != NO_KEY || !cache.is_keyless(block));
                }
            }
            cache.begin_eviction(&tags[..keyed]);
            self.note_all(&out[first..], Membership::Evictable, Membership::Neither);
            if have_keys {
                // Evicted blocks with keys seldom are neighbours: looking for runs costs more than it saves.
                for &block in out[first..].iter().rev() {
                    self.evict_bytes(block);
                    self.blocks[block.index()].take(filling);
                }
            } else {
                self.evict_all(&out[first..]);
                self.open(&out[first..], filling);
            }
            while let Some(block) = self.host_order().and_then(HostOrder::take_passed) {
                self.drop_popped(block, false);
            }
        }
    }

    /// Forgets the contents of a block that is being reallocated.
    pub(crate) fn evict_bytes(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        let copy = block.set_tier_copy(None);
        self.orphans.extend(copy);
        let tag = block.take_tag();
        if let (Some(cache), true) = (&mut self.cache, tag != 0) {
            cache.remove_evicted(id, tag, copy.is_some());
            self.evictions += 1;
        }
    }

    /// Detaches the cached contents of an evictable block, to reappear elsewhere later. The block becomes free. `depth`
    /// is its index in tables.
    pub(crate) fn detach_cached(&mut self, id: BlockId, depth: u32) -> Option<CachedIdentity> {
        let key = self.key(id).filter(|_| self.is_evictable(id))?;
        let identity = CachedIdentity { key, depth, parent: 0, tenant: self.tenant(id) };
        let before = self.blocks[id.index()];
        let tag = self.blocks[id.index()].take_tag();
        let copy = self.blocks[id.index()].set_tier_copy(None);
        self.orphans.extend(copy);
        if let Some(cache) = &mut self.cache {
            cache.remove(id, tag);
            cache.note_removal(id, Reason::Moved, copy.is_some());
        }
        self.moved(id, before);
        Some(identity)
    }

    /// Takes an overlappable lease on a block that was removed from the eviction order.
    pub(crate) fn lease_popped(&mut self, block: BlockId) {
        self.blocks[block.index()].add_lease(LeaseKind::OverlappableRead);
        self.note_moved(block, Membership::Evictable, Membership::Overlappable);
        let class = self.classes.of(block);
        self.sets[class].overlappable.insert(block);
        self.refresh(block.0..block.0 + 1);
    }

    /// Forgets the contents of an unused block whose only lease is overlappable.
    pub(crate) fn demote(&mut self, block: BlockId) {
        let last = Leases { overlappable: 1, ..Leases::default() };
        if self.block(block).state() == BlockState::Overlappable(last) && !self.is_beyond(block) {
            self.evict_bytes(block);
            self.refresh(block.0..block.0 + 1);
        }
    }

    /// Frees a block, if it is evictable.
    pub(crate) fn drop_cached(&mut self, block: BlockId) {
        if self.is_evictable(block) {
            self.retire(block);
            self.drop_bytes(block);
        }
    }

    /// Frees blocks of tenants beyond their quotas. Copies in other tiers are left in [`Pool::take_orphans`].
    pub(crate) fn drop_beyond_quotas(&mut self) {
        while let Some(block) = self.cache.as_mut().and_then(PrefixCache::pop_over_quota) {
            self.drop_bytes(block);
        }
    }

    /// Frees a cached block that was removed from the eviction order.
    pub(crate) fn drop_bytes(&mut self, block: BlockId) {
        let before = self.block(block);
        self.evict_bytes(block);
        self.moved(block, before);
    }

    /// Like [`Pool::drop_bytes`]; `is_copied` tells whether another tier has the bytes.
    pub(crate) fn drop_popped(&mut self, block: BlockId, is_copied: bool) {
        let tag = self.block(block).tag();
        if let Some(cache) = self.cache.as_mut().filter(|cache| !is_copied && !cache.is_keyless(block)) {
            cache.begin_eviction(&[tag]);
        }
        self.drop_bytes(block);
    }

    /// Records that the bytes of a block, evictable or not, are gone.
    pub(super) fn retire(&mut self, block: BlockId) {
        if let Some(cache) = &mut self.cache {
            cache.retire(block);
        }
    }

    /// Puts a cached block that nobody uses in its place in the chain that is being released, which is no use of it.
    pub(crate) fn reorder(&mut self, block: BlockId) {
        if let Some(cache) = &mut self.cache {
            cache.reorder(block);
        }
    }

    /// Follows a clock in seconds.
    pub(crate) fn set_now(&mut self, seconds: f64) {
        if let Some(cache) = &mut self.cache {
            cache.set_now(seconds);
        }
    }

    /// Notes that the chain released next is a turn that ends; `keys` are those of its blocks, first one first.
    pub(crate) fn end_turn(&mut self, keys: &[Key], hint: Option<Hint>) {
        if let Some(cache) = &mut self.cache {
            cache.end_turn(keys, hint);
        }
    }

    /// Puts the blocks of a conversation where a hint belongs; `keys` are those of its blocks, first one first.
    pub(crate) fn hint(&mut self, keys: &[Key], hint: Hint, blocks: &[BlockId]) {
        if let Some(cache) = &mut self.cache {
            cache.hint(keys, hint, blocks);
        }
    }

    /// Notes that the chain of a turn is released.
    pub(crate) fn end_chain(&mut self) {
        if let Some(cache) = &mut self.cache {
            cache.end_chain();
        }
    }

    /// By hint: the turns that ended with it, and what came of them.
    pub(crate) fn hint_counts(&self) -> [HintCount; Hint::ALL.len()] {
        self.cache.as_ref().map_or_else(Default::default, PrefixCache::hint_counts)
    }

    /// Begins the release of a sequence's blocks, last one first.
    #[inline]
    pub(crate) fn begin_chain(&mut self) {
        if let Some(cache) = &mut self.cache {
            cache.begin_chain();
        }
    }

    /// Reports that a block of the chain being released stays in use.
    #[inline]
    pub(super) fn hold(&mut self, block: BlockId) {
        if let Some(cache) = &mut self.cache {
            cache.hold(block);
        }
    }

    /// Raises the retention priority of a block.
    pub(crate) fn prioritise(&mut self, block: BlockId, priority: u8) {
        if let Some(cache) = &mut self.cache {
            cache.prioritise(block, priority);
        }
    }

    /// Sets the quota of a tenant, in blocks, or in bytes with several page classes; tenants are numbered from 1.
    pub(crate) fn set_quota(&mut self, tenant: u16, quota: usize) {
        let (blocks, weights) = (self.extent(), std::array::from_fn(|class| self.weight(class)));
        if let Some(cache) = &mut self.cache {
            cache.set_quota(tenant, quota, blocks, weights);
        }
    }

    /// All quotas, in the order of their tenants' numbers.
    pub(crate) fn quotas(&self) -> Vec<usize> {
        self.cache.as_ref().map_or_else(Vec::new, PrefixCache::quotas)
    }

    /// Evictable blocks of a tenant, or their bytes with several page classes.
    pub(crate) fn held_by(&self, tenant: u16) -> usize {
        self.cache.as_ref().map_or(0, |cache| cache.held_by(tenant))
    }

    /// Assigns a newly published block to a tenant.
    pub(crate) fn assign(&mut self, block: BlockId, tenant: u16) {
        if let Some(cache) = &mut self.cache {
            cache.assign(block, tenant);
        }
    }

    /// Tenant of a block, 0 for none with a quota.
    pub(crate) fn tenant(&self, block: BlockId) -> u16 {
        self.cache.as_ref().filter(|_| self.block(block).is_published()).map_or(0, |cache| cache.tenant(block))
    }

    /// Checks the quotas.
    pub(crate) fn check_quotas(&self) -> Option<String> {
        self.cache.as_ref().and_then(PrefixCache::check_quotas)
    }

    /// Starts measuring how long blocks stay cached, on a sample of them, if the pool caches.
    pub(crate) fn sample_residency(&mut self, rate: f64) {
        if let Some(cache) = &mut self.cache {
            cache.sample_residency(rate);
        }
    }

    /// Sets the current time for that measurement.
    pub(crate) fn set_time(&mut self, now: Duration) {
        if let Some(sample) = self.cache.as_mut().and_then(PrefixCache::residency_mut) {
            sample.set_time(now);
        }
    }

    /// How long the sampled blocks stayed cached; `None` before sampling starts.
    pub(crate) fn residency(&self) -> Option<&Residency> {
        self.cache.as_ref()?.residency().map(|sample| &sample.found)
    }

    /// A block that is sampled but not cached, which would be a bug.
    pub(super) fn stray_in_sample(&self) -> Option<BlockId> {
        self.cache.as_ref()?.residency()?.stray(|block| self.block(block).is_published())
    }

    /// Starts recording removals, the last `capacity` of them.
    pub(crate) fn note_removals(&mut self, capacity: usize) {
        if let Some(cache) = &mut self.cache {
            cache.note_removals(capacity);
        }
    }

    /// Pending removals, if recorded.
    pub(crate) fn removals(&mut self) -> Option<&mut Removals> {
        self.cache.as_mut().and_then(PrefixCache::removals_mut)
    }

    /// Like [`Pool::removals`], read-only.
    pub(crate) fn noted_removals(&self) -> Option<&Removals> {
        self.cache.as_ref().and_then(PrefixCache::removals)
    }

    pub(super) fn is_evictable(&self, block: BlockId) -> bool {
        self.cache.as_ref().is_some_and(|cache| cache.is_evictable(block))
    }

    pub(super) fn finds(&self, block: BlockId) -> bool {
        self.cache.as_ref().is_some_and(|cache| cache.finds(block))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{Chain, KeySpec};
    use crate::id::Tier;
    use crate::pool::Policies;
    use crate::prefix::evict::Eviction;

    fn key(n: u32) -> Key {
        Chain::new(&KeySpec::default(), 1, 0).block(&[n], &[]).unwrap()
    }

    #[test]
    fn evicted_blocks_are_no_longer_found_and_are_evicted_in_order_of_release() {
        let mut pool = Pool::new(Tier::Device, 100, true).unwrap();
        let mut blocks = Vec::new();
        pool.take(100, false, &mut blocks);
        for &block in &blocks {
            assert_eq!(pool.publish(block, key(block.0), 0), Published::Now);
        }
        blocks.reverse();
        for &block in &blocks {
            pool.release(block);
        }
        assert_eq!((pool.free(), pool.evictable(), pool.published()), (100, 100, 100));
        let mut taken = Vec::new();
        pool.take(70, false, &mut taken);
        assert_eq!(taken, blocks[..70]);
        assert!(taken.iter().all(|block| pool.find(&key(block.0)).is_none() && pool.refs(*block) == 1));
        assert_eq!((pool.evictions(), pool.published()), (70, 30));
    }

    #[test]
    fn a_point_leads_to_no_block_that_had_the_key_before_it_and_lost_it() {
        let mut pool = Pool::new(Tier::Device, 8, true).unwrap();
        pool.use_points(0, 0, false).unwrap();
        let mut blocks = Vec::new();
        pool.take(3, false, &mut blocks);
        let (former, anchor, tail) = (blocks[0], blocks[1], blocks[2]);
        assert_eq!(pool.publish(former, key(1), 0), Published::Now);
        pool.unpublish(former);
        assert_eq!(pool.publish(anchor, key(2), 1), Published::Now);
        pool.set_parent(anchor, key(1).link());
        assert!(pool.add_keyless(tail, key(9)));
        pool.add_point(anchor, (&[tail], false), [former].into_iter());
        assert!(pool.points().is_some_and(|points| points.has_point(anchor) && !points.leads_on(former)));
        assert_eq!(pool.check_points(), None);
    }

    #[test]
    fn a_key_has_one_block_and_a_block_one_key() {
        let mut pool = Pool::new(Tier::Device, 3, true).unwrap();
        pool.note_removals(9);
        let mut blocks = Vec::new();
        pool.take(3, false, &mut blocks);
        assert_eq!(pool.publish(blocks[0], key(1), 0), Published::Now);
        assert_eq!(pool.publish(blocks[0], key(1), 0), Published::Before);
        assert_eq!(pool.publish(blocks[1], key(1), 0), Published::As(blocks[0]));
        assert_eq!(pool.publish(blocks[0], key(2), 0), Published::Now);
        assert_eq!((pool.find(&key(1)), pool.find(&key(2)), pool.published()), (None, Some(blocks[0]), 1));
        pool.unpublish(blocks[0]);
        pool.unpublish(blocks[1]);
        let noted: Vec<_> = pool.removals().unwrap().take_all().1.map(|r| (r.block, r.reason)).collect();
        assert_eq!(noted, [(blocks[0], Reason::Replaced), (blocks[0], Reason::Lost)]);
    }

    #[test]
    fn a_sampled_block_records_how_long_it_stayed_and_was_unused() {
        let mut pool = Pool::new(Tier::Device, 3, true).unwrap();
        pool.sample_residency(1.0);
        let mut blocks = Vec::new();
        let at = |pool: &mut Pool, seconds| pool.set_time(Duration::from_secs(seconds));
        at(&mut pool, 1);
        pool.take(3, false, &mut blocks);
        for &block in &blocks {
            pool.publish(block, key(block.0), 0);
        }
        at(&mut pool, 3);
        pool.release_all(&blocks);
        at(&mut pool, 7);
        pool.claim(blocks[0]);
        pool.claim(blocks[0]); // in use already: no gap
        pool.release(blocks[0]);
        at(&mut pool, 8);
        pool.release(blocks[0]);
        pool.unpublish(blocks[1]);
        at(&mut pool, 20);
        pool.take(3, false, &mut Vec::new());
        let found = *pool.residency().unwrap();
        let sums = [found.lifetime, found.idle_before_evict, found.reuse_gap].map(|of| of.sum.as_secs());
        assert_eq!(sums, [19 + 19, 12 + 17, 4]);
        assert_eq!(found.lifetime.counts.iter().sum::<u64>(), 2, "lost blocks do not count");
    }

    /// Ten cached blocks, released in id order; the even ones belong to tenant 1, the others to no tenant.
    fn tenants(eviction: Eviction, quota: usize) -> Pool {
        let policies = Policies { eviction, ..Policies::default() };
        let mut pool = Pool::with_policies(Tier::Device, 10, true, policies).unwrap();
        pool.set_quota(1, quota);
        let mut blocks = Vec::new();
        pool.take(10, false, &mut blocks);
        for &block in &blocks {
            pool.publish(block, key(block.0), 0);
            pool.assign(block, u16::from(block.0 % 2 == 0));
        }
        for block in blocks {
            pool.begin_chain();
            pool.release(block);
            assert_eq!(pool.check_quotas(), None);
        }
        pool
    }

    #[test]
    fn every_policy_evicts_blocks_beyond_a_quota_first_and_the_oldest_of_them_first() {
        for eviction in Eviction::NAMED {
            let mut pool = tenants(eviction, 2);
            assert_eq!((pool.held_by(1), pool.tenant(BlockId(4)), pool.tenant(BlockId(5))), (5, 1, 0));
            let mut taken = Vec::new();
            pool.take(2, false, &mut taken);
            assert_eq!(taken, [BlockId(0), BlockId(2)], "{}", eviction.name());
            pool.drop_beyond_quotas();
            assert_eq!((pool.held_by(1), pool.free(), pool.evictable(), pool.evictions()), (2, 8, 7, 3));
            assert_eq!((pool.find(&key(4)), pool.find(&key(6))), (None, Some(BlockId(6))));
            assert_eq!(pool.check_quotas(), None);
        }
    }

    #[test]
    fn blocks_in_use_and_blocks_dropped_no_longer_count() {
        let mut pool = tenants(Eviction::Lru, 5);
        pool.claim(BlockId(8));
        pool.drop_cached(BlockId(6));
        pool.drop_cached(BlockId(8));
        assert_eq!((pool.held_by(1), pool.published()), (3, 9));
        assert_eq!(pool.evictable_blocks()[..3], [BlockId(0), BlockId(1), BlockId(2)]);
        pool.set_quota(1, 0);
        pool.drop_beyond_quotas();
        assert_eq!((pool.held_by(1), pool.published()), (0, 6));
        pool.release(BlockId(8));
        pool.drop_beyond_quotas();
        assert_eq!(pool.find(&key(8)), None);
    }
}
