//! Events of the prefix cache as columns: one numpy array a field, no Python object an event.

use crate::memory::{self, Zeroed};
use blockyard_core::event::{Event, EventBatch, Reason};
use blockyard_core::{ExportedKey, Tier};
use numpy::{PyArray1, PyArray2};
use pyo3::prelude::*;

const NO_KEY: ExportedKey = ExportedKey([0; 32]);

/// Events taken in one go.
#[pyclass(frozen, get_all, name = "EventBatch", module = "blockyard._core")]
pub(crate) struct PyEventBatch {
    first: u64,
    dropped: u64,
    kinds: Py<PyArray1<u8>>,
    tiers: Py<PyArray1<u8>>,
    blocks: Py<PyArray1<i32>>,
    keys: Py<PyArray2<u8>>,
    parents: Py<PyArray2<u8>>,
    tokens: Py<PyArray1<u32>>,
    lora_ids: Py<PyArray1<u64>>,
    reasons: Py<PyArray1<u8>>,
    remaining: Py<PyArray1<u8>>,
    groups: Py<PyArray1<u8>>,
}

impl PyEventBatch {
    pub(crate) fn new(py: Python<'_>, batch: &EventBatch) -> PyResult<Self> {
        let events = &batch.events;
        Ok(Self {
            first: batch.first,
            dropped: batch.dropped,
            kinds: column(py, events, |event| match event {
                Event::Stored { .. } => 0,
                Event::Removed { .. } => 1,
                Event::Cleared { .. } => 2,
            })?,
            tiers: column(py, events, |event| match event {
                Event::Stored { tier, .. } | Event::Removed { tier, .. } | Event::Cleared { tier } => *tier as u8,
            })?,
            #[expect(clippy::cast_possible_wrap, reason = "block ids stay below 2^30")]
            blocks: column(py, events, |event| match event {
                Event::Stored { block, .. } | Event::Removed { block, .. } => block.0 as i32,
                Event::Cleared { .. } => -1,
            })?,
            keys: keys(py, events, |event| match event {
                Event::Stored { key, .. } | Event::Removed { key, .. } => *key,
                Event::Cleared { .. } => NO_KEY,
            })?,
            parents: keys(py, events, |event| match event {
                Event::Stored { parent, .. } => parent.unwrap_or(NO_KEY),
                _ => NO_KEY,
            })?,
            tokens: column(py, events, |event| if let Event::Stored { tokens, .. } = event { *tokens } else { 0 })?,
            lora_ids: column(py, events, |event| if let Event::Stored { lora_id, .. } = event { *lora_id } else { 0 })?,
            reasons: column(py, events, |event| match event {
                Event::Removed { reason, .. } => *reason as u8 + 1,
                _ => 0,
            })?,
            remaining: column(py, events, |event| match event {
                Event::Removed { remaining, .. } => *remaining,
                _ => 0,
            })?,
            groups: column(py, events, |event| match event {
                Event::Stored { group, .. } | Event::Removed { group, .. } => *group,
                Event::Cleared { .. } => 0,
            })?,
        })
    }
}

fn column<T: Zeroed>(py: Python<'_>, events: &[Event], of: impl Fn(&Event) -> T) -> PyResult<Py<PyArray1<T>>> {
    memory::array(py, events, of).map(Bound::unbind)
}

fn keys(py: Python<'_>, events: &[Event], of: impl Fn(&Event) -> ExportedKey) -> PyResult<Py<PyArray2<u8>>> {
    let fill = |bytes: &mut [u8]| {
        bytes.chunks_exact_mut(32).zip(events).for_each(|(key, event)| key.copy_from_slice(&of(event).0));
    };
    memory::made(py, [events.len(), 32], fill).map(|(keys, ())| keys.unbind())
}

#[pymethods]
impl PyEventBatch {
    /// Names of the numbers in `kinds`.
    #[classattr]
    #[pyo3(name = "KINDS")]
    fn kind_names() -> (&'static str, &'static str, &'static str) {
        ("stored", "removed", "cleared")
    }

    /// Names of the numbers in `tiers`.
    #[classattr]
    #[pyo3(name = "TIERS")]
    fn tier_names() -> (&'static str, &'static str, &'static str) {
        let [device, host, external] = Tier::ALL.map(Tier::name);
        (device, host, external)
    }

    /// Names of the numbers in `reasons`; the first is of what was not removed.
    #[classattr]
    #[pyo3(name = "REASONS")]
    fn reason_names() -> (&'static str, &'static str, &'static str, &'static str, &'static str) {
        let [evicted, lost, replaced, moved] = Reason::ALL.map(Reason::name);
        ("", evicted, lost, replaced, moved)
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.kinds.bind(py).len()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let last = self.first + self.__len__(py)? as u64;
        Ok(format!("EventBatch({} to {last}, {} dropped before)", self.first, self.dropped))
    }
}
