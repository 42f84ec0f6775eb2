//! Evictable blocks in three segments: probation, used once, used again; and the rules that pick the next to evict.
//!
//! Every rule works on the same segments, so that it can change at any time and nothing cached is lost. Along a chain,
//! a block is in the same segment as the blocks after it or in a later one, and each segment is in release order. So no
//! block is evicted before one that depends on it, as long as a block of a later segment is evicted only if no earlier
//! segment has an older block.

use super::ghosts::Sample;
use crate::id::BlockId;
use crate::ring::Rings;

const PROBATION: u32 = 0;
const ONCE: u32 = 1;
const AGAIN: u32 = 2;

/// Bits of a note: the block's segment (of a block in use, the lowest segment it may go to later), and how often it was used
/// again. The others are its tag's.
const SEGMENT: u32 = 3;
const HIT: u32 = 4;
const HITS: u32 = 3 * HIT;
const TAG: u32 = !15;

/// [`EvictionRule::Keep`] keeps one new chain in 256.
const KEPT_CHAINS: u32 = 256;
/// The other chains may have one block in 16, ...
const PROBATION_SHARE: usize = 16;
/// ... but at least twice the length of the longest recent chain, up to half of the pool.
const PROBATION_CHAINS: usize = 2;

/// Which block goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EvictionRule {
    /// Evicts the oldest of the blocks used once, while these are more than this share, in 1024ths.
    Once(u16),
    /// Like `Once`; in addition, the oldest of the others gets another chance for each further use.
    Chances(u16),
    /// Evicts new blocks, except for one chain in [`KEPT_CHAINS`]: existing blocks stay, even if prompts repeat in a
    /// loop longer than the pool.
    Keep,
}

#[derive(Debug, Clone)]
pub(super) struct Segments {
    rule: EvictionRule,
    rings: Rings,
    /// By block.
    notes: Vec<u32>,
    /// Blocks in each segment.
    lens: [usize; 3],
    ghosts: Sample,
    blocks: usize,
    /// Most hits of a block of the chain that is being released, as bits of a note.
    floor: u32,
    /// Segment of the chain's blocks that have no hits.
    fresh: u32,
    chains: u32,
    /// Length of the longest recent chain, in blocks.
    longest: usize,
    /// Stamp before the first block of the chain that is being released.
    started: u32,
    /// Stamp of the last block that stayed because of its hits.
    stayed: u32,
}

impl Segments {
    /// Segments for a pool of `blocks` blocks; `ghosts` remembers evicted blocks.
    pub(super) fn new(blocks: usize, rule: EvictionRule, ghosts: Sample) -> Self {
        Self {
            rule,
            rings: Rings::new(blocks, 3),
            notes: vec![0; blocks],
            lens: [0; 3],
            ghosts,
            blocks,
            floor: 0,
            fresh: ONCE,
            chains: 0,
            longest: 0,
            started: 0,
            stayed: 0,
        }
    }

    pub(super) fn set_rule(&mut self, rule: EvictionRule) {
        self.rule = rule;
    }

    pub(super) fn rings(&self) -> &Rings {
        &self.rings
    }

    pub(super) fn begin_chain(&mut self) {
        self.floor = 0;
        self.chains = self.chains.wrapping_add(1);
        let inserted = self.rings.clock().wrapping_sub(self.started) as usize;
        self.started = self.rings.clock();
        self.longest = inserted.max(self.longest - self.longest.div_ceil(16));
        let room = (self.blocks / PROBATION_SHARE).max((self.longest * PROBATION_CHAINS).min(self.blocks / 2));
        let is_kept = self.chains % KEPT_CHAINS == 0 || self.lens[PROBATION as usize] > room;
        self.fresh = if self.rule == EvictionRule::Keep && !is_kept { PROBATION } else { ONCE };
    }

    /// Reports that a block of the chain stays in use; returns its note.
    #[inline]
    pub(super) fn hold(&mut self, block: BlockId) -> u32 {
        let note = &mut self.notes[block.index()];
        // Later it may not go to a lower segment than the blocks after it.
        self.fresh = self.fresh.max(*note & SEGMENT);
        *note = (*note & TAG) | (*note & HITS).max(self.floor) | self.fresh;
        *note & TAG
    }

    /// Makes a block of the chain evictable; returns its note.
    #[inline]
    pub(super) fn insert(&mut self, block: BlockId) -> u32 {
        let note = &mut self.notes[block.index()];
        let tag = *note & TAG;
        self.floor = self.floor.max(*note & HITS);
        self.fresh = self.fresh.max(*note & SEGMENT);
        let segment = if self.floor > 0 { AGAIN } else { self.fresh };
        *note = tag | self.floor | segment;
        self.lens[segment as usize] += 1;
        self.rings.push(segment as usize, block);
        tag
    }

    /// Removes a block from the segments, if it is there; returns whether it was.
    #[inline]
    pub(super) fn remove(&mut self, block: BlockId, is_hit: bool) -> bool {
        let was = self.rings.remove(block);
        let note = &mut self.notes[block.index()];
        self.lens[(*note & SEGMENT) as usize] -= usize::from(was);
        if !is_hit {
            *note = 0;
        } else if was {
            *note += if *note & HITS < HITS { HIT } else { 0 };
        }
        was
    }

    #[inline]
    pub(super) fn publish(&mut self, block: BlockId, tag: u32) {
        let came_back = self.ghosts.take(tag) && self.rule != EvictionRule::Keep;
        self.notes[block.index()] = (tag & TAG) | if came_back { HIT } else { 0 };
    }

    /// Blocks with these tags are reallocated.
    pub(super) fn evicted(&mut self, tags: &[u32]) {
        self.ghosts.insert(tags);
    }

    /// Takes out the block that goes first.
    pub(super) fn pop(&mut self) -> Option<BlockId> {
        loop {
            let segment = self.first().0;
            let has_chance = segment == AGAIN && self.next_has_chance();
            let block = self.rings.pop(segment as usize)?;
            if has_chance {
                let note = &mut self.notes[block.index()];
                if *note & HITS > HIT {
                    *note -= HIT;
                    self.rings.push(AGAIN as usize, block);
                    self.stayed = self.rings.clock();
                    continue;
                }
            }
            self.lens[segment as usize] -= 1;
            return Some(block);
        }
    }

    /// Whether the first block used again may stay if it has hits left: under [`EvictionRule::Chances`], and under any
    /// rule if a block after it, which may depend on it, has stayed.
    fn next_has_chance(&mut self) -> bool {
        let age = self.rings.age(AGAIN as usize).unwrap_or(0);
        matches!(self.rule, EvictionRule::Chances(_)) || age >= self.rings.clock().wrapping_sub(self.stayed)
    }

    /// Removes up to `count` blocks to evict first.
    pub(super) fn pop_into(&mut self, mut count: usize, out: &mut Vec<BlockId>) {
        while count > 0 {
            let (segment, most) = self.first();
            let segment = segment as usize;
            let before = out.len();
            if most == 1 {
                out.extend(self.pop());
            } else {
                self.rings.pop_into(segment, count.min(most), out);
                self.lens[segment] -= out.len() - before;
            }
            let popped = out.len() - before;
            if popped == 0 {
                return;
            }
            count -= popped;
        }
    }

    /// The segment to evict from, and how many of its blocks precede those of other segments.
    fn first(&mut self) -> (u32, usize) {
        let [probation, once, again] = self.lens;
        if probation > 0 {
            return (PROBATION, probation);
        }
        if again == 0 {
            return (ONCE, once);
        }
        if let EvictionRule::Once(share) | EvictionRule::Chances(share) = self.rule {
            let kept = (self.blocks * usize::from(share)) >> 10;
            if once > kept {
                return (ONCE, once - kept);
            }
        }
        let is_older = self.rings.age(AGAIN as usize) > self.rings.age(ONCE as usize);
        (if is_older { AGAIN } else { ONCE }, 1)
    }

    /// Makes room for blocks with numbers up to this one.
    pub(super) fn make_room(&mut self, blocks: usize) {
        self.rings.make_room(blocks);
        let more = blocks.saturating_sub(self.notes.len());
        self.notes.reserve_exact(more);
        self.notes.resize(self.notes.len() + more, 0);
    }

    pub(super) fn resize(&mut self, blocks: usize) {
        if blocks > self.notes.len() {
            self.make_room(blocks);
            // A tag's slot depends on the table size.
            self.ghosts = Sample::of_pool(blocks);
        }
        self.blocks = blocks;
    }

    pub(super) fn relocate(&mut self, from: BlockId, to: BlockId) {
        self.rings.rename(from, to);
        self.notes[to.index()] = std::mem::take(&mut self.notes[from.index()]);
    }
}
