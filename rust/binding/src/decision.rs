//! `Pairs` and `StepDecision`: the transfers that the scheduler receives at the end of each step.

use crate::convert::args::{self, Argument, refused};
use crate::convert::arrays;
use crate::convert::errors::{invalid, to_py};
use crate::convert::memory;
use crate::convert::tiers::tier;
use blockyard_core::{Kind, MAX_CLASSES, MAX_DECISION_BYTES, StepDecision, TicketId, Tier};
use numpy::{PyArray2, PyUntypedArrayMethods};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple, PyType};
use std::fmt::Display;

/// An int64 array `[n, 2]` of pairs.
pub(crate) fn array<'py>(py: Python<'py>, ids: &[[u32; 2]]) -> PyResult<Bound<'py, PyArray2<i64>>> {
    memory::filled(py, [ids.len(), 2], ids.as_flattened(), |&id| i64::from(id))
}

/// Pairs of block ids between two tiers.
///
/// Args:
///     src: tier to read.
///     dst: tier to write.
///     ids: `(from, to)`: int64 `[n, 2]`, another array of ints, or a sequence of pairs.
///     page_class: page class of the blocks, see `CacheGroup.with_blocks`.
/// Raises:
///     MappingError: an id is negative or too large, or the array has another dtype or shape.
///     InvalidArgumentError: a tier's name is unknown.
///
/// Example:
///     >>> from blockyard import Pairs
///     >>> pairs = Pairs("device", "host", [(3, 0), (4, 1)])
///     >>> len(pairs), pairs.ids.tolist()
///     (2, [[3, 0], [4, 1]])
#[pyclass(frozen, name = "Pairs", module = "blockyard._core")]
pub(crate) struct PyPairs {
    src: Tier,
    dst: Tier,
    page_class: u8,
    ids: Py<PyArray2<i64>>,
}

/// The arguments of `Pairs`, for pickling.
type PairsState = (&'static str, &'static str, Py<PyArray2<i64>>, u8);

impl PyPairs {
    pub(crate) fn from_core(py: Python<'_>, pairs: &blockyard_core::Pairs) -> PyResult<Py<Self>> {
        let blockyard_core::Pairs { src, dst, page_class, ref ids } = *pairs;
        Py::new(py, Self { src, dst, page_class, ids: array(py, ids)?.unbind() })
    }

    pub(crate) fn to_core(&self, py: Python<'_>) -> PyResult<blockyard_core::Pairs> {
        let ids = arrays::pairs(self.ids.bind(py))?;
        Ok(blockyard_core::Pairs { src: self.src, dst: self.dst, page_class: self.page_class, ids })
    }
}

impl<'py> Argument<'py> for Py<PyPairs> {
    fn read(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
        value.extract().map_err(|error| refused(error, value, name, "Pairs"))
    }
}

#[pymethods]
impl PyPairs {
    #[new]
    #[pyo3(signature = (src, dst, ids, page_class = 0))]
    fn new(
        src: &str,
        dst: &str,
        ids: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::page_class)] page_class: usize,
    ) -> PyResult<Self> {
        let (src, dst) = (tier("src", src, &Tier::ALL)?, tier("dst", dst, &Tier::ALL)?);
        let ids = array(ids.py(), &arrays::pairs(ids)?)?.unbind();
        let too_large = || invalid(format!("page_class is {page_class}, must be below {MAX_CLASSES}"));
        let page_class = u8::try_from(page_class).ok().filter(|&class| usize::from(class) < MAX_CLASSES);
        Ok(Self { src, dst, page_class: page_class.ok_or_else(too_large)?, ids })
    }

    /// Tier to read.
    #[getter]
    fn src(&self) -> &'static str {
        self.src.name()
    }

    /// Tier to write.
    #[getter]
    fn dst(&self) -> &'static str {
        self.dst.name()
    }

    /// Page class of the blocks; 0 if there is only one.
    #[getter]
    const fn page_class(&self) -> u8 {
        self.page_class
    }

    /// Block ids `(from, to)`, int64 `[n, 2]`.
    #[getter]
    fn ids(&self, py: Python<'_>) -> Py<PyArray2<i64>> {
        self.ids.clone_ref(py)
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        // Python code may have changed the array's shape.
        self.ids.bind(py).shape().first().copied().unwrap_or_default()
    }

    fn __eq__(&self, other: &Bound<'_, Self>) -> PyResult<bool> {
        let (py, other) = (other.py(), other.get());
        Ok(self.to_core(py)? == other.to_core(py)?)
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyType>, PairsState) {
        let this = slf.get();
        (slf.get_type(), (this.src(), this.dst(), this.ids(slf.py()), this.page_class))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let class = if self.page_class > 0 { format!(", page_class={}", self.page_class) } else { String::new() };
        format!("Pairs('{}', '{}', {} pairs{class})", self.src, self.dst, self.__len__(py))
    }
}

/// The transfers of one step. Its ticket holds leases on all their blocks until you complete or fail it.
///
/// Each kind is a tuple with one `Pairs` for each pair of tiers and page class, empty if there is nothing to do. `after` lists the
/// tickets, possibly including this one, whose device reads must finish before this step writes to the device.
///
/// Args:
///     ticket: number to complete or fail.
///     transfers: kinds and pairs, in any order; they are sorted so that they are safe to run in sequence.
///     after: tickets to wait for.
///     prefetch: whether the step computes without reading the blocks that it loads.
/// Attributes:
///     MAX_BYTES: maximum size of a decision for `to_bytes` and `from_bytes`.
/// Raises:
///     InvalidArgumentError: a kind's name is unknown.
///
/// Example:
///     >>> from blockyard import BlockManager
///     >>> manager = BlockManager(block_size=16, device_blocks=8, host_blocks=8)
///     >>> sequence = manager.allocate(20)
///     >>> _ = manager.complete(manager.take_decision().ticket)
///     >>> manager.swap_out([sequence])
///     >>> decision = manager.take_decision()
///     >>> [(kind, pairs.ids.tolist()) for kind, pairs in decision.transfers()]
///     [('swap_out', [[0, 0], [1, 1]])]
#[pyclass(frozen, name = "StepDecision", module = "blockyard._core")]
pub(crate) struct PyStepDecision {
    /// Number to complete or fail.
    #[pyo3(get)]
    ticket: u64,
    after: Vec<u64>,
    transfers: Vec<(Kind, Py<PyPairs>)>,
    /// Whether the step computes without the blocks that it loads, so that compute does not wait for them.
    #[pyo3(get)]
    prefetch: bool,
}

impl PyStepDecision {
    pub(crate) fn from_core(py: Python<'_>, decision: &StepDecision) -> PyResult<Self> {
        let transfers = decision.transfers.iter().map(|(kind, pairs)| Ok((*kind, PyPairs::from_core(py, pairs)?)));
        Ok(Self {
            ticket: decision.ticket.0,
            after: decision.after.iter().map(|ticket| ticket.0).collect(),
            transfers: transfers.collect::<PyResult<_>>()?,
            prefetch: decision.prefetch,
        })
    }

    /// Returns the decision, entry by entry.
    pub(crate) fn to_core(&self, py: Python<'_>) -> PyResult<StepDecision> {
        let entries = self.transfers.iter().map(|(kind, pairs)| Ok((*kind, pairs.get().to_core(py)?)));
        let transfers = entries.collect::<PyResult<_>>()?;
        let after = self.after.iter().copied().map(TicketId).collect();
        Ok(StepDecision { ticket: TicketId(self.ticket), after, transfers, prefetch: self.prefetch })
    }

    /// Returns the decision as `to_bytes` writes it: without empty entries, sorted by kind and tiers.
    fn settled(&self, py: Python<'_>) -> PyResult<StepDecision> {
        let mut decision = self.to_core(py)?;
        decision.transfers.retain(|(_, pairs)| !pairs.ids.is_empty());
        decision.transfers.sort_by_key(|(kind, pairs)| (*kind, pairs.src, pairs.dst, pairs.page_class));
        Ok(decision)
    }

    fn of<'py>(&self, py: Python<'py>, kind: Kind) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(
            py,
            self.transfers.iter().filter(|(k, _)| *k == kind).map(|(_, pairs)| pairs.clone_ref(py)).collect::<Vec<_>>(),
        )
    }

    /// Returns the pairs of a kind between two tiers, of the only page class.
    fn blocks<'py>(&self, py: Python<'py>, kind: Kind, src: Tier, dst: Tier) -> PyResult<Bound<'py, PyArray2<i64>>> {
        let wanted = |(k, pairs): &&(Kind, Py<PyPairs>)| (*k, pairs.get().src, pairs.get().dst) == (kind, src, dst);
        let mut found = self.transfers.iter().filter(wanted);
        match (found.next(), self.transfers.iter().find(|(_, pairs)| pairs.get().page_class > 0)) {
            (_, Some((kind, _))) => {
                Err(invalid(format!("{} pairs are of several page classes, read each of transfers()", kind.name())))
            }
            (Some((_, pairs)), None) => Ok(pairs.get().ids.bind(py).clone()),
            (None, None) => array(py, &[]),
        }
    }
}

#[pymethods]
impl PyStepDecision {
    #[new]
    #[pyo3(signature = (ticket, transfers, *, after = Vec::new(), prefetch = false),
        text_signature = "(ticket, transfers, *, after=(), prefetch=False)")]
    fn new(
        #[pyo3(from_py_with = args::ticket)] ticket: u64,
        #[pyo3(from_py_with = args::transfers)] transfers: Vec<(String, Py<PyPairs>)>,
        #[pyo3(from_py_with = args::after)] after: Vec<u64>,
        prefetch: bool,
    ) -> PyResult<Self> {
        let named = |(name, pairs): (String, Py<PyPairs>)| match Kind::ALL.into_iter().find(|kind| kind.name() == name)
        {
            Some(kind) => Ok((kind, pairs)),
            None => Err(invalid(format!("kind is '{name}', must be one of {:?}", Kind::ALL.map(Kind::name)))),
        };
        let mut transfers = transfers.into_iter().map(named).collect::<PyResult<Vec<_>>>()?;
        transfers.sort_by_key(|(kind, _)| *kind);
        Ok(Self { ticket, after, transfers, prefetch })
    }

    /// Tickets whose device reads must finish before this step writes to the device, a tuple of ints.
    #[getter]
    fn after<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.after)
    }

    /// Transfers to the host or the external tier: a tuple with one `Pairs` for each pair of tiers.
    #[getter]
    fn swap_out<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.of(py, Kind::SwapOut)
    }

    /// Transfers from the host or the external tier: a tuple with one `Pairs` for each pair of tiers.
    #[getter]
    fn swap_in<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.of(py, Kind::SwapIn)
    }

    /// Copy-on-write on the device: a tuple of `Pairs`.
    #[getter]
    fn copy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.of(py, Kind::Copy)
    }

    /// Defragmentation moves on the device: a tuple of `Pairs`.
    #[getter]
    fn r#move<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.of(py, Kind::Move)
    }

    /// Defragmentation exchanges on the device: a tuple of `Pairs`.
    #[getter]
    fn exchange<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.of(py, Kind::Exchange)
    }

    /// Host to device, int64 `[n, 2]`; vLLM's name.
    #[getter]
    fn blocks_to_swap_in<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        self.blocks(py, Kind::SwapIn, Tier::Host, Tier::Device)
    }

    /// Device to host, int64 `[n, 2]`; vLLM's name.
    #[getter]
    fn blocks_to_swap_out<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        self.blocks(py, Kind::SwapOut, Tier::Device, Tier::Host)
    }

    /// Copy-on-write on the device, int64 `[n, 2]`; vLLM's name.
    #[getter]
    fn blocks_to_copy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        self.blocks(py, Kind::Copy, Tier::Device, Tier::Device)
    }

    /// Return all kinds and pairs, in an order that is safe to run in sequence.
    fn transfers(&self, py: Python<'_>) -> Vec<(&'static str, Py<PyPairs>)> {
        self.transfers.iter().map(|(kind, pairs)| (kind.name(), pairs.clone_ref(py))).collect()
    }

    #[classattr]
    #[pyo3(name = "MAX_BYTES")]
    const fn max_bytes() -> usize {
        MAX_DECISION_BYTES
    }

    /// Serialize the decision, with version and checksum; empty entries are omitted. All processes write the same
    /// bytes.
    ///
    /// Raises:
    ///     MappingError: `from_bytes` would reject the decision, or it is too long.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let decision = self.settled(py)?;
        let bytes = py.detach(|| decision.to_bytes()).map_err(to_py)?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Deserialize a decision. This runs no code from the bytes, and uses memory in proportion to their length.
    ///
    /// The checksum detects damage, but anyone can compute it: sign bytes that cross a trust boundary. For any input,
    /// kinds match their tiers and no block is written twice; ids are checked where they are used.
    ///
    /// Args:
    ///     data: output of `to_bytes`.
    /// Raises:
    ///     MappingError: the bytes are damaged or of another version; a kind is out of order, repeated for its tiers,
    ///         or has the wrong tiers; a block is written twice, or both copied and written; or the ticket waits for a
    ///         later one.
    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        let decision = py.detach(|| StepDecision::from_bytes(data)).map_err(to_py)?;
        Self::from_core(py, &decision)
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.transfers.iter().map(|(_, pairs)| pairs.get().__len__(py)).sum()
    }

    fn __eq__(&self, other: &Bound<'_, Self>) -> PyResult<bool> {
        let (py, other) = (other.py(), other.get());
        Ok(self.settled(py)? == other.settled(py)?)
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        let py = slf.py();
        Ok((slf.get_type().getattr(intern!(py, "from_bytes"))?, (slf.get().to_bytes(py)?,)))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let counts = PyDict::new(py);
        for (kind, pairs) in &self.transfers {
            counts.set_item(kind.name(), pairs.get().__len__(py))?;
        }
        Ok(format!("StepDecision(ticket={}, {counts})", self.ticket))
    }
}
