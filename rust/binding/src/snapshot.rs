//! `BlockManager.snapshot` and `BlockManager.restore`.

use crate::errors::to_py;
use crate::manager::PyBlockManager;
use blockyard_core::Manager;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

#[pymethods]
impl PyBlockManager {
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| self.lock().snapshot()).map_err(to_py)?;
        Ok(PyBytes::new(py, &bytes))
    }

    #[staticmethod]
    fn restore(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        py.detach(|| Manager::restore(data)).map(Self::from_core).map_err(to_py)
    }
}
