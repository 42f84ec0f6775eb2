//! Moves of device blocks into holes, by transfers of the step's decision.
//!
//! Until a move's ticket is completed, only the pool knows about it: tables, keys and slots still name the source,
//! which can be read and written as usual. If the source then still holds the bytes that were moved, the target
//! replaces it everywhere. If it was written, freed, reused or leased in the meantime, it stays, and the target is
//! freed.

use super::view::SequenceFacts;
use super::{Budget, Goal, HoleUse, Plan, Planner, Wanted};
use crate::block::{BlockState, TierBlock};
use crate::decision::Kind;
use crate::error::Result;
use crate::id::{BlockId, SequenceId, Tier};
use crate::placement::{Occupancy, Tracker};
use crate::sequence::{Sequences, TableId};
use crate::tiers::Tiers;
use crate::transfer::{OpenStep, PendingMoves, PendingRehome, View};
use std::collections::HashSet;

/// What happens to unused cached blocks that are in the way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cached {
    /// They move like others, and stay cached.
    #[default]
    Move,
    /// They count as holes: those in the way, or that others move into, are evicted.
    Drop,
    /// They count as holes, but their contents move on to an empty hole, if one is left.
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

    /// Occupancy that such blocks count as.
    const fn place(self) -> Occupancy {
        match self {
            Self::Move => Occupancy::Live,
            Self::Drop | Self::Exchange => Occupancy::Hole,
        }
    }

    /// How another block may move into one.
    pub(super) const fn hole_use(self) -> HoleUse {
        match self {
            Self::Move => HoleUse::Never,
            Self::Drop => HoleUse::Drop,
            Self::Exchange => HoleUse::Exchange,
        }
    }

    /// The one of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|cached| cached.name() == name)
    }
}

/// The moves decided by one call, and the blocks that stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// Moves that will be in the current step's decision.
    pub planned: usize,
    /// Further moves that the goal needs, beyond the budget.
    pub left: usize,
    /// Live blocks that stay in the way because no hole is left for them.
    pub stuck: usize,
    /// Live blocks that stay in the way for now: they are being filled, or their contents may still turn out to be
    /// lost.
    pub held: usize,
    /// Cached blocks that were evicted.
    pub dropped: usize,
}

/// Counters of moves since the manager was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoveStats {
    /// Blocks that have moved.
    pub done: u64,
    /// Moves given up because the source was written, freed or leased meanwhile.
    pub cancelled: u64,
    /// Moves whose bytes did not land; their blocks stayed.
    pub failed: u64,
}

/// How fragmented the device's blocks are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fragmentation {
    /// The highest block that is not free; `None` if all are.
    pub max_id: Option<BlockId>,
    /// Distance between the highest movable block and where it would be in a dense layout.
    pub gap: u32,
    /// Free blocks that are not cached.
    pub holes: usize,
    /// Block tables that are not empty.
    pub tables: usize,
    /// Runs of adjacent blocks in those tables.
    pub runs: usize,
}

/// A move that is about to take effect, and the rows that have its source in their tables.
struct Landed {
    from: BlockId,
    to: BlockId,
    /// Entry of the tables.
    index: usize,
    refs: usize,
    tables: Vec<TableId>,
}

/// Moves within the device: their goals and their counters.
#[derive(Debug, Clone, Default)]
pub(crate) struct Defrag {
    planner: Planner,
    stats: MoveStats,
}

impl Defrag {
    pub(crate) fn stats(&self) -> MoveStats {
        self.stats
    }

    /// Decides moves towards goals; see [`Manager::defragment`](crate::Manager::defragment).
    pub(crate) fn request(
        &mut self,
        (sequences, step): (&mut Sequences, &mut OpenStep<'_>),
        goals: &[Wanted],
        named: Option<&[SequenceId]>,
        budget: Budget,
        cached: Cached,
    ) -> Result<Moves> {
        let ordered = goals.iter().any(|wanted| matches!(wanted.goal, Goal::Contiguous(_)));
        let tables = sequences.device_tables(named, ordered)?;
        sequences.track_owners(step)?;
        if let Some((tracker, blocks)) = step.tiers.tracker_mut() {
            tracker.count_cached_as(cached.place(), blocks);
        }
        self.set_goals(goals, step.tiers);
        let plan = self.plan((sequences, step), &tables, budget.one_way(), cached);
        let evicted = plan.drops().iter().map(|&[_, to]| to).chain(plan.clear.iter().copied());
        let dropped = evicted.map(|block| step.tiers.drop_cached((Tier::Device, BlockId(block)))).count();
        let mut rehomes = Vec::new();
        for [from, to] in plan.onward.iter().map(|pair| pair.map(BlockId)) {
            // Detach the contents of a cached block before another block moves in; they reappear in a hole once they
            // have landed there.
            let event = step.tiers.published_event((Tier::Device, from));
            let depth = Some(sequences.owner(from).index).filter(|&index| index != u32::MAX).unwrap_or(0);
            let identity = step.tiers.detach_cached(from, to, depth);
            rehomes.extend(identity.map(|identity| PendingRehome { from, to, identity, event }));
        }
        let planned = plan.pairs.len() + rehomes.len();
        if !rehomes.is_empty() {
            step.transfers.step_mut().moves_mut().rehomes.extend(rehomes);
        }
        for &[from, to] in &plan.pairs {
            sequences.seal(BlockId(from));
            step.tiers.begin_move(BlockId(from), BlockId(to));
            step.transfers.step_mut().moves_mut().moves.push([from, to]);
        }
        let Plan { left, stuck, held, .. } = plan;
        Ok(Moves { planned, left, stuck, held, dropped })
    }

    /// Sets the goals; if they equal the previous call's, their hysteresis state is kept.
    fn set_goals(&mut self, goals: &[Wanted], tiers: &Tiers) {
        let pool = tiers.device();
        let known = pool.tracker().map_or(0, |tracker| tracker.map().capacity() as usize);
        let beyond = u32::try_from(known.saturating_sub(pool.len())).unwrap_or(u32::MAX);
        let goals = goals.iter().map(|&Wanted { goal, slack }| match goal {
            // Blocks beyond the end of a shrunken pool are not part of its tail.
            Goal::FreeTail(tail) => Wanted { goal: Goal::FreeTail(tail.saturating_add(beyond)), slack },
            goal => Wanted { goal, slack },
        });
        if !self.planner.wanted().eq(goals.clone()) {
            self.planner = Planner::new(&goals.collect::<Vec<_>>());
        }
    }

    /// At most `budget` moves towards the goals; preserving the contents of a block that a move overwrites takes
    /// another move.
    fn plan(
        &mut self,
        (sequences, step): (&mut Sequences, &mut OpenStep<'_>),
        tables: &[Vec<BlockId>],
        budget: usize,
        cached: Cached,
    ) -> Plan {
        let null = sequences.has_nulls();
        let (open, first) = (step.transfers.open(), step.transfers.first());
        let Some((tracker, blocks)) = step.tiers.tracker_mut() else { return Plan::default() };
        let (map, blocks) = tracker.planning(blocks);
        let tables: Vec<&[BlockId]> = tables.iter().map(Vec::as_slice).collect();
        let (rows, groups, owners) = sequences.owners();
        let facts = SequenceFacts { rows, owners, blocks, open, first, groups, null, hole_use: cached.hole_use() };
        let budget = Budget { moves: usize::MAX, bytes: budget as u64, block_bytes: 1 };
        self.planner.plan(map, &tables, &facts, budget)
    }

    /// Adds the current step's moves that are still valid to its decision.
    pub(crate) fn decide(&mut self, step: &mut OpenStep<'_>) {
        let OpenStep { tiers, transfers, .. } = step;
        let Some(tracker) = tiers.device().tracker() else { return };
        let mut all = transfers.step_mut().take_moves();
        let counts = |&[from, to]: &[u32; 2]| tracker.moves_to(BlockId(from), BlockId(to));
        let (moves, cancelled): (Vec<_>, Vec<_>) = all.moves.into_iter().partition(counts);
        for &[_, to] in &cancelled {
            // If a block is not overwritten after all, the move that would have saved its contents is not needed.
            let unwritten = all.rehomes.iter().position(|rehome| rehome.from.0 == to);
            if let Some(rehome) = unwritten.map(|at| all.rehomes.swap_remove(at)) {
                tiers.publish_copy((Tier::Device, rehome.from), rehome.identity, rehome.event, None);
                tiers.give_back(rehome.to);
            }
            tiers.give_back(BlockId(to));
            self.stats.cancelled += 1;
        }
        all.moves = moves;
        if !all.moves.is_empty() {
            transfers.pairs(Kind::Move, Tier::Device, Tier::Device).extend(all.pairs());
        }
        if !all.is_empty() {
            *transfers.step_mut().moves_mut() = all;
        }
        if let Some((tracker, _)) = tiers.tracker_mut() {
            tracker.end_step();
        }
        if !cancelled.is_empty() {
            tiers.enforce_quotas();
        }
    }

    /// Cancels a ticket's moves whose targets did not land, and removes the targets from `lost`: no sequence had bytes
    /// there.
    pub(crate) fn lose(&mut self, tiers: &mut Tiers, moves: &mut PendingMoves, lost: &mut HashSet<TierBlock>) {
        let stats = &mut self.stats;
        moves.rehomes.retain(|rehome| {
            let landed = !lost.remove(&(Tier::Device, rehome.to));
            if !landed {
                tiers.give_back(rehome.to);
                stats.failed += 1;
            }
            landed
        });
        moves.moves.retain(|pair| {
            let [from, to] = pair.map(BlockId);
            let landed = !lost.remove(&(Tier::Device, to));
            if !landed {
                tiers.cancel_move(from, to);
                stats.failed += 1;
            }
            landed
        });
    }

    /// Finishes the moves of a ticket whose bytes have landed.
    pub(crate) fn finish(&mut self, sequences: &mut Sequences, tiers: &mut Tiers, all: &PendingMoves) {
        for rehome in &all.rehomes {
            let is_found = tiers.publish_copy((Tier::Device, rehome.to), rehome.identity, rehome.event, None);
            tiers.give_back(rehome.to);
            let count = if is_found { &mut self.stats.done } else { &mut self.stats.cancelled };
            *count += 1;
        }
        let mut landed = Vec::with_capacity(all.moves.len());
        for [from, to] in all.moves.iter().map(|pair| pair.map(BlockId)) {
            // The tracker drops a move whose source is written, freed or leased before the bytes land: the copy is stale.
            if tiers.device().tracker().is_some_and(|tracker| tracker.moves_to(from, to)) {
                let (refs, index) = (tiers.device().refs(from) as usize, sequences.owner(from).index as usize);
                landed.push(Landed { from, to, index, refs, tables: Vec::new() });
            } else {
                tiers.give_back(to);
                self.stats.cancelled += 1;
            }
        }
        find_tables(sequences, &mut landed);
        for Landed { from, to, index, refs, tables } in landed {
            debug_assert_eq!(tables.len(), refs, "tables that have the block, and its references, differ");
            tiers.finish_move(from, to);
            sequences.replace(from, to, &tables, index);
            self.stats.done += 1;
        }
    }
}

/// Finds all tables that contain the sources: through the owner of a block in one table, else by scanning all tables.
fn find_tables(sequences: &Sequences, landed: &mut [Landed]) {
    let mut open = Vec::new();
    for (at, one) in landed.iter_mut().enumerate() {
        let owner = sequences.owner(one.from);
        let id = sequences.rows().numbered(owner.table).filter(|(_, row)| row.tier == Tier::Device).map(|(id, _)| id);
        let has = |id: &TableId| sequences.rows().table(*id).table.get(one.index) == Some(&one.from);
        if let Some(id) = id.filter(|id| one.refs == 1 && has(id)) {
            one.tables.push(id);
        } else if one.refs > 0 {
            open.push(at);
        }
    }
    if open.is_empty() {
        return;
    }
    for (id, _, table) in sequences.on_device() {
        for &at in &open {
            let one = &mut landed[at];
            if table.table.get(one.index) == Some(&one.from) {
                one.tables.push(id);
            }
        }
    }
    for one in landed.iter_mut().filter(|one| one.tables.len() != one.refs) {
        // The owner dates from an earlier use of the block.
        one.tables.clear();
        for (id, _, table) in sequences.on_device() {
            if let Some(index) = table.table.iter().position(|&block| block == one.from) {
                one.index = index;
                one.tables.push(id);
            }
        }
    }
}

/// Measures fragmentation; see [`Manager::fragmentation`](crate::Manager::fragmentation).
pub(crate) fn fragmentation(sequences: &Sequences, tiers: &Tiers) -> Result<Fragmentation> {
    let places = tiers.survey()?;
    let pool = tiers.device();
    let known = (0..).map(BlockId).take(pool.extent());
    let mut found = Fragmentation {
        max_id: known.filter(|&block| pool.block(block).state() != BlockState::Free).last(),
        gap: places.gap(),
        holes: places.holes().len(),
        ..Fragmentation::default()
    };
    for (_, _, table) in sequences.on_device() {
        let table = &table.table[table.null_prefix as usize..];
        found.tables += usize::from(!table.is_empty());
        found.runs += table.chunk_by(|a, b| a.0 + 1 == b.0).count();
    }
    Ok(found)
}

/// Checks the moves in flight.
pub(crate) fn check_moves(View { tiers, transfers, .. }: View<'_>) -> std::result::Result<(), String> {
    let mut targets = HashSet::new();
    for [from, to] in transfers.all().flat_map(|(_, ticket)| ticket.move_pairs()) {
        let (node_refs, writing) = (tiers.device().refs(BlockId(to)), tiers.device().block(BlockId(to)).is_filling());
        if !targets.insert(to) || node_refs > 0 || !writing {
            return Err(format!("block {from} moves to {to}, which has {node_refs} references"));
        }
    }
    let counting = tiers
        .device()
        .tracker()
        .into_iter()
        .flat_map(Tracker::moving)
        .filter(|&[_, to]| !targets.contains(&to))
        .count();
    if counting > 0 {
        return Err(format!("{counting} blocks move without a ticket"));
    }
    Ok(())
}
