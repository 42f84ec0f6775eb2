//! Free-block generators, chosen by [`ReuseOrder`]: which free block is taken next.

use crate::id::BlockId;
use returned::Returned;
use std::ops::Range;

mod returned;
mod scan;
mod set;
pub use set::BlockSet;

/// The blocks of a run, in a list by block.
#[inline]
pub(crate) fn indices(run: &Range<u32>) -> Range<usize> {
    run.start as usize..run.end as usize
}

/// Runs of ascending neighbours.
#[inline]
pub(crate) fn runs(blocks: &[BlockId]) -> impl DoubleEndedIterator<Item = Range<u32>> {
    blocks.chunk_by(|a, b| a.0.wrapping_add(1) == b.0).map(|run| run[0].0..run[run.len() - 1].0 + 1)
}

/// Orders in which free blocks are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReuseOrder {
    /// The lowest id first.
    #[default]
    Lowest,
    /// Unused ids first, ascending; then the block freed first.
    Fifo,
    /// Unused ids first, ascending; then the block whose last use ended first, not counting transfers.
    Lru,
    /// The block freed last; then unused ids, ascending. For standalone allocators, not for managers in Python.
    Lifo,
}

impl ReuseOrder {
    /// The orders of managers.
    pub const ALL: [Self; 3] = [Self::Lowest, Self::Fifo, Self::Lru];

    /// The order's name in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lowest => "lowest",
            Self::Fifo => "fifo",
            Self::Lru => "lru",
            Self::Lifo => "lifo",
        }
    }

    /// The order of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Lowest, Self::Fifo, Self::Lru, Self::Lifo].into_iter().find(|order| order.name() == name)
    }
}

/// The free blocks of a pool, in the order in which they are taken.
#[derive(Debug, Clone)]
pub(crate) struct FreeBlocks {
    /// Blocks taken by id, the lowest first: all of them with [`ReuseOrder::Lowest`], else those never used.
    by_id: BlockSet,
    /// Blocks that were used before; `None` with [`ReuseOrder::Lowest`].
    returned: Option<Returned>,
}

/// Takes up to `count` returned blocks and hands them to `take`. Returns their number.
#[inline]
fn take_returned(returned: &mut Returned, count: usize, take: &mut impl FnMut(Range<u32>)) -> usize {
    let blocks = std::iter::from_fn(|| returned.pop()).take(count);
    blocks.map(|block| take(block.0..block.0 + 1)).count()
}

/// Takes the first `count` blocks of both parts.
#[inline(never)]
fn take_both(by_id: &mut BlockSet, returned: &mut Returned, count: usize, mut take: impl FnMut(Range<u32>)) {
    let mut left = count;
    if returned.goes_first() {
        left -= take_returned(returned, left, &mut take);
    }
    let rest = left.saturating_sub(by_id.len());
    by_id.take_runs(left, &mut take);
    take_returned(returned, rest, &mut take);
}

impl FreeBlocks {
    /// All ids of a run, none of them used before.
    pub(crate) fn full(order: ReuseOrder, run: Range<u32>) -> Self {
        let end = run.end as usize;
        // Without blocks, its memory stays untouched.
        let mut by_id = if run.is_empty() { BlockSet::empty(end) } else { BlockSet::full(end) };
        by_id.remove_run(0..run.start);
        Self { by_id, returned: Returned::none(order, end) }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.by_id.len() + self.returned.as_ref().map_or(0, Returned::len)
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.by_id.contains(block) || self.returned.as_ref().is_some_and(|returned| returned.contains(block))
    }

    /// Removes a block from any position. Returns whether it was free.
    pub(crate) fn remove(&mut self, block: BlockId) -> bool {
        self.by_id.remove(block) || self.returned.as_mut().is_some_and(|returned| returned.remove(block))
    }

    /// Whether the order of reuse follows the ends of uses.
    #[inline]
    pub(crate) fn follows_uses(&self) -> bool {
        matches!(self.returned, Some(Returned::Lru(_)))
    }

    /// Notes that the last use of a block has ended. It may be freed later, when its transfers have ended.
    #[inline]
    pub(crate) fn used(&mut self, block: BlockId) {
        if let Some(returned) = &mut self.returned {
            returned.used(block);
        }
    }

    #[inline]
    pub(crate) fn insert(&mut self, block: BlockId) {
        match &mut self.returned {
            None => {
                self.by_id.insert(block);
            }
            Some(returned) => returned.insert(block),
        }
    }

    /// As [`FreeBlocks::used`], for neighbours, the last one first.
    #[inline]
    pub(crate) fn used_run(&mut self, run: Range<u32>) {
        if let Some(returned) = &mut self.returned {
            run.rev().for_each(|block| returned.used(BlockId(block)));
        }
    }

    /// As [`FreeBlocks::insert`], for neighbours, the last one first.
    #[inline]
    pub(crate) fn insert_run(&mut self, run: Range<u32>) {
        match &mut self.returned {
            None => self.by_id.insert_run(run),
            Some(returned) => run.rev().for_each(|block| returned.insert(BlockId(block))),
        }
    }

    /// Takes the first `count` blocks, or all if there are fewer, and hands them to `take` as runs of neighbours.
    #[inline]
    pub(crate) fn take_runs(&mut self, count: usize, take: impl FnMut(Range<u32>)) {
        match &mut self.returned {
            None => self.by_id.take_runs(count, take),
            Some(returned) => take_both(&mut self.by_id, returned, count, take),
        }
    }

    /// Free blocks in their order; nothing is taken.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let returned =
            |first| self.returned.iter().filter(move |one| one.goes_first() == first).flat_map(Returned::iter);
        returned(true).chain(self.by_id.iter()).chain(returned(false))
    }

    /// Removes neighbours that leave a pool, free or not.
    pub(crate) fn cut(&mut self, gone: Range<u32>) {
        self.by_id.remove_run(gone.clone());
        if let Some(returned) = &mut self.returned {
            returned.cut(gone);
        }
    }

    /// Adds neighbours, except the `busy` ones. They count as never used.
    pub(crate) fn extend(&mut self, new: Range<u32>, busy: &[BlockId]) {
        if let Some(returned) = &mut self.returned {
            returned.make_room(new.end as usize);
        }
        self.by_id.grow(new.end as usize);
        self.by_id.insert_run(new);
        for &block in busy {
            self.by_id.remove(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_round_trip_and_others_are_refused() {
        for order in ORDERS {
            assert_eq!(ReuseOrder::from_name(order.name()), Some(order));
        }
        for name in ["", "pages:4", "latest"] {
            assert_eq!(ReuseOrder::from_name(name), None);
        }
    }

    const ORDERS: [ReuseOrder; 4] = [ReuseOrder::Lowest, ReuseOrder::Fifo, ReuseOrder::Lru, ReuseOrder::Lifo];

    fn ids(free: &FreeBlocks) -> Vec<u32> {
        free.iter().map(|block| block.0).collect()
    }

    fn taken(free: &mut FreeBlocks, count: usize) -> Vec<u32> {
        let mut out = Vec::new();
        free.take_runs(count, |run| out.extend(run));
        out
    }

    #[test]
    fn the_block_freed_last_is_taken_first() {
        let mut free = FreeBlocks::full(ReuseOrder::Lifo, 0..5);
        assert_eq!(taken(&mut free, 3), [0, 1, 2]);
        free.insert(BlockId(1));
        free.insert(BlockId(0));
        assert_eq!(ids(&free), [0, 1, 3, 4]);
        assert_eq!(taken(&mut free, 3), [0, 1, 3]);
    }

    #[test]
    fn a_block_whose_turn_came_while_a_transfer_held_it_is_taken_next() {
        let mut free = FreeBlocks::full(ReuseOrder::Lru, 0..4);
        assert_eq!(taken(&mut free, 4), [0, 1, 2, 3]);
        for block in [0, 1, 2, 3].map(BlockId) {
            free.used(block);
        }
        for block in [1, 3, 2].map(BlockId) {
            free.insert(block);
        }
        assert_eq!(taken(&mut free, 1), [1]);
        free.insert(BlockId(0));
        assert_eq!(ids(&free), [0, 2, 3]);
        assert!(free.remove(BlockId(0)) && !free.remove(BlockId(0)));
        free.insert(BlockId(0));
        free.used(BlockId(1));
        free.insert(BlockId(1));
        assert_eq!(taken(&mut free, 4), [0, 2, 3, 1]);
    }

    #[test]
    fn new_blocks_are_taken_after_those_that_were_free_before() {
        for order in ORDERS {
            let mut free = FreeBlocks::full(order, 0..4);
            free.take_runs(1, |_| ());
            free.extend(4..70, &[]);
            assert!(free.iter().eq((1..70).map(BlockId)), "{}", order.name());
            free.cut(2..70);
            assert!(free.iter().eq([BlockId(1)]), "{}", order.name());
            free.extend(2..5, &[BlockId(3)]);
            assert!(free.iter().eq([1, 2, 4].map(BlockId)), "{}", order.name());
        }
    }

    proptest! {
        #[test]
        fn blocks_are_taken_in_the_order_of_their_ids_their_return_or_their_last_use(
            order in prop::sample::select(&ORDERS[..]),
            ops in prop::collection::vec((0u8..6, 0usize..12), 0..300),
        ) {
            let mut free = FreeBlocks::full(order, 0..12);
            let mut model: Vec<u32> = (0..12).collect();
            let (mut used, mut leased): (Vec<u32>, Vec<u32>) = (Vec::new(), Vec::new());
            let back = |model: &mut Vec<u32>, block| match order {
                ReuseOrder::Lowest => model.insert(model.partition_point(|&other| other < block), block),
                ReuseOrder::Lifo => model.insert(0, block),
                ReuseOrder::Fifo | ReuseOrder::Lru => model.push(block),
            };
            for (op, n) in ops {
                match op {
                    0 | 1 => {
                        let wanted: Vec<u32> = model.drain(..n.min(3).min(model.len())).collect();
                        prop_assert_eq!(&taken(&mut free, n.min(3)), &wanted);
                        used.extend(wanted);
                    }
                    2 if n < used.len() => {
                        let block = used.remove(n);
                        free.used(BlockId(block));
                        free.insert(BlockId(block));
                        back(&mut model, block);
                    }
                    // A leased block comes back later; in last-use order its turn may have passed by then.
                    3 if n < used.len() && order != ReuseOrder::Lru => {
                        let block = used.remove(n);
                        free.used(BlockId(block));
                        leased.push(block);
                    }
                    4 if !leased.is_empty() => {
                        let block = leased.remove(0);
                        free.insert(BlockId(block));
                        back(&mut model, block);
                    }
                    5 => {
                        let block = u32::try_from(n).unwrap();
                        let place = model.iter().position(|&other| other == block);
                        prop_assert_eq!(free.remove(BlockId(block)), place.is_some());
                        if let Some(place) = place {
                            used.push(model.remove(place));
                        }
                    }
                    _ => {}
                }
                prop_assert_eq!(free.len(), model.len());
                prop_assert_eq!(&ids(&free), &model);
                prop_assert!((0..13).all(|m| free.contains(BlockId(m)) == model.contains(&m)));
            }
        }

        #[test]
        fn every_order_has_the_same_free_blocks_as_a_set(
            order in prop::sample::select(&ORDERS[..]),
            ops in prop::collection::vec((0u8..4, 0u32..150), 0..120),
        ) {
            let mut free = FreeBlocks::full(order, 0..64);
            let (mut blocks, mut model, mut taken) = (64u32, (0..64).collect::<BTreeSet<u32>>(), BTreeSet::new());
            for (op, n) in ops {
                match op {
                    0 => free.take_runs(n as usize % 20, |run| run.for_each(|id| {
                        assert!(model.remove(&id), "{id} was not free");
                        taken.insert(id);
                    })),
                    1 => if let Some(&id) = taken.iter().nth(n as usize % (taken.len() + 1)) {
                        taken.remove(&id);
                        free.used(BlockId(id));
                        if id < blocks {
                            free.insert(BlockId(id));
                            model.insert(id);
                        }
                    },
                    _ if n < blocks => {
                        free.cut(n..blocks);
                        model.retain(|&id| id < n);
                        blocks = n;
                    }
                    _ => {
                        let busy: Vec<_> = taken.range(blocks..n).copied().map(BlockId).collect();
                        free.extend(blocks..n, &busy);
                        model.extend((blocks..n).filter(|id| !taken.contains(id)));
                        blocks = n;
                    }
                }
                prop_assert_eq!(free.len(), model.len());
                prop_assert_eq!(free.iter().map(|block| block.0).collect::<BTreeSet<_>>(), model.clone());
                prop_assert!((0..150).all(|id| free.contains(BlockId(id)) == model.contains(&id)));
            }
        }
    }
}
