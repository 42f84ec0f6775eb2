//! `manager.prefix`: the prefix cache, and keys that other processes understand.

pub(crate) mod store_jobs;

use crate::allocator::ids;
use crate::convert::args;
use crate::convert::arrays::{self, Tokens};
use crate::convert::errors::{invalid, to_py};
use crate::convert::values::picklable;
use crate::event::PyEventBatch;
use crate::manager::policies;
use crate::manager::prompts::{self, Extras, KeySpecs, PyExtra, PyHashedPrompt, TokenIds};
use crate::manager::shared::{Shared, in_class};
use crate::manager::stats::residency;
use blockyard_core::{self as core, HashedPrompt, KeySpec, MAX_PRIORITY, PrefixHit, Prompt, Tier};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::collections::BTreeMap;
use store_jobs::PyStoreJobs;

/// How much of the start of a prompt is in the prefix cache.
#[pyclass(frozen, eq, hash, get_all, name = "PrefixHit", module = "blockyard._core")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PyPrefixHit {
    /// Number of tokens that need no compute: whole blocks, and never the prompt's last token.
    tokens: u32,
    /// Number of these blocks that only the host has; `allocate` loads them.
    host_blocks: usize,
}

#[pymethods]
impl PyPrefixHit {
    fn __bool__(&self) -> bool {
        self.tokens > 0
    }

    fn __repr__(&self) -> String {
        format!("PrefixHit(tokens={}, host_blocks={})", self.tokens, self.host_blocks)
    }
}

picklable!(PyPrefixHit { tokens, host_blocks });

/// A manager's prefix cache; available as `manager.prefix`.
///
/// A block is cached once its tokens are computed (`mark_computed`) and its bytes have landed. It stays cached after
/// its sequences are freed, until it is evicted.
///
/// Example:
///     >>> from blockyard import BlockManager
///     >>> manager = BlockManager(block_size=4, device_blocks=8, prefix_caching=True)
///     >>> prompt = [1, 2, 3, 4, 5, 6]
///     >>> first = manager.allocate(prompt)
///     >>> decision = manager.take_decision()  # the model computes the prompt
///     >>> manager.mark_computed([first])
///     >>> _ = manager.complete(decision.ticket)
///     >>> manager.prefix.lookup(prompt).tokens
///     4
#[pyclass(frozen, name = "Prefix", module = "blockyard._core")]
pub(crate) struct PyPrefix(Shared);

impl PyPrefix {
    pub(crate) const fn new(shared: Shared) -> Self {
        Self(shared)
    }
}

#[pymethods]
impl PyPrefix {
    /// Whether the manager has prefix caching.
    #[getter]
    fn enabled(&self) -> bool {
        self.0.lock().is_caching()
    }

    /// Loads from a prefix store, and writes to it.
    #[getter]
    fn store_jobs(&self) -> PyStoreJobs {
        PyStoreJobs::new(self.0.clone())
    }

    /// Return how much of a prompt is cached, without taking blocks.
    ///
    /// Args:
    ///     prompt: token ids, uint32 `[tokens]` or a list of ints; or a `HashedPrompt`, also with extras.
    ///     salt: salt of its tenant, bytes.
    ///     lora_id: its adapter; 0 for none.
    /// Returns:
    ///     `PrefixHit`, true if anything is cached.
    /// Raises:
    ///     InvalidArgumentError: a token id is out of range.
    #[pyo3(signature = (prompt, *, salt = None, lora_id = 0))]
    fn lookup(
        &self,
        prompt: &Bound<'_, PyAny>,
        salt: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
    ) -> PyResult<PyPrefixHit> {
        let (tokens, specs) = ([TokenIds::new(prompt, &"prompt")?], KeySpecs::one(salt, lora_id)?);
        let hit = self.0.with(|manager| {
            prompts::lend(&tokens, &specs, &Extras::default(), |prompts| manager.lookup(&prompts[0]))
        })?;
        let PrefixHit { tokens, host_blocks } = hit.map_err(to_py)?;
        Ok(PyPrefixHit { tokens, host_blocks })
    }

    /// Tell the prefix cache something of a conversation after its last turn was freed, for instance that it is over.
    ///
    /// Its cached device blocks that nothing uses go where the hint belongs, and count as just used; see
    /// `BlockManager.free`. `eviction="adaptive"` uses hints; other policies ignore them.
    ///
    /// Args:
    ///     prompt: the conversation, or its beginning: token ids, uint32 `[tokens]` or a list of ints; or a
    ///         `HashedPrompt`.
    ///     hint: `"over"`, `"tool_call"` or `"turn"`.
    ///     salt: salt of its tenant, bytes.
    ///     lora_id: its adapter; 0 for none.
    /// Returns:
    ///     Number of its tokens that are cached on the device.
    /// Raises:
    ///     InvalidArgumentError: the hint is unknown, or a token id is out of range.
    ///
    /// Example:
    ///     >>> from blockyard import BlockManager
    ///     >>> manager = BlockManager(block_size=4, device_blocks=8, prefix_caching=True)
    ///     >>> said = [1, 2, 3, 4, 5, 6]
    ///     >>> sequence = manager.allocate(said)
    ///     >>> manager.complete(manager.take_decision().ticket)
    ///     array([], dtype=uint64)
    ///     >>> manager.mark_computed([sequence])
    ///     >>> manager.free([sequence], hint="turn")
    ///     >>> manager.prefix.hint(said, "over")  # the user has left
    ///     4
    #[pyo3(signature = (prompt, hint, *, salt = None, lora_id = 0))]
    fn hint(
        &self,
        prompt: &Bound<'_, PyAny>,
        hint: &Bound<'_, PyAny>,
        salt: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
    ) -> PyResult<u32> {
        let Some(hint) = policies::hint(Some(hint))? else { return Ok(0) };
        let (tokens, specs) = ([TokenIds::new(prompt, &"prompt")?], KeySpecs::one(salt, lora_id)?);
        let cached = self.0.with(|manager| {
            prompts::lend(&tokens, &specs, &Extras::default(), |prompts| manager.hint(&prompts[0], hint))
        })?;
        cached.map_err(to_py)
    }

    /// Hash a prompt once, so that repeated lookups and admission do not hash it again.
    ///
    /// Args:
    ///     token_ids: uint32 `[tokens]` or a list of ints; copied.
    ///     salt: salt of its tenant, bytes.
    ///     lora_id: its adapter; 0 for none.
    ///     extras: other inputs that determine what the model computes, such as images: `(start, length, digest)`, see
    ///         `allocate`. They may name tokens beyond the prompt.
    /// Returns:
    ///     `HashedPrompt`, for `lookup`, `can_allocate` and `allocate` of managers with the same block size.
    /// Raises:
    ///     InvalidArgumentError: a token id or an extra is out of range.
    #[pyo3(signature = (token_ids, *, salt = None, lora_id = 0, extras = Vec::new()),
        text_signature = "($self, token_ids, *, salt=None, lora_id=0, extras=())")]
    fn hash(
        &self,
        token_ids: &Bound<'_, PyAny>,
        salt: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
        #[pyo3(from_py_with = args::extras)] extras: Vec<PyExtra>,
    ) -> PyResult<PyHashedPrompt> {
        let block_size = self.0.lock().block_size();
        let (tokens, specs) =
            ([TokenIds::Plain(arrays::token_ids(token_ids, &"token_ids")?)], KeySpecs::one(salt, lora_id)?);
        let extras = Extras::one(extras);
        let hashed = prompts::lend(&tokens, &specs, &extras, |prompts| HashedPrompt::new(&prompts[0], block_size))?;
        hashed.map(PyHashedPrompt::new).map_err(to_py)
    }

    /// Record token ids that were unknown at `append`, for instance in a scheduler that runs one step ahead.
    ///
    /// `append` without `token_ids` returns the slots; call this once the tokens are sampled. Sequences that were
    /// admitted by counts, or that share the blocks of these tokens with a fork, are skipped.
    ///
    /// Args:
    ///     sequences: handles, uint64 `[n]` without repeats, a list, or one.
    ///     token_ids: ids of the next unknown tokens, uint32 `[tokens]`, sequence by sequence.
    ///     num_tokens: number of ids for each sequence, one int or uint32 `[n]`; 1 by default.
    /// Raises:
    ///     InvalidArgumentError: there are more ids than unknown tokens, an id is out of range, or a handle is
    ///         repeated.
    ///     UnknownSequenceError: there is no such sequence.
    #[pyo3(signature = (sequences, token_ids, num_tokens = None))]
    fn note_tokens(
        &self,
        sequences: &Bound<'_, PyAny>,
        token_ids: &Bound<'_, PyAny>,
        num_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (sequences, tokens) = (arrays::sequences(sequences)?, Tokens::or_one(num_tokens)?);
        let ids = arrays::token_ids(token_ids, &"token_ids")?.into_vec()?;
        self.0.lock().note_tokens(&sequences, tokens.get(), &ids).map_err(to_py)
    }

    /// Return the computed blocks that all sequences share at their start, for cascade attention.
    ///
    /// Args:
    ///     sequences: handles, uint64 `[n]` or a list.
    /// Returns:
    ///     Block ids, int32 `[blocks]`.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    fn common_blocks<'py>(&self, sequences: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let py = sequences.py();
        let sequences = arrays::sequences(sequences)?;
        let manager = self.0.lock();
        let blocks = in_class(&manager, Tier::Device, manager.common_computed_blocks(&sequences).map_err(to_py)?);
        drop(manager);
        ids(py, &blocks)
    }

    /// Drop the whole cache, for instance after the model's weights changed.
    ///
    /// Returns:
    ///     False, without dropping anything, while a block is in use.
    fn reset(&self) -> bool {
        self.0.lock().reset_prefix_cache()
    }

    /// Count the cached blocks that no prompt can find, since a block before them was lost or dropped; 0 without host copies.
    ///
    /// They are freed as others are evicted. Counting takes time that grows with device and host.
    ///
    /// Returns:
    ///     Their number.
    fn count_unfindable(&self) -> usize {
        self.0.lock().num_unfindable()
    }

    /// Copy the blocks that would be evicted next to the host, by this step's decision (`swap_out`).
    ///
    /// Each step does this automatically for as many blocks as the next one may take, see `PrefixCaching`. Until the
    /// ticket completes, prompts still find the blocks, and this step may take them. Then the remaining device blocks
    /// are freed, and are found on the host. Older copies there make room.
    ///
    /// Args:
    ///     max_blocks: number of cached device blocks to consider, in the order of eviction; those that already have a
    ///         copy are freed.
    /// Returns:
    ///     Number of blocks to be copied.
    /// Raises:
    ///     InvalidArgumentError: the manager has no `PrefixCaching(host=True)`.
    fn offload(&self, #[pyo3(from_py_with = args::max_blocks)] max_blocks: u32) -> PyResult<usize> {
        let mut manager = self.0.lock();
        if !manager.keeps_host_copies() {
            let only = "but only a manager with PrefixCaching(host=True) keeps copies on the host";
            return Err(invalid(format!("max_blocks is {max_blocks}, {only}")));
        }
        manager.offload_cached(max_blocks as usize).map_err(to_py)
    }

    /// Announce device blocks that prompts will take which start in one of the next steps.
    ///
    /// The decision that is taken next empties as many, beside those for the next chunks of running prompts: it copies
    /// what they hold to the host (`swap_out`). The step in which the prompts start then need not wait for these copies.
    /// At most a sixteenth of device and host are emptied, or half of what the host is larger than the device.
    /// `Scheduler` does this.
    ///
    /// Args:
    ///     num_blocks: number of blocks; replaces what was announced for the same decision.
    /// Raises:
    ///     InvalidArgumentError: the manager has no `PrefixCaching(host=True)`.
    fn expect(&self, #[pyo3(from_py_with = args::num_blocks)] num_blocks: u32) -> PyResult<()> {
        let mut manager = self.0.lock();
        if !manager.keeps_host_copies() {
            let only = "but only a manager with PrefixCaching(host=True) keeps copies on the host";
            return Err(invalid(format!("num_blocks is {num_blocks}, {only}")));
        }
        manager.expect_blocks(num_blocks as usize).map_err(to_py)
    }

    /// Set how long the blocks of sequences stay cached after they are freed, for `eviction="priority"`.
    ///
    /// Each level adds the time that it takes to evict the whole pool once. A shared block has its highest priority.
    ///
    /// Args:
    ///     sequences: handles, uint64 `[n]`, a list, or one.
    ///     priority: 0, the default, to 15.
    /// Raises:
    ///     InvalidArgumentError: the priority is out of range.
    ///     UnknownSequenceError: there is no such sequence.
    fn set_priority(
        &self,
        sequences: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::priority)] priority: u32,
    ) -> PyResult<()> {
        let priority = u8::try_from(priority)
            .map_err(|_| invalid(format!("priority is {priority}, must be 0 to {MAX_PRIORITY}")))?;
        let sequences = arrays::sequences(sequences)?;
        self.0.lock().set_priority(&sequences, priority).map_err(to_py)
    }

    /// Limit a tenant's cached device blocks: published, and used by no sequence. Windows, states and blocks of other
    /// groups count too: they go with the block that they hang on.
    ///
    /// The tenant's least recently used blocks beyond the quota are freed whenever sequences are freed, tickets end or
    /// decisions are taken. If room is needed earlier, they are evicted before the blocks of other tenants. Blocks that
    /// the tenant published before its first quota do not count.
    ///
    /// Args:
    ///     salt: the tenant; None for prompts without a salt.
    ///     blocks: maximum number of such blocks; None for no limit. Only with one page class.
    ///     num_bytes: maximum bytes of such blocks, with their padding in an arena, instead of `blocks`. With one page
    ///         class, rounded down to whole blocks.
    /// Raises:
    ///     InvalidArgumentError: the device has fewer blocks, prefix caching is off, or 65535 tenants have quotas; blocks
    ///         have several sizes, or none in bytes.
    #[pyo3(signature = (salt, blocks = None, *, num_bytes = None))]
    fn set_quota(
        &self,
        salt: Option<&[u8]>,
        #[pyo3(from_py_with = args::blocks)] blocks: Option<i64>,
        #[pyo3(from_py_with = args::num_bytes)] num_bytes: Option<u64>,
    ) -> PyResult<()> {
        let blocks = blocks.map(|blocks| usize::try_from(blocks).map_err(|_| blocks)).transpose();
        let blocks = blocks.map_err(|blocks| invalid(format!("blocks is {blocks}, must be at least 0")))?;
        let mut manager = self.0.lock();
        let (classes, bytes) = (manager.num_classes(), manager.class_bytes(0));
        let quota = match (blocks, num_bytes) {
            (Some(blocks), Some(bytes)) => {
                return Err(invalid(format!("give either blocks, {blocks}, or num_bytes, {bytes}")));
            }
            (Some(blocks), None) if classes > 1 => {
                let must = format!("must be None with {classes} page classes, whose quotas are num_bytes");
                return Err(invalid(format!("blocks is {blocks}, {must}")));
            }
            (None, Some(num_bytes)) if classes == 1 && bytes <= 1 => {
                let must = "must be None if blocks have no bytes, see CacheGroup.with_blocks";
                return Err(invalid(format!("num_bytes is {num_bytes}, {must}")));
            }
            (None, Some(num_bytes)) => {
                let unit = if classes == 1 { bytes } else { 1 };
                Some(usize::try_from(num_bytes / unit).unwrap_or(usize::MAX - 1))
            }
            (blocks, None) => blocks,
        };
        manager.set_quota(KeySpec::new(salt, 0).salt, quota).map_err(to_py)
    }

    /// Return what counts towards a tenant's quota, and the quota: blocks, or bytes with several page classes.
    ///
    /// Args:
    ///     salt: the tenant; None for prompts without a salt.
    /// Returns:
    ///     `(used, quota)`; None for a tenant that never had a quota.
    fn quota(&self, salt: Option<&[u8]>) -> Option<(usize, Option<usize>)> {
        self.0.lock().quota(KeySpec::new(salt, 0).salt)
    }

    /// Start to measure how long blocks stay cached, on a sample; see `residency`.
    ///
    /// Args:
    ///     sample_rate: fraction of the blocks to measure, above 0 to 1.
    /// Raises:
    ///     InvalidArgumentError: the rate is out of range.
    fn sample_residency(&self, #[pyo3(from_py_with = args::sample_rate)] sample_rate: f64) -> PyResult<()> {
        if !(sample_rate > 0.0 && sample_rate <= 1.0) {
            return Err(invalid(format!("sample_rate is {sample_rate}, must be above 0 and at most 1")));
        }
        self.0.lock().sample_residency(sample_rate);
        Ok(())
    }

    /// Return how long sampled blocks stayed cached, since `sample_residency`.
    ///
    /// Returns:
    ///     `Residency` for each tier that caches: `"device"` and `"host"`.
    fn residency<'py>(&self, py: Python<'py>) -> PyResult<BTreeMap<&'static str, Bound<'py, PyAny>>> {
        let found = {
            let manager = self.0.lock();
            // Nothing is measured before sampling starts, but the device caches, if any tier does.
            let device = manager.residency(Tier::Device).copied().unwrap_or_default();
            let host = manager.residency(Tier::Host).copied();
            [Some((Tier::Device, device)), host.map(|host| (Tier::Host, host))]
        };
        found.iter().flatten().map(|(tier, found)| Ok((tier.name(), residency(py, found)?))).collect()
    }

    /// Return and remove all waiting events: blocks stored or removed, cache cleared. A router tracks the cache with
    /// them.
    ///
    /// Returns:
    ///     `EventBatch`, empty without `PrefixCaching(max_events=...)`.
    fn take_events(&self, py: Python<'_>) -> PyResult<PyEventBatch> {
        let batch = self.0.lock().take_events();
        PyEventBatch::new(py, &batch)
    }

    fn __repr__(&self) -> String {
        let manager = self.0.lock();
        let stats = manager.prefix_stats();
        let cached = manager.pool(Tier::Device).published();
        format!("Prefix({cached} blocks cached, {} of {} full blocks hit)", stats.hit_blocks, stats.blocks)
    }
}

/// Return the keys of a prompt's full blocks for other processes: SHA-256 digests, 32 bytes each.
///
/// The hashed stream starts with a 64-byte header: `BLKYKEYS`, then format 1, block size, cache group and 0 as
/// little-endian u32, the adapter as u64, and 32 bytes of salt (its SHA-256, or zeros for none). Each block's extras
/// follow, sorted, and its tokens as little-endian u32; together they are padded to 64 bytes with 0xFF. The extras are
/// those that touch the block: 0xFFFFFFFF, 1, the number of bytes that follow, `start` and `length` as little-endian
/// u32, and `digest`, padded to 4 bytes with 0xFF. A block's key is the digest of the stream up to its end.
///
/// Args:
///     tokens: token ids, uint32 `[n]` or a list of ints.
///     block_size: tokens in a block.
///     salt: salt of the tenant, bytes.
///     lora_id: adapter; 0 for none.
///     cache_group: number of the cache group.
///     extras: `(start, length, digest)` of each other input, such as an image; see `BlockManager.allocate`.
/// Returns:
///     A key for each full block, bytes.
/// Raises:
///     InvalidArgumentError: a token id, an extra or `block_size` is out of range.
#[pyfunction]
#[pyo3(signature = (tokens, *, block_size, salt = None, lora_id = 0, cache_group = 0, extras = Vec::new()),
    text_signature = "(tokens, *, block_size, salt=None, lora_id=0, cache_group=0, extras=())")]
pub(crate) fn export_keys<'py>(
    tokens: &Bound<'py, PyAny>,
    #[pyo3(from_py_with = args::block_size)] block_size: u32,
    salt: Option<&Bound<'py, PyAny>>,
    #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
    #[pyo3(from_py_with = args::cache_group)] cache_group: u32,
    #[pyo3(from_py_with = args::extras)] extras: Vec<PyExtra>,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let py = tokens.py();
    if block_size == 0 {
        return Err(invalid("block_size is 0, must be at least 1".to_owned()));
    }
    let tokens = [TokenIds::Plain(arrays::token_ids(tokens, &"tokens")?)];
    let (specs, extras) = (KeySpecs::one(salt, lora_id)?, Extras::one(extras));
    let export = |prompts: &[Prompt<'_>]| core::export_keys(&prompts[0], block_size, cache_group);
    let keys = prompts::lend(&tokens, &specs, &extras, export)?.map_err(to_py)?;
    Ok(keys.iter().map(|key| PyBytes::new(py, &key.0)).collect())
}
