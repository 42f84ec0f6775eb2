//! Scans a set of block ids from either end or from any id.

use super::set::{BlockSet, block_at, words};
use crate::id::BlockId;
use std::ops::Range;

impl BlockSet {
    /// The lowest member from `from` on.
    #[must_use]
    pub fn next(&self, from: u32) -> Option<BlockId> {
        let mut at = from as usize;
        for (depth, level) in self.levels.iter().enumerate() {
            let word = level.get(at / 64)? & (u64::MAX << (at % 64));
            if word != 0 {
                let first = at / 64 * 64 + word.trailing_zeros() as usize;
                let down = |i: usize, lower: &Vec<u64>| i * 64 + lower[i].trailing_zeros() as usize;
                return Some(block_at(self.levels[..depth].iter().rev().fold(first, down)));
            }
            at = at / 64 + 1;
        }
        None
    }

    /// The highest member below `end`.
    #[must_use]
    pub fn last_before(&self, end: u32) -> Option<BlockId> {
        let mut end = (end as usize).min(self.capacity);
        for (depth, level) in self.levels.iter().enumerate() {
            let at = end.checked_sub(1)?;
            let word = level[at / 64] & (u64::MAX >> (63 - at % 64));
            if word != 0 {
                let last = at / 64 * 64 + 63 - word.leading_zeros() as usize;
                let down = |i: usize, lower: &Vec<u64>| i * 64 + 63 - lower[i].leading_zeros() as usize;
                return Some(block_at(self.levels[..depth].iter().rev().fold(last, down)));
            }
            end = at / 64;
        }
        None
    }

    /// The highest member.
    #[must_use]
    pub fn highest(&self) -> Option<BlockId> {
        self.last_before(u32::MAX)
    }

    /// Number of members in a run; ids past the capacity are not members.
    #[must_use]
    pub fn count(&self, run: Range<u32>) -> usize {
        let end = run.end.min(block_at(self.capacity).0);
        if run.start >= end {
            return 0;
        }
        words(run.start..end).map(|(i, mask)| (self.levels[0][i] & mask).count_ones() as usize).sum()
    }

    /// The run of members that begins with the lowest from `from` on, cut at `limit` blocks.
    #[must_use]
    pub fn next_run(&self, from: u32, limit: u32) -> Option<Range<u32>> {
        let start = self.next(from)?.0;
        let mut end = start;
        while end - start < limit {
            let at = end as usize;
            let Some(word) = self.levels[0].get(at / 64) else { break };
            let ones = (word >> (at % 64)).trailing_ones();
            end += ones;
            if ones == 0 || (end as usize) / 64 == at / 64 {
                break;
            }
        }
        Some(start..end.min(start.saturating_add(limit)))
    }

    /// Makes room for ids `0..capacity`; never shrinks.
    pub fn grow(&mut self, capacity: usize) {
        if capacity <= self.capacity {
            return;
        }
        self.capacity = capacity;
        let mut bits = capacity;
        for depth in 0.. {
            let words = bits.div_ceil(64);
            if depth == self.levels.len() {
                let top = u64::from(self.levels[depth - 1][0] != 0);
                self.levels.push(vec![top]);
            }
            self.levels[depth].resize(words, 0);
            if words == 1 {
                break;
            }
            bits = words;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn agrees_with_a_sorted_set(
            start in 1u32..9000,
            capacity in 1u32..300_000,
            members in prop::collection::vec((0u32..300_000, 1u32..200), 0..60),
            asked in prop::collection::vec(0u32..300_010, 1..40),
        ) {
            let mut set = BlockSet::empty(start as usize);
            set.insert(BlockId(start - 1));
            set.grow(capacity as usize);
            let capacity = capacity.max(start);
            prop_assert_eq!(set.capacity(), capacity as usize);
            let mut model = BTreeSet::from([start - 1]);
            for (first, len) in members {
                let run = first % capacity..(first % capacity + len).min(capacity);
                set.insert_run(run.clone());
                model.extend(run);
            }
            prop_assert_eq!(set.highest().map(|b| b.0), model.last().copied());
            for at in asked {
                let next = model.range(at..).next().copied();
                prop_assert_eq!(set.next(at).map(|b| b.0), next);
                prop_assert_eq!(set.last_before(at).map(|b| b.0), model.range(..at).next_back().copied());
                prop_assert_eq!(set.count(at..at + 300), model.range(at..at + 300).count());
                for limit in [1, 7, 1000] {
                    let run = next.map(|first| first..(first..first + limit).find(|b| !model.contains(b)).unwrap_or(first + limit));
                    prop_assert_eq!(set.next_run(at, limit), run);
                }
            }
        }
    }
}
