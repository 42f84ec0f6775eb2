//! Arguments in: numpy arrays where the caller has them, short Python sequences as they are.

use crate::errors::{bad_mapping, invalid, unknown_ticket};
use crate::memory::{self, Area, Numbers, Plain, Target};
use blockyard_core::{Counts, SequenceId, TableRows, TicketId};
use numpy::ndarray::Dimension;
use numpy::{Ix1, Ix2};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList};

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

/// Any sequence of numbers, copied: what is written to the caller's arrays later changes none of them. `what` and `must`
/// are for the message.
fn numbers<'py, T>(value: &Bound<'py, PyAny>, what: &str, must: &str) -> PyResult<Vec<T>>
where
    T: Plain + TryFrom<isize> + FromPyObjectOwned<'py>,
{
    if let Some(numbers) = usual(value)? {
        return Ok(numbers);
    }
    value.extract().map_err(|_| invalid(format!("{what} are {}, must be {must}", describe(value))))
}

/// The numbers of a list of ints or an array of the right type.
fn usual<T: Plain + TryFrom<isize>>(value: &Bound<'_, PyAny>) -> PyResult<Option<Vec<T>>> {
    value.cast::<PyList>().map_or_else(|_| memory::listed(value), memory::ints)
}

/// One number, or any sequence of them.
fn one_or_more<'py, T>(value: &Bound<'py, PyAny>, what: &str, must: &str) -> PyResult<Result<T, Vec<T>>>
where
    T: Plain + TryFrom<isize> + FromPyObjectOwned<'py>,
{
    if !value.is_instance_of::<PyInt>() {
        if let Some(numbers) = usual(value)? {
            return Ok(Err(numbers));
        }
    }
    value.extract().map_or_else(|_| numbers(value, what, must).map(Err), |number| Ok(Ok(number)))
}

/// Handles of a batch of sequences: an array, any sequence of ints, or one.
pub(crate) fn sequences(value: &Bound<'_, PyAny>) -> PyResult<Vec<SequenceId>> {
    let must = "uint64 handles: a numpy array or a list of ints";
    let handles = one_or_more(value, "sequences", must)?.map_or_else(|handles| handles, |handle: u64| vec![handle]);
    Ok(handles.into_iter().map(SequenceId).collect())
}

/// Token ids of one prompt, which stay in the caller's array where they can: lent by [`memory::lend`].
pub(crate) fn token_ids<'py>(value: &Bound<'py, PyAny>) -> PyResult<Numbers<'py, u32>> {
    match Numbers::of_array(value)? {
        Some(ids) => Ok(ids),
        None => numbers(value, "token ids", "uint32: a numpy array or a list of ints").map(Numbers::List),
    }
}

/// Token counts: one for all, or one a sequence.
pub(crate) enum Tokens {
    All(u32),
    Each(Vec<u32>),
}

impl Tokens {
    pub(crate) fn new(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let must = "one int or one a sequence, 0 to 4294967295";
        Ok(one_or_more(value, "token counts", must)?.map_or_else(Self::Each, Self::All))
    }

    /// One token a sequence where nothing is said.
    pub(crate) fn or_one(value: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        value.map_or(Ok(Self::All(1)), Self::new)
    }

    pub(crate) fn get(&self) -> Counts<'_> {
        match self {
            Self::All(count) => Counts::All(*count),
            Self::Each(counts) => Counts::Each(counts),
        }
    }

    /// The counts as a list; one number stands for one sequence.
    pub(crate) fn into_vec(self) -> Vec<u32> {
        match self {
            Self::All(count) => vec![count],
            Self::Each(counts) => counts,
        }
    }
}

/// Pairs of block ids from an int64 array `[n, 2]`.
pub(crate) fn pairs(value: &Bound<'_, PyAny>) -> PyResult<Vec<[u32; 2]>> {
    let Some((ids, shape)) = memory::copied::<i64, Ix2>(value)? else {
        return Err(bad_mapping(format!("pairs are {}, must be an int64 array [n, 2]", describe(value))));
    };
    if shape[1] != 2 {
        return Err(bad_mapping(format!("pairs have shape {:?}, must be [n, 2]", shape.slice())));
    }
    let mut pairs = memory::reserved(shape[0])?;
    for (row, ids) in ids.chunks_exact(2).enumerate() {
        let id = |id: i64| {
            let must = format_args!("must be 0 to {}", u32::MAX);
            u32::try_from(id).map_err(|_| bad_mapping(format!("pair {row} names block {id}, {must}")))
        };
        pairs.push([id(ids[0])?, id(ids[1])?]);
    }
    Ok(pairs)
}

/// Block ids from an int64 array `[n]`.
pub(crate) fn ids(value: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let must = || bad_mapping(format!("blocks are {}, must be an int64 array [n]", describe(value)));
    memory::listed(value)?.ok_or_else(must)
}

/// A slot mapping of the caller's.
pub(crate) type Slots<'a, 'py> = Target<'a, 'py, i64, Ix1>;

/// An int64 array of `len`: the caller's, or a new one. Whether the caller's can be written is seen when it is.
pub(crate) fn slots<'py>(py: Python<'py>, len: usize, out: Option<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
    out.map_or_else(|| memory::zeros::<i64, _>(py, len).map(Bound::into_any), Ok)
}

/// Where slots are written.
pub(crate) fn slots_target<'a, 'py>(out: &'a Bound<'py, PyAny>, name: &'static str) -> Slots<'a, 'py> {
    Target::new(out, name, "int64 [tokens]")
}

/// The memory of a slot mapping, if it has so many slots.
pub(crate) fn exactly(slots: Area<'_, i64>, len: usize) -> PyResult<&mut [i64]> {
    let Area { items, .. } = slots;
    if items.len() == len { Ok(items) } else { Err(invalid(format!("out has {} slots, must have {len}", items.len()))) }
}

/// A block table of the caller's.
pub(crate) type Table<'a, 'py> = Target<'a, 'py, i32, Ix2>;

/// Where a block table is written.
pub(crate) fn table<'a, 'py>(table: &'a Bound<'py, PyAny>, name: &'static str) -> Table<'a, 'py> {
    Target::new(table, name, "int32 [sequences, blocks]")
}

/// The rows of a block table.
pub(crate) fn rows(table: Area<'_, i32>) -> TableRows<'_> {
    let Area { items, shape } = table;
    TableRows::new(items, shape[1])
}

/// Type of a value, and dtype and shape of an array, for messages.
pub(crate) fn describe(value: &Bound<'_, PyAny>) -> String {
    let kind = value.get_type().name().map_or_else(|_| "unknown".to_owned(), |name| name.to_string());
    match (value.getattr("dtype"), value.getattr("shape")) {
        (Ok(dtype), Ok(shape)) => format!("{kind} of {dtype} {shape}"),
        _ => kind,
    }
}
