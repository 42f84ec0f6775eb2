//! Appending tokens to a batch of sequences: new blocks, lookahead, copy-on-write, slots.

use super::pass::{Batch, Passed, Slow, Work, fits, next_block, next_blocks, pass};
use super::{Fit, Manager, TableRows, blocks_for, invalid, refuse_loading, refuse_lost, require_tier, write_slots};
use crate::block::LeaseKind;
use crate::decision::Kind;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::id::{BlockId, SequenceId, Tier};
use crate::table::Row;
use crate::transfer::Step;
use std::ops::Range;

/// Tokens to append to each sequence of a batch.
#[derive(Clone, Copy, Debug)]
pub enum Counts<'a> {
    /// The same number to all.
    All(u32),
    /// One number a sequence.
    Each(&'a [u32]),
}

impl Counts<'_> {
    /// Tokens for one sequence of the batch.
    #[inline]
    pub(super) fn at(self, index: usize) -> u32 {
        match self {
            Self::All(n) => n,
            Self::Each(counts) => counts[index],
        }
    }

    /// Tokens for a batch of so many sequences.
    ///
    /// # Errors
    /// There is not one number a sequence.
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

impl Manager {
    /// Device blocks that [`Manager::append`] would take: new ones, and one for each copy-on-write.
    ///
    /// # Errors
    /// As [`Manager::append`], but for blocks that are short.
    pub fn blocks_to_append(&mut self, sequences: &[SequenceId], counts: Counts<'_>, lookahead: u32) -> Result<usize> {
        counts.total(sequences.len())?;
        let (mut members, mut spread) = (Vec::new(), Vec::new());
        let (sequences, counts) = (self.growing(sequences, &mut members)?, self.spread(counts, &mut spread));
        self.rows.begin_batch();
        let (mut new, mut shared) = (0, std::mem::take(&mut self.scratch));
        shared.clear();
        let mut result = Ok(());
        for (i, &sequence) in sequences.iter().enumerate() {
            let count = counts.at(i);
            match self.rows.next_in_batch(sequence) {
                Ok(row) if fits(row.len, count, lookahead, row.writable) => {}
                Ok(_) => match self.need(sequence, count, lookahead, &mut shared) {
                    Ok(need) => new += need.blocks,
                    Err(error) => result = Err(error),
                },
                Err(error) => result = Err(error),
            }
            if result.is_err() {
                break;
            }
        }
        let copies = result.and_then(|()| if shared.is_empty() { Ok(0) } else { self.copies(&mut shared) });
        self.scratch = shared;
        Ok(new + copies?)
    }

    /// Whether [`Manager::append`] has the blocks that it takes.
    ///
    /// # Errors
    /// As [`Manager::append`], but for blocks that are short.
    pub fn can_append(&mut self, sequences: &[SequenceId], counts: Counts<'_>, lookahead: u32) -> Result<Fit> {
        let wanted = self.blocks_to_append(sequences, counts, lookahead)?;
        let pool = &self.tiers.device();
        Ok(Fit::new(wanted, pool.available(), pool.len() - usize::from(self.groups.slide())))
    }

    /// Fails unless [`Manager::append`] would find the blocks that it takes: what a caller asks before it makes slots.
    ///
    /// # Errors
    /// As [`Manager::append`].
    pub fn require_append(&mut self, sequences: &[SequenceId], counts: Counts<'_>, lookahead: u32) -> Result<()> {
        let wanted = self.blocks_to_append(sequences, counts, lookahead)?;
        self.tiers.device().require(wanted, true)
    }

    /// Appends tokens to a batch of sequences and writes the slot of each token, sequence by sequence, to `slots`; where
    /// there are several cache groups, those of one group after those of another.
    ///
    /// What falls out of a window is given back: tokens appended in earlier steps are computed before these.
    /// A shared block that would be written is copied first, by a copy of this step. `lookahead` more slots a sequence
    /// get blocks of its own, which drafts may be written to, but no tokens. Of a recurrent group the step writes the state
    /// after its last token alone: blocks of tokens that an earlier call of the step put in become null blocks.
    ///
    /// # Errors
    /// The device has too few blocks for the whole batch; a sequence is unknown, named twice, not on the device, still
    /// loading or has lost bytes; `slots` has another length than the tokens.
    pub fn append(
        &mut self,
        sequences: &[SequenceId],
        counts: Counts<'_>,
        lookahead: u32,
        slots: &mut [i64],
    ) -> Result<()> {
        self.append_synced(sequences, counts, lookahead, None, slots)
    }

    /// [`Manager::append`], and brings the rows of a block table up to date that the caller keeps from call to call: row
    /// `i` belongs to sequence `i`, in the first cache group, then come those of the next. What has changed since the sequence's last such call is written, at its first one the
    /// whole row. Who moves a sequence to another row or table writes that with [`Manager::block_tables`] first.
    ///
    /// # Errors
    /// As [`Manager::append`]; the table has fewer rows than there are sequences, or a sequence more blocks than a row.
    pub fn append_with_tables(
        &mut self,
        sequences: &[SequenceId],
        counts: Counts<'_>,
        lookahead: u32,
        tables: TableRows<'_>,
        slots: &mut [i64],
    ) -> Result<()> {
        self.append_synced(sequences, counts, lookahead, Some(tables), slots)
    }

    pub(super) fn append_synced(
        &mut self,
        sequences: &[SequenceId],
        counts: Counts<'_>,
        lookahead: u32,
        tables: Option<TableRows<'_>>,
        slots: &mut [i64],
    ) -> Result<()> {
        let (mut members, mut spread) = (Vec::new(), Vec::new());
        counts.total(sequences.len())?;
        let (sequences, counts) = (self.growing(sequences, &mut members)?, self.spread(counts, &mut spread));
        check_slots(sequences, counts, slots)?;
        if let Some(tables) = &tables {
            tables.require_rows(sequences.len())?;
        }
        self.rows.begin_batch();
        self.append_batch(Batch { sequences, counts, lookahead, slots, tables })?;
        if self.groups.cross() {
            self.await_encoders(sequences);
        }
        Ok(())
    }

    /// Appends to a batch in one pass over the rows whose tokens fit into the blocks that they are writing, and one over
    /// the others. If those cannot be served, the first pass is undone.
    pub(super) fn append_batch(&mut self, mut batch: Batch<'_>) -> Result<()> {
        let mut work = std::mem::take(&mut self.work);
        let pass = if batch.tables.is_some() { pass::<true> } else { pass::<false> };
        let passed = pass(&mut self.rows, self.transfers.open(), &mut batch, &mut work);
        work.slow.truncate(passed.slow);
        let result = if passed.rows < batch.sequences.len() {
            // What is wrong with a row before comes first.
            let repeated = Error::RepeatedSequence { sequence: batch.sequences[passed.rows] };
            self.slow_needs(&batch, &mut work, &mut Vec::new()).and(Err(repeated))
        } else if work.slow.is_empty() {
            Ok(())
        } else {
            self.append_slow(&mut batch, &mut work)
        };
        if result.is_err() {
            self.undo(&batch, &passed, &work);
        }
        self.work = work;
        result
    }

    /// The second pass: checks all rows that need blocks, then gives them.
    #[inline(never)]
    fn append_slow(&mut self, batch: &mut Batch<'_>, work: &mut Work) -> Result<()> {
        let mut blocks = std::mem::take(&mut self.scratch);
        blocks.clear();
        let result = self.slow_needs(batch, work, &mut blocks).and_then(|new| {
            let copies = if blocks.is_empty() { 0 } else { self.copies(&mut blocks)? };
            self.tiers.device().require(new + copies, true)?;
            if self.groups.slide() {
                for &Slow { index, .. } in &work.slow {
                    let sequence = batch.sequences[index];
                    let row = self.rows.at(sequence);
                    // Tokens that this step is yet to compute keep what they need.
                    if row.written != self.transfers.open() {
                        self.slide(sequence, row.len);
                    }
                    if self.is_recurrent(sequence) {
                        self.pass(sequence, batch.counts.at(index));
                    }
                }
            }
            self.append_checked(batch, work, new, &mut blocks)
        });
        self.scratch = blocks;
        result
    }

    /// New blocks that the noted rows need; `shared` gets the shared blocks that they would write.
    fn slow_needs(&self, batch: &Batch<'_>, work: &mut Work, shared: &mut Vec<BlockId>) -> Result<usize> {
        let (mut new, mut ended, mut passed) = (0, 0, 0);
        for &Slow { index, .. } in &work.slow {
            let (sequence, count) = (batch.sequences[index], batch.counts.at(index));
            let row = self.rows.get(sequence)?;
            let need = if count == 1 && batch.lookahead == 0 && ends_block(row, self.block_size) {
                ended += 1;
                Need { blocks: 1, entries: 1 }
            } else {
                self.need(sequence, count, batch.lookahead, shared)?
            };
            if let Some(tables) = &batch.tables {
                tables.require_width(sequence, self.rows.at(sequence).table.len() + need.entries)?;
            }
            new += need.blocks;
            passed += need.entries - need.blocks;
        }
        if passed > 0 {
            self.require_nulls(std::iter::once(passed))?;
        }
        work.ended = ended;
        Ok(new)
    }

    /// Appends to the noted rows, for which there are blocks. Without copies, these are taken at once.
    fn append_checked(
        &mut self,
        batch: &mut Batch<'_>,
        work: &Work,
        new: usize,
        blocks: &mut Vec<BlockId>,
    ) -> Result<()> {
        let (open, size) = (self.transfers.open(), self.block_size);
        if blocks.is_empty() {
            self.step().take(Tier::Device, new, false, blocks);
            if work.ended == work.slow.len() {
                next_blocks(&mut self.rows, batch, &work.slow, blocks, size, open);
                if self.groups.slide() || self.tiers.device().follows_places() {
                    for &Slow { index, .. } in &work.slow {
                        self.note_begun(batch.sequences[index], 0, 1);
                        self.note_new_blocks(batch.sequences[index], 1);
                    }
                }
                return Ok(());
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
                (slots, _) => self.grow(sequence, count, batch.lookahead, slots, &mut fresh)?,
            }
            self.note_new_blocks(sequence, self.rows.at(sequence).table.len() - before);
            if let Some(tables) = &mut batch.tables {
                let row = self.rows.at_mut(sequence);
                row.table.sync(&mut row.synced, tables.row(index));
            }
        }
        Ok(())
    }

    /// Notes whose a row's last blocks are.
    fn note_new_blocks(&mut self, sequence: SequenceId, count: usize) {
        if self.tiers.device().follows_places() {
            let table = &self.rows.at(sequence).table;
            let from = table.len() - count;
            self.tiers.note_owner(sequence.row(), from, &table[from..]);
        }
    }

    /// Takes back what the first pass has done to the rows before `passed`.
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
    fn need(&self, sequence: SequenceId, count: u32, lookahead: u32, shared: &mut Vec<BlockId>) -> Result<Need> {
        let row = self.rows.at(sequence);
        refuse_lost(sequence, row)?;
        require_tier(sequence, row, Tier::Device)?;
        refuse_loading(sequence, row, &self.transfers)?;
        let end = u64::from(row.len) + u64::from(count) + u64::from(lookahead);
        if end > u64::from(u32::MAX) {
            return Err(invalid("length with lookahead", i128::from(end), format!("at most {}", u32::MAX)));
        }
        let (passed, unwritten) = (self.passed_over(sequence, count), row.written == self.transfers.open());
        for i in self.written_blocks(row, count, lookahead) {
            if !self.tiers.device().block(row.table[i]).is_exclusive() {
                if unwritten {
                    return Err(Error::Unwritten { sequence });
                }
                if !passed.contains(&i) {
                    shared.push(row.table[i]);
                }
            }
        }
        if unwritten && self.leaves_awaited_state(sequence, count) {
            return Err(Error::Unwritten { sequence });
        }
        let held = row.table.len();
        let entries = blocks_for(end, self.block_size).saturating_sub(held);
        let skipped = self.groups.get(row.group).skipped(row.len, count, held, self.block_size);
        if skipped > 0 {
            self.require_nulls(std::iter::once(skipped))?;
        }
        Ok(Need { blocks: entries - skipped, entries })
    }

    /// Whether another sequence shares the block for the state after a row's last token, and the step would not write that
    /// state any more with `count` tokens put in: it writes the state after those, in another block.
    fn leaves_awaited_state(&self, sequence: SequenceId, count: u32) -> bool {
        let (row, size) = (self.rows.at(sequence), u64::from(self.block_size));
        let Some(last) = row.len.checked_sub(1).filter(|_| count > 0 && self.is_recurrent(sequence)) else {
            return false;
        };
        let block = row.table[(last / self.block_size) as usize];
        let leaves = (u64::from(last) + u64::from(count)) / size > u64::from(last) / size;
        leaves && !self.is_null(block) && self.tiers.device().refs(block) > 1
    }

    /// Copies that a batch needs which writes the shared blocks so often: the last owner left writes in place.
    fn copies(&self, shared: &mut [BlockId]) -> Result<usize> {
        shared.sort_unstable();
        let mut copies = 0;
        for writers in shared.chunk_by(|a, b| a == b) {
            let block = writers[0];
            // The last owner writes in place, unless the cache has the block too.
            let others = self.tiers.device().refs(block) as usize
                - usize::from(!self.tiers.device().block(block).is_published());
            let wanted = writers.len().min(others);
            let room = self.tiers.device().block(block).lease_room();
            if wanted > room {
                let limit = u32::try_from(room).unwrap_or(u32::MAX);
                return Err(Error::TooManyLeases { tier: Tier::Device, block, limit });
            }
            copies += wanted;
        }
        Ok(copies)
    }

    /// Table entries that exist and that are written after so many tokens and slots beyond them have been appended.
    fn written_blocks(&self, row: &Row, count: u32, lookahead: u32) -> Range<usize> {
        let first = (row.len / self.block_size) as usize;
        let end = u64::from(row.len) + u64::from(count) + u64::from(lookahead);
        if end == u64::from(row.len) {
            return first..first;
        }
        first..blocks_for(end, self.block_size).min(row.table.len()).max(first)
    }

    /// Appends to one row what [`Manager::need`] has found to fit; `fresh` are blocks taken for it and rows after it.
    fn grow(
        &mut self,
        sequence: SequenceId,
        count: u32,
        lookahead: u32,
        slots: &mut [i64],
        fresh: &mut std::slice::Iter<'_, BlockId>,
    ) -> Result<()> {
        let row = self.rows.at(sequence);
        let (len, blocks) = (row.len, row.table.len());
        for i in self.written_blocks(row, count, lookahead) {
            let block = self.rows.at(sequence).table[i];
            if self.is_null(block) {
                continue; // passed over
            }
            if self.tiers.device().block(block).is_exclusive() {
                self.tiers.note_written(block);
                let overlaps = self.tiers.device().block(block).is_read_ahead();
                self.transfers.note_overlap(overlaps);
                self.part(block);
            } else {
                self.copy_on_write(sequence, i, block, i < blocks_for(len.into(), self.block_size))?;
            }
        }
        let end = u64::from(len) + u64::from(count) + u64::from(lookahead);
        let wanted = blocks_for(end, self.block_size).saturating_sub(blocks);
        let (open, size) = (self.transfers.open(), self.block_size);
        let row = self.rows.at(sequence);
        if wanted > 0 {
            let skipped = self.groups.get(row.group).skipped(len, count, blocks, size);
            if skipped > 0 {
                self.skip(sequence, skipped);
            }
            let wanted = wanted - skipped;
            let row = self.rows.at_mut(sequence);
            let mut step = Step { tiers: &mut self.tiers, transfers: &mut self.transfers };
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
        row.len = len + count;
        row.written = open;
        // A step that computes the row waits for its load, and later ones come after that step.
        row.moving &= count == 0;
        let index = row.len / size;
        row.writable = 0;
        if let Some(&block) = row.table.get(index as usize) {
            // Who writes what a transfer still reads must say so, and the first pass does not ask. Where nothing is written yet,
            // the block may also be a copy of another tier's.
            let own = count > 0
                && self.tiers.device().block(block).is_exclusive()
                && !self.tiers.device().block(block).is_read_ahead();
            // Only the second pass asks whether the state at the end of a block is the last that this step writes.
            let own = own && (row.len % size > 0 || self.groups.get(row.group) != Group::Recurrent);
            // Nor may it write what is being moved.
            if !row.moving && own && !self.tiers.device().is_moving(block) {
                row.writable = (index + 1).saturating_mul(size);
                row.slot_base = (i64::from(block.0) - i64::from(index)) * i64::from(size);
            }
        }
        Ok(())
    }

    /// Parts a block that is about to be written from its copy in another tier, which after a truncation it may have.
    fn part(&mut self, block: BlockId) {
        if self.tiers.device().block(block).tier_copy().is_some() {
            self.tiers.unlink((Tier::Device, block));
            self.transfers.remove_fresh((Tier::Device, block));
        }
    }

    /// Gives a row a block of its own in place of a shared one, by a copy of this step if it has tokens there.
    fn copy_on_write(&mut self, sequence: SequenceId, index: usize, shared: BlockId, used: bool) -> Result<()> {
        let mut fresh = Vec::with_capacity(1);
        self.step().take(Tier::Device, 1, used, &mut fresh);
        let own = fresh[0];
        if !used {
            self.tiers.release((Tier::Device, shared));
            self.rows.at_mut(sequence).table.replace(index, own);
            self.tiers.note_owner(sequence.row(), index, &[own]);
            return Ok(());
        }
        let (from, to) = ((Tier::Device, shared), (Tier::Device, own));
        self.step().transfer(Kind::Copy, from, to, LeaseKind::Read)?;
        self.tiers.release((Tier::Device, shared));
        let open = self.transfers.open();
        let row = self.rows.at_mut(sequence);
        row.table.replace(index, own);
        self.tiers.note_owner(sequence.row(), index, &[own]);
        row.moving &= row.ticket == open;
        row.ticket = open;
        Ok(())
    }
}

/// What one row needs.
#[derive(Clone, Copy, Debug)]
struct Need {
    /// Blocks of the pool.
    blocks: usize,
    /// Entries of its table, which may have null blocks.
    entries: usize,
}

fn check_slots(sequences: &[SequenceId], counts: Counts<'_>, slots: &[i64]) -> Result<()> {
    let total = counts.total(sequences.len())?;
    if total == slots.len() as u64 {
        return Ok(());
    }
    Err(invalid("number of slots", slots.len() as i128, format!("{total}, the tokens")))
}

/// Whether a row has just filled the block that was its to write, and has no more.
#[inline]
fn ends_block(row: &Row, size: u32) -> bool {
    let held = row.table.len() as u64 * u64::from(size);
    row.writable != 0 && row.len == row.writable && held == u64::from(row.len) && row.len < u32::MAX - size
}
