//! `OffloadManager`: tracks which chunk of a host cache holds which key.

use crate::convert::args::{self, Seconds};
use crate::convert::errors::{invalid, to_py};
use crate::convert::memory;
use crate::convert::values::picklable;
use crate::locks::{Guard, InnerLock, lock};
use crate::manager::policies::{self, policy};
use blockyard_core::offload::{Lookup, Names, OffloadCache, Stored};
use blockyard_core::{BlockId, Key, Policies};
use numpy::PyArray1;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};

/// The result of `OffloadManager.prepare_store`.
#[pyclass(frozen, get_all, name = "PreparedStore", module = "blockyard._core")]
pub(crate) struct PyPreparedStore {
    /// The keys to store, in the order given.
    keys: Py<PyList>,
    /// The chunk of each, int32 `[n]`.
    chunks: Py<PyArray1<i32>>,
    /// The keys that were evicted for them.
    evicted: Py<PyList>,
}

#[pymethods]
impl PyPreparedStore {
    fn __repr__(&self, py: Python<'_>) -> String {
        let (keys, evicted) = (self.keys.bind(py).len(), self.evicted.bind(py).len());
        format!("PreparedStore(keys={keys}, evicted={evicted})")
    }
}

picklable!(PyPreparedStore { keys, chunks, evicted });

/// The chunks of a host cache, and the keys whose bytes they hold, for an engine's offload manager.
///
/// A key is any bytes object. It is pending from `prepare_store` to `complete_store`, then a hit until it is evicted or
/// forgotten. Loads keep their chunks from being evicted. A key forgotten during its transfers is a miss at once; its
/// chunk is reused only after they have ended.
///
/// Args:
///     num_chunks: number of chunks in the host cache.
///     eviction: which chunk to evict first, as for `PrefixCaching`.
/// Raises:
///     InvalidArgumentError: `num_chunks` is out of range, or the name of `eviction` is unknown.
///     OutOfMemoryError: not enough memory to track the chunks.
///
/// Example:
///     >>> from blockyard.offload import OffloadManager
///     >>> manager = OffloadManager(1024)
///     >>> store = manager.prepare_store([b"a", b"b"])
///     >>> store.chunks.tolist()  # copy the blocks there
///     [0, 1]
///     >>> _ = manager.complete_store(store.keys)
///     >>> manager.prepare_load([b"a"]).tolist()  # copy from there
///     [0]
///     >>> manager.complete_load([b"a"])
#[pyclass(frozen, name = "OffloadManager", module = "blockyard._core")]
pub(crate) struct PyOffloadManager {
    state: InnerLock<NamedCache>,
    names: Names,
}

struct NamedCache {
    cache: OffloadCache,
    /// The key of each chunk.
    names: Vec<Option<Py<PyAny>>>,
}

/// The keys as immutable Python objects, and as the core's keys.
struct Keys<'py> {
    names: Bound<'py, PyTuple>,
    keys: Vec<Key>,
}

impl<'py> Keys<'py> {
    /// Returns the Python keys at the given indexes, in ascending order.
    fn named(self, places: impl ExactSizeIterator<Item = usize>) -> PyResult<Bound<'py, PyList>> {
        if places.len() == self.keys.len() {
            return Ok(self.names.to_list());
        }
        let names: PyResult<Vec<_>> = places.map(|place| self.names.get_borrowed_item(place)).collect();
        PyList::new(self.names.py(), names?)
    }
}

impl PyOffloadManager {
    fn lock(&self) -> Guard<'_, NamedCache> {
        lock(&self.state)
    }

    /// Reads the caller's keys.
    fn read<'py>(&self, keys: &Bound<'py, PyAny>) -> PyResult<Keys<'py>> {
        let names = match keys.cast_exact::<PyList>() {
            Ok(list) => list.to_tuple(),
            Err(_) => PyTuple::new(keys.py(), args::items(keys, &"keys", |item, _| Ok(item.clone()))?)?,
        };
        let mut keys = memory::reserved(names.len())?;
        for (at, name) in names.iter_borrowed().enumerate() {
            keys.push(self.key(&name, "keys", at)?);
        }
        Ok(Keys { names, keys })
    }

    /// Reads the caller's keys as the core's keys.
    fn read_keys(&self, keys: &Bound<'_, PyAny>, argument: &str) -> PyResult<Vec<Key>> {
        let key = |item: &Bound<'_, PyAny>, at| self.key(item, argument, at);
        let Ok(list) = keys.cast_exact::<PyList>() else { return args::items(keys, &argument, key) };
        let mut found = memory::reserved(list.len())?;
        for (at, item) in list.iter().enumerate() {
            found.push(key(&item, at)?);
        }
        Ok(found)
    }

    #[inline]
    fn key(&self, name: &Bound<'_, PyAny>, argument: &str, at: usize) -> PyResult<Key> {
        match name.cast_exact::<PyBytes>() {
            Ok(name) => Ok(self.names.key(name.as_bytes())),
            // Subclasses of bytes may run Python code when they are dropped.
            Err(_) => Err(invalid(format!("{argument}[{at}] is {}, must be bytes", args::shown(name)))),
        }
    }
}

#[pymethods]
impl PyOffloadManager {
    #[new]
    #[pyo3(signature = (num_chunks, *, eviction = "lru"))]
    fn new(#[pyo3(from_py_with = args::num_chunks)] num_chunks: u32, eviction: &str) -> PyResult<Self> {
        let policies = Policies { eviction: policy(eviction)?, ..Policies::default() };
        let cache = OffloadCache::new(num_chunks as usize, policies).map_err(to_py)?;
        let state = InnerLock::new(NamedCache { cache, names: Vec::new() });
        Ok(Self { state, names: Names::default() })
    }

    /// Return the state of each key: `"hit"`, `"pending"` while it is being stored, or `"miss"`.
    ///
    /// Args:
    ///     keys: bytes, in any collection.
    /// Raises:
    ///     InvalidArgumentError: a key is not bytes.
    fn lookup<'py>(&self, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let (py, keys) = (keys.py(), self.read_keys(keys, "keys")?);
        let state = self.lock();
        state.cache.look_ahead(&keys);
        let found: Vec<&Bound<'py, PyString>> = keys
            .iter()
            .map(|key| match state.cache.lookup(key) {
                Lookup::Hit => intern!(py, "hit"),
                Lookup::Pending => intern!(py, "pending"),
                Lookup::Miss => intern!(py, "miss"),
            })
            .collect();
        drop(state);
        PyList::new(py, found)
    }

    /// Assign chunks to the keys without one. The other keys count as just used, and are not evicted by this call.
    ///
    /// Args:
    ///     keys: bytes, in any collection. A key that was forgotten during its store is skipped until that store ends.
    ///     deadline: time from which `expire` forgets the keys unless their stores have ended; None for never.
    /// Returns:
    ///     `PreparedStore`; or None, without any change, if too few chunks are empty or can be evicted.
    /// Raises:
    ///     InvalidArgumentError: a key is not bytes.
    #[pyo3(signature = (keys, *, deadline = None))]
    fn prepare_store(
        &self,
        keys: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::deadline)] deadline: Option<u64>,
    ) -> PyResult<Option<PyPreparedStore>> {
        let (py, offered) = (keys.py(), self.read(keys)?);
        let mut new = memory::reserved(offered.keys.len())?;
        let mut evicted = memory::reserved(offered.keys.len())?;
        let mut state = self.lock();
        if !state.cache.prepare_store(&offered.keys, deadline.unwrap_or(u64::MAX), &mut new) {
            return Ok(None);
        }
        for &(place, chunk) in &new {
            if chunk.index() >= state.names.len() {
                state.names.resize_with(chunk.index() + 1, || None);
            }
            evicted.extend(state.names[chunk.index()].replace(offered.names.get_item(place)?.unbind()));
        }
        drop(state);
        let chunks = memory::array(py, &new, |(_, chunk)| as_i32(*chunk))?;
        let keys = offered.named(new.iter().map(|(place, _)| *place))?;
        let evicted = PyList::new(py, evicted)?;
        Ok(Some(PyPreparedStore { keys: keys.unbind(), chunks: chunks.unbind(), evicted: evicted.unbind() }))
    }

    /// End the stores of keys. Keys that are not being stored are ignored.
    ///
    /// Args:
    ///     keys: bytes, in any collection.
    ///     success: whether the bytes are in the chunks. If not, the keys become misses and their chunks are freed.
    /// Returns:
    ///     The keys that have become hits.
    /// Raises:
    ///     InvalidArgumentError: a key is not bytes.
    #[pyo3(signature = (keys, success = true))]
    fn complete_store<'py>(&self, keys: &Bound<'py, PyAny>, success: bool) -> PyResult<Bound<'py, PyList>> {
        let ended = self.read(keys)?;
        let mut stored = memory::reserved(ended.keys.len())?;
        let mut state = self.lock();
        state.cache.look_ahead_chunks(&ended.keys);
        for (place, key) in ended.keys.iter().enumerate() {
            match state.cache.complete_store(key, success) {
                Stored::Found => stored.push(place),
                Stored::Freed(chunk) => state.names[chunk.index()] = None,
                Stored::Unknown => {}
            }
        }
        drop(state);
        ended.named(stored.into_iter())
    }

    /// Start to load keys: their chunks are not evicted until `complete_load`.
    ///
    /// Args:
    ///     keys: bytes, each a hit, in any collection.
    /// Returns:
    ///     The chunk of each key, int32 `[n]`.
    /// Raises:
    ///     InvalidArgumentError: a key is not a hit, or not bytes; nothing was changed.
    fn prepare_load<'py>(&self, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let (py, keys) = (keys.py(), self.read_keys(keys, "keys")?);
        let mut chunks = memory::reserved(keys.len())?;
        let mut state = self.lock();
        state.cache.look_ahead_chunks(&keys);
        let held = state.cache.prepare_load(&keys, &mut chunks);
        drop(state);
        held.map_err(|place| invalid(format!("keys[{place}] is not a hit, so it cannot be loaded")))?;
        memory::array(py, &chunks, |chunk| as_i32(*chunk))
    }

    /// End one load of each key.
    ///
    /// Args:
    ///     keys: bytes, in any collection.
    /// Raises:
    ///     InvalidArgumentError: a key is not bytes, or is not being loaded; the loads of the keys before it have
    ///         ended.
    fn complete_load(&self, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let keys = self.read_keys(keys, "keys")?;
        let mut state = self.lock();
        state.cache.look_ahead_chunks(&keys);
        match keys.iter().position(|key| !state.cache.complete_load(key)) {
            None => Ok(()),
            Some(place) => Err(invalid(format!("keys[{place}] is not being loaded"))),
        }
    }

    /// Mark keys as just used; misses are ignored.
    ///
    /// Args:
    ///     keys: bytes, in any collection, most important first: the first key is evicted last.
    ///     inserted: those of them that were only stored, not used again: they are put in this order too, but do not
    ///         count as used. Bytes, in any collection.
    ///     ended: when the request ended that all of these keys are of, in seconds of any monotonic clock; the policy learns
    ///         from it how soon conversations go on. None if no request ends.
    ///     hint: what you know of its conversation then: `"over"`, `"tool_call"` or `"turn"`, see `BlockManager.free`.
    /// Raises:
    ///     InvalidArgumentError: a key is not bytes, `ended` is not a finite number from 0 on, or the hint is unknown, or
    ///         given without `ended`.
    #[pyo3(signature = (keys, inserted = None, *, ended = None, hint = None))]
    fn touch(
        &self,
        keys: &Bound<'_, PyAny>,
        inserted: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::ended)] ended: Option<Seconds>,
        hint: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let hint = policies::hint(hint)?;
        if hint.is_some() && ended.is_none() {
            return Err(invalid(
                "ended is None, must be a finite number of seconds, 0 or more, with a hint".to_owned(),
            ));
        }
        let inserted = inserted.map_or(Ok(Vec::new()), |keys| self.read_keys(keys, "inserted"))?;
        let (keys, inserted) = (self.read_keys(keys, "keys")?, inserted.into_iter().collect());
        let mut state = self.lock();
        state.cache.look_ahead_chunks(&keys);
        if let Some(Seconds(ended)) = ended {
            state.cache.end_turn(&keys, ended, hint);
        }
        state.cache.touch(&keys, &inserted);
        Ok(())
    }

    /// Evict keys that are not being loaded, in the order of the eviction policy, and free their chunks.
    ///
    /// Args:
    ///     count: number of keys to evict.
    ///     protected: keys to keep: bytes, in any collection.
    /// Returns:
    ///     The evicted keys; or None, without any change, if fewer than `count` can be evicted.
    /// Raises:
    ///     InvalidArgumentError: `count` is negative, or a key is not bytes.
    #[pyo3(signature = (count, protected = None))]
    fn evict<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::count)] count: usize,
        protected: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        let keys = protected.map_or(Ok(Vec::new()), |keys| self.read_keys(keys, "protected"))?;
        let (mut chunks, mut state) = (Vec::new(), self.lock());
        if !state.cache.evict(count, &keys, &mut chunks) {
            return Ok(None);
        }
        let gone: Vec<_> = chunks.iter().filter_map(|chunk| state.names[chunk.index()].take()).collect();
        drop(state);
        PyList::new(py, gone).map(Some)
    }

    /// Forget keys whose bytes are bad or no longer needed; they become misses.
    ///
    /// Args:
    ///     keys: bytes, in any collection.
    /// Returns:
    ///     The keys that had chunks.
    /// Raises:
    ///     InvalidArgumentError: a key is not bytes.
    fn forget<'py>(&self, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let forgotten = self.read(keys)?;
        let mut gone = memory::reserved(forgotten.keys.len())?;
        let mut state = self.lock();
        for (place, key) in forgotten.keys.iter().enumerate() {
            if let Some(chunk) = state.cache.forget(key) {
                state.names[chunk.index()] = None;
                gone.push(place);
            }
        }
        drop(state);
        forgotten.named(gone.into_iter())
    }

    /// Forget the keys whose stores have passed their deadlines.
    ///
    /// Args:
    ///     now: the current time, in the unit of the deadlines.
    /// Returns:
    ///     The forgotten keys.
    fn expire<'py>(&self, py: Python<'py>, #[pyo3(from_py_with = args::now)] now: u64) -> PyResult<Bound<'py, PyList>> {
        let (mut late, mut state) = (Vec::new(), self.lock());
        state.cache.expire(now, &mut late);
        let names: Vec<_> = late.iter().filter_map(|(_, chunk)| state.names[chunk.index()].take()).collect();
        drop(state);
        PyList::new(py, names)
    }

    /// Forget all keys.
    ///
    /// Returns:
    ///     The keys that had chunks, whether hits or pending.
    fn reset<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let mut state = self.lock();
        state.cache.reset();
        let names: Vec<_> = std::mem::take(&mut state.names).into_iter().flatten().collect();
        drop(state);
        PyList::new(py, names)
    }

    /// Total number of chunks.
    #[getter]
    fn num_chunks(&self) -> usize {
        self.lock().cache.num_chunks()
    }

    /// Number of chunks available to a store: empty ones, and those that can be evicted.
    #[getter]
    fn num_free(&self) -> usize {
        self.lock().cache.num_free()
    }

    /// Number of keys that are hits.
    #[getter]
    fn num_stored(&self) -> usize {
        self.lock().cache.num_stored()
    }

    /// Number of pending keys.
    #[getter]
    fn num_storing(&self) -> usize {
        self.lock().cache.num_storing()
    }

    /// Number of keys evicted so far.
    #[getter]
    fn num_evicted(&self) -> u64 {
        self.lock().cache.num_evicted()
    }

    /// Raise InvariantError if the state contradicts itself, which is a bug in Blockyard.
    fn check(&self) -> PyResult<()> {
        self.lock().cache.check().map_err(to_py)
    }

    fn __repr__(&self) -> String {
        let state = self.lock();
        let cache = &state.cache;
        let (chunks, free) = (cache.num_chunks(), cache.num_free());
        format!("OffloadManager(num_chunks={chunks}, num_free={free}, num_stored={})", cache.num_stored())
    }
}

#[expect(clippy::cast_possible_wrap, reason = "ids stay below 2^30")]
fn as_i32(chunk: BlockId) -> i32 {
    chunk.0 as i32
}
