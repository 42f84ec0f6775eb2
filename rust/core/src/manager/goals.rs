//! What the planner of moves knows of sequences: their block tables, which of them run now, and which blocks they write.

use super::Manager;
use super::moves::Cached;
use crate::defrag::{Budget, Entry, Facts, Goal, Plan, Planner, Wanted};
use crate::error::Result;
use crate::group::NULL_BLOCK;
use crate::id::{BlockId, SequenceId, TicketId, Tier};
use crate::pool::{Hint, PlannerView};
use crate::reuse::BlockSet;
use crate::sequence::require_tier;
use crate::sequence::{Row, Rows};

/// What the manager knows of device blocks beyond their places.
struct ManagerFacts<'a> {
    rows: &'a Rows,
    blocks: PlannerView<'a>,
    /// The present step, and the earliest that has not ended.
    open: TicketId,
    first: TicketId,
    block_size: u32,
    /// Whether tables have null blocks.
    null: bool,
    cached: Cached,
}

impl Facts for ManagerFacts<'_> {
    fn entry(&self, hole: BlockId) -> Entry {
        if self.blocks.idle.contains(hole) { self.cached.entry() } else { Entry::Move }
    }

    fn content(&self) -> Option<&BlockSet> {
        (self.cached != Cached::Move).then_some(self.blocks.idle)
    }

    /// Whether the sequence that was last known to have it was written in this step or the one before.
    fn is_hot(&self, live: BlockId) -> bool {
        self.hinted(live).is_some_and(|(row, _)| row.written.0 + 1 >= self.open.0)
    }

    /// Whether its bytes are what they will be at the end of the step, and are not about to change.
    fn may_leave(&self, live: BlockId) -> bool {
        if self.blocks.is_settled(live) {
            return true;
        }
        if self.blocks.is_dirty(live) {
            return false;
        }
        let Some((row, index)) = self.hinted(live).or_else(|| self.search(live)) else { return false };
        // What was loaded may yet turn out to be lost.
        if row.lost || row.ticket >= self.first {
            return false;
        }
        let full = (index + 1).saturating_mul(self.block_size as usize) <= row.len as usize;
        if row.written == self.open {
            return full && !self.ends_with(row, index);
        }
        // A running sequence fills its last block step by step.
        full || row.written.0 + 1 < self.open.0
    }
}

impl<'a> ManagerFacts<'a> {
    /// Whether a row that the present step writes may have written an entry that the pool was not asked about.
    fn ends_with(&self, row: &Row, index: usize) -> bool {
        // Behind the last token there may be blocks of an earlier lookahead.
        let last = (row.len.saturating_sub(1) / self.block_size) as usize;
        let mut behind = row.table.iter().take(last + 1).skip(index + 1);
        let next = behind.find(|&&block| !(self.null && block == NULL_BLOCK));
        next.is_none_or(|&next| self.blocks.is_dirty(next))
    }

    /// The row that a block was last known to be in, if it is, and where.
    fn hinted(&self, block: BlockId) -> Option<(&'a Row, usize)> {
        let Hint { row, index } = self.blocks.hint(block);
        let row = self.rows.in_use(row).filter(|row| row.tier == Tier::Device)?;
        (row.table.get(index as usize) == Some(&block)).then_some((row, index as usize))
    }

    /// Another row that has the block, most likely in the same place.
    fn search(&self, block: BlockId) -> Option<(&'a Row, usize)> {
        let hinted = self.blocks.hint(block).index as usize;
        let rows = || self.rows.iter().filter(|(_, row)| row.tier == Tier::Device);
        let same = rows().find(|(_, row)| row.table.get(hinted) == Some(&block)).map(|(id, row)| (id, row, hinted));
        let (id, row, index) = same.or_else(|| {
            rows().find_map(|(id, row)| Some((id, row, row.table.iter().position(|&other| other == block)?)))
        })?;
        self.blocks.set_hint(block, Hint { row: id.row(), index: u32::try_from(index).unwrap_or(u32::MAX) });
        Some((row, index))
    }
}

impl Manager {
    /// The block tables that are to be contiguous, where a goal asks for it: those of all groups, without null blocks.
    pub(super) fn tables_to_order(
        &self,
        goals: &[Wanted],
        sequences: Option<&[SequenceId]>,
    ) -> Result<Vec<Vec<BlockId>>> {
        let mut all = Vec::new();
        let named = sequences.map(|sequences| self.sequences.members(sequences, &mut all)).transpose()?;
        for &member in named.unwrap_or_default() {
            require_tier(member, self.sequences.rows().get(member)?, Tier::Device)?;
        }
        if !goals.iter().any(|wanted| matches!(wanted.goal, Goal::Contiguous(_))) {
            return Ok(Vec::new());
        }
        let blocks = |row: &Row| row.table.iter().copied().filter(|&block| !self.sequences.is_null(block)).collect();
        Ok(match named {
            Some(named) => named.iter().map(|&member| blocks(self.sequences.rows().at(member))).collect(),
            None => self
                .sequences
                .rows()
                .iter()
                .map(|(_, row)| row)
                .filter(|row| row.tier == Tier::Device)
                .map(blocks)
                .collect(),
        })
    }

    /// Plans for these goals from now on; slacks count on where they are those of the call before.
    pub(super) fn set_goals(&mut self, goals: &[Wanted]) {
        let pool = &self.tiers.device();
        let known = pool.places().map_or(0, |places| places.capacity() as usize);
        let beyond = u32::try_from(known.saturating_sub(pool.len())).unwrap_or(u32::MAX);
        let goals = goals.iter().map(|&Wanted { goal, slack }| match goal {
            // Blocks beyond the end of a pool that has shrunk are no part of its tail.
            Goal::FreeTail(tail) => Wanted { goal: Goal::FreeTail(tail.saturating_add(beyond)), slack },
            goal => Wanted { goal, slack },
        });
        if !self.planner.wanted().eq(goals.clone()) {
            self.planner = Planner::new(&goals.collect::<Vec<_>>());
        }
    }

    /// At most `budget` moves towards the goals: what is to be kept of a block that one of them writes takes another.
    pub(super) fn plan(&mut self, tables: &[Vec<BlockId>], budget: usize, cached: Cached) -> Plan {
        let (null, block_size) = (self.sequences.has_nulls(), self.block_size());
        let Some((places, blocks)) = self.tiers.planning() else { return Plan::default() };
        let tables: Vec<&[BlockId]> = tables.iter().map(Vec::as_slice).collect();
        let (open, first) = (self.transfers.open(), self.transfers.first());
        let known = ManagerFacts { rows: self.sequences.rows(), blocks, open, first, block_size, null, cached };
        let budget = Budget { moves: usize::MAX, bytes: budget as u64, block_bytes: 1 };
        self.planner.plan(places, &tables, &known, budget)
    }
}
