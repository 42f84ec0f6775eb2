//! What becomes of holes that hold something cached: cached blocks that their owner may do without.
//!
//! They count as holes. Those that are entered, and those where `max_id` or `free_tail` want nothing to be, give up what
//! they hold, or hand it on to a hole that holds nothing. Other goals are about live blocks alone.

use super::facts::{Facts, HoleUse, Remaining};
use super::goal::Goal;
use super::rules::{Pairs, SPARE_HOLES};
use crate::id::BlockId;
use crate::placement::BlockMap;
use crate::reuse::BlockSet;
use std::collections::HashSet;

/// The first blocks that goals want to hold nothing: of all goals, and of those that moves are planned for in this step.
pub(super) struct Ends {
    all: u32,
    awake: u32,
}

impl Ends {
    pub(super) fn new() -> Self {
        Self { all: u32::MAX, awake: u32::MAX }
    }

    pub(super) fn add(&mut self, goal: Goal, end: u32, is_awake: bool) {
        if clears(goal) {
            self.all = self.all.min(end);
            self.awake = if is_awake { self.awake.min(end) } else { self.awake };
        }
    }
}

/// Whether a goal wants blocks to hold nothing at all.
fn clears(goal: Goal) -> bool {
    matches!(goal, Goal::MaxId(_) | Goal::FreeTail(_))
}

/// Holes with content from `end` on, the highest first.
fn in_the_way<'a>(content: &'a BlockSet, end: u32, places: &'a BlockMap) -> impl Iterator<Item = u32> + 'a {
    let down = move |before: u32| content.last_before(before).map(|block| block.0).filter(|&block| block >= end);
    std::iter::successors(down(u32::MAX), move |&block| down(block))
        .filter(|&block| places.holes().contains(BlockId(block)))
}

/// Distance to a goal that live blocks alone miss by `live`, counting content as in the way.
pub(super) fn excess(content: &BlockSet, goal: Goal, places: &BlockMap, live: u32) -> u32 {
    if !clears(goal) {
        return live;
    }
    let end = goal.end(places);
    in_the_way(content, end, places).next().map_or(live, |top| live.max(top + 1 - end))
}

/// Relocates or drops the cached content of a plan's targets; the same for content that is in the way. Returns how
/// much of that stays because nothing of the budget is left.
pub(super) fn settle<F: Facts>(
    content: &BlockSet,
    ends: &Ends,
    places: &BlockMap,
    facts: &F,
    budget_left: &mut Remaining,
    pairs: &mut Pairs,
) -> usize {
    let lists = [&pairs.moves, &pairs.drops, &pairs.exchanges];
    let entered: HashSet<u32> = lists.into_iter().flatten().map(|&[_, to]| to).collect();
    let most = entered.len().saturating_mul(16).saturating_add(SPARE_HOLES);
    let is_spare =
        |hole: u32| !entered.contains(&hole) && facts.hole_use(BlockId(hole)) == HoleUse::Move && hole < ends.all;
    let (mut blank, mut vain) = (places.holes().without(content).map(|hole| hole.0), 0);
    let mut spare = std::iter::from_fn(|| {
        while vain < most {
            let hole = blank.next()?;
            if is_spare(hole) {
                return Some(hole);
            }
            vain += 1;
        }
        None
    });
    for [from, to] in std::mem::take(&mut pairs.exchanges) {
        if let Some(hole) = spare.next() {
            pairs.exchanges.push([from, to]);
            pairs.onward.push([to, hole]);
        } else {
            pairs.drops.push([from, to]);
            budget_left.writes += 1;
        }
    }
    let mut left = 0;
    for block in in_the_way(content, ends.awake, places).filter(|block| !entered.contains(block)) {
        if facts.hole_use(BlockId(block)) != HoleUse::Exchange {
            pairs.clear.push(block);
        } else if budget_left.buys(HoleUse::Move) == 0 {
            left += 1;
        } else if let Some(hole) = spare.next() {
            pairs.moves.push([block, hole]);
            budget_left.pay(HoleUse::Move, 1);
        } else {
            pairs.clear.push(block);
        }
    }
    left
}
