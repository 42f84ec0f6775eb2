//! A decision joined with memory: neighbouring pairs become one run, so that a copy engine submits fewer descriptors.

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

/// Merges pairs whose source and destination both continue the pair before; the order is kept.
#[must_use]
pub fn merge_runs(pairs: &[[u32; 2]]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for &[src, dst] in pairs {
        match runs.last_mut() {
            Some(run) if continues(run.src, run.len, src) && continues(run.dst, run.len, dst) => run.len += 1,
            _ => runs.push(Run { src, dst, len: 1 }),
        }
    }
    runs
}

fn continues(first: u32, len: u32, next: u32) -> bool {
    first.checked_add(len) == Some(next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn neighbours_merge_and_others_do_not() {
        let runs = merge_runs(&[[3, 7], [4, 8], [5, 9], [6, 11], [6, 12], [2, 1]]);
        let expected = [(3, 7, 3), (6, 11, 1), (6, 12, 1), (2, 1, 1)];
        assert!(runs.iter().map(|r| (r.src, r.dst, r.len)).eq(expected));
    }

    proptest! {
        #[test]
        fn runs_expand_to_the_pairs(pairs in prop::collection::vec((0u32..20, 0u32..20).prop_map(|(a, b)| [a, b]), 0..100)) {
            let runs = merge_runs(&pairs);
            let back: Vec<_> = runs.iter().flat_map(|r| (0..r.len).map(|i| [r.src + i, r.dst + i])).collect();
            prop_assert_eq!(back, pairs);
        }
    }
}
