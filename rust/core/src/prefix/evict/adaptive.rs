//! The rule that has the most hits just now, found out by miniature caches.

use super::miniature::Miniature;
use super::segments::{Rule, Segments};
use super::{Departure, Evictor};
use crate::id::BlockId;

/// The rules that are tried.
const RULES: [Rule; 5] = [Rule::Lru, Rule::Once(307), Rule::Once(102), Rule::Once(10), Rule::Keep];
/// Blocks of a miniature cache, if the pool has as many: at least so many, and below twice as many.
const MINIATURE_BLOCKS: usize = 256;
/// Blocks followed between two choices: one in so many of a miniature's.
const CHOICES: usize = 8;
/// What a choice leaves of the scores of before, in 256.
const KEPT: u64 = 248;

/// A pool's blocks under one rule, and small caches that follow a sample of them under each.
#[derive(Debug, Clone)]
pub(crate) struct Adaptive {
    segments: Segments,
    miniatures: Vec<Miniature>,
    /// Hits of each miniature, times 256, of which older ones count less.
    scores: [u64; RULES.len()],
    /// A block is followed if so many of its tag's first bits are 0.
    sample_bits: u32,
    /// Tags of the chain that is being released, as far as they are followed.
    chain: Vec<u32>,
    /// Blocks to follow until the next choice.
    until_choice: usize,
    current: usize,
}

impl Adaptive {
    pub(crate) fn new(blocks: usize) -> Self {
        let sample_bits = (blocks / MINIATURE_BLOCKS).max(1).ilog2();
        let mut new = Self {
            segments: Segments::new(blocks, RULES[0]),
            miniatures: Vec::new(),
            scores: [0; RULES.len()],
            sample_bits,
            chain: Vec::new(),
            until_choice: 0,
            current: 0,
        };
        new.miniatures.extend(RULES.map(|rule| Miniature::new(blocks >> sample_bits, rule)));
        new
    }

    /// Follows the chain that has been released.
    fn follow(&mut self) {
        for (miniature, score) in self.miniatures.iter_mut().zip(&mut self.scores) {
            *score += 256 * miniature.follow(&self.chain) as u64;
        }
        let followed = self.chain.len();
        self.chain.clear();
        if self.until_choice > followed {
            self.until_choice -= followed;
        } else {
            self.choose();
        }
    }

    fn choose(&mut self) {
        let now = self.scores[self.current];
        let (best, most) = self.scores.iter().copied().enumerate().max_by_key(|&(_, score)| score).unwrap_or_default();
        if most > now + now / 128 + 1024 {
            self.current = best;
            self.segments.set_rule(RULES[best]);
        }
        for score in &mut self.scores {
            *score = *score * KEPT / 256;
        }
        self.until_choice = ((self.segments.blocks() >> self.sample_bits) / CHOICES).max(1);
    }

    #[inline]
    fn note(&mut self, block: BlockId) {
        let tag = self.segments.tag(block);
        if tag.leading_zeros() >= self.sample_bits && tag != 0 {
            self.chain.push(tag << self.sample_bits);
        }
    }
}

impl Evictor for Adaptive {
    fn len(&self) -> usize {
        self.segments.rings().len()
    }

    fn contains(&self, block: BlockId) -> bool {
        self.segments.rings().contains(block)
    }

    #[inline]
    fn insert(&mut self, block: BlockId) {
        self.note(block);
        self.segments.insert(block);
    }

    #[inline]
    fn remove(&mut self, block: BlockId, departure: Departure) -> bool {
        self.segments.remove(block, departure == Departure::Hit)
    }

    fn pop(&mut self) -> Option<BlockId> {
        let mut first = Vec::with_capacity(1);
        self.segments.pop_into(1, &mut first);
        first.pop()
    }

    fn pop_into(&mut self, count: usize, out: &mut Vec<BlockId>) {
        self.segments.pop_into(count, out);
    }

    fn evicted(&mut self, tags: &[u32]) {
        self.segments.evicted(tags);
    }

    #[inline]
    fn publish(&mut self, block: BlockId, _: u32, tag: u32) {
        self.segments.publish(block, tag);
    }

    fn begin_chain(&mut self) {
        if !self.chain.is_empty() {
            self.follow();
        }
        self.segments.begin_chain();
    }

    #[inline]
    fn hold(&mut self, block: BlockId) {
        self.note(block);
        self.segments.hold(block);
    }

    fn resize(&mut self, blocks: usize) {
        self.segments.resize(blocks);
    }

    fn relocate(&mut self, from: BlockId, to: BlockId) {
        self.segments.relocate(from, to);
    }

    fn boxed_clone(&self) -> Box<dyn Evictor> {
        Box::new(self.clone())
    }
}
