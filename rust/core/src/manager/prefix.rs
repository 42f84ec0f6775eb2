//! The prefix cache: prompts share the blocks of earlier ones that began alike.
//!
//! A block is found only once it is published, and published only once its tokens are computed and its bytes have landed.

use super::hostcache::Found;
use super::{Fit, Manager, blocks_for, invalid};
use crate::error::{Error, Result};
use crate::event::Publication;
use crate::group::{Group, NULL_BLOCK};
use crate::hash::{Chain, Extra, Key, KeySpec, has_reserved, refuse_reserved};
use crate::id::{BlockId, SequenceId, Tier};
use crate::prefix::{CachedIdentity, Published};
use crate::table::{LastBlock, RowKeys, frames_before_extras};
use serde::{Deserialize, Serialize};

/// Something besides tokens that decides the bytes of one block of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockExtra<'a> {
    /// Index of the block in the prompt.
    pub block: usize,
    /// What it is.
    pub extra: Extra<'a>,
}

/// A prompt to be admitted with whatever of it is cached.
///
/// ```
/// use blockyard_core::{Config, KeySpec, Manager, Prompt};
///
/// # fn main() -> blockyard_core::Result<()> {
/// let config = Config { block_size: 4, blocks: [8, 0, 0], watermark: 0.0, prefix_caching: true };
/// let mut manager = Manager::new(config)?;
/// let prompt = Prompt { tokens: &[1, 2, 3, 4, 5, 6], spec: KeySpec::default(), extras: &[] };
/// let mut admitted = Vec::new();
/// manager.allocate_prompts(&[prompt], &mut admitted)?;
/// let ticket = manager.take_decision().ticket; // the model computes all six tokens
/// manager.complete(ticket)?;
/// manager.mark_computed(&[admitted[0].0])?;
/// manager.free(&[admitted[0].0])?;
///
/// manager.allocate_prompts(&[prompt], &mut admitted)?;
/// assert_eq!(admitted[1].1, 4); // the first block is found, two tokens are to be computed
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// Token ids.
    pub tokens: &'a [u32],
    /// What its keys depend on besides its tokens.
    pub spec: KeySpec,
    /// Extras, by rising block.
    pub extras: &'a [BlockExtra<'a>],
}

/// Counters of the prefix cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefixStats {
    /// Prompts that were admitted with their tokens.
    pub prompts: u64,
    /// Their full blocks, and how many of those were found.
    pub blocks: u64,
    /// Full blocks that were found.
    pub hit_blocks: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Tokens that need not be computed.
    pub hit_tokens: u64,
    /// Blocks that turned out to be computed twice and were merged.
    pub merged: u64,
    /// Found blocks that were only on the host and had to be loaded.
    pub loaded: u64,
}

/// What is cached of the start of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixHit {
    /// Tokens that need not be computed, whole blocks; the last token always is to be computed.
    pub tokens: u32,
    /// Blocks of them that only the host has.
    pub host_blocks: usize,
}

/// One prompt's keys, and the table of each group with the blocks found for the first of them.
struct Match {
    keys: RowKeys,
    /// First blocks of the prompt that all groups can serve.
    hits: usize,
    /// The first group's table, and those of the others.
    found: Vec<BlockId>,
    /// What comes after `found`, from the first block on that only the host has.
    tail: Vec<Found>,
    others: Vec<Vec<BlockId>>,
}

impl Match {
    fn blocks(&self) -> impl Iterator<Item = &BlockId> {
        let tail = self.tail.iter().filter_map(|found| match found {
            Found::Device(block) => Some(block),
            Found::Host(_) => None,
        });
        self.found.iter().chain(self.others.iter().flatten()).chain(tail)
    }
}

impl Manager {
    /// Counters since the manager was made.
    #[must_use]
    pub fn prefix_stats(&self) -> PrefixStats {
        self.stats
    }

    /// Whether prompts share cached blocks.
    #[must_use]
    pub fn is_caching(&self) -> bool {
        self.tiers.device().is_caching()
    }

    /// What is cached of the start of a prompt; nothing is taken.
    ///
    /// # Errors
    /// A token has the reserved id.
    pub fn lookup(&self, prompt: &Prompt<'_>) -> Result<PrefixHit> {
        let found = self.find_prefix(prompt, 1)?;
        let tokens = u32::try_from(found.hits).unwrap_or(u32::MAX).saturating_mul(self.block_size);
        Ok(PrefixHit { tokens, host_blocks: self.blocks_to_load(found.tail.iter()) })
    }

    /// Whether a prompt may be admitted, the watermark kept: all of it, even where [`Manager::allocate_chunks`] takes blocks for
    /// a first chunk only, and `lookahead` slots beyond. It takes new blocks, blocks to load into, and cached ones that nothing
    /// uses; blocks that other sequences use cost nothing.
    ///
    /// # Errors
    /// A token has the reserved id.
    pub fn can_admit_prompt(&self, prompt: &Prompt<'_>, chunk: u32, lookahead: u32) -> Result<Fit> {
        let found = [self.find_prefix(prompt, 1)?];
        let loads = self.blocks_to_load(found.iter().flat_map(|found| &found.tail));
        let missing = self.missing(prompt, &found[0], u32::MAX).max(self.missing(prompt, &found[0], chunk));
        let tokens = prompt.tokens.len() as u64;
        let ahead = blocks_for(tokens + u64::from(lookahead), self.block_size) - blocks_for(tokens, self.block_size);
        let wanted = missing + ahead * self.groups.growing().len() + loads + self.idle_blocks(&found);
        Ok(self.admit(wanted, self.tiers.device().available()))
    }

    /// Opens one sequence for each prompt, sharing the longest prefix of it that is cached; appends to `out` each handle
    /// and how many of its first tokens need not be computed. The last token always is to be computed.
    ///
    /// # Errors
    /// The device has too few blocks for the whole batch, or a token has the reserved id.
    pub fn allocate_prompts(&mut self, prompts: &[Prompt<'_>], out: &mut Vec<(SequenceId, u32)>) -> Result<()> {
        self.allocate_chunks(prompts, u32::MAX, out)
    }

    /// As [`Manager::allocate_prompts`], with blocks for at most `chunk` tokens of each prompt beyond the cached ones. The
    /// rest is put in by [`Manager::append`], a chunk at a time; the cache knows its tokens already.
    ///
    /// # Errors
    /// As [`Manager::allocate_prompts`]; `chunk` is 0; a group wants an encoder's tokens.
    pub fn allocate_chunks(
        &mut self,
        prompts: &[Prompt<'_>],
        chunk: u32,
        out: &mut Vec<(SequenceId, u32)>,
    ) -> Result<()> {
        if chunk == 0 || self.groups.cross() {
            let must = "at least 1, of groups without an encoder".to_owned();
            return Err(invalid("tokens of a chunk", chunk, must));
        }
        self.rows.require(prompts.len().saturating_mul(self.groups.all().len()))?;
        let matches =
            prompts.iter().map(|prompt| self.find_prefix(prompt, prompts.len())).collect::<Result<Vec<_>>>()?;
        let idle = self.idle_blocks(&matches);
        let new: usize = prompts.iter().zip(&matches).map(|(prompt, found)| self.missing(prompt, found, chunk)).sum();
        let loads = self.blocks_to_load(matches.iter().flat_map(|found| &found.tail));
        self.tiers.device().require(new + loads + idle, true)?;
        self.require_nulls(prompts.iter().zip(&matches).map(|(prompt, found)| self.passed(prompt, found, chunk)))?;
        for block in matches.iter().flat_map(Match::blocks) {
            self.tiers.claim((Tier::Device, *block));
        }
        for (prompt, found) in prompts.iter().zip(matches) {
            out.push(self.open_prompt(prompt, found, chunk)?);
        }
        Ok(())
    }

    /// Appends tokens like [`Manager::append`], or like [`Manager::append_with_tables`] where there are any, and lets the prefix cache know them: `tokens` are the ids, sequence by
    /// sequence.
    ///
    /// # Errors
    /// As [`Manager::append`]; a token has the reserved id; there are not as many ids as tokens.
    pub fn append_tokens(
        &mut self,
        sequences: &[SequenceId],
        counts: super::Counts<'_>,
        lookahead: u32,
        tokens: &[u32],
        tables: Option<super::TableRows<'_>>,
        slots: &mut [i64],
    ) -> Result<()> {
        let total = counts.total(sequences.len())?;
        if tokens.len() as u64 != total {
            return Err(invalid("number of token ids", tokens.len() as i128, format!("{total}, the tokens")));
        }
        refuse_reserved(tokens)?;
        self.append_synced(sequences, counts, lookahead, tables, slots)?;
        let mut rest = tokens;
        for (i, &sequence) in sequences.iter().enumerate() {
            let (now, later) = rest.split_at(counts.at(i) as usize);
            rest = later;
            self.extend_keys(sequence, now)?;
        }
        Ok(())
    }

    /// Publishes the full blocks of the sequences: the model has computed all their tokens. A block whose key another
    /// block already has is given up for that one; what fell out of a window is given back.
    ///
    /// # Errors
    /// A handle is unknown or named twice, or the sequence has tokens that the present step is yet to write.
    pub fn mark_computed(&mut self, sequences: &[SequenceId]) -> Result<()> {
        self.mark_computed_to(sequences, None)
    }

    /// As [`Manager::mark_computed`], of the first so many tokens of each sequence: a prompt is computed in chunks.
    ///
    /// # Errors
    /// As [`Manager::mark_computed`]; there is not one number a sequence, or a sequence is shorter.
    pub fn mark_computed_to(&mut self, sequences: &[SequenceId], computed: Option<&[u32]>) -> Result<()> {
        if let Some(computed) = computed.filter(|computed| computed.len() != sequences.len()) {
            let must = format!("{}, the sequences", sequences.len());
            return Err(invalid("number of computed lengths", computed.len() as i128, must));
        }
        self.rows.begin_batch();
        for (i, &sequence) in sequences.iter().enumerate() {
            let row = self.rows.next_in_batch(sequence)?;
            if row.written == self.transfers.open() {
                return Err(Error::Unwritten { sequence });
            }
            if let Some(&computed) = computed.and_then(|computed| computed.get(i)).filter(|&&n| n > row.len) {
                return Err(invalid("number of computed tokens", computed, format!("at most {}", row.len)));
            }
        }
        for (i, &sequence) in sequences.iter().enumerate() {
            let computed = computed.map_or(self.rows.at(sequence).len, |computed| computed[i]);
            let keys = self.rows.at_mut(sequence).keys.take();
            for group in 0..self.groups.growing().len() {
                let group_tables = self.rows.at(sequence).group_tables.as_deref();
                let member = group_tables.map_or(sequence, |group_tables| group_tables[group]);
                if let Some(keys) = &keys {
                    self.publish_row(member, keys, computed);
                }
                self.slide(member, computed);
            }
            self.rows.at_mut(sequence).keys = keys;
        }
        Ok(())
    }

    /// Blocks at the start of all the sequences that they share and that are computed.
    ///
    /// # Errors
    /// A handle is unknown.
    pub fn common_computed_blocks(&self, sequences: &[SequenceId]) -> Result<Vec<BlockId>> {
        let rows = sequences.iter().map(|&s| self.rows.get(s)).collect::<Result<Vec<_>>>()?;
        let Some((first, rest)) = rows.split_first() else { return Ok(Vec::new()) };
        let computed = if first.keys.is_some() { first.published as usize } else { 0 };
        let same = |(i, block): &(usize, &BlockId)| {
            !self.is_null(**block) && rest.iter().all(|row| row.tier == first.tier && row.table.get(*i) == Some(block))
        };
        Ok(first.table.iter().enumerate().take(computed).take_while(same).map(|(_, &block)| block).collect())
    }

    /// Forgets everything that is cached, host copies too, unless a block is in use; returns whether it did.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.tiers.reset_cache()
    }

    /// Device blocks that are cached for the start of a prompt, null blocks left out, and how many blocks that start has.
    pub(super) fn cached_blocks(&self, prompt: &Prompt<'_>) -> Result<(Vec<BlockId>, usize)> {
        let found = self.find_prefix(prompt, 1)?;
        let tables = found.found.iter().chain(found.others.iter().flatten());
        let blocks = tables.copied().filter(|&block| !self.is_null(block)).collect();
        Ok((blocks, found.hits - found.tail.len()))
    }

    /// Found blocks that nothing uses yet.
    fn idle_blocks(&self, matches: &[Match]) -> usize {
        let idle = |block: &&BlockId| !self.tiers.device().block(**block).is_used();
        if let [one] = matches {
            return one.blocks().filter(idle).count();
        }
        let mut blocks: Vec<BlockId> = matches.iter().flat_map(Match::blocks).filter(idle).copied().collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks.len()
    }

    fn find_prefix(&self, prompt: &Prompt<'_>, batch: usize) -> Result<Match> {
        let size = self.block_size as usize;
        let mut chain = Chain::new(&prompt.spec, self.block_size, 0);
        let blocks = prompt.tokens.chunks_exact(size);
        let pending = blocks.remainder();
        let mut keys: Vec<Key> = Vec::with_capacity(blocks.len() + 1);
        // Room for the whole table, which it becomes.
        let mut found = Vec::with_capacity(blocks_for(prompt.tokens.len() as u64, self.block_size) + 1);
        let limit = prompt.tokens.len().saturating_sub(1) / size;
        let alone = self.groups.is_single() && !self.groups.slide();
        let (mut extras, mut surplus, mut last_own) = (prompt.extras, Vec::new(), 0);
        let (before_first, mut reserved) = (chain, has_reserved(pending));
        for (i, tokens) in blocks.clone().enumerate() {
            reserved |= has_reserved(tokens);
            let own = extras.iter().take_while(|extra| extra.block == i).count();
            let key = if own == 0 {
                chain.checked_block(tokens, &[])?
            } else {
                let of_block: Vec<Extra<'_>> = extras[..own].iter().map(|extra| extra.extra).collect();
                let key = chain.checked_block(tokens, &of_block)?;
                let regular = frames_before_extras(i + 1, self.block_size);
                surplus.push((u32::try_from(i).unwrap_or(u32::MAX), chain.frames().saturating_sub(regular)));
                key
            };
            (extras, last_own) = (&extras[own..], own);
            // One key behind the hashing, which takes so long that this costs nothing.
            if let Some(key) = keys.last() {
                if alone && found.len() + 1 == i {
                    found.extend(self.tiers.device().find(key));
                } else {
                    self.tiers.device().look_ahead(key);
                }
            }
            keys.push(key);
        }
        if reserved {
            refuse_reserved(prompt.tokens)?;
        }
        if let Some(extra) = extras.first() {
            let must = format!("rising, and below {}, the prompt's full blocks", keys.len());
            return Err(invalid("block of an extra key", extra.block as i128, must));
        }
        let (hits, others) = if alone {
            if found.len() + 1 == limit.min(keys.len()) {
                found.extend(keys.get(found.len()).and_then(|key| self.tiers.device().find(key)));
            }
            (found.len(), Vec::new())
        } else {
            self.find_groups(&keys[..limit], &mut found)
        };
        let keeps_copies = alone && self.tiers.keeps_host_copies();
        let tail = if keeps_copies { self.find_on_host(&keys[hits..limit], batch) } else { Vec::new() };
        let hits = hits + tail.len();
        let last = blocks.last().filter(|_| last_own == 0).map(|tokens| {
            let frames = chain.frames().saturating_sub(self.block_size.div_ceil(16));
            let before = keys.iter().rev().nth(1).map_or(before_first, |&key| Chain::resume(key, frames));
            LastBlock { before, tokens: tokens.to_vec() }
        });
        let (pending, lora_id, tenant) = (pending.to_vec(), prompt.spec.lora_id, self.tiers.tenant_of(&prompt.spec));
        let keys = RowKeys { chain, keys, pending, lora_id, tenant, surplus, last };
        Ok(Match { keys, hits, found, tail, others })
    }

    /// Tokens that a prompt's sequence has once it is opened, of which the first `hits` blocks are cached.
    fn opened(&self, prompt: &Prompt<'_>, hits: usize, chunk: u32) -> (u32, u32) {
        let length = u32::try_from(prompt.tokens.len()).unwrap_or(u32::MAX);
        let cached = u32::try_from(hits).unwrap_or(u32::MAX) * self.block_size;
        (cached, self.chunk_end(cached, length, chunk))
    }

    /// Blocks that a prompt takes beyond those found.
    fn missing(&self, prompt: &Prompt<'_>, found: &Match, chunk: u32) -> usize {
        let (cached, length) = self.opened(prompt, found.hits, chunk);
        let entries = blocks_for(u64::from(length), self.block_size) - found.hits;
        let skipped = |group: &Group| group.skipped(cached, length - cached, found.hits, self.block_size);
        self.groups.growing().iter().map(|group| entries - skipped(group)).sum()
    }

    /// Null entries that a prompt's tables get at most.
    fn passed(&self, prompt: &Prompt<'_>, found: &Match, chunk: u32) -> usize {
        let (_, length) = self.opened(prompt, found.hits, chunk);
        let sliding = self.groups.growing().iter().filter(|group| group.slides()).count();
        blocks_for(u64::from(length), self.block_size) * sliding
    }

    /// Opens the rows of a prompt whose found blocks have been claimed.
    fn open_prompt(&mut self, prompt: &Prompt<'_>, found: Match, chunk: u32) -> Result<(SequenceId, u32)> {
        let (cached, length) = self.opened(prompt, found.hits, chunk);
        let Match { keys, hits, mut found, tail, others } = found;
        self.stats.prompts += 1;
        self.stats.blocks += keys.keys.len() as u64;
        self.stats.hit_blocks += hits as u64;
        self.stats.tokens += prompt.tokens.len() as u64;
        self.stats.hit_tokens += u64::from(cached);
        let published = u32::try_from(hits - tail.len()).unwrap_or(u32::MAX);
        self.load(&tail, &keys, &mut found)?;
        let sequence = self.open_row(0, cached, length, found);
        let open = self.transfers.open();
        let row = self.rows.at_mut(sequence);
        row.keys = Some(Box::new(keys));
        row.published = published;
        if !tail.is_empty() {
            // The step that computes the row waits for its loads; until they have landed it is not moved elsewhere.
            row.ticket = open;
        }
        if !self.groups.is_single() {
            let mut rows = Vec::with_capacity(others.len());
            for (group, table) in (1u8..).zip(others) {
                let member = self.open_row(group, cached, length, table);
                self.rows.at_mut(member).published = published;
                rows.push(member);
            }
            self.link_group_tables(&[sequence], &rows);
        }
        Ok((sequence, cached))
    }

    /// Hashes tokens that a row got; a row that also got tokens unknown to the cache is no longer followed.
    fn extend_keys(&mut self, sequence: SequenceId, tokens: &[u32]) -> Result<()> {
        let size = self.block_size as usize;
        let row = self.rows.at_mut(sequence);
        let Some(keys) = &mut row.keys else { return Ok(()) };
        let known = keys.keys.len() * size + keys.pending.len();
        let before = row.len as usize - tokens.len();
        if known < before {
            row.keys = None;
            return Ok(());
        }
        // What is left of a prompt that is put in by chunks is known already.
        for &token in tokens.get(known - before..).unwrap_or_default() {
            keys.pending.push(token);
            if keys.pending.len() == size {
                let before = keys.chain;
                keys.keys.push(keys.chain.checked_block(&keys.pending, &[])?);
                let next = Vec::with_capacity(size);
                keys.last = Some(LastBlock { before, tokens: std::mem::replace(&mut keys.pending, next) });
            }
        }
        Ok(())
    }

    /// Publishes what has landed of one row on the device, and is computed.
    fn publish_row(&mut self, sequence: SequenceId, keys: &RowKeys, computed: u32) {
        let row = self.rows.at_mut(sequence);
        // What its blocks were loaded or copied from may yet turn out to be lost, and all computed from it too.
        if row.tier != Tier::Device || row.lost || !self.transfers.is_settled(row.ticket) {
            return;
        }
        let (group, slide) = (row.group, self.groups.slide());
        let end = keys.keys.len().min((computed / self.block_size) as usize);
        let mut at = row.published.max(row.null_prefix) as usize;
        while at < end {
            let (key, block) = (keys.keys[at].of_group(group), row.table[at]);
            if slide && block == NULL_BLOCK {
                at += 1;
                continue;
            }
            if self.tiers.device().block(block).is_filling() {
                break;
            }
            let identity = CachedIdentity { key, depth: u32::try_from(at).unwrap_or(u32::MAX), tenant: keys.tenant };
            let publication = || publication(keys, at, block, group, self.block_size);
            match self.tiers.publish((Tier::Device, block), identity, publication) {
                Published::Now | Published::Before => {}
                Published::As(canonical) => {
                    self.tiers.claim((Tier::Device, canonical));
                    row.table.replace(at, canonical);
                    self.tiers.release((Tier::Device, block));
                    // Where others still use the block given up, there is one more in use.
                    self.tiers.note_peak();
                    self.stats.merged += 1;
                }
            }
            at += 1;
        }
        row.published = row.published.max(u32::try_from(at).unwrap_or(u32::MAX));
    }
}

/// What the event says of the block that a row publishes.
fn publication(keys: &RowKeys, at: usize, block: BlockId, group: u8, block_size: u32) -> Option<Publication> {
    let parent = at.checked_sub(1).and_then(|before| keys.chain_at(before, block_size));
    let key = keys.chain_at(at, block_size)?;
    Some(Publication { block, key, parent, tokens: block_size, lora_id: keys.lora_id, group })
}
