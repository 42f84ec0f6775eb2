//! Quotas: how many cached blocks a tenant may leave on the device, or how many bytes of them if there are several page
//! classes. A tenant is identified by its salt.
//!
//! All unused blocks that a prompt can find count; windows, states and blocks of other groups go with the block that
//! they hang on, and while that is in use they may keep a tenant beyond its quota. At rest none is beyond its quota:
//! what hangs on blocks that lead to no point goes with these. Blocks beyond a quota are freed when
//! sequences are freed, tickets end and decisions are taken, the tenant's least recently used block first. If room is
//! needed in between, they are evicted before all other blocks.

use super::Tiers;
use crate::error::{Result, invalid};
use crate::hash::KeySpec;
use crate::id::Tier;
use crate::memory;
use std::collections::HashMap;

/// Tenants with quotas: their numbers from 1, by salt, and the quotas in the order of the numbers.
#[derive(Debug, Clone, Default)]
pub(super) struct Tenants {
    numbers: HashMap<[u8; 32], u16>,
    quotas: Vec<([u8; 32], usize)>,
}

impl Tenants {
    pub(super) fn all(&self) -> &[([u8; 32], usize)] {
        &self.quotas
    }
}

impl Tiers {
    /// Number of a prompt's tenant, 0 if it has no quota.
    #[inline]
    pub(crate) fn tenant_of(&self, spec: &KeySpec) -> u16 {
        let numbers = &self.tenants.numbers;
        if numbers.is_empty() { 0 } else { numbers.get(&spec.salt).copied().unwrap_or(0) }
    }

    /// Tenants with quotas.
    pub(crate) fn num_tenants(&self) -> usize {
        self.tenants.quotas.len()
    }

    /// Limits the tenant of a salt to cached device blocks of a number, or of a number of bytes with several page classes;
    /// `None` means no limit.
    pub(crate) fn set_quota(&mut self, salt: [u8; 32], quota: Option<usize>) -> Result<()> {
        let (limit, total) = (usize::from(u16::MAX), self.pools[0].whole_weight());
        if !self.pools[0].is_caching() {
            return Err(invalid("prefix_caching", 0, "1 for quotas".to_owned()));
        }
        if let Some(quota) = quota.filter(|&quota| quota > total) {
            let is_single = self.device().num_classes() == 1;
            let (what, unit) = if is_single { ("blocks", "blocks") } else { ("num_bytes", "bytes") };
            return Err(invalid(what, quota as i128, format!("at most the device's {total} {unit}")));
        }
        let tenants = &mut self.tenants;
        if tenants.quotas.len() == limit && !tenants.numbers.contains_key(&salt) {
            return Err(invalid("number of tenants with quotas", limit as i128 + 1, format!("at most {limit}")));
        }
        if tenants.quotas.is_empty() {
            // The owner of each block, twice, and its position among its tenant's blocks.
            memory::require_items::<(u16, u16, u32)>(self.pools[0].extent())?;
        }
        let next = u16::try_from(tenants.quotas.len() + 1).unwrap_or(u16::MAX);
        let number = *tenants.numbers.entry(salt).or_insert(next);
        let quota = quota.unwrap_or(usize::MAX);
        if number == next {
            tenants.quotas.push((salt, quota));
        } else {
            tenants.quotas[usize::from(number) - 1].1 = quota;
        }
        self.pools[0].set_quota(number, quota);
        self.enforce_quotas();
        Ok(())
    }

    /// Cached device blocks of a tenant that no sequence uses, in the unit of quotas, and its quota; `None` for a tenant that
    /// never had one.
    pub(crate) fn quota(&self, salt: [u8; 32]) -> Option<(usize, Option<usize>)> {
        let number = *self.tenants.numbers.get(&salt)?;
        let (_, quota) = self.tenants.quotas.get(usize::from(number) - 1)?;
        Some((self.pools[0].held_by(number), (*quota != usize::MAX).then_some(*quota)))
    }

    /// Frees blocks of tenants beyond their quotas.
    #[inline]
    pub(crate) fn enforce_quotas(&mut self) {
        if !self.tenants.quotas.is_empty() {
            self.pools[0].drop_beyond_quotas();
            self.unlink_orphans(Tier::Device);
        }
    }
}
