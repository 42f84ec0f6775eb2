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
/// Every call must be given the same table and the same manager; one restored from a snapshot is another. With several
/// cache groups table and slot mapping are cut into one equal part for each group that grows.
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
#[derive(Debug, Clone)]
pub struct DecodeBatch {
    /// One a cache group; the first group's rows are the sequences.
    parts: Vec<Part>,
}

/// One group's part of a batch.
#[derive(Debug, Clone, Default)]
struct Part {
    rows: Vec<SequenceId>,
    shown: Vec<Shown>,
}

impl Part {
    fn add(&mut self, manager: &Manager, row: SequenceId, mut tables: TableRows<'_>) {
        let mut shown = Shown::nothing();
        manager.rows.at(row).table.show(&mut shown, tables.row(self.rows.len()));
        self.rows.push(row);
        self.shown.push(shown);
    }
}

impl Default for DecodeBatch {
    fn default() -> Self {
        Self { parts: vec![Part::default()] }
    }
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
        &self.parts[0].rows
    }

    /// Adds sequences, on the device, at the end, and writes their rows; returns the first one's.
    ///
    /// # Errors
    /// A sequence is unknown, named twice, in the batch already, not on the device, still loading or has lost bytes; the
    /// table has too few rows, or too short ones.
    pub fn add(&mut self, manager: &mut Manager, sequences: &[SequenceId], mut tables: TableRows<'_>) -> Result<usize> {
        let (first, groups) = (self.sequences().len(), manager.growing_groups());
        let mut all = Vec::new();
        let members = manager.growing(sequences, &mut all)?;
        tables.part(0, groups).require_rows(first + sequences.len())?;
        manager.rows.begin_batch();
        for &sequence in self.sequences() {
            // One that was freed meanwhile can be named by nobody.
            let _ = manager.rows.next_in_batch(sequence);
        }
        for &row in members {
            manager.rows.next_in_batch(row)?;
            tables.require_width(row, manager.readable(row)?.table.len())?;
        }
        self.parts.resize_with(groups, Part::default);
        for (group, (part, rows)) in self.parts.iter_mut().zip(members.chunks_exact(sequences.len().max(1))).enumerate()
        {
            for &row in rows {
                part.add(manager, row, tables.part(group, groups));
            }
        }
        Ok(first)
    }

    /// Removes the sequence of a row. The last row takes its place, in the table too; returns which row that was, none if
    /// it was the one removed. The row that is no longer used is zeroed.
    ///
    /// # Errors
    /// There is no such row.
    pub fn remove(&mut self, index: usize, mut tables: TableRows<'_>) -> Result<Option<usize>> {
        let (count, groups) = (self.sequences().len(), self.parts.len());
        let Some(last) = count.checked_sub(1).filter(|&last| index <= last) else {
            return Err(invalid(
                "row of the batch",
                index as i128,
                format!("below {count}, the sequences of the batch"),
            ));
        };
        tables.part(0, groups).require_rows(last + 1)?;
        for (group, part) in self.parts.iter_mut().enumerate() {
            let mut tables = tables.part(group, groups);
            part.rows.swap_remove(index);
            part.shown.swap_remove(index);
            tables.copy_row(last, index);
            tables.row(last).fill(0);
        }
        Ok((index != last).then_some(last))
    }

    /// Appends tokens to all sequences: writes the slot of each token, sequence by sequence, and what has changed of the
    /// block table. Returns the number of tokens; `slots` beyond them, in each group's part, are left as they are.
    ///
    /// # Errors
    /// As [`Manager::append_with_tables`].
    pub fn append(
        &mut self,
        manager: &mut Manager,
        counts: Counts<'_>,
        lookahead: u32,
        mut tables: TableRows<'_>,
        slots: &mut [i64],
    ) -> Result<usize> {
        let groups = self.parts.len();
        let total = counts.total(self.sequences().len())?;
        tables.part(0, groups).require_rows(self.sequences().len())?;
        let have = slots.len() / groups;
        let Some(tokens) = usize::try_from(total).ok().filter(|&total| total <= have) else {
            return Err(invalid("number of slots", have as i128, format!("at least {total}, the tokens")));
        };
        if groups > 1 {
            // Then no group can fail where another has not.
            let wanted = manager.blocks_to_append(self.sequences(), counts, lookahead)?;
            manager.pools[0].require(wanted, true)?;
        }
        for (group, Part { rows, shown }) in self.parts.iter_mut().enumerate() {
            let slots = &mut slots[group * have..group * have + tokens];
            let (tables, shown) = (Some(tables.part(group, groups)), Some(shown.as_mut_slice()));
            manager.append_batch(Batch { sequences: rows, counts, lookahead, slots, tables, shown })?;
        }
        if manager.groups.cross() {
            manager.await_encoders(self.sequences());
        }
        Ok(tokens)
    }

    /// Writes what has changed of the block table without appending: after a swap, a truncation or a merge of prefixes.
    ///
    /// # Errors
    /// A sequence is unknown, not on the device, still loading or has lost bytes; a row is too short.
    pub fn refresh(&mut self, manager: &Manager, mut tables: TableRows<'_>) -> Result<()> {
        let groups = self.parts.len();
        tables.part(0, groups).require_rows(self.sequences().len())?;
        for &row in self.parts.iter().flat_map(|part| &part.rows) {
            tables.require_width(row, manager.readable(row)?.table.len())?;
        }
        for (group, part) in self.parts.iter_mut().enumerate() {
            let mut tables = tables.part(group, groups);
            for (i, (&row, shown)) in part.rows.iter().zip(&mut part.shown).enumerate() {
                manager.rows.at(row).table.show(shown, tables.row(i));
            }
        }
        Ok(())
    }

    /// Row of a sequence.
    ///
    /// # Errors
    /// The batch has no such sequence.
    pub fn find(&self, sequence: SequenceId) -> Result<usize> {
        self.sequences().iter().position(|&s| s == sequence).ok_or(Error::UnknownSequence { sequence })
    }
}
