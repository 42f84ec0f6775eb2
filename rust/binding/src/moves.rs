//! Defragmentation of a manager's own blocks.

use crate::args::{self, Argument};
use crate::arrays;
use crate::defrag::Goals;
use crate::errors::{invalid, to_py};
use crate::manager::PyBlockManager;
use blockyard_core::defrag::{Budget, Goal, Wanted};
use blockyard_core::{Cached, Fragmentation, Moves};
use pyo3::prelude::*;
use pyo3::types::PyString;

/// What one call of `defragment` has decided.
#[pyclass(frozen, eq, get_all, name = "DefragReport", module = "blockyard._core")]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct PyDefragReport {
    planned: usize,
    left: usize,
    stuck: usize,
    held: usize,
    dropped: usize,
}

#[pymethods]
impl PyDefragReport {
    fn __len__(&self) -> usize {
        self.planned
    }

    fn __repr__(&self) -> String {
        let Self { planned, left, stuck, held, dropped } = self;
        format!("DefragReport(planned={planned}, left={left}, stuck={stuck}, held={held}, dropped={dropped})")
    }
}

/// How the device's blocks lie.
#[pyclass(frozen, eq, get_all, name = "Fragmentation", module = "blockyard._core")]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct PyFragmentation {
    max_id: Option<u32>,
    gap: u32,
    holes: usize,
    empty_pages: usize,
    tables: usize,
    runs: usize,
}

#[pymethods]
impl PyFragmentation {
    fn __repr__(&self) -> String {
        let Self { max_id, gap, holes, empty_pages, tables, runs } = self;
        let max_id = max_id.map_or_else(|| "None".to_owned(), |id| id.to_string());
        let start = format!("Fragmentation(max_id={max_id}, gap={gap}, holes={holes}, empty_pages={empty_pages}");
        format!("{start}, tables={tables}, runs={runs})")
    }
}

#[pymethods]
impl PyBlockManager {
    #[pyo3(signature = (goal, number = None, *, sequences = None, max_moves = 512, max_bytes = None,
        block_bytes = None, cached = "move"))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn defragment(
        &self,
        goal: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::number)] number: Option<u32>,
        sequences: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::max_moves)] max_moves: u32,
        #[pyo3(from_py_with = args::max_bytes)] max_bytes: Option<u64>,
        #[pyo3(from_py_with = args::block_bytes)] block_bytes: Option<u64>,
        cached: &str,
    ) -> PyResult<PyDefragReport> {
        let goals = goals(goal, number)?;
        let what = Cached::from_name(cached);
        let what =
            what.ok_or_else(|| invalid(format!("cached is {cached:?}, must be \"move\", \"drop\" or \"exchange\"")))?;
        let block_bytes = match (max_bytes, block_bytes.unwrap_or(0)) {
            (Some(bytes), 0) => {
                return Err(invalid(format!("block_bytes is 0, must be at least 1 for max_bytes of {bytes}")));
            }
            (Some(_), block_bytes) => block_bytes,
            (None, _) => 0,
        };
        let budget = Budget { moves: max_moves as usize, bytes: max_bytes.unwrap_or(u64::MAX), block_bytes };
        let sequences = sequences.map(arrays::sequences).transpose()?;
        let Moves { planned, left, stuck, held, dropped } =
            self.lock().defragment(&goals, sequences.as_deref(), budget, what).map_err(to_py)?;
        Ok(PyDefragReport { planned, left, stuck, held, dropped })
    }

    #[pyo3(signature = (*, page_blocks = 64))]
    fn fragmentation(&self, #[pyo3(from_py_with = args::page_blocks)] page_blocks: u32) -> PyResult<PyFragmentation> {
        let found = self.lock().fragmentation(page_blocks).map_err(to_py)?;
        let Fragmentation { max_id, gap, holes, empty_pages, tables, runs } = found;
        Ok(PyFragmentation { max_id: max_id.map(|block| block.0), gap, holes, empty_pages, tables, runs })
    }
}

/// One goal by its name and number, or several.
fn goals(goal: &Bound<'_, PyAny>, number: Option<u32>) -> PyResult<Vec<Wanted>> {
    match (goal.cast::<PyString>(), number) {
        (Ok(name), Some(number)) => Ok(vec![Goal::from_name(name.to_str()?, number).map_err(to_py)?.into()]),
        (Ok(name), None) => {
            let name = name.to_str()?;
            Err(invalid(format!("number is None, must be an int for the goal {name:?}")))
        }
        (Err(_), None) => Goals::read(goal, &"goal").map(|Goals(goals)| goals),
        (Err(_), Some(number)) => {
            let must = "must be None where the goals have numbers of their own";
            Err(invalid(format!("number is {number}, {must}")))
        }
    }
}
