//! The Python module `blockyard._core`: converts and locks, decides nothing.
use pyo3::prelude::*;

/// The Rust core of Blockyard.
#[pymodule(gil_used = false)]
mod _core {
    use super::{Bound, PyModule, PyModuleMethods, PyResult};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
