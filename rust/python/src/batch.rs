//! `DecodeBatch`: the core's batch with the caller's arrays.
//!
//! Lock order: the batch, then its manager; see `blockyard_locks`.

use crate::args;
use crate::arrays::{self, Handle, Sequences, Table, Tokens};
use crate::errors::{invalid, to_py};
use crate::manager::{PyBlockManager, handles};
use blockyard_core::{Counts, DecodeBatch, TableRows};
use blockyard_locks::{Guard, OuterLock, with_both};
use numpy::{BorrowError, PyArray1, PyArray2, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;

/// The running sequences, with the block table and slot mapping that attention kernels read.
#[pyclass(frozen, name = "DecodeBatch", module = "blockyard._core")]
pub(crate) struct PyDecodeBatch {
    manager: Py<PyBlockManager>,
    #[pyo3(get)]
    block_tables: Py<PyArray2<i32>>,
    #[pyo3(get)]
    slots: Py<PyArray1<i64>>,
    inner: OuterLock<DecodeBatch>,
}

impl PyDecodeBatch {
    fn lock(&self) -> Guard<'_, DecodeBatch> {
        self.inner.lock()
    }

    fn table<'py>(&self, py: Python<'py>) -> PyResult<Table<'py>> {
        Table::new(self.block_tables.bind(py).as_any())
    }
}

#[expect(clippy::needless_pass_by_value, reason = "passed to `map_err` by name")]
fn unwritable(error: BorrowError) -> PyErr {
    invalid(format!("the slots cannot be written: {error}"))
}

#[pymethods]
impl PyDecodeBatch {
    #[new]
    fn new(manager: Py<PyBlockManager>, block_tables: &Bound<'_, PyAny>, slots: &Bound<'_, PyAny>) -> PyResult<Self> {
        let block_tables: Bound<'_, PyArray2<i32>> = arrays::output(block_tables, "int32 [sequences, blocks]")?;
        let slots: Bound<'_, PyArray1<i64>> = arrays::output(slots, "int64 [tokens]")?;
        let mut table = Table::new(block_tables.as_any())?;
        drop(slots.try_readwrite().map_err(unwritable)?);
        table.clear()?;
        drop(table);
        let (block_tables, slots) = (block_tables.unbind(), slots.unbind());
        Ok(Self { manager, block_tables, slots, inner: OuterLock::new(DecodeBatch::new()) })
    }

    #[getter]
    fn sequences<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        let sequences = self.lock().sequences().to_vec();
        handles(py, &sequences)
    }

    fn __len__(&self) -> usize {
        self.lock().sequences().len()
    }

    fn add(&self, sequences: &Bound<'_, PyAny>) -> PyResult<usize> {
        let py = sequences.py();
        let sequences = Sequences::new(sequences)?;
        let (sequences, mut table) = (sequences.get()?, self.table(py)?);
        let rows = table.rows()?;
        with_both(&self.inner, self.manager.get().shared(), |batch, manager| batch.add(manager, sequences, rows))
            .map_err(to_py)
    }

    fn remove(&self, py: Python<'_>, #[pyo3(from_py_with = args::row)] row: u32) -> PyResult<Option<usize>> {
        let mut table = self.table(py)?;
        let rows = table.rows()?;
        self.lock().remove(row as usize, rows).map_err(to_py)
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
        let tokens = num_tokens.map(|tokens| Tokens::new(tokens, "num_tokens")).transpose()?;
        let counts = tokens.as_ref().map_or(Ok(Counts::All(1)), Tokens::get)?;
        let (tables, slots) = (self.block_tables.bind(py), self.slots.bind(py));
        // Without the interpreter's lock another thread may write the same arrays through another batch: there the borrow
        // flags of rust-numpy refuse it. With that lock they would cost as much as the call, and tell nothing.
        #[cfg(Py_GIL_DISABLED)]
        let _exclusive = (self.table(py)?, slots.try_readwrite().map_err(unwritable)?);
        with_both(&self.inner, self.manager.get().shared(), |batch, manager| {
            // SAFETY: the arrays do not overlap and can be written, as `new` has found; nobody else in Rust has a slice of
            // them: this thread holds the interpreter's lock, or where there is none the borrow flags, and no Python code
            // runs until the slices are gone.
            let (rows, slots) = unsafe { (tables.as_slice_mut()?, slots.as_slice_mut()?) };
            let rows = TableRows::new(rows, tables.shape()[1]);
            batch.append(manager, counts, lookahead, rows, slots).map_err(to_py)
        })
    }

    fn refresh(&self, py: Python<'_>) -> PyResult<()> {
        let mut table = self.table(py)?;
        let rows = table.rows()?;
        with_both(&self.inner, self.manager.get().shared(), |batch, manager| batch.refresh(manager, rows))
            .map_err(to_py)
    }
}
