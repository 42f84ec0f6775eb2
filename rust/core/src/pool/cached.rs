//! What a pool remembers of cached blocks, and how it gives them out again.

use super::{Pool, Published};
use crate::error::Result;
use crate::event::Reason;
use crate::evict::{Departure, Eviction, Policy};
use crate::hash::Key;
use crate::id::BlockId;
use crate::memory;
use crate::prefix::PrefixIndex;
use std::hint::black_box;

/// What a prompt finds a block by, and whose it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CachedIdentity {
    pub(crate) key: Key,
    /// Blocks of its prompt before it, as far as is known.
    depth: u32,
    tenant: u16,
}

/// Blocks evicted at a time: their memory is read ahead, so that cache misses overlap.
const LOOK_AHEAD: usize = 128;

/// What is published of a pool, and in which order it goes.
#[derive(Debug, Clone)]
pub(super) struct Cache {
    pub(super) index: PrefixIndex,
    pub(super) policy: Policy,
}

impl Cache {
    /// Memory of one block, with the policy that takes the most: 24 bytes of the index, its key, 13 of the policy.
    pub(super) const BYTES: usize = 24 + size_of::<Key>() + 13;

    pub(super) fn new(blocks: usize, eviction: Eviction) -> Self {
        Self { index: PrefixIndex::new(blocks), policy: Policy::new(eviction, blocks) }
    }
}

impl Pool {
    /// Lets blocks be published from now on; the least recently used goes first.
    ///
    /// # Errors
    /// There is no memory for that.
    pub(crate) fn start_caching(&mut self) -> Result<()> {
        memory::require(self.len.saturating_mul(Cache::BYTES))?;
        self.cache = Some(Cache::new(self.len, Eviction::Lru));
        Ok(())
    }

    /// Cached blocks that nothing references and nothing leases.
    #[must_use]
    pub fn evictable(&self) -> usize {
        self.cache.as_ref().map_or(0, |cache| cache.policy.len())
    }

    /// Those blocks, in the order in which they would be given out; nothing is taken.
    #[must_use]
    pub fn evictable_blocks(&self) -> Vec<BlockId> {
        self.cache.as_ref().map_or_else(Vec::new, |cache| cache.policy.order())
    }

    /// Blocks that can be found by their keys.
    #[must_use]
    pub fn published(&self) -> usize {
        self.cache.as_ref().map_or(0, |cache| cache.index.len())
    }

    /// Cached blocks that were given out again.
    #[must_use]
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Most blocks that were not free at once.
    #[must_use]
    pub fn peak(&self) -> usize {
        self.peak
    }

    /// Key by which a block can be found.
    pub(crate) fn key(&self, block: BlockId) -> Option<Key> {
        let cache = self.cache.as_ref().filter(|_| self.block(block).is_published())?;
        cache.index.key(block).copied()
    }

    /// Takes cached blocks with one reference each, in the policy's order; as many as there are.
    pub(super) fn evict(&mut self, count: usize, filling: bool, out: &mut Vec<BlockId>) {
        let end = out.len() + count;
        while out.len() < end {
            let first = out.len();
            let Some(cache) = &mut self.cache else { return };
            cache.policy.pop_into(LOOK_AHEAD.min(end - first), out);
            if out.len() == first {
                return;
            }
            let mut tags = [0; LOOK_AHEAD];
            for (tag, block) in tags.iter_mut().zip(&out[first..]) {
                *tag = self.blocks[block.index()].tag();
            }
            let tags = &tags[..out.len() - first];
            black_box(tags.iter().fold(0, |all, &tag| all ^ cache.index.look_ahead(tag)));
            for &block in &out[first..] {
                self.evict_bytes(block);
                self.blocks[block.index()].take(filling);
            }
        }
    }

    /// Forgets what a block holds that is being given out again.
    pub(crate) fn evict_bytes(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        let copy = block.set_tier_copy(None);
        self.orphans.extend(copy);
        let tag = block.take_tag();
        if let (Some(cache), true) = (&mut self.cache, tag != 0) {
            cache.index.remove(id, tag);
            self.evictions += 1;
            self.note_removal(id, Reason::Evicted, copy);
        }
    }

    /// Takes out of an evictable block what can be found there, to be found elsewhere later. The block is free.
    pub(crate) fn detach_cached(&mut self, id: BlockId) -> Option<CachedIdentity> {
        let key = self.key(id).filter(|_| self.is_evictable(id))?;
        let depth = Some(self.hint(id).index).filter(|&index| index != u32::MAX).unwrap_or(0);
        let identity = CachedIdentity { key, depth, tenant: self.tenant(id) };
        self.retire(id);
        let before = self.blocks[id.index()];
        let tag = self.blocks[id.index()].take_tag();
        let copy = self.blocks[id.index()].set_tier_copy(None);
        self.orphans.extend(copy);
        if let Some(cache) = &mut self.cache {
            cache.index.remove(id, tag);
        }
        self.note_removal(id, Reason::Moved, copy);
        self.moved(id, before);
        Some(identity)
    }

    /// Publishes a block that was filled for that and is nobody's; returns whether it did. It does not if another block has
    /// the key by now, or if the block is beyond the pool's end.
    pub(crate) fn attach_cached(&mut self, block: BlockId, identity: CachedIdentity) -> bool {
        let CachedIdentity { key, depth, tenant } = identity;
        let is_cached = !self.is_beyond(block) && self.publish(block, key, depth) == Published::Now;
        if is_cached && tenant != 0 {
            self.assign(block, tenant);
        }
        is_cached
    }

    /// Tells the policy that the bytes of a block are gone; returns whether the block could be evicted.
    pub(super) fn retire(&mut self, block: BlockId) -> bool {
        self.cache.as_mut().is_some_and(|cache| cache.policy.remove(block, Departure::Gone))
    }

    /// Tells the policy that a sequence's blocks are released from now on, the last one first.
    pub(crate) fn begin_chain(&mut self) {
        if let Some(cache) = &mut self.cache {
            cache.policy.begin_chain();
        }
    }

    /// Tells the policy that a block of the chain being released stays in use.
    #[inline]
    pub(super) fn hold(&mut self, block: BlockId) {
        if let Some(cache) = &mut self.cache {
            cache.policy.hold(block);
        }
    }

    /// Tells the policy that a user of a block wants it kept.
    pub(crate) fn prioritise(&mut self, block: BlockId, priority: u8) {
        if let Some(cache) = &mut self.cache {
            cache.policy.prioritise(block, priority);
        }
    }

    /// The block that holds the bytes of a key.
    #[inline]
    pub(crate) fn find(&self, key: &Key) -> Option<BlockId> {
        self.cache.as_ref().and_then(|cache| cache.index.find(key))
    }

    /// Reads the memory that publishing under a key is going to need.
    #[inline]
    pub(crate) fn look_ahead(&self, key: &Key) {
        if let Some(cache) = &self.cache {
            black_box(cache.index.look_ahead(key.tag()));
        }
    }

    pub(super) fn is_evictable(&self, block: BlockId) -> bool {
        self.cache.as_ref().is_some_and(|cache| cache.policy.contains(block))
    }

    pub(super) fn finds(&self, block: BlockId) -> bool {
        let index = self.cache.as_ref().map(|cache| &cache.index);
        index.is_some_and(|index| index.key(block).and_then(|key| index.find(key)) == Some(block))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{Chain, KeySpec};
    use crate::id::Tier;

    fn key(n: u32) -> Key {
        Chain::new(&KeySpec::default(), 1, 0).block(&[n], &[]).unwrap()
    }

    #[test]
    fn evicted_blocks_are_no_longer_found_and_come_in_the_order_of_their_release() {
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
}
