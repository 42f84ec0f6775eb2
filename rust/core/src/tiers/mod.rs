//! The blocks of all tiers: copies between tiers, the blocks that prompts can find, and events about them.
//!
//! Invariant: tier copies are mutual, anything that ends a block's bytes unlinks its copy, and every findable block was
//! published by an event. No other component has mutable access to a pool.

mod check;
mod findable;
mod quota;
mod store_write_queue;

pub(crate) use store_write_queue::StoreWriteQueue;
pub use store_write_queue::{StoreWrites, Unwritten};

use crate::block::{Block, BlockState, LeaseKind, TierBlock};
use crate::error::{Result, invalid};
use crate::event::{EventBatch, Events, Publication, PublishedEvent};
use crate::group::Groups;
use crate::hash::Key;
use crate::id::{BlockId, Tier};
use crate::memory;
use crate::page::{PerClass, Shape};
use crate::placement::{BlockMap, Tracker};
use crate::pool::{Policies, Pool};
use crate::prefix::evict::{Hint, RANKS, Rank};
use crate::prefix::{CachedIdentity, Departing, Published};
use crate::transfer::Lease;
use findable::Chains;
use quota::Tenants;
use std::ops::Range;
use std::time::Duration;

/// Steps keep one block in this many, of both tiers, ready to be taken.
const RESERVE: usize = 64;

/// One block in this many, of both tiers, may be emptied for prompts that start soon, and more where the host is larger
/// than the device: a loop that no longer fits the tiers has no hits.
const EXPECTED: usize = 16;

/// The pools of the three tiers.
#[derive(Debug, Clone)]
pub(crate) struct Tiers {
    pools: [Pool; 3],
    events: Option<Box<Events>>,
    /// With a prefix store: blocks to write to it.
    write_queue: Option<Box<StoreWriteQueue>>,
    tenants: Tenants,
    /// Maximum number of evicted device blocks that a step copies to the host.
    host_copies_per_step: u32,
    /// How many the open step copies.
    host_copies: u32,
    /// Device blocks that prompts will take which start soon.
    expected: usize,
    /// Evicted blocks that are being copied, by segment or level.
    arriving: [usize; RANKS],
    /// Which blocks prompts can find.
    chains: Chains,
    /// Token slots in a block.
    block_size: u32,
    /// Whether block 0 of each tier is the null block.
    null: bool,
}

impl Tiers {
    /// Pools of these shapes; null blocks are permanently taken.
    ///
    /// # Errors
    /// More blocks than a tier can have, or than there is memory for.
    pub(crate) fn new(
        [device, host, external]: &[Shape; 3],
        block_size: u32,
        prefix_caching: bool,
        policies: Policies,
    ) -> Result<Self> {
        let pools = [
            Pool::with_shape(Tier::Device, device, prefix_caching, policies)?,
            Pool::with_shape(Tier::Host, host, false, policies)?,
            Pool::with_shape(Tier::External, external, false, policies)?,
        ];
        let null = device.has_null;
        Ok(Self {
            pools,
            events: None,
            write_queue: None,
            tenants: Tenants::default(),
            host_copies_per_step: 0,
            host_copies: 0,
            expected: 0,
            arriving: [0; RANKS],
            chains: Chains::default(),
            block_size,
            null,
        })
    }

    /// The blocks of a tier.
    #[inline]
    pub(crate) fn pool(&self, tier: Tier) -> &Pool {
        &self.pools[tier.index()]
    }

    #[cfg(test)]
    pub(crate) fn pool_mut(&mut self, tier: Tier) -> &mut Pool {
        &mut self.pools[tier.index()]
    }

    /// The blocks of the device.
    #[inline]
    pub(crate) fn device(&self) -> &Pool {
        &self.pools[0]
    }

    /// The blocks of the host.
    #[inline]
    pub(crate) fn host(&self) -> &Pool {
        &self.pools[1]
    }

    /// One block.
    #[inline]
    pub(crate) fn block(&self, (tier, block): TierBlock) -> Block {
        self.pool(tier).block(block)
    }

    /// Changes the blocks of a tier. The host's eviction order continues the device's, so each follows the other.
    #[inline]
    fn at<R>(&mut self, tier: Tier, change: impl FnOnce(&mut Pool) -> R) -> R {
        let [device, host, _] = &mut self.pools;
        if tier != Tier::Host || !host.is_caching() {
            return change(&mut self.pools[tier.index()]);
        }
        host.follow(device);
        let result = change(host);
        host.report(device);
        result
    }

    /// Takes blocks of a class, which must be available; see [`Pool::take`]. Returns whether a ticket still reads one of
    /// them.
    pub(crate) fn take(
        &mut self,
        (tier, class): (Tier, usize),
        count: usize,
        filling: bool,
        out: &mut Vec<BlockId>,
    ) -> bool {
        let overlapped = self.at(tier, |pool| pool.take_of(class, count, filling, out));
        self.unlink_orphans(tier);
        overlapped
    }

    /// An append has failed; see [`Pool::note_lack`].
    pub(crate) fn note_lack(&mut self, wanted: PerClass) {
        self.pools[0].note_lack(wanted);
    }

    /// Drops what is only cached on the device.
    pub(crate) fn drop_all_cached(&mut self) {
        self.at(Tier::Device, |pool| pool.evictable_blocks().into_iter().for_each(|block| pool.drop_cached(block)));
    }

    /// Gives classes the extents for `wanted` blocks; see [`Pool::make_room`].
    pub(crate) fn make_room(&mut self, tier: Tier, wanted: PerClass, overlappable_too: bool) {
        let lost = self.at(tier, |pool| pool.make_room(wanted, overlappable_too));
        if tier == Tier::Device && self.keeps_host_copies() {
            self.note_uncopied(lost);
        }
        self.unlink_orphans(tier);
    }

    /// Adds references to a block that has some.
    #[inline]
    pub(crate) fn share(&mut self, (tier, block): TierBlock, count: u32) {
        self.pools[tier.index()].share(block, count);
    }

    /// Takes a reference to each of some blocks.
    pub(crate) fn claim_all(&mut self, tier: Tier, blocks: &[BlockId]) {
        self.at(tier, |pool| pool.claim_all(blocks));
    }

    /// Drops references to a block that keeps others.
    pub(crate) fn unshare(&mut self, (tier, block): TierBlock, count: u32) {
        self.pools[tier.index()].unshare(block, count);
    }

    /// Takes a reference to a block that is in use or cached.
    #[inline]
    pub(crate) fn claim(&mut self, (tier, block): TierBlock) {
        self.at(tier, |pool| pool.claim(block));
    }

    /// Drops one reference.
    #[inline]
    pub(crate) fn release(&mut self, (tier, block): TierBlock) {
        self.at(tier, |pool| pool.release(block));
        self.unlink_orphans(tier);
    }

    /// Drops one reference to each block, to the last one first.
    pub(crate) fn release_all(&mut self, tier: Tier, blocks: &[BlockId]) {
        self.at(tier, |pool| pool.release_all(blocks));
        self.unlink_orphans(tier);
    }

    /// Follows a clock in seconds.
    pub(crate) fn set_now(&mut self, seconds: f64) {
        self.pools[0].set_now(seconds);
    }

    /// Notes that the chain released next is a turn that ends; `keys` are those of its blocks, first one first.
    pub(crate) fn end_turn(&mut self, keys: &[Key], hint: Option<Hint>) {
        self.pools[0].end_turn(keys, hint);
    }

    /// Puts device blocks of a conversation where a hint belongs; `keys` are those of its blocks, first one first.
    pub(crate) fn hint(&mut self, keys: &[Key], hint: Hint, blocks: &[BlockId]) {
        self.pools[0].hint(keys, hint, blocks);
    }

    /// Notes that the blocks of a turn are released.
    pub(crate) fn end_chain(&mut self) {
        self.pools[0].end_chain();
    }

    /// Begins the release of a sequence's blocks, last one first; `blocks` are those on the device with a retention
    /// priority.
    pub(crate) fn begin_release(&mut self, blocks: &[BlockId], priority: u8) {
        let pool = &mut self.pools[0];
        pool.begin_chain();
        for &block in blocks {
            pool.prioritise(block, priority);
        }
    }

    /// Takes a lease, for which there is room.
    pub(crate) fn lease(&mut self, (tier, block): TierBlock, kind: LeaseKind) {
        self.at(tier, |pool| pool.lease(block, kind));
    }

    /// Takes a lease on a cached block; see [`Pool::lease_cached`].
    pub(crate) fn lease_cached(&mut self, (tier, block): TierBlock, kind: LeaseKind) {
        self.at(tier, |pool| pool.lease_cached(block, kind));
    }

    /// Ends a lease.
    pub(crate) fn end_lease(&mut self, (tier, block): TierBlock, kind: LeaseKind) {
        self.at(tier, |pool| pool.end_lease(block, kind));
    }

    /// Ends a lease on each of some neighbours, on the last one first.
    #[inline]
    pub(crate) fn end_leases(&mut self, tier: Tier, run: Range<u32>, kind: LeaseKind) {
        self.at(tier, |pool| pool.end_leases(run, kind));
    }

    /// Puts leases in place of the references to private neighbours; see [`Pool::depart`].
    #[inline]
    pub(crate) fn depart(&mut self, tier: Tier, run: Range<u32>, reads: LeaseKind) {
        self.at(tier, |pool| pool.depart(run, reads));
    }

    /// Links two blocks that hold the same bytes as copies of each other, and of no others.
    pub(crate) fn link(&mut self, a: TierBlock, b: TierBlock) {
        for (one, other) in [(a, b), (b, a)] {
            if let Some(former) = self.set_copy(one, Some(other)).filter(|&former| former != other) {
                self.set_copy(former, None);
            }
        }
    }

    /// Removes a block's link to its copy.
    pub(crate) fn unlink(&mut self, block: TierBlock) {
        if let Some(copy) = self.set_copy(block, None) {
            self.set_copy(copy, None);
        }
    }

    fn set_copy(&mut self, (tier, block): TierBlock, copy: Option<TierBlock>) -> Option<TierBlock> {
        self.at(tier, |pool| pool.set_tier_copy(block, copy))
    }

    /// Unlinks the copies of blocks whose bytes are gone.
    #[inline]
    fn unlink_orphans(&mut self, tier: Tier) {
        for copy in self.pools[tier.index()].take_orphans() {
            self.set_copy(copy, None);
        }
    }

    /// Reports that the device blocks published next follow this one in their prompt.
    #[inline]
    pub(crate) fn continue_chain(&mut self, parent: Option<BlockId>) {
        self.pools[0].continue_chain(parent);
    }

    /// Publishes a block whose tokens are computed, with an event if events are on.
    pub(crate) fn publish(
        &mut self,
        at: TierBlock,
        identity: CachedIdentity,
        publication: impl FnOnce() -> Option<Publication>,
    ) -> Published {
        let published = self.publish_silently(at, identity);
        if published == Published::Now {
            if self.events.is_some() || self.write_queue.is_some() {
                if let Some(publication) = publication() {
                    self.note_published(at.0, &publication);
                }
            }
        } else if let (Published::As(_), Some(write_queue)) = (published, &mut self.write_queue) {
            write_queue.note_hit(identity.key);
        }
        published
    }

    fn note_published(&mut self, tier: Tier, publication: &Publication) {
        if let Some(write_queue) = &mut self.write_queue {
            let pools = &self.pools;
            write_queue.note_computed(publication, |key, block| find_cached(pools, key, block).is_some());
        }
        if let Some(events) = &mut self.events {
            events.stored(&mut self.pools, tier, publication);
        }
    }

    /// Publishes a block that came from a prefix store; returns whether it did. Quotas do not apply on the host.
    pub(crate) fn publish_loaded(
        &mut self,
        at: TierBlock,
        identity: CachedIdentity,
        publication: &Publication,
    ) -> bool {
        let tenant = if at.0 == Tier::Device { identity.tenant } else { 0 };
        let is_published = self.publish_silently(at, CachedIdentity { tenant, ..identity }) == Published::Now;
        if let Some(write_queue) = &mut self.write_queue {
            let pools = &self.pools;
            write_queue.note_loaded(publication, |key, block| find_cached(pools, key, block).is_some());
        }
        if let (true, Some(events)) = (is_published, &mut self.events) {
            events.stored(&mut self.pools, at.0, publication);
        }
        is_published
    }

    /// Starts queueing blocks for a prefix store.
    pub(crate) fn use_write_queue(&mut self, writes: StoreWrites, groups: Groups) {
        let blocks = self.device().len().saturating_add(self.host().len());
        self.write_queue = Some(Box::new(StoreWriteQueue::new(writes, groups, blocks)));
    }

    /// Where a recorded block is, for the store: on the device or the host.
    pub(crate) fn find_queued(&self, key: &Key) -> Option<TierBlock> {
        let block = self.write_queue()?.published_as(key)?;
        find_cached(&self.pools, key, block)
    }

    /// The queue of blocks for a prefix store.
    #[inline]
    pub(crate) fn write_queue(&self) -> Option<&StoreWriteQueue> {
        self.write_queue.as_deref()
    }

    /// Like [`Tiers::write_queue`], mutable.
    #[inline]
    pub(crate) fn write_queue_mut(&mut self) -> Option<&mut StoreWriteQueue> {
        self.write_queue.as_deref_mut()
    }

    /// Publishes a copy of a published block; returns whether it did, see [`Pool::publish`].
    pub(crate) fn publish_copy(
        &mut self,
        at: TierBlock,
        identity: CachedIdentity,
        event: Option<PublishedEvent>,
        rank: Option<Rank>,
    ) -> bool {
        let is_published = self.publish_silently(at, identity) == Published::Now;
        match (at, rank.filter(|_| is_published)) {
            ((Tier::Host, copy), Some(rank)) => self.set_rank(copy, rank),
            ((_, block), Some(rank)) => self.restore(block, rank.ring),
            (_, None) => {}
        }
        if let (true, Some(events), Some(event)) = (is_published, &mut self.events, event) {
            events.copied(&mut self.pools, at, event, self.block_size);
        }
        is_published
    }

    #[inline]
    fn publish_silently(&mut self, (tier, block): TierBlock, identity: CachedIdentity) -> Published {
        let published = self.at(tier, |pool| pool.publish(block, identity.key, identity.depth));
        if published == Published::Now {
            if tier == Tier::Device {
                self.pools[0].set_parent(block, identity.parent);
            }
            if tier == Tier::Device && self.num_tenants() > 0 {
                self.pools[0].assign(block, identity.tenant);
            }
            if self.keeps_host_copies() {
                self.chains.set(tier, block, identity.parent);
                self.join_copies(&identity.key);
            }
        }
        published
    }

    /// Starts to keep resume points on the device; see [`Pool::use_points`].
    pub(crate) fn use_points(&mut self, ordered: usize, companions: usize, is_dense: bool) -> Result<()> {
        self.pools[0].use_points(ordered, companions, is_dense)
    }

    /// Publishes device blocks in use that are found with others, with events if events are on.
    fn publish_keyless(
        &mut self,
        (anchor, blocks): (BlockId, &[BlockId]),
        key: impl Fn(usize) -> Key,
        publication: impl Fn(usize) -> Option<Publication>,
    ) {
        self.assign_to_tenant(anchor, blocks);
        if !self.names_keyless() {
            self.pools[0].add_keyless_all(blocks);
            return;
        }
        let before = self.device().key(anchor).map_or(0, |key| key.link());
        for (at, &block) in blocks.iter().enumerate() {
            let is_new = self.pools[0].add_keyless(block, key(at));
            if self.keeps_host_copies() && self.device().is_keyless(block) {
                self.chains.set(Tier::Device, block, before);
            }
            if is_new && (self.events.is_some() || self.write_queue.is_some()) {
                self.note_keyless(key(at), publication(at));
            }
        }
    }

    /// Whether anything asks for the keys of blocks that are found with others: host, store or events.
    pub(crate) fn names_keyless(&self) -> bool {
        self.keeps_host_copies() || self.write_queue.is_some() || self.events.is_some()
    }

    /// Assigns blocks to the tenant of the one that they hang on. Those that already hang on another one stay with its
    /// tenant: what was published before a tenant had a quota does not count, and may be kept for longer.
    fn assign_to_tenant(&mut self, anchor: BlockId, blocks: &[BlockId]) {
        if self.num_tenants() > 0 {
            let tenant = self.device().tenant(anchor);
            for &block in blocks {
                if !self.device().is_keyless(block) {
                    self.pools[0].assign(block, tenant);
                }
            }
        }
    }

    /// Notes the publication of a block that is found with others.
    fn note_keyless(&mut self, key: Key, publication: Option<Publication>) {
        let Some(publication) = publication else { return };
        // What was loaded from the host was written when it was computed.
        if let (Some(write_queue), true) = (&mut self.write_queue, self.pools[1].find(&key).is_some()) {
            write_queue.note_moved(key, publication.block);
            write_queue.note_hit(key);
            if let Some(events) = &mut self.events {
                events.stored(&mut self.pools, Tier::Device, &publication);
            }
        } else {
            self.note_published(Tier::Device, &publication);
        }
    }

    /// Hangs the blocks of the other groups on a published device block that lacks them.
    pub(crate) fn add_companions(
        &mut self,
        anchor: BlockId,
        companions: &[BlockId],
        key: impl Fn(usize) -> Key,
        publication: impl Fn(usize) -> Option<Publication>,
    ) {
        self.publish_keyless((anchor, companions), key, publication);
        self.pools[0].add_companions(anchor, companions);
    }

    /// Makes a resume point of device blocks in use, behind a published one; `before` are the published ones before it,
    /// last one first.
    pub(crate) fn add_point(
        &mut self,
        anchor: BlockId,
        (tail, is_junction): (&[BlockId], bool),
        before: impl Iterator<Item = BlockId>,
        key: impl Fn(usize) -> Key,
        publication: impl Fn(usize) -> Option<Publication>,
    ) {
        self.publish_keyless((anchor, tail), key, publication);
        self.pools[0].add_point(anchor, (tail, is_junction), before);
    }

    /// Drops the resume point of a device block, if it has one.
    pub(crate) fn drop_point(&mut self, anchor: BlockId) {
        self.pools[0].drop_point(anchor);
    }

    /// Links the device and host blocks of a key, if both exist and neither is linked.
    fn join_copies(&mut self, key: &Key) {
        let [device, host, _] = &self.pools;
        if let (Some(one), Some(other)) = (device.find(key), host.find(key)) {
            if device.block(one).tier_copy().is_none() && host.block(other).tier_copy().is_none() {
                self.link((Tier::Device, one), (Tier::Host, other));
            }
        }
    }

    /// Updates the peak, as merging blocks may have raised the number in use.
    pub(crate) fn note_peak(&mut self) {
        self.pools[0].note_peak();
    }

    /// Forgets a block whose bytes did not land.
    pub(crate) fn lose(&mut self, block: TierBlock) {
        self.unlink(block);
        self.pools[block.0.index()].unpublish(block.1);
    }

    /// Starts keeping host copies of published blocks; a step copies at most `per_step` on its own.
    pub(crate) fn keep_host_copies(&mut self, per_step: u32) -> Result<()> {
        let (device, host, null) = (self.device(), self.host(), usize::from(self.null));
        if (0..host.num_classes()).any(|class| host.most_of(class) == 0) {
            let must = format!("at least {} with PrefixCaching(host=True)", null + 1);
            return Err(invalid("host_blocks", host.len() as i128, must));
        }
        // Blocks that are found with others have no keys until there are host copies.
        let fits = device.is_caching() && host.is_idle() && (device.points().is_none() || device.published() == 0);
        if !fits || self.events.is_some() || self.keeps_host_copies() {
            let must = "none in use, with prefix caching on, before events are recorded, and only once".to_owned();
            return Err(invalid("host blocks of a prefix cache", host.len() as i128, must));
        }
        let [device, host, _] = &mut self.pools;
        host.start_caching(device)?;
        self.host_copies_per_step = per_step;
        self.chains.follow();
        Ok(())
    }

    /// Device blocks of a class that steps keep empty, or are copying to the host. Emptying them early costs hits once the
    /// host is full, so it is a small part of both tiers then.
    pub(crate) fn reserve(&self, class: usize) -> usize {
        let [device, host] = [self.device(), self.host()].map(|pool| pool.present(class));
        ((device + host) / RESERVE).max(self.host().empty_of(class)).min(device / 8)
    }

    /// Whether prompts find host copies.
    #[inline]
    pub(crate) fn keeps_host_copies(&self) -> bool {
        self.pools[1].is_caching()
    }

    /// Forgets everything that is cached, unless a block is in use; returns whether it did.
    pub(crate) fn reset_cache(&mut self) -> bool {
        let caching = if self.keeps_host_copies() { &[Tier::Device, Tier::Host][..] } else { &[Tier::Device] };
        if caching.iter().any(|tier| !self.pool(*tier).is_idle()) {
            return false;
        }
        if let Some(write_queue) = &mut self.write_queue {
            write_queue.clear();
        }
        for &tier in caching {
            self.pools[tier.index()].unpublish_all();
            self.unlink_orphans(tier);
            if let Some(events) = &mut self.events {
                events.cleared(&mut self.pools, tier);
            }
        }
        true
    }

    /// Removes the first device block from the eviction order, with its rank; the caller must lease or drop it. See
    /// [`Pool::pop_ranked`].
    pub(crate) fn pop_ranked(&mut self, class: Option<usize>, is_ahead: bool) -> Option<Departing> {
        self.pools[0].pop_ranked(class, is_ahead)
    }

    /// The host does not get all of what is leaving: the rest serves nobody.
    pub(crate) fn stop_departing(&mut self) {
        self.pools[0].stop_departing();
    }

    /// Gives a host block the rank that its bytes have, or had, on the device.
    pub(crate) fn set_rank(&mut self, copy: BlockId, rank: Rank) {
        self.at(Tier::Host, |host| host.host_order().map(|order| order.set_rank(copy, rank)));
    }

    /// Makes a cached block the last to be evicted, on the host of a segment or level from which it goes after blocks of
    /// `ring`; returns that.
    pub(crate) fn touch(&mut self, (tier, block): TierBlock, ring: Option<u8>) -> Option<u8> {
        if tier == Tier::Host {
            let rank = Rank { ring: self.host_join(block, ring), stamp: 0 };
            self.set_rank(block, rank);
            return Some(rank.ring);
        }
        if self.block((tier, block)).state() == BlockState::Cached {
            self.claim((tier, block));
            self.release((tier, block));
        }
        ring
    }

    /// The segment or level of a host block.
    pub(crate) fn host_ring(&mut self, copy: BlockId) -> u8 {
        self.pools[1].host_order().map_or(0, |order| order.ring(copy))
    }

    /// The ring that a host block goes to, if blocks of `ring` depend on it.
    fn host_join(&mut self, copy: BlockId, ring: Option<u8>) -> u8 {
        self.pools[1].host_order().map_or(0, |order| order.join(copy, ring))
    }

    /// Notes that a device block was loaded from the host, where it had this segment or level.
    pub(crate) fn restore(&mut self, block: BlockId, ring: u8) {
        self.pools[0].restore(block, ring);
    }

    /// Whether a device block of this class and rank is copied to the host: there is an empty block, or one that would be
    /// evicted first if both tiers were one pool.
    pub(crate) fn has_host_room(&mut self, class: usize, rank: Rank) -> bool {
        let host = self.host();
        if host.free_in(class) == 0 {
            return false;
        }
        // What is on its way to the host cannot be evicted. It may come after this block in its prompt, unless it is of a
        // later segment.
        if host.empty_of(class) > 0 {
            return true;
        }
        let arriving = self.arriving;
        self.at(Tier::Host, |host| {
            host.host_order().is_some_and(|order| {
                let mut rings = (0u8..).zip(arriving).filter(|&(_, count)| count > 0);
                rings.any(|(ring, _)| order.may_follow(ring, rank.ring)) || !order.is_first(rank, class)
            })
        })
    }

    /// How many more evicted blocks the open step may copy.
    pub(crate) fn host_copies_left(&self) -> usize {
        self.host_copies_per_step.saturating_sub(self.host_copies) as usize
    }

    /// Counts copied blocks of the open step.
    pub(crate) fn note_host_copies(&mut self, count: usize) {
        self.host_copies = self.host_copies.saturating_add(u32::try_from(count).unwrap_or(u32::MAX));
    }

    /// Announces device blocks that prompts will take which start soon; holds for the open step.
    pub(crate) fn expect(&mut self, count: usize) {
        let class = self.device().keyed_class();
        let [device, host] = [self.device(), self.host()].map(|pool| pool.present(class));
        self.expected = count.min(((device + host) / EXPECTED).max(host.saturating_sub(device) / 2));
    }

    /// The announced blocks, once.
    pub(crate) fn take_expected(&mut self) -> PerClass {
        PerClass::of(self.device().keyed_class(), std::mem::take(&mut self.expected))
    }

    /// Counts those of the next step from 0.
    pub(crate) fn end_host_copies(&mut self) {
        self.host_copies = 0;
    }

    /// Ends the leases on an evicted block and on its copy, which has arrived or is lost.
    pub(crate) fn end_eviction(&mut self, leases: [Lease; 2], ring: u8) {
        for lease in leases {
            self.end_lease((lease.tier, lease.block), lease.kind);
        }
        self.arriving[usize::from(ring)] -= 1;
    }

    /// Leases a popped block to device work that copies it to the host.
    pub(crate) fn lease_popped(&mut self, block: BlockId, ring: u8) {
        self.arriving[usize::from(ring)] += 1;
        self.pools[0].lease_popped(block);
    }

    /// Frees a popped block. Unless the host has its bytes, they are gone, which its policy learns.
    pub(crate) fn drop_popped(&mut self, block: BlockId, is_copied: bool) {
        self.pools[0].drop_popped(block, is_copied);
        self.unlink_orphans(Tier::Device);
    }

    /// Forgets the contents of an unused device block whose only lease is overlappable.
    pub(crate) fn demote(&mut self, block: BlockId) {
        self.pools[0].demote(block);
        self.unlink_orphans(Tier::Device);
    }

    /// Frees an evictable block, if it is one.
    pub(crate) fn drop_cached(&mut self, (tier, block): TierBlock) {
        self.at(tier, |pool| pool.drop_cached(block));
        self.unlink_orphans(tier);
    }

    /// Keeps the last `capacity` events from now on.
    pub(crate) fn record_events(&mut self, capacity: usize) -> Result<()> {
        if !self.pools[0].is_caching() || self.pools[0].published() > 0 || self.events.is_some() {
            let must = "set only once, while prefix caching is on and its cache is empty".to_owned();
            return Err(invalid("number of events", capacity as i128, must));
        }
        self.events = Some(Box::new(Events::new(capacity, &mut self.pools)?));
        Ok(())
    }

    /// Starts measuring how long blocks stay cached, on a sample of them.
    pub(crate) fn sample_residency(&mut self, rate: f64) {
        self.pools.iter_mut().for_each(|pool| pool.sample_residency(rate));
    }

    /// Sets the current time.
    pub(crate) fn set_time(&mut self, now: Duration) {
        self.pools.iter_mut().for_each(|pool| pool.set_time(now));
    }

    /// Takes all queued events.
    pub(crate) fn take_events(&mut self) -> EventBatch {
        self.events.as_mut().map(|events| events.take(&mut self.pools)).unwrap_or_default()
    }

    /// The event that published a block, with events on.
    pub(crate) fn published_event(&self, (tier, block): TierBlock) -> Option<PublishedEvent> {
        self.events.as_ref().map(|events| events.of(tier, block))
    }

    /// Resizes the device to `blocks` blocks, at most [`MAX_BLOCKS`](crate::block::MAX_BLOCKS).
    pub(crate) fn resize_device(&mut self, blocks: usize) -> Result<()> {
        self.pools[0].require_growth(blocks)?;
        if self.events.is_some() {
            memory::require_items::<PublishedEvent>(blocks.saturating_mul(2))?;
        }
        if self.keeps_host_copies() {
            memory::require_items::<u64>(blocks.saturating_mul(2))?; // the link to the block before each
        }
        self.pools[0].resize(blocks);
        self.unlink_orphans(Tier::Device);
        if let Some(events) = &mut self.events {
            events.grow(&self.pools);
        }
        Ok(())
    }
}

impl Tiers {
    /// Resizes the device's page classes; see [`Pool::resize_classes`].
    pub(crate) fn resize_classes(&mut self, blocks: PerClass, extents: usize) {
        self.pools[0].resize_classes(blocks, extents);
        self.unlink_orphans(Tier::Device);
    }
}

/// Where device or host have a key. `block` is where it was published, without a key if it is found with others; if it
/// belongs to no point any longer, it is worth nothing.
fn find_cached([device, host, _]: &[Pool; 3], key: &Key, block: BlockId) -> Option<TierBlock> {
    let on_device = device.find(key).or_else(|| Some(block).filter(|&block| device.is_owned_as(block, key)));
    on_device.map(|block| (Tier::Device, block)).or_else(|| host.find(key).map(|block| (Tier::Host, block)))
}

/// Moves within the device.
impl Tiers {
    /// Starts tracking the placement of the device's blocks; `written` are the blocks that the open step writes.
    pub(crate) fn track_moves(&mut self, written: impl FnOnce(&Pool) -> Vec<BlockId>) -> Result<()> {
        self.pools[0].track_moves(self.null, written)
    }

    /// The device's tracker, if tracking has started, and the blocks that it follows.
    #[inline]
    pub(crate) fn tracker_mut(&mut self) -> Option<(&mut Tracker, &[Block])> {
        self.pools[0].tracker_mut()
    }

    /// The placement of the device's blocks, recomputed if it is not tracked.
    pub(crate) fn survey(&self) -> Result<BlockMap> {
        self.pools[0].survey(self.null)
    }

    /// Begins a move of a device block into a hole.
    pub(crate) fn begin_move(&mut self, from: BlockId, to: BlockId) {
        self.pools[0].begin_move(from, to);
    }

    /// Begins a move of a device block into one that was taken to be filled.
    pub(crate) fn begin_move_to_taken(&mut self, from: BlockId, to: BlockId) {
        self.pools[0].begin_move_to_taken(from, to);
    }

    /// Cancels a move and frees its target: the source stays.
    pub(crate) fn cancel_move(&mut self, from: BlockId, to: BlockId) {
        if let Some((tracker, blocks)) = self.tracker_mut().filter(|(tracker, _)| tracker.moves_to(from, to)) {
            tracker.stay(from, blocks);
        }
        self.give_back(to);
    }

    /// Frees the target of a cancelled move.
    pub(crate) fn give_back(&mut self, to: BlockId) {
        self.pools[0].give_back(to);
    }

    /// Finishes a valid move: the target takes over the source's state.
    pub(crate) fn finish_move(&mut self, from: BlockId, to: BlockId) {
        let event = self.published_event((Tier::Device, from)).filter(|_| self.device().block(from).is_published());
        self.chains.rename(from, to);
        if let (Some(write_queue), Some(key)) = (&mut self.write_queue, self.pools[0].own_key(from)) {
            write_queue.note_moved(key, to);
        }
        if let Some(copy) = self.pools[0].finish_move(from, to) {
            self.link((Tier::Device, to), copy);
        }
        if let (Some(events), Some(event)) = (&mut self.events, event) {
            events.copied(&mut self.pools, (Tier::Device, to), event, self.block_size);
        }
    }

    /// Detaches a cached block's contents before another block moves in, and takes a hole for them. `depth` is its
    /// index in tables.
    pub(crate) fn detach_cached(&mut self, from: BlockId, to: BlockId, depth: u32) -> Option<CachedIdentity> {
        let parent = self.parent((Tier::Device, from)).max(self.device().parent(from));
        let Some(identity) = self.pools[0].detach_cached(from, depth) else {
            // It has no key, and goes with what it hangs on.
            self.drop_cached((Tier::Device, from));
            return None;
        };
        self.unlink_orphans(Tier::Device);
        self.pools[0].take_target(to);
        Some(CachedIdentity { parent, ..identity })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_one_copy_and_none_once_that_is_released() {
        let mut tiers =
            Tiers::new(&[4; 3].map(|blocks| Shape::single(blocks, false)), 1, false, Policies::default()).unwrap();
        let mut blocks = Vec::new();
        tiers.take((Tier::Device, 0), 3, false, &mut blocks);
        tiers.take((Tier::Host, 0), 1, false, &mut Vec::new());
        let host = (Tier::Host, BlockId(0));
        tiers.link((Tier::Device, blocks[0]), host);
        tiers.link((Tier::Device, blocks[1]), host);
        let copy = |tiers: &Tiers, block| tiers.block(block).tier_copy();
        assert_eq!(copy(&tiers, (Tier::Device, blocks[0])), None);
        assert_eq!(copy(&tiers, host), Some((Tier::Device, blocks[1])));
        tiers.release_all(Tier::Device, &blocks);
        assert_eq!((copy(&tiers, host), tiers.device().free()), (None, 4));
    }
}
