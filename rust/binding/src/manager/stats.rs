//! `ManagerStats`: all counters in one object.

use blockyard_core::{Histogram, Kind, RESIDENCY_SECONDS, Residency, Stats, TicketId, Tier, TierUse};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeMap;

/// One number a tier, by its name.
type ByTier = BTreeMap<&'static str, u64>;

/// Counters since the manager was made, and the state of each tier now. Transfers count when they are decided.
#[pyclass(frozen, eq, get_all, name = "ManagerStats", module = "blockyard._core")]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct PyManagerStats {
    /// Sequences that are open now.
    sequences: u64,
    /// Decisions taken.
    steps: u64,
    /// Tickets that are neither completed nor failed, a list of ints, oldest first.
    open_tickets: Vec<u64>,
    /// Prompts admitted with their token ids.
    prompts: u64,
    /// Full blocks of those prompts that were cached.
    hit_blocks: u64,
    /// Full blocks of those prompts that were not.
    missed_blocks: u64,
    /// Tokens that need not be computed.
    hit_tokens: u64,
    /// Tokens that must be computed.
    missed_tokens: u64,
    /// Blocks that were computed twice and merged into one.
    merged_blocks: u64,
    /// Hit blocks that only the host had.
    loaded_blocks: u64,
    /// Copies on write that were decided.
    copied_blocks: u64,
    /// For host and external tier, blocks swapped out to it.
    swapped_out_blocks: ByTier,
    /// For host and external tier, blocks swapped in from it.
    swapped_in_blocks: ByTier,
    /// Moves by defragmentation that ended.
    moved_blocks: u64,
    /// Moves given up because the block was written, freed or leased meanwhile.
    cancelled_moves: u64,
    /// Moves whose bytes did not land.
    failed_moves: u64,
    /// For each tier, the blocks that it has now.
    num_blocks: ByTier,
    /// For each tier, blocks that are referenced or leased now.
    used_blocks: ByTier,
    /// For each tier, the most blocks ever used at once.
    peak_blocks: ByTier,
    /// For each tier, blocks that transfers lease now.
    leased_blocks: ByTier,
    /// For each tier, blocks whose key finds them now.
    cached_blocks: ByTier,
    /// For each tier, cached blocks that were evicted.
    evicted_blocks: ByTier,
    /// For each tier, blocks that pins keep now.
    pinned_blocks: ByTier,
}

impl PyManagerStats {
    pub(crate) fn new(stats: &Stats, open_tickets: impl Iterator<Item = TicketId>) -> Self {
        let by_tier = |of: fn(&TierUse) -> u64| Tier::ALL.map(|t| (t.name(), of(&stats.tiers[t.index()]))).into();
        let swapped = |kind| [Tier::Host, Tier::External].map(|t| (t.name(), stats.decided(kind, t))).into();
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
    /// Hit blocks of all full blocks that were looked up; 0 before the first.
    #[getter]
    fn hit_rate(&self) -> f64 {
        share(self.hit_blocks, self.hit_blocks + self.missed_blocks)
    }

    /// Return all counters by name, for metrics.
    ///
    /// Returns:
    ///     A dict of numbers; those of a tier as `used_blocks_device` and so on, the number of `open_tickets`, and
    ///     `device_cache_usage_sys` and so on: the part of a tier that is in use, 0 to 1.
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

/// How long the sampled blocks of a tier stayed cached. Each is how many fell into each range, and their sum in
/// seconds.
#[pyclass(frozen, eq, get_all, name = "Residency", module = "blockyard._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct PyResidency {
    /// Upper ends of the ranges in seconds; the last range has no end.
    bounds: Vec<f64>,
    /// From when a block could be found to its eviction.
    lifetime: (Vec<u64>, f64),
    /// From when a block was last used to its eviction.
    idle_before_evict: (Vec<u64>, f64),
    /// From when nothing used a block any more to when a prompt did again.
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

/// How scattered the device's blocks are.
#[pyclass(frozen, eq, get_all, name = "Fragmentation", module = "blockyard._core")]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct PyFragmentation {
    /// Highest block that is not free; None if all are.
    pub(crate) max_id: Option<u32>,
    /// Blocks by which the highest block that can move could be lower.
    pub(crate) gap: u32,
    /// Free blocks that are not cached.
    pub(crate) holes: usize,
    /// Block tables with blocks of their own.
    pub(crate) tables: usize,
    /// Runs of neighbouring blocks in those tables.
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

/// A part of a whole, 0 to 1; 0 where there is nothing.
#[expect(clippy::cast_precision_loss, reason = "a ratio for people to read")]
fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}
