//! The block table of a batch, in memory that the caller owns.

use crate::error::{Result, invalid};
use crate::id::SequenceId;
use crate::sequence::{Sequences, TableId};
use crate::transfer::View;

impl Sequences {
    pub(crate) fn block_tables(&self, view: View<'_>, tables: &[TableId], width: usize, out: &mut [i32]) -> Result<()> {
        if tables.len().checked_mul(width) != Some(out.len()) {
            let must = format!("{} sequences of {width} blocks", tables.len());
            return Err(invalid("size of block_tables", out.len() as i128, must));
        }
        for &id in tables {
            self.readable(view, id.sequence)?;
            let (sequence, blocks) = (id.sequence, self.entries(id).len());
            if blocks > width {
                let must = format!("at least {blocks}, the blocks of sequence {sequence}");
                return Err(invalid("width of block_tables", width as i128, must));
            }
        }
        for (&id, out) in tables.iter().zip(out.chunks_exact_mut(width.max(1))) {
            let (table, first) = (self.entries(id), self.groups.first_block(id.group));
            for (to, block) in out.iter_mut().zip(table) {
                #[expect(clippy::cast_possible_wrap, reason = "ids stay below 2^30")]
                let id = block.0.saturating_sub(first) as i32;
                *to = id;
            }
            out[table.len()..].fill(0);
        }
        Ok(())
    }
}

/// Rows of a block table that the caller owns, each `width` entries long.
#[derive(Debug)]
pub struct TableRows<'a> {
    rows: &'a mut [i32],
    width: usize,
    /// Rows of each group.
    share: usize,
}

impl<'a> TableRows<'a> {
    /// A table of `rows.len() / width` rows; with several groups, each has an equal share of them.
    #[must_use]
    pub fn new(rows: &'a mut [i32], width: usize) -> Self {
        Self { rows, width, share: 0 }
    }

    /// Gives each of some sequences a row in each group's share. Fails unless there are enough.
    pub(in crate::sequence) fn share(&mut self, sequences: usize, groups: usize) -> Result<()> {
        let rows = self.rows.len().checked_div(self.width).unwrap_or(usize::MAX);
        let (wanted, share) = (sequences.saturating_mul(groups), rows / groups);
        if wanted > rows {
            let must = format!("at least {wanted}, the sequences");
            return Err(invalid("number of rows of block_tables", rows as i128, must));
        }
        self.share = share;
        Ok(())
    }

    /// Fails unless a row takes `blocks` blocks.
    pub(in crate::sequence) fn require_width(&self, sequence: SequenceId, blocks: usize) -> Result<()> {
        if blocks <= self.width {
            return Ok(());
        }
        let must = format!("at least {blocks}, the blocks of sequence {sequence}");
        Err(invalid("width of block_tables", self.width as i128, must))
    }

    /// The row of a sequence in a group, once all have theirs.
    #[inline]
    pub(in crate::sequence) fn row(&mut self, group: usize, index: usize) -> &mut [i32] {
        let index = group * self.share + index;
        &mut self.rows[index * self.width..(index + 1) * self.width]
    }
}
