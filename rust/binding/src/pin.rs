//! Pins, and deadlines of tickets.

use crate::allocator::ids;
use crate::args;
use crate::arrays::{self, Handle, Ticket};
use crate::decision::tier;
use crate::errors::to_py;
use crate::manager::{PyBlockManager, handles};
use crate::memory;
use blockyard_core::{BlockId, Expired, KeySpec, PinId, Prompt};
use numpy::PyArray1;
use pyo3::prelude::*;

/// What a moment has put an end to.
#[pyclass(frozen, get_all, name = "Expired", module = "blockyard._core")]
pub(crate) struct PyExpired {
    tickets: Vec<u64>,
    pins: Vec<u64>,
    overdue: Vec<u64>,
    sequences: Py<PyArray1<u64>>,
}

#[pymethods]
impl PyBlockManager {
    fn pin(
        &self,
        #[pyo3(from_py_with = args::sequence)] sequence: Handle,
        #[pyo3(from_py_with = args::deadline)] deadline: u64,
    ) -> PyResult<u64> {
        self.lock().pin(sequence.0, deadline).map(|pin| pin.0).map_err(to_py)
    }

    #[pyo3(signature = (prompt, deadline, *, salt = None, lora_id = 0))]
    fn pin_prompt(
        &self,
        prompt: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::deadline)] deadline: u64,
        salt: Option<&[u8]>,
        #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
    ) -> PyResult<(u64, u32)> {
        let spec = KeySpec::new(salt, lora_id);
        let pinned = memory::lend(&[arrays::token_ids(prompt, "prompt")?], |tokens| {
            self.lock().pin_prompt(&Prompt { tokens: tokens[0], spec, extras: &[] }, deadline)
        })?;
        pinned.map(|(pin, cached)| (pin.0, cached)).map_err(to_py)
    }

    fn pinned_blocks<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::pin)] pin: u64,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let blocks = self.lock().pinned_blocks(PinId(pin)).map(<[BlockId]>::to_vec).map_err(to_py)?;
        ids(py, &blocks)
    }

    fn submit_pin(&self, #[pyo3(from_py_with = args::pin)] pin: u64) -> PyResult<()> {
        self.lock().submit_pin(PinId(pin)).map_err(to_py)
    }

    fn unpin(&self, #[pyo3(from_py_with = args::pin)] pin: u64) -> PyResult<()> {
        self.lock().unpin(PinId(pin)).map_err(to_py)
    }

    fn set_deadline(
        &self,
        #[pyo3(from_py_with = args::ticket)] ticket: Ticket,
        #[pyo3(from_py_with = args::deadline)] deadline: u64,
    ) -> PyResult<()> {
        self.lock().set_deadline(ticket.0, deadline).map_err(to_py)
    }

    fn submit(&self, #[pyo3(from_py_with = args::ticket)] ticket: Ticket) -> PyResult<()> {
        self.lock().submit(ticket.0).map_err(to_py)
    }

    fn expire(&self, py: Python<'_>, #[pyo3(from_py_with = args::now)] now: u64) -> PyResult<PyExpired> {
        let Expired { tickets, pins, overdue, sequences } = self.lock().expire(now).map_err(to_py)?;
        Ok(PyExpired {
            tickets: tickets.iter().map(|ticket| ticket.0).collect(),
            pins: pins.iter().map(|pin| pin.0).collect(),
            overdue: overdue.iter().map(|ticket| ticket.0).collect(),
            sequences: handles(py, &sequences)?.unbind(),
        })
    }

    fn quarantined_blocks<'py>(&self, py: Python<'py>, tier: &str) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let blocks = self.lock().quarantined(self::tier(tier)?);
        ids(py, &blocks)
    }
}
