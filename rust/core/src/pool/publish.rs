//! Publishing blocks under their keys, and forgetting them. With events on, removals are noted.

use super::Pool;
use crate::block::TierBlock;
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
    /// Publishes a block under its key, `depth` blocks into its prompt, unless another block has that key.
    pub(crate) fn publish(&mut self, block: BlockId, key: Key, depth: u32) -> Published {
        let Some(cache) = &mut self.cache else { return Published::Before };
        let former = self.blocks[block.index()].tag();
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
        self.blocks[block.index()].set_tag(key.tag());
        if former != 0 {
            self.note_removal(block, Reason::Replaced, None);
        }
        Published::Now
    }

    /// Forgets a block whose bytes are lost.
    pub(crate) fn unpublish(&mut self, block: BlockId) {
        if self.block(block).is_published() {
            self.note_removal(block, Reason::Lost, None);
        }
        self.forget(block);
    }

    /// Forgets all keys without noting each; blocks that are in use stay so.
    pub(crate) fn unpublish_all(&mut self) {
        for block in (0..).map(BlockId).take(self.blocks.len()) {
            self.forget(block);
        }
    }

    fn forget(&mut self, id: BlockId) {
        let before = self.blocks[id.index()];
        let tag = self.blocks[id.index()].take_tag();
        if !before.is_used() {
            self.orphans.extend(self.blocks[id.index()].set_tier_copy(None));
        }
        if let (Some(cache), true) = (&mut self.cache, tag != 0) {
            cache.index.remove(id, tag);
            cache.policy.remove(id, Departure::Gone);
            self.moved(id, before);
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

    /// Notes that a block can no longer be found.
    pub(super) fn note_removal(&mut self, block: BlockId, reason: Reason, copy: Option<TierBlock>) {
        if let Some(removals) = &mut self.removals {
            removals.push(Removal { block, reason, remaining: u8::from(copy.is_some()) });
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
        pool.take(3, false, &mut blocks);
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
