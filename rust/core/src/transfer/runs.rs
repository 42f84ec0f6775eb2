//! Runs: merges pairs of adjacent blocks into one copy.

/// Consecutive blocks that are copied to consecutive blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First block that is read.
    pub src: u32,
    /// First block that is written.
    pub dst: u32,
    /// Blocks in the run, at least one.
    pub len: u32,
}

/// Merges each pair with the one before it if source and destination both follow; keeps the order.
pub fn merge_runs(pairs: &[[u32; 2]]) -> impl Iterator<Item = Run> {
    let next = |id: u32| id.checked_add(1);
    let neighbours = pairs.chunk_by(move |a, b| next(a[0]) == Some(b[0]) && next(a[1]) == Some(b[1]));
    #[expect(clippy::cast_possible_truncation, reason = "ids rise along a run and are below 2^32")]
    neighbours.map(|run| Run { src: run[0][0], dst: run[0][1], len: run.len() as u32 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn neighbours_merge_and_others_do_not() {
        let runs = merge_runs(&[[3, 7], [4, 8], [5, 9], [6, 11], [6, 12], [2, 1]]);
        let expected = [(3, 7, 3), (6, 11, 1), (6, 12, 1), (2, 1, 1)];
        assert!(runs.map(|r| (r.src, r.dst, r.len)).eq(expected));
    }

    proptest! {
        #[test]
        fn runs_expand_to_the_pairs(pairs in prop::collection::vec((0u32..20, 0u32..20).prop_map(|(a, b)| [a, b]), 0..100)) {
            let back: Vec<_> = merge_runs(&pairs).flat_map(|r| (r.src..r.src + r.len).zip(r.dst..)).map(|(from, to)| [from, to]).collect();
            prop_assert_eq!(back, pairs);
        }
    }
}
