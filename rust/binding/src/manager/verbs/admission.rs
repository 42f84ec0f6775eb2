//! Methods that open and free sequences.

use crate::convert::args;
use crate::convert::arrays::{Handle, Tokens};
use crate::convert::errors::{invalid, to_py};
use crate::convert::memory;
use crate::manager::PyBlockManager;
use crate::manager::fit::PyFit;
use crate::manager::policies;
use crate::manager::prompts::{self, Extras, KeySpecs, PromptLike, Prompts};
use crate::manager::sequence::PySequence;
use crate::manager::shared::handles;
use blockyard_core::{Demand, Manager, PromptOptions, SequenceId};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// The error for options that need token ids, given with counts.
const KEYED: &str = "salt, lora_id, extras, chunk_tokens and preempted need token ids, not counts";

impl PyBlockManager {
    /// Opens sequences whose lengths alone are known.
    fn allocate_counts(&self, counts: &[u32], encoder: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<SequenceId>> {
        let encoder = encoder.map(|tokens| Tokens::new(tokens, "encoder_tokens")).transpose()?.map(Tokens::into_vec);
        let mut out = memory::reserved(counts.len())?;
        match encoder {
            None => self.lock().allocate(counts, &mut out),
            Some(encoder) => self.lock().allocate_encoded(counts, &encoder, &mut out),
        }
        .map_err(to_py)?;
        Ok(out)
    }
}

#[pymethods]
impl PyBlockManager {
    /// Return whether a new sequence can be admitted while keeping the watermark free, without taking blocks.
    ///
    /// It counts the blocks that the sequence holds at most at one time, until its prompt's last token, or its answer's,
    /// is computed. A prompt that fits runs to its end if it is alone.
    ///
    /// Args:
    ///     prompt: token ids, uint32 `[tokens]` or a list of ints; or a `HashedPrompt`, also with extras; or a token
    ///         count, an int, which finds no cached blocks.
    ///     salt: separates tenants, bytes; see `allocate`.
    ///     lora_id: adapter of the prompt; 0 for none.
    ///     lookahead: number of slots beyond the prompt, or of draft tokens in each append after it; a recurrent group
    ///         has a state for each.
    ///     encoder_tokens: tokens of its encoder, if there is a group with cross attention.
    ///     chunk_tokens: maximum tokens added at a time; a sliding window then needs fewer blocks at once.
    ///     max_tokens: maximum tokens of its answer, which are added one at a time.
    /// Returns:
    ///     `Fit`, true if the sequence fits now.
    /// Raises:
    ///     InvalidArgumentError: a number or a token id is out of range.
    #[pyo3(signature = (prompt, *, salt = None, lora_id = 0, lookahead = 0, encoder_tokens = 0, chunk_tokens = None, max_tokens = 0))]
    #[expect(clippy::too_many_arguments, reason = "keywords")]
    fn can_allocate(
        &self,
        prompt: &Bound<'_, PyAny>,
        salt: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
        #[pyo3(from_py_with = args::lookahead)] lookahead: u32,
        #[pyo3(from_py_with = args::encoder_tokens)] encoder_tokens: u32,
        #[pyo3(from_py_with = args::chunk_tokens)] chunk_tokens: Option<u32>,
        #[pyo3(from_py_with = args::max_tokens)] max_tokens: u32,
    ) -> PyResult<PyFit> {
        if chunk_tokens == Some(0) {
            return Err(invalid("chunk_tokens is 0, must be at least 1".to_owned()));
        }
        match PromptLike::new(prompt, &"prompt")? {
            PromptLike::Count(tokens) => {
                let chunk = chunk_tokens.unwrap_or(0);
                let demand = Demand { tokens, lookahead, encoder_tokens, chunk, answer: max_tokens };
                Ok(self.lock().can_admit(&demand).into())
            }
            PromptLike::Tokens(_) if encoder_tokens > 0 => Err(invalid(format!(
                "encoder_tokens is {encoder_tokens}, must be 0 with token ids: give a token count"
            ))),
            PromptLike::Tokens(tokens) => {
                let (specs, chunk) = (KeySpecs::one(salt, lora_id)?, chunk_tokens.unwrap_or(u32::MAX));
                let fit = self.shared.with(|manager| {
                    prompts::lend(&[tokens], &specs, &Extras::default(), |prompts| {
                        manager.can_admit_prompt(&prompts[0], chunk, lookahead, max_tokens)
                    })
                })?;
                fit.map(Into::into).map_err(to_py)
            }
        }
    }

    /// Open sequences, all or none. Each positional argument is one sequence.
    ///
    /// `allocate([40, 40])` opens one sequence, whose prompt has two token ids. `allocate(40, 40)` opens two sequences
    /// of 40 tokens.
    ///
    /// With prefix caching, a prompt shares the longest cached prefix; its last token is always computed. This step's
    /// decision loads a prefix that is only on the host (`swap_in`); the step that computes the rest must run after it.
    ///
    /// Args:
    ///     prompts: token ids of each sequence, uint32 `[tokens]` or a list of ints; or a `HashedPrompt`; or a token
    ///         count, an int. Token id 4294967295 is reserved. A sequence of 0 tokens has no blocks yet.
    ///     counts: instead of prompts, the number of tokens of each sequence, uint32 `[n]`.
    ///     salt: separates tenants: a prompt shares blocks only with prompts of the same salt. Bytes or None for all
    ///         prompts, or a list with one for each. `b""` is a salt, too.
    ///     lora_id: adapter of the prompts, 0 for none; one int, or one for each prompt.
    ///     extras: other inputs that determine what the model computes, such as images: a list of `(start, length,
    ///         digest)` with the position of the first token, the number of tokens and bytes. Prompts share a block
    ///         only if the extras of its tokens and of all before them are equal. Those of tokens that `append` adds
    ///         count too: the sequence and its forks keep them. One list for all prompts, or a list with one for each.
    ///     chunk_tokens: maximum tokens beyond the cached ones to take blocks for; `next_chunk` and `append` add the
    ///         rest. None: all at once, which is refused for a prompt longer than a block in a recurrent group with prefix
    ///         caching: the state at its last block's end would not be kept.
    ///     encoder_tokens: tokens of each sequence's encoder, if there is a group with cross attention.
    ///     preempted: whether the prompts were admitted before and lost their blocks, for instance by a preemption.
    ///         `ManagerStats` counts the hits of first admissions only.
    /// Returns:
    ///     One `Sequence` for one prompt, a tuple of them for several, uint64 `[n]` for `counts`.
    /// Raises:
    ///     OutOfBlocksError: the device has too few free blocks for all of them.
    ///     InvalidArgumentError: a token id or an extra is out of range, counts and prompts are mixed, or the number of
    ///         salts, adapters, lists of extras or encoder lengths is wrong.
    #[pyo3(signature = (*prompts, counts = None, salt = None, lora_id = None, extras = None, chunk_tokens = None,
        encoder_tokens = None, preempted = false))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn allocate<'py>(
        &self,
        prompts: &Bound<'py, PyTuple>,
        counts: Option<&Bound<'py, PyAny>>,
        salt: Option<&Bound<'py, PyAny>>,
        lora_id: Option<&Bound<'py, PyAny>>,
        extras: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = args::chunk_tokens)] chunk_tokens: Option<u32>,
        encoder_tokens: Option<&Bound<'py, PyAny>>,
        preempted: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = prompts.py();
        let is_keyed = salt.is_some() || lora_id.is_some() || extras.is_some() || chunk_tokens.is_some() || preempted;
        if let Some(counts) = counts {
            if is_keyed {
                return Err(invalid(KEYED.to_owned()));
            }
            if !prompts.is_empty() {
                return Err(invalid(format!(
                    "counts are given with {} prompts, give only one of the two",
                    prompts.len()
                )));
            }
            let counts = Tokens::new(counts, "counts")?.into_vec();
            return Ok(handles(py, &self.allocate_counts(&counts, encoder_tokens)?)?.into_any());
        }
        if prompts.is_empty() {
            return Err(invalid("prompts are missing: give token ids or counts".to_owned()));
        }
        let opened = match Prompts::new(prompts)? {
            Prompts::Counts(_) if is_keyed => return Err(invalid(KEYED.to_owned())),
            Prompts::Counts(counts) => {
                self.allocate_counts(&counts, encoder_tokens)?.into_iter().map(|id| (id, 0)).collect()
            }
            Prompts::Tokens(_) if encoder_tokens.is_some() => {
                return Err(invalid("encoder_tokens are given with token ids, must be given with counts".to_owned()));
            }
            Prompts::Tokens(tokens) => {
                let (specs, extras) = (KeySpecs::new(salt, lora_id, tokens.len())?, Extras::new(extras, tokens.len())?);
                let options = PromptOptions { chunk: chunk_tokens.unwrap_or(u32::MAX), preempted };
                let mut out = memory::reserved(tokens.len())?;
                let open = |manager: &mut Manager| {
                    prompts::lend(&tokens, &specs, &extras, |prompts| {
                        manager.allocate_prompts(prompts, options, &mut out)
                    })
                };
                self.shared.with(open)?.map_err(to_py)?;
                out
            }
        };
        let mut sequences = opened.into_iter().map(PySequence::from_core);
        match (sequences.next(), prompts.len()) {
            (Some(one), 1) => Ok(Bound::new(py, one)?.into_any()),
            (first, _) => {
                let all = first.into_iter().chain(sequences).map(|sequence| Bound::new(py, sequence));
                Ok(PyTuple::new(py, all.collect::<PyResult<Vec<_>>>()?)?.into_any())
            }
        }
    }

    /// Open sequences that share the blocks of another. A write to a shared block copies it first.
    ///
    /// If this step writes to shared blocks, it must do so even if `sequence` is freed before the step runs.
    ///
    /// Args:
    ///     sequence: handle.
    ///     count: number of sequences to open; None opens one.
    ///     shared_tokens: share only this many tokens, a multiple of the block size; the new sequence gets its own
    ///         blocks for the rest. Requires `num_tokens`.
    ///     num_tokens: number of tokens of the new sequence.
    /// Returns:
    ///     `Sequence`, or uint64 `[count]`.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    ///     SequenceStateError: the sequence has lost bytes, or this step has not written the states after its draft
    ///         tokens yet; or, with `shared_tokens`, it is not on the device, is still loading, or this step has not yet
    ///         written the recurrent state that the new tokens need.
    ///     InvalidArgumentError: `shared_tokens` is not a multiple of the block size, or exceeds either sequence's
    ///         length.
    ///     OutOfBlocksError: the device has too few free blocks for the rest.
    #[pyo3(signature = (sequence, count = None, *, shared_tokens = None, num_tokens = None))]
    fn fork<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::sequence)] sequence: Handle,
        #[pyo3(from_py_with = args::count)] count: Option<u32>,
        #[pyo3(from_py_with = args::shared_tokens)] shared_tokens: Option<u32>,
        #[pyo3(from_py_with = args::num_tokens)] num_tokens: Option<u32>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let one = |id: SequenceId| Ok(Bound::new(py, PySequence::from_core((id, 0)))?.into_any());
        match (shared_tokens, num_tokens, count) {
            (Some(shared), Some(tokens), None) => {
                one(self.lock().fork_prefix(sequence.0, shared, tokens).map_err(to_py)?)
            }
            (None, None, _) => {
                let mut out = Vec::new();
                self.lock().fork(sequence.0, count.unwrap_or(1), &mut out).map_err(to_py)?;
                match (&out[..], count) {
                    (&[id], None) => one(id),
                    _ => Ok(handles(py, &out)?.into_any()),
                }
            }
            _ => Err(invalid("shared_tokens and num_tokens must be given together, without count".to_owned())),
        }
    }

    /// Free sequences. Their blocks are free once nothing references them and no transfer leases them.
    ///
    /// A hint says what you know of the conversation that each of them belongs to. `"over"`: it will not go on, so its
    /// cached blocks are evicted first, except those that other conversations use. `"tool_call"`: the answer calls a
    /// tool, so the next turn comes when the tool has run. `"turn"`: the answer ends the turn, so the next one comes when
    /// a person writes. `eviction="adaptive"` uses hints; other policies ignore them.
    ///
    /// Args:
    ///     sequences: handles, uint64 `[n]`, a list, or one.
    ///     hint: `"over"`, `"tool_call"` or `"turn"`; None if you do not know.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    ///     InvalidArgumentError: a handle is repeated, or the hint is unknown.
    #[pyo3(signature = (sequences, *, hint = None))]
    fn free(&self, sequences: &Bound<'_, PyAny>, hint: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let hint = policies::hint(hint)?;
        self.batch(sequences, |manager, sequences| manager.free_with_hint(sequences, hint))
    }

    /// Free all sequences, for instance to start again after an exception whose effect is unknown.
    fn free_all(&self) -> PyResult<()> {
        self.lock().free_all().map_err(to_py)
    }
}
