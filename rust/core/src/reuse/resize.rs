//! Free blocks of a pool whose number of blocks changes.

use super::{BlockSet, FreeBlocks, FreeQueue, PagedBlocks};
use crate::id::BlockId;
use std::ops::Range;

impl FreeBlocks {
    /// Lets go of the blocks at the end of a pool, free or not: none of them is given out any more.
    pub(crate) fn cut(&mut self, gone: Range<u32>) {
        match self {
            Self::Lowest(set) => set.remove_run(gone),
            Self::Paged(pages) => pages.cut(gone),
            Self::Queue(queue) => queue.cut(gone),
        }
    }

    /// Adds blocks at the end of a pool, all but the `busy` ones, which rise.
    pub(crate) fn extend(&mut self, new: Range<u32>, busy: &[BlockId]) {
        match self {
            Self::Lowest(set) => {
                set.grow(new.end as usize);
                set.insert_run(new);
                for &block in busy {
                    set.remove(block);
                }
            }
            Self::Paged(pages) => pages.extend(new, busy),
            Self::Queue(queue) => queue.extend(new, busy),
        }
    }
}

impl PagedBlocks {
    fn cut(&mut self, gone: Range<u32>) {
        self.free.remove_run(gone.clone());
        self.recount(gone.start);
    }

    fn extend(&mut self, new: Range<u32>, busy: &[BlockId]) {
        self.free.grow(new.end as usize);
        self.free.insert_run(new.clone());
        for &block in busy {
            self.free.remove(block);
        }
        self.recount(new.end);
    }

    /// Counts the free blocks of all pages again: the last one is longer or shorter now.
    fn recount(&mut self, blocks: u32) {
        let free = std::mem::replace(&mut self.free, BlockSet::empty(0));
        *self = Self::empty(self.page_blocks(), blocks as usize);
        let mut from = 0;
        while let Some(run) = free.next_run(from, u32::MAX) {
            from = run.end;
            self.insert_run(run);
        }
    }
}

impl FreeQueue {
    fn cut(&mut self, gone: Range<u32>) {
        for block in (gone.start..gone.end.min(self.fresh)).map(BlockId) {
            if self.free.remove(block) {
                self.rings.remove(block);
            }
        }
        self.overdue.retain(|block| block.0 < gone.start);
        (self.blocks, self.fresh) = (gone.start, self.fresh.min(gone.start));
    }

    /// New blocks are taken as those that were never taken, unless some of them are in use: then they come last.
    fn extend(&mut self, new: Range<u32>, busy: &[BlockId]) {
        self.rings.make_room(new.end as usize);
        self.free.grow(new.end as usize);
        let first = std::mem::replace(&mut self.fresh, new.end);
        self.blocks = new.end;
        if busy.is_empty() {
            self.fresh = first;
            return;
        }
        for block in (first..new.end).map(BlockId).filter(|block| busy.binary_search(block).is_err()) {
            self.rings.remove(block);
            self.used(block);
            self.insert(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reuse::ReuseOrder;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn new_blocks_are_given_out_after_those_that_were_free_before() {
        for order in ReuseOrder::ALL {
            let mut free = FreeBlocks::full(order, 4);
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
        fn of_every_order_the_same_blocks_are_free_as_in_a_set(
            order in prop::sample::select(ReuseOrder::ALL.to_vec()),
            ops in prop::collection::vec((0u8..4, 0u32..150), 0..120),
        ) {
            let mut free = FreeBlocks::full(order, 64);
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
