//! The blocks of a sequence: token ids, and the id of the physical block with their bytes.

use super::key::{self, IntKey};
use super::require;
use crate::convert::args::{self, Argument};
use crate::locks::{InnerLock, debug_assert_none_held, lock};
use blockyard_core::Key;
use pyo3::exceptions::{PyNotImplementedError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use pyo3::{PyTypeInfo, intern};
use std::cell::RefCell;
use std::fmt::Display;

pub(super) type V0Block<'py> = Bound<'py, PyNaiveBlock>;

/// The class of allocators with a prefix cache. It is imported at run time, since its module imports this one.
static CACHING: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// The constructor arguments of a block.
pub(super) struct Parts<'py> {
    pub(super) prev: Option<Bound<'py, PyAny>>,
    pub(super) tokens: Vec<i64>,
    pub(super) block_size: usize,
    pub(super) allocator: Bound<'py, PyAny>,
    pub(super) id: Option<i64>,
    pub(super) extra: Option<i64>,
}

struct V0BlockState {
    tokens: Vec<i64>,
    id: Option<i64>,
    key: Option<Key>,
    computed: bool,
    last_accessed: f64,
}

/// A block of token ids without a key; the base class of blocks with a key.
#[pyclass(frozen, subclass, name = "NaiveBlock", module = "blockyard.integrations.vllm_v0")]
pub(crate) struct PyNaiveBlock {
    block_size: usize,
    allocator: Py<PyAny>,
    /// The block whose id changes on a copy, if it is a different one.
    cow_target: Option<Py<PyAny>>,
    prev: InnerLock<Option<Py<PyAny>>>,
    extra: Option<i64>,
    /// Number of tokens in the preceding blocks; `None` for a block that never gets a key.
    before: Option<usize>,
    state: InnerLock<V0BlockState>,
}

impl PyNaiveBlock {
    pub(super) fn naive(parts: Parts<'_>, cow_target: Option<Py<PyAny>>) -> PyResult<Self> {
        let (len, block_size) = (parts.tokens.len(), parts.block_size);
        require(len <= block_size, || format!("{len} tokens do not fit into a block of {block_size}"))?;
        let state =
            V0BlockState { tokens: parts.tokens, id: parts.id, key: None, computed: false, last_accessed: -1.0 };
        Ok(Self {
            block_size,
            allocator: parts.allocator.unbind(),
            cow_target,
            prev: InnerLock::new(parts.prev.map(Bound::unbind)),
            extra: None,
            before: None,
            state: InnerLock::new(state),
        })
    }

    fn caching(parts: Parts<'_>, computed: bool) -> PyResult<Self> {
        let py = parts.allocator.py();
        // With `isinstance`, as in V0.
        let class = CACHING.import(py, "blockyard._core", "V0PrefixCachingBlockAllocator")?;
        require(parts.allocator.is_instance(class)?, || {
            format!("allocator is {:?}, must cache prefixes", parts.allocator)
        })?;
        let before = match &parts.prev {
            Some(prev) => {
                let is_block = prev.is_instance(&PyPrefixCachingBlock::type_object(py))?;
                require(is_block, || format!("the previous block is {prev:?}, must have a key"))?;
                match prev.cast::<Self>() {
                    Ok(block) => block.get().end(),
                    Err(_) => prev.getattr(intern!(py, "num_tokens_total"))?.extract().ok(),
                }
            }
            None => None,
        };
        let extra = parts.extra;
        let mut block = Self::naive(parts, None)?;
        lock(&block.state).computed = computed;
        (block.extra, block.before) = (extra, Some(before.unwrap_or(0)));
        Ok(block)
    }

    pub(super) fn id(&self) -> Option<i64> {
        lock(&self.state).id
    }

    pub(super) fn set_id(&self, id: Option<i64>) {
        lock(&self.state).id = id;
    }

    pub(super) fn extra(&self) -> Option<i64> {
        self.extra
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.state).tokens.len()
    }

    pub(super) fn full(&self) -> bool {
        self.len() == self.block_size
    }

    pub(super) fn tokens(&self) -> Vec<i64> {
        lock(&self.state).tokens.clone()
    }

    /// Returns the number of tokens up to the block's end, if the block can have a key.
    pub(super) fn end(&self) -> Option<usize> {
        self.before.map(|before| before + self.len())
    }

    pub(super) fn prev<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        lock(&self.prev).as_ref().map(|prev| prev.bind(py).clone())
    }

    pub(super) fn set_key(&self, key: Key) {
        lock(&self.state).key = Some(key);
    }

    fn known_key(&self) -> Option<Key> {
        lock(&self.state).key
    }

    fn unused(&self) -> PyResult<()> {
        if self.before.is_some() { Ok(()) } else { Err(PyNotImplementedError::new_err("not used for NaiveBlock")) }
    }
}

thread_local! {
    /// Predecessors of the blocks that this thread is dropping; `None` while it drops none.
    static DROPPING: RefCell<Option<Vec<Py<PyAny>>>> = const { RefCell::new(None) };
}

impl Drop for PyNaiveBlock {
    /// Drops a chain of blocks in a loop: they own each other, and recursion could overflow the stack.
    fn drop(&mut self) {
        let Some(prev) = lock(&self.prev).take() else { return };
        let is_first = DROPPING.with_borrow_mut(|dropping| {
            let is_first = dropping.is_none();
            dropping.get_or_insert_default().push(prev);
            is_first
        });
        if is_first {
            // A block that is dropped here adds its own predecessor.
            while let Some(prev) = DROPPING.with_borrow_mut(|dropping| dropping.as_mut().and_then(Vec::pop)) {
                drop(prev);
            }
            DROPPING.set(None);
        }
    }
}

/// Returns the key of a block, `None` until it and its predecessors are full. Each block is hashed once.
pub(super) fn key_of(block: &V0Block<'_>) -> PyResult<Option<Key>> {
    let (py, mut todo, mut parent) = (block.py(), vec![block.clone()], None);
    while let Some(block) = todo.last() {
        if block.get().before.is_none() {
            return Ok(None);
        }
        if let Some(key) = block.get().known_key() {
            parent = Some(key);
            todo.pop();
            break;
        }
        if !block.get().full() {
            return Ok(None);
        }
        match block.get().prev(py).map(Bound::cast_into::<PyNaiveBlock>) {
            None => break,
            Some(Ok(prev)) => todo.push(prev),
            Some(Err(error)) => {
                let key: Option<IntKey> = error.into_inner().getattr(intern!(py, "content_hash"))?.extract()?;
                let Some(IntKey(key)) = key else { return Ok(None) };
                parent = Some(key);
                break;
            }
        }
    }
    for block in todo.into_iter().rev() {
        let key = key::one(parent, &block.get().tokens(), block.get().extra)?;
        block.get().set_key(key);
        parent = Some(key);
    }
    Ok(parent)
}

/// Appends tokens to a block. A shared block is copied first, and a block that becomes full can be found from then
/// on.
pub(super) fn append(block: &V0Block<'_>, tokens: &[i64]) -> PyResult<()> {
    let (py, this) = (block.py(), block.get());
    if this.before.is_some() {
        require(key_of(block)?.is_none() && !lock(&this.state).computed, || {
            "cannot append to a full block".to_owned()
        })?;
        if tokens.is_empty() {
            return Ok(());
        }
    }
    let room = this.block_size - this.len();
    require(tokens.len() <= room, || format!("asked for {} slots, {room} are empty", tokens.len()))?;
    let allocator = this.allocator.bind(py);
    if this.id().is_some() {
        debug_assert_none_held();
        let target = this.cow_target.as_ref().map_or(block.as_any(), |target| target.bind(py));
        this.set_id(allocator.call_method1(intern!(py, "cow_block_if_not_appendable"), (target,))?.extract()?);
    }
    lock(&this.state).tokens.extend_from_slice(tokens);
    if this.id().is_some() && key_of(block)?.is_some() {
        this.set_id(allocator.call_method1(intern!(py, "promote_to_immutable_block"), (block,))?.extract()?);
    }
    Ok(())
}

impl<'py> Argument<'py> for V0Block<'py> {
    fn read(value: &Bound<'py, PyAny>, _: &dyn Display) -> PyResult<Self> {
        Ok(value.extract()?)
    }
}

#[pymethods]
impl PyNaiveBlock {
    #[new]
    #[expect(clippy::used_underscore_binding, reason = "V0's signature")]
    #[pyo3(signature = (prev_block, token_ids, block_size, allocator, block_id=None, _cow_target=None, extra_hash=None))]
    fn new(
        prev_block: Option<Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::token_ids)] token_ids: Vec<i64>,
        #[pyo3(from_py_with = args::block_size)] block_size: usize,
        allocator: Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::block_id)] block_id: Option<i64>,
        _cow_target: Option<Py<PyAny>>,
        #[pyo3(from_py_with = args::extra_hash)] extra_hash: Option<i64>,
    ) -> PyResult<Self> {
        let (prev, tokens, id, extra) = (prev_block, token_ids, block_id, extra_hash);
        Self::naive(Parts { prev, tokens, block_size, allocator, id, extra }, _cow_target)
    }

    /// Append token ids to the block; a shared block is copied first.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from a Python list")]
    fn append_token_ids(
        slf: &Bound<'_, Self>,
        #[pyo3(from_py_with = args::token_ids)] token_ids: Vec<i64>,
    ) -> PyResult<()> {
        append(slf, &token_ids)
    }

    /// Id of the physical block; None if there is none.
    #[getter]
    fn block_id(&self) -> Option<i64> {
        self.id()
    }

    #[setter(block_id)]
    fn set_block_id(&self, value: Option<i64>) {
        self.set_id(value);
    }

    /// Token ids in the block, a list of ints.
    #[getter]
    fn token_ids(&self) -> Vec<i64> {
        self.tokens()
    }

    /// Token slots in the block.
    #[getter]
    fn block_size(&self) -> usize {
        self.block_size
    }

    /// The previous block; None for the first.
    #[getter]
    fn prev_block<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.prev(py)
    }

    /// Hash of other inputs that determine the content; None if there are none.
    #[getter]
    fn extra_hash(&self) -> Option<i64> {
        self.extra
    }

    /// Whether all slots hold tokens.
    #[getter]
    fn is_full(&self) -> bool {
        self.full()
    }

    /// Number of slots without a token.
    #[getter]
    fn num_empty_slots(&self) -> usize {
        self.block_size - self.len()
    }

    /// Number of tokens up to the end of this block.
    #[getter]
    fn num_tokens_total(&self) -> PyResult<Option<usize>> {
        self.unused().map(|()| self.end())
    }

    /// Hash of the content; None if there is none.
    #[getter]
    fn content_hash(slf: &Bound<'_, Self>) -> PyResult<Option<IntKey>> {
        key_of(slf).map(|key| key.map(IntKey))
    }

    /// Whether the content is computed.
    #[getter]
    fn computed(&self) -> PyResult<bool> {
        self.unused().map(|()| lock(&self.state).computed)
    }

    #[setter(computed)]
    fn set_computed(&self, value: bool) -> PyResult<()> {
        self.unused().map(|()| lock(&self.state).computed = value)
    }

    /// Time of the last access.
    #[getter]
    fn last_accessed(&self) -> PyResult<f64> {
        self.unused().map(|()| lock(&self.state).last_accessed)
    }

    #[setter(last_accessed)]
    fn set_last_accessed(&self, last_accessed_ts: f64) -> PyResult<()> {
        self.unused().map(|()| lock(&self.state).last_accessed = last_accessed_ts)
    }
}

/// A block that can be found by its key once it is full.
#[pyclass(frozen, subclass, extends = PyNaiveBlock, name = "PrefixCachingBlock", module = "blockyard.integrations.vllm_v0")]
pub(crate) struct PyPrefixCachingBlock;

impl PyPrefixCachingBlock {
    pub(super) fn with(parts: Parts<'_>, computed: bool) -> PyResult<PyClassInitializer<Self>> {
        Ok(PyClassInitializer::from(PyNaiveBlock::caching(parts, computed)?).add_subclass(Self))
    }
}

#[pymethods]
impl PyPrefixCachingBlock {
    #[new]
    #[pyo3(signature = (prev_block, token_ids, block_size, allocator, block_id=None, computed=false, extra_hash=None))]
    fn new(
        prev_block: Option<Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::token_ids)] token_ids: Vec<i64>,
        #[pyo3(from_py_with = args::block_size)] block_size: usize,
        allocator: Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::block_id)] block_id: Option<i64>,
        computed: bool,
        #[pyo3(from_py_with = args::extra_hash)] extra_hash: Option<i64>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let (prev, tokens, id, extra) = (prev_block, token_ids, block_id, extra_hash);
        Self::with(Parts { prev, tokens, block_size, allocator, id, extra }, computed)
    }

    /// Return the hash of a block from the previous block's hash and its tokens.
    #[classmethod]
    #[pyo3(signature = (is_first_block, prev_block_hash, cur_block_token_ids, extra_hash=None))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from a Python list")]
    fn hash_block_tokens(
        _cls: &Bound<'_, PyType>,
        is_first_block: bool,
        prev_block_hash: Option<IntKey>,
        #[pyo3(from_py_with = args::cur_block_token_ids)] cur_block_token_ids: Vec<i64>,
        #[pyo3(from_py_with = args::extra_hash)] extra_hash: Option<i64>,
    ) -> PyResult<IntKey> {
        let parent = prev_block_hash.filter(|_| !is_first_block).map(|IntKey(key)| key);
        key::one(parent, &cur_block_token_ids, extra_hash).map(IntKey)
    }
}

/// Replaces blocks outside a sliding window; wraps a block that is never written.
#[pyclass(frozen, name = "NullBlock", module = "blockyard.integrations.vllm_v0")]
pub(crate) struct PyNullBlock {
    proxy: Py<PyAny>,
}

fn refused() -> PyErr {
    PyValueError::new_err("null block should not be modified")
}

#[pymethods]
impl PyNullBlock {
    #[new]
    pub(super) fn new(proxy: Py<PyAny>) -> Self {
        Self { proxy }
    }

    /// Raise: the null block cannot be written.
    #[expect(clippy::needless_pass_by_value, clippy::unused_self, reason = "V0's signature")]
    fn append_token_ids(&self, #[pyo3(from_py_with = args::token_ids)] token_ids: Vec<i64>) -> PyResult<()> {
        let _ = token_ids;
        Err(refused())
    }

    /// Id of the null block.
    #[getter]
    pub(super) fn block_id<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.proxy.bind(py).getattr(intern!(py, "block_id"))
    }

    #[setter(block_id)]
    #[expect(clippy::unused_self, reason = "a setter")]
    fn set_block_id(&self, value: Option<i64>) -> PyResult<()> {
        let _ = value;
        Err(refused())
    }

    fn __getattr__<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        self.proxy.bind(py).getattr(name)
    }
}
