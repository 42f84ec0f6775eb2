//! Methods that end a step and its ticket.

use crate::convert::args::{self, Seconds};
use crate::convert::arrays::TicketArgument;
use crate::convert::errors::to_py;
use crate::decision::{PyPairs, PyStepDecision};
use crate::manager::PyBlockManager;
use crate::manager::shared::{handles, no_handles};
use blockyard_core::Pairs;
use numpy::PyArray1;
use pyo3::prelude::*;

fn core_pairs(py: Python<'_>, pairs: &[Py<PyPairs>]) -> PyResult<Vec<Pairs>> {
    pairs.iter().map(|pairs| pairs.get().to_core(py)).collect()
}

/// The calls, for the manager's own methods and for its [`StepOwner`](crate::manager::step_owner).
impl PyBlockManager {
    pub(crate) fn take(&self, py: Python<'_>, prefetch: bool, now: Option<Seconds>) -> PyResult<PyStepDecision> {
        self.open_tickets.warn(py, &self.shared)?;
        let decision = {
            let mut manager = self.lock();
            if let Some(Seconds(now)) = now {
                manager.set_now(now).map_err(to_py)?;
            }
            if prefetch { manager.take_prefetch() } else { manager.take_decision() }
        };
        self.open_tickets.note(py, decision.ticket, &self.shared);
        PyStepDecision::from_core(py, &decision)
    }

    pub(crate) fn end<'py>(
        &self,
        py: Python<'py>,
        ticket: TicketArgument,
        lost: &[Py<PyPairs>],
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        if lost.is_empty() {
            let none = no_handles(py)?;
            return self.lock().complete(ticket.0).map(|()| none).map_err(to_py);
        }
        let lost = core_pairs(py, lost)?;
        let hit = self.lock().fail(ticket.0, &lost).map_err(to_py)?;
        handles(py, &hit)
    }

    pub(crate) fn end_lost<'py>(&self, py: Python<'py>, ticket: TicketArgument) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let hit = self.lock().fail_whole(ticket.0).map_err(to_py)?;
        handles(py, &hit)
    }

    pub(crate) fn mark_lost<'py>(
        &self,
        py: Python<'py>,
        ticket: TicketArgument,
        lost: Option<Vec<Py<PyPairs>>>,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let hit = match lost {
            Some(lost) => {
                let lost = core_pairs(py, &lost)?;
                self.lock().lose(ticket.0, &lost)
            }
            None => self.lock().lose_whole(ticket.0),
        };
        let hit = hit.map_err(to_py)?;
        handles(py, &hit)
    }
}

#[pymethods]
impl PyBlockManager {
    /// End the step and return its transfers. Carry them out, then `complete` or `fail` the ticket.
    ///
    /// Args:
    ///     prefetch: let the step compute while its loads arrive. Until the ticket has ended, `append`, `slot_mapping`,
    ///         `block_table` and `block_tables` reject the sequences that it loads. If you have already appended to
    ///         such a sequence in this step, or requested its block table, the step computes with it:
    ///         `decision.prefetch` is then False, and the step waits for all its loads. Without `prefetch` it always
    ///         does, and these calls, except `block_table`, still reject loaded sequences to which the step has not
    ///         appended: request their slots and tables before.
    ///     now: time of the step in seconds, by any clock that never goes back, such as `time.monotonic`. The prefix cache
    ///         learns from it how soon conversations go on. If it is before that of the last step, no time has passed,
    ///         and time goes on from there. Without it each step counts as one second; after a step that had a time,
    ///         a step without one takes no time.
    /// Returns:
    ///     `StepDecision`.
    /// Raises:
    ///     InvalidArgumentError: `now` is not a finite number from 0 on.
    ///     StepOrderError: this is a `KVCache`'s manager: call `KVCache.step`, or `step` of a `Scheduler(cache)`. The
    ///         cache's manager also refuses `complete`, `fail` and `lose`.
    /// Warns:
    ///     RuntimeWarning: once, if more than `max_open_tickets` tickets are open; it names the oldest.
    #[pyo3(signature = (*, prefetch = false, now = None))]
    fn take_decision(
        &self,
        py: Python<'_>,
        prefetch: bool,
        #[pyo3(from_py_with = args::now)] now: Option<Seconds>,
    ) -> PyResult<PyStepDecision> {
        self.refuse_owned("take_decision")?;
        self.take(py, prefetch, now)
    }

    /// End a ticket whose transfers have ended.
    ///
    /// Until then its blocks stay leased, however long it takes. If the process or device that ran it has died and can
    /// no longer write, pass all its pairs as `lost`, or call `fail`. If it only hangs, `lose` marks its sequences and
    /// keeps the blocks leased.
    ///
    /// Args:
    ///     ticket: `decision.ticket`.
    ///     lost: the `Pairs` that did not land.
    /// Returns:
    ///     Sequences that lost bytes, uint64 `[n]`. They can only be freed.
    /// Raises:
    ///     UnknownTicketError: the ticket was never issued, or has ended.
    ///     MappingError: the ticket does not write such a block.
    #[expect(clippy::needless_pass_by_value, reason = "an argument from Python")]
    #[pyo3(signature = (ticket, lost = Vec::new()), text_signature = "($self, ticket, lost=())")]
    fn complete<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::ticket)] ticket: TicketArgument,
        #[pyo3(from_py_with = args::lost)] lost: Vec<Py<PyPairs>>,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        self.refuse_owned("complete")?;
        self.end(py, ticket, &lost)
    }

    /// End a ticket whose transfers did not land at all, for instance because they were never run.
    ///
    /// Args:
    ///     ticket: `decision.ticket`.
    /// Returns:
    ///     Sequences that lost bytes, uint64 `[n]`. They can only be freed.
    /// Raises:
    ///     UnknownTicketError: the ticket was never issued, or has ended.
    fn fail<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::ticket)] ticket: TicketArgument,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        self.refuse_owned("fail")?;
        self.end_lost(py, ticket)
    }

    /// Mark the sequences that have lost bytes while the ticket's other transfers still run.
    ///
    /// Args:
    ///     ticket: `decision.ticket`. It stays open; pass the same pairs to `complete` when it ends.
    ///     lost: the `Pairs` that are known not to land; None means all of the ticket's.
    /// Returns:
    ///     Sequences that lost bytes, uint64 `[n]`. They can only be freed.
    /// Raises:
    ///     UnknownTicketError: the ticket was never issued, or has ended.
    ///     MappingError: the ticket does not write such a block.
    #[pyo3(signature = (ticket, lost = None))]
    fn lose<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::ticket)] ticket: TicketArgument,
        #[pyo3(from_py_with = args::lost)] lost: Option<Vec<Py<PyPairs>>>,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        self.refuse_owned("lose")?;
        self.mark_lost(py, ticket, lost)
    }
}
