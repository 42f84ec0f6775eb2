//! The prefix cache of one tier: maps keys to blocks, orders unused blocks for eviction, and records recent removals.
//!
//! Invariant: a key has one block and a block one key. Only blocks that the pool has parked can be evicted.

pub mod evict;
mod index;
mod outside;
mod points;
mod removal;
mod residency;

pub(crate) use index::grown;
pub(crate) use points::Points;
pub use removal::Reason;
pub(crate) use removal::{Removal, Removals, Ring};
pub(crate) use residency::ResidencySample;
pub use residency::{Histogram, RESIDENCY_SECONDS, Residency};

use crate::block::Block;
use crate::hash::Key;
use crate::id::BlockId;
use crate::page::{Classes, MAX_CLASSES};
use evict::{Departure, Eviction, Guide, Hint, HintCount, HostOrder, Policy, Quotas, Rank};
use index::PrefixIndex;
use std::hint::black_box;
use std::ops::Range;

/// The key of a cached block, and the tenant that owns it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CachedIdentity {
    pub(crate) key: Key,
    /// Number of blocks before it in its prompt, if known.
    pub(crate) depth: u32,
    /// Link to the block before it, 0 for the first block.
    pub(crate) parent: u64,
    /// Tenant with a quota that it belongs to, 0 for none.
    pub(crate) tenant: u16,
}

/// Result of publishing a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Published {
    Now,
    /// The block had that key already, or the pool keeps no keys.
    Before,
    /// Another block has that key; nothing was changed.
    As(BlockId),
    /// The block is unused and beyond the end of a shrunken pool; nothing was changed.
    Beyond,
}

/// A block that leaves the device's cache, for the host if it has a rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Departing {
    pub(crate) block: BlockId,
    /// None: it serves nobody.
    pub(crate) rank: Option<Rank>,
    /// Blocks of the same number are of no use without each other.
    pub(crate) unit: u64,
    /// It stays cached: the host only gets a copy.
    pub(crate) stays: bool,
}

/// Keys and eviction order of one tier's blocks.
#[derive(Debug, Clone)]
pub(crate) struct PrefixCache {
    index: PrefixIndex,
    order: Policy,
    /// The page class of the blocks in the order.
    ordered: usize,
    /// With several groups, or one that leaves blocks behind.
    points: Option<Box<Points>>,
    /// With events on: removals that no event reports yet.
    removals: Option<Box<Removals>>,
    /// Set once residency is sampled.
    residency: Option<Box<ResidencySample>>,
}

impl PrefixCache {
    /// Memory of one block, with the policy that takes the most: 24 bytes of the index, its key, 16 of the policy.
    pub(crate) const BYTES: usize = 24 + size_of::<Key>() + 16;

    pub(crate) fn new(blocks: usize, eviction: Eviction) -> Self {
        Self {
            index: PrefixIndex::new(blocks),
            order: Policy::new(eviction, blocks),
            ordered: 0,
            points: None,
            removals: None,
            residency: None,
        }
    }

    /// The cache of the host, whose eviction order continues the device's.
    pub(crate) fn of_host(blocks: usize, classes: Classes) -> Self {
        let order = Policy::Host(Box::new(HostOrder::new(blocks, classes)));
        Self { index: PrefixIndex::new(blocks), order, ordered: 0, points: None, removals: None, residency: None }
    }

    /// The host's order; `None` on the device.
    #[inline]
    pub(crate) fn host_order(&mut self) -> Option<&mut HostOrder> {
        self.order.host_mut()
    }

    /// See [`Policy::guide`].
    #[inline]
    pub(crate) fn guide(&self) -> Option<Guide> {
        self.order.guide()
    }

    /// Takes over what has happened to the host's copies: the stamp given last, and the tags of those evicted.
    #[inline]
    pub(crate) fn follow_host(&mut self, (clock, evicted): (u32, Vec<u32>)) {
        self.order.set_clock(clock);
        if !evicted.is_empty() {
            self.order.evicted(&evicted);
        }
    }

    /// Counts the blocks of the tier that evicted blocks are copied to.
    pub(crate) fn extend(&mut self, below: usize) {
        self.order.extend(below);
    }

    /// See [`Policy::restore`].
    pub(crate) fn restore(&mut self, block: BlockId, ring: u8) {
        self.order.restore(block, ring);
    }

    /// Removes the first block of the eviction order, or tells of one that the host needs besides; see
    /// [`PrefixCache::pop_departing`].
    pub(crate) fn pop_ranked(&mut self, class: Option<usize>, is_ahead: bool) -> Option<Departing> {
        if self.points.is_some() {
            return self.pop_departing(class, is_ahead);
        }
        self.order.pop_ranked().map(|(block, rank)| Departing { block, rank: Some(rank), unit: 0, stays: false })
    }

    /// Makes a block evictable that may have a copy in another tier.
    #[inline]
    pub(crate) fn park_with(&mut self, block: BlockId, state: Block) {
        match self.order.host_mut() {
            Some(order) if state.copy_on_device().is_some() => order.insert_copy(block),
            _ => self.enqueue(block),
        }
    }

    /// See [`Evictor::reorder`].
    pub(crate) fn reorder(&mut self, block: BlockId) {
        self.order.reorder(block);
    }

    /// Blocks that can be evicted.
    #[inline]
    pub(crate) fn evictable(&self) -> usize {
        self.order.len() + self.num_outside()
    }

    /// The page class of the blocks in the device's order.
    pub(crate) fn ordered(&self) -> usize {
        self.ordered
    }

    /// Blocks of a page class that can be evicted. All blocks of the device's order are of one class: that of the keys.
    #[inline]
    pub(crate) fn evictable_of(&self, class: usize) -> usize {
        if let Policy::Host(order) = &self.order {
            return order.evictable_of(class);
        }
        let ordered = if class == self.ordered { self.order.len() } else { 0 };
        ordered + self.num_outside_of(class)
    }

    /// Whether a block can be evicted.
    pub(crate) fn is_evictable(&self, block: BlockId) -> bool {
        self.order.contains(block) || self.is_outside(block)
    }

    /// Evictable blocks in eviction order.
    pub(crate) fn order(&self) -> Vec<BlockId> {
        let Some(points) = self.points() else { return self.order.order() };
        let classes = 0..points.num_classes();
        let (mut order, mut rest) = (Vec::with_capacity(self.evictable()), self.clone());
        classes.for_each(|class| rest.pop_points(class, self.evictable_of(class), &mut order));
        order
    }

    /// Whether a block belongs to a point, or to a block that has others beside it.
    pub(crate) fn is_owned(&self, block: BlockId) -> bool {
        self.points.as_deref().is_some_and(|points| points.is_owned(block))
    }

    /// Blocks that can be found.
    pub(crate) fn published(&self) -> usize {
        self.index.len() + self.num_keyless()
    }

    /// The key of a published block.
    pub(crate) fn key(&self, block: BlockId) -> Option<Key> {
        self.index.key(block).copied()
    }

    /// The block that holds the bytes of a key.
    #[inline]
    pub(crate) fn find(&self, key: &Key) -> Option<BlockId> {
        self.index.find(key)
    }

    /// The block whose key has this link.
    pub(crate) fn find_link(&self, link: u64) -> Option<BlockId> {
        self.index.find_link(link)
    }

    /// Whether a block is found, by its key or with its point.
    pub(crate) fn finds(&self, block: BlockId) -> bool {
        self.is_keyless(block) || self.index.key(block).and_then(|key| self.index.find(key)) == Some(block)
    }

    /// Prefetches the memory that a change under these tags will need, so that cache misses overlap.
    #[inline]
    pub(crate) fn prefetch(&self, tags: &[u32]) {
        black_box(tags.iter().fold(0, |all, &tag| all ^ self.index.look_ahead(tag)));
    }

    /// Publishes a block with a former key of that tag, 0 for none, unless another block has the new key.
    #[inline]
    pub(crate) fn publish(&mut self, block: BlockId, former: u32, key: Key, depth: u32) -> Published {
        if let Some(other) = self.index.find(&key) {
            return if other == block { Published::Before } else { Published::As(other) };
        }
        if former != 0 {
            if !self.take_keyless(block) {
                self.forget_popped(block, former);
            }
            self.note_removal(block, Reason::Replaced, false);
        }
        self.add(block, key, depth);
        Published::Now
    }

    /// Publishes a block without a key under one that no block has.
    #[inline]
    pub(crate) fn add(&mut self, block: BlockId, key: Key, depth: u32) {
        self.index.add(block, key);
        self.order.publish(block, depth, key.tag());
        if let Some(residency) = &mut self.residency {
            residency.published(block);
        }
    }

    /// Reports that the blocks published next follow this one in their prompt.
    pub(crate) fn continue_chain(&mut self, parent: Option<BlockId>) {
        self.order.continue_chain(parent);
    }

    /// Forgets the key of a block and removes it from the eviction order; `tag` is its key's tag.
    pub(crate) fn remove(&mut self, block: BlockId, tag: u32) {
        if !self.is_keyless(block) {
            self.index.remove(block, tag);
        }
        self.leave(block);
        if let Some(residency) = &mut self.residency {
            residency.removed(block);
        }
    }

    /// Whether unused neighbours of one class are found with others, and can be evicted, or would be.
    #[inline]
    pub(crate) fn hang(&self, run: Range<u32>) -> bool {
        self.points.as_deref().is_some_and(|points| points.hang(run))
    }

    /// Makes neighbours evictable that are found with others.
    pub(crate) fn park_run(&mut self, run: Range<u32>) {
        self.note_run(&run, false);
        if let Some(points) = self.points.as_deref_mut() {
            points.outside.insert_idle_run(run);
        }
    }

    /// Notes that such neighbours are used again; returns false, and does nothing, if one is about to leave.
    pub(crate) fn unpark_run(&mut self, run: Range<u32>) -> bool {
        let are_parked = self.points.as_deref_mut().is_some_and(|points| points.outside.remove_idle_run(run.clone()));
        if are_parked {
            self.note_run(&run, true);
        }
        are_parked
    }

    fn note_run(&mut self, run: &Range<u32>, again: bool) {
        if self.residency.is_some() {
            run.clone().map(BlockId).for_each(|block| self.note_use(block, again));
        }
    }

    /// Publishes neighbours in use that are found with others, and have no keys.
    pub(crate) fn add_keyless_run(&mut self, run: Range<u32>) {
        if let Some(points) = self.points.as_deref_mut() {
            points.add_keyless_run(run);
        }
    }

    /// Forgets popped neighbours that are being reallocated, if they were found with others and nobody records it;
    /// returns whether it did.
    pub(crate) fn remove_evicted_run(&mut self, run: Range<u32>) -> bool {
        let is_recorded = self.removals.is_some() || self.residency.is_some();
        !is_recorded && self.points.as_deref_mut().is_some_and(|points| points.forget_run(run))
    }

    /// Prefetches the memory needed to reallocate popped blocks with these tags, and informs the policy.
    #[inline]
    pub(crate) fn begin_eviction(&mut self, tags: &[u32]) {
        self.prefetch(tags);
        self.order.evicted(tags);
    }

    /// Forgets the key of a popped block that is being reallocated.
    #[inline]
    pub(crate) fn remove_evicted(&mut self, block: BlockId, tag: u32, has_copy: bool) {
        if self.points.is_none() {
            self.index.remove(block, tag);
        } else {
            self.forget_popped(block, tag);
        }
        self.note_removal(block, Reason::Evicted, has_copy);
        if let Some(residency) = &mut self.residency {
            residency.evicted(block);
        }
    }

    /// Replaces a block by another without a key.
    pub(crate) fn rename(&mut self, from: BlockId, to: BlockId, tag: u32, has_copy: bool) {
        if !self.is_keyless(from) {
            self.index.rename(from, to, tag);
        } else if let Some(key) = self.own_key(from) {
            self.index.set_key(to, key);
        }
        self.order.relocate(from, to);
        self.rename_points(from, to);
        self.note_removal(from, Reason::Moved, has_copy);
        if let Some(residency) = &mut self.residency {
            residency.removed(from);
        }
    }

    /// Records that a block is used again.
    #[inline]
    pub(crate) fn unpark(&mut self, block: BlockId) {
        self.dequeue(block);
    }

    /// Records that the bytes of a block, evictable or not, are gone.
    #[inline]
    pub(crate) fn retire(&mut self, block: BlockId) {
        self.order.remove(block, Departure::Gone);
        self.take_outside(block);
    }

    /// Removes up to `count` blocks of a class from the head of the eviction order.
    #[inline]
    pub(crate) fn pop_into(&mut self, class: usize, count: usize, out: &mut Vec<BlockId>) {
        if self.points.is_some() {
            self.pop_points(class, count, out);
        } else if let Policy::Host(order) = &mut self.order {
            out.extend((0..count).map_while(|_| order.pop_of(class)));
        } else {
            self.order.pop_into(count, out);
        }
    }

    /// See [`Policy::set_now`].
    pub(crate) fn set_now(&mut self, seconds: f64) {
        self.order.set_now(seconds);
    }

    /// See [`Policy::end_turn`].
    pub(crate) fn end_turn(&mut self, keys: &[Key], hint: Option<Hint>) {
        self.order.end_turn(keys, hint);
    }

    /// Puts the blocks of a conversation, which may be in use, where a hint belongs; `keys` are those of all
    /// its blocks.
    pub(crate) fn hint(&mut self, keys: &[Key], hint: Hint, blocks: &[BlockId]) {
        if self.order.hint(keys, hint) {
            for &block in blocks.iter().rev() {
                if self.order.contains(block) {
                    self.order.reorder(block);
                }
            }
            self.order.end_chain();
        }
    }

    /// See [`Policy::end_chain`].
    pub(crate) fn end_chain(&mut self) {
        self.order.end_chain();
    }

    /// See [`Policy::hint_counts`].
    pub(crate) fn hint_counts(&self) -> [HintCount; Hint::ALL.len()] {
        self.order.hint_counts()
    }

    /// Begins the release of a sequence's blocks, last one first.
    #[inline]
    pub(crate) fn begin_chain(&mut self) {
        self.order.begin_chain();
    }

    /// Reports that a block of the chain being released stays in use.
    #[inline]
    pub(crate) fn hold(&mut self, block: BlockId) {
        self.order.hold(block);
    }

    /// Raises the retention priority of a block.
    pub(crate) fn prioritise(&mut self, block: BlockId, priority: u8) {
        self.order.prioritise(block, priority);
    }

    /// Resizes to a pool of `blocks` blocks.
    pub(crate) fn resize(&mut self, blocks: usize) {
        self.index.grow(blocks);
        self.order.resize(blocks);
        self.resize_points(blocks);
    }

    /// Sets the quota of a tenant, in a pool of `blocks` blocks, whose weights are given by page class; tenants are numbered
    /// from 1.
    pub(crate) fn set_quota(&mut self, tenant: u16, quota: usize, blocks: usize, weights: [usize; MAX_CLASSES]) {
        self.order.set_quota(tenant, quota, blocks, weights[self.ordered]);
        self.weigh_outside(weights);
    }

    /// All quotas, in the order of their tenants' numbers.
    pub(crate) fn quotas(&self) -> Vec<usize> {
        self.order.quotas().map_or_else(Vec::new, Quotas::all)
    }

    /// Weight of a tenant's evictable blocks.
    pub(crate) fn held_by(&self, tenant: u16) -> usize {
        self.order.quotas().map_or(0, |quotas| quotas.held(tenant) + self.idle_of(tenant))
    }

    /// Assigns a newly published block to a tenant.
    pub(crate) fn assign(&mut self, block: BlockId, tenant: u16) {
        if let Some(quotas) = self.order.quotas_mut() {
            quotas.assign(block, tenant);
            self.assign_outside(block, tenant);
        }
    }

    /// Tenant of a published block, 0 for none with a quota.
    pub(crate) fn tenant(&self, block: BlockId) -> u16 {
        self.order.quotas().map_or(0, |quotas| quotas.owner(block))
    }

    /// Removes a block of a tenant over its quota from the eviction order.
    pub(crate) fn pop_over_quota(&mut self) -> Option<BlockId> {
        self.note_idle();
        let Some(block) = self.order.quotas_mut().and_then(Quotas::pop_over) else {
            return self.pop_dead_over_quota();
        };
        self.pass_popped(block);
        Some(block)
    }

    /// Checks the quotas.
    pub(crate) fn check_quotas(&self) -> Option<String> {
        self.order.quotas().and_then(Quotas::check).or_else(|| self.check_idle())
    }

    /// Notes that a published block is no longer used, or that it is used `again`.
    #[inline]
    pub(crate) fn note_use(&mut self, block: BlockId, again: bool) {
        if let Some(residency) = &mut self.residency {
            residency.note_use(block, again);
        }
    }

    /// Starts measuring how long blocks stay cached, on a sample of them.
    pub(crate) fn sample_residency(&mut self, rate: f64) {
        self.residency.get_or_insert_default().set_rate(rate);
    }

    /// The residency sample, mutable.
    pub(crate) fn residency_mut(&mut self) -> Option<&mut ResidencySample> {
        self.residency.as_deref_mut()
    }

    /// The residency sample.
    pub(crate) fn residency(&self) -> Option<&ResidencySample> {
        self.residency.as_deref()
    }

    /// Starts recording removals, the last `capacity` of them.
    pub(crate) fn note_removals(&mut self, capacity: usize) {
        self.removals = Some(Box::new(Ring::new(capacity)));
    }

    /// Pending removals, if recorded.
    pub(crate) fn removals_mut(&mut self) -> Option<&mut Removals> {
        self.removals.as_deref_mut()
    }

    /// Like [`PrefixCache::removals_mut`], read-only.
    pub(crate) fn removals(&self) -> Option<&Removals> {
        self.removals.as_deref()
    }

    /// Records that a block can no longer be found.
    #[inline]
    pub(crate) fn note_removal(&mut self, block: BlockId, reason: Reason, has_copy: bool) {
        if let Some(removals) = &mut self.removals {
            removals.push(Removal { block, reason, remaining: u8::from(has_copy) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_prompts_whose_keys_share_their_tags_each_keeps_its_point() {
        for first in [0, 4] {
            let mut cache = PrefixCache::new(8, Eviction::Lru);
            cache.use_points(Points::new(8, Classes::new(&[8]), 0, false), 0);
            for prompt in [first, 4 - first] {
                let key = |at: u32| Key::from_hash(u64::from(prompt + 1) << 32 | u64::from(at + 1), 0);
                let mut parent = 0;
                for at in 0..3 {
                    cache.add(BlockId(prompt + at), key(at), at);
                    cache.set_parent(BlockId(prompt + at), parent);
                    parent = key(at).link();
                }
                cache.add_keyless(BlockId(prompt + 3), key(9));
                cache.add_point(BlockId(prompt + 2), (&[BlockId(prompt + 3)], false), std::iter::empty());
                (0..4).rev().for_each(|at| cache.enqueue(BlockId(prompt + at)));
                assert_eq!(cache.check_points(), None);
            }
            let mut gone = Vec::new();
            cache.pop_into(0, 4, &mut gone);
            gone.sort_unstable();
            assert_eq!(gone, [0, 1, 2, 3].map(|at| BlockId(first + at)), "the prompt that was released first goes");
            assert!(cache.points().is_some_and(|points| points.has_point(BlockId(6 - first))));
            assert_eq!(cache.check_points(), None);
        }
    }
}
