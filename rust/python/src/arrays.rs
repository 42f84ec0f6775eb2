//! Arrays in: numpy where the caller has it, short Python sequences as they are.

use crate::errors::{bad_mapping, invalid, unknown_ticket};
use blockyard_core::{Counts, SequenceId, TableRows, TicketId};
use numpy::ndarray::Dimension;
use numpy::{
    Element, PyArray, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyReadwriteArray2,
    PyUntypedArrayMethods,
};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::{PyInt, PyList};
use std::ops::Range;

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

/// Items of a list that are fetched before the first of them is read.
const AHEAD: usize = 64;

/// Numbers of a batch: the caller's array, or a copy of another array or of a list.
pub(crate) enum Numbers<'py, T: Element> {
    Array(PyReadonlyArray1<'py, T>),
    /// A contiguous one that is not entered among those being read, which takes long where many are views of one.
    Alone(Bound<'py, PyArray1<T>>),
    List(Vec<T>),
}

impl<'py, T> Numbers<'py, T>
where
    T: Element + Copy + TryFrom<isize> + FromPyObjectOwned<'py>,
{
    /// A list of ints or an array of the right type.
    fn usual(value: &Bound<'py, PyAny>) -> Option<Self> {
        if let Ok(list) = value.cast::<PyList>() {
            return ints(list).map(Self::List);
        }
        let array = value.extract::<PyReadonlyArray1<'py, T>>().ok()?;
        Some(if array.is_c_contiguous() { Self::Array(array) } else { Self::List(array.as_array().to_vec()) })
    }

    /// A contiguous array, for calls that write to none.
    fn alone(value: &Bound<'py, PyAny>) -> Option<Self> {
        let array = value.cast::<PyArray1<T>>().ok()?;
        array.is_c_contiguous().then(|| Self::Alone(array.clone()))
    }

    /// Any sequence of numbers; `what` and `must` are for the message.
    fn new(value: &Bound<'py, PyAny>, what: &str, must: &str) -> PyResult<Self> {
        if let Some(numbers) = Self::usual(value) {
            return Ok(numbers);
        }
        value.extract().map(Self::List).map_err(|_| invalid(format!("{what} are {}, must be {must}", describe(value))))
    }

    /// One number, or any sequence of them.
    fn one_or_more(value: &Bound<'py, PyAny>, what: &str, must: &str) -> PyResult<Result<T, Self>> {
        if !value.is_instance_of::<PyInt>() {
            if let Some(numbers) = Self::usual(value) {
                return Ok(Err(numbers));
            }
        }
        match value.extract() {
            Ok(number) => Ok(Ok(number)),
            Err(_) => Self::new(value, what, must).map(Err),
        }
    }

    pub(crate) fn get(&self) -> PyResult<&[T]> {
        Ok(match self {
            Self::Array(array) => array.as_slice()?,
            // SAFETY: the calls that take such arrays write to none while they read. Threads that write to the caller's
            // arrays at the same time are his to keep away, as they are from numpy.
            Self::Alone(array) => unsafe { array.as_slice()? },
            Self::List(list) => list,
        })
    }
}

/// The items of a list of ints, which is most of what a prompt given as a list costs; none if some item is anything else,
/// or out of range: the slow way then finds what to do or to say.
fn ints<T: TryFrom<isize>>(list: &Bound<'_, PyList>) -> Option<Vec<T>> {
    with_critical_section(list, || {
        let len = list.len();
        let mut numbers = Vec::with_capacity(len);
        let mut items = [[std::ptr::null_mut(); AHEAD]; 2];
        fetch(list, 0..len.min(AHEAD), &mut items[0]);
        while numbers.len() < len {
            let (at, [now, next]) = (numbers.len(), &mut items);
            let end = len.min(at + AHEAD);
            fetch(list, end..len.min(end + AHEAD), next);
            for &item in &now[..end - at] {
                // SAFETY: the thread is attached. The list has held its items since they were read, as neither this call
                // nor that of `fetch` runs Python code, and the critical section keeps others from changing it.
                let number = unsafe { ffi::PyLong_AsSsize_t(item) };
                let Ok(number) = T::try_from(number) else {
                    PyErr::take(list.py());
                    return None;
                };
                numbers.push(number);
            }
            items.swap(0, 1);
        }
        Some(numbers)
    })
}

/// Items of a list, valid as long as that holds them; their memory is fetched while the caller goes on.
#[inline]
fn fetch(list: &Bound<'_, PyList>, range: Range<usize>, items: &mut [*mut ffi::PyObject; AHEAD]) {
    for (at, item) in range.zip(items) {
        // SAFETY: the thread is attached and the list alive; past its end there would be null.
        *item = unsafe { ffi::PyList_GetItem(list.as_ptr(), at.try_into().unwrap_or(isize::MAX)) };
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a hint, of any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(item.cast()) };
        }
    }
}

/// Handles of a batch of sequences.
pub(crate) struct Sequences<'py>(Numbers<'py, u64>);

impl<'py> Sequences<'py> {
    pub(crate) fn new(value: &Bound<'py, PyAny>) -> PyResult<Self> {
        let must = "uint64 handles: a numpy array or a list of ints";
        let handles = Numbers::one_or_more(value, "sequences", must)?;
        Ok(Self(handles.map_or_else(|handles| handles, |handle| Numbers::List(vec![handle]))))
    }

    /// For calls that write to no array.
    pub(crate) fn only_read(value: &Bound<'py, PyAny>) -> PyResult<Self> {
        Numbers::alone(value).map_or_else(|| Self::new(value), |numbers| Ok(Self(numbers)))
    }

    pub(crate) fn get(&self) -> PyResult<&[SequenceId]> {
        let handles = self.0.get()?;
        // SAFETY: `SequenceId` is a transparent wrapper of `u64`, so the two slices have one layout.
        Ok(unsafe { std::slice::from_raw_parts(handles.as_ptr().cast::<SequenceId>(), handles.len()) })
    }
}

/// Token ids of one prompt.
pub(crate) struct TokenIds<'py>(Numbers<'py, u32>);

impl<'py> TokenIds<'py> {
    pub(crate) fn new(value: &Bound<'py, PyAny>) -> PyResult<Self> {
        Numbers::new(value, "token ids", "uint32: a numpy array or a list of ints").map(Self)
    }

    /// For calls that write to no array.
    pub(crate) fn only_read(value: &Bound<'py, PyAny>) -> PyResult<Self> {
        Numbers::alone(value).map_or_else(|| Self::new(value), |numbers| Ok(Self(numbers)))
    }

    pub(crate) fn get(&self) -> PyResult<&[u32]> {
        self.0.get()
    }
}

/// Token counts: one for all, or one a sequence.
pub(crate) enum Tokens<'py> {
    All(u32),
    Each(Numbers<'py, u32>),
}

impl<'py> Tokens<'py> {
    pub(crate) fn new(value: &Bound<'py, PyAny>) -> PyResult<Self> {
        let must = "one int or one a sequence, 0 to 4294967295";
        Ok(Numbers::one_or_more(value, "token counts", must)?.map_or_else(Self::Each, Self::All))
    }

    pub(crate) fn get(&self) -> PyResult<Counts<'_>> {
        Ok(match self {
            Self::All(count) => Counts::All(*count),
            Self::Each(counts) => Counts::Each(counts.get()?),
        })
    }

    /// The counts as a list; one number stands for one sequence.
    pub(crate) fn to_vec(&self) -> PyResult<Vec<u32>> {
        Ok(match self {
            Self::All(count) => vec![*count],
            Self::Each(counts) => counts.get()?.to_vec(),
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
