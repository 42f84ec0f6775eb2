//! `BlockManager.resize_device`: a device pool that grows and shrinks while sequences run.

use crate::args;
use crate::errors::to_py;
use crate::manager::PyBlockManager;
use crate::memory;
use blockyard_core::Resize;
use numpy::PyArray1;
use pyo3::prelude::*;

/// How far the device's size has changed.
#[pyclass(frozen, eq, get_all, name = "ResizeProgress", module = "blockyard._core")]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct PyResizeProgress {
    blocks: usize,
    live: usize,
    held: usize,
    extent: usize,
}

impl From<Resize> for PyResizeProgress {
    fn from(Resize { blocks, live, held, extent }: Resize) -> Self {
        Self { blocks, live, held, extent }
    }
}

#[pymethods]
impl PyResizeProgress {
    /// Whether nothing is in use beyond the end.
    #[getter]
    fn done(&self) -> bool {
        self.extent == self.blocks
    }

    fn __repr__(&self) -> String {
        let Self { blocks, live, held, extent } = self;
        format!("ResizeProgress(blocks={blocks}, live={live}, held={held}, extent={extent})")
    }
}

#[pymethods]
impl PyBlockManager {
    fn resize_device(&self, #[pyo3(from_py_with = args::blocks)] blocks: u32) -> PyResult<PyResizeProgress> {
        self.lock().resize_device(blocks as usize).map(Into::into).map_err(to_py)
    }

    fn device_uses<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u8>>> {
        let states = self.lock().device_uses();
        memory::array(py, &states, |state| state.number())
    }

    fn resize_progress(&self) -> PyResizeProgress {
        self.lock().resize_progress().into()
    }
}
