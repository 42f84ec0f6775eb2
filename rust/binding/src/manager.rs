//! `BlockManager`: the core's manager behind a lock.
//!
//! The lock is held for one call and never while Python code runs.

use crate::allocator::ids;
use crate::args;
use crate::arrays::{self, Handle, Ticket, Tokens};
use crate::decision::{PyPairs, PyStepDecision, tier};
use crate::errors::{invalid, to_py};
use crate::group::{self, PyCacheGroup, row_in, rows_in};
use crate::memory::{self, Area};
use blockyard_core as core;
use blockyard_core::{BlockId, Config, Demand, Manager, SequenceId, TableRows, Tier};
use blockyard_locks::{Guard, InnerLock};
use numpy::{PyArray1, PyArrayMethods};
use pyo3::PyTypeInfo;
use pyo3::exceptions::PyRuntimeWarning;
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};
use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Slots of one call that are many.
const MANY: usize = 1 << 16;

/// Whether something fits: now, later, or never.
#[pyclass(frozen, eq, hash, name = "AllocStatus", module = "blockyard._core")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum PyAllocStatus {
    /// It fits now.
    #[pyo3(name = "OK")]
    Ok,
    /// It will fit once other sequences have left.
    #[pyo3(name = "LATER")]
    Later,
    /// It does not fit even into an empty tier.
    #[pyo3(name = "NEVER")]
    Never,
}

impl From<core::AllocStatus> for PyAllocStatus {
    fn from(status: core::AllocStatus) -> Self {
        match status {
            core::AllocStatus::Ok => Self::Ok,
            core::AllocStatus::Later => Self::Later,
            core::AllocStatus::Never => Self::Never,
        }
    }
}

/// `getattr`, and what names one of a class's values to it.
type Named<'py> = (Bound<'py, PyAny>, (Bound<'py, PyType>, &'static str));

#[pymethods]
impl PyAllocStatus {
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Named<'py>> {
        let name = match slf.get() {
            Self::Ok => "OK",
            Self::Later => "LATER",
            Self::Never => "NEVER",
        };
        Ok((slf.py().import("builtins")?.getattr("getattr")?, (Self::type_object(slf.py()), name)))
    }
}

/// The books of a paged KV cache.
#[pyclass(frozen, name = "BlockManager", module = "blockyard._core")]
pub(crate) struct PyBlockManager {
    inner: InnerLock<Manager>,
    /// Above so many open tickets there is a warning, once.
    max_open_tickets: u32,
    warned: AtomicBool,
}

/// Open tickets that no engine is known to have at a time.
const MANY_TICKETS: u32 = 1000;

impl PyBlockManager {
    pub(crate) fn from_core(manager: Manager) -> Self {
        Self { inner: InnerLock::new(manager), max_open_tickets: MANY_TICKETS, warned: AtomicBool::new(false) }
    }

    /// Warns once if more tickets are open than there should be. A warning may be an exception, so nothing has changed yet.
    fn warn_of_tickets(&self, py: Python<'_>) -> PyResult<()> {
        let (first, count, steps) = {
            let manager = self.lock();
            let count = manager.num_open_tickets();
            if count <= self.max_open_tickets as usize || self.warned.swap(true, Relaxed) {
                return Ok(());
            }
            (manager.open_tickets().take(8).collect::<Vec<_>>(), count, manager.stats().steps + 1)
        };
        let ages = first.iter().map(|ticket| format!("{} ({} steps ago)", ticket.0, steps - ticket.0));
        let text = format!(
            "{count} tickets are open, max_open_tickets is {}: complete or fail each, what they hold is not given out; \
             the first are {}",
            self.max_open_tickets,
            ages.collect::<Vec<_>>().join(", ")
        );
        PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &CString::new(text)?, 1)
    }

    pub(crate) fn lock(&self) -> Guard<'_, Manager> {
        self.inner.lock()
    }

    /// Calls a batch method on handles.
    fn batch<T>(
        &self,
        sequences: &Bound<'_, PyAny>,
        call: impl FnOnce(&mut Manager, &[SequenceId]) -> core::Result<T>,
    ) -> PyResult<T> {
        let sequences = arrays::sequences(sequences)?;
        call(&mut self.lock(), &sequences).map_err(to_py)
    }
}

pub(crate) fn handles<'py>(py: Python<'py>, ids: &[SequenceId]) -> PyResult<Bound<'py, PyArray1<u64>>> {
    memory::array(py, ids, |id| id.0)
}

#[pymethods]
impl PyBlockManager {
    #[new]
    #[pyo3(signature = (*, block_size, device_blocks, host_blocks = 0, external_blocks = 0, watermark = 0.01,
        prefix_caching = false, reuse_order = "lowest", eviction = "lru", events = 0, sliding_window = None,
        groups = None, host_prefix_cache = false, max_pinned = 0.5, max_open_tickets = 1000))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        #[pyo3(from_py_with = args::block_size)] block_size: u32,
        #[pyo3(from_py_with = args::device_blocks)] device_blocks: u32,
        #[pyo3(from_py_with = args::host_blocks)] host_blocks: u32,
        #[pyo3(from_py_with = args::external_blocks)] external_blocks: u32,
        #[pyo3(from_py_with = args::watermark)] watermark: f64,
        prefix_caching: bool,
        reuse_order: &str,
        eviction: &str,
        #[pyo3(from_py_with = args::events)] events: u32,
        #[pyo3(from_py_with = args::sliding_window)] sliding_window: Option<u32>,
        #[pyo3(from_py_with = args::groups)] groups: Option<Vec<PyCacheGroup>>,
        host_prefix_cache: bool,
        #[pyo3(from_py_with = args::max_pinned)] max_pinned: f64,
        #[pyo3(from_py_with = args::max_open_tickets)] max_open_tickets: u32,
    ) -> PyResult<Self> {
        let blocks = [device_blocks, host_blocks, external_blocks].map(|blocks| blocks as usize);
        let config = Config { block_size, blocks, watermark, prefix_caching };
        let policies = crate::evict::policies(reuse_order, eviction)?;
        let groups = group::groups(groups, sliding_window)?;
        let mut manager = Manager::with_groups(config, policies, &groups).map_err(to_py)?;
        manager.limit_pins(max_pinned).map_err(to_py)?;
        if host_prefix_cache {
            manager.keep_host_copies().map_err(to_py)?;
        }
        if events > 0 {
            manager.record_events(events as usize).map_err(to_py)?;
        }
        Ok(Self { max_open_tickets, ..Self::from_core(manager) })
    }

    #[getter]
    fn block_size(&self) -> u32 {
        self.lock().block_size()
    }

    #[getter]
    fn watermark_blocks(&self) -> usize {
        self.lock().watermark_blocks()
    }

    #[getter]
    fn num_sequences(&self) -> usize {
        self.lock().num_sequences()
    }

    #[pyo3(signature = (tier = "device"))]
    fn num_blocks(&self, tier: &str) -> PyResult<usize> {
        Ok(self.lock().pool(self::tier(tier)?).len())
    }

    #[pyo3(signature = (tier = "device"))]
    fn num_free(&self, tier: &str) -> PyResult<usize> {
        Ok(self.lock().pool(self::tier(tier)?).free())
    }

    #[pyo3(signature = (num_tokens, *, lookahead = 0, encoder_tokens = 0, chunk_tokens = None))]
    fn can_allocate(
        &self,
        #[pyo3(from_py_with = args::num_tokens)] num_tokens: u32,
        #[pyo3(from_py_with = args::lookahead)] lookahead: u32,
        #[pyo3(from_py_with = args::encoder_tokens)] encoder_tokens: u32,
        #[pyo3(from_py_with = args::chunk_tokens)] chunk_tokens: Option<u32>,
    ) -> PyResult<PyAllocStatus> {
        if chunk_tokens == Some(0) {
            return Err(invalid("chunk_tokens is 0, must be at least 1".to_owned()));
        }
        let (tokens, chunk) = (num_tokens, chunk_tokens.unwrap_or(0));
        Ok(self.lock().can_admit(&Demand { tokens, lookahead, encoder_tokens, chunk }).into())
    }

    #[pyo3(signature = (num_tokens, *, encoder_tokens = None))]
    fn allocate<'py>(
        &self,
        num_tokens: &Bound<'py, PyAny>,
        encoder_tokens: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let tokens = Tokens::new(num_tokens, "num_tokens")?.into_vec();
        let encoder_tokens = encoder_tokens.map(|tokens| Tokens::new(tokens, "encoder_tokens")).transpose()?;
        let encoder_tokens = encoder_tokens.map(Tokens::into_vec);
        let mut out = Vec::with_capacity(tokens.len());
        match encoder_tokens {
            None => self.lock().allocate(&tokens, &mut out),
            Some(encoder) => self.lock().allocate_encoded(&tokens, &encoder, &mut out),
        }
        .map_err(to_py)?;
        handles(num_tokens.py(), &out)
    }

    #[pyo3(signature = (sequence, count = 1))]
    fn fork<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::sequence)] sequence: Handle,
        #[pyo3(from_py_with = args::count)] count: u32,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let mut out = Vec::new();
        self.lock().fork(sequence.0, count, &mut out).map_err(to_py)?;
        handles(py, &out)
    }

    fn fork_prefix(
        &self,
        #[pyo3(from_py_with = args::sequence)] sequence: Handle,
        #[pyo3(from_py_with = args::shared_tokens)] shared_tokens: u32,
        #[pyo3(from_py_with = args::num_tokens)] num_tokens: u32,
    ) -> PyResult<u64> {
        let child = self.lock().fork_prefix(sequence.0, shared_tokens, num_tokens);
        child.map(|id| id.0).map_err(to_py)
    }

    #[pyo3(signature = (sequences, num_tokens = None, *, lookahead = 0))]
    fn blocks_to_append(
        &self,
        sequences: &Bound<'_, PyAny>,
        num_tokens: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::lookahead)] lookahead: u32,
    ) -> PyResult<usize> {
        let tokens = Tokens::or_one(num_tokens)?;
        let counts = tokens.get();
        self.batch(sequences, |manager, sequences| manager.blocks_to_append(sequences, counts, lookahead))
    }

    #[pyo3(signature = (sequences, num_tokens = None, *, lookahead = 0))]
    fn can_append(
        &self,
        sequences: &Bound<'_, PyAny>,
        num_tokens: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::lookahead)] lookahead: u32,
    ) -> PyResult<bool> {
        let tokens = Tokens::or_one(num_tokens)?;
        let counts = tokens.get();
        self.batch(sequences, |manager, sequences| {
            let wanted = manager.blocks_to_append(sequences, counts, lookahead)?;
            Ok(wanted <= manager.pool(Tier::Device).available())
        })
    }

    #[pyo3(signature = (sequences, num_tokens = None, *, token_ids = None, lookahead = 0, block_tables = None,
        out = None))]
    fn append<'py>(
        &self,
        sequences: &Bound<'py, PyAny>,
        num_tokens: Option<&Bound<'py, PyAny>>,
        token_ids: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = args::lookahead)] lookahead: u32,
        block_tables: Option<&Bound<'py, PyAny>>,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = sequences.py();
        let (sequences, tokens) = (arrays::sequences(sequences)?, Tokens::or_one(num_tokens)?);
        let counts = tokens.get();
        let total = counts.total(sequences.len()).map_err(to_py)?;
        let groups = self.lock().growing_groups();
        let len = usize::try_from(total).ok().and_then(|total| total.checked_mul(groups));
        let len = len.ok_or_else(|| invalid(format!("{total} tokens are too many for one call")))?;
        if len > MANY {
            // Whether there are blocks is asked before slots take memory, with numbers that may be anything.
            self.lock().require_append(&sequences, counts, lookahead).map_err(to_py)?;
        }
        let token_ids = token_ids.map(|ids| arrays::token_ids(ids, "token_ids")?.into_vec()).transpose()?;
        let out = arrays::slots(py, len, out)?;
        let append = |tables: Option<TableRows<'_>>, slots: Area<'_, i64>| {
            let (slots, mut manager) = (arrays::exactly(slots, len)?, self.lock());
            match (&token_ids, tables) {
                (None, None) => manager.append(&sequences, counts, lookahead, slots),
                (None, Some(tables)) => manager.append_with_tables(&sequences, counts, lookahead, tables, slots),
                (Some(ids), tables) => manager.append_tokens(&sequences, counts, lookahead, ids, tables, slots),
            }
            .map_err(to_py)
        };
        let slots = arrays::slots_target(&out, "out");
        match block_tables {
            None => memory::write(slots, |slots| append(None, slots))?,
            Some(table) => memory::write_both(arrays::table(table, "block_tables"), slots, |table, slots| {
                append(Some(arrays::rows(table)), slots)
            })?,
        }?;
        if groups == 1 {
            return Ok(out);
        }
        Ok(out.cast::<PyArray1<i64>>()?.reshape([groups, len / groups])?.into_any())
    }

    fn truncate(
        &self,
        #[pyo3(from_py_with = args::sequence)] sequence: Handle,
        #[pyo3(from_py_with = args::num_tokens)] num_tokens: u32,
    ) -> PyResult<()> {
        self.lock().truncate(sequence.0, num_tokens).map_err(to_py)
    }

    fn tier(&self, #[pyo3(from_py_with = args::sequence)] sequence: Handle) -> PyResult<&'static str> {
        self.lock().tier(sequence.0).map(Tier::name).map_err(to_py)
    }

    #[pyo3(signature = (sequence, group = 0))]
    fn block_table<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::sequence)] sequence: Handle,
        #[pyo3(from_py_with = args::group)] group: u32,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let manager = self.lock();
        let row = row_in(&manager, sequence.0, group)?;
        let table = manager.block_table(row).map(<[BlockId]>::to_vec).map_err(to_py)?;
        drop(manager);
        ids(py, &table)
    }

    #[pyo3(signature = (sequences, out = None, *, group = 0))]
    fn block_tables<'py>(
        &self,
        sequences: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        #[pyo3(from_py_with = args::group)] group: u32,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, sequences) = (sequences.py(), arrays::sequences(sequences)?);
        if let Some(out) = out {
            let rows = rows_in(&self.lock(), &sequences, group)?;
            memory::write(arrays::table(&out, "out"), |table| {
                self.lock().block_tables(&rows, table.shape[1], table.items).map_err(to_py)
            })??;
            return Ok(out);
        }
        // Under one lock: another thread may append between two.
        let manager = self.lock();
        let rows = rows_in(&manager, &sequences, group)?;
        let width = manager.max_blocks(&rows).map_err(to_py)?;
        let write = |table: &mut [i32]| manager.block_tables(&rows, width, table);
        let (table, written) = memory::made(py, [rows.len(), width], write)?;
        written.map_err(to_py)?;
        Ok(table.into_any())
    }

    #[pyo3(signature = (sequence, first, last, out = None, *, group = 0))]
    fn slot_mapping<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::sequence)] sequence: Handle,
        #[pyo3(from_py_with = args::first)] first: u32,
        #[pyo3(from_py_with = args::last)] last: u32,
        out: Option<Bound<'py, PyAny>>,
        #[pyo3(from_py_with = args::group)] group: u32,
    ) -> PyResult<Bound<'py, PyAny>> {
        let row = row_in(&self.lock(), sequence.0, group)?;
        let len = self.lock().num_tokens(row).map_err(to_py)?;
        if first > last || last > len {
            return Err(invalid(format!("tokens {first} to {last} of a sequence of {len}")));
        }
        let tokens = (last - first) as usize;
        let out = arrays::slots(py, tokens, out)?;
        memory::write(arrays::slots_target(&out, "out"), |slots| {
            self.lock().slot_mapping(row, first, arrays::exactly(slots, tokens)?).map_err(to_py)
        })??;
        Ok(out)
    }

    fn can_swap_out(&self, sequences: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.batch(sequences, Manager::can_swap_out)
    }

    fn swap_out(&self, sequences: &Bound<'_, PyAny>) -> PyResult<()> {
        self.batch(sequences, Manager::swap_out)
    }

    #[pyo3(signature = (sequences, *, lookahead = 0))]
    fn can_swap_in(
        &self,
        sequences: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::lookahead)] lookahead: u32,
    ) -> PyResult<PyAllocStatus> {
        self.batch(sequences, |manager, sequences| manager.can_swap_in(sequences, lookahead)).map(Into::into)
    }

    fn swap_in(&self, sequences: &Bound<'_, PyAny>) -> PyResult<()> {
        self.batch(sequences, Manager::swap_in)
    }

    fn can_spill(&self, sequences: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.batch(sequences, Manager::can_spill)
    }

    fn spill(&self, sequences: &Bound<'_, PyAny>) -> PyResult<()> {
        self.batch(sequences, Manager::spill)
    }

    #[pyo3(signature = (sequences, *, lookahead = 0))]
    fn can_fetch(
        &self,
        sequences: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::lookahead)] lookahead: u32,
    ) -> PyResult<PyAllocStatus> {
        self.batch(sequences, |manager, sequences| manager.can_fetch(sequences, lookahead)).map(Into::into)
    }

    #[pyo3(signature = (sequences, *, to = "device"))]
    fn fetch(&self, sequences: &Bound<'_, PyAny>, to: &str) -> PyResult<()> {
        let to = tier(to)?;
        self.batch(sequences, |manager, sequences| manager.fetch(sequences, to))
    }

    fn free(&self, sequences: &Bound<'_, PyAny>) -> PyResult<()> {
        self.batch(sequences, Manager::free)
    }

    fn take_decision(&self, py: Python<'_>) -> PyResult<PyStepDecision> {
        self.warn_of_tickets(py)?;
        let decision = self.lock().take_decision();
        PyStepDecision::from_core(py, &decision)
    }

    fn open_tickets<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let open: Vec<u64> = self.lock().open_tickets().map(|ticket| ticket.0).collect();
        PyTuple::new(py, open)
    }

    fn complete(&self, #[pyo3(from_py_with = args::ticket)] ticket: Ticket) -> PyResult<()> {
        self.lock().complete(ticket.0).map_err(to_py)
    }

    #[expect(clippy::needless_pass_by_value, reason = "extracted from a Python list")]
    fn fail<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::ticket)] ticket: Ticket,
        #[pyo3(from_py_with = args::lost)] lost: Vec<Py<PyPairs>>,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let lost = lost.iter().map(|pairs| pairs.get().to_core(py)).collect::<PyResult<Vec<_>>>()?;
        let hit = self.lock().fail(ticket.0, &lost).map_err(to_py)?;
        handles(py, &hit)
    }

    fn check(&self) -> PyResult<()> {
        self.lock().check().map_err(to_py)
    }
}
