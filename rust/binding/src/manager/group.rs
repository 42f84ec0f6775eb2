//! `CacheGroup`: which tokens the layers of one group need; `Arena`: the memory that groups share.

use crate::convert::args::{self, Argument, refused};
use crate::convert::errors::invalid;
use blockyard_core::{Group, PagedGroup, Space, extent_bytes};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::fmt::Display;

/// Which preceding tokens the layers of one cache group need.
///
/// Example:
///     >>> from blockyard import BlockManager, CacheGroup
///     >>> groups = [CacheGroup.full_attention(), CacheGroup.sliding_window(32)]
///     >>> manager = BlockManager(block_size=16, device_blocks=64, groups=groups)
///     >>> [group.peak_blocks(100, block_size=16, chunk_tokens=16) for group in groups]
///     [7, 4]
#[pyclass(frozen, eq, hash, from_py_object, name = "CacheGroup", module = "blockyard._core")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PyCacheGroup {
    kind: Group,
    block_tokens: Option<u32>,
    block_bytes: Option<u64>,
}

/// The factory, its arguments, and the block's tokens and bytes, for pickling.
type GroupState<'py> = (Bound<'py, PyAny>, Bound<'py, PyTuple>, Option<u32>, Option<u64>);

impl PyCacheGroup {
    const fn of(kind: Group) -> Self {
        Self { kind, block_tokens: None, block_bytes: None }
    }

    /// A manager's group: its blocks' tokens and bytes are named where they differ from those of a plain group.
    pub(crate) fn of_manager(kind: Group, block_size: u32, (_, tokens, bytes): (usize, u32, u64)) -> Self {
        let block_tokens = (tokens != block_size).then_some(tokens);
        Self { kind, block_tokens, block_bytes: (bytes > 1).then_some(bytes) }
    }
}

impl<'py> Argument<'py> for PyCacheGroup {
    fn read(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
        value.extract().map_err(|error| refused(error, value, name, "a CacheGroup"))
    }
}

#[pymethods]
impl PyCacheGroup {
    /// All preceding tokens.
    #[staticmethod]
    fn full_attention() -> Self {
        Self::of(Group::Full)
    }

    /// All preceding tokens, and the next one: the layers of an EAGLE or MTP drafter.
    ///
    /// A drafter computes its keys and values of a token from that token's hidden state and the next token. So the
    /// prefix cache finds a block of this model only if the token after it is the same, too, and publishes it once that
    /// token is computed. A step that appends tokens may write the drafter's entry of the token before them: its block is
    /// the sequence's own. After a fork or a truncation, write that entry again.
    #[staticmethod]
    fn drafter() -> Self {
        Self::of(Group::Drafter)
    }

    /// As `drafter`, for layers that see the last `window` tokens; earlier blocks are freed. The model's own layers with
    /// this window can share the group.
    #[staticmethod]
    fn windowed_drafter(#[pyo3(from_py_with = args::window)] window: u32) -> Self {
        Self::of(Group::WindowedDrafter { window })
    }

    /// The token itself and the `window - 1` before it; earlier blocks are freed. The prefix cache keeps those of a
    /// window at resume points only.
    #[staticmethod]
    fn sliding_window(#[pyo3(from_py_with = args::window)] window: u32) -> Self {
        Self::of(Group::SlidingWindow { window })
    }

    /// The tokens since the last multiple of `chunk`, as in Llama 4; earlier blocks are freed.
    #[staticmethod]
    fn chunked_attention(#[pyo3(from_py_with = args::chunk)] chunk: u32) -> Self {
        Self::of(Group::Chunked { chunk })
    }

    /// One state, stored in a block: the state after the block's last token.
    ///
    /// A step reads the state from the previous token's block and writes it to the block of its own last token. Blocks
    /// that a longer step skips are 0 in the table. A state cannot be undone, so `truncate` drops only draft tokens: those of
    /// the last `append(draft_tokens=)`.
    #[staticmethod]
    fn recurrent() -> Self {
        Self::of(Group::Recurrent)
    }

    /// The tokens of an encoder, set once; forks share them. Not supported with prefix caching.
    #[staticmethod]
    fn cross_attention() -> Self {
        Self::of(Group::CrossAttention)
    }

    /// `"full_attention"`, `"drafter"`, `"windowed_drafter"`, `"sliding_window"`, `"chunked_attention"`, `"recurrent"` or
    /// `"cross_attention"`.
    #[getter]
    fn kind(&self) -> &'static str {
        match self.kind {
            Group::Full => "full_attention",
            Group::Drafter => "drafter",
            Group::WindowedDrafter { .. } => "windowed_drafter",
            Group::SlidingWindow { .. } => "sliding_window",
            Group::Chunked { .. } => "chunked_attention",
            Group::Recurrent => "recurrent",
            Group::CrossAttention => "cross_attention",
        }
    }

    /// Tokens of the window or chunk; None for other kinds.
    #[getter]
    fn window(&self) -> Option<u32> {
        match self.kind {
            Group::SlidingWindow { window } | Group::WindowedDrafter { window } | Group::Chunked { chunk: window } => {
                Some(window)
            }
            _ => None,
        }
    }

    /// Return the maximum number of blocks that a sequence holds in this group, with chunks of `chunk_tokens`.
    #[pyo3(signature = (num_tokens, *, block_size, lookahead = 0, chunk_tokens = None))]
    fn peak_blocks(
        &self,
        #[pyo3(from_py_with = args::num_tokens)] num_tokens: u32,
        #[pyo3(from_py_with = args::block_size)] block_size: u32,
        #[pyo3(from_py_with = args::lookahead)] lookahead: u32,
        #[pyo3(from_py_with = args::chunk_tokens)] chunk_tokens: Option<u32>,
    ) -> PyResult<usize> {
        if block_size == 0 {
            return Err(invalid("block_size is 0, must be at least 1".to_owned()));
        }
        Ok(self.kind.peak_blocks(num_tokens, lookahead, chunk_tokens.unwrap_or(num_tokens), block_size))
    }

    /// Return the same group with another block size.
    ///
    /// Groups whose blocks have equal bytes share the blocks of one page class. Classes are numbered from 0, in the order
    /// in which groups first have their bytes; block ids count from 0 in each class. Without this call, a group's blocks
    /// have the manager's `block_size`, and equal bytes.
    ///
    /// Args:
    ///     tokens: token slots in a block, a divisor of the manager's `block_size`, which is the default. A recurrent
    ///         group always has the default.
    ///     bytes: bytes of a block.
    #[pyo3(signature = (*, tokens = None, bytes = None))]
    fn with_blocks(
        &self,
        #[pyo3(from_py_with = args::tokens)] tokens: Option<u32>,
        #[pyo3(from_py_with = args::bytes)] bytes: Option<u64>,
    ) -> Self {
        Self { kind: self.kind, block_tokens: tokens, block_bytes: bytes }
    }

    /// Token slots in a block; None for the manager's `block_size`.
    #[getter]
    const fn block_tokens(&self) -> Option<u32> {
        self.block_tokens
    }

    /// Bytes of a block; None if the blocks of all groups have equal bytes.
    #[getter]
    const fn block_bytes(&self) -> Option<u64> {
        self.block_bytes
    }

    #[staticmethod]
    #[pyo3(name = "_made")]
    fn made<'py>(
        make: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
        tokens: Option<u32>,
        bytes: Option<u64>,
    ) -> PyResult<Self> {
        let plain: Self = make.call1(args)?.extract()?;
        Ok(Self { block_tokens: tokens, block_bytes: bytes, ..plain })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, GroupState<'py>)> {
        let (py, this) = (slf.py(), slf.get());
        let make = slf.get_type().getattr(this.kind())?;
        let args = this.window().map_or_else(|| Ok(PyTuple::empty(py)), |window| PyTuple::new(py, [window]))?;
        Ok((slf.get_type().getattr("_made")?, (make, args, this.block_tokens, this.block_bytes)))
    }

    pub(crate) fn __repr__(&self) -> String {
        let window = self.window().map(|window| window.to_string()).unwrap_or_default();
        let tokens = self.block_tokens.map(|tokens| format!("tokens={tokens}"));
        let bytes = self.block_bytes.map(|bytes| format!("bytes={bytes}"));
        let blocks: Vec<_> = tokens.into_iter().chain(bytes).collect();
        let blocks = if blocks.is_empty() { String::new() } else { format!(".with_blocks({})", blocks.join(", ")) };
        format!("CacheGroup.{}({window}){blocks}", self.kind())
    }
}

/// The groups of a manager with blocks of `block_size` tokens.
pub(crate) fn groups(groups: Option<Vec<PyCacheGroup>>, block_size: u32) -> Vec<PagedGroup> {
    let groups = groups.unwrap_or_else(|| vec![PyCacheGroup::of(Group::Full)]);
    let paged = |PyCacheGroup { kind, block_tokens, block_bytes }| PagedGroup {
        group: kind,
        block_tokens: block_tokens.unwrap_or(block_size),
        block_bytes: block_bytes.unwrap_or(1),
    };
    groups.into_iter().map(paged).collect()
}

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
///     max_device_bytes: bytes of device memory that `defrag.resize` can reach; None for `device_bytes`. Block ids that it
///         adds take memory from the start, as soon as a class with higher ids is used. With one page class it has no
///         effect: any number of blocks can be reached.
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
    Extents { bytes: [u64; 3], extent: Option<u64>, most: Option<u64> },
    Split { blocks: Vec<[usize; 3]>, most: Option<Vec<usize>> },
}

impl<'py> Argument<'py> for PyArena {
    fn read(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
        value.extract().map_err(|error| refused(error, value, name, "an Arena"))
    }
}

impl PyArena {
    /// The blocks of each class of some groups.
    pub(crate) fn space(&self, groups: &[PagedGroup]) -> PyResult<Space> {
        let (bytes, extent, most) = match &self.0 {
            Kind::Split { blocks, most } => {
                return Ok(Space::Split { blocks: blocks.clone(), most: most.clone().unwrap_or_default() });
            }
            Kind::Extents { bytes, extent, most } => (bytes, extent, most),
        };
        let mut sizes: Vec<u64> = groups.iter().map(|group| group.block_bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let extent = extent.unwrap_or_else(|| extent_bytes(&sizes, bytes[0])).max(1);
        let count = |bytes: u64| usize::try_from(bytes / extent).ok();
        let [Some(device), Some(host), Some(external)] = bytes.map(count) else {
            return Err(invalid(format!("device_bytes is {}, must be at most {}", bytes[0], usize::MAX)));
        };
        let most = most.and_then(count).unwrap_or(device);
        Ok(Space::Extents { bytes: extent, counts: [device, host, external], most })
    }
}

#[pymethods]
impl PyArena {
    #[new]
    #[pyo3(signature = (*, device_bytes, host_bytes = 0, external_bytes = 0, extent_bytes = None, max_device_bytes = None))]
    fn new(
        #[pyo3(from_py_with = args::device_bytes)] device_bytes: u64,
        #[pyo3(from_py_with = args::host_bytes)] host_bytes: u64,
        #[pyo3(from_py_with = args::external_bytes)] external_bytes: u64,
        #[pyo3(from_py_with = args::extent_bytes)] extent_bytes: Option<u64>,
        #[pyo3(from_py_with = args::max_device_bytes)] max_device_bytes: Option<u64>,
    ) -> PyResult<Self> {
        if let Some(most) = max_device_bytes.filter(|&most| most < device_bytes) {
            return Err(invalid(format!("max_device_bytes is {most}, must be at least device_bytes, {device_bytes}")));
        }
        let bytes = [device_bytes, host_bytes, external_bytes];
        Ok(Self(Kind::Extents { bytes, extent: extent_bytes, most: max_device_bytes }))
    }

    /// A fixed number of blocks for each page class, for layouts in which a block's bytes are not one piece.
    ///
    /// Args:
    ///     device_blocks: number of blocks of each class in device memory.
    ///     host_blocks: number of blocks of each class in host memory.
    ///     external_blocks: number of slots of each class in the external store.
    ///     max_device_blocks: number of blocks of each class in device memory that `defrag.resize` can reach; None for
    ///         `device_blocks`.
    /// Raises:
    ///     InvalidArgumentError: the numbers of classes differ, or a maximum is too small.
    #[staticmethod]
    #[pyo3(signature = (*, device_blocks, host_blocks = None, external_blocks = None, max_device_blocks = None))]
    fn split(
        #[pyo3(from_py_with = args::device_blocks)] device_blocks: Vec<usize>,
        #[pyo3(from_py_with = args::host_blocks)] host_blocks: Option<Vec<usize>>,
        #[pyo3(from_py_with = args::external_blocks)] external_blocks: Option<Vec<usize>>,
        #[pyo3(from_py_with = args::max_device_blocks)] max_device_blocks: Option<Vec<usize>>,
    ) -> PyResult<Self> {
        let classes = device_blocks.len();
        let is_less = |most: &Vec<usize>| most.len() != classes || most.iter().zip(&device_blocks).any(|(a, b)| a < b);
        if let Some(most) = max_device_blocks.as_ref().filter(|most| is_less(most)) {
            let must = "must have a number at least as large for each of device_blocks";
            return Err(invalid(format!("max_device_blocks is {most:?}, {must}, {device_blocks:?}")));
        }
        let [host, external] = [host_blocks, external_blocks].map(|blocks| blocks.unwrap_or_else(|| vec![0; classes]));
        for (name, blocks) in [("host_blocks", &host), ("external_blocks", &external)] {
            if blocks.len() != classes {
                return Err(invalid(format!("{name} has {} items, must have {classes}", blocks.len())));
            }
        }
        let all = device_blocks.into_iter().zip(host).zip(external);
        let blocks = all.map(|((device, host), external)| [device, host, external]).collect();
        Ok(Self(Kind::Split { blocks, most: max_device_blocks }))
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let (py, given) = (slf.py(), PyDict::new(slf.py()));
        let make = match &slf.get().0 {
            Kind::Extents { bytes, extent, most } => {
                given.set_item("extent_bytes", extent)?;
                given.set_item("max_device_bytes", most)?;
                for (name, bytes) in ["device_bytes", "host_bytes", "external_bytes"].iter().zip(bytes) {
                    given.set_item(name, bytes)?;
                }
                slf.get_type().into_any()
            }
            Kind::Split { blocks, most } => {
                given.set_item("max_device_blocks", most)?;
                for (tier, name) in ["device_blocks", "host_blocks", "external_blocks"].iter().enumerate() {
                    given.set_item(name, blocks.iter().map(|of| of[tier]).collect::<Vec<_>>())?;
                }
                slf.get_type().getattr("split")?
            }
        };
        // All arguments are keywords.
        let partial = py.import("functools")?.getattr("partial")?;
        Ok((partial.call((make,), Some(&given))?, PyTuple::empty(py)))
    }

    fn __repr__(&self) -> String {
        match &self.0 {
            Kind::Extents { bytes: [device, host, external], extent, most } => {
                let extent = extent.map_or_else(|| "None".to_owned(), |extent| extent.to_string());
                let most = most.map(|most| format!(", max_device_bytes={most}")).unwrap_or_default();
                format!(
                    "Arena(device_bytes={device}, host_bytes={host}, external_bytes={external}, extent_bytes={extent}{most})"
                )
            }
            Kind::Split { blocks, most } => {
                let of = |tier: usize| blocks.iter().map(|all| all[tier]).collect::<Vec<_>>();
                let [device, host, external] = [of(0), of(1), of(2)];
                let most = most.as_ref().map(|most| format!(", max_device_blocks={most:?}")).unwrap_or_default();
                format!(
                    "Arena.split(device_blocks={device:?}, host_blocks={host:?}, external_blocks={external:?}{most})"
                )
            }
        }
    }
}
