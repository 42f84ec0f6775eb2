//! The allocators of one device.

use super::block::{PyNaiveBlock, V0Block, key_of};
use super::key::IntKey;
use super::pool::{Ids, PyPoolAllocator};
use super::{freed, require, to_v0};
use crate::convert::args;
use crate::convert::errors::invalid;
use crate::locks::lock;
use blockyard_core::{Key, Tier};
use pyo3::PyTypeInfo;
use pyo3::exceptions::{PyNotImplementedError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyFrozenSet;

fn one_device(device: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    require(device.is_none(), || "an allocator has one device".to_owned())
}

#[pymethods]
impl PyPoolAllocator {
    /// Ids of all blocks, a frozenset.
    #[getter]
    fn all_block_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyFrozenSet>> {
        PyFrozenSet::new(py, self.ids.all())
    }

    /// Return a block's id within its device.
    pub(super) fn get_physical_block_id(
        &self,
        #[pyo3(from_py_with = args::absolute_id)] absolute_id: i64,
    ) -> PyResult<u32> {
        self.local(absolute_id).map(|block| block.0)
    }

    /// Free a block.
    #[pyo3(signature = (block, keep_block_object=false))]
    fn free(&self, block: V0Block<'_>, keep_block_object: bool) -> PyResult<()> {
        let _ = keep_block_object; // ignored: block objects are cheap and not pooled
        self.release(&[block])
    }

    /// Return new references to the blocks up to this one.
    pub(super) fn fork<'py>(slf: &Bound<'py, Self>, last_block: V0Block<'py>) -> PyResult<Vec<V0Block<'py>>> {
        let mut blocks = vec![last_block];
        while let Some(prev) = blocks[blocks.len() - 1].get().prev(slf.py()) {
            blocks.push(prev.cast_into()?);
        }
        blocks.reverse();
        Self::share(slf, &blocks)
    }

    /// Allocate several full blocks.
    #[pyo3(signature = (prev_block, block_token_ids, extra_hash=None, device=None))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python")]
    pub(super) fn allocate_immutable_blocks<'py>(
        slf: &Bound<'py, Self>,
        prev_block: Option<Bound<'py, PyAny>>,
        #[pyo3(from_py_with = args::block_token_ids)] block_token_ids: Vec<Vec<i64>>,
        #[pyo3(from_py_with = args::extra_hash)] extra_hash: Option<i64>,
        device: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Vec<V0Block<'py>>> {
        one_device(device.as_ref())?;
        Self::allocate_chain(slf, prev_block.as_ref(), block_token_ids, Vec::new(), extra_hash)
    }

    /// Allocate a full block, the cached one if it exists.
    #[pyo3(signature = (prev_block, token_ids, extra_hash=None, device=None))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python")]
    pub(super) fn allocate_immutable_block<'py>(
        slf: &Bound<'py, Self>,
        prev_block: Option<Bound<'py, PyAny>>,
        #[pyo3(from_py_with = args::token_ids)] token_ids: Vec<i64>,
        #[pyo3(from_py_with = args::extra_hash)] extra_hash: Option<i64>,
        device: Option<Bound<'py, PyAny>>,
    ) -> PyResult<V0Block<'py>> {
        one_device(device.as_ref())?;
        Ok(Self::allocate_chain(slf, prev_block.as_ref(), vec![token_ids], Vec::new(), extra_hash)?.remove(0))
    }

    /// Allocate an empty block.
    #[pyo3(signature = (prev_block, extra_hash=None, device=None))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python")]
    pub(super) fn allocate_mutable_block<'py>(
        slf: &Bound<'py, Self>,
        prev_block: Option<Bound<'py, PyAny>>,
        #[pyo3(from_py_with = args::extra_hash)] extra_hash: Option<i64>,
        device: Option<Bound<'py, PyAny>>,
    ) -> PyResult<V0Block<'py>> {
        one_device(device.as_ref())?;
        let ids = slf.get().take(&[None])?;
        let made = Self::create(slf, Self::parts(slf, prev_block, Vec::new(), ids[0], extra_hash));
        slf.get().or_give_back(&ids, made)
    }

    /// Return the block id to write to: a copy's if the block is shared.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python")]
    fn cow_block_if_not_appendable(&self, block: V0Block<'_>) -> PyResult<i64> {
        let source = block.get().id().ok_or_else(freed)?;
        let (local, mut out) = (self.local(source)?, Vec::with_capacity(1));
        lock(&self.pool).make_writable(&[local], &mut out).map_err(to_v0)?;
        let target = self.ids.id(out[0]);
        if target != source {
            lock(&self.copies).push((source, target));
        }
        Ok(target)
    }

    /// Return and clear the copies since the last call, `(from, to)`.
    pub(super) fn clear_copy_on_writes(&self) -> Vec<(i64, i64)> {
        std::mem::take(&mut *lock(&self.copies))
    }

    /// Free the blocks of a list.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python")]
    fn swap_out(&self, #[pyo3(from_py_with = args::blocks)] blocks: Vec<V0Block<'_>>) -> PyResult<()> {
        self.release(&blocks)
    }

    /// Allocate blocks for a list that is swapped in.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python")]
    fn swap_in(&self, #[pyo3(from_py_with = args::blocks)] blocks: Vec<V0Block<'_>>) -> PyResult<()> {
        let ids = self.take(&self.places(&blocks, |_| Ok(true))?)?;
        blocks.iter().zip(ids).for_each(|(block, id)| block.get().set_id(Some(id)));
        Ok(())
    }

    /// Return the number of blocks.
    fn get_num_total_blocks(&self) -> usize {
        self.total()
    }

    /// Return the number of free blocks.
    #[pyo3(signature = (device=None))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python")]
    fn get_num_free_blocks(&self, device: Option<Bound<'_, PyAny>>) -> PyResult<usize> {
        one_device(device.as_ref()).map(|()| self.free_count())
    }

    /// Return how many full blocks a swap would allocate.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python")]
    fn get_num_full_blocks_touched(
        &self,
        #[pyo3(from_py_with = args::blocks)] blocks: Vec<V0Block<'_>>,
    ) -> PyResult<usize> {
        self.touched(&blocks, |_| Ok(true))
    }

    /// Return the hit rate of lookups; -1 without a prefix cache.
    pub(super) fn get_prefix_cache_hit_rate(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        lock(&self.pool).lookups().map_or(-1.0, |all| all.hits as f64 / all.queries.max(1) as f64)
    }

    /// Return the id of a full block, or of the cached block with the same tokens if it exists.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python")]
    fn promote_to_immutable_block(&self, block: V0Block<'_>) -> PyResult<i64> {
        if !self.caching {
            return Err(PyNotImplementedError::new_err("there is no promotion for naive blocks"));
        }
        let local = self.local(block.get().id().ok_or_else(freed)?)?;
        let Some(keyed) = Self::keyed(&block)? else {
            return require(false, || "only a full block can be promoted".to_owned()).map(|()| 0);
        };
        Ok(self.ids.id(lock(&self.pool).publish(local, keyed).map_err(to_v0)?))
    }

    /// Record when blocks were used.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from a Python list")]
    pub(super) fn mark_blocks_as_accessed(
        &self,
        #[pyo3(from_py_with = args::block_ids)] block_ids: Vec<i64>,
        #[pyo3(from_py_with = args::now)] now: f64,
    ) -> PyResult<()> {
        let blocks = self.locals(&block_ids)?;
        lock(&self.pool).touch(&blocks, now).map_err(|error| {
            PyValueError::new_err(format!("mark block as accessed which is not belonged to GPU: {error}"))
        })
    }

    /// Do nothing: full blocks count as computed.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from a Python list")]
    pub(super) fn mark_blocks_as_computed(
        &self,
        #[pyo3(from_py_with = args::block_ids)] block_ids: Vec<i64>,
    ) -> PyResult<()> {
        self.mark_computed((!block_ids.is_empty()).then_some(block_ids.as_slice()))
    }

    /// Drop the cache; return whether that was possible.
    pub(super) fn reset_prefix_cache(&self) -> bool {
        lock(&self.pool).reset()
    }

    /// Return how many of the hashes, from the first on, are cached.
    pub(super) fn find_cached_blocks_prefix<'py>(
        &self,
        #[pyo3(from_py_with = args::block_hashes)] mut block_hashes: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        if !self.caching {
            return Ok(Vec::new());
        }
        let key = |hash: &Bound<'py, PyAny>| hash.extract().map(|IntKey(key)| key);
        let keys = block_hashes.iter().map(key).collect::<PyResult<Vec<Key>>>()?;
        block_hashes.truncate(lock(&self.pool).find(&keys).len());
        Ok(block_hashes)
    }

    /// Return the computed blocks that all lists share at their start.
    pub(super) fn get_common_computed_block_ids(
        &self,
        #[pyo3(from_py_with = args::computed_seq_block_ids)] computed_seq_block_ids: Vec<Vec<i64>>,
    ) -> Vec<i64> {
        let alone = computed_seq_block_ids.len() == 1;
        let mut rows = computed_seq_block_ids.into_iter().filter(|ids| alone || !ids.is_empty());
        let first = rows.next().filter(|_| self.caching).unwrap_or_default();
        let common = |first: Vec<i64>, ids: Vec<i64>| {
            let same = first.iter().zip(&ids).take_while(|(a, b)| a == b).count();
            first[..same].to_vec()
        };
        rows.fold(first, common)
    }
}

/// An allocator of blocks without keys; it reuses the last freed ids first.
#[pyclass(frozen, subclass, extends = PyPoolAllocator, name = "NaiveBlockAllocator", module = "blockyard.integrations.vllm_v0")]
pub(crate) struct PyNaiveBlockAllocator;

impl PyNaiveBlockAllocator {
    pub(super) fn of_ids(
        py: Python<'_>,
        block_size: usize,
        ids: Ids,
        tier: Tier,
    ) -> PyResult<Bound<'_, PyPoolAllocator>> {
        let create_block = PyNaiveBlock::type_object(py).into_any().unbind();
        let base = PyPoolAllocator::naive(create_block, block_size, ids, tier)?;
        Ok(Bound::new(py, PyClassInitializer::from(base).add_subclass(Self))?.into_super())
    }
}

#[pymethods]
impl PyNaiveBlockAllocator {
    #[new]
    #[pyo3(signature = (create_block, num_blocks, block_size, block_ids=None, block_pool=None))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python")]
    fn new(
        create_block: Py<PyAny>,
        #[pyo3(from_py_with = args::num_blocks)] num_blocks: usize,
        #[pyo3(from_py_with = args::block_size)] block_size: usize,
        block_ids: Option<Bound<'_, PyAny>>,
        block_pool: Option<Bound<'_, PyAny>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let _ = block_pool; // ignored: block objects are cheap and not pooled
        let ids = Ids::new(block_ids.as_ref(), num_blocks)?;
        let base = PyPoolAllocator::naive(create_block, block_size, ids, Tier::Device)?;
        Ok(PyClassInitializer::from(base).add_subclass(Self))
    }
}

/// An allocator that finds blocks by their keys. It evicts the least recently used, then the longest prefixes.
#[pyclass(frozen, subclass, extends = PyPoolAllocator, name = "PrefixCachingBlockAllocator", module = "blockyard.integrations.vllm_v0")]
pub(crate) struct PyPrefixCachingBlockAllocator;

impl PyPrefixCachingBlockAllocator {
    pub(super) fn of_ids(
        py: Python<'_>,
        block_size: usize,
        ids: Ids,
        tier: Tier,
    ) -> PyResult<Bound<'_, PyPoolAllocator>> {
        let base = PyPoolAllocator::caching(py, block_size, ids, tier)?;
        Ok(Bound::new(py, PyClassInitializer::from(base).add_subclass(Self))?.into_super())
    }
}

#[pymethods]
impl PyPrefixCachingBlockAllocator {
    #[new]
    #[pyo3(signature = (num_blocks, block_size, block_ids=None, eviction_policy=None))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python")]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = args::num_blocks)] num_blocks: usize,
        #[pyo3(from_py_with = args::block_size)] block_size: usize,
        block_ids: Option<Bound<'_, PyAny>>,
        eviction_policy: Option<Bound<'_, PyAny>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        // V0's only policy; compared by name, since the enum belongs to the engine.
        if let Some(policy) = eviction_policy {
            if policy.getattr(intern!(py, "name"))?.extract::<String>()? != "LRU" {
                return Err(PyValueError::new_err(format!("eviction_policy is {policy:?}, must be LRU")));
            }
        }
        let ids = Ids::new(block_ids.as_ref(), num_blocks)?;
        let base = PyPoolAllocator::caching(py, block_size, ids, Tier::Device)?;
        Ok(PyClassInitializer::from(base).add_subclass(Self))
    }

    /// Return whether the content of a block is cached.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python")]
    fn is_block_cached(slf: &Bound<'_, Self>, block: V0Block<'_>) -> PyResult<bool> {
        let key = key_of(&block)?;
        Ok(key.is_some_and(|key| lock(&slf.as_super().get().pool).holder(&key).is_some()))
    }

    /// Return whether a block's content is computed.
    fn block_is_computed(
        slf: &Bound<'_, Self>,
        #[pyo3(from_py_with = args::block_id)] block_id: i64,
    ) -> PyResult<bool> {
        slf.as_super().get().computed(block_id)
    }
}

/// Creates an allocator of that kind, `naive` or `prefix_caching`.
pub(super) fn of_kind<'py>(
    py: Python<'py>,
    kind: &str,
    block_size: usize,
    first: usize,
    blocks: usize,
    tier: Tier,
) -> PyResult<Bound<'py, PyPoolAllocator>> {
    let first = i64::try_from(first).map_err(|_| invalid(format!("{first} blocks are too many")))?;
    let ids = Ids::From(first, blocks);
    match kind {
        "naive" => PyNaiveBlockAllocator::of_ids(py, block_size, ids, tier),
        "prefix_caching" => PyPrefixCachingBlockAllocator::of_ids(py, block_size, ids, tier),
        _ => Err(PyValueError::new_err(format!("allocator_type is '{kind}', must be 'naive' or 'prefix_caching'"))),
    }
}
