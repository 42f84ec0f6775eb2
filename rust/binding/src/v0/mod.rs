//! The objects of vLLM V0's block manager (0.7.3) over the core's allocators: blocks, allocators, block tables.
//!
//! Ids are the engine's, common to all devices. The ids of the core's pools, which start at 0 in each, stay internal.
//! Locks are held for one call into the core, and never while Python code runs.

mod allocator;
mod block;
mod device;
mod key;
mod pool;
mod table;

use blockyard_core::Error;
use pyo3::exceptions::PyAssertionError;
use pyo3::prelude::*;

pub(crate) use block::PyNaiveBlock;
pub(crate) use key::hash_blocks;

mod classes {
    pyo3::import_exception!(blockyard.integrations.vllm_v0.interfaces, NoFreeBlocksError);
}

/// Raises AssertionError, as V0 does; its callers may rely on the exception, even under `python -O`.
fn require(holds: bool, message: impl FnOnce() -> String) -> PyResult<()> {
    if holds { Ok(()) } else { Err(PyAssertionError::new_err(message())) }
}

/// Returns V0's exception for an error of the core.
#[expect(clippy::needless_pass_by_value, reason = "passed to `map_err` by name")]
fn to_v0(error: Error) -> PyErr {
    match error {
        Error::OutOfBlocks { tier, wanted, free, total } => {
            classes::NoFreeBlocksError::new_err((error.to_string(), tier.name(), wanted, free, total))
        }
        _ => PyAssertionError::new_err(error.to_string()),
    }
}

fn freed() -> PyErr {
    PyAssertionError::new_err("a block has no physical block, it has been freed")
}

/// Adds the classes to `_core` under prefixed names; Python users see them in the integration.
pub(crate) fn export(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("V0NaiveBlock", py.get_type::<PyNaiveBlock>())?;
    module.add("V0PrefixCachingBlock", py.get_type::<block::PyPrefixCachingBlock>())?;
    module.add("V0NullBlock", py.get_type::<block::PyNullBlock>())?;
    module.add("V0PoolAllocator", py.get_type::<pool::PyPoolAllocator>())?;
    module.add("V0NaiveBlockAllocator", py.get_type::<allocator::PyNaiveBlockAllocator>())?;
    module.add("V0PrefixCachingBlockAllocator", py.get_type::<allocator::PyPrefixCachingBlockAllocator>())?;
    module.add("V0CpuGpuBlockAllocator", py.get_type::<device::PyCpuGpuBlockAllocator>())?;
    module.add("V0BlockTable", py.get_type::<table::PyBlockTable>())
}
