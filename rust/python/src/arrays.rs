//! Arrays in: numpy where the caller has it, short Python sequences as they are.

use crate::errors::{bad_mapping, invalid, unknown_ticket};
use blockyard_core::{Counts, SequenceId, TableRows, TicketId};
use numpy::ndarray::Dimension;
use numpy::{
    Element, PyArray, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyReadwriteArray2,
    PyUntypedArrayMethods,
};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::prelude::*;
use pyo3::types::PyInt;

/// An argument that is one number; what is no number, or out of range, gets an error that shows it.
fn number<'py, T: FromPyObjectOwned<'py>>(value: Borrowed<'_, 'py, PyAny>, must: &str) -> PyResult<T> {
    value.extract().map_err(|_| {
        let found = value.repr().map_or_else(|_| describe(&value), |repr| repr.to_string());
        invalid(format!("number is {found}, must be {must}"))
    })
}

/// A count of tokens, blocks or sequences.
pub(crate) fn count(value: &Bound<'_, PyAny>) -> PyResult<u32> {
    number(value.as_borrowed(), "an int, 0 to 4294967295")
}

/// The handle of one sequence.
#[derive(Clone, Copy)]
pub(crate) struct Handle(pub(crate) SequenceId);

impl<'py> FromPyObject<'_, 'py> for Handle {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        number(value, "a uint64 handle").map(|handle| Self(SequenceId(handle)))
    }
}

/// A ticket; a number that no ticket can have is an unknown one.
#[derive(Clone, Copy)]
pub(crate) struct Ticket(pub(crate) TicketId);

impl<'py> FromPyObject<'_, 'py> for Ticket {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match value.extract::<u64>() {
            Ok(ticket) => Ok(Self(TicketId(ticket))),
            Err(_) if value.is_instance_of::<PyInt>() => {
                let number = value.repr().map_or_else(|_| String::new(), |repr| repr.to_string());
                Err(unknown_ticket(format!("ticket {number} is not open")))
            }
            Err(_) => number(value, "the int of a decision's ticket").map(|ticket| Self(TicketId(ticket))),
        }
    }
}

/// Handles of a batch of sequences.
pub(crate) enum Sequences<'py> {
    Array(PyReadonlyArray1<'py, u64>),
    List(Vec<u64>),
}

impl<'py> Sequences<'py> {
    pub(crate) fn new(value: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(array) = value.extract::<PyReadonlyArray1<'py, u64>>() {
            return Ok(if array.is_c_contiguous() {
                Self::Array(array)
            } else {
                Self::List(array.as_array().to_vec())
            });
        }
        if let Ok(handle) = value.extract::<u64>() {
            return Ok(Self::List(vec![handle]));
        }
        value.extract().map(Self::List).map_err(|_| {
            invalid(format!(
                "sequences are {}, must be uint64 handles: a numpy array or a list of ints",
                describe(value)
            ))
        })
    }

    pub(crate) fn get(&self) -> PyResult<&[SequenceId]> {
        let handles = match self {
            Self::Array(array) => array.as_slice()?,
            Self::List(list) => list,
        };
        // SAFETY: `SequenceId` is a transparent wrapper of `u64`, so the two slices have one layout.
        Ok(unsafe { std::slice::from_raw_parts(handles.as_ptr().cast::<SequenceId>(), handles.len()) })
    }
}

/// Token ids of one prompt.
pub(crate) enum TokenIds<'py> {
    Array(PyReadonlyArray1<'py, u32>),
    List(Vec<u32>),
}

impl<'py> TokenIds<'py> {
    pub(crate) fn new(value: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(array) = value.extract::<PyReadonlyArray1<'py, u32>>() {
            return Ok(if array.is_c_contiguous() {
                Self::Array(array)
            } else {
                Self::List(array.as_array().to_vec())
            });
        }
        value.extract().map(Self::List).map_err(|_| {
            invalid(format!("token ids are {}, must be uint32: a numpy array or a list of ints", describe(value)))
        })
    }

    pub(crate) fn get(&self) -> PyResult<&[u32]> {
        Ok(match self {
            Self::Array(array) => array.as_slice()?,
            Self::List(list) => list,
        })
    }
}

/// Token counts: one for all, or one a sequence.
pub(crate) enum Tokens<'py> {
    All(u32),
    Array(PyReadonlyArray1<'py, u32>),
    List(Vec<u32>),
}

impl<'py> Tokens<'py> {
    pub(crate) fn new(value: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(count) = value.extract::<u32>() {
            return Ok(Self::All(count));
        }
        if let Ok(array) = value.extract::<PyReadonlyArray1<'py, u32>>() {
            return Ok(if array.is_c_contiguous() {
                Self::Array(array)
            } else {
                Self::List(array.as_array().to_vec())
            });
        }
        value.extract().map(Self::List).map_err(|_| {
            invalid(format!(
                "token counts are {}, must be one int or one a sequence, 0 to {}",
                describe(value),
                u32::MAX
            ))
        })
    }

    pub(crate) fn get(&self) -> PyResult<Counts<'_>> {
        Ok(match self {
            Self::All(count) => Counts::All(*count),
            Self::Array(array) => Counts::Each(array.as_slice()?),
            Self::List(list) => Counts::Each(list),
        })
    }

    /// The counts as a list; one number stands for one sequence.
    pub(crate) fn to_vec(&self) -> PyResult<Vec<u32>> {
        Ok(match self {
            Self::All(count) => vec![*count],
            Self::Array(array) => array.as_slice()?.to_vec(),
            Self::List(list) => list.clone(),
        })
    }
}

/// Pairs of block ids from an int64 array `[n, 2]`.
pub(crate) fn pairs(value: &Bound<'_, PyAny>) -> PyResult<Vec<[u32; 2]>> {
    let array: PyReadonlyArray2<'_, i64> = value
        .extract()
        .map_err(|_| bad_mapping(format!("pairs are {}, must be an int64 array [n, 2]", describe(value))))?;
    if array.shape()[1] != 2 {
        return Err(bad_mapping(format!("pairs have shape {:?}, must be [n, 2]", array.shape())));
    }
    let id = |row: usize, id: i64| {
        u32::try_from(id).map_err(|_| bad_mapping(format!("pair {row} names block {id}, must be 0 to {}", u32::MAX)))
    };
    array.as_array().rows().into_iter().enumerate().map(|(i, row)| Ok([id(i, row[0])?, id(i, row[1])?])).collect()
}

/// Block ids, contiguous.
pub(crate) type Ids<'py> = PyReadonlyArray1<'py, i64>;

/// Block ids from an int64 array `[n]`.
pub(crate) fn ids<'py>(value: &Bound<'py, PyAny>) -> PyResult<Ids<'py>> {
    match value.extract::<Ids<'py>>() {
        Ok(array) if array.is_c_contiguous() => Ok(array),
        _ => Err(bad_mapping(format!("blocks are {}, must be a C-contiguous int64 array [n]", describe(value)))),
    }
}

/// An int64 array of `len`: the caller's, or a new one.
pub(crate) fn slots<'py>(
    py: Python<'py>,
    len: usize,
    out: Option<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    let Some(out) = out else { return Ok(PyArray1::zeros(py, len, false)) };
    let out: Bound<'py, PyArray1<i64>> = output(&out, "int64 [tokens]")?;
    if out.len() == len { Ok(out) } else { Err(invalid(format!("out has {} slots, must have {len}", out.len()))) }
}

/// A block table of the caller's, int32 `[sequences, blocks]`.
pub(crate) struct Table<'py> {
    array: PyReadwriteArray2<'py, i32>,
}

impl<'py> Table<'py> {
    pub(crate) fn new(table: &Bound<'py, PyAny>) -> PyResult<Self> {
        let array: Bound<'py, PyArray2<i32>> = output(table, "int32 [sequences, blocks]")?;
        let array = array.try_readwrite();
        Ok(Self { array: array.map_err(|error| invalid(format!("the block table cannot be written: {error}")))? })
    }

    /// Zeroes all rows.
    pub(crate) fn clear(&mut self) -> PyResult<()> {
        self.array.as_slice_mut()?.fill(0);
        Ok(())
    }

    pub(crate) fn rows(&mut self) -> PyResult<TableRows<'_>> {
        let width = self.array.shape()[1];
        Ok(TableRows::new(self.array.as_slice_mut()?, width))
    }
}

/// The caller's array, if it has the element type and dimensions wanted and can be written as one slice.
pub(crate) fn output<'py, T: Element, D: Dimension>(
    out: &Bound<'py, PyAny>,
    must: &str,
) -> PyResult<Bound<'py, PyArray<T, D>>> {
    match out.cast::<PyArray<T, D>>() {
        Ok(array) if array.is_c_contiguous() => Ok(array.clone()),
        _ => Err(invalid(format!("out is {}, must be C-contiguous {must}", describe(out)))),
    }
}

/// Type of a value, and dtype and shape of an array, for messages.
fn describe(value: &Bound<'_, PyAny>) -> String {
    let kind = value.get_type().name().map_or_else(|_| "unknown".to_owned(), |name| name.to_string());
    match (value.getattr("dtype"), value.getattr("shape")) {
        (Ok(dtype), Ok(shape)) => format!("{kind} of {dtype} {shape}"),
        _ => kind,
    }
}
