//! Making blocks findable by their keys, and unfindable; where events are on, removals are noted.

use super::{Pool, Twin, decode};
use crate::event::{Reason, Removal, Removals, Ring};
use crate::evict::Departure;
use crate::hash::Key;
use crate::id::BlockId;

/// What publishing a block came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Published {
    Now,
    /// The block had that key already, or the pool keeps no keys.
    Before,
    /// Another block has that key; nothing was changed.
    As(BlockId),
}

impl Pool {
    /// Makes a block findable by its key, `depth` blocks into its prompt, unless another has that key.
    pub(crate) fn publish(&mut self, block: BlockId, key: Key, depth: u32) -> Published {
        let Some(cache) = &mut self.cache else { return Published::Before };
        let former = self.nodes[block.index()].tag;
        if former != 0 {
            if let Some(other) = cache.index.find(&key) {
                return if other == block { Published::Before } else { Published::As(other) };
            }
            cache.index.remove(block, former);
        }
        if let Some(other) = cache.index.insert(block, key) {
            return Published::As(other);
        }
        cache.policy.publish(block, depth, key.tag());
        self.nodes[block.index()].tag = key.tag();
        if former != 0 {
            self.note_removal(block, Reason::Replaced, None);
        }
        Published::Now
    }

    /// Makes a block whose bytes are gone unfindable.
    pub(crate) fn unpublish(&mut self, block: BlockId) {
        if self.is_published(block) {
            self.note_removal(block, Reason::Lost, None);
        }
        self.forget(block);
    }

    /// Forgets all keys without noting each; blocks that are in use stay so.
    pub(crate) fn unpublish_all(&mut self) {
        for block in (0..).map(BlockId).take(self.nodes.len()) {
            self.forget(block);
        }
    }

    fn forget(&mut self, block: BlockId) {
        let node = &mut self.nodes[block.index()];
        let tag = std::mem::take(&mut node.tag);
        if node.refs == 0 {
            self.orphans.extend(decode(std::mem::take(&mut node.twin)));
        }
        if let (Some(cache), true) = (&mut self.cache, tag != 0) {
            cache.index.remove(block, tag);
            if cache.policy.remove(block, Departure::Gone) {
                self.free.insert(block);
                self.refresh(block);
            }
        }
    }

    /// Whether the pool keeps keys.
    pub(crate) fn is_caching(&self) -> bool {
        self.cache.is_some()
    }

    /// Notes removals from now on, the last `capacity` of them.
    pub(crate) fn note_removals(&mut self, capacity: usize) {
        self.removals = Some(Box::new(Ring::new(capacity)));
    }

    /// Removals that wait, where they are noted.
    pub(crate) fn removals(&mut self) -> Option<&mut Removals> {
        self.removals.as_deref_mut()
    }

    /// As [`Pool::removals`], to be looked at.
    pub(crate) fn noted_removals(&self) -> Option<&Removals> {
        self.removals.as_deref()
    }

    /// Notes that a block is no longer findable.
    pub(super) fn note_removal(&mut self, block: BlockId, reason: Reason, twin: Option<Twin>) {
        if let Some(removals) = &mut self.removals {
            removals.push(Removal { block, reason, remaining: u8::from(twin.is_some()) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{Chain, KeySpec};
    use crate::id::Tier;

    fn key(n: u32) -> Key {
        Chain::new(&KeySpec::default(), 1, 0).block(&[n], &[]).unwrap()
    }

    #[test]
    fn a_key_has_one_block_and_a_block_one_key() {
        let mut pool = Pool::new(Tier::Device, 3, true).unwrap();
        pool.note_removals(9);
        let mut blocks = Vec::new();
        pool.take(3, &mut blocks);
        assert_eq!(pool.publish(blocks[0], key(1), 0), Published::Now);
        assert_eq!(pool.publish(blocks[0], key(1), 0), Published::Before);
        assert_eq!(pool.publish(blocks[1], key(1), 0), Published::As(blocks[0]));
        assert_eq!(pool.publish(blocks[0], key(2), 0), Published::Now);
        assert_eq!((pool.find(&key(1)), pool.find(&key(2)), pool.published()), (None, Some(blocks[0]), 1));
        pool.unpublish(blocks[0]);
        pool.unpublish(blocks[1]);
        let noted: Vec<_> = pool.removals().unwrap().drain().1.map(|r| (r.block, r.reason)).collect();
        assert_eq!(noted, [(blocks[0], Reason::Replaced), (blocks[0], Reason::Lost)]);
    }
}
