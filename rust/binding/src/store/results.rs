//! `Completion` and `StoreStats`: the results of one batch, and of all batches.

use super::expected;
use crate::convert::args::{self, Argument};
use crate::convert::values::made;
use blockyard_store::{Miss, Stats};
use numpy::{PyArray1, PyArray2, get_array_module};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
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
