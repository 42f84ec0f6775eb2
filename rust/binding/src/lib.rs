//! The Python module `blockyard._core`: converts and locks, decides nothing.
#![deny(unsafe_code)]

mod allocator;
mod args;
mod arrays;
mod copy;
mod decision;
mod defrag;
mod errors;
mod event;
mod evict;
mod fill;
mod group;
mod hostcache;
mod manager;
#[expect(unsafe_code, reason = "the one module that has any, each with its proof")]
mod memory;
mod moves;
mod pin;
mod prefix;
mod quota;
mod resize;
mod reuse;
mod snapshot;
mod span;
mod stats;
mod store;
mod v0;

use pyo3::prelude::*;

/// The Rust core of Blockyard.
#[pymodule(gil_used = false)]
mod _core {
    use super::{Bound, PyModule, PyModuleMethods, PyResult};

    #[pymodule_export]
    use crate::allocator::{PyBlockAllocator, PyNaiveAllocator, PyPrefixCachingAllocator, chain_keys};
    #[pymodule_export]
    use crate::copy::{py_copy_rows, py_exchange_rows, py_move_rows};
    #[pymodule_export]
    use crate::decision::{PyPairs, PyStepDecision};
    #[pymodule_export]
    use crate::defrag::{PyBlockObserver, PyMovePlan};
    #[pymodule_export]
    use crate::event::PyEventBatch;
    #[pymodule_export]
    use crate::fill::PyFillMap;
    #[pymodule_export]
    use crate::group::PyCacheGroup;
    #[pymodule_export]
    use crate::manager::{PyAllocStatus, PyBlockManager};
    #[pymodule_export]
    use crate::moves::{PyDefragReport, PyFragmentation};
    #[pymodule_export]
    use crate::pin::PyExpired;
    #[pymodule_export]
    use crate::prefix::{PyPrefixStats, export_keys};
    #[pymodule_export]
    use crate::resize::PyResizeProgress;
    #[pymodule_export]
    use crate::reuse::PyFreeBlocks;
    #[pymodule_export]
    use crate::span::expand_span;
    #[pymodule_export]
    use crate::stats::PyManagerStats;
    #[pymodule_export]
    use crate::store::{PyCompletion, PySlabStore, PyTierStats};
    #[pymodule_export]
    use crate::v0::hash_blocks;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::v0::export(module)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
