//! The Python module `blockyard._core`: converts and locks, decides nothing.
#![deny(unsafe_code)]
#![expect(clippy::doc_markdown, reason = "the docs are those of the Python module")]

mod allocator;
mod convert;
mod copy;
mod decision;
mod event;
mod free_blocks;
mod locks;
mod manager;
mod observer;
mod offload;
mod span;
mod store;

use pyo3::prelude::*;

/// The Rust core of Blockyard.
#[pymodule(gil_used = false)]
mod _core {
    use super::{Bound, PyModule, PyModuleMethods, PyResult};

    #[pymodule_export]
    use crate::allocator::{PyBlockAllocator, PyNaiveAllocator, PyPrefixCachingAllocator, chain_keys};
    #[pymodule_export]
    use crate::copy::{PyBoundViews, PyMapping};
    #[pymodule_export]
    use crate::decision::{PyPairs, PyStepDecision};
    #[pymodule_export]
    use crate::event::PyEventBatch;
    #[pymodule_export]
    use crate::free_blocks::PyFreeBlocks;
    #[pymodule_export]
    use crate::manager::PyBlockManager;
    #[pymodule_export]
    use crate::manager::defrag::PyDefrag;
    #[pymodule_export]
    use crate::manager::fit::{PyAllocStatus, PyFit};
    #[pymodule_export]
    use crate::manager::group::{PyArena, PyCacheGroup};
    #[pymodule_export]
    use crate::manager::pins::PyPins;
    #[pymodule_export]
    use crate::manager::policies::PyPrefixCaching;
    #[pymodule_export]
    use crate::manager::pool::PyPool;
    #[pymodule_export]
    use crate::manager::prefix::store_jobs::{PyStoreJob, PyStoreJobs, PyStoreSearch};
    #[pymodule_export]
    use crate::manager::prefix::{PyPrefix, PyPrefixHit, export_keys};
    #[pymodule_export]
    use crate::manager::prompts::PyHashedPrompt;
    #[pymodule_export]
    use crate::manager::sequence::PySequence;
    #[pymodule_export]
    use crate::manager::step_owner::PyStepOwner;
    #[pymodule_export]
    use crate::manager::verbs::plain::plain_steps;
    #[pymodule_export]
    use crate::observer::{PyBlockObserver, PyMovePlan};
    #[pymodule_export]
    use crate::offload::{PyOffloadManager, PyPreparedStore};
    #[pymodule_export]
    use crate::span::expand_span;
    #[pymodule_export]
    use crate::store::{PyCompletion, PyRedisClient, PySlabStore, checksum_rows, read_slab, wipe_slab};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("build_profile", if cfg!(debug_assertions) { "debug" } else { "release" })
    }
}
