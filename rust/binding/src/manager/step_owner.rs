//! `StepOwner`: the only one that ends a manager's steps, such as a cache, which moves the bytes.

use crate::convert::args::{self, Seconds};
use crate::convert::arrays::TicketArgument;
use crate::convert::errors::step_order;
use crate::decision::{PyPairs, PyStepDecision};
use crate::manager::PyBlockManager;
use numpy::PyArray1;
use pyo3::prelude::*;

impl PyBlockManager {
    /// Fails if a `StepOwner` ends this manager's steps.
    pub(crate) fn refuse_owned(&self, call: &str) -> PyResult<()> {
        self.owner.get().map_or(Ok(()), |instead| {
            Err(step_order(format!(
                "{call} was called on a manager whose decisions a cache carries out: call {instead}"
            )))
        })
    }
}

/// Ends a manager's steps; the manager's own `take_decision`, `complete`, `fail` and `lose` then raise.
///
/// Args:
///     manager: a manager without an owner, for good.
///     instead: what others must call, for the error.
///
/// Raises:
///     StepOrderError: the manager has an owner, or a ticket is open.
#[pyclass(frozen, name = "StepOwner", module = "blockyard._core")]
pub(crate) struct PyStepOwner(Py<PyBlockManager>);

#[pymethods]
impl PyStepOwner {
    #[new]
    #[pyo3(signature = (manager, *, instead))]
    fn new(manager: Bound<'_, PyBlockManager>, instead: String) -> PyResult<Self> {
        let this = manager.get();
        this.refuse_owned("StepOwner")?;
        if let Some(ticket) = this.lock().open_tickets().next() {
            return Err(step_order(format!("ticket {} of the manager is open, must be completed first", ticket.0)));
        }
        this.owner.set(instead).map_err(|_| step_order("the manager has another owner".to_owned()))?;
        Ok(Self(manager.unbind()))
    }

    /// See `BlockManager.take_decision`.
    #[pyo3(signature = (*, prefetch = false, now = None))]
    fn take_decision(
        &self,
        py: Python<'_>,
        prefetch: bool,
        #[pyo3(from_py_with = args::now)] now: Option<Seconds>,
    ) -> PyResult<PyStepDecision> {
        self.0.get().take(py, prefetch, now)
    }

    /// See `BlockManager.complete`.
    #[expect(clippy::needless_pass_by_value, reason = "an argument from Python")]
    #[pyo3(signature = (ticket, lost = Vec::new()), text_signature = "($self, ticket, lost=())")]
    fn complete<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::ticket)] ticket: TicketArgument,
        #[pyo3(from_py_with = args::lost)] lost: Vec<Py<PyPairs>>,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        self.0.get().end(py, ticket, &lost)
    }

    /// See `BlockManager.fail`.
    fn fail<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::ticket)] ticket: TicketArgument,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        self.0.get().end_lost(py, ticket)
    }

    /// See `BlockManager.lose`.
    #[pyo3(signature = (ticket, lost = None))]
    fn lose<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::ticket)] ticket: TicketArgument,
        #[pyo3(from_py_with = args::lost)] lost: Option<Vec<Py<PyPairs>>>,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        self.0.get().mark_lost(py, ticket, lost)
    }
}
