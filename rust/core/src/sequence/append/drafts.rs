//! The states after draft tokens. A recurrent group has a block for each, so that rejecting drafts needs no copy.
//!
//! A row's last `drafts` tokens may be rejected, until its next append, truncation or swap. The state after the row's
//! last token is in that token's entry of the table, and the state after a block's last token is in that block's entry,
//! as always. The states after the other drafts, and after the token before them, lie behind the entries: one block each,
//! in the order of the tokens. No copy of the table shows these blocks, and nothing else uses them.

use crate::error::{Error, Result};
use crate::group::Group;
use crate::id::{BlockId, SequenceId, Tier};
use crate::sequence::{Sequences, TableId};
use crate::transfer::{OpenStep, View};

/// Number of each row's draft tokens.
#[derive(Debug, Clone, Default)]
pub(in crate::sequence) struct Drafts(Vec<u32>);

impl Drafts {
    fn get(&self, sequence: SequenceId) -> u32 {
        self.0.get(sequence.row() as usize).copied().unwrap_or(0)
    }

    pub(in crate::sequence) fn set(&mut self, sequence: SequenceId, count: u32) {
        let row = sequence.row() as usize;
        if row < self.0.len() {
            self.0[row] = count;
        } else if count > 0 {
            self.0.resize(row + 1, 0);
            self.0[row] = count;
        }
    }
}

/// The tokens before a row's last one whose states are kept: `first..last`.
#[derive(Clone, Copy, Debug)]
pub(in crate::sequence) struct Drafted {
    first: u32,
    last: u32,
    block_size: u32,
}

impl Drafted {
    /// Of a row of `len` tokens, the last `drafts` of which may be rejected.
    pub(in crate::sequence) fn new(len: u32, drafts: u32, block_size: u32) -> Self {
        let last = len.saturating_sub(1);
        Self { first: last.saturating_sub(drafts), last, block_size }
    }

    fn contains(self, token: u32) -> bool {
        (self.first..self.last).contains(&token)
    }

    /// Number of the states before that of `token` which lie behind the table's entries.
    fn before(self, token: u32) -> usize {
        (token - self.first - (token / self.block_size - self.first / self.block_size)) as usize
    }

    /// Number of states behind the table's entries.
    pub(in crate::sequence) fn behind(self) -> usize {
        self.before(self.last)
    }

    /// Which of the states behind the table's entries is that after `token`.
    fn place(self, token: u32) -> Option<usize> {
        (self.contains(token) && (token + 1) % self.block_size != 0).then(|| self.before(token))
    }

    /// Replaces the slots of tokens whose states lie in `behind`; `slots` are those of the tokens from `first` on, in a
    /// class that begins with `first_block`.
    pub(in crate::sequence) fn write_slots(
        self,
        behind: &[BlockId],
        (first, first_block): (u32, u32),
        slots: &mut [i64],
    ) {
        for (token, slot) in (first..).zip(slots) {
            if let Some(&block) = self.place(token).and_then(|place| behind.get(place)) {
                *slot =
                    i64::from(block.0 - first_block) * i64::from(self.block_size) + i64::from(token % self.block_size);
            }
        }
    }
}

impl Sequences {
    /// The drafts of a row whose states are kept.
    pub(in crate::sequence) fn drafted(&self, sequence: SequenceId) -> Drafted {
        Drafted::new(self.rows.at(sequence).len, self.num_drafts(sequence), self.block_size)
    }

    /// Number of a row's tokens that may be rejected, if it has recurrent groups.
    pub(in crate::sequence) fn num_drafts(&self, sequence: SequenceId) -> u32 {
        if self.groups.has_states() { self.drafts.get(sequence) } else { 0 }
    }

    /// The entries of a table, without the states of drafts behind them.
    pub(in crate::sequence) fn entries(&self, id: TableId) -> &[BlockId] {
        let table = &self.rows.table(id).table;
        &table[..table.len() - self.num_behind(id)]
    }

    /// The states of drafts behind a table's entries.
    pub(in crate::sequence) fn states_behind(&self, id: TableId) -> &[BlockId] {
        let table = &self.rows.table(id).table;
        &table[table.len() - self.num_behind(id)..]
    }

    #[inline]
    fn num_behind(&self, id: TableId) -> usize {
        let is_drafted = self.groups.has_states() && self.num_drafts(id.sequence) > 0 && self.is_recurrent(id);
        if is_drafted { self.drafted(id.sequence).behind() } else { 0 }
    }

    /// Fails if this step writes states of a row's drafts: their slots were handed out, and must not be taken back.
    pub(in crate::sequence) fn refuse_unwritten_drafts(&self, view: View<'_>, sequence: SequenceId) -> Result<()> {
        let is_unwritten = self.num_drafts(sequence) > 0 && self.rows.at(sequence).written == view.transfers.open();
        if is_unwritten { Err(Error::Unwritten { sequence }) } else { Ok(()) }
    }

    /// Whether a recurrent group has the state after the first `tokens` tokens of a longer row.
    pub(in crate::sequence) fn keeps_draft(&self, id: TableId, tokens: u32) -> bool {
        let (drafted, Some(token)) = (self.drafted(id.sequence), tokens.checked_sub(1)) else { return true };
        let has_entry = || self.entries(id).get((token / self.block_size) as usize).is_some_and(|&b| !self.is_null(b));
        drafted.contains(token) && (drafted.place(token).is_some() || has_entry())
    }

    /// Makes the state after the first `tokens` tokens the one in its table's entry.
    pub(in crate::sequence) fn pick_draft(&mut self, id: TableId, tokens: u32) {
        let Some(place) = tokens.checked_sub(1).and_then(|token| self.drafted(id.sequence).place(token)) else {
            return;
        };
        let (index, behind) = (((tokens - 1) / self.block_size) as usize, self.entries(id).len() + place);
        let row = self.rows.table_mut(id);
        let (kept, other) = (row.table[behind], row.table[index]);
        row.table.replace(index, kept);
        row.table.behind()[behind] = other;
        row.null_prefix = row.null_prefix.min(u32::try_from(index).unwrap_or(u32::MAX));
        self.owners.note(self.rows.number(id), index, &[kept]);
    }

    /// Frees the states of a row's drafts: they can no longer be rejected.
    pub(in crate::sequence) fn drop_drafts(&mut self, step: &mut OpenStep<'_>, sequence: SequenceId) {
        if self.num_drafts(sequence) == 0 {
            return;
        }
        for id in self.growing_tables_of(&[sequence]) {
            let entries = self.entries(id).len();
            let gone = self.rows.table_mut(id).table.behind().split_off(entries);
            step.tiers.release_all(Tier::Device, &gone);
        }
        self.drafts.set(sequence, 0);
    }

    /// Gives a table that has grown blocks for the states of the drafts among the next tokens of its row, the last of
    /// which is the last of `slots`.
    pub(in crate::sequence) fn add_draft_states(
        &mut self,
        step: &mut OpenStep<'_>,
        id: TableId,
        drafts: u32,
        slots: &mut [i64],
        fresh: &mut std::slice::Iter<'_, BlockId>,
    ) {
        let (len, count) = (self.rows.at(id.sequence).len, u32::try_from(slots.len()).unwrap_or(u32::MAX));
        let (drafted, class) = (Drafted::new(len + count, drafts, self.block_size), self.groups.class(id.group));
        let first_block = self.groups.first_block(id.group);
        let table = self.rows.table_mut(id).table.behind();
        let entries = table.len();
        table.extend(fresh.by_ref().take(drafted.behind()));
        let left = drafted.behind() - (table.len() - entries);
        if left > 0 {
            step.take((Tier::Device, class), left, false, table);
        }
        drafted.write_slots(&table[entries..], (len, first_block), slots);
    }

    /// Number of blocks for the states of `drafts` drafts, if `count` tokens with them are appended to a table.
    pub(in crate::sequence) fn draft_states(&self, id: TableId, count: u32, drafts: u32) -> usize {
        if drafts == 0 || self.groups.get(id.group) != Group::Recurrent {
            return 0;
        }
        Drafted::new(self.rows.at(id.sequence).len + count, drafts, self.block_size).behind()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_draft_has_one_place() {
        for (size, len, drafts) in [(4, 11, 6), (4, 8, 3), (1, 9, 4), (16, 40, 5), (4, 1, 0), (4, 0, 0)] {
            let drafted = Drafted::new(len, drafts, size);
            let places: Vec<_> = (0..len).filter_map(|token| drafted.place(token)).collect();
            assert_eq!(places, (0..drafted.behind()).collect::<Vec<_>>(), "{drafted:?}");
            let ends = (0..len).filter(|&token| drafted.contains(token) && (token + 1) % size == 0).count();
            assert_eq!(drafted.behind() + ends, drafts as usize, "{drafted:?}");
        }
    }
}
