//! `ManagerStats`: all counters in one object.

use crate::convert::values::{TierName, picklable};
use blockyard_core::{Histogram, Kind, RESIDENCY_SECONDS, Residency, Stats, TicketId, Tier, TierUse};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeMap;

/// One number per tier, by the tier's name.
type ByTier = BTreeMap<TierName, u64>;

/// Counters since the manager was created, and the current state of each tier. Transfers count when they are
/// decided.
#[pyclass(frozen, eq, get_all, name = "ManagerStats", module = "blockyard._core")]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct PyManagerStats {
    /// Number of open sequences.
    sequences: u64,
    /// Number of decisions taken.
    steps: u64,
    /// Tickets neither completed nor failed, a list of ints, oldest first.
    open_tickets: Vec<u64>,
    /// Number of prompts admitted with token ids.
    prompts: u64,
    /// Number of full blocks of those prompts that were cached.
    hit_blocks: u64,
    /// Number of full blocks of those prompts that were not cached.
    missed_blocks: u64,
    /// Number of prompt tokens that needed no compute.
    hit_tokens: u64,
    /// Number of prompt tokens to compute.
    missed_tokens: u64,
    /// Number of blocks that were computed twice and merged.
    merged_blocks: u64,
    /// Number of hit blocks that only the host had.
    loaded_blocks: u64,
    /// Number of blocks copied on write.
    copied_blocks: u64,
    /// For host and external tier, number of blocks swapped out to it.
    swapped_out_blocks: ByTier,
    /// For host and external tier, number of blocks swapped in from it.
    swapped_in_blocks: ByTier,
    /// Number of finished defragmentation moves.
    moved_blocks: u64,
    /// Number of moves cancelled because the block was written, freed or leased in the meantime.
    cancelled_moves: u64,
    /// Number of moves whose bytes did not land.
    failed_moves: u64,
    /// For each tier, its current number of blocks.
    num_blocks: ByTier,
    /// For each tier, number of blocks that are referenced or leased.
    used_blocks: ByTier,
    /// For each tier, the highest number of used blocks so far.
    peak_blocks: ByTier,
    /// For each tier, number of blocks leased by transfers.
    leased_blocks: ByTier,
    /// For each tier, number of blocks that can be found by key.
    cached_blocks: ByTier,
    /// For each tier, number of cached blocks evicted.
    evicted_blocks: ByTier,
    /// For each tier, number of pinned blocks.
    pinned_blocks: ByTier,
}

impl PyManagerStats {
    pub(crate) fn new(stats: &Stats, open_tickets: impl Iterator<Item = TicketId>) -> Self {
        let by_tier = |of: fn(&TierUse) -> u64| Tier::ALL.map(|t| (t.into(), of(&stats.tiers[t.index()]))).into();
        let swapped = |kind| [Tier::Host, Tier::External].map(|t| (t.into(), stats.decided(kind, t))).into();
        let prefix = &stats.prefix;
        Self {
            sequences: stats.sequences as u64,
            steps: stats.steps,
            open_tickets: open_tickets.map(|ticket| ticket.0).collect(),
            prompts: prefix.prompts,
            hit_blocks: prefix.hit_blocks,
            missed_blocks: prefix.missed_blocks(),
            hit_tokens: prefix.hit_tokens,
            missed_tokens: prefix.missed_tokens(),
            merged_blocks: prefix.merged,
            loaded_blocks: prefix.loaded,
            copied_blocks: stats.decided(Kind::Copy, Tier::Device),
            swapped_out_blocks: swapped(Kind::SwapOut),
            swapped_in_blocks: swapped(Kind::SwapIn),
            moved_blocks: stats.moves.done,
            cancelled_moves: stats.moves.cancelled,
            failed_moves: stats.moves.failed,
            num_blocks: by_tier(|tier| tier.blocks as u64),
            used_blocks: by_tier(|tier| tier.used as u64),
            peak_blocks: by_tier(|tier| tier.peak as u64),
            leased_blocks: by_tier(|tier| tier.leased as u64),
            cached_blocks: by_tier(|tier| tier.cached as u64),
            evicted_blocks: by_tier(|tier| tier.evicted),
            pinned_blocks: by_tier(|tier| tier.pinned as u64),
        }
    }
}

#[pymethods]
impl PyManagerStats {
    /// Fraction of the full blocks looked up that were hits; 0 before the first.
    #[getter]
    fn hit_rate(&self) -> f64 {
        share(self.hit_blocks, self.hit_blocks + self.missed_blocks)
    }

    /// Return all counters by name, for metrics.
    ///
    /// Returns:
    ///     A dict of numbers. Those of a tier are named `used_blocks_device` and so on; `open_tickets` is their number;
    ///     `device_cache_usage_sys` and so on are the fraction of a tier in use, 0 to 1.
    fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        let plain = [
            ("sequences", self.sequences),
            ("steps", self.steps),
            ("open_tickets", self.open_tickets.len() as u64),
            ("prompts", self.prompts),
            ("hit_blocks", self.hit_blocks),
            ("missed_blocks", self.missed_blocks),
            ("hit_tokens", self.hit_tokens),
            ("missed_tokens", self.missed_tokens),
            ("merged_blocks", self.merged_blocks),
            ("loaded_blocks", self.loaded_blocks),
            ("copied_blocks", self.copied_blocks),
            ("moved_blocks", self.moved_blocks),
            ("cancelled_moves", self.cancelled_moves),
            ("failed_moves", self.failed_moves),
        ];
        for (name, value) in plain {
            dict.set_item(name, value)?;
        }
        for (name, by_tier) in [("swapped_out", &self.swapped_out_blocks), ("swapped_in", &self.swapped_in_blocks)] {
            for (tier, value) in by_tier {
                dict.set_item(format!("{name}_blocks_{tier}_total"), value)?;
            }
        }
        let tiers = [
            ("used_blocks", &self.used_blocks),
            ("peak_blocks", &self.peak_blocks),
            ("leased_blocks", &self.leased_blocks),
            ("cached_blocks", &self.cached_blocks),
            ("evicted_blocks", &self.evicted_blocks),
            ("pinned_blocks", &self.pinned_blocks),
        ];
        for (name, by_tier) in tiers {
            for (tier, value) in by_tier {
                dict.set_item(format!("{name}_{tier}"), value)?;
            }
        }
        for (tier, used) in &self.used_blocks {
            dict.set_item(format!("{tier}_cache_usage_sys"), share(*used, self.num_blocks[tier]))?;
        }
        Ok(dict)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("ManagerStats({})", self.as_dict(py)?.repr()?))
    }
}

picklable!(PyManagerStats {
    sequences,
    steps,
    open_tickets,
    prompts,
    hit_blocks,
    missed_blocks,
    hit_tokens,
    missed_tokens,
    merged_blocks,
    loaded_blocks,
    copied_blocks,
    swapped_out_blocks,
    swapped_in_blocks,
    moved_blocks,
    cancelled_moves,
    failed_moves,
    num_blocks,
    used_blocks,
    peak_blocks,
    leased_blocks,
    cached_blocks,
    evicted_blocks,
    pinned_blocks,
});

/// How long the sampled blocks of a tier stayed cached. Each field has counts per range and a sum in seconds.
#[pyclass(frozen, eq, get_all, name = "Residency", module = "blockyard._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct PyResidency {
    /// Upper bounds of the ranges in seconds; the last range is unbounded.
    bounds: Vec<f64>,
    /// Time from when a block was first cached to its eviction.
    lifetime: (Vec<u64>, f64),
    /// Time from a block's last use to its eviction.
    idle_before_evict: (Vec<u64>, f64),
    /// Time during which no sequence used a block, until a prompt used it again.
    reuse_gap: (Vec<u64>, f64),
}

impl PyResidency {
    pub(crate) fn new(found: &Residency) -> Self {
        let of = |histogram: &Histogram| (histogram.counts.to_vec(), histogram.sum.as_secs_f64());
        Self {
            bounds: RESIDENCY_SECONDS.to_vec(),
            lifetime: of(&found.lifetime),
            idle_before_evict: of(&found.idle_before_evict),
            reuse_gap: of(&found.reuse_gap),
        }
    }
}

#[pymethods]
impl PyResidency {
    fn __repr__(&self) -> String {
        let count = |of: &(Vec<u64>, f64)| of.0.iter().sum::<u64>();
        format!("Residency({} evicted, {} reused)", count(&self.lifetime), count(&self.reuse_gap))
    }
}

picklable!(PyResidency { bounds, lifetime, idle_before_evict, reuse_gap });

/// How fragmented the device pool is.
#[pyclass(frozen, eq, get_all, name = "Fragmentation", module = "blockyard._core")]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct PyFragmentation {
    /// Highest block that is not free; None if all are.
    pub(crate) max_id: Option<u32>,
    /// By how many blocks the highest movable block could be lower.
    pub(crate) gap: u32,
    /// Number of free blocks without cached content.
    pub(crate) holes: usize,
    /// Number of block tables that are not empty.
    pub(crate) tables: usize,
    /// Number of runs of adjacent blocks in those tables.
    pub(crate) runs: usize,
}

#[pymethods]
impl PyFragmentation {
    fn __repr__(&self) -> String {
        let Self { max_id, gap, holes, tables, runs } = self;
        let max_id = max_id.map_or_else(|| "None".to_owned(), |id| id.to_string());
        format!("Fragmentation(max_id={max_id}, gap={gap}, holes={holes}, tables={tables}, runs={runs})")
    }
}

picklable!(PyFragmentation { max_id, gap, holes, tables, runs });

/// Returns a fraction, 0 to 1; 0 if the whole is 0.
#[expect(clippy::cast_precision_loss, reason = "a ratio for people to read")]
fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}
