//! `manager.pool(tier)`: the blocks of one tier.

use crate::allocator::ids;
use crate::convert::args;
use crate::convert::memory;
use crate::free_blocks::PyFreeBlocks;
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
    page_class: usize,
}

impl PyPool {
    pub(crate) const fn new(shared: Shared, tier: Tier, page_class: usize) -> Self {
        Self { shared, tier, page_class }
    }
}

#[pymethods]
impl PyPool {
    /// `"device"`, `"host"` or `"external"`.
    #[getter]
    const fn tier(&self) -> &'static str {
        self.tier.name()
    }

    /// Page class of the blocks.
    #[getter]
    const fn page_class(&self) -> usize {
        self.page_class
    }

    /// Number of ids that blocks of the class can have in the tier, in extents that other classes have at the moment, too.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.shared.lock().pool(self.tier).len_of(self.page_class)
    }

    /// Number of ids that blocks of the class can have after a resize. With one page class there is no such limit, and this
    /// is `num_blocks`.
    #[getter]
    fn max_blocks(&self) -> usize {
        self.shared.lock().pool(self.tier).capacity_of(self.page_class)
    }

    /// Bytes of a block; 1 if the groups have no bytes.
    #[getter]
    fn block_bytes(&self) -> u64 {
        self.shared.lock().class_bytes(self.page_class)
    }

    /// Number of blocks of the class in an extent; None if the class has its blocks for good.
    #[getter]
    fn per_extent(&self) -> Option<usize> {
        self.shared.lock().pool(self.tier).per_extent(self.page_class)
    }

    /// Bytes from a block of the class to the next in an arena; None if the class has its blocks for good.
    #[getter]
    fn block_stride(&self) -> Option<u64> {
        self.shared.lock().pool(self.tier).stride(self.page_class)
    }

    /// Number of extents that the class has at the moment.
    #[getter]
    fn num_extents(&self) -> usize {
        self.shared.lock().pool(self.tier).extents_of(self.page_class)
    }

    /// Number of blocks that are neither referenced nor leased, including cached ones, and those in extents that the class
    /// could take.
    #[getter]
    fn num_free(&self) -> usize {
        self.shared.lock().pool(self.tier).free_in(self.page_class)
    }

    /// Number of blocks that admission keeps free: the device's watermark, 0 in the other tiers.
    #[getter]
    fn reserved(&self) -> usize {
        if self.tier == Tier::Device { self.shared.lock().kept_blocks(self.page_class) } else { 0 }
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
        let pool = manager.pool(self.tier);
        let free = pool.free_blocks_of(self.page_class).take(limit.unwrap_or(usize::MAX));
        let free: Vec<BlockId> = free.map(|block| BlockId(pool.local(block).1)).collect();
        drop(manager);
        ids(py, &free)
    }

    /// Return the use of each block.
    ///
    /// Returns:
    ///     uint8 `[num_blocks]`, or `[defrag.progress().extent]` while a pool shrinks; with several page classes
    ///     `[max_blocks]`. 0: free. 1: cached; its key finds it, and it is evicted if needed. 2: only transfers or pins hold
    ///     it. 3: in use by sequences, or the null block.
    fn uses<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u8>>> {
        let manager = self.shared.lock();
        let (pool, all) = (manager.pool(self.tier), manager.uses(self.tier));
        // What lies beyond the end of a pool that shrinks is included.
        let uses = match pool.global(self.page_class, 0) {
            Some(first) if pool.num_classes() > 1 => {
                all[first.index()..first.index() + pool.capacity_of(self.page_class)].to_vec()
            }
            _ if pool.num_classes() > 1 => Vec::new(),
            _ => all,
        };
        drop(manager);
        memory::array(py, &uses, |state| state.number())
    }

    fn __iter__(&self) -> PyFreeBlocks {
        let (shared, tier, class) = (self.shared.clone(), self.tier, self.page_class);
        PyFreeBlocks::new(Box::new(move |first, count| {
            let manager = shared.lock();
            let pool = manager.pool(tier);
            let free = pool.free_blocks_of(class).skip(first).take(count);
            free.map(|block| BlockId(pool.local(block).1)).collect()
        }))
    }

    fn __repr__(&self) -> String {
        let manager = self.shared.lock();
        let pool = manager.pool(self.tier);
        let (free, blocks) = (pool.free_in(self.page_class), pool.len_of(self.page_class));
        let class = if pool.num_classes() > 1 { format!(", page_class={}", self.page_class) } else { String::new() };
        format!("Pool('{}'{class}, {free} of {blocks} blocks free)", self.tier.name())
    }
}
