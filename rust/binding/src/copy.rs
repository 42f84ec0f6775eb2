//! Mappings of blocks, and views of caches in host memory over which they run. What they may touch is checked by
//! `blockyard_copy`.

use crate::convert::args::{self, Argument, shown};
use crate::convert::arrays;
use crate::convert::errors::{bad_mapping, invalid, out_of_memory};
use crate::convert::memory::{self, RowViews};
use blockyard_copy::{ASIDE, CopyError, Mapping, MappingRule};
use numpy::{Ix1, Ix2, PyArray};
use pyo3::prelude::*;
use std::fmt::Display;

pub(crate) fn to_py(error: CopyError) -> PyErr {
    match error {
        CopyError::OutOfRange { .. }
        | CopyError::Repeated { .. }
        | CopyError::ReadAndWritten { .. }
        | CopyError::Reach { .. }
        | CopyError::Place { .. } => bad_mapping(error.to_string()),
        CopyError::OutOfMemory { bytes } => out_of_memory(bytes),
        _ => invalid(error.to_string()),
    }
}

impl<'py> Argument<'py> for MappingRule {
    fn read(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
        let word: String = value.extract().unwrap_or_default();
        let found = MappingRule::ALL.into_iter().find(|rule| rule.name() == word);
        let must = "'swap', 'copy', 'move' or 'exchange'";
        found.ok_or_else(|| invalid(format!("{name} is {}, must be {must}", shown(value))))
    }
}

/// Pairs of block ids `(from, to)`, checked and ordered by destination.
///
/// `Mapping([[3, 0], [5, 1]], src_blocks=8, dst_blocks=4, rule="swap")`
///
/// Args:
///     pairs: int64 `[n, 2]`, or other ints, as for `Pairs`.
///     src_blocks: blocks that can be read; ids are 0-based.
///     dst_blocks: blocks that can be written.
///     rule: `"swap"` copies from one cache to another: no destination repeats. `"copy"` copies within a cache:
///         besides, no block is both read and written. `"move"` moves within a cache, as if all were read before the
///         first is written: chains and rings are legal. `"exchange"` lets the blocks of a pair change places: no block
///         is named twice, and `(-1, -1)` is padding.
/// Raises:
///     MappingError: the pairs are no ints `[n, 2]`, an id is out of range, or they break the rule.
///     InvalidArgumentError: there is no such rule.
#[pyclass(name = "Mapping", module = "blockyard._core", frozen)]
pub(crate) struct PyMapping(pub(crate) Mapping);

#[pymethods]
impl PyMapping {
    #[new]
    #[pyo3(signature = (pairs, *, src_blocks, dst_blocks, rule))]
    fn new(
        pairs: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::src_blocks)] src_blocks: usize,
        #[pyo3(from_py_with = args::dst_blocks)] dst_blocks: usize,
        #[pyo3(from_py_with = args::rule)] rule: MappingRule,
    ) -> PyResult<Self> {
        let entries = arrays::id_pairs(pairs)?;
        Mapping::new(&entries, [src_blocks, dst_blocks], rule).map(Self).map_err(to_py)
    }

    /// What it does: `"swap"`, `"copy"`, `"move"` or `"exchange"`.
    #[getter]
    const fn rule(&self) -> &'static str {
        self.0.rule().name()
    }

    /// The pairs, int64 `[n, 2]`, in the order of their destinations, those of an exchange as they were given.
    ///
    /// Padding and moves of a block onto itself are left out.
    #[getter]
    fn pairs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray<i64, Ix2>>> {
        steps(py, self.0.pairs())
    }

    /// Blocks that there must be to read and to write: one more than the highest that is named, 0 if none is.
    #[getter]
    fn reach(&self) -> (usize, usize) {
        self.0.reach().into()
    }

    /// All as steps, int64 `[n, 2]`, and where each group of them begins, int64 `[groups + 1]`.
    ///
    /// Steps of a group run one after the other. To -1, a block is set aside; from -1, it is put where it belongs.
    #[expect(clippy::type_complexity, reason = "two arrays")]
    fn steps<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyArray<i64, Ix2>>, Bound<'py, PyArray<i64, Ix1>>)> {
        let all = self.0.steps();
        let starts = memory::array(py, &all.starts, |&start| i64::try_from(start).unwrap_or(i64::MAX))?;
        Ok((steps(py, &all.steps)?, starts))
    }

    /// Cut it into mappings of at most `most` pairs, to be run one after the other.
    ///
    /// Moves that depend on one another stay together.
    fn split(&self, #[pyo3(from_py_with = args::most)] most: usize) -> Vec<Self> {
        self.0.split(most).into_iter().map(Self).collect()
    }

    fn __len__(&self) -> usize {
        self.0.pairs().len()
    }

    fn __repr__(&self) -> String {
        format!("Mapping({} pairs to {})", self.0.pairs().len(), self.0.rule().name())
    }
}

/// Pairs as Python sees them.
fn steps<'py>(py: Python<'py>, pairs: &[[u32; 2]]) -> PyResult<Bound<'py, PyArray<i64, Ix2>>> {
    let id = |&id: &u32| if id == ASIDE { -1 } else { i64::from(id) };
    memory::filled(py, [pairs.len(), 2], pairs.as_flattened(), id)
}

/// Views of caches in host memory, checked once, over which mappings run.
///
/// It keeps the memory of all arrays. What is done to an array later (another shape, read-only) changes nothing here.
///
/// Args:
///     src: arrays to read, uint8 `[blocks, bytes]`, rows contiguous and apart.
///     dst: as many to write, of the same widths, apart from those that are read and from one another: side by side, or
///         with rows that alternate within one stride. None: `src` is changed in place, and apart in the same sense.
/// Raises:
///     InvalidArgumentError: an array is of another form, cannot be written or shares memory with another, or the two
///         lists do not fit one another.
#[pyclass(name = "BoundViews", module = "blockyard._core", frozen)]
pub(crate) struct PyBoundViews(RowViews);

#[pymethods]
impl PyBoundViews {
    #[new]
    #[pyo3(signature = (src, dst=None))]
    fn new(src: &Bound<'_, PyAny>, dst: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        RowViews::new(src, dst)?.map(Self).map_err(to_py)
    }

    /// Carry a mapping out in each view.
    ///
    /// Args:
    ///     mapping: by the rule `"swap"` or `"copy"` between two lists, by any but `"swap"` within one.
    ///     num_threads: most threads that share a large call.
    /// Raises:
    ///     MappingError: it names blocks that the views do not have, or is by another rule; nothing was copied.
    ///     OutOfMemoryError: rings of moves need more memory than there is; nothing was moved.
    #[pyo3(signature = (mapping, *, num_threads))]
    fn run(
        &self,
        py: Python<'_>,
        mapping: &Bound<'_, PyMapping>,
        #[pyo3(from_py_with = args::num_threads)] num_threads: usize,
    ) -> PyResult<()> {
        self.0.run(py, &mapping.get().0, num_threads).map_err(to_py)
    }
}
