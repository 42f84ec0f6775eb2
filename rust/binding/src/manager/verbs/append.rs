//! Methods that change the length of sequences.

use crate::convert::args;
use crate::convert::arrays::{self, Handle, Tokens};
use crate::convert::errors::{invalid, to_py};
use crate::convert::memory::{self, Area};
use crate::manager::PyBlockManager;
use crate::manager::fit::PyFit;
use blockyard_core::{Append, Manager, TableRows};
use numpy::{PyArray1, PyArrayMethods};
use pyo3::prelude::*;

/// Above this many slots, a call checks for free blocks before it allocates memory for the slots.
const MANY_SLOTS: usize = 1 << 16;

#[pymethods]
impl PyBlockManager {
    /// Return whether `append` would find enough blocks: new ones, and one for each copy-on-write.
    ///
    /// Args:
    ///     sequences: handles, uint64 `[n]`, a list, or one.
    ///     num_tokens: number of tokens for each sequence, one int or uint32 `[n]`.
    ///     draft_tokens: how many of them are draft tokens, one int or uint32 `[n]`.
    ///     lookahead: number of slots beyond those tokens that each sequence also gets blocks for.
    /// Returns:
    ///     `Fit`, true if there are enough blocks.
    /// Raises:
    ///     UnknownSequenceError, SequenceStateError, InvalidArgumentError: as `append`.
    #[pyo3(signature = (sequences, num_tokens = None, *, draft_tokens = None, lookahead = 0))]
    fn can_append(
        &self,
        sequences: &Bound<'_, PyAny>,
        num_tokens: Option<&Bound<'_, PyAny>>,
        draft_tokens: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::lookahead)] lookahead: u32,
    ) -> PyResult<PyFit> {
        let sequences = arrays::sequences(sequences)?;
        let tokens = Tokens::or_one(num_tokens)?.with_drafts(draft_tokens, sequences.len())?;
        self.lock().can_append(&sequences, tokens.get(), lookahead).map(Into::into).map_err(to_py)
    }

    /// Append tokens to a batch of sequences and return their slots. A shared block is copied before it is written.
    ///
    /// Args:
    ///     sequences: handles, uint64 `[n]` without repeats, a list, or one.
    ///     num_tokens: number of tokens for each sequence, one int or uint32 `[n]`; 1 by default.
    ///     draft_tokens: how many of those tokens, the last ones, are draft tokens, one int or uint32 `[n]`; fewer than
    ///         `num_tokens`. `truncate` can then drop them in a recurrent group, too: the step writes the state after
    ///         each of the last `1 + draft_tokens` tokens to the block of the token's slot. Other groups do not need it.
    ///     token_ids: ids of those tokens, uint32 `[tokens]`, sequence by sequence, for the prefix cache. If they are
    ///         not known yet, omit them and pass them to `prefix.note_tokens` later; blocks after tokens without ids
    ///         are not published. Of the prompt's tokens, the ids given to `allocate` count, and these are not read.
    ///     lookahead: number of slots beyond those tokens that each sequence also gets blocks for, for draft tokens.
    ///     block_tables: int32 `[n or more, max_blocks]`, C-contiguous, that you keep from call to call: row i is
    ///         sequence i. Only the entries that changed since the sequence's last such call are written. If you move a
    ///         sequence to another row or array, copy its row or write it with `block_tables`. With several groups,
    ///         `[groups * m, max_blocks]`: row i of each group's `m` rows is sequence i.
    ///     out: flat int64 array to write the slots to, `[tokens]`, or `[groups * tokens]` with several groups, one
    ///         group's slots after the other's; C-contiguous, must not share memory with `block_tables`.
    /// Returns:
    ///     Slots, `block * block_size + offset`, int64 `[tokens]`; with several groups `[groups, tokens]`, without
    ///     groups with cross attention.
    /// Raises:
    ///     OutOfBlocksError: the device has too few free blocks for the whole batch.
    ///     UnknownSequenceError: there is no such sequence.
    ///     SequenceStateError: a sequence is not on the device, is still loading, or has lost bytes, or this step has
    ///         not written the states after its draft tokens yet.
    ///     InvalidArgumentError: a handle is repeated, a sequence gets as many draft tokens as tokens, or an array has
    ///         the wrong shape or dtype or is read-only.
    #[pyo3(signature = (sequences, num_tokens = None, *, token_ids = None, draft_tokens = None, lookahead = 0,
        block_tables = None, out = None))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn append<'py>(
        &self,
        sequences: &Bound<'py, PyAny>,
        num_tokens: Option<&Bound<'py, PyAny>>,
        token_ids: Option<&Bound<'py, PyAny>>,
        draft_tokens: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = args::lookahead)] lookahead: u32,
        block_tables: Option<&Bound<'py, PyAny>>,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = sequences.py();
        let sequences = arrays::sequences(sequences)?;
        let tokens = Tokens::or_one(num_tokens)?.with_drafts(draft_tokens, sequences.len())?;
        let counts = tokens.get();
        let total = counts.total(sequences.len()).map_err(to_py)?;
        let groups = self.lock().growing_groups();
        let len = usize::try_from(total).ok().and_then(|total| total.checked_mul(groups));
        let len = len.ok_or_else(|| invalid(format!("{total} tokens are too many for one call")))?;
        if len > MANY_SLOTS {
            self.lock().require_append(&sequences, counts, lookahead).map_err(to_py)?;
        }
        let token_ids = token_ids.map(|ids| arrays::token_ids(ids, &"token_ids")?.into_vec()).transpose()?;
        let out = arrays::slots(py, len, out)?;
        let append = |tables: Option<TableRows<'_>>, slots: Area<'_, i64>, manager: &mut Manager| {
            let slots = arrays::exactly(slots, len)?;
            let token_ids = token_ids.as_deref();
            let batch = Append { sequences: &sequences, counts, lookahead, token_ids, tables, slots };
            manager.append(batch).map_err(to_py)
        };
        let slots = arrays::slots_target(&out, "out");
        match block_tables {
            None => memory::write(slots, || self.lock(), |slots, manager| append(None, slots, manager))?,
            Some(table) => memory::write_both(
                arrays::table(table, "block_tables"),
                slots,
                || self.lock(),
                |table, slots, manager| append(Some(arrays::rows(table)), slots, manager),
            )?,
        }?;
        if groups == 1 {
            return Ok(out);
        }
        Ok(out.cast::<PyArray1<i64>>()?.reshape([groups, len / groups])?.into_any())
    }

    /// Return how many tokens of a sequence's prompt to append next.
    ///
    /// With a recurrent group and prefix caching, a chunk ends at the prompt's next resume point: the state there is
    /// cached. An `append` of more tokens passes it over.
    ///
    /// Args:
    ///     sequence: handle of a sequence that was allocated with `chunk_tokens`.
    ///     budget: maximum number of tokens.
    /// Returns:
    ///     Number of tokens, at most `budget`; 0 once the whole prompt has been appended.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    fn next_chunk(
        &self,
        #[pyo3(from_py_with = args::sequence)] sequence: Handle,
        #[pyo3(from_py_with = args::budget)] budget: u32,
    ) -> PyResult<u32> {
        self.lock().next_chunk(sequence.0, budget).map_err(to_py)
    }

    /// Publish the full blocks of sequences whose tokens the model has computed.
    ///
    /// Block tables may change: a block is replaced by an existing duplicate, and blocks outside a window are freed.
    ///
    /// Args:
    ///     sequences: handles, uint64 `[n]` without repeats, a list, or one.
    ///     num_computed: how many of each sequence's first tokens are computed, uint32 `[n]`; all by default.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    ///     InvalidArgumentError: a sequence has fewer tokens, or `num_computed` does not have one entry per sequence.
    ///     SequenceStateError: a sequence has tokens that this step has not written yet.
    #[pyo3(signature = (sequences, num_computed = None))]
    fn mark_computed(&self, sequences: &Bound<'_, PyAny>, num_computed: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let sequences = arrays::sequences(sequences)?;
        let computed = num_computed.map(|computed| Tokens::new(computed, "num_computed")).transpose()?;
        let computed = computed.map(Tokens::into_vec);
        self.lock().mark_computed_to(&sequences, computed.as_deref()).map_err(to_py)
    }

    /// Truncate a sequence to its first tokens, for instance after draft tokens were rejected. Blocks without any of
    /// these tokens are freed, and so are those of an earlier lookahead.
    ///
    /// A recurrent group can drop the `draft_tokens` of the sequence's last append, until it is appended to, swapped
    /// or truncated again. Its table then has the state after the last token that stays; nothing is copied. Do not mark
    /// drafts as computed before: with prefix caching, states between them are then freed.
    ///
    /// Args:
    ///     sequence: handle.
    ///     num_tokens: number of tokens to keep.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    ///     SequenceStateError: the sequence has lost bytes, or tokens that this step has not written yet.
    ///     InvalidArgumentError: the sequence is shorter, or no longer has the window or state of that token.
    fn truncate(
        &self,
        #[pyo3(from_py_with = args::sequence)] sequence: Handle,
        #[pyo3(from_py_with = args::num_tokens)] num_tokens: u32,
    ) -> PyResult<()> {
        self.lock().truncate(sequence.0, num_tokens).map_err(to_py)
    }
}
