//! The allocators of all devices, combined into one.

use super::allocator::of_kind;
use super::block::{PyNaiveBlock, PyNullBlock, V0Block};
use super::pool::PyPoolAllocator;
use super::{freed, require};
use crate::convert::args;
use crate::locks::{InnerLock, lock};
use blockyard_core::Tier;
use pyo3::exceptions::PyKeyError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFrozenSet};
use std::collections::HashMap;
use std::sync::OnceLock;

/// A device, read by name, since each engine has its own enum. V0 has no external one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Device {
    Gpu,
    Cpu,
    External,
}

impl Device {
    const ALL: [Self; 3] = [Self::Gpu, Self::Cpu, Self::External];
}

impl<'py> FromPyObject<'_, 'py> for Device {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let name: String = value.getattr(intern!(value.py(), "name"))?.extract()?;
        match name.as_str() {
            "GPU" => Ok(Self::Gpu),
            "CPU" => Ok(Self::Cpu),
            "EXTERNAL" => Ok(Self::External),
            _ => Err(PyKeyError::new_err(name)),
        }
    }
}

type Pool<'py> = Bound<'py, PyPoolAllocator>;

/// The blocks of all devices, with common ids: the GPU's first, then the CPU's, then the external ones.
#[pyclass(frozen, subclass, name = "CpuGpuBlockAllocator", module = "blockyard.integrations.vllm_v0")]
pub(crate) struct PyCpuGpuBlockAllocator {
    gpu: Py<PyPoolAllocator>,
    cpu: Py<PyPoolAllocator>,
    external: Py<PyPoolAllocator>,
    swaps: InnerLock<Vec<(i64, i64)>>,
    null: OnceLock<Py<PyNullBlock>>,
}

/// Returns the blocks that can be moved or freed: all but null blocks.
pub(super) fn live<'py>(blocks: &[Bound<'py, PyAny>]) -> PyResult<Vec<V0Block<'py>>> {
    let not_null = blocks.iter().filter(|block| !block.is_instance_of::<PyNullBlock>());
    not_null.map(|block| Ok(block.cast::<PyNaiveBlock>()?.clone())).collect()
}

impl PyCpuGpuBlockAllocator {
    fn over(gpu: Pool<'_>, cpu: Pool<'_>, external: Pool<'_>) -> Self {
        let (gpu, cpu, external) = (gpu.unbind(), cpu.unbind(), external.unbind());
        Self { gpu, cpu, external, swaps: InnerLock::default(), null: OnceLock::new() }
    }

    pub(super) fn of<'py>(&self, py: Python<'py>, device: Device) -> Pool<'py> {
        let pool = match device {
            Device::Gpu => &self.gpu,
            Device::Cpu => &self.cpu,
            Device::External => &self.external,
        };
        pool.bind(py).clone()
    }

    /// Returns the allocator that an id belongs to.
    fn owner<'py>(&self, py: Python<'py>, id: Option<i64>) -> PyResult<Pool<'py>> {
        let id = id.ok_or_else(freed)?;
        let owner = Device::ALL.map(|device| self.of(py, device));
        owner.into_iter().find(|pool| pool.get().owns(id)).ok_or_else(|| PyKeyError::new_err(id))
    }

    pub(super) fn has_null_block(&self) -> bool {
        self.null.get().is_some()
    }

    pub(super) fn null_block<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyNullBlock>> {
        if let Some(null) = self.null.get() {
            return Ok(null.bind(py).clone());
        }
        let gpu = self.of(py, Device::Gpu);
        let proxy = PyPoolAllocator::allocate_mutable_block(&gpu, None, None, None)?;
        let null = Py::new(py, PyNullBlock::new(proxy.clone().into_any().unbind()))?;
        if self.null.set(null).is_err() {
            gpu.get().release(&[proxy])?; // another thread was faster
        }
        self.null_block(py)
    }

    /// Releases one reference each; ignores null blocks.
    pub(super) fn release(&self, py: Python<'_>, blocks: &[Bound<'_, PyAny>]) -> PyResult<()> {
        let live = live(blocks)?;
        let Some(first) = live.first() else { return Ok(()) };
        self.owner(py, first.get().id())?.get().release(&live)
    }

    /// Returns new blocks over the same physical ones; null blocks are returned themselves.
    pub(super) fn share<'py>(&self, py: Python<'py>, blocks: &[Bound<'py, PyAny>]) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let live = live(blocks)?;
        let Some(first) = live.first() else { return Ok(blocks.to_vec()) };
        let mut copies = PyPoolAllocator::share(&self.owner(py, first.get().id())?, &live)?.into_iter();
        let copy = |block: &Bound<'py, PyAny>| {
            let own = if block.is_instance_of::<PyNullBlock>() { None } else { copies.next() };
            own.map_or_else(|| block.clone(), Bound::into_any)
        };
        Ok(blocks.iter().map(copy).collect())
    }

    /// Returns whether all of a block's bytes are computed. A block still in prefill is not shared on the other
    /// device: it must neither overwrite nor replace a complete block with the same key.
    fn complete(&self, block: &V0Block<'_>) -> PyResult<bool> {
        let Some(id) = block.get().id() else { return Ok(true) };
        self.owner(block.py(), Some(id))?.get().computed(id)
    }
}

#[pymethods]
impl PyCpuGpuBlockAllocator {
    #[new]
    fn new(cpu_block_allocator: Pool<'_>, gpu_block_allocator: Pool<'_>) -> PyResult<Self> {
        let external = of_kind(cpu_block_allocator.py(), "naive", 1, 0, 0, Tier::External)?;
        let ids = cpu_block_allocator.get().all_ids();
        let both = ids.iter().filter(|&&id| gpu_block_allocator.get().owns(id)).count();
        require(both == 0, || format!("{both} block ids belong to both devices"))?;
        Ok(Self::over(gpu_block_allocator, cpu_block_allocator, external))
    }

    /// Creates the allocators, `naive` or `prefix_caching`.
    #[staticmethod]
    #[pyo3(signature = (allocator_type, num_gpu_blocks, num_cpu_blocks, block_size, num_external_blocks=0))]
    #[expect(clippy::similar_names, reason = "V0's signature")]
    fn create(
        py: Python<'_>,
        allocator_type: &str,
        #[pyo3(from_py_with = args::num_gpu_blocks)] num_gpu_blocks: usize,
        #[pyo3(from_py_with = args::num_cpu_blocks)] num_cpu_blocks: usize,
        #[pyo3(from_py_with = args::block_size)] block_size: usize,
        #[pyo3(from_py_with = args::num_external_blocks)] num_external_blocks: usize,
    ) -> PyResult<Self> {
        let of_kind = |first, blocks, tier| of_kind(py, allocator_type, block_size, first, blocks, tier);
        let gpu = of_kind(0, num_gpu_blocks, Tier::Device)?;
        let cpu = of_kind(num_gpu_blocks, num_cpu_blocks, Tier::Host)?;
        let external = of_kind(num_gpu_blocks.saturating_add(num_cpu_blocks), num_external_blocks, Tier::External)?;
        Ok(Self::over(gpu, cpu, external))
    }

    /// Returns the allocator of one device.
    #[pyo3(name = "of")]
    fn py_of<'py>(&self, py: Python<'py>, device: Device) -> Pool<'py> {
        self.of(py, device)
    }

    /// Return the null block.
    fn allocate_or_get_null_block<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyNullBlock>> {
        self.null_block(py)
    }

    /// Allocate an empty block.
    #[pyo3(signature = (prev_block, device, extra_hash=None))]
    fn allocate_mutable_block<'py>(
        &self,
        py: Python<'py>,
        prev_block: Option<Bound<'py, PyAny>>,
        device: Device,
        #[pyo3(from_py_with = args::extra_hash)] extra_hash: Option<i64>,
    ) -> PyResult<V0Block<'py>> {
        PyPoolAllocator::allocate_mutable_block(&self.of(py, device), prev_block, extra_hash, None)
    }

    /// Allocate several full blocks.
    #[pyo3(signature = (prev_block, block_token_ids, device, extra_hash=None))]
    fn allocate_immutable_blocks<'py>(
        &self,
        py: Python<'py>,
        prev_block: Option<Bound<'py, PyAny>>,
        #[pyo3(from_py_with = args::block_token_ids)] block_token_ids: Vec<Vec<i64>>,
        device: Device,
        #[pyo3(from_py_with = args::extra_hash)] extra_hash: Option<i64>,
    ) -> PyResult<Vec<V0Block<'py>>> {
        let pool = self.of(py, device);
        PyPoolAllocator::allocate_immutable_blocks(&pool, prev_block, block_token_ids, extra_hash, None)
    }

    /// Allocate a full block, the cached one if it exists.
    #[pyo3(signature = (prev_block, token_ids, device, extra_hash=None))]
    fn allocate_immutable_block<'py>(
        &self,
        py: Python<'py>,
        prev_block: Option<Bound<'py, PyAny>>,
        #[pyo3(from_py_with = args::token_ids)] token_ids: Vec<i64>,
        device: Device,
        #[pyo3(from_py_with = args::extra_hash)] extra_hash: Option<i64>,
    ) -> PyResult<V0Block<'py>> {
        PyPoolAllocator::allocate_immutable_block(&self.of(py, device), prev_block, token_ids, extra_hash, None)
    }

    /// Free a block.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python")]
    fn free(&self, block: Bound<'_, PyAny>) -> PyResult<()> {
        self.release(block.py(), std::slice::from_ref(&block))
    }

    /// Return new references to the blocks up to this one.
    fn fork<'py>(&self, py: Python<'py>, last_block: Bound<'py, PyAny>) -> PyResult<Vec<V0Block<'py>>> {
        let is_null = last_block.is_instance_of::<PyNullBlock>();
        require(!is_null, || "cannot fork the null block".to_owned())?;
        let block = last_block.cast_into::<PyNaiveBlock>()?;
        PyPoolAllocator::fork(&self.owner(py, block.get().id())?, block)
    }

    /// Move blocks to another device, all or none. Blocks that share a physical block still share one afterwards.
    ///
    /// Returns:
    ///     A dict from each physical block to its new one, in the order of first use.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python")]
    fn swap<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::blocks)] blocks: Vec<Bound<'py, PyAny>>,
        src_device: Device,
        dst_device: Device,
    ) -> PyResult<Bound<'py, PyDict>> {
        let (src, dst, live) = (self.of(py, src_device), self.of(py, dst_device), live(&blocks)?);
        let (src, dst) = (src.get(), dst.get());
        src.require_refs(&live)?;
        let (mut place, mut first, mut again) = (HashMap::with_capacity(live.len()), Vec::new(), Vec::new());
        for block in &live {
            let id = block.get().id().ok_or_else(freed)?;
            let next = first.len();
            if *place.entry(id).or_insert(next) == next {
                first.push(block.clone());
            } else {
                again.push((place[&id], block.clone()));
            }
        }
        let keys = src.places(&first, |block| self.complete(block))?;
        let sources: Vec<i64> = first.iter().filter_map(|block| block.get().id()).collect();
        let targets = dst.take(&keys)?;
        src.release(&live)?;
        for (block, &id) in first.iter().zip(&targets) {
            block.get().set_id(Some(id));
        }
        for (place, block) in &again {
            block.get().set_id(Some(targets[*place]));
        }
        dst.add_refs(&again.into_iter().map(|(_, block)| block).collect::<Vec<_>>())?;
        if dst_device != Device::Gpu {
            // On the GPU, the manager marks them at the end of the step that loads the bytes.
            let landed: Vec<i64> = keys.iter().zip(&targets).filter_map(|(key, &id)| key.map(|_| id)).collect();
            dst.mark_computed(Some(&landed))?;
        }
        let mapping = PyDict::new(py);
        sources.iter().zip(&targets).try_for_each(|(source, target)| mapping.set_item(source, target))?;
        lock(&self.swaps).extend(sources.into_iter().zip(targets));
        Ok(mapping)
    }

    /// Return and clear the swaps since the last call, `(from, to)`.
    fn get_and_reset_swaps(&self) -> Vec<(i64, i64)> {
        std::mem::take(&mut *lock(&self.swaps))
    }

    /// Return the number of free blocks.
    fn get_num_free_blocks(&self, py: Python<'_>, device: Device) -> usize {
        self.of(py, device).get().free_count()
    }

    /// Return the number of blocks.
    fn get_num_total_blocks(&self, py: Python<'_>, device: Device) -> usize {
        self.of(py, device).get().total()
    }

    /// Return how many full blocks a swap would allocate.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python")]
    fn get_num_full_blocks_touched(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::blocks)] blocks: Vec<Bound<'_, PyAny>>,
        device: Device,
    ) -> PyResult<usize> {
        self.of(py, device).get().touched(&live(&blocks)?, |block| self.complete(block))
    }

    /// Return a block's id within its device.
    fn get_physical_block_id(
        &self,
        py: Python<'_>,
        device: Device,
        #[pyo3(from_py_with = args::absolute_id)] absolute_id: i64,
    ) -> PyResult<u32> {
        self.of(py, device).get().get_physical_block_id(absolute_id)
    }

    /// Ids of all blocks, a frozenset.
    #[getter]
    fn all_block_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyFrozenSet>> {
        let ids = Device::ALL.into_iter().flat_map(|device| self.of(py, device).get().all_ids());
        PyFrozenSet::new(py, ids.collect::<Vec<_>>())
    }

    /// Return and clear the copies since the last call, `(from, to)`.
    fn clear_copy_on_writes(&self) -> Vec<(i64, i64)> {
        self.gpu.get().clear_copy_on_writes()
    }

    /// Record when blocks were used.
    fn mark_blocks_as_accessed(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::block_ids)] block_ids: Vec<i64>,
        #[pyo3(from_py_with = args::now)] now: f64,
    ) -> PyResult<()> {
        // The last block is never null, so it shows the sequence's device.
        let Some(&last) = block_ids.last() else { return Ok(()) };
        let owner = self.owner(py, Some(last))?;
        let own = block_ids.into_iter().filter(|&id| owner.get().owns(id)).collect();
        owner.get().mark_blocks_as_accessed(own, now)
    }

    /// Do nothing: full blocks count as computed.
    fn mark_blocks_as_computed(&self, #[pyo3(from_py_with = args::block_ids)] block_ids: Vec<i64>) -> PyResult<()> {
        self.gpu.get().mark_blocks_as_computed(block_ids)
    }

    /// Return the computed blocks that all lists share at their start.
    fn get_common_computed_block_ids(
        &self,
        #[pyo3(from_py_with = args::computed_seq_block_ids)] computed_seq_block_ids: Vec<Vec<i64>>,
    ) -> Vec<i64> {
        self.gpu.get().get_common_computed_block_ids(computed_seq_block_ids)
    }

    /// Return the hit rate of lookups; -1 without a prefix cache.
    fn get_prefix_cache_hit_rate(&self, py: Python<'_>, device: Device) -> f64 {
        self.of(py, device).get().get_prefix_cache_hit_rate()
    }

    /// Drop the cache; return whether that was possible.
    fn reset_prefix_cache(&self, py: Python<'_>) -> bool {
        Device::ALL.map(|device| self.of(py, device).get().reset_prefix_cache()) == [true; 3]
    }

    /// Return how many of the hashes, from the first on, are cached.
    #[pyo3(signature = (block_hashes, device=None))]
    fn find_cached_blocks_prefix<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::block_hashes)] block_hashes: Vec<Bound<'py, PyAny>>,
        device: Option<Device>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        self.of(py, device.unwrap_or(Device::Gpu)).get().find_cached_blocks_prefix(block_hashes)
    }
}
