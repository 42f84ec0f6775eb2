//! Opening a slab whose blocks outlive the process: from its checkpoint, or from the headers of its slots.

use super::{StoreOptions, generation_now};
use crate::buffer::Buffer;
use crate::device::{BlockDevice, read_whole, write_whole};
use crate::geometry::{Geometry, PAGE};
use crate::header::{Header, Superblock};
use crate::index::{Key, Landed, StoredBlock};
use crate::miss::Miss;
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of slots whose headers a thread reads at a time.
const BATCH: u64 = 64;

/// No clock reaches generations from here on: headers with one are ignored.
const FAR: u64 = 1 << 63;

impl StoreOptions {
    /// Reads what a slab holds under this namespace. Writes the superblock if the slab has none, or one with another
    /// geometry.
    ///
    /// Without a superblock it is unknown which blocks were forgotten, so all of them are: the second value is their
    /// number, of any namespace. So are the blocks of another revision.
    pub(super) fn recover(&self, device: &dyn BlockDevice) -> io::Result<(Landed, usize)> {
        let checkpoint = device.take_checkpoint(self.longest_checkpoint());
        let is_of_ours = |page: &Superblock| {
            page.payload_bytes == self.geometry.payload_bytes as u64 && page.revision == self.revision
        };
        let page = read_superblock(device)?;
        let before = page.filter(is_of_ours);
        let hint = before.and_then(|page| self.read_checkpoint(&checkpoint?, page.floor));
        let headers = if hint.is_none() { self.read_headers(device) } else { Vec::new() };
        let newest = headers.iter().map(|(_, header)| header.generation).max().unwrap_or(0);
        let known = hint.as_ref().map_or(newest + 1, |landed| landed.next_generation);
        let next = generation_now().max(known);
        let floor = before.map_or(next, |page| page.floor.clamp(1, FAR));
        if before.is_none_or(|page| page.slots != u64::from(self.geometry.slots)) {
            self.write_superblock(device, floor, self.revision)?;
        }
        let (blocks, older) =
            hint.map_or_else(|| self.newest_of_each_key(&headers, floor), |landed| (landed.blocks, landed.older));
        let lost = if page.is_none() { headers.len() } else { 0 };
        Ok((Landed { floor, next_generation: next.max(floor + 1), blocks, older }, lost))
    }

    /// Writes the superblock; returns once it would survive a loss of power.
    pub(super) fn write_superblock(&self, device: &dyn BlockDevice, floor: u64, revision: [u8; 32]) -> io::Result<()> {
        let page = Superblock::new(self.namespace, self.geometry, floor, revision).page();
        write_whole(device, page.as_slice(), 0)?;
        device.sync()
    }

    /// The intact headers of any namespace.
    fn read_headers(&self, device: &dyn BlockDevice) -> Vec<(u32, Header)> {
        let read = |slot, page: &Buffer, result| header(slot, page, result).ok().map(|header| (slot, header));
        scan(device, self.geometry, self.threads, PAGE, read)
    }

    /// The valid blocks of slots that earlier stores wrote, oldest first; and the slots whose block a newer write of
    /// its key replaces.
    fn newest_of_each_key(&self, headers: &[(u32, Header)], floor: u64) -> (Vec<StoredBlock>, Vec<u32>) {
        let is_ours = |header: &Header| {
            header.namespace == self.namespace && header.payload_bytes == self.geometry.payload_bytes as u64
        };
        let (mut newest, mut older) = (HashMap::<Key, StoredBlock>::new(), Vec::new());
        let mut by_age = Vec::new();
        for &(slot, ref header) in headers.iter().filter(|(_, header)| header.generation >= floor) {
            let block = StoredBlock {
                slot,
                key: header.key,
                generation: header.generation,
                proven: false,
                owner: header.owner,
            };
            // Blocks of other namespaces are never found here, but their slots are reused by age, as ours are.
            if !is_ours(header) {
                by_age.push((header.generation, StoredBlock::none(slot)));
                continue;
            }
            let held = newest.entry(header.key).or_insert(block);
            // An evicted block stays on disk until its slot is written: a key that was put again before that has two.
            if held.slot != slot {
                let last = if held.generation < block.generation { std::mem::replace(held, block) } else { block };
                older.push(last.slot);
            }
        }
        by_age.extend(newest.into_values().map(|block| (block.generation, block)));
        by_age.sort_unstable_by_key(|(generation, _)| *generation);
        (by_age.into_iter().map(|(_, block)| block).collect(), older)
    }
}

/// The superblock, if it is intact. Looks twice: without it, every block counts as forgotten.
pub(super) fn read_superblock(device: &dyn BlockDevice) -> io::Result<Option<Superblock>> {
    for _ in 0..2 {
        let mut page = Buffer::new(PAGE);
        read_whole(device, page.as_mut_slice(), 0)?;
        let found = page.as_slice().first_chunk().and_then(|page| Superblock::decode(page).ok());
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// The header read for a slot, if it is intact and was written for that slot.
pub(super) fn header(slot: u32, page: &Buffer, result: io::Result<()>) -> Result<Header, Miss> {
    result.map_err(|error| if error.kind() == io::ErrorKind::UnexpectedEof { Miss::Truncated } else { Miss::Io })?;
    let header = Header::decode(page.as_slice().first_chunk().ok_or(Miss::Truncated)?)?;
    match () {
        () if header.slot != u64::from(slot) => Err(Miss::Slot),
        () if header.generation == 0 || header.generation >= FAR => Err(Miss::Generation),
        () => Ok(header),
    }
}

/// Reads the first `len` bytes of every slot with `threads` threads; returns the results of `visit`, in no particular
/// order.
pub(super) fn scan<T: Send>(
    device: &dyn BlockDevice,
    geometry: Geometry,
    threads: usize,
    len: usize,
    visit: impl Fn(u32, &Buffer, io::Result<()>) -> Option<T> + Sync,
) -> Vec<T> {
    let next = AtomicU64::new(0);
    let slots = u64::from(geometry.slots);
    let work = || {
        let (mut found, mut buffer) = (Vec::new(), Buffer::new(len));
        loop {
            let first = next.fetch_add(BATCH, Ordering::Relaxed);
            if first >= slots {
                return found;
            }
            for slot in (first..slots.min(first + BATCH)).filter_map(|slot| u32::try_from(slot).ok()) {
                let result = read_whole(device, buffer.as_mut_slice(), geometry.offset(slot));
                found.extend(visit(slot, &buffer, result));
            }
        }
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut found = work();
        found.extend(others.into_iter().flat_map(|other| other.join().unwrap_or_default()));
        found
    })
}
