//! Rules for moves within the device: they land as late as their tickets allow, and no sequence notices.

use super::World;
use super::groups::leaves;
use blockyard_core::defrag::{Budget, Goal, Wanted, runs};
use blockyard_core::{BlockId, Cached, Error, Kind, Moves, TableId, Tier};
use proptest::prelude::*;

#[derive(Debug, Clone, Copy)]
pub(crate) enum Op {
    Defragment(Goals, Budget, Cached),
    /// Everything lands, then blocks are moved, and the step is taken, perhaps to fail.
    Settled(Goals, Option<usize>),
    /// A sequence is decoded for some steps. Others are freed, and in the last step blocks are moved before it is decoded.
    Decoded {
        pick: usize,
        steps: u32,
        goal: Goal,
    },
    /// A sequence is swapped in by a load that may fail; before the load ends, copies of its blocks are moved.
    Copied {
        pick: usize,
        lost: Option<usize>,
        tokens: u32,
        goals: Goals,
    },
    /// Blocks change places with cached ones between them. The exchange may fail, or no longer be needed; a prompt
    /// looks the cached blocks up before and after.
    Exchanged {
        count: usize,
        goal: Goal,
        freed: Option<usize>,
        lost: Option<usize>,
        tokens: u32,
    },
}

/// Up to two goals, and the sequences that are named: the first and their number.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Goals {
    wanted: [Option<Wanted>; 2],
    named: Option<(usize, usize)>,
}

impl Op {
    /// Empties as many extents as can be, once everything has landed.
    pub(crate) const SETTLED: Self = Self::Settled(Goals { wanted: [None, None], named: None }, None);
}

fn goal() -> impl Strategy<Value = Goal> {
    let number = 0u32..12;
    prop_oneof![
        2 => number.clone().prop_map(Goal::MaxId),
        2 => number.clone().prop_map(Goal::FreeTail),
        2 => (0u32..3).prop_map(Goal::Dense),
        3 => (1u32..3).prop_map(Goal::Contiguous),
    ]
}

fn goals() -> impl Strategy<Value = Goals> {
    let slack = prop_oneof![3 => Just(0u32), 1 => 1u32..4];
    let wanted = (goal(), slack).prop_map(|(goal, slack)| Wanted { goal, slack }).boxed();
    let both = (prop::option::weighted(0.98, wanted.clone()), prop::option::weighted(0.4, wanted));
    let named = prop::option::weighted(0.3, (0usize..64, 0usize..4));
    (both, named).prop_map(|((first, second), named)| Goals { wanted: [first, second], named })
}

fn budget() -> impl Strategy<Value = Budget> {
    let moves = prop_oneof![2 => 0usize..4, 1 => Just(usize::MAX)];
    let bytes = prop_oneof![3 => Just(u64::MAX), 1 => 0u64..400];
    (moves, bytes).prop_map(|(moves, bytes)| Budget { moves, bytes, block_bytes: 64 })
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (goals(), budget(), prop::sample::select(&Cached::ALL[..]))
            .prop_map(|(goals, budget, cached)| Op::Defragment(goals, budget, cached)),
        2 => (goals(), prop::option::of(0usize..8)).prop_map(|(goals, lost)| Op::Settled(goals, lost)),
        1 => (0usize..64, 1u32..6, goal()).prop_map(|(pick, steps, goal)| Op::Decoded { pick, steps, goal }),
        1 => (0usize..64, prop::option::of(0usize..8), 1u32..9, goals())
            .prop_map(|(pick, lost, tokens, goals)| Op::Copied { pick, lost, tokens, goals }),
        2 => (0usize..4, prop_oneof![2 => (1u32..3).prop_map(Goal::Contiguous), 1 => goal()], prop::option::weighted(0.3, 0usize..8), prop::option::of(0usize..8), 5u32..20)
            .prop_map(|(count, goal, freed, lost, tokens)| Op::Exchanged { count, goal, freed, lost, tokens }),
    ]
}

impl World {
    pub(crate) fn apply_moves(&mut self, op: Op) {
        match op {
            Op::Defragment(goals, budget, cached) => self.defragment(goals, budget, cached),
            Op::Settled(goals, lost) => {
                self.settle();
                self.step(None);
                let before = self.runs();
                self.defragment(goals, Budget::UNLIMITED, Cached::Move);
                self.step(lost);
                let ordered = goals.wanted.iter().flatten().all(|wanted| matches!(wanted.goal, Goal::Contiguous(_)));
                if ordered && goals.named.is_none() && lost.is_none() {
                    self.settle();
                    assert!(self.runs() <= before, "{} runs instead of {before}", self.runs());
                }
            }
            Op::Exchanged { count, goal, freed, lost, tokens } => self.exchange(count, goal, freed, lost, tokens),
            Op::Decoded { pick, steps, goal } => {
                let (decoded, others) = (self.pick(pick, 1), self.pick(pick + 1, 2));
                let others: Vec<_> = others.into_iter().filter(|other| !decoded.contains(other)).collect();
                self.settle();
                for left in (0..steps).rev() {
                    if left == 0 {
                        self.free(&others);
                        let wanted = [Some(Wanted { goal, slack: 0 }), None];
                        self.defragment(Goals { wanted, named: None }, Budget::UNLIMITED, Cached::Move);
                    }
                    self.append(&decoded, (1, 0, 0), None);
                    self.step(None);
                    self.settle();
                }
            }
            Op::Copied { pick, lost, tokens, goals } => {
                let others = self.pick(pick + 1, 2);
                for sequence in self.pick(pick, 1) {
                    self.come_back(sequence, lost, tokens);
                    // There must be a place to move to.
                    let others: Vec<_> = others.iter().copied().filter(|&other| other != sequence).collect();
                    self.free(&others);
                    self.defragment(goals, Budget::UNLIMITED, Cached::Move);
                    self.step(None);
                    if let Some(moves) = self.tickets.keys().next_back().copied() {
                        self.end(moves);
                    }
                }
            }
        }
    }

    /// Empties extents; other moves work with blocks of one size only.
    pub(crate) fn apply_extents(&mut self, op: Op) {
        match op {
            Op::Defragment(goals, budget, _) => {
                let _ = self.empty_extents(goals, budget);
            }
            Op::Settled(goals, lost) => {
                // Twice: the second step may copy blocks to the host that are evicted next, which keeps their extents.
                self.settle();
                self.settle();
                let is_whole = self.manager.resize_progress().is_done();
                let moves = self.empty_extents(goals, Budget::UNLIMITED);
                self.step(lost);
                self.settle();
                let again = self.empty_extents(goals, Budget::UNLIMITED);
                // What waits for copies of evicted blocks follows. From beyond the end, blocks move one by one.
                let is_done = moves.stuck == 0 && again.planned <= moves.left;
                assert!(is_done || moves.planned == 0 || lost.is_some() || !is_whole, "{moves:?}, then {again:?}");
            }
            Op::Decoded { pick, steps, goal } => {
                let (decoded, others) = (self.pick(pick, 1), self.pick(pick + 1, 2));
                let others: Vec<_> = others.into_iter().filter(|other| !decoded.contains(other)).collect();
                self.settle();
                for left in (0..steps).rev() {
                    if left == 0 {
                        self.free(&others);
                        let goals = Goals { wanted: [Some(goal.into()), None], named: None };
                        let _ = self.empty_extents(goals, Budget::UNLIMITED);
                    }
                    self.append(&decoded, (1, 0, 0), None);
                    self.step(None);
                    self.settle();
                }
            }
            Op::Copied { .. } | Op::Exchanged { .. } => {}
        }
    }

    /// Asks for as many extents as the first goal's number, and blocks of classes that its other numbers choose.
    fn empty_extents(&mut self, Goals { wanted, named }: Goals, budget: Budget) -> Moves {
        let numbers = wanted.map(|wanted| wanted.map_or(0, |wanted| wanted.goal.number() as usize));
        let (classes, (class, more)) = (self.manager.num_classes(), named.unwrap_or_default());
        let mut blocks = vec![0; classes];
        (blocks[class % classes], blocks[(class + 1) % classes]) = (numbers[1], more);
        let fewest = numbers[0] % 4;
        let tables: Vec<_> = self.truth.keys().map(|&s| self.blocks_of(s)).collect();
        let budget = Budget { block_bytes: 0, ..budget };
        // Nothing moves if not all of them can be emptied.
        let mut tries = (fewest..12).rev().map(|kept| self.manager.empty_extents(&blocks, kept, budget));
        let is_over = |result: &Result<Moves, Error>| !matches!(result, Ok(Moves { planned: 0, .. }));
        let result = tries.find(is_over).unwrap_or_else(|| Ok(Moves::default()));
        let has_extents = self.manager.pool(Tier::Device).per_extent(0).is_some();
        let Ok(moves) = result else {
            assert!(!has_extents, "{result:?}");
            return Moves::default();
        };
        assert!(has_extents && moves.planned <= budget.moves, "{moves:?}");
        let open = self.manager.clone().take_decision();
        let bytes = open.of(Kind::Move).map(|pairs| {
            pairs.ids.len() as u64 * self.manager.pool(Tier::Device).stride(pairs.page_class.into()).unwrap()
        });
        let is_whole = self.manager.resize_progress().is_done();
        let is_all = moves.stuck == 0 || moves.planned == 0 || !is_whole;
        assert!(bytes.sum::<u64>() >= moves.planned as u64 && is_all, "{moves:?}");
        assert!(self.truth.keys().map(|&s| self.blocks_of(s)).eq(tables), "a table changed before the bytes moved");
        moves
    }

    fn exchange(&mut self, count: usize, goal: Goal, freed: Option<usize>, lost: Option<usize>, tokens: u32) {
        for family in 0..2 {
            self.prompt(tokens, family, u32::MAX);
            self.allocate(6);
        }
        let some = self.pick(count, 3);
        self.append(&some, (5, 0, 0), None);
        self.demote(count);
        let goals = Goals { wanted: [Some(goal.into()), None], named: None };
        self.defragment(goals, Budget::UNLIMITED, Cached::Exchange);
        if let Some(pick) = freed {
            let freed = self.pick(pick, 1);
            self.free(&freed);
        }
        self.step(lost);
        self.prompt(tokens, 0, u32::MAX);
        if let Some(moves) = self.tickets.keys().next_back().copied() {
            self.end(moves);
        }
        self.prompt(tokens, 1, u32::MAX);
    }

    /// Number of runs of all sequences on the device.
    fn runs(&self) -> usize {
        let here = self.truth.keys().filter(|&&sequence| self.manager.tier(sequence) == Ok(Tier::Device));
        let rows =
            here.flat_map(|&s| (0..self.groups.len()).map(move |group| self.manager.table_of(s, group).unwrap()));
        let null = self.groups.iter().any(|group| leaves(*group));
        let blocks = |row: TableId| -> Vec<BlockId> {
            let table = self.manager.block_table(row).unwrap();
            table.iter().copied().filter(|block| !null || block.0 > 0).collect()
        };
        let tables: Vec<Vec<BlockId>> = rows.map(blocks).collect();
        runs(&tables.iter().map(Vec::as_slice).collect::<Vec<_>>()).0
    }

    fn defragment(&mut self, Goals { wanted, named }: Goals, budget: Budget, cached: Cached) {
        let wanted: Vec<Wanted> = wanted.into_iter().flatten().collect();
        let named = named.map(|(first, count)| self.pick(first, count));
        let away = named.iter().flatten().find(|&&sequence| self.manager.tier(sequence) != Ok(Tier::Device));
        if away.is_some() {
            let refused = self.manager.defragment(&wanted, named.as_deref(), budget, cached);
            return assert!(matches!(refused, Err(Error::WrongTier { wanted: Tier::Device, .. })), "{refused:?}");
        }
        let open = |world: &Self| {
            let decision = world.manager.clone().take_decision();
            decision.of(Kind::Move).map(|pairs| pairs.ids.len()).sum::<usize>()
        };
        let (before, free) = (open(self), self.manager.pool(Tier::Device).free());
        let tables: Vec<_> = self.truth.keys().map(|&s| self.blocks_of(s)).collect();
        let moves = self.manager.defragment(&wanted, named.as_deref(), budget, cached).unwrap();
        assert!(moves.planned <= budget.one_way() && (cached != Cached::Move || moves.dropped == 0));
        // Taking the decision drops blocks beyond quotas, and blocks that are copied to the host stay.
        let quotas = [0, 1].iter().any(|&tenant| self.manager.quota([tenant; 32]).is_some());
        let fewer = quotas || self.manager.keeps_host_copies();
        let (now, expected) = (open(self), before + moves.planned);
        assert!(now == expected || (fewer && now < expected), "{now} moves are decided, not {expected}");
        // Blocks beyond the end of a shrinking pool also count as not free.
        let short = self.manager.resize_progress().live > 0;
        let left = self.manager.pool(Tier::Device).free();
        assert!(left + moves.planned == free || (short && left <= free), "a target must no longer be free");
        let lies = self.manager.fragmentation().unwrap();
        assert!(lies.max_id.map_or(0, |top| top.index() + 1) + lies.holes >= self.manager.pool(Tier::Device).len());
        assert!(lies.tables <= lies.runs);
        assert!(lies.max_id.is_none_or(|top| top.index() < self.manager.resize_progress().extent));
        assert!(self.truth.keys().map(|&s| self.blocks_of(s)).eq(tables), "a table changed before the bytes moved");
    }
}
