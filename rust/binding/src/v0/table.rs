//! The block table of one sequence.

use super::block::{self, PyNaiveBlock, PyNullBlock, V0Block};
use super::device::{Device, PyCpuGpuBlockAllocator};
use super::pool::PyPoolAllocator;
use super::require;
use crate::convert::args::{self, Argument, length};
use crate::locks::{InnerLock, lock};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PySlice};
use std::ops::Range;

/// The engine keeps these lists: they grow in place, and are replaced when blocks move.
struct BlockLists {
    blocks: Py<PyList>,
    ids: Py<PyList>,
    num_full_slots: usize,
    /// Number of blocks at the start that are outside the window.
    dropped: usize,
    /// Number of full blocks at the start that are known to be computed.
    computed: usize,
}

/// The block table of one sequence.
#[pyclass(frozen, subclass, name = "BlockTable", module = "blockyard.integrations.vllm_v0")]
pub(crate) struct PyBlockTable {
    block_size: usize,
    allocator: Py<PyCpuGpuBlockAllocator>,
    max_block_sliding_window: Option<usize>,
    state: InnerLock<BlockLists>,
}

fn lists<'py>(blocks: &[Bound<'py, PyAny>], py: Python<'py>) -> PyResult<(Py<PyList>, Py<PyList>)> {
    let ids = blocks.iter().map(|block| block.getattr(intern!(py, "block_id"))).collect::<PyResult<Vec<_>>>()?;
    Ok((PyList::new(py, blocks)?.unbind(), PyList::new(py, ids)?.unbind()))
}

impl PyBlockTable {
    fn list<'py>(&self, py: Python<'py>) -> Bound<'py, PyList> {
        lock(&self.state).blocks.bind(py).clone()
    }

    fn ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyList> {
        lock(&self.state).ids.bind(py).clone()
    }

    fn full_slots(&self) -> usize {
        lock(&self.state).num_full_slots
    }

    fn block<'py>(blocks: &Bound<'py, PyList>, index: usize) -> PyResult<V0Block<'py>> {
        Ok(blocks.get_item(index)?.cast_into::<PyNaiveBlock>()?)
    }

    fn allocated<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let blocks = self.list(py);
        require(!blocks.is_empty(), || "no blocks have been allocated".to_owned())?;
        Ok(blocks)
    }

    fn gpu<'py>(&self, py: Python<'py>) -> Bound<'py, PyPoolAllocator> {
        self.allocator.get().of(py, Device::Gpu)
    }

    fn replace(&self, py: Python<'_>, blocks: &[Bound<'_, PyAny>]) -> PyResult<()> {
        let (blocks, ids) = lists(blocks, py)?;
        let mut state = lock(&self.state);
        let before = (std::mem::replace(&mut state.blocks, blocks), std::mem::replace(&mut state.ids, ids));
        state.computed = 0;
        drop(state);
        drop(before); // may drop blocks
        Ok(())
    }

    /// Returns the blocks that leave the window.
    fn outside(&self, num_computed_slots: Option<usize>) -> PyResult<Range<usize>> {
        let Some(cap) = self.max_block_sliding_window else { return Ok(0..0) };
        require(num_computed_slots.is_some(), || "a sliding window needs num_computed_slots".to_owned())?;
        let end = (num_computed_slots.unwrap_or(0) / self.block_size).saturating_sub(cap);
        Ok(lock(&self.state).dropped..end)
    }

    /// Fails unless there are enough free blocks for appending.
    fn require_room(
        &self,
        blocks: &Bound<'_, PyList>,
        written: Range<usize>,
        slots: usize,
        dropped: Range<usize>,
    ) -> PyResult<()> {
        let (gpu, full) = (self.gpu(blocks.py()), self.full_slots());
        let mut wanted = full.saturating_add(slots).div_ceil(self.block_size).saturating_sub(blocks.len());
        for index in written.start..written.end.min(blocks.len()) {
            wanted += usize::from(gpu.get().is_shared(&Self::block(blocks, index)?)?);
        }
        wanted += usize::from(self.max_block_sliding_window.is_some() && !self.allocator.get().has_null_block());
        if wanted == 0 {
            return Ok(());
        }
        // Blocks that leave the window are freed first, so they count as free.
        for index in dropped {
            wanted = wanted.saturating_sub(usize::from(!gpu.get().is_shared(&Self::block(blocks, index)?)?));
        }
        gpu.get().require_free(wanted)
    }

    fn drop_outside(&self, blocks: &Bound<'_, PyList>, outside: Range<usize>) -> PyResult<()> {
        let (py, ids) = (blocks.py(), self.ids(blocks.py()));
        let null: Bound<'_, PyNullBlock> = self.allocator.get().null_block(py)?;
        let id = null.get().block_id(py)?;
        for index in outside {
            self.allocator.get().release(py, &[blocks.get_item(index)?])?;
            blocks.set_item(index, &null)?;
            ids.set_item(index, &id)?;
            lock(&self.state).dropped = index + 1;
        }
        Ok(())
    }

    fn empty_slots(&self, py: Python<'_>) -> usize {
        (self.list(py).len() * self.block_size).saturating_sub(self.full_slots())
    }
}

#[pymethods]
impl PyBlockTable {
    #[new]
    #[pyo3(signature = (block_size, block_allocator, _blocks=None, max_block_sliding_window=None))]
    #[expect(clippy::used_underscore_binding, reason = "V0's signature")]
    fn new(
        #[pyo3(from_py_with = args::block_size)] block_size: usize,
        block_allocator: Bound<'_, PyCpuGpuBlockAllocator>,
        #[pyo3(from_py_with = args::_blocks)] _blocks: Option<Vec<Bound<'_, PyAny>>>,
        #[pyo3(from_py_with = args::max_block_sliding_window)] max_block_sliding_window: Option<usize>,
    ) -> PyResult<Self> {
        require(block_size > 0, || "block_size is 0, must be at least 1".to_owned())?;
        let (py, given) = (block_allocator.py(), _blocks.unwrap_or_default());
        let len = |block: &Bound<'_, PyAny>| block.getattr(intern!(py, "token_ids"))?.len();
        let num_full_slots = given.iter().map(len).sum::<PyResult<usize>>()?;
        let (blocks, ids) = lists(&given, py)?;
        let state = InnerLock::new(BlockLists { blocks, ids, num_full_slots, dropped: 0, computed: 0 });
        Ok(Self { block_size, allocator: block_allocator.unbind(), max_block_sliding_window, state })
    }

    /// Return how many blocks tokens and lookahead slots need, ignoring hits.
    #[staticmethod]
    #[pyo3(signature = (token_ids, block_size, num_lookahead_slots=0))]
    fn get_num_required_blocks(
        token_ids: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::block_size)] block_size: usize,
        #[pyo3(from_py_with = args::num_lookahead_slots)] num_lookahead_slots: usize,
    ) -> PyResult<usize> {
        let slots = length(token_ids, &"token_ids")?.saturating_add(num_lookahead_slots);
        Ok(slots.div_ceil(block_size.max(1)))
    }

    /// Replace the blocks by these, or by these ids.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python")]
    fn update(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::blocks)] blocks: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.replace(py, &blocks)
    }

    /// Allocate blocks for all tokens, or none.
    #[pyo3(signature = (token_ids, device=None, extra_hash=None))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from a Python list")]
    fn allocate(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::token_ids)] token_ids: Vec<i64>,
        device: Option<Device>,
        #[pyo3(from_py_with = args::extra_hash)] extra_hash: Option<i64>,
    ) -> PyResult<()> {
        require(!token_ids.is_empty() && self.list(py).is_empty(), || {
            "allocate needs an empty table and at least one token".to_owned()
        })?;
        let (chunks, tail) = token_ids.split_at(token_ids.len() / self.block_size * self.block_size);
        let chunks = chunks.chunks(self.block_size).map(<[i64]>::to_vec).collect();
        let pool = self.allocator.get().of(py, device.unwrap_or(Device::Gpu));
        let blocks = PyPoolAllocator::allocate_chain(&pool, None, chunks, tail.to_vec(), extra_hash)?;
        self.replace(py, &blocks.into_iter().map(Bound::into_any).collect::<Vec<_>>())?;
        let mut state = lock(&self.state);
        (state.num_full_slots, state.dropped) = (token_ids.len(), 0);
        Ok(())
    }

    /// Append tokens and make room for more, all or nothing. Shared blocks are copied before they are written.
    #[pyo3(signature = (token_ids, num_lookahead_slots=0, num_computed_slots=None, extra_hash=None))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from a Python list")]
    fn append_token_ids(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::token_ids)] token_ids: Vec<i64>,
        #[pyo3(from_py_with = args::num_lookahead_slots)] num_lookahead_slots: usize,
        #[pyo3(from_py_with = args::num_computed_slots)] num_computed_slots: Option<usize>,
        #[pyo3(from_py_with = args::extra_hash)] extra_hash: Option<i64>,
    ) -> PyResult<()> {
        let (blocks, full) = (self.allocated(py)?, self.full_slots());
        let (first, slots) = (full / self.block_size, token_ids.len().saturating_add(num_lookahead_slots));
        let outside = self.outside(num_computed_slots)?;
        let end = if token_ids.is_empty() { first } else { (full + token_ids.len()).div_ceil(self.block_size) };
        self.require_room(&blocks, first..end, slots, outside.clone())?;
        if self.max_block_sliding_window.is_some() {
            self.drop_outside(&blocks, outside)?;
        }
        self.ensure_num_empty_slots(py, slots, extra_hash)?;
        let (mut left, ids) = (token_ids.as_slice(), self.ids(py));
        for index in first..end {
            let block = Self::block(&blocks, index)?;
            let room = self.block_size - if index == first { full % self.block_size } else { 0 };
            let (tokens, rest) = left.split_at(room.min(left.len()));
            block::append(&block, tokens)?;
            ids.set_item(index, block.get().id())?;
            left = rest;
        }
        lock(&self.state).num_full_slots += token_ids.len();
        Ok(())
    }

    /// Allocate blocks until `num_empty_slots` slots are empty, or none.
    #[pyo3(signature = (num_empty_slots, extra_hash=None))]
    fn ensure_num_empty_slots(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::num_empty_slots)] num_empty_slots: usize,
        #[pyo3(from_py_with = args::extra_hash)] extra_hash: Option<i64>,
    ) -> PyResult<()> {
        let (blocks, ids, gpu) = (self.allocated(py)?, self.ids(py), self.gpu(py));
        let missing = num_empty_slots.saturating_sub(self.empty_slots(py)).div_ceil(self.block_size);
        gpu.get().require_free(missing)?;
        for _ in 0..missing {
            let last = blocks.get_item(blocks.len() - 1)?;
            let block = PyPoolAllocator::allocate_mutable_block(&gpu, Some(last), extra_hash, None)?;
            ids.append(block.get().id())?;
            blocks.append(block)?;
        }
        Ok(())
    }

    /// Return a table over the same physical blocks.
    fn fork(&self, py: Python<'_>) -> PyResult<Self> {
        let blocks: Vec<Bound<'_, PyAny>> = self.allocated(py)?.iter().collect();
        let (blocks, ids) = lists(&self.allocator.get().share(py, &blocks)?, py)?;
        let BlockLists { num_full_slots, dropped, computed, .. } = *lock(&self.state);
        let state = InnerLock::new(BlockLists { blocks, ids, num_full_slots, dropped, computed });
        let (block_size, allocator) = (self.block_size, self.allocator.clone_ref(py));
        Ok(Self { block_size, allocator, max_block_sliding_window: self.max_block_sliding_window, state })
    }

    /// Free all blocks.
    fn free(&self, py: Python<'_>) -> PyResult<()> {
        let blocks: Vec<Bound<'_, PyAny>> = self.list(py).iter().collect();
        self.allocator.get().release(py, &blocks)?;
        self.replace(py, &[])
    }

    /// Ids of the blocks, a list of ints.
    #[getter]
    fn physical_block_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyList> {
        self.ids(py)
    }

    /// The blocks, a list.
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> Bound<'py, PyList> {
        self.list(py)
    }

    /// Number of tokens in the table.
    #[getter]
    fn num_full_slots(&self) -> usize {
        self.full_slots()
    }

    #[getter(_num_empty_slots)]
    fn num_empty_slots(&self, py: Python<'_>) -> usize {
        self.empty_slots(py)
    }

    /// Return the tokens that the table does not have yet.
    fn get_unseen_token_ids<'py>(&self, sequence_token_ids: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let first = isize::try_from(self.full_slots())?;
        sequence_token_ids.get_item(PySlice::new(sequence_token_ids.py(), first, isize::MAX, 1))
    }

    /// Make the blocks of the first `num_tokens` tokens findable by their keys.
    fn mark_computed(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::num_tokens)] num_tokens: usize,
    ) -> PyResult<()> {
        let (ids, full) = (self.ids(py), num_tokens.min(self.full_slots()) / self.block_size);
        let first = std::mem::replace(&mut lock(&self.state).computed, full).min(full);
        let (gpu, mut ids) = (self.gpu(py), Vec::<i64>::read(&ids.get_slice(first, full), &"block_ids")?);
        ids.retain(|&id| gpu.get().owns(id));
        gpu.get().mark_computed(Some(&ids))
    }

    /// Return the maximum number of blocks that appending may write or allocate.
    fn get_num_blocks_touched_by_append_slots(
        &self,
        token_ids: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::num_lookahead_slots)] num_lookahead_slots: usize,
    ) -> PyResult<usize> {
        let used = self.full_slots() % self.block_size;
        let slots = length(token_ids, &"token_ids")?.saturating_add(num_lookahead_slots);
        Ok(slots.saturating_add(used).div_ceil(self.block_size))
    }
}
