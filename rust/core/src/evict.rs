//! Which cached block goes first: least recently used, by a ring of stamped entries.
//!
//! A block that becomes evictable is put at the ring's end with a new stamp; one that is used again only loses its
//! stamp, and its old entry is skipped later. So every operation touches one word of the block, eviction reads the ring in
//! order, and its cost does not depend on how many blocks could be evicted.

use crate::id::BlockId;
use std::collections::VecDeque;

/// Cached blocks, least recently used first.
#[derive(Debug, Clone)]
pub(crate) struct Lru {
    /// (block, stamp); an entry counts while the block still has that stamp.
    ring: VecDeque<(u32, u32)>,
    /// 0 for a block that is not evictable.
    stamps: Vec<u32>,
    next_stamp: u32,
    len: usize,
}

impl Lru {
    pub(crate) fn new(blocks: usize) -> Self {
        Self { ring: VecDeque::new(), stamps: vec![0; blocks], next_stamp: 1, len: 0 }
    }

    /// Blocks that can be evicted.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether a block can be evicted.
    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.stamps[block.index()] != 0
    }

    /// Blocks that can be evicted, least recently used first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockId> {
        let counts = |(block, stamp): &&(u32, u32)| self.stamps[*block as usize] == *stamp;
        self.ring.iter().filter(counts).map(|(block, _)| BlockId(*block))
    }

    /// Makes a block evictable, after all others.
    #[inline]
    pub(crate) fn insert(&mut self, block: BlockId) {
        debug_assert!(!self.contains(block));
        if self.next_stamp == u32::MAX || self.ring.len() > self.len + self.len / 2 + 64 {
            self.compact();
        }
        self.stamps[block.index()] = self.next_stamp;
        self.ring.push_back((block.0, self.next_stamp));
        self.next_stamp += 1;
        self.len += 1;
    }

    /// Takes a block out: it is in use again, or gone.
    #[inline]
    pub(crate) fn remove(&mut self, block: BlockId) -> bool {
        let was = std::mem::take(&mut self.stamps[block.index()]) != 0;
        self.len -= usize::from(was);
        was
    }

    /// Takes the least recently used block out.
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<BlockId> {
        while let Some((block, stamp)) = self.ring.pop_front() {
            if self.stamps[block as usize] == stamp {
                self.stamps[block as usize] = 0;
                self.len -= 1;
                return Some(BlockId(block));
            }
        }
        None
    }

    /// Drops the entries that no longer count, and numbers the others anew.
    fn compact(&mut self) {
        let stamps = &mut self.stamps;
        let mut next = 1;
        self.ring.retain_mut(|(block, stamp)| {
            let counts = stamps[*block as usize] == *stamp;
            if counts {
                stamps[*block as usize] = next;
                *stamp = next;
                next += 1;
            }
            counts
        });
        self.next_stamp = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn gives_blocks_in_the_order_of_their_last_insertion(ops in prop::collection::vec((0u8..5, 0u32..40), 0..600)) {
            let mut lru = Lru::new(40);
            let mut model: Vec<u32> = Vec::new();
            for (op, n) in ops {
                match op {
                    0 | 1 if !model.contains(&n) => {
                        lru.insert(BlockId(n));
                        model.push(n);
                    }
                    2 => {
                        prop_assert_eq!(lru.remove(BlockId(n)), model.contains(&n));
                        model.retain(|&m| m != n);
                    }
                    3 => {
                        let first = (!model.is_empty()).then(|| BlockId(model.remove(0)));
                        prop_assert_eq!(lru.pop(), first);
                    }
                    4 => lru.compact(),
                    _ => {}
                }
                prop_assert_eq!(lru.len(), model.len());
                prop_assert!(lru.iter().map(|block| block.0).eq(model.iter().copied()));
                prop_assert!((0..40).all(|m| lru.contains(BlockId(m)) == model.contains(&m)));
            }
        }
    }

    #[test]
    fn the_ring_stays_small_however_often_blocks_come_and_go() {
        let mut lru = Lru::new(8);
        for i in 0..100_000 {
            lru.insert(BlockId(i % 8));
            assert!(lru.remove(BlockId(i % 8)));
        }
        assert!(lru.ring.len() <= 128);
    }
}
