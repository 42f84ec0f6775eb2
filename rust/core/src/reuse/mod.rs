//! Which free block is taken next: the free-block generators, chosen by [`ReuseOrder`].
//!
//! [`BlockSet`] finds its lowest member at once, so that the lowest id goes first and the pool stays dense. By pages, those
//! in use are filled before one is opened. The other orders are a queue of the blocks that came back.

use crate::id::BlockId;
use crate::ring::Rings;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;

mod pages;
mod resize;
mod scan;
mod set;
pub use pages::MAX_PAGE_BLOCKS;
pub(crate) use pages::{PageCounts, PagedBlocks};
pub use set::BlockSet;

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
    /// The block that came free last; then ids never used, rising. For allocators of one tier, not for managers in Python.
    Lifo,
    /// The page of this many blocks that has the fewest free ones first, pages that are wholly free last; then the
    /// lowest id. `"pages:32"` in Python, 1 to [`MAX_PAGE_BLOCKS`].
    Pages(u32),
}

impl fmt::Display for ReuseOrder {
    /// The order's name in full, as [`ReuseOrder::from_name`] reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pages(blocks) => write!(f, "pages:{blocks}"),
            _ => f.write_str(self.name()),
        }
    }
}

impl ReuseOrder {
    /// The orders of managers.
    pub const ALL: [Self; 4] = [Self::Lowest, Self::Fifo, Self::Lru, Self::Pages(32)];

    /// The order's name in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lowest => "lowest",
            Self::Fifo => "fifo",
            Self::Lru => "lru",
            Self::Lifo => "lifo",
            Self::Pages(_) => "pages:N",
        }
    }

    /// The order of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        if let Some(blocks) = name.strip_prefix("pages:") {
            return blocks.parse().ok().filter(|blocks| (1..=MAX_PAGE_BLOCKS).contains(blocks)).map(Self::Pages);
        }
        [Self::Lowest, Self::Fifo, Self::Lru, Self::Lifo].into_iter().find(|order| order.name() == name)
    }
}

/// The free blocks of a pool, in their order.
#[derive(Debug, Clone)]
pub(crate) enum FreeBlocks {
    Lowest(BlockSet),
    Paged(PagedBlocks),
    Queue(FreeQueue),
}

impl FreeBlocks {
    /// All ids `0..blocks`.
    pub(crate) fn full(order: ReuseOrder, blocks: usize) -> Self {
        match order {
            ReuseOrder::Lowest => Self::Lowest(BlockSet::full(blocks)),
            ReuseOrder::Fifo | ReuseOrder::Lru | ReuseOrder::Lifo => Self::Queue(FreeQueue::full(blocks, order)),
            ReuseOrder::Pages(page) => Self::Paged(PagedBlocks::full(page, blocks)),
        }
    }

    /// Takes one block out of its turn; returns whether it was free.
    pub(crate) fn remove(&mut self, block: BlockId) -> bool {
        match self {
            Self::Lowest(set) => set.remove(block),
            Self::Paged(pages) => pages.remove(block),
            Self::Queue(queue) => queue.remove(block),
        }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Lowest(set) => set.len(),
            Self::Paged(pages) => pages.len(),
            Self::Queue(queue) => queue.len(),
        }
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        match self {
            Self::Lowest(set) => set.contains(block),
            Self::Paged(pages) => pages.contains(block),
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
            Self::Paged(pages) => pages.insert_run(block.0..block.0 + 1),
            Self::Queue(queue) => queue.insert(block),
        }
    }

    /// The last use of neighbours has ended, of the last one first; they may be free only later.
    #[inline]
    pub(crate) fn used_run(&mut self, run: Range<u32>) {
        if let Self::Queue(queue) = self {
            run.rev().map(BlockId).for_each(|block| queue.used(block));
        }
    }

    /// As [`FreeBlocks::insert`], of neighbours, of the last one first.
    #[inline]
    pub(crate) fn insert_run(&mut self, run: Range<u32>) {
        match self {
            Self::Lowest(set) => set.insert_run(run),
            Self::Paged(pages) => pages.insert_run(run),
            Self::Queue(queue) => run.rev().map(BlockId).for_each(|block| queue.insert(block)),
        }
    }

    /// Takes the `count` blocks that go first, or as many as there are, and hands them to `take` as runs of neighbours.
    #[inline]
    pub(crate) fn take_runs(&mut self, count: usize, mut take: impl FnMut(Range<u32>)) {
        match self {
            Self::Lowest(set) => set.take_runs(count, take),
            Self::Paged(pages) => pages.take_runs(count, take),
            Self::Queue(queue) => {
                let blocks = std::iter::from_fn(|| queue.pop()).take(count);
                blocks.for_each(|block| take(block.0..block.0 + 1));
            }
        }
    }

    /// Free blocks in their order; nothing is taken.
    pub(crate) fn iter(&self) -> Box<dyn Iterator<Item = BlockId> + '_> {
        match self {
            Self::Lowest(set) => Box::new(set.iter()),
            Self::Paged(pages) => Box::new(pages.iter()),
            Self::Queue(queue) => Box::new(queue.iter()),
        }
    }
}

/// Free blocks in the order in which they came free, or the other way round, or in which their last use ended.
#[derive(Debug, Clone)]
pub(crate) struct FreeQueue {
    /// The lowest id that was never taken; all from it on are free.
    fresh: u32,
    blocks: u32,
    /// Blocks whose turn came before they were free, or all that came back if the last of them goes first: these go first.
    overdue: VecDeque<BlockId>,
    rings: Rings,
    /// Free blocks, but for those never taken.
    free: BlockSet,
    order: ReuseOrder,
}

impl FreeQueue {
    fn full(blocks: usize, order: ReuseOrder) -> Self {
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let (free, rings) = (BlockSet::empty(blocks as usize), Rings::new(blocks as usize, 1));
        Self { fresh: 0, blocks, overdue: VecDeque::new(), rings, free, order }
    }

    fn len(&self) -> usize {
        (self.blocks - self.fresh) as usize + self.free.len()
    }

    fn contains(&self, block: BlockId) -> bool {
        (self.fresh..self.blocks).contains(&block.0) || self.free.contains(block)
    }

    fn used(&mut self, block: BlockId) {
        if self.order == ReuseOrder::Lru {
            self.rings.remove(block);
            self.rings.push(0, block);
        }
    }

    fn insert(&mut self, block: BlockId) {
        self.free.insert(block);
        match self.order {
            ReuseOrder::Lifo => self.overdue.push_front(block),
            ReuseOrder::Lru if self.rings.contains(block) => {}
            ReuseOrder::Lru => self.overdue.push_back(block),
            _ => self.rings.push(0, block),
        }
    }

    /// Takes a block out of its turn. Those that were never taken before it are next after all that never were.
    fn remove(&mut self, block: BlockId) -> bool {
        if !self.contains(block) {
            return false;
        }
        if block.0 >= self.fresh {
            for passed in (self.fresh..block.0).rev().map(BlockId) {
                // In a pool that has shrunk and grown it may have been taken before.
                self.rings.remove(passed);
                self.overdue.push_front(passed);
                self.free.insert(passed);
            }
            self.rings.remove(block);
            self.fresh = block.0 + 1;
            return true;
        }
        self.overdue.retain(|&other| other != block);
        self.rings.remove(block);
        self.free.remove(block)
    }

    fn pop(&mut self) -> Option<BlockId> {
        let returned_first = self.order == ReuseOrder::Lifo && !self.overdue.is_empty();
        if self.fresh < self.blocks && !returned_first {
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

    /// Blocks that came back, in their order.
    fn returned(&self) -> impl Iterator<Item = BlockId> + '_ {
        let all = self.overdue.iter().copied().chain(self.rings.iter(0));
        all.filter(|&block| self.free.contains(block))
    }

    fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let fresh = |when| (self.fresh..self.blocks).filter(move |_| when).map(BlockId);
        let last = self.order == ReuseOrder::Lifo;
        fresh(!last).chain(self.returned()).chain(fresh(last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_round_trip_and_others_are_refused() {
        for order in ReuseOrder::ALL.into_iter().chain([
            ReuseOrder::Lifo,
            ReuseOrder::Pages(1),
            ReuseOrder::Pages(MAX_PAGE_BLOCKS),
        ]) {
            assert_eq!(ReuseOrder::from_name(&order.to_string()), Some(order));
        }
        for name in ["", "pages", "pages:", "pages:0", "pages:N", "pages:65537", "pages:-1", "latest"] {
            assert_eq!(ReuseOrder::from_name(name), None);
        }
    }

    #[test]
    fn the_block_that_came_back_last_goes_first() {
        let mut free = FreeBlocks::full(ReuseOrder::Lifo, 5);
        free.take_runs(3, |_| ());
        free.insert(BlockId(1));
        free.insert(BlockId(0));
        assert!(free.iter().eq([0, 1, 3, 4].map(BlockId)));
        let mut taken = Vec::new();
        free.take_runs(3, |run| taken.push(run.start));
        assert_eq!(taken, [0, 1, 3]);
    }

    proptest! {
        #[test]
        fn queues_give_blocks_in_the_order_of_their_return_or_of_their_last_use(
            by_use in any::<bool>(), ops in prop::collection::vec((0u8..6, 0usize..12), 0..300),
        ) {
            let mut queue = FreeQueue::full(12, if by_use { ReuseOrder::Lru } else { ReuseOrder::Fifo });
            let mut free: Vec<u32> = (0..12).collect();
            let mut fresh = 0;
            let (mut taken, mut leased): (Vec<u32>, Vec<u32>) = (Vec::new(), Vec::new());
            for (op, n) in ops {
                match op {
                    0 | 1 => {
                        let first = queue.pop();
                        prop_assert_eq!(first, (!free.is_empty()).then(|| BlockId(free.remove(0))));
                        fresh += u32::from(first == Some(BlockId(fresh)));
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
                    5 => {
                        let block = u32::try_from(n).unwrap();
                        let place = free.iter().position(|&other| other == block);
                        prop_assert_eq!(queue.remove(BlockId(block)), place.is_some());
                        if let Some(place) = place {
                            free.remove(place);
                            taken.push(block);
                            if block >= fresh {
                                // Those that it passes over come after all others that were never taken.
                                let passed = (block - fresh) as usize;
                                free[..passed + (11 - block) as usize].rotate_left(passed);
                                fresh = block + 1;
                            }
                        }
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
