//! `Arena`: the memory that several page classes share.

use crate::convert::args::{self, Argument};
use crate::convert::errors::invalid;
use blockyard_core::{PagedGroup, Space, extent_bytes};
use pyo3::prelude::*;
use std::fmt::Display;

/// The memory that the page classes of a manager share, in each tier.
///
/// It consists of extents of equal bytes. A page class takes an extent when it needs one, and gives it up when another
/// needs it more. Block `id` of a class lies at byte `id * extent_bytes // per_extent` of its tier: one strided view
/// shows all blocks of a class. Extent 0 stays unused if tables have null blocks.
///
/// Args:
///     device_bytes: bytes of device memory; what is left behind the last whole extent is not used.
///     host_bytes: bytes of host memory.
///     external_bytes: bytes of the external store.
///     extent_bytes: bytes of an extent, a multiple of the number of blocks of each class in it; None for a size that
///         loses little.
/// Raises:
///     InvalidArgumentError: a number is out of range.
///
/// Example:
///     >>> from blockyard import Arena, BlockManager, CacheGroup
///     >>> full = CacheGroup.full_attention().with_blocks(bytes=1 << 14)
///     >>> state = CacheGroup.recurrent().with_blocks(bytes=3 << 16)
///     >>> manager = BlockManager(block_size=16, groups=[full, state], arena=Arena(device_bytes=1 << 26))
///     >>> [manager.pool(page_class=at).per_extent for at in range(manager.num_page_classes)]
///     [12, 1]
#[pyclass(frozen, eq, hash, from_py_object, name = "Arena", module = "blockyard._core")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct PyArena(Kind);

#[derive(Clone, PartialEq, Eq, Hash)]
enum Kind {
    Extents { bytes: [u64; 3], extent: Option<u64> },
    Split(Vec<[usize; 3]>),
}

impl<'py> Argument<'py> for PyArena {
    fn read(value: &Bound<'py, PyAny>, _: &dyn Display) -> PyResult<Self> {
        Ok(value.extract()?)
    }
}

impl PyArena {
    /// The blocks of each class of some groups.
    pub(crate) fn space(&self, groups: &[PagedGroup]) -> PyResult<Space> {
        let (bytes, extent) = match &self.0 {
            Kind::Split(blocks) => return Ok(Space::Split(blocks.clone())),
            Kind::Extents { bytes, extent } => (bytes, extent),
        };
        let mut sizes: Vec<u64> = groups.iter().map(|group| group.block_bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let extent = extent.unwrap_or_else(|| extent_bytes(&sizes, bytes[0])).max(1);
        let count = |bytes: u64| usize::try_from(bytes / extent).ok();
        let [Some(device), Some(host), Some(external)] = bytes.map(count) else {
            return Err(invalid(format!("device_bytes is {}, must be at most {}", bytes[0], usize::MAX)));
        };
        Ok(Space::Extents { bytes: extent, counts: [device, host, external] })
    }
}

#[pymethods]
impl PyArena {
    #[new]
    #[pyo3(signature = (*, device_bytes, host_bytes = 0, external_bytes = 0, extent_bytes = None))]
    fn new(
        #[pyo3(from_py_with = args::device_bytes)] device_bytes: u64,
        #[pyo3(from_py_with = args::host_bytes)] host_bytes: u64,
        #[pyo3(from_py_with = args::external_bytes)] external_bytes: u64,
        #[pyo3(from_py_with = args::extent_bytes)] extent_bytes: Option<u64>,
    ) -> Self {
        Self(Kind::Extents { bytes: [device_bytes, host_bytes, external_bytes], extent: extent_bytes })
    }

    /// A fixed number of blocks for each page class, for layouts in which a block's bytes are not one piece.
    ///
    /// Args:
    ///     device_blocks: number of blocks of each class in device memory.
    ///     host_blocks: number of blocks of each class in host memory.
    ///     external_blocks: number of slots of each class in the external store.
    /// Raises:
    ///     InvalidArgumentError: the numbers of classes differ.
    #[staticmethod]
    #[pyo3(signature = (*, device_blocks, host_blocks = None, external_blocks = None))]
    fn split(
        #[pyo3(from_py_with = args::device_blocks)] device_blocks: Vec<usize>,
        #[pyo3(from_py_with = args::host_blocks)] host_blocks: Option<Vec<usize>>,
        #[pyo3(from_py_with = args::external_blocks)] external_blocks: Option<Vec<usize>>,
    ) -> PyResult<Self> {
        let classes = device_blocks.len();
        let [host, external] = [host_blocks, external_blocks].map(|blocks| blocks.unwrap_or_else(|| vec![0; classes]));
        for (name, blocks) in [("host_blocks", &host), ("external_blocks", &external)] {
            if blocks.len() != classes {
                return Err(invalid(format!("{name} has {} items, must have {classes}", blocks.len())));
            }
        }
        let all = device_blocks.into_iter().zip(host).zip(external);
        Ok(Self(Kind::Split(all.map(|((device, host), external)| [device, host, external]).collect())))
    }

    fn __repr__(&self) -> String {
        match &self.0 {
            Kind::Extents { bytes: [device, host, external], extent } => {
                let extent = extent.map_or_else(|| "None".to_owned(), |extent| extent.to_string());
                format!(
                    "Arena(device_bytes={device}, host_bytes={host}, external_bytes={external}, extent_bytes={extent})"
                )
            }
            Kind::Split(blocks) => {
                let of = |tier: usize| blocks.iter().map(|all| all[tier]).collect::<Vec<_>>();
                let [device, host, external] = [of(0), of(1), of(2)];
                format!("Arena.split(device_blocks={device:?}, host_blocks={host:?}, external_blocks={external:?})")
            }
        }
    }
}
