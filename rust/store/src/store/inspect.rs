//! Inspects a slab: what its slots hold, and which blocks are damaged. Wipes slots.

use super::recover::{header, read_superblock, scan};
use crate::buffer::Buffer;
use crate::device::{read_whole, write_whole};
use crate::error::{Error, Result};
use crate::geometry::{Geometry, PAGE};
use crate::header::{Header, Superblock};
use crate::index::Key;
use crate::miss::Miss;
use crate::slab::{Access, PlainFile};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Number of reading threads.
const THREADS: usize = 4;

/// The contents of a slab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlabContents {
    /// The file.
    pub path: PathBuf,
    /// Slots and their length, as the superblock says.
    pub geometry: Geometry,
    /// Slots whose block a store can find, with its header; in the order of the slots.
    pub blocks: Vec<(u32, Header)>,
    /// Slots without a block.
    pub empty: u64,
    /// Blocks that `forget` has made invalid.
    pub forgotten: u64,
    /// Blocks that a newer write of their key replaces.
    pub replaced: u64,
    /// Slots whose block no read would return: the generation if the header is intact, else 0; and the reason. In the
    /// order of the slots.
    pub damaged: Vec<(u32, u64, Miss)>,
}

impl SlabContents {
    /// Reads the headers of a slab, even while a store has it open. With `payloads` it reads every block of a slab that
    /// no store has open.
    ///
    /// # Errors
    /// `Io`, `SymbolicLink`, `NotPrivate`, or `NotASlab` without an intact superblock; `InUse` with `payloads`.
    pub fn read(path: &Path, payloads: bool) -> Result<Self> {
        let file = PlainFile::open(path, if payloads { Access::Check } else { Access::Look })?;
        let (geometry, page) = superblock_of(&file)?;
        let visit = |slot, block: &Buffer, result| Some((slot, look(slot, block, result, geometry)));
        let mut slots = scan(&file, geometry, THREADS, if payloads { geometry.stride() } else { PAGE }, visit);
        slots.sort_unstable_by_key(|(slot, _)| *slot);
        Ok(Self::sum_up(file.path(), geometry, &page, slots))
    }

    /// Wipes slots of a slab that no store has open, unless a slot's block was written after the caller saw it; and
    /// drops its checkpoint. Returns how many were wiped.
    ///
    /// Each slot comes with the generation that the caller saw, 0 for a damaged header.
    ///
    /// # Errors
    /// As [`SlabContents::read`], `InUse`, and `SlotOutOfRange` before anything is wiped.
    pub fn wipe(path: &Path, slots: &[(u32, u64)]) -> Result<u64> {
        let file = PlainFile::open(path, Access::Repair)?;
        let failed = |source| Error::Io { action: "wipe a slot of", path: file.path().to_owned(), source };
        let (geometry, _) = superblock_of(&file)?;
        if let Some((slot, _)) = slots.iter().find(|(slot, _)| *slot >= geometry.slots) {
            return Err(Error::SlotOutOfRange { slot: i64::from(*slot), slots: geometry.slots });
        }
        file.drop_checkpoint().map_err(failed)?;
        let (zeros, mut page, mut wiped) = (Buffer::new(PAGE), Buffer::new(PAGE), 0);
        for &(slot, seen) in slots {
            let result = read_whole(&file, page.as_mut_slice(), geometry.offset(slot));
            let held = match look(slot, &page, result, geometry) {
                Ok(header) => header.generation,
                Err((_, Miss::Empty)) => continue,
                Err((generation, _)) => generation,
            };
            if held == seen {
                write_whole(&file, zeros.as_slice(), geometry.offset(slot)).map_err(failed)?;
                wiped += 1;
            }
        }
        Ok(wiped)
    }

    /// Refuses to open the keyed slab of a directory with other slots, if that would drop blocks. What cannot be read
    /// here is left to the opener.
    ///
    /// # Errors
    /// `WouldDrop`.
    pub fn refuse_to_drop(directory: &Path, wanted: Geometry) -> Result<()> {
        let Ok(file) = PlainFile::open(directory, Access::Look) else { return Ok(()) };
        let Ok((held, page)) = superblock_of(&file) else { return Ok(()) };
        // Slots of the same length keep their places.
        let kept = if held.payload_bytes == wanted.payload_bytes { wanted.slots } else { 0 };
        if kept >= held.slots {
            return Ok(());
        }
        let is_block = |header: &Header| header.generation >= page.floor;
        let visit = |slot, block: &Buffer, result| {
            (slot >= kept).then(|| look(slot, block, result, held).is_ok_and(|header| is_block(&header)))
        };
        let found = scan(&file, held, THREADS, PAGE, visit);
        match found.into_iter().filter(|&is_dropped| is_dropped).count() as u64 {
            0 => Ok(()),
            blocks => Err(Error::WouldDrop {
                path: file.path().to_owned(),
                slots: held.slots,
                payload_bytes: held.payload_bytes,
                wanted_slots: wanted.slots,
                wanted_bytes: wanted.payload_bytes,
                blocks,
            }),
        }
    }

    fn sum_up(path: &Path, geometry: Geometry, page: &Superblock, slots: Vec<(u32, Slot)>) -> Self {
        let mut found = Self {
            path: path.to_owned(),
            geometry,
            blocks: Vec::new(),
            empty: 0,
            forgotten: 0,
            replaced: 0,
            damaged: Vec::new(),
        };
        let newest = newest_of_each_key(&slots);
        for (slot, result) in slots {
            match result {
                Ok(header) if header.generation < page.floor => found.forgotten += 1,
                Ok(header) if is_replaced(&header, &newest) => found.replaced += 1,
                Ok(header) => found.blocks.push((slot, header)),
                Err((_, Miss::Empty)) => found.empty += 1,
                Err((generation, miss)) => found.damaged.push((slot, generation, miss)),
            }
        }
        found
    }
}

/// The geometry of a slab and its superblock. Fails with `NotASlab` if they are damaged.
fn superblock_of(file: &PlainFile) -> Result<(Geometry, Superblock)> {
    let failed = |source| Error::Io { action: "read the superblock of", path: file.path().to_owned(), source };
    let not_a_slab = || Error::NotASlab { path: file.path().to_owned() };
    let page = read_superblock(file).map_err(failed)?.ok_or_else(not_a_slab)?;
    let geometry = usize::try_from(page.payload_bytes).ok().zip(u32::try_from(page.slots).ok());
    let geometry = geometry.map(|(payload_bytes, slots)| Geometry { payload_bytes, slots });
    let makes_sense = |found: &Geometry| {
        Geometry::fit(found.payload_bytes, None, Some(found.slots.into())).is_ok_and(|fit| fit == *found)
            && found.stride() as u64 == page.stride
    };
    Ok((geometry.filter(makes_sense).ok_or_else(not_a_slab)?, page))
}

/// The content of a slot: its header, or the generation of a damaged block (0 if the header is damaged) and what is wrong.
type Slot = std::result::Result<Header, (u64, Miss)>;

/// Returns the content of a slot; checks its payload if it was read.
fn look(slot: u32, block: &Buffer, result: std::io::Result<()>, geometry: Geometry) -> Slot {
    let was_read = result.is_ok();
    let found = header(slot, block, result);
    if was_read && found == Err(Miss::Magic) && block.as_slice()[..PAGE].iter().all(|&byte| byte == 0) {
        return Err((0, Miss::Empty));
    }
    let header = found.map_err(|miss| (0, miss))?;
    if header.payload_bytes != geometry.payload_bytes as u64 {
        return Err((header.generation, Miss::Length));
    }
    match block.as_slice().get(PAGE..PAGE + geometry.payload_bytes) {
        Some(payload) if !header.is_of(payload) => Err((header.generation, Miss::PayloadChecksum)),
        _ => Ok(header),
    }
}

/// The last generation of each key. Slots of swap space have no keys.
fn newest_of_each_key(slots: &[(u32, Slot)]) -> HashMap<(Key, Key), u64> {
    let mut newest = HashMap::new();
    for header in slots.iter().filter_map(|(_, found)| found.as_ref().ok()).filter(|header| header.key != [0; 32]) {
        let last = newest.entry((header.namespace, header.key)).or_insert(header.generation);
        *last = header.generation.max(*last);
    }
    newest
}

fn is_replaced(header: &Header, newest: &HashMap<(Key, Key), u64>) -> bool {
    newest.get(&(header.namespace, header.key)).is_some_and(|&last| last > header.generation)
}
