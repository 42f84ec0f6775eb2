//! Sliding windows: blocks that no later token of a sequence needs return to the pool while it runs.

use crate::group::NULL_BLOCK;
use crate::id::Tier;
use crate::sequence::{Row, Sequences, TableId};
use crate::transfer::OpenStep;

impl Sequences {
    /// Replaces the blocks that a table no longer needs by the null block, once its first `computed` tokens are computed.
    pub(in crate::sequence) fn leave_window(&mut self, step: &mut OpenStep<'_>, id: TableId, computed: u32) {
        let Row { tier, ticket, .. } = *self.rows.at(id.sequence);
        let row = self.rows.table_mut(id);
        let from = row.null_prefix as usize;
        let to = self.groups.get(id.group).needs(computed, self.groups.tokens(id.group)).start.min(row.table.len());
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
