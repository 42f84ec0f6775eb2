//! Defragmentation: device blocks move into holes by transfers of the step's decision.
//!
//! Until a move's ticket is completed nothing but the pool knows of it: tables, keys and slots name the source, which is
//! read and written as ever. If the source then still holds what was read of it, the target takes its place everywhere; a
//! source that was written, freed, given out again or leased meanwhile stays, and the target is given back.

use super::Manager;
use crate::block::{BlockState, TierBlock};
use crate::defrag::{Budget, Entry, Occupancy, Plan, Wanted};
use crate::error::Result;
use crate::error::invalid;
use crate::id::{BlockId, SequenceId, TicketId, Tier};
use crate::sequence::Row;
use crate::transfer::{PendingMoves, PendingRehome};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// What becomes of cached blocks that are in the way and that no sequence uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cached {
    /// They move like others, and stay cached.
    #[default]
    Move,
    /// They count as holes: those are evicted that are in the way, or that others move into.
    Drop,
    /// They count as holes, but what is in these moves on to a hole that holds nothing, if there is one left.
    Exchange,
}

impl Cached {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Move, Self::Drop, Self::Exchange];

    /// Its name in messages and in Python.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Move => "move",
            Self::Drop => "drop",
            Self::Exchange => "exchange",
        }
    }

    /// What such blocks count as.
    pub(super) const fn place(self) -> Occupancy {
        match self {
            Self::Move => Occupancy::Live,
            Self::Drop | Self::Exchange => Occupancy::Hole,
        }
    }

    /// How one is entered.
    pub(super) const fn entry(self) -> Entry {
        match self {
            Self::Move => Entry::Never,
            Self::Drop => Entry::Drop,
            Self::Exchange => Entry::Exchange,
        }
    }

    /// The one of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|cached| cached.name() == name)
    }
}

/// What one call has decided to move, and what stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// Moves that the present step's decision is going to have.
    pub planned: usize,
    /// Moves that the goal needs beyond these: those past the budget.
    pub left: usize,
    /// Live blocks that stay in the way because no hole is left for them.
    pub stuck: usize,
    /// Live blocks that stay in the way for now: they are being filled, or what they hold may yet turn out to be lost.
    pub held: usize,
    /// Cached blocks that were evicted.
    pub dropped: usize,
}

/// Counters of moves since the manager was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveStats {
    /// Blocks that lie elsewhere now.
    pub done: u64,
    /// Moves given up because the source was written, freed or leased meanwhile.
    pub cancelled: u64,
    /// Moves whose bytes did not land; their blocks stayed.
    pub failed: u64,
}

impl MoveStats {
    pub(super) fn counters(self) -> [u64; 3] {
        [self.done, self.cancelled, self.failed]
    }
}

/// How the blocks of the device lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fragmentation {
    /// The highest block that is not free; none if all are.
    pub max_id: Option<BlockId>,
    /// Blocks between the highest one that could move and the highest that there need be.
    pub gap: u32,
    /// Free blocks that are not cached.
    pub holes: usize,
    /// Whole pages of the pool, of the size asked for, of which all blocks are holes.
    pub empty_pages: usize,
    /// Block tables with blocks of their own, and the runs of neighbours that they consist of.
    pub tables: usize,
    /// See `tables`.
    pub runs: usize,
}

/// A move that is about to take effect, and the rows that have its source in their tables.
struct Landed {
    from: BlockId,
    to: BlockId,
    /// Entry of the tables.
    index: usize,
    refs: usize,
    rows: Vec<u32>,
}

impl Manager {
    /// Decides moves of device blocks towards goals, the most important first, within a budget, as pairs of
    /// [`Kind::Move`](crate::Kind::Move) in the present step's decision. Sequences that run now are moved last.
    ///
    /// Nobody notices before the step's ticket is completed: block tables, slots and cached blocks stay as they are until
    /// then. A target is taken out of the free blocks at once; a source that is written, freed or leased meanwhile stays
    /// where it is.
    ///
    /// # Arguments
    /// `sequences` are those that [`Goal::Contiguous`](crate::defrag::Goal::Contiguous) is about, the first in front; all on
    /// the device if none are named. A goal's slack counts from call to call as long as the goals are the same.
    ///
    /// # Errors
    /// A sequence is unknown or not on the device; nothing has changed.
    pub fn defragment(
        &mut self,
        goals: &[Wanted],
        sequences: Option<&[SequenceId]>,
        budget: Budget,
        cached: Cached,
    ) -> Result<Moves> {
        let tables = self.tables_to_order(goals, sequences)?;
        self.follow_places(cached)?;
        self.set_goals(goals);
        let plan = self.plan(&tables, budget.one_way(), cached);
        let evicted = plan.drops().iter().map(|&[_, to]| to).chain(plan.clear.iter().copied());
        let dropped = evicted.map(|block| self.tiers.drop_cached(BlockId(block))).count();
        let onward = plan.onward.iter();
        let rehomes: Vec<_> = onward.filter_map(|&[from, to]| self.detach_cached(BlockId(from), BlockId(to))).collect();
        let planned = plan.pairs.len() + rehomes.len();
        if !rehomes.is_empty() {
            self.transfers.step_mut().moves_mut().rehomes.extend(rehomes);
        }
        for &[from, to] in &plan.pairs {
            self.begin_move(BlockId(from), BlockId(to));
        }
        let Plan { left, stuck, held, .. } = plan;
        Ok(Moves { planned, left, stuck, held, dropped })
    }

    /// Keeps the places of the device's blocks from now on.
    fn follow_places(&mut self, cached: Cached) -> Result<()> {
        if self.tiers.device().follows_places() {
            self.tiers.count_idle_as(cached.place());
            return Ok(());
        }
        let open = self.transfers.open();
        let rows = self.sequences.rows();
        let written = |pool: &crate::pool::Pool| {
            let rows = rows.iter().filter(|(_, row)| row.tier == Tier::Device && row.written == open);
            let blocks = rows.flat_map(|(_, row)| row.table.iter().copied());
            blocks.filter(|&block| !pool.block(block).is_published()).collect()
        };
        self.tiers.follow_places(written)?;
        self.tiers.count_idle_as(cached.place());
        for (sequence, row) in self.sequences.rows().iter().filter(|(_, row)| row.tier == Tier::Device) {
            self.tiers.note_owner(sequence.row(), 0, &row.table);
        }
        Ok(())
    }

    fn begin_move(&mut self, from: BlockId, to: BlockId) {
        // The next append to the block must ask the pool.
        let hint = self.tiers.hint(from);
        let size = self.block_size();
        let (rows, _) = self.sequences.rows_mut().entries();
        if let Some(row) = rows.get_mut(hint.row as usize).filter(|row| row.len < row.writable) {
            let index = (row.writable / size - 1) as usize;
            if row.table.get(index) == Some(&from) {
                row.writable = 0;
            }
        }
        self.tiers.begin_move(from, to);
        self.transfers.step_mut().moves_mut().moves.push([from.0, to.0]);
    }

    /// Takes what a cached block holds out of it before another moves there; a hole gets it once it has landed.
    fn detach_cached(&mut self, from: BlockId, to: BlockId) -> Option<PendingRehome> {
        let event = self.tiers.published_event((Tier::Device, from));
        let identity = self.tiers.detach_cached(from, to)?;
        Some(PendingRehome { from, to, identity, event })
    }

    /// Puts the moves of the present step that still count into its decision.
    pub(super) fn decide_moves(&mut self) {
        if !self.tiers.device().follows_places() {
            return;
        }
        let mut all = self.transfers.step_mut().take_moves();
        let (moves, cancelled): (Vec<_>, Vec<_>) =
            all.moves.into_iter().partition(|&[from, to]| self.tiers.device().moves_to(BlockId(from), BlockId(to)));
        for &[_, to] in &cancelled {
            // What nobody overwrites keeps what it holds: the move that was to save that is not needed.
            let unwritten = all.rehomes.iter().position(|rehome| rehome.from.0 == to);
            if let Some(rehome) = unwritten.map(|at| all.rehomes.swap_remove(at)) {
                self.tiers.attach_cached(rehome.from, rehome.identity, rehome.event);
                self.tiers.give_back(rehome.to);
            }
            self.tiers.give_back(BlockId(to));
            self.moved.cancelled += 1;
        }
        all.moves = moves;
        if !all.moves.is_empty() {
            self.transfers.pairs(crate::Kind::Move, Tier::Device, Tier::Device).extend(all.pairs());
        }
        if !all.is_empty() {
            *self.transfers.step_mut().moves_mut() = all;
        }
        self.tiers.end_step();
        if !cancelled.is_empty() {
            self.tiers.enforce_quotas();
        }
    }

    /// Gives up the moves of a ticket whose targets did not land, and takes these out of `lost`: nobody's bytes were there.
    pub(super) fn lose_moves(&mut self, ticket: TicketId, lost: &mut HashSet<TierBlock>) {
        let Ok(ticket) = self.transfers.get_mut(ticket) else { return };
        if ticket.move_pairs().next().is_none() {
            return;
        }
        let (moves, tiers, stats) = (ticket.moves_mut(), &mut self.tiers, &mut self.moved);
        moves.rehomes.retain(|rehome| {
            let landed = !lost.remove(&(Tier::Device, rehome.to));
            if !landed {
                tiers.give_back(rehome.to);
                stats.failed += 1;
            }
            landed
        });
        moves.moves.retain(|&[from, to]| {
            let landed = !lost.remove(&(Tier::Device, BlockId(to)));
            if !landed {
                if tiers.device().moves_to(BlockId(from), BlockId(to)) {
                    tiers.stay(BlockId(from));
                }
                tiers.give_back(BlockId(to));
                stats.failed += 1;
            }
            landed
        });
    }

    /// Ends the moves of a ticket, whose bytes have landed.
    pub(super) fn end_moves(&mut self, all: &PendingMoves) {
        for rehome in &all.rehomes {
            let is_found = self.tiers.attach_cached(rehome.to, rehome.identity, rehome.event);
            self.tiers.give_back(rehome.to);
            let count = if is_found { &mut self.moved.done } else { &mut self.moved.cancelled };
            *count += 1;
        }
        let mut landed = Vec::with_capacity(all.moves.len());
        for &[from, to] in &all.moves {
            let (from, to) = (BlockId(from), BlockId(to));
            if self.tiers.device().moves_to(from, to) {
                let (refs, index) = (self.tiers.device().refs(from) as usize, self.tiers.hint(from).index as usize);
                landed.push(Landed { from, to, index, refs, rows: Vec::new() });
            } else {
                self.tiers.give_back(to);
                self.moved.cancelled += 1;
            }
        }
        self.find_rows(&mut landed);
        for landed in landed {
            // After a snapshot with forged keys a block may be at different places of tables.
            if landed.rows.len() == landed.refs {
                self.finish_move(&landed);
                self.moved.done += 1;
            } else {
                self.tiers.stay(landed.from);
                self.tiers.give_back(landed.to);
                self.moved.cancelled += 1;
            }
        }
    }

    /// Finds all rows that have the sources in their tables: by the hints where one row has a block, else among all rows.
    fn find_rows(&mut self, landed: &mut [Landed]) {
        let mut open = Vec::new();
        for (at, one) in landed.iter_mut().enumerate() {
            let hint = self.tiers.hint(one.from);
            let row = self.sequences.rows().in_use(hint.row).filter(|row| row.tier == Tier::Device);
            if one.refs == 1 && row.is_some_and(|row| row.table.get(one.index) == Some(&one.from)) {
                one.rows.push(hint.row);
            } else if one.refs > 0 {
                open.push(at);
            }
        }
        if open.is_empty() {
            return;
        }
        for (id, row) in self.sequences.rows().iter().filter(|(_, row)| row.tier == Tier::Device) {
            for &at in &open {
                let one = &mut landed[at];
                if row.table.get(one.index) == Some(&one.from) {
                    one.rows.push(id.row());
                }
            }
        }
        for one in landed.iter_mut().filter(|one| one.rows.len() != one.refs) {
            // The hint is of an earlier life of the block.
            one.rows.clear();
            for (id, row) in self.sequences.rows().iter().filter(|(_, row)| row.tier == Tier::Device) {
                if let Some(index) = row.table.iter().position(|&block| block == one.from) {
                    if one.rows.is_empty() || one.index == index {
                        one.index = index;
                        one.rows.push(id.row());
                    }
                }
            }
        }
    }

    /// Lets the target take the place of the source everywhere.
    fn finish_move(&mut self, landed: &Landed) {
        let &Landed { from, to, index, .. } = landed;
        self.tiers.finish_move(from, to);
        let (rows, _) = self.sequences.rows_mut().entries();
        for &row in &landed.rows {
            rows[row as usize].table.replace(index, to);
        }
        if let Some(&row) = landed.rows.first() {
            self.tiers.note_owner(row, index, &[to]);
        }
    }

    /// How the device's blocks lie; takes time that rises with the pool and the tables.
    ///
    /// # Errors
    /// A page has no blocks.
    pub fn fragmentation(&self, page_blocks: u32) -> Result<Fragmentation> {
        if page_blocks == 0 {
            return Err(invalid("page_blocks", 0, "at least 1".to_owned()));
        }
        let places = self.tiers.survey()?;
        let pool = &self.tiers.device();
        let (pages, known) = (pool.len() / page_blocks as usize, (0..).map(BlockId).take(pool.extent()));
        let pages =
            (0..u32::try_from(pages).unwrap_or(u32::MAX)).map(|page| page * page_blocks..(page + 1) * page_blocks);
        let mut found = Fragmentation {
            max_id: known.filter(|&block| pool.block(block).state() != BlockState::Free).last(),
            gap: places.gap(),
            holes: places.holes().len(),
            empty_pages: pages.filter(|page| places.holes().count(page.clone()) == page.len()).count(),
            ..Fragmentation::default()
        };
        for (_, row) in self.sequences.rows().iter().filter(|(_, row)| row.tier == Tier::Device) {
            let table = &row.table[row.null_prefix as usize..];
            found.tables += usize::from(!table.is_empty());
            found.runs += table.chunk_by(|a, b| a.0 + 1 == b.0).count();
        }
        Ok(found)
    }

    /// What does not hold of the moves under way.
    pub(crate) fn check_moves(&self) -> std::result::Result<(), String> {
        let mut targets = HashSet::new();
        for [from, to] in self.transfers.all().flat_map(|(_, ticket)| ticket.move_pairs()) {
            let (node_refs, writing) =
                (self.tiers.device().refs(BlockId(to)), self.tiers.device().block(BlockId(to)).is_filling());
            if !targets.insert(to) || node_refs > 0 || !writing {
                return Err(format!("block {from} moves to {to}, which has {node_refs} references"));
            }
        }
        let counting = self.tiers.device().moving().filter(|&[_, to]| !targets.contains(&to)).count();
        if counting > 0 {
            return Err(format!("{counting} blocks move without a ticket"));
        }
        let sealed = |row: &Row| {
            let index = (row.writable / self.block_size()) as usize;
            let written = index.checked_sub(1).and_then(|i| row.table.get(i));
            row.writable <= row.len || written.is_none_or(|&block| !self.tiers.device().is_moving(block))
        };
        match self.sequences.rows().iter().find(|(_, row)| !sealed(row)) {
            Some((id, _)) => Err(format!("sequence {id} would write a block that moves")),
            None => Ok(()),
        }
    }
}
