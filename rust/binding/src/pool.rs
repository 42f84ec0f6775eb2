//! `manager.pool(tier)`: the blocks of one tier; and iterators over free blocks.
//!
//! Lock order: the iterator, then what it reads; see `blockyard_locks`.

use crate::allocator::ids;
use crate::args;
use crate::group::PyCacheGroup;
use crate::memory;
use crate::shared::Shared;
use blockyard_core::{BlockId, Tier};
use blockyard_locks::OuterLock;
use numpy::PyArray1;
use pyo3::prelude::*;
use std::collections::VecDeque;

/// Blocks read at first; each chunk is twice the one before, so that finding one's place again costs little.
const FIRST_CHUNK: usize = 64;

/// Reads up to `count` free blocks from place `first` of their order on.
type ReadFree = Box<dyn Fn(usize, usize) -> VecDeque<BlockId> + Send + Sync>;

struct State {
    ahead: VecDeque<BlockId>,
    /// Blocks read so far.
    place: usize,
    chunk: usize,
    ended: bool,
}

/// An iterator over free blocks in the order in which they would be given out. Nothing is taken.
///
/// It reads ids ahead in chunks, first 64, then twice as many each time, so the first few cost little in any pool. If
/// the pool changes meanwhile, ids that were read ahead stay as they were, and the next chunk continues at the same
/// place of the new order: an id may be missed or come twice.
#[pyclass(frozen, name = "FreeBlocks", module = "blockyard._core")]
pub(crate) struct PyFreeBlocks {
    read: ReadFree,
    state: OuterLock<State>,
}

impl PyFreeBlocks {
    pub(crate) fn new(read: ReadFree) -> Self {
        let state = State { ahead: VecDeque::new(), place: 0, chunk: FIRST_CHUNK, ended: false };
        Self { read, state: OuterLock::new(state) }
    }
}

#[pymethods]
impl PyFreeBlocks {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self) -> Option<u32> {
        let mut state = self.state.lock();
        if state.ahead.is_empty() && !state.ended {
            state.ahead = (self.read)(state.place, state.chunk);
            state.ended = state.ahead.len() < state.chunk;
            state.place += state.ahead.len();
            state.chunk *= 2;
        }
        state.ahead.pop_front().map(|block| block.0)
    }
}

/// The blocks of one tier, as `manager.pool("device")`. Iterate over it for the free blocks, one by one.
#[pyclass(frozen, name = "Pool", module = "blockyard._core")]
pub(crate) struct PyPool {
    shared: Shared,
    tier: Tier,
}

impl PyPool {
    pub(crate) const fn new(shared: Shared, tier: Tier) -> Self {
        Self { shared, tier }
    }
}

#[pymethods]
impl PyPool {
    /// `"device"`, `"host"` or `"external"`.
    #[getter]
    const fn tier(&self) -> &'static str {
        self.tier.name()
    }

    /// Blocks of the tier.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.shared.lock().pool(self.tier).len()
    }

    /// Blocks that nothing references and no transfer leases; cached ones count.
    #[getter]
    fn num_free(&self) -> usize {
        self.shared.lock().pool(self.tier).free()
    }

    /// Blocks that admission keeps free: the device's watermark, 0 in the other tiers.
    #[getter]
    fn reserved(&self) -> usize {
        if self.tier == Tier::Device { self.shared.lock().watermark_blocks() } else { 0 }
    }

    /// Cache groups whose block tables use the pool, a tuple of `CacheGroup` in the order of their numbers.
    #[getter]
    fn groups<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, pyo3::types::PyTuple>> {
        let groups: Vec<_> = self.shared.lock().groups().iter().copied().map(PyCacheGroup::from_core).collect();
        pyo3::types::PyTuple::new(py, groups)
    }

    /// Return the free blocks that hold nothing cached, in the order in which they are given out. Nothing is taken.
    ///
    /// Args:
    ///     limit: how many at most; None for all.
    /// Returns:
    ///     Block ids, int32 `[n]`.
    #[pyo3(signature = (limit = None))]
    fn free_ids<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::limit)] limit: Option<usize>,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let manager = self.shared.lock();
        let free = manager.pool(self.tier).free_blocks().take(limit.unwrap_or(usize::MAX));
        let free: Vec<BlockId> = free.collect();
        drop(manager);
        ids(py, &free)
    }

    /// Return what each block is used for.
    ///
    /// Returns:
    ///     uint8 `[num_blocks]`, while a pool shrinks `[defrag.progress().extent]`. 0: free. 1: cached; its key finds
    ///     it, and it is given out if needed. 2: only transfers or pins hold it. 3: sequences use it; a null block
    ///     counts as such.
    fn uses<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u8>>> {
        let uses = self.shared.lock().uses(self.tier);
        memory::array(py, &uses, |state| state.number())
    }

    /// Return the blocks that overdue transfers and overdue submitted pins still hold.
    ///
    /// Returns:
    ///     Block ids, int32 `[n]`, rising.
    fn quarantined_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let blocks = self.shared.lock().quarantined(self.tier);
        ids(py, &blocks)
    }

    fn __iter__(&self) -> PyFreeBlocks {
        let (shared, tier) = (self.shared.clone(), self.tier);
        PyFreeBlocks::new(Box::new(move |first, count| {
            shared.lock().pool(tier).free_blocks().skip(first).take(count).collect()
        }))
    }

    fn __repr__(&self) -> String {
        let manager = self.shared.lock();
        let pool = manager.pool(self.tier);
        format!("Pool('{}', {} of {} blocks free)", self.tier.name(), pool.free(), pool.len())
    }
}
