//! `DecodeBatch`: the core's batch with the caller's arrays.
//!
//! Lock order: the batch, then its manager; see `blockyard_locks`.

use crate::args;
use crate::arrays::{self, Handle, Tokens};
use crate::errors::to_py;
use crate::manager::{PyBlockManager, handles};
use crate::memory::{self, Kept};
use blockyard_core::{DecodeBatch, TableRows};
use blockyard_locks::{Guard, OuterLock, with_both};
use numpy::{Ix1, Ix2, PyArray1};
use pyo3::prelude::*;

/// The running sequences, with the block table and slot mapping that attention kernels read.
#[pyclass(frozen, name = "DecodeBatch", module = "blockyard._core")]
pub(crate) struct PyDecodeBatch {
    manager: Py<PyBlockManager>,
    block_tables: Kept<i32, Ix2>,
    slots: Kept<i64, Ix1>,
    inner: OuterLock<DecodeBatch>,
}

impl PyDecodeBatch {
    fn lock(&self) -> Guard<'_, DecodeBatch> {
        self.inner.lock()
    }

    /// Lends the block table to `call`.
    fn write<R>(&self, py: Python<'_>, call: impl FnOnce(TableRows<'_>) -> PyResult<R> + Send) -> PyResult<R> {
        memory::write(self.block_tables.target(py), |table| call(arrays::rows(table)))?
    }
}

#[pymethods]
impl PyDecodeBatch {
    #[new]
    fn new(manager: Py<PyBlockManager>, block_tables: &Bound<'_, PyAny>, slots: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (table, slots) = (arrays::table(block_tables, "block_tables"), arrays::slots_target(slots, "slots"));
        memory::write_both(table, slots, |table, _| table.items.fill(0))?;
        let (block_tables, slots) = (table.keep()?, slots.keep()?);
        Ok(Self { manager, block_tables, slots, inner: OuterLock::new(DecodeBatch::new()) })
    }

    #[getter]
    fn block_tables(&self, py: Python<'_>) -> Py<PyAny> {
        self.block_tables.array.clone_ref(py)
    }

    #[getter]
    fn slots(&self, py: Python<'_>) -> Py<PyAny> {
        self.slots.array.clone_ref(py)
    }

    #[getter]
    fn sequences<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let sequences = self.lock().sequences().to_vec();
        handles(py, &sequences)
    }

    fn __len__(&self) -> usize {
        self.lock().sequences().len()
    }

    fn add(&self, sequences: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (py, sequences, manager) = (sequences.py(), arrays::sequences(sequences)?, self.manager.get().shared());
        self.write(py, |rows| {
            with_both(&self.inner, manager, |batch, manager| batch.add(manager, &sequences, rows)).map_err(to_py)
        })
    }

    fn remove(&self, py: Python<'_>, #[pyo3(from_py_with = args::row)] row: u32) -> PyResult<Option<usize>> {
        self.write(py, |rows| self.lock().remove(row as usize, rows).map_err(to_py))
    }

    fn find(&self, #[pyo3(from_py_with = args::sequence)] sequence: Handle) -> PyResult<usize> {
        self.lock().find(sequence.0).map_err(to_py)
    }

    #[pyo3(signature = (num_tokens = None, *, lookahead = 0))]
    fn append(
        &self,
        py: Python<'_>,
        num_tokens: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::lookahead)] lookahead: u32,
    ) -> PyResult<usize> {
        let (tokens, manager) = (Tokens::or_one(num_tokens)?, self.manager.get().shared());
        memory::write_both(self.block_tables.target(py), self.slots.target(py), |table, slots| {
            with_both(&self.inner, manager, |batch, manager| {
                batch.append(manager, tokens.get(), lookahead, arrays::rows(table), slots.items).map_err(to_py)
            })
        })?
    }

    fn refresh(&self, py: Python<'_>) -> PyResult<()> {
        let manager = self.manager.get().shared();
        self.write(py, |rows| {
            with_both(&self.inner, manager, |batch, manager| batch.refresh(manager, rows)).map_err(to_py)
        })
    }
}
