//! Truncation: the last tokens of a sequence are given up, such as those that a speculative decoder has rejected.

use super::{Manager, blocks_for, invalid, refuse_lost, release};
use crate::error::{Error, Result};
use crate::id::SequenceId;
use crate::table::RowKeys;

impl Manager {
    /// Cuts a sequence to its first `tokens` tokens, in whatever tier it is; blocks that hold none of them, those of an
    /// earlier lookahead too, go free. What is appended next copies the last block first if another sequence or the cache
    /// has it too.
    ///
    /// # Errors
    /// The sequence is unknown, shorter, has lost bytes, or has tokens that the present step is yet to write.
    pub fn truncate(&mut self, sequence: SequenceId, tokens: u32) -> Result<()> {
        let row = self.rows.get(sequence)?;
        refuse_lost(sequence, row)?;
        if tokens > row.len {
            let must = format!("at most {}, those of sequence {sequence}", row.len);
            return Err(invalid("number of tokens to keep", tokens, must));
        }
        // Their slots would be written by this step, but could be given to others in it.
        if row.written == self.tickets.open() {
            return Err(Error::Unwritten { sequence });
        }
        let (size, tier) = (self.block_size, row.tier);
        let row = self.rows.at_mut(sequence);
        if tokens < row.len {
            row.keys = row.keys.take().and_then(|keys| cut_keys(keys, tokens as usize, size as usize));
        }
        row.len = tokens;
        row.writable = 0;
        for block in row.table.cut(blocks_for(u64::from(tokens), size)).into_iter().rev() {
            release(&mut self.pools, tier, block);
        }
        Ok(())
    }
}

/// Forgets the keys of tokens that are gone. The last full block can be opened again; a row that is cut further back is
/// published no further.
fn cut_keys(mut keys: Box<RowKeys>, tokens: usize, size: usize) -> Option<Box<RowKeys>> {
    let (full, rest) = (tokens / size, tokens % size);
    if full < keys.keys.len() {
        let last = keys.last.take().filter(|_| full + 1 == keys.keys.len())?;
        keys.chain = last.before;
        keys.pending = last.tokens;
        keys.keys.truncate(full);
        keys.published = keys.published.min(full);
    }
    keys.pending.truncate(rest);
    Some(keys)
}
