//! The store: a queue, a device and the threads between them. Threads touch the caller's memory only where it was lent
//! ([`LentRow`]). No call waits for the device longer than its timeout, except for opening a keyed store.
//!
//! Locks: one mutex over the [`Queue`], never held during I/O, hashing or copying of blocks. `work` wakes threads,
//! `done` wakes callers, see `wake`. A thread whose call hangs in the kernel keeps that call's buffers and its share of
//! the device, and is left behind on close.

use crate::buffer::{Buffer, LentRow};
use crate::device::BlockDevice;
use crate::error::{Error, Result};
use crate::geometry::{Geometry, PAGE};
use crate::miss::Miss;
use crate::queue::{LentRows, Queue, QueueOptions, Stats};
use crate::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, thread};
use crate::ticket::{Outcomes, Progress, SHARDS, shard};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::HashSet;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

mod checkpoint;
mod floor;
mod inspect;
mod keyed;
mod quota_file;
mod recover;
#[cfg(test)]
mod schedules;
mod wake;
mod worker;

use floor::Floor;
use quota_file::QuotaFile;
use wake::Sleepers;
use worker::Worker;

pub use floor::revision_name;
pub use inspect::SlabContents;

/// How long dropping a store that was not closed waits for its threads.
const PARTING: Duration = Duration::from_secs(1);

/// Path in messages of a store without a file.
const STORE: &str = "the external store";

/// Maximum time that close waits.
const MAX_WAIT: Duration = Duration::from_secs(86_400);

/// Options of a store. The device decides where the bytes are.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Slots and their length.
    pub geometry: Geometry,
    /// Digest of everything that determines the bytes; a block of another namespace is a miss.
    pub namespace: [u8; 32],
    /// Name of the weights that compute the blocks, see [`revision_name`]; blocks under keys of others are
    /// forgotten.
    pub revision: [u8; 32],
    /// Threads that read and write, 2 to 16.
    pub threads: usize,
    /// Maximum bytes of blocks in flight and of uncollected results, headers included.
    pub memory_bytes: u64,
    /// Timeout of an operation, in addition to the time for the bytes in flight.
    pub timeout_base: Duration,
    /// How long a block under a key is not read again after a failed read.
    pub hidden: Duration,
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
        if !(1..=86_400).contains(&self.timeout_base.as_secs()) {
            return invalid("timeout_base", self.timeout_base.as_secs(), "between 1 and 86400 seconds".to_owned());
        }
        Ok(())
    }

    fn queue(&self, first_generation: u64) -> Queue {
        let Self { geometry, memory_bytes: limit, timeout_base, threads, hidden, .. } = *self;
        let Geometry { slots, .. } = geometry;
        let stride = geometry.stride();
        Queue::new(QueueOptions { slots, stride, limit, timeout_base, threads, hidden }, first_generation)
    }
}

/// Blocks on a device: swap space that is addressed by slot ([`SlabStore::open`]), or blocks under keys that outlive
/// the process ([`SlabStore::open_keyed`]).
#[derive(Debug)]
pub struct SlabStore {
    options: StoreOptions,
    shared: Arc<Shared>,
    owner: u32,
    /// Whether blocks are addressed by key.
    keyed: bool,
    floor: Arc<Floor>,
    quota_file: QuotaFile,
    lost_blocks: usize,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<StoreState>,
    work: Condvar,
    /// By [`shard`].
    done: [Condvar; SHARDS],
    /// A thread has left.
    left: Condvar,
}

struct StoreState {
    queue: Queue,
    /// Taken on close, so that the last thread that uses the device drops it.
    device: Option<Arc<dyn BlockDevice>>,
    threads: usize,
    sleepers: Sleepers,
    /// Readable while ended tickets have not been polled; `None` until it is first requested.
    event: Option<OwnedFd>,
}

impl std::fmt::Debug for StoreState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreState").field("threads", &self.threads).finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, StoreState> {
        // A device that panicked did so outside the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a thread of the store ends.
    fn leave(&self) {
        self.lock().threads -= 1;
        self.left.notify_all();
    }
}

impl SlabStore {
    /// Starts the threads of a store of swap slots over a device.
    ///
    /// # Errors
    /// `InvalidOption` for options out of range, `Io` if a thread cannot be started.
    pub fn open(device: Arc<dyn BlockDevice>, options: StoreOptions) -> Result<Self> {
        options.check()?;
        let queue = options.queue(generation_now());
        Self::start(device, options, queue, false)
    }

    fn start(device: Arc<dyn BlockDevice>, options: StoreOptions, queue: Queue, keyed: bool) -> Result<Self> {
        let sleepers = Sleepers::default();
        let state = Mutex::new(StoreState { queue, device: Some(device), threads: 0, sleepers, event: None });
        let done = std::array::from_fn(|_| Condvar::new());
        let shared = Arc::new(Shared { state, work: Condvar::new(), done, left: Condvar::new() });
        let (floor, owner) = (Arc::new(Floor::new(options.revision)), std::process::id());
        let quota_file = QuotaFile::default();
        let store = Self { options, shared, owner, keyed, floor, quota_file, lost_blocks: 0 };
        for _ in 0..store.options.threads {
            store.start_thread()?;
        }
        Ok(store)
    }

    fn start_thread(&self) -> Result<()> {
        let Self { options: StoreOptions { geometry, namespace, .. }, ref shared, .. } = *self;
        let mut state = self.shared.lock();
        let device = Arc::clone(state.device.as_ref().ok_or(Error::Closed)?);
        let worker = Worker { shared: Arc::clone(shared), device, geometry, namespace };
        let name = "blockyard-store".to_owned();
        thread::Builder::new().name(name).spawn(move || worker.run()).map_err(|source| Error::Io {
            action: "start a thread for",
            path: STORE.into(),
            source,
        })?;
        state.threads += 1;
        Ok(())
    }

    /// Whether blocks are addressed by key, and not by slot.
    #[must_use]
    pub fn is_keyed(&self) -> bool {
        self.keyed
    }

    /// Whether [`SlabStore::close`] was called. In a fork it does not know.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.check_process().is_ok() && self.shared.lock().device.is_none()
    }

    /// Blocks of any namespace that the slab held when it was opened, and that count as forgotten since its first page
    /// is lost.
    #[must_use]
    pub fn lost_blocks(&self) -> usize {
        self.lost_blocks
    }

    /// Slots and their length.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.options.geometry
    }

    /// Blocks that can be in flight and in uncollected results; further ones are refused, `QueueFull`.
    #[must_use]
    pub fn max_blocks_in_flight(&self) -> u64 {
        self.options.memory_bytes / self.options.geometry.stride() as u64
    }

    /// Slots that can be addressed by number: none if blocks are addressed by key.
    #[must_use]
    pub fn swap_slots(&self) -> u32 {
        if self.keyed { 0 } else { self.options.geometry.slots }
    }

    /// Writes blocks: `rows` holds one payload per slot, back to back. The bytes are copied before this returns.
    ///
    /// Blocks beyond the memory limit are refused (`QueueFull`). A refused, failed or abandoned write leaves a slot
    /// that reads as a miss.
    ///
    /// # Errors
    /// `SlotOutOfRange`, `RepeatedSlot`, `WrongLength`, `Closed`, `Forked`; nothing was submitted.
    pub fn submit_write(&self, slots: &[i64], rows: &[u8]) -> Result<u64> {
        self.check_process()?;
        let payload_bytes = self.options.geometry.payload_bytes;
        self.check_length(slots.len(), rows.len())?;
        let checked = self.check_written(slots)?;
        let buffers = self.shared.lock().queue.memory.reserve_buffers(slots.len());
        let rows = rows.chunks_exact(payload_bytes);
        let filled: Vec<Buffer> = buffers.into_iter().zip(rows).map(|(buffer, row)| self.filled(buffer, row)).collect();
        self.submit_buffers(self.shared.lock(), &checked, filled)
    }

    /// Writes blocks straight from the caller's memory, one row per slot; otherwise like [`SlabStore::submit_write`].
    ///
    /// The store owns a row until its block has an outcome; after `Timeout` or `Closed`, until the hanging thread has
    /// dropped it. A row whose bytes change in the meantime is a miss when it is read.
    ///
    /// # Errors
    /// As [`SlabStore::submit_write`].
    pub fn lend_write(&self, slots: &[i64], rows: Vec<Box<dyn LentRow>>) -> Result<u64> {
        self.check_process()?;
        self.check_rows(slots.len(), &rows)?;
        let checked = self.check_written(slots)?;
        let mut state = self.shared.lock();
        let accepted = state.queue.memory.reserve(slots.len());
        let buffers = rows.into_iter().take(accepted).map(|row| state.queue.memory.buffer(Some(row))).collect();
        self.submit_buffers(state, &checked, buffers)
    }

    fn submit_buffers(
        &self,
        mut state: MutexGuard<'_, StoreState>,
        slots: &[u32],
        buffers: Vec<Buffer>,
    ) -> Result<u64> {
        let count = buffers.len();
        let result = state.queue.submit_writes(slots, buffers, Instant::now());
        if result.is_err() {
            state.queue.memory.unreserve(count);
        }
        self.shared.wake(&mut state);
        result
    }

    fn check_length(&self, slots: usize, found: usize) -> Result<()> {
        let payload_bytes = self.options.geometry.payload_bytes;
        let expected = slots.saturating_mul(payload_bytes);
        if found == expected { Ok(()) } else { Err(Error::WrongLength { found, slots, payload_bytes, expected }) }
    }

    /// Fails unless the rows are whole pages, one per slot.
    fn check_rows(&self, slots: usize, rows: &[Box<dyn LentRow>]) -> Result<()> {
        let width = self.options.geometry.payload_bytes;
        let fits = |bytes: &[u8]| bytes.len() == width && width % PAGE == 0 && bytes.as_ptr().addr() % PAGE == 0;
        let found = rows.iter().map(|row| row.bytes()).filter(|bytes| fits(bytes)).count();
        self.check_length(slots, if found == rows.len() { found * width } else { 0 })
    }

    fn check_written(&self, slots: &[i64]) -> Result<Vec<u32>> {
        let checked = self.check_slots(slots)?;
        let mut seen = HashSet::with_capacity(slots.len());
        match slots.iter().find(|&&slot| !seen.insert(slot)) {
            Some(&slot) => Err(Error::RepeatedSlot { slot }),
            None => Ok(checked),
        }
    }

    /// Returns a buffer that holds a payload: the given one, or a new one.
    fn filled(&self, buffer: Option<Buffer>, row: &[u8]) -> Buffer {
        let mut buffer = buffer.unwrap_or_else(|| Buffer::new(self.options.geometry.stride()));
        buffer.fill_payload(row);
        buffer
    }

    /// Reads blocks; a slot may be named more than once. A read sees the last write submitted before it.
    ///
    /// # Errors
    /// `SlotOutOfRange`, `Closed`, `Forked`; nothing was submitted.
    pub fn submit_read(&self, slots: &[i64]) -> Result<u64> {
        self.check_process()?;
        let checked = self.check_slots(slots)?;
        self.submit_reads(&checked, None)
    }

    /// Reads blocks straight into the caller's memory, one row per slot; otherwise like [`SlabStore::submit_read`]. A
    /// row's content is valid only if its block was read; its ownership is as in [`SlabStore::lend_write`].
    ///
    /// # Errors
    /// As [`SlabStore::submit_read`], and `WrongLength`.
    pub fn lend_read(&self, slots: &[i64], rows: Vec<Box<dyn LentRow>>) -> Result<u64> {
        self.check_process()?;
        self.check_rows(slots.len(), &rows)?;
        let checked = self.check_slots(slots)?;
        self.submit_reads(&checked, Some(rows))
    }

    fn submit_reads(&self, slots: &[u32], rows: LentRows) -> Result<u64> {
        let mut state = self.shared.lock();
        let result = state.queue.submit_reads(slots, rows, Instant::now());
        self.shared.wake(&mut state);
        result
    }

    fn check_slots(&self, slots: &[i64]) -> Result<Vec<u32>> {
        let count = self.swap_slots();
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
        let mut state = self.shared.lock();
        if let Some(event) = &state.event {
            // Nothing to read if no ticket has ended.
            let _ = rustix::io::read(event, &mut [0; 8]);
        }
        Ok(state.queue.tickets.poll(Instant::now()))
    }

    /// A file descriptor that becomes readable when a ticket ends, and stays so until [`SlabStore::poll`] is called.
    /// It belongs to the store. Deadlines do not make it readable.
    ///
    /// # Errors
    /// `Io` if the process has no descriptors left, `Forked`.
    pub fn event_fd(&self) -> Result<i32> {
        self.check_process()?;
        let mut state = self.shared.lock();
        if let Some(event) = &state.event {
            return Ok(event.as_raw_fd());
        }
        // Tickets may have ended already.
        let made = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| Error::Io {
            action: "make an eventfd for",
            path: STORE.into(),
            source: errno.into(),
        })?;
        Ok(state.event.insert(made).as_raw_fd())
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
            let waited = self.shared.done[shard(ticket)].wait_timeout(state, until - now);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Closes a ticket. Unfinished blocks become misses (`Timeout`).
    ///
    /// # Errors
    /// `UnknownTicket`, `Forked`.
    pub fn take(&self, ticket: u64) -> Result<Completion> {
        self.check_process()?;
        let mut state = self.shared.lock();
        let outcomes = state.queue.take(ticket, Instant::now())?;
        // Keys that missed the deadline are wiped.
        self.shared.wake(&mut state);
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
        let until = Instant::now() + timeout.min(MAX_WAIT);
        let mut state = self.shared.lock();
        state.queue.close();
        self.shared.work.notify_all();
        let mut device = state.device.take();
        if !self.keyed {
            state.threads += device.take().map_or(0, |device| self.discard_apart(device, None));
        }
        state = self.wait_for_threads(state, until);
        if let Some(device) = device {
            // Which keys have landed is known only when the threads have ended.
            let landed = state.queue.landed().filter(|_| state.threads == 0);
            let checkpoint = landed.map(|landed| self.options.checkpoint(&landed));
            state.threads += self.discard_apart(device, checkpoint);
            state = self.wait_for_threads(state, until);
        }
        state.queue.tickets.abandon();
        let all_left = state.threads == 0;
        self.shared.wake(&mut state);
        all_left
    }

    /// Waits until all threads have ended, or until a point in time.
    fn wait_for_threads<'a>(
        &'a self,
        mut state: MutexGuard<'a, StoreState>,
        until: Instant,
    ) -> MutexGuard<'a, StoreState> {
        while state.threads > 0 {
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else { break };
            state = self.shared.left.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state
    }

    /// Syncs or discards the device in a separate thread, since either can hang on a frozen disk. Returns the number
    /// of threads started.
    fn discard_apart(&self, device: Arc<dyn BlockDevice>, checkpoint: Option<Vec<u8>>) -> usize {
        let (shared, is_kept) = (Arc::clone(&self.shared), self.keyed);
        let work = move || {
            let synced = is_kept && device.sync().is_ok();
            if let Some(bytes) = checkpoint.filter(|_| synced) {
                device.save_checkpoint(&bytes);
            }
            device.discard();
            drop(device);
            shared.leave();
        };
        // Without a thread the closure is dropped, and with it the device, which then cleans up.
        usize::from(thread::Builder::new().name("blockyard-close".to_owned()).spawn(work).is_ok())
    }
}

impl Drop for SlabStore {
    fn drop(&mut self) {
        // Slower threads end by themselves; call `close` to wait for them.
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
    /// Whether the batch was a read.
    #[must_use]
    pub fn is_read(&self) -> bool {
        self.outcomes.reads
    }

    /// One entry per slot, in the order of the batch: the payload read, `None` for a write, or the miss.
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

/// Nanoseconds since 1970, so that no two openings of a slab share a generation, and a generation tells a block's age.
fn generation_now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX / 2).max(1)
}
