//! `OffloadManager`: which chunks of a host cache hold which keys.

use crate::convert::args;
use crate::convert::errors::{invalid, to_py};
use crate::convert::memory;
use crate::locks::lock;
use crate::manager::policies::policy;
use blockyard_core::offload::{Lookup, Names, OffloadCache, Stored};
use blockyard_core::{BlockId, Key, Policies};
use blockyard_locks::{Guard, InnerLock};
use numpy::PyArray1;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString};

/// What `OffloadManager.prepare_store` decided.
#[pyclass(frozen, get_all, name = "PreparedStore", module = "blockyard._core")]
pub(crate) struct PyPreparedStore {
    /// Keys to store, of those that were offered, in their order.
    keys: Py<PyList>,
    /// The chunk of each, int32 `[n]`.
    chunks: Py<PyArray1<i32>>,
    /// Keys that lost their chunks to them.
    evicted: Py<PyList>,
}

#[pymethods]
impl PyPreparedStore {
    fn __repr__(&self, py: Python<'_>) -> String {
        let (keys, evicted) = (self.keys.bind(py).len(), self.evicted.bind(py).len());
        format!("PreparedStore(keys={keys}, evicted={evicted})")
    }
}

/// The chunks of a host cache, and the keys whose bytes they hold, for an engine's offload manager.
///
/// A key is any bytes. It is pending from `prepare_store` to `complete_store`, a hit from then until it is evicted or
/// forgotten. Loads hold their chunks. A key that is forgotten while transfers of it run is a miss at once; its chunk
/// is given out again only after they have ended.
///
///     manager = OffloadManager(1024)
///     store = manager.prepare_store([b"a", b"b"])
///     # copy to store.chunks
///     manager.complete_store(store.keys)
///     chunks = manager.prepare_load([b"a"])
///     # copy from chunks
///     manager.complete_load([b"a"])
///
/// Args:
///     num_chunks: chunks of the host cache.
///     eviction: which stored chunk is given out again first, as for `PrefixCaching`.
/// Raises:
///     InvalidArgumentError: `num_chunks` is out of range, or `eviction` has another name.
///     OutOfMemoryError: there is no memory to keep track of so many.
#[pyclass(frozen, name = "OffloadManager", module = "blockyard._core")]
pub(crate) struct PyOffloadManager {
    state: InnerLock<State>,
    names: Names,
}

struct State {
    cache: OffloadCache,
    /// The name of the key that each chunk has.
    names: Vec<Option<Py<PyBytes>>>,
}

/// Names of keys, and the keys.
struct Keys<'py> {
    names: Vec<Bound<'py, PyBytes>>,
    keys: Vec<Key>,
}

impl PyOffloadManager {
    fn lock(&self) -> Guard<'_, State> {
        lock(&self.state)
    }

    /// Keys as the caller gave them, and as the cache knows them.
    fn read<'py>(&self, keys: &Bound<'py, PyAny>) -> PyResult<Keys<'py>> {
        let mut names = memory::reserved(keys.cast_exact::<PyList>().map_or(0, PyListMethods::len))?;
        let keys = self.keys(keys, "keys", |name| names.push(name.clone()))?;
        Ok(Keys { names, keys })
    }

    /// Keys as the cache knows them.
    fn read_keys(&self, keys: &Bound<'_, PyAny>) -> PyResult<Vec<Key>> {
        self.keys(keys, "keys", |_| {})
    }

    fn keys<'py>(
        &self,
        keys: &Bound<'py, PyAny>,
        argument: &str,
        mut note: impl FnMut(&Bound<'py, PyBytes>),
    ) -> PyResult<Vec<Key>> {
        let mut key = |item: &Bound<'py, PyAny>, at: usize| match item.cast_exact::<PyBytes>() {
            Ok(name) => {
                note(name);
                Ok(self.names.key(name.as_bytes()))
            }
            // Bytes of another class may run code when they are dropped.
            Err(_) => Err(invalid(format!("{argument}[{at}] is {}, must be bytes", args::shown(item)))),
        };
        match keys.cast_exact::<PyList>() {
            Ok(list) => {
                let mut found = memory::reserved(list.len())?;
                for (at, item) in list.iter().enumerate() {
                    found.push(key(&item, at)?);
                }
                Ok(found)
            }
            Err(_) => args::items(keys, &argument, key),
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
        let state = InnerLock::new(State { cache, names: Vec::new() });
        Ok(Self { state, names: Names::default() })
    }

    /// Return what each key is: `"hit"`, `"pending"` while it is being stored, or `"miss"`.
    ///
    /// Args:
    ///     keys: bytes, in any collection.
    /// Raises:
    ///     InvalidArgumentError: a key is not bytes.
    fn lookup<'py>(&self, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let (py, keys) = (keys.py(), self.read_keys(keys)?);
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

    /// Give chunks to the keys that have none. Those that have one count as just used, and none of them is evicted.
    ///
    /// Args:
    ///     keys: bytes, in any collection. One that was forgotten while it was being stored is left out until that
    ///         store has ended.
    ///     deadline: `expire` at this time or later forgets the keys unless their stores have ended; None for never.
    /// Returns:
    ///     `PreparedStore`; or None, and nothing is changed, if there are too few chunks that no transfer holds.
    /// Raises:
    ///     InvalidArgumentError: a key is not bytes.
    #[pyo3(signature = (keys, *, deadline = None))]
    fn prepare_store(
        &self,
        keys: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::deadline)] deadline: Option<u64>,
    ) -> PyResult<Option<PyPreparedStore>> {
        let (py, Keys { names, keys }) = (keys.py(), self.read(keys)?);
        let (mut new, mut evicted) = (memory::reserved(keys.len())?, Vec::new());
        let mut state = self.lock();
        if !state.cache.prepare_store(&keys, deadline.unwrap_or(u64::MAX), &mut new) {
            return Ok(None);
        }
        let end = new.iter().map(|(_, chunk)| chunk.index() + 1).max().unwrap_or(0).max(state.names.len());
        state.names.resize_with(end, || None);
        for &(place, chunk) in &new {
            evicted.extend(state.names[chunk.index()].replace(names[place].clone().unbind()));
        }
        drop(state);
        let chunks = memory::array(py, &new, |(_, chunk)| as_i32(*chunk))?;
        let keys = PyList::new(py, new.iter().map(|(place, _)| &names[*place]))?;
        let evicted = PyList::new(py, evicted)?;
        Ok(Some(PyPreparedStore { keys: keys.unbind(), chunks: chunks.unbind(), evicted: evicted.unbind() }))
    }

    /// End the stores of keys. Keys that are not being stored are passed over.
    ///
    /// Args:
    ///     keys: bytes, in any collection.
    ///     success: whether their bytes are in their chunks. Otherwise the keys are misses, and the chunks are free.
    /// Returns:
    ///     The keys that have become hits.
    /// Raises:
    ///     InvalidArgumentError: a key is not bytes.
    #[pyo3(signature = (keys, success = true))]
    fn complete_store<'py>(&self, keys: &Bound<'py, PyAny>, success: bool) -> PyResult<Bound<'py, PyList>> {
        let (py, Keys { names, keys }) = (keys.py(), self.read(keys)?);
        let mut state = self.lock();
        let mut stored = memory::reserved(keys.len())?;
        state.cache.look_ahead_chunks(&keys);
        for (name, key) in names.iter().zip(&keys) {
            match state.cache.complete_store(key, success) {
                Stored::Found => stored.push(name),
                Stored::Freed(chunk) => state.names[chunk.index()] = None,
                Stored::Unknown => {}
            }
        }
        drop(state);
        PyList::new(py, stored)
    }

    /// Hold the chunks of keys for a load.
    ///
    /// Args:
    ///     keys: bytes, each a hit, in any collection.
    /// Returns:
    ///     The chunk of each key, int32 `[n]`.
    /// Raises:
    ///     InvalidArgumentError: a key is no hit, or not bytes; nothing is held.
    fn prepare_load<'py>(&self, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let (py, keys) = (keys.py(), self.read_keys(keys)?);
        let mut chunks = memory::reserved(keys.len())?;
        let mut state = self.lock();
        state.cache.look_ahead_chunks(&keys);
        let held = state.cache.prepare_load(&keys, &mut chunks);
        drop(state);
        held.map_err(|place| invalid(format!("keys[{place}] is no hit, so there is nothing to load")))?;
        memory::array(py, &chunks, |chunk| as_i32(*chunk))
    }

    /// End one load of each key.
    ///
    /// Args:
    ///     keys: bytes, in any collection.
    /// Raises:
    ///     InvalidArgumentError: a key is not bytes, or is not being loaded; the loads of those before it have ended.
    fn complete_load(&self, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let keys = self.read_keys(keys)?;
        let mut state = self.lock();
        state.cache.look_ahead_chunks(&keys);
        match keys.iter().position(|key| !state.cache.complete_load(key)) {
            None => Ok(()),
            Some(place) => Err(invalid(format!("keys[{place}] is not being loaded"))),
        }
    }

    /// Count keys as just used; misses are passed over.
    ///
    /// Args:
    ///     keys: bytes, in any collection, the most important first: of those touched together it goes last.
    /// Raises:
    ///     InvalidArgumentError: a key is not bytes.
    fn touch(&self, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let keys = self.read_keys(keys)?;
        let mut state = self.lock();
        state.cache.look_ahead_chunks(&keys);
        keys.iter().rev().for_each(|key| state.cache.touch(key));
        Ok(())
    }

    /// Evict keys that nothing loads, those first that the eviction policy says; their chunks are free then.
    ///
    /// Args:
    ///     count: keys to evict.
    ///     protected: keys to keep: bytes, in any collection.
    /// Returns:
    ///     The keys that were evicted; or None, and nothing is changed, if there are not so many.
    /// Raises:
    ///     InvalidArgumentError: `count` is negative, or a key is not bytes.
    #[pyo3(signature = (count, protected = None))]
    fn evict<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::count)] count: usize,
        protected: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        let read = |keys| self.keys(keys, "protected", |_| {});
        let keys = protected.map_or(Ok(Vec::new()), read)?;
        let (mut chunks, mut state) = (Vec::new(), self.lock());
        if !state.cache.evict(count, &keys, &mut chunks) {
            return Ok(None);
        }
        let gone: Vec<_> = chunks.iter().filter_map(|chunk| state.names[chunk.index()].take()).collect();
        drop(state);
        PyList::new(py, gone).map(Some)
    }

    /// Forget keys whose bytes are bad or not wanted any more: they are misses from now on.
    ///
    /// Args:
    ///     keys: bytes, in any collection.
    /// Returns:
    ///     The keys that had chunks.
    /// Raises:
    ///     InvalidArgumentError: a key is not bytes.
    fn forget<'py>(&self, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let (py, Keys { names, keys }) = (keys.py(), self.read(keys)?);
        let mut state = self.lock();
        let mut gone = memory::reserved(keys.len())?;
        for (name, key) in names.iter().zip(&keys) {
            if let Some(chunk) = state.cache.forget(key) {
                state.names[chunk.index()] = None;
                gone.push(name);
            }
        }
        drop(state);
        PyList::new(py, gone)
    }

    /// Forget the keys whose stores have not ended by their deadlines.
    ///
    /// Args:
    ///     now: the time, in the unit of the deadlines.
    /// Returns:
    ///     Those keys.
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
    ///     The keys that had chunks, hits and pending ones.
    fn reset<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let mut state = self.lock();
        state.cache.reset();
        let names: Vec<_> = std::mem::take(&mut state.names).into_iter().flatten().collect();
        drop(state);
        PyList::new(py, names)
    }

    /// Chunks in all.
    #[getter]
    fn num_chunks(&self) -> usize {
        self.lock().cache.num_chunks()
    }

    /// Chunks that a store can have now: those that hold nothing, and those that can be evicted.
    #[getter]
    fn num_free(&self) -> usize {
        self.lock().cache.num_free()
    }

    /// Keys that are hits.
    #[getter]
    fn num_stored(&self) -> usize {
        self.lock().cache.num_stored()
    }

    /// Keys that are pending.
    #[getter]
    fn num_storing(&self) -> usize {
        self.lock().cache.num_storing()
    }

    /// Keys that were evicted so far.
    #[getter]
    fn num_evicted(&self) -> u64 {
        self.lock().cache.num_evicted()
    }

    /// Raise InvariantError if the manager contradicts itself: a bug in Blockyard.
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
