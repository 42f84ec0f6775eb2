//! Pages of a pool by how many of their blocks are in a set, and the reuse order that fills pages before it opens one.

use super::set::BlockSet;
use crate::id::BlockId;
use std::ops::Range;

/// Most blocks that a page can have.
pub const MAX_PAGE_BLOCKS: u32 = 1 << 16;

/// How many blocks of each page are in a set; pages of one count are found at once.
///
/// Level by level as [`BlockSet`] is: every call costs O(log64 n) for each page that it touches.
#[derive(Clone, Debug)]
pub(crate) struct PageCounts {
    page_blocks: u32,
    blocks: u32,
    counts: Vec<u32>,
    /// By count, as far as counts have been met; no page of count 0 is in any.
    pages: Vec<BlockSet>,
    /// Counts from 1 on that some page has.
    met: BlockSet,
}

impl PageCounts {
    /// Pages of `blocks` blocks of which none is in the set. `page_blocks` is at least 1.
    pub(crate) fn empty(page_blocks: u32, blocks: u32) -> Self {
        let counts = vec![0; blocks.div_ceil(page_blocks) as usize];
        let met = BlockSet::empty(page_blocks.min(blocks) as usize + 1);
        Self { page_blocks, blocks, counts, pages: Vec::new(), met }
    }

    pub(crate) fn page_blocks(&self) -> u32 {
        self.page_blocks
    }

    /// Pages, the short one at the end included.
    pub(crate) fn len(&self) -> u32 {
        self.blocks.div_ceil(self.page_blocks)
    }

    pub(crate) fn page_of(&self, block: u32) -> u32 {
        block / self.page_blocks
    }

    /// The blocks of a page.
    pub(crate) fn blocks(&self, page: u32) -> Range<u32> {
        let start = page * self.page_blocks;
        start..start.saturating_add(self.page_blocks).min(self.blocks)
    }

    /// Blocks of a page that are in the set.
    pub(crate) fn count(&self, page: u32) -> u32 {
        self.counts[page as usize]
    }

    /// The lowest count from `from` on, not below 1, that some page has.
    pub(crate) fn next_count(&self, from: u32) -> Option<u32> {
        self.met.next(from).map(|count| count.0)
    }

    /// The highest count below `end` that some page has.
    pub(crate) fn last_count(&self, end: u32) -> Option<u32> {
        self.met.last_before(end).map(|count| count.0)
    }

    /// Pages of a count that is met.
    pub(crate) fn with_count(&self, count: u32) -> Option<&BlockSet> {
        self.pages.get(count as usize)
    }

    /// Adds neighbours that were not in the set.
    pub(crate) fn add(&mut self, run: Range<u32>) {
        self.by_page(run, |counts, page, blocks| counts.set(page, counts.count(page) + blocks));
    }

    /// Takes away neighbours that were in the set.
    pub(crate) fn sub(&mut self, run: Range<u32>) {
        self.by_page(run, |counts, page, blocks| counts.set(page, counts.count(page) - blocks));
    }

    fn by_page(&mut self, run: Range<u32>, mut each: impl FnMut(&mut Self, u32, u32)) {
        let mut from = run.start;
        while from < run.end {
            let page = self.page_of(from);
            let end = self.blocks(page).end.min(run.end);
            each(self, page, end - from);
            from = end;
        }
    }

    /// Says how many blocks of a page are in the set.
    pub(crate) fn set(&mut self, page: u32, count: u32) {
        let before = std::mem::replace(&mut self.counts[page as usize], count);
        if before == count {
            return;
        }
        if before > 0 {
            let set = &mut self.pages[before as usize];
            set.remove(BlockId(page));
            if set.is_empty() {
                self.met.remove(BlockId(before));
            }
        }
        if count > 0 {
            let pages = self.counts.len();
            while self.pages.len() <= count as usize {
                self.pages.push(BlockSet::empty(0));
            }
            let set = &mut self.pages[count as usize];
            set.grow(pages);
            if set.is_empty() {
                self.met.insert(BlockId(count));
            }
            set.insert(BlockId(page));
        }
    }
}

/// Free blocks, those of the fullest pages first, so that whole pages stay free as long as can be.
///
/// Among pages of one count the lowest goes first, and within a page the lowest block; pages that are wholly free come
/// last.
#[derive(Clone, Debug)]
pub(crate) struct PagedBlocks {
    pub(super) free: BlockSet,
    /// Of free blocks, but only those of pages that are in use.
    partly: PageCounts,
    /// Pages that are wholly free.
    whole: BlockSet,
}

impl PagedBlocks {
    pub(crate) fn full(page_blocks: u32, blocks: usize) -> Self {
        let partly = PageCounts::empty(page_blocks.max(1), u32::try_from(blocks).unwrap_or(u32::MAX));
        let whole = BlockSet::full(partly.len() as usize);
        Self { free: BlockSet::full(blocks), partly, whole }
    }

    pub(crate) fn empty(page_blocks: u32, blocks: usize) -> Self {
        let partly = PageCounts::empty(page_blocks.max(1), u32::try_from(blocks).unwrap_or(u32::MAX));
        let whole = BlockSet::empty(partly.len() as usize);
        Self { free: BlockSet::empty(blocks), partly, whole }
    }

    pub(crate) fn page_blocks(&self) -> u32 {
        self.partly.page_blocks()
    }

    pub(crate) fn len(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.free.contains(block)
    }

    pub(crate) fn insert_run(&mut self, run: Range<u32>) {
        self.free.insert_run(run.clone());
        let mut from = run.start;
        while from < run.end {
            let page = self.partly.page_of(from);
            let blocks = self.partly.blocks(page);
            let end = blocks.end.min(run.end);
            self.partly.add(from..end);
            if self.partly.count(page) == blocks.end - blocks.start {
                self.partly.sub(blocks);
                self.whole.insert(BlockId(page));
            }
            from = end;
        }
    }

    pub(crate) fn remove(&mut self, block: BlockId) -> bool {
        let was_free = self.free.remove(block);
        if was_free {
            self.open(self.partly.page_of(block.0));
            self.partly.sub(block.0..block.0 + 1);
        }
        was_free
    }

    /// Takes the `count` blocks that go first, or as many as there are, and hands them to `take` as runs of neighbours.
    pub(crate) fn take_runs(&mut self, count: usize, mut take: impl FnMut(Range<u32>)) {
        let mut left = u32::try_from(count.min(self.len())).unwrap_or(u32::MAX);
        while let Some(page) = (left > 0).then(|| self.first()).flatten() {
            self.open(page);
            let blocks = self.partly.blocks(page);
            let (before, mut from) = (left, blocks.start);
            while let Some(run) = (left > 0).then(|| self.free.next_run(from, left)).flatten() {
                let run = run.start..run.end.min(blocks.end);
                if run.start >= run.end {
                    break;
                }
                self.free.remove_run(run.clone());
                left -= run.end - run.start;
                from = run.end;
                take(run);
            }
            self.partly.set(page, self.partly.count(page) - (before - left));
        }
    }

    /// Free blocks in their order; nothing is taken.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let next = |count: u32| self.partly.next_count(count + 1);
        let counts = std::iter::successors(next(0), move |&count| next(count));
        let partly = counts.filter_map(|count| self.partly.with_count(count)).flat_map(BlockSet::iter);
        partly.chain(self.whole.iter()).flat_map(|page| {
            let blocks = self.partly.blocks(page.0);
            let next = |from: u32| self.free.next(from);
            std::iter::successors(next(blocks.start), move |block| next(block.0 + 1))
                .take_while(move |block| block.0 < blocks.end)
        })
    }

    /// The page whose blocks go first.
    fn first(&self) -> Option<u32> {
        let partly = self.partly.next_count(1).and_then(|count| self.partly.with_count(count));
        partly.unwrap_or(&self.whole).next(0).map(|page| page.0)
    }

    /// A page goes into use.
    fn open(&mut self, page: u32) {
        if self.whole.remove(BlockId(page)) {
            self.partly.add(self.partly.blocks(page));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// The order in one line: pages in use by how few of their blocks are free, then the others.
    fn model(free: &BTreeSet<u32>, page: u32, blocks: u32) -> Vec<u32> {
        let of = |p: u32| free.range(p * page..(p + 1) * page).copied().collect::<Vec<_>>();
        let mut pages: Vec<u32> = (0..blocks.div_ceil(page)).collect();
        let room = |p: u32| (blocks - p * page).min(page) as usize;
        pages.sort_by_key(|&p| (of(p).len() == room(p), if of(p).len() == room(p) { 0 } else { of(p).len() }, p));
        pages.into_iter().flat_map(of).collect()
    }

    #[test]
    fn pages_in_use_are_filled_before_one_is_opened() {
        let mut free = PagedBlocks::full(4, 14);
        let mut taken = Vec::new();
        free.take_runs(9, |run| taken.extend(run));
        assert!(taken.iter().copied().eq(0..9));
        free.insert_run(1..4);
        free.insert_run(4..5);
        // Page 1 lacks one block, pages 0 and 2 lack three each; page 3 is not in use.
        assert!(free.iter().map(|block| block.0).eq([4, 1, 2, 3, 9, 10, 11, 12, 13]));
        taken.clear();
        free.take_runs(usize::MAX, |run| taken.extend(run));
        assert_eq!(taken, [4, 1, 2, 3, 9, 10, 11, 12, 13]);
    }

    proptest! {
        #[test]
        fn agrees_with_sorting_all_pages(
            page in 1u32..9, blocks in 1u32..70, ops in prop::collection::vec((0u8..5, 0u32..70, 1u32..20), 0..60),
        ) {
            let mut paged = PagedBlocks::full(page, blocks as usize);
            let mut free: BTreeSet<u32> = (0..blocks).collect();
            for (op, at, count) in ops {
                let block = at % blocks;
                match op {
                    0 | 1 => {
                        let mut taken = Vec::new();
                        paged.take_runs(count as usize, |run| taken.extend(run));
                        let wanted: Vec<u32> = model(&free, page, blocks).into_iter().take(count as usize).collect();
                        free.retain(|block| !wanted.contains(block));
                        prop_assert_eq!(taken, wanted);
                    }
                    2 => prop_assert_eq!(paged.remove(BlockId(block)), free.remove(&block)),
                    _ => {
                        let end = (block + count).min(blocks);
                        let end = (block..end).find(|b| free.contains(b)).unwrap_or(end);
                        paged.insert_run(block..end);
                        free.extend(block..end);
                    }
                }
                prop_assert_eq!(paged.len(), free.len());
                prop_assert!((0..blocks).all(|b| paged.contains(BlockId(b)) == free.contains(&b)));
                prop_assert!(paged.iter().map(|block| block.0).eq(model(&free, page, blocks)));
            }
        }

        #[test]
        fn counts_of_pages_agree_with_counting(
            page in 1u32..9, blocks in 1u32..90, ops in prop::collection::vec((0u32..90, 1u32..30), 0..40),
        ) {
            let (mut counts, mut set) = (PageCounts::empty(page, blocks), BTreeSet::new());
            for (start, len) in ops {
                let run = start % blocks..(start % blocks + len).min(blocks);
                if run.clone().all(|b| set.contains(&b)) {
                    counts.sub(run.clone());
                    set.retain(|b| !run.contains(b));
                } else if run.clone().all(|b| !set.contains(&b)) {
                    counts.add(run.clone());
                    set.extend(run);
                }
            }
            let of = |p: u32| u32::try_from(set.range(p * page..(p + 1) * page).count()).unwrap();
            for p in 0..counts.len() {
                prop_assert_eq!(counts.count(p), of(p));
                let with = counts.with_count(of(p)).is_some_and(|set| set.contains(BlockId(p)));
                prop_assert_eq!(with, of(p) > 0);
            }
            let met: BTreeSet<u32> = (0..counts.len()).map(of).filter(|&count| count > 0).collect();
            for from in 0..=page + 1 {
                prop_assert_eq!(counts.next_count(from), met.range(from..).next().copied());
                prop_assert_eq!(counts.last_count(from), met.range(..from).next_back().copied());
            }
        }
    }
}
