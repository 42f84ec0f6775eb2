//! `Sequence`: the handle of one sequence, returned by `allocate`.

use pyo3::basic::CompareOp;
use pyo3::prelude::*;
use pyo3::types::PyType;

/// The handle of one sequence. Every method that takes a handle accepts it, and so does numpy.
///
/// It compares, hashes and prints like its number.
///
/// Args:
///     handle: the number, uint64.
///     cached_tokens: number of tokens at the start of the prompt that need no compute.
#[pyclass(frozen, name = "Sequence", module = "blockyard._core")]
pub(crate) struct PySequence {
    handle: u64,
    /// Number of tokens at the start of the prompt that the prefix cache had, so that they need no compute. The last
    /// token is always computed.
    #[pyo3(get)]
    cached_tokens: u32,
}

impl PySequence {
    pub(crate) const fn from_core((sequence, cached_tokens): (blockyard_core::SequenceId, u32)) -> Self {
        Self { handle: sequence.0, cached_tokens }
    }
}

#[pymethods]
impl PySequence {
    #[new]
    #[pyo3(signature = (handle, cached_tokens = 0))]
    const fn new(
        #[pyo3(from_py_with = crate::convert::args::handle)] handle: u64,
        #[pyo3(from_py_with = crate::convert::args::cached_tokens)] cached_tokens: u32,
    ) -> Self {
        Self { handle, cached_tokens }
    }

    fn __index__(&self) -> u64 {
        self.handle
    }

    fn __int__(&self) -> u64 {
        self.handle
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<isize> {
        self.handle.into_pyobject(py)?.hash()
    }

    fn __richcmp__(&self, other: &Bound<'_, PyAny>, op: CompareOp) -> PyResult<Py<PyAny>> {
        let py = other.py();
        let other = other.cast::<Self>().map_or_else(|_| other.clone(), |other| handle(py, other.get()));
        let own = handle(py, self);
        Ok(own.rich_compare(other, op)?.unbind())
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyType>, (u64, u32)) {
        (slf.get_type(), (slf.get().handle, slf.get().cached_tokens))
    }

    fn __repr__(&self) -> String {
        self.handle.to_string()
    }
}

/// Returns the number as a Python int.
fn handle<'py>(py: Python<'py>, sequence: &PySequence) -> Bound<'py, PyAny> {
    let Ok(number) = sequence.handle.into_pyobject(py);
    number.into_any()
}
