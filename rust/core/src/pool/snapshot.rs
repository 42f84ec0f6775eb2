//! What of a pool outlives the process: references come from the tables, and a pool at rest has no leases.

use super::{Policies, Pool};
use crate::block::{Block, MAX_BLOCKS, Membership, TierBlock};
use crate::hash::Key;
use crate::id::{BlockId, Tier};
use crate::prefix::evict::Eviction;
use crate::prefix::{CacheImage, Published};
use crate::reuse::{FreeBlocks, FreeImage};
use crate::snapshot::{Contents, MAX_COUNT};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub(crate) struct PoolImage {
    /// One a block, so that a snapshot has at least as many bytes as it asks for blocks; those in use beyond the end
    /// included.
    generations: Vec<u32>,
    blocks: usize,
    evictions: u64,
    peak: usize,
    free: FreeImage,
    cache: Option<CacheImage>,
}

impl PoolImage {
    /// Blocks of the pool.
    pub(crate) fn num_blocks(&self) -> usize {
        self.blocks
    }

    /// One past the highest block that is in the pool or in use.
    pub(crate) fn extent(&self) -> usize {
        self.generations.len()
    }
}

impl Pool {
    /// What a snapshot keeps of a pool without leases.
    pub(crate) fn image(&self) -> PoolImage {
        // Named one by one: a new field has to be thought of here. `restore` computes what is left out.
        let Self {
            tier: _,
            len,
            blocks,
            free,
            overlappable: _,
            cache,
            orphans: _,
            evictions,
            peak,
            tail: _,
            tracker: _,
        } = self;
        let generations = (0..).map(BlockId).take(self.extent()).map(|block| self.block(block).generation()).collect();
        let published = (0..).map(BlockId).zip(blocks).filter(|(_, block)| block.is_published()).map(|(id, _)| id);
        let cache = cache.as_ref().map(|cache| cache.image(published));
        PoolImage { generations, blocks: *len, evictions: *evictions, peak: *peak, free: free.image(), cache }
    }

    /// The pool of a snapshot, given the references that the tables hold; `Manager::check` is yet to be run.
    pub(crate) fn restore(tier: Tier, image: PoolImage, refs: &[u32]) -> Contents<Self> {
        let PoolImage { generations, blocks, evictions, peak, free, cache } = image;
        let eviction = cache.as_ref().map_or(Some(Eviction::default()), |cache| Eviction::from_name(&cache.eviction));
        let Some(eviction) = eviction else { return Err(format!("{tier}: an unknown eviction policy")) };
        let policies = Policies { reuse: free.order()?, eviction };
        let pool = Self::with_policies(tier, generations.len(), cache.is_some(), policies);
        let mut pool = pool.map_err(|error| error.to_string())?;
        if peak > MAX_BLOCKS || evictions > MAX_COUNT || blocks > pool.len() {
            let known = pool.len();
            return Err(format!("{tier}: {evictions} evictions, {peak} blocks in use, {blocks} of {known}"));
        }
        (pool.evictions, pool.peak) = (evictions, peak);
        pool.blocks =
            generations.iter().zip(refs).map(|(&generation, &refs)| Block::restored(generation, refs)).collect();
        if let Some(cache) = cache {
            pool.restore_cache(cache, eviction, blocks)?;
        }
        let idle = (0..).map(BlockId).take(pool.len()).filter(|&block| pool.block(block).is_empty());
        pool.free = FreeBlocks::restore(free, pool.len(), idle).map_err(|what| format!("{tier} {what}"))?;
        pool.resize(blocks);
        if pool.extent() < generations.len() {
            return Err(format!("{tier}: nothing uses block {}, beyond the {blocks} there are", generations.len() - 1));
        }
        if pool.peak < pool.used() {
            return Err(format!("{tier}: {} blocks are in use, {peak} were at most", pool.used()));
        }
        Ok(pool)
    }

    fn restore_cache(&mut self, image: CacheImage, eviction: Eviction, blocks: usize) -> Contents<()> {
        let CacheImage { keys, eviction: _, order, quotas, owners } = image;
        let (tier, total) = (self.tier, self.len());
        let known = |block: &BlockId| block.index() < total;
        for (block, key) in keys {
            if !known(&block)
                || (block.index() >= blocks && !self.block(block).is_used())
                || self.block(block).is_published()
                || self.publish(block, Key::from_bytes(&key), 0) != Published::Now
            {
                return Err(format!("{tier} block {block} of {total} is published twice, or under another's key"));
            }
        }
        let Self { blocks: all, cache, .. } = self;
        let Some(cache) = cache else { return Ok(()) };
        let is_published = |block: BlockId| known(&block) && all[block.index()].is_published();
        let restored = cache.restore_order((eviction, total), &quotas, owners, is_published);
        restored.map_err(|what| format!("{tier} {what}"))?;
        for block in order {
            if !known(&block) || all[block.index()].membership() != Membership::Evictable || cache.is_evictable(block) {
                return Err(format!("{tier} block {block} of {total} cannot be evicted, or is named twice"));
            }
            cache.park(block);
        }
        Ok(())
    }

    /// Whether a restored pool has a block of that id.
    pub(crate) fn is_known(&self, block: BlockId) -> bool {
        block.index() < self.extent()
    }

    /// Links a block of a restored pool to its copy in another tier, which is known.
    pub(crate) fn restore_tier_copy(&mut self, block: BlockId, copy: TierBlock) -> Contents<()> {
        if !self.is_known(block) || copy.0 == self.tier || self.block(block).tier_copy().is_some() {
            return Err(format!("{} block {block} is linked twice, or not there", self.tier));
        }
        self.set_tier_copy(block, Some(copy));
        Ok(())
    }
}
