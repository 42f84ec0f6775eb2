//! The first pass of an append: what a decode step does to nearly every row, and nothing else.
//!
//! A row whose tokens fit into the block that is its own to write needs neither the pool nor a check: whatever else happens
//! to a row takes that block away (`writable` is 0 then), and a freed row has another generation.

use super::{Counts, TableRows};
use crate::id::{SequenceId, TicketId};
use crate::table::{Row, Rows, Shown};

/// One call's worth of appending.
#[derive(Debug)]
pub(super) struct Batch<'a> {
    pub(super) sequences: &'a [SequenceId],
    pub(super) counts: Counts<'a>,
    pub(super) lookahead: u32,
    pub(super) slots: &'a mut [i64],
    pub(super) tables: Option<TableRows<'a>>,
    /// What `tables` shows, where a batch object keeps it; else the rows do.
    pub(super) shown: Option<&'a mut [Shown]>,
}

/// A row that the first pass has left to the second: its place in the batch, and that of its slots.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slow {
    pub(super) index: usize,
    pub(super) at: usize,
}

/// Memory that one call hands on to the next.
#[derive(Debug, Clone, Default)]
pub(super) struct Work {
    pub(super) slow: Vec<Slow>,
    /// Step in which the rows of the first pass were written before.
    pub(super) before: Vec<TicketId>,
    /// Rows of a batch that moves whose blocks nothing else uses.
    pub(super) plain: Vec<bool>,
}

/// Nothing but slots is wanted.
pub(super) const ALONE: u8 = 0;
/// A block table too; the rows know what it shows.
pub(super) const SHOWN: u8 = 1;
/// As [`SHOWN`], but the batch knows, and names no row twice.
pub(super) const BOUND: u8 = 2;

/// What the first pass has seen: rows in all, fewer than there are if one is named twice, and those left to the second.
pub(super) struct Passed {
    pub(super) rows: usize,
    pub(super) slow: usize,
}

/// The first pass of a batch: advances the rows whose tokens fit and whose block table is up to date, and notes the others.
pub(super) fn pass<const KIND: u8>(rows: &mut Rows, open: TicketId, batch: &mut Batch<'_>, work: &mut Work) -> Passed {
    let count = batch.sequences.len();
    work.before.resize(count, open);
    work.slow.resize(count, Slow { index: 0, at: 0 });
    let (rows, epoch) = rows.entries();
    let first = First { rows, epoch, open, slow: &mut work.slow, passed: Passed { rows: 0, slow: 0 } };
    match (batch.counts, batch.lookahead, &batch.shown) {
        (Counts::All(1), 0, Some(shown)) => first.one_bound(batch.sequences, shown, batch.slots, &mut work.before),
        (Counts::All(1), 0, None) => first.one::<KIND>(batch.sequences, batch.slots, &mut work.before),
        _ => first.several::<KIND>(batch, &mut work.before),
    }
}

/// The first pass under way.
struct First<'a> {
    rows: &'a mut [Row],
    epoch: u32,
    open: TicketId,
    slow: &'a mut [Slow],
    passed: Passed,
}

/// Gives a row's next token its slot.
#[inline]
fn advance(row: &mut Row, slot: &mut i64, before: &mut TicketId, open: TicketId) {
    *slot = row.slot_base.wrapping_add(i64::from(row.len));
    *before = row.written;
    row.written = open;
    row.len = row.len.wrapping_add(1);
}

impl First<'_> {
    /// One token a row, as in every decode step. No instruction here is for nothing.
    #[inline(never)]
    fn one<const KIND: u8>(mut self, sequences: &[SequenceId], slots: &mut [i64], before: &mut [TicketId]) -> Passed {
        for ((&sequence, slot), before) in sequences.iter().zip(slots).zip(before) {
            match self.rows.get_mut(sequence.row() as usize) {
                Some(row) if row.generation == sequence.generation() => {
                    if row.stamp == self.epoch {
                        return self.passed;
                    }
                    row.stamp = self.epoch;
                    if is_shown::<KIND>(row, None) && row.len < row.writable {
                        advance(row, slot, before, self.open);
                    } else {
                        self.leave(self.passed.rows);
                    }
                }
                _ => self.leave(self.passed.rows),
            }
            self.passed.rows = self.passed.rows.wrapping_add(1);
        }
        self.passed
    }

    /// As [`First::one`], for a batch object.
    #[inline(never)]
    fn one_bound(
        mut self,
        sequences: &[SequenceId],
        shown: &[Shown],
        slots: &mut [i64],
        before: &mut [TicketId],
    ) -> Passed {
        for (((&sequence, shown), slot), before) in sequences.iter().zip(shown).zip(slots).zip(before) {
            match self.rows.get_mut(sequence.row() as usize) {
                Some(row)
                    if row.generation == sequence.generation()
                        && shown.version == row.table.version()
                        && row.len < row.writable =>
                {
                    advance(row, slot, before, self.open);
                }
                _ => self.leave(self.passed.rows),
            }
            self.passed.rows = self.passed.rows.wrapping_add(1);
        }
        self.passed
    }

    /// Leaves the present row to the second pass.
    #[inline]
    fn leave(&mut self, at: usize) {
        if let Some(slow) = self.slow.get_mut(self.passed.slow) {
            *slow = Slow { index: self.passed.rows, at };
            self.passed.slow += 1;
        }
    }

    /// Any number of tokens a row, and lookahead.
    #[inline(never)]
    fn several<const KIND: u8>(mut self, batch: &mut Batch<'_>, before: &mut [TicketId]) -> Passed {
        let shown = batch.shown.as_deref();
        let mut at = 0;
        for (&sequence, before) in batch.sequences.iter().zip(before) {
            let index = self.passed.rows;
            let count = batch.counts.at(index);
            let end = at + count as usize;
            match self.rows.get_mut(sequence.row() as usize) {
                Some(row) if row.generation == sequence.generation() => {
                    if KIND != BOUND {
                        if row.stamp == self.epoch {
                            return self.passed;
                        }
                        row.stamp = self.epoch;
                    }
                    if is_shown::<KIND>(row, shown.and_then(|shown| shown.get(index)))
                        && fits(row.len, count, batch.lookahead, row.writable)
                    {
                        for (slot, position) in batch.slots[at..end].iter_mut().zip(i64::from(row.len)..) {
                            *slot = row.slot_base + position;
                        }
                        *before = row.written;
                        row.written = self.open;
                        row.len += count;
                    } else {
                        self.leave(at);
                    }
                }
                _ => self.leave(at),
            }
            self.passed.rows += 1;
            at = end;
        }
        self.passed
    }
}

/// Whether the block table that is kept of a row, if any is, shows what the row has now.
#[inline]
fn is_shown<const KIND: u8>(row: &Row, bound: Option<&Shown>) -> bool {
    match KIND {
        ALONE => true,
        SHOWN => row.shown.version == row.table.version(),
        _ => bound.is_some_and(|shown| shown.version == row.table.version()),
    }
}

/// Whether tokens and lookahead fit into the block that a row is writing.
#[inline]
pub(super) fn fits(len: u32, count: u32, lookahead: u32, writable: u32) -> bool {
    writable != 0 && u64::from(len) + u64::from(count) + u64::from(lookahead) <= u64::from(writable)
}
