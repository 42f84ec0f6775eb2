//! The results of one batch, the counters of all batches, and the contents of a slab.

use super::{expected, to_py};
use crate::convert::args::{self, Argument};
use crate::convert::memory;
use crate::convert::values::made;
use blockyard_store::{Header, Miss, SlabContents, Stats};
use numpy::{PyArray1, PyArray2, get_array_module};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The results of one batch.
#[pyclass(frozen, name = "Completion", module = "blockyard._core")]
pub(crate) struct PyCompletion {
    /// The ticket that was collected.
    #[pyo3(get)]
    pub(super) ticket: u64,
    pub(super) ok: Py<PyArray1<bool>>,
    pub(super) rows: Py<PyArray2<u8>>,
    pub(super) reasons: Py<PyTuple>,
}

#[pymethods]
impl PyCompletion {
    #[new]
    fn new(
        #[pyo3(from_py_with = args::ticket)] ticket: u64,
        ok: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
        reasons: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let ok = ok.cast::<PyArray1<bool>>().map_err(|_| expected("ok", "a bool array [n]", ok))?;
        let rows =
            rows.cast::<PyArray2<u8>>().map_err(|_| expected("rows", "a uint8 array [n, bytes_per_block]", rows))?;
        let reasons = PyTuple::new(reasons.py(), Vec::<String>::read(reasons, &"reasons")?)?;
        Ok(Self { ticket, ok: ok.clone().unbind(), rows: rows.clone().unbind(), reasons: reasons.unbind() })
    }

    /// Whether each block was read or written, bool `[n]`.
    #[getter]
    fn ok(&self, py: Python<'_>) -> Py<PyArray1<bool>> {
        self.ok.clone_ref(py)
    }

    /// The blocks that were read, uint8 `[n, bytes_per_block]`; the content of misses is unspecified. For writes,
    /// `[0, bytes_per_block]`.
    #[getter]
    fn rows(&self, py: Python<'_>) -> Py<PyArray2<u8>> {
        self.rows.clone_ref(py)
    }

    /// Why each block is a miss, one string per block; empty if it is not.
    #[getter]
    fn reasons(&self, py: Python<'_>) -> Py<PyTuple> {
        self.reasons.clone_ref(py)
    }

    fn __getnewargs__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        (self.ticket, &self.ok, &self.rows, &self.reasons).into_pyobject(py)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let ok = self.ok.bind(py).as_any();
        let done = get_array_module(py)?.call_method1("count_nonzero", (ok,))?;
        Ok(format!("Completion(ticket={}, ok={done} of {})", self.ticket, ok.len()?))
    }
}

/// Returns the counters of a store since it was opened: `StoreStats`.
pub(super) fn store_stats<'py>(py: Python<'py>, stats: &Stats, bytes_per_block: u64) -> PyResult<Bound<'py, PyAny>> {
    let seen = Miss::ALL.into_iter().map(|miss| (miss.name(), stats.misses[miss.index()]));
    made!(py, "StoreStats" {
        written_blocks: stats.written_blocks,
        written_bytes: stats.written_blocks * bytes_per_block,
        read_blocks: stats.read_blocks,
        read_bytes: stats.read_blocks * bytes_per_block,
        misses: seen.filter(|(_, count)| *count > 0).collect::<BTreeMap<_, _>>(),
        errors: stats.errors,
        last_error: &stats.last_error,
        errors_in_a_row: stats.errors_in_a_row,
        is_down: stats.is_down,
        pending_bytes: stats.pending_bytes,
        cached_blocks: stats.cached_blocks,
        evicted_blocks: stats.evicted_blocks,
    })
}

/// Read the headers of a slab, even while a store has it open.
///
/// Args:
///     path: the file, or the directory of a prefix store.
///     payloads: read every block, too, and check it; then no store may have the slab open.
/// Raises:
///     StoreError: the file cannot be read, is not a slab, or is in use.
#[pyfunction]
#[pyo3(signature = (path, *, payloads=false))]
pub(crate) fn read_slab(py: Python<'_>, path: PathBuf, payloads: bool) -> PyResult<Bound<'_, PyAny>> {
    let found = py.detach(move || SlabContents::read(&path, payloads)).map_err(|error| to_py(&error))?;
    let digests = |of: fn(&Header) -> [u8; 32]| {
        let bytes: Vec<u8> = found.blocks.iter().flat_map(|(_, header)| of(header)).collect();
        memory::filled(py, [found.blocks.len(), 32], &bytes, |&byte| byte)
    };
    made!(py, "SlabContents" {
        path: &found.path,
        num_slots: found.geometry.slots,
        bytes_per_block: found.geometry.payload_bytes,
        empty: found.empty,
        forgotten: found.forgotten,
        replaced: found.replaced,
        slots: memory::array(py, &found.blocks, |(slot, _)| i64::from(*slot))?,
        generations: memory::array(py, &found.blocks, |(_, header)| header.generation)?,
        namespaces: digests(|header| header.namespace)?,
        tenants: digests(|header| header.owner.unwrap_or_default().tenant)?,
        damaged: found.damaged.iter().map(|(slot, generation, miss)| (slot, generation, miss.name())).collect::<Vec<_>>(),
    })
}

/// Wipe slots of a slab that no store has open, except those written since `read_slab`.
///
/// Args:
///     path: as for `read_slab`.
///     slots: slot and generation of each block, as `read_slab` returned them.
/// Returns:
///     How many slots were wiped.
/// Raises:
///     StoreError: the file cannot be read or written, is not a slab, or is in use.
///     MappingError: a slot is out of range; nothing was wiped.
#[pyfunction]
pub(crate) fn wipe_slab(
    py: Python<'_>,
    path: PathBuf,
    #[pyo3(from_py_with = args::slots)] slots: Vec<(u32, u64)>,
) -> PyResult<u64> {
    py.detach(move || SlabContents::wipe(&path, &slots)).map_err(|error| to_py(&error))
}
