//! Several goals at once, and sequences packed into few runs, against brute force on small pools.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

use blockyard_core::defrag::{BlockMap, Budget, Facts, Goal, HoleUse, Occupancy, Plain, Plan, Planner, Wanted, runs};
use blockyard_core::reuse::BlockSet;
use blockyard_core::{BlockId, merge_runs};
use proptest::prelude::*;
use std::cell::Cell;
use std::collections::HashMap;

fn places(states: &[u8]) -> BlockMap {
    let mut places = BlockMap::new(states.len());
    for (block, &state) in (0..).zip(states) {
        places.set(BlockId(block), [Occupancy::Hole, Occupancy::Live, Occupancy::Fixed][usize::from(state)]);
    }
    places
}

fn states_of(places: &BlockMap) -> Vec<Occupancy> {
    (0..places.capacity()).map(|block| places.get(BlockId(block))).collect()
}

type Tables = Vec<Vec<BlockId>>;

fn borrowed(tables: &Tables) -> Vec<&[BlockId]> {
    tables.iter().map(Vec::as_slice).collect()
}

/// Carries pairs out on places and tables; every pair must be sound.
fn apply(places: &mut BlockMap, tables: &mut Tables, pairs: &[[u32; 2]]) {
    places.check_pairs(pairs).unwrap();
    let moved: HashMap<u32, u32> = pairs.iter().map(|&[from, to]| (from, to)).collect();
    for &[from, to] in pairs {
        places.set(BlockId(from), Occupancy::Hole);
        places.set(BlockId(to), Occupancy::Live);
    }
    for block in tables.iter_mut().flatten() {
        block.0 = moved.get(&block.0).copied().unwrap_or(block.0);
    }
}

fn runs_of(tables: &Tables) -> usize {
    runs(&borrowed(tables)).0
}

/// A pool, and sequences in it: one in any order, and a second that shares its first blocks.
fn pools(most: usize) -> impl Strategy<Value = (Vec<u8>, Tables)> {
    let states = prop::collection::vec(prop_oneof![5 => Just(0u8), 5 => Just(1u8), 1 => Just(2u8)], 1..most);
    let pool = states.prop_flat_map(|states| {
        let used: Vec<u32> = (0..).zip(&states).filter(|(_, state)| **state > 0).map(|(block, _)| block).collect();
        let shuffled = Just(used).prop_shuffle();
        (Just(states), shuffled, 0usize..8, 0usize..8, 0usize..8)
    });
    pool.prop_map(|(states, used, a, b, shared)| {
        let used: Vec<BlockId> = used.into_iter().map(BlockId).collect();
        let a = a.min(used.len());
        let b = b.min(used.len() - a);
        let first = used[..a].to_vec();
        let second = [&first[..shared.min(a)], &used[a..a + b]].concat();
        (states, vec![first, second])
    })
}

/// The fewest runs that one plan can achieve, and the fewest moves for that, by trying every placement of every block.
fn best(states: &[u8], tables: &Tables) -> (usize, usize) {
    let mut blocks: Vec<u32> = tables.iter().flatten().map(|block| block.0).collect();
    blocks.sort_unstable();
    blocks.dedup();
    blocks.retain(|&block| states[block as usize] == 1);
    let holes: Vec<u32> = (0..).zip(states).filter(|(_, state)| **state == 0).map(|(block, _)| block).collect();
    let mut best = (runs_of(tables), 0);
    try_all(&blocks, &holes, tables, 0, &mut best);
    best
}

fn try_all(blocks: &[u32], holes: &[u32], tables: &Tables, moves: usize, best: &mut (usize, usize)) {
    let Some((&block, rest)) = blocks.split_first() else {
        *best = (*best).min((runs_of(tables), moves));
        return;
    };
    try_all(rest, holes, tables, moves, best);
    for (i, &hole) in holes.iter().enumerate() {
        let mut left = holes.to_vec();
        left.remove(i);
        // No block moves to another's former place, so that blocks are not confused.
        let place = |b: &BlockId| if b.0 == block { BlockId(hole) } else { *b };
        let after = tables.iter().map(|table| table.iter().map(place).collect()).collect();
        try_all(rest, &left, &after, moves + 1, best);
    }
}

fn contiguous(places: &mut BlockMap, tables: &Tables, budget: Budget) -> Plan {
    let before = states_of(places);
    let plan = places.plan_all(&[Goal::Contiguous(1)], &borrowed(tables), &Plain, budget);
    assert_eq!(states_of(places), before, "planning changes nothing");
    plan
}

fn longest_hole(states: &[u8]) -> usize {
    states.split(|&state| state > 0).map(<[u8]>::len).max().unwrap_or(0)
}

proptest! {
    #[test]
    fn sequences_end_up_in_fewer_runs((states, tables) in pools(40)) {
        let (mut now, mut after) = (places(&states), tables.clone());
        let before = runs_of(&tables);
        let plan = contiguous(&mut now, &tables, Budget::UNLIMITED);
        apply(&mut now, &mut after, &plan.pairs);
        prop_assert!(runs_of(&after) <= before);
        prop_assert_eq!(runs_of(&after) == before, plan.pairs.is_empty());
    }

    #[test]
    fn each_run_of_moves_pays((states, tables) in pools(40)) {
        let first = vec![tables[0].clone()];
        let (mut now, mut after) = (places(&states), first.clone());
        let plan = contiguous(&mut now, &first, Budget::UNLIMITED);
        apply(&mut now, &mut after, &plan.pairs);
        for run in merge_runs(&plan.pairs) {
            let is_other = |[from, _]: &[u32; 2]| !(run.src..run.src + run.len).contains(from);
            let without: Vec<_> = plan.pairs.iter().copied().filter(is_other).collect();
            let (mut less, mut tables) = (places(&states), first.clone());
            apply(&mut less, &mut tables, &without);
            prop_assert!(runs_of(&tables) > runs_of(&after), "{:?} does not reduce the number of runs", run);
        }
    }

    #[test]
    fn one_sequence_ends_up_in_the_fewest_runs_by_the_fewest_moves((states, tables) in pools(10)) {
        let first = vec![tables[0].clone()];
        let (fewest, moves) = best(&states, &first);
        let (mut now, mut after) = (places(&states), first.clone());
        let plan = contiguous(&mut now, &first, Budget::UNLIMITED);
        apply(&mut now, &mut after, &plan.pairs);
        prop_assert!(runs_of(&after) >= fewest);
        // The plan must be optimal if a run of holes takes the whole sequence, or it fits in one run around immovable
        // blocks.
        let movable = first[0].iter().all(|block| states[block.index()] == 1);
        if (movable && longest_hole(&states) >= first[0].len()) || fewest <= 1 {
            prop_assert_eq!((runs_of(&after), plan.pairs.len()), (fewest, moves));
        }
    }

    #[test]
    fn two_sequences_that_share_blocks_never_do_better_than_is_possible((states, tables) in pools(12)) {
        let (fewest, _) = best(&states, &tables);
        let (mut now, mut after) = (places(&states), tables.clone());
        let plan = contiguous(&mut now, &tables, Budget::UNLIMITED);
        apply(&mut now, &mut after, &plan.pairs);
        prop_assert!(runs_of(&after) >= fewest);
    }

    #[test]
    fn a_budget_of_moves_or_bytes_is_kept_and_the_steps_end(
        (states, tables) in pools(40), moves in 1usize..12, writes in 1u64..12,
    ) {
        let (mut now, mut tables) = (places(&states), tables);
        let budget = Budget { moves, bytes: writes * 4096 + 4095, block_bytes: 4096 };
        loop {
            let before = runs_of(&tables);
            let plan = contiguous(&mut now, &tables, budget);
            prop_assert!(plan.pairs.len() <= moves && plan.writes() as u64 <= writes);
            if plan.pairs.is_empty() {
                break;
            }
            apply(&mut now, &mut tables, &plan.pairs);
            prop_assert!(runs_of(&tables) < before);
        }
    }
}

/// Facts by block, drawn at random.
#[derive(Debug)]
struct Drawn(Vec<u8>);

impl Drawn {
    fn of(&self, block: BlockId) -> u8 {
        self.0[block.index() % self.0.len()]
    }
}

impl Facts for Drawn {
    fn hole_use(&self, hole: BlockId) -> HoleUse {
        [HoleUse::Move, HoleUse::Drop, HoleUse::Exchange, HoleUse::Never][usize::from(self.of(hole) % 4)]
    }

    fn is_hot(&self, live: BlockId) -> bool {
        self.of(live) & 0x4 > 0
    }

    fn may_leave(&self, live: BlockId) -> bool {
        self.of(live) & 0x18 > 0
    }
}

fn goals() -> impl Strategy<Value = Goal> {
    prop_oneof![
        (0u32..40).prop_map(Goal::MaxId),
        (0u32..40).prop_map(Goal::FreeTail),
        (0u32..4).prop_map(Goal::Dense),
        (1u32..3).prop_map(Goal::Contiguous),
    ]
}

fn excess(places: &BlockMap, tables: &Tables, goal: Goal) -> u32 {
    match goal {
        Goal::Contiguous(wanted) => u32::try_from(runs(&borrowed(tables)).1).unwrap().saturating_sub(wanted),
        _ => places.excess(goal),
    }
}

proptest! {
    #[test]
    fn a_later_goal_undoes_nothing_of_an_earlier_one(
        (states, tables) in pools(40), goals in prop::collection::vec(goals(), 1..4), moves in 1usize..50,
        facts in prop::collection::vec(0u8..32, 1..50), is_plain in any::<bool>(),
    ) {
        let facts = if is_plain { Drawn(vec![8]) } else { Drawn(facts) };
        let (mut now, mut tables) = (places(&states), tables);
        for _ in 0..200 {
            let of = |goals: &[Goal], now: &mut BlockMap| now.plan_all(goals, &borrowed(&tables), &facts, Budget::of_moves(moves));
            let plan = of(&goals, &mut now);
            for count in 1..goals.len() {
                // Alone, the earlier goals have the same moves, and the moves of later goals do not make them missed by
                // more.
                let earlier = of(&goals[..count], &mut now);
                prop_assert!(earlier.pairs.iter().all(|pair| plan.pairs.contains(pair)));
                let (mut alone, mut of_alone) = (now.clone(), tables.clone());
                let (mut all, mut of_all) = (now.clone(), tables.clone());
                apply(&mut alone, &mut of_alone, &earlier.pairs);
                apply(&mut all, &mut of_all, &plan.pairs);
                for &goal in &goals[..count] {
                    prop_assert!(excess(&all, &of_all, goal) <= excess(&alone, &of_alone, goal), "{:?} of {:?}", goal, goals);
                }
            }
            prop_assert!(plan.pairs.len() <= moves);
            if plan.pairs.is_empty() {
                return Ok(());
            }
            apply(&mut now, &mut tables, &plan.pairs);
        }
        prop_assert!(false, "{:?} never end", goals);
    }

    #[test]
    fn the_owners_facts_are_respected(
        states in prop::collection::vec(0u8..3, 1..60), facts in prop::collection::vec(0u8..32, 1..70), goal in goals(),
        moves in 0usize..20, writes in 0u64..20,
    ) {
        let (facts, mut places) = (Drawn(facts), places(&states));
        let live: Vec<BlockId> = places.live().iter().collect();
        let budget = Budget { moves, bytes: writes, block_bytes: 1 };
        let plan = places.plan_all(&[goal], &[&live], &facts, budget);
        prop_assert!(places.check_pairs(&plan.pairs).is_ok());
        prop_assert!(plan.pairs.len() <= moves && plan.writes() as u64 <= writes);
        let lists = [(plan.moves(), HoleUse::Move), (plan.drops(), HoleUse::Drop), (plan.exchanges(), HoleUse::Exchange)];
        for (pairs, hole_use) in lists {
            for &[from, to] in pairs {
                prop_assert!(facts.may_leave(BlockId(from)));
                prop_assert_eq!(facts.hole_use(BlockId(to)), hole_use);
            }
        }
        prop_assert_eq!(lists.map(|(pairs, _)| pairs).concat(), plan.pairs);
    }

    #[test]
    fn blocks_of_running_sequences_move_last(
        states in prop::collection::vec(0u8..3, 1..60), facts in prop::collection::vec(8u8..16, 1..70), moves in 0usize..20,
    ) {
        let (facts, mut places) = (Drawn(facts.iter().map(|fact| fact & 0xc).collect()), places(&states));
        for goal in [Goal::Dense(0), Goal::MaxId(9)] {
            let all = places.plan_all(&[goal], &[], &facts, Budget::UNLIMITED).pairs;
            let cut = places.plan_all(&[goal], &[], &facts, Budget::of_moves(moves)).pairs;
            let hot = |pairs: &[[u32; 2]]| pairs.iter().filter(|[from, _]| facts.is_hot(BlockId(*from))).count();
            prop_assert_eq!(cut.len(), all.len().min(moves));
            prop_assert_eq!(hot(&cut), cut.len().saturating_sub(all.len() - hot(&all)));
        }
    }

}

/// The holes of `content` are the blocks with content. With `keep`, it moves on to other holes.
struct Cached {
    content: BlockMap,
    keep: bool,
}

impl Facts for Cached {
    fn hole_use(&self, hole: BlockId) -> HoleUse {
        match (self.content.holes().contains(hole), self.keep) {
            (false, _) => HoleUse::Move,
            (true, true) => HoleUse::Exchange,
            (true, false) => HoleUse::Drop,
        }
    }

    fn content(&self) -> Option<&BlockSet> {
        Some(self.content.holes())
    }
}

proptest! {
    #[test]
    fn content_makes_way_and_is_kept_if_wanted_and_if_there_is_room(
        states in prop::collection::vec(prop_oneof![2 => Just(0u8), 3 => Just(1u8), 1 => Just(2u8), 3 => Just(3u8)], 1..60),
        goal in goals(), keep in any::<bool>(), moves in prop_oneof![0usize..9, Just(1000)],
    ) {
        let content = places(&states.iter().map(|&state| u8::from(state != 3)).collect::<Vec<_>>());
        let mut places = places(&states.iter().map(|state| state % 3).collect::<Vec<_>>());
        let live: Vec<BlockId> = places.live().iter().collect();
        let facts = Cached { content, keep };
        let budget = Budget { moves: usize::MAX, bytes: moves as u64, block_bytes: 1 };
        let plan = places.plan_all(&[goal], &[&live], &facts, budget);
        prop_assert!(plan.pairs.len() + plan.onward.len() <= moves);
        prop_assert_eq!(plan.exchanges().len(), plan.onward.len());
        // What every block holds afterwards: nothing, a live or fixed block, or content; and where that came from.
        let mut now: Vec<(u8, usize)> = states.iter().copied().zip(0..).collect();
        let all: Vec<[u32; 2]> = plan.pairs.iter().chain(&plan.onward).copied().collect();
        for &[from, to] in &all {
            let entered = plan.onward.iter().any(|[from, _]| *from == to) || plan.drops().iter().any(|[_, drop]| *drop == to);
            prop_assert_eq!(states[to as usize], if entered { 3 } else { 0 });
            prop_assert!([1, 3].contains(&states[from as usize]));
        }
        let before = now.clone();
        for [from, _] in &all {
            now[*from as usize] = (0, 0);
        }
        for &[from, to] in &all {
            now[to as usize] = before[from as usize];
        }
        for &block in &plan.clear {
            prop_assert_eq!(now[block as usize].0, 3);
            now[block as usize] = (0, 0);
        }
        let count = |state: u8, of: &[(u8, usize)]| of.iter().filter(|(found, _)| *found == state).count();
        let (held, kept) = (count(3, &before), count(3, &now));
        prop_assert_eq!((count(1, &now), count(2, &now)), (live.len(), count(2, &before)));
        prop_assert_eq!(held - kept, plan.drops().len() + plan.clear.len());
        let end = match goal {
            Goal::MaxId(n) => n as usize + 1,
            Goal::FreeTail(n) => states.len().saturating_sub(n as usize),
            _ => states.len(),
        };
        let above = now.iter().skip(end).filter(|(state, _)| [1, 3].contains(state)).count();
        if moves == 1000 {
            prop_assert!(above == plan.stuck, "{above} in the way, {}", plan.stuck);
        }
        if keep && held > kept {
            let blank = |block: usize| states[block] == 0 && now[block].0 == 0;
            prop_assert!(!(0..end.min(states.len())).any(blank), "content was dropped although a hole is left");
        }
    }
}

#[test]
fn content_in_the_way_of_many_moves_finds_every_hole() {
    // Blank holes, then cached ones: equal numbers, plus one.
    let mut places = BlockMap::new(10_001);
    let mut content = places.clone();
    content.set_run(0..5_000, Occupancy::Live);
    places.set_run(0..1, Occupancy::Live);
    let facts = Cached { content, keep: true };
    let plan = places.plan_all(&[Goal::MaxId(4_999)], &[], &facts, Budget::UNLIMITED);
    assert_eq!((plan.pairs.len(), plan.clear), (4_999, vec![5_001, 5_000]));
    let plan = places.plan_all(&[Goal::Dense(0)], &[], &facts, Budget::UNLIMITED);
    assert!(plan.pairs.is_empty() && plan.clear.is_empty());
}

/// Counts how many blocks a plan asks about.
#[derive(Default)]
struct Counted(Cell<usize>);

impl Counted {
    fn count(&self) {
        self.0.set(self.0.get() + 1);
    }
}

impl Facts for Counted {
    fn hole_use(&self, _hole: BlockId) -> HoleUse {
        self.count();
        HoleUse::Exchange
    }

    fn is_hot(&self, _live: BlockId) -> bool {
        self.count();
        false
    }
}

#[test]
fn a_plan_of_few_moves_examines_few_blocks_of_a_large_pool() {
    for goal in [Goal::Dense(0), Goal::MaxId(1_000_000), Goal::Contiguous(1)] {
        let mut places = BlockMap::new(1_048_576);
        places.set(BlockId(0), Occupancy::Fixed);
        // All blocks are in use, except for the last ones, which include four strays.
        places.set_run(1..900_000, Occupancy::Live);
        for stray in [1_048_001, 1_048_100, 1_048_200, 1_048_300] {
            places.set(BlockId(stray), Occupancy::Live);
        }
        let table = [1_048_001, 1_048_100, 1_048_200, 1_048_300].map(BlockId);
        let facts = Counted::default();
        let plan = places.plan_all(&[goal], &[&table], &facts, Budget::UNLIMITED);
        assert!((3..=4).contains(&plan.pairs.len()), "{goal:?}");
        assert!(facts.0.get() < 5000, "{goal:?} looked at {} blocks", facts.0.get());
    }
}

#[test]
fn each_goal_has_its_own_slack() {
    let mut states = [0u8; 64];
    states[8..12].fill(1);
    let goals = [Wanted { goal: Goal::FreeTail(52), slack: 0 }, Wanted { goal: Goal::Dense(0), slack: 8 }];
    let mut planner = Planner::new(&goals);
    let mut now = places(&states);
    assert!(planner.plan(&mut now, &[], &Plain, Budget::UNLIMITED).pairs.is_empty());
    states[12] = 1;
    // Block 12 is in the tail, and at most 8 ids too high: only the first goal moves blocks.
    let plan = planner.plan(&mut places(&states), &[], &Plain, Budget::of_moves(3));
    assert_eq!((plan.pairs.len(), plan.left), (1, 0));
    states.swap(12, 13);
    let mut now = places(&states);
    let plan = planner.plan(&mut now, &[], &Plain, Budget::of_moves(3));
    assert_eq!((plan.pairs.len(), plan.left), (3, 2));
    assert_eq!(planner.wanted().count(), 2);
    let mut planner = Planner::new(&[Wanted { goal: Goal::Dense(0), slack: 8 }]);
    let mut moves = 0;
    loop {
        let plan = planner.plan(&mut now, &[], &Plain, Budget::of_moves(1));
        if plan.pairs.is_empty() {
            break;
        }
        moves += plan.pairs.len();
        apply(&mut now, &mut Vec::new(), &plan.pairs);
    }
    assert_eq!((moves, now.gap()), (5, 0));
}

#[test]
fn leased_blocks_are_worked_around_and_forks_stay_whole() {
    let mut states = [0u8; 40];
    states[9] = 2;
    for block in [20, 4, 30, 21] {
        states[block] = 1;
    }
    let mut now = places(&states);
    let mut tables = vec![[20, 9, 4, 30].map(BlockId).to_vec()];
    let plan = contiguous(&mut now, &tables, Budget::UNLIMITED);
    apply(&mut now, &mut tables, &plan.pairs);
    assert_eq!(tables[0], [8, 9, 10, 11].map(BlockId));
    // A fork continues in place after block 20: the blocks of the other sequence move there, or not at all.
    let (mut now, mut tables) =
        (places(&states), vec![[4, 20].map(BlockId).to_vec(), [4, 20, 21].map(BlockId).to_vec()]);
    let plan = contiguous(&mut now, &tables, Budget::UNLIMITED);
    apply(&mut now, &mut tables, &plan.pairs);
    assert_eq!((plan.pairs, runs_of(&tables)), (vec![[4, 19]], 1));
}

#[test]
fn a_sequence_that_already_has_few_runs_does_not_delay_others() {
    struct Stays;
    impl Facts for Stays {
        fn may_leave(&self, _live: BlockId) -> bool {
            false
        }
    }
    let mut places = places(&[1, 1, 0, 0, 1, 0, 0, 0]);
    let tables: Tables = vec![[0, 1, 4].map(BlockId).to_vec()];
    let mut plan = |runs| places.plan_all(&[Goal::Contiguous(runs)], &borrowed(&tables), &Stays, Budget::UNLIMITED);
    assert_eq!((plan(1).held, plan(2).held), (3, 0));
}
