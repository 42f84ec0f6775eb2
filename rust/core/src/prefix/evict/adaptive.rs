//! Picks the eviction rule with the most current hits, measured by miniature caches.

use super::miniature::{Miniatures, SampledChain};
use super::rank::{EvictionRule, Guide};
use super::segments::Segments;
use super::turns::{HintCount, Turns, sampled};
use super::{Departure, Evictor, Hint};
use crate::hash::Key;
use crate::id::BlockId;

/// The candidate rules; the first is used until another proves better.
const RULES: [EvictionRule; 4] =
    [EvictionRule::Once(205), EvictionRule::Gaps, EvictionRule::Keep, EvictionRule::Once(10)];
/// Blocks of the miniature cache of a large pool.
const MANY_BLOCKS: usize = 512;
/// In smaller pools one block in 28 is sampled, which keeps the cost low, ...
const SPARSE: usize = 28;
/// ... except in pools below this multiple of it, where such a sample is too small.
const DENSE_BLOCKS: usize = 800;
/// Number of choices while a miniature follows as many blocks as its size.
const CHOICES: usize = 8;
/// Fraction of all counts that a choice keeps, in 256ths: they halve in 7 choices, in which a miniature follows almost
/// as many blocks as its size.
const REMAINING: u64 = 240;
/// Weight of a new hit; older hits decay to fractions of it.
const HIT: u64 = 256;
/// One in 3 hits of [`EvictionRule::Keep`] does not count: the blocks it keeps are arbitrary.
const MARGIN_OF_KEEP: u64 = 3;

/// Hits of the miniature caches on chains for which the rules differ; older hits count less.
#[derive(Debug, Clone, Default)]
struct Scores {
    hits: [u64; RULES.len()],
    /// Sum of squared differences between the hits of two rules, chain by chain.
    spread: [[u64; RULES.len()]; RULES.len()],
    /// Whether the rules' hits have differed since they last faded.
    have_differed: bool,
}

impl Scores {
    fn add(&mut self, hits: [usize; RULES.len()]) {
        if hits.iter().all(|&mine| mine == hits[0]) {
            return;
        }
        self.have_differed = true;
        for (rule, &mine) in hits.iter().enumerate() {
            self.hits[rule] += HIT * mine as u64;
            for (other, &others) in hits.iter().enumerate() {
                self.spread[rule][other] += HIT * (mine.abs_diff(others) as u64).pow(2);
            }
        }
    }

    /// Decays older hits, unless nothing new was learnt: prompts that repeat in a long loop have few hits.
    fn fade(&mut self) {
        if !std::mem::take(&mut self.have_differed) {
            return;
        }
        for count in self.hits.iter_mut().chain(self.spread.iter_mut().flatten()) {
            *count = *count * REMAINING / 256;
        }
    }

    /// The rule that beats the current one by more than chance.
    fn best(&self, current: usize) -> usize {
        let gain = |rule: usize| {
            let margin = if RULES[rule] == EvictionRule::Keep { self.hits[rule] / MARGIN_OF_KEEP } else { 0 };
            self.hits[rule].saturating_sub(self.hits[current] + margin)
        };
        // More than 1.2 standard deviations of the sum.
        let is_sure = |gain: u64, rule: usize| 2 * gain * gain > 3 * HIT * self.spread[rule][current];
        let better = (0..RULES.len()).map(|rule| (gain(rule), rule));
        better.filter(|&(gain, rule)| gain > 0 && is_sure(gain, rule)).max().map_or(current, |(_, rule)| rule)
    }
}

/// A pool's blocks under one rule, and a miniature cache per rule that follows a sample of them.
#[derive(Debug, Clone)]
pub(crate) struct Adaptive {
    segments: Segments,
    turns: Box<Turns>,
    miniatures: Box<Miniatures<{ RULES.len() }>>,
    /// Size of the pool that the miniatures model.
    modelled: usize,
    /// Blocks of the tier that evicted blocks are copied to.
    below: usize,
    scores: Box<Scores>,
    /// One block in `one_in` is sampled: those with the lowest tags.
    one_in: u32,
    highest: u32,
    /// Sampled tags of the chains released since the last choice.
    tags: Vec<u32>,
    chains: Vec<SampledChain<{ RULES.len() }>>,
    /// Sampled blocks between two choices.
    between_choices: usize,
    current: usize,
}

/// Creates miniatures for a pool of `blocks` blocks; also returns the sampling interval.
fn miniatures(blocks: usize) -> (Box<Miniatures<{ RULES.len() }>>, u32) {
    let dense = (blocks / 16).pow(2) / (DENSE_BLOCKS / 16).pow(2);
    let one_in = dense.min(SPARSE.max(blocks / MANY_BLOCKS)).max(1);
    let miniatures = Miniatures::new(blocks / one_in, RULES, one_in);
    (Box::new(miniatures), u32::try_from(one_in).unwrap_or(u32::MAX))
}

impl Adaptive {
    pub(crate) fn new(blocks: usize) -> Self {
        let (miniatures, one_in) = miniatures(blocks);
        Self {
            segments: Segments::new(blocks, RULES[0], blocks),
            turns: Box::new(Turns::new(blocks)),
            miniatures,
            modelled: blocks,
            below: 0,
            scores: Box::default(),
            one_in,
            highest: u32::MAX / one_in,
            tags: Vec::new(),
            chains: Vec::new(),
            between_choices: 0,
            current: 0,
        }
    }

    /// Feeds the chains released since the last choice to the miniatures, and chooses a rule.
    #[inline(never)]
    fn follow(&mut self) {
        let credits = self.turns.credits().map(|credit| credit / self.one_in);
        self.miniatures.follow(&self.tags, &mut self.chains, credits);
        for chain in self.chains.drain(..) {
            self.scores.add(chain.hits);
        }
        self.tags.clear();
        self.current = self.scores.best(self.current);
        self.segments.set_rule(RULES[self.current]);
        self.scores.fade();
        self.between_choices = (self.modelled / self.one_in as usize / CHOICES).max(1);
    }

    /// Follows a clock in seconds.
    pub(super) fn set_now(&mut self, seconds: f64) {
        self.turns.set_now(seconds);
    }

    /// Notes that the chain released next is a turn that ends; `keys` are those of its blocks.
    pub(super) fn end_turn(&mut self, keys: &[Key], hint: Option<Hint>) {
        let turn = self.turns.end(sampled(keys), hint, self.segments.rings().clock());
        self.segments.set_turn(Some(turn), self.turns.credits());
    }

    /// Begins to put a conversation's blocks where a hint belongs; see [`Turns::hint`].
    pub(super) fn hint(&mut self, keys: &[Key], hint: Hint) {
        let turn = self.turns.hint(sampled(keys), hint);
        self.segments.set_turn(turn, self.turns.credits());
        self.begin_chain();
    }

    pub(super) fn hint_counts(&self) -> [HintCount; Hint::ALL.len()] {
        self.turns.counts()
    }

    /// The blocks under the current rule.
    pub(super) fn segments(&mut self) -> &mut Segments {
        &mut self.segments
    }

    /// How the host continues this order.
    pub(super) fn guide(&self) -> Guide {
        self.segments.guide()
    }

    /// Counts the blocks of the tier that evicted blocks are copied to: the miniatures model both tiers as one pool.
    pub(super) fn extend(&mut self, below: usize) {
        self.segments.extend(below);
        self.below = below;
        self.model(self.modelled + below);
    }

    /// Restarts the miniatures for a pool of `blocks` blocks.
    fn model(&mut self, blocks: usize) {
        (self.miniatures, self.one_in) = miniatures(blocks);
        self.highest = u32::MAX / self.one_in;
        (self.modelled, self.scores) = (blocks, Box::default());
        self.tags.clear();
        self.chains.clear();
    }

    /// Records a released block, if it is sampled.
    #[inline]
    fn note(&mut self, tag: u32) {
        // 0 wraps to the highest.
        if tag.wrapping_sub(1) < self.highest {
            self.tags.push(tag * self.one_in);
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
        let tag = self.segments.insert(block);
        self.note(tag);
    }

    fn reorder(&mut self, block: BlockId) {
        self.segments.reorder(block);
    }

    #[inline]
    fn remove(&mut self, block: BlockId, departure: Departure) -> bool {
        self.segments.remove(block, departure == Departure::Hit)
    }

    fn pop(&mut self) -> Option<BlockId> {
        self.segments.pop()
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

    fn continue_chain(&mut self, parent: Option<BlockId>) {
        self.segments.continue_chain(parent);
    }

    fn begin_chain(&mut self) {
        let end = self.tags.len();
        if end > self.chains.last().map_or(0, |chain| chain.end) {
            self.chains.push(SampledChain {
                end,
                last: self.segments.last(),
                turn: self.segments.turn(),
                hits: [0; RULES.len()],
            });
            if end >= self.between_choices {
                self.follow();
            }
        }
        self.segments.begin_chain();
    }

    #[inline]
    fn hold(&mut self, block: BlockId) {
        let tag = self.segments.hold(block);
        self.note(tag);
    }

    /// Restarts the miniatures if the pool's size has changed a lot.
    fn resize(&mut self, blocks: usize) {
        self.segments.resize(blocks);
        let blocks = blocks + self.below;
        if blocks.abs_diff(self.modelled) > self.modelled / 8 {
            self.model(blocks);
        }
    }

    fn relocate(&mut self, from: BlockId, to: BlockId) {
        self.segments.relocate(from, to);
    }

    fn boxed_clone(&self) -> Box<dyn Evictor> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::super::turns::OVER;
    use super::*;
    use proptest::prelude::*;

    const COUNT: usize = RULES.len();

    proptest! {
        #[test]
        fn scores_sum_the_chains_that_differ_and_fade_only_after_one(
            choices in prop::collection::vec(prop::collection::vec(prop::array::uniform4(0u8..6), 0..4), 1..30),
        ) {
            let mut scores = Scores::default();
            let (mut hits, mut spread) = ([0.0; COUNT], [[0.0; COUNT]; COUNT]);
            for chains in choices {
                let differing: Vec<_> = chains.iter().filter(|chain| chain.iter().any(|&n| n != chain[0])).collect();
                for chain in &differing {
                    for (i, mine) in chain.iter().copied().map(f64::from).enumerate() {
                        hits[i] += mine;
                        for (j, other) in chain.iter().copied().map(f64::from).enumerate() {
                            spread[i][j] += (mine - other).powi(2);
                        }
                    }
                }
                for chain in &chains {
                    scores.add(chain.map(usize::from));
                }
                // Each fading rounds down.
                let found = scores.hits.iter().chain(scores.spread.iter().flatten()).map(|&n| f64::from(u32::try_from(n).unwrap()) / 256.0);
                for (found, exact) in found.zip(hits.iter().chain(spread.iter().flatten())) {
                    prop_assert!((-1e-9..0.05).contains(&(exact - found)), "{found} is not {exact}");
                }
                scores.fade();
                if !differing.is_empty() {
                    hits.iter_mut().chain(spread.iter_mut().flatten()).for_each(|n| *n *= 240.0 / 256.0);
                }
            }
        }
    }

    #[test]
    fn the_miniatures_learn_what_is_known_of_each_turn() {
        let mut policy = Adaptive::new(64);
        let hints = [None, Some(Hint::Over), None, Some(Hint::Turn), Some(Hint::Over)];
        for (block, hint) in (0..).map(BlockId).zip(hints) {
            let tag = (block.0 + 1) << 10;
            policy.publish(block, 0, tag);
            policy.end_turn(&[], hint);
            policy.begin_chain();
            policy.insert(block);
            policy.segments().end_chain();
        }
        policy.begin_chain();
        let known: Vec<_> = policy.chains.iter().map(|chain| chain.turn.map(|class| class == OVER)).collect();
        let over: Vec<_> = hints.map(|hint| Some(hint == Some(Hint::Over))).to_vec();
        // The first chain has been followed.
        assert_eq!(known, over[1..]);
    }

    #[test]
    fn two_chains_change_the_rule_but_a_change_to_keep_takes_four() {
        for rule in 1..COUNT {
            let mut scores = Scores::default();
            let mut hits = [0; COUNT];
            hits[rule] = 8;
            for _ in 1..if RULES[rule] == EvictionRule::Keep { 4 } else { 2 } {
                scores.add(hits);
                assert_eq!(scores.best(0), 0);
            }
            scores.add(hits);
            assert_eq!((scores.best(0), scores.best(rule)), (rule, rule));
        }
    }

    #[test]
    fn of_two_better_rules_the_one_with_more_hits_is_chosen() {
        for (first, second) in [(1, 3), (3, 1)] {
            let mut scores = Scores::default();
            let mut hits = [0; COUNT];
            (hits[first], hits[second]) = (9, 8);
            (0..3).for_each(|_| scores.add(hits));
            assert_eq!(scores.best(0), first);
        }
    }
}
