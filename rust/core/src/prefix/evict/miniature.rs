//! A small cache that follows a sample of the blocks under one rule, to see how many hits the rule would have.
//!
//! Source: Waldspurger, Saemundsson, Ahmad and Park, "Cache modeling and optimization using miniature simulations",
//! USENIX ATC 2017.

use super::segments::{Rule, Segments};
use crate::id::BlockId;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Tags are random bits already.
#[derive(Debug, Clone, Copy, Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0 << 8 | u64::from(byte);
        }
    }

    fn write_u32(&mut self, tag: u32) {
        self.0 = u64::from(tag).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// No block of a miniature.
const ABSENT: BlockId = BlockId(u32::MAX);

#[derive(Debug, Clone)]
pub(super) struct Miniature {
    segments: Segments,
    /// By tag.
    blocks: HashMap<u32, BlockId, BuildHasherDefault<AsItIs>>,
    /// By block.
    tags: Vec<u32>,
    /// Blocks that have never been used, from this one on.
    unused: u32,
    /// Blocks of the chain that is being followed.
    chain: Vec<BlockId>,
}

impl Miniature {
    pub(super) fn new(blocks: usize, rule: Rule) -> Self {
        Self {
            segments: Segments::new(blocks, rule),
            blocks: HashMap::with_capacity_and_hasher(2 * blocks, BuildHasherDefault::default()),
            tags: vec![0; blocks],
            unused: 0,
            chain: Vec::new(),
        }
    }

    /// A sequence has used blocks with these tags, the last one first; returns how many of them this cache has.
    pub(super) fn follow(&mut self, tags: &[u32]) -> usize {
        let Self { segments, blocks, chain, .. } = self;
        // The blocks that are there leave the order of eviction before others take room.
        let mut hits = 0;
        chain.clear();
        // A block that is released twice counts once.
        chain.extend(tags.iter().rev().map(|tag| match blocks.get(tag) {
            Some(&block) if segments.remove(block, true) => {
                hits += 1;
                block
            }
            _ => ABSENT,
        }));
        if hits < tags.len() {
            self.fill(tags);
        }
        self.segments.begin_chain();
        for &block in self.chain.iter().rev() {
            self.segments.insert(block);
        }
        hits
    }

    /// Gives blocks to the tags of the chain that have none, as far as there are blocks.
    fn fill(&mut self, tags: &[u32]) {
        for (at, &tag) in tags.iter().rev().enumerate() {
            if self.chain[at] == ABSENT && !self.blocks.contains_key(&tag) {
                let Some(block) = self.take(tag) else { break };
                self.chain[at] = block;
            }
        }
        self.chain.retain(|&block| block != ABSENT);
    }

    /// Gives a tag a block, if one is left.
    fn take(&mut self, tag: u32) -> Option<BlockId> {
        let block = if (self.unused as usize) < self.tags.len() {
            self.unused += 1;
            BlockId(self.unused - 1)
        } else {
            let block = self.segments.pop()?;
            let former = self.tags[block.index()];
            self.blocks.remove(&former);
            self.segments.evicted(&[former]);
            block
        };
        self.tags[block.index()] = tag;
        self.blocks.insert(tag, block);
        self.segments.publish(block, tag);
        Some(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_that_is_released_twice_counts_once() {
        let mut miniature = Miniature::new(4, Rule::Once(512));
        assert_eq!(miniature.follow(&[16, 8, 16]), 0);
        assert_eq!(miniature.follow(&[16, 16, 8]), 2);
        assert_eq!(miniature.segments.rings().len(), 2);
    }
}
