//! Appending tokens to a batch of sequences: new blocks, lookahead, copy-on-write, slots.

use super::{Manager, blocks_for, invalid, refuse_loading, refuse_lost, release, require_tier, take, write_slots};
use crate::decision::Kind;
use crate::error::{Error, Result};
use crate::id::{BlockId, SequenceId, Tier};
use crate::lease::LeaseKind;

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
        self.rows.begin_batch();
        let (mut new, mut shared) = (0, std::mem::take(&mut self.scratch));
        shared.clear();
        let mut result = Ok(());
        for (i, &sequence) in sequences.iter().enumerate() {
            let count = counts.at(i);
            match self.rows.next_in_batch(sequence) {
                Ok(row) if fits(row.len, count, lookahead, row.writable) => {}
                Ok(_) => match self.need(sequence, count, lookahead, &mut shared) {
                    Ok(blocks) => new += blocks,
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

    /// Appends tokens to a batch of sequences and writes the slot of each token, sequence by sequence, to `slots`.
    ///
    /// A shared block that would be written is copied first, by a copy of this step. `lookahead` more slots a sequence
    /// get blocks, but no tokens.
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
        let total = counts.total(sequences.len())?;
        if total != slots.len() as u64 {
            return Err(invalid("number of slots", slots.len() as i128, format!("{total}, the tokens")));
        }
        let wanted = self.blocks_to_append(sequences, counts, lookahead)?;
        self.pools[0].require(wanted, true)?;
        let open = self.tickets.open();
        let mut rest = slots;
        for (i, &sequence) in sequences.iter().enumerate() {
            let count = counts.at(i);
            let (now, later) = rest.split_at_mut(count as usize);
            rest = later;
            let row = self.rows.at_mut(sequence);
            if fits(row.len, count, lookahead, row.writable) {
                for (slot, position) in now.iter_mut().zip(i64::from(row.len)..) {
                    *slot = row.slot_base + position;
                }
                row.len += count;
                row.written = open;
            } else {
                self.grow(sequence, count, lookahead, now)?;
            }
        }
        Ok(())
    }

    /// New blocks that one row needs; shared blocks that it would write are appended to `shared`.
    fn need(&self, sequence: SequenceId, count: u32, lookahead: u32, shared: &mut Vec<BlockId>) -> Result<usize> {
        let row = self.rows.at(sequence);
        refuse_lost(sequence, row)?;
        require_tier(sequence, row, Tier::Device)?;
        refuse_loading(sequence, row, &self.tickets)?;
        let end = u64::from(row.len) + u64::from(count) + u64::from(lookahead);
        if end > u64::from(u32::MAX) {
            return Err(invalid("length with lookahead", i128::from(end), format!("at most {}", u32::MAX)));
        }
        for i in self.written_blocks(row.len, count, row.table.len()) {
            if !self.pools[0].is_exclusive(row.table[i]) {
                if row.written == self.tickets.open() {
                    return Err(Error::Unwritten { sequence });
                }
                shared.push(row.table[i]);
            }
        }
        Ok(blocks_for(end, self.block_size).saturating_sub(row.table.len()))
    }

    /// Copies that a batch needs which writes the shared blocks so often: the last owner left writes in place.
    fn copies(&self, shared: &mut [BlockId]) -> Result<usize> {
        shared.sort_unstable();
        let mut copies = 0;
        for writers in shared.chunk_by(|a, b| a == b) {
            let block = writers[0];
            let wanted = writers.len().min(self.pools[0].refs(block) as usize - 1);
            let room = self.pools[0].lease_room(block);
            if wanted > room {
                let limit = u32::try_from(room).unwrap_or(u32::MAX);
                return Err(Error::TooManyLeases { tier: Tier::Device, block, limit });
            }
            copies += wanted;
        }
        Ok(copies)
    }

    /// Table entries that exist and that appending `count` tokens writes.
    fn written_blocks(&self, len: u32, count: u32, blocks: usize) -> std::ops::Range<usize> {
        let first = (len / self.block_size) as usize;
        let end = if count == 0 { first } else { blocks_for(u64::from(len) + u64::from(count), self.block_size) };
        first..end.min(blocks).max(first)
    }

    /// Appends to one row what [`Manager::need`] has found to fit.
    fn grow(&mut self, sequence: SequenceId, count: u32, lookahead: u32, slots: &mut [i64]) -> Result<()> {
        let row = self.rows.at(sequence);
        let (len, blocks) = (row.len, row.table.len());
        for i in self.written_blocks(len, count, blocks) {
            let block = self.rows.at(sequence).table[i];
            if self.pools[0].is_exclusive(block) {
                self.step.reuses_drained |= self.pools[0].is_drained(block);
            } else {
                self.copy_on_write(sequence, i, block)?;
            }
        }
        let end = u64::from(len) + u64::from(count) + u64::from(lookahead);
        let wanted = blocks_for(end, self.block_size).saturating_sub(blocks);
        let (open, size) = (self.tickets.open(), self.block_size);
        let row = self.rows.at_mut(sequence);
        if wanted > 0 {
            self.step.reuses_drained |= take(&mut self.pools, Tier::Device, wanted, &mut row.table);
        }
        write_slots(row, len, size, slots);
        row.len = len + count;
        row.written = open;
        // A step that computes the row waits for its load, and later ones come after that step.
        row.moving &= count == 0;
        let index = row.len / size;
        row.writable = 0;
        if let Some(&block) = row.table.get(index as usize) {
            if !row.moving && self.pools[0].is_exclusive(block) {
                row.writable = (index + 1).saturating_mul(size);
                row.slot_base = (i64::from(block.0) - i64::from(index)) * i64::from(size);
            }
        }
        Ok(())
    }

    /// Gives a row a block of its own in place of a shared one, by a copy of this step.
    fn copy_on_write(&mut self, sequence: SequenceId, index: usize, shared: BlockId) -> Result<()> {
        let mut fresh = Vec::with_capacity(1);
        self.step.reuses_drained |= take(&mut self.pools, Tier::Device, 1, &mut fresh);
        let own = fresh[0];
        self.lease(Tier::Device, shared, LeaseKind::Read)?;
        self.lease(Tier::Device, own, LeaseKind::Write)?;
        self.step.pairs(Kind::Copy, Tier::Device, Tier::Device).push([shared.0, own.0]);
        release(&mut self.pools, Tier::Device, shared);
        let open = self.tickets.open();
        let row = self.rows.at_mut(sequence);
        row.table[index] = own;
        row.moving &= row.ticket == open;
        row.ticket = open;
        Ok(())
    }
}

/// Whether tokens and lookahead fit into the block that a row is writing.
#[inline]
fn fits(len: u32, count: u32, lookahead: u32, writable: u32) -> bool {
    writable != 0 && u64::from(len) + u64::from(count) + u64::from(lookahead) <= u64::from(writable)
}
