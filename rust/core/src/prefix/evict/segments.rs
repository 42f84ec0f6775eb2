//! Evictable blocks in segments by their uses (probation, used once, used again) and by the class of gaps of their
//! conversation; and the rules that pick the next to evict.
//!
//! Every rule works on the same segments, so that it can change at any time and nothing cached is lost. Along a chain, a
//! block's level is not below that of the blocks after it, its class is not above theirs, and each segment is in release
//! order. So no block is evicted before one that depends on it, as long as a block is evicted only if no segment of a
//! lower level or a higher class has an older block.

use super::ghosts::Ghosts;
use super::rank::{EvictionRule, Guide, RANKS, Rank, Rule};
use super::turns::{GAPS, Turn, UNKNOWN};
use crate::id::BlockId;
use crate::ring::Rings;
use std::ops::Range;

/// Levels: how often a block was used.
const PROBATION: u32 = 0;
const ONCE: u32 = 1;
/// Level of the blocks used again.
const AGAIN: u32 = 2;
const CLASSES: u32 = 7;
const _: () = assert!(CLASSES as usize == GAPS);
/// Rings: probation, one for each class of gaps in the other levels, and that of conversations that are over.
pub(super) const RINGS: usize = RANKS;
const OVER: u32 = 1 + AGAIN * CLASSES;
const _: () = assert!(OVER as usize + 1 == RINGS);
/// Rings of the blocks used once.
const ONCE_RINGS: Range<u32> = 1..1 + CLASSES;

/// Bits of a note: the block's ring (for a block in use, the minimum level on release), whether it was the last block of
/// its chain, and what is known of the blocks behind it. The others are its tag's.
const RING: u32 = 15;
const ENDS_CHAIN: u32 = 1 << 4;
/// It has been released behind the block before it.
const LINKED: u32 = 1 << 5;
/// A block behind it has been released.
const HAS_CHILD: u32 = 1 << 6;
/// Several have.
const BRANCHES: u32 = 1 << 7;
const TAG: u32 = !255;

/// Level and class of each ring: a table, because each release reads it.
const PARTS: [(u8, u8); RINGS] = {
    let mut parts = [(ONCE.to_le_bytes()[0], UNKNOWN); RINGS];
    parts[PROBATION as usize].0 = PROBATION.to_le_bytes()[0];
    let mut ring = ONCE_RINGS.start;
    while ring < OVER {
        parts[ring as usize] = (ring.div_ceil(CLASSES).to_le_bytes()[0], ((ring - 1) % CLASSES).to_le_bytes()[0]);
        ring += 1;
    }
    parts
};

#[inline]
fn level_of(ring: u32) -> u32 {
    u32::from(PARTS[(ring & RING) as usize].0)
}

/// Class of gaps.
#[inline]
fn class_of(ring: u32) -> u32 {
    u32::from(PARTS[(ring & RING) as usize].1)
}

#[inline]
fn ring_of(level: u32, class: u32) -> u32 {
    match level {
        _ if class >= CLASSES => OVER,
        PROBATION => PROBATION,
        _ => 1 + (level - 1) * CLASSES + class,
    }
}

/// Ring of the blocks of which nothing is known but that they were used.
pub(super) const NEWCOMERS: u8 = ONCE_RINGS.start.to_le_bytes()[0] + UNKNOWN;

/// The ring of a block that goes after equally old ones of either ring, under every rule.
pub(super) fn join(ring: u8, other: u8) -> u8 {
    let (first, second) = (u32::from(ring), u32::from(other));
    for goes_first in [OVER, PROBATION] {
        if first == goes_first {
            return other;
        }
        if second == goes_first {
            return ring;
        }
    }
    let joined = ring_of(level_of(first).max(level_of(second)), class_of(first).min(class_of(second)));
    joined.to_le_bytes()[0]
}

/// [`EvictionRule::Keep`] keeps one new chain in 251, a prime: in time, it keeps every chain of a loop of any other length.
const KEPT_CHAINS: u32 = 251;
/// The other chains may have one block in 16, ...
const PROBATION_SHARE: usize = 16;
/// ... but at least twice the length of the longest recent chain, up to half of the pool.
const PROBATION_CHAINS: usize = 2;

/// The blocks to evict first: up to `most` of this ring that are at least of this age.
struct Victims {
    ring: usize,
    most: usize,
    least_age: u32,
}

#[derive(Debug, Clone)]
pub(super) struct Segments {
    rule: EvictionRule,
    rings: Rings,
    /// By block.
    notes: Vec<u32>,
    /// Blocks in each ring.
    lens: [usize; RINGS],
    ghosts: Ghosts,
    blocks: usize,
    /// Blocks of the tier that evicted blocks are copied to.
    below: usize,
    /// Lowest segment for the remaining blocks of the chain that is being released.
    floor: u32,
    /// Highest class for them.
    class: u32,
    /// The block of that chain that was released last: the one behind the next.
    child: Option<BlockId>,
    /// Segment of that chain's last block.
    last: u32,
    /// Lowest segment for the blocks that are published next.
    inherited: u32,
    /// What is known of that chain, and of the one that is released next.
    turn: Turn,
    next: Turn,
    /// Whether what is known of it goes for the next block.
    is_turn: bool,
    /// By class of gaps: how many insertions older a block counts under [`EvictionRule::Gaps`].
    credits: [u32; GAPS],
    chains: u32,
    /// Length of the longest recent chain, in blocks.
    longest: usize,
    /// Stamp before the first block of the chain that is being released.
    started: u32,
}

impl Segments {
    /// Segments for a pool of `blocks` blocks; it remembers about as many evicted blocks as there are `places`.
    pub(super) fn new(blocks: usize, rule: EvictionRule, places: usize) -> Self {
        Self {
            rule,
            rings: Rings::new(blocks, RINGS),
            notes: vec![0; blocks],
            lens: [0; RINGS],
            ghosts: Ghosts::new(places),
            blocks,
            below: 0,
            floor: ONCE,
            class: CLASSES,
            child: None,
            last: PROBATION,
            inherited: PROBATION,
            turn: None,
            is_turn: false,
            next: None,
            credits: [0; GAPS],
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

    /// Tells what is known of the chain that is released next.
    pub(super) fn set_turn(&mut self, turn: Turn, credits: [u32; GAPS]) {
        (self.next, self.credits) = (turn, credits);
    }

    /// What is known of the chain released last.
    pub(super) fn turn(&self) -> Turn {
        self.turn
    }

    pub(super) fn begin_chain(&mut self) {
        self.turn = std::mem::take(&mut self.next);
        self.chains = self.chains.wrapping_add(1);
        let inserted = self.rings.clock().wrapping_sub(self.started) as usize;
        self.started = self.rings.clock();
        self.longest = inserted.max(self.longest - self.longest.div_ceil(16));
        let blocks = self.blocks + self.below;
        let room = (blocks / PROBATION_SHARE).max((self.longest * PROBATION_CHAINS).min(blocks / 2));
        let is_kept = self.chains % KEPT_CHAINS == 0 || self.lens[PROBATION as usize] > room;
        self.floor = if self.rule == EvictionRule::Keep && !is_kept { PROBATION } else { ONCE };
        self.is_turn = self.turn.is_some();
        self.class = self.turn.map_or(CLASSES - 1, u32::from);
        self.child = None;
    }

    /// Reports that the chain is released: what is known of it is not true of blocks that are released later.
    pub(super) fn end_chain(&mut self) {
        (self.is_turn, self.class, self.child) = (false, CLASSES - 1, None);
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
        let ring = (note & RING) as usize;
        self.lens[ring] += 1;
        self.rings.push(ring, block);
        note & TAG
    }

    /// Puts a block of the chain behind those of its segment, if it is evictable.
    pub(super) fn reorder(&mut self, block: BlockId) {
        if self.rings.remove(block) {
            self.lens[(self.notes[block.index()] & RING) as usize] -= 1;
            self.insert(block);
        }
    }

    /// Gives a released block its level, which is not below that of the blocks after it, and its class, which is not
    /// above theirs; returns its new note.
    #[inline]
    fn settle(&mut self, block: BlockId) -> u32 {
        // Chains are released from their end, so the floor only rises towards the beginning, and the class only falls. A
        // block that were in an earlier segment than its successor could be evicted first and leave the successor where
        // no prompt finds it. A successor that is not in this chain keeps its class: so this block keeps it, too.
        let note = self.notes[block.index()];
        let ends = if self.child.is_none() { ENDS_CHAIN } else { 0 };
        let mut behind = note & (HAS_CHILD | BRANCHES);
        if let Some(child) = self.child.replace(block) {
            let child = &mut self.notes[child.index()];
            if *child & LINKED == 0 {
                *child |= LINKED;
                behind |= (behind & HAS_CHILD) * (BRANCHES / HAS_CHILD);
            }
            behind |= HAS_CHILD;
        }
        self.floor = self.floor.max(level_of(note));
        let has_others = behind & (if ends == 0 { BRANCHES } else { HAS_CHILD }) != 0;
        if has_others || !self.is_turn {
            self.class = self.class.min(class_of(note));
        }
        if ends != 0 {
            self.last = self.floor;
        }
        let settled = (note & (TAG | LINKED)) | ring_of(self.floor, self.class) | ends | behind;
        self.notes[block.index()] = settled;
        settled
    }

    /// Removes a block from the segments, if it is there; returns whether it was.
    #[inline]
    pub(super) fn remove(&mut self, block: BlockId, is_hit: bool) -> bool {
        let was = self.rings.remove(block);
        let note = &mut self.notes[block.index()];
        let ring = *note & RING;
        self.lens[ring as usize] -= usize::from(was);
        // A hit on a block in use is no further use of a cached block: prompts that run side by side count once.
        if !is_hit {
            *note = 0;
        } else if was {
            *note = (*note & !RING) | ring_of(AGAIN, class_of(ring));
        }
        was
    }

    /// Reports that the blocks published next follow this one in their prompt. If it is the last of its chain, they
    /// continue that chain and are expected to be used as often.
    pub(super) fn continue_chain(&mut self, parent: Option<BlockId>) {
        let note = parent.map_or(0, |parent| self.notes[parent.index()]);
        self.inherit(if note & ENDS_CHAIN == 0 { PROBATION } else { level_of(note & RING) });
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
        let level = if came_back { self.inherited.max(AGAIN) } else { self.inherited };
        self.notes[block.index()] = (tag & TAG) | ENDS_CHAIN | ring_of(level, u32::from(UNKNOWN));
    }

    /// Reports that blocks with these tags are reallocated.
    pub(super) fn evicted(&mut self, tags: &[u32]) {
        for &tag in tags {
            self.ghosts.insert(tag);
        }
    }

    /// Takes out the block that goes first.
    pub(super) fn pop(&mut self) -> Option<BlockId> {
        self.pop_ranked().map(|(block, _)| block)
    }

    /// Removes up to `count` blocks to evict first.
    pub(super) fn pop_into(&mut self, mut count: usize, out: &mut Vec<BlockId>) {
        while count > 0 {
            let Some(Victims { ring, most, least_age }) = self.first() else { return };
            let before = out.len();
            let last = self.rings.pop_older(ring, count.min(most), least_age, out);
            self.note_end(ring, last);
            let popped = out.len() - before;
            self.lens[ring] -= popped;
            count -= popped;
        }
    }

    /// Notes that the first block of a ring has no other behind it, if the one evicted last was the only one: that had
    /// the stamp before.
    #[inline]
    fn note_end(&mut self, ring: usize, evicted: u32) {
        if let Some((block, age)) = self.rings.first(ring) {
            let note = &mut self.notes[block.index()];
            let was_behind = self.rings.clock().wrapping_sub(age) == evicted.wrapping_add(1);
            if was_behind && *note & (ENDS_CHAIN | HAS_CHILD | BRANCHES) == HAS_CHILD {
                *note &= !HAS_CHILD;
            }
        }
    }

    /// The blocks to evict first.
    fn first(&mut self) -> Option<Victims> {
        let Self { rule, rings, lens, blocks, credits, .. } = self;
        first((*rule, credits), *blocks, lens, |ring| rings.age(ring))
    }

    fn num_once(&self) -> usize {
        ONCE_RINGS.map(|ring| self.lens[ring as usize]).sum()
    }

    /// How the host continues this order; see [`super::host`].
    pub(super) fn guide(&self) -> Guide {
        let blocks = self.blocks + self.below;
        let once = self.num_once();
        let rule = Rule::Segments { rule: self.rule, credits: self.credits, blocks, once };
        Guide { rule, clock: self.rings.clock() }
    }

    /// Continues at a stamp of the host's order.
    pub(super) fn set_clock(&mut self, clock: u32) {
        self.rings.set_clock(clock);
    }

    /// Takes out the block that goes first, with its rank.
    pub(super) fn pop_ranked(&mut self) -> Option<(BlockId, Rank)> {
        let ring = self.first()?.ring;
        let stamp = self.rings.clock().wrapping_sub(self.rings.age(ring)?);
        let block = self.rings.pop(ring)?;
        self.note_end(ring, stamp);
        self.lens[ring] -= 1;
        Some((block, Rank { ring: u8::try_from(ring).unwrap_or(u8::MAX), stamp }))
    }

    /// Notes that a published block was loaded from the host, where it was in this segment: a hit like any other.
    pub(super) fn restore(&mut self, block: BlockId, ring: u8) {
        let note = &mut self.notes[block.index()];
        let ring = u32::from(ring);
        *note = (*note & !RING) | ring_of(AGAIN, class_of(ring));
    }

    /// Counts the blocks of the tier that evicted blocks are copied to.
    pub(super) fn extend(&mut self, below: usize) {
        self.below = below;
        self.ghosts = Ghosts::new(self.blocks + below);
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
            self.ghosts = Ghosts::new(blocks + self.below);
        }
        self.blocks = blocks;
    }

    pub(super) fn relocate(&mut self, from: BlockId, to: BlockId) {
        self.rings.rename(from, to);
        self.notes[to.index()] = std::mem::take(&mut self.notes[from.index()]);
    }
}

/// The ring of the block that goes first, of those whose oldest block has an age; `lens` may count more blocks.
pub(super) fn goes_first(
    rule: (EvictionRule, &[u32; GAPS]),
    blocks: usize,
    lens: [usize; RINGS],
    ages: &[Option<u32>; RINGS],
) -> Option<usize> {
    let all = std::array::from_fn(|ring| if ages[ring].is_some() { lens[ring] } else { 0 });
    first(rule, blocks, &all, |ring| ages[ring]).map(|victims| victims.ring)
}

/// The blocks to evict first, in a pool of `blocks` blocks: `lens` are those in each ring, `age` that of the oldest.
fn first(
    (rule, credits): (EvictionRule, &[u32; GAPS]),
    blocks: usize,
    lens: &[usize; RINGS],
    age: impl FnMut(usize) -> Option<u32>,
) -> Option<Victims> {
    let all = |ring: u32, most| Some(Victims { ring: ring as usize, most, least_age: 0 });
    // Also under other rules, which put nothing there: the rule may have changed since.
    if let Some(ring) = [OVER, PROBATION].into_iter().find(|&ring| lens[ring as usize] > 0) {
        return all(ring, lens[ring as usize]);
    }
    let share = match rule {
        EvictionRule::Once(share) => share,
        EvictionRule::Keep | EvictionRule::Gaps => 1024,
    };
    let kept = (blocks * usize::from(share)) >> 10;
    let once: usize = ONCE_RINGS.map(|ring| lens[ring as usize]).sum();
    if once > kept {
        let oldest = oldest(ONCE_RINGS, lens, age, |_| 0)?;
        return Some(Victims { most: oldest.most.min(once - kept), ..oldest });
    }
    oldest(ONCE_RINGS.start..OVER, lens, age, |ring| match rule {
        EvictionRule::Gaps => u64::from(credits[class_of(ring) as usize]),
        EvictionRule::Once(_) | EvictionRule::Keep => 0,
    })
}

/// The oldest blocks of some rings; those of each ring count as this much older.
fn oldest(
    rings: Range<u32>,
    lens: &[usize; RINGS],
    mut age: impl FnMut(usize) -> Option<u32>,
    older: impl Fn(u32) -> u64,
) -> Option<Victims> {
    let (mut first, mut second) = (None::<(u64, u32, u32)>, 0);
    for ring in rings {
        if lens[ring as usize] == 0 {
            continue;
        }
        let age = age(ring as usize)?;
        let rank = u64::from(age) + older(ring);
        match first {
            Some((best, ..)) if best >= rank => second = rank.max(second),
            _ => {
                second = first.map_or(0, |(best, ..)| best);
                first = Some((rank, ring, age));
            }
        }
    }
    let (rank, ring, age) = first?;
    // Down to the next ring's oldest block; of equally old ones the earlier ring's goes first.
    let least_age = age.saturating_sub(u32::try_from(rank - second).unwrap_or(u32::MAX).saturating_sub(1));
    Some(Victims { ring: ring as usize, most: lens[ring as usize], least_age })
}
