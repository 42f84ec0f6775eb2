//! A planner's view of the sequences: their block tables, which are running, and which blocks they write.

use super::{Facts, HoleUse};
use crate::group::{Groups, NULL_BLOCK};
use crate::id::{BlockId, TicketId, Tier};
use crate::placement::PlannerView;
use crate::reuse::BlockSet;
use crate::sequence::{Owner, SequenceRows, TableId};
use std::cell::Cell;

/// Facts about device blocks from the sequences and the pool.
pub(super) struct SequenceFacts<'a> {
    pub(super) rows: &'a SequenceRows,
    pub(super) owners: &'a [Cell<Owner>],
    pub(super) blocks: PlannerView<'a>,
    /// The current step, and the earliest one still open.
    pub(super) open: TicketId,
    pub(super) first: TicketId,
    pub(super) groups: &'a Groups,
    /// Whether tables have null blocks.
    pub(super) null: bool,
    /// How cached blocks that no sequence uses are entered.
    pub(super) hole_use: HoleUse,
}

impl Facts for SequenceFacts<'_> {
    fn hole_use(&self, hole: BlockId) -> HoleUse {
        if self.blocks.cached.contains(hole) { self.hole_use } else { HoleUse::Move }
    }

    fn content(&self) -> Option<&BlockSet> {
        (self.hole_use != HoleUse::Never).then_some(self.blocks.cached)
    }

    /// Whether its last known sequence was written in this step or the one before.
    fn is_hot(&self, live: BlockId) -> bool {
        self.hinted(live).is_some_and(|(id, _)| self.rows.written(id).0 + 1 >= self.open.0)
    }

    /// Whether its bytes are final for this step and will not change soon.
    fn may_leave(&self, live: BlockId) -> bool {
        if self.blocks.is_settled(live) {
            return true;
        }
        if self.blocks.is_dirty(live) {
            return false;
        }
        let Some((id, index)) = self.hinted(live).or_else(|| self.search(live)) else { return false };
        let (row, written) = (self.rows.at(id.sequence), self.rows.written(id));
        // Loaded bytes may still turn out to be lost.
        if row.lost || row.ticket >= self.first {
            return false;
        }
        let size = self.groups.tokens(id.group) as usize;
        let full = (index + 1).saturating_mul(size) <= self.rows.len_of(id) as usize;
        if written == self.open {
            return full && !self.ends_with(id, index);
        }
        // A running sequence fills its last block step by step.
        full || written.0 + 1 < self.open.0
    }
}

impl SequenceFacts<'_> {
    /// Whether a row that the current step writes may have written this entry of a table without the pool knowing.
    fn ends_with(&self, id: TableId, index: usize) -> bool {
        // Blocks of an earlier lookahead may follow the last token.
        let last = (self.rows.len_of(id).saturating_sub(1) / self.groups.tokens(id.group)) as usize;
        let mut behind = self.rows.table(id).table.iter().take(last + 1).skip(index + 1);
        let next = behind.find(|&&block| !(self.null && block == NULL_BLOCK));
        next.is_none_or(|&next| self.blocks.is_dirty(next))
    }

    /// The table that a block was last known to be in, if it still is, and its index.
    #[inline]
    fn hinted(&self, block: BlockId) -> Option<(TableId, usize)> {
        let Owner { table, index } = self.owners[block.index()].get();
        let (id, _) = self.rows.numbered(table).filter(|(_, row)| row.tier == Tier::Device)?;
        (self.rows.table(id).table.get(index as usize) == Some(&block)).then_some((id, index as usize))
    }

    /// Another table that has the block, most likely in the same place.
    fn search(&self, block: BlockId) -> Option<(TableId, usize)> {
        let hinted = self.owners[block.index()].get().index as usize;
        let tables = || self.rows.tables().filter(|(_, row, _)| row.tier == Tier::Device);
        let same = tables().find(|(.., table)| table.table.get(hinted) == Some(&block)).map(|(id, ..)| (id, hinted));
        let (id, index) = same.or_else(|| {
            tables().find_map(|(id, _, table)| Some((id, table.table.iter().position(|&other| other == block)?)))
        })?;
        let owner = Owner { table: self.rows.number(id), index: u32::try_from(index).unwrap_or(u32::MAX) };
        self.owners[block.index()].set(owner);
        Some((id, index))
    }
}
