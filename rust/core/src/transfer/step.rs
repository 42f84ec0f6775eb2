//! What a verb needs to decide a transfer: the tiers, and the open step.

use super::{Lease, Transfers, merge_runs};
use crate::block::{LeaseKind, TierBlock};
use crate::decision::Kind;
use crate::error::Result;
use crate::id::{BlockId, Tier};
use crate::tiers::Tiers;

/// The tiers and the open step.
pub(crate) struct Step<'a> {
    pub(crate) tiers: &'a mut Tiers,
    pub(crate) transfers: &'a mut Transfers,
}

impl Step<'_> {
    /// Takes blocks; see [`Tiers::take`]. Notes whether an unfinished ticket still reads one of them.
    pub(crate) fn take(&mut self, tier: Tier, count: usize, filling: bool, out: &mut Vec<BlockId>) {
        let overlapped = self.tiers.take(tier, count, filling, out);
        self.transfers.note_overlap(overlapped);
    }

    /// Decides to fill a block, which was taken for that, from another that is in use.
    pub(crate) fn transfer(&mut self, kind: Kind, from: TierBlock, to: TierBlock, reads: LeaseKind) -> Result<()> {
        self.tiers.lease(from, reads)?;
        self.add(kind, from, to, reads);
        Ok(())
    }

    /// As [`Step::transfer`], from a cached block: the transfer counts as a hit for the order of eviction.
    pub(crate) fn transfer_cached(
        &mut self,
        kind: Kind,
        from: TierBlock,
        to: TierBlock,
        reads: LeaseKind,
    ) -> Result<()> {
        self.tiers.lease_cached(from, reads)?;
        self.add(kind, from, to, reads);
        Ok(())
    }

    fn add(&mut self, kind: Kind, from: TierBlock, to: TierBlock, reads: LeaseKind) {
        self.transfers.step.lease(Lease { tier: from.0, kind: reads, block: from.1 });
        self.transfers.step.lease(Lease { tier: to.0, kind: LeaseKind::Write, block: to.1 });
        self.transfers.pairs(kind, from.0, to.0).push([from.1.0, to.1.0]);
    }

    /// As [`Step::transfer`], of many blocks that each have one reference and nothing else, which the transfer drops. No
    /// question is asked for each block: this is what a swap costs.
    pub(crate) fn transfer_private(
        &mut self,
        kind: Kind,
        (from, sources): (Tier, &[BlockId]),
        (to, targets): (Tier, &[BlockId]),
        reads: LeaseKind,
    ) {
        let Transfers { step, decided, .. } = &mut *self.transfers;
        let pairs = super::pairs_of(decided, kind, from, to);
        let first = pairs.len();
        pairs.extend(sources.iter().zip(targets).map(|(source, target)| [source.0, target.0]));
        for run in merge_runs(&pairs[first..]) {
            self.tiers.depart(from, run.src..run.src + run.len, reads);
            step.lease_run(from, reads, to, run);
        }
    }
}
