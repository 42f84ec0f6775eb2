//! A pool's page classes: the free blocks of each, and how many blocks of each a call could take.

use super::{Extents, Membership, Pool};
use crate::fit::Share;
use crate::id::BlockId;
use crate::page::{ClassUse, Classes, MAX_CLASSES, PerClass, Shape};
use crate::reuse::{BlockSet, FreeBlocks, ReuseOrder};

/// The blocks of one class that are free, and those that only reads hold which later device work is ordered after.
#[derive(Debug, Clone)]
pub(super) struct ClassSets {
    pub(super) free: FreeBlocks,
    pub(super) overlappable: BlockSet,
}

impl ClassSets {
    /// The sets of all classes. The blocks that a class has from the start are free, except null blocks.
    pub(super) fn all(classes: &Classes, shape: &Shape, reuse: ReuseOrder) -> Box<[Self]> {
        (0..classes.len())
            .map(|class| {
                let own = classes.range(class);
                let overlappable = BlockSet::empty(own.end as usize);
                let now = u32::try_from(shape.now[class]).unwrap_or(u32::MAX);
                let null = u32::from(shape.has_null).min(now);
                let first = if shape.extents.is_some() { own.end } else { own.start + null };
                let mut free = FreeBlocks::full(reuse, first..own.end);
                if shape.extents.is_none() && own.start + now < own.end {
                    free.cut(own.start + now..own.end);
                }
                Self { free, overlappable }
            })
            .collect()
    }
}

/// What some blocks of each class lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    /// The class that has too few, or the one that they need most of.
    pub(crate) class: usize,
    /// Blocks of that class that are available, those found included, without what is kept.
    pub(crate) free: usize,
    pub(crate) is_enough: bool,
}

impl Pool {
    /// Number of page classes.
    #[must_use]
    pub fn num_classes(&self) -> usize {
        self.classes.len()
    }

    /// The class of a block.
    #[inline]
    pub(crate) fn class_of(&self, block: BlockId) -> usize {
        self.classes.of(block)
    }

    /// A block's class, and its id there. Null blocks have id 0 in each class.
    #[inline]
    #[must_use]
    pub fn local(&self, block: BlockId) -> (usize, u32) {
        let class = self.classes.of(block);
        (class, block.0 - self.classes.first(class))
    }

    /// The first number of a class.
    #[inline]
    pub(crate) fn first_of(&self, class: usize) -> u32 {
        self.classes.first(class)
    }

    /// The block of that id in a class, if the class can have one.
    #[must_use]
    pub fn global(&self, class: usize, id: u32) -> Option<BlockId> {
        if self.classes.len() == 1 && class == 0 {
            return Some(BlockId(id)); // a shrunken pool may still have it
        }
        let range = if class < self.classes.len() { self.classes.range(class) } else { 0..0 };
        range.start.checked_add(id).filter(|block| range.contains(block)).map(BlockId)
    }

    /// Bytes from a block of a class to the next; `None` if classes have their blocks for good.
    #[must_use]
    pub fn stride(&self, class: usize) -> Option<u64> {
        self.extents.as_deref().map(|extents| extents.stride(class))
    }

    /// Blocks of a class in an extent; `None` if classes have their blocks for good.
    #[must_use]
    pub fn per_extent(&self, class: usize) -> Option<usize> {
        self.extents.as_deref().map(|extents| extents.per_extent(class))
    }

    /// Extents that a class has.
    #[must_use]
    pub fn extents_of(&self, class: usize) -> usize {
        self.extents.as_deref().map_or(0, |extents| extents.owned(class))
    }

    /// Ids that a class has in the tier; those of extents that it does not have at the moment included.
    #[must_use]
    pub fn len_of(&self, class: usize) -> usize {
        let range = self.classes.range(class);
        (range.end.min(self.ends[class]) - range.start) as usize
    }

    /// Ids that a class can have once the tier is as large as a resize can make it.
    #[must_use]
    pub fn capacity_of(&self, class: usize) -> usize {
        self.classes.range(class).len()
    }

    /// Extents of the tier, those included that no class has; `None` if classes have their blocks for good.
    #[must_use]
    pub fn num_extents(&self) -> Option<usize> {
        self.extents.as_deref().map(Extents::len)
    }

    /// Bytes of an extent; `None` if classes have their blocks for good.
    #[must_use]
    pub fn extent_bytes(&self) -> Option<u64> {
        self.extents.as_deref().map(|extents| extents.bytes_of(1))
    }

    /// Extents that the tier can have, see [`Pool::capacity_of`].
    #[must_use]
    pub fn most_extents(&self) -> Option<usize> {
        self.extents.as_deref().map(Extents::capacity)
    }

    /// The fewest ids that a class has.
    pub(crate) fn least_len(&self) -> usize {
        (0..self.classes.len()).map(|class| self.len_of(class)).min().unwrap_or(0)
    }

    /// Numbers of some blocks, by class.
    pub(crate) fn count<'a>(&self, blocks: impl IntoIterator<Item = &'a BlockId>) -> PerClass {
        blocks.into_iter().map(|&block| PerClass::of(self.class_of(block), 1)).sum()
    }

    /// Extents that numbers of blocks of each class fill; none if classes have their blocks for good.
    pub(crate) fn filled_by(&self, blocks: PerClass) -> usize {
        self.extents.as_deref().map_or(0, |extents| extents.filled_by(blocks))
    }

    /// Blocks of a class that could be taken, as [`Pool::free`].
    #[must_use]
    pub fn free_in(&self, class: usize) -> usize {
        self.free_with(class, false, 0)
    }

    /// Empty free blocks of a class in allocation order, by number; takes none.
    pub fn free_blocks_of(&self, class: usize) -> impl Iterator<Item = BlockId> + '_ {
        self.sets[class].free.iter()
    }

    /// [`Pool::available`] or [`Pool::free`] of a class, once `more` blocks have become free.
    pub(crate) fn free_with(&self, class: usize, overlappable_too: bool, more: usize) -> usize {
        let sets = &self.sets[class];
        let overlappable = if overlappable_too { sets.overlappable.len() } else { 0 };
        let tail = self.tail.by_class.get(class);
        let own = (sets.free.len() + self.evictable_of(class) + overlappable + more).saturating_sub(tail);
        let Some(extents) = &self.extents else { return own };
        own + extents.obtainable(class) * extents.per_extent(class)
    }

    /// Blocks of a class that can be taken without evicting any, and without extents of others.
    pub(crate) fn ready(&self, class: usize) -> usize {
        let sets: &ClassSets = &self.sets[class];
        (sets.free.len() + sets.overlappable.len()).saturating_sub(self.tail.by_class.get(class))
    }

    /// Blocks of a class that would lie in extents that hold nothing and that it does not have.
    pub(crate) fn vacant(&self, class: usize) -> usize {
        self.extents.as_deref().map_or(0, |extents| extents.vacant(class) * extents.per_extent(class))
    }

    /// Blocks of a class that hold nothing: taking them evicts nothing and waits for no reader.
    pub(crate) fn empty_of(&self, class: usize) -> usize {
        self.sets[class].free.len().saturating_sub(self.tail.by_class.get(class)) + self.vacant(class)
    }

    /// Blocks that a class has at the moment.
    pub(crate) fn present(&self, class: usize) -> usize {
        let extents = self.extents.as_deref();
        extents.map_or_else(|| self.len_of(class), |extents| extents.owned(class) * extents.per_extent(class))
    }

    /// Blocks that each class has to take, without extents of others.
    pub(super) fn available_in(&self, overlappable_too: bool) -> PerClass {
        let own = |class| {
            let sets: &ClassSets = &self.sets[class];
            let overlappable = if overlappable_too { sets.overlappable.len() } else { 0 };
            PerClass::of(class, sets.free.len() + self.evictable_of(class) + overlappable)
        };
        (0..self.classes.len()).map(own).sum()
    }

    /// Evictable blocks of a class.
    pub(crate) fn evictable_of(&self, class: usize) -> usize {
        self.cache.as_ref().map_or(0, |cache| cache.evictable_of(class))
    }

    /// The part of the pool that admission keeps free: blocks of each class, or, in `PerClass`'s first number, extents.
    pub(crate) fn kept(&self, share: Share) -> PerClass {
        match &self.extents {
            _ if self.classes.len() == 1 && self.extents.is_none() => PerClass::of(0, share.blocks()),
            Some(extents) => PerClass::of(0, share.of(extents.usable(self.has_null))),
            None => (0..self.classes.len()).map(|class| PerClass::of(class, share.of(self.len_of(class)))).sum(),
        }
    }

    /// Whether `wanted` blocks of each class can be taken, next to `found` unused ones with contents that stay, while
    /// `kept` ones stay free. With extents, `kept` is a number of those. Blocks that are `held` count as unused.
    pub(crate) fn room(
        &self,
        wanted: PerClass,
        (found, held): (&[BlockId], &[BlockId]),
        kept: PerClass,
        overlappable_too: bool,
    ) -> Room {
        let costs = |&&block: &&BlockId| self.costs(block, overlappable_too);
        let found: Vec<BlockId> = found.iter().filter(costs).copied().collect();
        let taken = self.count(&found);
        let available = (self.available_in(overlappable_too) + self.count(held)).saturating_sub(taken);
        let (tail, with_own) = (self.tail.by_class, self.with_tail(wanted));
        let Some(extents) = self.extents.as_deref() else {
            let lacks = |class: &usize| with_own.get(*class) + kept.get(*class) > available.get(*class);
            let short = (0..self.classes.len()).find(lacks);
            let class = short.unwrap_or_else(|| self.largest(wanted));
            let free = (available + taken).get(class).saturating_sub(kept.get(class) + tail.get(class));
            return Room { class, free, is_enough: short.is_none() };
        };
        // Those that are read by device work, too, keep their extents.
        let freed: Vec<BlockId> = held.iter().filter(|&&block| !self.block(block).is_read_ahead()).copied().collect();
        let idle = extents.idle_without(&self.classes, &freed, &found);
        let (mut lacking, mut given) = extents.balance(with_own, available, idle);
        if lacking > 0 && tail.total() > 0 {
            (lacking, given) = extents.balance(wanted + tail, available, idle);
        }
        let short = with_own.saturating_sub(available);
        let class = self.largest(if short.total() > 0 { short } else { wanted });
        let others = lacking - extents.filled_by(PerClass::of(class, short.get(class))) + kept.get(0);
        // Blocks of the class that are left once the others have theirs, and what is kept is set aside.
        let (more, fewer) = (given.saturating_sub(others), others.saturating_sub(given));
        let per_extent = extents.per_extent(class);
        let fewer = fewer * per_extent + tail.get(class);
        let free = ((available + taken).get(class) + more * per_extent).saturating_sub(fewer);
        Room { class, free, is_enough: lacking + kept.get(0) <= given }
    }

    /// Blocks that classes need to take `wanted` ones: a block in use beyond the end takes the place of one of its class
    /// that is in the pool.
    pub(super) fn with_tail(&self, wanted: PerClass) -> PerClass {
        wanted.with(self.tail.by_class, |wanted, tail| if wanted > 0 { wanted + tail } else { 0 })
    }

    /// Blocks of a class that can be taken next to `found` unused ones with contents that stay, if nobody still reads them
    /// and other classes need none.
    pub(crate) fn unread_in(&self, class: usize, found: &[BlockId]) -> usize {
        let found: Vec<BlockId> = found.iter().filter(|&&block| self.costs(block, false)).copied().collect();
        let taken = self.count(&found).get(class);
        if self.classes.len() == 1 {
            let free = if self.available() > self.free() { self.uncached() } else { self.free() };
            return self.free().saturating_sub(taken).min(free);
        }
        if !self.sets[class].overlappable.is_empty() {
            return self.sets[class].free.len();
        }
        let own = self.available_in(false).get(class).saturating_sub(taken);
        let Some(extents) = self.extents.as_deref() else { return own };
        let idle = extents.idle_without(&self.classes, &[], &found);
        own + extents.obtainable_of(class, idle) * extents.per_extent(class)
    }

    /// The measure of a block in sums over classes: its bytes, or 1 if there is one class.
    #[inline]
    pub(crate) fn weight(&self, class: usize) -> usize {
        if self.classes.len() == 1 { 1 } else { usize::try_from(self.strides[class]).unwrap_or(usize::MAX) }
    }

    /// The sum of the weights of some blocks.
    pub(crate) fn weigh(&self, blocks: PerClass) -> usize {
        let weights = (0..self.classes.len()).map(|class| self.weight(class).saturating_mul(blocks.get(class)));
        weights.fold(0, usize::saturating_add)
    }

    /// The weight of all blocks that could be taken, as [`Pool::free`].
    pub(crate) fn free_weight(&self) -> usize {
        if self.classes.len() == 1 {
            return self.free();
        }
        usize::try_from(self.available_bytes(PerClass::default(), false)).unwrap_or(usize::MAX)
    }

    /// The weight of free blocks that are not cached, and of extents that no class has.
    pub(crate) fn uncached_weight(&self) -> usize {
        if self.classes.len() == 1 {
            return self.uncached();
        }
        let own = (0..self.classes.len()).map(|class| PerClass::of(class, self.sets[class].free.len())).sum();
        let spare = self.extents.as_deref().map_or(0, Extents::spare_bytes);
        self.weigh(own).saturating_add(usize::try_from(spare).unwrap_or(usize::MAX))
    }

    /// The weight of the whole tier.
    pub(crate) fn whole_weight(&self) -> usize {
        match self.extents.as_deref() {
            _ if self.classes.len() == 1 => self.len,
            Some(extents) => {
                let bytes = extents.bytes_of(extents.usable(self.has_null));
                usize::try_from(bytes).unwrap_or(usize::MAX)
            }
            None => self.weigh((0..self.classes.len()).map(|class| PerClass::of(class, self.len_of(class))).sum()),
        }
    }

    /// The class with the largest part of its blocks.
    fn largest(&self, counts: PerClass) -> usize {
        let part = |class: &usize| (counts.get(*class) << 20) / self.len_of(*class).max(1);
        (0..self.classes.len()).rev().max_by_key(part).unwrap_or(0)
    }

    /// Blocks that a class has at most, the null block not counted.
    pub(crate) fn most_of(&self, class: usize) -> usize {
        match self.extents.as_deref() {
            Some(extents) => extents.usable(self.has_null) * extents.per_extent(class),
            None => self.len_of(class).saturating_sub(usize::from(self.has_null)),
        }
    }

    /// Bytes of some blocks of each class; of equal blocks without bytes, their number.
    pub(crate) fn bytes_of(&self, blocks: PerClass) -> u64 {
        let bytes = (0..self.classes.len()).map(|class| self.strides[class].saturating_mul(blocks.get(class) as u64));
        bytes.fold(0, u64::saturating_add)
    }

    /// Bytes of all blocks, or of all extents that classes can have.
    pub(crate) fn total_bytes(&self) -> u64 {
        match self.extents.as_deref() {
            Some(extents) => extents.bytes_of(extents.usable(self.has_null)),
            None => self.use_by_class().iter().map(|found| found.total).sum(),
        }
    }

    /// The use of each class.
    pub(crate) fn use_by_class(&self) -> [ClassUse; MAX_CLASSES] {
        let mut found = [ClassUse::default(); MAX_CLASSES];
        for (class, found) in found.iter_mut().enumerate().take(self.classes.len()) {
            let is_split = self.extents.is_none() && self.has_null && self.len_of(class) > 0;
            let total = self.present(class) - usize::from(is_split);
            let unused = self.sets[class].free.len() + self.evictable_of(class);
            let beyond = self.tail.by_class.get(class) + self.tail.held_by_class.get(class);
            let cached = if self.classes.len() == 1 {
                self.published()
            } else {
                let range = self.classes.range(class);
                let known = self.blocks.get(range.start as usize..self.blocks.len().min(range.end as usize));
                known.unwrap_or_default().iter().filter(|block| block.is_published()).count()
            };
            let [total, used, cached] = [total, total.saturating_sub(unused) + beyond, cached]
                .map(|count| self.bytes_of(PerClass::of(class, count)));
            *found = ClassUse { total, used, cached };
        }
        found
    }

    /// Bytes of all available blocks and of extents that no class has, while `kept` stays free.
    pub(crate) fn available_bytes(&self, kept: PerClass, overlappable_too: bool) -> u64 {
        let own = self.bytes_of(self.available_in(overlappable_too).saturating_sub(self.tail.by_class));
        match self.extents.as_deref() {
            Some(extents) => own.saturating_add(extents.spare_bytes()).saturating_sub(extents.bytes_of(kept.get(0))),
            None => own.saturating_sub(self.bytes_of(kept)),
        }
    }

    /// Whether an empty tier has these blocks, and what is kept.
    pub(crate) fn could_have(&self, blocks: PerClass, kept: PerClass) -> bool {
        match self.extents.as_deref() {
            Some(extents) => extents.filled_by(blocks) + kept.get(0) <= extents.usable(self.has_null),
            None => (0..self.classes.len())
                .all(|class| blocks.get(class).saturating_add(kept.get(class)) <= self.most_of(class)),
        }
    }

    /// Numbers that no block has at the moment: those of extents that their class does not have, and all but one of the
    /// null blocks.
    pub(crate) fn num_absent(&self) -> usize {
        match self.extents.as_deref() {
            Some(extents) => self.len - extents.num_blocks() - usize::from(self.has_null),
            None if self.classes.len() == 1 => 0,
            None => {
                let absent = |class| self.capacity_of(class) - self.len_of(class);
                let nulls = (1..self.classes.len()).filter(|&class| self.has_null && self.len_of(class) > 0).count();
                nulls + (0..self.classes.len()).map(absent).sum::<usize>()
            }
        }
    }

    /// Whether a number is one of those.
    pub(super) fn is_absent(&self, block: BlockId) -> bool {
        if self.is_beyond(block) || (self.has_null && block == crate::group::NULL_BLOCK) {
            return false;
        }
        match self.extents.as_deref() {
            Some(extents) => !extents.has(&self.classes, block),
            None => self.has_null && self.local(block).1 == 0,
        }
    }

    /// Whether a number is one that a block of the pool has at the moment.
    pub(super) fn is_there(&self, block: BlockId) -> bool {
        !self.is_beyond(block) && !self.is_absent(block)
    }

    /// The sets of a block's class.
    pub(super) fn free_of(&self, block: BlockId) -> &ClassSets {
        &self.sets[self.classes.of(block)]
    }

    /// Lets the extents follow a block from one set to another.
    #[inline]
    pub(super) fn note_moved(&mut self, block: BlockId, from: Membership, to: Membership) {
        if let Some(extents) = &mut self.extents {
            extents.note(&self.classes, block, from, to);
        }
    }

    /// Like [`Pool::note_moved`], for many blocks.
    #[inline]
    pub(super) fn note_all(&mut self, blocks: &[BlockId], from: Membership, to: Membership) {
        if let Some(extents) = &mut self.extents {
            for &block in blocks {
                extents.note(&self.classes, block, from, to);
            }
        }
    }

    /// Checks that a class's sets have only its own blocks, and that all of them are free, cached, in use or held.
    pub(super) fn check_classes(&self) -> Option<String> {
        let mut counted = vec![[0; 3]; self.classes.len()];
        for (block, state) in (0..).map(BlockId).zip(&self.blocks).take(self.len) {
            if !self.is_there(block) {
                continue;
            }
            let kind = match state.membership() {
                Membership::Free => continue,
                Membership::Evictable => 0,
                Membership::Overlappable => 1,
                Membership::Neither => 2,
            };
            counted[self.classes.of(block)][kind] += 1;
        }
        for (class, [cached, overlappable, used]) in counted.into_iter().enumerate() {
            let (sets, range) = (&self.sets[class], self.classes.range(class));
            let own = sets.free.iter().chain(sets.overlappable.iter()).all(|block| range.contains(&block.0));
            let there = range.clone().map(BlockId).filter(|&block| self.is_there(block)).count();
            let free = there - cached - overlappable - used;
            let found = (sets.free.len(), self.evictable_of(class), sets.overlappable.len());
            if !own || found != (free, cached, overlappable) {
                return Some(format!(
                    "class {class} has {found:?} free, evictable and overlappable blocks, counted {:?}",
                    (free, cached, overlappable)
                ));
            }
        }
        None
    }
}
