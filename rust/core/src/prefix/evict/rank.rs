//! The place of a block in the order of a policy, and how policies compare places: what the host's order takes over from
//! the device's.

use super::turns::GAPS;

/// Rings for the segments or levels of any policy.
pub(crate) const RANKS: usize = 2 + 2 * GAPS;
/// Which block goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EvictionRule {
    /// Evicts the oldest of the blocks used once, while these are more than this share, in 1024ths; then the oldest of
    /// all.
    Once(u16),
    /// Evicts the oldest, where a block counts as older by the usual gap between the turns of its conversation.
    Gaps,
    /// Evicts new blocks, except for one chain in [`KEPT_CHAINS`]: existing blocks stay, even if prompts repeat in a
    /// loop longer than the pool.
    Keep,
}

/// Place of an evictable block in its policy's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rank {
    /// Its segment or level.
    pub(crate) ring: u8,
    /// When it became evictable.
    pub(crate) stamp: u32,
}

/// How the device's policy compares the heads of its rings.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rule {
    /// The oldest goes first.
    Oldest,
    /// By levels, each worth `credit` insertions.
    Levels { credit: u64 },
    /// By segments; `once` is the number of the device's blocks that were used once.
    Segments { rule: EvictionRule, credits: [u32; GAPS], blocks: usize, once: usize },
}

/// What the host's order takes over from the device's policy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Guide {
    pub(crate) rule: Rule,
    /// Stamp of the device's last insertion.
    pub(crate) clock: u32,
}
