//! Levels of retention that decay: a block of level `n` is kept as if it had become evictable `n` turnovers of the pool
//! later. So every block is evicted eventually, whatever its level.
//!
//! Along a chain no block is evicted before one that depends on it: chains are released from their ends, and a block's
//! deadline is never before those of the blocks after it.

use super::rank::{Guide, Rank, Rule};
use crate::id::BlockId;
use crate::ring::Rings;

/// Maximum number of insertions per level, so that deadlines stay comparable.
const MAX_CREDIT: usize = 1 << 26;

/// Evictable blocks, one ring per level; the block with the earliest deadline is evicted first.
#[derive(Debug, Clone)]
pub(crate) struct Leveled {
    rings: Rings,
    /// Deadline of the block's last insertion, or of blocks released after it in the chain while it was in use.
    deadlines: Vec<u32>,
    /// Latest deadline in the chain that is being released.
    floor: u32,
    /// Insertions so far.
    now: u32,
    levels: u32,
    /// Insertions that one level is worth: a turnover of the pool and of the tier that it copies to.
    credit: u32,
    /// Blocks of that tier.
    below: usize,
}

impl Leveled {
    pub(crate) fn new(blocks: usize, levels: u32) -> Self {
        let credit = Self::credit(blocks);
        let rings = Rings::new(blocks, levels as usize);
        Self { rings, deadlines: vec![0; blocks], floor: 0, now: 0, levels, credit, below: 0 }
    }

    /// Follows a resize of the pool to `blocks` blocks.
    pub(crate) fn resize(&mut self, blocks: usize) {
        self.credit = Self::credit(blocks + self.below);
        if blocks > self.deadlines.len() {
            self.rings.make_room(blocks);
            self.deadlines.resize(blocks, self.now);
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "at most 2^26")]
    fn credit(blocks: usize) -> u32 {
        blocks.clamp(1, MAX_CREDIT) as u32
    }

    pub(crate) fn rings(&self) -> &Rings {
        &self.rings
    }

    /// Begins the release of another chain.
    pub(crate) fn begin_chain(&mut self) {
        self.floor = self.now;
    }

    /// Records that a block of the chain being released stays in use.
    pub(crate) fn hold(&mut self, block: BlockId) {
        let deadline = &mut self.deadlines[block.index()];
        let left = remaining(self.floor, self.now).max(remaining(*deadline, self.now));
        *deadline = self.now.wrapping_add(left);
    }

    /// Makes a block evictable with at least that level.
    pub(crate) fn insert(&mut self, block: BlockId, level: u32) {
        self.now = self.now.wrapping_add(1);
        let left = remaining(self.deadlines[block.index()], self.now).max(remaining(self.floor, self.now));
        let level = level.max(left.div_ceil(self.credit)).min(self.levels - 1);
        let deadline = self.now.wrapping_add(level * self.credit);
        self.deadlines[block.index()] = deadline;
        self.floor = deadline;
        self.rings.push(level as usize, block);
    }

    pub(crate) fn remove(&mut self, block: BlockId) -> bool {
        self.rings.remove(block)
    }

    /// Forgets a block whose bytes are gone.
    pub(crate) fn forget(&mut self, block: BlockId) {
        self.deadlines[block.index()] = self.now;
    }

    /// Replaces a block by another.
    pub(crate) fn rename(&mut self, from: BlockId, to: BlockId) {
        self.rings.rename(from, to);
        self.deadlines[to.index()] = self.deadlines[from.index()];
        self.forget(from);
    }

    /// Takes out the block with the earliest deadline.
    pub(crate) fn pop(&mut self) -> Option<BlockId> {
        self.pop_ranked().map(|(block, _)| block)
    }

    /// Like [`Leveled::pop`], with the block's rank.
    pub(crate) fn pop_ranked(&mut self) -> Option<(BlockId, Rank)> {
        let mut first: Option<(u64, usize, u32)> = None;
        for ring in 0..self.levels as usize {
            if let Some(age) = self.rings.age(ring) {
                let overdue = overdue(ring, u64::from(age), u64::from(self.credit), self.levels as usize);
                // Of two with equal deadlines, the one of the higher level was inserted first.
                if first.is_none_or(|(most, ..)| overdue >= most) {
                    first = Some((overdue, ring, age));
                }
            }
        }
        let (_, ring, age) = first?;
        let stamp = self.rings.clock().wrapping_sub(age);
        let block = self.rings.pop(ring)?;
        self.forget(block);
        Some((block, Rank { ring: u8::try_from(ring).unwrap_or(u8::MAX), stamp }))
    }

    /// How the host continues this order. The credit is that of both tiers.
    pub(crate) fn guide(&self) -> Guide {
        Guide { rule: Rule::Levels { credit: u64::from(self.credit) }, clock: self.rings.clock() }
    }

    /// Continues at a stamp of the host's order.
    pub(crate) fn set_clock(&mut self, clock: u32) {
        self.rings.set_clock(clock);
        self.now = clock;
    }

    /// Counts the blocks of the tier that evicted blocks are copied to.
    pub(crate) fn extend(&mut self, below: usize) {
        self.credit = Self::credit(self.deadlines.len() + below);
        self.below = below;
    }
}

/// How long ago a block of a level passed its deadline, plus the credit of all higher levels: never negative.
pub(super) fn overdue(level: usize, age: u64, credit: u64, levels: usize) -> u64 {
    age + credit * (levels - 1 - level) as u64
}

/// Insertions until a deadline; 0 once it has passed.
fn remaining(deadline: u32, now: u32) -> u32 {
    let left = deadline.wrapping_sub(now);
    if left > u32::MAX / 2 { 0 } else { left }
}
