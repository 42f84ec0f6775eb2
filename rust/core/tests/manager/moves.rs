//! Rules for moves within the device: they land as late as their tickets allow, and no sequence notices.

use super::World;
use blockyard_core::defrag::Goal;
use blockyard_core::{Cached, Kind, Tier};
use proptest::prelude::*;

#[derive(Debug, Clone, Copy)]
pub(crate) enum Op {
    Defragment(Goal, usize, Cached),
    /// Everything lands, then blocks are moved, and the step is handed out, perhaps to fail.
    Settled(Goal, Option<usize>),
}

fn goal() -> impl Strategy<Value = Goal> {
    let number = 0u32..12;
    prop_oneof![
        2 => number.clone().prop_map(Goal::MaxId),
        2 => number.clone().prop_map(Goal::FreeTail),
        2 => (0u32..3).prop_map(Goal::Dense),
        1 => (1u32..6).prop_map(Goal::EmptyPages),
    ]
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (goal(), prop_oneof![2 => 0usize..4, 1 => Just(usize::MAX)], prop::sample::select(&Cached::ALL[..]))
            .prop_map(|(goal, n, cached)| Op::Defragment(goal, n, cached)),
        2 => (goal(), prop::option::of(0usize..8)).prop_map(|(goal, lost)| Op::Settled(goal, lost)),
    ]
}

impl World {
    pub(crate) fn apply_moves(&mut self, op: Op) {
        match op {
            Op::Defragment(goal, budget, cached) => self.defragment(goal, budget, cached),
            Op::Settled(goal, lost) => {
                self.settle();
                self.step(None);
                self.defragment(goal, usize::MAX, Cached::Move);
                self.step(lost);
            }
        }
    }

    fn defragment(&mut self, goal: Goal, budget: usize, cached: Cached) {
        let open = |world: &Self| {
            let decision = world.manager.clone().take_decision();
            decision.of(Kind::Move).map(|pairs| pairs.ids.len()).sum::<usize>()
        };
        let (before, free) = (open(self), self.manager.pool(Tier::Device).free());
        let tables: Vec<_> = self.truth.keys().map(|&s| self.blocks_of(s)).collect();
        let moves = self.manager.defragment(goal, budget, cached);
        assert!(moves.planned <= budget && (cached == Cached::Drop || moves.dropped == 0));
        // What tenants have beyond their quotas goes when the decision is taken.
        let quotas = [0, 1].iter().any(|&tenant| self.manager.quota([tenant; 32]).is_some());
        let (now, expected) = (open(self), before + moves.planned);
        assert!(now == expected || (quotas && now < expected), "{now} moves are decided, not {expected}");
        // Blocks beyond the end of a pool that shrinks count as not free, too.
        let short = self.manager.resize_progress().live > 0;
        let left = self.manager.pool(Tier::Device).free();
        assert!(left + moves.planned == free || (short && left <= free), "a target is no longer free");
        let lies = self.manager.fragmentation(2).unwrap();
        assert!(lies.max_id.map_or(0, |top| top.index() + 1) + lies.holes >= self.manager.pool(Tier::Device).len());
        assert!(2 * lies.empty_pages <= lies.holes && lies.tables <= lies.runs);
        assert!(lies.max_id.is_none_or(|top| top.index() < self.manager.resize_progress().extent));
        assert!(self.truth.keys().map(|&s| self.blocks_of(s)).eq(tables), "a table changed before the bytes");
    }
}
