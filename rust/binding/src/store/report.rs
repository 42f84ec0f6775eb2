//! `SlabReport`: the contents of a slab, for `blockyard inspect` and `blockyard fsck`.

use super::to_py;
use crate::convert::values::picklable;
use blockyard_store::SlabReport;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The contents of a slab's slots.
#[pyclass(frozen, get_all, name = "SlabReport", module = "blockyard._core")]
pub(crate) struct PySlabReport {
    /// The slab's file.
    path: PathBuf,
    /// Number of slots in the slab.
    num_slots: u32,
    /// Bytes of a block in one slot.
    bytes_per_block: usize,
    /// Process id that wrote the superblock.
    pid: u32,
    /// Number of blocks that a store can find, by namespace in hexadecimal digits.
    blocks: BTreeMap<String, u64>,
    /// Number of slots without a block.
    empty: u64,
    /// Number of blocks forgotten by `forget`.
    forgotten: u64,
    /// Number of blocks replaced by a newer write of their key.
    replaced: u64,
    /// The damaged slots, each with the reason that a read would report.
    damaged: Vec<(u32, String)>,
    /// Number of damaged slots that were wiped.
    wiped: u64,
}

impl PySlabReport {
    fn from_store(report: SlabReport) -> Self {
        let hex = |namespace: [u8; 32]| {
            let half = |bytes: &[u8]| bytes.iter().fold(0_u128, |number, byte| number << 8 | u128::from(*byte));
            format!("{:032x}{:032x}", half(&namespace[..16]), half(&namespace[16..]))
        };
        Self {
            path: report.path,
            num_slots: report.geometry.slots,
            bytes_per_block: report.geometry.payload_bytes,
            pid: report.pid,
            blocks: report.blocks.into_iter().map(|(namespace, count)| (hex(namespace), count)).collect(),
            empty: report.empty,
            forgotten: report.forgotten,
            replaced: report.replaced,
            damaged: report.damaged.into_iter().map(|(slot, miss)| (slot, miss.name().to_owned())).collect(),
            wiped: report.wiped,
        }
    }
}

picklable!(PySlabReport { path, num_slots, bytes_per_block, pid, blocks, empty, forgotten, replaced, damaged, wiped });

/// Read the headers of a slab, even while a store has it open.
///
/// Args:
///     path: the file, or the directory of a prefix store.
/// Raises:
///     StoreError: the file cannot be read, or is not a slab.
#[pyfunction]
pub(crate) fn inspect_slab(py: Python<'_>, path: PathBuf) -> PyResult<PySlabReport> {
    let report = py.detach(move || SlabReport::inspect(&path));
    report.map(PySlabReport::from_store).map_err(|error| to_py(&error))
}

/// Read every block of a slab that no store has open.
///
/// Args:
///     path: the file, or the directory of a prefix store.
///     repair: wipe damaged slots.
/// Raises:
///     StoreError: the file cannot be read or written, is not a slab, or is in use.
#[pyfunction]
#[pyo3(signature = (path, *, repair=false))]
pub(crate) fn check_slab(py: Python<'_>, path: PathBuf, repair: bool) -> PyResult<PySlabReport> {
    let report = py.detach(move || SlabReport::check(&path, repair));
    report.map(PySlabReport::from_store).map_err(|error| to_py(&error))
}
