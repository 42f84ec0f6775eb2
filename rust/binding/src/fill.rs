//! `FillMap`: which parts of the host's blocks hold bytes.

use crate::convert::args;
use crate::convert::arrays::ids;
use crate::convert::errors::to_py;
use crate::convert::memory;
use crate::locks::{Guard, InnerLock, lock};
use blockyard_core::FillMap;
use numpy::PyArray1;
use pyo3::prelude::*;

/// Which parts of the host's blocks hold bytes, where a host block holds several device blocks.
///
/// A part's id is `block * per_block + offset`. Mark parts once their bytes have landed; clear a block before it is
/// given out again.
///
/// Args:
///     num_blocks: blocks of the host.
///     per_block: device blocks in each.
/// Raises:
///     InvalidArgumentError: `per_block` is 0, or there are 2^32 parts or more.
#[pyclass(frozen, name = "FillMap", module = "blockyard._core")]
pub(crate) struct PyFillMap(InnerLock<FillMap>);

impl PyFillMap {
    fn lock(&self) -> Guard<'_, FillMap> {
        lock(&self.0)
    }
}

#[pymethods]
impl PyFillMap {
    #[new]
    fn new(
        #[pyo3(from_py_with = args::num_blocks)] num_blocks: u32,
        #[pyo3(from_py_with = args::per_block)] per_block: u32,
    ) -> PyResult<Self> {
        FillMap::new(num_blocks, per_block).map(|map| Self(InnerLock::new(map))).map_err(to_py)
    }

    /// Large blocks.
    #[getter]
    fn num_blocks(&self) -> u32 {
        self.lock().blocks()
    }

    /// Parts in a large block.
    #[getter]
    fn per_block(&self) -> u32 {
        self.lock().per_block()
    }

    /// Note that parts, int64 `[n]`, hold bytes. Raises: MappingError, and notes nothing.
    fn mark(&self, parts: &Bound<'_, PyAny>) -> PyResult<()> {
        let parts = ids(parts)?;
        self.lock().mark(&parts).map_err(to_py)
    }

    /// Note that parts, int64 `[n]`, are empty. Raises: MappingError, and notes nothing.
    fn unmark(&self, parts: &Bound<'_, PyAny>) -> PyResult<()> {
        let parts = ids(parts)?;
        self.lock().unmark(&parts).map_err(to_py)
    }

    /// Note that all parts of blocks, int64 `[n]`, are empty. Raises: MappingError, and notes nothing.
    fn clear(&self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let blocks = ids(blocks)?;
        self.lock().clear(&blocks).map_err(to_py)
    }

    /// Raise MappingError at the first of the parts, int64 `[n]`, that holds no bytes.
    fn require(&self, parts: &Bound<'_, PyAny>) -> PyResult<()> {
        let parts = ids(parts)?;
        self.lock().require(&parts).map_err(to_py)
    }

    /// Parts of each of the blocks, int64 `[n]`, that hold bytes.
    fn count<'py>(&self, blocks: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let (py, blocks) = (blocks.py(), ids(blocks)?);
        let counts = self.lock().count(&blocks).map_err(to_py)?;
        memory::array(py, &counts, |&count| count)
    }

    fn __repr__(&self) -> String {
        let map = self.lock();
        format!("FillMap({} blocks of {})", map.blocks(), map.per_block())
    }
}
