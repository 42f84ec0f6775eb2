//! `Completion` and `StoreStats`: the results of one batch, and of all batches.

use super::expected;
use crate::convert::args::{self, Argument};
use blockyard_store::{Miss, Stats};
use numpy::{PyArray1, PyArray2, get_array_module};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::collections::BTreeMap;

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

/// Counters of a store since it was opened.
#[pyclass(frozen, eq, get_all, name = "StoreStats", module = "blockyard._core")]
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct PyStoreStats {
    /// Number of blocks written.
    written_blocks: u64,
    /// Bytes of those blocks, without headers.
    written_bytes: u64,
    /// Number of blocks read and found intact.
    read_blocks: u64,
    /// Bytes of those blocks, without headers.
    read_bytes: u64,
    /// Number of blocks not read or written, by reason.
    misses: BTreeMap<String, u64>,
    /// Number of operations that failed with a system error.
    errors: u64,
    /// Message of the last of those errors.
    last_error: String,
    /// Number of those errors since the last successful operation: 0 means healthy.
    errors_in_a_row: u64,
    /// Whether the storage has stopped answering; batches are then refused until it answers a probe.
    is_down: bool,
    /// Bytes of blocks in flight and of uncollected results.
    pending_bytes: u64,
    /// Number of keys with a block.
    cached_blocks: u64,
    /// Number of keys whose block was evicted.
    evicted_blocks: u64,
}

#[pymethods]
impl PyStoreStats {
    #[new]
    #[pyo3(signature = (*, written_blocks=0, written_bytes=0, read_blocks=0, read_bytes=0, misses=None, errors=0,
                        last_error="", errors_in_a_row=0, is_down=false, pending_bytes=0, cached_blocks=0,
                        evicted_blocks=0))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments, one per counter")]
    fn new(
        #[pyo3(from_py_with = args::written_blocks)] written_blocks: u64,
        #[pyo3(from_py_with = args::written_bytes)] written_bytes: u64,
        #[pyo3(from_py_with = args::read_blocks)] read_blocks: u64,
        #[pyo3(from_py_with = args::read_bytes)] read_bytes: u64,
        #[pyo3(from_py_with = args::misses)] misses: Option<BTreeMap<String, u64>>,
        #[pyo3(from_py_with = args::errors)] errors: u64,
        last_error: &str,
        #[pyo3(from_py_with = args::errors_in_a_row)] errors_in_a_row: u64,
        is_down: bool,
        #[pyo3(from_py_with = args::pending_bytes)] pending_bytes: u64,
        #[pyo3(from_py_with = args::cached_blocks)] cached_blocks: u64,
        #[pyo3(from_py_with = args::evicted_blocks)] evicted_blocks: u64,
    ) -> Self {
        Self {
            written_blocks,
            written_bytes,
            read_blocks,
            read_bytes,
            misses: misses.unwrap_or_default(),
            errors,
            last_error: last_error.to_owned(),
            errors_in_a_row,
            is_down,
            pending_bytes,
            cached_blocks,
            evicted_blocks,
        }
    }

    /// Number of reads whose header or payload checksum did not match.
    #[getter]
    fn checksum_failures(&self) -> u64 {
        self.sum(&[Miss::HeaderChecksum, Miss::PayloadChecksum])
    }

    /// Number of reads that returned a damaged block, for any reason.
    #[getter]
    fn damaged_blocks(&self) -> u64 {
        self.sum(&[
            Miss::Magic,
            Miss::Version,
            Miss::HeaderChecksum,
            Miss::Namespace,
            Miss::Key,
            Miss::Slot,
            Miss::Generation,
            Miss::Length,
            Miss::PayloadChecksum,
            Miss::Truncated,
        ])
    }

    /// Return all counters, for JSON.
    fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (name, value) in [
            ("written_blocks", self.written_blocks),
            ("written_bytes", self.written_bytes),
            ("read_blocks", self.read_blocks),
            ("read_bytes", self.read_bytes),
            ("checksum_failures", self.checksum_failures()),
            ("damaged_blocks", self.damaged_blocks()),
            ("errors", self.errors),
            ("errors_in_a_row", self.errors_in_a_row),
            ("pending_bytes", self.pending_bytes),
            ("cached_blocks", self.cached_blocks),
            ("evicted_blocks", self.evicted_blocks),
        ] {
            dict.set_item(name, value)?;
        }
        dict.set_item("is_down", self.is_down)?;
        dict.set_item("last_error", &self.last_error)?;
        dict.set_item("misses", &self.misses)?;
        Ok(dict)
    }

    /// The constructor's arguments by name, for pickling.
    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<((), Bound<'py, PyDict>)> {
        let counters = self.as_dict(py)?;
        counters.del_item("checksum_failures")?;
        counters.del_item("damaged_blocks")?;
        Ok(((), counters))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("StoreStats({})", self.as_dict(py)?.repr()?))
    }
}

impl PyStoreStats {
    pub(super) fn from_store(stats: Stats, bytes_per_block: u64) -> Self {
        let seen = Miss::ALL.into_iter().map(|miss| (miss.name().to_owned(), stats.misses[miss.index()]));
        Self {
            written_blocks: stats.written_blocks,
            written_bytes: stats.written_blocks * bytes_per_block,
            read_blocks: stats.read_blocks,
            read_bytes: stats.read_blocks * bytes_per_block,
            misses: seen.filter(|(_, count)| *count > 0).collect(),
            errors: stats.errors,
            last_error: stats.last_error,
            errors_in_a_row: stats.errors_in_a_row,
            is_down: stats.is_down,
            pending_bytes: stats.pending_bytes,
            cached_blocks: stats.cached_blocks,
            evicted_blocks: stats.evicted_blocks,
        }
    }

    fn sum(&self, misses: &[Miss]) -> u64 {
        misses.iter().filter_map(|miss| self.misses.get(miss.name())).sum()
    }
}
