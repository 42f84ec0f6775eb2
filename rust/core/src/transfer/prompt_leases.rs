//! Leases of prompts that wait: what was loaded ahead for a prompt stays until it is admitted, or until its owner ends
//! the lease because something that runs needs the blocks.
//!
//! Invariant: each leased block has one lease of the pool, however many prompts lease it.

use super::{Lease, Wanted};
use crate::block::{LeaseKind, TierBlock};
use crate::error::{Error, Result};
use crate::hash::Key;
use crate::id::{BlockId, LeaseId, Tier};
use crate::pool::Pool;
use crate::tiers::Tiers;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// What the leases of waiting prompts may hold together, the new one included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseShare {
    /// Half of the blocks that no table has, in each tier.
    Half,
    /// All of them on the device except the watermark, and half of them on the host.
    Free,
    /// As much as there is, even if not all of the prompt's blocks fit.
    Any,
}

impl LeaseShare {
    /// All shares.
    pub const ALL: [Self; 3] = [Self::Half, Self::Free, Self::Any];

    /// The share's name in Python.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Half => "half",
            Self::Free => "free",
            Self::Any => "any",
        }
    }

    /// The share of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|share| share.name() == name)
    }
}

/// One prompt's lease.
#[derive(Debug, Clone)]
struct PromptLease {
    /// Its blocks, and their places in the prompt.
    blocks: Vec<(u32, TierBlock)>,
    /// Keys of the blocks that it is still to get, and their places; last one first.
    promised: Vec<(u32, Key)>,
    /// It holds host blocks only, see [`Wanted::by_host`].
    by_host: bool,
}

/// The leases of all waiting prompts.
#[derive(Debug, Clone, Default)]
pub(crate) struct PromptLeases {
    last: u64,
    leases: BTreeMap<LeaseId, PromptLease>,
    /// Prompts that lease each block.
    blocks: HashMap<TierBlock, usize>,
    /// Prompts that are promised each key.
    promised: HashMap<Key, usize>,
    /// Page classes of these keys, where there are several.
    classes: HashMap<Key, u8>,
}

impl PromptLeases {
    /// Number of leases.
    pub(crate) fn len(&self) -> usize {
        self.leases.len()
    }

    /// Keys that are promised, and the page classes of their blocks.
    pub(crate) fn promised(&self) -> impl Iterator<Item = (&Key, usize)> {
        self.promised.keys().map(|key| (key, usize::from(self.classes.get(key).copied().unwrap_or(0))))
    }

    /// Number of distinct blocks that are promised.
    pub(crate) fn num_promised(&self) -> usize {
        self.promised.len()
    }

    /// Whether some prompt is promised a key.
    pub(crate) fn is_promised(&self, key: &Key) -> bool {
        self.promised.contains_key(key)
    }

    /// Leased blocks of a tier that no table has.
    fn idle<'a>(&'a self, pool: &'a Pool) -> impl Iterator<Item = BlockId> + 'a {
        let blocks = self.blocks.keys().filter(|(of, block)| *of == pool.tier() && pool.refs(*block) == 0);
        blocks.map(|(_, block)| *block)
    }

    /// Number of leased blocks of a tier that no table has.
    pub(crate) fn num_idle(&self, tiers: &Tiers, tier: Tier) -> usize {
        self.idle(tiers.pool(tier)).count()
    }

    /// The weight of those.
    pub(crate) fn idle_weight(&self, tiers: &Tiers, tier: Tier) -> usize {
        let pool = tiers.pool(tier);
        self.idle(pool).map(|block| pool.weight(pool.class_of(block))).sum()
    }

    /// Leases the blocks of a prompt that the tiers have, and promises it the missing ones, unless that is more than
    /// its share. `targets` weigh the blocks of device and host that loads are filling, `kept_free` what stays free.
    pub(crate) fn lease(
        &mut self,
        tiers: &mut Tiers,
        wanted: &Wanted,
        share: LeaseShare,
        targets: [usize; 2],
        kept_free: usize,
    ) -> Option<LeaseId> {
        if share != LeaseShare::Any && !self.fits(tiers, wanted, share, targets, kept_free) {
            return None;
        }
        self.last += 1;
        let id = LeaseId(self.last);
        let promised = wanted.lacking.iter().rev().map(|&(place, key, _)| (place, key)).collect();
        let mut lease = PromptLease { blocks: Vec::new(), promised, by_host: wanted.by_host };
        for &(place, block) in &wanted.found {
            self.take(tiers, &mut lease.blocks, place, block);
        }
        lease.promised.iter().for_each(|(_, key)| *self.promised.entry(*key).or_default() += 1);
        if tiers.device().num_classes() > 1 {
            self.classes.extend(wanted.lacking.iter().map(|&(_, key, class)| (key, class)));
        }
        self.leases.insert(id, lease);
        Some(id)
    }

    fn fits(&self, tiers: &Tiers, wanted: &Wanted, share: LeaseShare, targets: [usize; 2], kept_free: usize) -> bool {
        let [on_device, on_host] = wanted.evictable(tiers);
        let rest = |tier: Tier, found: usize| {
            let (free, held) = (tiers.pool(tier).free_weight(), self.idle_weight(tiers, tier) + targets[tier.index()]);
            usize::midpoint(free, held).checked_sub(held + found)
        };
        let device = match share {
            LeaseShare::Half => rest(Tier::Device, on_device),
            LeaseShare::Free | LeaseShare::Any => tiers.device().free_weight().checked_sub(on_device + kept_free),
        };
        let host = if tiers.keeps_host_copies() { rest(Tier::Host, on_host) } else { Some(0) };
        let host = if share == LeaseShare::Half { host } else { Some(host.unwrap_or(0)) };
        let weight = |class: usize| tiers.device().weight(class);
        let new = wanted.lacking.iter().filter(|(_, key, _)| !self.promised.contains_key(key));
        let new: usize = new.map(|&(_, _, class)| weight(usize::from(class))).sum();
        let promised = if tiers.device().num_classes() == 1 {
            self.promised.len()
        } else {
            self.promised().map(|(_, class)| weight(class)).sum()
        };
        // Blocks that loads are filling are promised to prompts, too.
        let promised = promised.saturating_sub(targets[0] + targets[1]);
        let to_device = |device: usize| if wanted.by_host { 0 } else { device };
        matches!((device, host), (Some(device), Some(host)) if new + promised <= to_device(device) + host)
    }

    /// Leases a block, if the pool can count one lease more of it.
    fn take(&mut self, tiers: &mut Tiers, blocks: &mut Vec<(u32, TierBlock)>, place: u32, block: TierBlock) {
        let count = self.blocks.get(&block).copied().unwrap_or(0);
        if count == 0 {
            if tiers.block(block).lease_room(LeaseKind::Read) == 0 {
                return;
            }
            tiers.lease(block, LeaseKind::Read);
        }
        self.blocks.insert(block, count + 1);
        blocks.push((place, block));
    }

    /// Leases promised blocks that the tiers have now, up to the first that they do not have.
    pub(crate) fn advance(&mut self, tiers: &mut Tiers) {
        let waiting: Vec<LeaseId> =
            self.leases.iter().filter(|(_, lease)| !lease.promised.is_empty()).map(|(id, _)| *id).collect();
        for id in waiting {
            self.advance_one(tiers, id);
        }
    }

    fn advance_one(&mut self, tiers: &mut Tiers, id: LeaseId) {
        let Some(mut lease) = self.leases.remove(&id) else { return };
        while let Some((place, key)) = lease.promised.last() {
            let on_device = tiers.device().find(key).map(|block| (Tier::Device, block));
            let Some(block) = on_device.or_else(|| tiers.host().find(key).map(|block| (Tier::Host, block))) else {
                break;
            };
            let place = *place;
            self.unpromise(key);
            lease.promised.pop();
            if !lease.by_host || block.0 == Tier::Host {
                self.take(tiers, &mut lease.blocks, place, block);
            }
        }
        self.leases.insert(id, lease);
    }

    /// Promises a prompt nothing more: its load has ended. From now on, the lease holds what the prompt finds.
    ///
    /// # Errors
    /// There was never such a lease.
    pub(crate) fn settle(&mut self, tiers: &mut Tiers, id: LeaseId, found: &[(u32, TierBlock)]) -> Result<()> {
        self.require(id)?;
        let Some(lease) = self.leases.remove(&id) else { return Ok(()) };
        lease.promised.iter().for_each(|(_, key)| self.unpromise(key));
        let (held, mut blocks) = (lease.blocks, Vec::with_capacity(found.len()));
        for &(place, block) in found {
            self.take(tiers, &mut blocks, place, block);
        }
        self.leases.insert(id, PromptLease { blocks, promised: Vec::new(), by_host: lease.by_host });
        self.let_go(tiers, held);
        Ok(())
    }

    /// Ends a lease, if it has not ended.
    ///
    /// # Errors
    /// There was never such a lease.
    pub(crate) fn end(&mut self, tiers: &mut Tiers, id: LeaseId) -> Result<()> {
        self.require(id)?;
        let Some(lease) = self.leases.remove(&id) else { return Ok(()) };
        for (_, key) in &lease.promised {
            self.unpromise(key);
        }
        self.let_go(tiers, lease.blocks);
        Ok(())
    }

    /// Ends the leases on blocks of a prompt, on the last one first, so that a chain is evicted from its end.
    fn let_go(&mut self, tiers: &mut Tiers, mut blocks: Vec<(u32, TierBlock)>) {
        blocks.sort_unstable_by_key(|(place, _)| Reverse(*place));
        for (_, block) in &blocks {
            if drop_one(&mut self.blocks, block) {
                tiers.end_lease(*block, LeaseKind::Read);
            }
        }
    }

    /// Ends all leases, the newest first.
    pub(crate) fn end_all(&mut self, tiers: &mut Tiers) {
        while let Some(id) = self.leases.last_key_value().map(|(id, _)| *id) {
            _ = self.end(tiers, id);
        }
    }

    /// A prompt is promised a key no longer.
    fn unpromise(&mut self, key: &Key) {
        if drop_one(&mut self.promised, key) {
            self.classes.remove(key);
        }
    }

    fn require(&self, lease: LeaseId) -> Result<()> {
        if lease.0 == 0 || lease.0 > self.last { Err(Error::UnknownLease { lease }) } else { Ok(()) }
    }

    /// Leases that the pools count.
    pub(crate) fn leases(&self) -> impl Iterator<Item = Lease> + '_ {
        self.blocks.keys().map(|&(tier, block)| Lease { tier, kind: LeaseKind::Read, block })
    }

    /// Checks the counts.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        let (mut blocks, mut promised) = (HashMap::new(), HashMap::new());
        for lease in self.leases.values() {
            lease.blocks.iter().for_each(|(_, block)| *blocks.entry(*block).or_default() += 1);
            lease.promised.iter().for_each(|(_, key)| *promised.entry(*key).or_default() += 1);
        }
        if blocks == self.blocks && promised == self.promised {
            return Ok(());
        }
        let (held, named) = (self.blocks.len(), self.promised.len());
        Err(format!(
            "prompts lease {held} and are promised {named} blocks, counted {} and {}",
            blocks.len(),
            promised.len()
        ))
    }
}

/// Counts one less; returns whether it was the last.
fn drop_one<K: Eq + Hash>(counts: &mut HashMap<K, usize>, key: &K) -> bool {
    match counts.get_mut(key) {
        Some(count) if *count > 1 => {
            *count -= 1;
            false
        }
        Some(_) => counts.remove(key).is_some(),
        None => false,
    }
}
