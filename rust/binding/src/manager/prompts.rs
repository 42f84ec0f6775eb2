//! Prompt arguments: token counts or token ids, with their salts, adapters and extras.

use crate::convert::args::{Argument, items, refused, shown};
use crate::convert::arrays;
use crate::convert::errors::invalid;
use crate::convert::memory::{self, Numbers};
use blockyard_core::{HashedPrompt, KeySpec, Prompt, PromptExtra};
use numpy::{PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyInt, PyList, PyString, PyTuple};
use std::fmt::Display;

/// (start, length, digest) of an input besides tokens that determines the bytes of a span of tokens.
pub(crate) type PyExtra = (u32, u32, PyBackedBytes);

/// A prompt whose tokens are already hashed, so that lookup and admission do not hash it again.
///
/// `manager.prefix.hash` creates it. Any manager with the same block size accepts it instead of token ids. It includes
/// salt, adapter and extras. `len()` is its number of tokens.
///
/// Example:
///     >>> from blockyard import BlockManager
///     >>> manager = BlockManager(block_size=4, device_blocks=8, prefix_caching=True)
///     >>> prompt = manager.prefix.hash([1, 2, 3, 4, 5, 6])
///     >>> len(prompt), manager.prefix.lookup(prompt).tokens
///     (6, 0)
///     >>> sequence = manager.allocate(prompt)
#[pyclass(frozen, name = "HashedPrompt", module = "blockyard._core")]
pub(crate) struct PyHashedPrompt(HashedPrompt);

impl PyHashedPrompt {
    pub(crate) const fn new(prompt: HashedPrompt) -> Self {
        Self(prompt)
    }
}

#[pymethods]
impl PyHashedPrompt {
    fn __len__(&self) -> usize {
        self.0.tokens().len()
    }

    fn __repr__(&self) -> String {
        format!("HashedPrompt({} tokens)", self.0.tokens().len())
    }
}

/// A prompt's token ids, hashed or not.
pub(crate) enum TokenIds<'py> {
    Plain(Numbers<'py, u32>),
    Hashed(Bound<'py, PyHashedPrompt>),
}

impl<'py> TokenIds<'py> {
    pub(crate) fn new(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
        match value.cast::<PyHashedPrompt>() {
            Ok(hashed) => Ok(Self::Hashed(hashed.clone())),
            Err(_) => arrays::token_ids(value, name).map(Self::Plain),
        }
    }

    fn plain(&self) -> Option<&Numbers<'py, u32>> {
        match self {
            Self::Plain(ids) => Some(ids),
            Self::Hashed(_) => None,
        }
    }

    fn hashed(&self) -> Option<&HashedPrompt> {
        match self {
            Self::Plain(_) => None,
            Self::Hashed(prompt) => Some(&prompt.get().0),
        }
    }
}

/// One prompt: its length only, or its token ids.
pub(crate) enum PromptLike<'py> {
    Count(u32),
    Tokens(TokenIds<'py>),
}

impl<'py> PromptLike<'py> {
    pub(crate) fn new(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
        if value.is_instance_of::<PyInt>() {
            return u32::read(value, name).map(Self::Count);
        }
        let is_array = value.cast::<PyUntypedArray>().is_ok_and(|array| array.ndim() > 0);
        if is_array || value.is_instance_of::<PyList>() || value.is_instance_of::<PyHashedPrompt>() {
            return TokenIds::new(value, name).map(Self::Tokens);
        }
        match value.extract() {
            Ok(count) => Ok(Self::Count(count)),
            Err(_) if value.is_instance_of::<PyString>() || value.try_iter().is_err() => {
                Err(invalid(format!("{name} is {}, must be token ids or a token count", shown(value))))
            }
            Err(_) => TokenIds::new(value, name).map(Self::Tokens),
        }
    }
}

/// Several prompts, all of one kind.
pub(crate) enum Prompts<'py> {
    Counts(Vec<u32>),
    Tokens(Vec<TokenIds<'py>>),
}

impl<'py> Prompts<'py> {
    pub(crate) fn new(prompts: &Bound<'py, PyTuple>) -> PyResult<Self> {
        let (mut counts, mut tokens) = (Vec::new(), Vec::new());
        for (i, prompt) in prompts.iter().enumerate() {
            if prompt
                .cast::<PyList>()
                .is_ok_and(|list| list.get_item(0).is_ok_and(|item| item.is_instance_of::<PyList>()))
            {
                return Err(invalid(format!(
                    "prompts[{i}] is a list of lists, pass each prompt as a separate argument: allocate([1, 2], [3])"
                )));
            }
            match PromptLike::new(&prompt, &format_args!("prompts[{i}]"))? {
                PromptLike::Count(count) => counts.push(count),
                PromptLike::Tokens(ids) => tokens.push(ids),
            }
        }
        match (counts.is_empty(), tokens.is_empty()) {
            (false, false) => {
                let (counts, tokens) = (counts.len(), tokens.len());
                Err(invalid(format!(
                    "prompts are {counts} counts and {tokens} lists of token ids, must be of one kind"
                )))
            }
            (true, _) => Ok(Self::Tokens(tokens)),
            (false, true) => Ok(Self::Counts(counts)),
        }
    }
}

/// The salts and adapters that prompts' keys depend on: one for all, or one for each.
pub(crate) struct KeySpecs(Vec<KeySpec>);

impl KeySpecs {
    pub(crate) fn new(
        salt: Option<&Bound<'_, PyAny>>,
        lora_id: Option<&Bound<'_, PyAny>>,
        prompts: usize,
    ) -> PyResult<Self> {
        let salts: Vec<Option<PyBackedBytes>> = one_or_each(salt, None, &"salt", "bytes", prompts, |value| {
            let one: PyResult<PyBackedBytes> = value.extract().map_err(PyErr::from);
            one.ok().map(|salt| Ok(Some(salt)))
        })?;
        let adapters: Vec<u64> = one_or_each(lora_id, 0, &"lora_id", "an int", prompts, |value| {
            // An array has an `__index__` too, but can be iterated.
            let is_numpy_int = || value.hasattr("__index__").unwrap_or(false) && value.try_iter().is_err();
            (value.is_instance_of::<PyInt>() || is_numpy_int()).then(|| u64::read(value, &"lora_id"))
        })?;
        if let ([salt], [adapter]) = (&salts[..], &adapters[..]) {
            return Ok(Self(vec![KeySpec::new(salt.as_deref(), *adapter)]));
        }
        let at = |i: usize| (salts.get(i).or_else(|| salts.last()), adapters.get(i).or_else(|| adapters.last()));
        let spec = |i| match at(i) {
            (Some(salt), Some(&adapter)) => KeySpec::new(salt.as_deref(), adapter),
            _ => KeySpec::default(),
        };
        Ok(Self((0..prompts).map(spec).collect()))
    }

    /// Returns the salt and adapter of one prompt.
    pub(crate) fn one(salt: Option<&Bound<'_, PyAny>>, lora_id: u64) -> PyResult<Self> {
        let read = |value: &Bound<'_, PyAny>| -> PyResult<PyBackedBytes> {
            value.extract().map_err(|error| refused(error, value, &"salt", "bytes"))
        };
        Ok(Self(vec![KeySpec::new(salt.map(read).transpose()?.as_deref(), lora_id)]))
    }

    fn at(&self, i: usize) -> KeySpec {
        self.0.get(i).or_else(|| self.0.last()).copied().unwrap_or_default()
    }
}

/// The extras of prompts: those of all, or those of each.
#[derive(Default)]
pub(crate) struct Extras(Vec<Vec<PyExtra>>);

impl Extras {
    pub(crate) fn new(extras: Option<&Bound<'_, PyAny>>, prompts: usize) -> PyResult<Self> {
        let Some(extras) = extras else { return Ok(Self(Vec::new())) };
        let all = PyList::new(extras.py(), items(extras, &"extras", |item, _| Ok(item.clone()))?)?;
        let of_all = |value: &Bound<'_, PyAny>| {
            let is_one = value.get_item(0).map_or(true, |first| !is_list_of_extras(&first));
            is_one.then(|| Vec::read(value, &"extras"))
        };
        one_or_each(Some(all.as_any()), Vec::new(), &"extras", "a list", prompts, of_all).map(Self)
    }

    /// Returns the extras of one prompt.
    pub(crate) fn one(extras: Vec<PyExtra>) -> Self {
        Self(vec![extras])
    }

    fn at(&self, i: usize) -> &[PyExtra] {
        self.0.get(i).or_else(|| self.0.last()).map_or(&[], Vec::as_slice)
    }
}

/// Whether a value can be a prompt's list of extras; an extra starts with an int.
fn is_list_of_extras(value: &Bound<'_, PyAny>) -> bool {
    let first = value.try_iter().map(|mut items| items.next());
    let is_extra = |item: Bound<'_, PyAny>| !item.is_instance_of::<PyString>() && item.try_iter().is_ok();
    first.is_ok_and(|first| first.is_none_or(|item| item.is_ok_and(is_extra)))
}

/// Reads one value for all prompts (returned as a list of one), or a list with one for each prompt. `one` reads a
/// value for all, if it is one; `must` says what one is.
fn one_or_each<'py, T: Argument<'py>>(
    value: Option<&Bound<'py, PyAny>>,
    default: T,
    name: &dyn Display,
    must: &str,
    prompts: usize,
    one: impl Fn(&Bound<'py, PyAny>) -> Option<PyResult<T>>,
) -> PyResult<Vec<T>> {
    let Some(value) = value else { return Ok(vec![default]) };
    if let Some(value) = one(value) {
        return Ok(vec![value?]);
    }
    if value.is_instance_of::<PyString>() || value.try_iter().is_err() {
        return Err(invalid(format!("{name} is {}, must be {must}, or one for each prompt", shown(value))));
    }
    let each = items(value, name, |item, at| T::read(item, &format_args!("{name}[{at}]")))?;
    if each.len() == prompts {
        Ok(each)
    } else {
        Err(invalid(format!("{name} has {} values, there are {prompts} prompts", each.len())))
    }
}

/// Calls `call` with prompts in the core's form.
pub(crate) fn lend<R>(
    prompts: &[TokenIds<'_>],
    specs: &KeySpecs,
    extras: &Extras,
    call: impl FnOnce(&[Prompt<'_>]) -> R + Send,
) -> PyResult<R> {
    let hashed: Vec<_> = prompts.iter().map(TokenIds::hashed).collect();
    let is_keyed = |i: usize| specs.at(i) != KeySpec::default() || !extras.at(i).is_empty();
    if let Some(i) = (0..hashed.len()).find(|&i| hashed[i].is_some() && is_keyed(i)) {
        let must = "must be passed to prefix.hash";
        return Err(invalid(format!("prompts[{i}] is a HashedPrompt: its salt, lora_id and extras {must}")));
    }
    let extras: Vec<Vec<PromptExtra<'_>>> =
        (0..prompts.len()).map(|i| extras.at(i).iter().map(prompt_extra).collect()).collect();
    memory::lend(prompts.iter().filter_map(TokenIds::plain), |plain| {
        let mut plain = plain.iter();
        let prompts = hashed.iter().enumerate().map(|(i, hashed)| match hashed {
            Some(hashed) => hashed.prompt(),
            None => Prompt {
                tokens: plain.next().copied().unwrap_or_default(),
                spec: specs.at(i),
                extras: &extras[i],
                hashed: None,
            },
        });
        call(&prompts.collect::<Vec<_>>())
    })
}

fn prompt_extra((start, length, digest): &PyExtra) -> PromptExtra<'_> {
    PromptExtra { start: *start, length: *length, digest }
}
