//! `manager.pool(tier)`: the blocks of one tier.

use crate::allocator::ids;
use crate::convert::args;
use crate::convert::memory;
use crate::free_blocks::PyFreeBlocks;
use crate::manager::group::PyCacheGroup;
use crate::manager::shared::Shared;
use blockyard_core::{BlockId, Tier};
use numpy::PyArray1;
use pyo3::prelude::*;

/// The blocks of one tier, as returned by `manager.pool("device")`. Iterate over it to get the free blocks one by
/// one.
///
/// Example:
///     >>> from blockyard import BlockManager
///     >>> manager = BlockManager(block_size=4, device_blocks=8)
///     >>> _ = manager.allocate(12)
///     >>> pool = manager.pool("device")
///     >>> pool.num_free, pool.free_ids(limit=2).tolist()
///     (5, [3, 4])
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

    /// Number of blocks in the tier.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.shared.lock().pool(self.tier).len()
    }

    /// Number of blocks that are neither referenced nor leased, including cached ones.
    #[getter]
    fn num_free(&self) -> usize {
        self.shared.lock().pool(self.tier).free()
    }

    /// Number of blocks that admission keeps free: the device's watermark, 0 in the other tiers.
    #[getter]
    fn reserved(&self) -> usize {
        if self.tier == Tier::Device { self.shared.lock().watermark_blocks() } else { 0 }
    }

    /// Cache groups whose block tables use the pool, a tuple of `CacheGroup` ordered by number.
    #[getter]
    fn groups<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, pyo3::types::PyTuple>> {
        let groups: Vec<_> = self.shared.lock().groups().iter().copied().map(PyCacheGroup::from_core).collect();
        pyo3::types::PyTuple::new(py, groups)
    }

    /// Return the free blocks without cached content, in the order in which they are allocated, without taking them.
    ///
    /// Args:
    ///     limit: maximum number of blocks; None for all.
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

    /// Return the use of each block.
    ///
    /// Returns:
    ///     uint8 `[num_blocks]`, or `[defrag.progress().extent]` while a pool shrinks. 0: free. 1: cached; its key
    ///     finds it, and it is evicted if needed. 2: only transfers or pins hold it. 3: in use by sequences, or the
    ///     null block.
    fn uses<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u8>>> {
        let uses = self.shared.lock().uses(self.tier);
        memory::array(py, &uses, |state| state.number())
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
