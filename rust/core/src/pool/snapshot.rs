//! What of a pool outlives the process: references come from the tables, and a pool at rest has no leases.

use super::{Cache, Pool, Published, Twin};
use crate::evict::Lru;
use crate::hash::Key;
use crate::id::{BlockId, Tier};
use crate::reuse::BlockSet;
use crate::snapshot::{Contents, MAX_COUNT};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub(crate) struct PoolImage {
    /// One a block, so that a snapshot has at least as many bytes as it asks for blocks.
    generations: Vec<u32>,
    evictions: u64,
    peak: usize,
    cache: Option<CacheImage>,
}

#[derive(Serialize, Deserialize)]
struct CacheImage {
    /// Published blocks and their keys.
    keys: Vec<(BlockId, [u8; 32])>,
    /// Evictable blocks, first to go first.
    order: Vec<BlockId>,
}

impl PoolImage {
    pub(crate) fn num_blocks(&self) -> usize {
        self.generations.len()
    }
}

impl Pool {
    /// What a snapshot keeps of a pool without leases.
    pub(crate) fn image(&self) -> PoolImage {
        // Named one by one: a new field has to be thought of here. What is left out is made anew by `restore`.
        let Self { tier: _, nodes, free: _, draining: _, cache, orphans: _, evictions, peak, removals: _ } = self;
        let generations = nodes.iter().map(|node| node.generation).collect();
        let cache = cache.as_ref().map(|Cache { index, lru }| {
            let published = (0..).map(BlockId).zip(nodes).filter(|(_, node)| node.tag != 0);
            let keys = published.map(|(block, _)| (block, index.key(block).to_bytes())).collect();
            CacheImage { keys, order: lru.iter().collect() }
        });
        PoolImage { generations, evictions: *evictions, peak: *peak, cache }
    }

    /// The pool of a snapshot, given the references that the tables hold; `Manager::check` is yet to be run.
    pub(crate) fn restore(tier: Tier, image: PoolImage, refs: &[u32]) -> Contents<Self> {
        let PoolImage { generations, evictions, peak, cache } = image;
        let mut pool = Self::new(tier, generations.len(), cache.is_some()).map_err(|error| error.to_string())?;
        if peak > pool.len() || evictions > MAX_COUNT {
            return Err(format!("{tier}: {evictions} evictions, {peak} of {} blocks in use", pool.len()));
        }
        (pool.evictions, pool.peak) = (evictions, peak);
        pool.free = BlockSet::empty(pool.len());
        for (node, (generation, refs)) in pool.nodes.iter_mut().zip(generations.iter().zip(refs)) {
            (node.generation, node.refs) = (*generation, *refs);
        }
        if let Some(cache) = cache {
            pool.restore_cache(cache)?;
        }
        for block in (0..).map(BlockId).take(pool.len()) {
            if pool.is_idle(block) && !pool.is_published(block) {
                pool.free.insert(block);
            }
        }
        Ok(pool)
    }

    fn restore_cache(&mut self, image: CacheImage) -> Contents<()> {
        let CacheImage { keys, order } = image;
        let (tier, total) = (self.tier, self.len());
        let known = |block: &BlockId| block.index() < total;
        for (block, key) in keys {
            if !known(&block)
                || self.is_published(block)
                || self.publish(block, Key::from_bytes(&key)) != Published::Now
            {
                return Err(format!("{tier} block {block} of {total} is published twice, or under another's key"));
            }
        }
        let mut lru = Lru::new(total);
        for block in order {
            if !known(&block) || !self.is_idle(block) || !self.is_published(block) || lru.contains(block) {
                return Err(format!("{tier} block {block} of {total} cannot be evicted, or is named twice"));
            }
            lru.insert(block);
        }
        if let Some(cache) = &mut self.cache {
            cache.lru = lru;
        }
        Ok(())
    }

    /// Links a block of a restored pool to its twin.
    pub(crate) fn restore_twin(&mut self, block: BlockId, twin: Twin) -> Contents<()> {
        if block.index() >= self.len() || self.twin(block).is_some() {
            return Err(format!("{} block {block} is linked twice, or not there", self.tier));
        }
        self.set_twin(block, Some(twin));
        Ok(())
    }
}
