//! The manager that `BlockManager` and its facets share.
//!
//! The lock is held for one call and never while Python code runs.

use crate::convert::errors::to_py;
use crate::convert::memory;
use crate::locks::{Guard, InnerLock, lock};
use blockyard_core::{BlockId, Manager, SequenceId, TableId, Tier, memory as core_memory};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// One manager behind one lock.
#[derive(Clone)]
pub(crate) struct Shared(Arc<InnerLock<Manager>>);

impl Shared {
    pub(crate) fn new(manager: Manager) -> Self {
        Self(Arc::new(InnerLock::new(manager)))
    }

    pub(crate) fn lock(&self) -> Guard<'_, Manager> {
        let mut manager = lock(&self.0);
        if manager.samples_residency() {
            static EPOCH: OnceLock<Instant> = OnceLock::new();
            manager.set_time(EPOCH.get_or_init(Instant::now).elapsed());
        }
        manager
    }

    /// Takes the lock, for calls that lend the caller's memory: nothing may be lent while this thread waits.
    pub(crate) fn with<R>(&self, call: impl FnOnce(&mut Manager) -> R) -> R {
        call(&mut self.lock())
    }
}

/// Returns a new uint64 array of handles.
pub(crate) fn handles<'py>(py: Python<'py>, ids: &[SequenceId]) -> PyResult<Bound<'py, PyArray1<u64>>> {
    memory::array(py, ids, |id| id.0)
}

/// Returns the shared empty array of handles: most steps return it, and creating it would cost as much as the call.
pub(crate) fn no_handles(py: Python<'_>) -> PyResult<Bound<'_, PyArray1<u64>>> {
    static NONE: PyOnceLock<Py<PyArray1<u64>>> = PyOnceLock::new();
    NONE.get_or_try_init(py, || handles(py, &[]).map(Bound::unbind)).map(|none| none.bind(py).clone())
}

/// Returns blocks of a tier by their ids in their page classes.
pub(crate) fn in_class(manager: &Manager, tier: Tier, mut blocks: Vec<BlockId>) -> Vec<BlockId> {
    let pool = manager.pool(tier);
    if pool.num_classes() > 1 {
        for block in &mut blocks {
            block.0 = pool.local(*block).1;
        }
    }
    blocks
}

/// Returns the tables of sequences in one cache group.
pub(crate) fn rows_in(manager: &Manager, sequences: &[SequenceId], group: u32) -> PyResult<Vec<TableId>> {
    let mut rows = core_memory::with_room(sequences.len()).map_err(to_py)?;
    for &sequence in sequences {
        rows.push(row_in(manager, sequence, group)?);
    }
    Ok(rows)
}

/// Returns the table of a sequence in one cache group.
pub(crate) fn row_in(manager: &Manager, sequence: SequenceId, group: u32) -> PyResult<TableId> {
    manager.table_of(sequence, group as usize).map_err(to_py)
}
