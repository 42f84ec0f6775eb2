//! `manager.prefix.store_jobs`: transfers between a prefix store and the manager's tiers.

use crate::convert::args::{self, items, refused};
use crate::convert::errors::{invalid, to_py};
use crate::convert::memory;
use crate::convert::values::{TierName, picklable};
use crate::manager::prompts::{self, Extras, KeySpecs, TokenIds};
use crate::manager::shared::Shared;
use blockyard_core::{
    ExportedKey, JobId, Key, LeaseId, LeaseShare, MissingBlocks, StoreJob, StoreSearch, StoreWrites, Unwritten,
};
use numpy::{PyArray1, PyArray2};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// A load from a prefix store, or a write to it: the keys, and the block for each.
#[pyclass(frozen, name = "StoreJob", module = "blockyard._core")]
pub(crate) struct PyStoreJob {
    /// Number of the job. A job without blocks has already ended.
    #[pyo3(get)]
    job: u64,
    /// Tier of the blocks, `"device"` or `"host"`.
    #[pyo3(get)]
    tier: TierName,
    /// Page class of the blocks.
    #[pyo3(get)]
    page_class: usize,
    /// Keys in the store, uint8 `[n, 32]`.
    #[pyo3(get)]
    keys: Py<PyArray2<u8>>,
    /// The blocks, int64 `[n]`.
    #[pyo3(get)]
    blocks: Py<PyArray1<i64>>,
    /// Each block's tenant, uint8 `[n, 32]`: SHA-256 of its salt, zeros for prompts without a salt.
    #[pyo3(get)]
    tenants: Py<PyArray2<u8>>,
    /// Key of the preceding block in the prompt, uint8 `[n, 32]`; zeros for the first block.
    #[pyo3(get)]
    parents: Py<PyArray2<u8>>,
    /// Keys under which device and host find the blocks; they do not leave the process.
    cache_keys: Vec<Key>,
}

/// Returns rows of 32 bytes as uint8 `[n, 32]`.
fn rows_array<'a>(py: Python<'_>, rows: impl ExactSizeIterator<Item = &'a [u8; 32]>) -> PyResult<Py<PyArray2<u8>>> {
    let shape = [rows.len(), 32];
    let fill = |bytes: &mut [u8]| {
        bytes.chunks_exact_mut(32).zip(rows).for_each(|(bytes, row)| bytes.copy_from_slice(row));
    };
    memory::made(py, shape, fill).map(|(rows, ())| rows.unbind())
}

/// Returns keys as uint8 `[n, 32]`.
fn keys_array(py: Python<'_>, keys: &[ExportedKey]) -> PyResult<Py<PyArray2<u8>>> {
    rows_array(py, keys.iter().map(|key| &key.0))
}

/// Keys of missing blocks, the page class of each, and those of blocks that loads are bringing.
type Missing = (Py<PyArray2<u8>>, Py<PyArray1<i64>>, Py<PyArray1<i64>>);

/// Reads a sequence of bools.
fn bools(value: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<bool>> {
    items(value, &name, |item, _| item.extract().map_err(|error: PyErr| refused(error, item, &name, "bools")))
}

/// Reads a sequence of numbers of blocks.
fn counts(value: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<usize>> {
    items(value, &name, |item, _| item.extract().map_err(|error: PyErr| refused(error, item, &name, "ints from 0 on")))
}

impl PyStoreJob {
    fn new(py: Python<'_>, job: &StoreJob) -> PyResult<Self> {
        static NONE: PyOnceLock<PyStoreJob> = PyOnceLock::new();
        if !job.blocks.is_empty() {
            return Self::with_arrays(py, job);
        }
        // Most jobs that begin have no blocks, and arrays would cost more than the rest of the call.
        let none = NONE.get_or_try_init(py, || Self::with_arrays(py, job))?;
        let [keys, tenants, parents] = [&none.keys, &none.tenants, &none.parents].map(|rows| rows.clone_ref(py));
        let (tier, blocks) = (job.tier.into(), none.blocks.clone_ref(py));
        let cache_keys = Vec::new();
        Ok(Self { job: job.job.0, tier, page_class: job.page_class, keys, blocks, tenants, parents, cache_keys })
    }

    fn with_arrays(py: Python<'_>, job: &StoreJob) -> PyResult<Self> {
        let StoreJob { job, tier, page_class, keys, blocks, tenants, parents, cache_keys } = job;
        let blocks = memory::array(py, blocks, |block| i64::from(block.0))?.unbind();
        let (keys, parents) = (keys_array(py, keys)?, keys_array(py, parents)?);
        let tenants = rows_array(py, tenants.iter())?;
        let (job, tier, page_class, cache_keys) = (job.0, (*tier).into(), *page_class, cache_keys.clone());
        Ok(Self { job, tier, page_class, keys, blocks, tenants, parents, cache_keys })
    }
}

#[pymethods]
impl PyStoreJob {
    fn __len__(&self, py: Python<'_>) -> usize {
        self.blocks.bind(py).len().unwrap_or(0)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!("StoreJob({}: {} blocks, {})", self.job, self.__len__(py), self.tier)
    }
}

picklable!(PyStoreJob { job, tier, page_class, keys, blocks, tenants, parents } without cache_keys);

/// The blocks that device and host lack of a prompt, in models where prompts continue only at resume points.
///
/// Ask the store for all keys, then `deepest` for the point to load.
#[pyclass(frozen, name = "StoreSearch", module = "blockyard._core")]
pub(crate) struct PyStoreSearch {
    search: StoreSearch,
    /// Keys in the store, uint8 `[n, 32]`.
    #[pyo3(get)]
    keys: Py<PyArray2<u8>>,
    /// The page class of each block, int64 `[n]`.
    #[pyo3(get)]
    page_classes: Py<PyArray1<i64>>,
}

#[pymethods]
impl PyStoreSearch {
    /// Return the number of blocks up to the deepest point that the store completes.
    ///
    /// Args:
    ///     has: whether the store has the block of each key, bool `[n]` or a list.
    ///     max_blocks: maximum number of blocks to load.
    /// Returns:
    ///     Number of the prompt's first blocks, for `missing` and `begin_load`; 0 if device and host serve as many.
    /// Raises:
    ///     InvalidArgumentError: `has` does not have one entry per key.
    fn deepest(
        &self,
        has: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::max_blocks)] max_blocks: u32,
    ) -> PyResult<usize> {
        self.search.deepest(&bools(has, "has")?, max_blocks as usize).map_err(to_py)
    }

    fn __repr__(&self) -> String {
        format!("StoreSearch({} blocks)", self.search.keys().len())
    }
}

/// Loads from a prefix store and writes to it; available as `manager.prefix.store_jobs`.
///
/// `KVCache(prefix_store=...)` carries them out.
///
/// No lookup finds a block being loaded before `end_load` reports that its bytes have landed. Blocks of open jobs are
/// not allocated, evicted or moved.
#[pyclass(frozen, name = "StoreJobs", module = "blockyard._core")]
pub(crate) struct PyStoreJobs(Shared);

impl PyStoreJobs {
    pub(crate) const fn new(shared: Shared) -> Self {
        Self(shared)
    }
}

#[pymethods]
impl PyStoreJobs {
    /// Start to collect blocks to write to the store.
    ///
    /// Args:
    ///     writes: which blocks. `"through"`: each block once it is computed. `"back"`: the same, but only once blocks
    ///         that are not written yet outnumber the free ones, or after `flush`. `"second_use"`: blocks that are
    ///         computed or hit a second time. `"never"`: none.
    /// Raises:
    ///     InvalidArgumentError: the name is unknown, blocks are cached already, the manager has no prefix caching, or it
    ///         has several groups, a window, states or a drafter without `PrefixCaching(host=True)`.
    fn start(&self, writes: &str) -> PyResult<()> {
        let names = StoreWrites::ALL.map(StoreWrites::name).join(", ");
        let writes = StoreWrites::from_name(writes)
            .ok_or_else(|| invalid(format!("writes is \"{writes}\", must be one of {names}")))?;
        self.0.lock().use_store(writes).map_err(to_py)
    }

    /// Return what a store could complete of a prompt that continues only at resume points.
    ///
    /// Args:
    ///     prompt: token ids, uint32 `[tokens]` or a list of ints; or a `HashedPrompt`.
    ///     salt: salt of its tenant, bytes.
    ///     lora_id: its adapter; 0 for none.
    /// Raises:
    ///     InvalidArgumentError: a token id is out of range.
    #[pyo3(signature = (prompt, *, salt = None, lora_id = 0))]
    fn search(
        &self,
        prompt: &Bound<'_, PyAny>,
        salt: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
    ) -> PyResult<PyStoreSearch> {
        let (tokens, specs) = ([TokenIds::new(prompt, &"prompt")?], KeySpecs::one(salt, lora_id)?);
        let search = self.0.with(|manager| {
            prompts::lend(&tokens, &specs, &Extras::default(), |prompts| manager.search_store(&prompts[0]))
        })?;
        let search = search.map_err(to_py)?;
        let keys = keys_array(prompt.py(), search.keys())?;
        let classes: Vec<usize> = search.page_classes().collect();
        let page_classes =
            memory::array(prompt.py(), &classes, |&class| i64::try_from(class).unwrap_or(i64::MAX))?.unbind();
        Ok(PyStoreSearch { search, keys, page_classes })
    }

    /// Return the number of blocks up to the deepest point that the store completes and that the host has room for.
    ///
    /// Args:
    ///     search: a search of a prompt.
    ///     has: whether the store has the block of each key, bool `[n]` or a list.
    ///     coming: by page class, number of other blocks on their way to the host that have no place there yet.
    /// Returns:
    ///     As `StoreSearch.deepest`.
    /// Raises:
    ///     InvalidArgumentError: `has` does not have one entry per key, or `coming` one per page class.
    fn deepest(
        &self,
        search: &Bound<'_, PyStoreSearch>,
        has: &Bound<'_, PyAny>,
        coming: &Bound<'_, PyAny>,
    ) -> PyResult<usize> {
        let (has, coming) = (bools(has, "has")?, counts(coming, "coming")?);
        self.0.lock().deepest_with_room(&search.get().search, &has, &coming).map_err(to_py)
    }

    /// Return the keys of a prompt's blocks that no tier has and no load is bringing, and what is being loaded.
    ///
    /// Args:
    ///     prompt: token ids, uint32 `[tokens]` or a list of ints; or a `HashedPrompt`.
    ///     max_blocks: maximum number of keys.
    ///     point: what a resume point after that many blocks needs, see `search`; None for all blocks up to the last
    ///         boundary.
    ///     salt: salt of its tenant, bytes.
    ///     lora_id: its adapter; 0 for none.
    /// Returns:
    ///     `(keys, page_classes, loading)`: the keys in the prompt's order, uint8 `[n, 32]`; the page class of each, int64
    ///     `[n]`; and that of each of its blocks that loads are bringing, int64 `[m]`. If `n` is `max_blocks`, blocks
    ///     beyond the last key may be left out of the latter.
    /// Raises:
    ///     InvalidArgumentError: a token id is out of range.
    #[pyo3(signature = (prompt, max_blocks, *, point = None, salt = None, lora_id = 0))]
    fn missing(
        &self,
        prompt: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::max_blocks)] max_blocks: u32,
        #[pyo3(from_py_with = args::point)] point: Option<usize>,
        salt: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
    ) -> PyResult<Missing> {
        let (tokens, specs) = ([TokenIds::new(prompt, &"prompt")?], KeySpecs::one(salt, lora_id)?);
        let most = max_blocks as usize;
        let missing = self.0.with(|manager| {
            prompts::lend(&tokens, &specs, &Extras::default(), |prompts| {
                manager.missing_blocks(&prompts[0], most, point)
            })
        })?;
        let MissingBlocks { keys, page_classes, loading } = missing.map_err(to_py)?;
        let classes = |of: &[u8]| Ok::<_, PyErr>(memory::array(prompt.py(), of, |&class| i64::from(class))?.unbind());
        Ok((keys_array(prompt.py(), &keys)?, classes(&page_classes)?, classes(&loading)?))
    }

    /// Begin to load the first of those blocks, as many of one page class as fit.
    ///
    /// They go to the host until loads hold half of what no sequence has there; else to the device, which keeps its
    /// watermark free. With several groups, windows or states they go to the host only. See `room`.
    ///
    /// Args:
    ///     prompt: as for `missing`.
    ///     max_blocks: maximum number of blocks.
    ///     point: as for `missing`.
    ///     salt: salt of its tenant, bytes.
    ///     lora_id: its adapter; 0 for none.
    /// Returns:
    ///     `StoreJob`. End it with `end_load`, unless it has no blocks.
    /// Raises:
    ///     InvalidArgumentError: a token id is out of range.
    #[pyo3(signature = (prompt, max_blocks, *, point = None, salt = None, lora_id = 0))]
    fn begin_load(
        &self,
        prompt: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::max_blocks)] max_blocks: u32,
        #[pyo3(from_py_with = args::point)] point: Option<usize>,
        salt: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
    ) -> PyResult<PyStoreJob> {
        let (tokens, specs) = ([TokenIds::new(prompt, &"prompt")?], KeySpecs::one(salt, lora_id)?);
        let most = max_blocks as usize;
        let job = self.0.with(|manager| {
            prompts::lend(&tokens, &specs, &Extras::default(), |prompts| manager.begin_load(&prompts[0], most, point))
        })?;
        PyStoreJob::new(prompt.py(), &job.map_err(to_py)?)
    }

    /// End a load. Prompts find the blocks that have landed; the others are freed.
    ///
    /// Args:
    ///     job: number of the job.
    ///     landed: whether the bytes of each block have landed, bool `[n]` or a list.
    /// Returns:
    ///     Number of blocks that prompts can now find.
    /// Raises:
    ///     UnknownTicketError: there is no such load, or it has ended.
    ///     InvalidArgumentError: `landed` does not have one entry per block.
    fn end_load(&self, #[pyo3(from_py_with = args::job)] job: u64, landed: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.0.lock().end_load(JobId(job), &bools(landed, "landed")?).map_err(to_py)
    }

    /// With `"back"`: let all blocks be written now, because the process is about to end.
    fn flush(&self) {
        self.0.lock().flush_to_store();
    }

    /// Return the number of blocks that the next loads of a prompt may take, one on the host and one on the device.
    ///
    /// Args:
    ///     prompt: as for `missing`.
    ///     point: as for `missing`.
    ///     page_class: page class of the blocks.
    ///     salt: salt of its tenant, bytes.
    ///     lora_id: its adapter; 0 for none.
    /// Raises:
    ///     InvalidArgumentError: a token id is out of range, or there is no such page class.
    #[pyo3(signature = (prompt, *, point = None, page_class = 0, salt = None, lora_id = 0))]
    fn room(
        &self,
        prompt: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::point)] point: Option<usize>,
        #[pyo3(from_py_with = args::page_class)] page_class: usize,
        salt: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
    ) -> PyResult<usize> {
        let (tokens, specs) = ([TokenIds::new(prompt, &"prompt")?], KeySpecs::one(salt, lora_id)?);
        let room = self.0.with(|manager| {
            prompts::lend(&tokens, &specs, &Extras::default(), |prompts| {
                manager.room_to_load(&prompts[0], point, page_class)
            })
        })?;
        room.map_err(to_py)
    }

    /// Lease the blocks of a prompt that waits: those that device and host have, and those that loads bring for it.
    ///
    /// Leased blocks are neither evicted nor moved. Whoever takes a lease ends it when the prompt is admitted or
    /// dropped, or when something that runs needs the blocks. `prefix.reset` and a smaller device end all leases.
    ///
    /// Args:
    ///     prompt: as for `missing`.
    ///     share: what all leases together may hold, with the blocks that they are still to get. `"half"`: half of the
    ///         blocks that no sequence has, in each tier. `"free"`: all of them on the device except the watermark, and
    ///         half on the host. `"any"`: no limit.
    ///     salt: salt of its tenant, bytes.
    ///     lora_id: its adapter; 0 for none.
    /// Returns:
    ///     The number of the lease; None, without leasing anything, if the prompt would exceed the share.
    /// Raises:
    ///     InvalidArgumentError: a token id is out of range, or the share is unknown.
    #[pyo3(signature = (prompt, *, share = "half", salt = None, lora_id = 0))]
    fn lease(
        &self,
        prompt: &Bound<'_, PyAny>,
        share: &str,
        salt: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
    ) -> PyResult<Option<u64>> {
        let names = LeaseShare::ALL.map(LeaseShare::name).join(", ");
        let share = LeaseShare::from_name(share)
            .ok_or_else(|| invalid(format!("share is \"{share}\", must be one of {names}")))?;
        let (tokens, specs) = ([TokenIds::new(prompt, &"prompt")?], KeySpecs::one(salt, lora_id)?);
        let lease = self.0.with(|manager| {
            prompts::lend(&tokens, &specs, &Extras::default(), |prompts| manager.lease_prompt(&prompts[0], share))
        })?;
        Ok(lease.map_err(to_py)?.map(|lease| lease.0))
    }

    /// The load of a lease's prompt has ended: from now on, the lease holds what the prompt finds, and gets nothing more.
    ///
    /// Args:
    ///     lease: its number.
    ///     prompt: the prompt, as for `lease`.
    ///     salt: salt of its tenant, bytes.
    ///     lora_id: its adapter; 0 for none.
    /// Raises:
    ///     UnknownTicketError: there was never such a lease.
    ///     InvalidArgumentError: a token id is out of range.
    #[pyo3(signature = (lease, prompt, *, salt = None, lora_id = 0))]
    fn settle_lease(
        &self,
        #[pyo3(from_py_with = args::lease)] lease: u64,
        prompt: &Bound<'_, PyAny>,
        salt: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
    ) -> PyResult<()> {
        let (tokens, specs) = ([TokenIds::new(prompt, &"prompt")?], KeySpecs::one(salt, lora_id)?);
        let settled = self.0.with(|manager| {
            let lease = LeaseId(lease);
            prompts::lend(&tokens, &specs, &Extras::default(), |prompts| manager.settle_lease(lease, &prompts[0]))
        })?;
        settled.map_err(to_py)
    }

    /// End a lease. Does nothing if it has ended.
    ///
    /// Args:
    ///     lease: its number; None for all leases.
    /// Raises:
    ///     UnknownTicketError: there was never such a lease.
    fn end_lease(&self, #[pyo3(from_py_with = args::lease)] lease: Option<u64>) -> PyResult<()> {
        let mut manager = self.0.lock();
        if let Some(lease) = lease {
            return manager.end_lease(LeaseId(lease)).map_err(to_py);
        }
        manager.end_leases();
        Ok(())
    }

    /// Number of leases that have not ended.
    #[getter]
    fn num_leases(&self) -> usize {
        self.0.lock().num_leases()
    }

    /// Number of blocks that loads have still to take for leased prompts.
    #[getter]
    fn num_promised(&self) -> usize {
        self.0.lock().num_promised()
    }

    /// Bytes of those blocks, in the measure of `Fit.bytes`.
    #[getter]
    fn promised_bytes(&self) -> u64 {
        self.0.lock().promised_bytes()
    }

    /// Number of leased device blocks that no sequence has.
    #[getter]
    fn num_leased(&self) -> usize {
        self.0.lock().num_leased_idle()
    }

    /// Number of blocks waiting for `begin_write`; a block evicted while waiting counts until its turn comes.
    #[getter]
    fn num_waiting(&self) -> usize {
        self.0.lock().waiting_for_store()
    }

    /// Begin to read blocks for the store, all from one tier and of one page class.
    ///
    /// Writes together hold at most a quarter of the device's blocks. A call that needs one of these blocks takes it,
    /// and `end_write` then returns False.
    ///
    /// Args:
    ///     max_blocks: maximum number of blocks.
    ///     max_bytes: maximum number of bytes, if the manager has several page classes; a larger block is alone.
    /// Returns:
    ///     `StoreJob`. End it with `end_write` once its blocks have been read, unless it has no blocks.
    #[pyo3(signature = (max_blocks, *, max_bytes = None))]
    fn begin_write(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::max_blocks)] max_blocks: u32,
        #[pyo3(from_py_with = args::max_bytes)] max_bytes: Option<usize>,
    ) -> PyResult<PyStoreJob> {
        let job = self.0.lock().begin_write_of(max_blocks as usize, max_bytes.unwrap_or(usize::MAX));
        PyStoreJob::new(py, &job)
    }

    /// End a write once its blocks have been read.
    ///
    /// Args:
    ///     job: number of the job.
    /// Returns:
    ///     False if another call took blocks of this job in the meantime: do not store the bytes.
    /// Raises:
    ///     UnknownTicketError: there is no such write, or it has ended.
    fn end_write(&self, #[pyo3(from_py_with = args::job)] job: u64) -> PyResult<bool> {
        self.0.lock().end_write(JobId(job)).map_err(to_py)
    }

    /// Note that the store did not keep blocks of an ended write.
    ///
    /// Args:
    ///     job: the write.
    ///     blocks: which of its blocks, bool `[n]` or a list.
    ///     why: `"failed"`: a prompt that hits or computes them queues them again. `"chain"`: the store has lost what
    ///         comes before them; a prompt that hits them queues all its blocks again. `"refused"`: what comes before
    ///         them fills the store; they are queued once they are computed again, as is what follows them.
    /// Raises:
    ///     InvalidArgumentError: `why` has another value, `blocks` does not have one entry per block, or `job` was
    ///         pickled.
    #[pyo3(signature = (job, blocks, why = "failed"))]
    fn note_unwritten(&self, job: &PyStoreJob, blocks: &Bound<'_, PyAny>, why: &str) -> PyResult<()> {
        let names = Unwritten::ALL.map(Unwritten::name).join(", ");
        let of =
            Unwritten::from_name(why).ok_or_else(|| invalid(format!("why is \"{why}\", must be one of {names}")))?;
        let (blocks, keys) = (bools(blocks, "blocks")?, &job.cache_keys);
        if blocks.len() != keys.len() {
            let must = format!("{}, the blocks of job {} in this process", keys.len(), job.job);
            return Err(invalid(format!("length of blocks is {}, must be {must}", blocks.len())));
        }
        let keys: Vec<Key> = keys.iter().zip(blocks).filter_map(|(key, is_one)| is_one.then_some(*key)).collect();
        self.0.lock().note_unwritten(&keys, of);
        Ok(())
    }

    /// End all loads and writes: nothing has landed, and blocks that were being read may be written later.
    ///
    /// Call it when no copy to or from their blocks is running.
    fn give_up_all(&self) -> PyResult<()> {
        self.0.lock().give_up_store_jobs().map_err(to_py)
    }
}
