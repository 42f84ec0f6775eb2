//! The protocol by which processes share a store's epoch, searched exhaustively.
//!
//! The actions are those of `python/blockyard/stores/threaded/epochs.py` and `store.py`:
//!
//! | action here | there |
//! |---|---|
//! | `Submit` | `submit_put`: the put has the epoch of its submission |
//! | `Land` | `_carry_out_under_epoch` of a put, with what is known or after `SharedEpoch.confirm` |
//! | `Read`, `Take` | `_get`: blocks under the known epoch, then `SharedEpoch.counts` of the record |
//! | `Stop` | `SharedEpoch.stop`, the first half of `forget` |
//! | `Begin` | `SharedEpoch.begin`; its fault is a request or an answer that is lost |
//! | `Crash` | the process is killed; another one opens the store with the namespace's weights |
//! | `Lose` | the storage loses the record |
//!
//! A read of the record and the replacement that depends on it are one action: the storage refuses a replacement whose
//! read is out of date.
//!
//! Worlds that differ only in numbers of tokens, names of keys or the order of processes are searched once. A block is
//! either old, computed before the last `forget`, or young: no action needs more detail.
//!
//! The protocol of the first release, with epochs by the processes' clocks, is a variant that must fail.

use stateright::{Checker, Model, Property};
use std::collections::{BTreeMap, BTreeSet};

/// Weights before any `forget`.
const FIRST: u8 = 0;
/// A time in the old protocol, on a clock that is ahead.
const AHEAD: u8 = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Epoch {
    token: u8,
    /// In the old protocol, the time at which it began.
    weights: u8,
    /// 0 for the revision of the namespace, 1 for the one that `forget` names.
    name: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Value {
    key: u8,
    /// The name of the weights that computed it.
    weights: u8,
    /// Whether an epoch has been begun since.
    is_old: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Put {
    value: Value,
    is_void: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Get {
    epoch: Epoch,
    /// Why a hit would be wrong. This is decided when the read is submitted: later events do not make a hit wrong.
    wrong: Option<&'static str>,
    is_shared: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Process {
    /// Name of the weights that it has loaded.
    name: u8,
    mine: Option<Epoch>,
    is_due: bool,
    joins: bool,
    is_behind: bool,
    put: Option<Put>,
    get: Option<Get>,
    forgets: u8,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct World {
    record: Option<Epoch>,
    blocks: BTreeSet<(u8, Value)>,
    processes: Vec<Process>,
    faults: u8,
    /// A wrong result that was found.
    wrong: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Fault {
    None,
    RequestLost,
    AnswerLost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Action {
    Submit { who: usize, key: u8 },
    Land { who: usize, asks: bool },
    Read { who: usize, key: u8 },
    Take { who: usize },
    Stop { who: usize, names: bool },
    Begin { who: usize, fault: Fault },
    Crash { who: usize },
    Lose,
}

/// Bounds of the search.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    processes: usize,
    keys: u8,
    /// Calls of `forget` by each process.
    forgets: u8,
    /// Total number of lost requests and answers, crashes and lost records.
    faults: u8,
    /// Whether the record may be lost; a `forget` may be lost with it.
    record_is_lost: bool,
    by_clocks: bool,
}

const BOUNDS: Bounds = Bounds { processes: 2, keys: 1, forgets: 1, faults: 1, record_is_lost: false, by_clocks: false };

impl World {
    fn fresh(&self, weights: u8, name: u8) -> Epoch {
        Epoch { token: self.fresh_number(), weights, name }
    }

    /// A number that no token or weights have.
    fn fresh_number(&self) -> u8 {
        let epochs = self.record.iter().chain(self.processes.iter().filter_map(|process| process.mine.as_ref()));
        let gets = self.processes.iter().filter_map(|process| process.get.as_ref()).map(|get| &get.epoch);
        let used = epochs.chain(gets).flat_map(|epoch| [epoch.token, epoch.weights]);
        used.chain(self.blocks.iter().map(|block| block.0)).max().unwrap_or(FIRST) + 1
    }

    /// `Epoch.opened`, `Epoch.continued` and the rest of `SharedEpoch.confirm`; None for a `ForgottenError`.
    fn confirm(&mut self, who: usize) -> Option<Epoch> {
        let process = &self.processes[who];
        if process.is_due {
            return None;
        }
        let epoch = match (process.mine, self.record) {
            (None, None) => Some(self.fresh(FIRST, process.name)),
            (None, Some(stored)) => (stored.name == process.name).then_some(stored),
            (Some(mine), None) => Some(self.fresh(mine.weights, mine.name)),
            (Some(mine), Some(stored)) => {
                ((stored.weights, stored.name) == (mine.weights, mine.name)).then_some(stored)
            }
        };
        let process = &mut self.processes[who];
        process.is_behind = epoch.is_none();
        if let Some(epoch) = epoch {
            self.record = Some(epoch);
            if process.mine.is_none() && epoch.weights != FIRST {
                process.void_put();
            }
            process.mine = Some(epoch);
        }
        epoch
    }

    /// `SharedEpoch.begin`, without lost requests or answers.
    fn begun(&self, who: usize) -> Epoch {
        let Process { name, joins, .. } = self.processes[who];
        let fresh = self.fresh(self.fresh_number() + 1, name);
        self.record.filter(|stored| joins && stored.name == name).unwrap_or(fresh)
    }

    /// The old `_share_epoch`: the greatest time wins.
    fn share_by_clocks(&mut self, who: usize) -> Epoch {
        let now = if who == 0 { AHEAD } else { 1 };
        let fresh = self.fresh(now, 0);
        let mine = self.processes[who].mine.max_by_time(self.record).unwrap_or(fresh);
        self.record = Some(mine);
        self.processes[who].mine = Some(mine);
        mine
    }

    fn known(&mut self, who: usize, asks: bool, bounds: Bounds) -> Option<Epoch> {
        let process = &self.processes[who];
        match process.mine.filter(|_| !asks && !process.is_behind && !process.is_due) {
            Some(mine) => Some(mine),
            None if bounds.by_clocks => Some(self.share_by_clocks(who)),
            None => self.confirm(who),
        }
    }

    fn read(&mut self, who: usize, key: u8, bounds: Bounds) {
        let Some(epoch) = self.known(who, false, bounds) else { return };
        let name = self.processes[who].name;
        // The oldest block is the worst case.
        let found = self.blocks.iter().filter(|(token, value)| *token == epoch.token && value.key == key);
        let found = found.map(|block| block.1).min_by_key(|value| (value.weights == name, !value.is_old));
        self.processes[who].get = found.map(|found| {
            let is_forgotten = found.is_old && !bounds.record_is_lost;
            let wrong = if found.weights == name {
                is_forgotten.then_some("a block that was computed before a forget")
            } else {
                Some("a block of other weights")
            };
            Get { epoch, wrong, is_shared: found.weights == 1 }
        });
    }

    fn take(&mut self, who: usize, bounds: Bounds) {
        let Some(get) = self.processes[who].get.take() else { return };
        if self.counts(&get, bounds) {
            self.wrong = get.wrong;
        } else {
            self.confirm(who);
        }
    }

    /// `SharedEpoch.counts`.
    fn counts(&self, get: &Get, bounds: Bounds) -> bool {
        bounds.by_clocks || self.record.is_some_and(|stored| stored.token == get.epoch.token)
    }

    fn has_hit(&self, bounds: Bounds, wanted: fn(&Get) -> bool) -> bool {
        self.processes
            .iter()
            .filter_map(|process| process.get.as_ref())
            .any(|get| wanted(get) && self.counts(get, bounds))
    }

    /// Marks everything computed so far as old.
    fn age(&mut self) {
        self.blocks =
            std::mem::take(&mut self.blocks).into_iter().map(|(token, value)| (token, value.aged())).collect();
        for put in self.processes.iter_mut().filter_map(|process| process.put.as_mut()) {
            put.value = put.value.aged();
        }
    }

    /// Picks one of the worlds that differ only in the names of their keys.
    fn representative(self, bounds: Bounds) -> Self {
        if bounds.keys < 2 {
            return self.normalized(bounds.by_clocks);
        }
        let mut swapped = self.clone();
        swapped.blocks = self.blocks.iter().map(|&(token, value)| (token, value.renamed())).collect();
        for put in swapped.processes.iter_mut().filter_map(|process| process.put.as_mut()) {
            put.value = put.value.renamed();
        }
        self.normalized(bounds.by_clocks).min(swapped.normalized(bounds.by_clocks))
    }

    /// Numbers tokens and weights in the order in which the world has them, and orders processes that are alike.
    fn normalized(mut self, by_clocks: bool) -> Self {
        for put in self.processes.iter_mut().filter_map(|process| process.put.as_mut()).filter(|put| put.is_void) {
            put.value = Value { key: 0, weights: 0, is_old: true };
        }
        if !by_clocks {
            let record = self.record;
            self.processes.sort_by_key(|process| (process.without_numbers(record), process.clone()));
        }
        let mut numbers = BTreeMap::from([(FIRST, FIRST)]);
        let mut number = |old: &mut u8| {
            let next = numbers.values().copied().fold(FIRST, u8::max) + 1;
            *old = *numbers.entry(*old).or_insert(next);
        };
        let processes = self.processes.iter_mut();
        let mine =
            processes.flat_map(|process| process.mine.iter_mut().chain(process.get.as_mut().map(|get| &mut get.epoch)));
        for epoch in self.record.iter_mut().chain(mine) {
            number(&mut epoch.token);
            if !by_clocks {
                number(&mut epoch.weights);
            }
        }
        // Blocks under tokens that no process has cannot be found.
        let known = |(token, value): &(u8, Value)| numbers.get(token).map(|&token| (token, *value));
        self.blocks = self.blocks.iter().filter_map(known).collect();
        // A read finds the old block first, so a young one of the same key and weights changes nothing.
        let blocks = std::mem::take(&mut self.blocks);
        let is_least = |(token, value): &(u8, Value)| {
            value.is_old || !blocks.contains(&(*token, Value { is_old: true, ..*value }))
        };
        self.blocks = blocks.iter().filter(|block| is_least(block)).copied().collect();
        self
    }
}

impl Value {
    fn aged(self) -> Self {
        Self { is_old: true, ..self }
    }

    fn renamed(self) -> Self {
        Self { key: 1 - self.key, ..self }
    }
}

impl Process {
    /// The part that does not depend on the numbers of tokens and weights. Sorting by it finds more equal worlds.
    fn without_numbers(&self, record: Option<Epoch>) -> impl Ord + use<> {
        let seen = |epoch: Epoch| {
            let of_record = record.map(|stored| (stored.token == epoch.token, stored.weights == epoch.weights));
            (epoch.name, epoch.weights == FIRST, of_record)
        };
        let get = self.get.as_ref().map(|get| (seen(get.epoch), get.wrong, get.is_shared));
        let flags = [self.is_due, self.joins, self.is_behind];
        (self.name, self.forgets, flags, self.mine.map(seen), self.put, get)
    }

    fn void_put(&mut self) {
        if let Some(put) = &mut self.put {
            put.is_void = true;
        }
    }
}

trait ByTime {
    fn max_by_time(self, other: Self) -> Self;
}

impl ByTime for Option<Epoch> {
    fn max_by_time(self, other: Self) -> Self {
        if self.map(|epoch| epoch.weights) >= other.map(|epoch| epoch.weights) { self } else { other }
    }
}

impl Model for Bounds {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World { processes: vec![Process::default(); self.processes], ..World::default() }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        if world.wrong.is_some() {
            return;
        }
        let may_fail = world.faults < self.faults;
        // Reads change nothing that others see, so one at a time suffices.
        let reads = world.processes.iter().any(|process| process.get.is_some());
        for (who, process) in world.processes.iter().enumerate() {
            for key in 0..self.keys {
                if process.put.is_none() {
                    actions.push(Action::Submit { who, key });
                }
                if !reads {
                    actions.push(Action::Read { who, key });
                }
            }
            if process.put.is_some() {
                actions.extend([Action::Land { who, asks: false }, Action::Land { who, asks: true }]);
            }
            if process.get.is_some() {
                actions.push(Action::Take { who });
            }
            if process.forgets < self.forgets {
                actions.extend([Action::Stop { who, names: false }, Action::Stop { who, names: true }]);
            }
            if process.is_due {
                actions.push(Action::Begin { who, fault: Fault::None });
                if may_fail && !self.by_clocks {
                    actions.push(Action::Begin { who, fault: Fault::RequestLost });
                    actions.push(Action::Begin { who, fault: Fault::AnswerLost });
                }
            }
            if may_fail {
                actions.push(Action::Crash { who });
            }
        }
        if may_fail && self.record_is_lost && world.record.is_some() {
            actions.push(Action::Lose);
        }
    }

    fn next_state(&self, last: &World, action: Action) -> Option<World> {
        let mut world = last.clone();
        match action {
            Action::Submit { who, key } => {
                let value = Value { key, weights: world.processes[who].name, is_old: false };
                world.processes[who].put = Some(Put { value, is_void: false });
            }
            Action::Land { who, asks } => {
                let epoch = world.known(who, asks, *self);
                if let (Some(put), Some(epoch)) = (world.processes[who].put.take(), epoch)
                    && !put.is_void
                {
                    world.blocks.insert((epoch.token, put.value));
                }
            }
            Action::Read { who, key } => world.read(who, key, *self),
            Action::Take { who } => world.take(who, *self),
            Action::Stop { who, names } => {
                let fresh_time =
                    world.processes[who].mine.map_or(if who == 0 { AHEAD } else { 1 }, |mine| mine.weights + 1);
                let fresh = world.fresh(fresh_time, 0);
                let process = &mut world.processes[who];
                process.forgets += 1;
                process.void_put();
                process.get = None;
                (process.is_due, process.is_behind, process.joins) = (true, false, names);
                process.mine = self.by_clocks.then_some(fresh);
                process.name = if names { 1 } else { process.name };
            }
            Action::Begin { who, fault } => {
                world.faults += u8::from(fault != Fault::None);
                let epoch = if self.by_clocks { world.share_by_clocks(who) } else { world.begun(who) };
                let has_begun = self.by_clocks || Some(epoch) != world.record;
                if fault != Fault::RequestLost {
                    world.record = Some(epoch);
                }
                if fault == Fault::None {
                    if has_begun {
                        world.age();
                    }
                    let process = &mut world.processes[who];
                    process.void_put();
                    (process.mine, process.is_due) = (Some(epoch), false);
                }
            }
            Action::Crash { who } => {
                world.faults += 1;
                world.processes[who] = Process { forgets: world.processes[who].forgets, ..Process::default() };
            }
            Action::Lose => {
                world.faults += 1;
                world.record = None;
            }
        }
        let world = world.representative(*self);
        (world != *last).then_some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("no wrong hit", |_, world: &World| world.wrong.is_none()),
            Property::sometimes("a hit", |bounds: &Self, world: &World| world.has_hit(*bounds, |_| true)),
            Property::sometimes("a hit under the revision that forget named", |bounds: &Self, world: &World| {
                world.has_hit(*bounds, |get| get.is_shared)
            }),
        ]
    }
}

/// Searches everything; returns the number of states.
fn search(bounds: Bounds) -> usize {
    let checker =
        bounds.checker().threads(std::thread::available_parallelism().map_or(1, Into::into)).spawn_bfs().join();
    println!("{bounds:?}: {} states, {} steps deep", checker.unique_state_count(), checker.max_depth());
    checker.assert_properties();
    checker.unique_state_count()
}

#[test]
fn no_order_of_steps_of_two_processes_finds_a_wrong_block() {
    assert!(search(BOUNDS) > 4_000);
}

#[test]
fn no_order_finds_a_block_of_other_weights_where_the_record_may_be_lost() {
    assert!(search(Bounds { record_is_lost: true, ..BOUNDS }) > 4_000);
}

#[test]
#[ignore = "takes minutes: `make test-all`"]
fn no_order_of_steps_of_three_processes_finds_a_wrong_block() {
    assert!(search(Bounds { processes: 3, keys: 2, ..BOUNDS }) > 1_000_000);
}

#[test]
#[ignore = "takes minutes: `make test-all`"]
fn no_order_finds_a_wrong_block_where_each_process_forgets_twice() {
    assert!(search(Bounds { forgets: 2, faults: 2, ..BOUNDS }) > 50_000);
}

#[test]
fn epochs_by_clocks_are_found_wrong() {
    let checker = Bounds { by_clocks: true, ..BOUNDS }.checker().spawn_bfs().join();
    let path = checker.discovery("no wrong hit").expect("the old protocol must fail");
    let wrong = path.last_state().wrong;
    println!("{wrong:?}: {:?}", path.into_actions());
}
