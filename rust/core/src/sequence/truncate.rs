//! Truncation: drops the last tokens of a sequence, such as those rejected by a speculative decoder.

use super::table::Row;
use super::{Sequences, TableId, blocks_for, refuse_lost};
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
            return Err(invalid("num_tokens", tokens, must));
        }
        // This step would write their slots, but could also reallocate them.
        if row.written == step.transfers.open() {
            return Err(Error::Unwritten { sequence });
        }
        for id in self.growing_tables_of(&[sequence]) {
            self.refuse_gone(id, tokens)?;
        }
        for id in self.growing_tables_of(&[sequence]).filter(|&id| self.is_recurrent(id)).collect::<Vec<_>>() {
            self.pick_draft(id, tokens);
        }
        self.drop_drafts(step, sequence);
        let row = self.rows.at_mut(sequence);
        let shortens = tokens < row.len;
        if shortens {
            cut_keys(row, tokens, self.groups.whole(tokens, self.block_size));
        }
        row.len = tokens;
        row.writable = 0;
        for id in self.growing_tables_of(&[sequence]) {
            self.truncate_table(step, id, tokens, shortens);
        }
        Ok(())
    }

    fn truncate_table(&mut self, step: &mut OpenStep<'_>, id: TableId, tokens: u32, shortens: bool) {
        let (size, tier) = (self.groups.tokens(id.group), self.rows.at(id.sequence).tier);
        // What a group publishes it counts in keys.
        let whole = self.groups.whole(tokens, self.block_size);
        let row = self.rows.table_mut(id);
        if shortens {
            row.published = row.published.min(whole);
        }
        row.note_cut();
        let cut = row.table.cut(blocks_for(u64::from(tokens), size));
        row.null_prefix = row.null_prefix.min(u32::try_from(row.table.len()).unwrap_or(u32::MAX));
        step.tiers.release_all(tier, &cut);
    }

    /// Fails if a table has freed blocks that tokens after the first `tokens` need.
    fn refuse_gone(&self, id @ TableId { sequence, group: number }: TableId, tokens: u32) -> Result<()> {
        let (row, table) = (self.rows.at(sequence), &self.rows.table(id).table);
        let group = self.groups.get(number);
        let has_all = |tokens: u32| {
            if group == Group::Recurrent && tokens != row.len {
                return self.keeps_draft(id, tokens);
            }
            !group.needs(tokens, self.groups.tokens(number)).any(|i| self.is_null(table[i]))
        };
        if has_all(tokens) {
            return Ok(());
        }
        let least = (tokens..row.len).rev().take_while(|&tokens| has_all(tokens)).last().unwrap_or(row.len);
        let must =
            format!("{least} to {}: cache group {number} of sequence {sequence} has freed blocks for fewer", row.len);
        Err(invalid("num_tokens", tokens, must))
    }
}

/// Drops the keys of removed tokens. The last full block can be reopened; a row truncated further back is no longer
/// published.
fn cut_keys(row: &mut Row, tokens: u32, whole: u32) {
    let Some(keys) = &mut row.keys else { return };
    let full = whole as usize;
    if full < keys.keys.len() && (full + 1 < keys.keys.len() || !keys.reopen_last()) {
        return row.unfollow();
    }
    keys.computed = keys.computed.min(whole);
    // Tokens after the keys may not have known ids yet.
    row.known = row.known.min(tokens);
}
