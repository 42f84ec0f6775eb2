//! `CacheGroup`: which tokens the layers of one group need.

use crate::convert::args::{self, Argument};
use crate::convert::errors::invalid;
use blockyard_core::Group;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
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
pub(crate) struct PyCacheGroup(Group);

impl PyCacheGroup {
    pub(crate) const fn from_core(group: Group) -> Self {
        Self(group)
    }
}

impl<'py> Argument<'py> for PyCacheGroup {
    fn read(value: &Bound<'py, PyAny>, _: &dyn Display) -> PyResult<Self> {
        Ok(value.extract()?)
    }
}

#[pymethods]
#[expect(clippy::trivially_copy_pass_by_ref, reason = "a Python object is shared")]
impl PyCacheGroup {
    /// All preceding tokens.
    #[staticmethod]
    fn full_attention() -> Self {
        Self(Group::Full)
    }

    /// All preceding tokens, and the next one: the layers of an EAGLE or MTP drafter.
    ///
    /// A drafter computes its keys and values of a token from that token's hidden state and the next token. So the
    /// prefix cache finds a block of this model only if the token after it is the same, too, and publishes it once that
    /// token is computed. A step that appends tokens may write the drafter's entry of the token before them: its block is
    /// the sequence's own. After a fork or a truncation, write that entry again.
    #[staticmethod]
    fn drafter() -> Self {
        Self(Group::Drafter)
    }

    /// The token itself and the `window - 1` before it; earlier blocks are freed. The prefix cache keeps those of a
    /// window at resume points only.
    #[staticmethod]
    fn sliding_window(#[pyo3(from_py_with = args::window)] window: u32) -> Self {
        Self(Group::SlidingWindow { window })
    }

    /// The tokens since the last multiple of `chunk`, as in Llama 4; earlier blocks are freed.
    #[staticmethod]
    fn chunked_attention(#[pyo3(from_py_with = args::chunk)] chunk: u32) -> Self {
        Self(Group::Chunked { chunk })
    }

    /// One state, stored in a block: the state after the block's last token.
    ///
    /// A step reads the state from the previous token's block and writes it to the block of its own last token. Blocks
    /// that a longer step skips are 0 in the table. A state cannot be undone, so truncation is refused.
    #[staticmethod]
    fn recurrent() -> Self {
        Self(Group::Recurrent)
    }

    /// The tokens of an encoder, set once; forks share them. Not supported with prefix caching.
    #[staticmethod]
    fn cross_attention() -> Self {
        Self(Group::CrossAttention)
    }

    /// `"full_attention"`, `"drafter"`, `"sliding_window"`, `"chunked_attention"`, `"recurrent"` or `"cross_attention"`.
    #[getter]
    fn kind(&self) -> &'static str {
        match self.0 {
            Group::Full => "full_attention",
            Group::Drafter => "drafter",
            Group::SlidingWindow { .. } => "sliding_window",
            Group::Chunked { .. } => "chunked_attention",
            Group::Recurrent => "recurrent",
            Group::CrossAttention => "cross_attention",
        }
    }

    /// Tokens of the window or chunk; None for other kinds.
    #[getter]
    fn window(&self) -> Option<u32> {
        match self.0 {
            Group::SlidingWindow { window } | Group::Chunked { chunk: window } => Some(window),
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
        Ok(self.0.peak_blocks(num_tokens, lookahead, chunk_tokens.unwrap_or(num_tokens), block_size))
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let (py, this) = (slf.py(), slf.get());
        let make = slf.get_type().getattr(this.kind())?;
        Ok((make, this.window().map_or_else(|| Ok(PyTuple::empty(py)), |window| PyTuple::new(py, [window]))?))
    }

    pub(crate) fn __repr__(&self) -> String {
        let window = self.window().map(|window| window.to_string()).unwrap_or_default();
        format!("CacheGroup.{}({window})", self.kind())
    }
}

/// The groups of a manager.
pub(crate) fn groups(groups: Option<Vec<PyCacheGroup>>) -> Vec<Group> {
    groups.map_or_else(|| vec![Group::Full], |groups| groups.into_iter().map(|group| group.0).collect())
}
