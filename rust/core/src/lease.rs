//! Leases and the tickets that hold them. A leased block is not freed, moved or given out again until the transfer that
//! reads or writes it has finished.

use crate::block::{BlockVersion, LeaseKind};
use crate::event::Told;
use crate::id::{BlockId, TicketId, Tier};
use crate::pool::{CachedIdentity, Pool};
use crate::transfer::Run;
use std::collections::{BTreeMap, HashMap};

/// One block held by one ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lease {
    /// Tier of the block.
    pub tier: Tier,
    /// What the transfer does with it.
    pub kind: LeaseKind,
    /// The block.
    pub block: BlockId,
}

/// The tickets that have been handed out and not yet completed or failed, and the one being collected.
#[derive(Debug, Clone)]
pub(crate) struct Tickets {
    open: TicketId,
    collected: Vec<Held>,
    /// Moves of the present step.
    moves: Relocations,
    submitted: BTreeMap<TicketId, Ticket>,
    /// Copies of ended tickets that came after one which is not: its loads may yet turn out to have failed.
    ended_copies: BTreeMap<TicketId, Vec<[BlockVersion; 2]>>,
    /// How many these are at most, and above how many they are looked through.
    ended: usize,
    ended_limit: usize,
}

/// Copies of ended tickets that are kept without a look at what they are of.
const FEW_COPIES: usize = 16;

/// What one ticket holds, and which device bytes its copies read and wrote.
#[derive(Debug, Clone)]
struct Ticket {
    held: Vec<Held>,
    copies: Vec<[BlockVersion; 2]>,
    moves: Relocations,
}

/// Blocks of the device whose bytes are on the way to others: their targets are written under the ticket.
#[derive(Debug, Clone, Default)]
pub(crate) struct Relocations {
    /// `[from, to]`: books name the source until the ticket has ended.
    pub(crate) moves: Vec<[u32; 2]>,
    /// Cached blocks that some of these moves write: nobody finds them until the ticket has ended.
    pub(crate) kept: Vec<Kept>,
}

/// What can be found in a block once its bytes have landed there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kept {
    pub(crate) from: BlockId,
    pub(crate) to: BlockId,
    pub(crate) found: CachedIdentity,
    pub(crate) told: Option<Told>,
}

impl Relocations {
    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.moves.is_empty() && self.kept.is_empty()
    }

    /// `[from, to]` of all.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = [u32; 2]> {
        self.moves.iter().copied().chain(self.kept.iter().map(|kept| [kept.from.0, kept.to.0]))
    }

    fn leases(&self) -> impl Iterator<Item = Lease> {
        self.pairs().map(|[_, to]| Lease { tier: Tier::Device, kind: LeaseKind::Write, block: BlockId(to) })
    }
}

/// What a ticket holds, in the order in which it was collected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Held {
    One(Lease),
    Runs(HeldRuns),
}

/// Leases on all blocks of some runs: those read, and those written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeldRuns {
    pub(crate) from: Tier,
    /// What the transfer does with the blocks that it reads.
    pub(crate) reads: LeaseKind,
    pub(crate) to: Tier,
    pub(crate) runs: Vec<Run>,
}

impl Held {
    fn leases(&self) -> impl Iterator<Item = Lease> {
        let (one, held) = match self {
            Self::One(lease) => (Some(*lease), None),
            Self::Runs(held) => (None, Some(held)),
        };
        let of_runs = held.into_iter().flat_map(|held| held.runs.iter().flat_map(|run| held.of(*run)));
        one.into_iter().chain(of_runs)
    }

    fn drains(&self) -> bool {
        match self {
            Self::One(lease) => lease.kind == LeaseKind::OverlappableRead,
            Self::Runs(held) => held.reads == LeaseKind::OverlappableRead,
        }
    }
}

impl HeldRuns {
    fn of(&self, run: Run) -> impl Iterator<Item = Lease> + use<> {
        let Self { from, reads, to, .. } = *self;
        (0..run.len).flat_map(move |i| {
            let read = Lease { tier: from, kind: reads, block: BlockId(run.src + i) };
            [read, Lease { tier: to, kind: LeaseKind::Write, block: BlockId(run.dst + i) }]
        })
    }
}

impl Tickets {
    pub(crate) fn new() -> Self {
        Self {
            open: TicketId(1),
            collected: Vec::new(),
            moves: Relocations::default(),
            submitted: BTreeMap::new(),
            ended_copies: BTreeMap::new(),
            ended: 0,
            ended_limit: FEW_COPIES,
        }
    }

    /// No tickets but the one to be collected.
    pub(crate) fn resume(open: TicketId) -> Self {
        Self { open, ..Self::new() }
    }

    /// Submitted tickets that are neither completed nor failed, first to last.
    pub(crate) fn submitted(&self) -> impl Iterator<Item = TicketId> {
        self.submitted.keys().copied()
    }

    /// How many these are.
    pub(crate) fn in_flight_count(&self) -> usize {
        self.submitted.len()
    }

    /// The ticket that the present step's transfers will carry.
    pub(crate) fn open(&self) -> TicketId {
        self.open
    }

    /// Notes a lease of the present step.
    pub(crate) fn collect(&mut self, lease: Lease) {
        self.collected.push(Held::One(lease));
    }

    /// Notes leases of the present step on all blocks of a run.
    pub(crate) fn collect_run(&mut self, from: Tier, reads: LeaseKind, to: Tier, run: Run) {
        match self.collected.last_mut() {
            Some(Held::Runs(held)) if (held.from, held.reads, held.to) == (from, reads, to) => held.runs.push(run),
            _ => self.collected.push(Held::Runs(HeldRuns { from, reads, to, runs: vec![run] })),
        }
    }

    /// Ends the present step: its leases belong to the returned ticket from now on.
    pub(crate) fn submit(&mut self, copies: Vec<[BlockVersion; 2]>) -> TicketId {
        let ticket = self.open;
        let (held, moves) = (std::mem::take(&mut self.collected), std::mem::take(&mut self.moves));
        self.submitted.insert(ticket, Ticket { held, copies, moves });
        self.open = TicketId(ticket.0 + 1);
        ticket
    }

    /// Whether the ticket's transfers may still be running.
    pub(crate) fn in_flight(&self, ticket: TicketId) -> bool {
        ticket == self.open || self.submitted.contains_key(&ticket)
    }

    /// Whether no ticket up to this one may still be running, so that nothing it built on can turn out to be lost.
    pub(crate) fn is_settled(&self, ticket: TicketId) -> bool {
        ticket < self.open && self.submitted.range(..=ticket).next().is_none()
    }

    /// Whether no submitted ticket is unfinished.
    pub(crate) fn idle(&self) -> bool {
        self.submitted.is_empty()
    }

    /// Leases of a submitted ticket.
    pub(crate) fn get(&self, ticket: TicketId) -> Option<impl Iterator<Item = Lease>> {
        self.submitted.get(&ticket).map(|ticket| ticket.held.iter().flat_map(Held::leases).chain(ticket.moves.leases()))
    }

    /// Leases of a submitted ticket or of the present step's.
    pub(crate) fn of(&self, ticket: TicketId) -> impl Iterator<Item = Lease> {
        let submitted = self.submitted.get(&ticket).map(|ticket| (&ticket.held, &ticket.moves));
        let held = if ticket == self.open { Some((&self.collected, &self.moves)) } else { submitted };
        held.into_iter().flat_map(|(held, moves)| held.iter().flat_map(Held::leases).chain(moves.leases()))
    }

    /// Closes a submitted ticket and gives back what it held.
    pub(crate) fn close(&mut self, ticket: TicketId) -> Option<Vec<Held>> {
        let Ticket { held, copies, moves: _ } = self.submitted.remove(&ticket)?;
        let first = self.submitted.keys().next().copied().unwrap_or(self.open);
        if first < ticket && !copies.is_empty() {
            self.ended += copies.len();
            self.ended_copies.insert(ticket, copies);
        }
        self.ended_copies = self.ended_copies.split_off(&first);
        if self.ended_copies.is_empty() {
            self.ended = 0;
        }
        Some(held)
    }

    /// Whether so many copies of ended tickets are kept that those of no consequence are to be forgotten.
    pub(crate) fn has_many_copies(&self) -> bool {
        self.ended > self.ended_limit
    }

    /// Forgets the copies of ended tickets whose bytes are gone, and those of bytes that no unfinished ticket can lose. A
    /// copy of a copy becomes one of the first. So there is at most one for each block in use and each ticket behind it.
    pub(crate) fn forget_copies(&mut self, device: &Pool) {
        let written = self.leases().filter(|lease| (lease.tier, lease.kind) == (Tier::Device, LeaseKind::Write));
        let written = written.map(|lease| (lease.block, device.block(lease.block).version()));
        // BlockVersion, and those written by unfinished tickets that they were made from.
        let mut origins: HashMap<BlockVersion, Vec<BlockVersion>> = written.map(|bytes| (bytes, vec![bytes])).collect();
        let looked_through = origins.len();
        let ended = std::mem::take(&mut self.ended_copies);
        let mut all: Vec<_> = ended.iter().map(|(ticket, copies)| (*ticket, copies, true)).collect();
        all.extend(self.submitted.iter().map(|(ticket, submitted)| (*ticket, &submitted.copies, false)));
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
                let origins = origins.entry(to).or_default();
                origins.extend(made_from);
                origins.sort_unstable();
                origins.dedup();
            }
        }
        self.ended_limit = FEW_COPIES + 2 * self.ended + looked_through;
    }

    /// Copies of a submitted ticket and of those after it, in their order.
    pub(crate) fn copies_since(&self, ticket: TicketId) -> Vec<[BlockVersion; 2]> {
        let mut copies: Vec<_> = self.ended_copies.range(ticket..).map(|(&at, copies)| (at, copies)).collect();
        copies.extend(self.submitted.range(ticket..).map(|(&at, ticket)| (at, &ticket.copies)));
        copies.sort_by_key(|(at, _)| *at);
        copies.into_iter().flat_map(|(_, copies)| copies.iter().copied()).collect()
    }

    /// Submitted tickets that read device blocks which may already have been given out again.
    pub(crate) fn draining(&self) -> Vec<TicketId> {
        let drains = |ticket: &Ticket| ticket.held.iter().any(Held::drains);
        self.submitted.iter().filter(|(_, ticket)| drains(ticket)).map(|(&ticket, _)| ticket).collect()
    }

    /// Every lease held, the present step's included.
    pub(crate) fn leases(&self) -> impl Iterator<Item = Lease> {
        let held = self.submitted.values().flat_map(|ticket| &ticket.held).chain(&self.collected);
        let moves = self.submitted.values().map(|ticket| &ticket.moves).chain([&self.moves]);
        held.flat_map(Held::leases).chain(moves.flat_map(Relocations::leases))
    }

    /// Notes a move of the present step.
    pub(crate) fn collect_move(&mut self, from: BlockId, to: BlockId) {
        self.moves.moves.push([from.0, to.0]);
    }

    /// Moves of the present step.
    pub(crate) fn open_moves(&mut self) -> &mut Relocations {
        &mut self.moves
    }

    /// Moves of a submitted ticket.
    pub(crate) fn moves_of(&mut self, ticket: TicketId) -> Option<&mut Relocations> {
        self.submitted.get_mut(&ticket).map(|ticket| &mut ticket.moves)
    }

    /// Moves under way, the present step's included.
    pub(crate) fn moves(&self) -> impl Iterator<Item = [u32; 2]> {
        self.submitted.values().map(|ticket| &ticket.moves).chain([&self.moves]).flat_map(Relocations::pairs)
    }

    /// The earliest ticket that has not ended, the present step's at the latest.
    pub(crate) fn first(&self) -> TicketId {
        self.submitted.keys().next().copied().unwrap_or(self.open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_in_flight_from_its_step_until_closed() {
        let mut tickets = Tickets::new();
        let open = tickets.open();
        assert!(tickets.in_flight(open) && tickets.idle());
        tickets.collect(Lease { tier: Tier::Device, kind: LeaseKind::OverlappableRead, block: BlockId(3) });
        assert_eq!(tickets.submit(vec![[(BlockId(3), 0), (BlockId(4), 0)]]), open);
        assert!(tickets.in_flight(open) && !tickets.idle());
        assert_eq!(tickets.draining(), vec![open]);
        assert_eq!(tickets.copies_since(open), [[(BlockId(3), 0), (BlockId(4), 0)]]);
        assert_eq!(tickets.close(open).unwrap().len(), 1);
        assert!(!tickets.in_flight(open));
        assert_eq!(tickets.close(open), None);
    }

    #[test]
    fn runs_hold_both_their_sides_and_stay_in_the_order_of_what_was_collected() {
        let mut tickets = Tickets::new();
        let one = Lease { tier: Tier::Device, kind: LeaseKind::Read, block: BlockId(9) };
        tickets.collect_run(Tier::Device, LeaseKind::OverlappableRead, Tier::Host, Run { src: 1, dst: 4, len: 2 });
        tickets.collect_run(Tier::Device, LeaseKind::OverlappableRead, Tier::Host, Run { src: 7, dst: 6, len: 1 });
        tickets.collect(one);
        tickets.collect_run(Tier::Host, LeaseKind::Read, Tier::Device, Run { src: 0, dst: 3, len: 1 });
        let ticket = tickets.submit(Vec::new());
        let leases: Vec<_> = tickets.get(ticket).unwrap().collect();
        assert!(leases.iter().copied().eq(tickets.leases()));
        assert_eq!(leases.iter().map(|lease| lease.block.0).collect::<Vec<_>>(), [1, 4, 2, 5, 7, 6, 9, 0, 3]);
        assert_eq!(leases[2], Lease { tier: Tier::Device, kind: LeaseKind::OverlappableRead, block: BlockId(2) });
        assert_eq!(leases[3], Lease { tier: Tier::Host, kind: LeaseKind::Write, block: BlockId(5) });
        assert_eq!(tickets.draining(), [ticket]);
        assert_eq!(tickets.close(ticket).unwrap().len(), 3);
    }

    #[test]
    fn copies_of_an_ended_ticket_are_known_while_an_earlier_one_runs() {
        let mut tickets = Tickets::new();
        let copied = [(BlockId(1), 5), (BlockId(2), 7)];
        let (load, copy) = (tickets.submit(Vec::new()), tickets.submit(vec![copied]));
        tickets.close(copy).unwrap();
        assert_eq!(tickets.copies_since(load), [copied]);
        assert!(!tickets.is_settled(copy));
        tickets.close(load).unwrap();
        assert!(tickets.is_settled(copy) && tickets.ended_copies.is_empty());
    }
}
