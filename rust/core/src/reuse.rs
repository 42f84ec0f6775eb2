//! Which free block is taken next: the free-block generators, chosen by [`ReuseOrder`].
//!
//! [`BlockSet`] is a set of block ids kept as a hierarchical bitmap: insert, remove and find-lowest cost O(log64 n), so the
//! lowest id goes first and the pool stays dense. The other orders are a queue of the blocks that came back.

use crate::id::BlockId;
use crate::ring::Rings;
use crate::snapshot::Contents;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Orders in which free blocks are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReuseOrder {
    /// The lowest id first.
    #[default]
    Lowest,
    /// Ids never used first, rising; then the block that came free first.
    Fifo,
    /// Ids never used first, rising; then the block whose last use ended first, transfers not counted as use.
    Lru,
}

impl ReuseOrder {
    /// All orders.
    pub const ALL: [Self; 3] = [Self::Lowest, Self::Fifo, Self::Lru];

    /// The order's name in messages and in Python.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lowest => "lowest",
            Self::Fifo => "fifo",
            Self::Lru => "lru",
        }
    }

    /// The order of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|order| order.name() == name)
    }
}

/// The free blocks of a pool, in their order.
#[derive(Debug, Clone)]
pub(crate) enum FreeBlocks {
    Lowest(BlockSet),
    Queue(FreeQueue),
}

impl FreeBlocks {
    /// All ids `0..blocks`.
    pub(crate) fn full(order: ReuseOrder, blocks: usize) -> Self {
        match order {
            ReuseOrder::Lowest => Self::Lowest(BlockSet::full(blocks)),
            ReuseOrder::Fifo => Self::Queue(FreeQueue::full(blocks, false)),
            ReuseOrder::Lru => Self::Queue(FreeQueue::full(blocks, true)),
        }
    }

    /// Takes one block out of its turn, for an owner who keeps an order of its own; a queue gives blocks in turn only.
    pub(crate) fn remove(&mut self, block: BlockId) -> bool {
        match self {
            Self::Lowest(set) => set.remove(block),
            Self::Queue(_) => false,
        }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Lowest(set) => set.len(),
            Self::Queue(queue) => queue.len(),
        }
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        match self {
            Self::Lowest(set) => set.contains(block),
            Self::Queue(queue) => queue.contains(block),
        }
    }

    /// The last use of a block has ended; it may be free only later.
    #[inline]
    pub(crate) fn used(&mut self, block: BlockId) {
        if let Self::Queue(queue) = self {
            queue.used(block);
        }
    }

    #[inline]
    pub(crate) fn insert(&mut self, block: BlockId) {
        match self {
            Self::Lowest(set) => {
                set.insert(block);
            }
            Self::Queue(queue) => queue.insert(block),
        }
    }

    /// Takes the `count` blocks that go first, or as many as there are, and hands each to `take`.
    #[inline]
    pub(crate) fn take(&mut self, count: usize, mut take: impl FnMut(BlockId)) {
        match self {
            Self::Lowest(set) => set.take_lowest(count, take),
            Self::Queue(queue) => std::iter::from_fn(|| queue.pop()).take(count).for_each(&mut take),
        }
    }

    /// Free blocks in their order; nothing is taken.
    pub(crate) fn iter(&self) -> Box<dyn Iterator<Item = BlockId> + '_> {
        match self {
            Self::Lowest(set) => Box::new(set.iter()),
            Self::Queue(queue) => Box::new(queue.iter()),
        }
    }
}

/// What a snapshot keeps of free blocks: those that the books' counts do not tell.
#[derive(Serialize, Deserialize)]
pub(crate) struct FreeImage {
    order: String,
    /// The lowest id that was never taken, and the others in their order; none of it where the lowest goes first.
    fresh: u32,
    queue: Vec<BlockId>,
}

impl FreeImage {
    pub(crate) fn order(&self) -> Contents<ReuseOrder> {
        ReuseOrder::from_name(&self.order).ok_or_else(|| "an unknown reuse order".to_owned())
    }
}

impl FreeBlocks {
    pub(crate) fn image(&self) -> FreeImage {
        match self {
            Self::Lowest(_) => FreeImage { order: ReuseOrder::Lowest.name().to_owned(), fresh: 0, queue: Vec::new() },
            Self::Queue(queue) => {
                let order = if queue.by_use { ReuseOrder::Lru } else { ReuseOrder::Fifo };
                let returned = queue.iter().skip((queue.blocks - queue.fresh) as usize).collect();
                FreeImage { order: order.name().to_owned(), fresh: queue.fresh, queue: returned }
            }
        }
    }

    /// The free blocks of a snapshot, `idle` by the books' counts; `Manager::check` compares the two.
    pub(crate) fn restore(image: FreeImage, blocks: usize, idle: impl Iterator<Item = BlockId>) -> Contents<Self> {
        let mut free = Self::full(image.order()?, blocks);
        match &mut free {
            Self::Lowest(set) => {
                *set = BlockSet::empty(blocks);
                idle.for_each(|block| {
                    set.insert(block);
                });
            }
            Self::Queue(queue) => {
                if image.fresh > queue.blocks {
                    return Err(format!("block {} was never taken, of {blocks}", image.fresh));
                }
                queue.fresh = image.fresh;
                for block in image.queue {
                    if block.0 >= queue.fresh || queue.contains(block) {
                        return Err(format!("block {block} is free twice"));
                    }
                    queue.used(block);
                    queue.insert(block);
                }
            }
        }
        Ok(free)
    }
}

/// Free blocks in the order in which they came free, or in which their last use ended.
#[derive(Debug, Clone)]
pub(crate) struct FreeQueue {
    /// The lowest id that was never taken; all from it on are free.
    fresh: u32,
    blocks: u32,
    /// Blocks whose turn came before they were free: they go first.
    overdue: VecDeque<BlockId>,
    rings: Rings,
    /// Free blocks, but for those never taken.
    free: BlockSet,
    by_use: bool,
}

impl FreeQueue {
    fn full(blocks: usize, by_use: bool) -> Self {
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let (free, rings) = (BlockSet::empty(blocks as usize), Rings::new(blocks as usize, 1));
        Self { fresh: 0, blocks, overdue: VecDeque::new(), rings, free, by_use }
    }

    fn len(&self) -> usize {
        (self.blocks - self.fresh) as usize + self.free.len()
    }

    fn contains(&self, block: BlockId) -> bool {
        (self.fresh..self.blocks).contains(&block.0) || self.free.contains(block)
    }

    fn used(&mut self, block: BlockId) {
        if self.by_use {
            self.rings.remove(block);
            self.rings.push(0, block);
        }
    }

    fn insert(&mut self, block: BlockId) {
        self.free.insert(block);
        if !self.by_use {
            self.rings.push(0, block);
        } else if !self.rings.contains(block) {
            self.overdue.push_back(block);
        }
    }

    fn pop(&mut self) -> Option<BlockId> {
        if self.fresh < self.blocks {
            self.fresh += 1;
            return Some(BlockId(self.fresh - 1));
        }
        loop {
            let block = self.overdue.pop_front().or_else(|| self.rings.pop(0))?;
            if self.free.remove(block) {
                return Some(block);
            }
        }
    }

    fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let back = self.overdue.iter().copied().chain(self.rings.iter(0));
        (self.fresh..self.blocks).map(BlockId).chain(back.filter(|&block| self.free.contains(block)))
    }
}

/// A set of block ids that gives its lowest member first.
///
/// Level 0 holds one bit a block; each further level one bit a word of the level below, set iff that word is not zero.
#[derive(Debug, Clone)]
pub struct BlockSet {
    levels: Vec<Vec<u64>>,
    capacity: usize,
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

    /// Adds a block; returns whether it was absent.
    pub fn insert(&mut self, block: BlockId) -> bool {
        let mut i = block.index();
        debug_assert!(i < self.capacity);
        let word = &mut self.levels[0][i / 64];
        let (before, bit) = (*word, 1 << (i % 64));
        if before & bit != 0 {
            return false;
        }
        *word |= bit;
        self.len += 1;
        if before == 0 {
            for level in &mut self.levels[1..] {
                i /= 64;
                let before = level[i / 64];
                level[i / 64] |= 1 << (i % 64);
                if before != 0 {
                    break;
                }
            }
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
        let mut left = count.min(self.len);
        self.len -= left;
        while left > 0 {
            let word_index = self.lowest_word();
            let mut word = self.levels[0][word_index];
            while word != 0 && left > 0 {
                take(block_at(word_index * 64 + word.trailing_zeros() as usize));
                word &= word - 1;
                left -= 1;
            }
            self.levels[0][word_index] = word;
            if word == 0 {
                self.clear_above(word_index);
            }
        }
    }

    /// Members in rising order; nothing is taken.
    pub fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.levels[0].iter().enumerate().flat_map(|(i, &word)| {
            std::iter::successors((word != 0).then_some(word), |&w| {
                let rest = w & (w - 1);
                (rest != 0).then_some(rest)
            })
            .map(move |w| block_at(i * 64 + w.trailing_zeros() as usize))
        })
    }

    /// Index of the first level-0 word that is not zero; the set must not be empty.
    fn lowest_word(&self) -> usize {
        let mut i = 0;
        for level in self.levels[1..].iter().rev() {
            i = i * 64 + level[i].trailing_zeros() as usize;
        }
        i
    }

    /// Tells the levels above that level-0 word `i` became zero.
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

#[expect(clippy::cast_possible_truncation, reason = "a set never holds more than u32::MAX ids")]
fn block_at(index: usize) -> BlockId {
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
        fn agrees_with_a_sorted_set(capacity in 1u32..9000, ops in prop::collection::vec((0u8..4, 0u32..9000), 0..300)) {
            let mut set = BlockSet::empty(capacity as usize);
            let mut model = BTreeSet::new();
            for (op, x) in ops {
                let block = BlockId(x % capacity);
                match op {
                    0 | 1 => prop_assert_eq!(set.insert(block), model.insert(block)),
                    2 => prop_assert_eq!(set.remove(block), model.remove(&block)),
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
        }
    }

    proptest! {
        #[test]
        fn queues_give_blocks_in_the_order_of_their_return_or_of_their_last_use(
            by_use in any::<bool>(), ops in prop::collection::vec((0u8..5, 0usize..12), 0..300),
        ) {
            let mut queue = FreeQueue::full(12, by_use);
            let mut free: Vec<u32> = (0..12).collect();
            let (mut taken, mut leased): (Vec<u32>, Vec<u32>) = (Vec::new(), Vec::new());
            for (op, n) in ops {
                match op {
                    0 | 1 => {
                        let first = queue.pop();
                        prop_assert_eq!(first, (!free.is_empty()).then(|| BlockId(free.remove(0))));
                        taken.extend(first.map(|block| block.0));
                    }
                    2 if n < taken.len() => {
                        let block = taken.remove(n);
                        queue.used(BlockId(block));
                        queue.insert(BlockId(block));
                        free.push(block);
                    }
                    // What is leased comes back later; the queue by last use may have passed it by then.
                    3 if n < taken.len() && !by_use => {
                        let block = taken.remove(n);
                        queue.used(BlockId(block));
                        leased.push(block);
                    }
                    4 if !leased.is_empty() => {
                        let block = leased.remove(0);
                        queue.insert(BlockId(block));
                        free.push(block);
                    }
                    _ => {}
                }
                prop_assert_eq!(queue.len(), free.len());
                prop_assert!(queue.iter().eq(free.iter().copied().map(BlockId)));
                prop_assert!((0..12).all(|m| queue.contains(BlockId(m)) == free.contains(&m)));
            }
        }
    }
}
