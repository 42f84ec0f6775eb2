//! `BlockManager`: the core's manager. Its facets are in files of their own.

pub(crate) mod defrag;
pub(crate) mod fit;
pub(crate) mod group;
mod open_tickets;
pub(crate) mod pins;
pub(crate) mod policies;
pub(crate) mod pool;
pub(crate) mod prefix;
pub(crate) mod prompts;
pub(crate) mod sequence;
pub(crate) mod shared;
pub(crate) mod stats;

use crate::allocator::ids;
use crate::convert::args;
use crate::convert::arrays::{self, Handle, TicketArgument, Tokens};
use crate::convert::errors::{invalid, to_py};
use crate::convert::memory::{self, Area};
use crate::convert::tiers::{tier, tier_of};
use crate::decision::{PyPairs, PyStepDecision};
use crate::locks::Guard;
use crate::manager::defrag::PyDefrag;
use crate::manager::fit::PyFit;
use crate::manager::group::PyCacheGroup;
use crate::manager::open_tickets::OpenTickets;
use crate::manager::pins::PyPins;
use crate::manager::policies::CachingOptions;
use crate::manager::pool::PyPool;
use crate::manager::prefix::PyPrefix;
use crate::manager::prompts::{KeySpecs, PromptLike, Prompts, PyExtra};
use crate::manager::sequence::PySequence;
use crate::manager::shared::{Shared, handles, no_handles, row_in, rows_in};
use crate::manager::stats::PyManagerStats;
use blockyard_core::{self as core, BlockId, Config, Demand, Manager, SequenceId, TableRows, Tier};
use numpy::{PyArray1, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

/// Slots of one call that are many: whether there are blocks is asked before memory for the slots is taken.
const MANY_SLOTS: usize = 1 << 16;

/// Why options of token ids are refused where there are only counts.
const KEYED: &str = "salt, lora_id, extras or chunk_tokens are given with counts, give token ids with them";

/// Managers of this process that were numbered before.
static NUMBERED: AtomicU16 = AtomicU16::new(0);

/// The next manager's number. Handles of 65,536 managers differ.
fn next_number() -> u16 {
    NUMBERED.fetch_add(1, Relaxed).wrapping_add(1)
}

/// Tracks every block of a paged KV cache: who uses it, what it holds, and which tier it is in.
///
/// It decides who can run and which blocks to copy or move. `take_decision` returns those transfers once a step. It
/// moves no bytes itself.
///
/// Args:
///     block_size: token slots in a block, 1 to 1048576.
///     device_blocks: blocks that attention kernels read.
///     host_blocks: blocks in host memory.
///     external_blocks: slots of the external store.
///     watermark: fraction of the device blocks that admission keeps free, 0 to below 1.
///     reuse_order: which free block is taken next. `"lowest"`: the lowest id, which keeps the pool dense. `"fifo"`:
///         ids never used, then the block that came free first. `"lru"`: ids never used, then the block whose last use
///         ended first.
///     groups: cache groups of a hybrid model, a list of `CacheGroup`. Each sequence has a block table in each group;
///         all groups share the pools. None: one group with full attention.
///     prefix_caching: whether prompts share the blocks of earlier prompts that begin alike; True, False or a
///         `PrefixCaching` with options.
///     max_open_tickets: open tickets above which `take_decision` warns: a `complete` is probably missing.
/// Raises:
///     InvalidArgumentError: a size or fraction is out of range, or an option has another name.
///
/// Example:
///     >>> from blockyard import BlockManager
///     >>> manager = BlockManager(block_size=16, device_blocks=1024, host_blocks=4096)
///     >>> sequence = manager.allocate(100)
///     >>> manager.append([sequence]).tolist()
///     [100]
///     >>> manager.block_table(sequence).tolist()
///     [0, 1, 2, 3, 4, 5, 6]
#[pyclass(frozen, name = "BlockManager", module = "blockyard._core")]
pub(crate) struct PyBlockManager {
    shared: Shared,
    open_tickets: OpenTickets,
}

impl PyBlockManager {
    fn lock(&self) -> Guard<'_, Manager> {
        self.shared.lock()
    }

    /// Calls a batch method on handles.
    fn batch<T>(
        &self,
        sequences: &Bound<'_, PyAny>,
        call: impl FnOnce(&mut Manager, &[SequenceId]) -> core::Result<T>,
    ) -> PyResult<T> {
        let sequences = arrays::sequences(sequences)?;
        call(&mut self.lock(), &sequences).map_err(to_py)
    }

    /// Opens sequences of which only the lengths are known.
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

fn core_pairs(py: Python<'_>, pairs: &[Py<PyPairs>]) -> PyResult<Vec<core::Pairs>> {
    pairs.iter().map(|pairs| pairs.get().to_core(py)).collect()
}

#[pymethods]
impl PyBlockManager {
    #[new]
    #[pyo3(signature = (*, block_size, device_blocks, host_blocks = 0, external_blocks = 0, watermark = 0.01,
        reuse_order = "lowest", groups = None, prefix_caching = CachingOptions::Off, max_open_tickets = 16))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        #[pyo3(from_py_with = args::block_size)] block_size: u32,
        #[pyo3(from_py_with = args::device_blocks)] device_blocks: u32,
        #[pyo3(from_py_with = args::host_blocks)] host_blocks: u32,
        #[pyo3(from_py_with = args::external_blocks)] external_blocks: u32,
        #[pyo3(from_py_with = args::watermark)] watermark: f64,
        reuse_order: &str,
        #[pyo3(from_py_with = args::groups)] groups: Option<Vec<PyCacheGroup>>,
        #[pyo3(from_py_with = args::prefix_caching)] prefix_caching: CachingOptions,
        #[pyo3(from_py_with = args::max_open_tickets)] max_open_tickets: u32,
    ) -> PyResult<Self> {
        let blocks = [device_blocks, host_blocks, external_blocks].map(|blocks| blocks as usize);
        let config = Config { block_size, blocks, watermark, prefix_caching: prefix_caching.is_on() };
        let policies = policies::of(reuse_order, &prefix_caching)?;
        let mut manager = Manager::with_groups(config, policies, &group::groups(groups)).map_err(to_py)?;
        manager.set_number(next_number()).map_err(to_py)?;
        if let CachingOptions::On(options) = prefix_caching {
            options.apply(&mut manager)?;
        }
        Ok(Self { shared: Shared::new(manager), open_tickets: OpenTickets::new(max_open_tickets) })
    }

    /// Token slots in a block.
    #[getter]
    fn block_size(&self) -> u32 {
        self.lock().block_size()
    }

    /// The prefix cache: lookup, priorities, quotas, events.
    #[getter]
    fn prefix(&self) -> PyPrefix {
        PyPrefix::new(self.shared.clone())
    }

    /// Pins: cached blocks that a reader outside keeps, such as a connector.
    #[getter]
    fn pins(&self) -> PyPins {
        PyPins::new(self.shared.clone())
    }

    /// Defragmentation of the device pool, and its size.
    #[getter]
    fn defrag(&self) -> PyDefrag {
        PyDefrag::new(self.shared.clone())
    }

    /// Return the blocks of one tier: how many there are, which are free.
    ///
    /// Args:
    ///     tier: `"device"`, `"host"` or `"external"`.
    #[pyo3(signature = (tier = "device"))]
    fn pool(&self, tier: &str) -> PyResult<PyPool> {
        Ok(PyPool::new(self.shared.clone(), tier_of(tier)?))
    }

    /// Return whether a new sequence can be admitted while the watermark stays free.
    ///
    /// The whole prompt is counted, even if `chunk_tokens` puts it in step by step. Nothing is taken.
    ///
    /// Args:
    ///     prompt: token ids, uint32 `[tokens]` or a list of ints; or a `HashedPrompt`; or their number, an int, which
    ///         finds no cached blocks.
    ///     salt: keeps tenants apart, bytes; see `allocate`.
    ///     lora_id: adapter of the prompt; 0 for none.
    ///     lookahead: slots beyond the prompt.
    ///     encoder_tokens: tokens of its encoder, where there is a group with cross attention.
    ///     chunk_tokens: most tokens that go in at a time; a sliding window then needs fewer blocks at once.
    /// Returns:
    ///     `Fit`, true if the sequence fits now.
    /// Raises:
    ///     InvalidArgumentError: a number or a token id is out of range.
    #[pyo3(signature = (prompt, *, salt = None, lora_id = 0, lookahead = 0, encoder_tokens = 0, chunk_tokens = None))]
    fn can_allocate(
        &self,
        prompt: &Bound<'_, PyAny>,
        salt: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
        #[pyo3(from_py_with = args::lookahead)] lookahead: u32,
        #[pyo3(from_py_with = args::encoder_tokens)] encoder_tokens: u32,
        #[pyo3(from_py_with = args::chunk_tokens)] chunk_tokens: Option<u32>,
    ) -> PyResult<PyFit> {
        if chunk_tokens == Some(0) {
            return Err(invalid("chunk_tokens is 0, must be at least 1".to_owned()));
        }
        match PromptLike::new(prompt, &"prompt")? {
            PromptLike::Count(tokens) => {
                let demand = Demand { tokens, lookahead, encoder_tokens, chunk: chunk_tokens.unwrap_or(0) };
                Ok(self.lock().can_admit(&demand).into())
            }
            PromptLike::Tokens(_) if encoder_tokens > 0 => {
                Err(invalid(format!("encoder_tokens is {encoder_tokens}, must be 0 with token ids: give their number")))
            }
            PromptLike::Tokens(tokens) => {
                let (specs, chunk) = (KeySpecs::one(salt, lora_id)?, chunk_tokens.unwrap_or(u32::MAX));
                let fit = self.shared.with(|manager| {
                    prompts::lend(&[tokens], &specs, &[], |prompts| {
                        manager.can_admit_prompt(&prompts[0], chunk, lookahead)
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
    /// With prefix caching a prompt shares the longest cached prefix; its last token is always computed. A prefix that
    /// is only on the host is loaded by this step's decision (`swap_in`): the step that computes the rest runs after
    /// it.
    ///
    /// Args:
    ///     prompts: for each sequence its token ids, uint32 `[tokens]` or a list of ints; or a `HashedPrompt`; or their
    ///         number, an int. Token id 4294967295 is reserved.
    ///     counts: instead of prompts, the number of tokens of each sequence, uint32 `[n]`.
    ///     salt: keeps tenants apart: prompts share only with prompts of the same salt. Bytes or None for all prompts,
    ///         or a list with one for each. `b""` is a salt too.
    ///     lora_id: adapter of the prompts, 0 for none; one int, or one for each prompt.
    ///     extras: what else decides a block's bytes, such as an image's hash: `(prompt, block, kind, bytes)`, by
    ///         rising block.
    ///     chunk_tokens: most tokens beyond the cached ones to take blocks for; `next_chunk` and `append` put
    ///         the rest in. None: all at once.
    ///     encoder_tokens: tokens of each sequence's encoder, where there is a group with cross attention.
    /// Returns:
    ///     One `Sequence` for one prompt, a tuple of them for several, uint64 `[n]` for `counts`.
    /// Raises:
    ///     OutOfBlocksError: the device has too few free blocks for all of them.
    ///     InvalidArgumentError: a token id is out of range, counts and prompts are mixed, or there is not one salt,
    ///         adapter or encoder length for each.
    #[pyo3(signature = (*prompts, counts = None, salt = None, lora_id = None, extras = Vec::new(), chunk_tokens = None,
        encoder_tokens = None))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from a Python list")]
    fn allocate<'py>(
        &self,
        prompts: &Bound<'py, PyTuple>,
        counts: Option<&Bound<'py, PyAny>>,
        salt: Option<&Bound<'py, PyAny>>,
        lora_id: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = args::extras)] extras: Vec<PyExtra>,
        #[pyo3(from_py_with = args::chunk_tokens)] chunk_tokens: Option<u32>,
        encoder_tokens: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = prompts.py();
        let is_keyed = salt.is_some() || lora_id.is_some() || !extras.is_empty() || chunk_tokens.is_some();
        if let Some(counts) = counts {
            if is_keyed {
                return Err(invalid(KEYED.to_owned()));
            }
            if !prompts.is_empty() {
                return Err(invalid(format!("counts are given with {} prompts, give one of them", prompts.len())));
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
                return Err(invalid("encoder_tokens are given with token ids, give counts with them".to_owned()));
            }
            Prompts::Tokens(tokens) => {
                let (specs, chunk) = (KeySpecs::new(salt, lora_id, tokens.len())?, chunk_tokens.unwrap_or(u32::MAX));
                let mut out = memory::reserved(tokens.len())?;
                let open = |manager: &mut Manager| {
                    prompts::lend(&tokens, &specs, &extras, |prompts| manager.allocate_chunks(prompts, chunk, &mut out))
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

    /// Open sequences that share the blocks of one. A write to a shared block copies it first.
    ///
    /// What this step is yet to write of shared blocks must be written even if `sequence` is freed before it runs.
    ///
    /// Args:
    ///     sequence: handle.
    ///     count: of sequences to open; None opens one.
    ///     shared_tokens: share only the first tokens, a multiple of the block size; the new sequence gets blocks of
    ///         its own for the rest. Together with `num_tokens`.
    ///     num_tokens: tokens of the new sequence.
    /// Returns:
    ///     `Sequence`, or uint64 `[count]`.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    ///     SequenceStateError: the sequence has lost bytes; or, with `shared_tokens`, it is not on the device, is still
    ///         loading, or this step is yet to write the recurrent state that the new tokens need.
    ///     InvalidArgumentError: `shared_tokens` is no multiple of the block size or more than either sequence has.
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
            _ => Err(invalid("shared_tokens and num_tokens go together, without count".to_owned())),
        }
    }

    /// Free sequences. Their blocks are free once nothing references them and no transfer leases them.
    ///
    /// Args:
    ///     sequences: handles, uint64 `[n]`, a list, or one.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    ///     InvalidArgumentError: a handle is given twice.
    fn free(&self, sequences: &Bound<'_, PyAny>) -> PyResult<()> {
        self.batch(sequences, Manager::free)
    }

    /// Return whether `append` has the blocks it takes: new ones, and one for each copy-on-write.
    ///
    /// Args:
    ///     sequences: handles, uint64 `[n]`, a list, or one.
    ///     num_tokens: tokens for each sequence, one int or uint32 `[n]`.
    ///     lookahead: slots beyond those tokens for which each sequence gets blocks too.
    /// Returns:
    ///     `Fit`, true if `append` finds its blocks.
    /// Raises:
    ///     UnknownSequenceError, SequenceStateError, InvalidArgumentError: as `append`.
    #[pyo3(signature = (sequences, num_tokens = None, *, lookahead = 0))]
    fn can_append(
        &self,
        sequences: &Bound<'_, PyAny>,
        num_tokens: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::lookahead)] lookahead: u32,
    ) -> PyResult<PyFit> {
        let tokens = Tokens::or_one(num_tokens)?;
        let counts = tokens.get();
        self.batch(sequences, |manager, sequences| manager.can_append(sequences, counts, lookahead)).map(Into::into)
    }

    /// Append tokens to a batch of sequences and return their slots. A shared block is copied before it is written.
    ///
    /// Args:
    ///     sequences: handles, uint64 `[n]`, none twice; a list, or one.
    ///     num_tokens: tokens for each sequence, one int or uint32 `[n]`; 1 by default.
    ///     token_ids: ids of those tokens, uint32 `[tokens]`, sequence by sequence, for the prefix cache. Where
    ///         they are not known yet, leave them out and name them later with `prefix.note_tokens`; what is behind
    ///         tokens without ids is not published.
    ///     lookahead: slots beyond those tokens for which each sequence gets blocks too, for draft tokens.
    ///     block_tables: int32 `[n or more, max_blocks]`, C-contiguous, that the caller keeps from call to call: row i
    ///         is sequence i. Only what changed since the sequence's last such call is written. After you move a
    ///         sequence to another row or array, copy its row or write it with `block_tables`. With several groups the
    ///         rows of one group follow those of another, `n` each.
    ///     out: int64 array to write the slots to, C-contiguous; it shares no memory with `block_tables`.
    /// Returns:
    ///     Slots, `block * block_size + offset`, int64 `[tokens]`; with several groups `[groups, tokens]`, groups with
    ///     cross attention left out.
    /// Raises:
    ///     OutOfBlocksError: the device has too few free blocks for the whole batch.
    ///     UnknownSequenceError: there is no such sequence.
    ///     SequenceStateError: a sequence is not on the device, is still loading, or has lost bytes.
    ///     InvalidArgumentError: a handle is given twice, or an array has the wrong shape or dtype or cannot be
    ///         written.
    #[pyo3(signature = (sequences, num_tokens = None, *, token_ids = None, lookahead = 0, block_tables = None,
        out = None))]
    fn append<'py>(
        &self,
        sequences: &Bound<'py, PyAny>,
        num_tokens: Option<&Bound<'py, PyAny>>,
        token_ids: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = args::lookahead)] lookahead: u32,
        block_tables: Option<&Bound<'py, PyAny>>,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = sequences.py();
        let (sequences, tokens) = (arrays::sequences(sequences)?, Tokens::or_one(num_tokens)?);
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
            match (&token_ids, tables) {
                (None, None) => manager.append(&sequences, counts, lookahead, slots),
                (None, Some(tables)) => manager.append_with_tables(&sequences, counts, lookahead, tables, slots),
                (Some(ids), tables) => manager.append_tokens(&sequences, counts, lookahead, ids, tables, slots),
            }
            .map_err(to_py)
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
    /// With a recurrent group and prefix caching a chunk ends at a block's end where it can: only states there are
    /// cached.
    ///
    /// Args:
    ///     sequence: handle of a sequence that was allocated with `chunk_tokens`.
    ///     budget: most tokens.
    /// Returns:
    ///     Tokens, at most `budget`; 0 once the whole prompt is in.
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
    /// A block that another block already duplicates is replaced by it, and blocks outside a window are given back:
    /// block tables may change.
    ///
    /// Args:
    ///     sequences: handles, uint64 `[n]`, none twice; a list, or one.
    ///     num_computed: how many of each sequence's first tokens are computed, uint32 `[n]`; all by default.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    ///     InvalidArgumentError: a sequence has fewer tokens, or there is not one number for each.
    ///     SequenceStateError: a sequence has tokens that this step is yet to write.
    #[pyo3(signature = (sequences, num_computed = None))]
    fn mark_computed(&self, sequences: &Bound<'_, PyAny>, num_computed: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let sequences = arrays::sequences(sequences)?;
        let computed = num_computed.map(|computed| Tokens::new(computed, "num_computed")).transpose()?;
        let computed = computed.map(Tokens::into_vec);
        self.lock().mark_computed_to(&sequences, computed.as_deref()).map_err(to_py)
    }

    /// Cut a sequence to its first tokens, for instance after draft tokens were rejected. Blocks that hold none of
    /// them, and those of an earlier lookahead, are freed.
    ///
    /// Args:
    ///     sequence: handle.
    ///     num_tokens: tokens to keep.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    ///     SequenceStateError: the sequence has lost bytes, or tokens that this step is yet to write.
    ///     InvalidArgumentError: the sequence is shorter, or has a recurrent state, which cannot be taken back.
    fn truncate(
        &self,
        #[pyo3(from_py_with = args::sequence)] sequence: Handle,
        #[pyo3(from_py_with = args::num_tokens)] num_tokens: u32,
    ) -> PyResult<()> {
        self.lock().truncate(sequence.0, num_tokens).map_err(to_py)
    }

    /// Return whether `swap_out` can move the sequences: nothing else moves them, and the tier has room.
    ///
    /// Args:
    ///     sequences: handles, all of one tier; uint64 `[n]`, a list, or one.
    ///     to: `"host"` or `"external"`.
    /// Returns:
    ///     `Fit`, true if they can move now.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    ///     InvalidArgumentError: a handle is given twice, or `to` is another tier.
    #[pyo3(signature = (sequences, to = "host"))]
    fn can_swap_out(&self, sequences: &Bound<'_, PyAny>, to: &str) -> PyResult<PyFit> {
        let to = tier("to", to, &[Tier::Host, Tier::External])?;
        self.batch(sequences, |manager, sequences| manager.can_swap_out(sequences, to)).map(Into::into)
    }

    /// Move sequences away from the device, by this step's decision: from the device to the host, or from either to the
    /// external tier. A block that several of them share moves once.
    ///
    /// Args:
    ///     sequences: handles, all of one tier; uint64 `[n]`, a list, or one.
    ///     to: `"host"` or `"external"`.
    /// Raises:
    ///     OutOfBlocksError: the tier has too few free blocks for all of them.
    ///     UnknownSequenceError: there is no such sequence.
    ///     SequenceStateError: a sequence is in another tier, moving, written in this step, or has lost bytes.
    ///     InvalidArgumentError: a handle is given twice, or `to` is another tier.
    #[pyo3(signature = (sequences, to = "host"))]
    fn swap_out(&self, sequences: &Bound<'_, PyAny>, to: &str) -> PyResult<()> {
        let to = tier("to", to, &[Tier::Host, Tier::External])?;
        self.batch(sequences, |manager, sequences| manager.swap_out(sequences, to))
    }

    /// Return whether `swap_in` can move the sequences. On the device one more token each has room then, and the
    /// watermark stays free.
    ///
    /// Args:
    ///     sequences: handles, all of one tier; uint64 `[n]`, a list, or one.
    ///     to: `"device"` or `"host"`.
    ///     lookahead: slots beyond that token.
    /// Returns:
    ///     `Fit`, true if they can move now.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    ///     InvalidArgumentError: a handle is given twice, or `to` is another tier.
    #[pyo3(signature = (sequences, to = "device", *, lookahead = 0))]
    fn can_swap_in(
        &self,
        sequences: &Bound<'_, PyAny>,
        to: &str,
        #[pyo3(from_py_with = args::lookahead)] lookahead: u32,
    ) -> PyResult<PyFit> {
        let to = tier("to", to, &[Tier::Device, Tier::Host])?;
        self.batch(sequences, |manager, sequences| manager.can_swap_in(sequences, to, lookahead)).map(Into::into)
    }

    /// Move sequences back towards the device, by this step's decision: from the external tier to the host, or from
    /// either to the device.
    ///
    /// Args:
    ///     sequences: handles, all of one tier; uint64 `[n]`, a list, or one.
    ///     to: `"device"`, or `"host"` for sequences in the external tier.
    /// Raises:
    ///     OutOfBlocksError, UnknownSequenceError, SequenceStateError, InvalidArgumentError: as `swap_out`.
    #[pyo3(signature = (sequences, to = "device"))]
    fn swap_in(&self, sequences: &Bound<'_, PyAny>, to: &str) -> PyResult<()> {
        let to = tier("to", to, &[Tier::Device, Tier::Host])?;
        self.batch(sequences, |manager, sequences| manager.swap_in(sequences, to))
    }

    /// End the step and return its transfers. Carry them out, then `complete` or `fail` the ticket.
    ///
    /// Args:
    ///     prefetch: let the step compute while its loads arrive. Until the ticket has ended, `append`, `slot_mapping`,
    ///         `block_table` and `block_tables` refuse what it loads. If a sequence that it loads was appended to, or
    ///         asked for its block table, before this call, the step computes with it: then `decision.prefetch` is
    ///         False, and the step waits for all its loads.
    /// Returns:
    ///     `StepDecision`.
    /// Warns:
    ///     RuntimeWarning: once, if more than `max_open_tickets` tickets are open; it names the oldest.
    #[pyo3(signature = (*, prefetch = false))]
    fn take_decision(&self, py: Python<'_>, prefetch: bool) -> PyResult<PyStepDecision> {
        self.open_tickets.warn(py, &self.shared)?;
        let decision = {
            let mut manager = self.lock();
            if prefetch { manager.take_prefetch() } else { manager.take_decision() }
        };
        self.open_tickets.note(py, decision.ticket, &self.shared);
        PyStepDecision::from_core(py, &decision)
    }

    /// End a ticket whose transfers have ended.
    ///
    /// Until then its blocks stay leased, however long it takes. Where the process or device that ran it has died and
    /// can write no more, give all its pairs as `lost`, or call `fail`. Where it only hangs, `lose` marks its sequences
    /// and keeps the blocks leased.
    ///
    /// Args:
    ///     ticket: `decision.ticket`.
    ///     lost: the `Pairs` that did not land.
    /// Returns:
    ///     Sequences that lost bytes, uint64 `[n]`. They can only be freed.
    /// Raises:
    ///     UnknownTicketError: the ticket was never handed out, or has ended.
    ///     MappingError: the ticket writes no such block.
    #[expect(clippy::needless_pass_by_value, reason = "an argument from Python")]
    #[pyo3(signature = (ticket, lost = Vec::new()), text_signature = "($self, ticket, lost=())")]
    fn complete<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::ticket)] ticket: TicketArgument,
        #[pyo3(from_py_with = args::lost)] lost: Vec<Py<PyPairs>>,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        if lost.is_empty() {
            let none = no_handles(py)?;
            return self.lock().complete(ticket.0).map(|()| none).map_err(to_py);
        }
        let lost = core_pairs(py, &lost)?;
        let hit = self.lock().fail(ticket.0, &lost).map_err(to_py)?;
        handles(py, &hit)
    }

    /// End a ticket of which nothing landed, for instance because it was never carried out.
    ///
    /// Args:
    ///     ticket: `decision.ticket`.
    /// Returns:
    ///     Sequences that lost bytes, uint64 `[n]`. They can only be freed.
    /// Raises:
    ///     UnknownTicketError: the ticket was never handed out, or has ended.
    fn fail<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::ticket)] ticket: TicketArgument,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let hit = self.lock().fail_whole(ticket.0).map_err(to_py)?;
        handles(py, &hit)
    }

    /// Mark the sequences that have lost bytes while the ticket's other transfers still run.
    ///
    /// Args:
    ///     ticket: `decision.ticket`. It stays open; give `complete` the same pairs when it ends.
    ///     lost: the `Pairs` that are known not to land.
    /// Returns:
    ///     Sequences that lost bytes, uint64 `[n]`. They can only be freed.
    /// Raises:
    ///     UnknownTicketError: the ticket was never handed out, or has ended.
    ///     MappingError: the ticket writes no such block.
    #[expect(clippy::needless_pass_by_value, reason = "an argument from Python")]
    fn lose<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::ticket)] ticket: TicketArgument,
        #[pyo3(from_py_with = args::lost)] lost: Vec<Py<PyPairs>>,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let lost = core_pairs(py, &lost)?;
        let hit = self.lock().lose(ticket.0, &lost).map_err(to_py)?;
        handles(py, &hit)
    }

    /// Return the blocks of a sequence in its present tier.
    ///
    /// Args:
    ///     sequence: handle.
    ///     group: cache group.
    /// Returns:
    ///     Block ids, int32 `[blocks]`; 0 for blocks that fell out of a window.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    ///     SequenceStateError: its blocks are being prefetched, see `take_decision`.
    ///     InvalidArgumentError: there is no such group.
    #[pyo3(signature = (sequence, group = 0))]
    fn block_table<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::sequence)] sequence: Handle,
        #[pyo3(from_py_with = args::group)] group: u32,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let mut manager = self.lock();
        let row = row_in(&manager, sequence.0, group)?;
        let table = manager.read_table(row).map(<[BlockId]>::to_vec).map_err(to_py)?;
        drop(manager);
        ids(py, &table)
    }

    /// Return the block tables of sequences on the device, padded with 0, as attention kernels read them.
    ///
    /// Args:
    ///     sequences: handles, uint64 `[n]`, a list, or one.
    ///     out: int32 array `[n, max_blocks or more]` to write to, C-contiguous.
    ///     group: cache group.
    /// Returns:
    ///     Block ids, int32 `[n, max_blocks]`, or `out`.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    ///     SequenceStateError: a sequence is not on the device, is still loading, or has lost bytes.
    ///     InvalidArgumentError: `out` has another number of rows or too few columns, or there is no such group.
    #[pyo3(signature = (sequences, out = None, *, group = 0))]
    fn block_tables<'py>(
        &self,
        sequences: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        #[pyo3(from_py_with = args::group)] group: u32,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, sequences) = (sequences.py(), arrays::sequences(sequences)?);
        if let Some(out) = out {
            let rows = rows_in(&self.lock(), &sequences, group)?;
            let write = |table: Area<'_, i32>, manager: &mut Guard<'_, Manager>| {
                manager.block_tables(&rows, table.shape[1], table.items).map_err(to_py)
            };
            memory::write(arrays::table(&out, "out"), || self.lock(), write)??;
            return Ok(out);
        }
        // Under one lock: another thread may append between two.
        let mut manager = self.lock();
        let rows = rows_in(&manager, &sequences, group)?;
        let width = manager.max_blocks(&rows).map_err(to_py)?;
        let write = |table: &mut [i32]| manager.block_tables(&rows, width, table);
        let (table, written) = memory::made(py, [rows.len(), width], write)?;
        written.map_err(to_py)?;
        Ok(table.into_any())
    }

    /// Return the slots of some tokens of sequences on the device, one sequence after the other.
    ///
    /// Args:
    ///     sequences: handles, uint64 `[n]`, a list, or one.
    ///     first: first token, for all or one a sequence.
    ///     last: token after the last, for all or one a sequence.
    ///     out: int64 array `[sum of last - first]` to write to, C-contiguous.
    ///     group: cache group.
    /// Returns:
    ///     Slots, `block * block_size + offset`, int64 `[sum of last - first]`, or `out`.
    /// Raises:
    ///     UnknownSequenceError, SequenceStateError: as `block_tables`.
    ///     InvalidArgumentError: a sequence has fewer tokens, `out` another length, or there is no such group.
    #[pyo3(signature = (sequences, first, last, out = None, *, group = 0))]
    fn slot_mapping<'py>(
        &self,
        sequences: &Bound<'py, PyAny>,
        first: &Bound<'py, PyAny>,
        last: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        #[pyo3(from_py_with = args::group)] group: u32,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, sequences) = (sequences.py(), arrays::sequences(sequences)?);
        let ranges = arrays::ranges(first, last, sequences.len())?;
        let rows = rows_in(&self.lock(), &sequences, group)?;
        let ranges: Vec<_> = rows.into_iter().zip(ranges).collect();
        if let Some(out) = out {
            let write = |slots: Area<'_, i64>, manager: &mut Guard<'_, Manager>| {
                manager.slot_mapping(&ranges, slots.items).map_err(to_py)
            };
            memory::write(arrays::slots_target(&out, "out"), || self.lock(), write)??;
            return Ok(out);
        }
        let mut manager = self.lock();
        let len = manager.num_slots(&ranges).map_err(to_py)?;
        let (slots, written) = memory::made(py, [len], |slots: &mut [i64]| manager.slot_mapping(&ranges, slots))?;
        written.map_err(to_py)?;
        Ok(slots.into_any())
    }

    /// Return the number of tokens in a sequence.
    ///
    /// Args:
    ///     sequence: handle.
    ///     group: cache group; one with cross attention has the encoder's tokens.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    ///     InvalidArgumentError: there is no such group.
    #[pyo3(signature = (sequence, group = 0))]
    fn num_tokens(
        &self,
        #[pyo3(from_py_with = args::sequence)] sequence: Handle,
        #[pyo3(from_py_with = args::group)] group: u32,
    ) -> PyResult<u32> {
        let manager = self.lock();
        let row = row_in(&manager, sequence.0, group)?;
        manager.num_tokens(row).map_err(to_py)
    }

    /// Return the tier that a sequence's blocks are in: `"device"`, `"host"` or `"external"`.
    ///
    /// Args:
    ///     sequence: handle.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    fn tier(&self, #[pyo3(from_py_with = args::sequence)] sequence: Handle) -> PyResult<&'static str> {
        self.lock().tier(sequence.0).map(Tier::name).map_err(to_py)
    }

    /// Return all counters, as of now: `ManagerStats`.
    fn stats(&self) -> PyManagerStats {
        let manager = self.lock();
        PyManagerStats::new(&manager.stats(), manager.open_tickets())
    }

    /// Recount the whole state and compare. For tests and debugging; it takes time in proportion to the pools.
    ///
    /// Raises:
    ///     InvariantError: the state contradicts itself, which is a bug in Blockyard.
    fn check(&self) -> PyResult<()> {
        self.lock().check().map_err(to_py)
    }

    fn __repr__(&self) -> String {
        let manager = self.lock();
        let tier = |tier: Tier| {
            let pool = manager.pool(tier);
            (!pool.is_empty()).then(|| format!("{}: {} of {} blocks free", tier.name(), pool.free(), pool.len()))
        };
        let tiers: Vec<_> = Tier::ALL.into_iter().filter_map(tier).collect();
        let (number, sequences) = (manager.number(), manager.num_sequences());
        let size = manager.block_size();
        let open: Vec<_> = manager.open_tickets().take(4).map(|ticket| ticket.0.to_string()).collect();
        let open = match open.len() {
            0 => String::new(),
            _ => format!(", {} open tickets from {}", manager.num_open_tickets(), open[0]),
        };
        format!("BlockManager(number={number}, block_size={size}, {}, {sequences} sequences{open})", tiers.join(", "))
    }
}
