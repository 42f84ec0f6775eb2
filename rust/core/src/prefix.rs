//! Key to block, for sharing: an open-addressing table of 8-byte slots (tag, block). The keys themselves lie by block id.

use crate::hash::Key;
use crate::id::BlockId;

/// Slots a block: few enough probes, for 24 bytes.
const SLOTS_PER_BLOCK: usize = 3;

/// Which block holds the bytes of a key.
///
/// A slot is 0 if empty, else the key's tag and the block's id plus 1. Removal shifts later slots back, so there are no
/// tombstones and the table never has to be rebuilt.
#[derive(Debug, Clone)]
pub(crate) struct PrefixIndex {
    slots: Vec<u64>,
    /// By block id, as far as blocks have been published.
    keys: Vec<Key>,
    len: usize,
}

impl PrefixIndex {
    pub(crate) fn new(blocks: usize) -> Self {
        let slots = vec![0; blocks * SLOTS_PER_BLOCK + 8];
        Self { slots, keys: Vec::with_capacity(blocks), len: 0 }
    }

    /// Keys in the table.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Key that was set for a block.
    pub(crate) fn key(&self, block: BlockId) -> Option<&Key> {
        self.keys.get(block.index())
    }

    /// The slot where the search for a tag begins: read ahead of a removal, so that cache misses overlap.
    #[inline]
    pub(crate) fn look_ahead(&self, tag: u32) -> u64 {
        self.slots[self.home(tag)]
    }

    /// The block with that key.
    #[inline]
    pub(crate) fn find(&self, key: &Key) -> Option<BlockId> {
        let tag = key.tag();
        let mut at = self.home(tag);
        loop {
            let slot = self.slots[at];
            if slot == 0 {
                return None;
            }
            if tag_of(slot) == tag && self.keys[block_of(slot).index()] == *key {
                return Some(block_of(slot));
            }
            at = self.next(at);
        }
    }

    /// Adds a block under a key, unless some block has that key: then returns that one and changes nothing.
    #[inline]
    pub(crate) fn insert(&mut self, block: BlockId, key: Key) -> Option<BlockId> {
        let tag = key.tag();
        let mut at = self.home(tag);
        loop {
            let slot = self.slots[at];
            if slot == 0 {
                break;
            }
            if tag_of(slot) == tag && self.keys[block_of(slot).index()] == key {
                return Some(block_of(slot));
            }
            at = self.next(at);
        }
        if block.index() >= self.keys.len() {
            self.keys.resize(grown(block, self.keys.capacity()), Key::default());
        }
        self.keys[block.index()] = key;
        self.slots[at] = u64::from(tag) << 32 | u64::from(block.0 + 1);
        self.len += 1;
        None
    }

    /// Removes a block; `tag` is that of its key. Returns whether it was there.
    pub(crate) fn remove(&mut self, block: BlockId, tag: u32) -> bool {
        let wanted = u64::from(tag) << 32 | u64::from(block.0 + 1);
        let mut hole = self.home(tag);
        while self.slots[hole] != wanted {
            if self.slots[hole] == 0 {
                return false;
            }
            hole = self.next(hole);
        }
        let mut at = hole;
        loop {
            at = self.next(at);
            let slot = self.slots[at];
            if slot == 0 {
                break;
            }
            // A slot may fill the hole unless its home lies behind the hole on the way to it.
            let wants = self.home(tag_of(slot));
            let stays = if hole <= at { hole < wants && wants <= at } else { hole < wants || wants <= at };
            if !stays {
                self.slots[hole] = slot;
                hole = at;
            }
        }
        self.slots[hole] = 0;
        self.len -= 1;
        true
    }

    #[inline]
    fn home(&self, tag: u32) -> usize {
        ((u64::from(tag) * self.slots.len() as u64) >> 32) as usize
    }

    #[inline]
    fn next(&self, at: usize) -> usize {
        if at + 1 == self.slots.len() { 0 } else { at + 1 }
    }
}

/// Length of an array by block id that is to include a block: some pages more, within what was reserved.
pub(crate) fn grown(block: BlockId, capacity: usize) -> usize {
    (block.index() + 1).next_multiple_of(1024).min(capacity.max(block.index() + 1))
}

fn tag_of(slot: u64) -> u32 {
    (slot >> 32) as u32
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half is the id")]
fn block_of(slot: u64) -> BlockId {
    BlockId((slot as u32).wrapping_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{Chain, KeySpec};
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn key(n: u32) -> Key {
        Chain::new(&KeySpec::default(), 1, 0).block(&[n], &[]).unwrap()
    }

    proptest! {
        #[test]
        fn agrees_with_a_map(ops in prop::collection::vec((any::<bool>(), 0u32..24), 0..400)) {
            let mut index = PrefixIndex::new(24);
            let mut model: HashMap<u32, BlockId> = HashMap::new();
            for (add, n) in ops {
                let block = BlockId(n);
                if add && !model.contains_key(&n) {
                    prop_assert_eq!(index.insert(block, key(n)), None);
                    prop_assert_eq!(index.insert(BlockId(23 - n), key(n)), Some(block));
                    model.insert(n, block);
                } else if !add {
                    prop_assert_eq!(index.remove(block, key(n).tag()), model.remove(&n).is_some());
                }
                prop_assert_eq!(index.len(), model.len());
                for m in 0..24 {
                    prop_assert_eq!(index.find(&key(m)), model.get(&m).copied());
                }
            }
        }
    }
}
