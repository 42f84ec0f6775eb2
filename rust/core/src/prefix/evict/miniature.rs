//! A small cache that follows a sample of the blocks under one rule, to see how many hits the rule would have.
//!
//! Source: Waldspurger, Saemundsson, Ahmad and Park, "Cache modeling and optimization using miniature simulations",
//! USENIX ATC 2017.

use super::segments::{Rule, Segments};
use crate::id::BlockId;

/// Blocks by their tags: open addressing with linear probing, at least twice as many slots as blocks.
#[derive(Debug, Clone)]
struct Directory {
    /// A block's number plus 1, or 0.
    slots: Vec<u16>,
    /// By block.
    tags: Vec<u32>,
}

impl Directory {
    fn new(blocks: usize) -> Self {
        let blocks = blocks.min(usize::from(u16::MAX) - 1);
        Self { slots: vec![0; (2 * blocks).next_power_of_two()], tags: vec![0; blocks] }
    }

    /// Where the search for a tag begins.
    #[inline]
    fn home(&self, tag: u32) -> usize {
        tag.wrapping_mul(0x9e37_79b1).rotate_left(16) as usize & (self.slots.len() - 1)
    }

    #[inline]
    fn next(&self, at: usize) -> usize {
        (at + 1) & (self.slots.len() - 1)
    }

    /// The slot of a tag, or the empty one where it would be; and the block there.
    #[inline]
    fn search(&self, tag: u32) -> (usize, Option<BlockId>) {
        let mut at = self.home(tag);
        while let Some(block) = self.slots[at].checked_sub(1) {
            if self.tags[usize::from(block)] == tag {
                return (at, Some(BlockId(u32::from(block))));
            }
            at = self.next(at);
        }
        (at, None)
    }

    #[inline]
    fn find(&self, tag: u32) -> Option<BlockId> {
        self.search(tag).1
    }

    /// Gives a block, which has none, a tag, unless some block has it; returns whether none had.
    #[inline]
    fn insert(&mut self, block: BlockId, tag: u32) -> bool {
        let (at, there) = self.search(tag);
        if there.is_none() {
            self.tags[block.index()] = tag;
            self.slots[at] = u16::try_from(block.0 + 1).unwrap_or_default();
        }
        there.is_none()
    }

    /// Takes a block's tag away, and returns it. Slots behind move up, so that no search ends too soon.
    fn remove(&mut self, block: BlockId) -> u32 {
        let tag = self.tags[block.index()];
        let mask = self.slots.len() - 1;
        let mut hole = self.search(tag).0;
        let mut at = self.next(hole);
        while let Some(moved) = self.slots[at].checked_sub(1) {
            let from_home = at.wrapping_sub(self.home(self.tags[usize::from(moved)])) & mask;
            if from_home >= at.wrapping_sub(hole) & mask {
                self.slots[hole] = self.slots[at];
                hole = at;
            }
            at = self.next(at);
        }
        self.slots[hole] = 0;
        tag
    }
}

/// No block of a miniature.
const ABSENT: BlockId = BlockId(u32::MAX);

#[derive(Debug, Clone)]
pub(super) struct Miniature {
    segments: Segments,
    blocks: Directory,
    /// Blocks that have never been used, from this one on.
    unused: u32,
    /// Blocks of the chain that is being followed.
    chain: Vec<BlockId>,
    /// Blocks without a tag that have been used, and the tags that they had.
    empty: Vec<BlockId>,
    former: Vec<u32>,
}

impl Miniature {
    /// Of the blocks that go, one in `ghosts_one_in` is remembered.
    pub(super) fn new(blocks: usize, rule: Rule, ghosts_one_in: u16) -> Self {
        Self {
            segments: Segments::new(blocks, rule, ghosts_one_in),
            blocks: Directory::new(blocks),
            unused: 0,
            chain: Vec::new(),
            empty: Vec::new(),
            former: Vec::new(),
        }
    }

    /// A sequence has used blocks with these tags, the last one first; returns how many of them this cache has.
    pub(super) fn follow(&mut self, tags: &[u32]) -> usize {
        let Self { segments, blocks, chain, .. } = self;
        // The blocks that are there leave the order of eviction before others take room.
        let mut hits = 0;
        chain.clear();
        // A block that is released twice counts once.
        chain.extend(tags.iter().rev().map(|&tag| match blocks.find(tag) {
            Some(block) if segments.remove(block, true) => {
                hits += 1;
                block
            }
            _ => ABSENT,
        }));
        if hits < tags.len() {
            self.fill(tags, tags.len() - hits);
        }
        self.segments.begin_chain();
        for &block in self.chain.iter().rev() {
            self.segments.insert(block);
        }
        hits
    }

    /// Gives blocks to the tags of the chain that have none, as far as there are blocks.
    fn fill(&mut self, tags: &[u32], absent: usize) {
        self.make_empty(absent);
        let (segments, blocks, chain) = (&mut self.segments, &mut self.blocks, &mut self.chain);
        for (place, &tag) in chain.iter_mut().zip(tags.iter().rev()).filter(|(place, _)| **place == ABSENT) {
            let Some(&block) = self.empty.last() else { break };
            if blocks.insert(block, tag) {
                self.empty.pop();
                segments.publish(block, tag);
                *place = block;
            }
        }
        chain.retain(|&block| block != ABSENT);
    }

    /// Empties blocks until there are so many, or none is left. Blocks that are released twice leave some.
    fn make_empty(&mut self, count: usize) {
        while self.empty.len() < count && (self.unused as usize) < self.blocks.tags.len() {
            self.empty.push(BlockId(self.unused));
            self.unused += 1;
        }
        let first = self.empty.len();
        if first < count {
            self.segments.pop_into(count - first, &mut self.empty);
            self.former.clear();
            for &block in &self.empty[first..] {
                self.former.push(self.blocks.remove(block));
            }
            self.segments.evicted(&self.former);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;
    use std::collections::hash_map::Entry;

    proptest! {
        #[test]
        fn a_directory_finds_what_a_map_finds(ops in prop::collection::vec((0u32..12, 1u32..40), 0..300)) {
            // Tags that begin at few slots, so that searches run on and wrap around.
            let tag = |n: u32| (n % 3 + 1) << 28 | n << 4;
            let mut directory = Directory::new(12);
            let mut model: HashMap<u32, u32> = HashMap::new();
            for (block, n) in ops {
                let held = model.iter().find(|&(_, &at)| at == block).map(|(&tag, _)| tag);
                if let Some(held) = held {
                    prop_assert_eq!(directory.remove(BlockId(block)), held);
                    model.remove(&held);
                } else if let Entry::Vacant(entry) = model.entry(tag(n)) {
                    prop_assert!(directory.insert(BlockId(block), tag(n)) && !directory.insert(BlockId(12), tag(n)));
                    entry.insert(block);
                }
                for n in 1..40 {
                    prop_assert_eq!(directory.find(tag(n)), model.get(&tag(n)).copied().map(BlockId));
                }
            }
        }
    }

    #[test]
    fn a_block_that_is_released_twice_counts_once() {
        let mut miniature = Miniature::new(4, Rule::Once(512), 1);
        assert_eq!(miniature.follow(&[16, 8, 16]), 0);
        assert_eq!(miniature.follow(&[16, 16, 8]), 2);
        assert_eq!(miniature.segments.rings().len(), 2);
    }
}
