//! A decision joined with memory: neighbouring pairs become one run, so that a copy engine submits fewer descriptors.

mod expand;
mod order;
mod route;

use crate::error::{Error, Result};

pub use expand::Span;
pub use order::{order_moves, orders};
pub use route::{End, Pieces, Region, Route, Side};

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
    runs(pairs).collect()
}

/// As [`merge_runs`], one by one.
pub(crate) fn runs(pairs: &[[u32; 2]]) -> impl Iterator<Item = Run> {
    let next = |id: u32| id.checked_add(1);
    let neighbours = pairs.chunk_by(move |a, b| next(a[0]) == Some(b[0]) && next(a[1]) == Some(b[1]));
    #[expect(clippy::cast_possible_truncation, reason = "ids rise along a run and are below 2^32")]
    neighbours.map(|run| Run { src: run[0][0], dst: run[0][1], len: run.len() as u32 })
}

/// Checks a mapping: ids are in range, no destination repeats, and in place no block is both read and written.
fn check(pairs: &[[u32; 2]], blocks: [u32; 2], in_place: bool) -> Result<()> {
    let bad = |what| Err(Error::BadMapping { what });
    if let Some(at) = pairs.iter().position(|pair| pair[0] >= blocks[0] || pair[1] >= blocks[1]) {
        let [from, to] = pairs[at];
        return bad(format!("pair {at} copies block {from} of {} to block {to} of {}", blocks[0], blocks[1]));
    }
    let written = Marks::of(pairs, blocks[1]);
    if let Err(block) = written {
        return bad(format!("block {block} is written twice"));
    }
    match written {
        Ok(written) if in_place => match pairs.iter().position(|pair| written.holds(pair[0])) {
            Some(at) => bad(format!("block {} is both read (pair {at}) and written in one copy", pairs[at][0])),
            None => Ok(()),
        },
        _ => Ok(()),
    }
}

/// The blocks that a mapping writes: a bit a block where that is little memory, else sorted.
enum Marks {
    Bits(Vec<u64>),
    Sorted(Vec<u32>),
}

impl Marks {
    /// The blocks written, or one that is written twice; ids are below `blocks`.
    fn of(pairs: &[[u32; 2]], blocks: u32) -> std::result::Result<Self, u32> {
        let words = blocks.div_ceil(64) as usize;
        if words <= pairs.len().saturating_mul(8) {
            let mut bits = vec![0u64; words];
            for &[_, block] in pairs {
                let (word, bit) = (&mut bits[block as usize / 64], 1 << (block % 64));
                if *word & bit != 0 {
                    return Err(block);
                }
                *word |= bit;
            }
            return Ok(Self::Bits(bits));
        }
        let mut sorted: Vec<_> = pairs.iter().map(|pair| pair[1]).collect();
        sorted.sort_unstable();
        match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(&[block, ..]) => Err(block),
            _ => Ok(Self::Sorted(sorted)),
        }
    }

    fn holds(&self, block: u32) -> bool {
        match self {
            Self::Bits(bits) => bits.get(block as usize / 64).is_some_and(|word| word & (1 << (block % 64)) != 0),
            Self::Sorted(sorted) => sorted.binary_search(&block).is_ok(),
        }
    }
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

    #[test]
    fn a_mapping_is_checked_alike_in_few_and_in_many_blocks() {
        for blocks in [10, 1 << 20] {
            let ok = |pairs: &[[u32; 2]], in_place| check(pairs, [blocks, blocks], in_place).is_ok();
            assert!(ok(&[[1, 2], [2, 3]], false) && ok(&[[1, 2], [1, 3]], true) && ok(&[], true));
            assert!(!ok(&[[1, 2], [4, 2]], false) && !ok(&[[1, 2], [2, 3]], true));
            assert!(!ok(&[[1, blocks]], false) && !ok(&[[blocks, 1]], false));
        }
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
