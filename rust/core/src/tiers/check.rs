//! Consistency checks of the tiers, by themselves and against externally counted references and leases.

use super::Tiers;
use crate::block::Leases;
use crate::group::NULL_BLOCK;
use crate::id::{BlockId, Tier};
use std::collections::HashMap;

impl Tiers {
    /// Compares each block of a tier with the references and leases counted from tables, tickets and pins.
    pub(crate) fn check_tier(
        &self,
        tier: Tier,
        mut refs: HashMap<BlockId, u32>,
        mut leases: HashMap<BlockId, Leases>,
    ) -> Result<(), String> {
        let pool = self.pool(tier);
        let has_null = self.null && !pool.is_empty();
        if has_null {
            *refs.entry(NULL_BLOCK).or_default() += 1;
        }
        for block in (0..).map(BlockId).take(pool.known()) {
            let refs = refs.remove(&block).unwrap_or(0);
            if let Some(what) = pool.check(block, refs, leases.remove(&block).unwrap_or_default()) {
                return Err(what);
            }
            if let Some((other, copy)) = pool.block(block).tier_copy() {
                if self.block((other, copy)).tier_copy() != Some((tier, block)) {
                    return Err(format!("{tier} block {block}: its copy, {other} block {copy}, has another copy"));
                }
                let keys = pool.key(block).zip(self.pool(other).key(copy));
                if other == tier || keys.is_some_and(|(one, two)| one != two) {
                    return Err(format!("{tier} block {block} and its copy, {other} block {copy}, hold other bytes"));
                }
            }
        }
        if let Some(what) = pool.check_totals().or_else(|| pool.check_points()) {
            return Err(what);
        }
        let null = pool.block(NULL_BLOCK);
        if has_null && (null.is_published() || null.tier_copy().is_some()) {
            return Err(format!("{tier} block {NULL_BLOCK} is the null block, and holds bytes"));
        }
        match refs.keys().chain(leases.keys()).next() {
            Some(block) => Err(format!("{tier} block {block} is in use and beyond the {} of the tier", pool.len())),
            None => Ok(()),
        }
    }

    /// Checks the tiers together: which are caches, which tenants have quotas, and the events.
    pub(crate) fn check_settings(&self, cross: bool) -> Result<(), String> {
        let [device, host, external] = &self.pools;
        let odd = (host.is_caching() || cross) && host.is_caching() != device.is_caching();
        if external.is_caching() || odd {
            return Err("a tier caches that must not".to_owned());
        }
        let least = usize::from(self.null) + 1;
        if device.len() < least || host.resized() || external.resized() {
            return Err(format!("{} device blocks, at least {least}, and a tier of another size", device.len()));
        }
        let quotas = self.tenants.all().iter().map(|(_, quota)| *quota);
        if !quotas.eq(device.quotas()) || !host.quotas().is_empty() {
            return Err(format!("{} tenants have quotas of {:?}", self.tenants.all().len(), device.quotas()));
        }
        let events = || self.events.as_ref().and_then(|events| events.check(&self.pools));
        device.check_quotas().or_else(events).map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::Shape;
    use crate::pool::Policies;

    #[test]
    fn references_and_copies_that_do_not_agree_are_found() {
        let mut tiers =
            Tiers::new(&[4; 3].map(|blocks| Shape::single(blocks, true)), 1, false, Policies::default()).unwrap();
        let (mut device, mut host) = (Vec::new(), Vec::new());
        tiers.take((Tier::Device, 0), 1, false, &mut device);
        tiers.take((Tier::Host, 0), 1, false, &mut host);
        let check = |tiers: &Tiers, refs: u32| {
            tiers.check_tier(Tier::Device, HashMap::from([(device[0], refs)]), HashMap::new())
        };
        assert_eq!((check(&tiers, 1), tiers.check_settings(true)), (Ok(()), Ok(())));
        assert!(check(&tiers, 2).is_err());
        tiers.link((Tier::Device, device[0]), (Tier::Host, host[0]));
        assert_eq!(check(&tiers, 1), Ok(()));
        tiers.pool_mut(Tier::Host).set_tier_copy(host[0], None);
        assert!(check(&tiers, 1).unwrap_err().contains("has another copy"));
    }
}
