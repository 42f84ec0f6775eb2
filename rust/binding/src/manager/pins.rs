//! `manager.pins`: cached blocks that a reader outside keeps.

use crate::allocator::ids;
use crate::convert::args;
use crate::convert::arrays::Handle;
use crate::convert::errors::to_py;
use crate::manager::prompts::{self, KeySpecs, TokenIds};
use crate::manager::shared::{Shared, handles};
use blockyard_core::{BlockId, Expired, PinId};
use numpy::PyArray1;
use pyo3::prelude::*;

/// What `BlockManager.expire` ended or found to be late for the first time.
#[pyclass(frozen, get_all, name = "Expired", module = "blockyard._core")]
pub(crate) struct PyExpired {
    /// Tickets that ended, a list of ints. Their transfers must not run any more.
    tickets: Vec<u64>,
    /// Pins that ended, a list of ints.
    pins: Vec<u64>,
    /// Submitted tickets that are late, a list of ints. Their blocks are quarantined from now on.
    overdue: Vec<u64>,
    /// Sequences that waited for either kind of ticket, uint64 `[n]`. They can only be freed.
    sequences: Py<PyArray1<u64>>,
}

impl PyExpired {
    pub(crate) fn from_core(py: Python<'_>, expired: &Expired) -> PyResult<Self> {
        Ok(Self {
            tickets: expired.tickets.iter().map(|ticket| ticket.0).collect(),
            pins: expired.pins.iter().map(|pin| pin.0).collect(),
            overdue: expired.overdue.iter().map(|ticket| ticket.0).collect(),
            sequences: handles(py, &expired.sequences)?.unbind(),
        })
    }
}

#[pymethods]
impl PyExpired {
    fn __repr__(&self) -> String {
        let Self { tickets, pins, overdue, .. } = self;
        format!("Expired(tickets={tickets:?}, pins={pins:?}, overdue={overdue:?})")
    }
}

/// A manager's pins, as `manager.pins`. A pin keeps cached device blocks for a reader such as a connector.
///
/// Pinned blocks are neither evicted nor written, whatever becomes of their sequences. A pin ends with `unpin`, or with
/// `manager.expire(now)` at its deadline if it was not submitted. Deadlines are numbers of a clock of yours.
///
/// Example:
///     >>> from blockyard import BlockManager
///     >>> manager = BlockManager(block_size=4, device_blocks=8, prefix_caching=True)
///     >>> sequence = manager.allocate([1, 2, 3, 4, 5])
///     >>> ticket = manager.take_decision().ticket
///     >>> manager.mark_computed([sequence])
///     >>> _ = manager.complete(ticket)
///     >>> pin = manager.pins.pin(sequence, deadline=30)
///     >>> manager.pins.blocks(pin).tolist()
///     [0]
///     >>> manager.pins.unpin(pin)
#[pyclass(frozen, name = "Pins", module = "blockyard._core")]
pub(crate) struct PyPins(Shared);

impl PyPins {
    pub(crate) const fn new(shared: Shared) -> Self {
        Self(shared)
    }
}

#[pymethods]
impl PyPins {
    /// Pin the published device blocks of a sequence.
    ///
    /// Args:
    ///     sequence: handle of a sequence on the device.
    ///     deadline: time on the caller's clock, 0 to 2^64 - 1.
    /// Returns:
    ///     The pin's number.
    /// Raises:
    ///     OutOfBlocksError: pins would hold more device blocks than `max_pinned` allows.
    ///     UnknownSequenceError: there is no such sequence.
    ///     SequenceStateError: the sequence is not on the device, is still loading, or has lost bytes.
    fn pin(
        &self,
        #[pyo3(from_py_with = args::sequence)] sequence: Handle,
        #[pyo3(from_py_with = args::deadline)] deadline: u64,
    ) -> PyResult<u64> {
        self.0.lock().pin(sequence.0, deadline).map(|pin| pin.0).map_err(to_py)
    }

    /// Pin the blocks at the start of a prompt that are cached on the device.
    ///
    /// Args:
    ///     prompt: token ids, uint32 `[tokens]` or a list of ints.
    ///     deadline: time on the caller's clock, 0 to 2^64 - 1.
    ///     salt: of its tenant, bytes.
    ///     lora_id: its adapter; 0 for none.
    /// Returns:
    ///     The pin's number, and the tokens in its blocks.
    /// Raises:
    ///     OutOfBlocksError: pins would hold more device blocks than `max_pinned` allows.
    ///     InvalidArgumentError: a token id is out of range.
    #[pyo3(signature = (prompt, deadline, *, salt = None, lora_id = 0))]
    fn pin_prompt(
        &self,
        prompt: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::deadline)] deadline: u64,
        salt: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
    ) -> PyResult<(u64, u32)> {
        let (tokens, specs) = ([TokenIds::new(prompt, &"prompt")?], KeySpecs::one(salt, lora_id)?);
        let pinned = self
            .0
            .with(|manager| prompts::lend(&tokens, &specs, &[], |prompts| manager.pin_prompt(&prompts[0], deadline)))?;
        pinned.map(|(pin, cached)| (pin.0, cached)).map_err(to_py)
    }

    /// Return the blocks of a pin, in the order of their tokens.
    ///
    /// Args:
    ///     pin: its number.
    /// Returns:
    ///     Block ids, int32 `[n]`.
    /// Raises:
    ///     UnknownTicketError: the pin has ended or expired.
    fn blocks<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::pin)] pin: u64,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let blocks = self.0.lock().pinned_blocks(PinId(pin)).map(<[BlockId]>::to_vec).map_err(to_py)?;
        ids(py, &blocks)
    }

    /// Note that the reader's transfer has begun: from now on only `unpin` ends the pin.
    ///
    /// Args:
    ///     pin: its number.
    /// Raises:
    ///     UnknownTicketError: the pin has ended or expired; its blocks must not be read.
    fn submit(&self, #[pyo3(from_py_with = args::pin)] pin: u64) -> PyResult<()> {
        self.0.lock().submit_pin(PinId(pin)).map_err(to_py)
    }

    /// End a pin: its reader is done.
    ///
    /// Args:
    ///     pin: its number.
    /// Raises:
    ///     UnknownTicketError: the pin has ended or expired.
    fn unpin(&self, #[pyo3(from_py_with = args::pin)] pin: u64) -> PyResult<()> {
        self.0.lock().unpin(PinId(pin)).map_err(to_py)
    }
}
