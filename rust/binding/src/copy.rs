//! Copies between arrays of rows. What they may touch is checked by `blockyard_copy`.

use crate::args;
use crate::arrays;
use crate::errors::{bad_mapping, invalid, out_of_memory};
use crate::memory::{self, Caches};
use blockyard_copy::{CopyError, Rows, copy_rows, exchange_rows, move_rows};
use numpy::PyUntypedArray;
use pyo3::prelude::*;

fn to_py(error: CopyError) -> PyErr {
    match error {
        CopyError::OutOfRange { .. } | CopyError::Repeated { .. } | CopyError::ReadAndWritten { .. } => {
            bad_mapping(error.to_string())
        }
        CopyError::OutOfMemory { bytes } => out_of_memory(bytes),
        _ => invalid(error.to_string()),
    }
}

fn caches<'py>(arrays: &Bound<'py, PyAny>, name: &'static str, written: bool) -> PyResult<Caches<'py>> {
    let array = |array: &Bound<'py, PyAny>, at: usize| {
        if array.cast::<PyUntypedArray>().is_ok() {
            return Ok(array.clone());
        }
        let found = arrays::describe(array);
        Err(invalid(format!("{name}[{at}] is {found}, must be uint8 [rows, bytes], rows contiguous and apart")))
    };
    Ok(Caches { arrays: args::items(arrays, &name, array)?, name, written })
}

/// Copies rows between arrays.
#[pyfunction]
#[pyo3(name = "copy_rows", signature = (src, dst, pairs, *, num_threads))]
pub(crate) fn py_copy_rows(
    py: Python<'_>,
    src: &Bound<'_, PyAny>,
    dst: &Bound<'_, PyAny>,
    pairs: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = args::num_threads)] num_threads: usize,
) -> PyResult<()> {
    let (src, dst, pairs) = (caches(src, "src", false)?, caches(dst, "dst", true)?, arrays::pairs(pairs)?);
    memory::with_rows(py, [&src, &dst], |[src, dst]| copy_rows(src, dst, &pairs, num_threads))?.map_err(to_py)
}

/// Exchanges rows within arrays.
#[pyfunction]
#[pyo3(name = "exchange_rows", signature = (arrays, pairs, *, num_threads))]
pub(crate) fn py_exchange_rows(
    arrays: &Bound<'_, PyAny>,
    pairs: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = args::num_threads)] num_threads: usize,
) -> PyResult<()> {
    within(arrays, pairs, num_threads, exchange_rows)
}

/// Moves rows within arrays, as if all were read first.
#[pyfunction]
#[pyo3(name = "move_rows", signature = (arrays, pairs, *, num_threads))]
pub(crate) fn py_move_rows(
    arrays: &Bound<'_, PyAny>,
    pairs: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = args::num_threads)] num_threads: usize,
) -> PyResult<()> {
    within(arrays, pairs, num_threads, move_rows)
}

/// Exchanges or moves rows within caches.
type Change = fn(&[Rows], &[[u32; 2]], usize) -> Result<(), CopyError>;

/// Changes rows of arrays in place.
fn within(arrays: &Bound<'_, PyAny>, pairs: &Bound<'_, PyAny>, num_threads: usize, change: Change) -> PyResult<()> {
    let (caches, pairs) = (caches(arrays, "arrays", true)?, arrays::pairs(pairs)?);
    memory::with_rows(arrays.py(), [&caches], |[rows]| change(rows, &pairs, num_threads))?.map_err(to_py)
}
