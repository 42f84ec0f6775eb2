//! Which source goes to which hole, where any will do: as few runs of neighbours as a best fit gives.

use std::collections::BTreeSet;
use std::ops::Range;

/// Pairs every source with a hole, `(from, to)`, ordered by source; the holes must be enough.
///
/// Longest runs of sources choose first and take the shortest run of holes that holds them whole; what fits nowhere
/// fills the longest. Both sides of a run rise, so neighbours stay neighbours.
pub(super) fn pair(mut sources: Vec<u32>, holes: &[Range<u32>]) -> Vec<[u32; 2]> {
    sources.sort_unstable();
    if let [source] = sources[..] {
        // No run to keep: the lowest hole serves as well as any.
        return holes.iter().find(|run| !run.is_empty()).map(|run| [source, run.start]).into_iter().collect();
    }
    let mut runs: Vec<Range<u32>> = sources.chunk_by(|a, b| a + 1 == *b).map(|run| run[0]..run[0] + len(run)).collect();
    runs.sort_by_key(|run| std::cmp::Reverse(run.end - run.start));
    let mut free: BTreeSet<(u32, u32)> = holes.iter().map(|run| (run.end - run.start, run.start)).collect();
    let mut pairs = Vec::with_capacity(sources.len());
    for run in runs {
        let mut from = run.start;
        while from < run.end {
            let wanted = run.end - from;
            let best = free.range((wanted, 0)..).next().or_else(|| free.last()).copied();
            let Some((room, to)) = best else { break };
            free.remove(&(room, to));
            let taken = wanted.min(room);
            pairs.extend((0..taken).map(|i| [from + i, to + i]));
            if room > taken {
                free.insert((room - taken, to + taken));
            }
            from += taken;
        }
    }
    pairs.sort_unstable();
    pairs
}

#[expect(clippy::cast_possible_truncation, reason = "distinct ids are at most 2^32")]
fn len(run: &[u32]) -> u32 {
    run.len() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::merge_runs;
    use proptest::prelude::*;

    #[test]
    fn a_run_goes_where_it_fits_whole() {
        let pairs = pair(vec![103, 101, 102, 100, 90], &[1..3, 5..6, 10..14]);
        assert_eq!(pairs, [[90, 5], [100, 10], [101, 11], [102, 12], [103, 13]]);
    }

    #[test]
    fn a_run_without_a_fit_is_cut_into_the_longest_holes() {
        let pairs = pair((100..104).collect(), &[1..2, 3..5, 7..8]);
        assert_eq!(merge_runs(&pairs).len(), 3);
    }

    proptest! {
        #[test]
        fn each_source_gets_a_hole_of_its_own(
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
