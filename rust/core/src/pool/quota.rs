//! Tenants' quotas of cached blocks, as a pool sees them.

use super::Pool;
use crate::evict::Quotas;
use crate::id::BlockId;

impl Pool {
    /// Sets the quota of a tenant; tenants are numbered from 1.
    pub(crate) fn set_quota(&mut self, tenant: u16, quota: usize) {
        let blocks = self.extent();
        if let Some(cache) = &mut self.cache {
            cache.policy.set_quota(tenant, quota, blocks);
        }
    }

    /// All quotas, in the order of their tenants' numbers.
    pub(crate) fn quotas(&self) -> Vec<usize> {
        self.cache.as_ref().and_then(|cache| cache.policy.quotas()).map_or_else(Vec::new, Quotas::all)
    }

    /// Evictable blocks of a tenant.
    pub(crate) fn held_by(&self, tenant: u16) -> usize {
        self.cache.as_ref().and_then(|cache| cache.policy.quotas()).map_or(0, |quotas| quotas.held(tenant))
    }

    /// A block that has just been published belongs to a tenant.
    pub(crate) fn assign(&mut self, block: BlockId, tenant: u16) {
        if let Some(quotas) = self.cache.as_mut().and_then(|cache| cache.policy.quotas_mut()) {
            quotas.assign(block, tenant);
        }
    }

    /// Tenant of a block, 0 for none with a quota.
    pub(crate) fn tenant(&self, block: BlockId) -> u16 {
        let quotas = self.cache.as_ref().and_then(|cache| cache.policy.quotas());
        quotas.filter(|_| self.block(block).is_published()).map_or(0, |quotas| quotas.owner(block))
    }

    /// Frees what tenants have beyond their quotas. Copies in other tiers are left in [`Pool::take_orphans`].
    pub(crate) fn drop_beyond_quotas(&mut self) {
        while let Some(block) =
            self.cache.as_mut().and_then(|cache| cache.policy.quotas_mut()).and_then(Quotas::pop_over)
        {
            self.drop_bytes(block);
        }
    }

    /// Frees a block, if it is evictable.
    pub(crate) fn drop_cached(&mut self, block: BlockId) {
        if self.is_evictable(block) {
            self.retire(block);
            self.drop_bytes(block);
        }
    }

    /// Frees a cached block that has left the order of eviction.
    fn drop_bytes(&mut self, block: BlockId) {
        let before = self.block(block);
        self.evict_bytes(block);
        self.moved(block, before);
    }

    /// The first `count` blocks to be evicted.
    pub(crate) fn eviction_candidates(&self, count: usize) -> Vec<BlockId> {
        self.cache.as_ref().map_or_else(Vec::new, |cache| cache.policy.upcoming(count))
    }

    /// What does not hold of the quotas.
    pub(crate) fn check_quotas(&self) -> Option<String> {
        self.cache.as_ref().and_then(|cache| cache.policy.quotas()).and_then(Quotas::check)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evict::Eviction;
    use crate::hash::{Chain, Key, KeySpec};
    use crate::id::Tier;
    use crate::pool::Policies;

    fn key(n: u32) -> Key {
        Chain::new(&KeySpec::default(), 1, 0).block(&[n], &[]).unwrap()
    }

    /// Ten cached blocks, released in the order of their ids; the even ones are tenant 1's, the others nobody's.
    fn pool(eviction: Eviction, quota: usize) -> Pool {
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
    fn with_every_policy_what_is_beyond_a_quota_goes_first_the_oldest_before_the_others() {
        for eviction in Eviction::NAMED {
            let mut pool = pool(eviction, 2);
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
        let mut pool = pool(Eviction::Lru, 5);
        pool.claim(BlockId(8));
        pool.drop_cached(BlockId(6));
        pool.drop_cached(BlockId(8));
        assert_eq!((pool.held_by(1), pool.published()), (3, 9));
        assert_eq!(pool.eviction_candidates(3), [BlockId(0), BlockId(1), BlockId(2)]);
        pool.set_quota(1, 0);
        pool.drop_beyond_quotas();
        assert_eq!((pool.held_by(1), pool.published()), (0, 6));
        pool.release(BlockId(8));
        pool.drop_beyond_quotas();
        assert_eq!(pool.find(&key(8)), None);
    }
}
