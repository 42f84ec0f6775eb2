//! `NaiveAllocator` and `PrefixCachingAllocator`: the core's allocators behind one base class and a lock.
//!
//! The lock is held for one call and never while Python code runs.

use crate::convert::args::{self, Argument, items, refused, shown};
use crate::convert::arrays;
use crate::convert::errors::{invalid, to_py};
use crate::convert::memory;
use crate::convert::tiers::tier_of;
use crate::free_blocks::PyFreeBlocks;
use crate::locks::{Guard, InnerLock, lock};
use blockyard_core as core;
use blockyard_core::ReuseOrder;
use blockyard_core::allocator::Eviction;
use blockyard_core::hash::Chain;
use blockyard_core::{BlockAllocator, BlockId, Extra, Key, KeySpec, Keyed};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt};
use std::fmt::Display;

pub(crate) type Ids<'py> = Bound<'py, PyArray1<i32>>;

/// Block ids: an int32 array, a list of ints or one int.
pub(crate) struct Blocks(pub(crate) Vec<BlockId>);

impl<'py> Argument<'py> for Blocks {
    fn read(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
        if let Ok(block) = value.extract::<u32>() {
            return Ok(Self(vec![BlockId(block)]));
        }
        if let Some(ids) = memory::listed::<i32>(value)? {
            let mut blocks = memory::reserved(ids.len())?;
            for id in ids {
                let block = u32::try_from(id).map(BlockId);
                blocks.push(block.map_err(|_| invalid(format!("block is {id}, must be at least 0")))?);
            }
            return Ok(Self(blocks));
        }
        let must = "ids from 0 on: an int32 array, a list of ints or one int";
        if value.is_instance_of::<PyInt>() {
            return Err(invalid(format!("{name} is {}, must be {must}", shown(value))));
        }
        let block =
            |id: &Bound<'py, PyAny>, _| id.extract().map(BlockId).map_err(|error| refused(error, value, name, must));
        items(value, name, block).map(Self)
    }
}

/// Returns a new array of block ids.
#[expect(clippy::cast_possible_wrap, reason = "block ids stay below 2^30")]
pub(crate) fn ids<'py>(py: Python<'py>, blocks: &[BlockId]) -> PyResult<Ids<'py>> {
    memory::array(py, blocks, |block| block.0 as i32)
}

fn key(bytes: &[u8]) -> PyResult<Key> {
    let key = bytes.try_into().map_err(|_| invalid(format!("key has {} bytes, must have 32", bytes.len())))?;
    Ok(Key::from_bytes(key))
}

/// Returns an order of reuse or eviction, or an error that lists the valid names.
pub(crate) fn named<T>(what: &str, name: &str, found: Option<T>, must: &str) -> PyResult<T> {
    found.ok_or_else(|| invalid(format!("{what} is {name:?}, must be one of {must}")))
}

/// Returns the reuse order of that name; `lru` equals `fifo` for empty blocks.
pub(crate) fn reuse(name: &str) -> PyResult<ReuseOrder> {
    let found = ReuseOrder::from_name(if name == "lru" { "fifo" } else { name });
    named("reuse", name, found, "lowest, fifo, lru, lifo")
}

/// Returns the eviction order of that name.
pub(crate) fn eviction(name: &str) -> PyResult<Eviction> {
    named("eviction", name, Eviction::from_name(name), "released, accessed")
}

/// The blocks of one tier with their reference counts; the base of both allocators.
///
/// The caller owns one reference for each id that it received. Block ids are int32 `[n]`. Every method takes a batch,
/// and either succeeds completely or changes nothing.
///
/// Raises:
///     OutOfBlocksError: the call needs more blocks than are free.
///     InvalidArgumentError: a block is out of range, has too few references, or is the null block.
#[pyclass(frozen, subclass, name = "BlockAllocator", module = "blockyard._core")]
pub(crate) struct PyBlockAllocator(InnerLock<Box<dyn BlockAllocator>>);

impl PyBlockAllocator {
    fn over(allocator: impl BlockAllocator + 'static) -> Self {
        Self(InnerLock::new(Box::new(allocator)))
    }

    pub(crate) fn lock(&self) -> Guard<'_, Box<dyn BlockAllocator>> {
        lock(&self.0)
    }
}

#[pymethods]
impl PyBlockAllocator {
    /// Number of blocks in the tier.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.lock().pool().len()
    }

    /// Number of unreferenced blocks, including cached ones.
    #[getter]
    fn num_free(&self) -> usize {
        self.lock().pool().free()
    }

    /// Number of keys looked up, and of keys found, since the last reset; None without a prefix cache.
    #[getter]
    fn lookups(&self) -> Option<(u64, u64)> {
        self.lock().lookups().map(|lookups| (lookups.queries, lookups.hits))
    }

    /// Return how many references a block has.
    ///
    /// Args:
    ///     block: its id.
    fn refs(&self, #[pyo3(from_py_with = args::block)] block: u32) -> PyResult<u32> {
        let allocator = self.lock();
        let total = allocator.pool().len();
        if block as usize >= total {
            return Err(invalid(format!("block is {block}, must be below {total}")));
        }
        Ok(allocator.pool().refs(BlockId(block)))
    }

    /// Take free blocks, one reference each. Cached blocks are evicted if needed.
    ///
    /// Args:
    ///     count: number of blocks.
    /// Returns:
    ///     Block ids, int32 `[count]`.
    /// Raises:
    ///     OutOfBlocksError: fewer blocks are free.
    fn allocate<'py>(&self, py: Python<'py>, #[pyo3(from_py_with = args::count)] count: u32) -> PyResult<Ids<'py>> {
        let mut out = Vec::new();
        self.lock().allocate(count as usize, &mut out).map_err(to_py)?;
        ids(py, &out)
    }

    /// Take one block for each key, the cached one if it exists, and `plain` blocks without a key.
    ///
    /// Args:
    ///     keys: keys of full blocks, 32 bytes each, from `chain_keys`.
    ///     depths: length of the prefix that ends with each block; of equally old blocks, the deepest is evicted first.
    ///     plain: number of blocks without a key.
    /// Returns:
    ///     The blocks, int32 `[keys + plain]`, and how many keys were cached.
    #[pyo3(signature = (keys, depths, *, plain = 0))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python lists")]
    fn allocate_keyed<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::keys)] keys: Vec<Bound<'py, PyBytes>>,
        #[pyo3(from_py_with = args::depths)] depths: Vec<u32>,
        #[pyo3(from_py_with = args::plain)] plain: u32,
    ) -> PyResult<(Ids<'py>, usize)> {
        if keys.len() != depths.len() {
            return Err(invalid(format!("depths has {} items, must have {}, one per key", depths.len(), keys.len())));
        }
        let keyed = |(bytes, &depth): (&Bound<'_, PyBytes>, &u32)| Ok(Keyed { key: key(bytes.as_bytes())?, depth });
        let keys = keys.iter().zip(&depths).map(keyed).collect::<PyResult<Vec<_>>>()?;
        let mut out = Vec::with_capacity(keys.len() + 1);
        let hits = self.lock().allocate_keyed(&keys, plain as usize, &mut out).map_err(to_py)?;
        Ok((ids(py, &out)?, hits))
    }

    /// Add one reference to each block.
    ///
    /// Args:
    ///     blocks: ids, int32 `[n]`, a list, or one int.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python lists")]
    fn share(&self, #[pyo3(from_py_with = args::blocks)] blocks: Blocks) -> PyResult<()> {
        self.lock().share(&blocks.0).map_err(to_py)
    }

    /// Raise the error that `free` would raise, if any; change nothing.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python lists")]
    fn require(&self, #[pyo3(from_py_with = args::blocks)] blocks: Blocks) -> PyResult<()> {
        self.lock().require(&blocks.0).map_err(to_py)
    }

    /// Release one reference to each block.
    ///
    /// Args:
    ///     blocks: ids, int32 `[n]`, a list, or one int.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python lists")]
    fn free(&self, #[pyo3(from_py_with = args::blocks)] blocks: Blocks) -> PyResult<()> {
        self.lock().free(&blocks.0).map_err(to_py)
    }

    /// Replace shared blocks by new ones. Where the returned id differs, the caller must copy the bytes.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python lists")]
    fn make_writable<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::blocks)] blocks: Blocks,
    ) -> PyResult<Ids<'py>> {
        let mut out = Vec::with_capacity(blocks.0.len());
        self.lock().make_writable(&blocks.0, &mut out).map_err(to_py)?;
        ids(py, &out)
    }

    /// Give a full block its key. Return the block to use from now on: this one, or another one with that key.
    #[pyo3(signature = (block, key, depth = 0))]
    fn publish(
        &self,
        #[pyo3(from_py_with = args::block)] block: u32,
        key: &[u8],
        #[pyo3(from_py_with = args::depth)] depth: u32,
    ) -> PyResult<u32> {
        let keyed = Keyed { key: self::key(key)?, depth };
        Ok(self.lock().publish(BlockId(block), keyed).map_err(to_py)?.0)
    }

    /// Return the blocks of the longest computed prefix of the keys, without taking them.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python lists")]
    fn find<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::keys)] keys: Vec<Bound<'py, PyBytes>>,
    ) -> PyResult<Ids<'py>> {
        let keys = keys.iter().map(|bytes| key(bytes.as_bytes())).collect::<PyResult<Vec<_>>>()?;
        let found = self.lock().find(&keys);
        ids(py, &found)
    }

    /// Return how many free blocks it would take to allocate these keys.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python lists")]
    fn cost(&self, #[pyo3(from_py_with = args::keys)] keys: Vec<Bound<'_, PyBytes>>) -> PyResult<usize> {
        let keys = keys.iter().map(|bytes| key(bytes.as_bytes())).collect::<PyResult<Vec<_>>>()?;
        Ok(self.lock().cost(&keys))
    }

    /// Return whether a cached block has this key.
    ///
    /// Args:
    ///     key: 32 bytes.
    fn has_key(&self, key: &[u8]) -> PyResult<bool> {
        Ok(self.lock().holder(&self::key(key)?).is_some())
    }

    /// Return whether the block's content is computed: `publish` gave it a key, or it came from a hit.
    ///
    /// Args:
    ///     block: its id.
    fn is_computed(&self, #[pyo3(from_py_with = args::block)] block: u32) -> bool {
        self.lock().is_computed(BlockId(block))
    }

    /// Mark these blocks, or all in use, as computed if they have a key: the step that writes them is over.
    #[pyo3(signature = (blocks = None))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python lists")]
    fn mark_computed(&self, #[pyo3(from_py_with = args::blocks)] blocks: Option<Blocks>) {
        self.lock().mark_computed(blocks.as_ref().map(|blocks| blocks.0.as_slice()));
    }

    /// Record when blocks were last used, in seconds of any clock.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python lists")]
    fn touch(
        &self,
        #[pyo3(from_py_with = args::blocks)] blocks: Blocks,
        #[pyo3(from_py_with = args::now)] now: f64,
    ) -> PyResult<()> {
        self.lock().touch(&blocks.0, now).map_err(to_py)
    }

    /// Forget all keys. While a block is in use, do nothing and return False.
    fn reset(&self) -> bool {
        self.lock().reset()
    }

    /// Return the null block, which replaces blocks outside a window. The first call takes it; it is never freed.
    fn null_block(&self) -> PyResult<u32> {
        Ok(self.lock().null_block().map_err(to_py)?.0)
    }

    /// Return free blocks in the order in which they would be allocated, int32 `[n]`, without taking them.
    ///
    /// Empty blocks come first, then cached ones in the order of eviction.
    #[pyo3(signature = (limit = None))]
    fn upcoming<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::limit)] limit: Option<usize>,
    ) -> PyResult<Ids<'py>> {
        let blocks: Vec<BlockId> = self.lock().upcoming().take(limit.unwrap_or(usize::MAX)).collect();
        ids(py, &blocks)
    }

    /// Iterate over the blocks of `upcoming` lazily. See `FreeBlocks`.
    fn iter_upcoming(slf: Py<Self>) -> PyFreeBlocks {
        PyFreeBlocks::new(Box::new(move |first, count| slf.get().lock().upcoming().skip(first).take(count).collect()))
    }

    /// Recount the whole state and compare.
    ///
    /// Raises:
    ///     InvariantError: the state contradicts itself, which is a bug in Blockyard.
    fn check(&self) -> PyResult<()> {
        self.lock().check().map_err(to_py)
    }
}

/// An allocator that only counts references, without a prefix cache.
///
/// Args:
///     num_blocks: number of blocks in the tier.
///     tier: name of the tier in errors.
///     reuse: which free block is taken next: `"lowest"` id, `"fifo"` (or `"lru"`), or `"lifo"`.
///
/// Example:
///     >>> from blockyard.allocators import NaiveAllocator
///     >>> allocator = NaiveAllocator(8)
///     >>> blocks = allocator.allocate(3)
///     >>> blocks.tolist(), allocator.num_free
///     ([0, 1, 2], 5)
///     >>> allocator.free(blocks)
#[pyclass(frozen, extends = PyBlockAllocator, name = "NaiveAllocator", module = "blockyard._core")]
pub(crate) struct PyNaiveAllocator;

#[pymethods]
impl PyNaiveAllocator {
    #[new]
    #[pyo3(signature = (num_blocks, *, tier = "device", reuse = "lowest"))]
    fn new(
        #[pyo3(from_py_with = args::num_blocks)] num_blocks: u32,
        tier: &str,
        reuse: &str,
    ) -> PyResult<PyClassInitializer<Self>> {
        let (tier, reuse) = (tier_of(tier)?, self::reuse(reuse)?);
        let allocator = core::NaiveAllocator::new(tier, num_blocks as usize, reuse).map_err(to_py)?;
        Ok(PyClassInitializer::from(PyBlockAllocator::over(allocator)).add_subclass(Self))
    }
}

/// An allocator with a prefix cache: it finds full blocks by key, even after their last reference is released.
///
/// Args:
///     num_blocks: number of blocks in the tier.
///     tier: name of the tier in errors.
///     reuse: which free block is taken next, as for `NaiveAllocator`.
///     eviction: which cached block is evicted if no block is empty: the least recently `"released"` or `"accessed"`.
///
/// Example:
///     >>> from blockyard.allocators import PrefixCachingAllocator, chain_keys
///     >>> allocator = PrefixCachingAllocator(8)
///     >>> keys = chain_keys([1, 2, 3, 4, 5, 6, 7, 8], block_size=4)
///     >>> blocks = allocator.allocate(2)
///     >>> blocks = [allocator.publish(block, key, depth) for depth, (block, key) in enumerate(zip(blocks, keys))]
///     >>> allocator.mark_computed(blocks)
///     >>> allocator.free(blocks)
///     >>> allocator.find(keys).tolist()
///     [0, 1]
#[pyclass(frozen, extends = PyBlockAllocator, name = "PrefixCachingAllocator", module = "blockyard._core")]
pub(crate) struct PyPrefixCachingAllocator;

#[pymethods]
impl PyPrefixCachingAllocator {
    #[new]
    #[pyo3(signature = (num_blocks, *, tier = "device", reuse = "lowest", eviction = "released"))]
    fn new(
        #[pyo3(from_py_with = args::num_blocks)] num_blocks: u32,
        tier: &str,
        reuse: &str,
        eviction: &str,
    ) -> PyResult<PyClassInitializer<Self>> {
        let (tier, reuse, eviction) = (tier_of(tier)?, self::reuse(reuse)?, self::eviction(eviction)?);
        let allocator = core::PrefixCachingAllocator::new(tier, num_blocks as usize, reuse, eviction).map_err(to_py)?;
        Ok(PyClassInitializer::from(PyBlockAllocator::over(allocator)).add_subclass(Self))
    }
}

/// Return the in-process keys of the full blocks of `tokens`, 32 bytes each.
///
/// Args:
///     tokens: token ids, uint32 `[n]`; tokens that do not fill a block are ignored.
///     block_size: tokens in a block.
///     parent: key of the preceding block.
///     extra: other inputs that determine the bytes of each of these blocks.
#[pyfunction]
#[pyo3(signature = (tokens, *, block_size, parent = None, extra = None))]
pub(crate) fn chain_keys<'py>(
    tokens: &Bound<'py, PyAny>,
    #[pyo3(from_py_with = args::block_size)] block_size: u32,
    parent: Option<&[u8]>,
    extra: Option<&[u8]>,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let py = tokens.py();
    if block_size == 0 {
        return Err(invalid("block_size is 0, must be at least 1".to_owned()));
    }
    let mut last = match parent {
        Some(bytes) => key(bytes)?,
        None => Chain::new(&KeySpec::default(), block_size, 0).key(),
    };
    let extra = extra.map(|bytes| Extra { kind: 0, bytes });
    let next = |block: &[u32]| -> PyResult<_> {
        last = last.child(block, extra.as_slice()).map_err(to_py)?;
        Ok(last.to_bytes())
    };
    let keys = memory::lend(&[arrays::token_ids(tokens, &"tokens")?], |tokens| {
        let blocks = tokens[0].chunks_exact(block_size as usize);
        let mut keys = memory::reserved(blocks.len())?;
        for key in blocks.map(next) {
            keys.push(key?);
        }
        PyResult::Ok(keys)
    })??;
    Ok(keys.iter().map(|key| PyBytes::new(py, key)).collect())
}
