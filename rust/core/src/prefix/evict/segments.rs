//! Evictable blocks in segments by their uses: probation, used once, used again one to three times; and the rules that
//! pick the next to evict.
//!
//! Every rule works on the same segments, so that it can change at any time and nothing cached is lost. Along a chain,
//! a block is in the same segment as the blocks after it or in a later one, and each segment is in release order. So no
//! block is evicted before one that depends on it, as long as a block of a later segment is evicted only if no earlier
//! segment has an older block.

use super::ghosts::Sample;
use super::rank::{EvictionRule, Guide, Rank, Rule};
use crate::id::BlockId;
use crate::ring::Rings;

const SEGMENTS: usize = 5;
const PROBATION: u32 = 0;
const ONCE: u32 = 1;
/// Segment of the blocks used again once; further uses lead to the next ones.
const AGAIN: u32 = 2;
const LAST_SEGMENT: u32 = 4;

/// Bits of a note: the block's segment (of a block in use, the lowest segment it may go to later), and whether it is
/// the last block of its chain. The others are its tag's.
const SEGMENT: u32 = 7;
const ENDS_CHAIN: u32 = 8;
const TAG: u32 = !15;

/// [`EvictionRule::Keep`] keeps one new chain in 256.
const KEPT_CHAINS: u32 = 256;
/// The other chains may have one block in 16, ...
const PROBATION_SHARE: usize = 16;
/// ... but at least twice the length of the longest recent chain, up to half of the pool.
const PROBATION_CHAINS: usize = 2;

/// The blocks to evict first: up to `most` of this segment that are at least of this age.
struct Victims {
    segment: usize,
    most: usize,
    least_age: u32,
}

#[derive(Debug, Clone)]
pub(super) struct Segments {
    rule: EvictionRule,
    rings: Rings,
    /// By block.
    notes: Vec<u32>,
    /// Blocks in each segment.
    lens: [usize; SEGMENTS],
    ghosts: Sample,
    blocks: usize,
    /// Blocks of the tier that evicted blocks are copied to.
    below: usize,
    /// Lowest segment for the remaining blocks of the chain that is being released.
    floor: u32,
    /// [`ENDS_CHAIN`] until a block of that chain is released.
    ends: u32,
    /// Segment of that chain's last block.
    last: u32,
    /// Lowest segment for the blocks that are published next.
    inherited: u32,
    chains: u32,
    /// Length of the longest recent chain, in blocks.
    longest: usize,
    /// Stamp before the first block of the chain that is being released.
    started: u32,
}

impl Segments {
    /// Segments for a pool of `blocks` blocks; `ghosts` remembers evicted blocks.
    pub(super) fn new(blocks: usize, rule: EvictionRule, ghosts: Sample) -> Self {
        Self {
            rule,
            rings: Rings::new(blocks, SEGMENTS),
            notes: vec![0; blocks],
            lens: [0; SEGMENTS],
            ghosts,
            blocks,
            below: 0,
            floor: ONCE,
            ends: ENDS_CHAIN,
            last: PROBATION,
            inherited: PROBATION,
            chains: 0,
            longest: 0,
            started: 0,
        }
    }

    pub(super) fn set_rule(&mut self, rule: EvictionRule) {
        self.rule = rule;
    }

    pub(super) fn rings(&self) -> &Rings {
        &self.rings
    }

    pub(super) fn begin_chain(&mut self) {
        self.chains = self.chains.wrapping_add(1);
        let inserted = self.rings.clock().wrapping_sub(self.started) as usize;
        self.started = self.rings.clock();
        self.longest = inserted.max(self.longest - self.longest.div_ceil(16));
        let blocks = self.blocks + self.below;
        let room = (blocks / PROBATION_SHARE).max((self.longest * PROBATION_CHAINS).min(blocks / 2));
        let is_kept = self.chains % KEPT_CHAINS == 0 || self.lens[PROBATION as usize] > room;
        self.floor = if self.rule == EvictionRule::Keep && !is_kept { PROBATION } else { ONCE };
        self.ends = ENDS_CHAIN;
    }

    /// Reports that a block of the chain stays in use; returns its note.
    #[inline]
    pub(super) fn hold(&mut self, block: BlockId) -> u32 {
        self.settle(block) & TAG
    }

    /// Makes a block of the chain evictable; returns its note.
    #[inline]
    pub(super) fn insert(&mut self, block: BlockId) -> u32 {
        let note = self.settle(block);
        let segment = (note & SEGMENT) as usize;
        self.lens[segment] += 1;
        self.rings.push(segment, block);
        note & TAG
    }

    /// Puts a block of the chain behind those of its segment, if it is evictable.
    pub(super) fn reorder(&mut self, block: BlockId) {
        if self.rings.remove(block) {
            self.lens[(self.notes[block.index()] & SEGMENT) as usize] -= 1;
            self.insert(block);
        }
    }

    /// Gives a released block its segment, which is not below that of the blocks after it; returns its new note.
    #[inline]
    fn settle(&mut self, block: BlockId) -> u32 {
        // Chains are released from their end, so the floor only rises towards the beginning. A block that were in an
        // earlier segment than its successor could be evicted first and leave the successor where no prompt finds it.
        let note = &mut self.notes[block.index()];
        self.floor = self.floor.max(*note & SEGMENT);
        let settled = (*note & TAG) | self.floor | self.ends;
        *note = settled;
        if self.ends != 0 {
            (self.last, self.ends) = (self.floor, 0);
        }
        settled
    }

    /// Removes a block from the segments, if it is there; returns whether it was.
    #[inline]
    pub(super) fn remove(&mut self, block: BlockId, is_hit: bool) -> bool {
        let was = self.rings.remove(block);
        let note = &mut self.notes[block.index()];
        let segment = *note & SEGMENT;
        self.lens[segment as usize] -= usize::from(was);
        // A hit on a block in use is no further use of a cached block: prompts that run side by side count once.
        if !is_hit {
            *note = 0;
        } else if was {
            *note = (*note & !SEGMENT) | (segment.max(ONCE) + 1).min(LAST_SEGMENT);
        }
        was
    }

    /// Reports that the blocks published next follow this one in their prompt. If it is the last of its chain, they
    /// continue that chain and are expected to be used as often.
    pub(super) fn continue_chain(&mut self, parent: Option<BlockId>) {
        let note = parent.map_or(0, |parent| self.notes[parent.index()]);
        self.inherit(if note & ENDS_CHAIN == 0 { PROBATION } else { note & SEGMENT });
    }

    /// Reports that the blocks published next continue a chain whose last block was in this segment. If that block was
    /// used again, they count as used again, too.
    pub(super) fn inherit(&mut self, segment: u32) {
        self.inherited = if segment < AGAIN { PROBATION } else { segment };
    }

    /// Segment of the last block of the most recently released chain.
    pub(super) fn last(&self) -> u32 {
        self.last
    }

    #[inline]
    pub(super) fn publish(&mut self, block: BlockId, tag: u32) {
        // Under `Keep`, most blocks are evicted as they come. In a loop all of them come back, and promoting them would
        // push out those that `Keep` holds on to.
        let came_back = self.ghosts.take(tag) && self.rule != EvictionRule::Keep;
        let segment = if came_back { self.inherited.max(AGAIN) } else { self.inherited };
        self.notes[block.index()] = (tag & TAG) | ENDS_CHAIN | segment;
    }

    /// Reports that blocks with these tags are reallocated.
    pub(super) fn evicted(&mut self, tags: &[u32]) {
        self.ghosts.insert(tags);
    }

    /// Takes out the block that goes first.
    pub(super) fn pop(&mut self) -> Option<BlockId> {
        let segment = self.first()?.segment;
        let block = self.rings.pop(segment)?;
        self.lens[segment] -= 1;
        Some(block)
    }

    /// Removes up to `count` blocks to evict first.
    pub(super) fn pop_into(&mut self, mut count: usize, out: &mut Vec<BlockId>) {
        while count > 0 {
            let Some(Victims { segment, most, least_age }) = self.first() else { return };
            let before = out.len();
            self.rings.pop_older(segment, count.min(most), least_age, out);
            let popped = out.len() - before;
            self.lens[segment] -= popped;
            count -= popped;
        }
    }

    /// The blocks to evict first.
    fn first(&mut self) -> Option<Victims> {
        let Self { rule, rings, lens, blocks, .. } = self;
        first(*rule, *blocks, lens, |segment| rings.age(segment))
    }

    /// How the host continues this order; see [`super::host`].
    pub(super) fn guide(&self) -> Guide {
        let blocks = self.blocks + self.below;
        let rule = Rule::Segments { rule: self.rule, blocks, once: self.lens[ONCE as usize] };
        Guide { rule, clock: self.rings.clock() }
    }

    /// Continues at a stamp of the host's order.
    pub(super) fn set_clock(&mut self, clock: u32) {
        self.rings.set_clock(clock);
    }

    /// Takes out the block that goes first, with its rank.
    pub(super) fn pop_ranked(&mut self) -> Option<(BlockId, Rank)> {
        let segment = self.first()?.segment;
        let stamp = self.rings.clock().wrapping_sub(self.rings.age(segment)?);
        let block = self.rings.pop(segment)?;
        self.lens[segment] -= 1;
        Some((block, Rank { ring: u8::try_from(segment).unwrap_or(u8::MAX), stamp }))
    }

    /// Notes that a published block was loaded from the host, where it was in this segment: a hit like any other.
    pub(super) fn restore(&mut self, block: BlockId, segment: u8) {
        let note = &mut self.notes[block.index()];
        let segment = (u32::from(segment).max(ONCE) + 1).min(LAST_SEGMENT).max(*note & SEGMENT);
        *note = (*note & !SEGMENT) | segment;
    }

    /// Counts the blocks of the tier that evicted blocks are copied to.
    pub(super) fn extend(&mut self, below: usize) {
        self.below = below;
        self.ghosts = Sample::of_pool(self.blocks + below);
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
            self.ghosts = Sample::of_pool(blocks + self.below);
        }
        self.blocks = blocks;
    }

    pub(super) fn relocate(&mut self, from: BlockId, to: BlockId) {
        self.rings.rename(from, to);
        self.notes[to.index()] = std::mem::take(&mut self.notes[from.index()]);
    }
}

/// The segment of the block that goes first, of those whose oldest block has an age; `lens` may count more blocks.
pub(super) fn goes_first(
    rule: EvictionRule,
    blocks: usize,
    lens: [usize; SEGMENTS],
    ages: [Option<u32>; SEGMENTS],
) -> Option<usize> {
    let all = std::array::from_fn(|segment| if ages[segment].is_some() { lens[segment] } else { 0 });
    first(rule, blocks, &all, |segment| ages[segment]).map(|victims| victims.segment)
}

/// The blocks to evict first, in a pool of `blocks` blocks: `lens` are those in each segment, `age` that of the oldest.
fn first(
    rule: EvictionRule,
    blocks: usize,
    lens: &[usize; SEGMENTS],
    age: impl FnMut(usize) -> Option<u32>,
) -> Option<Victims> {
    let all = |segment: u32, most| Some(Victims { segment: segment as usize, most, least_age: 0 });
    let [probation, once, again @ ..] = *lens;
    // Also under other rules, which put nothing there: the rule may have changed since.
    if probation > 0 {
        return all(PROBATION, probation);
    }
    if once > 0 && again == [0; 3] {
        return all(ONCE, once);
    }
    let (share, credit) = match rule {
        EvictionRule::Once(share) => (share, 0),
        EvictionRule::Leveled(share) => (share, blocks),
        EvictionRule::Keep => (1024, 0),
    };
    let kept = (blocks * usize::from(share)) >> 10;
    if once > kept {
        return all(ONCE, once - kept);
    }
    oldest(lens, credit as u64, age)
}

/// The oldest blocks not on probation, where a block of each segment counts as `credit` younger than those before.
fn oldest(lens: &[usize; SEGMENTS], credit: u64, mut age: impl FnMut(usize) -> Option<u32>) -> Option<Victims> {
    // Ages plus the credit that is missing to the last segment: adding to the earlier ones orders them as subtracting
    // from the later ones would, and cannot underflow.
    let (mut first, mut second) = (None::<(u64, u32, u32)>, 0);
    for segment in ONCE..=LAST_SEGMENT {
        if lens[segment as usize] == 0 {
            continue;
        }
        let age = age(segment as usize)?;
        let rank = u64::from(age) + credit * u64::from(LAST_SEGMENT - segment);
        match first {
            Some((best, ..)) if best >= rank => second = rank.max(second),
            _ => {
                second = first.map_or(0, |(best, ..)| best);
                first = Some((rank, segment, age));
            }
        }
    }
    let (rank, segment, age) = first?;
    // Down to the next segment's oldest block; of equally old ones the earlier segment's goes first.
    let least_age = age.saturating_sub(u32::try_from(rank - second).unwrap_or(u32::MAX).saturating_sub(1));
    Some(Victims { segment: segment as usize, most: lens[segment as usize], least_age })
}
