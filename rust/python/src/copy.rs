//! Copies between arrays of rows. What they may touch is checked here; what makes a mapping sound, by their callers.

use crate::args;
use crate::arrays::{self, describe};
use crate::errors::{bad_mapping, invalid};
use blockyard_copy::{CopyError, Rows, copy_rows, exchange_rows, move_rows};
use numpy::{PyArray2, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;

fn to_py(error: CopyError) -> PyErr {
    match error {
        CopyError::OutOfRange { .. } => bad_mapping(error.to_string()),
        CopyError::Caches { .. } | CopyError::Widths { .. } => invalid(error.to_string()),
    }
}

/// Arrays of rows, which keep the memory.
struct Caches<'py> {
    rows: Vec<Rows>,
    _arrays: Vec<Bound<'py, PyArray2<u8>>>,
}

impl<'py> Caches<'py> {
    fn new(name: &str, arrays: &Bound<'py, PyAny>) -> PyResult<Self> {
        let (mut rows, mut kept) = (Vec::new(), Vec::new());
        for (index, array) in arrays.try_iter()?.enumerate() {
            let array = array?;
            let bad = || {
                let found = describe(&array);
                invalid(format!("{name}[{index}] is {found}, must be uint8 [rows, bytes], rows contiguous and apart"))
            };
            let array = array.cast::<PyArray2<u8>>().map_err(|_| bad())?;
            rows.push(rows_of(array).ok_or_else(bad)?);
            kept.push(array.clone());
        }
        Ok(Self { rows, _arrays: kept })
    }
}

/// The rows of an array whose rows are contiguous and lie apart.
fn rows_of(array: &Bound<'_, PyArray2<u8>>) -> Option<Rows> {
    let (&[count, width], &[stride, column]) = (array.shape(), array.strides()) else { return None };
    // A stride along which there is but one item may be anything.
    let stride = if count > 1 { usize::try_from(stride).ok()? } else { width };
    // SAFETY: the array has these rows; who asks keeps it.
    (stride >= width && (count == 0 || width <= 1 || column == 1))
        .then(|| unsafe { Rows::new(array.data(), count, width, stride) })
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
    let (src, dst, pairs) = (Caches::new("src", src)?, Caches::new("dst", dst)?, arrays::pairs(pairs)?);
    let (src_rows, dst_rows) = (&src.rows, &dst.rows);
    // SAFETY: the caller says that nothing is written twice, or both read and written.
    py.detach(|| unsafe { copy_rows(src_rows, dst_rows, &pairs, num_threads) }).map_err(to_py)
}

/// Exchanges rows within arrays.
#[pyfunction]
#[pyo3(name = "exchange_rows", signature = (arrays, pairs, *, num_threads))]
pub(crate) fn py_exchange_rows(
    py: Python<'_>,
    arrays: &Bound<'_, PyAny>,
    pairs: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = args::num_threads)] num_threads: usize,
) -> PyResult<()> {
    // SAFETY: the caller says that no row is named twice.
    unsafe { within(py, arrays, pairs, num_threads, exchange_rows) }
}

/// Moves rows within arrays, as if all were read first.
#[pyfunction]
#[pyo3(name = "move_rows", signature = (arrays, pairs, *, num_threads))]
pub(crate) fn py_move_rows(
    py: Python<'_>,
    arrays: &Bound<'_, PyAny>,
    pairs: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = args::num_threads)] num_threads: usize,
) -> PyResult<()> {
    // SAFETY: the caller says that no row is written twice.
    unsafe { within(py, arrays, pairs, num_threads, move_rows) }
}

/// Exchanges or moves rows within caches.
type Change = unsafe fn(&[Rows], &[[u32; 2]], usize) -> Result<(), CopyError>;

/// Changes rows of arrays in place.
///
/// # Safety
/// The pairs are as `change` wants them.
unsafe fn within(
    py: Python<'_>,
    arrays: &Bound<'_, PyAny>,
    pairs: &Bound<'_, PyAny>,
    num_threads: usize,
    change: Change,
) -> PyResult<()> {
    let (caches, pairs) = (Caches::new("arrays", arrays)?, arrays::pairs(pairs)?);
    let rows = &caches.rows;
    // SAFETY: the arrays have these rows; the rest is as the caller says.
    py.detach(|| unsafe { change(rows, &pairs, num_threads) }).map_err(to_py)
}
