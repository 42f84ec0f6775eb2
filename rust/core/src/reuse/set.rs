//! A set of block ids kept as a hierarchical bitmap: insert, remove and find-lowest cost O(log64 n), and runs are
//! inserted and removed by the word.

use crate::id::BlockId;
use std::ops::Range;

/// A set of block ids that returns its lowest member first.
///
/// Level 0 holds one bit per block; each further level one bit per word of the level below, set iff that word is not
/// zero.
#[derive(Debug, Clone)]
pub struct BlockSet {
    pub(super) levels: Vec<Vec<u64>>,
    pub(super) capacity: usize,
    len: usize,
}

impl BlockSet {
    /// An empty set over ids `0..capacity`.
    #[must_use]
    pub fn empty(capacity: usize) -> Self {
        let mut levels = Vec::new();
        let mut bits = capacity.max(1);
        loop {
            let words = bits.div_ceil(64);
            levels.push(vec![0; words]);
            if words == 1 {
                break;
            }
            bits = words;
        }
        Self { levels, capacity, len: 0 }
    }

    /// The set of all ids `0..capacity`.
    #[must_use]
    pub fn full(capacity: usize) -> Self {
        let mut set = Self::empty(capacity);
        let mut bits = capacity;
        for level in &mut set.levels {
            let whole = bits / 64;
            level[..whole].fill(u64::MAX);
            if bits % 64 != 0 {
                level[whole] = (1 << (bits % 64)) - 1;
            }
            bits = bits.div_ceil(64);
        }
        set.len = capacity;
        set
    }

    /// Members of the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the set has no members.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Ids that the set can hold: `0..capacity`.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Whether the block is a member.
    #[must_use]
    pub fn contains(&self, block: BlockId) -> bool {
        let i = block.index();
        i < self.capacity && self.levels[0][i / 64] >> (i % 64) & 1 == 1
    }

    /// Whether all of some neighbours are members.
    #[inline]
    pub(crate) fn contains_run(&self, run: Range<u32>) -> bool {
        words(run).all(|(index, mask)| self.levels[0].get(index).is_some_and(|word| word & mask == mask))
    }

    /// Adds a block; returns whether it was absent.
    pub fn insert(&mut self, block: BlockId) -> bool {
        let i = block.index();
        debug_assert!(i < self.capacity);
        let word = &mut self.levels[0][i / 64];
        let (before, bit) = (*word, 1 << (i % 64));
        if before & bit != 0 {
            return false;
        }
        *word |= bit;
        self.len += 1;
        if before == 0 {
            self.set_above(i / 64);
        }
        true
    }

    /// Removes a block; returns whether it was a member.
    pub fn remove(&mut self, block: BlockId) -> bool {
        if !self.contains(block) {
            return false;
        }
        let i = block.index();
        self.levels[0][i / 64] &= !(1 << (i % 64));
        self.len -= 1;
        if self.levels[0][i / 64] == 0 {
            self.clear_above(i / 64);
        }
        true
    }

    /// Takes the `count` lowest members out, in rising order, and hands each to `take`.
    ///
    /// Takes fewer if the set has fewer.
    pub fn take_lowest(&mut self, count: usize, mut take: impl FnMut(BlockId)) {
        self.take_runs(count, |run| run.map(BlockId).for_each(&mut take));
    }

    /// As [`BlockSet::take_lowest`], but hands over runs of neighbours.
    #[inline]
    pub(crate) fn take_runs(&mut self, count: usize, mut take: impl FnMut(Range<u32>)) {
        let mut left = count.min(self.len);
        self.len -= left;
        while left > 0 {
            let word_index = self.lowest_word();
            let mut word = self.levels[0][word_index];
            while word != 0 && left > 0 {
                let first = word.trailing_zeros() as usize;
                let end = first + ((word >> first).trailing_ones() as usize).min(left);
                take(block_at(word_index * 64 + first).0..block_at(word_index * 64 + end).0);
                word &= !mask(first, end);
                left -= end - first;
            }
            self.levels[0][word_index] = word;
            if word == 0 {
                self.clear_above(word_index);
            }
        }
    }

    /// Adds neighbours.
    #[inline]
    pub(crate) fn insert_run(&mut self, run: Range<u32>) {
        for (index, mask) in words(run) {
            self.insert_word(index, mask);
        }
    }

    /// Removes neighbours.
    #[inline]
    pub(crate) fn remove_run(&mut self, run: Range<u32>) {
        for (index, mask) in words(run) {
            self.remove_word(index, mask);
        }
    }

    /// Members in rising order; nothing is taken.
    pub fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.levels[0].iter().enumerate().flat_map(|(i, &word)| members(i, word))
    }

    /// Members that are not in the other set, in rising order.
    pub(crate) fn without<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = BlockId> + 'a {
        self.levels[0]
            .iter()
            .enumerate()
            .flat_map(|(i, &word)| members(i, word & !other.levels[0].get(i).copied().unwrap_or(0)))
    }

    /// Index of the first level-0 word that is not zero; the set must not be empty.
    fn lowest_word(&self) -> usize {
        let mut i = 0;
        for level in self.levels[1..].iter().rev() {
            i = i * 64 + level[i].trailing_zeros() as usize;
        }
        i
    }

    /// Adds blocks of one level-0 word.
    #[inline]
    fn insert_word(&mut self, index: usize, mask: u64) {
        let word = &mut self.levels[0][index];
        let before = *word;
        *word |= mask;
        self.len += (mask & !before).count_ones() as usize;
        if before == 0 && mask != 0 {
            self.set_above(index);
        }
    }

    /// Removes blocks of one level-0 word.
    #[inline]
    fn remove_word(&mut self, index: usize, mask: u64) {
        let word = &mut self.levels[0][index];
        let before = *word;
        *word &= !mask;
        self.len -= (mask & before).count_ones() as usize;
        if *word == 0 && before != 0 {
            self.clear_above(index);
        }
    }

    /// Updates the levels above: level-0 word `i` is no longer zero.
    fn set_above(&mut self, mut i: usize) {
        for level in &mut self.levels[1..] {
            let before = level[i / 64];
            level[i / 64] |= 1 << (i % 64);
            if before != 0 {
                break;
            }
            i /= 64;
        }
    }

    /// Updates the levels above: level-0 word `i` became zero.
    fn clear_above(&mut self, mut i: usize) {
        for level in &mut self.levels[1..] {
            level[i / 64] &= !(1 << (i % 64));
            if level[i / 64] != 0 {
                break;
            }
            i /= 64;
        }
    }
}

/// Members of level-0 word `i`.
fn members(i: usize, word: u64) -> impl Iterator<Item = BlockId> {
    let rest = |&word: &u64| Some(word & (word - 1)).filter(|&rest| rest != 0);
    let words = std::iter::successors(Some(word).filter(|&word| word != 0), rest);
    words.map(move |word| block_at(i * 64 + word.trailing_zeros() as usize))
}

/// The level-0 words of a run, and its bits in each.
#[inline]
pub(super) fn words(run: Range<u32>) -> impl Iterator<Item = (usize, u64)> {
    let run = run.start as usize..run.end as usize;
    (run.start / 64..run.end.div_ceil(64)).map(move |word| {
        let (first, end) = (run.start.saturating_sub(word * 64), (run.end - word * 64).min(64));
        (word, mask(first, end))
    })
}

/// The bits `first..end` of a word; `first` is below 64, `end` from 1 to 64.
#[inline]
pub(super) fn mask(first: usize, end: usize) -> u64 {
    (u64::MAX >> (64 - end)) & (u64::MAX << first)
}

#[expect(clippy::cast_possible_truncation, reason = "a set never holds more than u32::MAX ids")]
pub(super) fn block_at(index: usize) -> BlockId {
    BlockId(index as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn full_set_gives_ids_in_rising_order() {
        for capacity in [0, 1, 63, 64, 65, 4096, 4097, 300_000] {
            let mut set = BlockSet::full(capacity);
            assert_eq!(set.len(), capacity);
            let mut taken = Vec::new();
            set.take_lowest(capacity + 1, |b| taken.push(b.0));
            assert!(taken.iter().copied().eq(0..u32::try_from(capacity).unwrap()));
            assert!(set.is_empty());
        }
    }

    proptest! {
        #[test]
        fn agrees_with_a_sorted_set(capacity in 1u32..9000, ops in prop::collection::vec((0u8..6, 0u32..9000), 0..300)) {
            let mut set = BlockSet::empty(capacity as usize);
            let mut model = BTreeSet::new();
            for (op, x) in ops {
                let block = BlockId(x % capacity);
                match op {
                    0 | 1 => prop_assert_eq!(set.insert(block), model.insert(block)),
                    2 => prop_assert_eq!(set.remove(block), model.remove(&block)),
                    3 | 4 => {
                        let run = (x % capacity)..(x % capacity + x % 150).min(capacity);
                        if op == 3 {
                            set.insert_run(run.clone());
                            model.extend(run.map(BlockId));
                        } else {
                            set.remove_run(run.clone());
                            model.retain(|block| !run.contains(&block.0));
                        }
                    }
                    _ => {
                        let count = (x % 70) as usize;
                        let mut taken = Vec::new();
                        set.take_lowest(count, |b| taken.push(b));
                        let expected: Vec<_> = model.iter().copied().take(count).collect();
                        for b in &expected { model.remove(b); }
                        prop_assert_eq!(taken, expected);
                    }
                }
                prop_assert_eq!(set.len(), model.len());
            }
            prop_assert!(set.iter().eq(model.iter().copied()));
            let mut few = BlockSet::empty(capacity as usize / 2);
            (0..capacity / 2).filter(|id| id % 3 == 0).for_each(|id| {
                few.insert(BlockId(id));
            });
            prop_assert!(set.without(&few).eq(model.into_iter().filter(|&block| !few.contains(block))));
        }
    }
}
