//! Ends of steps and of tickets: decisions go out, results come back. The order matters: what has landed is published before
//! its leases end, leases end backwards, then moves take effect, then blocks whose bytes are on the host are freed.

use super::Manager;
use crate::block::{BlockVersion, LeaseKind, TierBlock};
use crate::decision::{Pairs, StepDecision};
use crate::error::{Error, Result};
use crate::id::{BlockId, SequenceId, TicketId, Tier};
use crate::transfer::{Held, HeldRuns};
use std::collections::HashSet;

impl Manager {
    /// Ends the step: the transfers decided since the last call, under a ticket that holds leases on all their blocks.
    pub fn take_decision(&mut self) -> StepDecision {
        self.tiers.enforce_quotas();
        self.decide_moves();
        self.sequences.end_step();
        let decision = self.transfers.submit(self.tiers.device());
        for (kind, pairs) in &decision.transfers {
            self.decided[*kind as usize] += pairs.ids.len() as u64;
        }
        decision
    }

    /// Tickets that are neither completed nor failed, first to last. What they hold is not given out.
    pub fn open_tickets(&self) -> impl Iterator<Item = TicketId> {
        self.transfers.submitted()
    }

    /// How many these are.
    #[must_use]
    pub fn num_open_tickets(&self) -> usize {
        self.transfers.in_flight_count()
    }

    /// Ends a ticket whose bytes have all landed.
    ///
    /// # Errors
    /// The ticket was never handed out, or has ended.
    pub fn complete(&mut self, ticket: TicketId) -> Result<()> {
        let mut ended = self.transfers.close(ticket, self.tiers.device())?;
        let demoted = self.step().publish_landed(ended.publishes());
        // Backwards, so that what these leases were the last to hold is evicted from the ends of its chains.
        for held in ended.held().iter().rev() {
            match held {
                Held::One(lease) => self.tiers.end_lease((lease.tier, lease.block), lease.kind),
                Held::Runs(HeldRuns { from, reads, to, runs }) => {
                    for run in runs.iter().rev() {
                        self.tiers.end_leases(*from, run.src..run.src + run.len, *reads);
                        self.tiers.end_leases(*to, run.dst..run.dst + run.len, LeaseKind::Write);
                    }
                }
            }
        }
        let moves = ended.take_moves();
        if !moves.is_empty() {
            self.end_moves(&moves);
        }
        self.step().demote(&demoted);
        self.tiers.enforce_quotas();
        Ok(())
    }

    /// Ends a ticket of which some pairs did not land; returns the sequences that lost bytes, which can only be freed.
    ///
    /// Copies that read what did not land are followed, those of later tickets and of the open step too.
    ///
    /// # Errors
    /// The ticket is unknown, or writes no such block.
    pub fn fail(&mut self, ticket: TicketId, lost: &[Pairs]) -> Result<Vec<SequenceId>> {
        let written: HashSet<TierBlock> = self.transfers.get(ticket)?.written().collect();
        let blocks = || lost.iter().flat_map(|pairs| pairs.ids.iter().map(|&[_, to]| (pairs.dst, BlockId(to))));
        if let Some((tier, block)) = blocks().find(|block| !written.contains(block)) {
            return Err(Error::NotInTicket { ticket, tier, block });
        }
        self.end_without(ticket, blocks().collect(), true)
    }

    /// As [`Manager::fail`] with all pairs of the ticket: nothing landed.
    ///
    /// # Errors
    /// The ticket is unknown.
    pub fn fail_whole(&mut self, ticket: TicketId) -> Result<Vec<SequenceId>> {
        let written = self.transfers.get(ticket)?.written().collect();
        self.end_without(ticket, written, true)
    }

    /// Ends a ticket whose transfers never ran.
    pub(super) fn cancel(&mut self, ticket: TicketId) -> Result<Vec<SequenceId>> {
        let written = self.transfers.get(ticket)?.written().collect();
        self.end_without(ticket, written, false)
    }

    /// Ends a ticket that did not write some blocks; `tried` says whether it read what they were to hold, in vain.
    fn end_without(
        &mut self,
        ticket: TicketId,
        mut blocks: HashSet<TierBlock>,
        tried: bool,
    ) -> Result<Vec<SequenceId>> {
        self.lose_moves(ticket, &mut blocks);
        self.follow_copies(ticket, &mut blocks);
        self.step().cancel_publishes(ticket, &blocks, tried)?;
        // In order, so that their events are.
        let mut gone: Vec<TierBlock> = blocks.iter().copied().collect();
        gone.sort_unstable();
        for block in gone {
            self.tiers.lose(block);
        }
        let sequences = self.sequences.lose(&blocks)?;
        self.complete(ticket)?;
        Ok(sequences)
    }

    /// Adds what later copies have made of blocks that did not land.
    fn follow_copies(&self, ticket: TicketId, blocks: &mut HashSet<TierBlock>) {
        let device = self.tiers.device();
        let on_device = blocks.iter().filter(|(tier, _)| *tier == Tier::Device);
        let mut lost: HashSet<BlockVersion> =
            on_device.map(|&(_, block)| (block, device.block(block).version())).collect();
        for [from, to] in self.transfers.copies_since(ticket, device) {
            if lost.contains(&from) && lost.insert(to) && device.block(to.0).is_used_as(to.1) {
                blocks.insert((Tier::Device, to.0));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Config, Counts, Kind, Manager, SequenceId, Tier};

    fn append(manager: &mut Manager, sequence: SequenceId) {
        manager.append(&[sequence], Counts::All(1), 0, &mut [0]).unwrap();
    }

    /// Ends a step and its ticket; returns how many copies it had.
    fn step(manager: &mut Manager) -> usize {
        let decision = manager.take_decision();
        manager.complete(decision.ticket).unwrap();
        decision.of(Kind::Copy).map(|pairs| pairs.ids.len()).sum()
    }

    /// Writes in a copy of a sequence's last block, and perhaps frees the sequence.
    fn go_on(manager: &mut Manager, sequence: SequenceId, given_up: bool) -> SequenceId {
        let mut out = Vec::new();
        manager.fork(sequence, 1, &mut out).unwrap();
        append(manager, out[0]);
        assert_eq!(step(manager), 1);
        manager.truncate(out[0], 3).unwrap();
        if given_up {
            manager.free(&[sequence]).unwrap();
        }
        out[0]
    }

    #[test]
    fn a_ticket_that_never_ends_keeps_no_more_copies_than_there_are_blocks_and_its_loss_still_reaches_all() {
        let config = Config { block_size: 4, blocks: [16, 16, 0], watermark: 0.0, prefix_caching: false };
        let (mut manager, mut out) = (Manager::new(config).unwrap(), Vec::new());
        manager.allocate(&[2, 3], &mut out).unwrap();
        step(&mut manager);
        let (loaded, sound) = (out[0], out[1]);
        manager.swap_out(&[loaded], Tier::Host).unwrap();
        step(&mut manager);
        manager.swap_in(&[loaded], Tier::Device).unwrap();
        append(&mut manager, loaded);
        let load = manager.take_decision();
        let mut last = go_on(&mut manager, loaded, false);
        let (mut others, mut most) = (Vec::new(), 0);
        for i in 0..3000 {
            last = go_on(&mut manager, last, true);
            let other = go_on(&mut manager, sound, false);
            if i % 1000 == 0 {
                others.push(go_on(&mut manager, last, false));
            }
            manager.free(&[other]).unwrap();
            let kept = manager.transfers.copies_since(load.ticket, manager.tiers.device()).len();
            most = most.max(kept);
        }
        assert!(most <= 64, "{most} copies are kept for 16 blocks");
        assert_eq!(manager.open_tickets().collect::<Vec<_>>(), [load.ticket]);
        let pairs: Vec<_> = load.of(Kind::SwapIn).cloned().collect();
        let mut all = vec![loaded, last];
        all.extend(others);
        all.sort_unstable();
        assert_eq!(manager.fail(load.ticket, &pairs), Ok(all));
        append(&mut manager, sound);
        manager.check().unwrap();
        assert_eq!(
            (manager.transfers.copies_since(load.ticket, manager.tiers.device()).len(), manager.open_tickets().count()),
            (0, 0)
        );
    }
}
