//! Pages of a pool by what they hold, and which of them are kept.

use super::Occupancy;
use crate::id::BlockId;
use crate::reuse::{BlockSet, PageCounts};
use std::ops::Range;

/// What each page holds, kept up to date block by block, so that no plan looks at all pages.
#[derive(Clone, Debug)]
pub(crate) struct Pages {
    /// Live blocks of whole pages without fixed blocks.
    loose: PageCounts,
    live: Vec<u32>,
    fixed: Vec<u32>,
    /// Pages with fixed blocks: they can never be empty.
    forced: BlockSet,
    /// Those among them that have holes.
    open: BlockSet,
    /// Blocks of forced pages that are not fixed.
    forced_room: u64,
    /// Loose pages that hold something.
    used: u32,
    /// Live blocks in all.
    all_live: u64,
}

/// Which pages stay: the forced ones, and the fewest others that hold all live blocks, with as many in place as can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Keep {
    /// Loose pages with more live blocks than this stay; of those with as many, the ones up to `last`.
    pub(crate) live: u32,
    pub(crate) last: Option<u32>,
    /// Loose pages that stay.
    pub(crate) pages: u32,
    /// Whether the short page at the end stays, if it is not forced.
    pub(crate) short: bool,
}

impl Pages {
    /// Pages of holes.
    pub(crate) fn new(page_blocks: u32, blocks: u32) -> Self {
        let loose = PageCounts::empty(page_blocks.max(1), blocks);
        let pages = loose.len() as usize;
        let (forced, open) = (BlockSet::empty(pages), BlockSet::empty(pages));
        let (live, fixed) = (vec![0; pages], vec![0; pages]);
        Self { loose, live, fixed, forced, open, forced_room: 0, used: 0, all_live: 0 }
    }

    pub(crate) fn page_blocks(&self) -> u32 {
        self.loose.page_blocks()
    }

    pub(crate) fn page_of(&self, block: u32) -> u32 {
        self.loose.page_of(block)
    }

    pub(crate) fn blocks(&self, page: u32) -> Range<u32> {
        self.loose.blocks(page)
    }

    fn size(&self, page: u32) -> u32 {
        let blocks = self.blocks(page);
        blocks.end - blocks.start
    }

    /// The short page at the end, if there is one and it could be empty.
    pub(crate) fn short(&self) -> Option<u32> {
        let last = self.loose.len().checked_sub(1)?;
        (self.size(last) < self.page_blocks() && self.fixed[last as usize] == 0).then_some(last)
    }

    pub(crate) fn live(&self, page: u32) -> u32 {
        self.live[page as usize]
    }

    /// Pages with fixed blocks and holes.
    pub(crate) fn open(&self) -> &BlockSet {
        &self.open
    }

    /// Whole pages without fixed blocks, by their live blocks.
    pub(crate) fn loose(&self) -> &PageCounts {
        &self.loose
    }

    /// Neighbours are no longer `place`, if `by` is -1, or are from now on.
    pub(crate) fn change(&mut self, run: Range<u32>, place: Occupancy, by: i8) {
        if place == Occupancy::Hole {
            return;
        }
        let mut from = run.start;
        while from < run.end {
            let page = self.page_of(from);
            let end = self.blocks(page).end.min(run.end);
            self.change_page(page, end - from, place, by < 0);
            from = end;
        }
    }

    fn change_page(&mut self, page: u32, blocks: u32, place: Occupancy, is_less: bool) {
        let i = page as usize;
        if self.fixed[i] > 0 {
            self.forced_room -= u64::from(self.size(page) - self.fixed[i]);
        }
        let changed = |count: u32| if is_less { count - blocks } else { count + blocks };
        if place == Occupancy::Fixed {
            self.fixed[i] = changed(self.fixed[i]);
        } else {
            self.live[i] = changed(self.live[i]);
            let blocks = u64::from(blocks);
            self.all_live = if is_less { self.all_live - blocks } else { self.all_live + blocks };
        }
        let (live, fixed, size) = (self.live[i], self.fixed[i], self.size(page));
        if fixed > 0 {
            self.forced_room += u64::from(size - fixed);
            self.forced.insert(BlockId(page));
        } else {
            self.forced.remove(BlockId(page));
        }
        // Between two changes of one block a page may hold more than it has.
        if fixed > 0 && live + fixed < size {
            self.open.insert(BlockId(page));
        } else {
            self.open.remove(BlockId(page));
        }
        let loose = if fixed == 0 && size == self.page_blocks() { live } else { 0 };
        let before = self.loose.count(page);
        self.used = self.used + u32::from(loose > 0) - u32::from(before > 0);
        self.loose.set(page, loose);
    }

    /// Which pages stay.
    pub(crate) fn keep(&self) -> Keep {
        let Some(wanted) = self.all_live.checked_sub(self.forced_room).filter(|&wanted| wanted > 0) else {
            return self.best(0, false);
        };
        let full = u64::from(self.page_blocks());
        let count = u32::try_from(wanted.div_ceil(full)).unwrap_or(u32::MAX);
        let with_short = self.short().is_some_and(|short| {
            let held = u64::from(self.size(short)) + full * u64::from(count - 1);
            held >= wanted && self.live_of(count) < self.live(short)
        });
        self.best(count - u32::from(with_short), with_short)
    }

    /// Pages that hold something.
    pub(crate) fn used(&self) -> u32 {
        let short = self.short().filter(|&short| self.live(short) > 0);
        self.used + u32::try_from(self.forced.len()).unwrap_or(u32::MAX) + u32::from(short.is_some())
    }

    /// Pages that hold something and are not kept.
    pub(crate) fn leaving(&self, keep: &Keep) -> u32 {
        let short = self.short().filter(|&short| !keep.short && self.live(short) > 0);
        self.used - keep.pages.min(self.used) + u32::from(short.is_some())
    }

    /// Whether blocks may go to a page so that it need not be emptied again.
    pub(crate) fn is_kept(&self, keep: &Keep, page: u32) -> bool {
        if self.fixed[page as usize] > 0 {
            return true;
        }
        if Some(page) == self.short() {
            return keep.short;
        }
        let live = self.live(page);
        live > keep.live || (live == keep.live && keep.last.is_some_and(|last| page <= last))
    }

    /// Live blocks of the loose page that comes at place `rank`, from 1 on, by how many it has.
    fn live_of(&self, rank: u32) -> u32 {
        self.best(rank, false).live
    }

    /// The `pages` loose pages with the most live blocks, the lowest among those with as many.
    fn best(&self, pages: u32, short: bool) -> Keep {
        let (mut left, mut end) = (pages, u32::MAX);
        while let Some(live) = (left > 0).then(|| self.loose.last_count(end)).flatten() {
            let with = self.loose.with_count(live).map_or(0, |set| u32::try_from(set.len()).unwrap_or(u32::MAX));
            if with >= left {
                let last = self.loose.with_count(live).and_then(|set| set.nth(left as usize - 1));
                return Keep { live, last: last.map(|page| page.0), pages, short };
            }
            left -= with;
            end = live;
        }
        // None is wanted, or more than hold anything.
        let live = if pages == 0 { u32::MAX } else { 0 };
        Keep { live, last: None, pages: pages - left, short }
    }
}
