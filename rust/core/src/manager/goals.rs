//! What the planner of moves is told of sequences: their block tables, and which of them run now.

use super::{Manager, require_tier};
use crate::defrag::{Budget, Facts, Goal, Plan, Planner, Wanted};
use crate::error::Result;
use crate::id::{BlockId, SequenceId, TicketId, Tier};
use crate::pool::Hint;
use crate::table::{Row, Rows};

/// What the manager knows of device blocks beyond their places. Its holes hold nothing: every entry is a plain move.
struct Known<'a> {
    rows: &'a Rows,
    hints: &'a [Hint],
    open: TicketId,
}

impl Facts for Known<'_> {
    /// Whether the sequence that was last known to have it was written in this step or the one before.
    fn is_hot(&self, live: BlockId) -> bool {
        let Hint { row, index } = self.hints[live.index()];
        let row = self.rows.in_use(row).filter(|row| row.tier == Tier::Device);
        let row = row.filter(|row| row.table.get(index as usize) == Some(&live));
        row.is_some_and(|row| row.written.0 + 1 >= self.open.0)
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
        let named = sequences.map(|sequences| self.members(sequences, &mut all)).transpose()?;
        for &member in named.unwrap_or_default() {
            require_tier(member, self.rows.get(member)?, Tier::Device)?;
        }
        if !goals.iter().any(|wanted| matches!(wanted.goal, Goal::Contiguous(_))) {
            return Ok(Vec::new());
        }
        let blocks = |row: &Row| row.table.iter().copied().filter(|&block| !self.is_null(block)).collect();
        Ok(match named {
            Some(named) => named.iter().map(|&member| blocks(self.rows.at(member))).collect(),
            None => self.rows.iter().map(|(_, row)| row).filter(|row| row.tier == Tier::Device).map(blocks).collect(),
        })
    }

    /// Plans for these goals from now on; slacks count on where they are those of the call before.
    pub(super) fn set_goals(&mut self, goals: &[Wanted]) {
        let pool = &self.pools[0];
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

    /// At most `budget` moves towards the goals.
    pub(super) fn plan(&mut self, tables: &[Vec<BlockId>], budget: usize) -> Plan {
        let Some((places, hints)) = self.pools[0].planning() else { return Plan::default() };
        let tables: Vec<&[BlockId]> = tables.iter().map(Vec::as_slice).collect();
        let known = Known { rows: &self.rows, hints, open: self.tickets.open() };
        self.planner.plan(places, &tables, &known, Budget::of_moves(budget))
    }
}
