//! The rule that has the most hits just now, found out by miniature caches.

use super::miniature::Miniature;
use super::segments::{Rule, Segments};
use super::{Departure, Evictor};
use crate::id::BlockId;

/// The rules that are tried; the first one until there is reason for another.
const RULES: [Rule; 4] = [Rule::Once(102), Rule::Once(10), Rule::Once(409), Rule::Keep];
/// Fewest blocks of a miniature cache, if the pool has as many.
const FEWEST_BLOCKS: usize = 128;
/// Blocks of a miniature cache of a large pool, at least.
const MANY_BLOCKS: usize = 512;
/// One block in `1 << SPARSE_BITS` is followed in pools between, which keeps what this costs low.
const SPARSE_BITS: u32 = 4;
/// Choices while a miniature cache follows as many blocks as it has.
const CHOICES: usize = 8;
/// What a choice leaves of all counts, in 256: they halve while a miniature follows 14 choices' blocks.
const REMAINING: u64 = 244;
/// One hit, as it is counted: fractions remain of older ones.
const HIT: u64 = 256;
/// Hits that another rule must have more.
const MARGIN: u64 = 2 * HIT;
/// What [`Rule::Keep`] must have more for each 32 hits: what it keeps has no merit but to be there.
const MARGIN_OF_KEEP: u64 = 3;

/// Hits of the miniature caches; older ones count less.
#[derive(Debug, Clone, Default)]
struct Scores {
    hits: [u64; RULES.len()],
    /// Sum of squares of what one rule's hits differ from another's, a chain at a time.
    spread: [[u64; RULES.len()]; RULES.len()],
}

impl Scores {
    fn add(&mut self, hits: [usize; RULES.len()]) {
        for (rule, &mine) in hits.iter().enumerate() {
            self.hits[rule] += HIT * mine as u64;
            for (spread, &other) in self.spread[rule].iter_mut().zip(&hits) {
                *spread += HIT * (mine.abs_diff(other) as u64).pow(2);
            }
        }
    }

    fn fade(&mut self) {
        for count in self.hits.iter_mut().chain(self.spread.iter_mut().flatten()) {
            *count = *count * REMAINING / 256;
        }
    }

    /// The rule that has most hits by more than chance, compared with the present one.
    fn best(&self, current: usize) -> usize {
        let gain = |rule: usize| {
            let margin = if RULES[rule] == Rule::Keep { self.hits[rule] / 32 * MARGIN_OF_KEEP } else { 0 };
            self.hits[rule].saturating_sub(self.hits[current] + margin)
        };
        // More than 1.2 standard deviations of the sum.
        let is_sure = |gain: u64, rule: usize| 2 * gain * gain > 3 * HIT * self.spread[rule][current];
        let better = (0..RULES.len()).map(|rule| (gain(rule), rule));
        better.filter(|&(gain, rule)| gain > MARGIN && is_sure(gain, rule)).max().map_or(current, |(_, rule)| rule)
    }
}

/// A pool's blocks under one rule, and miniature caches that follow a sample of them under each.
#[derive(Debug, Clone)]
pub(crate) struct Adaptive {
    segments: Segments,
    /// One a rule.
    miniatures: Vec<Miniature>,
    /// Blocks of the pool that they stand for.
    modelled: usize,
    scores: Scores,
    /// A block is followed if so many of its tag's first bits are 0.
    sample_bits: u32,
    /// Tags of the chain that is being released, as far as they are followed.
    chain: Vec<u32>,
    /// Blocks to follow until the next choice.
    until_choice: usize,
    current: usize,
}

/// One a rule for a pool of so many blocks; and how many of a followed tag's first bits are 0.
fn miniatures(blocks: usize) -> (Vec<Miniature>, u32) {
    let bits = |least: usize| (blocks / least).max(1).ilog2();
    let sample_bits = bits(FEWEST_BLOCKS).min(bits(MANY_BLOCKS).max(SPARSE_BITS));
    (RULES.map(|rule| Miniature::new(blocks >> sample_bits, rule)).into(), sample_bits)
}

impl Adaptive {
    pub(crate) fn new(blocks: usize) -> Self {
        let (miniatures, sample_bits) = miniatures(blocks);
        Self {
            segments: Segments::new(blocks, RULES[0]),
            miniatures,
            modelled: blocks,
            scores: Scores::default(),
            sample_bits,
            chain: Vec::new(),
            until_choice: 0,
            current: 0,
        }
    }

    /// Follows the chain that has been released.
    #[cold]
    fn follow(&mut self) {
        let mut hits = [0; RULES.len()];
        for (miniature, hits) in self.miniatures.iter_mut().zip(&mut hits) {
            *hits = miniature.follow(&self.chain);
        }
        self.scores.add(hits);
        let followed = self.chain.len();
        self.chain.clear();
        if self.until_choice > followed {
            self.until_choice -= followed;
            return;
        }
        self.current = self.scores.best(self.current);
        self.segments.set_rule(RULES[self.current]);
        self.scores.fade();
        self.until_choice = ((self.modelled >> self.sample_bits) / CHOICES).max(1);
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

    /// The miniatures start again if they stand for a pool of quite another size.
    fn resize(&mut self, blocks: usize) {
        self.segments.resize(blocks);
        if blocks.abs_diff(self.modelled) > self.modelled / 8 {
            (self.miniatures, self.sample_bits) = miniatures(blocks);
            (self.modelled, self.scores) = (blocks, Scores::default());
            self.chain.clear();
        }
    }

    fn relocate(&mut self, from: BlockId, to: BlockId) {
        self.segments.relocate(from, to);
    }

    fn boxed_clone(&self) -> Box<dyn Evictor> {
        Box::new(self.clone())
    }
}
