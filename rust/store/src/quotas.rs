//! Which tenant each block counts for, and which blocks to drop beyond a quota. The index owns this.
//!
//! Invariants:
//! - a block counts for its tenant from [`Quotas::add`] to [`Quotas::remove`]; a block without an owner never does;
//! - a tenant has an entry while it has a block, and the entry has ranks while there is a quota;
//! - no tenant has more blocks than its quota, except between [`Quotas::limit`] and the removals that must follow.

use crate::header::{Key, Owner};
use crate::ranks::{Rank, Verdict, judge};
use std::collections::{BTreeSet, HashMap};

/// No tenant.
const NONE: u32 = u32::MAX;

/// The tenant that a slot's block counts for. Meaningless for a slot without a block.
#[derive(Clone, Copy, Debug)]
struct Share {
    tenant: u32,
    /// Position of the slot among its tenant's slots.
    at: u32,
    parent: Key,
}

#[derive(Debug)]
struct Tenant {
    name: [u8; 32],
    slots: Vec<u32>,
    /// With a quota: its blocks.
    ranks: Option<BTreeSet<Rank>>,
}

/// The tenants that have blocks.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    ids: HashMap<[u8; 32], u32>,
    tenants: Vec<Tenant>,
    /// Ids for reuse.
    free: Vec<u32>,
}

#[derive(Debug, Default)]
pub(crate) struct Quotas {
    most: HashMap<[u8; 32], u32>,
    ledger: Ledger,
    /// One entry per slot; empty until a block has an owner.
    shares: Vec<Share>,
}

impl Quotas {
    /// Returns how many blocks count towards a tenant's quota, and the quota, if there is one.
    pub(crate) fn quota(&self, tenant: &[u8; 32]) -> Option<(u32, u32)> {
        let most = *self.most.get(tenant)?;
        let held = self.ledger.find(tenant).map_or(0, |found| found.slots.len());
        Some((u32::try_from(held).unwrap_or(u32::MAX), most))
    }

    /// Returns the quota of each tenant that has one.
    pub(crate) fn all(&self) -> Vec<([u8; 32], u32)> {
        self.most.iter().map(|(&tenant, &most)| (tenant, most)).collect()
    }

    /// Returns the owner of a slot's block.
    pub(crate) fn owner(&self, slot: u32) -> Option<Owner> {
        let share = self.share(slot)?;
        Some(Owner { tenant: self.ledger.tenants[share.tenant as usize].name, parent: share.parent })
    }

    /// Counts the block of a slot for its owner; its rank is added next.
    pub(crate) fn add(&mut self, (slot, slots): (u32, usize), owner: Option<Owner>) {
        let Some(owner) = owner else {
            if let Some(share) = self.shares.get_mut(slot as usize) {
                share.tenant = NONE;
            }
            return;
        };
        if self.shares.is_empty() {
            self.shares.resize(slots, Share { tenant: NONE, at: 0, parent: [0; 32] });
        }
        let id = self.ledger.enter(owner.tenant, self.most.contains_key(&owner.tenant));
        let tenant = &mut self.ledger.tenants[id as usize];
        let at = u32::try_from(tenant.slots.len()).unwrap_or(NONE);
        tenant.slots.push(slot);
        self.shares[slot as usize] = Share { tenant: id, at, parent: owner.parent };
    }

    /// Stops counting the block of a slot, whose rank was removed.
    pub(crate) fn remove(&mut self, slot: u32) {
        let Some(share) = self.share(slot) else { return };
        let tenant = &mut self.ledger.tenants[share.tenant as usize];
        tenant.slots.swap_remove(share.at as usize);
        if let Some(&moved) = tenant.slots.get(share.at as usize) {
            self.shares[moved as usize].at = share.at;
        }
        self.shares[slot as usize].tenant = NONE;
        self.ledger.leave_if_empty(share.tenant);
    }

    /// Adds the rank of a slot, if its tenant has a quota.
    pub(crate) fn insert(&mut self, rank: Rank) {
        if let Some(ranks) = self.ranks_of(rank.2) {
            ranks.insert(rank);
        }
    }

    /// Removes the rank of a slot.
    pub(crate) fn withdraw(&mut self, rank: Rank) {
        if let Some(ranks) = self.ranks_of(rank.2) {
            ranks.remove(&rank);
        }
    }

    fn ranks_of(&mut self, slot: u32) -> Option<&mut BTreeSet<Rank>> {
        let share = self.share(slot)?;
        self.ledger.tenants[share.tenant as usize].ranks.as_mut()
    }

    /// What happens to a new block of a tenant, see [`judge`].
    pub(crate) fn judge(&self, tenant: &[u8; 32], new: (bool, i64), parent: Option<Rank>) -> Verdict {
        let Some(&most) = self.most.get(tenant) else { return Verdict::Fits };
        let tenant = self.ledger.find(tenant);
        if tenant.map_or(0, |tenant| tenant.slots.len()) < most as usize {
            return Verdict::Fits;
        }
        tenant.and_then(|tenant| tenant.ranks.as_ref()).map_or(Verdict::Refused, |ranks| judge(ranks, new, parent))
    }

    /// Sets a tenant's quota. Returns the tenant's slots if they must be ranked now, see [`Quotas::rank`]. Call
    /// [`Quotas::beyond`] next, until it has nothing to remove.
    pub(crate) fn limit(&mut self, tenant: [u8; 32], most: Option<u32>) -> Option<Vec<u32>> {
        let is_new = match most {
            Some(most) => self.most.insert(tenant, most).is_none(),
            None => self.most.remove(&tenant).is_none(),
        };
        let found = self.ledger.find_mut(&tenant)?;
        found.ranks = found.ranks.take().filter(|_| most.is_some());
        (is_new && most.is_some()).then(|| found.slots.clone())
    }

    /// Sets the ranks of a tenant's blocks.
    pub(crate) fn rank(&mut self, tenant: &[u8; 32], ranks: BTreeSet<Rank>) {
        if let Some(found) = self.ledger.find_mut(tenant) {
            found.ranks = Some(ranks);
        }
    }

    /// Returns the slot whose block is dropped first, if the tenant is beyond its quota.
    pub(crate) fn beyond(&self, tenant: &[u8; 32]) -> Option<u32> {
        let most = *self.most.get(tenant)?;
        let found = self.ledger.find(tenant).filter(|found| found.slots.len() > most as usize)?;
        found.ranks.as_ref()?.first().map(|&(_, _, slot)| slot)
    }

    /// Stops counting all blocks. Returns the old structures: dropping them can take time.
    pub(crate) fn forget(&mut self) -> Ledger {
        std::mem::take(&mut self.ledger)
    }

    fn share(&self, slot: u32) -> Option<Share> {
        self.shares.get(slot as usize).filter(|share| share.tenant != NONE).copied()
    }

    /// Compares everything with the ranks of all blocks.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub(crate) fn check(&self, blocks: &[Rank]) -> Result<(), String> {
        let rank_of: HashMap<u32, Rank> = blocks.iter().map(|&rank| (rank.2, rank)).collect();
        let mut counted = 0;
        for (name, &id) in &self.ledger.ids {
            let tenant = &self.ledger.tenants[id as usize];
            let held = tenant.slots.len();
            counted += held;
            let is_placed = |(at, slot): (usize, &u32)| {
                let share = self.share(*slot);
                rank_of.contains_key(slot) && share.is_some_and(|share| (share.tenant, share.at as usize) == (id, at))
            };
            if held == 0 || tenant.name != *name || !tenant.slots.iter().enumerate().all(is_placed) {
                return Err(format!("a tenant has {held} slots, not all are its own"));
            }
            if self.most.get(name).is_some_and(|&most| held > most as usize) {
                return Err(format!("a tenant has {held} blocks, more than its quota"));
            }
            let expected =
                self.most.contains_key(name).then(|| tenant.slots.iter().map(|slot| rank_of[slot]).collect());
            if tenant.ranks != expected {
                return Err(format!("ranks are {:?}, must be {expected:?}", tenant.ranks));
            }
        }
        let owned = blocks.iter().filter(|(_, _, slot)| self.share(*slot).is_some()).count();
        let entries = self.ledger.ids.len() + self.ledger.free.len();
        if counted != owned || entries != self.ledger.tenants.len() {
            return Err(format!("tenants have {counted} of {owned} blocks, in {entries} entries"));
        }
        Ok(())
    }
}

impl Ledger {
    fn find(&self, tenant: &[u8; 32]) -> Option<&Tenant> {
        self.ids.get(tenant).map(|&id| &self.tenants[id as usize])
    }

    fn find_mut(&mut self, tenant: &[u8; 32]) -> Option<&mut Tenant> {
        self.ids.get(tenant).map(|&id| &mut self.tenants[id as usize])
    }

    /// Returns the entry of a tenant; creates it if missing.
    fn enter(&mut self, name: [u8; 32], is_ranked: bool) -> u32 {
        if let Some(&id) = self.ids.get(&name) {
            return id;
        }
        let tenant = Tenant { name, slots: Vec::new(), ranks: is_ranked.then(BTreeSet::new) };
        let id = if let Some(id) = self.free.pop() {
            self.tenants[id as usize] = tenant;
            id
        } else {
            self.tenants.push(tenant);
            u32::try_from(self.tenants.len() - 1).unwrap_or(NONE)
        };
        self.ids.insert(name, id);
        id
    }

    /// Releases an entry without blocks.
    fn leave_if_empty(&mut self, id: u32) {
        let tenant = &mut self.tenants[id as usize];
        if tenant.slots.is_empty() {
            tenant.slots = Vec::new();
            tenant.ranks = None;
            self.ids.remove(&tenant.name);
            self.free.push(id);
        }
    }
}
