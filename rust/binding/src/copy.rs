//! Mappings of blocks, and views of caches in host memory that they run over. `blockyard_copy` checks all accesses.

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
///     src_blocks: number of blocks that can be read; ids are 0-based.
///     dst_blocks: number of blocks that can be written.
///     rule: `"swap"` copies from one cache to another: no destination repeats. `"copy"` copies within a cache:
///         also, no block is both read and written. `"move"` moves within a cache, as if all blocks were read before
///         any is written: chains and rings are allowed. `"exchange"` swaps the blocks of each pair: no block is named
///         twice, and `(-1, -1)` is padding.
/// Raises:
///     MappingError: the pairs are not ints `[n, 2]`, an id is out of range, or the pairs break the rule.
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

    /// Its rule: `"swap"`, `"copy"`, `"move"` or `"exchange"`.
    #[getter]
    const fn rule(&self) -> &'static str {
        self.0.rule().name()
    }

    /// The pairs, int64 `[n, 2]`, sorted by destination; those of an exchange in the given order.
    ///
    /// Padding and moves of a block onto itself are omitted.
    #[getter]
    fn pairs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray<i64, Ix2>>> {
        steps(py, self.0.pairs())
    }

    /// The number of blocks needed to read from and to write to: the highest id plus one, 0 without pairs.
    #[getter]
    fn reach(&self) -> (usize, usize) {
        self.0.reach().into()
    }

    /// The mapping as single steps, int64 `[n, 2]`, and the start of each group of steps, int64 `[groups + 1]`.
    ///
    /// Steps of a group run in sequence. A step to -1 sets a block aside; a step from -1 writes it to its destination.
    #[expect(clippy::type_complexity, reason = "two arrays")]
    fn steps<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyArray<i64, Ix2>>, Bound<'py, PyArray<i64, Ix1>>)> {
        let all = self.0.steps();
        let starts = memory::array(py, &all.starts, |&start| i64::try_from(start).unwrap_or(i64::MAX))?;
        Ok((steps(py, &all.steps)?, starts))
    }

    /// Split into mappings of at most `most` pairs, to run one after the other.
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

/// Returns pairs as a numpy array.
fn steps<'py>(py: Python<'py>, pairs: &[[u32; 2]]) -> PyResult<Bound<'py, PyArray<i64, Ix2>>> {
    let id = |&id: &u32| if id == ASIDE { -1 } else { i64::from(id) };
    memory::filled(py, [pairs.len(), 2], pairs.as_flattened(), id)
}

/// Views of caches in host memory, checked once, that mappings run over.
///
/// It keeps the memory of all arrays alive. Later changes to an array (its shape, read-only) have no effect here.
///
/// Args:
///     src: arrays to read, uint8 `[blocks, bytes]`, each row contiguous, rows not overlapping.
///     dst: arrays to write, as many and of the same widths. No two arrays may overlap; their rows may alternate within
///         one stride. None: `src` is changed in place, under the same conditions.
/// Raises:
///     InvalidArgumentError: an array has another form, is read-only or shares memory with another, or the two lists do
///         not match.
#[pyclass(name = "BoundViews", module = "blockyard._core", frozen)]
pub(crate) struct PyBoundViews(RowViews);

#[pymethods]
impl PyBoundViews {
    #[new]
    #[pyo3(signature = (src, dst=None))]
    fn new(src: &Bound<'_, PyAny>, dst: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        RowViews::new(src, dst)?.map(Self).map_err(to_py)
    }

    /// Run a mapping in each view.
    ///
    /// Args:
    ///     mapping: with the rule `"swap"` or `"copy"` between two lists; with any rule but `"swap"` within one.
    ///     num_threads: maximum number of threads for a large call.
    /// Raises:
    ///     MappingError: the mapping names blocks that the views do not have, or has another rule; nothing was copied.
    ///     OutOfMemoryError: not enough memory for rings of moves; nothing was moved.
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
