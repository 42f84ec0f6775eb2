//! Which blocks a goal may use, given the goals before it.

use super::facts::{Facts, HoleUse, Remaining};
use super::pair::Pairing;
use crate::id::BlockId;
use crate::placement::BlockMap;
use std::collections::HashSet;
use std::ops::Range;

/// How many runs of holes beyond those needed to examine for a better fit.
const SPARE_RUNS: usize = 64;
/// The same for plans of few moves, beyond their number.
const FEW_RUNS: usize = 8;
/// How many holes beyond a multiple of those needed to examine for cheaper ones.
pub(super) const SPARE_HOLES: usize = 1024;
/// How many immovable blocks, beyond a multiple of those wanted, to skip in search of others.
const SPARE_BLOCKS: usize = 1024;

/// Pairs of a plan that is being made, by how their holes are entered.
#[derive(Clone, Debug, Default)]
pub(super) struct Pairs {
    pub(super) moves: Vec<[u32; 2]>,
    pub(super) drops: Vec<[u32; 2]>,
    pub(super) exchanges: Vec<[u32; 2]>,
    /// See [`super::Plan`].
    pub(super) onward: Vec<[u32; 2]>,
    pub(super) clear: Vec<u32>,
}

impl Pairs {
    pub(super) fn of(&mut self, hole_use: HoleUse) -> &mut Vec<[u32; 2]> {
        debug_assert_ne!(hole_use, HoleUse::Never, "a pair whose hole nobody may enter");
        match hole_use {
            HoleUse::Drop => &mut self.drops,
            HoleUse::Exchange => &mut self.exchanges,
            HoleUse::Move | HoleUse::Never => &mut self.moves,
        }
    }

    /// Number of pairs of each kind.
    pub(super) fn marks(&self) -> [usize; 3] {
        [self.moves.len(), self.drops.len(), self.exchanges.len()]
    }

    /// The pairs added after these numbers were taken.
    pub(super) fn since(&self, marks: [usize; 3]) -> impl Iterator<Item = [u32; 2]> + '_ {
        let lists = [&self.moves, &self.drops, &self.exchanges];
        lists.into_iter().zip(marks).flat_map(|(list, mark)| list[mark..].iter().copied())
    }
}

/// What a goal may use: the owner's facts, and the results of earlier goals.
pub(super) struct Rules<'a, F> {
    pub(super) facts: &'a F,
    /// No block from here on is a destination.
    pub(super) end: u32,
    /// Live blocks that an earlier goal has put in order.
    pub(super) kept: HashSet<u32>,
}

/// Runs of holes by their use.
#[derive(Clone, Debug, Default)]
pub(super) struct HoleRuns {
    runs: [Vec<Range<u32>>; 3],
    found: [usize; 3],
}

/// Uses of holes, the cheapest first.
const HOLE_USES: [HoleUse; 3] = [HoleUse::Move, HoleUse::Drop, HoleUse::Exchange];

impl HoleRuns {
    fn clear(&mut self) {
        self.runs.iter_mut().for_each(Vec::clear);
        self.found = [0; 3];
    }

    pub(super) fn len(&self) -> usize {
        self.found.iter().sum()
    }

    fn push(&mut self, hole_use: HoleUse, run: Range<u32>) {
        let Some(i) = HOLE_USES.iter().position(|&other| other == hole_use) else { return };
        self.found[i] += (run.end - run.start) as usize;
        match self.runs[i].last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => self.runs[i].push(run),
        }
    }
}

/// Buffers reused between plans.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch {
    pub(super) sources: Vec<u32>,
    pub(super) hot: Vec<u32>,
    /// Blocks that were skipped because they may not move now.
    pub(super) held: usize,
    pub(super) holes: HoleRuns,
    pub(super) pairing: Pairing,
}

impl<'a, F: Facts> Rules<'a, F> {
    pub(super) fn new(facts: &'a F) -> Self {
        Self { facts, end: u32::MAX, kept: HashSet::new() }
    }

    /// How a hole may be used.
    pub(super) fn hole_use(&self, hole: u32) -> HoleUse {
        if hole >= self.end { HoleUse::Never } else { self.facts.hole_use(BlockId(hole)) }
    }

    /// Picks up to `count` blocks that may move, in the given order, except that those of running sequences come last.
    pub(super) fn pick(&self, blocks: impl Iterator<Item = u32>, count: usize, scratch: &mut Scratch) {
        let Scratch { sources, hot, held, .. } = scratch;
        sources.clear();
        hot.clear();
        *held = 0;
        let most_hot = count.saturating_mul(4).saturating_add(SPARE_RUNS);
        let most_held = count.saturating_mul(4).saturating_add(SPARE_BLOCKS);
        for block in blocks.filter(|block| !self.kept.contains(block)) {
            if sources.len() >= count || hot.len() >= most_hot || *held >= most_held {
                break;
            }
            if !self.facts.may_leave(BlockId(block)) {
                *held += 1;
            } else if self.facts.is_hot(BlockId(block)) {
                hot.push(block);
            } else {
                sources.push(block);
            }
        }
        let left = count - sources.len();
        sources.extend(hot.iter().take(left));
    }

    /// Collects at least `count` empty holes of a range, plus spares; falls back to any hole after a bounded search.
    /// Returns whether it succeeded.
    pub(super) fn find_holes(&self, places: &BlockMap, range: Range<u32>, count: usize, holes: &mut HoleRuns) -> bool {
        let (mut spare, mut looked, most_spare) = (0, 0, SPARE_RUNS.min(count + FEW_RUNS));
        let most = count.saturating_mul(16).saturating_add(SPARE_HOLES);
        let longest = u32::try_from(count).unwrap_or(u32::MAX).max(1);
        let mut from = range.start;
        while let Some(run) = places.holes().next_run(from, longest.min(range.end.saturating_sub(from))) {
            if run.start >= range.end {
                break;
            }
            let run = run.start..run.end.min(range.end);
            (from, looked) = (run.end, looked + run.len());
            run.for_each(|hole| holes.push(self.hole_use(hole), hole..hole + 1));
            spare += usize::from(holes.found[0] >= count);
            if (count == 1 && spare > 0) || spare > most_spare || (looked > most && holes.len() >= count) {
                return true;
            }
        }
        holes.len() >= count
    }
}

impl Scratch {
    pub(super) fn clear(&mut self) {
        self.holes.clear();
    }

    /// Pairs the picked sources with the holes found, as far as the budget goes.
    pub(super) fn match_up(&mut self, budget_left: &mut Remaining, out: &mut Pairs) -> usize {
        let Self { sources, holes, pairing, .. } = self;
        let mut done = 0;
        for (i, hole_use) in HOLE_USES.into_iter().enumerate() {
            let count = holes.found[i].min(budget_left.buys(hole_use)).min(sources.len() - done);
            if count > 0 {
                pairing.pair(&mut sources[done..done + count], &holes.runs[i], out.of(hole_use));
                budget_left.pay(hole_use, count);
                done += count;
            }
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Occupancy;

    /// Only holes from 10 on are blank.
    struct Late;

    impl Facts for Late {
        fn hole_use(&self, hole: BlockId) -> HoleUse {
            if hole.0 < 10 { HoleUse::Exchange } else { HoleUse::Move }
        }
    }

    #[test]
    fn the_search_for_holes_continues_until_one_takes_a_plain_move() {
        let mut places = BlockMap::new(20);
        (0..20).filter(|block| block % 3 == 1).for_each(|block| places.set(BlockId(block), Occupancy::Live));
        let mut holes = HoleRuns::default();
        assert!(Rules::new(&Late).find_holes(&places, 0..20, 1, &mut holes));
        assert!(holes.found[0] >= 1, "{holes:?}");
    }
}
