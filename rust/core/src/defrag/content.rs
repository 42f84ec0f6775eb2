//! Cached content in holes, and where a plan moves it.
//!
//! A hole is a block that no sequence uses. It may hold cached content, which its owner can give up. A plan disturbs
//! such content in two cases:
//!
//! - A pair of the plan moves a live block into the hole.
//! - The hole lies beyond the end of a `max_id` or `free_tail` goal. Only these two goals want blocks to be empty; the
//!   others are about live blocks.
//!
//! Content whose hole has [`HoleUse::Exchange`] moves to an empty hole if there is one. All other content is dropped.

use super::facts::{Facts, HoleUse, Remaining};
use super::goal::Goal;
use super::rules::{Pairs, SPARE_HOLES};
use crate::id::BlockId;
use crate::placement::BlockMap;
use crate::reuse::BlockSet;
use std::collections::HashSet;

/// The holes that hold cached content, and the ends of the goals that want blocks to be empty.
pub(super) struct Content<'a> {
    holes: &'a BlockSet,
    /// Lowest end of all such goals: no content moves to a hole from here on.
    end: u32,
    /// Lowest end of such goals that are active in this step: content from here on is in the way.
    active_end: u32,
}

/// Whether a goal wants blocks to be empty, not just free of live blocks.
fn wants_empty(goal: Goal) -> bool {
    matches!(goal, Goal::MaxId(_) | Goal::FreeTail(_))
}

impl<'a> Content<'a> {
    /// Content of these holes, with no goals yet.
    pub(super) fn new(holes: &'a BlockSet) -> Self {
        Self { holes, end: u32::MAX, active_end: u32::MAX }
    }

    /// Adds a goal with its end; `is_active` says whether this step plans moves for it.
    pub(super) fn add_goal(&mut self, goal: Goal, end: u32, is_active: bool) {
        if wants_empty(goal) {
            self.end = self.end.min(end);
            self.active_end = if is_active { self.active_end.min(end) } else { self.active_end };
        }
    }

    /// Distance to a goal, counting content as in the way. Live blocks alone miss the goal by `live`.
    pub(super) fn excess(&self, goal: Goal, places: &BlockMap, live: u32) -> u32 {
        if !wants_empty(goal) {
            return live;
        }
        let end = goal.end(places);
        self.from(end, places).next().map_or(live, |highest| live.max(highest + 1 - end))
    }

    /// Relocates or drops the content of all holes that the pairs enter, and all content in the way of active goals.
    /// Returns how many blocks stay in the way because the budget is spent.
    pub(super) fn make_way<F: Facts>(
        &self,
        places: &BlockMap,
        facts: &F,
        budget_left: &mut Remaining,
        pairs: &mut Pairs,
    ) -> usize {
        let targets: HashSet<u32> =
            [&pairs.moves, &pairs.drops, &pairs.exchanges].into_iter().flatten().map(|&[_, to]| to).collect();
        let mut empty_holes = self.empty_holes(places, facts, &targets);
        relocate_targets(&mut empty_holes, budget_left, pairs);
        let mut left = 0;
        for block in self.from(self.active_end, places).filter(|block| !targets.contains(block)) {
            if facts.hole_use(BlockId(block)) != HoleUse::Exchange {
                pairs.clear.push(block);
            } else if budget_left.buys(HoleUse::Move) == 0 {
                left += 1;
            } else if let Some(hole) = empty_holes.next() {
                pairs.moves.push([block, hole]);
                budget_left.pay(HoleUse::Move, 1);
            } else {
                pairs.clear.push(block);
            }
        }
        left
    }

    /// Holes with content from `end` on, the highest first.
    fn from(&self, end: u32, places: &BlockMap) -> impl Iterator<Item = u32> {
        let below = move |block: u32| self.holes.last_before(block).map(|block| block.0).filter(|&block| block >= end);
        std::iter::successors(below(u32::MAX), move |&block| below(block))
            .filter(|&block| places.holes().contains(BlockId(block)))
    }

    /// Empty holes that content can move to, the lowest first. Passes over a limited number of others, so that a plan
    /// of few moves stays cheap.
    fn empty_holes<'b, F: Facts>(
        &'b self,
        places: &'b BlockMap,
        facts: &'b F,
        targets: &'b HashSet<u32>,
    ) -> impl Iterator<Item = u32> + 'b {
        let end = self.end;
        let is_open =
            move |hole: u32| !targets.contains(&hole) && facts.hole_use(BlockId(hole)) == HoleUse::Move && hole < end;
        let mut candidates = places.holes().without(self.holes).map(|hole| hole.0);
        let mut looks = targets.len().saturating_mul(16).saturating_add(SPARE_HOLES);
        std::iter::from_fn(move || {
            while looks > 0 {
                let hole = candidates.next()?;
                if is_open(hole) {
                    return Some(hole);
                }
                looks -= 1;
            }
            None
        })
    }
}

/// Moves the content of each exchange's target on to an empty hole. Where there is none the content is dropped, and the
/// pair costs one write instead of two.
fn relocate_targets(empty_holes: &mut impl Iterator<Item = u32>, budget_left: &mut Remaining, pairs: &mut Pairs) {
    for [from, to] in std::mem::take(&mut pairs.exchanges) {
        if let Some(hole) = empty_holes.next() {
            pairs.exchanges.push([from, to]);
            pairs.onward.push([to, hole]);
        } else {
            pairs.drops.push([from, to]);
            budget_left.writes += 1;
        }
    }
}
