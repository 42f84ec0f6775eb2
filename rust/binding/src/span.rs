//! `expand_span`: the ids of the small blocks in a range of large ones.

use crate::convert::args;
use crate::convert::arrays::ids;
use crate::convert::errors::{invalid, to_py};
use crate::convert::memory::{self, Target};
use blockyard_core::Span;
use numpy::{Ix1, PyArray1, PyUntypedArrayMethods};
use pyo3::prelude::*;

/// Write the ids of the small blocks in a range of large ones.
#[pyfunction]
#[pyo3(signature = (blocks, out, *, per_block, first, last))]
pub(crate) fn expand_span(
    blocks: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = args::per_block)] per_block: u32,
    #[pyo3(from_py_with = args::first)] first: u32,
    #[pyo3(from_py_with = args::last)] last: u32,
) -> PyResult<()> {
    let blocks = ids(blocks)?;
    let span = Span { blocks: &blocks, per_block, first, last };
    let must = || invalid(format!("out is {}, must be int64 [n]", args::describe(out)));
    let len = PyUntypedArrayMethods::len(out.cast::<PyArray1<i64>>().map_err(|_| must())?);
    let mut expanded = memory::reserved(len)?;
    expanded.resize(len, 0);
    span.expand(expanded.iter_mut()).map_err(to_py)?;
    memory::store(Target::<i64, Ix1>::new(out, "out", "int64 [n]"), &[expanded.len()], &expanded)
}
