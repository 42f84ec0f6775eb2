//! `BlockManager.stats`: all counters in one object.

use crate::manager::PyBlockManager;
use blockyard_core::{Kind, Stats, Tier, TierUse};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeMap;

/// One number a tier, by its name.
type ByTier = BTreeMap<&'static str, u64>;

/// Counters since the manager was made, and what is the case now.
#[pyclass(frozen, eq, get_all, name = "ManagerStats", module = "blockyard._core")]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct PyManagerStats {
    sequences: u64,
    steps: u64,
    open_tickets: u64,
    prompts: u64,
    hit_blocks: u64,
    missed_blocks: u64,
    hit_tokens: u64,
    missed_tokens: u64,
    merged_blocks: u64,
    loaded_blocks: u64,
    copied_blocks: u64,
    swapped_out_blocks: u64,
    swapped_in_blocks: u64,
    spilled_blocks: u64,
    fetched_blocks: u64,
    moved_blocks: u64,
    cancelled_moves: u64,
    failed_moves: u64,
    used_blocks: ByTier,
    peak_blocks: ByTier,
    leased_blocks: ByTier,
    cached_blocks: ByTier,
    evicted_blocks: ByTier,
    pinned_blocks: ByTier,
    quarantined_blocks: ByTier,
}

impl From<&Stats> for PyManagerStats {
    fn from(stats: &Stats) -> Self {
        let by_tier = |of: fn(&TierUse) -> u64| Tier::ALL.map(|t| (t.name(), of(&stats.tiers[t.index()]))).into();
        let prefix = &stats.prefix;
        Self {
            sequences: stats.sequences as u64,
            steps: stats.steps,
            open_tickets: stats.open_tickets as u64,
            prompts: prefix.prompts,
            hit_blocks: prefix.hit_blocks,
            missed_blocks: prefix.missed_blocks(),
            hit_tokens: prefix.hit_tokens,
            missed_tokens: prefix.missed_tokens(),
            merged_blocks: prefix.merged,
            loaded_blocks: prefix.loaded,
            copied_blocks: stats.decided(Kind::Copy),
            swapped_out_blocks: stats.decided(Kind::SwapOut),
            swapped_in_blocks: stats.decided(Kind::SwapIn),
            spilled_blocks: stats.decided(Kind::Spill),
            fetched_blocks: stats.decided(Kind::Fetch),
            moved_blocks: stats.moves.done,
            cancelled_moves: stats.moves.cancelled,
            failed_moves: stats.moves.failed,
            used_blocks: by_tier(|tier| tier.used as u64),
            peak_blocks: by_tier(|tier| tier.peak as u64),
            leased_blocks: by_tier(|tier| tier.leased as u64),
            cached_blocks: by_tier(|tier| tier.cached as u64),
            evicted_blocks: by_tier(|tier| tier.evicted),
            pinned_blocks: by_tier(|tier| tier.pinned as u64),
            quarantined_blocks: by_tier(|tier| tier.quarantined as u64),
        }
    }
}

#[pymethods]
impl PyManagerStats {
    /// All counters by name; those of a tier as `used_blocks_device` and so on.
    fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        let plain = [
            ("sequences", self.sequences),
            ("steps", self.steps),
            ("open_tickets", self.open_tickets),
            ("prompts", self.prompts),
            ("hit_blocks", self.hit_blocks),
            ("missed_blocks", self.missed_blocks),
            ("hit_tokens", self.hit_tokens),
            ("missed_tokens", self.missed_tokens),
            ("merged_blocks", self.merged_blocks),
            ("loaded_blocks", self.loaded_blocks),
            ("copied_blocks", self.copied_blocks),
            ("swapped_out_blocks", self.swapped_out_blocks),
            ("swapped_in_blocks", self.swapped_in_blocks),
            ("spilled_blocks", self.spilled_blocks),
            ("fetched_blocks", self.fetched_blocks),
            ("moved_blocks", self.moved_blocks),
            ("cancelled_moves", self.cancelled_moves),
            ("failed_moves", self.failed_moves),
        ];
        for (name, value) in plain {
            dict.set_item(name, value)?;
        }
        let tiers = [
            ("used_blocks", &self.used_blocks),
            ("peak_blocks", &self.peak_blocks),
            ("leased_blocks", &self.leased_blocks),
            ("cached_blocks", &self.cached_blocks),
            ("evicted_blocks", &self.evicted_blocks),
            ("pinned_blocks", &self.pinned_blocks),
            ("quarantined_blocks", &self.quarantined_blocks),
        ];
        for (name, by_tier) in tiers {
            for (tier, value) in by_tier {
                dict.set_item(format!("{name}_{tier}"), value)?;
            }
        }
        Ok(dict)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("ManagerStats({})", self.as_dict(py)?.repr()?))
    }
}

#[pymethods]
impl PyBlockManager {
    fn stats(&self) -> PyManagerStats {
        (&self.lock().stats()).into()
    }
}
