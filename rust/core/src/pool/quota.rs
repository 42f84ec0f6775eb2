//! Tenants' quotas of cached blocks, as a pool sees them.

use super::Pool;
use crate::id::BlockId;

impl Pool {
    /// Sets the quota of a tenant; tenants are numbered from 1.
    pub(crate) fn set_quota(&mut self, tenant: u16, quota: usize) {
        let blocks = self.len();
        if let Some(cache) = &mut self.cache {
            cache.policy.set_quota(tenant, quota, blocks);
        }
    }

    /// All quotas, in the order of their tenants' numbers.
    pub(crate) fn quotas(&self) -> Vec<usize> {
        self.cache.as_ref().and_then(|cache| cache.policy.quotas()).map_or_else(Vec::new, |quotas| quotas.all())
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
    pub(crate) fn owner(&self, block: BlockId) -> u16 {
        let quotas = self.cache.as_ref().and_then(|cache| cache.policy.quotas());
        quotas.filter(|_| self.is_published(block)).map_or(0, |quotas| quotas.owner(block))
    }

    /// Frees what tenants have beyond their quotas; the owner of all pools lets twins forget.
    pub(crate) fn drop_beyond_quotas(&mut self) {
        while let Some(block) =
            self.cache.as_mut().and_then(|cache| cache.policy.quotas_mut()).and_then(|quotas| quotas.pop_over())
        {
            self.drop_bytes(block);
            self.free.insert(block);
        }
    }

    /// Frees an evictable block, if it is one.
    pub(crate) fn drop_cached(&mut self, block: BlockId) {
        if self.is_evictable(block) {
            self.retire(block);
            self.drop_bytes(block);
            self.free.insert(block);
        }
    }

    /// Evictable blocks that go first, at most `count`.
    pub(crate) fn upcoming(&self, count: usize) -> Vec<BlockId> {
        self.cache.as_ref().map_or_else(Vec::new, |cache| cache.policy.upcoming(count))
    }

    /// What does not hold of the quotas.
    pub(crate) fn check_quotas(&self) -> Option<String> {
        self.cache.as_ref().and_then(|cache| cache.policy.quotas()).and_then(|quotas| quotas.check())
    }
}
