//! `BlockManager`: the core's manager. Its methods are in `verbs/`, and each facet has its own file.

pub(crate) mod defrag;
pub(crate) mod fit;
pub(crate) mod group;
mod open_tickets;
pub(crate) mod pins;
pub(crate) mod policies;
pub(crate) mod pool;
pub(crate) mod prefix;
pub(crate) mod prompts;
pub(crate) mod sequence;
pub(crate) mod shared;
pub(crate) mod stats;
pub(crate) mod step_owner;
pub(crate) mod verbs;

use crate::convert::args;
use crate::convert::arrays::{self, Handle};
use crate::convert::errors::{invalid, to_py};
use crate::convert::tiers::tier_of;
use crate::locks::Guard;
use crate::manager::defrag::PyDefrag;
use crate::manager::group::{PyArena, PyCacheGroup};
use crate::manager::open_tickets::OpenTickets;
use crate::manager::pins::PyPins;
use crate::manager::policies::CachingOptions;
use crate::manager::pool::PyPool;
use crate::manager::prefix::PyPrefix;
use crate::manager::shared::{Shared, row_in};
use crate::manager::stats::manager_stats;
use blockyard_core::{self as core, Config, Group, Manager, SequenceId, Space, Tier};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

/// How many managers of this process have a number.
static NUMBERED: AtomicU16 = AtomicU16::new(0);

/// Returns the next manager's number. The handles of 65,536 managers differ.
fn next_number() -> u16 {
    NUMBERED.fetch_add(1, Relaxed).wrapping_add(1)
}

/// Tracks every block of a paged KV cache: who uses it, what it holds, and which tier it is in.
///
/// It decides who can run and which blocks to copy or move. `take_decision` returns those transfers once a step. It
/// moves no bytes itself.
///
/// Args:
///     block_size: token slots in a block, 1 to 1048576.
///     device_blocks: number of blocks in device memory. Give either this or `arena`.
///     host_blocks: number of blocks in host memory.
///     external_blocks: number of slots in the external store.
///     watermark: fraction of the device blocks that admission keeps free, 0 to below 1.
///     reuse_order: which free block is taken next. `"lowest"`: the lowest id, which keeps the pool dense. `"fifo"`:
///         unused ids, then the block that was freed first. `"lru"`: unused ids, then the least recently used block.
///     groups: cache groups of a hybrid model, a list of `CacheGroup`. Each sequence has a block table in each group;
///         all groups share the pools. None: one group with full attention.
///     arena: the memory that the groups' page classes share, if their blocks differ in bytes, see
///         `CacheGroup.with_blocks`. With several page classes, the only goal of `defrag.run` is `"extents"`.
///     prefix_caching: whether prompts share the blocks of earlier prompts with the same beginning; True, False or a
///         `PrefixCaching` with options.
///     max_open_tickets: with more open tickets than this, `take_decision` warns: a `complete` is probably missing.
/// Raises:
///     InvalidArgumentError: a size or fraction is out of range, or an option's name is unknown.
///
/// Example:
///     >>> from blockyard import BlockManager
///     >>> manager = BlockManager(block_size=16, device_blocks=1024, host_blocks=4096)
///     >>> sequence = manager.allocate(100)
///     >>> manager.append([sequence]).tolist()
///     [100]
///     >>> manager.block_table(sequence).tolist()
///     [0, 1, 2, 3, 4, 5, 6]
#[pyclass(frozen, name = "BlockManager", module = "blockyard._core")]
pub(crate) struct PyBlockManager {
    shared: Shared,
    open_tickets: OpenTickets,
    /// Set once a `StepOwner` ends the steps: what others must call.
    owner: OnceLock<String>,
}

impl PyBlockManager {
    fn lock(&self) -> Guard<'_, Manager> {
        self.shared.lock()
    }

    /// Calls a batch method with handles.
    fn batch<T>(
        &self,
        sequences: &Bound<'_, PyAny>,
        call: impl FnOnce(&mut Manager, &[SequenceId]) -> core::Result<T>,
    ) -> PyResult<T> {
        let sequences = arrays::sequences(sequences)?;
        call(&mut self.lock(), &sequences).map_err(to_py)
    }
}

#[pymethods]
impl PyBlockManager {
    #[new]
    #[pyo3(signature = (*, block_size, device_blocks = None, host_blocks = 0, external_blocks = 0, watermark = 0.01,
        reuse_order = "lowest", groups = None, arena = None, prefix_caching = CachingOptions::Off, max_open_tickets = 16),
        text_signature = "(*, block_size, device_blocks=None, host_blocks=0, external_blocks=0, watermark=0.01, reuse_order='lowest', \
            groups=None, arena=None, prefix_caching=False, max_open_tickets=16)")]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        #[pyo3(from_py_with = args::block_size)] block_size: u32,
        #[pyo3(from_py_with = args::device_blocks)] device_blocks: Option<u32>,
        #[pyo3(from_py_with = args::host_blocks)] host_blocks: u32,
        #[pyo3(from_py_with = args::external_blocks)] external_blocks: u32,
        #[pyo3(from_py_with = args::watermark)] watermark: f64,
        reuse_order: &str,
        #[pyo3(from_py_with = args::groups)] groups: Option<Vec<PyCacheGroup>>,
        #[pyo3(from_py_with = args::arena)] arena: Option<PyArena>,
        #[pyo3(from_py_with = args::prefix_caching)] prefix_caching: CachingOptions,
        #[pyo3(from_py_with = args::max_open_tickets)] max_open_tickets: u32,
    ) -> PyResult<Self> {
        let groups = group::groups(groups, block_size);
        let blocks = [device_blocks.unwrap_or(0), host_blocks, external_blocks].map(|blocks| blocks as usize);
        let space = match (device_blocks, arena) {
            (Some(_), None) => Space::Split { blocks: vec![blocks], most: Vec::new() },
            (None, Some(arena)) if blocks == [0; 3] => arena.space(&groups)?,
            _ => {
                return Err(invalid(
                    "give either device_blocks or arena, which has the blocks of all tiers".to_owned(),
                ));
            }
        };
        let policies = policies::of(reuse_order, &prefix_caching)?;
        let config = Config { block_size, space, groups, watermark, prefix_caching: prefix_caching.is_on(), policies };
        let mut manager = Manager::new(config).map_err(to_py)?;
        manager.set_number(next_number()).map_err(to_py)?;
        if let CachingOptions::On(options) = prefix_caching {
            options.apply(&mut manager)?;
        }
        Ok(Self {
            shared: Shared::new(manager),
            open_tickets: OpenTickets::new(max_open_tickets),
            owner: OnceLock::new(),
        })
    }

    /// Token slots in a block.
    #[getter]
    fn block_size(&self) -> u32 {
        self.lock().block_size()
    }

    /// The prefix cache: lookup, priorities, quotas, events.
    #[getter]
    fn prefix(&self) -> PyPrefix {
        PyPrefix::new(self.shared.clone())
    }

    /// Pins: cached blocks kept for an external reader, such as a connector.
    #[getter]
    fn pins(&self) -> PyPins {
        PyPins::new(self.shared.clone())
    }

    /// Defragments and resizes the device pool.
    #[getter]
    fn defrag(&self) -> PyDefrag {
        PyDefrag::new(self.shared.clone())
    }

    /// Return the pool of one tier: its size and free blocks.
    ///
    /// Args:
    ///     tier: `"device"`, `"host"` or `"external"`.
    ///     page_class: page class of the blocks.
    /// Raises:
    ///     InvalidArgumentError: there is no such tier or class.
    #[pyo3(signature = (tier = "device", page_class = 0))]
    fn pool(&self, tier: &str, #[pyo3(from_py_with = args::page_class)] page_class: usize) -> PyResult<PyPool> {
        let classes = self.lock().num_classes();
        if page_class >= classes {
            return Err(invalid(format!("page_class is {page_class}, must be below {classes}")));
        }
        Ok(PyPool::new(self.shared.clone(), tier_of(tier)?, page_class))
    }

    /// The cache groups, a tuple of `CacheGroup` ordered by number, with the sizes of their blocks where these are their
    /// own.
    #[getter]
    fn groups<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let manager = self.lock();
        let size = manager.block_size();
        let group = |(number, group): (usize, &Group)| {
            manager.page(number).map(|page| PyCacheGroup::of_manager(*group, size, page))
        };
        let groups: Vec<_> = manager.groups().iter().enumerate().filter_map(group).collect();
        drop(manager);
        PyTuple::new(py, groups)
    }

    /// Number of page classes: of sizes of blocks, in bytes.
    #[getter]
    fn num_page_classes(&self) -> usize {
        self.lock().num_classes()
    }

    /// Return the number of tokens in a sequence.
    ///
    /// Args:
    ///     sequence: handle.
    ///     group: cache group; for cross attention, the encoder's tokens are counted.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    ///     InvalidArgumentError: there is no such group.
    #[pyo3(signature = (sequence, group = 0))]
    fn num_tokens(
        &self,
        #[pyo3(from_py_with = args::sequence)] sequence: Handle,
        #[pyo3(from_py_with = args::group)] group: u32,
    ) -> PyResult<u32> {
        let manager = self.lock();
        let row = row_in(&manager, sequence.0, group)?;
        manager.num_tokens(row).map_err(to_py)
    }

    /// Return the tier that a sequence's blocks are in: `"device"`, `"host"` or `"external"`.
    ///
    /// Args:
    ///     sequence: handle.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    fn tier(&self, #[pyo3(from_py_with = args::sequence)] sequence: Handle) -> PyResult<&'static str> {
        self.lock().tier(sequence.0).map(Tier::name).map_err(to_py)
    }

    /// Number of tickets that have not ended.
    #[getter]
    fn num_open_tickets(&self) -> usize {
        self.lock().num_open_tickets()
    }

    /// Return all counters: `ManagerStats`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (stats, open, classes) = {
            let manager = self.lock();
            let classes: Vec<_> = (0..manager.num_classes()).map(|class| manager.class_bytes(class)).collect();
            (manager.stats(), manager.open_tickets().collect::<Vec<_>>(), classes)
        };
        manager_stats(py, &stats, &open, &classes)
    }

    /// Recount the whole state and compare. For tests and debugging; it takes time in proportion to the pools.
    ///
    /// Raises:
    ///     InvariantError: the state contradicts itself, which is a bug in Blockyard.
    fn check(&self) -> PyResult<()> {
        self.lock().check().map_err(to_py)
    }

    fn __repr__(&self) -> String {
        let manager = self.lock();
        let tier = |tier: Tier| {
            let pool = manager.pool(tier);
            let class = |class| format!("{} of {}", pool.free_in(class), pool.len_of(class));
            let classes: Vec<_> = (0..pool.num_classes()).map(class).collect();
            (!pool.is_empty()).then(|| format!("{}: {} blocks free", tier.name(), classes.join(" + ")))
        };
        let tiers: Vec<_> = Tier::ALL.into_iter().filter_map(tier).collect();
        let (number, sequences) = (manager.number(), manager.num_sequences());
        let size = manager.block_size();
        let open: Vec<_> = manager.open_tickets().take(4).map(|ticket| ticket.0.to_string()).collect();
        let open = match open.len() {
            0 => String::new(),
            _ => format!(", {} open tickets from {}", manager.num_open_tickets(), open[0]),
        };
        format!("BlockManager(number={number}, block_size={size}, {}, {sequences} sequences{open})", tiers.join(", "))
    }
}
