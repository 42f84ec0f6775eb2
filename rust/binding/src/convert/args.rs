//! Arguments that are numbers or sequences. Errors name the argument and its range, and no `__len__` is trusted.
//!
//! `#[pyo3(from_py_with = args::num_tokens)] num_tokens: u32` reads a number this way; [`named`] defines a function for
//! each name.

use crate::convert::errors::{invalid, to_py};
use blockyard_core::memory;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict, PyFloat, PyInt, PyList, PyString};
use std::collections::BTreeMap;
use std::fmt::Display;

/// Maximum length of a sequence that is neither a list nor an array: such a sequence can be endless and use no memory.
const MAX_ITEMS: usize = 1 << 24;

/// A type that can be read from a Python object, with the argument's name for errors.
pub(crate) trait Argument<'py>: Sized {
    fn read(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self>;
}

/// Defines, for each name, a function that reads the argument of that name.
macro_rules! named {
    ($($name:ident)*) => {
        $(pub(crate) fn $name<'py, T: Argument<'py>>(value: &Bound<'py, PyAny>) -> PyResult<T> {
            T::read(value, &stringify!($name))
        })*
    };
}

named! {
    after arena block block_bytes block_size blocks budget bytes bytes_per_block cache_group cached_tokens chunk
    chunk_tokens commands connect_timeout count db deadline depth depths device_blocks device_bytes dst_blocks
    encoder_tokens ended extent_bytes external_blocks external_bytes extras first free free_bytes goals group groups
    handle head_bytes host_blocks host_bytes host_copies_per_step hot ids job keys last lease lengths limit lookahead
    lora_id lost max_blocks max_bytes max_device_blocks max_device_bytes max_events max_moves max_open_tickets
    max_pinned max_tokens memory most moves names namespace now num_blocks num_bytes num_chunks num_slots num_threads
    num_tokens number page_class per_block pin plain point port prefix_caching priority rows rule sample_rate sequence
    sequences shared_tokens size sizes slack slot slots src_blocks tenant threads ticket timeout timeout_base times
    tokens transfers ttl_ms wanted watermark window
}

/// Returns the error for an invalid argument. Only errors about type or value are converted; others pass through.
pub(crate) fn refused(error: impl Into<PyErr>, value: &Bound<'_, PyAny>, name: &dyn Display, must: &str) -> PyErr {
    let (py, error) = (value.py(), error.into());
    let about_value = error.is_instance_of::<PyTypeError>(py)
        || error.is_instance_of::<PyOverflowError>(py)
        || error.is_instance_of::<PyValueError>(py);
    if about_value { invalid(format!("{name} is {}, must be {must}", shown(value))) } else { error }
}

/// Formats a value for a message: numbers, NumPy's too, and short strings in full.
pub(crate) fn shown(value: &Bound<'_, PyAny>) -> String {
    const MAX_REPR: usize = 60;
    let is_number = |value: &Bound<'_, PyAny>| value.is_instance_of::<PyInt>() || value.is_instance_of::<PyFloat>();
    if value.getattr("shape").and_then(|shape| shape.len()).is_ok_and(|axes| axes == 0) {
        if let Some(item) = value.call_method0("item").ok().filter(is_number) {
            return shown(&item);
        }
    }
    if is_number(value) || value.is_instance_of::<PyString>() {
        if let Some(repr) = value.repr().ok().map(|repr| repr.to_string()).filter(|repr| repr.len() <= MAX_REPR) {
            return repr;
        }
    }
    describe(value)
}

macro_rules! numbers {
    ($($kind:ty, $must:literal;)*) => {
        $(impl<'py> Argument<'py> for $kind {
            #[inline]
            fn read(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
                value.extract().map_err(|error| refused(error, value, name, $must))
            }
        })*
    };
}

numbers! {
    u16, "an int, 0 to 65535";
    u32, "an int, 0 to 4294967295";
    u64, "an int, 0 to 18446744073709551615";
    usize, "an int, 0 to 18446744073709551615";
    i32, "an int, -2147483648 to 2147483647";
    i64, "an int, -9223372036854775808 to 9223372036854775807";
    f64, "a number";
    String, "a string";
    Bound<'py, PyBytes>, "bytes";
    [u8; 32], "32 bytes";
}

impl<'py, T: Argument<'py>> Argument<'py> for Option<T> {
    fn read(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
        if value.is_none() { Ok(None) } else { T::read(value, name).map(Some) }
    }
}

impl<'py, T: Argument<'py>> Argument<'py> for Vec<T> {
    fn read(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
        items(value, name, |item, at| T::read(item, &format_args!("{name}[{at}]")))
    }
}

impl<'py> Argument<'py> for PyBackedBytes {
    fn read(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
        value.extract().map_err(|error| refused(error, value, name, "bytes"))
    }
}

impl<'py> Argument<'py> for BTreeMap<String, u64> {
    fn read(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
        let dict = value.cast::<PyDict>().map_err(|error| refused(error, value, name, "a dict"))?;
        let entry = |(key, value): (Bound<'py, PyAny>, Bound<'py, PyAny>)| {
            Ok((String::read(&key, name)?, u64::read(&value, &format_args!("{name}[{}]", shown(&key)))?))
        };
        dict.iter().map(entry).collect()
    }
}

macro_rules! tuples {
    ($($len:literal: $($item:ident)*;)*) => {
        $(impl<'py, $($item: Argument<'py>),*> Argument<'py> for ($($item,)*) {
            fn read(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
                let all = items(value, name, |item, _| Ok(item.clone()))?;
                if all.len() != $len {
                    return Err(invalid(format!("{name} has {} items, must have {}", all.len(), $len)));
                }
                let mut at = 0..;
                let mut next = || at.next().unwrap_or_default();
                Ok(($({
                    let at: usize = next();
                    $item::read(&all[at], &format_args!("{name}[{at}]"))?
                },)*))
            }
        })*
    };
}

tuples! {
    2: A B;
    3: A B C;
    4: A B C D;
}

/// Reads the items of a sequence one by one, with their indexes. Strings are rejected.
pub(crate) fn items<'py, T>(
    value: &Bound<'py, PyAny>,
    name: &dyn Display,
    mut read: impl FnMut(&Bound<'py, PyAny>, usize) -> PyResult<T>,
) -> PyResult<Vec<T>> {
    let must = "a sequence";
    if value.is_instance_of::<PyString>() {
        return Err(invalid(format!("{name} is {}, must be {must}", shown(value))));
    }
    let too_many = |len: &dyn Display| {
        invalid(format!("{name} has {len} items, must have at most {MAX_ITEMS} unless it is a list or an array"))
    };
    let is_stored = value.is_instance_of::<PyList>();
    // Check the reported length first, to reject long sequences early; it may be wrong or missing.
    match value.len() {
        Ok(len) if len > MAX_ITEMS && !is_stored => return Err(too_many(&len)),
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => return Err(too_many(&"2^63 or more")),
        _ => {}
    }
    let mut found = Vec::new();
    let iter = value.try_iter().map_err(|error| refused(error, value, name, must))?;
    for (at, item) in iter.enumerate() {
        if at == MAX_ITEMS && !is_stored {
            return Err(too_many(&format_args!("more than {MAX_ITEMS}")));
        }
        memory::make_room(&mut found, 1).map_err(to_py)?;
        found.push(read(&item?, at)?);
    }
    Ok(found)
}

impl<'py> Argument<'py> for Bound<'py, PyAny> {
    fn read(value: &Bound<'py, PyAny>, _: &dyn Display) -> PyResult<Self> {
        Ok(value.clone())
    }
}

/// A time in seconds of a monotonic clock; a bool is none.
#[derive(Clone, Copy)]
pub(crate) struct Seconds(pub(crate) f64);

impl<'py> Argument<'py> for Seconds {
    fn read(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
        let must = "a finite number of seconds, 0 or more";
        let is_bool =
            value.get_type().name().is_ok_and(|name| name.to_cow().is_ok_and(|name| name.starts_with("bool")));
        let seconds: f64 = value.extract().map_err(|error| refused(error, value, name, must))?;
        if is_bool || !(seconds >= 0.0 && seconds.is_finite()) {
            return Err(invalid(format!("{name} is {}, must be {must}", shown(value))));
        }
        Ok(Self(seconds))
    }
}

/// Describes a value's type, and an array's dtype and shape, for messages.
pub(crate) fn describe(value: &Bound<'_, PyAny>) -> String {
    let kind = value.get_type().name().map_or_else(|_| "unknown".to_owned(), |name| name.to_string());
    match (value.getattr("dtype"), value.getattr("shape")) {
        (Ok(dtype), Ok(shape)) => format!("{kind} of {dtype} {shape}"),
        _ => kind,
    }
}
