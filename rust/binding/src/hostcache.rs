//! Host copies of cached blocks, as far as `BlockManager` is asked for them.

use crate::args;
use crate::errors::to_py;
use crate::manager::PyBlockManager;
use pyo3::prelude::*;

#[pymethods]
impl PyBlockManager {
    fn offload_cached(&self, #[pyo3(from_py_with = args::max_blocks)] max_blocks: u32) -> PyResult<usize> {
        self.lock().offload_cached(max_blocks as usize).map_err(to_py)
    }
}
