//! `ManagerStats`, `Residency` and `Fragmentation`: the counters as objects of `blockyard.types`.

use crate::convert::values::made;
use blockyard_core::{
    ClassUse, Hint, HintCount, Histogram, Kind, RESIDENCY_SECONDS, Residency, Stats, TicketId, Tier, TierUse,
};
use pyo3::prelude::*;
use std::collections::BTreeMap;

/// Returns all counters; `classes` are the bytes of a block of each page class.
pub(crate) fn manager_stats<'py>(
    py: Python<'py>,
    stats: &Stats,
    open: &[TicketId],
    classes: &[u64],
) -> PyResult<Bound<'py, PyAny>> {
    let by_tier = |of: fn(&TierUse) -> u64| BTreeMap::from(Tier::ALL.map(|t| (t.name(), of(&stats.tiers[t.index()]))));
    let swapped = |kind| BTreeMap::from([Tier::Host, Tier::External].map(|t| (t.name(), stats.decided(kind, t))));
    let by_hint = |of: fn(&HintCount) -> u64| {
        BTreeMap::from(Hint::ALL.map(|hint| (hint.name(), of(&stats.hints[hint as usize]))))
    };
    let prefix = &stats.prefix;
    // Blocks of a cache without page classes of their own have no bytes.
    let unit = u64::from(classes != [1]);
    let by_class = |of: fn(&ClassUse) -> u64| {
        let of_tier = |tier: Tier| {
            let found = &stats.tiers[tier.index()].classes[..classes.len()];
            found.iter().map(|found| unit * of(found)).collect::<Vec<_>>()
        };
        BTreeMap::from(Tier::ALL.map(|tier| (tier.name(), of_tier(tier))))
    };
    let num_bytes = BTreeMap::from(Tier::ALL.map(|tier| (tier.name(), unit * stats.tiers[tier.index()].bytes)));
    made!(py, "ManagerStats" {
        sequences: stats.sequences,
        steps: stats.steps,
        open_tickets: open.iter().map(|ticket| ticket.0).collect::<Vec<_>>(),
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
        num_bytes,
        class_bytes: by_class(|found| found.total),
        used_bytes: by_class(|found| found.used),
        cached_bytes: by_class(|found| found.cached),
        uncopied_blocks: stats.uncopied,
        hinted_turns: by_hint(|count| count.given),
        resumed_turns: by_hint(|count| count.resumed),
    })
}

/// Returns how long the sampled blocks of a tier stayed cached.
pub(crate) fn residency<'py>(py: Python<'py>, found: &Residency) -> PyResult<Bound<'py, PyAny>> {
    let of = |histogram: &Histogram| (histogram.counts.to_vec(), histogram.sum.as_secs_f64());
    made!(py, "Residency" {
        bounds: RESIDENCY_SECONDS.to_vec(),
        lifetime: of(&found.lifetime),
        idle_before_evict: of(&found.idle_before_evict),
        reuse_gap: of(&found.reuse_gap),
    })
}
