//! Requests and the order in which they may run. No I/O and no threads: the store calls this under its one lock.
//!
//! Invariants:
//! - operations on one slot run one at a time, in the order in which they were submitted;
//! - `used` counts the bytes of all buffers that belong to an operation or to an uncollected result, and never exceeds
//!   `limit`;
//! - a slot is `Valid` only between the reported end of a write and the start of the next.

use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::miss::Miss;
use crate::ticket::{Outcome, Outcomes, Place, Tickets, deadline};
use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::time::{Duration, Instant};

/// Bytes of idle buffers that are kept for reuse.
const KEPT: usize = 64 << 20;

/// Counters since the store was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Blocks whose write completed.
    pub written_blocks: u64,
    /// Blocks whose read was checked and accepted.
    pub read_blocks: u64,
    /// Misses by [`Miss::index`].
    pub misses: [u64; Miss::ALL.len()],
    /// Operations that the system answered with an error.
    pub errors: u64,
    /// The last of those errors, in words; empty if there was none.
    pub last_error: String,
    /// Bytes of blocks in flight and of results not yet collected, headers included.
    pub pending_bytes: u64,
}

/// One operation on a slot.
#[derive(Debug)]
enum Op {
    Write(Place, Buffer),
    Read(Place),
    /// A refused write: the slot no longer holds what the caller expects.
    Void(u32),
}

/// Work for a thread.
#[derive(Debug)]
pub(crate) enum Job {
    Write { place: Place, generation: u64, buffer: Buffer },
    Read { place: Place, generation: u64, buffer: Buffer },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotState {
    Empty,
    Lost,
    Valid { generation: u64 },
}

/// The state of a store without its threads and its device. Waiting callers ask `tickets` directly.
#[derive(Debug)]
pub(crate) struct Queue {
    stride: usize,
    slots: Vec<SlotState>,
    ready: VecDeque<Op>,
    /// Slots with an operation that is ready or running, and the operations behind it.
    busy: HashMap<u32, VecDeque<Op>>,
    pub(crate) tickets: Tickets,
    next_generation: u64,
    limit: u64,
    used: u64,
    patience: Duration,
    idle: Vec<Buffer>,
    stats: Stats,
    closing: bool,
}

impl Queue {
    pub(crate) fn new(slots: u32, stride: usize, limit: u64, patience: Duration, first_generation: u64) -> Self {
        Self {
            stride,
            slots: vec![SlotState::Empty; slots as usize],
            ready: VecDeque::new(),
            busy: HashMap::new(),
            tickets: Tickets::new(),
            next_generation: first_generation,
            limit,
            used: 0,
            patience,
            idle: Vec::new(),
            stats: Stats::default(),
            closing: false,
        }
    }

    /// Reserves memory for up to `wanted` blocks; returns a buffer for each that fits.
    pub(crate) fn reserve(&mut self, wanted: usize) -> Vec<Option<Buffer>> {
        let count = self.reserve_bytes(wanted);
        (0..count).map(|_| self.idle.pop()).collect()
    }

    fn reserve_bytes(&mut self, wanted: usize) -> usize {
        let room = (self.limit - self.used) / self.stride as u64;
        let count = usize::try_from(room).unwrap_or(usize::MAX).min(wanted);
        self.used += (count * self.stride) as u64;
        count
    }

    /// Takes a batch of writes. Slots without a buffer are refused: `QueueFull`, and what they held is lost.
    pub(crate) fn submit_writes(&mut self, slots: &[u32], buffers: Vec<Buffer>, now: Instant) -> Result<u64> {
        if self.closing {
            return Err(Error::Closed);
        }
        let accepted = buffers.len();
        let ticket = self.open_ticket(false, slots.len(), accepted, now);
        for (index, (&slot, buffer)) in slots.iter().zip(buffers).enumerate() {
            self.enqueue(slot, Op::Write(Place { ticket, index, slot }, buffer));
        }
        for &slot in &slots[accepted..] {
            self.void(slot);
        }
        Ok(ticket)
    }

    /// Takes a batch of reads. Those that the memory limit does not allow are refused: `QueueFull`.
    pub(crate) fn submit_reads(&mut self, slots: &[u32], now: Instant) -> Result<u64> {
        if self.closing {
            return Err(Error::Closed);
        }
        let accepted = self.reserve_bytes(slots.len());
        let ticket = self.open_ticket(true, slots.len(), accepted, now);
        for (index, &slot) in slots[..accepted].iter().enumerate() {
            self.enqueue(slot, Op::Read(Place { ticket, index, slot }));
        }
        Ok(ticket)
    }

    fn open_ticket(&mut self, reads: bool, blocks: usize, accepted: usize, now: Instant) -> u64 {
        self.tickets.open(reads, blocks, accepted, deadline(now, self.patience, self.used))
    }

    fn enqueue(&mut self, slot: u32, op: Op) {
        match self.busy.entry(slot) {
            Entry::Occupied(mut behind) => behind.get_mut().push_back(op),
            Entry::Vacant(free) => {
                free.insert(VecDeque::new());
                self.ready.push_back(op);
            }
        }
    }

    /// Forgets what a slot holds, in its turn. At most one such mark stands behind each operation.
    fn void(&mut self, slot: u32) {
        match self.busy.get_mut(&slot) {
            None => self.slots[slot as usize] = SlotState::Lost,
            Some(behind) if matches!(behind.back(), Some(Op::Void(_))) => {}
            Some(behind) => behind.push_back(Op::Void(slot)),
        }
    }

    /// The next operation that needs the device; those that need none are settled on the way.
    pub(crate) fn next_job(&mut self) -> Option<Job> {
        while let Some(op) = self.ready.pop_front() {
            match op {
                Op::Void(slot) => {
                    self.slots[slot as usize] = SlotState::Lost;
                    self.advance(slot);
                }
                Op::Write(place, buffer) => {
                    self.slots[place.slot as usize] = SlotState::Lost;
                    if self.tickets.is_open(place) {
                        let generation = self.next_generation;
                        self.next_generation += 1;
                        return Some(Job::Write { place, generation, buffer });
                    }
                    self.finish_write(place, 0, buffer, Err(Miss::Timeout));
                }
                Op::Read(place) => match self.slots[place.slot as usize] {
                    SlotState::Valid { generation } if self.tickets.is_open(place) => {
                        let buffer = self.idle.pop().unwrap_or_else(|| Buffer::new(self.stride));
                        return Some(Job::Read { place, generation, buffer });
                    }
                    SlotState::Valid { .. } => self.finish_unread(place, Miss::Timeout),
                    SlotState::Empty => self.finish_unread(place, Miss::Empty),
                    SlotState::Lost => self.finish_unread(place, Miss::Lost),
                },
            }
        }
        None
    }

    /// Ends a write.
    pub(crate) fn finish_write(
        &mut self,
        place: Place,
        generation: u64,
        buffer: Buffer,
        result: std::result::Result<(), Miss>,
    ) {
        self.release(Some(buffer));
        let told = self.settle(place, result.map(|()| None));
        if told && result.is_ok() {
            self.stats.written_blocks += 1;
            self.slots[place.slot as usize] = SlotState::Valid { generation };
        }
        self.advance(place.slot);
    }

    /// Ends a read.
    pub(crate) fn finish_read(&mut self, place: Place, buffer: Buffer, result: std::result::Result<(), Miss>) {
        match result {
            Ok(()) => {
                if self.settle(place, Ok(Some(buffer))) {
                    self.stats.read_blocks += 1;
                }
            }
            Err(miss) => {
                self.settle(place, Err(miss));
                self.release(Some(buffer));
            }
        }
        self.advance(place.slot);
    }

    fn finish_unread(&mut self, place: Place, miss: Miss) {
        self.settle(place, Err(miss));
        self.release(None);
        self.advance(place.slot);
    }

    /// Notes an error of the system, for whoever asks why blocks are missing.
    pub(crate) fn note_error(&mut self, what: String) {
        self.stats.errors += 1;
        self.stats.last_error = what;
    }

    /// Records the outcome of a block; returns whether its ticket still needs it. If not, a block that was read gives its
    /// memory back.
    fn settle(&mut self, place: Place, outcome: Outcome) -> bool {
        match self.tickets.settle(place, outcome) {
            Ok(()) => true,
            Err(Ok(Some(buffer))) => {
                self.release(Some(buffer));
                false
            }
            Err(_) => false,
        }
    }

    /// Lets the next operation on the slot go ahead.
    fn advance(&mut self, slot: u32) {
        match self.busy.get_mut(&slot).and_then(VecDeque::pop_front) {
            Some(op) => self.ready.push_back(op),
            None => {
                self.busy.remove(&slot);
            }
        }
    }

    /// Gives one block's memory back; its buffer is kept for the next if there is one.
    fn release(&mut self, buffer: Option<Buffer>) {
        self.used -= self.stride as u64;
        if let Some(buffer) = buffer {
            self.keep(buffer);
        }
    }

    fn keep(&mut self, buffer: Buffer) {
        if (self.idle.len() + 1) * self.stride <= KEPT {
            self.idle.push(buffer);
        }
    }

    /// Gives the memory of collected blocks back.
    pub(crate) fn take_back(&mut self, outcomes: &mut Outcomes) {
        for buffer in outcomes.blocks.drain(..).flatten().flatten() {
            self.release(Some(buffer));
        }
    }

    /// Gives memory back that was set aside for blocks which were never submitted.
    pub(crate) fn unreserve(&mut self, count: usize) {
        self.used -= (count * self.stride) as u64;
    }

    /// Refuses new batches and settles what no thread has begun.
    pub(crate) fn close(&mut self) {
        self.closing = true;
        let mut waiting: Vec<Op> = self.ready.drain(..).collect();
        for (_, behind) in self.busy.drain() {
            waiting.extend(behind);
        }
        for op in waiting {
            match op {
                Op::Write(place, buffer) => {
                    self.settle(place, Err(Miss::Closed));
                    self.release(Some(buffer));
                }
                Op::Read(place) => {
                    self.settle(place, Err(Miss::Closed));
                    self.release(None);
                }
                Op::Void(_) => {}
            }
        }
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing
    }

    /// Counters, with the present memory use.
    pub(crate) fn stats(&self) -> Stats {
        Stats { misses: self.tickets.misses(), pending_bytes: self.used, ..self.stats.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> Queue {
        Queue::new(4, 8192, 4 * 8192, Duration::from_secs(1), 100)
    }

    fn submit(queue: &mut Queue, slots: &[u32]) -> u64 {
        let buffers = queue.reserve(slots.len()).into_iter().map(|_| Buffer::new(8192)).collect();
        queue.submit_writes(slots, buffers, Instant::now()).unwrap()
    }

    /// Does everything that can be done, and tells the slots and generations in the order of the work.
    fn work(queue: &mut Queue) -> Vec<(&'static str, u32, u64)> {
        let mut done = Vec::new();
        while let Some(job) = queue.next_job() {
            match job {
                Job::Write { place, generation, buffer } => {
                    done.push(("write", place.slot, generation));
                    queue.finish_write(place, generation, buffer, Ok(()));
                }
                Job::Read { place, generation, buffer } => {
                    done.push(("read", place.slot, generation));
                    queue.finish_read(place, buffer, Ok(()));
                }
            }
        }
        done
    }

    #[test]
    fn one_slot_is_worked_on_in_order_and_others_beside_it() {
        let mut queue = queue();
        submit(&mut queue, &[0]);
        queue.submit_reads(&[0], Instant::now()).unwrap();
        submit(&mut queue, &[0, 1]);
        let Some(Job::Write { place, generation, buffer }) = queue.next_job() else { unreachable!() };
        assert_eq!(work(&mut queue), [("write", 1, 101)]);
        queue.finish_write(place, generation, buffer, Ok(()));
        assert_eq!(work(&mut queue), [("read", 0, 100), ("write", 0, 102)]);
    }

    #[test]
    fn work_for_a_ticket_that_was_given_up_is_not_done() {
        let mut queue = queue();
        let given_up = submit(&mut queue, &[2]);
        queue.tickets.take(given_up).unwrap();
        let read = queue.submit_reads(&[2], Instant::now()).unwrap();
        assert_eq!(work(&mut queue), []);
        assert!(matches!(queue.tickets.take(read).unwrap().blocks[..], [Err(Miss::Lost)]));
        submit(&mut queue, &[3]);
        assert_eq!(work(&mut queue), [("write", 3, 100)]);
        let given_up = queue.submit_reads(&[3, 3], Instant::now()).unwrap();
        queue.tickets.take(given_up).unwrap();
        assert_eq!(work(&mut queue), []);
        assert_eq!(queue.stats().pending_bytes, 0);
    }
}
