//! Hash table from key to block: 8-byte slots (tag, block) in buckets. The keys themselves are stored by block id.

use crate::hash::Key;
use crate::id::BlockId;

/// Words in a bucket, a cache line: slots, then a count of keys that overflowed to the next bucket.
const BUCKET: usize = 8;
const SLOTS: usize = BUCKET - 1;
/// Maximum average of blocks per bucket if all are cached: overflow is rare, at 21 bytes per block.
const BLOCKS: usize = 3;
/// The same with several page classes, at 13 bytes per block: only once one class has all extents, one bucket in eight
/// overflows.
const BLOCKS_OF_CLASS: usize = 5;

/// Which block holds the bytes of a key.
///
/// A slot is 0 if empty, else the key's tag and the block's id plus 1. All slots of a bucket are compared without
/// branches, which would be mispredicted. Removal leaves no tombstones, so the table never has to be rebuilt.
#[derive(Debug, Clone)]
pub(crate) struct PrefixIndex {
    /// Words, because the system provides them zeroed and untouched.
    words: Vec<u64>,
    /// Word of the first bucket, aligned to a cache line.
    first: usize,
    buckets: usize,
    /// By block id, as far as blocks have been published.
    keys: Vec<Key>,
    len: usize,
}

impl PrefixIndex {
    pub(crate) fn new(blocks: usize) -> Self {
        Self::with_buckets(blocks, blocks / BLOCKS + 1)
    }

    fn with_buckets(blocks: usize, buckets: usize) -> Self {
        let words = vec![0; (buckets + 1) * BUCKET];
        let first = words.as_ptr().align_offset(64).min(SLOTS);
        Self { words, first, buckets, keys: Vec::with_capacity(blocks), len: 0 }
    }

    /// Reserves memory for the `blocks` keys of one of several page classes, while there are none.
    pub(crate) fn expect(&mut self, blocks: usize) {
        let keys = std::mem::take(&mut self.keys);
        *self = Self { keys, ..Self::with_buckets(0, blocks / BLOCKS_OF_CLASS + 1) };
    }

    /// Makes room for `blocks` blocks; existing entries stay.
    pub(crate) fn grow(&mut self, blocks: usize) {
        if blocks / BLOCKS < self.buckets {
            return;
        }
        let former = std::mem::replace(self, Self::new(blocks));
        self.keys.extend_from_slice(&former.keys);
        for at in 0..former.buckets {
            for &slot in former.bucket(at)[..SLOTS].iter().filter(|&&slot| slot != 0) {
                let block = block_of(slot);
                self.add(block, former.keys[block.index()]);
            }
        }
    }

    /// Keys in the table.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Key that was set for a block.
    pub(crate) fn key(&self, block: BlockId) -> Option<&Key> {
        self.keys.get(block.index())
    }

    /// Sets the key of a block that is not found by it.
    #[inline]
    pub(crate) fn set_key(&mut self, block: BlockId, key: Key) {
        if block.index() >= self.keys.len() {
            self.keys.resize(grown(block, self.keys.capacity()), Key::default());
        }
        self.keys[block.index()] = key;
    }

    /// Prefetches the first bucket of a tag, ahead of a change, so that cache misses overlap.
    #[inline]
    pub(crate) fn look_ahead(&self, tag: u32) -> u64 {
        self.words[self.word(self.home(tag))]
    }

    /// The block with that key.
    #[inline]
    pub(crate) fn find(&self, key: &Key) -> Option<BlockId> {
        let mut at = self.home(key.tag());
        loop {
            let bucket = self.bucket(at);
            if let Some(found) = self.find_in(bucket, key.tag(), |other| other == key) {
                return Some(found);
            }
            if bucket[SLOTS] == 0 {
                return None;
            }
            at = self.next(at);
        }
    }

    /// The block whose key has this link.
    #[expect(clippy::cast_possible_truncation, reason = "the lower half is the tag")]
    pub(crate) fn find_link(&self, link: u64) -> Option<BlockId> {
        let mut at = self.home(link as u32);
        loop {
            let bucket = self.bucket(at);
            if let Some(found) = self.find_in(bucket, link as u32, |key| key.link() == link) {
                return Some(found);
            }
            if bucket[SLOTS] == 0 {
                return None;
            }
            at = self.next(at);
        }
    }

    /// Adds a block under a key that no block has.
    #[inline]
    pub(crate) fn add(&mut self, block: BlockId, key: Key) {
        let tag = key.tag();
        let mut at = self.home(tag);
        loop {
            let bucket = self.bucket_mut(at);
            let empty = with_tag(bucket, 0);
            if empty != 0 {
                bucket[empty.trailing_zeros() as usize] = slot(block, tag);
                break;
            }
            bucket[SLOTS] += 1;
            at = self.next(at);
        }
        self.set_key(block, key);
        self.len += 1;
    }

    /// Removes a block; `tag` is that of its key. Returns whether it was there.
    #[inline]
    pub(crate) fn remove(&mut self, block: BlockId, tag: u32) -> bool {
        let (home, wanted) = (self.home(tag), slot(block, tag));
        let mut at = home;
        loop {
            let bucket = self.bucket_mut(at);
            let found = mask(bucket, |slot| slot == wanted);
            if found != 0 {
                bucket[found.trailing_zeros() as usize] = 0;
                break;
            }
            if bucket[SLOTS] == 0 {
                return false;
            }
            at = self.next(at);
        }
        while at != home {
            at = at.checked_sub(1).unwrap_or(self.buckets - 1);
            self.bucket_mut(at)[SLOTS] -= 1;
        }
        self.len -= 1;
        true
    }

    /// Replaces a block, whose key has that tag, by another block without a key.
    pub(crate) fn rename(&mut self, from: BlockId, to: BlockId, tag: u32) {
        let (mut at, wanted) = (self.home(tag), slot(from, tag));
        loop {
            let bucket = self.bucket_mut(at);
            let found = mask(bucket, |slot| slot == wanted);
            if found != 0 {
                bucket[found.trailing_zeros() as usize] = slot(to, tag);
                break;
            }
            if bucket[SLOTS] == 0 {
                return;
            }
            at = self.next(at);
        }
        if to.index() >= self.keys.len() {
            self.keys.resize(grown(to, self.keys.capacity()), Key::default());
        }
        self.keys[to.index()] = self.keys[from.index()];
    }

    #[inline]
    fn find_in(&self, bucket: &[u64], tag: u32, is: impl Fn(&Key) -> bool) -> Option<BlockId> {
        let mut alike = with_tag(bucket, tag);
        while alike != 0 {
            let block = block_of(bucket[alike.trailing_zeros() as usize]);
            if is(&self.keys[block.index()]) {
                return Some(block);
            }
            alike &= alike - 1;
        }
        None
    }

    #[inline]
    fn home(&self, tag: u32) -> usize {
        ((u64::from(tag) * self.buckets as u64) >> 32) as usize
    }

    #[inline]
    fn next(&self, at: usize) -> usize {
        if at + 1 == self.buckets { 0 } else { at + 1 }
    }

    #[inline]
    fn word(&self, bucket: usize) -> usize {
        self.first + bucket * BUCKET
    }

    #[inline]
    fn bucket(&self, at: usize) -> &[u64] {
        let word = self.word(at);
        &self.words[word..word + BUCKET]
    }

    #[inline]
    fn bucket_mut(&mut self, at: usize) -> &mut [u64] {
        let word = self.word(at);
        &mut self.words[word..word + BUCKET]
    }
}

/// Slots of a bucket that satisfy a predicate, one bit per slot.
#[inline]
fn mask(bucket: &[u64], is: impl Fn(u64) -> bool) -> u32 {
    bucket[..SLOTS].iter().enumerate().fold(0, |mask, (i, &slot)| mask | u32::from(is(slot)) << i)
}

/// Slots with a tag; empty ones have tag 0.
#[inline]
fn with_tag(bucket: &[u64], tag: u32) -> u32 {
    mask(bucket, |slot| (slot >> 32) as u32 == tag)
}

#[inline]
fn slot(block: BlockId, tag: u32) -> u64 {
    u64::from(tag) << 32 | u64::from(block.0 + 1)
}

/// New length of an array that is indexed by block id and must include this block: rounded up, within its capacity.
pub(crate) fn grown(block: BlockId, capacity: usize) -> usize {
    (block.index() + 1).next_multiple_of(1024).min(capacity.max(block.index() + 1))
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
        fn agrees_with_a_map(
            buckets in 4usize..9, ops in prop::collection::vec((any::<bool>(), 0u32..24), 0..400), spare in 24u32..2000,
        ) {
            // With few buckets, many keys overflow to the next.
            let mut index = PrefixIndex { buckets, ..PrefixIndex::new(24) };
            let mut model: HashMap<u32, BlockId> = HashMap::new();
            for (add, n) in ops {
                let block = BlockId(n);
                if add && !model.contains_key(&n) {
                    prop_assert_eq!(index.find(&key(n)), None);
                    index.add(block, key(n));
                    prop_assert_eq!(index.find(&key(n)), Some(block));
                    model.insert(n, block);
                    if n % 3 == 0 {
                        index.rename(block, BlockId(spare + n), key(n).tag());
                        model.insert(n, BlockId(spare + n));
                    }
                } else if !add {
                    let block = model.get(&n).copied().unwrap_or(block);
                    prop_assert_eq!(index.remove(block, key(n).tag()), model.remove(&n).is_some());
                }
                prop_assert_eq!(index.len(), model.len());
                prop_assert!(!model.is_empty() || index.words.iter().all(|&word| word == 0));
                for m in 0..24 {
                    prop_assert_eq!(index.find(&key(m)), model.get(&m).copied());
                }
            }
        }
    }

    #[test]
    fn tags_spread_over_all_buckets() {
        let index = PrefixIndex { buckets: 4, ..PrefixIndex::new(24) };
        let homes = [0, 1 << 30, 2 << 30, 3 << 30, u32::MAX].map(|tag| index.home(tag));
        assert_eq!(homes, [0, 1, 2, 3, 3]);
    }
}
