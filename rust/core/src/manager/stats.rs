//! All counters, read in one call.

use crate::decision::Kind;
use crate::defrag::MoveStats;
use crate::id::Tier;
use crate::page::{ClassUse, MAX_CLASSES};
use crate::prefix::evict::{Hint, HintCount};
use crate::sequence::PrefixStats;

/// Use of one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierUse {
    /// Blocks in the tier.
    pub blocks: usize,
    /// Blocks that are not free now: referenced, or held by a transfer.
    pub used: usize,
    /// Peak number of blocks in use.
    pub peak: usize,
    /// Blocks that transfers hold now.
    pub leased: usize,
    /// Blocks that can be found by their keys now, used or not.
    pub cached: usize,
    /// Cached blocks that were evicted.
    pub evicted: u64,
    /// Blocks that pins hold now.
    pub pinned: usize,
    /// Bytes of the tier without null blocks; the blocks count 1 if they have no bytes.
    pub bytes: u64,
    /// By page class, see [`Manager::num_classes`](crate::Manager::num_classes).
    pub classes: [ClassUse; MAX_CLASSES],
}

/// Counters since the manager was created, and current values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Sequences that have not been freed.
    pub sequences: usize,
    /// Decisions taken.
    pub steps: u64,
    /// Tickets neither completed nor failed.
    pub open_tickets: usize,
    /// The prefix cache.
    pub prefix: PrefixStats,
    /// Moves within the device.
    pub moves: MoveStats,
    /// Device, host, external.
    pub tiers: [TierUse; 3],
    /// Blocks that the device evicted and did not copy to the host.
    pub uncopied: u64,
    /// By hint, see [`Hint::ALL`]: the turns of conversations that ended with it.
    pub hints: [HintCount; Hint::ALL.len()],
    pub(super) decided: [[u64; 3]; 5],
}

impl Stats {
    /// Pairs of a kind in all decisions taken, by the slower of their two tiers.
    #[must_use]
    pub fn decided(&self, kind: Kind, tier: Tier) -> u64 {
        self.decided[kind as usize][tier.index()]
    }
}
