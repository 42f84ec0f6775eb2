//! `SlabReport`: the contents of a slab, for `blockyard inspect` and `blockyard fsck`.

use super::to_py;
use crate::convert::values::made;
use blockyard_store::SlabReport;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::path::PathBuf;

fn slab_report(py: Python<'_>, report: SlabReport) -> PyResult<Bound<'_, PyAny>> {
    let hex = |namespace: [u8; 32]| {
        let half = |bytes: &[u8]| bytes.iter().fold(0_u128, |number, byte| number << 8 | u128::from(*byte));
        format!("{:032x}{:032x}", half(&namespace[..16]), half(&namespace[16..]))
    };
    made!(py, "SlabReport" {
        path: report.path,
        num_slots: report.geometry.slots,
        bytes_per_block: report.geometry.payload_bytes,
        pid: report.pid,
        blocks: report.blocks.into_iter().map(|(name, count)| (hex(name), count)).collect::<BTreeMap<_, _>>(),
        empty: report.empty,
        forgotten: report.forgotten,
        replaced: report.replaced,
        damaged: report.damaged.into_iter().map(|(slot, miss)| (slot, miss.name())).collect::<Vec<_>>(),
        wiped: report.wiped,
    })
}

/// Read the headers of a slab, even while a store has it open.
///
/// Args:
///     path: the file, or the directory of a prefix store.
/// Raises:
///     StoreError: the file cannot be read, or is not a slab.
#[pyfunction]
pub(crate) fn inspect_slab(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyAny>> {
    let report = py.detach(move || SlabReport::inspect(&path));
    slab_report(py, report.map_err(|error| to_py(&error))?)
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
pub(crate) fn check_slab(py: Python<'_>, path: PathBuf, repair: bool) -> PyResult<Bound<'_, PyAny>> {
    let report = py.detach(move || SlabReport::check(&path, repair));
    slab_report(py, report.map_err(|error| to_py(&error))?)
}
