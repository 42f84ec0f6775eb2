//! Defragmentation of a manager's own blocks.

use crate::arrays::count;
use crate::errors::to_py;
use crate::manager::PyBlockManager;
use blockyard_core::Moves;
use blockyard_core::defrag::Goal;
use pyo3::prelude::*;

/// What one call of `defragment` has decided.
#[pyclass(frozen, eq, get_all, name = "DefragReport", module = "blockyard._core")]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct PyDefragReport {
    planned: usize,
    left: usize,
    stuck: usize,
    held: usize,
}

#[pymethods]
impl PyDefragReport {
    fn __len__(&self) -> usize {
        self.planned
    }

    fn __repr__(&self) -> String {
        let Self { planned, left, stuck, held } = self;
        format!("DefragReport(planned={planned}, left={left}, stuck={stuck}, held={held})")
    }
}

#[pymethods]
impl PyBlockManager {
    #[pyo3(signature = (goal, number, *, max_moves = 512))]
    fn defragment(
        &self,
        goal: &str,
        #[pyo3(from_py_with = count)] number: u32,
        #[pyo3(from_py_with = count)] max_moves: u32,
    ) -> PyResult<PyDefragReport> {
        let goal = Goal::from_name(goal, number).map_err(to_py)?;
        let Moves { planned, left, stuck, held } = self.lock().defragment(goal, max_moves as usize);
        Ok(PyDefragReport { planned, left, stuck, held })
    }
}
