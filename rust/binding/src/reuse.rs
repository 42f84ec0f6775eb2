//! Iterators over free blocks that take none of them.
//!
//! Lock order: the iterator, then what it reads; see `blockyard_locks`.

use crate::allocator::PyBlockAllocator;
use crate::manager::PyBlockManager;
use blockyard_core::{BlockId, Tier};
use blockyard_locks::OuterLock;
use pyo3::prelude::*;
use std::collections::VecDeque;

/// Blocks read at first; each chunk is twice the one before, so that finding one's place again costs little.
const FIRST_CHUNK: usize = 64;

/// Whose blocks they are.
pub(crate) enum Source {
    Manager(Py<PyBlockManager>, Tier),
    Allocator(Py<PyBlockAllocator>),
}

impl Source {
    /// Up to `count` blocks from place `first` of the order on.
    fn read(&self, first: usize, count: usize) -> VecDeque<BlockId> {
        match self {
            Self::Manager(manager, tier) => {
                manager.get().lock().pool(*tier).free_blocks().skip(first).take(count).collect()
            }
            Self::Allocator(allocator) => allocator.get().lock().upcoming().skip(first).take(count).collect(),
        }
    }
}

struct State {
    ahead: VecDeque<BlockId>,
    /// Blocks read so far.
    place: usize,
    chunk: usize,
    ended: bool,
}

/// Free blocks in the order in which they would be given out; nothing is taken.
#[pyclass(frozen, name = "FreeBlocks", module = "blockyard._core")]
pub(crate) struct PyFreeBlocks {
    source: Source,
    state: OuterLock<State>,
}

impl PyFreeBlocks {
    pub(crate) fn new(source: Source) -> Self {
        let state = State { ahead: VecDeque::new(), place: 0, chunk: FIRST_CHUNK, ended: false };
        Self { source, state: OuterLock::new(state) }
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
            state.ahead = self.source.read(state.place, state.chunk);
            state.ended = state.ahead.len() < state.chunk;
            state.place += state.ahead.len();
            state.chunk *= 2;
        }
        state.ahead.pop_front().map(|block| block.0)
    }
}
