//! Tickets: the outcome of each block, and its deadline. [`crate::queue::Queue`] calls this under its lock.
//!
//! Invariant: a block is settled once; later outcomes are dropped.

use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::header::Owner;
use crate::index::Key;
use crate::miss::Miss;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Outcome of one block: the block if it was read, `None` if it was written, or the miss.
pub(crate) type Outcome = std::result::Result<Option<Buffer>, Miss>;

/// Outcome of one ticket.
#[derive(Debug)]
pub(crate) struct Outcomes {
    pub(crate) reads: bool,
    /// One entry per slot, in the order of the batch.
    pub(crate) blocks: Vec<Outcome>,
}

/// Progress of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Every block is done, or will never be.
    Finished,
    /// The deadline has passed; unfinished blocks will be misses.
    Expired,
    /// Some blocks are in flight.
    Pending,
}

/// A block of a batch, and the content that its slot must have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) ticket: u64,
    pub(crate) index: usize,
    pub(crate) slot: u32,
    /// Zero in swap space.
    pub(crate) key: Key,
    /// Generation of this write, or of the write that put the key into the slot. 0 for reads of swap space, which take
    /// the last write.
    pub(crate) generation: u64,
    /// For a write, the tenant that the block counts for.
    pub(crate) owner: Option<Owner>,
}

#[derive(Debug)]
struct OpenBatch {
    reads: bool,
    blocks: Vec<Option<Outcome>>,
    /// Reads by key, whose keys are forgotten if they miss the deadline.
    gets: Vec<Place>,
    open: usize,
    deadline: Instant,
    /// Number of jobs that had ended when it was opened.
    answers: u64,
    reported: bool,
    /// Whether it is internal to the store.
    hidden: bool,
}

/// The open tickets, and how many blocks missed for which reason.
#[derive(Debug)]
pub(crate) struct Tickets {
    entries: BTreeMap<u64, OpenBatch>,
    next: u64,
    misses: [u64; Miss::ALL.len()],
    /// Shards of the tickets that have ended since the last [`Tickets::take_ended`].
    ended: u64,
}

impl Tickets {
    pub(crate) fn new() -> Self {
        Self { entries: BTreeMap::new(), next: 1, misses: [0; Miss::ALL.len()], ended: 0 }
    }

    /// Opens a ticket for `blocks` blocks; those beyond `taken` are refused at once, with that reason. `answers` counts
    /// the jobs that have ended.
    pub(crate) fn open(
        &mut self,
        reads: bool,
        blocks: usize,
        (accepted, refusal): (usize, Miss),
        deadline: Instant,
        answers: u64,
    ) -> u64 {
        let ticket = self.next;
        self.next += 1;
        let mut outcomes = Vec::with_capacity(blocks);
        outcomes.resize_with(accepted, || None);
        outcomes.resize_with(blocks, || Some(Err(refusal)));
        self.misses[refusal.index()] += (blocks - accepted) as u64;
        if accepted == 0 {
            self.ended |= 1 << shard(ticket);
        }
        let (gets, open) = (Vec::new(), accepted);
        let entry =
            OpenBatch { reads, blocks: outcomes, gets, open, deadline, answers, reported: false, hidden: false };
        self.entries.insert(ticket, entry);
        ticket
    }

    /// Makes a ticket internal to the store: [`Tickets::poll`] does not report it.
    pub(crate) fn hide(&mut self, ticket: u64) {
        if let Some(ticket) = self.entries.get_mut(&ticket) {
            (ticket.reported, ticket.hidden) = (true, true);
        }
    }

    pub(crate) fn is_hidden(&self, ticket: u64) -> bool {
        self.entries.get(&ticket).is_some_and(|ticket| ticket.hidden)
    }

    /// Records a read by key, for [`Tickets::overdue`].
    pub(crate) fn remember(&mut self, place: Place) {
        if let Some(ticket) = self.entries.get_mut(&place.ticket) {
            ticket.gets.push(place);
        }
    }

    /// Reads by key that have missed their deadline.
    pub(crate) fn overdue(&self, ticket: u64, now: Instant) -> Vec<Place> {
        let Some(entry) = self.entries.get(&ticket).filter(|entry| now >= entry.deadline) else { return Vec::new() };
        entry.gets.iter().filter(|place| entry.blocks[place.index].is_none()).copied().collect()
    }

    /// Whether a ticket has missed its deadline and no job has ended since it was opened.
    pub(crate) fn is_unanswered(&self, ticket: u64, now: Instant, answers: u64) -> bool {
        let is_late = |entry: &OpenBatch| entry.open > 0 && now >= entry.deadline && entry.answers == answers;
        self.entries.get(&ticket).is_some_and(is_late)
    }

    /// Whether the block still needs an outcome.
    pub(crate) fn is_open(&self, place: Place) -> bool {
        self.entries.contains_key(&place.ticket)
    }

    /// Records the outcome of a block; returns it if its ticket no longer needs it.
    pub(crate) fn settle(&mut self, place: Place, outcome: Outcome) -> std::result::Result<(), Outcome> {
        let ticket = place.ticket;
        let Some(batch) = self.entries.get_mut(&ticket) else { return Err(outcome) };
        let Some(entry @ None) = batch.blocks.get_mut(place.index) else { return Err(outcome) };
        if let Err(miss) = outcome {
            self.misses[miss.index()] += 1;
        }
        *entry = Some(outcome);
        batch.open -= 1;
        if batch.open == 0 {
            self.ended |= 1 << shard(ticket);
        }
        Ok(())
    }

    /// Progress of a ticket.
    pub(crate) fn progress(&self, ticket: u64, now: Instant) -> Result<Progress> {
        let entry = self.entries.get(&ticket).ok_or(Error::UnknownTicket { ticket })?;
        Ok(match entry.open {
            0 => Progress::Finished,
            _ if now >= entry.deadline => Progress::Expired,
            _ => Progress::Pending,
        })
    }

    /// Whether a ticket reads, and how many blocks it has.
    pub(crate) fn expects(&self, ticket: u64) -> Result<(bool, usize)> {
        let entry = self.entries.get(&ticket).ok_or(Error::UnknownTicket { ticket })?;
        Ok((entry.reads, entry.blocks.len()))
    }

    /// When a ticket's unfinished blocks become misses.
    pub(crate) fn deadline(&self, ticket: u64) -> Result<Instant> {
        self.entries.get(&ticket).map(|entry| entry.deadline).ok_or(Error::UnknownTicket { ticket })
    }

    /// Tickets that finished or expired since the last call and have not been collected.
    pub(crate) fn poll(&mut self, now: Instant) -> Vec<u64> {
        let over = |entry: &OpenBatch| !entry.reported && (entry.open == 0 || now >= entry.deadline);
        let mut found = Vec::new();
        for (&ticket, entry) in self.entries.iter_mut().filter(|(_, entry)| over(entry)) {
            entry.reported = true;
            found.push(ticket);
        }
        found
    }

    /// Shards of the tickets that have ended since the last call, one bit each: their callers must be woken.
    pub(crate) fn take_ended(&mut self) -> u64 {
        std::mem::take(&mut self.ended)
    }

    /// Closes a ticket and returns its blocks; unfinished ones become misses (`Timeout`).
    pub(crate) fn take(&mut self, ticket: u64) -> Result<Outcomes> {
        let entry = self.entries.remove(&ticket).ok_or(Error::UnknownTicket { ticket })?;
        self.misses[Miss::Timeout.index()] += entry.open as u64;
        let blocks = entry.blocks.into_iter().map(|block| block.unwrap_or(Err(Miss::Timeout))).collect();
        Ok(Outcomes { reads: entry.reads, blocks })
    }

    /// Settles every open block as `Closed`.
    pub(crate) fn abandon(&mut self) {
        for entry in self.entries.values_mut() {
            for block in entry.blocks.iter_mut().filter(|block| block.is_none()) {
                *block = Some(Err(Miss::Closed));
                self.misses[Miss::Closed.index()] += 1;
            }
            entry.open = 0;
        }
        self.ended = u64::MAX;
    }

    /// Misses by [`Miss::index`].
    pub(crate) fn misses(&self) -> [u64; Miss::ALL.len()] {
        self.misses
    }
}

/// Number of groups of callers: the end of a ticket wakes only the callers of its shard.
pub(crate) const SHARDS: usize = u64::BITS as usize;

/// The shard of a ticket.
pub(crate) fn shard(ticket: u64) -> usize {
    usize::try_from(ticket % u64::from(u64::BITS)).unwrap_or_default()
}

/// When blocks submitted now become misses: `timeout_base`, and time for the bytes in flight.
pub(crate) fn deadline(now: Instant, timeout_base: Duration, bytes: u64) -> Instant {
    /// Slowest rate that a healthy medium is expected to sustain, in bytes per millisecond (16 MB/s).
    const SLOWEST: u64 = 16_000;
    now + timeout_base + Duration::from_millis(bytes / SLOWEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(ticket: u64, index: usize) -> Place {
        Place { ticket, index, slot: 0, key: [0; 32], generation: 0, owner: None }
    }

    #[test]
    fn deadlines_grow_with_the_bytes_under_way() {
        let (now, timeout_base) = (Instant::now(), Duration::from_secs(1));
        assert_eq!(deadline(now, timeout_base, 0) - now, timeout_base);
        assert_eq!(deadline(now, timeout_base, 64_000_000) - now, Duration::from_secs(5));
    }

    #[test]
    fn a_block_is_settled_once() {
        let mut tickets = Tickets::new();
        let ticket = tickets.open(false, 2, (2, Miss::QueueFull), Instant::now(), 0);
        assert!(tickets.settle(block(ticket, 0), Err(Miss::Io)).is_ok());
        assert!(tickets.settle(block(ticket, 0), Ok(None)).is_err());
        assert!(tickets.settle(block(ticket, 2), Ok(None)).is_err());
        assert!(tickets.settle(block(ticket + 1, 0), Ok(None)).is_err());
        assert_eq!(tickets.take_ended(), 0);
        assert!(tickets.settle(block(ticket, 1), Ok(None)).is_ok());
        assert_eq!((tickets.take_ended(), tickets.take_ended()), (1 << ticket, 0));
        assert!(matches!(tickets.take(ticket).unwrap().blocks[..], [Err(Miss::Io), Ok(None)]));
        assert_eq!(tickets.misses().iter().sum::<u64>(), 1);
    }

    #[test]
    fn a_ticket_that_expires_is_reported_once_and_given_up_when_taken() {
        let mut tickets = Tickets::new();
        let now = Instant::now();
        let ticket = tickets.open(true, 3, (2, Miss::QueueFull), now + Duration::from_secs(1), 0);
        assert_eq!((tickets.poll(now).len(), tickets.progress(ticket, now).unwrap()), (0, Progress::Pending));
        let late = now + Duration::from_secs(1);
        assert_eq!(tickets.progress(ticket, late).unwrap(), Progress::Expired);
        assert_eq!((tickets.poll(late), tickets.poll(late)), (vec![ticket], vec![]));
        let blocks = tickets.take(ticket).unwrap().blocks;
        assert!(matches!(blocks[..], [Err(Miss::Timeout), Err(Miss::Timeout), Err(Miss::QueueFull)]));
    }

    #[test]
    fn abandoned_tickets_are_over_and_wake_their_callers() {
        let mut tickets = Tickets::new();
        let now = Instant::now();
        let ticket = tickets.open(true, 1, (1, Miss::QueueFull), now + Duration::from_secs(1), 0);
        tickets.abandon();
        assert_eq!(tickets.progress(ticket, now).unwrap(), Progress::Finished);
        assert_ne!(tickets.take_ended() & 1 << shard(ticket), 0);
    }
}
