//! The prefix cache: prompts share the blocks of earlier prompts with the same beginning.
//!
//! A block is found only once it is published, and published only once its tokens are computed and its bytes have
//! landed.

mod wanted;

pub use wanted::StoreSearch;

use super::extras::{Extras, PromptExtra};
use super::points::{Below, Start};
use super::table::RowKeys;
use super::{Append, Sequences, TableId, blocks_for};
use crate::error::{Error, Result, invalid};
use crate::group::Group;
use crate::hash::{Chain, ExportedKey, Key, KeySpec, has_reserved, refuse_reserved};
use crate::host_cache::Found;
use crate::id::{BlockId, SequenceId, Tier};
use crate::memory;
use crate::page::PerClass;
use crate::prefix::CachedIdentity;
use crate::transfer::{OpenStep, View};
use std::borrow::Cow;

/// A prompt to admit, sharing its cached blocks.
///
/// ```
/// use blockyard_core::{Config, KeySpec, Manager, Prompt, PromptOptions};
///
/// # fn main() -> blockyard_core::Result<()> {
/// let config = Config { prefix_caching: true, ..Config::new(4, [8, 0, 0]) };
/// let mut manager = Manager::new(config)?;
/// let prompt = Prompt { tokens: &[1, 2, 3, 4, 5, 6], spec: KeySpec::default(), extras: &[], hashed: None };
/// let mut admitted = Vec::new();
/// manager.allocate_prompts(&[prompt], PromptOptions::default(), &mut admitted)?;
/// let ticket = manager.take_decision().ticket; // the model computes all six tokens
/// manager.complete(ticket)?;
/// manager.mark_computed(&[admitted[0].0])?;
/// manager.free(&[admitted[0].0])?;
///
/// manager.allocate_prompts(&[prompt], PromptOptions::default(), &mut admitted)?;
/// assert_eq!(admitted[1].1, 4); // the first block is found, two tokens must be computed
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// Token ids.
    pub tokens: &'a [u32],
    /// What its keys depend on besides its tokens.
    pub spec: KeySpec,
    /// Extras, in any order; they may name tokens beyond the prompt.
    pub extras: &'a [PromptExtra<'a>],
    /// The same prompt with its keys, see [`HashedPrompt::prompt`].
    pub hashed: Option<&'a HashedPrompt>,
}

/// A prompt whose tokens were hashed once, for any number of lookups and admissions.
#[derive(Clone, Debug)]
pub struct HashedPrompt {
    tokens: Box<[u32]>,
    spec: KeySpec,
    block_size: u32,
    keys: RowKeys,
}

impl HashedPrompt {
    /// Hashes a prompt for managers with blocks of this size.
    ///
    /// # Errors
    /// A token has the reserved id, or an extra has no token or ends beyond the longest sequence.
    pub fn new(prompt: &Prompt<'_>, block_size: u32) -> Result<Self> {
        let keys = hash(prompt, block_size, |_, _| {})?;
        Ok(Self { tokens: prompt.tokens.into(), spec: prompt.spec, block_size, keys })
    }

    /// The prompt, in the form that managers accept.
    #[must_use]
    pub fn prompt(&self) -> Prompt<'_> {
        Prompt { tokens: &self.tokens, spec: self.spec, extras: &[], hashed: Some(self) }
    }

    /// Tokens of the prompt.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
}

/// What a prompt's token id is called in an error.
const OF_A_PROMPT: &str = "a token id of a prompt";

/// Hashes the blocks of a prompt. `visit` is called with each key except the last and the number of keys so far, one
/// key behind the hashing, whose latency hides its cost.
fn hash(prompt: &Prompt<'_>, block_size: u32, mut visit: impl FnMut(usize, &Key)) -> Result<RowKeys> {
    let blocks = prompt.tokens.chunks_exact(block_size as usize);
    let count = blocks.len();
    let mut keys = new_keys(prompt, block_size, Vec::with_capacity(count + 1));
    keys.extras = Extras::new(prompt.extras)?;
    let mut reserved = has_reserved(blocks.remainder());
    for (i, tokens) in blocks.enumerate() {
        reserved |= has_reserved(tokens);
        if i + 1 < count {
            keys.push_key(tokens, block_size);
        } else {
            keys.push_block(tokens, block_size);
        }
        if let Some(before) = i.checked_sub(1) {
            visit(i, &keys.keys[before]);
        }
    }
    if reserved {
        refuse_reserved(OF_A_PROMPT, prompt.tokens)?;
    }
    Ok(keys)
}

/// The keys of a prompt without extras; its chain is before the first block.
fn new_keys(prompt: &Prompt<'_>, block_size: u32, keys: Vec<Key>) -> RowKeys {
    let (KeySpec { salt, lora_id }, chain) = (prompt.spec, Chain::new(&prompt.spec, block_size, 0));
    let (extras, surplus) = (Extras::default(), Vec::new());
    RowKeys {
        chain,
        keys,
        ahead: Vec::new(),
        following: Vec::new(),
        lora_id,
        salt,
        tenant: 0,
        extras,
        surplus,
        before_last: None,
        due: Vec::new(),
        junction: 0,
        resumed: 0,
        appended: 0,
        computed: 0,
    }
}

/// Returns the keys of a prompt's full blocks for other processes.
///
/// # Errors
/// As [`HashedPrompt::new`]; or there is not enough memory.
pub fn export_keys(prompt: &Prompt<'_>, block_size: u32, cache_group: u32) -> Result<Vec<ExportedKey>> {
    let (extras, blocks) = (Extras::new(prompt.extras)?, prompt.tokens.chunks_exact(block_size as usize));
    refuse_reserved(OF_A_PROMPT, &prompt.tokens[..prompt.tokens.len() - blocks.remainder().len()])?;
    let (mut chain, mut keys) = (Chain::new(&prompt.spec, block_size, cache_group), Vec::new());
    memory::make_room(&mut keys, blocks.len())?;
    for (i, tokens) in blocks.enumerate() {
        chain.framed_block(extras.frames(i, block_size), tokens);
        keys.push(chain.export());
    }
    Ok(keys)
}

/// Placeholders for a prompt's keys in a manager without a prefix cache: as many, and never looked up.
fn placeholders(prompt: &Prompt<'_>, block_size: u32) -> Result<RowKeys> {
    refuse_reserved(OF_A_PROMPT, prompt.tokens)?;
    let keys = new_keys(prompt, block_size, vec![Key::default(); prompt.tokens.len() / block_size as usize]);
    Ok(RowKeys { before_last: Some(keys.chain), ..keys })
}

/// How [`Manager::allocate_prompts`](crate::Manager::allocate_prompts) opens prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptOptions {
    /// Tokens of each prompt beyond the cached ones that get blocks, at most; all by default. Add the rest by
    /// [`Manager::append`](crate::Manager::append), a chunk at a time; the cache already knows its tokens.
    pub chunk: u32,
    /// Whether the prompts were admitted before and lost their blocks, for instance by a preemption. [`PrefixStats`]
    /// leaves them out, since they find what they computed themselves.
    pub preempted: bool,
}

impl Default for PromptOptions {
    fn default() -> Self {
        Self { chunk: u32::MAX, preempted: false }
    }
}

/// Counters of the prefix cache: of each prompt's first admission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixStats {
    /// Prompts that were admitted with their tokens.
    pub prompts: u64,
    /// Their full blocks.
    pub blocks: u64,
    /// Full blocks that were found.
    pub hit_blocks: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Tokens that need not be computed.
    pub hit_tokens: u64,
    /// Blocks that were computed twice and merged.
    pub merged: u64,
    /// Found blocks that were only on the host and were loaded.
    pub loaded: u64,
}

impl PrefixStats {
    /// Full blocks that were looked up and not found.
    #[must_use]
    pub fn missed_blocks(&self) -> u64 {
        self.blocks - self.hit_blocks
    }

    /// Tokens of prompts that had to be computed.
    #[must_use]
    pub fn missed_tokens(&self) -> u64 {
        self.tokens - self.hit_tokens
    }

    /// Checks that the counters are consistent with whole blocks, `per_key` of which hold the tokens of a key.
    pub(super) fn holds(&self, block_size: u32, per_key: usize) -> bool {
        let Self { prompts, blocks, hit_blocks, tokens, hit_tokens, merged: _, loaded } = *self;
        let size = u128::from(block_size);
        hit_blocks <= blocks
            && loaded <= hit_blocks * per_key as u64
            && u128::from(blocks) * size <= u128::from(tokens)
            && u128::from(hit_blocks) * size == u128::from(hit_tokens)
            && (prompts > 0 || tokens == 0)
    }
}

/// The cached part of a prompt's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixHit {
    /// Tokens that need not be computed, in whole blocks; the last token must always be computed.
    pub tokens: u32,
    /// Blocks of them that only the host has.
    pub host_blocks: usize,
}

/// One prompt's keys, and each group's table of the blocks found for the leading ones.
pub(super) struct Match<'a> {
    keys: Cow<'a, RowKeys>,
    /// Tenant with a quota that the prompt belongs to, 0 for none.
    tenant: u16,
    /// First blocks of the prompt that all groups can serve.
    pub(super) hits: usize,
    /// First blocks up to where the prompt parts from another, see [`Start`].
    pub(super) run: usize,
    /// Whether a point at an interval served it, or would have.
    pub(super) parts: bool,
    /// Whether it makes points at intervals.
    at_intervals: bool,
    /// The first group's table, and those of the others.
    found: Vec<BlockId>,
    others: Vec<Vec<BlockId>>,
    /// By group: the found blocks after those, starting with the first that only the host has. Empty if there is none.
    pub(super) tails: Vec<Vec<Found>>,
    /// Whether its chunks end at resume points, for the states there.
    pub(super) keeps_points: bool,
}

fn device_block(found: &Found) -> Option<&BlockId> {
    match found {
        Found::Device(block) => Some(block),
        Found::Host(_) => None,
    }
}

impl Match<'_> {
    /// The match of the same prompt if it had found nothing.
    pub(super) fn without_hits(&self) -> Self {
        let none = |tables: &Vec<Vec<_>>| vec![Vec::new(); tables.len()];
        Self {
            keys: self.keys.clone(),
            tenant: self.tenant,
            hits: 0,
            run: 0,
            parts: self.parts,
            at_intervals: self.at_intervals,
            found: Vec::new(),
            others: none(&self.others),
            tails: Vec::new(),
            keeps_points: self.keeps_points,
        }
    }

    /// What was found behind the first blocks of each group, which the device has.
    pub(super) fn behind(&self) -> impl Iterator<Item = &Found> {
        self.tails.iter().flatten()
    }

    /// Found blocks that only the host has.
    pub(super) fn copies(&self) -> impl Iterator<Item = BlockId> {
        self.behind().filter_map(|found| match found {
            Found::Device(_) => None,
            Found::Host(copy) => Some(*copy),
        })
    }

    /// What one group's table has from an index on.
    pub(super) fn table(&self, group: usize, first: usize) -> impl Iterator<Item = Found> {
        let table = group.checked_sub(1).map_or(&self.found, |other| &self.others[other]);
        let behind = self.tails.get(group).map_or(&[][..], Vec::as_slice);
        let rest = behind.iter().skip(first.saturating_sub(table.len())).copied();
        table[first.min(table.len())..].iter().copied().map(Found::Device).chain(rest)
    }

    /// By group: the first blocks, which the device has.
    pub(super) fn tables(&self) -> impl Iterator<Item = &[BlockId]> {
        std::iter::once(&self.found).chain(&self.others).map(Vec::as_slice)
    }

    /// Those of the blocks behind that the device has.
    pub(super) fn blocks_behind(&self) -> impl Iterator<Item = &BlockId> {
        self.behind().filter_map(device_block)
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = &BlockId> {
        self.tables().flatten().chain(self.blocks_behind())
    }

    /// First blocks of the prompt that the device has.
    fn on_device(&self) -> usize {
        // With several groups, either all or nothing.
        self.hits.saturating_sub(self.tails.first().map_or(0, Vec::len))
    }
}

impl Sequences {
    pub(crate) fn lookup(&self, view: View<'_>, prompt: &Prompt<'_>) -> Result<PrefixHit> {
        let found = self.find_prefix(view, prompt, 1)?;
        let tokens = u32::try_from(found.hits).unwrap_or(u32::MAX).saturating_mul(self.block_size);
        Ok(PrefixHit { tokens, host_blocks: view.blocks_to_load(found.behind()).total() })
    }

    pub(crate) fn allocate_prompts(
        &mut self,
        step: &mut OpenStep<'_>,
        prompts: &[Prompt<'_>],
        options: PromptOptions,
        out: &mut Vec<(SequenceId, u32)>,
    ) -> Result<()> {
        let chunk = options.chunk;
        self.require_chunks(chunk)?;
        for prompt in prompts {
            self.require_states(step.view(), prompt.tokens.len(), chunk)?;
        }
        self.rows.require(prompts.len())?;
        self.rows.require_followed(prompts.len())?;
        let mut matches = prompts
            .iter()
            .map(|prompt| self.find_prefix(step.view(), prompt, prompts.len()))
            .collect::<Result<Vec<_>>>()?;
        let view = step.view();
        self.give_up(view, prompts, &mut matches, (chunk, 0, 0));
        let new: PerClass =
            prompts.iter().zip(&matches).map(|(prompt, found)| self.missing(view, prompt, found, chunk)).sum();
        let request = Self::request_prompts(view, &matches, new);
        view.require(request, || Self::idle_blocks(view, &matches))?;
        self.require_nulls(
            step.view(),
            prompts.iter().zip(&matches).map(|(prompt, found)| self.passed(step.view(), prompt, found, chunk)),
        )?;
        // Else its blocks would give way to cached ones with the same keys. What was found stays: without it, one may not fit.
        if self.begins_packed(step.view()) && matches.iter().all(|found| found.hits == 0) {
            step.tiers.drop_all_cached();
        }
        for found in &matches {
            found.tables().for_each(|table| step.tiers.claim_all(Tier::Device, table));
            found.blocks_behind().for_each(|&block| step.tiers.claim((Tier::Device, block)));
        }
        let loads = step.view().blocks_to_load(matches.iter().flat_map(Match::behind));
        step.prepare(Tier::Device, new + loads, true);
        // Host copies, too: what the prompts take evicts blocks to the host, and must not evict these from there.
        for copy in matches.iter().flat_map(Match::copies) {
            step.tiers.claim((Tier::Host, copy));
        }
        self.note_hits(step, &matches);
        for (prompt, found) in prompts.iter().zip(matches) {
            out.push(self.open_prompt(step, prompt, found, options));
        }
        Ok(())
    }

    /// Tells the store's queue what prompts found.
    fn note_hits(&self, step: &mut OpenStep<'_>, matches: &[Match<'_>]) {
        let (device, host) = (step.tiers.device(), step.tiers.host());
        let keys: Vec<Key> = if step.tiers.write_queue().is_none() {
            return;
        } else if self.is_full_attention() {
            matches.iter().flat_map(|found| &found.keys.keys[..found.hits]).copied().collect()
        } else {
            let on_device = matches.iter().flat_map(Match::blocks).filter_map(|&block| device.own_key(block));
            on_device.chain(matches.iter().flat_map(Match::copies).filter_map(|copy| host.key(copy))).collect()
        };
        if let Some(write_queue) = step.tiers.write_queue_mut() {
            for key in keys {
                write_queue.note_hit(key);
            }
        }
    }

    pub(crate) fn append_tokens(&mut self, step: &mut OpenStep<'_>, tokens: &[u32], batch: Append<'_>) -> Result<()> {
        let Append { sequences, counts, .. } = batch;
        let total = counts.total(sequences.len())?;
        if tokens.len() as u64 != total {
            return Err(invalid("length of token_ids", tokens.len() as i128, format!("{total}, the tokens")));
        }
        refuse_reserved("an id in token_ids", tokens)?;
        self.append(step, batch)?;
        let mut rest = tokens;
        for (i, &sequence) in sequences.iter().enumerate() {
            let (now, later) = rest.split_at(counts.at(i) as usize);
            rest = later;
            self.extend_keys(sequence, now);
        }
        Ok(())
    }

    pub(crate) fn mark_computed_to(
        &mut self,
        step: &mut OpenStep<'_>,
        sequences: &[SequenceId],
        computed: Option<&[u32]>,
    ) -> Result<()> {
        if let Some(computed) = computed.filter(|computed| computed.len() != sequences.len()) {
            let must = format!("{}, the sequences", sequences.len());
            return Err(invalid("length of num_computed", computed.len() as i128, must));
        }
        self.rows.begin_batch();
        for (i, &sequence) in sequences.iter().enumerate() {
            let row = self.rows.next_in_batch(sequence)?;
            if row.written == step.transfers.open() {
                return Err(Error::Unwritten { sequence });
            }
            if let Some(&computed) = computed.and_then(|computed| computed.get(i)).filter(|&&n| n > row.len) {
                return Err(invalid("num_computed", computed, format!("at most {}", row.len)));
            }
            // First prefetch what all of them will publish, so that cache misses overlap.
            let keys = row.keys.as_ref().and_then(|keys| keys.keys.get(row.first.published as usize..));
            let end = computed.map_or(row.len, |computed| computed[i]) / self.block_size;
            for key in keys.unwrap_or_default().iter().take(end.saturating_sub(row.first.published) as usize) {
                step.tiers.device().look_ahead(key);
            }
        }
        for (i, &sequence) in sequences.iter().enumerate() {
            let computed = computed.map_or(self.rows.at(sequence).len, |computed| computed[i]);
            let mut keys = self.rows.at_mut(sequence).keys.take();
            let has_points = keys.is_some() && step.tiers.device().points().is_some();
            match &mut keys {
                Some(keys) if has_points => self.publish_groups(step, sequence, keys, computed),
                Some(keys) => self.publish_row(step, sequence, keys, computed),
                None => {}
            }
            for member in self.growing_tables_of(&[sequence]) {
                // The last boundary may become a point yet.
                let needed = if has_points { computed / self.block_size * self.block_size } else { computed };
                self.leave_window(step, member, needed);
            }
            self.rows.at_mut(sequence).keys = keys;
        }
        Ok(())
    }

    pub(crate) fn common_computed_blocks(&self, sequences: &[SequenceId]) -> Result<Vec<BlockId>> {
        let rows = sequences.iter().map(|&s| self.rows.get(s)).collect::<Result<Vec<_>>>()?;
        let Some((first, rest)) = rows.split_first() else { return Ok(Vec::new()) };
        let has_points = self.groups.has_nulls();
        let computed =
            first.keys.as_ref().map_or(0, |keys| if has_points { keys.computed } else { first.first.published });
        let computed = computed as usize * self.groups.per_key(0);
        let same = |(i, block): &(usize, &BlockId)| {
            !self.is_null(**block)
                && rest.iter().all(|row| row.tier == first.tier && row.first.table.get(*i) == Some(block))
        };
        Ok(first.first.table.iter().enumerate().take(computed).take_while(same).map(|(_, &block)| block).collect())
    }

    /// The keys of a prompt's full blocks.
    pub(super) fn keys_of<'a>(&self, prompt: &Prompt<'a>) -> Result<Cow<'a, RowKeys>> {
        let keys = match self.own_keys(prompt)? {
            Some(keys) => Cow::Borrowed(keys),
            None => Cow::Owned(HashedPrompt::new(prompt, self.block_size)?.keys),
        };
        Ok(if self.groups.ahead() > 0 { self.look_ahead(prompt, keys) } else { keys })
    }

    /// The keys that a hashed prompt has.
    fn own_keys<'a>(&self, prompt: &Prompt<'a>) -> Result<Option<&'a RowKeys>> {
        match prompt.hashed {
            Some(hashed) if hashed.block_size != self.block_size => {
                let must = format!("{}, the manager's", self.block_size);
                Err(invalid("block_size of a hashed prompt", hashed.block_size, must))
            }
            hashed => Ok(hashed.map(|hashed| &hashed.keys)),
        }
    }

    /// Published blocks of a sequence on the device.
    pub(crate) fn published_blocks(&self, view: View<'_>, sequence: SequenceId) -> Result<Vec<BlockId>> {
        self.readable(view, sequence)?;
        let tables = self.rows.tables_of(sequence).flat_map(|table| table.table.iter());
        Ok(tables.copied().filter(|&block| view.tiers.device().block(block).is_published()).collect())
    }

    /// Device blocks cached for the start of a prompt, without null blocks, and the length of that start in blocks.
    pub(crate) fn cached_blocks(&self, view: View<'_>, prompt: &Prompt<'_>) -> Result<(Vec<BlockId>, usize)> {
        let found = self.find_in(view, prompt, 1, false)?;
        let blocks = found.blocks().copied().filter(|&block| !self.is_null(block)).collect();
        Ok((blocks, found.hits))
    }

    /// Fails unless prompts can be computed in chunks of this size.
    pub(super) fn require_chunks(&self, chunk: u32) -> Result<()> {
        if chunk > 0 && !self.groups.cross() {
            return Ok(());
        }
        let must = if chunk == 0 { "at least 1" } else { "None with a group of cross attention" };
        Err(invalid("chunk_tokens", chunk, must.to_owned()))
    }

    pub(super) fn find_prefix<'a>(&self, view: View<'_>, prompt: &Prompt<'a>, batch: usize) -> Result<Match<'a>> {
        self.find_in(view, prompt, batch, view.tiers.keeps_host_copies())
    }

    /// Finds the start of a prompt on the device, and with `host` on the host, too.
    fn find_in<'a>(&self, view: View<'_>, prompt: &Prompt<'a>, batch: usize, host: bool) -> Result<Match<'a>> {
        let is_caching = view.tiers.device().is_caching();
        let limit = if is_caching { prompt.tokens.len().saturating_sub(1) / self.block_size as usize } else { 0 };
        let alone = self.is_full_attention();
        // With a drafter, the keys by which blocks are found are made later.
        let is_run = self.groups.keeps_all();
        let while_hashing = is_run && self.groups.ahead() == 0 && prompt.hashed.is_none();
        let number = u8::try_from(self.groups.anchor()).unwrap_or(u8::MAX);
        let find = |key: &Key| view.tiers.device().find(&key.of_group(number));
        // `found` becomes the table, so reserve room for all of it.
        let room = if is_run { blocks_for(prompt.tokens.len() as u64, self.groups.tokens(number)) + 1 } else { 0 };
        let mut found = Vec::with_capacity(room);
        let keys = match self.own_keys(prompt)? {
            Some(keys) => Cow::Borrowed(keys),
            None if !is_caching && prompt.extras.is_empty() => Cow::Owned(placeholders(prompt, self.block_size)?),
            None => Cow::Owned(hash(prompt, self.block_size, |i, key| {
                if !while_hashing {
                    view.tiers.device().look_ahead(key);
                } else if found.len() + 1 == i {
                    found.extend(find(key));
                }
            })?),
        };
        let keys = if self.groups.ahead() > 0 { self.look_ahead(prompt, keys) } else { keys };
        if is_run {
            // Hashing already looked up each block except the last, up to the first missing one.
            let end = if !while_hashing || found.len() + 1 == limit { limit } else { found.len() };
            found.extend(keys.found_by()[found.len()..end].iter().map_while(find));
        }
        let (mut hits, mut run, parts, others, mut tails) = if alone {
            (found.len(), found.len(), false, Vec::new(), Vec::new())
        } else {
            let start = self.find_groups(view, &keys.found_by()[..limit], prompt.tokens.len(), found);
            let below = if host { self.find_below(view, &keys.found_by()[..limit], batch, &start) } else { None };
            found = Vec::new();
            if let Some(Below { hits, run, parts, tables }) = below {
                (hits, run, parts, vec![Vec::new(); tables.len() - 1], tables)
            } else {
                let Start { hits, run, parts, mut tables } = start;
                let others = tables.split_off(1);
                found = tables.pop().unwrap_or_default();
                (hits, run, parts, others, Vec::new())
            }
        };
        if alone && host {
            let tail = view.find_on_host(&keys.keys[hits..limit], batch);
            hits += tail.len();
            run = hits;
            tails.push(tail);
        }
        Ok(Match {
            keys,
            tenant: view.tiers.tenant_of(&prompt.spec),
            hits,
            run,
            parts,
            at_intervals: parts || self.parted_lately(view),
            found,
            others,
            tails,
            keeps_points: true,
        })
    }

    /// Keys of a prompt for a drafter.
    #[cold]
    fn look_ahead<'a>(&self, prompt: &Prompt<'a>, keys: Cow<'a, RowKeys>) -> Cow<'a, RowKeys> {
        let mut keys = keys.into_owned();
        keys.look_ahead(prompt.tokens, self.block_size);
        Cow::Owned(keys)
    }

    /// Where chunks of a prompt end besides its end: at the points for which a state is kept.
    pub(super) fn chunk_ends(&self, view: View<'_>, found: &Match<'_>, cached: u32, length: u32) -> Vec<u32> {
        let ends = found.keeps_points && self.keeps_states(view);
        if ends { self.due_points((found.run, found.at_intervals), cached, length) } else { Vec::new() }
    }

    /// Number of tokens in a prompt's sequence that are cached, and of all once it is opened.
    fn opened(&self, view: View<'_>, prompt: &Prompt<'_>, found: &Match<'_>, chunk: u32) -> (u32, u32) {
        let length = u32::try_from(prompt.tokens.len()).unwrap_or(u32::MAX);
        let cached = u32::try_from(found.hits).unwrap_or(u32::MAX) * self.block_size;
        let due = self.chunk_ends(view, found, cached, length);
        (cached, self.chunk_end(view, (cached, length), chunk, &due))
    }

    /// Number of blocks that a prompt takes beyond those that were found.
    pub(super) fn missing(&self, view: View<'_>, prompt: &Prompt<'_>, found: &Match<'_>, chunk: u32) -> PerClass {
        let (cached, length) = self.opened(view, prompt, found, chunk);
        let missing = |(number, group): (u8, &Group)| {
            let (size, held) = (self.groups.tokens(number), found.hits * self.groups.per_key(usize::from(number)));
            let skipped = group.skipped(cached, length - cached, held, size);
            self.groups.blocks(number, blocks_for(u64::from(length), size) - held - skipped)
        };
        (0..).zip(self.groups.growing()).map(missing).sum()
    }

    /// Maximum number of null entries in a prompt's tables.
    pub(super) fn passed(&self, view: View<'_>, prompt: &Prompt<'_>, found: &Match<'_>, chunk: u32) -> usize {
        let (_, length) = self.opened(view, prompt, found, chunk);
        let leaving = self.groups.leaving().iter();
        leaving.map(|&group| blocks_for(u64::from(length), self.block_size) * self.groups.per_key(group)).sum()
    }

    /// Opens the rows of a prompt whose found blocks have been claimed.
    fn open_prompt(
        &mut self,
        step: &mut OpenStep<'_>,
        prompt: &Prompt<'_>,
        found: Match<'_>,
        options: PromptOptions,
    ) -> (SequenceId, u32) {
        let (cached, length) = self.opened(step.view(), prompt, &found, options.chunk);
        let on_device = found.on_device();
        let all = u32::try_from(prompt.tokens.len()).unwrap_or(u32::MAX);
        let mut due =
            if found.keeps_points { self.due_points((found.run, found.at_intervals), cached, all) } else { Vec::new() };
        if found.parts {
            self.note_parting(step.view());
        }
        let Match { keys, tenant, hits, run, mut found, mut others, tails, .. } = found;
        if on_device < hits && self.groups.has_nulls() {
            due.insert(0, cached); // the device gets the point, too
        }
        let computed = cached / self.block_size;
        let junction = if run > hits { u32::try_from(run).unwrap_or(0) } else { 0 };
        let keys = RowKeys { tenant, due, junction, resumed: computed, computed, ..keys.into_owned() };
        let published = u32::try_from(on_device).unwrap_or(u32::MAX);
        let mut loaded = 0;
        for (group, tail) in tails.iter().enumerate() {
            let table = group.checked_sub(1).map_or(&mut found, |other| &mut others[other]);
            loaded += step.load(tail, |at| self.loaded_identity(&keys, at, (group, hits)), table);
        }
        if !options.preempted {
            self.stats.prompts += 1;
            self.stats.blocks += keys.keys.len() as u64;
            self.stats.hit_blocks += hits as u64;
            self.stats.tokens += prompt.tokens.len() as u64;
            self.stats.hit_tokens += u64::from(cached);
            self.stats.loaded += loaded;
        }
        let sequence = self.open_row(step, cached, length, found);
        // Only with host copies does anyone ask what the next chunks take.
        if (length as usize) < prompt.tokens.len() && step.tiers.keeps_host_copies() {
            self.prefilling.push((sequence, cached));
        }
        let open = step.transfers.open();
        self.rows.follow(sequence, keys, prompt.tokens);
        let row = self.rows.at_mut(sequence);
        row.first.published = published;
        if on_device < hits {
            // The step that computes the row waits for its loads; the row does not move until they have landed.
            row.ticket = open;
            step.transfers.note_load_read();
        }
        for (group, table) in (1u8..).zip(others) {
            let member = TableId { sequence, group };
            self.open_table(step, member, cached, length, table);
            self.rows.table_mut(member).published = published;
        }
        (sequence, cached)
    }

    /// What a block is that is loaded from the host into an entry of a table, for a prompt with `hits` cached blocks, and
    /// whether it is found by its key on the device.
    fn loaded_identity(&self, keys: &RowKeys, entry: usize, (group, hits): (usize, usize)) -> (CachedIdentity, bool) {
        let keeps_all = self.groups.keeps_all();
        let (at, _) = self.groups.key_of(group, entry);
        let is_anchor = group == self.groups.anchor() && entry == self.anchor_entry(at);
        let identity = Self::identity(keys, at, u8::try_from(group).unwrap_or(u8::MAX));
        let parent = if keeps_all { identity.parent } else { 0 };
        let identity = CachedIdentity { key: self.own_key(keys.found_by(), group, entry), parent, ..identity };
        (identity, is_anchor && (keeps_all || at + 1 == hits))
    }

    /// Hashes tokens added to a row; a row that also got tokens unknown to the cache is no longer followed.
    #[inline]
    fn extend_keys(&mut self, sequence: SequenceId, tokens: &[u32]) {
        let row = self.rows.at_mut(sequence);
        let (known, before) = (row.known as usize, row.len as usize - tokens.len());
        if known < before {
            row.unfollow();
            return;
        }
        // The rest of a chunked prompt is already known, and a row that is not followed records nothing: its `known`
        // lies after all tokens.
        for &token in tokens.get(known - before..).unwrap_or_default() {
            self.rows.push_token(sequence, token);
        }
    }

    pub(crate) fn note_tokens(
        &mut self,
        view: View<'_>,
        sequences: &[SequenceId],
        counts: super::Counts<'_>,
        tokens: &[u32],
    ) -> Result<()> {
        let total = counts.total(sequences.len())?;
        if tokens.len() as u64 != total {
            return Err(invalid("length of token_ids", tokens.len() as i128, format!("{total}, the tokens")));
        }
        refuse_reserved("an id in token_ids", tokens)?;
        self.rows.begin_batch();
        for (i, &sequence) in sequences.iter().enumerate() {
            let row = self.rows.next_in_batch(sequence)?;
            if row.keys.is_none() {
                continue;
            }
            let unknown = row.len.saturating_sub(row.known);
            if counts.at(i) > unknown {
                let must = format!("at most {unknown}, the tokens of sequence {sequence} whose ids are not known");
                return Err(invalid("length of token_ids", counts.at(i), must));
            }
        }
        let mut rest = tokens;
        for (i, &sequence) in sequences.iter().enumerate() {
            let (now, later) = rest.split_at(counts.at(i) as usize);
            rest = later;
            let (row, size) = (self.rows.at_mut(sequence), self.groups.tokens(0) as usize);
            if row.keys.is_none() || now.is_empty() {
                continue;
            }
            // Forks could give a block's tokens different ids, and a block has one key, so the row is no longer
            // followed.
            let first = row.known.saturating_sub(self.groups.ahead()) as usize;
            let blocks = &row.first.table[first / size..(row.known as usize + now.len()).div_ceil(size)];
            if blocks.iter().any(|&block| view.tiers.pool(row.tier).refs(block) > 1) {
                row.unfollow();
            } else {
                for &token in now {
                    self.rows.push_token(sequence, token);
                }
            }
        }
        Ok(())
    }
}
