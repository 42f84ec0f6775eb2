//! Runs of holes that can take a sequence's blocks.

use super::facts::{Facts, HoleUse};
use super::rules::Rules;
use crate::placement::BlockMap;
use crate::reuse::BlockSet;
use std::cmp::Reverse;
use std::ops::Range;

/// How many of the longest runs of holes to examine, beyond one per block to place.
const LOOKED: usize = 128;
/// Maximum number of runs of holes to find.
const FOUND: usize = 4096;

/// Runs of holes found at the start of a plan; runs used up since then are skipped.
#[derive(Debug, Default)]
pub(super) struct Spans {
    /// Empty holes, which take a plain move.
    blank: Vec<Range<u32>>,
    /// Holes of any kind.
    any: Vec<Range<u32>>,
}

impl Spans {
    /// Searches from the lowest hole on and examines the longest runs found, more of them for more `blocks`; also
    /// examines the highest run.
    pub(super) fn find<F: Facts>(places: &BlockMap, rules: &Rules<'_, F>, blocks: usize) -> Self {
        let mut spans = Self::default();
        let longest = u32::try_from(blocks).unwrap_or(u32::MAX).max(1);
        let next = |from: u32| places.holes().next_run(from, longest);
        let mut found: Vec<_> = std::iter::successors(next(0), |run| next(run.end)).take(FOUND).collect();
        let (from, most) = (found.last().map_or(0, |run| run.end), LOOKED + blocks);
        if found.len() > most {
            found.select_nth_unstable_by_key(most, |run| (Reverse(run.end - run.start), run.start));
            found.truncate(most);
            found.sort_unstable_by_key(|run| run.start);
        }
        for run in found {
            spans.add(rules, run);
        }
        if let Some(top) = places.holes().highest().filter(|top| top.0 >= from) {
            let below = places.live().last_before(top.0).max(places.fixed().last_before(top.0));
            let start = below.map_or(0, |block| block.0 + 1).max(from);
            spans.add(rules, start..start.saturating_add(longest).min(top.0 + 1));
        }
        spans
    }

    fn add<F: Facts>(&mut self, rules: &Rules<'_, F>, run: Range<u32>) {
        for hole in run {
            let hole_use = rules.hole_use(hole);
            if hole_use == HoleUse::Move {
                grow(&mut self.blank, hole);
            }
            if hole_use != HoleUse::Never {
                grow(&mut self.any, hole);
            }
        }
    }

    /// The best run for `wanted` blocks: the shortest one that fits and takes plain moves only; else, of all that fit,
    /// the one where they would displace the least `content`; else the longest.
    pub(super) fn fit(&mut self, places: &BlockMap, wanted: u32, content: Option<&BlockSet>) -> Option<Range<u32>> {
        let blank = best(&mut self.blank, places, wanted, None);
        match blank {
            Some(run) if run.end - run.start >= wanted => Some(run),
            _ => best(&mut self.any, places, wanted, content),
        }
    }
}

fn grow(runs: &mut Vec<Range<u32>>, hole: u32) {
    match runs.last_mut() {
        Some(last) if last.end == hole => last.end += 1,
        _ => runs.push(hole..hole + 1),
    }
}

/// Best fit, else the longest. Runs that are partly used by now are first cut to their remaining holes.
fn best(runs: &mut Vec<Range<u32>>, places: &BlockMap, wanted: u32, content: Option<&BlockSet>) -> Option<Range<u32>> {
    loop {
        let length = |run: &Range<u32>| run.end - run.start;
        let lost = |run: &Range<u32>| content.map_or(0, |content| content.count(run.start..run.start + wanted));
        let fits =
            (0..runs.len()).filter(|&i| length(&runs[i]) >= wanted).min_by_key(|&i| (lost(&runs[i]), length(&runs[i])));
        let i = fits.or_else(|| (0..runs.len()).rev().max_by_key(|&i| length(&runs[i])))?;
        let run = runs[i].clone();
        if places.holes().count(run.clone()) == run.len() {
            return Some(run);
        }
        runs.swap_remove(i);
        let mut from = run.start;
        while let Some(rest) =
            places.holes().next_run(from, run.end.saturating_sub(from)).filter(|rest| rest.start < run.end)
        {
            from = rest.end;
            runs.push(rest.start..rest.end.min(run.end));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::defrag::Plain;
    use crate::id::BlockId;
    use crate::placement::Occupancy;

    #[test]
    fn the_longest_of_many_runs_are_kept() {
        // Single holes, one run of five among the last of them.
        let mut places = BlockMap::new(1000);
        let is_live = |block: u32| block % 2 == 0 && !(800..806).contains(&block);
        (0..1000).filter(|&block| is_live(block)).for_each(|block| places.set(BlockId(block), Occupancy::Live));
        let mut spans = Spans::find(&places, &Rules::new(&Plain), 5);
        let run = spans.fit(&places, 5, None).unwrap();
        assert!(run.len() >= 5 && run.start >= 799 && run.end <= 807, "{run:?}");
    }
}
