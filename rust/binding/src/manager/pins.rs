//! `manager.pins`: cached blocks kept for an external reader.

use crate::allocator::ids;
use crate::convert::args;
use crate::convert::arrays::Handle;
use crate::convert::errors::to_py;
use crate::manager::prompts::{self, Extras, KeySpecs, TokenIds};
use crate::manager::shared::{Shared, in_class};
use blockyard_core::{BlockId, PinId, Tier};
use numpy::PyArray1;
use pyo3::prelude::*;

/// A manager's pins; available as `manager.pins`. A pin keeps cached device blocks for a reader such as a connector.
///
/// Pinned blocks are neither evicted nor written, even after their sequences are freed. Only `unpin` ends a pin, so
/// call it even for a reader that has died. Pins hold at most the fraction `max_pinned` of the device blocks.
///
/// Example:
///     >>> from blockyard import BlockManager
///     >>> manager = BlockManager(block_size=4, device_blocks=8, prefix_caching=True)
///     >>> sequence = manager.allocate([1, 2, 3, 4, 5])
///     >>> ticket = manager.take_decision().ticket
///     >>> manager.mark_computed([sequence])
///     >>> _ = manager.complete(ticket)
///     >>> pin = manager.pins.pin(sequence)
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
    /// Returns:
    ///     The number of the pin.
    /// Raises:
    ///     OutOfBlocksError: pins would hold more device blocks than `max_pinned` allows.
    ///     UnknownSequenceError: there is no such sequence.
    ///     SequenceStateError: the sequence is not on the device, is still loading, or has lost bytes.
    fn pin(&self, #[pyo3(from_py_with = args::sequence)] sequence: Handle) -> PyResult<u64> {
        self.0.lock().pin(sequence.0).map(|pin| pin.0).map_err(to_py)
    }

    /// Pin the cached device blocks at the start of a prompt.
    ///
    /// Args:
    ///     prompt: token ids, uint32 `[tokens]` or a list of ints.
    ///     salt: salt of its tenant, bytes.
    ///     lora_id: its adapter; 0 for none.
    /// Returns:
    ///     The number of the pin, and the number of tokens in its blocks.
    /// Raises:
    ///     OutOfBlocksError: pins would hold more device blocks than `max_pinned` allows.
    ///     InvalidArgumentError: a token id is out of range.
    #[pyo3(signature = (prompt, *, salt = None, lora_id = 0))]
    fn pin_prompt(
        &self,
        prompt: &Bound<'_, PyAny>,
        salt: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
    ) -> PyResult<(u64, u32)> {
        let (tokens, specs) = ([TokenIds::new(prompt, &"prompt")?], KeySpecs::one(salt, lora_id)?);
        let pinned = self.0.with(|manager| {
            prompts::lend(&tokens, &specs, &Extras::default(), |prompts| manager.pin_prompt(&prompts[0]))
        })?;
        pinned.map(|(pin, cached)| (pin.0, cached)).map_err(to_py)
    }

    /// Return the blocks of a pin, in the order of their tokens.
    ///
    /// Args:
    ///     pin: its number.
    /// Returns:
    ///     Block ids, int32 `[n]`.
    /// Raises:
    ///     UnknownTicketError: the pin has ended, or never existed.
    fn blocks<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::pin)] pin: u64,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let manager = self.0.lock();
        let blocks = manager.pinned_blocks(PinId(pin)).map(<[BlockId]>::to_vec).map_err(to_py)?;
        let blocks = in_class(&manager, Tier::Device, blocks);
        drop(manager);
        ids(py, &blocks)
    }

    /// End a pin when its reader is done.
    ///
    /// Args:
    ///     pin: its number.
    /// Raises:
    ///     UnknownTicketError: the pin has ended, or never existed.
    fn unpin(&self, #[pyo3(from_py_with = args::pin)] pin: u64) -> PyResult<()> {
        self.0.lock().unpin(PinId(pin)).map_err(to_py)
    }
}
