//! `FreeBlocks`: iterates over free blocks without taking them.
//!
//! Lock order: the iterator, then the pool; see `crate::locks`.

use crate::locks::{OuterLock, lock};
use blockyard_core::BlockId;
use pyo3::prelude::*;
use std::collections::VecDeque;

/// Size of the first chunk; each chunk is twice the previous one, so that resuming costs little.
const FIRST_CHUNK: usize = 64;

/// Reads up to `count` free blocks, from position `first` of their order.
type ReadFree = Box<dyn Fn(usize, usize) -> VecDeque<BlockId> + Send + Sync>;

struct ReadAhead {
    ahead: VecDeque<BlockId>,
    /// Number of blocks read so far.
    place: usize,
    chunk: usize,
    ended: bool,
}

/// An iterator over free blocks in the order in which they would be allocated. It takes none of them.
///
/// It reads ids in chunks: 64 first, then twice as many each time, so that the first few cost little in any pool. If
/// the pool changes during the iteration, ids already read stay as they were, and the next chunk continues at the same
/// position of the new order: an id may be missed or repeated.
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
