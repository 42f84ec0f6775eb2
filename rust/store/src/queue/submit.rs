//! New batches: which blocks are accepted, which are refused, and which already have an outcome.

use super::{Op, Queue};
use crate::buffer::{Buffer, LentRow};
use crate::error::{Error, Result};
use crate::geometry::PAGE;
use crate::header::Owner;
use crate::index::{Key, Reuse};
use crate::miss::Miss;
use crate::ranks::Verdict;
use crate::ticket::{Place, deadline};
use std::time::Instant;

/// Rows that take the blocks of a read; `None` for the store's own memory.
pub(crate) type LentRows = Option<Vec<Box<dyn LentRow>>>;

impl Queue {
    /// Submits a batch of writes. Slots without a buffer are refused, `QueueFull`, and lose their content.
    pub(crate) fn submit_writes(&mut self, slots: &[u32], buffers: Vec<Buffer>, now: Instant) -> Result<u64> {
        self.check_open()?;
        let (accepted, miss) = if self.is_hung(now) { (0, Miss::Timeout) } else { (buffers.len(), Miss::QueueFull) };
        let ticket = self.open_ticket(false, slots.len(), accepted, miss, now);
        let mut buffers = buffers.into_iter();
        for (index, (&slot, buffer)) in slots.iter().zip(buffers.by_ref().take(accepted)).enumerate() {
            let generation = self.take_generation();
            self.enqueue(slot, Op::Write(Place { ticket, index, slot, key: [0; 32], generation, owner: None }, buffer));
        }
        for buffer in buffers {
            self.memory.release(Some(buffer));
        }
        for &slot in &slots[accepted..] {
            self.void(slot);
        }
        Ok(ticket)
    }

    /// Submits a batch of reads. Those beyond the memory limit are refused, `QueueFull`.
    pub(crate) fn submit_reads(&mut self, slots: &[u32], rows: LentRows, now: Instant) -> Result<u64> {
        self.check_open()?;
        let hung = self.is_hung(now);
        let accepted = if hung { 0 } else { self.memory.reserve(slots.len()) };
        let miss = if hung { Miss::Timeout } else { Miss::QueueFull };
        let ticket = self.open_ticket(true, slots.len(), accepted, miss, now);
        let mut rows = rows.map(Vec::into_iter);
        for (index, &slot) in slots[..accepted].iter().enumerate() {
            let row = rows.as_mut().and_then(Iterator::next);
            self.enqueue(slot, Op::Read(Place { ticket, index, slot, key: [0; 32], generation: 0, owner: None }, row));
        }
        Ok(ticket)
    }

    /// Returns whether a put of each key must write, and so needs a buffer: the key has no slot, its block has not been
    /// read since a crash, or its last read failed.
    pub(crate) fn is_new(&self, keys: &[Key]) -> Vec<bool> {
        keys.iter().map(|key| self.index.find(key).is_none_or(|found| self.is_unproven(found))).collect()
    }

    fn is_unproven(&self, found: (u32, u64)) -> bool {
        let (slot, generation) = found;
        let state = self.slots[slot as usize];
        state.holds(generation) && (!state.proves(generation) || self.doubts.has(found))
    }

    /// Submits a batch of puts, each with a buffer if there was memory. Keys that have a slot are only confirmed.
    /// Others evict the least recently used ends of prompts; without a buffer they are refused, `QueueFull`. A block that
    /// would be dropped first itself is refused, too, `Refused`: then the others are its own prompt's beginning.
    pub(crate) fn submit_puts(
        &mut self,
        keys: &[Key],
        owners: Option<&[Owner]>,
        buffers: Vec<Option<Buffer>>,
        now: Instant,
    ) -> Result<u64> {
        self.check_open()?;
        let hung = self.is_hung(now).then_some(Miss::Timeout);
        if let Some(miss) = hung.or_else(|| self.forgetting.map(|_| Miss::Forgotten)) {
            for buffer in buffers.into_iter().flatten() {
                self.memory.release(Some(buffer));
            }
            return Ok(self.open_ticket(false, keys.len(), 0, miss, now));
        }
        let ticket = self.open_ticket(false, keys.len(), keys.len(), Miss::QueueFull, now);
        // The batch must not evict its own keys.
        self.index.touch_all(keys);
        for (index, (&key, buffer)) in keys.iter().zip(buffers).enumerate() {
            let owner = owners.and_then(|owners| owners.get(index)).copied();
            self.put(Place { ticket, index, slot: 0, key, generation: 0, owner }, buffer);
        }
        if owners.is_none() {
            self.index.touch_all(keys);
        }
        Ok(ticket)
    }

    fn put(&mut self, place: Place, buffer: Option<Buffer>) {
        let key = place.key;
        match (self.index.find(&key), buffer) {
            (Some(found), Some(buffer)) if self.is_unproven(found) => {
                let (slot, generation) = (found.0, self.take_generation());
                self.renewing.insert(generation, found.1);
                self.index.renew(slot, &key, generation);
                let owner = self.index.owner(slot);
                self.enqueue(slot, Op::Write(Place { slot, generation, owner, ..place }, buffer));
            }
            (Some(found), None) if self.is_unproven(found) => drop(self.settle(place, Err(Miss::QueueFull))),
            (Some((slot, generation)), spare) => {
                if spare.is_some() {
                    self.memory.release(spare);
                }
                self.confirm(Place { slot, generation, ..place });
            }
            (None, buffer) => self.put_new(place, buffer),
        }
    }

    /// Puts a key that has no slot, if it is not refused. If it replaces a block, it takes that block's slot.
    fn put_new(&mut self, place: Place, buffer: Option<Buffer>) {
        let verdict = self.index.judge(&place.key, place.owner.as_ref());
        let buffer = match (verdict, buffer) {
            (Verdict::Refused, buffer) => {
                if buffer.is_some() {
                    self.memory.release(buffer);
                }
                self.settle(place, Err(Miss::Refused));
                return;
            }
            (_, None) => {
                self.settle(place, Err(Miss::QueueFull));
                return;
            }
            (_, Some(buffer)) => buffer,
        };
        if let Verdict::InPlaceOf(slot) = verdict {
            self.index.yield_first(slot);
        }
        let generation = self.take_generation();
        match self.index.claim(place.key, generation, place.owner) {
            Some((slot, evicted)) => {
                self.evicting.extend(evicted.map(|key| (generation, (slot, key))));
                self.enqueue(slot, Op::Write(Place { slot, generation, ..place }, buffer));
            }
            None => self.finish_unread(place, Miss::QueueFull),
        }
    }

    /// Sets a tenant's quota and drops excess blocks. The ticket, which stays within the store, ends when no later
    /// opener can find them; `None` if nothing was dropped.
    pub(crate) fn set_quota(&mut self, tenant: [u8; 32], most: Option<u32>, now: Instant) -> Result<Option<u64>> {
        self.check_open()?;
        self.index.set_quota(tenant, most);
        let dropped: Vec<_> = std::iter::from_fn(|| self.index.drop_beyond(&tenant)).collect();
        if dropped.is_empty() {
            return Ok(None);
        }
        let count = dropped.len();
        let deadline = deadline(now, self.timeout_base, self.memory.used() + (count * PAGE) as u64);
        let ticket = self.tickets.open(false, count, (count, Miss::QueueFull), deadline, self.answers);
        self.tickets.hide(ticket);
        for (index, (slot, key, generation)) in dropped.into_iter().enumerate() {
            self.enqueue(slot, Op::Wipe(Place { ticket, index, slot, key, generation, owner: None }));
        }
        Ok(Some(ticket))
    }

    /// Submits a batch of reads by key. Keys without a block are misses at once, `Absent`.
    pub(crate) fn submit_gets(&mut self, keys: &[Key], rows: LentRows, now: Instant) -> Result<u64> {
        self.check_open()?;
        if self.is_hung(now) {
            return Ok(self.open_ticket(true, keys.len(), 0, Miss::Timeout, now));
        }
        let ticket = self.open_ticket(true, keys.len(), keys.len(), Miss::QueueFull, now);
        self.index.touch_all(keys);
        let mut rows = rows.map(Vec::into_iter);
        for (index, &key) in keys.iter().enumerate() {
            let row = rows.as_mut().and_then(Iterator::next);
            let (slot, generation) = self.index.find(&key).unwrap_or_default();
            let place = Place { ticket, index, slot, key, generation, owner: None };
            if generation == 0 || self.doubts.hides((slot, generation), now) {
                self.settle(place, Err(Miss::Absent));
            } else if self.memory.reserve(1) == 0 {
                self.settle(place, Err(Miss::QueueFull));
            } else {
                self.tickets.remember(place);
                self.enqueue(slot, Op::Read(place, row));
            }
        }
        Ok(ticket)
    }

    /// Submits a batch of keys to delete: no later call finds them, and when the ticket ends, no later opener does.
    /// It fails while slots are suspect; these are wiped again.
    pub(crate) fn submit_deletes(&mut self, keys: &[Key], now: Instant) -> Result<u64> {
        self.check_open()?;
        let ticket = self.open_ticket(false, keys.len(), keys.len(), Miss::QueueFull, now);
        for (index, &key) in keys.iter().enumerate() {
            let (slot, generation) = self.index.find(&key).unwrap_or_default();
            let place = Place { ticket, index, slot, key, generation, owner: None };
            if self.index.remove(slot, generation, Reuse::First) {
                self.enqueue(slot, Op::Wipe(place));
            } else {
                self.settle_deletion(place, Ok(()));
            }
        }
        let idle: Vec<u32> = self.suspects.iter().copied().filter(|slot| !self.busy.contains_key(slot)).collect();
        for slot in idle {
            self.suspect(slot);
        }
        Ok(ticket)
    }

    fn check_open(&self) -> Result<()> {
        if self.closing { Err(Error::Closed) } else { Ok(()) }
    }

    /// Opens a ticket; blocks beyond `accepted` are refused for the reason `miss`.
    fn open_ticket(&mut self, reads: bool, blocks: usize, accepted: usize, miss: Miss, now: Instant) -> u64 {
        let deadline = deadline(now, self.timeout_base, self.memory.used());
        self.tickets.open(reads, blocks, (accepted, miss), deadline, self.answers)
    }

    /// Whether the device did not answer a whole ticket, and has not answered since. From time to time, if a thread
    /// is idle, a batch is let through as a probe.
    fn is_hung(&mut self, now: Instant) -> bool {
        let Some(again) = self.hung_until else { return false };
        if now < again || self.running >= self.threads {
            return true;
        }
        self.hung_until = Some(now + self.timeout_base);
        false
    }
}
