//! Extents: the pieces of a tier that its page classes take and give back.
//!
//! A class takes its own free blocks first, and cached ones that serve nobody; then an extent that nobody uses, if what
//! serves nobody goes; then its own cached blocks; then an extent of another class in which nothing is in use.
//!
//! So the blocks in use of a class can come to lie in all extents, while there are bytes for another class, but no extent.
//! Once a sequence has failed for that, classes pack their blocks: until all have been released twice, they take blocks in
//! the extents that they use before others, and what is cached there goes. A sequence that starts again alone then never
//! uses more extents than its blocks fill: that is what admission counts, see [`Pool::could_have`].
//!
//! Invariant: the blocks of an extent that a class does not own hold nothing and are in no set.

use super::Pool;
use crate::block::Membership;
use crate::id::BlockId;
use crate::page::{Classes, ExtentShape, MAX_CLASSES, PerClass};
use crate::reuse::BlockSet;
use std::ops::Range;

/// Owner of an extent that no class has.
const NOBODY: u8 = u8::MAX;

/// The extents of one tier.
#[derive(Debug, Clone)]
pub(super) struct Extents {
    /// Blocks of each class in an extent.
    per_extent: PerClass,
    bytes: u64,
    /// Extents of the tier: the first of as many as a resize can make them.
    len: usize,
    /// By extent: the class that has it. Beyond the end, the one whose blocks are still in use there.
    owners: Vec<u8>,
    /// Extents that no class has.
    spare: BlockSet,
    /// By extent: its blocks that are in use or leased.
    held: Vec<u32>,
    /// By extent: its blocks that can be evicted.
    cached: Vec<u32>,
    /// By class: its extents, those of them without held blocks, and those that are empty.
    owned: PerClass,
    idle: PerClass,
    vacant: [BlockSet; MAX_CLASSES],
    /// Set while classes pack their blocks.
    packing: Option<Box<Packing>>,
}

/// See the file's head.
#[derive(Debug, Clone)]
struct Packing {
    /// By class: its extents in which some blocks are held, but not all.
    partly: [BlockSet; MAX_CLASSES],
    /// How often all blocks will have been released when it ends.
    releases: u8,
}

impl Extents {
    /// Extents that no class has yet; with `has_null`, the first is never given away.
    pub(super) fn new(ExtentShape { per_extent, bytes, count, most }: ExtentShape, has_null: bool) -> Self {
        let mut spare = BlockSet::full(most);
        spare.remove_run(id(count)..id(most));
        if has_null {
            spare.remove(BlockId(0));
        }
        Self {
            per_extent,
            bytes,
            len: count,
            owners: vec![NOBODY; most],
            spare,
            held: vec![0; most],
            cached: vec![0; most],
            owned: PerClass::default(),
            idle: PerClass::default(),
            vacant: std::array::from_fn(|_| BlockSet::empty(most)),
            packing: None,
        }
    }

    /// Extents of the tier.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Extents that the tier can have.
    pub(super) fn capacity(&self) -> usize {
        self.owners.len()
    }

    /// Sets the number of extents of the tier, and returns the former one.
    pub(super) fn set_len(&mut self, len: usize) -> usize {
        std::mem::replace(&mut self.len, len)
    }

    /// The class that has an extent, and the numbers of its blocks there.
    pub(super) fn place(&self, classes: &Classes, extent: usize) -> Option<(usize, Range<u32>)> {
        let class = Some(self.owners[extent]).filter(|&by| by != NOBODY).map(usize::from)?;
        Some((class, self.blocks(classes, class, extent)))
    }

    /// An extent leaves the tier, in which nothing is cached any longer. Its class keeps it as long as it uses blocks there.
    pub(super) fn leave(&mut self, extent: usize) {
        let by = self.owners[extent];
        self.spare.remove(BlockId(id(extent)));
        self.set_owner(extent, None);
        self.cached[extent] = 0;
        if self.held[extent] > 0 {
            self.owners[extent] = by;
        }
    }

    /// An extent comes to the tier, or back to it.
    pub(super) fn join(&mut self, extent: usize) {
        match std::mem::replace(&mut self.owners[extent], NOBODY) {
            NOBODY => {
                self.spare.insert(BlockId(id(extent)));
            }
            by => self.set_owner(extent, Some(usize::from(by))),
        }
    }

    /// Follows a block of an extent that has left the tier. With the last one in use, its class gives it up.
    pub(super) fn note_left(&mut self, classes: &Classes, block: BlockId, is_held: bool) {
        let extent = self.at(classes, classes.of(block), block);
        self.held[extent] = if is_held { self.held[extent] + 1 } else { self.held[extent] - 1 };
        if self.held[extent] == 0 {
            self.owners[extent] = NOBODY;
        }
    }

    pub(super) fn at(&self, classes: &Classes, class: usize, block: BlockId) -> usize {
        (block.0 - classes.first(class)) as usize / self.per_extent.get(class).max(1)
    }

    /// Whether the class of a block has the extent that the block lies in.
    pub(super) fn has(&self, classes: &Classes, block: BlockId) -> bool {
        let class = classes.of(block);
        self.owners[self.at(classes, class, block)] == owner(class)
    }

    /// The numbers of a class's blocks in an extent.
    fn blocks(&self, classes: &Classes, class: usize, extent: usize) -> Range<u32> {
        let count = self.per_extent.get(class);
        let first = classes.first(class) + id(extent * count);
        first..first + id(count)
    }

    /// Follows a block of a class from one set to another.
    pub(super) fn note(&mut self, classes: &Classes, block: BlockId, from: Membership, to: Membership) {
        let class = classes.of(block);
        let extent = self.at(classes, class, block);
        let was = self.emptiness(extent);
        self.held[extent] = self.held[extent] + u32::from(is_held(to)) - u32::from(is_held(from));
        let is_cached = |set| u32::from(set == Membership::Evictable);
        self.cached[extent] = self.cached[extent] + is_cached(to) - is_cached(from);
        let is = self.emptiness(extent);
        if was != is && self.owners[extent] == owner(class) {
            let idle = self.idle.at(class);
            *idle = *idle + is[0] - was[0];
            if was[1] != is[1] {
                self.mark_vacant(class, extent, is[1] == 1);
            }
        }
        if self.packing.is_some() {
            self.note_packed(class, extent, was[0] < is[0]);
        }
    }

    /// Follows a block while classes pack theirs; `is_released`: its extent has no held block any longer.
    #[cold]
    fn note_packed(&mut self, class: usize, extent: usize, is_released: bool) {
        let is_partly = self.is_partly(extent) && self.owners[extent] == owner(class);
        let Some(packing) = &mut self.packing else { return };
        if is_partly {
            packing.partly[class].insert(BlockId(id(extent)));
        } else {
            packing.partly[class].remove(BlockId(id(extent)));
        }
        if is_released && self.idle == self.owned {
            packing.releases -= 1;
            if packing.releases == 0 {
                self.packing = None;
            }
        }
    }

    /// Whether some blocks of an extent of a class are held, but not all.
    fn is_partly(&self, extent: usize) -> bool {
        let (by, held) = (self.owners[extent], self.held[extent] as usize);
        by != NOBODY && extent < self.len && held > 0 && held < self.per_extent.get(usize::from(by))
    }

    /// Lets classes pack their blocks until all have been released `releases` times.
    fn pack(&mut self, releases: u8) {
        let mut partly = std::array::from_fn(|_| BlockSet::empty(self.owners.len()));
        for extent in (0..self.len).filter(|&extent| self.is_partly(extent)) {
            partly[usize::from(self.owners[extent])].insert(BlockId(id(extent)));
        }
        self.packing = Some(Box::new(Packing { partly, releases }));
    }

    /// Counts the extents of a packing again, after some have left or come.
    pub(super) fn repack(&mut self) {
        if let Some(Packing { releases, .. }) = self.packing.as_deref() {
            self.pack(*releases);
        }
    }

    /// While classes pack their blocks: the extent that a class with unused blocks takes the next ones from.
    fn next_packed(&self, class: usize) -> Option<usize> {
        let partly = &self.packing.as_deref()?.partly[class];
        let cached = || (0..self.len).find(|&extent| self.owners[extent] == owner(class) && self.held[extent] == 0);
        partly.next(0).or_else(|| self.vacant[class].next(0)).map(BlockId::index).or_else(cached)
    }

    fn mark_vacant(&mut self, class: usize, extent: usize, is_vacant: bool) {
        let extent = BlockId(id(extent));
        if is_vacant {
            self.vacant[class].insert(extent);
        } else {
            self.vacant[class].remove(extent);
        }
    }

    /// 1 if nothing of an extent is held, and 1 if it holds nothing at all.
    fn emptiness(&self, extent: usize) -> [usize; 2] {
        let is_idle = self.held[extent] == 0;
        [usize::from(is_idle), usize::from(is_idle && self.cached[extent] == 0)]
    }

    /// Extents that hold nothing and that a class does not have.
    pub(super) fn vacant(&self, class: usize) -> usize {
        let others = self.vacant.iter().enumerate().filter(|&(by, _)| by != class);
        self.spare.len() + others.map(|(_, extents)| extents.len()).sum::<usize>()
    }

    /// Bytes from a block of a class to the next.
    pub(super) fn stride(&self, class: usize) -> u64 {
        self.bytes / self.per_extent.get(class).max(1) as u64
    }

    /// Blocks of a class in an extent.
    pub(super) fn per_extent(&self, class: usize) -> usize {
        self.per_extent.get(class)
    }

    /// Extents that a class has.
    pub(super) fn owned(&self, class: usize) -> usize {
        self.owned.get(class)
    }

    /// Bytes of a number of extents.
    pub(super) fn bytes_of(&self, extents: usize) -> u64 {
        self.bytes.saturating_mul(extents as u64)
    }

    /// Bytes of the extents that no class has.
    pub(super) fn spare_bytes(&self) -> u64 {
        self.bytes_of(self.spare.len())
    }

    /// Extents that a class could have besides its own, if the others need none.
    pub(super) fn obtainable(&self, class: usize) -> usize {
        self.obtainable_of(class, self.idle)
    }

    /// Extents that classes have, and blocks in them.
    pub(super) fn num_blocks(&self) -> usize {
        (0..MAX_CLASSES).map(|class| self.owned.get(class) * self.per_extent.get(class)).sum()
    }

    /// Extents that classes can have.
    pub(super) fn usable(&self, has_null: bool) -> usize {
        self.len.saturating_sub(usize::from(has_null))
    }

    /// Extents that numbers of blocks of each class fill.
    pub(super) fn filled_by(&self, blocks: PerClass) -> usize {
        blocks.with(self.per_extent, |blocks, per_extent| blocks.div_ceil(per_extent.max(1))).total()
    }

    /// Extents that classes lack for `wanted` blocks if they have `available` ones, and those that they can get: spare
    /// ones, and `idle` ones of classes that can do without them.
    pub(super) fn balance(&self, wanted: PerClass, available: PerClass, idle: PerClass) -> (usize, usize) {
        let lacking = self.filled_by(wanted.saturating_sub(available));
        (lacking, self.spare.len() + idle.with(self.spared(wanted, available), usize::min).total())
    }

    /// Extents that classes with `available` blocks can do without if they take `wanted` ones.
    fn spared(&self, wanted: PerClass, available: PerClass) -> PerClass {
        available.saturating_sub(wanted).with(self.per_extent, |left, per| left / per.max(1))
    }

    /// Extents in which nothing is held, by class: with those in which only blocks that are `held` are, without those that
    /// have one that is `found`.
    pub(super) fn idle_without(&self, classes: &Classes, held: &[BlockId], found: &[BlockId]) -> PerClass {
        let place = |&block: &BlockId| (self.at(classes, classes.of(block), block), classes.of(block));
        let places = |blocks: &[BlockId]| {
            let mut places: Vec<_> = blocks.iter().map(place).collect();
            places.sort_unstable();
            places
        };
        let (freed, mut pinned) = (places(held), places(found));
        let is_idle = |extent: usize| {
            let freed = freed.iter().filter(|(at, _)| *at == extent).count();
            self.held.get(extent).is_some_and(|&held| held as usize == freed)
        };
        pinned.dedup();
        pinned.retain(|(extent, _)| is_idle(*extent));
        let mut more: Vec<_> = freed.iter().copied().filter(|(extent, _)| is_idle(*extent)).collect();
        more.dedup();
        let count =
            |places: &[(usize, usize)]| places.iter().map(|&(_, class)| PerClass::of(class, 1)).sum::<PerClass>();
        (self.idle + count(&more)).saturating_sub(count(&pinned))
    }

    /// Extents that a class could have besides its own, if `idle` ones are and the others need none.
    pub(super) fn obtainable_of(&self, class: usize, idle: PerClass) -> usize {
        self.spare.len() + idle.total() - idle.get(class)
    }

    /// The extent that another class gives up first: the one with the smallest part of cached blocks. Classes give up
    /// as many as `surplus` says.
    fn cheapest(&self, class: usize, surplus: PerClass) -> Option<(usize, usize)> {
        let part = |(extent, by): &(usize, usize)| {
            (u64::from(self.cached[*extent]) << 32) / self.per_extent.get(*by).max(1) as u64
        };
        let idle = (0..self.len).filter(|&extent| self.held[extent] == 0 && self.owners[extent] != NOBODY);
        let idle = idle.map(|extent| (extent, usize::from(self.owners[extent])));
        idle.filter(|&(_, by)| by != class && surplus.get(by) >= self.per_extent.get(by)).min_by_key(part)
    }

    /// Whether an extent that no class has, or that is empty, can go to another class.
    fn empty(&self, class: usize, surplus: PerClass) -> Option<(usize, Option<usize>)> {
        if let Some(extent) = self.spare.next(0) {
            return Some((extent.index(), None));
        }
        let others = (0..MAX_CLASSES).filter(|&by| by != class && surplus.get(by) >= self.per_extent.get(by));
        let first = others.filter_map(|by| Some((self.vacant[by].next(0)?.index(), Some(by))));
        first.min()
    }

    fn set_owner(&mut self, extent: usize, class: Option<usize>) {
        let [is_idle, is_vacant] = self.emptiness(extent);
        if let Some(former) = Some(self.owners[extent]).filter(|&former| former != NOBODY) {
            *self.owned.at(usize::from(former)) -= 1;
            *self.idle.at(usize::from(former)) -= is_idle;
            self.mark_vacant(usize::from(former), extent, false);
        }
        if let Some(class) = class {
            *self.owned.at(class) += 1;
            *self.idle.at(class) += is_idle;
            self.mark_vacant(class, extent, is_vacant == 1);
            self.spare.remove(BlockId(id(extent)));
        }
        self.owners[extent] = class.map_or(NOBODY, owner);
    }
}

/// An extent of a class with blocks that are in use or leased.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BusyExtent {
    pub(crate) class: usize,
    pub(crate) extent: usize,
    /// How many of its blocks these are.
    pub(crate) held: usize,
    /// Those that are free or can be evicted.
    pub(crate) open: usize,
    /// Whether it is beyond the end of a shrunken tier.
    pub(crate) has_left: bool,
}

/// What classes have once all moves so far, and those that are being planned, have landed.
#[derive(Clone, Debug)]
pub(crate) struct Prospect {
    wanted: PerClass,
    kept: usize,
    available: PerClass,
    idle: PerClass,
}

impl Prospect {
    /// Adds an extent that a class empties.
    pub(crate) fn add_idle(&mut self, class: usize) {
        *self.idle.at(class) += 1;
    }
}

fn is_held(set: Membership) -> bool {
    matches!(set, Membership::Neither | Membership::Overlappable)
}

fn owner(class: usize) -> u8 {
    u8::try_from(class).unwrap_or(NOBODY)
}

fn id(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

impl Pool {
    /// Gives classes the extents that they need to take `wanted` blocks, which [`Pool::room`] has found to be there.
    /// Returns how many cached blocks without a copy in another tier are lost with these.
    pub(crate) fn make_room(&mut self, wanted: PerClass, overlappable_too: bool) -> usize {
        if self.extents.is_none() {
            return 0;
        }
        let wanted = self.with_tail(wanted);
        (0..self.classes.len()).map(|class| self.grow_class(class, wanted, overlappable_too)).sum()
    }

    /// Gives one class extents until it can take its blocks; what it can evict itself stays, as far as others are empty.
    fn grow_class(&mut self, class: usize, wanted: PerClass, overlappable_too: bool) -> usize {
        let (count, mut lost) = (wanted.get(class), 0);
        loop {
            let available = self.available_in(overlappable_too);
            let surplus = available.saturating_sub(wanted);
            let Some(extents) = self.extents.as_deref() else { return lost };
            let unused = |class| PerClass::of(class, self.sets[class].free.len() + self.num_dead(class));
            let unused: PerClass = (0..self.classes.len()).map(unused).sum();
            if count <= unused.get(class) {
                return lost;
            }
            // An empty extent that another class needs, too, is not better than what this one has cached.
            let empty = extents.empty(class, unused.saturating_sub(wanted));
            if empty.is_none() && self.drop_dead(class) {
                continue;
            }
            if empty.is_none() && count <= available.get(class) {
                return lost;
            }
            let Some(extents) = self.extents.as_deref() else { return lost };
            let cheapest = || extents.cheapest(class, surplus).map(|(extent, by)| (extent, Some(by)));
            let Some((extent, from)) = empty.or_else(cheapest) else { return lost };
            lost += self.give(extent, from, class);
        }
    }

    /// A call has failed for `wanted` blocks: classes pack theirs from now on if there were bytes for these.
    pub(crate) fn note_lack(&mut self, wanted: PerClass) {
        let has_bytes = self.bytes_of(wanted) <= self.available_bytes(PerClass::default(), true);
        if let (true, Some(extents)) = (has_bytes, self.extents.as_deref_mut()) {
            extents.pack(2);
        }
    }

    /// While classes pack their blocks: takes up to `count` of a class, extent by extent, as [`Pool::take_of`] does.
    pub(super) fn take_packed(&mut self, class: usize, count: usize, filling: bool, out: &mut Vec<BlockId>) {
        let end = out.len() + count;
        while out.len() < end {
            let Some(extents) = self.extents.as_deref() else { return };
            let Some(extent) = extents.next_packed(class) else { return };
            let (all, before) = (extents.blocks(&self.classes, class, extent), out.len());
            for drops_cached in [false, true] {
                for block in all.clone().map(BlockId) {
                    if drops_cached && out.len() < end {
                        self.drop_cached(block);
                    }
                    if out.len() < end && self.sets[class].free.contains(block) {
                        self.know(block);
                        self.change(block, |block| block.take(filling));
                        if let Some((tracker, blocks)) = self.tracker_mut() {
                            tracker.note_written(block, blocks);
                        }
                        out.push(block);
                    }
                }
            }
            if out.len() == before {
                return;
            }
        }
    }

    /// Whether classes pack their blocks.
    #[inline]
    pub(crate) fn is_packing(&self) -> bool {
        self.extents.as_deref().is_some_and(|extents| extents.packing.is_some())
    }

    /// Frees the cached blocks of other classes that serve nobody; returns whether there were any.
    fn drop_dead(&mut self, class: usize) -> bool {
        let mut any = false;
        for other in (0..self.classes.len()).filter(|&other| other != class) {
            while let Some(block) = self.cache.as_mut().and_then(|cache| cache.pop_dead(other)) {
                self.drop_popped(block, false);
                any = true;
            }
        }
        any
    }

    fn num_dead(&self, class: usize) -> usize {
        self.cache.as_ref().map_or(0, |cache| cache.num_dead(class))
    }

    /// The extents with blocks in use, those included that have left the tier.
    pub(crate) fn busy_extents(&self) -> Vec<BusyExtent> {
        let Some(extents) = self.extents.as_deref() else { return Vec::new() };
        let owned =
            extents.owners.iter().enumerate().filter(|(extent, by)| **by != NOBODY && extents.held[*extent] > 0);
        let busy = owned.map(|(extent, &by)| {
            let (class, held) = (usize::from(by), extents.held[extent] as usize);
            let has_left = extent >= extents.len;
            let open = if has_left { 0 } else { extents.per_extent.get(class) - held };
            BusyExtent { class, extent, held, open, has_left }
        });
        busy.collect()
    }

    /// The blocks of an extent that are in use or leased.
    pub(crate) fn held_in(&self, BusyExtent { class, extent, .. }: BusyExtent) -> impl Iterator<Item = BlockId> + '_ {
        let blocks = self.extents.as_deref().map_or(0..0, |extents| extents.blocks(&self.classes, class, extent));
        blocks.map(BlockId).filter(|&block| is_held(self.block(block).membership()))
    }

    /// The extent that a block lies in.
    pub(crate) fn extent_at(&self, block: BlockId) -> usize {
        self.extents.as_deref().map_or(0, |extents| extents.at(&self.classes, self.class_of(block), block))
    }

    /// What classes have if `wanted` blocks will be taken, `kept` extents will stay empty, and `moving` blocks leave
    /// the extents that they are in, `leaving` of which hold no others.
    pub(crate) fn prospect(&self, wanted: PerClass, kept: usize, moving: PerClass, leaving: PerClass) -> Prospect {
        let idle = self.extents.as_deref().map_or_else(PerClass::default, |extents| extents.idle);
        Prospect { wanted, kept, available: self.available_in(true) + moving, idle: idle + leaving }
    }

    /// How many extents are lacking.
    pub(crate) fn lacking(&self, Prospect { wanted, kept, available, idle }: &Prospect) -> usize {
        let Some(extents) = self.extents.as_deref() else { return 0 };
        let (lacking, given) = extents.balance(*wanted, *available, *idle);
        (lacking + kept).saturating_sub(given)
    }

    /// Whether a class could do without one more extent, if that were empty.
    pub(crate) fn can_spare(&self, Prospect { wanted, available, idle, .. }: &Prospect, class: usize) -> bool {
        let spared = self.extents.as_deref().map(|extents| extents.spared(*wanted, *available));
        spared.is_some_and(|spared| spared.get(class) > idle.get(class))
    }

    /// Blocks of a class that can be taken without an extent of another class.
    pub(crate) fn own_available(&self, class: usize) -> usize {
        self.available_in(true).get(class)
    }

    /// Takes an extent from a class, with what is cached there, and gives it to another.
    fn give(&mut self, extent: usize, from: Option<usize>, class: usize) -> usize {
        let (Some(extents), mut lost) = (self.extents.as_deref(), 0) else { return 0 };
        if let Some(from) = from {
            let gone = extents.blocks(&self.classes, from, extent);
            for block in gone.clone().map(BlockId) {
                lost += usize::from(self.is_evictable(block) && self.block(block).tier_copy().is_none());
                self.drop_cached(block);
            }
            self.sets[from].free.cut(gone);
        }
        let Some(extents) = self.extents.as_deref_mut() else { return lost };
        extents.set_owner(extent, Some(class));
        let new = extents.blocks(&self.classes, class, extent);
        self.sets[class].free.extend(new, &[]);
        lost
    }

    /// Checks that every extent's blocks are where its owner says, and that the extents are all of the tier.
    pub(super) fn check_extents(&self) -> Option<String> {
        let extents = self.extents.as_deref()?;
        let [mut owned, mut idle] = [PerClass::default(); 2];
        let mut vacant = extents.vacant.each_ref().map(|of| BlockSet::empty(of.capacity()));
        for (extent, &by) in extents.owners.iter().enumerate() {
            let has_left = extent >= extents.len;
            if by == NOBODY || has_left && extents.held[extent] == 0 {
                if by != NOBODY || extents.held[extent] + extents.cached[extent] > 0 {
                    return Some(format!("extent {extent} of nobody, or beyond the end, is in use or has an owner"));
                }
                continue;
            }
            let class = usize::from(by);
            let all = || extents.blocks(&self.classes, class, extent).map(|block| self.block(BlockId(block)));
            let count = |is: fn(Membership) -> bool| all().filter(|block| is(block.membership())).count();
            let found = [extents.held[extent], extents.cached[extent]].map(|count| count as usize);
            let counted = [count(is_held), count(|set| set == Membership::Evictable)];
            if found != counted {
                return Some(format!(
                    "extent {extent} of class {class} has {found:?} held and cached, counted {counted:?}"
                ));
            }
            if has_left {
                continue;
            }
            owned += PerClass::of(class, 1);
            idle += PerClass::of(class, usize::from(counted[0] == 0));
            if counted == [0, 0] {
                vacant[class].insert(BlockId(id(extent)));
            }
        }
        let is_vacant = |(counted, found): (&BlockSet, &BlockSet)| counted.iter().eq(found.iter());
        if !vacant.iter().zip(&extents.vacant).all(is_vacant) {
            return Some(format!("empty extents of each class are {vacant:?}, not {:?}", extents.vacant));
        }
        if let Some(packing) = extents.packing.as_deref() {
            let is_partly =
                |class: usize, extent: usize| usize::from(extents.owners[extent]) == class && extents.is_partly(extent);
            let counted = |class| (0..extents.owners.len()).filter(move |&extent| is_partly(class, extent));
            let is_right = |(class, of): (usize, &BlockSet)| counted(class).eq(of.iter().map(BlockId::index));
            if !packing.partly.iter().enumerate().all(is_right) {
                return Some(format!("extents that are used in part are not {:?}", packing.partly));
            }
        }
        let spare = extents.spare.iter().all(|extent| extents.owners[extent.index()] == NOBODY);
        let all = owned.total() + extents.spare.len() == extents.usable(self.has_null);
        let (counted, found) = ([owned, idle], [extents.owned, extents.idle]);
        if (counted, spare, all) != (found, true, true) {
            return Some(format!(
                "extents, and those that are idle, are {counted:?} and {} spare of {}, not {found:?}",
                extents.spare.len(),
                extents.owners.len(),
            ));
        }
        None
    }
}
