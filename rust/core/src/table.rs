//! Block tables: which blocks hold a sequence's tokens. One row a sequence; rows are reused, and a handle carries the
//! row's generation, so that a stale one is recognised.

use crate::error::{Error, Result};
use crate::hash::{Chain, Key};
use crate::id::{BlockId, SequenceId, TicketId, Tier};

mod snapshot;
pub(crate) use snapshot::RowsImage;

/// Most sequences in the books.
const MAX_SEQUENCES: usize = 1 << 24;

/// One sequence.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    /// Odd while the row is in use.
    generation: u32,
    /// Tokens in the sequence.
    pub(crate) len: u32,
    /// Tokens that fit without asking the pool: the end of the block being written while it is exclusive, else 0.
    pub(crate) writable: u32,
    /// Last batch call that named the row.
    stamp: u32,
    /// Slot of token 0 if the block being written went on backwards; a token's slot is this plus its position.
    pub(crate) slot_base: i64,
    /// Last ticket that moves or copies blocks of this row.
    pub(crate) ticket: TicketId,
    /// Step in which tokens were last given slots.
    pub(crate) written: TicketId,
    pub(crate) tier: Tier,
    /// Blocks of this row are on the way between tiers under `ticket`.
    pub(crate) moving: bool,
    /// A failed transfer took bytes of this row.
    pub(crate) lost: bool,
    pub(crate) table: Vec<BlockId>,
    /// Keys of the row's full blocks, where the prefix cache knows its tokens.
    pub(crate) keys: Option<Box<RowKeys>>,
}

/// What the prefix cache knows of a row. Every token is hashed once.
#[derive(Debug, Clone)]
pub(crate) struct RowKeys {
    pub(crate) chain: Chain,
    /// Keys of the full blocks, first to last.
    pub(crate) keys: Vec<Key>,
    /// Tokens of the block being filled.
    pub(crate) pending: Vec<u32>,
    /// Blocks whose keys have been published since the row came to its tier.
    pub(crate) published: usize,
    /// Adapter that the sequence runs with.
    pub(crate) lora_id: u64,
    /// Blocks with extras, and how many frames the chain has up to each beyond those of tokens alone.
    pub(crate) surplus: Vec<(u32, u32)>,
}

impl RowKeys {
    /// The chain up to one of the full blocks.
    pub(crate) fn chain_at(&self, index: usize, block_size: u32) -> Option<Chain> {
        let after = self.surplus.partition_point(|&(block, _)| block as usize <= index);
        let surplus = after.checked_sub(1).map_or(0, |last| self.surplus[last].1);
        let frames = frames_before_extras(index + 1, block_size).saturating_add(surplus);
        Some(Chain::resume(*self.keys.get(index)?, frames))
    }
}

/// Frames of a chain over so many blocks of tokens.
pub(crate) fn frames_before_extras(blocks: usize, block_size: u32) -> u32 {
    let of_block = u64::from(block_size).div_ceil(16);
    u32::try_from((blocks as u64).saturating_mul(of_block).saturating_add(1)).unwrap_or(u32::MAX)
}

impl Row {
    fn unused() -> Self {
        Self {
            generation: 0,
            len: 0,
            writable: 0,
            stamp: 0,
            slot_base: 0,
            ticket: TicketId(0),
            written: TicketId(0),
            tier: Tier::Device,
            moving: false,
            lost: false,
            table: Vec::new(),
            keys: None,
        }
    }
}

/// All sequences.
#[derive(Debug, Clone)]
pub(crate) struct Rows {
    entries: Vec<Row>,
    unused: Vec<u32>,
    epoch: u32,
}

impl Rows {
    pub(crate) fn new() -> Self {
        Self { entries: Vec::new(), unused: Vec::new(), epoch: 0 }
    }

    /// Sequences in the books.
    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.unused.len()
    }

    /// Fails unless `count` more rows can be had.
    pub(crate) fn require(&self, count: usize) -> Result<()> {
        let free = MAX_SEQUENCES.saturating_sub(self.len());
        if count <= free {
            return Ok(());
        }
        Err(Error::InvalidArgument {
            what: "number of new sequences",
            found: count as i128,
            must: format!("at most {free}"),
        })
    }

    /// Opens a row without tokens; the caller has called [`Rows::require`].
    pub(crate) fn open(&mut self, tier: Tier, table: Vec<BlockId>) -> SequenceId {
        let index = self.unused.pop().unwrap_or_else(|| {
            self.entries.push(Row::unused());
            row_index(self.entries.len() - 1)
        });
        let row = &mut self.entries[index as usize];
        let generation = row.generation.wrapping_add(1);
        *row = Row { generation, tier, table, ..Row::unused() };
        SequenceId::new(index, generation)
    }

    /// Closes a row and gives its table back.
    pub(crate) fn close(&mut self, sequence: SequenceId) -> Vec<BlockId> {
        let row = &mut self.entries[sequence.row() as usize];
        row.generation = row.generation.wrapping_add(1);
        row.writable = 0;
        row.keys = None;
        self.unused.push(sequence.row());
        std::mem::take(&mut row.table)
    }

    pub(crate) fn get(&self, sequence: SequenceId) -> Result<&Row> {
        match self.entries.get(sequence.row() as usize) {
            Some(row) if row.generation == sequence.generation() && row.generation & 1 == 1 => Ok(row),
            _ => Err(Error::UnknownSequence { sequence }),
        }
    }

    pub(crate) fn get_mut(&mut self, sequence: SequenceId) -> Result<&mut Row> {
        match self.entries.get_mut(sequence.row() as usize) {
            Some(row) if row.generation == sequence.generation() && row.generation & 1 == 1 => Ok(row),
            _ => Err(Error::UnknownSequence { sequence }),
        }
    }

    /// A row that a call has already found.
    pub(crate) fn at(&self, sequence: SequenceId) -> &Row {
        &self.entries[sequence.row() as usize]
    }

    /// A row that a call has already found.
    pub(crate) fn at_mut(&mut self, sequence: SequenceId) -> &mut Row {
        &mut self.entries[sequence.row() as usize]
    }

    /// Begins a batch call: rows named from now on are noted, so that a repetition shows.
    pub(crate) fn begin_batch(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
        if self.epoch == 0 {
            for row in &mut self.entries {
                row.stamp = 0;
            }
            self.epoch = 1;
        }
    }

    /// A row of the present batch call.
    ///
    /// # Errors
    /// The handle is unknown, or the batch has named it before.
    #[inline]
    pub(crate) fn next_in_batch(&mut self, sequence: SequenceId) -> Result<&mut Row> {
        let epoch = self.epoch;
        let row = self.get_mut(sequence)?;
        if row.stamp == epoch {
            return Err(Error::RepeatedSequence { sequence });
        }
        row.stamp = epoch;
        Ok(row)
    }

    /// Rows in use, with their handles.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (SequenceId, &Row)> {
        let in_use = self.entries.iter().enumerate().filter(|(_, row)| row.generation & 1 == 1);
        in_use.map(|(i, row)| (SequenceId::new(row_index(i), row.generation), row))
    }
}

#[expect(clippy::cast_possible_truncation, reason = "`require` bounds the number of rows")]
fn row_index(index: usize) -> u32 {
    index as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_handle_is_unknown_even_after_its_row_is_used_again() {
        let mut rows = Rows::new();
        let first = rows.open(Tier::Device, vec![BlockId(5)]);
        assert_eq!(rows.close(first), [BlockId(5)]);
        assert!(rows.get(first).is_err());
        let second = rows.open(Tier::Host, Vec::new());
        assert_eq!(first.row(), second.row());
        assert!(rows.get(first).is_err());
        assert!(rows.get(second).is_ok());
        assert!(rows.get(SequenceId::new(first.row(), 2)).is_err());
    }

    #[test]
    fn a_batch_notices_a_row_named_twice_and_the_next_batch_does_not() {
        let mut rows = Rows::new();
        let a = rows.open(Tier::Device, Vec::new());
        rows.begin_batch();
        assert!(rows.next_in_batch(a).is_ok());
        assert_eq!(rows.next_in_batch(a).unwrap_err(), Error::RepeatedSequence { sequence: a });
        rows.begin_batch();
        assert!(rows.next_in_batch(a).is_ok());
    }
}
