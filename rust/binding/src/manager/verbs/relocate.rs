//! Methods that move sequences between tiers.

use crate::convert::args;
use crate::convert::tiers::tier;
use crate::manager::PyBlockManager;
use crate::manager::fit::PyFit;
use blockyard_core::Tier;
use pyo3::prelude::*;

#[pymethods]
impl PyBlockManager {
    /// Return whether `swap_out` can move the sequences: they are not moving already, and the tier has room.
    ///
    /// Args:
    ///     sequences: handles, all of one tier; uint64 `[n]`, a list, or one.
    ///     to: `"host"` or `"external"`.
    /// Returns:
    ///     `Fit`, true if they can move now.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    ///     InvalidArgumentError: a handle is repeated, or `to` is another tier.
    #[pyo3(signature = (sequences, to = "host"))]
    fn can_swap_out(&self, sequences: &Bound<'_, PyAny>, to: &str) -> PyResult<PyFit> {
        let to = tier("to", to, &[Tier::Host, Tier::External])?;
        self.batch(sequences, |manager, sequences| manager.can_swap_out(sequences, to)).map(Into::into)
    }

    /// Move sequences away from the device in this step's decision: from the device to the host, or from either to
    /// the external tier. A block that several of them share moves once.
    ///
    /// Args:
    ///     sequences: handles, all of one tier; uint64 `[n]`, a list, or one.
    ///     to: `"host"` or `"external"`.
    /// Raises:
    ///     OutOfBlocksError: the tier has too few free blocks for all of them.
    ///     UnknownSequenceError: there is no such sequence.
    ///     SequenceStateError: a sequence is in another tier, moving, written in this step, or has lost bytes.
    ///     InvalidArgumentError: a handle is repeated, or `to` is another tier.
    #[pyo3(signature = (sequences, to = "host"))]
    fn swap_out(&self, sequences: &Bound<'_, PyAny>, to: &str) -> PyResult<()> {
        let to = tier("to", to, &[Tier::Host, Tier::External])?;
        self.batch(sequences, |manager, sequences| manager.swap_out(sequences, to))
    }

    /// Return whether `swap_in` can move the sequences. On the device, there must also be room for one more token
    /// each, with the watermark still free.
    ///
    /// Args:
    ///     sequences: handles, all of one tier; uint64 `[n]`, a list, or one.
    ///     to: `"device"` or `"host"`.
    ///     lookahead: number of slots beyond that token, or of draft tokens after it; a recurrent group has a state for each.
    /// Returns:
    ///     `Fit`, true if they can move now.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    ///     InvalidArgumentError: a handle is repeated, or `to` is another tier.
    #[pyo3(signature = (sequences, to = "device", *, lookahead = 0))]
    fn can_swap_in(
        &self,
        sequences: &Bound<'_, PyAny>,
        to: &str,
        #[pyo3(from_py_with = args::lookahead)] lookahead: u32,
    ) -> PyResult<PyFit> {
        let to = tier("to", to, &[Tier::Device, Tier::Host])?;
        self.batch(sequences, |manager, sequences| manager.can_swap_in(sequences, to, lookahead)).map(Into::into)
    }

    /// Move sequences back towards the device in this step's decision: from the external tier to the host, or from
    /// either to the device.
    ///
    /// Args:
    ///     sequences: handles, all of one tier; uint64 `[n]`, a list, or one.
    ///     to: `"device"`, or `"host"` for sequences in the external tier.
    /// Raises:
    ///     OutOfBlocksError, UnknownSequenceError, SequenceStateError, InvalidArgumentError: as `swap_out`.
    #[pyo3(signature = (sequences, to = "device"))]
    fn swap_in(&self, sequences: &Bound<'_, PyAny>, to: &str) -> PyResult<()> {
        let to = tier("to", to, &[Tier::Device, Tier::Host])?;
        self.batch(sequences, |manager, sequences| manager.swap_in(sequences, to))
    }
}
