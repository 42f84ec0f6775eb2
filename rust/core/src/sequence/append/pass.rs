//! The first pass of an append: the common case of nearly every row in a decode step, and nothing else.
//!
//! A row whose tokens fit into its exclusive block needs neither the pool nor a check: anything else that happens to a
//! row revokes that block (`writable` becomes 0), and a freed row has another generation.

use super::Counts;
use super::block_tables::TableRows;
use crate::id::{BlockId, SequenceId, TicketId};
use crate::sequence::table::{Row, SequenceRows};

/// One call's worth of appending.
#[derive(Debug)]
pub(crate) struct Batch<'a> {
    pub(crate) sequences: &'a [SequenceId],
    pub(crate) counts: Counts<'a>,
    pub(crate) lookahead: u32,
    pub(crate) slots: &'a mut [i64],
    pub(crate) tables: Option<TableRows<'a>>,
}

/// A row deferred to the second pass: its index in the batch, and that of its slots.
#[derive(Debug, Clone, Copy)]
pub(in crate::sequence) struct Slow {
    pub(in crate::sequence) index: usize,
    pub(in crate::sequence) at: usize,
}

/// Buffers reused between calls.
#[derive(Debug, Clone, Default)]
pub(in crate::sequence) struct Work {
    pub(in crate::sequence) slow: Vec<Slow>,
    /// How many of these rows get one token and have just filled their last block.
    pub(in crate::sequence) ended: usize,
    /// How many blocks these rows leave behind for others.
    pub(in crate::sequence) freed: usize,
    /// Rows of a moving batch whose blocks nothing else uses.
    pub(in crate::sequence) private: Vec<bool>,
}

/// Result of the first pass: the rows seen, fewer than all if one is named twice, and those deferred to the second
/// pass.
pub(in crate::sequence) struct Passed {
    pub(in crate::sequence) rows: usize,
    pub(in crate::sequence) slow: usize,
    /// Step in which all rows of the first pass were last written, so that the pass can be undone.
    pub(in crate::sequence) before: TicketId,
}

/// No row seen yet.
const NEVER: TicketId = TicketId(u64::MAX);

/// The first pass of a batch: advances the rows whose tokens fit and whose block table is up to date, and defers the
/// others. `TABLES`: the caller keeps a block table between calls, and the rows track what it shows.
pub(in crate::sequence) fn pass<const TABLES: bool>(
    rows: &mut SequenceRows,
    open: TicketId,
    batch: &mut Batch<'_>,
    work: &mut Work,
) -> Passed {
    let count = batch.sequences.len();
    work.slow.resize(count, Slow { index: 0, at: 0 });
    let (rows, epoch) = rows.entries();
    let first = First { rows, epoch, open, left: Left { slow: &mut work.slow, len: 0 } };
    match (batch.counts, batch.lookahead) {
        (Counts::All(1), 0) => first.one::<TABLES>(batch.sequences, batch.slots),
        _ => first.several::<TABLES>(batch),
    }
}

/// The first pass in progress.
struct First<'a> {
    rows: &'a mut [Row],
    epoch: u32,
    open: TicketId,
    left: Left<'a>,
}

/// Rows deferred to the second pass.
struct Left<'a> {
    slow: &'a mut [Slow],
    len: usize,
}

impl Left<'_> {
    #[inline]
    fn push(&mut self, index: usize, at: usize) {
        if let Some(slow) = self.slow.get_mut(self.len) {
            *slow = Slow { index, at };
            self.len += 1;
        }
    }
}

/// Gives a row's next token its slot.
#[inline]
fn advance(row: &mut Row, slot: &mut i64, open: TicketId) {
    *slot = row.slot_base.wrapping_add(i64::from(row.len));
    row.written = open;
    row.len = row.len.wrapping_add(1);
}

impl First<'_> {
    /// One token per row, as in every decode step: the hottest loop, where each instruction counts.
    #[inline(never)]
    fn one<const TABLES: bool>(self, sequences: &[SequenceId], slots: &mut [i64]) -> Passed {
        let Self { rows, epoch, open, mut left } = self;
        let (mut index, mut before) = (0_usize, NEVER);
        for (&sequence, slot) in sequences.iter().zip(slots) {
            match rows.get_mut(sequence.row() as usize) {
                Some(row) if row.id == sequence => {
                    if row.stamp == epoch {
                        return Passed { rows: index, slow: left.len, before };
                    }
                    row.stamp = epoch;
                    if is_synced::<TABLES>(row) && row.len < row.writable && joins(row, &mut before) {
                        advance(row, slot, open);
                    } else {
                        left.push(index, index);
                    }
                }
                _ => left.push(index, index),
            }
            index = index.wrapping_add(1);
        }
        Passed { rows: index, slow: left.len, before }
    }

    /// Any number of tokens per row, and lookahead.
    #[inline(never)]
    fn several<const TABLES: bool>(self, batch: &mut Batch<'_>) -> Passed {
        let Self { rows, epoch, open, mut left } = self;
        let (mut at, mut before) = (0, NEVER);
        for (index, &sequence) in batch.sequences.iter().enumerate() {
            let count = batch.counts.at(index);
            let end = at + count as usize;
            match rows.get_mut(sequence.row() as usize) {
                Some(row) if row.id == sequence => {
                    if row.stamp == epoch {
                        return Passed { rows: index, slow: left.len, before };
                    }
                    row.stamp = epoch;
                    if is_synced::<TABLES>(row)
                        && fits(row.len, count, batch.lookahead, row.writable)
                        && joins(row, &mut before)
                    {
                        for (slot, position) in batch.slots[at..end].iter_mut().zip(i64::from(row.len)..) {
                            *slot = row.slot_base + position;
                        }
                        row.written = open;
                        row.len += count;
                    } else {
                        left.push(index, at);
                    }
                }
                _ => left.push(index, at),
            }
            at = end;
        }
        Passed { rows: batch.sequences.len(), slow: left.len, before }
    }
}

/// Whether a row was last written in the same step as the others of the pass. If not, it is deferred, like any uncommon
/// row.
#[inline]
fn joins(row: &Row, before: &mut TicketId) -> bool {
    if row.written == *before {
        return true;
    }
    let first = *before == NEVER;
    if first {
        *before = row.written;
    }
    first
}

/// Whether the caller's block table, if any, is up to date for a row.
#[inline]
fn is_synced<const TABLES: bool>(row: &Row) -> bool {
    !TABLES || row.synced.version == row.table.version()
}

/// Whether tokens and lookahead fit into the block that a row is writing.
#[inline]
pub(in crate::sequence) fn fits(len: u32, count: u32, lookahead: u32, writable: u32) -> bool {
    writable != 0 && u64::from(len) + u64::from(count) + u64::from(lookahead) <= u64::from(writable)
}

/// Begins a row's next block with one token.
#[inline]
pub(in crate::sequence) fn next_block(row: &mut Row, block: BlockId, size: u32, open: TicketId) {
    row.table.extend_with(|table| table.push(block));
    row.slot_base = i64::from(block.0) * i64::from(size) - i64::from(row.len);
    row.writable = row.len + size;
    row.len += 1;
    row.written = open;
}

/// The second pass if all deferred rows have filled their last blocks: each gets one of `blocks`.
#[inline(never)]
pub(in crate::sequence) fn next_blocks(
    rows: &mut SequenceRows,
    batch: &mut Batch<'_>,
    slow: &[Slow],
    blocks: &[BlockId],
    size: u32,
    open: TicketId,
) {
    let (rows, _) = rows.entries();
    for (&Slow { index, at }, &block) in slow.iter().zip(blocks) {
        let row = &mut rows[batch.sequences[index].row() as usize];
        next_block(row, block, size, open);
        batch.slots[at] = i64::from(block.0) * i64::from(size);
        if let Some(tables) = &mut batch.tables {
            row.table.sync(&mut row.synced, tables.row(index));
        }
    }
}
