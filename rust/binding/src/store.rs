//! `SlabStore`, `Completion` and `StoreStats`: the file tier as Python sees it.

use crate::convert::args::{self, Argument};
use crate::convert::arrays::Ticket;
use crate::convert::memory;
use blockyard_store::{
    BlockDevice, Completion, DirectMode, Error, Geometry, Miss, Progress, SlabFile, SlabOptions, SlabStore, Stats,
    StoreOptions,
};
use numpy::{PyArray1, PyArray2, get_array_module};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

mod classes {
    use pyo3::import_exception;

    import_exception!(blockyard.errors, InvalidArgumentError);
    import_exception!(blockyard.errors, MappingError);
    import_exception!(blockyard.errors, StoreError);
    import_exception!(blockyard.errors, StoreFullError);
    import_exception!(blockyard.errors, UnknownTicketError);
}

/// How often a waiting call looks for signals.
const SLICE: Duration = Duration::from_millis(100);

fn to_py(error: &Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::NoSpace { .. } | Error::FileTooLarge { .. } | Error::TooManySlots { .. } | Error::TooSmall { .. } => {
            classes::StoreFullError::new_err(message)
        }
        Error::SlotOutOfRange { .. } | Error::RepeatedSlot { .. } => classes::MappingError::new_err(message),
        Error::InvalidOption { .. } | Error::WrongLength { .. } => classes::InvalidArgumentError::new_err(message),
        Error::UnknownTicket { .. } => classes::UnknownTicketError::new_err(message),
        _ => classes::StoreError::new_err(message),
    }
}

fn invalid(message: String) -> PyErr {
    classes::InvalidArgumentError::new_err(message)
}

/// What became of one batch.
#[pyclass(frozen, name = "Completion", module = "blockyard._core")]
pub(crate) struct PyCompletion {
    /// The ticket that was collected.
    #[pyo3(get)]
    ticket: u64,
    ok: Py<PyArray1<bool>>,
    rows: Py<PyArray2<u8>>,
    reasons: Py<PyTuple>,
}

#[pymethods]
impl PyCompletion {
    #[new]
    fn new(
        #[pyo3(from_py_with = args::ticket)] ticket: u64,
        ok: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
        reasons: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let ok = ok.cast::<PyArray1<bool>>().map_err(|_| expected("ok", "a bool array [n]", ok))?;
        let rows =
            rows.cast::<PyArray2<u8>>().map_err(|_| expected("rows", "a uint8 array [n, bytes_per_block]", rows))?;
        let reasons = PyTuple::new(reasons.py(), Vec::<String>::read(reasons, &"reasons")?)?;
        Ok(Self { ticket, ok: ok.clone().unbind(), rows: rows.clone().unbind(), reasons: reasons.unbind() })
    }

    /// Whether each block came back or went in, bool `[n]`.
    #[getter]
    fn ok(&self, py: Python<'_>) -> Py<PyArray1<bool>> {
        self.ok.clone_ref(py)
    }

    /// The blocks that were read, uint8 `[n, bytes_per_block]`; rows of misses hold nothing of use. `[0,
    /// bytes_per_block]` for writes.
    #[getter]
    fn rows(&self, py: Python<'_>) -> Py<PyArray2<u8>> {
        self.rows.clone_ref(py)
    }

    /// Why a block is a miss, one string a block; empty where it is not.
    #[getter]
    fn reasons(&self, py: Python<'_>) -> Py<PyTuple> {
        self.reasons.clone_ref(py)
    }

    fn __getnewargs__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        (self.ticket, &self.ok, &self.rows, &self.reasons).into_pyobject(py)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let ok = self.ok.bind(py).as_any();
        let done = get_array_module(py)?.call_method1("count_nonzero", (ok,))?;
        Ok(format!("Completion(ticket={}, ok={done} of {})", self.ticket, ok.len()?))
    }
}

/// Counters of a tier since it was opened.
#[pyclass(frozen, eq, get_all, name = "StoreStats", module = "blockyard._core")]
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct PyTierStats {
    /// Blocks whose write completed.
    written_blocks: u64,
    /// Bytes of those, headers not counted.
    written_bytes: u64,
    /// Blocks whose read was checked and accepted.
    read_blocks: u64,
    /// Bytes of those, headers not counted.
    read_bytes: u64,
    /// Blocks that did not come back or go in, by reason.
    misses: BTreeMap<String, u64>,
    /// Operations that the system answered with an error.
    errors: u64,
    /// The last of those errors, in words.
    last_error: String,
    /// Bytes of blocks in flight and of results not yet collected.
    pending_bytes: u64,
}

#[pymethods]
impl PyTierStats {
    #[new]
    #[pyo3(signature = (*, written_blocks=0, written_bytes=0, read_blocks=0, read_bytes=0, misses=None, errors=0,
                        last_error="", pending_bytes=0))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments, one a counter")]
    fn new(
        #[pyo3(from_py_with = args::written_blocks)] written_blocks: u64,
        #[pyo3(from_py_with = args::written_bytes)] written_bytes: u64,
        #[pyo3(from_py_with = args::read_blocks)] read_blocks: u64,
        #[pyo3(from_py_with = args::read_bytes)] read_bytes: u64,
        #[pyo3(from_py_with = args::misses)] misses: Option<BTreeMap<String, u64>>,
        #[pyo3(from_py_with = args::errors)] errors: u64,
        last_error: &str,
        #[pyo3(from_py_with = args::pending_bytes)] pending_bytes: u64,
    ) -> Self {
        let last_error = last_error.to_owned();
        let misses = misses.unwrap_or_default();
        Self { written_blocks, written_bytes, read_blocks, read_bytes, misses, errors, last_error, pending_bytes }
    }

    /// Reads whose header or payload checksum did not match.
    #[getter]
    fn checksum_failures(&self) -> u64 {
        self.sum(&[Miss::HeaderChecksum, Miss::PayloadChecksum])
    }

    /// Reads that came back from storage and were refused, for any reason.
    #[getter]
    fn damaged_blocks(&self) -> u64 {
        self.sum(&[
            Miss::Magic,
            Miss::Version,
            Miss::HeaderChecksum,
            Miss::Namespace,
            Miss::Key,
            Miss::Slot,
            Miss::Generation,
            Miss::Length,
            Miss::PayloadChecksum,
            Miss::Truncated,
        ])
    }

    /// All counters, for JSON.
    fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (name, value) in [
            ("written_blocks", self.written_blocks),
            ("written_bytes", self.written_bytes),
            ("read_blocks", self.read_blocks),
            ("read_bytes", self.read_bytes),
            ("checksum_failures", self.checksum_failures()),
            ("damaged_blocks", self.damaged_blocks()),
            ("errors", self.errors),
            ("pending_bytes", self.pending_bytes),
        ] {
            dict.set_item(name, value)?;
        }
        dict.set_item("last_error", &self.last_error)?;
        dict.set_item("misses", &self.misses)?;
        Ok(dict)
    }

    /// What the constructor takes, by name.
    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<((), Bound<'py, PyDict>)> {
        let counters = self.as_dict(py)?;
        counters.del_item("checksum_failures")?;
        counters.del_item("damaged_blocks")?;
        Ok(((), counters))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("StoreStats({})", self.as_dict(py)?.repr()?))
    }
}

impl PyTierStats {
    fn from_store(stats: Stats, bytes_per_block: u64) -> Self {
        let seen = Miss::ALL.into_iter().map(|miss| (miss.name().to_owned(), stats.misses[miss.index()]));
        Self {
            written_blocks: stats.written_blocks,
            written_bytes: stats.written_blocks * bytes_per_block,
            read_blocks: stats.read_blocks,
            read_bytes: stats.read_blocks * bytes_per_block,
            misses: seen.filter(|(_, count)| *count > 0).collect(),
            errors: stats.errors,
            last_error: stats.last_error,
            pending_bytes: stats.pending_bytes,
        }
    }

    fn sum(&self, misses: &[Miss]) -> u64 {
        misses.iter().filter_map(|miss| self.misses.get(miss.name())).sum()
    }
}

/// Slot-addressed swap space in one preallocated file; `blockyard.stores.open_store` opens it by URL.
#[pyclass(frozen, name = "SlabStore", module = "blockyard._core")]
pub(crate) struct PySlabStore {
    store: SlabStore,
    path: PathBuf,
    direct: bool,
    notes: Vec<String>,
}

#[pymethods]
impl PySlabStore {
    #[new]
    #[pyo3(signature = (directory, *, bytes_per_block, size=None, num_slots=None, threads=4, direct="auto",
                        memory=1_073_741_824, deadline=10.0, namespace=[0; 32]))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments, one an option of the URL")]
    fn new(
        py: Python<'_>,
        directory: PathBuf,
        #[pyo3(from_py_with = args::bytes_per_block)] bytes_per_block: usize,
        #[pyo3(from_py_with = args::size)] size: Option<u64>,
        #[pyo3(from_py_with = args::num_slots)] num_slots: Option<u64>,
        #[pyo3(from_py_with = args::threads)] threads: usize,
        direct: &str,
        #[pyo3(from_py_with = args::memory)] memory: u64,
        #[pyo3(from_py_with = args::deadline)] deadline: f64,
        #[pyo3(from_py_with = args::namespace)] namespace: [u8; 32],
    ) -> PyResult<Self> {
        let direct = match direct {
            "auto" => DirectMode::Auto,
            "on" => DirectMode::On,
            "off" => DirectMode::Off,
            other => return Err(invalid(format!("direct is '{other}', must be 'auto', 'on' or 'off'"))),
        };
        let patience = seconds("deadline", deadline)?;
        py.detach(|| {
            let geometry = Geometry::fit(bytes_per_block, size, num_slots)?;
            let options = StoreOptions { geometry, namespace, threads, memory_bytes: memory, patience };
            options.check()?;
            let slab = SlabFile::create(&SlabOptions { directory, geometry, namespace, direct })?;
            let (path, direct, notes) = (slab.path().to_owned(), slab.direct(), slab.notes().to_vec());
            let device: Arc<dyn BlockDevice> = Arc::new(slab);
            Ok(Self { store: SlabStore::open(device, options)?, path, direct, notes })
        })
        .map_err(|error| to_py(&error))
    }

    /// Slots, numbered from 0.
    #[getter]
    fn num_slots(&self) -> u32 {
        self.store.geometry().slots
    }

    /// Bytes that one slot holds for the caller.
    #[getter]
    fn bytes_per_block(&self) -> usize {
        self.store.geometry().payload_bytes
    }

    /// Bytes from slot to slot in the file, header and padding included.
    #[getter]
    fn slot_bytes(&self) -> usize {
        self.store.geometry().stride()
    }

    /// Bytes of the whole file.
    #[getter]
    fn file_bytes(&self) -> u64 {
        self.store.geometry().total()
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

    /// What the file system did not allow, in words.
    #[getter]
    fn notes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.notes)
    }

    /// Where a slot's header begins in the file, in bytes.
    fn slot_offset(&self, #[pyo3(from_py_with = args::slot)] slot: i64) -> PyResult<u64> {
        let geometry = self.store.geometry();
        let found = u32::try_from(slot).ok().filter(|&found| found < geometry.slots);
        let missing = || to_py(&Error::SlotOutOfRange { slot, slots: geometry.slots });
        found.map(|found| geometry.offset(found)).ok_or_else(missing)
    }

    /// Start to write blocks: `slots` int64 `[n]`, `rows` uint8 `[n, bytes_per_block]`, of any layout. The bytes are
    /// copied before this returns a ticket. See `ExternalStore.submit_write`.
    fn submit_write(&self, slots: &Bound<'_, PyAny>, rows: &Bound<'_, PyAny>) -> PyResult<u64> {
        let slots = slot_array(slots)?;
        let shape = [slots.len(), self.bytes_per_block()];
        let submitted = memory::lend_rows(rows, shape, |bytes| self.store.submit_write(&slots, bytes))?;
        let wanted = || expected("rows", &format!("a uint8 array of shape {shape:?}"), rows);
        submitted.ok_or_else(wanted)?.map_err(|error| to_py(&error))
    }

    /// Start to read blocks: `slots` int64 `[n]`. Returns a ticket. See `ExternalStore.submit_read`.
    fn submit_read(&self, py: Python<'_>, slots: &Bound<'_, PyAny>) -> PyResult<u64> {
        let slots = slot_array(slots)?;
        py.detach(|| self.store.submit_read(&slots)).map_err(|error| to_py(&error))
    }

    /// Tickets that finished or expired since the last call, not collected yet. Never waits.
    fn poll(&self) -> PyResult<Vec<u64>> {
        self.store.poll().map_err(|error| to_py(&error))
    }

    /// Collect a ticket; waits until its deadline, or for `timeout` seconds. Blocks that were read go into `out`,
    /// uint8 `[n, bytes_per_block]`, or into new rows. See `ExternalStore.wait`.
    #[pyo3(signature = (ticket, timeout=None, out=None))]
    fn wait(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::ticket)] ticket: Ticket,
        #[pyo3(from_py_with = args::timeout)] timeout: Option<f64>,
        out: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyCompletion> {
        let ticket = ticket.0.0;
        let timeout = timeout.map(|timeout| seconds("timeout", timeout)).transpose()?;
        self.wait_until(py, ticket, timeout.and_then(|timeout| Instant::now().checked_add(timeout)))?;
        let (is_read, len) = self.store.expects(ticket).map_err(|error| to_py(&error))?;
        // Memory first: without it the ticket can still be collected.
        let mut reasons = memory::reserved(len)?;
        let width = self.bytes_per_block();
        let (ok, rows) = memory::made(py, len, |ok: &mut [bool]| {
            let mut take =
                |rows: &mut [u8]| self.store.take(ticket).map(|found| collect(&found, rows, width, &mut reasons));
            let (rows, taken) = match out.filter(|_| is_read) {
                Some(out) => memory::fill_rows(out, "out", [len, width], take)?,
                None => memory::made(py, [if is_read { len } else { 0 }, width], |rows| py.detach(|| take(rows)))?,
            };
            taken.map_err(|error| to_py(&error))?;
            ok.iter_mut().zip(&reasons).for_each(|(ok, reason)| *ok = reason.is_empty());
            Ok::<_, PyErr>(rows.unbind())
        })?;
        Ok(PyCompletion { ticket, ok: ok.unbind(), rows: rows?, reasons: PyTuple::new(py, reasons)?.unbind() })
    }

    /// Counters since the store was opened.
    fn stats(&self) -> PyResult<PyTierStats> {
        let stats = self.store.stats().map_err(|error| to_py(&error))?;
        Ok(PyTierStats::from_store(stats, self.bytes_per_block() as u64))
    }

    /// Give up what is under way and remove the file. Returns False if the disk did not answer within `timeout`
    /// seconds.
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
        let io = if self.direct { "direct" } else { "buffered" };
        format!(
            "SlabStore('{}', {} slots of {} bytes, {io})",
            self.path.display(),
            geometry.slots,
            geometry.payload_bytes
        )
    }
}

impl PySlabStore {
    /// Waits in slices, so that an interrupt from the keyboard is not held up.
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

/// Copies what was read, and says why what was not is a miss.
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

/// The error for an argument that is not the array it must be; says what it is.
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
