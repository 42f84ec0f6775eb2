//! Plans against brute force on small pools, and the observer against bytes that really move.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

use blockyard_core::defrag::{BlockMap, Budget, Fresh, Goal, Observer, Occupancy, Plain, Plan, Planner, Wanted};
use blockyard_core::{BlockId, merge_runs};
use proptest::prelude::*;

fn places(states: &[u8]) -> BlockMap {
    let mut places = BlockMap::new(states.len());
    for (block, &state) in (0..).zip(states) {
        places.set(BlockId(block), [Occupancy::Hole, Occupancy::Live, Occupancy::Fixed][usize::from(state)]);
    }
    places
}

/// Carries the plan out on the places; every pair must be sound.
fn apply(places: &mut BlockMap, plan: &Plan) {
    places.check_pairs(&plan.pairs).unwrap();
    for &[from, to] in &plan.pairs {
        places.set(BlockId(from), Occupancy::Hole);
        places.set(BlockId(to), Occupancy::Live);
    }
}

fn states() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(prop_oneof![5 => Just(0u8), 5 => Just(1u8), 1 => Just(2u8)], 1..40)
}

proptest! {
    #[test]
    fn each_id_above_the_limit_takes_one_move(states in states(), n in 0u32..40, budget in 1usize..9) {
        let before = places(&states);
        let capacity = before.capacity();
        for (goal, end) in [
            (Goal::MaxId(n), (n + 1).min(capacity)),
            (Goal::FreeTail(n), capacity.saturating_sub(n)),
            (Goal::Dense(0), before.densest().map_or(0, |b| b.0 + 1)),
        ] {
            let (above, room) = (before.live().count(end..capacity), before.holes().count(0..end));
            let mut after = before.clone();
            let mut total = 0;
            loop {
                let plan = after.plan(goal, budget);
                prop_assert_eq!(plan.stuck, above.saturating_sub(room));
                prop_assert_eq!(total + plan.pairs.len() + plan.left, above.min(room));
                if plan.pairs.is_empty() { break; }
                total += plan.pairs.len();
                apply(&mut after, &plan);
            }
            prop_assert_eq!(total, above.min(room));
            prop_assert_eq!(after.excess(goal) == 0, above <= room);
            prop_assert!(matches!(goal, Goal::Dense(_)) <= (after.gap() == 0));
        }
    }

    #[test]
    fn a_plan_has_no_more_runs_than_rising_pairs_in_order(states in states(), n in 4u32..20) {
        let before = places(&states);
        let plan = before.plan(Goal::MaxId(n), usize::MAX);
        let mut sources: Vec<u32> = plan.pairs.iter().map(|p| p[0]).collect();
        sources.sort_unstable();
        let in_order: Vec<_> = sources.iter().zip(before.holes().iter()).map(|(&a, b)| [a, b.0]).collect();
        prop_assert!(merge_runs(&plan.pairs).count() <= merge_runs(&in_order).count());
    }
}

#[test]
fn hysteresis_waits_for_the_slack_and_then_finishes() {
    let mut states = [0u8; 64];
    states[8..12].fill(1);
    let mut planner = Planner::new(&[Wanted { goal: Goal::Dense(0), slack: 8 }]);
    let mut step = |places: &mut BlockMap| planner.plan(places, &[], &Plain, Budget::of_moves(1));
    assert_eq!(step(&mut places(&states)).pairs, [[11; 2]; 0]);
    states[13] = 1;
    let mut now = places(&states);
    let mut moves = 0;
    loop {
        let plan = step(&mut now);
        if plan.pairs.is_empty() {
            break;
        }
        moves += plan.pairs.len();
        apply(&mut now, &plan);
    }
    assert_eq!((moves, now.gap()), (5, 0));
}

/// The foreign allocator: which ids are referenced, and the bytes that each readable id must have.
struct World {
    observer: Observer,
    memory: Vec<u32>,
    refs: Vec<u32>,
    content: Vec<Option<u32>>,
    leases: Vec<(blockyard_core::defrag::LeaseId, Vec<(u32, u32)>)>,
    next: u32,
}

impl World {
    fn new(blocks: u32) -> Self {
        let size = blocks as usize;
        let observer = Observer::new(blocks, blocks).unwrap();
        Self {
            observer,
            memory: vec![0; size],
            refs: vec![0; size],
            content: vec![None; size],
            leases: Vec::new(),
            next: 1,
        }
    }

    fn write(&mut self, id: u32) {
        self.memory[self.observer.resolve(id) as usize] = self.next;
        self.content[id as usize] = Some(self.next);
        self.next += 1;
    }

    fn step(&mut self, op: u8, id: u32) {
        let i = id as usize;
        let is_held = self.leases.iter().any(|(_, blocks)| blocks.iter().any(|b| b.0 == self.observer.resolve(id)));
        match op {
            // A fresh id: its old bytes do not matter. A leased id is not allocated.
            0 | 1 if self.refs[i] == 0 && !is_held => {
                self.observer.use_fresh(&[id, id]).unwrap();
                self.observer.release_ids(&[id], Fresh::Yes).unwrap();
                self.refs[i] = 1;
                self.write(id);
            }
            // A hit, or one more reference.
            2 if !is_held => {
                self.observer.use_ids(&[id]).unwrap();
                self.refs[i] += 1;
                if self.content[i].is_none() {
                    self.write(id);
                }
            }
            3 | 4 if self.refs[i] > 0 => {
                let fresh = if op == 3 { Fresh::No } else { Fresh::Yes };
                self.observer.release_ids(&[id], fresh).unwrap();
                self.refs[i] -= 1;
                if self.refs[i] == 0 && fresh == Fresh::Yes {
                    self.content[i] = None;
                }
            }
            5 if self.refs[i] > 0 => {
                let lease = self.observer.lease(&[id, id]).unwrap();
                let block = self.observer.resolve(id);
                self.leases.push((lease, vec![(block, self.memory[block as usize])]));
            }
            6 if !self.leases.is_empty() => {
                let (lease, _) = self.leases.swap_remove(i % self.leases.len());
                self.observer.end_lease(lease).unwrap();
            }
            7 => self.defragment(id),
            _ => assert!(self.refs[i] > 0 || self.observer.release_ids(&[id], Fresh::No).is_err()),
        }
    }

    fn defragment(&mut self, id: u32) {
        let used: Vec<u32> = (1..24).rev().filter(|&id| self.refs[id as usize] > 0).collect();
        let goals = [Goal::Dense(0), Goal::MaxId(id), Goal::Contiguous(1)];
        let goals: Vec<Wanted> = (0..2 + id as usize % 2).map(|i| goals[(id as usize + i) % 3].into()).collect();
        let (first, second) = used.split_at(used.len() / 2);
        let sequences = [first.to_vec(), [&used[..used.len() / 4], second].concat()];
        let budget = Budget { moves: 1 + id as usize % 5, bytes: u64::from(id), block_bytes: 1 };
        let plan = self.observer.plan(&mut Planner::new(&goals), &sequences, second, budget).unwrap();
        assert!(plan.writes() <= id as usize && plan.drops().is_empty());
        for &[from, to] in plan.moves() {
            assert!(self.observer.is_blank(BlockId(to)));
            self.memory[to as usize] = std::mem::replace(&mut self.memory[from as usize], u32::MAX);
        }
        for &[from, to] in plan.exchanges() {
            self.memory.swap(from as usize, to as usize);
        }
        self.observer.commit(&plan.pairs).unwrap();
    }

    fn check(&self) {
        self.observer.check().expect("the observer is consistent");
        assert_eq!(self.observer.resolve(0), 0);
        let ids: Vec<u32> = (0..24).map(|block| self.observer.unresolve(block)).collect();
        let forward: Vec<u32> = ids.iter().map(|&id| self.observer.resolve(id)).collect();
        assert_eq!(forward, (0..24).collect::<Vec<u32>>(), "unresolve inverts resolve");
        for (id, content) in (0u32..).zip(&self.content) {
            let block = self.observer.resolve(id);
            assert_eq!(self.observer.refs(BlockId(block)), self.refs[id as usize]);
            if let Some(content) = content {
                assert_eq!(self.memory[block as usize], *content, "id {id} in block {block}");
            }
        }
        for &(block, held) in self.leases.iter().flat_map(|(_, blocks)| blocks) {
            assert_eq!(self.memory[block as usize], held, "leased block {block}");
        }
    }
}

proptest! {
    #[test]
    fn bytes_follow_their_ids(steps in prop::collection::vec((0u8..8, 1u32..24), 0..200)) {
        let mut world = World::new(24);
        for (op, id) in steps {
            world.step(op, id);
            world.check();
        }
    }
}

#[test]
fn ids_out_of_range_and_stale_plans_change_nothing() {
    let mut observer = Observer::new(1, 16).unwrap();
    observer.use_ids(&[3, 9]).unwrap();
    let before = format!("{observer:?}");
    assert!(observer.use_fresh(&[4, 16]).is_err());
    assert!(observer.release_ids(&[3, 9, 9], Fresh::Yes).is_err());
    assert!(observer.commit(&[[9, 4], [3, 4]]).is_err());
    assert!(observer.commit(&[[9, 3]]).is_err());
    assert!(observer.set_limit(9).is_err());
    assert_eq!(format!("{observer:?}"), before);
    let lease = observer.lease(&[9]).unwrap();
    assert!(observer.commit(&[[9, 1]]).is_err());
    observer.end_lease(lease).unwrap();
    assert!(observer.end_lease(lease).is_err());
    observer.commit(&[[9, 1]]).unwrap();
    assert_eq!((observer.resolve(9), observer.unresolve(9)), (1, 1));
}

#[test]
fn fresh_ids_take_the_lowest_blocks_longest_runs_first() {
    let mut observer = Observer::new(64, 64).unwrap();
    observer.forget_ids(&[1, 3, 4, 5, 7, 8]).unwrap();
    observer.use_fresh(&[40, 41, 42, 43, 44, 40, 3]).unwrap();
    let blocks: Vec<u32> = [40, 41, 42, 43, 44, 3].map(|id| observer.resolve(id)).to_vec();
    assert_eq!(blocks, [3, 4, 5, 7, 8, 1]);
    assert_eq!((observer.refs(BlockId(3)), observer.refs(BlockId(4))), (2, 1));
    observer.check().unwrap();
}
