//! Array arguments: numpy arrays, or Python sequences.

use crate::convert::args::{Argument, describe, items, refused, shown};
use crate::convert::errors::{bad_mapping, invalid, to_py, unknown_ticket};
use crate::convert::memory::{self, Area, Numbers, Plain, Target};
use blockyard_core::{Counts, SequenceId, TableRows, TicketId};
use numpy::ndarray::Dimension;
use numpy::{Ix1, Ix2, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::prelude::*;
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

/// A ticket. A number out of range counts as an unknown ticket.
#[derive(Clone, Copy)]
pub(crate) struct TicketArgument(pub(crate) TicketId);

impl<'py> Argument<'py> for TicketArgument {
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

/// Copies any sequence of numbers, so that later writes to the caller's arrays have no effect. Messages contain `what`
/// and `must`.
fn numbers<'py, T>(value: &Bound<'py, PyAny>, what: &dyn Display, must: &str) -> PyResult<Vec<T>>
where
    T: Plain + TryFrom<isize> + FromPyObjectOwned<'py>,
{
    if let Some(numbers) = usual(value)? {
        return Ok(numbers);
    }
    let number = |item: &Bound<'py, PyAny>, at| {
        item.extract().map_err(|error| {
            if !item.is_instance_of::<PyInt>() {
                return refused(error, value, what, must);
            }
            let range = format!("in the range of {}", must.split(':').next().unwrap_or(must));
            refused(error, item, &format_args!("{what}[{at}]"), &range)
        })
    };
    items(value, what, number)
}

/// Reads a list of ints or an array of the right type.
fn usual<T: Plain + TryFrom<isize>>(value: &Bound<'_, PyAny>) -> PyResult<Option<Vec<T>>> {
    value.cast::<PyList>().map_or_else(|_| memory::listed(value), memory::ints)
}

/// Reads one number, or any sequence of numbers.
fn one_or_more<'py, T>(value: &Bound<'py, PyAny>, what: &str, must: &str) -> PyResult<Result<T, Vec<T>>>
where
    T: Plain + TryFrom<isize> + FromPyObjectOwned<'py>,
{
    if !value.is_instance_of::<PyInt>() {
        if let Some(numbers) = usual(value)? {
            return Ok(Err(numbers));
        }
    }
    match value.extract::<T>().map_err(Into::into) {
        Ok(number) => Ok(Ok(number)),
        Err(error) if value.try_iter().is_err() => Err(refused(error, value, &what, must)),
        Err(_) => numbers(value, &what, must).map(Err),
    }
}

/// Reads the handles of a batch of sequences: an array, any sequence of ints, or one int.
pub(crate) fn sequences(value: &Bound<'_, PyAny>) -> PyResult<Vec<SequenceId>> {
    let must = "uint64 handles: a numpy array or a list of ints";
    let handles = one_or_more(value, "sequences", must)?.map_or_else(|handles| handles, |handle: u64| vec![handle]);
    Ok(handles.into_iter().map(SequenceId).collect())
}

/// Token ids of one prompt. They stay in the caller's array if possible, lent by [`memory::lend`].
pub(crate) fn token_ids<'py>(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Numbers<'py, u32>> {
    match Numbers::of_array(value)? {
        Some(ids) => Ok(ids),
        None => numbers(value, name, "uint32 token ids: a numpy array or a list of ints").map(Numbers::List),
    }
}

/// Token counts: one for all sequences, or one for each.
pub(crate) enum Tokens {
    All(u32),
    Each(Vec<u32>),
    /// One for each, and how many of those are drafts.
    Drafted(Vec<u32>, Vec<u32>),
}

impl Tokens {
    pub(crate) fn new(value: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        let must = "one int or one per sequence, 0 to 4294967295";
        Ok(one_or_more(value, name, must)?.map_or_else(Self::Each, Self::All))
    }

    /// One token per sequence by default.
    pub(crate) fn or_one(value: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        value.map_or(Ok(Self::All(1)), |value| Self::new(value, "num_tokens"))
    }

    pub(crate) fn get(&self) -> Counts<'_> {
        match self {
            Self::All(count) => Counts::All(*count),
            Self::Each(counts) => Counts::Each(counts),
            Self::Drafted(tokens, drafts) => Counts::Drafted { tokens, drafts },
        }
    }

    /// The same counts for `sequences` sequences, with drafts among them.
    pub(crate) fn with_drafts(self, drafts: Option<&Bound<'_, PyAny>>, sequences: usize) -> PyResult<Self> {
        let each = |tokens| match tokens {
            Self::All(count) => {
                let mut counts = memory::reserved(sequences)?;
                counts.resize(sequences, count);
                Ok(counts)
            }
            tokens => PyResult::Ok(tokens.into_vec()),
        };
        match drafts.map(|drafts| Self::new(drafts, "draft_tokens")).transpose()? {
            None | Some(Self::All(0)) => Ok(self),
            Some(drafts) => Ok(Self::Drafted(each(self)?, each(drafts)?)),
        }
    }

    /// Returns the counts as a list; one number means one sequence.
    pub(crate) fn into_vec(self) -> Vec<u32> {
        match self {
            Self::All(count) => vec![count],
            Self::Each(counts) | Self::Drafted(counts, _) => counts,
        }
    }
}

/// Tokens from `first` up to `last` of `sequences` sequences.
pub(crate) fn ranges(
    first: &Bound<'_, PyAny>,
    last: &Bound<'_, PyAny>,
    sequences: usize,
) -> PyResult<impl Iterator<Item = Range<u32>>> {
    let each = |value, name| {
        let tokens = Tokens::new(value, name)?;
        match tokens {
            Tokens::Each(each) if each.len() != sequences => Err(invalid(format!(
                "{name} has {} numbers, must have 1, or 1 for each of {sequences} sequences",
                each.len()
            ))),
            tokens => Ok(tokens),
        }
    };
    let (first, last) = (each(first, "first")?, each(last, "last")?);
    Ok((0..sequences).map(move |at| first.get().at(at)..last.get().at(at)))
}

/// Reads pairs of block ids, 0 to 4294967295: an int64 array `[n, 2]`, or anything that `id_pairs` accepts.
pub(crate) fn pairs(value: &Bound<'_, PyAny>) -> PyResult<Vec<[u32; 2]>> {
    let ids = id_pairs(value)?;
    let mut pairs = memory::reserved(ids.len())?;
    for (row, ids) in ids.into_iter().enumerate() {
        let id = |id: i64| u32::try_from(id).map_err(|_| no_block(row, &id));
        pairs.push([id(ids[0])?, id(ids[1])?]);
    }
    Ok(pairs)
}

fn no_block(row: usize, id: &dyn Display) -> PyErr {
    bad_mapping(format!("pair {row} names block {id}, must be 0 to {}", u32::MAX))
}

/// Reads pairs of ints: an int64 array `[n, 2]`, an array of other ints, or a sequence of pairs.
pub(crate) fn id_pairs(value: &Bound<'_, PyAny>) -> PyResult<Vec<[i64; 2]>> {
    if let Some((ids, shape)) = memory::copied::<i64, Ix2>(value)? {
        if shape[1] != 2 {
            return Err(bad_mapping(format!("pairs have shape {:?}, must be [n, 2]", shape.slice())));
        }
        let mut pairs = memory::reserved(shape[0])?;
        pairs.extend(ids.chunks_exact(2).map(|ids| [ids[0], ids[1]]));
        return Ok(pairs);
    }
    let refused = |value: &Bound<'_, PyAny>| {
        bad_mapping(format!("pairs are {}, must be ints [n, 2]: an array or a sequence of pairs", describe(value)))
    };
    if let Ok(array) = value.cast::<PyUntypedArray>() {
        let is_int = matches!(array.dtype().kind(), b'i' | b'u');
        if !is_int || array.ndim() != 2 || array.shape()[1] != 2 {
            return Err(refused(value));
        }
        blockyard_core::memory::require_items::<[i64; 2]>(array.shape()[0]).map_err(to_py)?;
        return id_pairs(&value.call_method1("astype", ("int64",))?);
    }
    items(value, &"pairs", |pair, at| {
        let ids = items(pair, &format_args!("pairs[{at}]"), |id, _| Ok(id.clone()))?;
        let [from, to] = &ids[..] else { return Err(refused(value)) };
        let id = |id: &Bound<'_, PyAny>| id.extract::<i64>().map_err(|_| no_block(at, &shown(id)));
        Ok([id(from)?, id(to)?])
    })
}

/// Reads block ids from an int64 array `[n]`.
pub(crate) fn ids(value: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let must = || bad_mapping(format!("blocks are {}, must be an int64 array [n]", describe(value)));
    memory::listed(value)?.ok_or_else(must)
}

/// The caller's slot mapping.
pub(crate) type Slots<'a, 'py> = Target<'a, 'py, i64, Ix1>;

/// An int64 array of `len` items: the caller's, or a new one. The caller's array is checked when it is written.
pub(crate) fn slots<'py>(py: Python<'py>, len: usize, out: Option<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
    out.map_or_else(|| memory::zeros::<i64, _>(py, len).map(Bound::into_any), Ok)
}

/// Where slots are written.
pub(crate) fn slots_target<'a, 'py>(out: &'a Bound<'py, PyAny>, name: &'static str) -> Slots<'a, 'py> {
    Target::new(out, name, "int64 [tokens]")
}

/// Returns the memory of a slot mapping if it has `len` slots.
pub(crate) fn exactly(slots: Area<'_, i64>, len: usize) -> PyResult<&mut [i64]> {
    let Area { items, .. } = slots;
    if items.len() == len { Ok(items) } else { Err(invalid(format!("out has {} slots, must have {len}", items.len()))) }
}

/// The caller's block table.
pub(crate) type TableTarget<'a, 'py> = Target<'a, 'py, i32, Ix2>;

/// Where a block table is written.
pub(crate) fn table<'a, 'py>(table: &'a Bound<'py, PyAny>, name: &'static str) -> TableTarget<'a, 'py> {
    Target::new(table, name, "int32 [sequences, blocks]")
}

/// The rows of a block table.
pub(crate) fn rows(table: Area<'_, i32>) -> TableRows<'_> {
    let Area { items, shape } = table;
    TableRows::new(items, shape[1])
}
