//! Blocks under keys: a store that evicts the least recently used ends of prompts, and finds its blocks again when reopened.

use super::{MAX_WAIT, STORE, SlabStore, StoreOptions, StoreState, generation_now};
use crate::buffer::{Buffer, LentRow};
use crate::device::BlockDevice;
use crate::error::{Error, Result};
use crate::header::Owner;
use crate::index::Key;
use crate::queue::Queue;
use crate::sync::{Arc, MutexGuard};
use std::io;
use std::time::Instant;

impl SlabStore {
    /// Opens a store of blocks under keys, with the blocks of the same namespace that the device already holds.
    ///
    /// Reads the checkpoint, or without one the header of each slot.
    ///
    /// # Errors
    /// `InvalidOption` for options out of range, `Io` if the superblock cannot be read or written, or a thread cannot
    /// be started.
    pub fn open_keyed(device: Arc<dyn BlockDevice>, options: StoreOptions) -> Result<Self> {
        options.check()?;
        let (landed, lost) = options.recover(&*device).map_err(failed("recover the blocks of"))?;
        let mut queue = options.queue(landed.next_generation);
        queue.restore(&landed);
        let quotas = options.kept_quotas(&*device);
        let mut store = Self::start(device, options, queue, true)?;
        store.lost_blocks = lost;
        for (tenant, most) in quotas {
            // Blocks beyond a quota are there only if the process that set it was killed before they were wiped. If the
            // device refuses now, the quota holds all the same.
            let _ = store.enforce(tenant, Some(most));
        }
        Ok(store)
    }

    /// Stores blocks under their keys: `rows` holds one payload per key, back to back. The bytes are copied before
    /// this returns. A key that already has a block keeps it; equal keys must mean equal bytes.
    ///
    /// Other keys are evicted: the least recently used one that no stored block names as its parent. If that is the new
    /// block itself, since the store or its owner's quota holds only what comes before it, it is refused (`Refused`), see
    /// [`SlabStore::set_quota`]. Blocks beyond the memory limit are refused, too (`QueueFull`). `owners` has one entry per
    /// key; without it the blocks count towards no quota, and the last keys of a batch are evicted first.
    ///
    /// # Errors
    /// `WrongLength`, `WrongOwners`, `NotKeyed`, `Closed`, `Forked`; nothing was submitted.
    pub fn submit_put(&self, keys: &[Key], rows: &[u8], owners: Option<&[Owner]>) -> Result<u64> {
        self.check_keyed()?;
        check_owners(keys, owners)?;
        let payload_bytes = self.options.geometry.payload_bytes;
        self.check_length(keys.len(), rows.len())?;
        let mut rows: Vec<Row> = rows.chunks_exact(payload_bytes).map(Row::Unread).collect();
        let mut state = self.shared.lock();
        loop {
            // Between two rounds, other callers may have removed existing keys.
            let is_new = state.queue.is_new(keys);
            let missing: Vec<usize> = (0..keys.len()).filter(|&i| is_new[i] && rows[i].is_unread()).collect();
            if missing.is_empty() {
                break;
            }
            let mut spare = state.queue.memory.reserve_buffers(missing.len()).into_iter();
            drop(state);
            for i in missing {
                rows[i].read(|row| spare.next().map(|buffer| self.filled(buffer, row)));
            }
            state = self.shared.lock();
        }
        let buffers = rows.into_iter().map(Row::into_buffer).collect();
        self.submit_puts(state, keys, owners, buffers)
    }

    /// Stores blocks straight from the caller's memory, one row per key; otherwise like [`SlabStore::submit_put`]. The
    /// store owns rows as in [`SlabStore::lend_write`].
    ///
    /// # Errors
    /// As [`SlabStore::submit_put`].
    pub fn lend_put(&self, keys: &[Key], rows: Vec<Box<dyn LentRow>>, owners: Option<&[Owner]>) -> Result<u64> {
        self.check_keyed()?;
        check_owners(keys, owners)?;
        self.check_rows(keys.len(), &rows)?;
        let mut state = self.shared.lock();
        let is_new = state.queue.is_new(keys);
        let around = |(is_new, row)| {
            (is_new && state.queue.memory.reserve(1) == 1).then(|| state.queue.memory.buffer(Some(row)))
        };
        let buffers = is_new.into_iter().zip(rows).map(around).collect();
        self.submit_puts(state, keys, owners, buffers)
    }

    fn submit_puts(
        &self,
        mut state: MutexGuard<'_, StoreState>,
        keys: &[Key],
        owners: Option<&[Owner]>,
        buffers: Vec<Option<Buffer>>,
    ) -> Result<u64> {
        let reserved = buffers.iter().flatten().count();
        state.queue.count_from(generation_now());
        let result = state.queue.submit_puts(keys, owners, buffers, Instant::now());
        if result.is_err() {
            state.queue.memory.unreserve(reserved);
        }
        self.shared.wake(&mut state);
        result
    }

    /// Reads blocks by key; a key may be named more than once. A key without a block is a miss (`Absent`), and so is
    /// one whose read failed a moment ago. A damaged block is deleted once a second look has found the same bytes.
    ///
    /// # Errors
    /// `NotKeyed`, `Closed`, `Forked`; nothing was submitted.
    pub fn submit_get(&self, keys: &[Key]) -> Result<u64> {
        self.submit_keys(|queue, now| queue.submit_gets(keys, None, now))
    }

    /// Reads blocks by key straight into the caller's memory, one row per key; otherwise like
    /// [`SlabStore::submit_get`]. Rows are as in [`SlabStore::lend_read`].
    ///
    /// # Errors
    /// As [`SlabStore::submit_get`], and `WrongLength`.
    pub fn lend_get(&self, keys: &[Key], rows: Vec<Box<dyn LentRow>>) -> Result<u64> {
        self.check_rows(keys.len(), &rows)?;
        self.submit_keys(|queue, now| queue.submit_gets(keys, Some(rows), now))
    }

    /// Deletes keys. No later call finds them; once the ticket has ended without misses, no later opener does.
    ///
    /// # Errors
    /// `NotKeyed`, `Closed`, `Forked`; nothing was submitted.
    pub fn submit_delete(&self, keys: &[Key]) -> Result<u64> {
        self.submit_keys(|queue, now| queue.submit_deletes(keys, now))
    }

    /// For each key, whether it has a block whose write has landed and whose last read did not fail. Nothing is read:
    /// only a get proves the bytes.
    ///
    /// # Errors
    /// `NotKeyed`, `Forked`.
    pub fn contains(&self, keys: &[Key]) -> Result<Vec<bool>> {
        self.check_keyed()?;
        Ok(self.shared.lock().queue.contains(keys, Instant::now()))
    }

    /// For each key, whether a get is sure to be a miss: the store has no block under it, and none is being written, or
    /// its read failed a moment ago.
    ///
    /// # Errors
    /// `NotKeyed`, `Forked`.
    pub fn lacks(&self, keys: &[Key]) -> Result<Vec<bool>> {
        self.check_keyed()?;
        Ok(self.shared.lock().queue.lacks(keys, Instant::now()))
    }

    /// Forgets every key: for this store at once, for later openers when it returns. Takes the same time for any
    /// number of keys, and waits for the device. Blocks being written are forgotten, too.
    ///
    /// With a revision, only blocks that its weights compute are valid from now on; nothing is forgotten if it is the
    /// store's revision already.
    ///
    /// # Errors
    /// `Io` if the superblock cannot be written in time: a later opener may then find the keys again. `NotKeyed`,
    /// `Closed`, `Forked`.
    pub fn forget(&self, revision: Option<[u8; 32]>) -> Result<()> {
        self.check_keyed()?;
        let raise = || {
            let mut state = self.shared.lock();
            let device = Arc::clone(state.device.as_ref().ok_or(Error::Closed)?);
            let (floor, counted) = state.queue.forget();
            drop(state);
            drop(counted);
            Ok((device, floor))
        };
        let options = self.options.clone();
        let shared = Arc::clone(&self.shared);
        let write = move |device: &dyn BlockDevice, floor, revision| {
            options.write_superblock(device, floor, revision)?;
            shared.lock().queue.has_forgotten(floor);
            Ok(())
        };
        self.floor.raise(revision, self.options.timeout_base, raise, write)
    }

    /// Limits the blocks of one tenant, for this store and later openers with its namespace, and drops excess blocks at
    /// once: the least recently used of those that no stored block names as its parent. All puts obey it. `None` means
    /// no limit.
    ///
    /// Waits until later openers find the quota and none of the dropped blocks.
    ///
    /// # Errors
    /// `Io` if the device did not confirm that in time; the quota still holds in this store. `NotKeyed`, `Closed`,
    /// `Forked`: nothing was changed.
    pub fn set_quota(&self, tenant: [u8; 32], most: Option<u32>) -> Result<()> {
        self.check_keyed()?;
        let device = self.shared.lock().device.as_ref().map(Arc::clone).ok_or(Error::Closed)?;
        let dropped = self.enforce(tenant, most);
        self.quota_file.write(&self.options, &self.shared, device, self.options.timeout_base)?;
        dropped
    }

    fn enforce(&self, tenant: [u8; 32], most: Option<u32>) -> Result<()> {
        let mut state = self.shared.lock();
        let result = state.queue.set_quota(tenant, most, Instant::now());
        self.shared.wake(&mut state);
        drop(state);
        let Some(ticket) = result? else { return Ok(()) };
        self.wait_for(ticket, MAX_WAIT)?;
        let done = self.take(ticket)?;
        match done.blocks().filter(std::result::Result::is_err).count() {
            0 => Ok(()),
            left => {
                let what = format!("{left} of {} blocks may reappear when the slab is reopened", done.blocks().len());
                Err(failed("drop what is beyond the quota from")(io::Error::other(what)))
            }
        }
    }

    /// Returns how many blocks count towards a tenant's quota, including those in flight, and the quota; `None`
    /// without one.
    ///
    /// # Errors
    /// `NotKeyed`, `Forked`.
    pub fn quota(&self, tenant: [u8; 32]) -> Result<Option<(u32, u32)>> {
        self.check_keyed()?;
        Ok(self.shared.lock().queue.quota(&tenant))
    }

    /// Checks the counts of all tenants; for tests.
    ///
    /// # Errors
    /// What is wrong, in words.
    #[doc(hidden)]
    pub fn check(&self) -> std::result::Result<(), String> {
        self.shared.lock().queue.check()
    }

    fn submit_keys(&self, submit: impl FnOnce(&mut Queue, Instant) -> Result<u64>) -> Result<u64> {
        self.check_keyed()?;
        let mut state = self.shared.lock();
        let result = submit(&mut state.queue, Instant::now());
        self.shared.wake(&mut state);
        result
    }

    fn check_keyed(&self) -> Result<()> {
        self.check_process()?;
        if self.keyed { Ok(()) } else { Err(Error::NotKeyed) }
    }
}

fn check_owners(keys: &[Key], owners: Option<&[Owner]>) -> Result<()> {
    match owners {
        Some(owners) if owners.len() != keys.len() => Err(Error::WrongOwners { found: owners.len(), keys: keys.len() }),
        _ => Ok(()),
    }
}

/// A payload on its way into a buffer.
enum Row<'a> {
    Unread(&'a [u8]),
    Copied(Buffer),
    /// There was no memory left.
    Refused,
}

impl<'a> Row<'a> {
    fn is_unread(&self) -> bool {
        matches!(self, Self::Unread(_))
    }

    fn read(&mut self, copy: impl FnOnce(&'a [u8]) -> Option<Buffer>) {
        if let Self::Unread(row) = self {
            *self = copy(row).map_or(Self::Refused, Self::Copied);
        }
    }

    fn into_buffer(self) -> Option<Buffer> {
        match self {
            Self::Copied(buffer) => Some(buffer),
            Self::Unread(_) | Self::Refused => None,
        }
    }
}

pub(super) fn failed(action: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Io { action, path: STORE.into(), source }
}
