//! The prefix cache: prompts share the blocks of earlier ones that began alike.
//!
//! A block is found only once it is published, and published only once its tokens are computed and its bytes have landed.

use super::{Manager, blocks_for, invalid, release, take};
use crate::error::{Error, Result};
use crate::event::Publication;
use crate::hash::{Chain, Extra, Key, KeySpec, refuse_reserved};
use crate::id::{BlockId, SequenceId, Tier};
use crate::pool::Published;
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
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// Token ids.
    pub tokens: &'a [u32],
    /// What its keys depend on beside its tokens.
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
}

/// One prompt's keys and the blocks found for the first of them.
struct Match {
    keys: RowKeys,
    found: Vec<BlockId>,
}

impl Manager {
    /// Counters since the manager was made.
    #[must_use]
    pub fn prefix_stats(&self) -> PrefixStats {
        self.stats
    }

    /// Tokens at the start of a prompt whose blocks are cached; nothing is taken.
    ///
    /// # Errors
    /// A token has the reserved id.
    pub fn cached_tokens(&self, prompt: &Prompt<'_>) -> Result<u32> {
        let found = self.find_prefix(prompt)?.found.len();
        Ok(u32::try_from(found).unwrap_or(u32::MAX).saturating_mul(self.block_size))
    }

    /// Opens one sequence for each prompt, sharing the longest prefix of it that is cached; appends to `out` each handle
    /// and how many of its first tokens need not be computed. The last token always is to be computed.
    ///
    /// # Errors
    /// The device has too few blocks for the whole batch, or a token has the reserved id.
    pub fn allocate_prompts(&mut self, prompts: &[Prompt<'_>], out: &mut Vec<(SequenceId, u32)>) -> Result<()> {
        self.rows.require(prompts.len())?;
        let matches = prompts.iter().map(|prompt| self.find_prefix(prompt)).collect::<Result<Vec<_>>>()?;
        let idle = self.idle_blocks(&matches);
        let held = |(prompt, found): (&Prompt<'_>, &Match)| {
            blocks_for(prompt.tokens.len() as u64, self.block_size) - found.found.len()
        };
        let new: usize = prompts.iter().zip(&matches).map(held).sum();
        self.pools[0].require(new + idle, true)?;
        for block in matches.iter().flat_map(|m| &m.found) {
            self.pools[0].claim(*block);
        }
        for (prompt, found) in prompts.iter().zip(matches) {
            out.push(self.open_prompt(prompt, found));
        }
        Ok(())
    }

    /// Appends tokens like [`Manager::append`], or like [`Manager::append_with_tables`] where there are any, and lets the prefix cache know them: `tokens` are the ids, sequence by
    /// sequence.
    ///
    /// # Errors
    /// As [`Manager::append`]; a token has the reserved id; there are not as many ids as slots.
    pub fn append_tokens(
        &mut self,
        sequences: &[SequenceId],
        counts: super::Counts<'_>,
        lookahead: u32,
        tokens: &[u32],
        tables: Option<super::TableRows<'_>>,
        slots: &mut [i64],
    ) -> Result<()> {
        if tokens.len() != slots.len() {
            return Err(invalid("number of token ids", tokens.len() as i128, format!("{}, the slots", slots.len())));
        }
        refuse_reserved(tokens)?;
        self.append_shown(sequences, counts, lookahead, tables, slots)?;
        let mut rest = tokens;
        for (i, &sequence) in sequences.iter().enumerate() {
            let (now, later) = rest.split_at(counts.at(i) as usize);
            rest = later;
            self.extend_keys(sequence, now)?;
        }
        Ok(())
    }

    /// Publishes the full blocks of the sequences: the model has computed all their tokens. A block whose key another
    /// block already has is given up for that one.
    ///
    /// # Errors
    /// A handle is unknown or named twice, or the sequence has tokens that the present step is yet to write.
    pub fn mark_computed(&mut self, sequences: &[SequenceId]) -> Result<()> {
        self.rows.begin_batch();
        for &sequence in sequences {
            let row = self.rows.next_in_batch(sequence)?;
            if row.written == self.tickets.open() {
                return Err(Error::Unwritten { sequence });
            }
        }
        for &sequence in sequences {
            self.publish_row(sequence);
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
        let computed = first.keys.as_ref().map_or(0, |keys| keys.published);
        let same = |(i, block): &(usize, &BlockId)| {
            rest.iter().all(|row| row.tier == first.tier && row.table.get(*i) == Some(block))
        };
        Ok(first.table.iter().enumerate().take(computed).take_while(same).map(|(_, &block)| block).collect())
    }

    /// Forgets everything that is cached, unless a block is in use; returns whether it did.
    pub fn reset_prefix_cache(&mut self) -> bool {
        if self.pools[0].free() != self.pools[0].len() {
            return false;
        }
        self.pools[0].unpublish_all();
        for (tier, twin) in self.pools[0].take_orphans() {
            self.pools[tier.index()].set_twin(twin, None);
        }
        if let Some(events) = &mut self.events {
            events.cleared(&mut self.pools, Tier::Device);
        }
        true
    }

    /// Found blocks that nothing uses yet.
    fn idle_blocks(&self, matches: &[Match]) -> usize {
        let idle = |block: &&BlockId| self.pools[0].is_idle(**block);
        if let [one] = matches {
            return one.found.iter().filter(idle).count();
        }
        let mut blocks: Vec<BlockId> = matches.iter().flat_map(|m| &m.found).filter(idle).copied().collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks.len()
    }

    fn find_prefix(&self, prompt: &Prompt<'_>) -> Result<Match> {
        let size = self.block_size as usize;
        let mut chain = Chain::new(&prompt.spec, self.block_size, 0);
        let blocks = prompt.tokens.chunks_exact(size);
        let pending = blocks.remainder();
        refuse_reserved(prompt.tokens)?;
        let mut keys = Vec::with_capacity(blocks.len() + 1);
        let (mut extras, mut surplus, mut before) = (prompt.extras, Vec::new(), None);
        for (i, tokens) in blocks.clone().enumerate() {
            before = Some(chain);
            let own = extras.iter().take_while(|extra| extra.block == i).count();
            let key = if own == 0 {
                chain.checked_block(tokens, &[])?
            } else {
                before = None;
                let of_block: Vec<Extra<'_>> = extras[..own].iter().map(|extra| extra.extra).collect();
                let key = chain.checked_block(tokens, &of_block)?;
                let regular = frames_before_extras(i + 1, self.block_size);
                surplus.push((u32::try_from(i).unwrap_or(u32::MAX), chain.frames().saturating_sub(regular)));
                key
            };
            extras = &extras[own..];
            keys.push(key);
        }
        if let Some(extra) = extras.first() {
            let must = format!("rising, and below {}, the prompt's full blocks", keys.len());
            return Err(invalid("block of an extra key", extra.block as i128, must));
        }
        let most = prompt.tokens.len().saturating_sub(1) / size;
        // Room for the whole table, which it becomes.
        let mut found = Vec::with_capacity(blocks_for(prompt.tokens.len() as u64, self.block_size) + 1);
        found.extend(keys[..most].iter().map_while(|key: &Key| self.pools[0].find(key)));
        let published = found.len();
        let last = before.zip(blocks.last()).map(|(before, tokens)| LastBlock { before, tokens: tokens.to_vec() });
        let (pending, lora_id) = (pending.to_vec(), prompt.spec.lora_id);
        Ok(Match { keys: RowKeys { chain, keys, pending, published, priority: 0, lora_id, surplus, last }, found })
    }

    /// Opens the row of a prompt whose found blocks have been claimed.
    fn open_prompt(&mut self, prompt: &Prompt<'_>, found: Match) -> (SequenceId, u32) {
        let Match { keys, found: mut table } = found;
        let hits = table.len();
        let held = blocks_for(prompt.tokens.len() as u64, self.block_size);
        table.reserve(held + 1 - hits);
        self.step.reuses_drained |= take(&mut self.pools, Tier::Device, held - hits, &mut table);
        let sequence = self.rows.open(Tier::Device, table);
        let open = self.tickets.open();
        let length = u32::try_from(prompt.tokens.len()).unwrap_or(u32::MAX);
        let cached = u32::try_from(hits).unwrap_or(u32::MAX) * self.block_size;
        self.stats.prompts += 1;
        self.stats.blocks += keys.keys.len() as u64;
        self.stats.hit_blocks += hits as u64;
        self.stats.tokens += u64::from(length);
        self.stats.hit_tokens += u64::from(cached);
        let row = self.rows.at_mut(sequence);
        row.len = length;
        row.written = open;
        row.keys = Some(Box::new(keys));
        (sequence, cached)
    }

    /// Hashes tokens that a row got; a row that also got tokens unknown to the cache is no longer followed.
    fn extend_keys(&mut self, sequence: SequenceId, tokens: &[u32]) -> Result<()> {
        let size = self.block_size as usize;
        let row = self.rows.at_mut(sequence);
        let Some(keys) = &mut row.keys else { return Ok(()) };
        let known = keys.keys.len() * size + keys.pending.len() + tokens.len();
        if known != row.len as usize {
            row.keys = None;
            return Ok(());
        }
        for &token in tokens {
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

    /// Publishes what has landed of one row on the device.
    fn publish_row(&mut self, sequence: SequenceId) {
        let row = self.rows.at_mut(sequence);
        // What its blocks were loaded or copied from may yet turn out to be lost, and all computed from it too.
        if row.tier != Tier::Device || row.lost || !self.tickets.is_settled(row.ticket) {
            return;
        }
        let Some(keys) = &mut row.keys else { return };
        while let (Some(&key), Some(&block)) = (keys.keys.get(keys.published), row.table.get(keys.published)) {
            if self.pools[0].is_writing(block) {
                break;
            }
            let depth = u32::try_from(keys.published).unwrap_or(u32::MAX);
            match self.pools[0].publish(block, key, depth) {
                Published::Now => {
                    let told = self.events.as_mut().and_then(|e| Some((e, publication(keys, block, self.block_size)?)));
                    if let Some((events, publication)) = told {
                        events.stored(&mut self.pools, Tier::Device, publication);
                    }
                }
                Published::Before => {}
                Published::As(canonical) => {
                    self.pools[0].claim(canonical);
                    row.table.replace(keys.published, canonical);
                    release(&mut self.pools, Tier::Device, block);
                    self.stats.merged += 1;
                }
            }
            keys.published += 1;
        }
    }
}

/// What the events are told of the block that a row publishes next.
fn publication(keys: &RowKeys, block: BlockId, block_size: u32) -> Option<Publication> {
    let at = keys.published;
    let parent = at.checked_sub(1).and_then(|before| keys.chain_at(before, block_size));
    let key = keys.chain_at(at, block_size)?;
    Some(Publication { block, key, parent, tokens: block_size, lora_id: keys.lora_id })
}
