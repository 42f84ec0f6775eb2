//! The pool of one device, with the engine's ids. The allocators' methods build on it.

use super::block::{Parts, PyNaiveBlock, PyPrefixCachingBlock, V0Block, key_of};
use super::key;
use super::{freed, require, to_v0};
use crate::convert::args::Argument;
use crate::convert::errors::to_py;
use crate::locks::{InnerLock, debug_assert_none_held, lock};
use blockyard_core as core;
use blockyard_core::ReuseOrder;
use blockyard_core::allocator::Eviction;
use blockyard_core::{BlockAllocator, BlockId, Error, Key, Keyed, Tier};
use pyo3::PyTypeInfo;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::IntoPyDict;
use std::collections::{HashMap, HashSet};

/// The engine's ids of a pool's blocks, in the pool's order.
pub(super) enum Ids {
    From(i64, usize),
    Listed(Vec<i64>, HashMap<i64, usize>),
}

impl Ids {
    pub(super) fn new(ids: Option<&Bound<'_, PyAny>>, blocks: usize) -> PyResult<Self> {
        let Some(ids) = ids else { return Ok(Self::From(0, blocks)) };
        let mut ids = Vec::<i64>::read(ids, &"block_ids")?;
        ids.sort_unstable();
        ids.dedup();
        require(ids.len() == blocks, || format!("{} block ids, must be {blocks}", ids.len()))?;
        match (ids.first(), ids.last()) {
            (Some(&first), Some(&last)) if last.abs_diff(first) != ids.len() as u64 - 1 => {
                let index = ids.iter().enumerate().map(|(index, &id)| (id, index)).collect();
                Ok(Self::Listed(ids, index))
            }
            (first, _) => Ok(Self::From(first.copied().unwrap_or(0), blocks)),
        }
    }

    #[expect(clippy::cast_possible_wrap, reason = "block ids stay below 2^30")]
    pub(super) fn all(&self) -> Vec<i64> {
        match self {
            Self::From(first, blocks) => (*first..first + *blocks as i64).collect(),
            Self::Listed(ids, _) => ids.clone(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::From(_, blocks) => *blocks,
            Self::Listed(ids, _) => ids.len(),
        }
    }

    fn local(&self, id: i64) -> Option<usize> {
        match self {
            Self::From(first, blocks) => {
                id.checked_sub(*first).and_then(|local| usize::try_from(local).ok()).filter(|local| local < blocks)
            }
            Self::Listed(_, index) => index.get(&id).copied(),
        }
    }

    pub(super) fn id(&self, block: BlockId) -> i64 {
        match self {
            Self::From(first, _) => first + i64::from(block.0),
            Self::Listed(ids, _) => ids[block.0 as usize],
        }
    }
}

/// The base of both allocators.
#[pyclass(frozen, subclass, name = "PoolAllocator", module = "blockyard.integrations.vllm_v0")]
pub(crate) struct PyPoolAllocator {
    pub(super) pool: InnerLock<Box<dyn BlockAllocator>>,
    pub(super) ids: Ids,
    pub(super) block_size: usize,
    pub(super) create_block: Py<PyAny>,
    pub(super) caching: bool,
    pub(super) copies: InnerLock<Vec<(i64, i64)>>,
}

impl PyPoolAllocator {
    pub(super) fn naive(create_block: Py<PyAny>, block_size: usize, ids: Ids, tier: Tier) -> PyResult<Self> {
        let pool = core::NaiveAllocator::new(tier, ids.len(), ReuseOrder::Lifo).map_err(to_py)?;
        Ok(Self::over(Box::new(pool), create_block, block_size, ids, false))
    }

    pub(super) fn caching(py: Python<'_>, block_size: usize, ids: Ids, tier: Tier) -> PyResult<Self> {
        let pool = core::PrefixCachingAllocator::new(tier, ids.len(), ReuseOrder::Lifo, Eviction::Accessed);
        let create_block = PyPrefixCachingBlock::type_object(py).into_any().unbind();
        Ok(Self::over(Box::new(pool.map_err(to_py)?), create_block, block_size, ids, true))
    }

    fn over(pool: Box<dyn BlockAllocator>, create: Py<PyAny>, block_size: usize, ids: Ids, caching: bool) -> Self {
        let (pool, copies) = (InnerLock::new(pool), InnerLock::default());
        Self { pool, ids, block_size, create_block: create, caching, copies }
    }

    pub(super) fn local(&self, id: i64) -> PyResult<BlockId> {
        let local = self.ids.local(id).and_then(|local| u32::try_from(local).ok()).map(BlockId);
        local.ok_or_else(|| {
            let blocks = self.total();
            PyValueError::new_err(format!("block {id} is not one of the {blocks} of this allocator"))
        })
    }

    pub(super) fn locals(&self, ids: &[i64]) -> PyResult<Vec<BlockId>> {
        ids.iter().map(|&id| self.local(id)).collect()
    }

    fn blocks(&self, blocks: &[V0Block<'_>]) -> PyResult<Vec<BlockId>> {
        blocks.iter().map(|block| self.local(block.get().id().ok_or_else(freed)?)).collect()
    }

    pub(super) fn owns(&self, id: i64) -> bool {
        self.ids.local(id).is_some()
    }

    pub(super) fn total(&self) -> usize {
        lock(&self.pool).pool().len()
    }

    pub(super) fn free_count(&self) -> usize {
        lock(&self.pool).pool().free()
    }

    pub(super) fn all_ids(&self) -> Vec<i64> {
        self.ids.all()
    }

    /// Fails unless `wanted` blocks are free.
    pub(super) fn require_free(&self, wanted: usize) -> PyResult<()> {
        let (free, total) = (self.free_count(), self.total());
        let tier = lock(&self.pool).pool().tier();
        if wanted > free { Err(to_v0(Error::OutOfBlocks { tier, wanted, free, total })) } else { Ok(()) }
    }

    /// Returns whether a block is shared.
    pub(super) fn is_shared(&self, block: &V0Block<'_>) -> PyResult<bool> {
        let local = self.local(block.get().id().ok_or_else(freed)?)?;
        Ok(lock(&self.pool).pool().refs(local) > 1)
    }

    /// Fails unless each physical block has at least as many references as it appears in `blocks`.
    pub(super) fn require_refs(&self, blocks: &[V0Block<'_>]) -> PyResult<()> {
        let blocks = self.blocks(blocks)?;
        lock(&self.pool).require(&blocks).map_err(to_v0)
    }

    /// Adds one reference to each block.
    pub(super) fn add_refs(&self, blocks: &[V0Block<'_>]) -> PyResult<()> {
        let blocks = self.blocks(blocks)?;
        lock(&self.pool).share(&blocks).map_err(to_v0)
    }

    /// Releases one reference to each block, all or none.
    pub(super) fn release(&self, blocks: &[V0Block<'_>]) -> PyResult<()> {
        let locals = self.blocks(blocks)?;
        lock(&self.pool).free(&locals).map_err(to_v0)?;
        for block in blocks {
            block.get().set_id(None);
        }
        Ok(())
    }

    /// Allocates one physical block for each place, all or none. A place with a key gets the block with that key if
    /// it exists.
    pub(super) fn take(&self, places: &[Option<Keyed>]) -> PyResult<Vec<i64>> {
        let keys: Vec<Keyed> = places.iter().copied().flatten().collect();
        let (plain, mut taken) = (places.len() - keys.len(), Vec::with_capacity(places.len()));
        let mut pool = lock(&self.pool);
        if self.caching {
            pool.allocate_keyed(&keys, plain, &mut taken).map(|_| ()).map_err(to_v0)?;
        } else {
            pool.allocate(places.len(), &mut taken).map_err(to_v0)?;
            return Ok(taken.into_iter().map(|block| self.ids.id(block)).collect());
        }
        let (mut keyed, mut plain) = (0, keys.len());
        let next = |place: &Option<Keyed>| {
            let at = if place.is_some() { &mut keyed } else { &mut plain };
            *at += 1;
            self.ids.id(taken[*at - 1])
        };
        Ok(places.iter().map(next).collect())
    }

    pub(super) fn computed(&self, id: i64) -> PyResult<bool> {
        let local = self.local(id)?;
        Ok(lock(&self.pool).is_computed(local))
    }

    /// Makes blocks findable by their keys: those with these ids, or all in use.
    pub(super) fn mark_computed(&self, ids: Option<&[i64]>) -> PyResult<()> {
        let blocks = ids.map(|ids| self.locals(ids)).transpose()?;
        lock(&self.pool).mark_computed(blocks.as_deref());
        Ok(())
    }

    /// Returns how many free blocks it would take to allocate these keys.
    pub(super) fn cost(&self, keys: &[Key]) -> usize {
        lock(&self.pool).cost(keys)
    }

    pub(super) fn keyed(block: &V0Block<'_>) -> PyResult<Option<Keyed>> {
        let depth = block.get().end().map_or(0, |end| u32::try_from(end).unwrap_or(u32::MAX));
        Ok(key_of(block)?.map(|key| Keyed { key, depth }))
    }

    /// Returns the keys of blocks that come from another device; only for those accepted by `complete`.
    pub(super) fn places(
        &self,
        blocks: &[V0Block<'_>],
        complete: impl Fn(&V0Block<'_>) -> PyResult<bool>,
    ) -> PyResult<Vec<Option<Keyed>>> {
        let place = |block| if self.caching && complete(block)? { Self::keyed(block) } else { Ok(None) };
        blocks.iter().map(place).collect()
    }

    pub(super) fn create<'py>(slf: &Bound<'py, Self>, parts: Parts<'py>) -> PyResult<V0Block<'py>> {
        let (py, this) = (slf.py(), slf.get());
        if this.caching {
            return Ok(Bound::new(py, PyPrefixCachingBlock::with(parts, false)?)?.into_super());
        }
        let create_block = this.create_block.bind(py);
        if create_block.is(PyNaiveBlock::type_object(py)) {
            return Bound::new(py, PyNaiveBlock::naive(parts, None)?);
        }
        let options = [
            ("prev_block", parts.prev.into_pyobject(py)?),
            ("token_ids", parts.tokens.into_pyobject(py)?),
            ("block_size", parts.block_size.into_pyobject(py)?.into_any()),
            ("allocator", parts.allocator),
            ("block_id", parts.id.into_pyobject(py)?),
            ("extra_hash", parts.extra.into_pyobject(py)?),
        ];
        debug_assert_none_held();
        Ok(create_block.call((), Some(&options.into_py_dict(py)?))?.cast_into()?)
    }

    pub(super) fn parts<'py>(
        slf: &Bound<'py, Self>,
        prev: Option<Bound<'py, PyAny>>,
        tokens: Vec<i64>,
        id: i64,
        extra: Option<i64>,
    ) -> Parts<'py> {
        let (block_size, allocator) = (slf.get().block_size, slf.clone().into_any());
        Parts { prev, tokens, block_size, allocator, id: Some(id), extra }
    }

    /// Returns a chain of new blocks over the physical blocks of others.
    pub(super) fn share<'py>(slf: &Bound<'py, Self>, blocks: &[V0Block<'py>]) -> PyResult<Vec<V0Block<'py>>> {
        let this = slf.get();
        this.add_refs(blocks)?;
        let ids: Vec<i64> = blocks.iter().filter_map(|block| block.get().id()).collect();
        let mut copies: Vec<V0Block<'py>> = Vec::with_capacity(blocks.len());
        for (block, &id) in blocks.iter().zip(&ids) {
            let other = block.get();
            let prev = copies.last().map_or_else(|| other.prev(slf.py()), |prev| Some(prev.clone().into_any()));
            let copy = Self::create(slf, Self::parts(slf, prev, other.tokens(), id, other.extra()));
            let copy = this.or_give_back(&ids, copy)?;
            if let Some(key) = key_of(block)? {
                copy.get().set_key(key);
            }
            copies.push(copy);
        }
        Ok(copies)
    }

    /// Allocates blocks for full chunks of tokens and a last, partial one, all or none.
    pub(super) fn allocate_chain<'py>(
        slf: &Bound<'py, Self>,
        prev: Option<&Bound<'py, PyAny>>,
        full: Vec<Vec<i64>>,
        tail: Vec<i64>,
        extra: Option<i64>,
    ) -> PyResult<Vec<V0Block<'py>>> {
        let this = slf.get();
        let keys = if this.caching { this.keys(prev, &full, extra)? } else { vec![None; full.len()] };
        let mut places = keys;
        places.extend((!tail.is_empty()).then_some(None));
        let ids = this.take(&places)?;
        let chunks = full.into_iter().chain([tail]).zip(ids.iter().copied()).zip(places);
        let made = Self::create_chain(slf, prev, chunks, extra);
        this.or_give_back(&ids, made)
    }

    /// Returns the new blocks, or frees their physical blocks on an error.
    pub(super) fn or_give_back<T>(&self, ids: &[i64], made: PyResult<T>) -> PyResult<T> {
        if made.is_err() {
            let blocks = self.locals(ids)?;
            lock(&self.pool).free(&blocks).map_err(to_v0)?;
        }
        made
    }

    fn create_chain<'py>(
        slf: &Bound<'py, Self>,
        prev: Option<&Bound<'py, PyAny>>,
        chunks: impl Iterator<Item = ((Vec<i64>, i64), Option<Keyed>)>,
        extra: Option<i64>,
    ) -> PyResult<Vec<V0Block<'py>>> {
        let mut blocks: Vec<V0Block<'py>> = Vec::new();
        for ((tokens, id), key) in chunks {
            let before = blocks.last().map_or_else(|| prev.cloned(), |block| Some(block.clone().into_any()));
            let block = Self::create(slf, Self::parts(slf, before, tokens, id, extra))?;
            if let Some(Keyed { key, .. }) = key {
                block.get().set_key(key);
            }
            blocks.push(block);
        }
        Ok(blocks)
    }

    fn keys(
        &self,
        prev: Option<&Bound<'_, PyAny>>,
        full: &[Vec<i64>],
        extra: Option<i64>,
    ) -> PyResult<Vec<Option<Keyed>>> {
        let fits = full.iter().all(|tokens| tokens.len() == self.block_size);
        require(fits, || "an immutable block must be full".to_owned())?;
        let (mut parent, mut end) = (None, 0);
        if let Some(prev) = prev {
            let block = prev.cast::<PyNaiveBlock>()?;
            end = block.get().end().unwrap_or(0);
            parent = key_of(block)?;
            let is_full = parent.is_some() || full.is_empty();
            require(is_full, || "the previous block of an immutable one must be full".to_owned())?;
        }
        let keys = key::chain(parent, &full.concat(), self.block_size, extra)?;
        let ends = (1..).map(|blocks| u32::try_from(end + blocks * self.block_size).unwrap_or(u32::MAX));
        Ok(keys.into_iter().zip(ends).map(|(key, depth)| Some(Keyed { key, depth })).collect())
    }

    /// Returns how many free blocks full blocks would take on this device; those accepted by `complete` are found by
    /// key.
    pub(super) fn touched(
        &self,
        blocks: &[V0Block<'_>],
        complete: impl Fn(&V0Block<'_>) -> PyResult<bool>,
    ) -> PyResult<usize> {
        let full: Vec<V0Block<'_>> = blocks.iter().filter(|block| block.get().full()).cloned().collect();
        let places = self.places(&full, complete)?;
        let alone = full.iter().zip(&places).filter(|(_, place)| place.is_none());
        let alone: HashSet<Option<i64>> = alone.map(|(block, _)| block.get().id()).collect();
        let keys: Vec<Key> = places.iter().flatten().map(|keyed| keyed.key).collect();
        Ok(alone.len() + self.cost(&keys))
    }
}
