//! How long blocks stay cached: for a sample of them, when they were published, and when they were last used.
//!
//! The core has no clock: each call of a manager is given the time at which it began. A hash of its id determines
//! whether a block is sampled, so other blocks cost only a multiplication.

use crate::id::BlockId;
use std::collections::HashMap;
use std::time::Duration;

/// Upper bounds, in seconds, of the ranges in which a [`Histogram`] counts durations; the last range is unbounded. They
/// are vLLM's.
pub const RESIDENCY_SECONDS: [f64; 21] = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1200.0, 1800.0,
];

/// How many durations fell into each range, and their sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    /// By range, see [`RESIDENCY_SECONDS`].
    pub counts: [u64; RESIDENCY_SECONDS.len() + 1],
    /// Sum of all durations.
    pub sum: Duration,
}

impl Histogram {
    fn observe(&mut self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        self.counts[RESIDENCY_SECONDS.partition_point(|end| *end < seconds)] += 1;
        self.sum = self.sum.saturating_add(duration);
    }
}

/// How long the sampled blocks of a tier stayed cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Residency {
    /// Time from a block's publication to its eviction.
    pub lifetime: Histogram,
    /// Time from a block's last use to its eviction.
    pub idle_before_evict: Histogram,
    /// Time during which nothing used a block, until a prompt used it again.
    pub reuse_gap: Histogram,
}

/// One cached block of the sample.
#[derive(Clone, Copy, Debug)]
struct Stay {
    since: Duration,
    last_used: Duration,
}

/// Measures the sampled blocks of one tier.
#[derive(Clone, Debug, Default)]
pub(crate) struct ResidencySample {
    /// Hashes of ids up to this one belong to the sample.
    threshold: u32,
    now: Duration,
    stays: HashMap<BlockId, Stay>,
    pub(crate) found: Residency,
}

impl ResidencySample {
    /// Sets the sampled fraction of the blocks, 0 to 1.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates within u32")]
    pub(crate) fn set_rate(&mut self, rate: f64) {
        self.threshold = (rate * f64::from(u32::MAX)) as u32;
    }

    /// Sets the current time.
    pub(crate) fn set_time(&mut self, now: Duration) {
        self.now = now;
    }

    #[inline]
    fn has(&self, block: BlockId) -> bool {
        block.0.wrapping_mul(0x9E37_79B1) <= self.threshold
    }

    /// Records that a block can be found.
    #[inline]
    pub(crate) fn published(&mut self, block: BlockId) {
        if self.has(block) {
            self.stays.insert(block, Stay { since: self.now, last_used: self.now });
        }
    }

    /// Notes that a published block is no longer used, or that it is used `again`.
    #[inline(never)]
    pub(crate) fn note_use(&mut self, block: BlockId, again: bool) {
        if again {
            self.reused(block);
        } else {
            self.released(block);
        }
    }

    /// Notes that a published block is no longer used.
    #[inline]
    fn released(&mut self, block: BlockId) {
        if self.has(block) {
            if let Some(stay) = self.stays.get_mut(&block) {
                stay.last_used = self.now;
            }
        }
    }

    /// Records that an unused block is used again.
    #[inline]
    fn reused(&mut self, block: BlockId) {
        if self.has(block) {
            if let Some(stay) = self.stays.get(&block) {
                self.found.reuse_gap.observe(self.now.saturating_sub(stay.last_used));
            }
        }
    }

    /// Records that a block was evicted.
    #[inline]
    pub(crate) fn evicted(&mut self, block: BlockId) {
        if self.has(block) {
            if let Some(stay) = self.stays.remove(&block) {
                self.found.lifetime.observe(self.now.saturating_sub(stay.since));
                self.found.idle_before_evict.observe(self.now.saturating_sub(stay.last_used));
            }
        }
    }

    /// Records that a block can no longer be found for another reason; its times do not count.
    #[inline]
    pub(crate) fn removed(&mut self, block: BlockId) {
        if self.has(block) {
            self.stays.remove(&block);
        }
    }

    /// A sampled block that cannot be found, which would be a bug.
    pub(crate) fn stray(&self, finds: impl Fn(BlockId) -> bool) -> Option<BlockId> {
        self.stays.keys().copied().find(|block| !finds(*block))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_includes_its_upper_bound() {
        let mut found = Histogram::default();
        for millis in [0, 1, 2, 3, 1_800_000, 1_800_001] {
            found.observe(Duration::from_millis(millis));
        }
        assert_eq!((found.counts[..3].to_vec(), found.counts[20..].to_vec()), (vec![2, 1, 1], vec![1, 1]));
        assert_eq!(found.sum, Duration::from_millis(3_600_007));
    }

    #[test]
    fn a_sample_has_about_its_fraction_of_any_range_of_ids() {
        let mut sample = ResidencySample::default();
        for (rate, most) in [(0.0, 1), (0.01, 120), (0.5, 5100), (1.0, 10_000)] {
            sample.set_rate(rate);
            for first in [0, 1 << 20] {
                let count = (first..first + 10_000).filter(|id| sample.has(BlockId(*id))).count();
                assert!(count <= most && count * 10 >= most.saturating_sub(1) * 8, "{count} of 10000 at {rate}");
            }
        }
    }
}
