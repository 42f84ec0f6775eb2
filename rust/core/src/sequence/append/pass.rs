//! The first pass of an append: the common case of nearly every row in a decode step, and nothing else.
//!
//! A row whose tokens fit into its exclusive block needs neither the pool nor a check: anything else that happens to a
//! row revokes that block (`writable` becomes 0), and a freed row has another generation.

use super::Counts;
use super::block_tables::TableRows;
use crate::group::Groups;
use crate::id::{BlockId, SequenceId, TicketId};
use crate::page::PerClass;
use crate::sequence::table::{Entries, GroupTable, Row, SequenceRows, TableId};

/// One call of [`Manager::append`](crate::Manager::append).
#[derive(Debug)]
pub struct Append<'a> {
    /// Sequences to append to.
    pub sequences: &'a [SequenceId],
    /// Tokens for each.
    pub counts: Counts<'a>,
    /// Slots for drafts beyond the tokens of each sequence, in blocks that nothing else uses.
    pub lookahead: u32,
    /// Ids of the tokens for the prefix cache, sequence by sequence.
    pub token_ids: Option<&'a [u32]>,
    /// Rows of a block table that the caller keeps between calls: row `i` belongs to sequence `i` in the first cache
    /// group, followed by the rows of the next group. Only changes since the sequence's last such call are written, or
    /// the whole row on its first. After moving a sequence to another row or table, write that row with
    /// [`Manager::block_tables`](crate::Manager::block_tables) first.
    pub tables: Option<TableRows<'a>>,
    /// Receives the slot of each token, sequence by sequence; with several cache groups, group by group.
    pub slots: &'a mut [i64],
}

impl<'a> Append<'a> {
    /// Tokens without ids or lookahead.
    #[must_use]
    pub fn new(sequences: &'a [SequenceId], counts: Counts<'a>, slots: &'a mut [i64]) -> Self {
        Self { sequences, counts, lookahead: 0, token_ids: None, tables: None, slots }
    }
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
    /// Which of these rows get one token and have just filled their last blocks.
    pub(in crate::sequence) ended: Vec<bool>,
    /// By group: how many new blocks these rows need.
    pub(in crate::sequence) new: Vec<usize>,
    /// Whether they keep the tails of points that may be marked as computed after this append.
    pub(in crate::sequence) keeps_tails: bool,
    /// How many blocks these rows leave behind for others.
    pub(in crate::sequence) freed: PerClass,
    /// How many more they take.
    pub(in crate::sequence) lacking: PerClass,
    /// Tables of a moving batch whose blocks nothing else uses.
    pub(in crate::sequence) private: Vec<bool>,
}

impl Work {
    /// The tables of the deferred rows, group by group, and whether their rows ended.
    pub(in crate::sequence) fn slow_tables<'a>(
        &'a self,
        sequences: &'a [SequenceId],
        groups: u8,
    ) -> impl Iterator<Item = (Slow, TableId, bool)> {
        (0..groups).flat_map(move |group| {
            let rows = self.slow.iter().zip(&self.ended);
            rows.map(move |(&slow, &ended)| (slow, TableId { sequence: sequences[slow.index], group }, ended))
        })
    }
}

/// Result of the first pass: the rows seen, fewer than all if one is named twice.
pub(in crate::sequence) struct Passed {
    pub(in crate::sequence) rows: usize,
    /// Step in which all rows of the first pass were last written, so that the pass can be undone.
    pub(in crate::sequence) before: TicketId,
}

/// No row seen yet.
const NEVER: TicketId = TicketId(u64::MAX);

/// The first pass of a batch: advances the rows whose tokens fit and whose block tables, in the first `groups` groups, are
/// up to date, and defers the others. `TABLES`: the caller keeps a block table between calls, and the rows track what it
/// shows.
pub(in crate::sequence) fn pass<const TABLES: bool>(
    rows: &mut SequenceRows,
    groups: usize,
    open: TicketId,
    batch: &mut Append<'_>,
    work: &mut Work,
) -> Passed {
    let count = batch.sequences.len();
    work.slow.clear();
    work.slow.reserve(count);
    let first = First { entries: rows.entries(), groups, open, slow: &mut work.slow };
    match (batch.counts, batch.lookahead) {
        (Counts::All(1), 0) if groups == 1 => first.one::<TABLES>(batch.sequences, batch.slots),
        (Counts::All(1), 0) => first.one_in_each::<TABLES>(batch.sequences, batch.slots),
        _ => first.several::<TABLES>(batch),
    }
}

/// The first pass of a batch with draft tokens, whose states take blocks: defers all rows.
#[inline(never)]
pub(in crate::sequence) fn defer_all(rows: &mut SequenceRows, batch: &Append<'_>, work: &mut Work) -> Passed {
    let (Entries { rows, epoch, .. }, mut at) = (rows.entries(), 0);
    work.slow.clear();
    for (index, &sequence) in batch.sequences.iter().enumerate() {
        if let Some(row) = rows.get_mut(sequence.row() as usize).filter(|row| row.id == sequence) {
            if row.stamp == epoch {
                return Passed { rows: index, before: NEVER };
            }
            row.stamp = epoch;
        }
        work.slow.push(Slow { index, at });
        at += batch.counts.at(index) as usize;
    }
    Passed { rows: batch.sequences.len(), before: NEVER }
}

/// The first pass in progress.
struct First<'a> {
    entries: Entries<'a>,
    /// Growing groups.
    groups: usize,
    open: TicketId,
    /// Rows deferred to the second pass.
    slow: &'a mut Vec<Slow>,
}

impl First<'_> {
    /// One token per row of one group, as in every decode step: the hottest loop, where each instruction counts.
    ///
    /// It reads nothing from the stack: with two such reads it took 1.3 times as long in half of all processes, probably
    /// where the processor took them for reads of what was just stored to a row.
    #[inline(never)]
    fn one<const TABLES: bool>(self, sequences: &[SequenceId], slots: &mut [i64]) -> Passed {
        let Self { entries: Entries { rows, epoch, .. }, open, slow, .. } = self;
        let (mut index, mut before) = (0_usize, NEVER);
        for (&sequence, slot) in sequences.iter().zip(slots) {
            match rows.get_mut(sequence.row() as usize) {
                Some(row)
                    if row.id == sequence
                        && row.stamp != epoch
                        && is_synced::<TABLES>(&row.first)
                        && row.len < row.writable
                        && row.written == before =>
                {
                    row.advance(slot, epoch, open);
                }
                Some(row) => match look::<TABLES>(row, sequence, epoch, before) {
                    Look::Joins => {
                        before = row.written;
                        row.advance(slot, epoch, open);
                    }
                    Look::Waits => slow.push(Slow { index, at: index }),
                    Look::Repeats => return Passed { rows: index, before },
                },
                None => slow.push(Slow { index, at: index }),
            }
            index = index.wrapping_add(1);
        }
        Passed { rows: index, before }
    }

    /// One token per row of several groups. The slots of a row that turns out to be slow are written again later.
    #[inline(never)]
    fn one_in_each<const TABLES: bool>(self, sequences: &[SequenceId], slots: &mut [i64]) -> Passed {
        let Self { entries: Entries { rows, others, per_row, epoch }, groups, open, slow } = self;
        let (count, mut before) = (sequences.len(), NEVER);
        for (index, &sequence) in sequences.iter().enumerate() {
            let at = sequence.row() as usize;
            match (rows.get_mut(at), others.get(at * per_row..at * per_row + groups - 1)) {
                (Some(row), Some(others)) if row.id == sequence => {
                    if row.stamp == epoch {
                        return Passed { rows: index, before };
                    }
                    row.stamp = epoch;
                    let (len, mut to) = (i64::from(row.len), index);
                    let mut synced = is_synced::<TABLES>(&row.first);
                    slots[to] = row.first.slot_base.wrapping_add(len);
                    for table in others {
                        to = to.wrapping_add(count);
                        synced &= is_synced::<TABLES>(table);
                        slots[to] = table.slot_base.wrapping_add(len);
                    }
                    if synced && row.len < row.writable && joins(row, &mut before) {
                        row.written = open;
                        row.len = row.len.wrapping_add(1);
                    } else {
                        slow.push(Slow { index, at: index });
                    }
                }
                _ => slow.push(Slow { index, at: index }),
            }
        }
        Passed { rows: count, before }
    }

    /// Any number of tokens per row, and lookahead.
    #[inline(never)]
    fn several<const TABLES: bool>(self, batch: &mut Append<'_>) -> Passed {
        let Self { entries: Entries { rows, others, per_row, epoch }, groups, open, slow } = self;
        let (mut at, mut before, tokens) = (0, NEVER, batch.slots.len() / groups);
        for (index, &sequence) in batch.sequences.iter().enumerate() {
            let count = batch.counts.at(index);
            let end = at + count as usize;
            let others_at = sequence.row() as usize * per_row;
            match (rows.get_mut(sequence.row() as usize), others.get(others_at..others_at + groups - 1)) {
                (Some(row), Some(others)) if row.id == sequence => {
                    if row.stamp == epoch {
                        return Passed { rows: index, before };
                    }
                    row.stamp = epoch;
                    if is_synced::<TABLES>(&row.first)
                        && others.iter().all(is_synced::<TABLES>)
                        && fits(row.len, count, batch.lookahead, row.writable)
                        && joins(row, &mut before)
                    {
                        let mut from = at;
                        for table in std::iter::once(&row.first).chain(others) {
                            let slots = &mut batch.slots[from..from + count as usize];
                            for (slot, position) in slots.iter_mut().zip(i64::from(row.len)..) {
                                *slot = table.slot_base + position;
                            }
                            from += tokens;
                        }
                        row.written = open;
                        row.len += count;
                    } else {
                        slow.push(Slow { index, at });
                    }
                }
                _ => slow.push(Slow { index, at }),
            }
            at = end;
        }
        Passed { rows: batch.sequences.len(), before }
    }
}

impl Row {
    /// Adds one token.
    #[inline]
    fn advance(&mut self, slot: &mut i64, epoch: u32, open: TicketId) {
        *slot = self.first.slot_base.wrapping_add(i64::from(self.len));
        self.stamp = epoch;
        self.written = open;
        self.len = self.len.wrapping_add(1);
    }
}

/// What a second look at a row says.
enum Look {
    /// It is the first of the pass.
    Joins,
    /// It is deferred to the second pass.
    Waits,
    /// The batch names it twice.
    Repeats,
}

/// Looks a second time at a row that is not like those before it.
#[cold]
#[inline(never)]
fn look<const TABLES: bool>(row: &mut Row, sequence: SequenceId, epoch: u32, mut before: TicketId) -> Look {
    if row.id != sequence {
        return Look::Waits;
    }
    if row.stamp == epoch {
        return Look::Repeats;
    }
    row.stamp = epoch;
    let joins = is_synced::<TABLES>(&row.first) && row.len < row.writable && joins(row, &mut before);
    if joins { Look::Joins } else { Look::Waits }
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

/// Whether the caller's block table, if any, is up to date.
#[inline]
fn is_synced<const TABLES: bool>(table: &GroupTable) -> bool {
    !TABLES || table.synced.version == table.table.version()
}

/// Whether tokens and lookahead fit into the blocks that a row is writing.
#[inline]
pub(in crate::sequence) fn fits(len: u32, count: u32, lookahead: u32, writable: u32) -> bool {
    writable != 0 && u64::from(len) + u64::from(count) + u64::from(lookahead) <= u64::from(writable)
}

/// Begins a table's next block with the token after the first `len`; returns its slot.
#[inline]
pub(in crate::sequence) fn next_block(
    table: &mut GroupTable,
    block: BlockId,
    (size, first_block): (u32, u32),
    len: u32,
) -> i64 {
    table.table.extend_with(|table| table.push(block));
    let slot = i64::from(block.0.saturating_sub(first_block)) * i64::from(size);
    table.slot_base = slot - i64::from(len);
    slot
}

/// Adds one token to a row whose tables have begun their next blocks.
#[inline]
pub(in crate::sequence) fn begin_block(row: &mut Row, size: u32, open: TicketId) {
    row.writable = row.len + size;
    row.len += 1;
    row.written = open;
}

/// The second pass if all deferred rows have filled their last blocks: each table gets one of `blocks`.
#[inline(never)]
pub(in crate::sequence) fn next_blocks(
    rows: &mut SequenceRows,
    batch: &mut Append<'_>,
    slow: &[Slow],
    blocks: &[BlockId],
    groups: &Groups,
    open: TicketId,
) {
    let Entries { rows, others, per_row, .. } = rows.entries();
    let tokens = batch.slots.len() / (blocks.len() / slow.len()).max(1);
    let (firsts, blocks) = blocks.split_at(slow.len());
    let geometry = |group: u8| (groups.tokens(group), groups.first_block(group));
    for (number, blocks) in (1..).zip(blocks.chunks(slow.len())) {
        let (group, of) = (usize::from(number), geometry(number));
        for (slow, &block) in slow.iter().zip(blocks) {
            let row = batch.sequences[slow.index].row() as usize;
            let (table, len) = (&mut others[row * per_row + group - 1], rows[row].len);
            batch.slots[group * tokens + slow.at] = next_block(table, block, of, len);
            if let Some(tables) = &mut batch.tables {
                table.table.sync(&mut table.synced, tables.row(group, slow.index), of.1);
            }
        }
    }
    let of = geometry(0);
    for (&Slow { index, at }, &block) in slow.iter().zip(firsts) {
        let row = &mut rows[batch.sequences[index].row() as usize];
        batch.slots[at] = next_block(&mut row.first, block, of, row.len);
        begin_block(row, of.0, open);
        if let Some(tables) = &mut batch.tables {
            row.first.table.sync(&mut row.first.synced, tables.row(0, index), of.1);
        }
    }
}
