//! Keys of full blocks in V0's form: Python ints.

use super::require;
use crate::convert::args;
use crate::convert::errors::{invalid, to_py};
use blockyard_core::hash::Chain;
use blockyard_core::{Extra, Key, KeySpec};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt};

/// A key that Python sees as an int of 256 bits; other ints are reduced modulo 2^256.
#[derive(Clone, Copy)]
pub(super) struct IntKey(pub(super) Key);

impl<'py> IntoPyObject<'py> for IntKey {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let bytes = PyBytes::new(py, &self.0.to_bytes());
        py.get_type::<PyInt>().call_method1(intern!(py, "from_bytes"), (bytes, intern!(py, "big")))
    }
}

impl<'py> FromPyObject<'_, 'py> for IntKey {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let py = value.py();
        value.cast::<PyInt>()?;
        let to_bytes = |value: &Bound<'py, PyAny>| {
            value.call_method1(intern!(py, "to_bytes"), (32, intern!(py, "big")))?.extract::<[u8; 32]>()
        };
        let bytes = to_bytes(&value).or_else(|_| {
            let end = PyInt::new(py, 1).lshift(256)?;
            to_bytes(&value.rem(end)?)
        });
        Ok(Self(Key::from_bytes(&bytes?)))
    }
}

/// Returns the keys of the full blocks of `tokens`, which follow `parent`.
pub(super) fn chain(parent: Option<Key>, tokens: &[i64], block_size: usize, extra: Option<i64>) -> PyResult<Vec<Key>> {
    let size = u32::try_from(block_size).ok().filter(|&size| size > 0);
    let size = size.ok_or_else(|| invalid(format!("block_size is {block_size}, must be at least 1")))?;
    // Engines use -1 for an unknown token; real ids are below 2^31.
    let known = |&token: &i64| u32::try_from(if token < 0 { (1 << 31) - token } else { token });
    let known = tokens.iter().map(known).collect::<Result<Vec<u32>, _>>();
    let known = known.map_err(|_| invalid("token ids must be below 4294967295".to_owned()))?;
    let extra = extra.map(|extra| extra.to_string().into_bytes());
    let extra = extra.as_ref().map(|bytes| Extra { kind: 0, bytes });
    let mut last = parent.unwrap_or_else(|| Chain::new(&KeySpec::default(), size, 0).key());
    let next = |block| {
        last = last.child(block, extra.as_slice()).map_err(to_py)?;
        Ok(last)
    };
    known.chunks_exact(block_size).map(next).collect()
}

/// Returns the key of one full block.
pub(super) fn one(parent: Option<Key>, tokens: &[i64], extra: Option<i64>) -> PyResult<Key> {
    require(!tokens.is_empty(), || "a block without tokens has no key".to_owned())?;
    chain(parent, tokens, tokens.len(), extra).map(|keys| keys[0])
}

/// Return the keys of the full blocks of `token_ids`, which follow `parent`; a negative id is an unknown token.
#[pyfunction]
#[pyo3(name = "v0_hash_blocks")]
#[expect(clippy::needless_pass_by_value, reason = "extracted from Python lists")]
pub(crate) fn hash_blocks<'py>(
    py: Python<'py>,
    parent: Option<Bound<'py, PyAny>>,
    #[pyo3(from_py_with = args::token_ids)] token_ids: Vec<i64>,
    #[pyo3(from_py_with = args::block_size)] block_size: usize,
    #[pyo3(from_py_with = args::extra_hash)] extra_hash: Option<i64>,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let parent = parent.map(|parent| parent.extract::<IntKey>()).transpose()?;
    let keys = chain(parent.map(|IntKey(key)| key), &token_ids, block_size, extra_hash)?;
    keys.into_iter().map(|key| IntKey(key).into_pyobject(py)).collect()
}
