//! Sliding windows: blocks that no later token of a sequence needs return to the pool while it runs.

use crate::group::NULL_BLOCK;
use crate::id::{SequenceId, Tier};
use crate::sequence::Sequences;
use crate::transfer::OpenStep;

impl Sequences {
    /// Replaces the blocks that a row no longer needs by the null block, once its first `computed` tokens are computed.
    pub(in crate::sequence) fn leave_window(&mut self, step: &mut OpenStep<'_>, sequence: SequenceId, computed: u32) {
        let row = self.rows.at(sequence);
        let (from, tier) = (row.null_prefix as usize, row.tier);
        let to = self.groups.get(row.group).unneeded(computed, self.block_size).min(row.table.len());
        // Lost sequences are identified by their blocks, including those no longer needed but computed from.
        if to <= from || tier != Tier::Device || !step.transfers.is_settled(row.ticket) {
            return;
        }
        let row = self.rows.at_mut(sequence);
        row.null_prefix = u32::try_from(to).unwrap_or(u32::MAX);
        let gone = row.table.blank(from, to, NULL_BLOCK);
        step.tiers.begin_release(&[], 0);
        step.tiers.share((Tier::Device, NULL_BLOCK), u32::try_from(gone.len()).unwrap_or(u32::MAX));
        step.tiers.release_all(tier, &gone);
    }
}
