//! Arrays in: numpy where the caller has it, short Python sequences as they are.

use crate::args::{Argument, items, refused, shown};
use crate::errors::{bad_mapping, invalid, to_py, unknown_ticket};
use blockyard_core::{Counts, SequenceId, TableRows, TicketId, memory};
use numpy::ndarray::Dimension;
use numpy::{
    Element, PyArray, PyArray1, PyArray2, PyArrayDescrMethods, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2,
    PyReadwriteArray2, PyUntypedArray, PyUntypedArrayMethods,
};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::{PyInt, PyList};
use std::fmt::Display;
use std::ops::Range;

/// The handle of one sequence.
#[derive(Clone, Copy)]
pub(crate) struct Handle(pub(crate) SequenceId);

impl<'py> Argument<'py> for Handle {
    fn read(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
        let handle = value.extract().map_err(|error| refused(error, value, name, "a uint64 handle"));
        handle.map(|handle| Self(SequenceId(handle)))
    }
}

/// A ticket; a number that no ticket can have is an unknown one.
#[derive(Clone, Copy)]
pub(crate) struct Ticket(pub(crate) TicketId);

impl<'py> Argument<'py> for Ticket {
    fn read(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
        match value.extract::<u64>() {
            Ok(ticket) => Ok(Self(TicketId(ticket))),
            Err(_) if value.is_instance_of::<PyInt>() => {
                Err(unknown_ticket(format!("ticket {} is not open", shown(value))))
            }
            Err(error) => Err(refused(error, value, name, "the int of a decision's ticket")),
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
    fn usual(value: &Bound<'py, PyAny>) -> Option<PyResult<Self>> {
        if let Ok(list) = value.cast::<PyList>() {
            return ints(list).map(|numbers| Ok(Self::List(numbers)));
        }
        let array = value.extract::<PyReadonlyArray1<'py, T>>().ok()?;
        if array.is_c_contiguous() {
            return Some(Ok(Self::Array(array)));
        }
        // An array that repeats few numbers may be longer than memory.
        let copy = memory::with_room(array.len()).map_err(to_py);
        Some(copy.map(|mut numbers| {
            numbers.extend(array.as_array());
            Self::List(numbers)
        }))
    }

    /// A contiguous array, for calls that write to none.
    fn alone(value: &Bound<'py, PyAny>) -> Option<Self> {
        let array = value.cast::<PyArray1<T>>().ok()?;
        array.is_c_contiguous().then(|| Self::Alone(array.clone()))
    }

    /// Any sequence of numbers; `what` and `must` are for the message.
    fn new(value: &Bound<'py, PyAny>, what: &str, must: &str) -> PyResult<Self> {
        if let Some(numbers) = Self::usual(value) {
            return numbers;
        }
        let number = |item: &Bound<'py, PyAny>, _| item.extract().map_err(|error| refused(error, value, &what, must));
        items(value, &what, number).map(Self::List)
    }

    /// One number, or any sequence of them.
    fn one_or_more(value: &Bound<'py, PyAny>, what: &str, must: &str) -> PyResult<Result<T, Self>> {
        if !value.is_instance_of::<PyInt>() {
            if let Some(numbers) = Self::usual(value) {
                return numbers.map(Err);
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
        let mut numbers = memory::with_room(len).ok()?;
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
    pub(crate) fn new(value: &Bound<'py, PyAny>, name: &str) -> PyResult<Self> {
        Numbers::new(value, name, "uint32 token ids: a numpy array or a list of ints").map(Self)
    }

    /// For calls that write to no array.
    pub(crate) fn only_read(value: &Bound<'py, PyAny>, name: &str) -> PyResult<Self> {
        Numbers::alone(value).map_or_else(|| Self::new(value, name), |numbers| Ok(Self(numbers)))
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
    pub(crate) fn new(value: &Bound<'py, PyAny>, name: &str) -> PyResult<Self> {
        let must = "one int or one a sequence, 0 to 4294967295";
        Ok(Numbers::one_or_more(value, name, must)?.map_or_else(Self::Each, Self::All))
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
    let Ok(array) = value.extract::<PyReadonlyArray2<'_, i64>>() else { return other_pairs(value) };
    if array.shape()[1] != 2 {
        return Err(bad_mapping(format!("pairs have shape {:?}, must be [n, 2]", array.shape())));
    }
    let id = |row: usize, id: i64| {
        u32::try_from(id).map_err(|_| bad_mapping(format!("pair {row} names block {id}, must be 0 to {}", u32::MAX)))
    };
    let mut pairs = memory::with_room(array.shape()[0]).map_err(to_py)?;
    for (i, row) in array.as_array().rows().into_iter().enumerate() {
        pairs.push([id(i, row[0])?, id(i, row[1])?]);
    }
    Ok(pairs)
}

/// Pairs of block ids from an array of other ints, or a sequence of pairs.
fn other_pairs(value: &Bound<'_, PyAny>) -> PyResult<Vec<[u32; 2]>> {
    let refused = |value: &Bound<'_, PyAny>| {
        bad_mapping(format!("pairs are {}, must be ints [n, 2]: an array or a sequence of pairs", describe(value)))
    };
    if let Ok(array) = value.cast::<PyUntypedArray>() {
        let is_int = matches!(array.dtype().kind(), b'i' | b'u');
        if !is_int || array.ndim() != 2 || array.shape()[1] != 2 {
            return Err(refused(value));
        }
        memory::require_items::<[i64; 2]>(array.shape()[0]).map_err(to_py)?;
        return pairs(&value.call_method1("astype", ("int64",))?);
    }
    items(value, &"pairs", |pair, at| {
        let ids = items(pair, &format_args!("pairs[{at}]"), |id, _| Ok(id.clone()))?;
        let [from, to] = &ids[..] else { return Err(refused(value)) };
        let id = |id: &Bound<'_, PyAny>| {
            let must = || format!("pair {at} names block {}, must be 0 to {}", shown(id), u32::MAX);
            id.extract::<u32>().map_err(|_| bad_mapping(must()))
        };
        Ok([id(from)?, id(to)?])
    })
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
    let Some(out) = out else { return zeros(py, len) };
    let out: Bound<'py, PyArray1<i64>> = output(&out, "int64 [tokens]")?;
    if out.len() == len { Ok(out) } else { Err(invalid(format!("out has {} slots, must have {len}", out.len()))) }
}

/// An array of zeros. One that may be larger than memory is made of a vector, for numpy's own would be a panic.
pub(crate) fn zeros<T: Element + Clone + Default>(py: Python<'_>, len: usize) -> PyResult<Bound<'_, PyArray1<T>>> {
    const SMALL: usize = 1 << 16;
    if len <= SMALL {
        return Ok(PyArray1::zeros(py, len, false));
    }
    let mut numbers = memory::with_room(len).map_err(to_py)?;
    numbers.resize(len, T::default());
    Ok(PyArray1::from_vec(py, numbers))
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
pub(crate) fn describe(value: &Bound<'_, PyAny>) -> String {
    let kind = value.get_type().name().map_or_else(|_| "unknown".to_owned(), |name| name.to_string());
    match (value.getattr("dtype"), value.getattr("shape")) {
        (Ok(dtype), Ok(shape)) => format!("{kind} of {dtype} {shape}"),
        _ => kind,
    }
}
