//! The order in which blocks are dropped: leaves first, and of these the least recently used.
//!
//! A leaf is a block that no stored block names as its parent. The index keeps one order for the whole store, and each
//! tenant with a quota has another of the same ranks.

use crate::header::Key;
use std::collections::{BTreeSet, HashMap};

/// A block's place in the order: whether it has children, its last use, its slot.
pub(crate) type Rank = (bool, i64, u32);

/// What happens to a new block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Fits,
    /// It fits if the block in this slot is dropped.
    InPlaceOf(u32),
    Refused,
}

/// What happens to a new block of rank `new`, which follows `parent`, if these blocks leave no room.
pub(crate) fn judge(order: &BTreeSet<Rank>, new: (bool, i64), parent: Option<Rank>) -> Verdict {
    let first = order.first().copied();
    if let Some((true, _, slot)) = first {
        return Verdict::InPlaceOf(slot); // a circle of parents
    }
    // With the new block, its parent is not a leaf.
    let parent = parent.filter(|rank| order.contains(rank));
    let other = order.iter().find(|&&rank| Some(rank) != parent).copied();
    let parent = parent.map(|(_, used, slot)| (true, used, slot));
    match other.into_iter().chain(parent).min() {
        Some(rank @ (has_children, used, slot)) if (has_children, used) < new && Some(rank) != parent => {
            Verdict::InPlaceOf(slot)
        }
        _ => Verdict::Refused,
    }
}

/// The ranks of a store's blocks.
#[derive(Debug, Default)]
pub(crate) struct Ranks {
    order: BTreeSet<Rank>,
    /// How many blocks name a key as their parent.
    children: HashMap<Key, u32>,
}

impl Ranks {
    pub(crate) fn has_children(&self, key: &Key) -> bool {
        self.children.contains_key(key)
    }

    /// Counts a child; returns whether it is the first.
    pub(crate) fn add_child(&mut self, parent: Key) -> bool {
        let count = self.children.entry(parent).or_default();
        *count += 1;
        *count == 1
    }

    /// Counts a child less; returns whether it was the last.
    pub(crate) fn remove_child(&mut self, parent: Key) -> bool {
        let Some(count) = self.children.get_mut(&parent) else { return false };
        *count -= 1;
        let is_last = *count == 0;
        if is_last {
            self.children.remove(&parent);
        }
        is_last
    }

    pub(crate) fn insert(&mut self, rank: Rank) {
        self.order.insert(rank);
    }

    pub(crate) fn remove(&mut self, rank: Rank) {
        self.order.remove(&rank);
    }

    pub(crate) fn has(&self, rank: Rank) -> bool {
        self.order.contains(&rank)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Rank> {
        self.order.iter()
    }

    /// What happens to a new block in a full store.
    pub(crate) fn judge(&self, new: (bool, i64), parent: Option<Rank>) -> Verdict {
        judge(&self.order, new, parent)
    }

    /// Compares the counts with the parents of all stored blocks; zeros mean none.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub(crate) fn check(&self, parents: impl Iterator<Item = Key>) -> Result<(), String> {
        let mut expected = Self::default();
        for parent in parents.filter(|parent| *parent != [0; 32]) {
            expected.add_child(parent);
        }
        if self.children == expected.children { Ok(()) } else { Err("the counts of children are wrong".to_owned()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: (bool, i64) = (false, i64::MAX);

    #[test]
    fn a_new_block_takes_the_place_of_the_oldest_leaf_but_never_of_its_own_prompt() {
        let order = BTreeSet::from([(true, 1, 10), (true, 2, 11), (false, 3, 12), (false, 9, 13)]);
        assert_eq!(judge(&order, NEW, None), Verdict::InPlaceOf(12));
        assert_eq!(judge(&order, NEW, Some((false, 3, 12))), Verdict::InPlaceOf(13));
        let own = BTreeSet::from([(true, 1, 10), (true, 2, 11), (false, 3, 12)]);
        assert_eq!(judge(&own, NEW, Some((false, 3, 12))), Verdict::Refused);
        assert_eq!(judge(&order, (false, i64::MIN), None), Verdict::Refused, "its parent is not stored");
        assert_eq!(judge(&BTreeSet::from([(true, 5, 1), (true, 4, 2)]), NEW, None), Verdict::InPlaceOf(2), "a circle");
    }

    #[test]
    fn a_block_is_a_leaf_until_it_has_a_child_and_again_after_the_last() {
        let (mut ranks, key) = (Ranks::default(), [7; 32]);
        assert_eq!((ranks.add_child(key), ranks.add_child(key), ranks.has_children(&key)), (true, false, true));
        assert!(ranks.check([key, [0; 32], key].into_iter()).is_ok() && ranks.check([key].into_iter()).is_err());
        assert_eq!((ranks.remove_child(key), ranks.remove_child(key), ranks.remove_child(key)), (false, true, false));
        assert!(!ranks.has_children(&key));
    }
}
