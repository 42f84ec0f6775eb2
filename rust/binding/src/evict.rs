//! Which block goes first, as `BlockManager` sees it: orders and policies by name, priorities, free blocks in their order.

use crate::allocator::ids;
use crate::args;
use crate::arrays;
use crate::decision::tier;
use crate::errors::{invalid, to_py};
use crate::manager::PyBlockManager;
use crate::reuse::{PyFreeBlocks, Source};
use blockyard_core::{BlockId, Eviction, MAX_PRIORITY, Policies, ReuseOrder};
use numpy::PyArray1;
use pyo3::prelude::*;

/// The policies of those names.
pub(crate) fn policies(reuse_order: &str, eviction: &str) -> PyResult<Policies> {
    let reuse = ReuseOrder::from_name(reuse_order)
        .ok_or_else(|| unknown("reuse_order", reuse_order, &ReuseOrder::ALL.map(ReuseOrder::name)))?;
    let eviction = Eviction::from_name(eviction)
        .ok_or_else(|| unknown("eviction", eviction, &Eviction::NAMED.map(Eviction::name)))?;
    Ok(Policies { reuse, eviction })
}

fn unknown(what: &str, found: &str, names: &[&str]) -> PyErr {
    invalid(format!("{what} is \"{found}\", must be one of {}", names.join(", ")))
}

#[pymethods]
impl PyBlockManager {
    #[pyo3(signature = (tier = "device", limit = None))]
    fn free_block_ids<'py>(
        &self,
        py: Python<'py>,
        tier: &str,
        #[pyo3(from_py_with = args::limit)] limit: Option<usize>,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let tier = self::tier(tier)?;
        let manager = self.lock();
        let free = manager.pool(tier).free_blocks().take(limit.unwrap_or(usize::MAX));
        let free: Vec<BlockId> = free.collect();
        drop(manager);
        ids(py, &free)
    }

    #[pyo3(signature = (tier = "device"))]
    fn iter_free_blocks(slf: Py<Self>, tier: &str) -> PyResult<PyFreeBlocks> {
        Ok(PyFreeBlocks::new(Source::Manager(slf, self::tier(tier)?)))
    }

    fn set_priority(
        &self,
        sequences: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::priority)] priority: u32,
    ) -> PyResult<()> {
        let priority = u8::try_from(priority)
            .map_err(|_| invalid(format!("priority is {priority}, must be 0 to {MAX_PRIORITY}")))?;
        let sequences = arrays::sequences(sequences)?;
        self.lock().set_priority(&sequences, priority).map_err(to_py)
    }
}
