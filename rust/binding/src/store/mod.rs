//! `SlabStore`: the file store. `results` has the results of its batches and the inspection of its file, `redis` the
//! connections of the Redis store.

mod redis;
mod results;

pub(crate) use redis::PyRedisClient;
pub(crate) use results::{PyCompletion, read_slab, wipe_slab};

use crate::convert::args::{self, Argument};
use crate::convert::arrays::TicketArgument;
use crate::convert::memory::{self, LentRows};
use blockyard_store::{
    BlockDevice, Completion, DirectMode, Error, Geometry, Miss, Owner, Progress, SlabContents, SlabFile, SlabOptions,
    SlabStore, StoreOptions, checksum, checksum_of_two, keyed_checksum, revision_name,
};
use numpy::{Ix2, PyArray, PyArray1, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

mod classes {
    use pyo3::import_exception;

    import_exception!(blockyard.errors, InvalidArgumentError);
    import_exception!(blockyard.errors, MappingError);
    import_exception!(blockyard.errors, StoreError);
    import_exception!(blockyard.errors, StoreFullError);
    import_exception!(blockyard.errors, UnknownTicketError);
}

/// Return the XXH3-128 of each row, little-endian, uint8 `[n, 16]`; with a key, the first 16 bytes of the keyed
/// BLAKE3.
///
/// Args:
///     rows: uint8 `[n, width]`.
///     key: 32 bytes, known only to trusted writers: nobody else can compute these checksums.
///     heads: bytes in front of each row, uint8 `[n, m]`; the checksum covers both.
/// Raises:
///     InvalidArgumentError: wrong dtype or shape, or the key does not have 32 bytes.
#[pyfunction]
#[pyo3(signature = (rows, key=None, heads=None))]
pub(crate) fn checksum_rows<'py>(
    rows: &Bound<'py, PyAny>,
    key: Option<&[u8]>,
    heads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyArray<u8, Ix2>>> {
    let refused = || expected("rows", "a uint8 array [n, width]", rows);
    let shape = rows.cast::<PyArray<u8, Ix2>>().map_err(|_| refused())?.dims();
    let (count, width) = (shape[0], shape[1]);
    let key: Option<&[u8; 32]> = match key {
        None => None,
        Some(key) => Some(key.try_into().map_err(|_| invalid(format!("key has {} bytes, must have 32", key.len())))?),
    };
    let heads = heads.map(|heads| heads_of(heads, count)).transpose()?;
    let sum = |row: usize, bytes: &[u8]| match &heads {
        Some((heads, width)) => checksum_of_two(key, &heads[row * width..][..*width], bytes),
        None => key.map_or_else(|| checksum(bytes), |key| keyed_checksum(key, bytes)),
    };
    let hash = |bytes: &[u8]| (0..count).map(|row| sum(row, &bytes[row * width..][..width])).collect::<Vec<_>>();
    let sums = memory::lend_rows(rows, [count, width], hash)?.ok_or_else(refused)?;
    memory::filled(rows.py(), [count, 16], sums.as_flattened(), |&byte| byte)
}

/// Copies the heads of `count` rows; returns them and the bytes of each.
fn heads_of(heads: &Bound<'_, PyAny>, count: usize) -> PyResult<(Vec<u8>, usize)> {
    let refused = || expected("heads", &format!("a uint8 array [{count}, m]"), heads);
    let shape = heads.cast::<PyArray<u8, Ix2>>().map_err(|_| refused())?.dims();
    let bytes = memory::lend_rows(heads, [count, shape[1]], <[u8]>::to_vec)?.ok_or_else(refused)?;
    Ok((bytes, shape[1]))
}

/// How often a waiting call checks for signals.
const SLICE: Duration = Duration::from_millis(100);

fn to_py(error: &Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::NoSpace { .. } | Error::FileTooLarge { .. } | Error::TooManySlots { .. } | Error::TooSmall { .. } => {
            classes::StoreFullError::new_err(message)
        }
        Error::SlotOutOfRange { .. } | Error::RepeatedSlot { .. } => classes::MappingError::new_err(message),
        Error::InvalidOption { .. }
        | Error::WouldDrop { .. }
        | Error::WrongLength { .. }
        | Error::WrongOwners { .. } => classes::InvalidArgumentError::new_err(message),
        Error::UnknownTicket { .. } => classes::UnknownTicketError::new_err(message),
        _ => classes::StoreError::new_err(message),
    }
}

fn invalid(message: String) -> PyErr {
    classes::InvalidArgumentError::new_err(message)
}

/// Blocks in one preallocated file; `blockyard.stores.open_store` opens it by URL. With `use="swap"`, blocks are
/// addressed by slot and die with the process; with `use="prefix"`, they are found by key and outlive it.
#[pyclass(frozen, name = "SlabStore", module = "blockyard._core")]
pub(crate) struct PySlabStore {
    store: SlabStore,
    path: PathBuf,
    direct: bool,
    notes: Vec<String>,
    /// The callers' rows for reads, by ticket.
    lent: Mutex<HashMap<u64, Lent>>,
}

#[pymethods]
impl PySlabStore {
    #[new]
    #[pyo3(signature = (directory, *, bytes_per_block, size=None, num_slots=None, threads=4, direct="auto",
                        memory=1_073_741_824, timeout_base=10.0, namespace=[0; 32], r#use="swap", revision="", drop=false))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments, one per option of the URL")]
    fn new(
        py: Python<'_>,
        directory: PathBuf,
        #[pyo3(from_py_with = args::bytes_per_block)] bytes_per_block: usize,
        #[pyo3(from_py_with = args::size)] size: Option<u64>,
        #[pyo3(from_py_with = args::num_slots)] num_slots: Option<u64>,
        #[pyo3(from_py_with = args::threads)] threads: usize,
        direct: &str,
        #[pyo3(from_py_with = args::memory)] memory: u64,
        #[pyo3(from_py_with = args::timeout_base)] timeout_base: f64,
        #[pyo3(from_py_with = args::namespace)] namespace: [u8; 32],
        r#use: &str,
        revision: &str,
        drop: bool,
    ) -> PyResult<Self> {
        let is_keyed = match r#use {
            "swap" => false,
            "prefix" => true,
            other => return Err(invalid(format!("use is '{other}', must be 'swap' or 'prefix'"))),
        };
        let direct = match direct {
            "auto" => DirectMode::Auto,
            "on" => DirectMode::On,
            "off" => DirectMode::Off,
            other => return Err(invalid(format!("direct is '{other}', must be 'auto', 'on' or 'off'"))),
        };
        let timeout_base = seconds("timeout_base", timeout_base)?;
        py.detach(|| {
            let geometry = Geometry::fit(bytes_per_block, size, num_slots)?;
            let revision = revision_name(revision);
            let memory_bytes = memory;
            let hidden = Duration::from_secs(2); // as `FAILED_SECONDS` of the stores in Python
            let options = StoreOptions { geometry, namespace, revision, threads, memory_bytes, timeout_base, hidden };
            options.check()?;
            let file = SlabOptions { directory, geometry, namespace, direct };
            if is_keyed && !drop {
                SlabContents::refuse_to_drop(&file.directory, geometry)?;
            }
            let slab = if is_keyed { SlabFile::open_kept(&file)? } else { SlabFile::create(&file)? };
            let (path, direct, notes) = (slab.path().to_owned(), slab.direct(), slab.notes().to_vec());
            let device: Arc<dyn BlockDevice> = Arc::new(slab);
            let open = if is_keyed { SlabStore::open_keyed } else { SlabStore::open };
            let store = open(device, options)?;
            Ok(Self { store, path, direct, notes, lent: Mutex::default() })
        })
        .map_err(|error| to_py(&error))
    }

    /// Whether the class supports `set_quota`, with `use="prefix"`.
    #[classattr]
    fn keeps_quotas() -> bool {
        true
    }

    /// Number of blocks that the store can hold; in swap space the slots, numbered from 0.
    #[getter]
    fn num_slots(&self) -> u32 {
        self.store.geometry().slots
    }

    /// What the store can be used for, see `ExternalStore.uses`.
    #[getter]
    fn uses(&self) -> (&'static str,) {
        if self.store.is_keyed() { ("prefix",) } else { ("swap",) }
    }

    /// Whether `close` was called.
    #[getter]
    fn is_closed(&self) -> bool {
        self.store.is_closed()
    }

    /// Bytes of one block, as the caller sees it.
    #[getter]
    fn bytes_per_block(&self) -> usize {
        self.store.geometry().payload_bytes
    }

    /// Maximum number of blocks in flight and in uncollected results.
    #[getter]
    fn max_blocks_in_flight(&self) -> u64 {
        self.store.max_blocks_in_flight()
    }

    /// The slab's file.
    #[getter]
    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// Whether the page cache is bypassed.
    #[getter]
    fn direct(&self) -> bool {
        self.direct
    }

    /// Number of blocks that the file held when it was opened, and that are gone since its first page is damaged.
    #[getter]
    fn lost_blocks(&self) -> usize {
        self.store.lost_blocks()
    }

    /// Messages about features that the system refused.
    #[getter]
    fn notes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.notes)
    }

    /// Return the offset of a slot's header in the file, in bytes.
    fn slot_offset(&self, #[pyo3(from_py_with = args::slot)] slot: i64) -> PyResult<u64> {
        let geometry = self.store.geometry();
        let found = u32::try_from(slot).ok().filter(|&found| found < geometry.slots);
        let missing = || to_py(&Error::SlotOutOfRange { slot, slots: geometry.slots });
        found.map(|found| geometry.offset(found)).ok_or_else(missing)
    }

    /// Start to write blocks: `slots` int64 `[n]`, `rows` uint8 `[n, bytes_per_block]`. Returns a ticket. Rows that
    /// are not whole pages are copied first. See `ExternalStore.submit_write`.
    fn submit_write(&self, slots: &Bound<'_, PyAny>, rows: &Bound<'_, PyAny>) -> PyResult<u64> {
        let slots = slot_array(slots)?;
        self.submit_rows(
            rows,
            slots.len(),
            |lent| self.store.lend_write(&slots, lent),
            |bytes| self.store.submit_write(&slots, bytes),
        )
    }

    /// Start to read blocks: `slots` int64 `[n]`, into `rows` uint8 `[n, bytes_per_block]`. Returns a ticket.
    /// See `ExternalStore.submit_read`.
    #[pyo3(signature = (slots, rows=None))]
    fn submit_read(&self, py: Python<'_>, slots: &Bound<'_, PyAny>, rows: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        let slots = slot_array(slots)?;
        self.read_into(py, rows, slots.len(), |lent| match lent {
            None => self.store.submit_read(&slots),
            Some(lent) => self.store.lend_read(&slots, lent),
        })
    }

    /// Start to store blocks under their keys: `keys` uint8 `[n, 32]` or 32 bytes each, and `rows` as for
    /// `submit_write`. Returns a ticket. See `ExternalStore.submit_put`.
    #[pyo3(signature = (keys, rows, owners=None))]
    fn submit_put(
        &self,
        keys: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
        owners: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let keys = key_array(keys)?;
        let owners = owners.map(|owners| owners_of(owners, keys.len())).transpose()?;
        self.submit_rows(
            rows,
            keys.len(),
            |lent| self.store.lend_put(&keys, lent, owners.as_deref()),
            |bytes| self.store.submit_put(&keys, bytes, owners.as_deref()),
        )
    }

    /// Start to read blocks by key, with `rows` as for `submit_read`. Returns a ticket.
    /// See `ExternalStore.submit_get`.
    #[pyo3(signature = (keys, rows=None))]
    fn submit_get(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, rows: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        let keys = key_array(keys)?;
        self.read_into(py, rows, keys.len(), |lent| match lent {
            None => self.store.submit_get(&keys),
            Some(lent) => self.store.lend_get(&keys, lent),
        })
    }

    /// Start to delete keys. Returns a ticket. See `ExternalStore.submit_delete`.
    fn submit_delete(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<u64> {
        let keys = key_array(keys)?;
        py.detach(|| self.store.submit_delete(&keys)).map_err(|error| to_py(&error))
    }

    /// Return whether each key has a block, bool `[n]`, without reading it. See `ExternalStore.contains`.
    fn contains<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<bool>>> {
        let keys = key_array(keys)?;
        let found = self.store.contains(&keys).map_err(|error| to_py(&error))?;
        memory::array(py, &found, |found| *found)
    }

    /// Return whether a read of each key would be a miss, bool `[n]`. See `ExternalStore.lacks`.
    fn lacks<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<bool>>> {
        let keys = key_array(keys)?;
        let found = self.store.lacks(&keys).map_err(|error| to_py(&error))?;
        memory::array(py, &found, |found| *found)
    }

    /// Forget every key, also for later processes; waits for the disk. See `ExternalStore.forget`.
    #[pyo3(signature = (revision=None))]
    fn forget(&self, py: Python<'_>, revision: Option<&str>) -> PyResult<()> {
        py.detach(|| self.store.forget(revision.map(revision_name))).map_err(|error| to_py(&error))
    }

    /// Limit the blocks of one tenant and drop excess ones; waits for the disk. Later stores of this namespace keep the
    /// quota. See `ExternalStore.set_quota`.
    fn set_quota(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::tenant)] tenant: [u8; 32],
        #[pyo3(from_py_with = args::num_blocks)] num_blocks: Option<u32>,
    ) -> PyResult<()> {
        py.detach(|| self.store.set_quota(tenant, num_blocks)).map_err(|error| to_py(&error))
    }

    /// Return how many blocks count towards a tenant's quota, and the quota; None without a quota. See
    /// `ExternalStore.quota`.
    fn quota(&self, #[pyo3(from_py_with = args::tenant)] tenant: [u8; 32]) -> PyResult<Option<(u32, u32)>> {
        self.store.quota(tenant).map_err(|error| to_py(&error))
    }

    /// Return a file descriptor that is readable after a ticket has ended, until the next `poll`. See
    /// `ExternalStore.event_fd`.
    fn event_fd(&self) -> PyResult<i32> {
        self.store.event_fd().map_err(|error| to_py(&error))
    }

    /// Return uncollected tickets that finished or expired since the last call. Never waits.
    fn poll(&self) -> PyResult<Vec<u64>> {
        self.store.poll().map_err(|error| to_py(&error))
    }

    /// Collect a ticket; waits until its deadline, or for `timeout` seconds. See `ExternalStore.wait`.
    #[pyo3(signature = (ticket, timeout=None))]
    fn wait(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::ticket)] ticket: TicketArgument,
        #[pyo3(from_py_with = args::timeout)] timeout: Option<f64>,
    ) -> PyResult<PyCompletion> {
        let ticket = ticket.0.0;
        let timeout = timeout.map(|timeout| seconds("timeout", timeout)).transpose()?;
        self.wait_until(py, ticket, timeout.and_then(|timeout| Instant::now().checked_add(timeout)))?;
        let (is_read, len) = self.store.expects(ticket).map_err(|error| to_py(&error))?;
        // Allocate first: if that fails, the ticket can still be collected.
        let mut reasons = memory::reserved(len)?;
        let width = self.bytes_per_block();
        let (ok, rows) = memory::made(py, len, |ok: &mut [bool]| {
            let mut take =
                |rows: &mut [u8]| self.store.take(ticket).map(|found| collect(&found, rows, width, &mut reasons));
            let lent = self.lent().get(&ticket).map(|lent| (lent.in_place, lent.rows.clone_ref(py)));
            let (rows, taken) = match lent {
                Some((true, rows)) => (rows.into_bound(py), py.detach(|| take(&mut []))),
                Some((false, rows)) => memory::fill_rows(rows.bind(py), "rows", [len, width], take)?,
                None => memory::made(py, [if is_read { len } else { 0 }, width], |rows| py.detach(|| take(rows)))?,
            };
            self.lent().remove(&ticket);
            taken.map_err(|error| to_py(&error))?;
            ok.iter_mut().zip(&reasons).for_each(|(ok, reason)| *ok = reason.is_empty());
            Ok::<_, PyErr>(rows.unbind())
        })?;
        Ok(PyCompletion { ticket, ok: ok.unbind(), rows: rows?, reasons: PyTuple::new(py, reasons)?.unbind() })
    }

    /// Return the counters since the store was opened.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let stats = self.store.stats().map_err(|error| to_py(&error))?;
        results::store_stats(py, &stats, self.bytes_per_block() as u64)
    }

    /// Abandon batches in flight, and delete the file of swap space. Returns False if the disk did not answer within
    /// `timeout` seconds.
    #[pyo3(signature = (timeout=5.0))]
    fn close(&self, py: Python<'_>, #[pyo3(from_py_with = args::timeout)] timeout: f64) -> PyResult<bool> {
        let timeout = seconds("timeout", timeout)?;
        Ok(py.detach(|| self.store.close(timeout)))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_details))]
    fn __exit__(&self, py: Python<'_>, _details: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py, 5.0).map(|_| ())
    }

    fn __repr__(&self) -> String {
        let geometry = self.store.geometry();
        format!(
            "SlabStore('{}', {} slots of {} bytes, {})",
            self.path.display(),
            geometry.slots,
            geometry.payload_bytes,
            if self.direct { "direct" } else { "buffered" }
        )
    }
}

/// The caller's rows for a read.
struct Lent {
    rows: Py<PyArray<u8, Ix2>>,
    /// Whether the store reads directly into them.
    in_place: bool,
}

impl PySlabStore {
    fn lent(&self) -> MutexGuard<'_, HashMap<u64, Lent>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lends the caller's rows to the store; `None` if they are not whole aligned pages.
    fn lent_rows(&self, rows: &Bound<'_, PyAny>, count: usize, is_written: bool) -> PyResult<Option<LentRows>> {
        memory::lent_rows(rows, [count, self.bytes_per_block()], is_written)
    }

    /// Submits the caller's rows: with `lend` if they are whole aligned pages, else with `copy`.
    fn submit_rows(
        &self,
        rows: &Bound<'_, PyAny>,
        count: usize,
        lend: impl FnOnce(LentRows) -> Result<u64, Error> + Send,
        copy: impl FnOnce(&[u8]) -> Result<u64, Error> + Send,
    ) -> PyResult<u64> {
        let shape = [count, self.bytes_per_block()];
        let wanted = || expected("rows", &format!("a uint8 array of shape {shape:?}"), rows);
        let submitted = match self.lent_rows(rows, count, false)? {
            Some(pages) => rows.py().detach(|| lend(pages)),
            None => memory::lend_rows(rows, shape, copy)?.ok_or_else(wanted)?,
        };
        submitted.map_err(|error| to_py(&error))
    }

    /// Submits a read, and keeps its rows for `wait`.
    fn read_into(
        &self,
        py: Python<'_>,
        rows: Option<&Bound<'_, PyAny>>,
        count: usize,
        submit: impl FnOnce(Option<LentRows>) -> Result<u64, Error> + Send,
    ) -> PyResult<u64> {
        let Some(rows) = rows else {
            return py.detach(|| submit(None)).map_err(|error| to_py(&error));
        };
        let lent = self.lent_rows(rows, count, true)?;
        let (in_place, array) = (lent.is_some(), rows.cast::<PyArray<u8, Ix2>>()?.clone().unbind());
        let rows = Lent { rows: array, in_place };
        py.detach(|| {
            // Under the lock: another thread's `poll` may report the ticket at once, and its `wait` needs the rows.
            let mut all = self.lent();
            let ticket = submit(lent)?;
            all.insert(ticket, rows);
            Ok(ticket)
        })
        .map_err(|error| to_py(&error))
    }

    /// Waits in slices, so that a keyboard interrupt is handled promptly.
    fn wait_until(&self, py: Python<'_>, ticket: u64, until: Option<Instant>) -> PyResult<()> {
        loop {
            let left = until.map_or(SLICE, |until| until.saturating_duration_since(Instant::now()));
            let progress = py.detach(|| self.store.wait_for(ticket, left.min(SLICE))).map_err(|error| to_py(&error))?;
            if progress != Progress::Pending || left.is_zero() {
                return Ok(());
            }
            py.check_signals()?;
        }
    }
}

/// Copies the blocks that were read, and adds each block's reason.
fn collect(found: &Completion, out: &mut [u8], width: usize, reasons: &mut Vec<&'static str>) {
    let mut rows = out.chunks_exact_mut(width);
    for block in found.blocks() {
        let row = rows.next();
        if let (Ok(Some(block)), Some(row)) = (block, row) {
            row.copy_from_slice(block);
        }
        reasons.push(block.map_or_else(Miss::name, |_| ""));
    }
}

fn slot_array(value: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    memory::listed(value)?.ok_or_else(|| expected("slots", "an int64 array [n]", value))
}

/// Reads keys of 32 bytes, from an array or one by one.
fn key_array(value: &Bound<'_, PyAny>) -> PyResult<Vec<[u8; 32]>> {
    match memory::copied::<u8, Ix2>(value)? {
        Some((bytes, shape)) if shape[1] == 32 => {
            Ok(bytes.chunks_exact(32).filter_map(|key| key.try_into().ok()).collect())
        }
        Some(_) => Err(expected("keys", "a uint8 array [n, 32]", value)),
        None => Vec::<[u8; 32]>::read(value, &"keys"),
    }
}

/// Reads the owners of `count` blocks from arrays of tenants and parents.
fn owners_of(value: &Bound<'_, PyAny>, count: usize) -> PyResult<Vec<Owner>> {
    let (tenants, parents) = value
        .extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()
        .map_err(|_| expected("owners", "a tuple (tenants, parents)", value))?;
    let rows = |what, value: &Bound<'_, PyAny>| {
        let refused = || expected(what, &format!("a uint8 array of shape [{count}, 32]"), value);
        let (bytes, shape) = memory::copied::<u8, Ix2>(value)?.ok_or_else(refused)?;
        if (shape[0], shape[1]) == (count, 32) { Ok(bytes) } else { Err(refused()) }
    };
    let (tenants, parents) = (rows("owners.tenants", &tenants)?, rows("owners.parents", &parents)?);
    let owner = |(tenant, parent): (&[u8], &[u8])| {
        Some(Owner { tenant: tenant.try_into().ok()?, parent: parent.try_into().ok()? })
    };
    Ok(tenants.chunks_exact(32).zip(parents.chunks_exact(32)).filter_map(owner).collect())
}

/// Returns the error for an argument that is not the required array.
fn expected(what: &str, wanted: &str, value: &Bound<'_, PyAny>) -> PyErr {
    let found = match (value.getattr("dtype"), value.getattr("shape")) {
        (Ok(dtype), Ok(shape)) => format!("an array of {dtype} {shape}"),
        _ => format!("{}", value.get_type()),
    };
    invalid(format!("{what} must be {wanted}, found {found}"))
}

fn seconds(what: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value).map_err(|_| invalid(format!("{what} is {value} seconds, must be 0 or more")))
}
