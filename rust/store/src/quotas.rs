//! Which tenant each block counts for, and which blocks to drop beyond a quota. The index owns this.
//!
//! Beyond a quota, the least recently used *leaf* of the tenant is dropped: a block that no stored block of the tenant
//! names as its parent. So a prompt that is longer than its quota keeps its beginning.
//!
//! Invariants:
//! - a block counts for its tenant from [`Quotas::add`] to [`Quotas::remove`]; a block without an owner never does;
//! - a tenant has an entry while it has a block, and the entry has ranks while there is a quota;
//! - no tenant has more blocks than its quota, except between [`Quotas::limit`] and the removals that must follow.

use crate::header::{Key, Owner};
use std::collections::{BTreeSet, HashMap};

/// No tenant.
const NONE: u32 = u32::MAX;

/// Whether a new block fits its tenant's quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Fits,
    /// It fits if the block in this slot is dropped.
    InPlaceOf(u32),
    Refused,
}

/// The tenant that a slot's block counts for. Meaningless for a slot without a block.
#[derive(Clone, Copy, Debug)]
struct Share {
    tenant: u32,
    /// Position of the slot among its tenant's slots.
    at: u32,
    /// When the block was last used, on a counter of all uses.
    used: i64,
    parent: Key,
}

/// A block's place in the order in which a tenant's blocks are dropped: whether it has children, its last use, its
/// slot.
type Rank = (bool, i64, u32);

#[derive(Debug)]
struct Tenant {
    name: [u8; 32],
    slots: Vec<u32>,
    ranks: Option<Ranks>,
}

/// The blocks of a tenant with a quota.
#[derive(Debug, Default, PartialEq, Eq)]
struct Ranks {
    order: BTreeSet<Rank>,
    /// How many blocks name a key as their parent.
    children: HashMap<Key, u32>,
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
    newest: i64,
    oldest: i64,
}

impl Quotas {
    /// Returns how many blocks count towards a tenant's quota, and the quota, if there is one.
    pub(crate) fn quota(&self, tenant: &[u8; 32]) -> Option<(u32, u32)> {
        let most = *self.most.get(tenant)?;
        let held = self.ledger.find(tenant).map_or(0, |found| found.slots.len());
        Some((u32::try_from(held).unwrap_or(u32::MAX), most))
    }

    /// Returns the owner of a slot's block.
    pub(crate) fn owner(&self, slot: u32) -> Option<Owner> {
        let share = self.share(slot)?;
        Some(Owner { tenant: self.ledger.tenants[share.tenant as usize].name, parent: share.parent })
    }

    /// The parent of a slot's block, if its removal changes the parent's rank.
    pub(crate) fn ranked_parent(&self, slot: u32) -> Option<Key> {
        let share = self.share(slot)?;
        self.ledger.tenants[share.tenant as usize].ranks.as_ref().map(|_| share.parent)
    }

    /// Counts the block of a slot for its owner. `parent` is the slot of its parent, if that is stored. If not, a
    /// new block counts as the least recently used, since no lookup reaches it.
    pub(crate) fn add(
        &mut self,
        (slot, slots): (u32, usize),
        key: &Key,
        owner: Option<Owner>,
        parent: Option<u32>,
        is_new: bool,
    ) {
        let Some(owner) = owner else {
            if let Some(share) = self.shares.get_mut(slot as usize) {
                share.tenant = NONE;
            }
            return;
        };
        if self.shares.is_empty() {
            self.shares.resize(slots, Share { tenant: NONE, at: 0, used: 0, parent: [0; 32] });
        }
        let is_orphan = is_new && owner.has_parent() && parent.is_none();
        let used = if is_orphan { self.before_all() } else { self.after_all() };
        let id = self.ledger.enter(owner.tenant, self.most.contains_key(&owner.tenant));
        let tenant = &mut self.ledger.tenants[id as usize];
        let at = u32::try_from(tenant.slots.len()).unwrap_or(NONE);
        tenant.slots.push(slot);
        self.shares[slot as usize] = Share { tenant: id, at, used, parent: owner.parent };
        let parent = self.rank_of_parent(id, parent);
        if let Some(ranks) = &mut self.ledger.tenants[id as usize].ranks {
            ranks.add((used, slot), key, owner.parent, parent);
        }
    }

    /// Stops counting the block of a slot. `parent` is the slot of the key that [`Quotas::ranked_parent`] returns.
    pub(crate) fn remove(&mut self, slot: u32, key: &Key, parent: Option<u32>) {
        let Some(share) = self.share(slot) else { return };
        let parent = self.rank_of_parent(share.tenant, parent.filter(|&parent| parent != slot));
        let tenant = &mut self.ledger.tenants[share.tenant as usize];
        if let Some(ranks) = &mut tenant.ranks {
            ranks.remove((share.used, slot), key, share.parent, parent);
        }
        tenant.slots.swap_remove(share.at as usize);
        if let Some(&moved) = tenant.slots.get(share.at as usize) {
            self.shares[moved as usize].at = share.at;
        }
        self.shares[slot as usize].tenant = NONE;
        self.ledger.leave_if_empty(share.tenant);
    }

    /// Records the use of a slot's block.
    pub(crate) fn touch(&mut self, slot: u32, key: &Key) {
        let Some(share) = self.share(slot) else { return };
        let used = self.after_all();
        self.shares[slot as usize].used = used;
        if let Some(ranks) = &mut self.ledger.tenants[share.tenant as usize].ranks {
            let has_children = ranks.children.contains_key(key);
            ranks.order.remove(&(has_children, share.used, slot));
            ranks.order.insert((has_children, used, slot));
        }
    }

    /// Returns what happens to a new block, as if it were added and excess blocks were then removed.
    pub(crate) fn judge(&self, key: &Key, owner: &Owner, parent: Option<u32>) -> Verdict {
        let Some(&most) = self.most.get(&owner.tenant) else { return Verdict::Fits };
        let tenant = self.ledger.find(&owner.tenant);
        if tenant.map_or(0, |tenant| tenant.slots.len()) < most as usize {
            return Verdict::Fits;
        }
        let Some(ranks) = tenant.and_then(|tenant| tenant.ranks.as_ref()) else { return Verdict::Refused };
        let is_orphan = owner.has_parent() && parent.is_none();
        let used = if is_orphan { i64::MIN } else { i64::MAX };
        let new = (owner.parent == *key || ranks.children.contains_key(key), used);
        // With the new block, its parent is not a leaf.
        let id = self.ledger.ids.get(&owner.tenant).copied().unwrap_or(NONE);
        let parent = self.rank_of_parent(id, parent).map(|(used, slot)| (true, used, slot));
        let other = ranks.order.iter().find(|rank| parent.is_none_or(|parent| parent.2 != rank.2));
        match other.copied().into_iter().chain(parent).min() {
            Some((has_children, used, slot)) if (has_children, used) < new => Verdict::InPlaceOf(slot),
            _ => Verdict::Refused,
        }
    }

    /// Sets a tenant's quota. Call [`Quotas::beyond`] next, until it has nothing to remove.
    pub(crate) fn limit(&mut self, tenant: [u8; 32], most: Option<u32>, key_of: impl Fn(u32) -> Key) {
        let is_counted = match most {
            Some(most) => self.most.insert(tenant, most).is_some(),
            None => self.most.remove(&tenant).is_none(),
        };
        let Some(&id) = self.ledger.ids.get(&tenant).filter(|_| !is_counted) else { return };
        let ranks = most.map(|_| self.ranks(&self.ledger.tenants[id as usize].slots, key_of));
        self.ledger.tenants[id as usize].ranks = ranks;
    }

    /// Returns the slot whose block is dropped first, if the tenant is beyond its quota.
    pub(crate) fn beyond(&self, tenant: &[u8; 32]) -> Option<u32> {
        let most = *self.most.get(tenant)?;
        let found = self.ledger.find(tenant).filter(|found| found.slots.len() > most as usize)?;
        found.ranks.as_ref()?.order.first().map(|&(_, _, slot)| slot)
    }

    /// Stops counting all blocks. Returns the old structures: dropping them can take time.
    pub(crate) fn forget(&mut self) -> Ledger {
        std::mem::take(&mut self.ledger)
    }

    fn ranks(&self, slots: &[u32], key_of: impl Fn(u32) -> Key) -> Ranks {
        let mut ranks = Ranks::default();
        for &slot in slots {
            ranks.name(self.shares[slot as usize].parent);
        }
        for &slot in slots {
            let has_children = ranks.children.contains_key(&key_of(slot));
            ranks.order.insert((has_children, self.shares[slot as usize].used, slot));
        }
        ranks
    }

    /// Last use and slot of a parent, if it counts for the same tenant.
    fn rank_of_parent(&self, tenant: u32, parent: Option<u32>) -> Option<(i64, u32)> {
        let parent = parent?;
        self.share(parent).filter(|share| share.tenant == tenant).map(|share| (share.used, parent))
    }

    fn share(&self, slot: u32) -> Option<Share> {
        self.shares.get(slot as usize).filter(|share| share.tenant != NONE).copied()
    }

    fn after_all(&mut self) -> i64 {
        self.newest += 1;
        self.newest
    }

    fn before_all(&mut self) -> i64 {
        self.oldest -= 1;
        self.oldest
    }

    /// Compares everything with these blocks: the occupied slots, with their keys.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub(crate) fn check(&self, blocks: &[(u32, Key)]) -> Result<(), String> {
        let keys: HashMap<u32, Key> = blocks.iter().copied().collect();
        let mut counted = 0;
        for (name, &id) in &self.ledger.ids {
            let tenant = &self.ledger.tenants[id as usize];
            let held = tenant.slots.len();
            counted += held;
            let is_placed = |(at, slot): (usize, &u32)| {
                let share = self.share(*slot);
                keys.contains_key(slot) && share.is_some_and(|share| (share.tenant, share.at as usize) == (id, at))
            };
            if held == 0 || tenant.name != *name || !tenant.slots.iter().enumerate().all(is_placed) {
                return Err(format!("a tenant has {held} slots, not all are its own"));
            }
            if self.most.get(name).is_some_and(|&most| held > most as usize) {
                return Err(format!("a tenant has {held} blocks, more than its quota"));
            }
            let expected = self.most.contains_key(name).then(|| self.ranks(&tenant.slots, |slot| keys[&slot]));
            if tenant.ranks != expected {
                return Err(format!("ranks are {:?}, must be {expected:?}", tenant.ranks));
            }
        }
        let owned = blocks.iter().filter(|(slot, _)| self.share(*slot).is_some()).count();
        let entries = self.ledger.ids.len() + self.ledger.free.len();
        if counted != owned || entries != self.ledger.tenants.len() {
            return Err(format!("tenants have {counted} of {owned} blocks, in {entries} entries"));
        }
        Ok(())
    }
}

impl Ranks {
    fn name(&mut self, parent: Key) -> bool {
        if parent == [0; 32] {
            return false;
        }
        let count = self.children.entry(parent).or_default();
        *count += 1;
        *count == 1
    }

    fn add(&mut self, (used, slot): (i64, u32), key: &Key, parent: Key, of_parent: Option<(i64, u32)>) {
        if let (true, Some((used, slot))) = (self.name(parent), of_parent) {
            self.order.remove(&(false, used, slot));
            self.order.insert((true, used, slot));
        }
        self.order.insert((self.children.contains_key(key), used, slot));
    }

    fn remove(&mut self, (used, slot): (i64, u32), key: &Key, parent: Key, of_parent: Option<(i64, u32)>) {
        self.order.remove(&(self.children.contains_key(key), used, slot));
        let Some(count) = self.children.get_mut(&parent) else { return };
        *count -= 1;
        if *count > 0 {
            return;
        }
        self.children.remove(&parent);
        if let Some((used, slot)) = of_parent {
            self.order.remove(&(true, used, slot));
            self.order.insert((false, used, slot));
        }
    }
}

impl Ledger {
    fn find(&self, tenant: &[u8; 32]) -> Option<&Tenant> {
        self.ids.get(tenant).map(|&id| &self.tenants[id as usize])
    }

    /// Returns the entry of a tenant; creates it if missing.
    fn enter(&mut self, name: [u8; 32], is_ranked: bool) -> u32 {
        if let Some(&id) = self.ids.get(&name) {
            return id;
        }
        let tenant = Tenant { name, slots: Vec::new(), ranks: is_ranked.then(Ranks::default) };
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
