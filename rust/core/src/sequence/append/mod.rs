//! Appending tokens to a batch of sequences: new blocks, lookahead, copy-on-write, slots.

pub(super) mod block_tables;
pub(super) mod drafts;
pub(super) mod pass;
mod window;

use super::table::Row;
use super::{Sequences, TableId, blocks_for, is_loaded_now, refuse_lost, require_tier, write_slots};
use crate::block::LeaseKind;
use crate::decision::Kind;
use crate::error::{Error, Result, invalid};
use crate::fit::{AllocStatus, Fit};
use crate::id::{BlockId, SequenceId, Tier};
use crate::page::PerClass;
use crate::transfer::{OpenStep, Request, View};
use pass::{Append, Passed, Slow, Work, begin_block, defer_all, fits, next_block, next_blocks, pass};
use std::ops::Range;

/// Tokens to append to each sequence of a batch.
#[derive(Clone, Copy, Debug)]
pub enum Counts<'a> {
    /// The same number to all.
    All(u32),
    /// One number per sequence.
    Each(&'a [u32]),
    /// One number per sequence, and how many of each one's tokens, the last ones, are drafts that
    /// [`Manager::truncate`](crate::Manager::truncate) may reject: in recurrent groups, too.
    Drafted {
        /// Tokens, drafts included.
        tokens: &'a [u32],
        /// Drafts, fewer than the tokens.
        drafts: &'a [u32],
    },
}

impl Counts<'_> {
    /// Tokens for one sequence of the batch.
    #[inline]
    #[must_use]
    pub fn at(self, index: usize) -> u32 {
        match self {
            Self::All(n) => n,
            Self::Each(counts) | Self::Drafted { tokens: counts, .. } => counts[index],
        }
    }

    /// Drafts among the tokens for one sequence of the batch.
    #[inline]
    #[must_use]
    pub fn drafts_at(self, index: usize) -> u32 {
        match self {
            Self::Drafted { drafts, .. } => drafts[index],
            _ => 0,
        }
    }

    /// Tokens for a batch of `sequences` sequences.
    ///
    /// # Errors
    /// There is not one number per sequence, or a sequence has as many drafts as tokens.
    pub fn total(self, sequences: usize) -> Result<u64> {
        match self {
            Self::All(n) => Ok(u64::from(n) * sequences as u64),
            Self::Each(counts) if counts.len() == sequences => Ok(counts.iter().map(|&n| u64::from(n)).sum()),
            Self::Each(counts) => {
                Err(invalid("length of num_tokens", counts.len() as i128, format!("{sequences}, the sequences")))
            }
            Self::Drafted { tokens, drafts } => {
                if drafts.len() != sequences {
                    let must = format!("{sequences}, the sequences");
                    return Err(invalid("length of draft_tokens", drafts.len() as i128, must));
                }
                let total = Counts::Each(tokens).total(sequences)?;
                match drafts.iter().zip(tokens).find(|(drafts, tokens)| **drafts > tokens.saturating_sub(1)) {
                    Some((&drafts, tokens)) => {
                        let must =
                            format!("at most {}, one fewer than its sequence's tokens", tokens.saturating_sub(1));
                        Err(invalid("draft_tokens", drafts, must))
                    }
                    None => Ok(total),
                }
            }
        }
    }
}

impl Sequences {
    pub(crate) fn blocks_to_append(
        &mut self,
        view: View<'_>,
        sequences: &[SequenceId],
        counts: Counts<'_>,
        lookahead: u32,
    ) -> Result<usize> {
        Ok(self.request_append(view, sequences, counts, lookahead)?.blocks.total())
    }

    /// The device blocks that an append takes, which keeps tails of points only if there is room.
    fn request_append(
        &mut self,
        view: View<'_>,
        sequences: &[SequenceId],
        counts: Counts<'_>,
        lookahead: u32,
    ) -> Result<Request> {
        let keeps_tails = self.groups.has_nulls();
        let request = self.request_with(view, (sequences, counts, lookahead), keeps_tails)?;
        if !keeps_tails || view.fit(request, PerClass::default(), Vec::new).status == AllocStatus::Ok {
            return Ok(request);
        }
        self.request_with(view, (sequences, counts, lookahead), false)
    }

    /// The device blocks that an append takes. Next to the new blocks, at least the current ones of one sequence must
    /// fit, unless its window may free them.
    fn request_with(
        &mut self,
        view: View<'_>,
        (sequences, counts, lookahead): (&[SequenceId], Counts<'_>, u32),
        keeps_tails: bool,
    ) -> Result<Request> {
        counts.total(sequences.len())?;
        self.rows.begin_batch();
        let (mut new, mut freed) = (PerClass::default(), PerClass::default());
        let (mut held, mut shared) = (PerClass::default(), std::mem::take(&mut self.scratch));
        shared.clear();
        let mut result = Ok(());
        for (i, id) in self.growing_tables_of(sequences).enumerate() {
            let (sequence, count) = (id.sequence, counts.at(i % sequences.len()));
            let drafts = if self.groups.has_states() { counts.drafts_at(i % sequences.len()) } else { 0 };
            let row = if id.group == 0 { self.rows.next_in_batch(sequence) } else { Ok(self.rows.at_mut(sequence)) };
            match row {
                Ok(row) if drafts == 0 && fits(row.len, count, lookahead, row.writable) => {
                    held = held.with(PerClass::of(self.groups.class(0), row.first.table.len()), usize::max);
                }
                Ok(_) => match self.need(view, id, (count, drafts), lookahead, &mut shared) {
                    Ok(need) => {
                        let class = self.groups.class(id.group);
                        *new.at(class) += need.blocks;
                        *freed.at(class) += self.freed(view, id, need, keeps_tails);
                        *held.at(class) = held.get(class).max(self.rows.table(id).table.len());
                    }
                    Err(error) => result = Err(error),
                },
                Err(error @ Error::RepeatedSequence { .. }) => {
                    result = self.refuse_earlier(view, &sequences[..i], counts, lookahead).and(Err(error));
                }
                Err(error) => result = Err(error),
            }
            if result.is_err() {
                break;
            }
        }
        let copies =
            result.and_then(|()| if shared.is_empty() { Ok(PerClass::default()) } else { copies(view, &mut shared) });
        self.scratch = shared;
        // Copies are only needed while the sharing sequences exist, even those for which a shrinking device no longer
        // has room.
        let held = if new.total() == 0 || self.groups.has_nulls() { PerClass::default() } else { held };
        Ok(Request { least: new + held, ..Request::device((new + copies?).saturating_sub(freed)) })
    }

    /// The first error of sequences that come before a repeated one: it takes precedence, in whichever group it is.
    #[cold]
    fn refuse_earlier(
        &self,
        view: View<'_>,
        sequences: &[SequenceId],
        counts: Counts<'_>,
        lookahead: u32,
    ) -> Result<()> {
        self.growing_tables_of(sequences).enumerate().try_for_each(|(i, id)| {
            let count = (counts.at(i % sequences.len()), counts.drafts_at(i % sequences.len()));
            self.need(view, id, count, lookahead, &mut Vec::new()).map(drop)
        })
    }

    pub(crate) fn can_append(
        &mut self,
        view: View<'_>,
        sequences: &[SequenceId],
        counts: Counts<'_>,
        lookahead: u32,
    ) -> Result<Fit> {
        let request = self.request_append(view, sequences, counts, lookahead)?;
        Ok(view.fit(request, PerClass::default(), Vec::new))
    }

    pub(crate) fn require_append(
        &mut self,
        view: View<'_>,
        sequences: &[SequenceId],
        counts: Counts<'_>,
        lookahead: u32,
    ) -> Result<()> {
        let request = self.request_append(view, sequences, counts, lookahead)?;
        view.require(request, Vec::new)
    }

    pub(crate) fn append(&mut self, step: &mut OpenStep<'_>, mut batch: Append<'_>) -> Result<()> {
        let total = batch.counts.total(batch.sequences.len())?;
        let groups = self.groups.growing().len();
        check_slots(total.saturating_mul(groups as u64), batch.slots)?;
        if let Some(tables) = &mut batch.tables {
            tables.share(batch.sequences.len(), groups)?;
        }
        self.rows.begin_batch();
        self.append_batch(step, batch)
    }

    /// Appends to a batch in one pass over the rows whose tokens fit into the blocks that they are writing, and one
    /// over the others. If those cannot be served, the first pass is undone.
    fn append_batch(&mut self, step: &mut OpenStep<'_>, mut batch: Append<'_>) -> Result<()> {
        // Two passes, since nearly all rows of a decode step take no block: the first needs no look at the pool, and
        // the second takes the blocks of all others at once.
        let mut work = std::mem::take(&mut self.work);
        let passed = if self.groups.has_states() && matches!(batch.counts, Counts::Drafted { .. }) {
            defer_all(&mut self.rows, &batch, &mut work)
        } else {
            let pass = if batch.tables.is_some() { pass::<true> } else { pass::<false> };
            pass(&mut self.rows, self.groups.growing().len(), step.transfers.open(), &mut batch, &mut work)
        };
        let result = if passed.rows < batch.sequences.len() {
            // An error in an earlier row takes precedence, as if the rows were served one after the other.
            let repeated = Error::RepeatedSequence { sequence: batch.sequences[passed.rows] };
            self.slow_needs(step.view(), &batch, &mut work, &mut Vec::new()).and(Err(repeated))
        } else if work.slow.is_empty() {
            Ok(())
        } else {
            self.append_slow(step, &mut batch, &mut work)
        };
        if result.is_err() {
            self.undo(&batch, &passed, &work);
        }
        self.work = work;
        result
    }

    /// The second pass: checks all rows that need blocks, then takes these.
    #[inline(never)]
    fn append_slow(&mut self, step: &mut OpenStep<'_>, batch: &mut Append<'_>, work: &mut Work) -> Result<()> {
        let mut blocks = std::mem::take(&mut self.scratch);
        work.keeps_tails = self.groups.has_nulls();
        let mut wanted = self.require_slow(step.view(), batch, work, &mut blocks);
        if work.keeps_tails && matches!(wanted, Err(Error::OutOfBlocks { .. })) {
            work.keeps_tails = false;
            wanted = self.require_slow(step.view(), batch, work, &mut blocks);
        }
        if let Err(Error::OutOfBlocks { page_class: Some(_), .. }) = wanted {
            step.tiers.note_lack(work.lacking);
        }
        let result = wanted.map(|wanted| {
            // From here on nothing fails: every check is above, so the call succeeds whole or changes nothing.
            if self.groups.has_states() {
                work.slow.iter().for_each(|slow| self.drop_drafts(step, batch.sequences[slow.index]));
            }
            if self.groups.has_nulls() {
                for (Slow { index, .. }, id, _) in work.slow_tables(batch.sequences, self.groups.num_growing()) {
                    let row = self.rows.at(id.sequence);
                    // Tokens that this step has yet to compute keep the blocks they need.
                    if row.written != step.transfers.open() {
                        self.leave_window(step, id, self.left_to(id.sequence, work.keeps_tails));
                    }
                    if self.is_recurrent(id) {
                        self.pass(step, id, batch.counts.at(index) - batch.counts.drafts_at(index));
                    }
                }
                for Slow { index, .. } in &work.slow {
                    let row = self.rows.at_mut(batch.sequences[*index]);
                    let is_new = row.written != step.transfers.open();
                    if let (Some(keys), true) = (&mut row.keys, is_new) {
                        keys.appended = row.len;
                    }
                }
            }
            step.prepare(Tier::Device, wanted, true);
            self.append_checked(step, batch, work, &mut blocks);
        });
        self.scratch = blocks;
        result
    }

    /// Fails unless the deferred rows can be served; returns the blocks that they take. `shared` becomes the shared blocks
    /// that they would write.
    fn require_slow(
        &self,
        view: View<'_>,
        batch: &Append<'_>,
        work: &mut Work,
        shared: &mut Vec<BlockId>,
    ) -> Result<PerClass> {
        shared.clear();
        let new = self.slow_needs(view, batch, work, shared)?;
        let copies = if shared.is_empty() { PerClass::default() } else { copies(view, shared)? };
        work.lacking = (new + copies).saturating_sub(work.freed);
        view.require(Request::device(work.lacking), Vec::new)?;
        Ok(new + copies)
    }

    /// How many tokens of a row count as computed for the blocks that it leaves behind. Its first point that is due since
    /// its last append `keeps` its tail: a scheduler that runs ahead marks it as computed only after this append.
    fn left_to(&self, sequence: SequenceId, keeps: bool) -> u32 {
        let row = self.rows.at(sequence);
        let keys = row.keys.as_ref().filter(|_| keeps);
        let due = keys.and_then(|keys| keys.due.iter().find(|&&at| at > keys.appended));
        due.map_or(row.len, |&at| at.min(row.len))
    }

    /// Number of new blocks that the deferred rows need; appends the shared blocks that they would write to `shared`.
    fn slow_needs(
        &self,
        view: View<'_>,
        batch: &Append<'_>,
        work: &mut Work,
        shared: &mut Vec<BlockId>,
    ) -> Result<PerClass> {
        let (mut new, mut passed, mut freed) = (PerClass::default(), 0, PerClass::default());
        let Work { slow, ended, new: by_group, keeps_tails, .. } = work;
        let keeps_tails = *keeps_tails;
        ended.clear();
        ended.resize(slow.len(), false);
        by_group.clear();
        let (is_even, leaves) = (self.groups.is_even(), self.groups.has_nulls());
        // A drafter's entry before the token is written too: the block that has it must be the row's own.
        let may_end = batch.lookahead == 0 && self.groups.ahead() == 0 && is_even;
        for group in 0..self.groups.num_growing() {
            let (mut of_group, class) = (0, self.groups.class(group));
            for (&Slow { index, .. }, ends) in slow.iter().zip(&mut *ended) {
                let (sequence, count) = (batch.sequences[index], batch.counts.at(index));
                let id = TableId { sequence, group };
                if group == 0 {
                    let row = self.rows.get(sequence)?;
                    *ends = may_end && count == 1 && ends_block(row, self.block_size);
                }
                let (held, need) = if *ends {
                    (self.rows.table(id).table.len(), Need { blocks: 1, entries: 1, skipped: 0 })
                } else {
                    let drafts = batch.counts.drafts_at(index);
                    (self.entries(id).len(), self.need(view, id, (count, drafts), batch.lookahead, shared)?)
                };
                // All tables with blocks of a size have the same length.
                if let (Some(tables), true) = (&batch.tables, group == 0 || !is_even) {
                    tables.require_width(sequence, held + need.entries)?;
                }
                of_group += need.blocks;
                if leaves {
                    *freed.at(class) += self.freed(view, id, need, keeps_tails);
                }
                passed += need.skipped;
            }
            by_group.push(of_group);
            *new.at(class) += of_group;
        }
        if passed > 0 {
            self.require_nulls(view, std::iter::once(passed))?;
        }
        work.freed = freed;
        Ok(new)
    }

    /// Appends to the deferred rows, for which there are enough blocks. Without copies, takes the blocks all at once.
    fn append_checked(
        &mut self,
        step: &mut OpenStep<'_>,
        batch: &mut Append<'_>,
        work: &Work,
        blocks: &mut Vec<BlockId>,
    ) {
        let (open, groups) = (step.transfers.open(), self.groups.num_growing());
        if blocks.is_empty() {
            self.take_each(step, &work.new, blocks);
            if !work.ended.contains(&false) {
                next_blocks(&mut self.rows, batch, &work.slow, blocks, &self.groups, open);
                if self.groups.has_states() {
                    work.slow.iter().for_each(|slow| self.note_begun(batch.sequences[slow.index], 0, 1));
                }
                if self.owners.are_noted() {
                    work.slow_tables(batch.sequences, groups).for_each(|(_, id, _)| self.note_new_blocks(id, 1));
                }
                return;
            }
        } else {
            blocks.clear();
        }
        let mut fresh = blocks.iter();
        let taken = !blocks.is_empty();
        let tokens = batch.slots.len() / usize::from(groups);
        for (Slow { index, at }, id, ends) in work.slow_tables(batch.sequences, groups) {
            let group = usize::from(id.group);
            let (count, drafts) = (batch.counts.at(index), batch.counts.drafts_at(index));
            let slots = &mut batch.slots[group * tokens + at..][..count as usize];
            let before = self.rows.table(id).table.len();
            match (slots, fresh.as_slice()) {
                ([slot], [block, ..]) if ends => {
                    fresh.next();
                    let len = self.rows.at(id.sequence).len;
                    let of = self.geometry(id.group);
                    *slot = next_block(self.rows.table_mut(id), *block, of, len);
                }
                (slots, _) => self.grow(step, id, (count, drafts), batch.lookahead, slots, &mut fresh),
            }
            if let Some(tables) = &mut batch.tables {
                let (row, first) = (self.rows.table_mut(id), self.groups.first_block(id.group));
                row.table.sync(&mut row.synced, tables.row(group, index), first);
            }
            if drafts > 0 && self.is_recurrent(id) {
                let slots = &mut batch.slots[group * tokens + at..][..count as usize];
                self.add_draft_states(step, id, drafts, slots, &mut fresh);
            }
            self.note_new_blocks(id, self.rows.table(id).table.len() - before);
        }
        for (&Slow { index, .. }, &ends) in work.slow.iter().zip(&work.ended) {
            let (sequence, count) = (batch.sequences[index], batch.counts.at(index));
            if ends && taken {
                self.note_begun(sequence, 0, 1);
                begin_block(self.rows.at_mut(sequence), self.groups.least_tokens(), open);
            } else {
                self.advance(step, sequence, (count, batch.counts.drafts_at(index)));
            }
        }
    }

    /// Takes the new blocks of each group, one group's after the other's.
    fn take_each(&self, step: &mut OpenStep<'_>, new: &[usize], blocks: &mut Vec<BlockId>) {
        let classes = (0u8..).zip(new).map(|(group, &count)| (self.groups.class(group), count)).collect::<Vec<_>>();
        for same in classes.chunk_by(|one, other| one.0 == other.0) {
            step.take((Tier::Device, same[0].0), same.iter().map(|(_, count)| count).sum(), false, blocks);
        }
    }

    /// Records the owner of a table's last blocks.
    fn note_new_blocks(&mut self, id: TableId, count: usize) {
        if self.owners.are_noted() {
            let table = &self.rows.table(id).table;
            let from = table.len() - count;
            self.owners.note(self.rows.number(id), from, &table[from..]);
        }
    }

    /// Undoes the first pass for the rows before `passed`.
    #[cold]
    fn undo(&mut self, batch: &Append<'_>, &Passed { rows, before }: &Passed, work: &Work) {
        let mut slow = work.slow.iter().map(|slow| slow.index).peekable();
        for (i, &sequence) in batch.sequences[..rows].iter().enumerate() {
            if slow.next_if_eq(&i).is_none() {
                let row = self.rows.at_mut(sequence);
                row.len -= batch.counts.at(i);
                row.written = before;
            }
        }
    }

    /// New blocks that one table needs; shared blocks that it would write are appended to `shared`.
    fn need(
        &self,
        view: View<'_>,
        id: TableId,
        (count, drafts): (u32, u32),
        lookahead: u32,
        shared: &mut Vec<BlockId>,
    ) -> Result<Need> {
        let (sequence, row, table) = (id.sequence, self.rows.at(id.sequence), self.entries(id));
        refuse_lost(sequence, row)?;
        require_tier(sequence, row, Tier::Device)?;
        self.refuse_loading(sequence, row, view)?;
        self.refuse_unwritten_drafts(view, sequence)?;
        let (end, certain) = (end_of(row, count, lookahead)?, count - drafts);
        let (passed, unwritten) = (self.passed_over(id, certain), row.written == view.transfers.open());
        for i in self.written_blocks(id, table, count, lookahead) {
            if !view.tiers.device().block(table[i]).is_exclusive() {
                // The copy would read the block before this step has written the row's earlier tokens to it.
                if unwritten {
                    return Err(Error::Unwritten { sequence });
                }
                if !passed.contains(&i) {
                    shared.push(table[i]);
                }
            }
        }
        if unwritten && self.leaves_awaited_state(view, id, count) {
            return Err(Error::Unwritten { sequence });
        }
        let held = table.len();
        let size = self.groups.tokens(id.group);
        let entries = blocks_for(end, size).saturating_sub(held);
        let skipped = self.groups.get(id.group).skipped(row.len, certain, held, size);
        if skipped > 0 {
            self.require_nulls(view, std::iter::once(skipped))?;
        }
        Ok(Need { blocks: entries - skipped + self.draft_states(id, count, drafts), entries, skipped })
    }

    /// Blocks that become available once a row that takes new ones leaves behind what no new token needs.
    fn freed(&self, view: View<'_>, id: TableId, need: Need, keeps_tails: bool) -> usize {
        if need.blocks == 0 {
            return 0;
        }
        let (row, own) = (self.rows.at(id.sequence), self.rows.table(id));
        let is_left = row.written != view.transfers.open() && view.transfers.is_settled(row.ticket);
        let len = self.left_to(id.sequence, keeps_tails);
        let end = self.groups.get(id.group).needs(len, self.groups.tokens(id.group)).start.min(own.table.len());
        let left = own.null_prefix as usize..end;
        let blocks = if is_left { own.table.get(left).unwrap_or_default() } else { &[] };
        let blocks = blocks.iter().chain(self.states_behind(id));
        let device = view.tiers.device();
        let is_freed = |&&block: &&BlockId| {
            let now = device.block(block);
            !self.is_null(block) && now.refs() == 1 && !now.is_leased() && !device.is_beyond(block)
        };
        blocks.filter(is_freed).count()
    }

    /// Whether the open step has yet to write the state after a row's last token for another sequence, and appending
    /// `count` tokens would need it at once: or keep the step from writing it, to write that after the new tokens.
    fn leaves_awaited_state(&self, view: View<'_>, id: TableId, count: u32) -> bool {
        let (row, size) = (self.rows.at(id.sequence), u64::from(self.block_size));
        let Some(last) = row.len.checked_sub(1).filter(|_| count > 0 && self.is_recurrent(id)) else {
            return false;
        };
        let block = self.rows.table(id).table[(last / self.block_size) as usize];
        let leaves = (u64::from(last) + u64::from(count)) / size > u64::from(last) / size;
        let is_shared = view.tiers.device().refs(block) > 1 || self.awaiting.contains(id.sequence);
        leaves && !self.is_null(block) && is_shared
    }

    /// Existing table entries that will be written once `count` tokens and `lookahead` slots after them are appended.
    fn written_blocks(&self, id: TableId, table: &[BlockId], count: u32, lookahead: u32) -> Range<usize> {
        let (len, size) = (self.rows.at(id.sequence).len, self.groups.tokens(id.group));
        let first = (self.groups.first_written(len, id.group) / size) as usize;
        let end = u64::from(len) + u64::from(count) + u64::from(lookahead);
        if end == u64::from(len) {
            return first..first;
        }
        first..blocks_for(end, size).min(table.len()).max(first)
    }

    /// Gives one table the blocks and the slots of more tokens, as checked by [`Sequences::need`]; `fresh` are the blocks
    /// taken for it and later tables.
    fn grow(
        &mut self,
        step: &mut OpenStep<'_>,
        id: TableId,
        (count, drafts): (u32, u32),
        lookahead: u32,
        slots: &mut [i64],
        fresh: &mut std::slice::Iter<'_, BlockId>,
    ) {
        let (len, blocks) = (self.rows.at(id.sequence).len, self.rows.table(id).table.len());
        let size = self.groups.tokens(id.group);
        for i in self.written_blocks(id, &self.rows.table(id).table, count, lookahead) {
            let block = self.rows.table(id).table[i];
            if self.is_null(block) {
                continue; // passed over
            }
            if step.tiers.device().block(block).is_exclusive() {
                write_in_place(step, block);
            } else {
                self.copy_on_write(step, id, i, block, i < blocks_for(len.into(), size));
            }
        }
        let end = u64::from(len) + u64::from(count) + u64::from(lookahead);
        let wanted = blocks_for(end, size).saturating_sub(blocks);
        if wanted > 0 {
            let skipped = self.groups.get(id.group).skipped(len, count - drafts, blocks, size);
            if skipped > 0 {
                self.skip(step, id, skipped);
            }
            let (wanted, class) = (wanted - skipped, self.groups.class(id.group));
            let row = self.rows.table_mut(id);
            row.table.extend_with(|table| {
                let taken = table.len();
                table.extend(fresh.by_ref().take(wanted));
                let left = wanted - (table.len() - taken);
                if left > 0 {
                    step.take((Tier::Device, class), left, false, table);
                }
            });
        }
        write_slots(&self.rows.table(id).table, len, self.geometry(id.group), slots);
    }

    /// Adds tokens to a row whose tables have grown.
    fn advance(&mut self, step: &mut OpenStep<'_>, sequence: SequenceId, (count, drafts): (u32, u32)) {
        let open = step.transfers.open();
        self.note_begun(sequence, self.rows.at(sequence).len, count);
        let row = self.rows.at_mut(sequence);
        if is_loaded_now(row, step.transfers) {
            step.transfers.note_load_read();
        }
        row.len += count;
        row.written = open;
        // A step that computes the row waits for its load, and later steps follow it.
        row.moving &= count == 0;
        row.writable = 0;
        let (len, moving) = (row.len, row.moving);
        if self.groups.has_states() {
            self.drafts.set(sequence, drafts);
        }
        // The next append has to free the states of drafts first.
        if count > 0 && !moving && self.num_drafts(sequence) == 0 && self.writes_own(step, sequence) {
            for id in self.growing_tables_of(&[sequence]) {
                let (size, first) = self.geometry(id.group);
                let (index, table) = (len / size, self.rows.table_mut(id));
                let block = i64::from(table.table[index as usize].0.saturating_sub(first));
                table.slot_base = (block - i64::from(index)) * i64::from(size);
            }
            let size = self.groups.least_tokens();
            self.rows.at_mut(sequence).writable = (len / size + 1).saturating_mul(size);
        }
    }

    /// Whether a row may write the blocks of its next token without asking the pool.
    fn writes_own(&self, step: &OpenStep<'_>, sequence: SequenceId) -> bool {
        let (device, len) = (step.tiers.device(), self.rows.at(sequence).len);
        self.growing_tables_of(&[sequence]).all(|id| {
            let size = self.groups.tokens(id.group);
            let Some(&block) = self.rows.table(id).table.get((len / size) as usize) else { return false };
            // Writing a block that a transfer still reads must be recorded, which the first pass does not do. If
            // nothing is written yet, the block may also be linked to a copy in another tier.
            let own = device.block(block).is_exclusive() && !device.block(block).is_read_ahead();
            // Only the second pass checks whether the state at the end of a block is the last that this step writes, and
            // whether a drafter may write the entry before a block.
            let awaits = len % size == 0 && (self.is_recurrent(id) || self.groups.ahead() > 0);
            // Nor may it write a block that is being moved.
            own && !awaits && !device.is_moving(block)
        })
    }

    /// Replaces a table's shared block by its own, with a copy in this step if it has tokens there.
    fn copy_on_write(&mut self, step: &mut OpenStep<'_>, id: TableId, index: usize, shared: BlockId, used: bool) {
        let mut fresh = Vec::with_capacity(1);
        step.take((Tier::Device, self.groups.class(id.group)), 1, used, &mut fresh);
        let own = fresh[0];
        if !used {
            step.tiers.release((Tier::Device, shared));
            self.rows.table_mut(id).table.replace(index, own);
            self.owners.note(self.rows.number(id), index, &[own]);
            return;
        }
        let (from, to) = ((Tier::Device, shared), (Tier::Device, own));
        step.transfer(Kind::Copy, from, to, LeaseKind::Read);
        step.tiers.release((Tier::Device, shared));
        let open = step.transfers.open();
        self.rows.table_mut(id).table.replace(index, own);
        self.owners.note(self.rows.number(id), index, &[own]);
        let row = self.rows.at_mut(id.sequence);
        row.moving &= row.ticket == open;
        row.ticket = open;
    }
}

/// What one table needs for an append.
#[derive(Clone, Copy, Debug)]
struct Need {
    /// Blocks of the pool.
    blocks: usize,
    /// Its entries, which may have null blocks.
    entries: usize,
    /// Those that have.
    skipped: usize,
}

/// Records that the open step writes a block, and unlinks its copy in another tier, which it may have after a
/// truncation.
fn write_in_place(step: &mut OpenStep<'_>, block: BlockId) {
    if let Some((tracker, blocks)) = step.tiers.tracker_mut() {
        tracker.note_written(block, blocks);
    }
    let now = step.tiers.device().block(block);
    step.transfers.note_overlap(now.is_read_ahead());
    if now.tier_copy().is_some() {
        step.tiers.unlink((Tier::Device, block));
        step.transfers.remove_fresh((Tier::Device, block));
    }
}

/// Length of a row after `count` more tokens and lookahead.
pub(super) fn end_of(row: &Row, count: u32, lookahead: u32) -> Result<u64> {
    let end = u64::from(row.len) + u64::from(count) + u64::from(lookahead);
    if end > u64::from(u32::MAX) {
        return Err(invalid("length with num_tokens and lookahead", i128::from(end), format!("at most {}", u32::MAX)));
    }
    Ok(end)
}

/// Number of writers of a block that get a copy. The last owner writes in place, unless the block is cached.
pub(super) fn copied(writers: usize, refs: usize, published: bool) -> usize {
    writers.min(refs.saturating_sub(usize::from(!published)))
}

/// Number of copies for a batch that writes these shared blocks: the last remaining owner writes in place.
fn copies(view: View<'_>, shared: &mut [BlockId]) -> Result<PerClass> {
    shared.sort_unstable();
    let mut copies = PerClass::default();
    for writers in shared.chunk_by(|a, b| a == b) {
        let block = writers[0];
        let device = view.tiers.device();
        let wanted = copied(writers.len(), device.refs(block) as usize, device.block(block).is_published());
        device.require_leases(block, LeaseKind::Read, wanted)?;
        *copies.at(device.class_of(block)) += wanted;
    }
    Ok(copies)
}

fn check_slots(total: u64, slots: &[i64]) -> Result<()> {
    if total == slots.len() as u64 {
        return Ok(());
    }
    Err(invalid("length of out", slots.len() as i128, format!("{total}, the tokens")))
}

/// Whether a row has just filled its last writable blocks in all groups, and has no others.
#[inline]
fn ends_block(row: &Row, size: u32) -> bool {
    let held = row.first.table.len() as u64 * u64::from(size);
    row.writable != 0 && row.len == row.writable && held == u64::from(row.len) && row.len < u32::MAX - size
}
