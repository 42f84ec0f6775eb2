//! `RedisClient`: the connections of the Redis store.

use super::{classes, expected, invalid, seconds};
use crate::convert::args;
use crate::convert::memory;
use blockyard_redis::{Address, Answer, Client, Command, Error, Group, Options, Tls};
use numpy::{Ix2, PyArray, PyArray1, PyArray2, PyUntypedArrayMethods};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyList};
use std::path::PathBuf;

/// Commands as Python passes them.
type Commands<'py> = Vec<Vec<Bound<'py, PyBytes>>>;

/// Whether each value was stored, the answers to commands, and why nodes did not answer.
type Stored<'py> = (Bound<'py, PyArray1<bool>>, Bound<'py, PyList>, Option<String>);

/// Whether each value was found, its first bytes, the answers to other commands, and why nodes did not answer.
type Found<'py> = (Bound<'py, PyArray1<bool>>, Bound<'py, PyArray2<u8>>, Bound<'py, PyList>, Option<String>);

/// Maximum number of first bytes that `get` returns separately.
const MAX_HEAD_BYTES: usize = 4096;

fn to_py(error: &Error) -> PyErr {
    classes::StoreError::new_err(error.to_string())
}

/// Connections to a Redis or Valkey server or cluster, one for each running call. Calls block without the
/// interpreter's lock. In a cluster, a node that does not answer affects only its own values. Calls skip it until it
/// answers a probe, which a separate thread sends every second.
///
/// Args:
///     host: host name of the server, or with `transport="unix"` the path of its socket.
///     port: port of the server.
///     transport: `"tcp"`, `"tls"` or `"unix"`.
///     cluster: whether the server is a node of a cluster.
///     username, password: None for none.
///     db: database number.
///     ca, cert, key: PEM files for `"tls"`: the CA of the server's certificate; client certificate and key.
///     connect_timeout: timeout in seconds for connecting.
///     timeout: maximum seconds without an answer from the server.
/// Raises:
///     StoreError: a PEM file cannot be read.
#[pyclass(frozen, name = "RedisClient", module = "blockyard._core")]
pub(crate) struct PyRedisClient {
    client: Client,
    host: String,
}

#[pymethods]
impl PyRedisClient {
    #[new]
    #[pyo3(signature = (host, *, port=6379, transport="tcp", cluster=false, username=None, password=None, db=0, ca=None,
                        cert=None, key=None, connect_timeout=2.0, timeout=2.0))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments, one per part of the URL")]
    fn new(
        py: Python<'_>,
        host: String,
        #[pyo3(from_py_with = args::port)] port: u16,
        transport: &str,
        cluster: bool,
        username: Option<String>,
        password: Option<String>,
        #[pyo3(from_py_with = args::db)] db: i64,
        ca: Option<PathBuf>,
        cert: Option<PathBuf>,
        key: Option<PathBuf>,
        #[pyo3(from_py_with = args::connect_timeout)] connect_timeout: f64,
        #[pyo3(from_py_with = args::timeout)] timeout: f64,
    ) -> PyResult<Self> {
        let address = match transport {
            "unix" => Address::Unix(PathBuf::from(&host)),
            "tcp" => Address::Tcp { host: host.clone(), port, tls: None },
            "tls" => Address::Tcp { host: host.clone(), port, tls: Some(Tls { ca, cert, key }) },
            other => return Err(invalid(format!("transport is '{other}', must be 'tcp', 'tls' or 'unix'"))),
        };
        let (connect_timeout, timeout) = (seconds("connect_timeout", connect_timeout)?, seconds("timeout", timeout)?);
        if connect_timeout.is_zero() || timeout.is_zero() {
            return Err(invalid("connect_timeout and timeout must be more than 0 seconds".to_owned()));
        }
        let options = Options { address, is_cluster: cluster, username, password, db, connect_timeout, timeout };
        let client = py.detach(|| Client::new(options)).map_err(|error| to_py(&error))?;
        Ok(Self { client, host })
    }

    /// Store values, separately or in groups.
    ///
    /// The values of a group and its command are one transaction at the server, and the command runs last. In a
    /// cluster, all keys of a group must be in the hash slot of its first name.
    ///
    /// Args:
    ///     names: keys of the values, bytes each.
    ///     rows: uint8 `[n, width]`.
    ///     ttl_ms: milliseconds after which the server drops the values.
    ///     lengths: number of bytes of each row to store.
    ///     sizes: number of values in each group, in order; they add up to n. None for no groups.
    ///     last: the command of each group, words of bytes.
    /// Returns:
    ///     Whether the server stored each value, bool `[n]`; the answers to `last`; and None, or why nodes of a cluster
    ///     do not answer.
    /// Raises:
    ///     StoreError: the server, or every node of the cluster, does not answer.
    #[pyo3(signature = (names, rows, *, ttl_ms=None, lengths=None, sizes=None, last=None))]
    fn put<'py>(
        &self,
        #[pyo3(from_py_with = args::names)] names: Vec<PyBackedBytes>,
        rows: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = args::ttl_ms)] ttl_ms: Option<u64>,
        #[pyo3(from_py_with = args::lengths)] lengths: Option<Vec<usize>>,
        #[pyo3(from_py_with = args::sizes)] sizes: Option<Vec<usize>>,
        #[pyo3(from_py_with = args::last)] last: Option<Commands<'py>>,
    ) -> PyResult<Stored<'py>> {
        let names: Vec<_> = names.into_iter().map(|name| name.to_vec()).collect();
        let groups = groups_of(sizes.unwrap_or_default(), words_of("last", last.unwrap_or_default())?, names.len())?;
        let [count, width] = shape_of(rows, "rows", names.len())?;
        let lengths = lengths.unwrap_or_else(|| vec![width; count]);
        if lengths.len() != count || lengths.iter().any(|&length| length > width) {
            return Err(invalid(format!("lengths must be {count} ints, 0 to {width}")));
        }
        let stored = memory::lend_rows(rows, [count, width], |bytes| {
            let rows = bytes.chunks_exact(width).zip(&lengths);
            let values: Vec<&[u8]> = rows.map(|(row, &length)| &row[..length]).collect();
            self.client.put(&groups, &names, &values, ttl_ms)
        })?;
        let (answers, stored, why) = stored.ok_or_else(|| not_rows("rows", rows))?.map_err(|error| to_py(&error))?;
        Ok((memory::array(rows.py(), &stored, |stored| *stored)?, list_of(rows.py(), answers)?, why))
    }

    /// Read values into rows. A value of another length leaves its row unchanged; with `varies`, a shorter one is
    /// read and padded with zeros.
    ///
    /// Args:
    ///     names: keys of the values, bytes each.
    ///     out: uint8 `[n, width]`, C-contiguous.
    ///     varies: whether values may be shorter than rows.
    ///     head_bytes: number of first bytes of each value to return separately instead of in `out`, 0 to 4096.
    ///     first: commands, as for `run`, to run before the reads in the same round trip.
    /// Returns:
    ///     Whether each value was found, bool `[n]`; the first bytes of each, uint8 `[n, head_bytes]`, zeros if absent;
    ///     the answers to `first`; and None, or why nodes of a cluster do not answer.
    /// Raises:
    ///     StoreError: the server, or every node of the cluster, does not answer; or one refuses.
    #[pyo3(signature = (names, out, *, varies=false, head_bytes=0, first=None))]
    fn get<'py>(
        &self,
        #[pyo3(from_py_with = args::names)] names: Vec<PyBackedBytes>,
        out: &Bound<'py, PyAny>,
        varies: bool,
        #[pyo3(from_py_with = args::head_bytes)] head_bytes: u32,
        #[pyo3(from_py_with = args::first)] first: Option<Commands<'py>>,
    ) -> PyResult<Found<'py>> {
        let names: Vec<_> = names.into_iter().map(|name| name.to_vec()).collect();
        let head_bytes = head_bytes as usize;
        let first = words_of("first", first.unwrap_or_default())?;
        let [count, width] = shape_of(out, "out", names.len())?;
        if head_bytes > MAX_HEAD_BYTES {
            return Err(invalid(format!("head_bytes is {head_bytes}, must be 0 to {MAX_HEAD_BYTES}")));
        }
        let mut heads: Vec<u8> = memory::reserved(count.saturating_mul(head_bytes))?;
        heads.resize(count * head_bytes, 0);
        let (_, found) = memory::fill_rows(out, "out", [count, width], |bytes| {
            let mut rest = &mut heads[..];
            let head = |_| {
                let (head, after) = std::mem::take(&mut rest).split_at_mut(head_bytes);
                rest = after;
                head
            };
            let mut rows: Vec<_> = (0..count).map(head).zip(bytes.chunks_exact_mut(width)).collect();
            self.client.get(&first, &names, &mut rows, varies)
        })?;
        let (py, (answers, found, why)) = (out.py(), found.map_err(|error| to_py(&error))?);
        let heads = memory::filled(py, [count, head_bytes], &heads, |&byte| byte)?;
        Ok((memory::array(py, &found, |found| *found)?, heads, list_of(py, answers)?, why))
    }

    /// Run commands in one round trip; in a cluster, one to each node.
    ///
    /// Args:
    ///     commands: words of bytes each, at least one. In a cluster, the second word is the key, or the fourth of
    ///         `EVAL`; the third of `CLUSTER` is the slot.
    /// Returns:
    ///     The answer to each command: an int, bytes, None or a list; or a StoreError if the server refused it; or None
    ///     if the node of a cluster does not answer. And None, or why nodes do not answer.
    /// Raises:
    ///     StoreError: the server, or every node of the cluster, does not answer.
    fn run<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::commands)] commands: Commands<'py>,
    ) -> PyResult<(Bound<'py, PyList>, Option<String>)> {
        let commands = words_of("commands", commands)?;
        let (answers, why) = py.detach(|| self.client.run(&commands)).map_err(|error| to_py(&error))?;
        Ok((list_of(py, answers)?, why))
    }

    /// Close the idle connections.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.client.close());
    }

    fn __repr__(&self) -> String {
        format!("RedisClient('{}')", self.host)
    }
}

/// Checks the groups of the values with these names.
fn groups_of(sizes: Vec<usize>, last: Vec<Command>, count: usize) -> PyResult<Vec<Group>> {
    let total = sizes.iter().try_fold(0_usize, |total, &size| total.checked_add(size));
    if sizes.len() != last.len() || (!sizes.is_empty() && total != Some(count)) {
        let (sizes, commands) = (sizes.len(), last.len());
        return Err(invalid(format!(
            "sizes has {sizes} groups, must have one per command ({commands}) and sum to {count}"
        )));
    }
    Ok(sizes.into_iter().zip(last).collect())
}

fn words_of(name: &str, commands: Commands<'_>) -> PyResult<Vec<Command>> {
    if commands.iter().any(Vec::is_empty) {
        return Err(invalid(format!("{name} has an empty command, each must have at least one word")));
    }
    Ok(commands.into_iter().map(|words| words.into_iter().map(|word| word.as_bytes().to_vec()).collect()).collect())
}

fn not_rows(name: &str, value: &Bound<'_, PyAny>) -> PyErr {
    expected(name, "a uint8 array [n, width]", value)
}

/// Returns the shape of the rows for `count` keys.
fn shape_of(value: &Bound<'_, PyAny>, name: &str, count: usize) -> PyResult<[usize; 2]> {
    let array = value.cast::<PyArray<u8, Ix2>>().map_err(|_| not_rows(name, value))?;
    match array.shape() {
        &[found, width] if found == count && width > 0 => Ok([found, width]),
        shape => Err(invalid(format!("{name} has shape {shape:?}, must have [{count}, 1 or more]"))),
    }
}

fn list_of(py: Python<'_>, answers: Vec<Answer>) -> PyResult<Bound<'_, PyList>> {
    let answers = answers.into_iter().map(|answer| match answer {
        Answer::Nil => Ok(py.None().into_bound(py)),
        Answer::Int(number) => number.into_bound_py_any(py),
        Answer::Bytes(bytes) => Ok(PyBytes::new(py, &bytes).into_any()),
        Answer::List(answers) => list_of(py, answers).map(Bound::into_any),
        Answer::Refused(why) => Ok(classes::StoreError::new_err(why).into_value(py).into_bound(py).into_any()),
    });
    PyList::new(py, answers.collect::<PyResult<Vec<_>>>()?)
}
