//! Inspects a slab: what its slots hold, and which blocks are damaged.

use super::recover::{header, read_superblock, scan};
use crate::buffer::Buffer;
use crate::device::write_whole;
use crate::error::{Error, Result};
use crate::geometry::{Geometry, PAGE};
use crate::header::{Header, Superblock};
use crate::miss::Miss;
use crate::slab::{Access, PlainFile};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// Number of reading threads.
const THREADS: usize = 4;

/// The contents of a slab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlabReport {
    /// The file.
    pub path: PathBuf,
    /// Slots and their length, as the superblock says.
    pub geometry: Geometry,
    /// Process that wrote the superblock.
    pub pid: u32,
    /// Number of valid blocks, by namespace.
    pub blocks: BTreeMap<[u8; 32], u64>,
    /// Slots without a block.
    pub empty: u64,
    /// Blocks that `forget` has made invalid.
    pub forgotten: u64,
    /// Blocks that a newer write of their key replaces.
    pub replaced: u64,
    /// Slots whose block no read would return, with the reason; in the order of the slots.
    pub damaged: Vec<(u32, Miss)>,
    /// Damaged slots that were wiped.
    pub wiped: u64,
}

impl SlabReport {
    /// Reads the headers of a slab, even while a store has it open.
    ///
    /// # Errors
    /// `Io`, `SymbolicLink`, `NotPrivate`, or `NotASlab` without an intact superblock.
    pub fn inspect(path: &Path) -> Result<Self> {
        Self::read(path, Access::Look, |_| PAGE)
    }

    /// Reads every block of a slab that no store has open. With `repair` it wipes damaged slots.
    ///
    /// # Errors
    /// As [`SlabReport::inspect`], and `InUse`.
    pub fn check(path: &Path, repair: bool) -> Result<Self> {
        let access = if repair { Access::Repair } else { Access::Check };
        Self::read(path, access, |geometry| geometry.stride())
    }

    fn read(path: &Path, access: Access, len: impl FnOnce(Geometry) -> usize) -> Result<Self> {
        let file = PlainFile::open(path, access)?;
        let failed = |action| {
            let path = file.path().to_owned();
            move |source| Error::Io { action, path, source }
        };
        let (geometry, page) = superblock_of(&file)?;
        let visit = |slot, block: &Buffer, result| Some((slot, look(slot, block, result, geometry)));
        let mut slots = scan(&file, geometry, THREADS, len(geometry), visit);
        slots.sort_unstable_by_key(|(slot, _)| *slot);
        let mut report = Self::sum_up(file.path(), geometry, page.pid, page.floor, &slots);
        if access == Access::Repair {
            let zeros = Buffer::new(PAGE);
            for (slot, _) in &report.damaged {
                write_whole(&file, zeros.as_slice(), geometry.offset(*slot)).map_err(failed("wipe a slot of"))?;
                report.wiped += 1;
            }
        }
        Ok(report)
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

    fn sum_up(
        path: &Path,
        geometry: Geometry,
        pid: u32,
        floor: u64,
        slots: &[(u32, std::result::Result<Header, Miss>)],
    ) -> Self {
        let (path, blocks, damaged) = (path.to_owned(), BTreeMap::new(), Vec::new());
        let mut report = Self { path, geometry, pid, blocks, empty: 0, forgotten: 0, replaced: 0, damaged, wiped: 0 };
        let mut newest = HashMap::new();
        for (slot, found) in slots {
            match found {
                Ok(header) if header.generation < floor => report.forgotten += 1,
                // Slots of swap space have no keys.
                Ok(header) if header.key == [0; 32] => *report.blocks.entry(header.namespace).or_default() += 1,
                Ok(header) => {
                    let held = newest.entry((header.namespace, header.key)).or_insert(header.generation);
                    if *held == header.generation {
                        *report.blocks.entry(header.namespace).or_default() += 1;
                    } else {
                        *held = header.generation.max(*held);
                        report.replaced += 1;
                    }
                }
                Err(Miss::Empty) => report.empty += 1,
                Err(miss) => report.damaged.push((*slot, *miss)),
            }
        }
        report
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

/// Returns the content of a slot; checks its payload if it was read.
fn look(
    slot: u32,
    block: &Buffer,
    result: std::io::Result<()>,
    geometry: Geometry,
) -> std::result::Result<Header, Miss> {
    let was_read = result.is_ok();
    let found = header(slot, block, result);
    if was_read && found == Err(Miss::Magic) && block.as_slice()[..PAGE].iter().all(|&byte| byte == 0) {
        return Err(Miss::Empty);
    }
    let header = found?;
    if header.payload_bytes != geometry.payload_bytes as u64 {
        return Err(Miss::Length);
    }
    match block.as_slice().get(PAGE..PAGE + geometry.payload_bytes) {
        Some(payload) if !header.is_of(payload) => Err(Miss::PayloadChecksum),
        _ => Ok(header),
    }
}
