//! The store: a queue, a device and the threads between them. No thread touches the caller's memory, and no call waits
//! for the device longer than its timeout.
//!
//! Locks: one mutex over the [`Queue`], never held during I/O, hashing or copying of blocks. `work` wakes threads,
//! `done` wakes callers. A thread that hangs in the kernel keeps its own buffer and its share of the device, and is
//! left behind on close.

use crate::buffer::Buffer;
use crate::device::{BlockDevice, read_whole, write_whole};
use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::header::Expected;
use crate::miss::Miss;
use crate::queue::{Job, Queue, Stats};
use crate::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, thread};
use crate::ticket::{Outcomes, Progress};
use std::collections::HashSet;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

#[cfg(test)]
mod schedules;

/// How long a store that is dropped without being closed waits for its threads.
const PARTING: Duration = Duration::from_secs(1);

/// Longest time that close waits.
const LONGEST: Duration = Duration::from_secs(86_400);

/// Options of a store. The device decides where the bytes are.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Slots and their length.
    pub geometry: Geometry,
    /// Digest of everything that decides the bytes; a block of another namespace is a miss.
    pub namespace: [u8; 32],
    /// Threads that read and write, 2 to 16.
    pub threads: usize,
    /// Most bytes of blocks in flight and of results not yet collected, headers included.
    pub memory_bytes: u64,
    /// Least time for an operation; it grows with the bytes in flight.
    pub patience: Duration,
}

impl StoreOptions {
    /// Refuses invalid options.
    ///
    /// # Errors
    /// `InvalidOption`.
    pub fn check(&self) -> Result<()> {
        let stride = self.geometry.stride() as u64;
        let invalid = |what, found, must| Err(Error::InvalidOption { what, found, must });
        if !(2..=16).contains(&self.threads) {
            return invalid("threads", self.threads as u64, "between 2 and 16".to_owned());
        }
        if !(stride..=1 << 50).contains(&self.memory_bytes) {
            return invalid("memory", self.memory_bytes, format!("between one slot of {stride} bytes and 1 PiB"));
        }
        if !(1..=86_400).contains(&self.patience.as_secs()) {
            return invalid("deadline", self.patience.as_secs(), "between 1 and 86400 seconds".to_owned());
        }
        Ok(())
    }
}

/// Slot-addressed swap space over a device.
#[derive(Debug)]
pub struct SlabStore {
    options: StoreOptions,
    shared: Arc<Shared>,
    owner: u32,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
    done: Condvar,
}

struct State {
    queue: Queue,
    /// Taken on close, so that the last thread that uses the device drops it.
    device: Option<Arc<dyn BlockDevice>>,
    threads: usize,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("queue", &self.queue).field("threads", &self.threads).finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A device that panicked did so outside the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SlabStore {
    /// Starts the threads of a store over a device.
    ///
    /// # Errors
    /// `InvalidOption` for options out of range, `Io` if a thread cannot be started.
    pub fn open(device: Arc<dyn BlockDevice>, options: StoreOptions) -> Result<Self> {
        options.check()?;
        let stride = options.geometry.stride();
        let slots = options.geometry.slots;
        let queue = Queue::new(slots, stride, options.memory_bytes, options.patience, first_generation());
        let state = Mutex::new(State { queue, device: Some(device), threads: 0 });
        let shared = Arc::new(Shared { state, work: Condvar::new(), done: Condvar::new() });
        let store = Self { options, shared, owner: std::process::id() };
        for _ in 0..store.options.threads {
            store.start_thread()?;
        }
        Ok(store)
    }

    fn start_thread(&self) -> Result<()> {
        let mut state = self.shared.lock();
        let device = Arc::clone(state.device.as_ref().ok_or(Error::Closed)?);
        let worker = Worker {
            shared: Arc::clone(&self.shared),
            device,
            geometry: self.options.geometry,
            namespace: self.options.namespace,
        };
        let name = "blockyard-store".to_owned();
        thread::Builder::new().name(name).spawn(move || worker.run()).map_err(|source| Error::Io {
            action: "start a thread for",
            path: "the file tier".into(),
            source,
        })?;
        state.threads += 1;
        Ok(())
    }

    /// Slots and their length.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.options.geometry
    }

    /// How the store works.
    #[must_use]
    pub fn options(&self) -> &StoreOptions {
        &self.options
    }

    /// Writes blocks: `rows` holds one payload a slot, back to back. The bytes are copied before this returns.
    ///
    /// Blocks beyond the memory limit are refused (`QueueFull`). A refused, failed or abandoned write leaves a slot
    /// that reads as a miss.
    ///
    /// # Errors
    /// `SlotOutOfRange`, `RepeatedSlot`, `WrongLength`, `Closed`, `Forked`; nothing was submitted.
    pub fn submit_write(&self, slots: &[i64], rows: &[u8]) -> Result<u64> {
        self.check_process()?;
        let payload_bytes = self.options.geometry.payload_bytes;
        let expected = slots.len().saturating_mul(payload_bytes);
        if rows.len() != expected {
            return Err(Error::WrongLength { found: rows.len(), slots: slots.len(), payload_bytes, expected });
        }
        let checked = self.check_slots(slots)?;
        let mut seen = HashSet::with_capacity(slots.len());
        if let Some(&slot) = slots.iter().find(|&&slot| !seen.insert(slot)) {
            return Err(Error::RepeatedSlot { slot });
        }
        let buffers = self.shared.lock().queue.reserve(slots.len());
        let stride = self.options.geometry.stride();
        let filled: Vec<Buffer> = buffers
            .into_iter()
            .zip(rows.chunks_exact(payload_bytes))
            .map(|(buffer, row)| {
                let mut buffer = buffer.unwrap_or_else(|| Buffer::new(stride));
                buffer.fill_payload(row);
                buffer
            })
            .collect();
        let mut state = self.shared.lock();
        let count = filled.len();
        let result = state.queue.submit_writes(&checked, filled, Instant::now());
        if result.is_err() {
            state.queue.unreserve(count);
        }
        drop(state);
        self.shared.work.notify_all();
        result
    }

    /// Reads blocks; a slot may be named more than once. A read sees the last write submitted before it.
    ///
    /// # Errors
    /// `SlotOutOfRange`, `Closed`, `Forked`; nothing was submitted.
    pub fn submit_read(&self, slots: &[i64]) -> Result<u64> {
        self.check_process()?;
        let checked = self.check_slots(slots)?;
        let ticket = self.shared.lock().queue.submit_reads(&checked, Instant::now())?;
        self.shared.work.notify_all();
        Ok(ticket)
    }

    fn check_slots(&self, slots: &[i64]) -> Result<Vec<u32>> {
        let count = self.options.geometry.slots;
        let check = |&slot: &i64| match u32::try_from(slot) {
            Ok(found) if found < count => Ok(found),
            _ => Err(Error::SlotOutOfRange { slot, slots: count }),
        };
        slots.iter().map(check).collect()
    }

    /// A fork has no threads, and its copy of the lock may be held forever.
    fn check_process(&self) -> Result<()> {
        match std::process::id() {
            here if here == self.owner => Ok(()),
            here => Err(Error::Forked { owner: self.owner, here }),
        }
    }

    /// Tickets that finished or expired since the last call and have not been collected. Never waits.
    ///
    /// # Errors
    /// `Forked`.
    pub fn poll(&self) -> Result<Vec<u64>> {
        self.check_process()?;
        Ok(self.shared.lock().queue.tickets.poll(Instant::now()))
    }

    /// Waits until a ticket is finished, its deadline has passed, or `timeout` has.
    ///
    /// # Errors
    /// `UnknownTicket`, `Forked`.
    pub fn wait_for(&self, ticket: u64, timeout: Duration) -> Result<Progress> {
        self.check_process()?;
        let mut state = self.shared.lock();
        let deadline = state.queue.tickets.deadline(ticket)?;
        let until = Instant::now().checked_add(timeout).map_or(deadline, |until| until.min(deadline));
        loop {
            let now = Instant::now();
            let progress = state.queue.tickets.progress(ticket, now)?;
            if progress != Progress::Pending || now >= until {
                return Ok(progress);
            }
            let waited = self.shared.done.wait_timeout(state, until - now);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Closes a ticket. Unfinished blocks become misses (`Timeout`).
    ///
    /// # Errors
    /// `UnknownTicket`, `Forked`.
    pub fn take(&self, ticket: u64) -> Result<Completion> {
        self.check_process()?;
        let outcomes = self.shared.lock().queue.tickets.take(ticket)?;
        Ok(Completion {
            shared: Arc::clone(&self.shared),
            owner: self.owner,
            payload_bytes: self.options.geometry.payload_bytes,
            outcomes,
        })
    }

    /// Whether a ticket reads, and how many blocks it has.
    ///
    /// # Errors
    /// `UnknownTicket`, `Forked`.
    pub fn expects(&self, ticket: u64) -> Result<(bool, usize)> {
        self.check_process()?;
        self.shared.lock().queue.tickets.expects(ticket)
    }

    /// Counters since the store was opened.
    ///
    /// # Errors
    /// `Forked`.
    pub fn stats(&self) -> Result<Stats> {
        self.check_process()?;
        Ok(self.shared.lock().queue.stats())
    }

    /// Drops operations that no thread has started, waits up to `timeout` for the others, and discards the device.
    /// Returns whether all threads ended; threads that hang in the kernel keep their buffers. Open tickets can still be
    /// collected. Closing twice, or in a fork, does nothing.
    #[must_use = "false means that threads were left behind"]
    pub fn close(&self, timeout: Duration) -> bool {
        if self.check_process().is_err() {
            return true;
        }
        let until = Instant::now() + timeout.min(LONGEST);
        let mut state = self.shared.lock();
        state.queue.close();
        self.shared.work.notify_all();
        if let Some(device) = state.device.take() {
            state.threads += self.discard_apart(device);
        }
        while state.threads > 0 {
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else { break };
            state = self.shared.done.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.queue.tickets.abandon();
        self.shared.done.notify_all();
        state.threads == 0
    }

    /// Discards the device in a thread of its own, since removing a file can hang on a frozen disk. Returns the number
    /// of threads started.
    fn discard_apart(&self, device: Arc<dyn BlockDevice>) -> usize {
        let shared = Arc::clone(&self.shared);
        let work = move || {
            device.discard();
            drop(device);
            shared.lock().threads -= 1;
            shared.done.notify_all();
        };
        // Without a thread the closure is dropped, and with it the device, which then cleans up.
        usize::from(thread::Builder::new().name("blockyard-close".to_owned()).spawn(work).is_ok())
    }
}

impl Drop for SlabStore {
    fn drop(&mut self) {
        // Threads that need longer end by themselves; whoever wants to wait calls close.
        let _ = self.close(PARTING);
    }
}

/// The result of one ticket. Blocks that were read count against the memory limit until this is dropped.
#[derive(Debug)]
pub struct Completion {
    shared: Arc<Shared>,
    owner: u32,
    payload_bytes: usize,
    outcomes: Outcomes,
}

impl Completion {
    /// Whether the batch was one of reads.
    #[must_use]
    pub fn is_read(&self) -> bool {
        self.outcomes.reads
    }

    /// One entry a slot, in the order of the batch: the payload that was read, nothing for a write, or the miss.
    #[must_use]
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = std::result::Result<Option<&[u8]>, Miss>> {
        self.outcomes.blocks.iter().map(|block| match block {
            Ok(buffer) => Ok(buffer.as_ref().map(|buffer| buffer.payload(self.payload_bytes))),
            Err(miss) => Err(*miss),
        })
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        // A fork's copy of the lock may be held forever.
        if std::process::id() == self.owner {
            self.shared.lock().queue.take_back(&mut self.outcomes);
        }
    }
}

/// One thread of the store.
struct Worker {
    shared: Arc<Shared>,
    device: Arc<dyn BlockDevice>,
    geometry: Geometry,
    namespace: [u8; 32],
}

impl Worker {
    fn run(self) {
        while let Some(job) = self.next_job() {
            self.carry_out(job);
        }
        let Self { shared, device, .. } = self;
        drop(device);
        shared.lock().threads -= 1;
        shared.done.notify_all();
    }

    /// Waits for work; `None` when the store is closing.
    fn next_job(&self) -> Option<Job> {
        let mut state = self.shared.lock();
        loop {
            if state.queue.is_closing() {
                return None;
            }
            let job = state.queue.next_job();
            self.wake_callers(&mut state);
            if job.is_some() {
                return job;
            }
            state = self.shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn carry_out(&self, job: Job) {
        match job {
            Job::Write { place, generation, mut buffer } => {
                let header = self.expected(place.slot, generation).header(buffer.payload(self.geometry.payload_bytes));
                header.encode(buffer.as_mut_slice());
                let result = write_whole(&*self.device, buffer.as_slice(), self.geometry.offset(place.slot));
                let mut state = self.shared.lock();
                let result = outcome(&mut state.queue, "write", place.slot, result);
                state.queue.finish_write(place, generation, buffer, result);
                self.wake_callers(&mut state);
            }
            Job::Read { place, generation, mut buffer } => {
                let result = read_whole(&*self.device, buffer.as_mut_slice(), self.geometry.offset(place.slot));
                let checked = result.map(|()| self.expected(place.slot, generation).check(buffer.as_slice()));
                let mut state = self.shared.lock();
                let result = outcome(&mut state.queue, "read", place.slot, checked).and_then(|checked| checked);
                state.queue.finish_read(place, buffer, result);
                self.wake_callers(&mut state);
            }
        }
    }

    fn wake_callers(&self, state: &mut State) {
        if state.queue.tickets.take_ended() {
            self.shared.done.notify_all();
        }
    }

    fn expected(&self, slot: u32, generation: u64) -> Expected {
        Expected {
            namespace: self.namespace,
            key: [0; 32],
            slot: slot.into(),
            generation,
            payload_bytes: self.geometry.payload_bytes,
        }
    }
}

/// Turns a system error into a miss and keeps its message.
fn outcome<T>(queue: &mut Queue, what: &str, slot: u32, result: std::io::Result<T>) -> std::result::Result<T, Miss> {
    result.map_err(|error| {
        if error.kind() == std::io::ErrorKind::UnexpectedEof {
            return Miss::Truncated;
        }
        queue.note_error(format!("{what} of slot {slot}: {error}"));
        Miss::Io
    })
}

/// Nanoseconds since 1970, so that no two lives of a slab share a generation.
fn first_generation() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX / 2).max(1)
}
