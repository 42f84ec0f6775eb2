//! Plans for several goals by priority, step after step.

use super::content::Content;
use super::contiguous::{Arranger, Sequences};
use super::facts::{Budget, Facts, Remaining};
use super::goal::Goal;
use super::plan::{Hysteresis, Plan, Rest};
use super::rules::{Pairs, Rules, Scratch};
use crate::placement::BlockMap;

/// A goal, and when to work towards it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The goal.
    pub goal: Goal,
    /// Nothing moves for it until it is missed by more than this many ids or runs; then until it is met.
    pub slack: u32,
}

impl From<Goal> for Wanted {
    fn from(goal: Goal) -> Self {
        Self { goal, slack: 0 }
    }
}

/// Plans the moves of one step after another for the same goals.
///
/// Goals are ordered by priority. A later goal does not undo an earlier one: it moves nothing past the end of `max_id`,
/// `free_tail` and `dense`, and leaves the blocks of `contiguous` sequences in place. If two goals conflict, the
/// earlier one is met.
#[derive(Clone, Debug, Default)]
pub struct Planner {
    wanted: Vec<(Wanted, Hysteresis)>,
    scratch: Scratch,
}

impl Planner {
    /// An idle planner with these goals, most important first.
    #[must_use]
    pub fn new(wanted: &[Wanted]) -> Self {
        let wanted = wanted.iter().map(|&wanted| (wanted, Hysteresis::new(wanted.slack))).collect();
        Self { wanted, scratch: Scratch::default() }
    }

    /// The goals, the most important first.
    pub fn wanted(&self) -> impl Iterator<Item = Wanted> + '_ {
        self.wanted.iter().map(|(wanted, _)| *wanted)
    }

    /// Plans the moves of the next step; `places` is unchanged afterwards.
    ///
    /// The cost is proportional to the number of moves and the blocks of `sequences`, apart from `contiguous` and from
    /// counting the blocks left and stuck, which takes 64 blocks at a time.
    ///
    /// # Arguments
    /// `sequences` are the block tables that `contiguous` is about.
    #[must_use]
    pub fn plan<F: Facts>(
        &mut self,
        places: &mut BlockMap,
        sequences: &Sequences<'_>,
        facts: &F,
        budget: Budget,
    ) -> Plan {
        let Self { wanted, scratch } = self;
        let mut content = facts.content().map(Content::new);
        let mut due = false;
        // Measure all goals before suspending anything.
        let awake: Vec<(Goal, u32, bool)> = wanted
            .iter_mut()
            .map(|(Wanted { goal, .. }, hysteresis)| {
                let live = excess(places, *goal, sequences);
                let all = content.as_ref().map_or(live, |content| content.excess(*goal, places, live));
                let wakes = hysteresis.wakes(all);
                due |= wakes;
                (*goal, goal.end(places), wakes)
            })
            .collect();
        if !due {
            return Plan::default();
        }
        let (mut rules, mut budget_left) = (Rules::new(facts), Remaining::new(budget));
        let (mut pairs, mut named, mut rest) = (Pairs::default(), Vec::new(), Rest::default());
        for (i, &(goal, end, wakes)) in awake.iter().enumerate() {
            let done = named.len();
            match goal {
                _ if !wakes => {}
                Goal::Contiguous(runs) => {
                    let (rules, budget_left, out, named) = (&rules, &mut budget_left, &mut pairs, &mut named);
                    rest.held += Arranger { places, rules, budget_left, out, named }.arrange(sequences, runs as usize);
                }
                _ => {
                    let marks = pairs.marks();
                    let found = places.plan_places(goal, end, &rules, &mut budget_left, scratch, &mut pairs);
                    rest.left += found.left;
                    rest.stuck += found.stuck;
                    rest.held += found.held;
                    if i + 1 < awake.len() {
                        named.extend(pairs.since(marks));
                        named[done..].iter().for_each(|&pair| places.suspend(pair));
                    }
                }
            }
            if matches!(goal, Goal::Contiguous(_)) {
                rules.kept.extend(sequences.iter().copied().flatten().map(|block| block.0));
            } else {
                rules.end = rules.end.min(end);
                if let Some(content) = &mut content {
                    content.add_goal(goal, end, wakes);
                }
            }
        }
        if let Some(content) = &content {
            rest.left += content.make_way(places, facts, &mut budget_left, &mut pairs);
        }
        for pair in named {
            places.resume(pair);
        }
        for list in [&mut pairs.moves, &mut pairs.drops, &mut pairs.exchanges] {
            list.sort_unstable();
        }
        Plan::new(pairs, rest)
    }
}

/// How far a goal is from being met.
fn excess(places: &BlockMap, goal: Goal, sequences: &Sequences<'_>) -> u32 {
    match goal {
        Goal::Contiguous(wanted) => {
            let runs = sequences.iter().map(|blocks| blocks.chunk_by(|a, b| a.0 + 1 == b.0).count());
            u32::try_from(runs.max().unwrap_or(0)).unwrap_or(u32::MAX).saturating_sub(wanted)
        }
        _ => places.excess(goal),
    }
}

impl BlockMap {
    /// One step for several goals, the most important first. See [`Planner`], which keeps buffers and hysteresis.
    #[must_use]
    pub fn plan_all<F: Facts>(&mut self, goals: &[Goal], sequences: &Sequences<'_>, facts: &F, budget: Budget) -> Plan {
        let wanted: Vec<Wanted> = goals.iter().copied().map(Wanted::from).collect();
        Planner::new(&wanted).plan(self, sequences, facts, budget)
    }
}
