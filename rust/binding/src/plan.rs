//! `CopyRoute` and the functions of plans: runs, orders, stretches of unequal blocks.

use crate::args;
use crate::arrays::{self, ids};
use crate::decision::{PyStepDecision, array};
use crate::errors::{invalid, to_py};
use crate::memory::{self, Target};
use blockyard_core::{End, Pieces, Region, Route, Side, Span, merge_runs, order_moves, orders};
use numpy::ndarray::Dimension;
use numpy::{Ix1, Ix2, PyArray1, PyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

const REGION: &str = "uint64 [n, 8]: source base, row, sub, destination base, row, sub, bytes, part";

/// Views of two sets of memory, joined.
#[pyclass(frozen, name = "CopyRoute", module = "blockyard._core")]
pub(crate) struct PyCopyRoute(Route);

#[pymethods]
impl PyCopyRoute {
    #[new]
    #[pyo3(signature = (regions, *, src_blocks, dst_blocks, src_per_row = 1, dst_per_row = 1, in_place = false))]
    fn new(
        regions: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::src_blocks)] src_blocks: u32,
        #[pyo3(from_py_with = args::dst_blocks)] dst_blocks: u32,
        #[pyo3(from_py_with = args::src_per_row)] src_per_row: u32,
        #[pyo3(from_py_with = args::dst_per_row)] dst_per_row: u32,
        in_place: bool,
    ) -> PyResult<Self> {
        let found = memory::copied::<u64, Ix2>(regions)?;
        let (numbers, shape) = found.ok_or_else(|| invalid(format!("regions must be a {REGION}")))?;
        if shape[1] != 8 {
            return Err(invalid(format!("regions have shape {:?}, must be {REGION}", shape.slice())));
        }
        let region = |row: &[u64]| -> PyResult<Region> {
            let side = |at: usize| Side { base: row[at], row: row[at + 1], sub: row[at + 2] };
            let part = u32::try_from(row[7]).map_err(|_| invalid(format!("part is {}, must be below 2^32", row[7])))?;
            Ok(Region { src: side(0), dst: side(3), bytes: row[6], part })
        };
        let mut regions = memory::reserved(numbers.len() / 8)?;
        for row in numbers.chunks_exact(8) {
            regions.push(region(row)?);
        }
        let src = End { blocks: src_blocks, per_row: src_per_row };
        let dst = End { blocks: dst_blocks, per_row: dst_per_row };
        Route::new(&regions, src, dst, in_place).map(Self).map_err(to_py)
    }

    #[getter]
    fn num_parts(&self) -> usize {
        self.0.parts()
    }

    #[getter]
    fn num_regions(&self) -> usize {
        self.0.regions()
    }

    fn compile<'py>(&self, pairs: &Bound<'py, PyAny>, out: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let pairs = arrays::pairs(pairs)?;
        let starts = memory::write(Target::<u64, Ix2>::new(out, "out", "uint64 [3, pieces]"), |out| {
            let &[3, pieces] = out.shape else {
                return Err(invalid(format!("out has shape {:?}, must be [3, pieces]", out.shape)));
            };
            let (src, rest) = out.items.split_at_mut(pieces);
            let (dst, bytes) = rest.split_at_mut(pieces);
            self.0.compile(&pairs, &mut Pieces { src, dst, bytes }).map_err(to_py)
        })??;
        memory::array(out.py(), &starts, |&start| number(start))
    }

    fn __repr__(&self) -> String {
        format!("CopyRoute({} regions in {} parts)", self.0.regions(), self.0.parts())
    }
}

#[expect(clippy::cast_possible_wrap, reason = "counts entries of an array in memory")]
fn number(count: usize) -> i64 {
    count as i64
}

/// Merges pairs whose source and destination both continue the pair before; the order is kept.
#[pyfunction]
#[pyo3(name = "merge_runs")]
pub(crate) fn py_merge_runs<'py>(ids: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray2<i64>>> {
    let runs = merge_runs(&arrays::pairs(ids)?);
    let numbers: Vec<[u32; 3]> = runs.iter().map(|run| [run.src, run.dst, run.len]).collect();
    memory::filled(ids.py(), [runs.len(), 3], numbers.as_flattened(), |&number| i64::from(number))
}

/// Pairs, and where waves of them begin.
type Waves<'py> = (Bound<'py, PyArray2<i64>>, Bound<'py, PyArray1<i64>>);

/// Orders moves within one tier into waves.
#[pyfunction]
#[pyo3(name = "order_moves")]
pub(crate) fn py_order_moves<'py>(
    pairs: &Bound<'py, PyAny>,
    #[pyo3(from_py_with = args::num_blocks)] num_blocks: u32,
) -> PyResult<Waves<'py>> {
    let (ordered, starts) = order_moves(&arrays::pairs(pairs)?, num_blocks).map_err(to_py)?;
    let py = pairs.py();
    Ok((array(py, &ordered)?, memory::array(py, &starts, |&start| number(start))?))
}

/// For each transfer of a decision the earlier ones that must have finished before it begins.
#[pyfunction]
pub(crate) fn transfer_orders<'py>(decision: &Bound<'py, PyStepDecision>) -> PyResult<Bound<'py, PyTuple>> {
    let py = decision.py();
    let waits = orders(&decision.get().to_core(py)?).into_iter().map(|before| PyTuple::new(py, before));
    PyTuple::new(py, waits.collect::<PyResult<Vec<_>>>()?)
}

/// Writes the ids of the small blocks of a stretch of large ones.
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
    let must = || invalid(format!("out is {}, must be int64 [n]", arrays::describe(out)));
    let len = PyUntypedArrayMethods::len(out.cast::<PyArray1<i64>>().map_err(|_| must())?);
    let mut expanded = memory::reserved(len)?;
    expanded.resize(len, 0);
    span.expand(expanded.iter_mut()).map_err(to_py)?;
    memory::store(Target::<i64, Ix1>::new(out, "out", "int64 [n]"), &[expanded.len()], &expanded)
}
