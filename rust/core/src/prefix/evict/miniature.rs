//! Small caches that follow the same sample of blocks, each under its own rule, to measure how many hits each rule
//! would have.
//!
//! Source: Waldspurger, Saemundsson, Ahmad and Park, "Cache modeling and optimization using miniature simulations",
//! USENIX ATC 2017.

use super::rank::EvictionRule;
use super::segments::Segments;
use super::turns::{GAPS, Turn};
use crate::id::BlockId;
use rustc_hash::FxHashMap;

/// The sampled blocks that some cache has: all caches use the same number for a tag.
#[derive(Debug, Clone, Default)]
struct Followed {
    numbers: FxHashMap<u32, BlockId>,
    /// By number; 0 for one that no tag has.
    tags: Vec<u32>,
    /// Numbers that no tag has.
    free: Vec<BlockId>,
}

impl Followed {
    #[inline]
    fn number(&mut self, tag: u32) -> BlockId {
        *self.numbers.entry(tag).or_insert_with(|| {
            let number = self.free.pop().unwrap_or_else(|| {
                self.tags.push(0);
                BlockId(u32::try_from(self.tags.len() - 1).unwrap_or(u32::MAX))
            });
            self.tags[number.index()] = tag;
            number
        })
    }

    /// Removes a block that no cache has any longer.
    #[inline]
    fn remove(&mut self, number: BlockId) {
        let tag = std::mem::take(&mut self.tags[number.index()]);
        if tag != 0 {
            self.numbers.remove(&tag);
            self.free.push(number);
        }
    }
}

/// Blocks of a sample that a sequence used, and how many of them each cache had.
#[derive(Debug, Clone)]
pub(super) struct SampledChain<const RULES: usize> {
    /// Where its tags end among those of all chains.
    pub(super) end: usize,
    /// Level of its last block in the pool.
    pub(super) last: u32,
    pub(super) turn: Turn,
    pub(super) hits: [usize; RULES],
}

/// One cache per rule.
#[derive(Debug, Clone)]
pub(super) struct Miniatures<const RULES: usize> {
    /// Blocks that each cache holds.
    blocks: usize,
    caches: [Segments; RULES],
    followed: Followed,
    /// Numbers of blocks that each cache has room for.
    room: usize,
    /// Blocks that some cache evicted or rejected since the last sweep.
    gone: Vec<BlockId>,
    /// Scratch buffers: the blocks of all chains, the blocks and tags that a cache lacks of one chain, and evicted
    /// tags.
    used: Vec<BlockId>,
    chain: Vec<(BlockId, u32)>,
    former: Vec<u32>,
}

impl<const RULES: usize> Miniatures<RULES> {
    /// The pool remembers `denser` times as many blocks of a chain, and recognizes the chain while any of them is left.
    /// To recognize it for as long, a cache remembers one more turnover for each halving of a chain's blocks.
    pub(super) fn new(blocks: usize, rules: [EvictionRule; RULES], denser: usize) -> Self {
        let places = blocks * (1 + denser.max(1).ilog2() as usize);
        Self {
            blocks,
            caches: rules.map(|rule| Segments::new(blocks, rule, places)),
            followed: Followed::default(),
            room: blocks,
            gone: Vec::new(),
            used: Vec::new(),
            chain: Vec::new(),
            former: Vec::new(),
        }
    }

    /// Processes chains of used blocks by their tags, each with its last block first.
    pub(super) fn follow(&mut self, tags: &[u32], chains: &mut [SampledChain<RULES>], credits: [u32; GAPS]) {
        let mut used = std::mem::take(&mut self.used);
        used.clear();
        used.extend(tags.iter().map(|&tag| self.followed.number(tag)));
        self.make_room();
        // Process one cache after the other, so that each is read once.
        for rule in 0..RULES {
            let mut start = 0;
            for SampledChain { end, last, turn, hits } in &mut *chains {
                self.caches[rule].inherit(*last);
                self.caches[rule].set_turn(*turn, credits);
                hits[rule] = self.follow_one(rule, &used[start..*end]);
                start = *end;
            }
        }
        self.used = used;
        for block in self.gone.drain(..) {
            if !self.caches.iter().any(|cache| cache.rings().contains(block)) {
                self.followed.remove(block);
            }
        }
    }

    /// Makes room in each cache for the sampled blocks, and for some more.
    #[inline]
    fn make_room(&mut self) {
        let followed = self.followed.tags.len();
        if followed > self.room {
            self.room = followed + self.blocks / 8;
            self.caches.iter_mut().for_each(|cache| cache.make_room(self.room));
        }
    }

    /// Processes the blocks that a sequence used, last one first; returns how many of them this cache had.
    fn follow_one(&mut self, rule: usize, used: &[BlockId]) -> usize {
        let Self { followed, gone, chain, former, .. } = self;
        let cache = &mut self.caches[rule];
        // Remove the blocks that hit from the eviction order before others take their room.
        let (mut hits, mut found, mut is_found) = (0, 0, true);
        chain.clear();
        chain.extend(used.iter().rev().map(|&block| {
            let is_hit = cache.remove(block, true);
            hits += usize::from(is_hit);
            // A prompt does not find what is behind a block that it lacks.
            is_found &= is_hit;
            found += usize::from(is_found);
            (block, if is_hit { 0 } else { followed.tags[block.index()] })
        }));
        if hits < used.len() {
            let excess = (cache.rings().len() + used.len()).saturating_sub(self.blocks);
            if excess > 0 {
                let first = gone.len();
                cache.pop_into(excess, gone);
                former.clear();
                former.extend(gone[first..].iter().map(|block| followed.tags[block.index()]));
                cache.evicted(former);
            }
            let mut room = self.blocks - cache.rings().len() - hits;
            chain.retain(|&(block, tag)| {
                if tag != 0 && room == 0 {
                    gone.push(block);
                    return false;
                }
                if tag != 0 {
                    room -= 1;
                    cache.publish(block, tag);
                }
                true
            });
        }
        cache.begin_chain();
        for &(block, _) in chain.iter().rev() {
            // A block that is released twice counts once.
            if !cache.rings().contains(block) {
                cache.insert(block);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_that_is_released_twice_counts_once() {
        let mut miniatures = Miniatures::new(4, [EvictionRule::Once(512), EvictionRule::Gaps], 1);
        for (tags, hits) in [([16, 8, 16], 0), ([16, 16, 8], 2)] {
            let mut chains = [SampledChain { end: 3, last: 0, turn: None, hits: [0; 2] }];
            miniatures.follow(&tags, &mut chains, [0; GAPS]);
            assert_eq!(chains[0].hits, [hits; 2]);
        }
        assert!(miniatures.caches.iter().all(|cache| cache.rings().len() == 2));
    }

    #[test]
    fn a_prompt_that_continues_a_chain_stays_longer() {
        let mut miniatures = Miniatures::new(4, [EvictionRule::Once(10), EvictionRule::Once(100)], 1);
        for (tags, last, hits) in [([16, 8], 2, 0), ([32, 24], 1, 0), ([48, 40], 1, 0), ([16, 8], 3, 2)] {
            let mut chains = [SampledChain { end: 2, last, turn: None, hits: [0; 2] }];
            miniatures.follow(&tags, &mut chains, [0; GAPS]);
            assert_eq!(chains[0].hits, [hits; 2]);
        }
    }

    #[test]
    fn a_block_that_no_cache_has_is_forgotten() {
        let mut miniatures = Miniatures::new(8, [EvictionRule::Once(102), EvictionRule::Gaps, EvictionRule::Keep], 1);
        for first in 1..2000u32 {
            // Some chains are longer than the caches.
            let tags: Vec<u32> = (first..first + first % 12).rev().map(|tag| tag * 16).collect();
            miniatures.follow(
                &tags,
                &mut [SampledChain { end: tags.len(), last: 0, turn: None, hits: [0; 3] }],
                [0; GAPS],
            );
            let Followed { numbers, tags, free } = &miniatures.followed;
            assert!(numbers.len() <= 3 * 8 && numbers.len() + free.len() == tags.len());
            for (number, &tag) in tags.iter().enumerate() {
                let number = BlockId(u32::try_from(number).unwrap());
                assert_eq!(tag != 0, miniatures.caches.iter().any(|cache| cache.rings().contains(number)));
                assert_eq!(numbers.get(&tag).copied(), (tag != 0).then_some(number));
            }
        }
    }
}
