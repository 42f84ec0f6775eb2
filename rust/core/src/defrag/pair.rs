//! Assigns sources to interchangeable holes by best fit, for few contiguous runs.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// Pairs sources with holes; reuses its buffers.
#[derive(Clone, Debug, Default)]
pub(super) struct Pairing {
    /// Runs sorted by length, then by start.
    runs: BinaryHeap<(u32, Reverse<u32>)>,
    free: FreeRuns,
    fitted: Vec<[u32; 2]>,
}

impl Pairing {
    /// Adds to `pairs` every source with a hole, `(from, to)`, ordered by source; the holes must be enough.
    ///
    /// The longest runs of sources choose first and take the shortest run of holes that fits them. A run that fits
    /// nowhere fills the longest, and its remainder chooses again in its turn. Both sides of a run ascend, so adjacent
    /// blocks stay adjacent. If pairing both sides in plain order gives fewer runs, that is used instead.
    pub(super) fn pair(&mut self, sources: &mut [u32], holes: &[Range<u32>], pairs: &mut Vec<[u32; 2]>) {
        if let [source] = *sources {
            // There is no run to preserve: the lowest hole is as good as any.
            pairs.extend(holes.iter().find(|run| !run.is_empty()).map(|run| [source, run.start]));
            return;
        }
        sources.sort_unstable();
        let first = pairs.len();
        pairs.extend(sources.iter().copied().zip(holes.iter().cloned().flatten()).map(|(from, to)| [from, to]));
        let in_order = cuts(&pairs[first..]);
        if in_order > 0 {
            self.fit(sources, holes);
            self.fitted.sort_unstable();
            if self.fitted.len() == sources.len() && cuts(&self.fitted) <= in_order {
                pairs[first..].copy_from_slice(&self.fitted);
            }
        }
    }

    fn fit(&mut self, sources: &[u32], holes: &[Range<u32>]) {
        let Self { runs, free, fitted } = self;
        runs.clear();
        fitted.clear();
        runs.extend(sources.chunk_by(|a, b| a + 1 == *b).map(|run| (len(run), Reverse(run[0]))));
        free.fill(holes);
        while let Some((wanted, Reverse(from))) = runs.pop() {
            let Some(room) = free.take(wanted) else { break };
            let taken = wanted.min(room.end - room.start);
            fitted.extend((0..taken).map(|i| [from + i, room.start + i]));
            free.put(room.start + taken..room.end);
            if taken < wanted {
                runs.push((wanted - taken, Reverse(from + taken)));
            }
        }
    }
}

/// Number of pairs that do not continue the run of the pair before.
fn cuts(pairs: &[[u32; 2]]) -> usize {
    pairs.windows(2).filter(|two| two[0].map(|block| block + 1) != two[1]).count()
}

/// Runs of holes by length, those of [`LONG`] and more together, so that a fit is found at once.
#[derive(Clone, Debug, Default)]
struct FreeRuns {
    by_length: Vec<Vec<Range<u32>>>,
    /// Bit `n`: some run is of length `n`.
    lengths: u64,
}

/// From this length on, a fit need not be the best.
const LONG: u32 = 63;

impl FreeRuns {
    fn fill(&mut self, holes: &[Range<u32>]) {
        self.by_length.resize_with(LONG as usize + 1, Vec::new);
        while self.lengths != 0 {
            self.by_length[self.lengths.trailing_zeros() as usize].clear();
            self.lengths &= self.lengths - 1;
        }
        // Among equal lengths, take the lowest first.
        holes.iter().rev().for_each(|run| self.put(run.clone()));
    }

    fn put(&mut self, run: Range<u32>) {
        if !run.is_empty() {
            let length = (run.end - run.start).min(LONG);
            self.by_length[length as usize].push(run);
            self.lengths |= 1 << length;
        }
    }

    /// Takes the shortest run that holds `wanted` blocks, or else the longest.
    fn take(&mut self, wanted: u32) -> Option<Range<u32>> {
        let fitting = self.lengths & (u64::MAX << wanted.min(LONG));
        let length = if fitting == 0 { self.lengths.checked_ilog2()? } else { fitting.trailing_zeros() };
        let runs = &mut self.by_length[length as usize];
        let run = if wanted > LONG {
            let fit = runs.iter().enumerate().filter(|(_, run)| run.end - run.start >= wanted);
            let best = fit.min_by_key(|(_, run)| run.end - run.start);
            let longest = || runs.iter().enumerate().max_by_key(|(_, run)| run.end - run.start);
            let index = best.or_else(longest)?.0;
            runs.swap_remove(index)
        } else {
            runs.pop()?
        };
        if runs.is_empty() {
            self.lengths &= !(1 << length);
        }
        Some(run)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "distinct ids are at most 2^32")]
fn len(run: &[u32]) -> u32 {
    run.len() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::merge_runs;
    use proptest::prelude::*;

    fn pair(mut sources: Vec<u32>, holes: &[Range<u32>]) -> Vec<[u32; 2]> {
        let (mut pairing, mut pairs) = (Pairing::default(), Vec::new());
        // Leftovers of an earlier plan must have no effect.
        pairing.free.fill(&[700..800, 3..4]);
        pairing.pair(&mut sources, holes, &mut pairs);
        pairs
    }

    #[test]
    fn a_run_goes_where_it_fits_whole() {
        let pairs = pair(vec![103, 101, 102, 100, 90], &[1..3, 5..6, 10..14]);
        assert_eq!(pairs, [[90, 5], [100, 10], [101, 11], [102, 12], [103, 13]]);
    }

    #[test]
    fn long_runs_fit_too() {
        let pairs = pair((1000..1100).chain(2000..2070).collect(), &[1..80, 100..300, 400..500]);
        assert_eq!(merge_runs(&pairs).map(|run| run.dst).collect::<Vec<_>>(), [400, 1]);
        let cut = pair((1000..1100).collect(), &[1..20, 30..40, 50..80, 100..170]);
        assert_eq!(merge_runs(&cut).count(), 2);
    }

    #[test]
    fn a_run_without_a_fit_is_cut_into_the_longest_holes() {
        let pairs = pair((100..104).collect(), &[1..2, 3..5, 7..8]);
        assert_eq!(merge_runs(&pairs).count(), 3);
    }

    proptest! {
        #[test]
        fn a_fit_is_the_shortest_that_holds_all_or_else_the_longest(
            lengths in prop::collection::vec(1u32..150, 1..20),
            all_wanted in prop::collection::vec(1u32..150, 1..20),
        ) {
            let holes: Vec<_> = (0..).zip(&lengths).map(|(i, &length)| i * 200..i * 200 + length).collect();
            let (mut free, mut left) = (FreeRuns::default(), lengths);
            free.fill(&holes);
            for wanted in all_wanted {
                let fit = left.iter().copied().filter(|&length| length >= wanted).min();
                let Some(run) = free.take(wanted) else {
                    prop_assert!(left.is_empty());
                    break;
                };
                prop_assert!(holes.contains(&run));
                let length = run.end - run.start;
                // If the shortest fit is long and few blocks are wanted, any long run will do.
                let any_long = wanted <= LONG && fit.is_none_or(|fit| fit >= LONG) && length >= LONG;
                prop_assert!(any_long || Some(length) == fit.or(left.iter().copied().max()));
                left.remove(left.iter().position(|&n| n == length).unwrap());
            }
        }

        #[test]
        fn each_source_gets_its_own_hole(
            gaps in prop::collection::vec((1u32..4, 1u32..5), 1..20),
            sources in prop::collection::btree_set(1000u32..1060, 0..30),
        ) {
            let mut at = 0;
            let holes: Vec<_> = gaps.iter().map(|&(gap, len)| { at += gap + len; at - len..at }).collect();
            let room: usize = holes.iter().map(ExactSizeIterator::len).sum();
            let sources: Vec<u32> = sources.into_iter().take(room).collect();
            let pairs = pair(sources.clone(), &holes);
            prop_assert!(pairs.iter().map(|p| p[0]).eq(sources.iter().copied()));
            let mut to: Vec<u32> = pairs.iter().map(|p| p[1]).collect();
            to.sort_unstable();
            to.dedup();
            prop_assert_eq!(to.len(), sources.len());
            prop_assert!(to.iter().all(|t| holes.iter().any(|run| run.contains(t))));
        }
    }
}
