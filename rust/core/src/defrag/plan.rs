//! From a goal to the fewest moves that meet it.

use super::goal::Goal;
use super::pair::pair;
use super::places::Places;
use crate::error::{Error, Result};
use crate::id::BlockId;
use std::cmp::Reverse;
use std::ops::Range;

/// How many runs of holes are looked at beyond those that are needed, in search of a better fit.
const SPARE_RUNS: usize = 64;

/// Moves towards a goal; nothing has moved yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// `(from, to)`: live blocks and the holes that they go to, no block named twice.
    pub pairs: Vec<[u32; 2]>,
    /// Moves that the goal needs beyond these: those past the budget.
    pub left: usize,
    /// Live blocks that stay in the way because no hole is left for them.
    pub stuck: usize,
}

impl Places {
    /// The fewest moves that meet the goal, or the first `budget` of them.
    ///
    /// However often a plan with a budget is made and carried out, the moves add up to those of one plan without.
    #[must_use]
    pub fn plan(&self, goal: Goal, budget: usize) -> Plan {
        match goal {
            Goal::EmptyPages(page) => self.plan_pages(page.max(1), budget),
            _ => self.plan_below(goal.end(self), budget),
        }
    }

    /// How far the goal is from being met: ids above the limit, or pages that could be empty.
    #[must_use]
    pub fn excess(&self, goal: Goal) -> u32 {
        if let Goal::EmptyPages(page) = goal {
            let pages = self.pages(page.max(1));
            let kept = keep(&pages);
            let count = pages.iter().enumerate().filter(|(i, page)| page.live > 0 && !page.forced && !kept[*i]).count();
            return u32::try_from(count).unwrap_or(u32::MAX);
        }
        let end = goal.end(self);
        self.live().highest().map_or(0, |top| (top.0 + 1).saturating_sub(end))
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

    /// All live blocks from `end` on move below it, highest first.
    fn plan_below(&self, end: u32, budget: usize) -> Plan {
        let above = self.live().count(end..self.capacity());
        if above == 0 {
            return Plan::default();
        }
        let holes = self.hole_runs(0..end, above.min(budget));
        let room: usize = holes.iter().map(|run| (run.end - run.start) as usize).sum();
        let count = above.min(budget).min(room);
        let down = |before: u32| self.live().last_before(before).map(|block| block.0);
        let sources = std::iter::successors(down(u32::MAX), |&block| down(block)).take(count).collect();
        let below = if room < above { self.holes().count(0..end) } else { room };
        let stuck = above.saturating_sub(below);
        Plan { pairs: pair(sources, &holes), left: above - stuck - count, stuck }
    }

    /// Runs of holes within a range: at least `count` blocks of them if there are, and some more to choose from.
    fn hole_runs(&self, range: Range<u32>, count: usize) -> Vec<Range<u32>> {
        let (mut runs, mut found, mut spare) = (Vec::new(), 0, 0);
        let mut from = range.start;
        while let Some(run) = self.holes().next_run(from, range.end.saturating_sub(from)) {
            if run.start >= range.end || spare > SPARE_RUNS {
                break;
            }
            let run = run.start..run.end.min(range.end);
            spare += usize::from(found >= count);
            found += (run.end - run.start) as usize;
            from = run.end;
            runs.push(run);
        }
        runs
    }

    /// All live blocks outside of the pages that are kept move into those.
    fn plan_pages(&self, page_blocks: u32, budget: usize) -> Plan {
        let pages = self.pages(page_blocks);
        let kept = keep(&pages);
        let mut leave: Vec<&Page> = Vec::new();
        let mut holes = Vec::new();
        for (page, kept) in pages.iter().zip(kept) {
            if kept {
                holes.extend(self.hole_runs(page.blocks.clone(), usize::MAX));
            } else if page.live > 0 {
                leave.push(page);
            }
        }
        // Pages with little in them first: they are given back soonest.
        leave.sort_by_key(|page| (page.live, Reverse(page.blocks.start)));
        let above: usize = leave.iter().map(|page| page.live as usize).sum();
        let sources = leave.iter().flat_map(|page| {
            let next = |from: u32| self.live().next(from).map(|b| b.0).filter(|b| page.blocks.contains(b));
            std::iter::successors(next(page.blocks.start), move |&block| next(block + 1))
        });
        let pairs = pair(sources.take(budget).collect(), &holes);
        Plan { left: above - pairs.len(), pairs, stuck: 0 }
    }

    fn pages(&self, page_blocks: u32) -> Vec<Page> {
        let capacity = self.capacity();
        let starts = (0..capacity).step_by(page_blocks as usize);
        let page = |start: u32| {
            let blocks = start..start.saturating_add(page_blocks).min(capacity);
            let fixed = count(self.fixed().count(blocks.clone()));
            let live = count(self.live().count(blocks.clone()));
            Page { live, room: blocks.end - blocks.start - fixed, forced: fixed > 0, blocks }
        };
        starts.map(page).collect()
    }
}

/// What a page holds.
struct Page {
    blocks: Range<u32>,
    live: u32,
    /// Blocks that are not fixed.
    room: u32,
    /// Holds a fixed block, and so can never be empty.
    forced: bool,
}

/// Which pages stay: those that must, and the fewest others that hold all live blocks, with as many in place as can be.
fn keep(pages: &[Page]) -> Vec<bool> {
    let mut kept: Vec<bool> = pages.iter().map(|page| page.forced).collect();
    let live: u64 = pages.iter().map(|page| u64::from(page.live)).sum();
    let room: u64 = pages.iter().filter(|page| page.forced).map(|page| u64::from(page.room)).sum();
    let Some(wanted) = live.checked_sub(room).filter(|&wanted| wanted > 0) else { return kept };
    // The last page may be short: all others hold the same.
    let full = pages.first().map_or(1, |page| u64::from(page.blocks.end - page.blocks.start));
    let mut others: Vec<usize> = (0..pages.len()).filter(|&i| !pages[i].forced).collect();
    others.sort_by_key(|&i| (Reverse(pages[i].live), i));
    let short = others.iter().copied().find(|&i| u64::from(pages[i].room) < full);
    let mut count = usize::try_from(wanted.div_ceil(full)).unwrap_or(usize::MAX);
    let whole: Vec<usize> = others.iter().copied().filter(|&i| Some(i) != short).collect();
    count = count.min(others.len());
    // With the short page among `count` pages, the others must hold what it cannot.
    let with_short = short.filter(|&i| {
        let held = u64::from(pages[i].room) + full * (count as u64 - 1);
        let last = count.checked_sub(1).and_then(|last| whole.get(last));
        held >= wanted && last.is_none_or(|&last| pages[last].live < pages[i].live)
    });
    let rest = count - usize::from(with_short.is_some());
    for &i in whole.iter().take(rest).chain(&with_short) {
        kept[i] = true;
    }
    kept
}

#[expect(clippy::cast_possible_truncation, reason = "a page has at most 2^32 blocks")]
fn count(blocks: usize) -> u32 {
    blocks as u32
}

/// Starts a goal's moves when it is missed by more than a slack, and goes on until it is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hysteresis {
    slack: u32,
    active: bool,
}

impl Hysteresis {
    /// At rest; `slack` is in ids or pages, as [`Places::excess`] counts.
    #[must_use]
    pub const fn new(slack: u32) -> Self {
        Self { slack, active: false }
    }

    /// The step's plan: empty while the goal is missed by no more than the slack and no moves are under way.
    pub fn plan(&mut self, places: &Places, goal: Goal, budget: usize) -> Plan {
        let excess = places.excess(goal);
        self.active = excess > if self.active { 0 } else { self.slack };
        if self.active { places.plan(goal, budget) } else { Plan::default() }
    }
}
