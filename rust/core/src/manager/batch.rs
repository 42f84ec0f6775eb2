//! The running sequences of an engine and their rows of one block table, kept from step to step.
//!
//! Row `i` of the table and slot mapping belongs to the batch's sequence `i`; there are no gaps. The batch owns nothing of
//! the sequences: what other calls do to them is noticed by the versions of their tables.

use super::pass::Batch;
use super::{Counts, Manager, TableRows, invalid};
use crate::error::{Error, Result};
use crate::id::SequenceId;
use crate::table::Shown;

/// A batch of sequences whose block table and slot mapping are kept incrementally, in memory of the caller's.
///
/// Every call must be given the same table and the same manager; one restored from a snapshot is another.
///
/// ```
/// use blockyard_core::{Config, Counts, DecodeBatch, Manager, TableRows};
///
/// # fn main() -> blockyard_core::Result<()> {
/// let config = Config { block_size: 4, blocks: [8, 0, 0], watermark: 0.0, prefix_caching: false };
/// let (mut manager, mut sequences) = (Manager::new(config)?, Vec::new());
/// manager.allocate(&[4, 2], &mut sequences)?;
/// manager.take_decision();
///
/// let (mut batch, mut table, mut slots) = (DecodeBatch::new(), [0; 2 * 4], [0; 2]);
/// batch.add(&mut manager, &sequences, TableRows::new(&mut table, 4))?;
/// batch.append(&mut manager, Counts::All(1), 0, TableRows::new(&mut table, 4), &mut slots)?;
/// assert_eq!(table, [0, 2, 0, 0, 1, 0, 0, 0]); // the first sequence has begun block 2
/// assert_eq!(slots, [2 * 4, 4 + 2]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct DecodeBatch {
    sequences: Vec<SequenceId>,
    shown: Vec<Shown>,
}

impl DecodeBatch {
    /// A batch without sequences.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The sequences, by row.
    #[must_use]
    pub fn sequences(&self) -> &[SequenceId] {
        &self.sequences
    }

    /// Adds sequences, on the device, at the end, and writes their rows; returns the first one's.
    ///
    /// # Errors
    /// A sequence is unknown, named twice, in the batch already, not on the device, still loading or has lost bytes; the
    /// table has too few rows, or too short ones.
    pub fn add(&mut self, manager: &mut Manager, sequences: &[SequenceId], mut tables: TableRows<'_>) -> Result<usize> {
        let first = self.sequences.len();
        tables.require_rows(first + sequences.len())?;
        manager.rows.begin_batch();
        for &sequence in &self.sequences {
            // One that was freed meanwhile can be named by nobody.
            let _ = manager.rows.next_in_batch(sequence);
        }
        for &sequence in sequences {
            manager.rows.next_in_batch(sequence)?;
            tables.require_width(sequence, manager.readable(sequence)?.table.len())?;
        }
        for &sequence in sequences {
            let mut shown = Shown::nothing();
            manager.rows.at(sequence).table.show(&mut shown, tables.row(self.sequences.len()));
            self.sequences.push(sequence);
            self.shown.push(shown);
        }
        Ok(first)
    }

    /// Removes the sequence of a row. The last row takes its place, in the table too; returns which row that was, none if
    /// it was the one removed. The row that is no longer used is zeroed.
    ///
    /// # Errors
    /// There is no such row.
    pub fn remove(&mut self, index: usize, mut tables: TableRows<'_>) -> Result<Option<usize>> {
        let Some(last) = self.sequences.len().checked_sub(1).filter(|&last| index <= last) else {
            let must = format!("below {}, the sequences of the batch", self.sequences.len());
            return Err(invalid("row of the batch", index as i128, must));
        };
        tables.require_rows(last + 1)?;
        self.sequences.swap_remove(index);
        self.shown.swap_remove(index);
        tables.copy_row(last, index);
        tables.row(last).fill(0);
        Ok((index != last).then_some(last))
    }

    /// Appends tokens to all sequences: writes the slot of each token, sequence by sequence, and what has changed of the
    /// block table. Returns the number of tokens; `slots` beyond them are left as they are.
    ///
    /// # Errors
    /// As [`Manager::append_with_tables`].
    pub fn append(
        &mut self,
        manager: &mut Manager,
        counts: Counts<'_>,
        lookahead: u32,
        tables: TableRows<'_>,
        slots: &mut [i64],
    ) -> Result<usize> {
        let total = counts.total(self.sequences.len())?;
        tables.require_rows(self.sequences.len())?;
        let have = slots.len();
        let slots = usize::try_from(total).ok().and_then(|total| slots.get_mut(..total));
        let Some(slots) = slots else {
            return Err(invalid("number of slots", have as i128, format!("at least {total}, the tokens")));
        };
        let tokens = slots.len();
        let (sequences, shown) = (&self.sequences, Some(self.shown.as_mut_slice()));
        manager.append_batch(Batch { sequences, counts, lookahead, slots, tables: Some(tables), shown })?;
        Ok(tokens)
    }

    /// Writes what has changed of the block table without appending: after a swap, a truncation or a merge of prefixes.
    ///
    /// # Errors
    /// A sequence is unknown, not on the device, still loading or has lost bytes; a row is too short.
    pub fn refresh(&mut self, manager: &Manager, mut tables: TableRows<'_>) -> Result<()> {
        tables.require_rows(self.sequences.len())?;
        for &sequence in &self.sequences {
            tables.require_width(sequence, manager.readable(sequence)?.table.len())?;
        }
        for (i, (&sequence, shown)) in self.sequences.iter().zip(&mut self.shown).enumerate() {
            manager.rows.at(sequence).table.show(shown, tables.row(i));
        }
        Ok(())
    }

    /// Row of a sequence.
    ///
    /// # Errors
    /// The batch has no such sequence.
    pub fn find(&self, sequence: SequenceId) -> Result<usize> {
        self.sequences.iter().position(|&s| s == sequence).ok_or(Error::UnknownSequence { sequence })
    }
}
