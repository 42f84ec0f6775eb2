//! Truncation: drops the last tokens of a sequence, such as those rejected by a speculative decoder.

use super::table::Row;
use super::{Sequences, blocks_for, refuse_lost};
use crate::error::{Error, Result, invalid};
use crate::group::Group;
use crate::id::SequenceId;
use crate::transfer::OpenStep;

impl Sequences {
    pub(crate) fn truncate(&mut self, step: &mut OpenStep<'_>, sequence: SequenceId, tokens: u32) -> Result<()> {
        let row = self.rows.get(sequence)?;
        refuse_lost(sequence, row)?;
        if tokens > row.len {
            let must = format!("at most {}, those of sequence {sequence}", row.len);
            return Err(invalid("number of tokens to keep", tokens, must));
        }
        // This step would write their slots, but could also reallocate them.
        if row.written == step.transfers.open() {
            return Err(Error::Unwritten { sequence });
        }
        let mut all = Vec::new();
        let members = self.growing(&[sequence], &mut all)?.to_vec();
        for &member in &members {
            self.refuse_gone(member, tokens)?;
        }
        for member in members {
            self.truncate_row(step, member, tokens);
        }
        Ok(())
    }

    fn truncate_row(&mut self, step: &mut OpenStep<'_>, sequence: SequenceId, tokens: u32) {
        let size = self.block_size;
        let row = self.rows.at_mut(sequence);
        if tokens < row.len {
            cut_keys(row, tokens, size);
            row.published = row.published.min(tokens / size);
        }
        let tier = row.tier;
        row.len = tokens;
        row.writable = 0;
        row.note_cut();
        let cut = row.table.cut(blocks_for(u64::from(tokens), size));
        row.null_prefix = row.null_prefix.min(u32::try_from(row.table.len()).unwrap_or(u32::MAX));
        step.tiers.release_all(tier, &cut);
    }

    /// Fails if a row has freed blocks that tokens after the first `tokens` need.
    fn refuse_gone(&self, sequence: SequenceId, tokens: u32) -> Result<()> {
        let row = self.rows.at(sequence);
        let group = self.groups.get(row.group);
        let end = blocks_for(u64::from(tokens), self.block_size);
        let needed = group.unneeded(tokens, self.block_size)..end;
        let state = group == Group::Recurrent && tokens != row.len && tokens > 0;
        if !state && !needed.clone().any(|i| self.is_null(row.table[i])) {
            return Ok(());
        }
        let must = format!("{}, or what cache group {} of sequence {sequence} still has", row.len, row.group);
        Err(invalid("number of tokens to keep", tokens, must))
    }
}

/// Drops the keys of removed tokens. The last full block can be reopened; a row truncated further back is no longer
/// published.
fn cut_keys(row: &mut Row, tokens: u32, size: u32) {
    let Some(keys) = &mut row.keys else { return };
    let full = (tokens / size) as usize;
    if full < keys.keys.len() && (full + 1 < keys.keys.len() || !keys.reopen_last()) {
        return row.unfollow();
    }
    keys.computed = keys.computed.min(tokens / size);
    // Tokens after the keys may not have known ids yet.
    row.known = row.known.min(tokens);
}
