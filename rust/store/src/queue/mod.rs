//! Requests and the order in which they may run. No I/O and no threads: the store calls this under its one lock.
//!
//! Invariants:
//! - operations on one slot run one at a time, in the order in which they were submitted;
//! - a slot is `Valid` only between the reported end of a write and the start of the next;
//! - a key is in the index from the submission of its write until it is evicted, deleted or found damaged twice, or its
//!   first write fails;
//! - the header of a slot that is not suspect has no key other than the one in the index: deletion relies on it.

use crate::buffer::{Buffer, LentRow};
use crate::error::Result;
use crate::index::{Index, Key, Landed, Reuse, StoredBlock};
use crate::miss::Miss;
use crate::quotas::Ledger;
use crate::ranks::Ranks;
use crate::ticket::{Outcome, Outcomes, Place, Tickets};
use std::collections::hash_map::{Entry, HashMap};
use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

mod doubts;
mod memory;
mod submit;

use doubts::Doubts;
use memory::Memory;

pub(crate) use doubts::Seen;
pub(crate) use submit::LentRows;

/// Maximum bytes of adjacent blocks in one call: larger calls gain nothing, and would leave other threads idle.
const RUN: usize = 1 << 20;

/// Counters since the store was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Blocks whose write completed.
    pub written_blocks: u64,
    /// Blocks whose read was checked and accepted.
    pub read_blocks: u64,
    /// Misses by [`Miss::index`].
    pub misses: [u64; Miss::ALL.len()],
    /// Operations that failed with a system error.
    pub errors: u64,
    /// Message of the last of those errors; empty if there was none.
    pub last_error: String,
    /// Number of those errors since the last successful operation.
    pub errors_in_a_row: u64,
    /// Whether the device hangs: batches are refused until it answers.
    pub is_down: bool,
    /// Bytes of blocks in flight and of results not yet collected, headers included.
    pub pending_bytes: u64,
    /// Keys that have a block now.
    pub cached_blocks: u64,
    /// Keys whose block was evicted.
    pub evicted_blocks: u64,
}

/// One operation on a slot.
enum Op {
    Write(Place, Buffer),
    /// A read, with the row that takes the block if one was lent.
    Read(Place, Option<Box<dyn LentRow>>),
    /// A put of a key that already has a slot: its write may still be in flight.
    Confirm(Place),
    /// Wipes the header of a deleted or dropped key, so that no later opener finds it.
    Wipe(Place),
    /// The deletion of a key that an earlier write has evicted: it ends when that write has landed.
    Gone(Place),
    /// A refused write: the slot no longer holds what the caller expects.
    Void(u32),
}

/// Work for a thread; several blocks are in adjacent slots.
#[derive(Debug)]
pub(crate) enum Job {
    Write(Vec<(Place, Buffer)>),
    Read(Vec<(Place, Buffer)>),
    Wipe(Place),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotState {
    Empty,
    Lost,
    Valid {
        generation: u64,
        /// See [`StoredBlock`].
        proven: bool,
    },
}

impl SlotState {
    fn holds(self, wanted: u64) -> bool {
        matches!(self, Self::Valid { generation, .. } if generation == wanted)
    }

    fn proves(self, wanted: u64) -> bool {
        matches!(self, Self::Valid { generation, proven: true } if generation == wanted)
    }
}

/// The state of a store without its threads and its device. Waiting callers ask `tickets` directly.
pub(crate) struct Queue {
    slots: Vec<SlotState>,
    /// Has no slots in swap space.
    index: Index,
    /// Slots whose on-disk header may hold a key missing from the index: an operation failed, and the header is not
    /// wiped yet.
    suspects: HashSet<u32>,
    /// Keys evicted by writes that have not ended, with their slots, by the writes' generations.
    evicting: HashMap<u64, (u32, Key)>,
    /// Writes that replace a block of their key: the generation of that block, by their own. It stays if they fail.
    renewing: HashMap<u64, u64>,
    /// Blocks whose last read failed.
    doubts: Doubts,
    ready: VecDeque<Op>,
    /// Slots with an operation that is ready or running, and the operations behind it.
    busy: HashMap<u32, VecDeque<Op>>,
    pub(crate) tickets: Tickets,
    pub(crate) memory: Memory,
    next_generation: u64,
    timeout_base: Duration,
    stats: Stats,
    closing: bool,
    /// Number of threads that take jobs, and how many of them are busy.
    threads: usize,
    running: usize,
    /// Jobs that have ended.
    answers: u64,
    /// Set until the device has recorded the last `forget`: the floor to write. Puts are refused meanwhile.
    forgetting: Option<u64>,
    /// Set while the device hangs: until then batches are refused. See [`Queue::is_hung`].
    hung_until: Option<Instant>,
}

/// The configuration of a queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueOptions {
    pub(crate) slots: u32,
    pub(crate) stride: usize,
    pub(crate) limit: u64,
    pub(crate) timeout_base: Duration,
    pub(crate) threads: usize,
    pub(crate) hidden: Duration,
}

impl Queue {
    pub(crate) fn new(options: QueueOptions, first_generation: u64) -> Self {
        let QueueOptions { slots, stride, limit, timeout_base, threads, hidden } = options;
        Self {
            slots: vec![SlotState::Empty; slots as usize],
            index: Index::new(0, first_generation),
            suspects: HashSet::new(),
            evicting: HashMap::new(),
            renewing: HashMap::new(),
            doubts: Doubts::new(hidden),
            ready: VecDeque::new(),
            busy: HashMap::new(),
            tickets: Tickets::new(),
            memory: Memory::new(stride, limit),
            next_generation: first_generation,
            timeout_base,
            stats: Stats::default(),
            closing: false,
            threads,
            running: 0,
            answers: 0,
            forgetting: None,
            hung_until: None,
        }
    }

    /// Makes this a queue of keys, with the blocks that the slab holds.
    pub(crate) fn restore(&mut self, landed: &Landed) {
        self.index = Index::new(u32::try_from(self.slots.len()).unwrap_or(u32::MAX), landed.floor);
        self.next_generation = landed.next_generation;
        for &block in &landed.blocks {
            if block.generation > 0 {
                let StoredBlock { generation, proven, .. } = block;
                self.slots[block.slot as usize] = SlotState::Valid { generation, proven };
            }
            self.index.restore(block);
        }
        for &slot in &landed.older {
            self.suspect(slot);
        }
    }

    /// For each key, whether it has a block whose write has landed, except while its last read was damaged or failed a
    /// moment ago; false for all while the device hangs.
    pub(crate) fn contains(&self, keys: &[Key], now: Instant) -> Vec<bool> {
        let landed = |key| {
            self.index.find(key).is_some_and(|found @ (slot, generation)| {
                let is_doubted = self.doubts.has_damage(found) || self.doubts.hides(found, now);
                self.slots[slot as usize].holds(generation) && !is_doubted
            })
        };
        if self.hung_until.is_some() {
            return vec![false; keys.len()];
        }
        keys.iter().map(landed).collect()
    }

    /// For each key, whether the store has neither a block nor a write of one in flight, or does not read it now.
    pub(crate) fn lacks(&self, keys: &[Key], now: Instant) -> Vec<bool> {
        let is_lacked = |key| self.index.find(key).is_none_or(|found| self.doubts.hides(found, now));
        keys.iter().map(is_lacked).collect()
    }

    /// Forgets every key, including those being written; returns the first valid generation from now on, and what
    /// the caller must drop after releasing the lock.
    pub(crate) fn forget(&mut self) -> (u64, (Ledger, Ranks)) {
        let floor = self.take_generation();
        let counted = self.index.forget(floor);
        self.forgetting = Some(floor);
        (floor, counted)
    }

    /// Returns how many blocks count towards a tenant's quota, and the quota, if there is one.
    pub(crate) fn quota(&self, tenant: &[u8; 32]) -> Option<(u32, u32)> {
        self.index.quota(tenant)
    }

    /// Returns the quota of each tenant that has one.
    pub(crate) fn quotas(&self) -> Vec<([u8; 32], u32)> {
        self.index.quotas()
    }

    /// Checks the order of the blocks, and the counts of all tenants.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        self.index.check()
    }

    /// Accepts puts again once the device has the newest floor.
    pub(crate) fn has_forgotten(&mut self, floor: u64) {
        self.forgetting = self.forgetting.filter(|&newest| newest > floor);
    }

    /// Returns the blocks that have landed, for the next opener. `None` in swap space, and if slots are suspect:
    /// then only the headers are reliable.
    pub(crate) fn landed(&self) -> Option<Landed> {
        let landed = |block: StoredBlock| {
            let state = self.slots[block.slot as usize];
            let proven = state.proves(block.generation);
            if state.holds(block.generation) { StoredBlock { proven, ..block } } else { StoredBlock::none(block.slot) }
        };
        (self.index.len() > 0 && self.suspects.is_empty()).then(|| Landed {
            floor: self.index.floor(),
            next_generation: self.next_generation,
            blocks: self.index.blocks().map(landed).collect(),
            older: Vec::new(),
        })
    }

    /// Whether a thread may begin an operation.
    pub(crate) fn num_ready(&self) -> usize {
        self.ready.len()
    }

    /// Numbers the next writes from `generation` on, unless they already have higher numbers.
    pub(crate) fn count_from(&mut self, generation: u64) {
        self.next_generation = self.next_generation.max(generation);
    }

    fn take_generation(&mut self) -> u64 {
        self.next_generation += 1;
        self.next_generation - 1
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

    /// Settles a repeated put when its turn comes.
    fn confirm(&mut self, place: Place) {
        match self.busy.get_mut(&place.slot) {
            Some(behind) => behind.push_back(Op::Confirm(place)),
            None => self.finish_confirm(place),
        }
    }

    fn finish_confirm(&mut self, place: Place) {
        let landed = self.slots[place.slot as usize].holds(place.generation);
        self.settle(place, if landed { Ok(None) } else { Err(Miss::Lost) });
    }

    /// Forgets a slot's content when its turn comes. At most one such mark follows each operation.
    fn void(&mut self, slot: u32) {
        match self.busy.get_mut(&slot) {
            None => self.slots[slot as usize] = SlotState::Lost,
            Some(behind) if matches!(behind.back(), Some(Op::Void(_))) => {}
            Some(behind) => behind.push_back(Op::Void(slot)),
        }
    }

    /// Returns the next operations that need the device; settles those that need none.
    pub(crate) fn next_job(&mut self) -> Option<Job> {
        let job = self.find_job();
        self.running += usize::from(job.is_some());
        job
    }

    fn find_job(&mut self) -> Option<Job> {
        // Group adjacent blocks as long as no thread is left idle.
        let most = (RUN / self.memory.stride()).min(self.ready.len().div_ceil(self.threads)).max(1);
        while let Some(op) = self.ready.pop_front() {
            match op {
                Op::Void(slot) => {
                    self.slots[slot as usize] = SlotState::Lost;
                    self.advance(slot);
                }
                Op::Confirm(place) => {
                    self.finish_confirm(place);
                    self.advance(place.slot);
                }
                Op::Wipe(place) => {
                    self.slots[place.slot as usize] = SlotState::Lost;
                    return Some(Job::Wipe(place));
                }
                Op::Gone(place) => {
                    self.settle_deletion(place, Ok(()));
                    self.advance(place.slot);
                }
                Op::Write(place, buffer) => {
                    if let Some(first) = self.begin_write(place, buffer) {
                        let is_next = |op: &Op, slot| matches!(op, Op::Write(next, _) if next.slot == slot);
                        return Some(Job::Write(self.run_of(first, most, is_next)));
                    }
                }
                Op::Read(place, row) => {
                    if let Some(first) = self.begin_read(place, row) {
                        let is_next = |op: &Op, slot| matches!(op, Op::Read(next, _) if next.slot == slot);
                        return Some(Job::Read(self.run_of(first, most, is_next)));
                    }
                }
            }
        }
        None
    }

    /// Returns a block and the adjacent ones that follow it in the queue, up to `most`.
    fn run_of(
        &mut self,
        first: (Place, Buffer),
        most: usize,
        is_next: impl Fn(&Op, u32) -> bool,
    ) -> Vec<(Place, Buffer)> {
        let mut slot = first.0.slot;
        let mut run = vec![first];
        while run.len() < most {
            slot = slot.saturating_add(1);
            if !self.ready.front().is_some_and(|op| is_next(op, slot)) {
                break;
            }
            let Some(op) = self.ready.pop_front() else { break };
            let begun = match op {
                Op::Write(place, buffer) => self.begin_write(place, buffer),
                Op::Read(place, row) => self.begin_read(place, row),
                _ => None,
            };
            let Some(begun) = begun else { break };
            run.push(begun);
        }
        run
    }

    /// Returns what a thread needs for a write; `None` if nobody waits for it.
    fn begin_write(&mut self, place: Place, buffer: Buffer) -> Option<(Place, Buffer)> {
        self.slots[place.slot as usize] = SlotState::Lost;
        if self.tickets.is_open(place) {
            return Some((place, buffer));
        }
        self.finish_write(place, buffer, Err(Miss::Timeout));
        None
    }

    /// Returns what a thread needs for a read; `None` if it is a miss already.
    fn begin_read(&mut self, place: Place, row: Option<Box<dyn LentRow>>) -> Option<(Place, Buffer)> {
        match self.read_of(place) {
            Ok(place) => Some((place, self.memory.buffer(row))),
            Err(miss) => {
                self.finish_unread(place, miss);
                self.advance(place.slot);
                None
            }
        }
    }

    /// Records that a job has ended: the device answers.
    pub(crate) fn answered(&mut self) {
        self.running -= 1;
        self.answers += 1;
        self.hung_until = None;
    }

    /// Returns a read with the generation that its slot must have, or the miss if the slot has no such block.
    fn read_of(&self, place: Place) -> std::result::Result<Place, Miss> {
        match self.slots[place.slot as usize] {
            SlotState::Valid { .. } if !self.tickets.is_open(place) => Err(Miss::Timeout),
            SlotState::Valid { generation, .. } if place.generation == 0 => Ok(Place { generation, ..place }),
            SlotState::Valid { generation, .. } if place.generation == generation => Ok(place),
            SlotState::Empty => Err(Miss::Empty),
            SlotState::Valid { .. } | SlotState::Lost => Err(Miss::Lost),
        }
    }

    /// Closes a ticket. Keys whose reads missed its deadline are hidden for a while: the device may only be late.
    pub(crate) fn take(&mut self, ticket: u64, now: Instant) -> Result<Outcomes> {
        if self.running > 0 && self.tickets.is_unanswered(ticket, now, self.answers) {
            self.hung_until = Some(now + self.timeout_base);
        }
        for place in self.tickets.overdue(ticket, now) {
            if self.is_current(place) {
                self.doubts.note((place.slot, place.generation), None, now);
            }
        }
        self.tickets.take(ticket)
    }

    /// Whether the index has a block where an operation expects it.
    fn is_current(&self, place: Place) -> bool {
        self.index.find(&place.key) == Some((place.slot, place.generation))
    }

    /// Forgets the key of an operation that failed, and wipes its header.
    fn drop_key(&mut self, place: Place, reuse: Reuse) {
        if self.index.remove(place.slot, place.generation, reuse) {
            self.suspect(place.slot);
        }
    }

    /// Wipes the header of a slot, without a ticket.
    fn suspect(&mut self, slot: u32) {
        self.suspects.insert(slot);
        self.enqueue(slot, Op::Wipe(Place { ticket: 0, index: 0, slot, key: [0; 32], generation: 0, owner: None }));
    }

    /// Ends a write.
    pub(crate) fn finish_write(&mut self, place: Place, buffer: Buffer, result: std::result::Result<(), Miss>) {
        self.memory.release(Some(buffer));
        let is_wanted = self.settle(place, result.map(|()| None));
        let evicted = self.evicting.remove(&place.generation);
        if result.is_ok() {
            self.suspects.remove(&place.slot);
        } else if let Some((slot, _)) = evicted {
            self.suspects.insert(slot);
        }
        let renewed = self.renewing.remove(&place.generation);
        if is_wanted && result.is_ok() {
            self.stats.written_blocks += 1;
            self.slots[place.slot as usize] = SlotState::Valid { generation: place.generation, proven: true };
            self.doubts.clear(place.slot);
        } else if let Some(before) = renewed.filter(|_| self.is_current(place)) {
            self.keep_renewed(place, if result.is_ok() { place.generation } else { before });
        } else {
            self.drop_key(place, Reuse::Last);
        }
        self.advance(place.slot);
    }

    /// Keeps the block that an unsuccessful write was to replace. Each read checks whether it is still intact.
    fn keep_renewed(&mut self, place: Place, generation: u64) {
        self.index.renew(place.slot, &place.key, generation);
        self.slots[place.slot as usize] = SlotState::Valid { generation, proven: false };
    }

    /// Ends a read. If it failed, its block is hidden for a while; only damage that a second look finds deletes it.
    pub(crate) fn finish_read(
        &mut self,
        place: Place,
        buffer: Buffer,
        result: std::result::Result<(), (Miss, Option<Seen>)>,
        now: Instant,
    ) {
        match result {
            Ok(()) => {
                self.slots[place.slot as usize] = SlotState::Valid { generation: place.generation, proven: true };
                self.doubts.clear(place.slot);
                if self.settle(place, Ok(Some(buffer))) {
                    self.stats.read_blocks += 1;
                }
            }
            Err((miss, seen)) => {
                if self.is_current(place) {
                    self.doubt(place, seen, now);
                }
                self.settle(place, Err(miss));
                self.memory.release(Some(buffer));
            }
        }
        self.advance(place.slot);
    }

    fn doubt(&mut self, place: Place, seen: Option<Seen>, now: Instant) {
        let found = (place.slot, place.generation);
        if self.doubts.note(found, seen, now) {
            self.drop_key(place, Reuse::First);
        } else if seen.is_some() {
            // Nor may the next opener take it for proven.
            self.slots[place.slot as usize] = SlotState::Valid { generation: place.generation, proven: false };
        }
    }

    /// Ends the wiping of a header.
    pub(crate) fn finish_wipe(&mut self, place: Place, result: std::result::Result<(), Miss>) {
        if result.is_ok() {
            self.suspects.remove(&place.slot);
        } else {
            self.suspects.insert(place.slot);
        }
        if self.tickets.is_hidden(place.ticket) {
            self.settle(place, result.map(|()| None));
        } else {
            self.settle_deletion(place, result);
        }
        self.advance(place.slot);
    }

    /// Ends a deletion, unless another slot's header still has the key and a write is about to replace it.
    fn settle_deletion(&mut self, place: Place, result: std::result::Result<(), Miss>) {
        let evicting = self.evicting.values().find(|(_, key)| *key == place.key && place.ticket > 0);
        if let Some(&(slot, _)) = evicting.filter(|_| result.is_ok()) {
            self.enqueue(slot, Op::Gone(Place { slot, ..place }));
            return;
        }
        let result = if self.suspects.is_empty() { result } else { Err(Miss::Io) };
        self.settle(place, result.map(|()| None));
    }

    /// Ends an operation that did not reach the device and had memory set aside.
    fn finish_unread(&mut self, place: Place, miss: Miss) {
        self.settle(place, Err(miss));
        self.memory.release(None);
    }

    /// Records the system's answer, to explain missing blocks.
    pub(crate) fn note_answer(&mut self, error: Option<String>) {
        self.stats.errors_in_a_row = if error.is_some() { self.stats.errors_in_a_row + 1 } else { 0 };
        if let Some(what) = error {
            self.stats.errors += 1;
            self.stats.last_error = what;
        }
    }

    /// Records the outcome of a block; returns whether its ticket still needs it. If not, frees the memory of a block
    /// that was read.
    fn settle(&mut self, place: Place, outcome: Outcome) -> bool {
        match self.tickets.settle(place, outcome) {
            Ok(()) => true,
            Err(Ok(Some(buffer))) => {
                self.memory.release(Some(buffer));
                false
            }
            Err(_) => false,
        }
    }

    /// Starts the next operation on the slot.
    fn advance(&mut self, slot: u32) {
        match self.busy.get_mut(&slot).and_then(VecDeque::pop_front) {
            Some(op) => self.ready.push_back(op),
            None => {
                self.busy.remove(&slot);
            }
        }
    }

    /// Releases the memory of collected blocks.
    pub(crate) fn take_back(&mut self, outcomes: &mut Outcomes) {
        for buffer in outcomes.blocks.drain(..).flatten().flatten() {
            self.memory.release(Some(buffer));
        }
    }

    /// Refuses new batches, and settles operations that no thread has begun.
    pub(crate) fn close(&mut self) {
        self.closing = true;
        let mut waiting: Vec<Op> = self.ready.drain(..).collect();
        for (_, behind) in self.busy.drain() {
            waiting.extend(behind);
        }
        for op in waiting {
            match op {
                Op::Write(place, buffer) => {
                    // The header that it would have replaced stays.
                    self.suspects.insert(place.slot);
                    self.settle(place, Err(Miss::Closed));
                    self.memory.release(Some(buffer));
                }
                Op::Read(place, _) => self.finish_unread(place, Miss::Closed),
                Op::Wipe(place) => {
                    self.suspects.insert(place.slot);
                    self.settle(place, Err(Miss::Closed));
                }
                Op::Confirm(place) | Op::Gone(place) => drop(self.settle(place, Err(Miss::Closed))),
                Op::Void(_) => {}
            }
        }
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing
    }

    /// Returns the counters, with the current memory use.
    pub(crate) fn stats(&self) -> Stats {
        Stats {
            misses: self.tickets.misses(),
            is_down: self.hung_until.is_some(),
            pending_bytes: self.memory.used(),
            cached_blocks: self.index.live().into(),
            evicted_blocks: self.index.evicted(),
            ..self.stats.clone()
        }
    }
}

#[cfg(test)]
mod tests;
