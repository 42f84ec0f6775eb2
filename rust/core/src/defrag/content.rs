//! What becomes of holes that hold something cached: cached blocks that their owner may do without.
//!
//! They count as holes. Those that are entered, and those where `max_id`, `free_tail` or `empty_pages` want nothing to be,
//! give up what they hold, or hand it on to a hole that holds nothing. Other goals are about live blocks alone.

use super::facts::{Entry, Facts, Remaining};
use super::goal::Goal;
use super::rules::{Guard, Pairs, SPARE_HOLES};
use crate::id::BlockId;
use crate::occupancy::BlockMap;
use crate::reuse::BlockSet;
use std::collections::HashSet;

impl Guard {
    /// Where a goal that ends there, or keeps these pages, wants nothing to be.
    pub(super) fn of(goal: Goal, end: u32, places: &BlockMap) -> Option<Self> {
        match goal {
            Goal::EmptyPages(page) => places.watched(page).map(|pages| Self::Pages(page, pages.keep())),
            Goal::Contiguous(_) => None,
            _ => Some(Self::Below(end)),
        }
    }

    /// Whether a hole is nobody's destination.
    pub(super) fn bars(&self, places: &BlockMap, hole: u32) -> bool {
        match self {
            Self::Below(end) => hole >= *end,
            Self::Pages(page, keep) => {
                places.watched(*page).is_some_and(|pages| !pages.is_kept(keep, pages.page_of(hole)))
            }
        }
    }

    /// First of the blocks up to one that is not barred of which none is.
    fn open_from(&self, places: &BlockMap, block: u32) -> u32 {
        match self {
            Self::Below(_) => 0,
            Self::Pages(page, _) => places.watched(*page).map_or(0, |pages| pages.blocks(pages.page_of(block)).start),
        }
    }
}

/// Where goals want nothing to be: all of them, and those that moves are planned for in this step.
#[derive(Default)]
pub(super) struct Guards {
    all: Vec<Guard>,
    awake: Vec<Guard>,
}

impl Guards {
    pub(super) fn add(&mut self, goal: Goal, guard: Option<Guard>, is_awake: bool) {
        let guard = guard.filter(|_| clears(goal));
        self.all.extend(guard);
        self.awake.extend(guard.filter(|_| is_awake));
    }
}

/// Whether a goal wants blocks to hold nothing at all.
fn clears(goal: Goal) -> bool {
    !matches!(goal, Goal::Dense(_) | Goal::Contiguous(_))
}

/// Holes with content that one of the guards bars, the highest first.
fn in_the_way<'a>(content: &'a BlockSet, guards: &'a [Guard], places: &'a BlockMap) -> impl Iterator<Item = u32> + 'a {
    let mut end = u32::MAX;
    std::iter::from_fn(move || {
        while let Some(block) = content.last_before(end).map(|block| block.0) {
            if guards.iter().any(|guard| guard.bars(places, block)) {
                end = block;
                if places.holes().contains(BlockId(block)) {
                    return Some(block);
                }
            } else {
                end = guards.iter().map(|guard| guard.open_from(places, block)).max()?;
            }
        }
        None
    })
}

/// How far a goal is from being met that live blocks alone have missed by `live`: content is in the way, too.
pub(super) fn excess(content: &BlockSet, goal: Goal, places: &BlockMap, live: u32) -> u32 {
    let guard = Guard::of(goal, goal.end(places), places).filter(|_| clears(goal));
    let mut blocks = in_the_way(content, guard.as_slice(), places);
    match (guard, goal) {
        (Some(Guard::Below(end)), _) => blocks.next().map_or(live, |top| live.max(top + 1 - end)),
        (Some(Guard::Pages(page, _)), _) => {
            let Some(pages) = places.watched(page) else { return live };
            let (mut count, mut last) = (live, None);
            for page in blocks.map(|block| pages.page_of(block)).filter(|&page| pages.live(page) == 0) {
                count += u32::from(last.replace(page) != Some(page));
            }
            count
        }
        (None, _) => live,
    }
}

/// Finds places for what the holes of a plan hold, or has it dropped; the same for content that is in the way. Returns how
/// much of that stays because nothing of the budget is left.
pub(super) fn settle<F: Facts>(
    content: &BlockSet,
    guards: &Guards,
    places: &BlockMap,
    facts: &F,
    budget_left: &mut Remaining,
    pairs: &mut Pairs,
) -> usize {
    let lists = [&pairs.moves, &pairs.drops, &pairs.exchanges];
    let entered: HashSet<u32> = lists.into_iter().flatten().map(|&[_, to]| to).collect();
    let most = entered.len().saturating_mul(16).saturating_add(SPARE_HOLES);
    let is_spare = |hole: u32| {
        let is_barred = || guards.all.iter().any(|guard| guard.bars(places, hole));
        !entered.contains(&hole) && facts.entry(BlockId(hole)) == Entry::Move && !is_barred()
    };
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
    for block in in_the_way(content, &guards.awake, places).filter(|block| !entered.contains(block)) {
        if facts.entry(BlockId(block)) != Entry::Exchange {
            pairs.clear.push(block);
        } else if budget_left.buys(Entry::Move) == 0 {
            left += 1;
        } else if let Some(hole) = spare.next() {
            pairs.moves.push([block, hole]);
            budget_left.pay(Entry::Move, 1);
        } else {
            pairs.clear.push(block);
        }
    }
    left
}
