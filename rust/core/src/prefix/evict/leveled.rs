//! Levels of retention that decay: a block of level `n` is kept as if it had become evictable `n` turnovers of the pool
//! later. So every block is evicted eventually, whatever its level.
//!
//! Along a chain no block is evicted before one that depends on it: chains are released from their ends, and a block's
//! deadline is never before those of the blocks after it.

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
    /// Insertions that one level is worth.
    credit: u32,
}

impl Leveled {
    pub(crate) fn new(blocks: usize, levels: u32) -> Self {
        let credit = Self::credit(blocks);
        let rings = Rings::new(blocks, levels as usize);
        Self { rings, deadlines: vec![0; blocks], floor: 0, now: 0, levels, credit }
    }

    /// Follows a resize of the pool to `blocks` blocks.
    pub(crate) fn resize(&mut self, blocks: usize) {
        self.credit = Self::credit(blocks);
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
        let mut first: Option<(i64, usize)> = None;
        for level in 0..self.levels {
            let ring = level as usize;
            if let Some(age) = self.rings.age(ring) {
                let overdue = i64::from(age) - i64::from(level) * i64::from(self.credit);
                // Of two with equal deadlines, the one of the higher level was inserted first.
                if first.is_none_or(|(most, _)| overdue >= most) {
                    first = Some((overdue, ring));
                }
            }
        }
        let block = self.rings.pop(first?.1)?;
        self.forget(block);
        Some(block)
    }
}

/// Insertions until a deadline; 0 once it has passed.
fn remaining(deadline: u32, now: u32) -> u32 {
    let left = deadline.wrapping_sub(now);
    if left > u32::MAX / 2 { 0 } else { left }
}
