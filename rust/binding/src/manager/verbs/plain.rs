//! `plain_steps`: many plain steps of a manager in one call.

use crate::convert::args::{self, Seconds};
use crate::convert::arrays;
use crate::convert::errors::to_py;
use crate::decision::PyStepDecision;
use crate::manager::PyBlockManager;
use pyo3::prelude::*;

/// Append one token to each sequence and end the step, for many steps in one call.
///
/// Each step is what `append`, `take_decision(prefetch=True)`, `complete` and, for sequences with a full block,
/// `mark_computed` do. The call ends with the first step that has transfers, and before one for which the device has
/// too few free blocks.
///
/// Args:
///     manager: the manager.
///     sequences: handles, uint64 `[n]` without repeats, a list, or one.
///     times: for each step, as `now` of `take_decision`.
///     token_ids: ids of the tokens, uint32 `[steps * n]`, step by step, for the prefix cache.
/// Returns:
///     How many steps have ended. The peak of device blocks in use. And the decision of the step after them, if it has
///     transfers, else None: carry it out, `complete` its ticket, and call `mark_computed`.
/// Raises:
///     UnknownSequenceError, SequenceStateError: as `append`.
///     InvalidArgumentError: a handle is repeated, a time is not a finite number from 0 on, or there is not one token id
///         for each sequence and step; nothing has changed.
///     StepOrderError: this is a `KVCache`'s manager.
#[pyfunction]
#[pyo3(signature = (manager, sequences, times, *, token_ids = None))]
pub(crate) fn plain_steps(
    manager: &Bound<'_, PyBlockManager>,
    sequences: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = args::times)] times: Vec<Seconds>,
    token_ids: Option<&Bound<'_, PyAny>>,
) -> PyResult<(usize, usize, Option<PyStepDecision>)> {
    let (py, manager) = (manager.py(), manager.get());
    manager.refuse_owned("plain_steps")?;
    let sequences = arrays::sequences(sequences)?;
    let times: Vec<f64> = times.into_iter().map(|Seconds(time)| time).collect();
    let ids = token_ids.map(|ids| arrays::token_ids(ids, &"token_ids")?.into_vec()).transpose()?.unwrap_or_default();
    manager.open_tickets.warn(py, &manager.shared)?;
    let done = py.detach(|| manager.lock().plain_steps(&sequences, &ids, &times)).map_err(to_py)?;
    if let Some(decision) = &done.decision {
        manager.open_tickets.note(py, decision.ticket, &manager.shared);
    }
    let decision = done.decision.map(|decision| PyStepDecision::from_core(py, &decision)).transpose()?;
    Ok((done.steps, done.peak_blocks, decision))
}
