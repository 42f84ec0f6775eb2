//! From a goal to the fewest moves that meet it.

use super::facts::{Budget, Facts, Plain, Remaining};
use super::goal::Goal;
use super::rules::{Pairs, Rules, Scratch};
use crate::error::{Error, Result};
use crate::id::BlockId;
use crate::placement::BlockMap;

/// Blocks that a plan does not move; see [`Plan`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rest {
    pub(super) left: usize,
    pub(super) stuck: usize,
    pub(super) held: usize,
}

/// Moves towards goals; nothing has moved yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// `(from, to)`: live blocks or content in the way, and the holes that they move to, without repeats; moves first,
    /// then drops, then exchanges.
    pub pairs: Vec<[u32; 2]>,
    /// Further moves that the goals need, beyond the budget. `contiguous` does not count here.
    pub left: usize,
    /// Live blocks that stay in the way because no hole is left for them, as far as this is known.
    pub stuck: usize,
    /// Live blocks that stay in the way because their owner does not let them move now, as far as a plan has met them.
    pub held: usize,
    /// If [`Facts::content`] reports content: the holes of [`Plan::exchanges`], and the holes their content moves on
    /// to.
    pub onward: Vec<[u32; 2]>,
    /// Holes whose content must be dropped because it is in the way.
    pub clear: Vec<u32>,
    drops_from: usize,
    exchanges_from: usize,
}

impl Plan {
    pub(super) fn new(pairs: Pairs, Rest { left, stuck, held }: Rest) -> Self {
        let Pairs { moves: mut all, mut drops, mut exchanges, onward, clear } = pairs;
        let drops_from = all.len();
        let exchanges_from = drops_from + drops.len();
        all.append(&mut drops);
        all.append(&mut exchanges);
        Self { pairs: all, left, stuck, held, onward, clear, drops_from, exchanges_from }
    }

    /// Pairs whose destination has no content to keep.
    #[must_use]
    pub fn moves(&self) -> &[[u32; 2]] {
        &self.pairs[..self.drops_from]
    }

    /// Pairs whose destination is evicted first.
    #[must_use]
    pub fn drops(&self) -> &[[u32; 2]] {
        &self.pairs[self.drops_from..self.exchanges_from]
    }

    /// Pairs that swap, or whose destination's content moves on.
    #[must_use]
    pub fn exchanges(&self) -> &[[u32; 2]] {
        &self.pairs[self.exchanges_from..]
    }

    /// Blocks that are written.
    #[must_use]
    pub fn writes(&self) -> usize {
        self.pairs.len() + self.exchanges().len()
    }
}

impl BlockMap {
    /// The fewest moves that meet the goal, or the first `budget` of them; none for `contiguous`, which
    /// [`BlockMap::plan_all`] plans.
    ///
    /// Repeated plans with a budget add up to the moves of one plan without.
    #[must_use]
    pub fn plan(&self, goal: Goal, budget: usize) -> Plan {
        let (mut budget_left, mut pairs) = (Remaining::new(Budget::of_moves(budget)), Pairs::default());
        let (rules, scratch, end) = (Rules::new(&Plain), &mut Scratch::default(), goal.end(self));
        let rest = self.plan_places(goal, end, &rules, &mut budget_left, scratch, &mut pairs);
        Plan::new(pairs, rest)
    }

    /// How far the goal is from being met, in ids above the limit. See also [`super::runs`].
    #[must_use]
    pub fn excess(&self, goal: Goal) -> u32 {
        match goal {
            Goal::Contiguous(_) => 0,
            _ => self.live().highest().map_or(0, |top| (top.0 + 1).saturating_sub(goal.end(self))),
        }
    }

    /// Checks that all pairs can be carried out as they stand.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the first block that cannot.
    pub fn check_pairs(&self, pairs: &[[u32; 2]]) -> Result<()> {
        let mut named: Vec<u32> = pairs.iter().flatten().copied().collect();
        named.sort_unstable();
        let fault = |what, found: u32, must: &str| {
            Err(Error::InvalidArgument { what, found: found.into(), must: must.to_owned() })
        };
        if let Some(twice) = named.windows(2).find(|pair| pair[0] == pair[1]) {
            return fault("a block of the pairs", twice[0], "named once");
        }
        for &[from, to] in pairs {
            if !self.live().contains(BlockId(from)) {
                return fault("source", from, "a live block that nobody holds in place");
            }
            if !self.holes().contains(BlockId(to)) {
                return fault("destination", to, "a hole");
            }
        }
        Ok(())
    }

    /// Plans for any goal except `contiguous`; returns what it does not move. `end` is the goal's end, measured before
    /// the blocks of other goals were hidden.
    pub(super) fn plan_places<F: Facts>(
        &self,
        goal: Goal,
        end: u32,
        rules: &Rules<'_, F>,
        budget_left: &mut Remaining,
        scratch: &mut Scratch,
        out: &mut Pairs,
    ) -> Rest {
        match goal {
            Goal::Contiguous(_) => Rest::default(),
            _ => self.plan_below(end, rules, budget_left, scratch, out),
        }
    }

    /// All live blocks from `end` on move below it, highest first.
    fn plan_below<F: Facts>(
        &self,
        end: u32,
        rules: &Rules<'_, F>,
        budget_left: &mut Remaining,
        scratch: &mut Scratch,
        out: &mut Pairs,
    ) -> Rest {
        let Some(top) = self.live().highest().filter(|top| top.0 >= end) else { return Rest::default() };
        let above = self.live().count(end..top.0 + 1);
        let down = |before: u32| self.live().last_before(before).map(|block| block.0).filter(|&block| block >= end);
        let sources = std::iter::successors(Some(top.0), |&block| down(block));
        scratch.clear();
        rules.pick(sources, above.min(budget_left.moves).min(budget_left.writes), scratch);
        let (held, above) = (scratch.held, above - scratch.held);
        let is_enough = rules.find_holes(self, 0..end, scratch.sources.len(), &mut scratch.holes);
        let room = scratch.holes.len();
        let done = scratch.match_up(budget_left, out);
        let stuck = if is_enough { self.short_of(above, end) } else { above - room };
        Rest { left: above - stuck - done, stuck, held }
    }

    /// How many of `above` blocks find no hole below `end`; counts 64 blocks at a time, and only where it must.
    fn short_of(&self, above: usize, end: u32) -> usize {
        let (holes, past) = (self.holes().len(), self.capacity() - end);
        if holes.saturating_sub(past as usize) >= above {
            return 0;
        }
        let below =
            if past < end { holes - self.holes().count(end..self.capacity()) } else { self.holes().count(0..end) };
        above.saturating_sub(below)
    }
}

/// Starts moving when a goal is missed by more than a slack, and continues until it is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hysteresis {
    slack: u32,
    active: bool,
}

impl Hysteresis {
    /// At rest; `slack` is in ids or runs, as [`BlockMap::excess`] counts.
    pub(super) const fn new(slack: u32) -> Self {
        Self { slack, active: false }
    }

    /// Whether to move blocks now, with the goal missed by `excess`.
    pub(super) fn wakes(&mut self, excess: u32) -> bool {
        self.active = excess > if self.active { 0 } else { self.slack };
        self.active
    }
}
