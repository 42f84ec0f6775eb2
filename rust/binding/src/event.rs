//! Events of the prefix cache as columns: one numpy array per field, no Python objects per event.

use crate::convert::memory::{self, Zeroed};
use crate::convert::values::picklable;
use blockyard_core::Reason;
use blockyard_core::event::{Event, EventBatch};
use blockyard_core::{ExportedKey, Tier};
use numpy::{PyArray1, PyArray2};
use pyo3::prelude::*;

const NO_KEY: ExportedKey = ExportedKey([0; 32]);

/// A batch of prefix cache events, one array entry per event, oldest first.
///
/// Event `i` has the number `first + i`. Numbers continue from batch to batch; `dropped` events before `first` were
/// lost for lack of room. Replaying `stored`, `removed` and `cleared` by tier and key yields exactly the cache's
/// content.
///
/// - `kinds`: uint8 `[n]`, indexes `KINDS`; `tiers`: uint8 `[n]`, indexes `TIERS`; `blocks`: int32 `[n]`, -1 if
///   cleared.
/// - `keys`: uint8 `[n, 32]`, the exported key as `export_keys` returns it; `groups`: uint8 `[n]`, the block's cache
///   group, since blocks of several groups have the same key.
/// - Only for `stored`: `parents`, uint8 `[n, 32]`, key of the preceding block, zeros for a sequence's first; `tokens`,
///   uint32 `[n]`; `lora_ids`, uint64 `[n]`.
/// - Only for `removed`: `reasons`, uint8 `[n]`, indexes `REASONS`; `remaining`, uint8 `[n]`, number of copies in other
///   tiers, including those in transfer. They cannot be found until a swapped sequence returns, with a new `stored`.
///
/// Attributes:
///     KINDS: names of the numbers in `kinds`.
///     TIERS: names of the numbers in `tiers`.
///     REASONS: names of the numbers in `reasons`; the first, empty, is for events other than `removed`.
///
/// Example:
///     >>> from blockyard import BlockManager, PrefixCaching
///     >>> manager = BlockManager(block_size=4, device_blocks=8, prefix_caching=PrefixCaching(max_events=100))
///     >>> sequence = manager.allocate([1, 2, 3, 4, 5])
///     >>> ticket = manager.take_decision().ticket
///     >>> manager.mark_computed([sequence])
///     >>> _ = manager.complete(ticket)
///     >>> events = manager.prefix.take_events()
///     >>> [(events.KINDS[kind], block) for kind, block in zip(events.kinds, events.blocks.tolist())]
///     [('stored', 0)]
#[pyclass(frozen, get_all, name = "EventBatch", module = "blockyard._core")]
pub(crate) struct PyEventBatch {
    /// Number of the first event.
    first: u64,
    /// Number of events before `first` that were lost for lack of room.
    dropped: u64,
    /// uint8 `[n]`, index of `KINDS`.
    kinds: Py<PyArray1<u8>>,
    /// uint8 `[n]`, index of `TIERS`.
    tiers: Py<PyArray1<u8>>,
    /// Block ids, int32 `[n]`; -1 for `cleared`.
    blocks: Py<PyArray1<i32>>,
    /// Exported keys, uint8 `[n, 32]`, as `export_keys` returns them.
    keys: Py<PyArray2<u8>>,
    /// For `stored`, the key of the preceding block, uint8 `[n, 32]`; zeros for the first block of a sequence.
    parents: Py<PyArray2<u8>>,
    /// For `stored`, number of tokens in the block, uint32 `[n]`.
    tokens: Py<PyArray1<u32>>,
    /// For `stored`, the adapter, uint64 `[n]`.
    lora_ids: Py<PyArray1<u64>>,
    /// For `removed`, index of `REASONS`, uint8 `[n]`.
    reasons: Py<PyArray1<u8>>,
    /// For `removed`, number of copies left in other tiers, uint8 `[n]`.
    remaining: Py<PyArray1<u8>>,
    /// Cache group of the block, uint8 `[n]`, since blocks of several groups have the same key.
    groups: Py<PyArray1<u8>>,
}

picklable!(PyEventBatch {
    first,
    dropped,
    kinds,
    tiers,
    blocks,
    keys,
    parents,
    tokens,
    lora_ids,
    reasons,
    remaining,
    groups,
});

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

    /// Names of the numbers in `reasons`; the first, empty, is for events other than `removed`.
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
