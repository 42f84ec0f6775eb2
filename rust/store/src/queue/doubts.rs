//! `Doubts`: blocks whose last read failed. No failure that may pass deletes a block, and damage only at a second look.
//!
//! A failed read hides its block for a while, so that no read waits for it again. Then the next read looks once more.
//! If it finds the same damaged bytes, the block is damaged where it lies. A put replaces a doubted block meanwhile.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Digest of a damaged block as it was read.
pub(crate) type Seen = [u8; 16];

#[derive(Clone, Copy, Debug)]
struct Doubt {
    generation: u64,
    until: Instant,
    /// `None` after a failure that may pass.
    seen: Option<Seen>,
}

/// By slot. A doubt of another generation than the slot's is void.
#[derive(Debug)]
pub(crate) struct Doubts {
    hidden: Duration,
    doubts: HashMap<u32, Doubt>,
}

impl Doubts {
    pub(crate) fn new(hidden: Duration) -> Self {
        Self { hidden, doubts: HashMap::new() }
    }

    /// Records that a read failed. Returns whether this confirms that the block is damaged.
    ///
    /// A look at a hidden block does not count: what was wrong on the way is often wrong twice in a row.
    pub(crate) fn note(&mut self, (slot, generation): (u32, u64), seen: Option<Seen>, now: Instant) -> bool {
        let before = self.find(slot, generation);
        if before.is_some_and(|doubt| now < doubt.until) {
            return false;
        }
        let before = before.and_then(|doubt| doubt.seen);
        if seen.is_some() && before == seen {
            self.doubts.remove(&slot);
            return true;
        }
        self.doubts.insert(slot, Doubt { generation, until: now + self.hidden, seen: seen.or(before) });
        false
    }

    /// Whether a block is not read now.
    pub(crate) fn hides(&self, (slot, generation): (u32, u64), now: Instant) -> bool {
        self.find(slot, generation).is_some_and(|doubt| now < doubt.until)
    }

    /// Whether the last look at a block found damage.
    pub(crate) fn has_damage(&self, (slot, generation): (u32, u64)) -> bool {
        self.find(slot, generation).is_some_and(|doubt| doubt.seen.is_some())
    }

    /// Whether the last read of a block failed.
    pub(crate) fn has(&self, (slot, generation): (u32, u64)) -> bool {
        self.find(slot, generation).is_some()
    }

    /// Forgets a doubt: the block was read or written.
    pub(crate) fn clear(&mut self, slot: u32) {
        self.doubts.remove(&slot);
    }

    fn find(&self, slot: u32, generation: u64) -> Option<Doubt> {
        self.doubts.get(&slot).filter(|doubt| doubt.generation == generation).copied()
    }
}
