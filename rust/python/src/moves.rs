//! Defragmentation of a manager's own blocks.

use crate::arrays::count;
use crate::errors::{invalid, to_py};
use crate::manager::PyBlockManager;
use blockyard_core::defrag::Goal;
use blockyard_core::{Cached, Fragmentation, Moves};
use pyo3::prelude::*;

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
    #[pyo3(signature = (goal, number, *, max_moves = 512, cached = "move"))]
    fn defragment(
        &self,
        goal: &str,
        #[pyo3(from_py_with = count)] number: u32,
        #[pyo3(from_py_with = count)] max_moves: u32,
        cached: &str,
    ) -> PyResult<PyDefragReport> {
        let goal = Goal::from_name(goal, number).map_err(to_py)?;
        let what = Cached::from_name(cached);
        let what = what.ok_or_else(|| invalid(format!("cached is {cached:?}, must be \"move\" or \"drop\"")))?;
        let moves = self.lock().defragment(goal, max_moves as usize, what);
        let Moves { planned, left, stuck, held, dropped } = moves;
        Ok(PyDefragReport { planned, left, stuck, held, dropped })
    }

    #[pyo3(signature = (*, page_blocks = 64))]
    fn fragmentation(&self, #[pyo3(from_py_with = count)] page_blocks: u32) -> PyResult<PyFragmentation> {
        let found = self.lock().fragmentation(page_blocks).map_err(to_py)?;
        let Fragmentation { max_id, gap, holes, empty_pages, tables, runs } = found;
        Ok(PyFragmentation { max_id: max_id.map(|block| block.0), gap, holes, empty_pages, tables, runs })
    }
}
