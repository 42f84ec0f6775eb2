//! Sequences: their block tables, one per cache group, and the keys of their tokens. [`Manager`](crate::Manager)
//! documents their calls.
//!
//! Invariant: a row is writable beyond its length only if its last block is exclusive, unread and not moving.

mod admission;
mod append;
mod check;
mod chunk;
mod extras;
mod fork;
mod groups;
mod owners;
mod points;
mod prompt;
mod relocate;
mod retention;
mod table;
mod truncate;

pub use append::Counts;
pub use append::block_tables::TableRows;
pub use append::pass::Append;
pub use extras::PromptExtra;
pub use groups::Demand;
pub(crate) use owners::Owner;
use owners::Owners;
pub use prompt::{HashedPrompt, PrefixHit, PrefixStats, Prompt, PromptOptions, StoreSearch, export_keys};
use table::Marks;
pub use table::TableId;
pub(crate) use table::{GroupTable, Row, SequenceRows};

use crate::block::TierBlock;
use crate::error::{Error, Result, invalid};
use crate::fit::Share;
use crate::group::{Group, Groups, NULL_BLOCK};
use crate::id::{BlockId, SequenceId, Tier};
use crate::prefix::evict::Hint;
use crate::transfer::{OpenStep, Request, Transfers, View};
use std::collections::HashSet;
use std::ops::Range;

/// All sequences.
#[derive(Debug, Clone)]
pub(crate) struct Sequences {
    block_size: u32,
    groups: Groups,
    /// Device blocks that admission keeps free.
    watermark: Share,
    rows: SequenceRows,
    /// Sequences with recurrent groups that began the block of their last token in the open step, which has yet to write
    /// the state there.
    begun: Marks,
    /// Forks that share a state which the open step has yet to write for another sequence, even if that is freed.
    awaiting: Marks,
    drafts: append::drafts::Drafts,
    /// Prompts that are computed in chunks, and their lengths at the end of the last step.
    prefilling: Vec<(SequenceId, u32)>,
    owners: Owners,
    /// Evictions on the device when a point at an interval was last of use.
    parted: Option<u64>,
    stats: PrefixStats,
    scratch: Vec<BlockId>,
    /// Blocks that a table has just left.
    gone: Vec<BlockId>,
    work: append::pass::Work,
}

impl Sequences {
    pub(crate) fn new(block_size: u32, groups: Groups, watermark: Share) -> Self {
        Self {
            block_size,
            watermark,
            rows: SequenceRows::new(block_size, groups.all()),
            groups,
            begun: Marks::default(),
            awaiting: Marks::default(),
            drafts: append::drafts::Drafts::default(),
            prefilling: Vec::new(),
            owners: Owners::default(),
            parted: None,
            stats: PrefixStats::default(),
            scratch: Vec::new(),
            gone: Vec::new(),
            work: append::pass::Work::default(),
        }
    }

    pub(crate) fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Token slots in a block of a group, and the number of the first block of its class.
    #[inline]
    fn geometry(&self, group: u8) -> (u32, u32) {
        (self.groups.tokens(group), self.groups.first_block(group))
    }

    /// Whether tables have null blocks.
    pub(crate) fn has_nulls(&self) -> bool {
        self.groups.has_nulls()
    }

    /// Sequences that have not been freed.
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Sets the manager's number, which new handles carry.
    pub(crate) fn set_manager(&mut self, number: u16) {
        self.rows.set_manager(number);
    }

    pub(crate) fn rows(&self) -> &SequenceRows {
        &self.rows
    }

    #[cfg(test)]
    pub(crate) fn rows_mut(&mut self) -> &mut SequenceRows {
        &mut self.rows
    }

    /// A sequence.
    pub(crate) fn get(&self, sequence: SequenceId) -> Result<&Row> {
        self.rows.get(sequence)
    }

    /// Blocks of a table.
    pub(crate) fn table(&self, id: TableId) -> Result<&[BlockId]> {
        self.rows.get(id.sequence)?;
        Ok(self.entries(id))
    }

    /// Tokens of a sequence in one group.
    pub(crate) fn num_tokens(&self, id: TableId) -> Result<u32> {
        self.rows.get(id.sequence)?;
        Ok(self.rows.len_of(id))
    }

    /// Device blocks that admission keeps free.
    pub(crate) fn watermark(&self) -> Share {
        self.watermark
    }

    /// Fails unless there is memory for a device of `blocks` blocks.
    pub(crate) fn require_growth(&self, blocks: usize) -> Result<()> {
        if self.owners.are_noted() { self.owners.require(blocks) } else { Ok(()) }
    }

    /// Follows a resize of several page classes, which changes no block's number.
    pub(crate) fn resize_watermark(&mut self, blocks: usize) {
        self.watermark.resize(blocks);
    }

    /// Follows a resize of the device to `blocks` blocks.
    pub(crate) fn resize_device(&mut self, blocks: usize) {
        self.resize_watermark(blocks);
        if self.owners.are_noted() {
            self.owners.grow(blocks);
        }
    }

    /// Counters of the prefix cache.
    pub(crate) fn stats(&self) -> PrefixStats {
        self.stats
    }

    /// Ends the step: it has written the blocks that it began.
    pub(crate) fn end_step(&mut self) {
        self.begun.clear();
        self.awaiting.clear();
    }

    pub(crate) fn slot_mapping(&self, view: View<'_>, ranges: &[(TableId, Range<u32>)], out: &mut [i64]) -> Result<()> {
        let slots = self.num_slots(view, ranges)?;
        if out.len() != slots {
            return Err(invalid("length of out", out.len() as i128, format!("{slots}, the tokens")));
        }
        let mut rest = out;
        for (id, tokens) in ranges {
            let (to, behind) = rest.split_at_mut(tokens.len());
            write_slots(&self.rows.table(*id).table, tokens.start, self.geometry(id.group), to);
            if self.num_drafts(id.sequence) > 0 && self.is_recurrent(*id) {
                self.drafted(id.sequence).write_slots(
                    self.states_behind(*id),
                    (tokens.start, self.groups.first_block(id.group)),
                    to,
                );
            }
            rest = behind;
        }
        Ok(())
    }

    pub(crate) fn num_slots(&self, view: View<'_>, ranges: &[(TableId, Range<u32>)]) -> Result<usize> {
        let mut slots = 0;
        for (id, tokens) in ranges {
            self.readable(view, id.sequence)?;
            let len = self.rows.len_of(*id);
            if tokens.start > tokens.end {
                return Err(invalid("first", tokens.start, format!("at most last, {}", tokens.end)));
            }
            if tokens.end > len {
                return Err(invalid("last", tokens.end, format!("at most {len}, the tokens of the sequence")));
            }
            slots += tokens.len();
        }
        Ok(slots)
    }

    /// A row whose device blocks the current step may read.
    pub(crate) fn readable(&self, view: View<'_>, sequence: SequenceId) -> Result<&Row> {
        let row = self.rows.get(sequence)?;
        refuse_lost(sequence, row)?;
        require_tier(sequence, row, Tier::Device)?;
        self.refuse_loading(sequence, row, view)?;
        Ok(row)
    }

    /// Records that the current step reads these rows: if it loads one of them, it waits for its loads.
    pub(crate) fn note_reads(&self, transfers: &mut Transfers, mut sequences: impl Iterator<Item = SequenceId>) {
        let is_loaded = |sequence| self.rows.get(sequence).is_ok_and(|row| is_loaded_now(row, transfers));
        if transfers.is_loading() && sequences.any(is_loaded) {
            transfers.note_load_read();
        }
    }

    /// A table whose blocks may be returned: not while they are being loaded in the background.
    pub(crate) fn shown(&self, view: View<'_>, id: TableId) -> Result<&[BlockId]> {
        let row = self.rows.get(id.sequence)?;
        if row.tier == Tier::Device && row.moving && view.transfers.is_prefetch(row.ticket) {
            return Err(self.in_flight(id.sequence, row, view));
        }
        Ok(self.entries(id))
    }

    /// All sequences, in the order of their handles.
    pub(crate) fn handles(&self) -> Vec<SequenceId> {
        let mut all: Vec<_> = self.rows.iter().map(|(sequence, _)| sequence).collect();
        all.sort_unstable();
        all
    }

    pub(crate) fn free(&mut self, step: &mut OpenStep<'_>, sequences: &[SequenceId], hint: Option<Hint>) -> Result<()> {
        self.rows.begin_batch();
        for &sequence in sequences {
            self.rows.next_in_batch(sequence)?;
        }
        if self.groups.has_nulls() && step.tiers.device().is_caching() {
            for &sequence in sequences {
                self.make_last_point(step, sequence);
            }
        }
        for id in self.tables_of(sequences) {
            let tier = self.rows.at(id.sequence).tier;
            self.end_turn(step, id, hint);
            self.begin_release(step, id);
            // Release the last block first, so that a cached chain is evicted from its end.
            let table = self.rows.table_mut(id);
            let (nulls, blocks) = (table.null_prefix, table.table.take());
            step.tiers.release_all(tier, &blocks[nulls as usize..]);
            if nulls > 0 {
                step.tiers.unshare((tier, NULL_BLOCK), nulls);
            }
            step.tiers.end_chain();
        }
        for &sequence in sequences {
            self.begun.remove(sequence);
            self.awaiting.remove(sequence);
            self.drafts.set(sequence, 0);
            self.rows.close(sequence);
        }
        step.tiers.enforce_quotas();
        Ok(())
    }

    /// Marks the sequences that have one of the blocks as lost: they can only be freed.
    pub(crate) fn lose(&mut self, blocks: &HashSet<TierBlock>) -> Vec<SequenceId> {
        let hit = |tier, table: &GroupTable| table.table.iter().any(|&block| blocks.contains(&(tier, block)));
        let hit =
            |(sequence, row): &(SequenceId, &Row)| self.rows.tables_of(*sequence).any(|table| hit(row.tier, table));
        let mut sequences: Vec<_> = self.rows.iter().filter(hit).map(|(sequence, _)| sequence).collect();
        sequences.sort_unstable();
        for &sequence in &sequences {
            let row = self.rows.at_mut(sequence);
            row.lost = true;
            row.writable = 0;
        }
        sequences
    }

    pub(crate) fn allocate(
        &mut self,
        step: &mut OpenStep<'_>,
        tokens: &[u32],
        out: &mut Vec<SequenceId>,
    ) -> Result<()> {
        if !self.groups.is_single() {
            return self.allocate_groups(step, tokens, None, out);
        }
        let wanted = tokens.iter().map(|&n| self.blocks_at_start(0, n)).sum();
        step.view().require(Request::device(self.groups.blocks(0, wanted)), Vec::new)?;
        let (group, size) = (self.groups.get(0), self.groups.tokens(0));
        self.require_nulls(step.view(), tokens.iter().map(|&n| group.skipped(0, n, 0, size)))?;
        self.rows.require(tokens.len())?;
        for &n in tokens {
            out.push(self.open_row(step, 0, n, Vec::new()));
        }
        Ok(())
    }

    pub(crate) fn allocate_groups(
        &mut self,
        step: &mut OpenStep<'_>,
        tokens: &[u32],
        encoder_tokens: Option<&[u32]>,
        out: &mut Vec<SequenceId>,
    ) -> Result<()> {
        let encoders = if self.groups.cross() { tokens.len() } else { 0 };
        let found = encoder_tokens.map_or(0, <[u32]>::len);
        if found != encoders || (encoder_tokens.is_some() && !self.groups.cross()) {
            let must = format!("{encoders}, for {} sequences of {} groups", tokens.len(), self.groups.all().len());
            return Err(invalid("length of encoder_tokens", found as i128, must));
        }
        let length = |group, i: usize| match (group, encoder_tokens) {
            (Group::CrossAttention, Some(encoder)) => encoder[i],
            _ => tokens[i],
        };
        let sequences = 0..tokens.len();
        let groups = self.groups.clone();
        let groups = groups.all();
        let numbered = || (0u8..).zip(groups);
        let wanted = numbered().flat_map(|(number, &group)| sequences.clone().map(move |i| (number, group, i)));
        let blocks = |(number, group, i)| self.groups.blocks(number, self.blocks_at_start(number, length(group, i)));
        let wanted = wanted.map(blocks).sum();
        step.view().require(Request::device(wanted), Vec::new)?;
        let passed = numbered().flat_map(|(number, &group)| sequences.clone().map(move |i| (number, group, i)));
        self.require_nulls(
            step.view(),
            passed.map(|(number, group, i)| group.skipped(0, length(group, i), 0, self.groups.tokens(number))),
        )?;
        self.rows.require(tokens.len())?;
        step.prepare(Tier::Device, wanted, true);
        let first = out.len();
        for (number, &group) in (0u8..).zip(groups) {
            for i in sequences.clone() {
                if number == 0 {
                    out.push(self.open_row(step, 0, tokens[i], Vec::new()));
                } else {
                    let id = TableId { sequence: out[first + i], group: number };
                    self.open_table(step, id, 0, length(group, i), Vec::new());
                }
            }
        }
        for (&sequence, &tokens) in out[first..].iter().zip(encoder_tokens.unwrap_or_default()) {
            let row = self.rows.at_mut(sequence);
            (row.encoder_tokens, row.encoder_written) = (tokens, row.written);
        }
        Ok(())
    }

    /// Blocks of one group's table for a new sequence.
    pub(super) fn blocks_at_start(&self, group: u8, tokens: u32) -> usize {
        let size = self.groups.tokens(group);
        blocks_for(u64::from(tokens), size) - self.groups.get(group).skipped(0, tokens, 0, size)
    }

    /// Opens the row of a sequence of `tokens` tokens, with its first group's table, as [`Sequences::open_table`].
    pub(super) fn open_row(
        &mut self,
        step: &mut OpenStep<'_>,
        held: u32,
        tokens: u32,
        table: Vec<BlockId>,
    ) -> SequenceId {
        let sequence = self.rows.open(Tier::Device);
        let open = step.transfers.open();
        let row = self.rows.at_mut(sequence);
        row.len = tokens;
        row.written = open;
        self.note_begun(sequence, held, tokens - held);
        self.open_table(step, TableId::from(sequence), held, tokens, table);
        sequence
    }

    /// Begins a table of a new sequence of `tokens` tokens. The blocks in `table` hold the first `held`; takes blocks for
    /// the rest.
    pub(super) fn open_table(
        &mut self,
        step: &mut OpenStep<'_>,
        id: TableId,
        held: u32,
        tokens: u32,
        mut table: Vec<BlockId>,
    ) {
        let (kind, size) = (self.groups.get(id.group), self.groups.tokens(id.group));
        let wanted = blocks_for(u64::from(tokens), size) - table.len();
        table.reserve(wanted + 1);
        let skipped = kind.skipped(held, tokens - held, table.len(), size);
        Self::pass_over(step, skipped, &mut table);
        step.take((Tier::Device, self.groups.class(id.group)), wanted - skipped, false, &mut table);
        let null_prefix = table.iter().take_while(|&&block| self.is_null(block)).count();
        if self.owners.are_noted() {
            self.owners.note(self.rows.number(id), null_prefix, &table[null_prefix..]);
        }
        self.rows.open_table(id, table).null_prefix = u32::try_from(null_prefix).unwrap_or(u32::MAX);
    }

    /// Loads of the current step land before its tokens are written; loads of earlier steps must have landed.
    fn refuse_loading(&self, sequence: SequenceId, row: &Row, view: View<'_>) -> Result<()> {
        let transfers = view.transfers;
        if row.moving && row.ticket != transfers.open() && transfers.in_flight(row.ticket) {
            return Err(self.in_flight(sequence, row, view));
        }
        Ok(())
    }

    /// The error for a row whose transfer, or an older one, has not ended.
    #[cold]
    fn in_flight(&self, sequence: SequenceId, row: &Row, view: View<'_>) -> Error {
        let earlier = view.transfers.first();
        if earlier < row.ticket && !view.transfers.in_flight(row.ticket) {
            return Error::EarlierInFlight { sequence, ticket: row.ticket, earlier };
        }
        let pool = view.tiers.pool(row.tier);
        let blocks = self.rows.tables_of(sequence).flat_map(|table| table.table.iter());
        let blocks = blocks.filter(|&&block| pool.block(block).is_filling()).count();
        Error::InFlight { sequence, ticket: row.ticket, blocks }
    }
}

/// Blocks for `tokens` tokens.
fn blocks_for(tokens: u64, block_size: u32) -> usize {
    usize::try_from(tokens.div_ceil(u64::from(block_size))).unwrap_or(usize::MAX)
}

fn refuse_lost(sequence: SequenceId, row: &Row) -> Result<()> {
    if row.lost { Err(Error::Lost { sequence }) } else { Ok(()) }
}

pub(crate) fn require_tier(sequence: SequenceId, row: &Row, wanted: Tier) -> Result<()> {
    if row.tier == wanted { Ok(()) } else { Err(Error::WrongTier { sequence, wanted, found: row.tier }) }
}

/// Whether the current step loads the row.
#[inline]
fn is_loaded_now(row: &Row, transfers: &Transfers) -> bool {
    row.moving && row.ticket == transfers.open()
}

/// Writes the slots of tokens from `first` on, block by block: of blocks of that many tokens, counted from the first block
/// of their class.
fn write_slots(table: &[BlockId], first: u32, (block_size, first_block): (u32, u32), out: &mut [i64]) {
    let (index, offset) = ((first / block_size) as usize, first % block_size);
    let (size, begun) = (block_size as usize, (block_size - offset) as usize);
    let (head, rest) = out.split_at_mut(begun.min(out.len()));
    // A null block counts as the first of every class.
    let local = |block: BlockId| i64::from(block.0.saturating_sub(first_block));
    let slot = |block: BlockId, offset: u32| local(block) * i64::from(block_size) + i64::from(offset);
    if !head.is_empty() {
        count_from(slot(table[index], offset), head);
    }
    for (slots, &block) in rest.chunks_mut(size).zip(table.iter().skip(index + 1)) {
        // For the usual block size the loop compiles to a few vector instructions.
        match <&mut [i64; 16]>::try_from(&mut *slots) {
            Ok(slots) => count_from(slot(block, 0), slots),
            Err(_) => count_from(slot(block, 0), slots),
        }
    }
}

#[inline]
fn count_from(first: i64, out: &mut [i64]) {
    let len = i64::try_from(out.len()).unwrap_or(i64::MAX);
    for (to, slot) in out.iter_mut().zip(first..first.saturating_add(len)) {
        *to = slot;
    }
}

#[cfg(test)]
mod tests {
    use crate::{Append, Config, Counts, Manager};

    #[test]
    fn the_slots_of_any_range_are_those_of_its_blocks() {
        for size in [1, 3, 16, 20] {
            let config = Config::new(size, [64, 0, 0]);
            let (mut manager, mut out) = (Manager::new(config).unwrap(), Vec::new());
            manager.allocate(&[size, size * 2], &mut out).unwrap();
            for _ in 0..3 {
                // Alternating, so that neither gets only adjacent blocks.
                let slots = &mut vec![0; 2 * size as usize];
                manager.append(Append::new(&out, Counts::All(size), slots)).unwrap();
            }
            for &sequence in &out {
                let table = manager.block_table(sequence).unwrap().to_vec();
                let len = manager.num_tokens(sequence).unwrap();
                let slot = |token: u32| i64::from(table[(token / size) as usize].0 * size + token % size);
                for (first, last) in (0..=len).flat_map(|first| (first..=len).map(move |last| (first, last))) {
                    let mut slots = vec![-1; (last - first) as usize];
                    manager.slot_mapping(&[(sequence.into(), first..last)], &mut slots).unwrap();
                    assert!(slots.into_iter().eq((first..last).map(slot)), "{first}..{last} of blocks of {size}");
                }
            }
        }
    }
}
