//! Memory that is as slow as the decisions allow, and computation that is only as good as what it reads.
//!
//! Transfers that the step does not order read and land only when their ticket ends. If a block is written before a
//! transfer has read it, the transfer reads garbage. A failed load brings garbage, too, and tokens computed from
//! garbage are garbage.

use super::bytes::place;
use super::groups::{drafts_ahead, entry, in_group, needed};
use super::{At, BLOCK, Bytes, GARBAGE, Slot, World};
use blockyard_core::{BlockId, Error, Group, Kind, Pairs, SequenceId, Stats, StepDecision, TicketId, Tier};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The value that drafts write.
const DRAFT: u64 = u64::MAX - 1;

/// One pair in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transfer {
    kind: Kind,
    src: At,
    dst: At,
    /// What it has read; `None` before it reads.
    bytes: Option<Bytes>,
    landed: bool,
    /// Whether it turns out to have failed when its ticket ends.
    lost: bool,
}

fn lost_pairs(transfers: &[Transfer]) -> Vec<Pairs> {
    let single =
        |t: &Transfer| Pairs { src: t.src.0, dst: t.dst.0, page_class: t.dst.1 as u8, ids: vec![[t.src.2, t.dst.2]] };
    transfers.iter().filter(|t| t.lost).map(single).collect()
}

/// Each pair of a decision is counted once, under the slower of its tiers.
fn require_counted(decision: &StepDecision, before: &Stats, after: &Stats) {
    for (kind, tier) in Kind::ALL.into_iter().flat_map(|kind| Tier::ALL.map(|tier| (kind, tier))) {
        let pairs = decision.of(kind).filter(|pairs| pairs.src.max(pairs.dst) == tier);
        let count: u64 = pairs.map(|pairs| pairs.ids.len() as u64).sum();
        assert_eq!(after.decided(kind, tier) - before.decided(kind, tier), count, "{kind:?}, {tier}");
    }
}

impl World {
    /// Ends the step: device-ordered work runs now, the rest when the ticket ends.
    pub(crate) fn step(&mut self, lost: Option<usize>) {
        if let Some(now) = &mut self.now {
            self.manager.set_now(*now).unwrap();
            *now += 1.0;
        }
        // Whether the step may be over before its loads have landed.
        let prefetch = self.manager.clone().take_prefetch().prefetch;
        let before = self.manager.stats();
        let decision = self.manager.take_decision();
        require_counted(&decision, &before, &self.manager.stats());
        self.run(&decision, prefetch, lost);
    }

    /// Ends the step, which may be over before its loads have landed.
    pub(crate) fn prefetch_step(&mut self) -> StepDecision {
        let decision = self.manager.take_prefetch();
        self.run(&decision, decision.prefetch, None);
        decision
    }

    fn run(&mut self, decision: &StepDecision, prefetch: bool, lost: Option<usize>) {
        self.trace.decision(decision);
        let mut mine = Vec::new();
        for (kind, pairs) in &decision.transfers {
            let transfer = |&[from, to]: &[u32; 2]| Transfer {
                kind: *kind,
                src: (pairs.src, pairs.page_class.into(), from),
                dst: (pairs.dst, pairs.page_class.into(), to),
                bytes: None,
                landed: false,
                lost: false,
            };
            mine.extend(pairs.ids.iter().map(transfer));
        }
        if let (Some(n), false) = (lost, mine.is_empty()) {
            let n = n % mine.len();
            mine[n].lost = true;
        }
        self.tickets.insert(decision.ticket, mine);
        for ticket in &decision.after {
            self.read_device(*ticket);
        }
        self.load(decision.ticket, prefetch);
        self.move_now(decision.ticket);
        for at in 0..self.tickets[&decision.ticket].len() {
            if self.tickets[&decision.ticket][at].kind == Kind::Copy {
                self.land(decision.ticket, at);
            }
        }
        self.compute();
        self.dirty.clear();
    }

    /// Runs the moves before everything else in their step, which they allow: as if all are read before any is written.
    fn move_now(&mut self, ticket: TicketId) {
        if ticket.0 % 2 == 0 {
            let transfers = &self.tickets[&ticket];
            let moves: Vec<usize> = (0..transfers.len()).filter(|&at| transfers[at].kind == Kind::Move).collect();
            for &at in &moves {
                self.fetch(ticket, at);
            }
            for &at in &moves {
                self.land(ticket, at);
            }
        }
    }

    /// Lands the loads that the step waits for: those of blocks that it computes with, writes or copies.
    fn load(&mut self, ticket: TicketId, prefetch: bool) {
        let tables = self.computed.iter().flat_map(|&(sequence, _)| self.blocks_of(sequence));
        let written = self.pending.iter().map(|&((class, id, _), _)| (class, id));
        let copied = self.tickets[&ticket].iter().filter(|t| t.kind == Kind::Copy).map(|t| (t.src.1, t.src.2));
        let needed: Vec<(usize, u32)> = tables.chain(written).chain(copied).collect();
        for at in 0..self.tickets[&ticket].len() {
            let transfer = self.tickets[&ticket][at];
            if transfer.kind != Kind::Copy
                && transfer.dst.0 == Tier::Device
                && needed.contains(&(transfer.dst.1, transfer.dst.2))
            {
                assert!(!(prefetch && transfer.kind == Kind::SwapIn), "the step of a prefetch needs {transfer:?}");
                self.land(ticket, at);
            }
        }
    }

    /// Writes this step's tokens; each depends on the earlier tokens that its sequence needs.
    fn compute(&mut self) {
        let mut pending: BTreeMap<Slot, u64> = std::mem::take(&mut self.pending).into_iter().collect();
        // Nothing reads the target of a move that has not landed.
        let sound = self.tickets.values().flatten().all(|transfer| !transfer.lost || transfer.kind == Kind::Move);
        let mut computed = std::mem::take(&mut self.computed);
        computed.retain(|(sequence, _)| self.truth.contains_key(sequence) && !self.lost.contains(sequence));
        computed.sort_by_key(|&(_, first)| first);
        // Encoders' tokens, and those of sequences that are freed or have lost bytes.
        let owned: BTreeSet<Slot> = computed.iter().flat_map(|&(s, first)| self.slots_from(s, first)).collect();
        for (&slot, &token) in pending.iter().filter(|(slot, _)| !owned.contains(slot)) {
            self.write_slot(slot, token);
        }
        self.draft();
        // A step reads its states before it writes any.
        let mut found = Vec::new();
        for &(sequence, first) in &computed {
            if sound {
                self.read_states(sequence, first);
            }
            found.push(self.finds(sequence, first..first, |group| group == Group::Recurrent));
        }
        for (slot, state) in std::mem::take(&mut self.orphans) {
            self.write_state(slot, state);
        }
        for (&(sequence, first), found) in computed.iter().zip(found) {
            let garbage = !found || !self.finds(sequence, first..first, |group| group != Group::Recurrent);
            for slot in self.slots_from(sequence, first) {
                if let Some(token) = pending.remove(&slot) {
                    self.write_slot(slot, if garbage { GARBAGE[0] } else { token });
                }
            }
            // A sequence without tokens to compute writes no state.
            let has_new = (first as usize) < self.truth[&sequence].len();
            for (slot, state) in self.states(sequence).into_iter().filter(|_| has_new) {
                self.write_state(slot, if garbage { GARBAGE[0] } else { state });
            }
        }
        self.draft_states.clear();
        for (sequence, first) in computed.into_iter().filter(|_| sound) {
            self.read(sequence, first);
        }
    }

    /// Writes drafts to the slots beyond the tokens, which nothing may read.
    fn draft(&mut self) {
        for (sequence, end) in std::mem::take(&mut self.drafts) {
            let Some(len) = self.truth.get(&sequence).map(Vec::len) else { continue };
            for slot in
                self.growing().flat_map(|(number, _)| self.slots(sequence, number, len as u32..end)).collect::<Vec<_>>()
            {
                self.write_slot(slot, DRAFT);
            }
        }
    }

    /// Whether this step computes tokens of a sequence.
    pub(crate) fn has_new(&self, sequence: SequenceId) -> bool {
        self.computed.iter().any(|&(s, first)| s == sequence && (first as usize) < self.truth[&s].len())
    }

    /// The states that a step writes for a sequence's recurrent groups: those after its last token and its drafts.
    pub(crate) fn states(&self, sequence: SequenceId) -> Vec<(Slot, u64)> {
        let len = self.truth[&sequence].len() as u32;
        let Some(&state) = self.truth[&sequence].last() else { return vec![] };
        let recurrent = self.growing().filter(|&(_, group)| group == Group::Recurrent);
        let last = |(number, _)| {
            self.slots(sequence, number, len - 1..len).into_iter().map(move |slot| (slot, in_group(number, state)))
        };
        let drafts = self.draft_states.iter().filter(|(s, ..)| *s == sequence).map(|&(_, slot, state)| (slot, state));
        drafts.chain(recurrent.flat_map(last)).collect()
    }

    /// A state fills its block.
    fn write_state(&mut self, (class, id, _): Slot, state: u64) {
        self.put((Tier::Device, class, id), [state; BLOCK as usize]);
    }

    fn write_slot(&mut self, (class, id, offset): Slot, token: u64) {
        let at = (Tier::Device, class, id);
        let mut bytes = self.memory.get(at);
        bytes[offset as usize] = token;
        self.put(at, bytes);
    }

    /// Slots of a sequence's tokens from `first` on, of all groups.
    fn slots_from(&self, sequence: SequenceId, first: u32) -> Vec<Slot> {
        let end = self.truth[&sequence].len() as u32;
        // A drafter writes the entry before them, too, unless they follow cached tokens.
        let first_of = |group| if drafts_ahead(group) { first.saturating_sub(1) } else { first };
        self.growing().flat_map(|(number, group)| self.slots(sequence, number, first_of(group)..end)).collect()
    }

    /// Slots of some positions in one group.
    pub(crate) fn slots(&self, sequence: SequenceId, number: usize, positions: Range<u32>) -> Vec<Slot> {
        let table = self.manager.block_table(self.manager.table_of(sequence, number).unwrap()).unwrap();
        let size = self.tokens_of(number);
        let slot = |i| {
            let (_, class, id) = place(&self.manager, Tier::Device, table[(i / size) as usize]);
            (class, id, i % size)
        };
        positions.map(slot).collect()
    }

    /// Whether these groups have what is needed to compute the tokens of a range.
    fn finds(&self, sequence: SequenceId, tokens: Range<u32>, of: impl Fn(Group) -> bool) -> bool {
        let tier = self.manager.tier(sequence).unwrap();
        self.growing().filter(|&(_, group)| of(group)).all(|(number, group)| {
            let table = self.manager.block_table(self.manager.table_of(sequence, number).unwrap()).unwrap();
            let size = self.tokens_of(number);
            needed(group, tokens.start, tokens.end).all(|i| {
                let at = place(&self.manager, tier, table[(i / size) as usize]);
                let found = self.memory.get(at)[(i % size) as usize];
                found == entry((number, group), &self.truth[&sequence], i)
            })
        })
    }

    fn read_device(&mut self, ticket: TicketId) {
        let transfers = self.tickets.get_mut(&ticket).expect("`after` names a ticket that has not ended");
        for transfer in
            transfers.iter_mut().filter(|t| t.src.0 == Tier::Device && t.kind != Kind::Copy && t.bytes.is_none())
        {
            transfer.bytes = Some(self.memory.get(transfer.src));
        }
    }

    fn fetch(&mut self, ticket: TicketId, at: usize) -> Bytes {
        let transfer = &mut self.tickets.get_mut(&ticket).unwrap()[at];
        *transfer.bytes.get_or_insert(self.memory.get(transfer.src))
    }

    fn land(&mut self, ticket: TicketId, at: usize) {
        let bytes = self.fetch(ticket, at);
        let transfer = &mut self.tickets.get_mut(&ticket).unwrap()[at];
        if !std::mem::replace(&mut transfer.landed, true) {
            let (dst, bytes) = (transfer.dst, if transfer.lost { GARBAGE } else { bytes });
            self.put(dst, bytes);
        }
    }

    /// Writes a block, even if transfers have yet to read it.
    pub(crate) fn put(&mut self, at: At, bytes: Bytes) {
        let memory = &self.memory;
        let reads = |t: &&mut Transfer| memory.overlap(t.src, at) && t.kind != Kind::Copy;
        for transfer in self.tickets.values_mut().flatten().filter(reads) {
            transfer.bytes.get_or_insert(GARBAGE);
        }
        self.memory.put(at, bytes);
    }

    /// Runs the rest of a ticket and ends it.
    pub(crate) fn end(&mut self, ticket: TicketId) {
        let count = self.tickets[&ticket].len();
        for at in 0..count {
            self.fetch(ticket, at);
        }
        for at in 0..count {
            self.land(ticket, at);
        }
        let transfers = self.tickets.remove(&ticket).unwrap();
        let lost = lost_pairs(&transfers);
        if lost.is_empty() {
            self.manager.complete(ticket).unwrap();
        } else {
            let hit = self.manager.fail(ticket, &lost).unwrap();
            // Blocks that the current step has yet to copy are in no memory.
            let copies: Vec<u32> = self
                .manager
                .clone()
                .take_decision()
                .of(Kind::Copy)
                .flat_map(|p| p.ids.clone())
                .map(|[_, to]| to)
                .collect();
            // Nothing is lost if the copy is of a shared lookahead block, or if the lost block has left the window.
            let unsure = self.groups != [Group::Full] || transfers.iter().any(|t| t.lost && t.kind == Kind::Copy);
            for sequence in hit {
                assert!(
                    unsure || self.lost.contains(&sequence) || !self.is_whole(sequence, &copies),
                    "{sequence} has lost nothing"
                );
                self.lost.push(sequence);
            }
        }
        assert_eq!(self.manager.complete(ticket), Err(Error::UnknownTicket { ticket }));
    }

    /// Reports one pair of a ticket as lost, while the ticket stays open.
    pub(crate) fn lose(&mut self, ticket: TicketId, at: usize) {
        let transfers = self.tickets.get_mut(&ticket).unwrap();
        let at = at % transfers.len().max(1);
        transfers.iter_mut().skip(at).take(1).for_each(|transfer| transfer.lost = true);
        self.lost.extend(self.manager.lose(ticket, &lost_pairs(&self.tickets[&ticket])).unwrap());
    }

    /// Fails a whole ticket, whatever this memory has already done for it.
    pub(crate) fn give_up(&mut self, ticket: TicketId) {
        self.lost.extend(self.manager.fail_whole(ticket).unwrap());
        for Transfer { dst, .. } in self.tickets.remove(&ticket).unwrap() {
            self.put(dst, GARBAGE);
        }
        assert_eq!(self.manager.complete(ticket), Err(Error::UnknownTicket { ticket }));
    }

    /// A case that is rare at random: a sequence is swapped out and in, and appends in that step, perhaps with a loss.
    /// A fork copies blocks that may be lost, and its ticket ends first.
    pub(crate) fn come_back(&mut self, sequence: SequenceId, lost: Option<usize>, tokens: u32) {
        self.settle();
        if self.manager.swap_out(&[sequence], Tier::Host).is_err() {
            return;
        }
        self.drafted.remove(&sequence);
        self.settle();
        if self.manager.swap_in(&[sequence], Tier::Device).is_err() {
            return;
        }
        self.append(&[sequence], (1, 0, 0), None);
        self.step(lost);
        let mut out = Vec::new();
        self.fork(sequence, 1, &mut out);
        self.append(&out, (tokens, 0, 0), None);
        self.step(None);
        if let Some(copy) = self.tickets.keys().next_back().copied() {
            self.end(copy);
        }
    }

    /// Ends the step and all tickets.
    pub(crate) fn settle(&mut self) {
        self.step(None);
        while let Some(ticket) = self.nth_ticket(0) {
            self.end(ticket);
        }
    }

    /// Whether every token of a sequence is where its table says, except for tokens that this step has yet to write,
    /// and no copy of this step targets its blocks.
    fn is_whole(&self, sequence: SequenceId, copies: &[u32]) -> bool {
        let tier = self.manager.tier(sequence).unwrap();
        let table = self.manager.block_table(sequence).unwrap();
        let waits = |block: BlockId, offset: usize| {
            let slot = (0, block.0, u32::try_from(offset).unwrap());
            tier == Tier::Device && self.pending.iter().any(|&(pending, _)| pending == slot)
        };
        self.truth[&sequence].iter().enumerate().all(|(i, token)| {
            let (block, offset) = (table[i / BLOCK as usize], i % BLOCK as usize);
            let pending_copy = tier == Tier::Device && copies.contains(&block.0);
            !pending_copy && (self.memory.get((tier, 0, block.0))[offset] == *token || waits(block, offset))
        })
    }
}
