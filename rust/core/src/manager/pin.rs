//! Pins, which keep cached blocks for a reader outside, and what a deadline does to pins and tickets: a dead reader cannot
//! hold a block for ever.
//!
//! The clock is the caller's: any unit, rising. What has been submitted ends only by its own call. Past its deadline its
//! blocks are quarantined: held and counted, while the sequences that wait for them can be freed and go on elsewhere.

use super::Manager;
use crate::block::{LeaseKind, TierBlock};
use crate::error::{Error, Result};
use crate::fit::Share;
use crate::id::{BlockId, PinId, SequenceId, TicketId, Tier};
use crate::sequence::Prompt;
use crate::transfer::{Deadline, Late, Lease};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// One reader's blocks.
#[derive(Debug, Clone)]
struct Pin {
    blocks: Vec<BlockId>,
    deadline: Deadline,
}

/// Pins.
#[derive(Debug, Clone)]
pub(super) struct Pins {
    /// Device blocks that may be pinned at once.
    limit: Share,
    next: u64,
    held: BTreeMap<PinId, Pin>,
    /// Pins of each pinned block.
    counts: HashMap<BlockId, usize>,
    /// Submitted ones past their deadline.
    late: BTreeSet<PinId>,
}

/// What a moment has put an end to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Expired {
    /// Tickets that are closed: they were not submitted and must not be any more.
    pub tickets: Vec<TicketId>,
    /// Pins that are gone; they were not submitted.
    pub pins: Vec<PinId>,
    /// Submitted tickets that are overdue from now on: their blocks are quarantined until they are completed or failed.
    pub overdue: Vec<TicketId>,
    /// Sequences that waited for bytes of either, rising: they can only be freed.
    pub sequences: Vec<SequenceId>,
}

impl Pins {
    /// No pins, and the number of the next one.
    pub(super) fn new(limit: Share, next: u64) -> Self {
        Self { limit, next, held: BTreeMap::new(), counts: HashMap::new(), late: BTreeSet::new() }
    }

    /// Number of the next pin.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    pub(super) fn fraction(&self) -> f64 {
        self.limit.fraction()
    }

    /// The device has so many blocks from now on.
    pub(super) fn resize(&mut self, blocks: usize) {
        self.limit.resize(blocks);
    }

    /// Pins that are held.
    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    /// Pinned device blocks.
    pub(super) fn blocks(&self) -> usize {
        self.counts.len()
    }

    fn get(&mut self, pin: PinId) -> Result<&mut Pin> {
        self.held.get_mut(&pin).ok_or(Error::UnknownPin { pin })
    }
}

impl Manager {
    /// Lets pins hold at most this fraction of the device blocks, a half if never called; those that are held stay.
    ///
    /// # Errors
    /// The fraction is not at least 0 and below 1: a pool of pinned blocks would have nothing to give out.
    pub fn limit_pins(&mut self, fraction: f64) -> Result<()> {
        self.pins.limit = Share::new("max_pinned", fraction, self.tiers.device().len())?;
        Ok(())
    }

    /// Keeps the published blocks of a sequence on the device for a reader until `deadline`, whatever becomes of the
    /// sequence.
    ///
    /// # Errors
    /// The sequence is unknown, not on the device, still loading or has lost bytes; pins would hold too many blocks.
    pub fn pin(&mut self, sequence: SequenceId, deadline: u64) -> Result<PinId> {
        self.sequences.readable(self.view(), sequence)?;
        let mut all = Vec::new();
        let one = [sequence];
        let members = self.sequences.members(&one, &mut all)?;
        let tables = members.iter().flat_map(|&member| self.sequences.rows().at(member).table.iter());
        let blocks = tables.copied().filter(|&block| self.tiers.device().block(block).is_published()).collect();
        self.pin_blocks(blocks, deadline)
    }

    /// As [`Manager::pin`], for the blocks at the start of a prompt that are cached on the device; returns how many tokens
    /// those hold, too.
    ///
    /// # Errors
    /// A token has the reserved id, or pins would hold too many blocks.
    pub fn pin_prompt(&mut self, prompt: &Prompt<'_>, deadline: u64) -> Result<(PinId, u32)> {
        let (blocks, hits) = self.sequences.cached_blocks(self.view(), prompt)?;
        let tokens = u32::try_from(hits).unwrap_or(u32::MAX).saturating_mul(self.block_size());
        Ok((self.pin_blocks(blocks, deadline)?, tokens))
    }

    fn pin_blocks(&mut self, blocks: Vec<BlockId>, deadline: u64) -> Result<PinId> {
        let new = blocks.iter().filter(|block| !self.pins.counts.contains_key(block)).count();
        let (held, limit) = (self.pins.counts.len(), self.pins.limit.blocks());
        if held + new > limit {
            return Err(Error::TooManyPinned { wanted: new, held, limit });
        }
        if let Some(&block) = blocks.iter().find(|&&block| self.tiers.device().block(block).lease_room() == 0) {
            let limit = u32::from(u16::MAX >> 1);
            return Err(Error::TooManyLeases { tier: Tier::Device, block, limit });
        }
        for &block in &blocks {
            // Out of the evictable ones, if it is one of them: a leased block is none.
            self.tiers.lease_cached((Tier::Device, block), LeaseKind::Read)?;
            *self.pins.counts.entry(block).or_default() += 1;
        }
        let pin = PinId(self.pins.next);
        self.pins.next += 1;
        self.pins.held.insert(pin, Pin { blocks, deadline: Deadline { at: deadline, submitted: false } });
        Ok(pin)
    }

    /// Blocks of a pin, in the order of their tokens, one cache group after the other.
    ///
    /// # Errors
    /// The pin is unknown or has expired.
    pub fn pinned_blocks(&self, pin: PinId) -> Result<&[BlockId]> {
        self.pins.held.get(&pin).map(|pin| pin.blocks.as_slice()).ok_or(Error::UnknownPin { pin })
    }

    /// The reader's transfer has begun: only [`Manager::unpin`] ends the pin from now on.
    ///
    /// # Errors
    /// The pin is unknown or has expired: the blocks must not be read.
    pub fn submit_pin(&mut self, pin: PinId) -> Result<()> {
        self.pins.get(pin)?.deadline.submitted = true;
        Ok(())
    }

    /// The reader needs the blocks no more.
    ///
    /// # Errors
    /// The pin is unknown or has expired.
    pub fn unpin(&mut self, pin: PinId) -> Result<()> {
        let Pin { blocks, .. } = self.pins.held.remove(&pin).ok_or(Error::UnknownPin { pin })?;
        self.pins.late.remove(&pin);
        // Backwards, so that the chain is evicted from its end.
        for block in blocks.into_iter().rev() {
            if let Some(count) = self.pins.counts.get_mut(&block) {
                *count -= 1;
                if *count == 0 {
                    self.pins.counts.remove(&block);
                }
            }
            self.tiers.end_lease((Tier::Device, block), LeaseKind::Read);
        }
        Ok(())
    }

    /// Gives a decision's ticket a deadline: for its submission, and then for its end.
    ///
    /// # Errors
    /// The ticket was never handed out, or has ended.
    pub fn set_deadline(&mut self, ticket: TicketId, deadline: u64) -> Result<()> {
        self.transfers.set_deadline(ticket, deadline)
    }

    /// The ticket's transfers have begun: only [`Manager::complete`] and [`Manager::fail`] end it from now on.
    ///
    /// # Errors
    /// The ticket was never handed out, has ended or expired: its transfers must not run.
    pub fn submit(&mut self, ticket: TicketId) -> Result<()> {
        self.transfers.mark_submitted(ticket)
    }

    /// Ends every pin and every ticket that is not submitted and whose deadline is `now` or earlier, the latter as if all
    /// of its transfers had failed; what the step was to compute is the caller's to drop. Blocks of submitted ones are
    /// quarantined.
    ///
    /// # Errors
    /// The manager contradicts itself.
    pub fn expire(&mut self, now: u64) -> Result<Expired> {
        let mut expired = Expired::default();
        let late: Vec<_> = self.pins.held.iter().filter(|(_, pin)| pin.deadline.at <= now).collect();
        let (overdue, ended): (Vec<_>, Vec<_>) = late.into_iter().partition(|(_, pin)| pin.deadline.submitted);
        let overdue: Vec<PinId> = overdue.into_iter().map(|(&id, _)| id).collect();
        expired.pins = ended.into_iter().map(|(&id, _)| id).collect();
        self.pins.late.extend(overdue);
        for &pin in &expired.pins {
            self.unpin(pin)?;
        }
        Late { expired: expired.tickets, overdue: expired.overdue } = self.transfers.late(now);
        for &ticket in &expired.tickets {
            expired.sequences.extend(self.cancel(ticket)?);
        }
        for &ticket in &expired.overdue {
            let written: HashSet<TierBlock> = self.transfers.get(ticket)?.written().collect();
            expired.sequences.extend(self.sequences.lose(&written)?);
            self.transfers.set_overdue(ticket)?;
        }
        expired.sequences.sort_unstable();
        expired.sequences.dedup();
        Ok(expired)
    }

    /// Blocks of a tier that transfers past their deadline still hold, by id.
    #[must_use]
    pub fn quarantined(&self, tier: Tier) -> Vec<BlockId> {
        let leases = self.transfers.overdue_leases();
        let mut blocks: Vec<_> = leases.filter(|lease| lease.tier == tier).map(|lease| lease.block).collect();
        if tier == Tier::Device {
            let pins = self.pins.late.iter().filter_map(|pin| self.pins.held.get(pin));
            blocks.extend(pins.flat_map(|pin| &pin.blocks));
        }
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }

    /// Leases that pins hold.
    pub(crate) fn pin_leases(&self) -> impl Iterator<Item = Lease> + '_ {
        let blocks = self.pins.held.values().flat_map(|pin| &pin.blocks);
        blocks.map(|&block| Lease { tier: Tier::Device, kind: LeaseKind::Read, block })
    }

    /// What does not hold of pins.
    pub(crate) fn check_pins(&self) -> std::result::Result<(), String> {
        let mut counts: HashMap<BlockId, usize> = HashMap::new();
        self.pin_leases().for_each(|lease| *counts.entry(lease.block).or_default() += 1);
        if counts != self.pins.counts {
            return Err(format!("{} blocks are pinned, counted {}", self.pins.counts.len(), counts.len()));
        }
        Ok(())
    }
}
