//! `AllocStatus` and `Fit`: whether a request for blocks fits, with the numbers that decide it.

use crate::convert::errors::invalid;
use blockyard_core::{self as core, MAX_CLASSES, PerClass};
use pyo3::PyTypeInfo;
use pyo3::prelude::*;
use pyo3::types::PyType;

/// Whether a request fits: now, later or never. Only `OK` is true.
///
/// Attributes:
///     OK: it fits now.
///     LATER: it fits once other sequences have left the tier.
///     NEVER: it does not fit even into an empty tier.
///
/// Example:
///     >>> from blockyard import AllocStatus, BlockManager
///     >>> manager = BlockManager(block_size=16, device_blocks=8, watermark=0)
///     >>> manager.can_allocate(1000).status is AllocStatus.NEVER
///     True
#[pyclass(frozen, eq, hash, from_py_object, name = "AllocStatus", module = "blockyard._core")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum PyAllocStatus {
    /// It fits now.
    #[pyo3(name = "OK")]
    Ok,
    /// It fits once other sequences have left the tier.
    #[pyo3(name = "LATER")]
    Later,
    /// It does not fit even into an empty tier.
    #[pyo3(name = "NEVER")]
    Never,
}

impl PyAllocStatus {
    const fn name(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Later => "LATER",
            Self::Never => "NEVER",
        }
    }
}

impl From<core::AllocStatus> for PyAllocStatus {
    fn from(status: core::AllocStatus) -> Self {
        match status {
            core::AllocStatus::Ok => Self::Ok,
            core::AllocStatus::Later => Self::Later,
            core::AllocStatus::Never => Self::Never,
        }
    }
}

/// `getattr` and its arguments for one of a class's values, for pickling.
type Named<'py> = (Bound<'py, PyAny>, (Bound<'py, PyType>, &'static str));

#[pymethods]
#[expect(clippy::trivially_copy_pass_by_ref, reason = "a Python object is shared")]
impl PyAllocStatus {
    /// Its name, as of an `enum.Enum`: `"OK"`, `"LATER"` or `"NEVER"`.
    #[getter(name)]
    const fn python_name(&self) -> &'static str {
        self.name()
    }

    fn __bool__(&self) -> bool {
        *self == Self::Ok
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Named<'py>> {
        let getattr = slf.py().import("builtins")?.getattr("getattr")?;
        Ok((getattr, (Self::type_object(slf.py()), slf.get().name())))
    }
}

/// Whether a request for blocks fits, and the numbers that decide it. True only if `status` is `OK`.
///
/// Args:
///     status: `AllocStatus`.
///     blocks: number of blocks that the request takes.
///     free: number of blocks that can be allocated.
///     page_class: page class of these blocks.
///     wanted: number of blocks of each page class that the request takes; None for `blocks` of `page_class` alone.
///     bytes: bytes of the blocks of all page classes that the request takes; None for `blocks`.
///     free_bytes: bytes that can be allocated; None for `free`.
#[pyclass(frozen, eq, hash, name = "Fit", module = "blockyard._core")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PyFit {
    /// `AllocStatus.OK`, `LATER` or `NEVER`.
    #[pyo3(get)]
    status: PyAllocStatus,
    /// Number of blocks that the request takes; 0 for sequences that cannot move in their current state.
    #[pyo3(get)]
    blocks: usize,
    /// Number of blocks that can be allocated now, without those of the watermark if the request must keep it.
    #[pyo3(get)]
    free: usize,
    /// Page class of these blocks: the one that has too few, or else the one that the request needs most of.
    #[pyo3(get)]
    page_class: usize,
    wanted: PerClass,
    /// Bytes of the blocks of all page classes that the request takes, with their padding in an arena; the number of blocks
    /// if they have no bytes.
    #[pyo3(get)]
    bytes: u64,
    /// Bytes that can be allocated now, in the unit of `bytes`. Blocks of one class may still be lacking.
    #[pyo3(get)]
    free_bytes: u64,
}

impl From<core::Fit> for PyFit {
    fn from(core::Fit { status, blocks, free, page_class, wanted, bytes, free_bytes }: core::Fit) -> Self {
        Self { status: status.into(), blocks, free, page_class, wanted, bytes, free_bytes }
    }
}

/// The arguments of a `Fit`, for pickling.
type Fields = (PyAllocStatus, usize, usize, usize, Vec<usize>, u64, u64);

#[pymethods]
impl PyFit {
    #[new]
    #[pyo3(signature = (status, blocks, free, page_class = 0, wanted = None, bytes = None, free_bytes = None))]
    fn new(
        status: PyAllocStatus,
        #[pyo3(from_py_with = crate::convert::args::blocks)] blocks: usize,
        #[pyo3(from_py_with = crate::convert::args::free)] free: usize,
        #[pyo3(from_py_with = crate::convert::args::page_class)] page_class: usize,
        #[pyo3(from_py_with = crate::convert::args::wanted)] wanted: Option<Vec<usize>>,
        #[pyo3(from_py_with = crate::convert::args::bytes)] bytes: Option<u64>,
        #[pyo3(from_py_with = crate::convert::args::free_bytes)] free_bytes: Option<u64>,
    ) -> PyResult<Self> {
        if page_class >= MAX_CLASSES {
            return Err(invalid(format!("page_class is {page_class}, must be below {MAX_CLASSES}")));
        }
        if let Some(wanted) = wanted.as_ref().filter(|wanted| wanted.len() > MAX_CLASSES) {
            return Err(invalid(format!("wanted has {} items, must have at most {MAX_CLASSES}", wanted.len())));
        }
        let wanted = wanted.unwrap_or_else(|| [vec![0; page_class], vec![blocks]].concat());
        let (bytes, free_bytes) = (bytes.unwrap_or(blocks as u64), free_bytes.unwrap_or(free as u64));
        Ok(Self { status, blocks, free, page_class, wanted: PerClass::from_slice(&wanted), bytes, free_bytes })
    }

    /// Number of blocks of each page class that the request takes, a list; those of the last classes are left out if they
    /// are 0. `manager.defrag.run("extents", wanted=...)` takes it.
    #[getter]
    fn wanted(&self) -> Vec<usize> {
        let last = (0..MAX_CLASSES).rev().find(|&class| self.wanted.get(class) > 0).unwrap_or(0);
        (0..=last).map(|class| self.wanted.get(class)).collect()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyType>, Fields) {
        let &Self { status, blocks, free, page_class, bytes, free_bytes, .. } = slf.get();
        (slf.get_type(), (status, blocks, free, page_class, slf.get().wanted(), bytes, free_bytes))
    }

    fn __bool__(&self) -> bool {
        self.status == PyAllocStatus::Ok
    }

    fn __repr__(&self) -> String {
        let class = if self.page_class > 0 { format!(", page_class={}", self.page_class) } else { String::new() };
        format!("Fit({}, blocks={}, free={}{class})", self.status.name(), self.blocks, self.free)
    }
}
