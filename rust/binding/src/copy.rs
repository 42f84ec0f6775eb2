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
        let found = args::describe(array);
        Err(invalid(format!("{name}[{at}] is {found}, must be uint8 [rows, bytes], rows contiguous and apart")))
    };
    Ok(Caches { arrays: args::items(arrays, &name, array)?, name, written })
}

/// Copy row `from` of each array to row `to` of its partner.
///
/// Args:
///     src: arrays to read, uint8 `[rows, bytes]`, rows contiguous and apart.
///     dst: as many to write, of the same widths, apart from one another: side by side, or with rows that alternate
///         within one stride. They may be the arrays that are read, in the same order, or share no memory with those.
///     pairs: rows `(from, to)`, int64 `[n, 2]`; `to` has no repeats, and within arrays shares no row with `from`.
///     num_threads: at most so many share a large call.
/// Raises:
///     InvalidArgumentError: an array is of another form, cannot be written or shares memory with another, or the two
///         lists do not fit one another; nothing was copied.
///     MappingError: a row does not exist, is written twice, or read and written; nothing was copied.
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

/// Let two rows of each pair change places in each array.
///
/// Args:
///     arrays: uint8 `[rows, bytes]`, rows contiguous and apart, as those that `copy_rows` writes.
///     pairs: rows, int64 `[n, 2]`, none twice.
///     num_threads: at most so many share a large call.
/// Raises:
///     InvalidArgumentError: an array is of another form, cannot be written or shares memory with another; nothing was
///         exchanged.
///     MappingError: a row does not exist or is named twice; nothing was exchanged.
#[pyfunction]
#[pyo3(name = "exchange_rows", signature = (arrays, pairs, *, num_threads))]
pub(crate) fn py_exchange_rows(
    arrays: &Bound<'_, PyAny>,
    pairs: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = args::num_threads)] num_threads: usize,
) -> PyResult<()> {
    within(arrays, pairs, num_threads, exchange_rows)
}

/// Move rows within each array, as if all were read first.
///
/// Args:
///     arrays: uint8 `[rows, bytes]`, rows contiguous and apart, as those that `copy_rows` writes.
///     pairs: rows `(from, to)`, int64 `[n, 2]`; `to` has no repeats.
///     num_threads: at most so many share a large call.
/// Raises:
///     InvalidArgumentError: an array is of another form, cannot be written or shares memory with another; nothing was
///         moved.
///     MappingError: a row does not exist or is written twice; nothing was moved.
///     OutOfMemoryError: rings of moves need more memory than there is; nothing was moved.
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
