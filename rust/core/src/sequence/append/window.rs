//! Sliding windows: blocks that no later token of a sequence needs return to the pool while it runs.

use crate::group::{Group, NULL_BLOCK};
use crate::hash::Key;
use crate::id::{BlockId, Tier};
use crate::sequence::{Row, Sequences, TableId};
use crate::transfer::{OpenStep, View};

impl Sequences {
    /// Number of leading blocks of a prompt, at most `keys.len()`, that all groups can serve. Writes the first group's
    /// table of them to `found` and returns the other groups' tables, with null blocks where a group needs none.
    pub(in crate::sequence) fn find_groups(
        &self,
        view: View<'_>,
        keys: &[Key],
        found: &mut Vec<BlockId>,
    ) -> (usize, Vec<Vec<BlockId>>) {
        let groups = self.groups.growing();
        let mut hits = keys.len();
        loop {
            let before = hits;
            for (number, &group) in (0u8..).zip(groups) {
                hits = self.served(view, number, group, &keys[..hits]);
            }
            if hits == before {
                break;
            }
        }
        let tokens = u32::try_from(hits).unwrap_or(u32::MAX).saturating_mul(self.block_size);
        let table = |(number, group): (u8, &Group)| {
            let unneeded = group.unneeded(tokens, self.block_size).min(hits);
            let blocks =
                keys[unneeded..hits].iter().filter_map(move |key| view.tiers.device().find(&key.of_group(number)));
            std::iter::repeat_n(NULL_BLOCK, unneeded).chain(blocks)
        };
        let mut tables = (0u8..).zip(groups).map(table);
        found.extend(tables.next().into_iter().flatten());
        (hits, tables.map(Iterator::collect).collect())
    }

    /// How many of the first `keys.len()` blocks one group can serve: all blocks that it still needs after them are
    /// cached.
    fn served(&self, view: View<'_>, number: u8, group: Group, keys: &[Key]) -> usize {
        let finds = |i: usize| view.tiers.device().find(&keys[i].of_group(number)).is_some();
        if !group.leaves_nulls() {
            return (0..keys.len()).take_while(|&i| finds(i)).count();
        }
        // From the end: `end` is served if what it needs, down to `first`, is there.
        let mut end = keys.len();
        let mut first = end;
        while first > 0 {
            let tokens = u32::try_from(end).unwrap_or(u32::MAX).saturating_mul(self.block_size);
            if first <= group.unneeded(tokens, self.block_size) {
                break;
            }
            first -= 1;
            if !finds(first) {
                end = first;
            }
        }
        end
    }

    /// Replaces the blocks that a table no longer needs by the null block, once its first `computed` tokens are computed.
    pub(in crate::sequence) fn leave_window(&mut self, step: &mut OpenStep<'_>, id: TableId, computed: u32) {
        let Row { tier, ticket, .. } = *self.rows.at(id.sequence);
        let row = self.rows.table_mut(id);
        let from = row.null_prefix as usize;
        let to = self.groups.get(id.group).unneeded(computed, self.block_size).min(row.table.len());
        // Lost sequences are identified by their blocks, including those no longer needed but computed from.
        if to <= from || tier != Tier::Device || !step.transfers.is_settled(ticket) {
            return;
        }
        row.null_prefix = u32::try_from(to).unwrap_or(u32::MAX);
        let gone = &mut self.gone;
        row.table.blank(from, to, NULL_BLOCK, gone);
        step.tiers.begin_release(&[], 0);
        step.tiers.share((Tier::Device, NULL_BLOCK), u32::try_from(gone.len()).unwrap_or(u32::MAX));
        step.tiers.release_all(tier, gone);
    }
}
