//! The block table of a batch, in memory that the caller owns.

use super::invalid;
use crate::error::Result;
use crate::id::SequenceId;

/// Rows of a block table that the caller owns, each `width` entries long.
#[derive(Debug)]
pub struct TableRows<'a> {
    rows: &'a mut [i32],
    width: usize,
}

impl<'a> TableRows<'a> {
    /// A table of `rows.len() / width` rows.
    #[must_use]
    pub fn new(rows: &'a mut [i32], width: usize) -> Self {
        Self { rows, width }
    }

    /// Fails unless there are so many rows.
    pub(super) fn require_rows(&self, wanted: usize) -> Result<()> {
        let rows = self.rows.len().checked_div(self.width).unwrap_or(usize::MAX);
        if wanted <= rows {
            return Ok(());
        }
        Err(invalid("number of rows of the block table", rows as i128, format!("at least {wanted}, the sequences")))
    }

    /// Fails unless a row takes so many blocks.
    pub(super) fn require_width(&self, sequence: SequenceId, blocks: usize) -> Result<()> {
        if blocks <= self.width {
            return Ok(());
        }
        let must = format!("at least {blocks}, the blocks of sequence {sequence}");
        Err(invalid("width of the block tables", self.width as i128, must))
    }

    pub(super) fn copy_row(&mut self, from: usize, to: usize) {
        self.rows.copy_within(from * self.width..(from + 1) * self.width, to * self.width);
    }

    pub(super) fn row(&mut self, index: usize) -> &mut [i32] {
        &mut self.rows[index * self.width..(index + 1) * self.width]
    }
}
