//! The state that a call needs to decide a transfer: the tiers and the open step.

use super::{Lease, StoreJobs, Transfers, merge_runs};
use crate::block::{LeaseKind, TierBlock};
use crate::decision::Kind;
use crate::id::{BlockId, Tier};
use crate::page::PerClass;
use crate::tiers::Tiers;

/// The tiers, the open step, and the jobs of a prefix store.
pub(crate) struct OpenStep<'a> {
    pub(crate) tiers: &'a mut Tiers,
    pub(crate) transfers: &'a mut Transfers,
    pub(crate) jobs: &'a mut StoreJobs,
}

/// Like [`OpenStep`], read-only.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub(crate) tiers: &'a Tiers,
    pub(crate) transfers: &'a Transfers,
    pub(crate) jobs: &'a StoreJobs,
}

impl OpenStep<'_> {
    /// A read-only view of the step.
    #[inline]
    pub(crate) fn view(&self) -> View<'_> {
        View { tiers: self.tiers, transfers: self.transfers, jobs: self.jobs }
    }

    /// Takes blocks of a page class, whose availability [`View::require`] has checked; see [`Tiers::take`]. Cancels
    /// prefix-store writes that hold some of them. Records whether an unfinished ticket still reads one of them.
    pub(crate) fn take(&mut self, of: (Tier, usize), count: usize, filling: bool, out: &mut Vec<BlockId>) {
        let tier = of.0;
        if self.jobs.are_writing() {
            self.jobs.give_up_writes(self.tiers, tier, PerClass::of(of.1, count), true);
        }
        if tier == Tier::Device && self.tiers.keeps_host_copies() {
            self.make_room(of.1, count);
        }
        let overlapped = self.tiers.take(of, count, filling, out);
        self.transfers.note_overlap(overlapped);
    }

    /// Sees to it that blocks of several page classes can be taken one class after the other, once [`View::require`] has
    /// found that there are enough, and found ones that are shared have been claimed.
    pub(crate) fn prepare(&mut self, tier: Tier, wanted: PerClass, overlappable_too: bool) {
        if self.tiers.pool(tier).num_classes() > 1 {
            if self.jobs.are_writing() {
                self.jobs.give_up_writes(self.tiers, tier, wanted, overlappable_too);
            }
            self.tiers.make_room(tier, wanted, overlappable_too);
        }
    }

    /// Decides a transfer from a block in use into a block taken for it.
    pub(crate) fn transfer(&mut self, kind: Kind, from: TierBlock, to: TierBlock, reads: LeaseKind) {
        self.tiers.lease(from, reads);
        self.add(kind, from, to, reads);
    }

    /// Like [`OpenStep::transfer`], from a cached block: the transfer counts as a hit for eviction.
    pub(crate) fn transfer_cached(&mut self, kind: Kind, from: TierBlock, to: TierBlock, reads: LeaseKind) {
        self.tiers.lease_cached(from, reads);
        self.add(kind, from, to, reads);
    }

    /// Like [`OpenStep::transfer`], from a device block popped from the eviction order to the host.
    pub(crate) fn transfer_popped(&mut self, from: BlockId, to: BlockId, ring: u8) {
        self.tiers.lease_popped(from, ring);
        self.transfers.step.lease_evicted(from, to, ring);
        self.transfers.pairs(Kind::SwapOut, Tier::Device, Tier::Host).push([from.0, to.0]);
    }

    fn add(&mut self, kind: Kind, from: TierBlock, to: TierBlock, reads: LeaseKind) {
        self.transfers.step.lease(Lease { tier: from.0, kind: reads, block: from.1 });
        self.transfers.step.lease(Lease { tier: to.0, kind: LeaseKind::Write, block: to.1 });
        self.transfers.pairs(kind, from.0, to.0).push([from.1.0, to.1.0]);
    }

    /// Like [`OpenStep::transfer`], for many private blocks, whose references the transfer drops. There is no check per
    /// block, as this dominates the cost of a swap.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::Shape;
    use crate::pool::Policies;

    #[test]
    fn a_transfer_leases_both_blocks_until_its_ticket_ends() {
        let mut tiers =
            Tiers::new(&[4; 3].map(|blocks| Shape::single(blocks, false)), 1, false, Policies::default()).unwrap();
        let (mut transfers, mut jobs) = (Transfers::new(), StoreJobs::default());
        let mut step = OpenStep { tiers: &mut tiers, transfers: &mut transfers, jobs: &mut jobs };
        let (mut sources, mut targets) = (Vec::new(), Vec::new());
        step.take((Tier::Device, 0), 3, false, &mut sources);
        step.take((Tier::Host, 0), 3, true, &mut targets);
        let (from, to) = ((Tier::Device, sources[0]), (Tier::Host, targets[0]));
        step.transfer(Kind::SwapOut, from, to, LeaseKind::Read);
        let [source, target] = [(Tier::Device, &sources[1..]), (Tier::Host, &targets[1..])];
        step.transfer_private(Kind::SwapOut, source, target, LeaseKind::Read);
        assert_eq!(
            (transfers.pairs(Kind::SwapOut, Tier::Device, Tier::Host).len(), transfers.leases().count()),
            (3, 6)
        );
        // The private ones have lost their references, and stay until they are read.
        assert_eq!(sources.iter().map(|block| tiers.device().refs(*block)).collect::<Vec<_>>(), [1, 0, 0]);
        assert_eq!(tiers.device().free(), 1);
        for lease in transfers.leases().collect::<Vec<_>>() {
            tiers.end_lease((lease.tier, lease.block), lease.kind);
        }
        assert_eq!((tiers.device().free(), tiers.host().free()), (3, 1));
    }
}
