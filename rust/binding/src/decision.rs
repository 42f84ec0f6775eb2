//! `Pairs` and `StepDecision`: what the scheduler gets back once a step.

use crate::convert::args::{self, Argument};
use crate::convert::arrays;
use crate::convert::errors::{invalid, to_py};
use crate::convert::memory;
use crate::convert::tiers::tier;
use blockyard_core::{Kind, MAX_DECISION_BYTES, StepDecision, TicketId, Tier};
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
///     src: tier that is read.
///     dst: tier that is written.
///     ids: `(from, to)`: int64 `[n, 2]`, another array of ints, or a sequence of pairs.
/// Raises:
///     MappingError: an id is negative or too large, or the array has another dtype or shape.
///     InvalidArgumentError: a tier has another name.
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
    ids: Py<PyArray2<i64>>,
}

/// What `Pairs` is made of, to be made again.
type PairsState = (&'static str, &'static str, Py<PyArray2<i64>>);

impl PyPairs {
    pub(crate) fn from_core(py: Python<'_>, pairs: &blockyard_core::Pairs) -> PyResult<Py<Self>> {
        Py::new(py, Self { src: pairs.src, dst: pairs.dst, ids: array(py, &pairs.ids)?.unbind() })
    }

    pub(crate) fn to_core(&self, py: Python<'_>) -> PyResult<blockyard_core::Pairs> {
        let ids = arrays::pairs(self.ids.bind(py))?;
        Ok(blockyard_core::Pairs { src: self.src, dst: self.dst, ids })
    }
}

impl<'py> Argument<'py> for Py<PyPairs> {
    fn read(value: &Bound<'py, PyAny>, _: &dyn Display) -> PyResult<Self> {
        Ok(value.extract()?)
    }
}

#[pymethods]
impl PyPairs {
    #[new]
    fn new(src: &str, dst: &str, ids: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (src, dst) = (tier("src", src, &Tier::ALL)?, tier("dst", dst, &Tier::ALL)?);
        let ids = array(ids.py(), &arrays::pairs(ids)?)?.unbind();
        Ok(Self { src, dst, ids })
    }

    /// Tier that is read.
    #[getter]
    fn src(&self) -> &'static str {
        self.src.name()
    }

    /// Tier that is written.
    #[getter]
    fn dst(&self) -> &'static str {
        self.dst.name()
    }

    /// Block ids `(from, to)`, int64 `[n, 2]`.
    #[getter]
    fn ids(&self, py: Python<'_>) -> Py<PyArray2<i64>> {
        self.ids.clone_ref(py)
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        // Somebody may have given the array another shape.
        self.ids.bind(py).shape().first().copied().unwrap_or_default()
    }

    fn __eq__(&self, other: &Bound<'_, Self>) -> PyResult<bool> {
        let (py, other) = (other.py(), other.get());
        Ok(self.to_core(py)? == other.to_core(py)?)
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyType>, PairsState) {
        let this = slf.get();
        (slf.get_type(), (this.src(), this.dst(), this.ids(slf.py())))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!("Pairs('{}', '{}', {} pairs)", self.src, self.dst, self.__len__(py))
    }
}

/// The transfers of one step, and the ticket that holds leases on all their blocks until it is completed or failed.
///
/// Each kind is a tuple with one `Pairs` for each pair of tiers, empty if there is nothing to do. `after` names the
/// tickets, perhaps this one too, whose device reads must have finished before this step writes to the device.
///
/// Args:
///     ticket: number to complete or fail.
///     transfers: kind and pairs; sorted into the order in which they are safe to run.
///     after: tickets to wait for.
///     prefetch: whether nothing that the step computes reads what it loads.
/// Attributes:
///     MAX_BYTES: most bytes of a decision that `to_bytes` writes and `from_bytes` reads.
/// Raises:
///     InvalidArgumentError: a kind has another name.
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
    /// Whether nothing that the step computes reads what it loads: compute does not wait for it.
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

    /// The decision, entry by entry.
    pub(crate) fn to_core(&self, py: Python<'_>) -> PyResult<StepDecision> {
        let entries = self.transfers.iter().map(|(kind, pairs)| Ok((*kind, pairs.get().to_core(py)?)));
        let transfers = entries.collect::<PyResult<_>>()?;
        let after = self.after.iter().copied().map(TicketId).collect();
        Ok(StepDecision { ticket: TicketId(self.ticket), after, transfers, prefetch: self.prefetch })
    }

    /// The decision as `to_bytes` writes it: without empty entries, in the order of kinds and tiers.
    fn settled(&self, py: Python<'_>) -> PyResult<StepDecision> {
        let mut decision = self.to_core(py)?;
        decision.transfers.retain(|(_, pairs)| !pairs.ids.is_empty());
        decision.transfers.sort_by_key(|(kind, pairs)| (*kind, pairs.src, pairs.dst));
        Ok(decision)
    }

    fn of<'py>(&self, py: Python<'py>, kind: Kind) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(
            py,
            self.transfers.iter().filter(|(k, _)| *k == kind).map(|(_, pairs)| pairs.clone_ref(py)).collect::<Vec<_>>(),
        )
    }

    /// The pairs of a kind between two tiers.
    fn blocks<'py>(&self, py: Python<'py>, kind: Kind, src: Tier, dst: Tier) -> PyResult<Bound<'py, PyArray2<i64>>> {
        let wanted = |(k, pairs): &&(Kind, Py<PyPairs>)| (*k, pairs.get().src, pairs.get().dst) == (kind, src, dst);
        match self.transfers.iter().find(wanted) {
            Some((_, pairs)) => Ok(pairs.get().ids.bind(py).clone()),
            None => array(py, &[]),
        }
    }
}

#[pymethods]
impl PyStepDecision {
    #[new]
    #[pyo3(signature = (ticket, transfers, *, after = Vec::new(), prefetch = false))]
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

    /// Tickets whose device reads must end before this step writes to the device, a tuple of ints.
    #[getter]
    fn after<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.after)
    }

    /// Away from the device, to the host or the external tier: a tuple with one `Pairs` for each pair of tiers.
    #[getter]
    fn swap_out<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.of(py, Kind::SwapOut)
    }

    /// Towards the device, from the host or the external tier: a tuple with one `Pairs` for each pair of tiers.
    #[getter]
    fn swap_in<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.of(py, Kind::SwapIn)
    }

    /// Copy-on-write on the device: a tuple of `Pairs`.
    #[getter]
    fn copy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.of(py, Kind::Copy)
    }

    /// Moves of defragmentation on the device: a tuple of `Pairs`.
    #[getter]
    fn r#move<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.of(py, Kind::Move)
    }

    /// Exchanges of defragmentation on the device: a tuple of `Pairs`.
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

    /// All kinds and pairs, in the order in which they are safe to run one after another.
    fn transfers(&self, py: Python<'_>) -> Vec<(&'static str, Py<PyPairs>)> {
        self.transfers.iter().map(|(kind, pairs)| (kind.name(), pairs.clone_ref(py))).collect()
    }

    #[classattr]
    #[pyo3(name = "MAX_BYTES")]
    const fn max_bytes() -> usize {
        MAX_DECISION_BYTES
    }

    /// The decision as bytes with version and checksum, the same in every process, less entries without pairs.
    ///
    /// Raises:
    ///     MappingError: it cannot be carried out as it is written, as `from_bytes` says, or is too long.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let decision = self.settled(py)?;
        let bytes = py.detach(|| decision.to_bytes()).map_err(to_py)?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// The decision that was written as these bytes; runs no code in them, takes memory in proportion to them.
    ///
    /// The checksum finds damage, not a forger who computes it: bytes of unknown origin need a signature of yours.
    /// Whoever wrote them, kinds and tiers fit and nothing is written twice; ids are bounded where they are used.
    ///
    /// Args:
    ///     data: what `to_bytes` gave.
    /// Raises:
    ///     MappingError: the bytes are not whole or of another version, a kind is out of order or there twice for its
    ///         tiers, or joins other tiers, a block is written twice or both copied and written, or the ticket waits
    ///         for a later one.
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
