//! Ends steps and tickets: decisions go out, results come back. The order matters: landed blocks are published before
//! their leases end, device blocks with host copies are released, leases end in reverse order, then moves take effect.

use super::Manager;
use crate::block::{LeaseKind, TierBlock};
use crate::decision::{Kind, Pairs, StepDecision};
use crate::error::{Error, Result};
use crate::id::{BlockId, SequenceId, TicketId};
use crate::page::MAX_CLASSES;
use crate::tiers::Tiers;
use crate::transfer::{Held, HeldRuns, OpenStep, Ticket, evicted};
use std::collections::HashSet;

impl Manager {
    /// Ends the step and returns the transfers decided since the last call, under a ticket that holds leases on all
    /// their blocks.
    pub fn take_decision(&mut self) -> StepDecision {
        self.end_step(false)
    }

    /// Like [`Manager::take_decision`], but loads that the step does not compute with may land after it. Until the
    /// ticket ends, the loaded sequences have no block tables.
    pub fn take_prefetch(&mut self) -> StepDecision {
        self.end_step(true)
    }

    /// Sets the time of the step that ends next, in seconds of any monotonic clock; the prefix cache learns from it how
    /// soon conversations go on. If it is before the last one, no time has passed, and time goes on from there: a clock
    /// can start again. Without this call each step counts as one second; after it, a step without it takes no time.
    ///
    /// # Errors
    /// The time is not a number from 0 on, or is infinite.
    pub fn set_now(&mut self, now: f64) -> Result<()> {
        if !(now >= 0.0 && now.is_finite()) {
            return Err(Error::InvalidTime { found: now.to_string() });
        }
        self.clock.seconds += (now - self.clock.given.unwrap_or(now)).max(0.0);
        self.clock.given = Some(now);
        Ok(())
    }

    fn end_step(&mut self, prefetch: bool) -> StepDecision {
        if self.clock.given.is_none() {
            self.clock.seconds += 1.0;
        }
        self.tiers.set_now(self.clock.seconds);
        self.tiers.enforce_quotas();
        let Self { tiers, transfers, defrag, jobs, sequences, .. } = self;
        let mut step = OpenStep { tiers, transfers, jobs };
        if step.tiers.keeps_host_copies() {
            let expected = step.tiers.take_expected();
            step.offload_ahead(sequences.blocks_of_next_chunks() + expected);
        }
        step.tiers.end_host_copies();
        step.cut_off();
        defrag.decide(&mut step);
        self.sequences.end_step();
        let mut decision = self.transfers.submit(self.tiers.device(), prefetch);
        if self.num_classes() > 1 {
            decision.transfers = by_class(&self.tiers, decision.transfers);
        }
        decision
    }

    /// Tickets that are neither completed nor failed, oldest first. The blocks they hold are not available.
    pub fn open_tickets(&self) -> impl Iterator<Item = TicketId> {
        self.transfers.submitted()
    }

    /// Number of open tickets.
    #[must_use]
    pub fn num_open_tickets(&self) -> usize {
        self.transfers.in_flight_count()
    }

    /// Ends a ticket whose bytes have all landed.
    ///
    /// # Errors
    /// The ticket was never handed out, or has ended.
    pub fn complete(&mut self, ticket: TicketId) -> Result<()> {
        let ended = self.transfers.close(ticket, self.tiers.device())?;
        self.end(ended);
        Ok(())
    }

    /// Ends everything that depended on a ticket.
    fn end(&mut self, mut ended: Ticket) {
        let demoted = self.step().publish_landed(ended.publishes());
        self.step().demote(&demoted);
        // In reverse, so that blocks last held by these leases are evicted from the ends of their chains.
        for held in ended.held().iter().rev() {
            match held {
                Held::One(lease) => self.tiers.end_lease((lease.tier, lease.block), lease.kind),
                Held::Runs(HeldRuns { from, reads, to, runs }) => {
                    for run in runs.iter().rev() {
                        self.tiers.end_leases(*from, run.src..run.src + run.len, *reads);
                        self.tiers.end_leases(*to, run.dst..run.dst + run.len, LeaseKind::Write);
                    }
                }
                Held::Evicted(..) => {}
            }
        }
        // In the order in which they were evicted, so that the host evicts them in that order, too.
        for held in ended.held() {
            if let Held::Evicted(from, to, ring) = held {
                self.tiers.end_eviction(evicted(*from, *to), *ring);
            }
        }
        let moves = ended.take_moves();
        if !moves.is_empty() {
            self.defrag.finish(&mut self.sequences, &mut self.tiers, &moves);
        }
        self.tiers.enforce_quotas();
    }

    /// Ends a ticket some of whose pairs did not land; returns the sequences that lost bytes, which can only be freed.
    ///
    /// Copies made from lost blocks count as lost too, even those of later tickets and of the open step.
    ///
    /// # Errors
    /// The ticket is unknown, or writes no such block.
    pub fn fail(&mut self, ticket: TicketId, lost: &[Pairs]) -> Result<Vec<SequenceId>> {
        let blocks = self.lost_blocks(ticket, lost)?;
        Ok(self.end_without(ticket, blocks))
    }

    /// Marks and returns the sequences of blocks that are known not to land, while the ticket's other transfers
    /// continue. They can only be freed. End the ticket with [`Manager::fail`] and include these pairs.
    ///
    /// # Errors
    /// As [`Manager::fail`].
    pub fn lose(&mut self, ticket: TicketId, lost: &[Pairs]) -> Result<Vec<SequenceId>> {
        let mut blocks = self.lost_blocks(ticket, lost)?;
        self.transfers.follow_copies(ticket, self.tiers.device(), &mut blocks);
        Ok(self.sequences.lose(&blocks))
    }

    /// Like [`Manager::lose`] with all pairs of the ticket: nothing will land.
    ///
    /// # Errors
    /// The ticket is unknown.
    pub fn lose_whole(&mut self, ticket: TicketId) -> Result<Vec<SequenceId>> {
        let mut blocks = self.transfers.get(ticket)?.written().collect();
        self.transfers.follow_copies(ticket, self.tiers.device(), &mut blocks);
        Ok(self.sequences.lose(&blocks))
    }

    /// Blocks of a ticket that did not land.
    fn lost_blocks(&self, ticket: TicketId, lost: &[Pairs]) -> Result<HashSet<TierBlock>> {
        let written: HashSet<TierBlock> = self.transfers.get(ticket)?.written().collect();
        let mut blocks = HashSet::new();
        for pairs in lost {
            let pool = self.tiers.pool(pairs.dst);
            for &[_, to] in &pairs.ids {
                let block =
                    pool.global(pairs.page_class.into(), to).filter(|block| written.contains(&(pairs.dst, *block)));
                let Some(block) = block else {
                    return Err(Error::NotInTicket { ticket, tier: pairs.dst, block: BlockId(to) });
                };
                blocks.insert((pairs.dst, block));
            }
        }
        Ok(blocks)
    }

    /// Like [`Manager::fail`] with all pairs of the ticket: nothing landed.
    ///
    /// # Errors
    /// The ticket is unknown.
    pub fn fail_whole(&mut self, ticket: TicketId) -> Result<Vec<SequenceId>> {
        let written = self.transfers.get(ticket)?.written().collect();
        Ok(self.end_without(ticket, written))
    }

    /// Ends a ticket that did not write some blocks.
    fn end_without(&mut self, ticket: TicketId, mut blocks: HashSet<TierBlock>) -> Vec<SequenceId> {
        if let Some(moves) = self.transfers.moves_mut(ticket) {
            self.defrag.lose(&mut self.tiers, moves, &mut blocks);
        }
        self.transfers.follow_copies(ticket, self.tiers.device(), &mut blocks);
        self.step().cancel_publishes(ticket, &blocks);
        // Sorted, so that their events are in order.
        let mut gone: Vec<TierBlock> = blocks.iter().copied().collect();
        gone.sort_unstable();
        for block in gone {
            self.tiers.lose(block);
        }
        let sequences = self.sequences.lose(&blocks);
        let ended = self.transfers.close_known(ticket, self.tiers.device());
        self.end(ended);
        sequences
    }
}

/// Pairs of blocks as pairs of ids in their page classes, class by class.
fn by_class(tiers: &Tiers, transfers: Vec<(Kind, Pairs)>) -> Vec<(Kind, Pairs)> {
    let mut all = Vec::with_capacity(transfers.len());
    for (kind, Pairs { src, dst, ids, .. }) in transfers {
        let mut classes = [const { Vec::new() }; MAX_CLASSES];
        for [from, to] in ids {
            let (class, from) = tiers.pool(src).local(BlockId(from));
            classes[class].push([from, tiers.pool(dst).local(BlockId(to)).1]);
        }
        let named = (0u8..).zip(classes).filter(|(_, ids)| !ids.is_empty());
        all.extend(named.map(|(page_class, ids)| (kind, Pairs { src, dst, page_class, ids })));
    }
    all
}

#[cfg(test)]
mod tests {
    use crate::{Append, Config, Counts, Kind, Manager, SequenceId, Tier};

    fn append(manager: &mut Manager, sequence: SequenceId) {
        manager.append(Append::new(&[sequence], Counts::All(1), &mut [0])).unwrap();
    }

    /// Ends a step and its ticket; returns how many copies it had.
    fn step(manager: &mut Manager) -> usize {
        let decision = manager.take_decision();
        manager.complete(decision.ticket).unwrap();
        decision.of(Kind::Copy).map(|pairs| pairs.ids.len()).sum()
    }

    /// Writes to a copy of a sequence's last block, and perhaps frees the sequence.
    fn continue_in_copy(manager: &mut Manager, sequence: SequenceId, given_up: bool) -> SequenceId {
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
        let config = Config::new(4, [16, 16, 0]);
        let (mut manager, mut out) = (Manager::new(config).unwrap(), Vec::new());
        manager.allocate(&[2, 3], &mut out).unwrap();
        step(&mut manager);
        let (loaded, sound) = (out[0], out[1]);
        manager.swap_out(&[loaded], Tier::Host).unwrap();
        step(&mut manager);
        manager.swap_in(&[loaded], Tier::Device).unwrap();
        append(&mut manager, loaded);
        let load = manager.take_decision();
        let mut last = continue_in_copy(&mut manager, loaded, false);
        let (mut others, mut most) = (Vec::new(), 0);
        for i in 0..3000 {
            last = continue_in_copy(&mut manager, last, true);
            let other = continue_in_copy(&mut manager, sound, false);
            if i % 1000 == 0 {
                others.push(continue_in_copy(&mut manager, last, false));
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
