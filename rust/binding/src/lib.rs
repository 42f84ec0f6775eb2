//! The Python module `blockyard._core`: converts and locks, decides nothing.
#![deny(unsafe_code)]
#![expect(clippy::doc_markdown, reason = "the docs are those of the Python module")]

mod allocator;
mod args;
mod arrays;
mod block_manager;
mod copy;
mod decision;
mod defrag;
mod errors;
mod event;
mod fill;
mod fit;
mod free_blocks;
mod group;
#[expect(unsafe_code, reason = "the one module that has any, each with its proof")]
mod memory;
mod observer;
mod pins;
mod policies;
mod pool;
mod prefix;
mod prompts;
mod sequence;
mod shared;
mod span;
mod stats;
mod store;
mod tiers;
mod v0;

use pyo3::prelude::*;

/// The Rust core of Blockyard.
#[pymodule(gil_used = false)]
mod _core {
    use super::{Bound, PyModule, PyModuleMethods, PyResult};

    #[pymodule_export]
    use crate::allocator::{PyBlockAllocator, PyNaiveAllocator, PyPrefixCachingAllocator, chain_keys};
    #[pymodule_export]
    use crate::block_manager::PyBlockManager;
    #[pymodule_export]
    use crate::copy::{PyBoundViews, PyMapping};
    #[pymodule_export]
    use crate::decision::{PyPairs, PyStepDecision};
    #[pymodule_export]
    use crate::defrag::{PyDefrag, PyDefragReport, PyResizeProgress};
    #[pymodule_export]
    use crate::event::PyEventBatch;
    #[pymodule_export]
    use crate::fill::PyFillMap;
    #[pymodule_export]
    use crate::fit::{PyAllocStatus, PyFit};
    #[pymodule_export]
    use crate::free_blocks::PyFreeBlocks;
    #[pymodule_export]
    use crate::group::PyCacheGroup;
    #[pymodule_export]
    use crate::observer::{PyBlockObserver, PyMovePlan};
    #[pymodule_export]
    use crate::pins::{PyExpired, PyPins};
    #[pymodule_export]
    use crate::policies::PyPrefixCaching;
    #[pymodule_export]
    use crate::pool::PyPool;
    #[pymodule_export]
    use crate::prefix::{PyPrefix, PyPrefixHit, export_keys};
    #[pymodule_export]
    use crate::prompts::PyHashedPrompt;
    #[pymodule_export]
    use crate::sequence::PySequence;
    #[pymodule_export]
    use crate::span::expand_span;
    #[pymodule_export]
    use crate::stats::{PyFragmentation, PyManagerStats};
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
