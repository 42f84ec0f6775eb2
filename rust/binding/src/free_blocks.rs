//! `FreeBlocks`: iterators over free blocks that take none of them.
//!
//! Lock order: the iterator, then what it reads; see `crate::locks`.

use crate::locks::{OuterLock, lock};
use blockyard_core::BlockId;
use pyo3::prelude::*;
use std::collections::VecDeque;

/// Blocks read at first; each chunk is twice the one before, so that finding one's place again costs little.
const FIRST_CHUNK: usize = 64;

/// Reads up to `count` free blocks from place `first` of their order on.
type ReadFree = Box<dyn Fn(usize, usize) -> VecDeque<BlockId> + Send + Sync>;

struct ReadAhead {
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
    state: OuterLock<ReadAhead>,
}

impl PyFreeBlocks {
    pub(crate) fn new(read: ReadFree) -> Self {
        let state = ReadAhead { ahead: VecDeque::new(), place: 0, chunk: FIRST_CHUNK, ended: false };
        Self { read, state: OuterLock::new(state) }
    }
}

#[pymethods]
impl PyFreeBlocks {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self) -> Option<u32> {
        let mut state = lock(&self.state);
        if state.ahead.is_empty() && !state.ended {
            state.ahead = (self.read)(state.place, state.chunk);
            state.ended = state.ahead.len() < state.chunk;
            state.place += state.ahead.len();
            state.chunk *= 2;
        }
        state.ahead.pop_front().map(|block| block.0)
    }
}
