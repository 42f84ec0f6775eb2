//! Which slot holds which key, and in which order slots are reused.
//!
//! Slots without a block come first, then the least recently used *leaf*: a block that no stored block names as its
//! parent. So of a prompt the end goes before the beginning, and a prompt as recent as its most recent leaf.
//!
//! Invariants:
//! - `slots` has one entry for each live key, and the entry's slot has that key;
//! - a slot is live if its generation is at least `floor`; so raising the floor forgets every key in O(1);
//! - the list links every slot once, by last use; slots without a rank are older than all live ones;
//! - every live slot has a rank, in the whole store and, under a quota, among its tenant's.

pub(crate) use crate::header::Key;
use crate::header::Owner;
use crate::quotas::{Ledger, Quotas};
use crate::ranks::{Rank, Ranks, Verdict};
use std::collections::HashMap;

/// No slot, at the ends of the reuse order.
const NONE: u32 = u32::MAX;

/// A slot and its content: a block, or with generation 0 nothing that the store would find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoredBlock {
    pub(crate) slot: u32,
    pub(crate) key: Key,
    pub(crate) generation: u64,
    /// Whether the payload is known to have landed, too: after a crash, the header alone does not prove it.
    pub(crate) proven: bool,
    pub(crate) owner: Option<Owner>,
}

impl StoredBlock {
    /// A slot without a block.
    pub(crate) fn none(slot: u32) -> Self {
        Self { slot, key: [0; 32], generation: 0, proven: false, owner: None }
    }
}

/// The content that one opening of a keyed store passes on to the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Landed {
    /// The first valid generation.
    pub(crate) floor: u64,
    /// Above every generation that was used.
    pub(crate) next_generation: u64,
    /// Blocks that have landed, and slots without one, in reuse order. Each slot and key appears once.
    pub(crate) blocks: Vec<StoredBlock>,
    /// Slots with an older write of one of these keys.
    pub(crate) older: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct IndexEntry {
    key: Key,
    /// Generation of the write that put the key here; 0 without a key.
    generation: u64,
    /// When the slot was last used, on a counter of all uses.
    used: i64,
    newer: u32,
    older: u32,
}

/// Where a slot that has lost its key goes in the reuse order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reuse {
    First,
    /// For slots that could not be written: others come first.
    Last,
}

/// The keys of a store. A store of swap slots has an index of no slots.
#[derive(Debug)]
pub(crate) struct Index {
    entries: Vec<IndexEntry>,
    slots: HashMap<Key, u32>,
    newest: u32,
    oldest: u32,
    floor: u64,
    live: u32,
    evicted: u64,
    ranks: Ranks,
    quotas: Quotas,
    last_use: i64,
    /// Counts down, for blocks that no lookup reaches.
    first_use: i64,
}

impl Index {
    /// Creates an index of `slots` slots without keys; generations below `floor`, which is at least 1, are void.
    pub(crate) fn new(slots: u32, floor: u64) -> Self {
        let entry = |slot: u32| IndexEntry {
            key: [0; 32],
            generation: 0,
            used: 0,
            newer: if slot + 1 < slots { slot + 1 } else { NONE },
            older: slot.checked_sub(1).unwrap_or(NONE),
        };
        Self {
            entries: (0..slots).map(entry).collect(),
            slots: HashMap::new(),
            newest: slots.checked_sub(1).unwrap_or(NONE),
            oldest: if slots > 0 { 0 } else { NONE },
            floor: floor.max(1),
            live: 0,
            evicted: 0,
            ranks: Ranks::default(),
            quotas: Quotas::default(),
            last_use: 0,
            first_use: 0,
        }
    }

    /// Slots of the index.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Keys that have a slot.
    pub(crate) fn live(&self) -> u32 {
        self.live
    }

    /// Number of evicted keys.
    pub(crate) fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Slot and generation of a key.
    pub(crate) fn find(&self, key: &Key) -> Option<(u32, u64)> {
        let slot = *self.slots.get(key)?;
        let generation = self.entries[slot as usize].generation;
        (generation >= self.floor).then_some((slot, generation))
    }

    /// Records the use of a key's block, if it has one.
    pub(crate) fn touch(&mut self, key: &Key) {
        if let Some((slot, _)) = self.find(key) {
            self.unrank(slot);
            self.rank_newest(slot);
        }
    }

    /// Records the use of some blocks, of the last one first: if they have no owners, the beginning goes last.
    pub(crate) fn touch_all(&mut self, keys: &[Key]) {
        keys.iter().rev().for_each(|key| self.touch(key));
    }

    /// Returns what happens to a new block, as if it were added and excess blocks were then dropped: beyond its
    /// tenant's quota, or else beyond the store's slots.
    pub(crate) fn judge(&self, key: &Key, owner: Option<&Owner>) -> Verdict {
        let parent = owner.and_then(|owner| self.parent(owner.parent));
        let is_orphan = parent.is_none() && owner.is_some_and(Owner::has_parent);
        let has_children = self.ranks.has_children(key) || owner.is_some_and(|owner| owner.parent == *key);
        let new = (has_children, if is_orphan { i64::MIN } else { i64::MAX });
        let parent = parent.map(|slot| self.rank(slot));
        let within_quota = owner.map_or(Verdict::Fits, |owner| self.quotas.judge(&owner.tenant, new, parent));
        if within_quota == Verdict::Fits && self.is_live(self.oldest) {
            return self.ranks.judge(new, parent);
        }
        within_quota
    }

    /// Makes a slot the first to be reused.
    pub(crate) fn yield_first(&mut self, slot: u32) {
        self.unlink(slot);
        self.link_oldest(slot);
    }

    /// Gives a key the oldest slot of the list. Returns the slot, and the key that was evicted from it. `None` if there
    /// are no slots.
    pub(crate) fn claim(&mut self, key: Key, generation: u64, owner: Option<Owner>) -> Option<(u32, Option<Key>)> {
        let slot = self.oldest;
        let entry = *self.entries.get(slot as usize)?;
        let evicted = (entry.generation >= self.floor).then_some(entry.key);
        self.evicted += u64::from(evicted.is_some());
        self.clear(slot);
        self.set(StoredBlock { slot, key, generation, proven: false, owner }, true);
        Some((slot, evicted))
    }

    /// Adds the existing content of a slot, as the last to be reused. Call it once for each slot and key.
    pub(crate) fn restore(&mut self, block: StoredBlock) {
        if block.generation > 0 {
            self.set(block, false);
        } else {
            self.rank_newest(block.slot);
        }
    }

    /// Gives the slot of a key to another write of the key. The block's owner stays.
    pub(crate) fn renew(&mut self, slot: u32, key: &Key, generation: u64) {
        self.entries[slot as usize].generation = generation;
        self.touch(key);
    }

    /// Returns the owner of a slot's block.
    pub(crate) fn owner(&self, slot: u32) -> Option<Owner> {
        self.quotas.owner(slot)
    }

    /// Returns the slot of a parent; zeros mean no parent.
    fn parent(&self, key: Key) -> Option<u32> {
        self.find(&key).filter(|_| key != [0; 32]).map(|(slot, _)| slot)
    }

    fn is_live(&self, slot: u32) -> bool {
        self.entries.get(slot as usize).is_some_and(|entry| entry.generation >= self.floor)
    }

    /// Adds a block. A new one whose parent is not stored counts as the least recently used: no lookup reaches it.
    fn set(&mut self, block: StoredBlock, is_new: bool) {
        let StoredBlock { slot, key, generation, owner, .. } = block;
        // Looked up before the key is added: no block is its own parent.
        let parent = owner.and_then(|owner| self.parent(owner.parent));
        self.quotas.add((slot, self.entries.len()), owner);
        let entry = &mut self.entries[slot as usize];
        (entry.key, entry.generation) = (key, generation);
        self.slots.insert(key, slot);
        self.live += u32::from(generation >= self.floor);
        if let Some(owner) = owner.filter(Owner::has_parent) {
            let before = parent.map(|parent| self.rank(parent));
            if self.ranks.add_child(owner.parent) {
                self.rank_again(before);
            }
        }
        self.rank_newest(slot);
        if is_new && parent.is_none() && owner.is_some_and(|owner| owner.has_parent()) {
            self.unrank(slot);
            self.first_use -= 1;
            self.entries[slot as usize].used = self.first_use;
            self.insert_rank(slot);
        }
    }

    /// The place of a slot in the order in which blocks are dropped.
    fn rank(&self, slot: u32) -> Rank {
        let IndexEntry { key, generation, used, .. } = self.entries[slot as usize];
        (generation >= self.floor && self.ranks.has_children(&key), used, slot)
    }

    fn insert_rank(&mut self, slot: u32) {
        let rank = self.rank(slot);
        self.ranks.insert(rank);
        self.quotas.insert(rank);
    }

    /// Ranks a slot, which has no rank, as the most recently used.
    fn rank_newest(&mut self, slot: u32) {
        self.unlink(slot);
        self.link_newest(slot);
        self.last_use += 1;
        self.entries[slot as usize].used = self.last_use;
        self.insert_rank(slot);
    }

    /// Removes the rank of a slot, if it has one.
    fn unrank(&mut self, slot: u32) {
        let rank = self.rank(slot);
        self.ranks.remove(rank);
        self.quotas.withdraw(rank);
    }

    /// Updates the rank of a block that got its first child or lost its last one.
    fn rank_again(&mut self, before: Option<Rank>) {
        if let Some(before) = before {
            self.ranks.remove(before);
            self.quotas.withdraw(before);
            self.insert_rank(before.2);
        }
    }

    /// Forgets the key that the write of this generation put into a slot, if it is still there; returns whether it
    /// was.
    pub(crate) fn remove(&mut self, slot: u32, generation: u64, reuse: Reuse) -> bool {
        let held = self.entries.get(slot as usize).map_or(0, |entry| entry.generation);
        if held != generation || held < self.floor {
            return false;
        }
        self.clear(slot);
        match reuse {
            Reuse::First => self.yield_first(slot),
            Reuse::Last => self.rank_newest(slot),
        }
        true
    }

    /// Forgets every key whose generation is below the new floor, which must be above all of them. Returns the old
    /// structures: dropping them can take time.
    pub(crate) fn forget(&mut self, floor: u64) -> (Ledger, Ranks) {
        self.floor = floor;
        self.live = 0;
        (self.quotas.forget(), std::mem::take(&mut self.ranks))
    }

    /// Sets the quota of a tenant; call [`Index::drop_beyond`] next, until there is nothing to drop.
    pub(crate) fn set_quota(&mut self, tenant: [u8; 32], most: Option<u32>) {
        if let Some(slots) = self.quotas.limit(tenant, most) {
            let ranks = slots.into_iter().map(|slot| self.rank(slot)).collect();
            self.quotas.rank(&tenant, ranks);
        }
    }

    /// Forgets one key of a tenant beyond its quota; returns slot, key and generation.
    pub(crate) fn drop_beyond(&mut self, tenant: &[u8; 32]) -> Option<(u32, Key, u64)> {
        let slot = self.quotas.beyond(tenant)?;
        let IndexEntry { key, generation, .. } = self.entries[slot as usize];
        self.remove(slot, generation, Reuse::First).then_some((slot, key, generation))
    }

    /// Returns how many blocks count towards a tenant's quota, and the quota, if there is one.
    pub(crate) fn quota(&self, tenant: &[u8; 32]) -> Option<(u32, u32)> {
        self.quotas.quota(tenant)
    }

    /// Returns the quota of each tenant that has one.
    pub(crate) fn quotas(&self) -> Vec<([u8; 32], u32)> {
        self.quotas.all()
    }

    /// Checks the ranks, and the counts of all tenants.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub(crate) fn check(&self) -> Result<(), String> {
        let live: Vec<StoredBlock> = self.blocks().filter(|block| block.generation > 0).collect();
        self.ranks.check(live.iter().filter_map(|block| block.owner).map(|owner| owner.parent))?;
        if let Some(block) = live.iter().find(|block| !self.ranks.has(self.rank(block.slot))) {
            return Err(format!("slot {} has no rank", block.slot));
        }
        let is_free = |&&(_, _, slot): &&Rank| self.entries[slot as usize].generation == 0;
        let free = self.ranks.iter().filter(is_free).count();
        if self.ranks.iter().count() != live.len() + free {
            return Err(format!("{} slots have ranks, {} blocks are live", self.ranks.iter().count(), live.len()));
        }
        self.quotas.check(&live.iter().map(|block| self.rank(block.slot)).collect::<Vec<_>>())
    }

    /// The first valid generation.
    pub(crate) fn floor(&self) -> u64 {
        self.floor
    }

    /// Returns every slot in reuse order. Whether payloads have landed is not known here.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = StoredBlock> {
        let mut next = self.oldest;
        std::iter::from_fn(move || {
            let slot = next;
            let entry = self.entries.get(slot as usize)?;
            next = entry.newer;
            if entry.generation < self.floor {
                return Some(StoredBlock::none(slot));
            }
            let owner = self.quotas.owner(slot);
            Some(StoredBlock { slot, key: entry.key, generation: entry.generation, proven: false, owner })
        })
    }

    /// Removes a slot's key, dead or alive.
    fn clear(&mut self, slot: u32) {
        let entry = self.entries[slot as usize];
        if entry.generation == 0 {
            self.unrank(slot);
            return;
        }
        if entry.generation >= self.floor {
            self.unrank(slot);
            self.live -= 1;
            if let Some(owner) = self.quotas.owner(slot).filter(Owner::has_parent) {
                let before = self.parent(owner.parent).filter(|&parent| parent != slot).map(|parent| self.rank(parent));
                if self.ranks.remove_child(owner.parent) {
                    self.rank_again(before);
                }
            }
            self.quotas.remove(slot);
        }
        self.entries[slot as usize].generation = 0;
        // A dead key may already have another slot.
        if self.slots.get(&entry.key) == Some(&slot) {
            self.slots.remove(&entry.key);
        }
    }

    fn unlink(&mut self, slot: u32) {
        let IndexEntry { newer, older, .. } = self.entries[slot as usize];
        match self.entries.get_mut(newer as usize) {
            Some(entry) => entry.older = older,
            None => self.newest = older,
        }
        match self.entries.get_mut(older as usize) {
            Some(entry) => entry.newer = newer,
            None => self.oldest = newer,
        }
    }

    fn link_newest(&mut self, slot: u32) {
        let older = std::mem::replace(&mut self.newest, slot);
        match self.entries.get_mut(older as usize) {
            Some(entry) => entry.newer = slot,
            None => self.oldest = slot,
        }
        let entry = &mut self.entries[slot as usize];
        (entry.newer, entry.older) = (NONE, older);
    }

    fn link_oldest(&mut self, slot: u32) {
        let newer = std::mem::replace(&mut self.oldest, slot);
        match self.entries.get_mut(newer as usize) {
            Some(entry) => entry.older = slot,
            None => self.newest = slot,
        }
        let entry = &mut self.entries[slot as usize];
        (entry.newer, entry.older) = (newer, NONE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SLOTS: u32 = 5;

    fn key(n: u8) -> Key {
        [n; 32]
    }

    #[test]
    fn a_store_of_swap_slots_has_no_keys() {
        let mut index = Index::new(0, 7);
        assert_eq!((index.claim(key(1), 9, None), index.find(&key(1)), index.len()), (None, None, 0));
        assert!(!index.remove(3, 9, Reuse::First));
        index.forget(10);
        assert_eq!(index.blocks().count(), 0);
    }

    #[test]
    fn slots_are_filled_in_order_and_then_reused_from_the_least_recently_used() {
        let mut index = Index::new(3, 1);
        let claimed: Vec<_> = (1..=3).map(|n| index.claim(key(n), n.into(), None)).collect();
        assert_eq!(claimed, [0, 1, 2].map(|slot| Some((slot, None))));
        index.touch(&key(1));
        assert_eq!(index.claim(key(4), 4, None), Some((1, Some(key(2)))));
        assert_eq!((index.find(&key(2)), index.find(&key(4)), index.evicted()), (None, Some((1, 4)), 1));
        assert!(index.remove(2, 3, Reuse::Last));
        assert_eq!(
            index.claim(key(5), 5, None),
            Some((0, Some(key(1)))),
            "a slot that cannot be written is not retried at once"
        );
        assert!(index.remove(1, 4, Reuse::First));
        assert_eq!(index.claim(key(6), 6, None), Some((1, None)));
    }

    #[test]
    fn a_late_failure_does_not_take_the_key_of_a_newer_write() {
        let mut index = Index::new(1, 1);
        index.claim(key(1), 1, None);
        index.claim(key(1), 2, None);
        assert!(!index.remove(0, 1, Reuse::First));
        assert_eq!(index.find(&key(1)), Some((0, 2)));
    }

    #[derive(Clone, Debug)]
    enum Action {
        Put(u8),
        Touch(u8),
        Remove(u8, bool),
        Forget,
    }

    fn actions() -> impl Strategy<Value = Vec<Action>> {
        let action = prop_oneof![
            6 => (0u8..9).prop_map(Action::Put),
            3 => (0u8..9).prop_map(Action::Touch),
            2 => (0u8..9, any::<bool>()).prop_map(|(n, last)| Action::Remove(n, last)),
            1 => Just(Action::Forget),
        ];
        prop::collection::vec(action, 0..60)
    }

    proptest! {
        /// The model is a list of keys with their slots, least recently used first.
        #[test]
        fn a_random_history_gives_what_a_plain_list_gives(actions in actions()) {
            let mut index = Index::new(SLOTS, 1);
            let mut model: Vec<(Option<u8>, u32)> = (0..SLOTS).map(|slot| (None, slot)).collect();
            let mut generation = 1;
            for action in actions {
                generation += 1;
                match action {
                    Action::Put(n) if index.find(&key(n)).is_none() => {
                        let (held, slot) = model.remove(0);
                        prop_assert_eq!(index.claim(key(n), generation, None), Some((slot, held.map(key))));
                        model.push((Some(n), slot));
                    }
                    Action::Put(n) | Action::Touch(n) => {
                        if let Some(at) = model.iter().position(|&(held, _)| held == Some(n)) {
                            let entry = model.remove(at);
                            index.touch(&key(n));
                            model.push(entry);
                        }
                    }
                    Action::Remove(n, last) => {
                        if let Some(at) = model.iter().position(|&(held, _)| held == Some(n)) {
                            let (_, slot) = model.remove(at);
                            let found = index.find(&key(n)).unwrap();
                            let reuse = if last { Reuse::Last } else { Reuse::First };
                            prop_assert!(index.remove(slot, found.1, reuse));
                            model.insert(if last { model.len() } else { 0 }, (None, slot));
                        }
                    }
                    Action::Forget => {
                        index.forget(generation);
                        for entry in &mut model {
                            entry.0 = None;
                        }
                    }
                }
                let found = |block: StoredBlock| ((block.generation > 0).then_some(block.key[0]), block.slot);
                prop_assert_eq!(index.blocks().map(found).collect::<Vec<_>>(), model.clone());
                let live: Vec<_> = model.iter().filter(|(held, _)| held.is_some()).collect();
                prop_assert_eq!(index.live() as usize, live.len());
                for n in 0..9 {
                    let slot = model.iter().find(|&&(held, _)| held == Some(n)).map(|&(_, slot)| slot);
                    prop_assert_eq!(index.find(&key(n)).map(|(slot, _)| slot), slot);
                }
            }
            prop_assert!(index.slots.len() <= SLOTS as usize);
        }
    }
}
