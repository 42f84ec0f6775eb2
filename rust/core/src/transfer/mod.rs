//! Transfers: the step being decided, and the tickets of earlier steps that have not ended.
//!
//! Invariant: each lease belongs to one ticket or pin, and a ticket fills every block that it will publish. A leased
//! block is not freed, moved or reallocated until the transfer that reads or writes it has finished.

mod open_step;
mod prompt_leases;
mod request;
mod runs;
mod span;
mod store_jobs;
mod ticket;

pub(crate) use open_step::{OpenStep, View};
pub use prompt_leases::LeaseShare;
pub(crate) use prompt_leases::PromptLeases;
pub(crate) use request::Request;
pub use runs::{Run, merge_runs};
pub use span::Span;
pub use store_jobs::StoreJob;
pub(crate) use store_jobs::{Missing, StoreJobs, Wanted};
pub(crate) use ticket::{Held, HeldRuns, Lease, PendingMoves, PendingPublish, PendingRehome, Ticket, evicted};

use crate::block::{BlockVersion, LeaseKind, TierBlock};
use crate::decision::{Kind, Pairs, StepDecision};
use crate::error::fault;
use crate::error::{Error, Result};
use crate::id::{BlockId, TicketId, Tier};
use crate::pool::Pool;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Number of ended copies to keep without pruning.
const FEW_COPIES: usize = 16;

/// The open step and the tickets in flight.
#[derive(Debug, Clone)]
pub(crate) struct Transfers {
    open: TicketId,
    /// The open step's ticket.
    step: Ticket,
    /// Pairs decided in the open step.
    decided: Vec<(Kind, Pairs)>,
    /// Blocks that the open step fills and that its later sequences may share.
    fresh: HashSet<TierBlock>,
    /// Whether the open step writes device blocks that an unfinished ticket still reads.
    overlaps: bool,
    /// Whether the open step's computation reads blocks that it loads.
    reads_loads: bool,
    submitted: BTreeMap<TicketId, Ticket>,
    /// Pairs decided so far, by kind and the slower of their two tiers.
    num_decided: [[u64; 3]; 5],
    /// Copies of ended tickets that follow a ticket still in flight, whose loads may still turn out to have failed.
    ended_copies: BTreeMap<TicketId, Vec<[BlockVersion; 2]>>,
    /// Upper bound of their number, and the number above which they are pruned.
    ended: usize,
    ended_limit: usize,
}

impl Transfers {
    pub(crate) fn new() -> Self {
        Self {
            open: TicketId(1),
            step: Ticket::default(),
            decided: Vec::new(),
            fresh: HashSet::new(),
            overlaps: false,
            reads_loads: false,
            submitted: BTreeMap::new(),
            num_decided: [[0; 3]; 5],
            ended_copies: BTreeMap::new(),
            ended: 0,
            ended_limit: FEW_COPIES,
        }
    }

    /// Submitted tickets that are neither completed nor failed, oldest first.
    pub(crate) fn submitted(&self) -> impl Iterator<Item = TicketId> {
        self.submitted.keys().copied()
    }

    /// Number of submitted tickets in flight.
    pub(crate) fn in_flight_count(&self) -> usize {
        self.submitted.len()
    }

    /// The ticket that the open step's transfers will carry.
    pub(crate) fn open(&self) -> TicketId {
        self.open
    }

    /// The open step's ticket so far.
    pub(crate) fn step_mut(&mut self) -> &mut Ticket {
        &mut self.step
    }

    /// Pairs of one kind decided in the open step, mutable.
    pub(crate) fn pairs(&mut self, kind: Kind, src: Tier, dst: Tier) -> &mut Vec<[u32; 2]> {
        pairs_of(&mut self.decided, kind, src, dst)
    }

    /// Pairs in all decisions, by kind and the slower of their two tiers.
    pub(crate) fn num_decided(&self) -> [[u64; 3]; 5] {
        self.num_decided
    }

    /// Records whether blocks taken by the open step are still read by an unfinished ticket.
    pub(crate) fn note_overlap(&mut self, overlaps: bool) {
        self.overlaps |= overlaps;
    }

    /// Whether the open step fills a block that its later sequences may share.
    pub(crate) fn is_fresh(&self, block: TierBlock) -> bool {
        self.fresh.contains(&block)
    }

    /// Lets later sequences of the open step share a block that it fills.
    pub(crate) fn add_fresh(&mut self, block: TierBlock) {
        self.fresh.insert(block);
    }

    /// The opposite of [`Transfers::add_fresh`].
    pub(crate) fn remove_fresh(&mut self, block: TierBlock) {
        self.fresh.remove(&block);
    }

    /// Publishes a block once the open step's transfers have landed.
    pub(crate) fn publish(&mut self, pending: PendingPublish) {
        self.step.publish(pending);
    }

    /// Records that the open step computes with a block that it loads.
    #[inline]
    pub(crate) fn note_load_read(&mut self) {
        self.reads_loads = true;
    }

    /// Whether the open step loads blocks.
    #[inline]
    pub(crate) fn is_loading(&self) -> bool {
        self.decided.iter().any(|(kind, _)| *kind == Kind::SwapIn)
    }

    /// Whether a submitted ticket loads blocks that its step did not compute with, so did not wait for.
    pub(crate) fn is_prefetch(&self, ticket: TicketId) -> bool {
        self.submitted.get(&ticket).is_some_and(Ticket::is_prefetch)
    }

    /// Ends the open step: its transfers, under a ticket that holds leases on all their blocks. `prefetch` lets loads
    /// land after the step, if it does not compute with them.
    pub(crate) fn submit(&mut self, device: &Pool, prefetch: bool) -> StepDecision {
        let prefetch = !std::mem::take(&mut self.reads_loads) && prefetch;
        if prefetch && self.is_loading() {
            self.step.set_prefetch();
        }
        let (ticket, mut transfers) = (self.open, std::mem::take(&mut self.decided));
        // The order of the kinds is the order of execution: what is read by one is written by a later one only.
        transfers.sort_by_key(|(kind, pairs)| (*kind, pairs.src, pairs.dst));
        let mut step = std::mem::take(&mut self.step);
        step.set_copies(copies(&transfers, device));
        self.submitted.insert(ticket, step);
        self.open = TicketId(ticket.0 + 1);
        self.fresh = HashSet::new();
        for (kind, pairs) in &transfers {
            self.num_decided[*kind as usize][pairs.src.max(pairs.dst).index()] += pairs.ids.len() as u64;
        }
        let after = if std::mem::take(&mut self.overlaps) { self.overlapped() } else { Vec::new() };
        StepDecision { ticket, after, transfers, prefetch }
    }

    /// Whether the ticket's transfers may still be running.
    pub(crate) fn in_flight(&self, ticket: TicketId) -> bool {
        ticket == self.open || self.submitted.contains_key(&ticket)
    }

    /// Whether all tickets up to this one have ended, so that nothing that depends on them can turn out to be lost.
    pub(crate) fn is_settled(&self, ticket: TicketId) -> bool {
        ticket < self.open && self.submitted.range(..=ticket).next().is_none()
    }

    /// Whether no submitted ticket is unfinished.
    pub(crate) fn idle(&self) -> bool {
        self.submitted.is_empty()
    }

    /// The earliest ticket that has not ended, at the latest the open step's.
    pub(crate) fn first(&self) -> TicketId {
        self.submitted.keys().next().copied().unwrap_or(self.open)
    }

    /// A submitted ticket.
    pub(crate) fn get(&self, ticket: TicketId) -> Result<&Ticket> {
        fault::point()?;
        self.submitted.get(&ticket).ok_or(Error::UnknownTicket { ticket })
    }

    /// All tickets, the open step's last.
    pub(crate) fn all(&self) -> impl Iterator<Item = (TicketId, &Ticket)> {
        self.submitted.iter().map(|(&id, ticket)| (id, ticket)).chain([(self.open, &self.step)])
    }

    /// Every lease held, the open step's included.
    pub(crate) fn leases(&self) -> impl Iterator<Item = Lease> {
        self.all().flat_map(|(_, ticket)| ticket.leases())
    }

    /// The moves of a submitted ticket, mutable, if any.
    pub(crate) fn moves_mut(&mut self, ticket: TicketId) -> Option<&mut PendingMoves> {
        self.submitted.get_mut(&ticket).filter(|ticket| ticket.move_pairs().next().is_some()).map(Ticket::moves_mut)
    }

    /// Blocks that a ticket will publish, mutable; `None` if there never were any.
    pub(crate) fn publishes_mut(&mut self, ticket: TicketId) -> Option<&mut Vec<PendingPublish>> {
        self.submitted.get_mut(&ticket)?.publishes_mut()
    }

    /// Links to the blocks that open tickets will publish, and to those before them.
    pub(crate) fn promised(&self) -> impl Iterator<Item = (u64, u64)> {
        let pending = self.all().flat_map(|(_, ticket)| ticket.publishes()).map(|pending| pending.identity);
        let moved = self.all().flat_map(|(_, ticket)| ticket.rehomes()).map(|rehome| rehome.identity);
        pending.chain(moved).map(|identity| (identity.key.link(), identity.parent))
    }

    /// Closes a submitted ticket.
    pub(crate) fn close(&mut self, ticket: TicketId, device: &Pool) -> Result<Ticket> {
        self.get(ticket)?;
        Ok(self.close_known(ticket, device))
    }

    /// Like [`Transfers::close`], for a known ticket.
    pub(crate) fn close_known(&mut self, ticket: TicketId, device: &Pool) -> Ticket {
        let mut closed = self.submitted.remove(&ticket).unwrap_or_default();
        let (first, copies) = (self.first(), closed.take_copies());
        // An older ticket may still lose the bytes that these copies were made from. If none is open, nothing can.
        if first < ticket && !copies.is_empty() {
            self.ended += copies.len();
            self.ended_copies.insert(ticket, copies);
        }
        self.ended_copies = self.ended_copies.split_off(&first);
        if self.ended_copies.is_empty() {
            self.ended = 0;
        }
        // The limit doubles with what was kept, so a pass over all copies costs O(1) for each copy noted.
        if self.ended > self.ended_limit {
            self.forget_copies(device);
        }
        closed
    }

    /// Drops ended copies whose bytes are gone, or whose bytes no unfinished ticket can lose. A copy of a copy becomes
    /// a copy of the original. So there is at most one for each block in use and each earlier ticket.
    fn forget_copies(&mut self, device: &Pool) {
        // Only bytes that an unfinished ticket still writes can turn out to be lost. A block id alone does not name them:
        // the block may have been reused since, so its version goes with it.
        let written = self.leases().filter(|lease| (lease.tier, lease.kind) == (Tier::Device, LeaseKind::Write));
        let written = written.map(|lease| (lease.block, device.block(lease.block).version()));
        // Block versions, and the versions written by unfinished tickets that they were copied from.
        let mut origins: HashMap<BlockVersion, Vec<BlockVersion>> = written.map(|bytes| (bytes, vec![bytes])).collect();
        let looked_through = origins.len();
        let ended = std::mem::take(&mut self.ended_copies);
        let mut all: Vec<_> = ended.iter().map(|(ticket, copies)| (*ticket, copies.as_slice(), true)).collect();
        all.extend(self.submitted.iter().map(|(ticket, submitted)| (*ticket, submitted.copies(), false)));
        // In the order of tickets, a copy's source has its origins before the copy is looked at: one pass suffices.
        all.sort_by_key(|(ticket, ..)| *ticket);
        self.ended = 0;
        for (ticket, copies, has_ended) in all {
            for &[from, to] in copies {
                let Some(made_from) = origins.get(&from).cloned() else { continue };
                if has_ended && device.block(to.0).has_version(to.1) {
                    self.ended += made_from.len();
                    let kept = self.ended_copies.entry(ticket).or_default();
                    kept.extend(made_from.iter().map(|&origin| [origin, to]));
                }
                // Also where `to` has been overwritten since: a later copy may have been made from it before that.
                let origins = origins.entry(to).or_default();
                origins.extend(made_from);
                origins.sort_unstable();
                origins.dedup();
            }
        }
        self.ended_limit = FEW_COPIES + 2 * self.ended + looked_through;
    }

    /// Copies of a submitted ticket and of those after it, in order, the open step's last.
    pub(crate) fn copies_since(&self, ticket: TicketId, device: &Pool) -> Vec<[BlockVersion; 2]> {
        let mut since: Vec<_> =
            self.ended_copies.range(ticket..).map(|(&at, copies)| (at, copies.as_slice())).collect();
        since.extend(self.submitted.range(ticket..).map(|(&at, ticket)| (at, ticket.copies())));
        since.sort_by_key(|(at, _)| *at);
        let open = copies(&self.decided, device);
        since.into_iter().flat_map(|(_, copies)| copies.iter().copied()).chain(open).collect()
    }

    /// Adds the blocks that this and later tickets copied, directly or indirectly, from lost blocks.
    pub(crate) fn follow_copies(&self, ticket: TicketId, device: &Pool, blocks: &mut HashSet<TierBlock>) {
        let on_device = blocks.iter().filter(|(tier, _)| *tier == Tier::Device);
        let mut lost: HashSet<BlockVersion> =
            on_device.map(|&(_, block)| (block, device.block(block).version())).collect();
        // In order, so that a copy of a lost copy is found in the same pass.
        for [from, to] in self.copies_since(ticket, device) {
            if lost.contains(&from) && lost.insert(to) && device.block(to.0).is_used_as(to.1) {
                blocks.insert((Tier::Device, to.0));
            }
        }
    }

    /// Submitted tickets that read device blocks that may already have been reallocated.
    fn overlapped(&self) -> Vec<TicketId> {
        self.submitted.iter().filter(|(_, ticket)| ticket.is_overlapped()).map(|(&ticket, _)| ticket).collect()
    }

    /// Checks that each block that a ticket will publish is filled under that ticket.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        for (id, ticket) in self.all().filter(|(_, ticket)| !ticket.publishes().is_empty()) {
            let written: HashSet<TierBlock> = ticket.written().collect();
            if let Some(PendingPublish { to: (tier, block), .. }) =
                ticket.publishes().iter().find(|pending| !written.contains(&pending.to))
            {
                return Err(format!("ticket {id} is to publish {tier} block {block}, but does not fill it"));
            }
        }
        Ok(())
    }
}

/// The decided pairs of one kind, mutable.
fn pairs_of(decided: &mut Vec<(Kind, Pairs)>, kind: Kind, src: Tier, dst: Tier) -> &mut Vec<[u32; 2]> {
    let same = |(k, pairs): &(Kind, Pairs)| (*k, pairs.src, pairs.dst) == (kind, src, dst);
    let at = decided.iter().position(same).unwrap_or_else(|| {
        decided.push((kind, Pairs { src, dst, page_class: 0, ids: Vec::new() }));
        decided.len() - 1
    });
    &mut decided[at].1.ids
}

/// The copies among a step's transfers, whose leases are all still held.
fn copies(transfers: &[(Kind, Pairs)], device: &Pool) -> Vec<[BlockVersion; 2]> {
    let held = |block| (BlockId(block), device.block(BlockId(block)).version());
    let copies = transfers.iter().filter(|(kind, _)| *kind == Kind::Copy).flat_map(|(_, pairs)| &pairs.ids);
    copies.map(|&[from, to]| [held(from), held(to)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device of eight blocks in use.
    fn device() -> Pool {
        let mut pool = Pool::new(Tier::Device, 8, false).unwrap();
        pool.take(8, false, &mut Vec::new());
        pool
    }

    fn copy(transfers: &mut Transfers, from: u32, to: u32) {
        transfers.pairs(Kind::Copy, Tier::Device, Tier::Device).push([from, to]);
    }

    fn version(block: u32) -> BlockVersion {
        (BlockId(block), 0)
    }

    #[test]
    fn a_ticket_is_in_flight_from_its_step_until_closed() {
        let (mut transfers, device) = (Transfers::new(), device());
        let open = transfers.open();
        assert!(transfers.in_flight(open) && transfers.idle());
        let lease = Lease { tier: Tier::Device, kind: LeaseKind::OverlappableRead, block: BlockId(3) };
        transfers.step_mut().lease(lease);
        copy(&mut transfers, 3, 4);
        transfers.note_overlap(true);
        let decision = transfers.submit(&device, false);
        assert_eq!((decision.ticket, decision.after), (open, vec![open]));
        assert!(transfers.in_flight(open) && !transfers.idle());
        assert_eq!(transfers.copies_since(open, &device), [[version(3), version(4)]]);
        assert_eq!(transfers.close(open, &device).unwrap().held().len(), 1);
        assert!(!transfers.in_flight(open));
        assert!(transfers.close(open, &device).is_err());
    }

    #[test]
    fn copies_of_an_ended_ticket_are_known_while_an_earlier_one_runs() {
        let (mut transfers, device) = (Transfers::new(), device());
        let load = transfers.submit(&device, false).ticket;
        copy(&mut transfers, 1, 2);
        let second = transfers.submit(&device, false).ticket;
        transfers.close(second, &device).unwrap();
        assert_eq!(transfers.copies_since(load, &device), [[version(1), version(2)]]);
        transfers.close(load, &device).unwrap();
        assert!(transfers.copies_since(load, &device).is_empty());
    }
}
