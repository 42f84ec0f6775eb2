//! Appending tokens to a batch of sequences: new blocks, lookahead, copy-on-write, slots.

pub(super) mod block_tables;
pub(super) mod pass;
mod window;

use super::table::Row;
use super::{Sequences, blocks_for, is_loaded_now, refuse_loading, refuse_lost, require_tier, write_slots};
use crate::block::LeaseKind;
use crate::decision::Kind;
use crate::error::{Error, Result, invalid};
use crate::fit::Fit;
use crate::group::Group;
use crate::id::{BlockId, SequenceId, Tier};
use crate::transfer::{OpenStep, Request, View};
use pass::{Batch, Passed, Slow, Work, fits, next_block, next_blocks, pass};
use std::ops::Range;

/// Tokens to append to each sequence of a batch.
#[derive(Clone, Copy, Debug)]
pub enum Counts<'a> {
    /// The same number to all.
    All(u32),
    /// One number per sequence.
    Each(&'a [u32]),
}

impl Counts<'_> {
    /// Tokens for one sequence of the batch.
    #[inline]
    #[must_use]
    pub fn at(self, index: usize) -> u32 {
        match self {
            Self::All(n) => n,
            Self::Each(counts) => counts[index],
        }
    }

    /// Tokens for a batch of `sequences` sequences.
    ///
    /// # Errors
    /// There is not one number per sequence.
    pub fn total(self, sequences: usize) -> Result<u64> {
        match self {
            Self::All(n) => Ok(u64::from(n) * sequences as u64),
            Self::Each(counts) if counts.len() == sequences => Ok(counts.iter().map(|&n| u64::from(n)).sum()),
            Self::Each(counts) => {
                Err(invalid("number of token counts", counts.len() as i128, format!("{sequences}, the sequences")))
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
        Ok(self.request_append(view, sequences, counts, lookahead)?.blocks)
    }

    /// The device blocks that an append takes. Next to the new blocks, at least the current ones of one sequence must
    /// fit, unless its window may free them.
    fn request_append(
        &mut self,
        view: View<'_>,
        sequences: &[SequenceId],
        counts: Counts<'_>,
        lookahead: u32,
    ) -> Result<Request> {
        counts.total(sequences.len())?;
        let (mut members, mut spread) = (Vec::new(), Vec::new());
        let (sequences, counts) = (self.growing(sequences, &mut members)?, self.spread(counts, &mut spread));
        self.rows.begin_batch();
        let (mut new, mut freed, mut held, mut shared) = (0, 0, 0, std::mem::take(&mut self.scratch));
        shared.clear();
        let mut result = Ok(());
        for (i, &sequence) in sequences.iter().enumerate() {
            let count = counts.at(i);
            match self.rows.next_in_batch(sequence) {
                Ok(row) if fits(row.len, count, lookahead, row.writable) => held = held.max(row.table.len()),
                Ok(_) => match self.need(view, sequence, count, lookahead, &mut shared) {
                    Ok(need) => {
                        new += need.blocks;
                        freed += self.freed(view, sequence, need);
                        held = held.max(self.rows.at(sequence).table.len());
                    }
                    Err(error) => result = Err(error),
                },
                Err(error) => result = Err(error),
            }
            if result.is_err() {
                break;
            }
        }
        let copies = result.and_then(|()| if shared.is_empty() { Ok(0) } else { copies(view, &mut shared) });
        self.scratch = shared;
        // Copies are only needed while the sharing sequences exist, even those for which a shrinking device no longer
        // has room.
        let held = if new == 0 || self.groups.has_nulls() { 0 } else { held };
        Ok(Request { least: new + held, ..Request::device((new + copies?).saturating_sub(freed)) })
    }

    pub(crate) fn can_append(
        &mut self,
        view: View<'_>,
        sequences: &[SequenceId],
        counts: Counts<'_>,
        lookahead: u32,
    ) -> Result<Fit> {
        let request = self.request_append(view, sequences, counts, lookahead)?;
        Ok(view.fit(request, 0, Vec::new))
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

    pub(crate) fn append(&mut self, step: &mut OpenStep<'_>, batch: Batch<'_>) -> Result<()> {
        let Batch { sequences, counts, lookahead, slots, tables } = batch;
        let (mut members, mut spread) = (Vec::new(), Vec::new());
        counts.total(sequences.len())?;
        let (sequences, counts) = (self.growing(sequences, &mut members)?, self.spread(counts, &mut spread));
        check_slots(sequences, counts, slots)?;
        if let Some(tables) = &tables {
            tables.require_rows(sequences.len())?;
        }
        self.rows.begin_batch();
        self.append_batch(step, Batch { sequences, counts, lookahead, slots, tables })?;
        if self.groups.cross() {
            self.await_encoders(sequences);
        }
        Ok(())
    }

    /// Appends to a batch in one pass over the rows whose tokens fit into the blocks that they are writing, and one
    /// over the others. If those cannot be served, the first pass is undone.
    fn append_batch(&mut self, step: &mut OpenStep<'_>, mut batch: Batch<'_>) -> Result<()> {
        // Two passes, since nearly all rows of a decode step take no block: the first needs no look at the pool, and
        // the second takes the blocks of all others at once.
        let mut work = std::mem::take(&mut self.work);
        let pass = if batch.tables.is_some() { pass::<true> } else { pass::<false> };
        let passed = pass(&mut self.rows, step.transfers.open(), &mut batch, &mut work);
        work.slow.truncate(passed.slow);
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
    fn append_slow(&mut self, step: &mut OpenStep<'_>, batch: &mut Batch<'_>, work: &mut Work) -> Result<()> {
        let mut blocks = std::mem::take(&mut self.scratch);
        blocks.clear();
        let result = self.slow_needs(step.view(), batch, work, &mut blocks).and_then(|new| {
            let copies = if blocks.is_empty() { 0 } else { copies(step.view(), &mut blocks)? };
            step.view().require(Request::device((new + copies).saturating_sub(work.freed)), Vec::new)?;
            // From here on nothing fails: every check is above, so the call succeeds whole or changes nothing.
            if self.groups.has_nulls() {
                for &Slow { index, .. } in &work.slow {
                    let sequence = batch.sequences[index];
                    let row = self.rows.at(sequence);
                    // Tokens that this step has yet to compute keep the blocks they need.
                    if row.written != step.transfers.open() {
                        self.leave_window(step, sequence, row.len);
                    }
                    if self.is_recurrent(sequence) {
                        self.pass(step, sequence, batch.counts.at(index));
                    }
                }
            }
            self.append_checked(step, batch, work, new, &mut blocks);
            Ok(())
        });
        self.scratch = blocks;
        result
    }

    /// Number of new blocks that the deferred rows need; appends the shared blocks that they would write to `shared`.
    fn slow_needs(
        &self,
        view: View<'_>,
        batch: &Batch<'_>,
        work: &mut Work,
        shared: &mut Vec<BlockId>,
    ) -> Result<usize> {
        let (mut new, mut ended, mut passed, mut freed) = (0, 0, 0, 0);
        for &Slow { index, .. } in &work.slow {
            let (sequence, count) = (batch.sequences[index], batch.counts.at(index));
            let row = self.rows.get(sequence)?;
            let need = if count == 1 && batch.lookahead == 0 && ends_block(row, self.block_size) {
                ended += 1;
                Need { blocks: 1, entries: 1 }
            } else {
                self.need(view, sequence, count, batch.lookahead, shared)?
            };
            if let Some(tables) = &batch.tables {
                tables.require_width(sequence, self.rows.at(sequence).table.len() + need.entries)?;
            }
            new += need.blocks;
            freed += self.freed(view, sequence, need);
            passed += need.entries - need.blocks;
        }
        if passed > 0 {
            self.require_nulls(view, std::iter::once(passed))?;
        }
        (work.ended, work.freed) = (ended, freed);
        Ok(new)
    }

    /// Appends to the deferred rows, for which there are enough blocks. Without copies, takes the blocks all at once.
    fn append_checked(
        &mut self,
        step: &mut OpenStep<'_>,
        batch: &mut Batch<'_>,
        work: &Work,
        new: usize,
        blocks: &mut Vec<BlockId>,
    ) {
        let (open, size) = (step.transfers.open(), self.block_size);
        if blocks.is_empty() {
            step.take(Tier::Device, new, false, blocks);
            if work.ended == work.slow.len() {
                next_blocks(&mut self.rows, batch, &work.slow, blocks, size, open);
                if self.groups.has_nulls() || self.owners.are_noted() {
                    for &Slow { index, .. } in &work.slow {
                        self.note_begun(batch.sequences[index], 0, 1);
                        self.note_new_blocks(batch.sequences[index], 1);
                    }
                }
                return;
            }
        } else {
            blocks.clear();
        }
        let mut fresh = blocks.iter();
        for &Slow { index, at } in &work.slow {
            let (sequence, count) = (batch.sequences[index], batch.counts.at(index));
            let slots = &mut batch.slots[at..at + count as usize];
            let row = self.rows.at_mut(sequence);
            let before = row.table.len();
            match (slots, fresh.as_slice()) {
                ([slot], [block, ..]) if batch.lookahead == 0 && ends_block(row, size) => {
                    fresh.next();
                    next_block(row, *block, size, open);
                    *slot = i64::from(block.0) * i64::from(size);
                    self.note_begun(sequence, 0, 1);
                }
                (slots, _) => self.grow(step, sequence, count, batch.lookahead, slots, &mut fresh),
            }
            self.note_new_blocks(sequence, self.rows.at(sequence).table.len() - before);
            if let Some(tables) = &mut batch.tables {
                let row = self.rows.at_mut(sequence);
                row.table.sync(&mut row.synced, tables.row(index));
            }
        }
    }

    /// Records the owner of a row's last blocks.
    fn note_new_blocks(&mut self, sequence: SequenceId, count: usize) {
        if self.owners.are_noted() {
            let table = &self.rows.at(sequence).table;
            let from = table.len() - count;
            self.owners.note(sequence.row(), from, &table[from..]);
        }
    }

    /// Undoes the first pass for the rows before `passed`.
    #[cold]
    fn undo(&mut self, batch: &Batch<'_>, &Passed { rows, before, .. }: &Passed, work: &Work) {
        let mut slow = work.slow.iter().map(|slow| slow.index).peekable();
        for (i, &sequence) in batch.sequences[..rows].iter().enumerate() {
            if slow.next_if_eq(&i).is_none() {
                let row = self.rows.at_mut(sequence);
                row.len -= batch.counts.at(i);
                row.written = before;
            }
        }
    }

    /// New blocks that one row needs; shared blocks that it would write are appended to `shared`.
    fn need(
        &self,
        view: View<'_>,
        sequence: SequenceId,
        count: u32,
        lookahead: u32,
        shared: &mut Vec<BlockId>,
    ) -> Result<Need> {
        let row = self.rows.at(sequence);
        refuse_lost(sequence, row)?;
        require_tier(sequence, row, Tier::Device)?;
        refuse_loading(sequence, row, view)?;
        let end = end_of(row, count, lookahead)?;
        let (passed, unwritten) = (self.passed_over(sequence, count), row.written == view.transfers.open());
        for i in self.written_blocks(row, count, lookahead) {
            if !view.tiers.device().block(row.table[i]).is_exclusive() {
                // The copy would read the block before this step has written the row's earlier tokens to it.
                if unwritten {
                    return Err(Error::Unwritten { sequence });
                }
                if !passed.contains(&i) {
                    shared.push(row.table[i]);
                }
            }
        }
        if unwritten && self.leaves_awaited_state(view, sequence, count) {
            return Err(Error::Unwritten { sequence });
        }
        let held = row.table.len();
        let entries = blocks_for(end, self.block_size).saturating_sub(held);
        let skipped = self.groups.get(row.group).skipped(row.len, count, held, self.block_size);
        if skipped > 0 {
            self.require_nulls(view, std::iter::once(skipped))?;
        }
        Ok(Need { blocks: entries - skipped, entries })
    }

    /// Blocks that become available once a row that takes new ones leaves behind what no new token needs.
    fn freed(&self, view: View<'_>, sequence: SequenceId, need: Need) -> usize {
        if !self.groups.has_nulls() || need.blocks == 0 {
            return 0;
        }
        let row = self.rows.at(sequence);
        let is_left = row.written != view.transfers.open() && view.transfers.is_settled(row.ticket);
        let end = self.groups.get(row.group).unneeded(row.len, self.block_size).min(row.table.len());
        let left = row.null_prefix as usize..end;
        let blocks = if is_left { row.table.get(left).unwrap_or_default() } else { &[] };
        let device = view.tiers.device();
        let is_freed = |&&block: &&BlockId| {
            let now = device.block(block);
            !self.is_null(block) && now.refs() == 1 && !now.is_leased() && !device.is_beyond(block)
        };
        blocks.iter().filter(is_freed).count()
    }

    /// Whether another sequence shares the block for the state after a row's last token, and appending `count` tokens
    /// would keep the step from writing that state: it writes the state after the new tokens, in another block.
    fn leaves_awaited_state(&self, view: View<'_>, sequence: SequenceId, count: u32) -> bool {
        let (row, size) = (self.rows.at(sequence), u64::from(self.block_size));
        let Some(last) = row.len.checked_sub(1).filter(|_| count > 0 && self.is_recurrent(sequence)) else {
            return false;
        };
        let block = row.table[(last / self.block_size) as usize];
        let leaves = (u64::from(last) + u64::from(count)) / size > u64::from(last) / size;
        leaves && !self.is_null(block) && view.tiers.device().refs(block) > 1
    }

    /// Existing table entries that will be written once `count` tokens and `lookahead` slots after them are appended.
    fn written_blocks(&self, row: &Row, count: u32, lookahead: u32) -> Range<usize> {
        let first = (row.len / self.block_size) as usize;
        let end = u64::from(row.len) + u64::from(count) + u64::from(lookahead);
        if end == u64::from(row.len) {
            return first..first;
        }
        first..blocks_for(end, self.block_size).min(row.table.len()).max(first)
    }

    /// Appends to one row, as checked by [`Manager::need`]; `fresh` are the blocks taken for it and later rows.
    fn grow(
        &mut self,
        step: &mut OpenStep<'_>,
        sequence: SequenceId,
        count: u32,
        lookahead: u32,
        slots: &mut [i64],
        fresh: &mut std::slice::Iter<'_, BlockId>,
    ) {
        let row = self.rows.at(sequence);
        let (len, blocks) = (row.len, row.table.len());
        for i in self.written_blocks(row, count, lookahead) {
            let block = self.rows.at(sequence).table[i];
            if self.is_null(block) {
                continue; // passed over
            }
            if step.tiers.device().block(block).is_exclusive() {
                write_in_place(step, block);
            } else {
                self.copy_on_write(step, sequence, i, block, i < blocks_for(len.into(), self.block_size));
            }
        }
        let end = u64::from(len) + u64::from(count) + u64::from(lookahead);
        let wanted = blocks_for(end, self.block_size).saturating_sub(blocks);
        let (open, size) = (step.transfers.open(), self.block_size);
        let row = self.rows.at(sequence);
        if wanted > 0 {
            let skipped = self.groups.get(row.group).skipped(len, count, blocks, size);
            if skipped > 0 {
                self.skip(step, sequence, skipped);
            }
            let wanted = wanted - skipped;
            let row = self.rows.at_mut(sequence);
            row.table.extend_with(|table| {
                let taken = table.len();
                table.extend(fresh.by_ref().take(wanted));
                let left = wanted - (table.len() - taken);
                if left > 0 {
                    step.take(Tier::Device, left, false, table);
                }
            });
        }
        self.note_begun(sequence, len, count);
        let row = self.rows.at_mut(sequence);
        write_slots(row, len, size, slots);
        if is_loaded_now(row, step.transfers) {
            step.transfers.note_load_read();
        }
        row.len = len + count;
        row.written = open;
        // A step that computes the row waits for its load, and later steps follow it.
        row.moving &= count == 0;
        let index = row.len / size;
        row.writable = 0;
        if let Some(&block) = row.table.get(index as usize) {
            // Writing a block that a transfer still reads must be recorded, which the first pass does not do. If
            // nothing is written yet, the block may also be linked to a copy in another tier.
            let own = count > 0
                && step.tiers.device().block(block).is_exclusive()
                && !step.tiers.device().block(block).is_read_ahead();
            // Only the second pass checks whether the state at the end of a block is the last that this step writes.
            let own = own && (row.len % size > 0 || self.groups.get(row.group) != Group::Recurrent);
            // Nor may it write a block that is being moved.
            if !row.moving && own && !step.tiers.device().is_moving(block) {
                row.writable = (index + 1).saturating_mul(size);
                row.slot_base = (i64::from(block.0) - i64::from(index)) * i64::from(size);
            }
        }
    }

    /// Replaces a row's shared block by its own, with a copy in this step if it has tokens there.
    fn copy_on_write(
        &mut self,
        step: &mut OpenStep<'_>,
        sequence: SequenceId,
        index: usize,
        shared: BlockId,
        used: bool,
    ) {
        let mut fresh = Vec::with_capacity(1);
        step.take(Tier::Device, 1, used, &mut fresh);
        let own = fresh[0];
        if !used {
            step.tiers.release((Tier::Device, shared));
            self.rows.at_mut(sequence).table.replace(index, own);
            self.owners.note(sequence.row(), index, &[own]);
            return;
        }
        let (from, to) = ((Tier::Device, shared), (Tier::Device, own));
        step.transfer(Kind::Copy, from, to, LeaseKind::Read);
        step.tiers.release((Tier::Device, shared));
        let open = step.transfers.open();
        let row = self.rows.at_mut(sequence);
        row.table.replace(index, own);
        self.owners.note(sequence.row(), index, &[own]);
        row.moving &= row.ticket == open;
        row.ticket = open;
    }
}

/// What one row needs for an append.
#[derive(Clone, Copy, Debug)]
struct Need {
    /// Blocks of the pool.
    blocks: usize,
    /// Entries of its table, which may have null blocks.
    entries: usize,
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
        return Err(invalid("length with lookahead", i128::from(end), format!("at most {}", u32::MAX)));
    }
    Ok(end)
}

/// Number of writers of a block that get a copy. The last owner writes in place, unless the block is cached.
pub(super) fn copied(writers: usize, refs: usize, published: bool) -> usize {
    writers.min(refs.saturating_sub(usize::from(!published)))
}

/// Number of copies for a batch that writes these shared blocks: the last remaining owner writes in place.
fn copies(view: View<'_>, shared: &mut [BlockId]) -> Result<usize> {
    shared.sort_unstable();
    let mut copies = 0;
    for writers in shared.chunk_by(|a, b| a == b) {
        let block = writers[0];
        let device = view.tiers.device();
        let wanted = copied(writers.len(), device.refs(block) as usize, device.block(block).is_published());
        device.require_leases(block, LeaseKind::Read, wanted)?;
        copies += wanted;
    }
    Ok(copies)
}

fn check_slots(sequences: &[SequenceId], counts: Counts<'_>, slots: &[i64]) -> Result<()> {
    let total = counts.total(sequences.len())?;
    if total == slots.len() as u64 {
        return Ok(());
    }
    Err(invalid("number of slots", slots.len() as i128, format!("{total}, the tokens")))
}

/// Whether a row has just filled its last writable block.
#[inline]
fn ends_block(row: &Row, size: u32) -> bool {
    let held = row.table.len() as u64 * u64::from(size);
    row.writable != 0 && row.len == row.writable && held == u64::from(row.len) && row.len < u32::MAX - size
}
