//! Resume points: the positions where a later prompt can continue, in models whose layers do not all keep every block.
//!
//! A *point* is a position in a chain. It hangs on its *anchor*, the block with a key that ends there, and has a *tail*:
//! the blocks of windows and states that a token at this position needs. Tails have no keys: they are found with their
//! point and evicted with it. Where several groups keep every block, those of the other groups are the anchor's
//! *companions*, and share its fate.
//!
//! Invariant: an anchor counts the points behind it. An unused block that leads to no point goes first of all; so what
//! is cached can be found, or is the next to be evicted.

use super::evict::{Departure, Policy, Rank};
use super::index::{PrefixIndex, grown};
use super::outside::{Grave, Outside};
use super::{Departing, PrefixCache};
use crate::hash::Key;
use crate::id::BlockId;
use crate::page::Classes;
use crate::reuse::{BlockSet, indices, runs};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use std::ops::Range;

mod check;
mod sweep;

/// Bit of an anchor's reasons: it has a point itself. The others count the next anchors that lead to one.
const POINT: u16 = 1 << 15;

/// This many next anchors are no longer counted down: such an anchor stays live until the eviction order reaches it, or
/// a sweep counts all again.
const MANY: u16 = POINT - 1;

/// Reasons with one more anchor that leads to a point.
#[inline]
fn one_more(reasons: u16) -> u16 {
    if reasons & !POINT == MANY { reasons } else { reasons + 1 }
}

/// Room for this many anchors' lists is never given back.
const LEAST_ROOM: usize = 1024;

/// The blocks that hang on an anchor.
#[derive(Debug, Clone, Default)]
struct Bundle {
    /// None once one was lost: the anchor can no longer be used.
    companions: Box<[BlockId]>,
    tail: Option<Box<[BlockId]>>,
    /// Prompts part behind the point.
    is_junction: bool,
}

impl Bundle {
    fn blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.companions.iter().chain(self.tail.iter().flatten()).copied()
    }
}

/// What leaves for the host together.
#[derive(Debug, Clone, Default)]
struct Unit {
    number: u64,
    /// The rank of the anchor that was evicted.
    rank: Option<Rank>,
    /// Blocks of its tail that stay on the device: something uses them, or they belong to another point, too.
    staying: Vec<BlockId>,
    /// Number of blocks of its tail that go: all at once, as a part would be of no use.
    going: usize,
}

/// The points of one tier.
#[derive(Debug, Clone)]
pub(crate) struct Points {
    /// Blocks of other groups that each anchor needs.
    companions: usize,
    /// Every anchor is a point without a tail: no group leaves blocks behind.
    is_dense: bool,
    /// By anchor: the link to the one before it, 0 for the first.
    parents: Vec<u64>,
    /// By anchor: why it is kept.
    reasons: Vec<u16>,
    /// By block: the points and anchors that it hangs on.
    owners: Vec<u32>,
    bundles: FxHashMap<BlockId, Bundle>,
    /// Blocks that are published without a key.
    keyless: BlockSet,
    /// Evictable blocks that the policy's order does not have.
    pub(super) outside: Outside,
    /// Where blocks go that lose their point now.
    goes_to: Grave,
    /// What is leaving for the host together: a point with all that only led to it.
    leaving: Unit,
    /// Anchors whose tails are on their way to the host: prompts find these as long as their blocks are here.
    departing: BlockSet,
    /// Blocks that have followed a point to the host, or were about to.
    followers: BlockSet,
    /// An anchor that others depend on is gone, since the last sweep.
    is_broken: bool,
    /// Blocks, each with an anchor that it hangs on; kept once it was needed.
    hangs_on: Option<BTreeSet<(BlockId, BlockId)>>,
}

impl Points {
    /// `companions`: how many other groups keep every block; `is_dense`: the groups that do not are none.
    pub(crate) fn new(blocks: usize, classes: Classes, companions: usize, is_dense: bool) -> Self {
        // The system provides these zeroed and untouched: anchors and the blocks that hang on them are mostly of different
        // page classes, and so in different parts.
        Self {
            companions,
            is_dense,
            parents: vec![0; blocks],
            reasons: vec![0; blocks],
            owners: vec![0; blocks],
            bundles: FxHashMap::default(),
            keyless: BlockSet::empty(blocks),
            outside: Outside::new(blocks, classes),
            goes_to: Grave::Dead,
            leaving: Unit::default(),
            departing: BlockSet::empty(blocks),
            followers: BlockSet::empty(blocks),
            is_broken: false,
            hangs_on: None,
        }
    }

    /// Number of page classes.
    pub(crate) fn num_classes(&self) -> usize {
        self.outside.num_classes()
    }

    /// Memory of one block.
    pub(crate) const BYTES: usize = size_of::<u64>() + size_of::<u16>() + size_of::<u32>() + 12;

    #[inline]
    fn reasons(&self, block: BlockId) -> u16 {
        self.reasons.get(block.index()).copied().unwrap_or(0)
    }

    pub(super) fn is_owned(&self, block: BlockId) -> bool {
        self.owners.get(block.index()).is_some_and(|&owners| owners > 0)
    }

    /// Whether an anchor leads to a point.
    #[inline]
    fn is_live(&self, anchor: BlockId) -> bool {
        self.is_dense || self.reasons(anchor) > 0
    }

    /// Whether a prompt can continue behind an anchor.
    #[inline]
    pub(crate) fn has_point(&self, anchor: BlockId) -> bool {
        let departs = || !self.departing.is_empty() && self.departing.contains(anchor);
        self.is_dense || self.reasons(anchor) & POINT != 0 || departs()
    }

    /// The blocks of a point, group by group.
    pub(crate) fn tail(&self, anchor: BlockId) -> &[BlockId] {
        self.bundles.get(&anchor).and_then(|bundle| bundle.tail.as_deref()).unwrap_or_default()
    }

    /// Whether the point of an anchor, if it has one, takes blocks of its own.
    #[inline]
    pub(crate) fn has_tail(&self, anchor: BlockId) -> bool {
        self.has_point(anchor) && self.bundles.get(&anchor).is_some_and(|bundle| bundle.tail.is_some())
    }

    /// Whether anchors behind one lead to a point.
    pub(crate) fn leads_on(&self, anchor: BlockId) -> bool {
        self.reasons(anchor) & !POINT > 0
    }

    /// Whether prompts part behind the point of an anchor.
    pub(crate) fn is_junction(&self, anchor: BlockId) -> bool {
        self.bundles.get(&anchor).is_some_and(|bundle| bundle.is_junction)
    }

    /// The blocks of the other groups that keep every block; `None` if they are not all there.
    #[inline]
    pub(crate) fn companions(&self, anchor: BlockId) -> Option<&[BlockId]> {
        if self.companions == 0 {
            return Some(&[]);
        }
        self.bundles.get(&anchor).map(|bundle| &*bundle.companions).filter(|all| all.len() == self.companions)
    }

    /// Makes a block evictable that does not belong in the policy's order; returns false for one that does.
    fn park_outside(&mut self, block: BlockId) -> bool {
        let belongs = self.keyless.contains(block) || !self.is_live(block);
        if belongs && self.is_owned(block) {
            self.outside.insert_idle(block);
        } else if belongs {
            // Its point may be on the host: only what was never on the way there serves nobody.
            let grave = if self.followers.contains(block) { Grave::Leaving } else { Grave::Dead };
            self.outside.bury(grave, block);
        }
        belongs
    }

    /// Makes room for a block in the lists.
    #[inline]
    fn know(&mut self, block: BlockId) {
        if block.index() >= self.owners.len() {
            self.grow_lists(block);
        }
    }

    #[cold]
    fn grow_lists(&mut self, block: BlockId) {
        let len = grown(block, self.owners.capacity());
        self.owners.resize(len, 0);
        self.reasons.resize(len, 0);
        self.parents.resize(len, 0);
    }

    /// Forgets what hangs on an anchor. Where many short prompts had points, few long ones may follow.
    fn drop_bundle(&mut self, anchor: BlockId) {
        self.bundles.remove(&anchor);
        let (len, room) = (self.bundles.len(), self.bundles.capacity());
        if room > LEAST_ROOM && len * 8 < room {
            self.bundles.shrink_to(len * 2);
        }
    }

    fn own(&mut self, anchor: BlockId, blocks: &[BlockId]) {
        for run in runs(blocks) {
            self.know(BlockId(run.end - 1));
            self.owners[indices(&run)].iter_mut().for_each(|owners| *owners += 1);
        }
        if let Some(all) = &mut self.hangs_on {
            all.extend(blocks.iter().map(|&block| (block, anchor)));
        }
    }

    /// The tail of an anchor sets out for the host.
    fn send_tail(&mut self, anchor: BlockId) {
        let Some(tail) = self.bundles.get(&anchor).and_then(|bundle| bundle.tail.as_deref()) else { return };
        self.departing.insert(anchor);
        for &block in tail {
            if self.owners[block.index()] == 1 && self.outside.remove_idle(block) {
                self.outside.bury(Grave::Leaving, block);
                self.leaving.going += 1;
            } else {
                self.leaving.staying.push(block);
            }
        }
    }

    /// Nothing can be found behind an anchor any longer.
    fn drop_tail(&mut self, anchor: BlockId) {
        let Some(bundle) = self.bundles.get_mut(&anchor) else { return };
        self.departing.remove(anchor);
        if let Some(tail) = bundle.tail.take() {
            self.disown(anchor, &tail);
        }
        if self.companions == 0 {
            self.drop_bundle(anchor);
        }
    }

    /// Releases blocks; those that hang on nothing else go first of all from now on.
    fn disown(&mut self, anchor: BlockId, blocks: &[BlockId]) {
        if let Some(all) = &mut self.hangs_on {
            for &block in blocks {
                all.remove(&(block, anchor));
            }
        }
        for run in runs(blocks) {
            let owners = &mut self.owners[indices(&run)];
            for owners in owners.iter_mut() {
                *owners -= 1;
            }
            let are_free = owners.iter().all(|&owners| owners == 0);
            if are_free && self.goes_to == Grave::Dead && self.outside.remove_idle_run(run.clone()) {
                self.outside.bury_run(run);
                continue;
            }
            for block in run.map(BlockId) {
                if self.owners[block.index()] == 0 && self.outside.remove_idle(block) {
                    self.outside.bury(self.goes_to, block);
                }
            }
        }
    }

    /// Puts the unused companions of an anchor among the dead, unless another anchor needs them, or takes them out.
    fn bring_companions(&mut self, anchor: BlockId, to_dead: bool) {
        if self.companions == 0 {
            return;
        }
        let companions = self.bundles.get(&anchor).map_or_else(Vec::new, |bundle| bundle.companions.to_vec());
        for block in companions {
            if to_dead && !self.serves_another(block, anchor) && self.outside.remove_idle(block) {
                self.outside.bury(self.goes_to, block);
            } else if !to_dead && self.outside.unbury(block) {
                self.outside.insert_idle(block);
            }
        }
    }

    /// Whether a companion hangs on another live anchor, too: prompts that part within the tokens of a key share the first
    /// of several blocks.
    fn serves_another(&mut self, block: BlockId, anchor: BlockId) -> bool {
        self.owners[block.index()] > 1
            && self
                .hung_on(block)
                .into_iter()
                .any(|other| other != anchor && self.is_live(other) && !self.outside.is_dead(other))
    }

    /// Nothing hangs on an anchor without a point any longer.
    fn drop_companions(&mut self, anchor: BlockId) {
        let Some(bundle) = self.bundles.get_mut(&anchor).filter(|_| self.companions > 0) else { return };
        let dropped = std::mem::take(&mut bundle.companions);
        if bundle.tail.is_none() {
            self.drop_bundle(anchor);
        }
        self.disown(anchor, &dropped);
    }

    /// Takes out dead blocks of a class, at most `count`; returns whether there were any.
    fn pop_dead(&mut self, class: usize, count: usize, out: &mut Vec<BlockId>) -> bool {
        let first = out.len();
        while out.len() == first && self.outside.num_dead(class) > 0 {
            self.outside.pop_dead(class, count, out);
            if out.len() == first {
                let Some(next) = self.outside.pop_leaving() else { break };
                self.outside.bury(Grave::Dead, next);
            }
        }
        out.len() > first
    }

    /// Whether neighbours are all found with others.
    pub(super) fn hang(&self, run: Range<u32>) -> bool {
        let owners = self.owners.get(indices(&run)).unwrap_or_default();
        !owners.is_empty() && owners.iter().all(|&owners| owners > 0) && self.keyless.contains_run(run)
    }

    /// Publishes neighbours in use without keys.
    pub(super) fn add_keyless_run(&mut self, run: Range<u32>) {
        self.keyless.insert_run(run);
    }

    /// Forgets popped neighbours if they were found with others, and nothing else; returns whether it did.
    pub(super) fn forget_run(&mut self, run: Range<u32>) -> bool {
        let are_left = self.owners.get(indices(&run)).is_some_and(|owners| owners.iter().all(|&owners| owners == 0));
        let are_keyless = are_left && self.keyless.contains_run(run.clone());
        if are_keyless {
            self.keyless.remove_run(run.clone());
            self.followers.remove_run(run);
        }
        are_keyless
    }

    /// The anchors that a block hangs on, first to last.
    fn hung_on(&mut self, block: BlockId) -> Vec<BlockId> {
        let bundles = &self.bundles;
        let hung = |(&anchor, bundle): (&BlockId, &Bundle)| bundle.blocks().map(|block| (block, anchor)).collect();
        let all = self.hangs_on.get_or_insert_with(|| bundles.iter().flat_map::<Vec<_>, _>(hung).collect());
        all.range((block, BlockId(0))..=(block, BlockId(u32::MAX))).map(|&(_, anchor)| anchor).collect()
    }
}

/// What the keys and the eviction order need to know of each other.
struct Both<'a> {
    points: &'a mut Points,
    index: &'a PrefixIndex,
    order: &'a mut Policy,
}

impl Both<'_> {
    /// The anchor before one in its chain; `Err` if it is gone.
    fn parent(&self, anchor: BlockId) -> Result<Option<BlockId>, ()> {
        match self.points.parents[anchor.index()] {
            0 => Ok(None),
            link => self.index.find_link(link).map(Some).ok_or(()),
        }
    }

    /// Tells the quotas how many blocks hang on those in the order.
    fn note_idle(&mut self) {
        if let Some(quotas) = self.order.quotas_mut() {
            for tenant in self.points.outside.take_changed() {
                quotas.set_idle(tenant, self.points.outside.idle_of(tenant));
            }
        }
    }

    /// The anchor before one in its chain, which is `known` if its key says so.
    #[inline]
    fn parent_or(&self, anchor: BlockId, known: Option<BlockId>) -> Result<Option<BlockId>, ()> {
        let link = self.points.parents[anchor.index()];
        let is_known = |block: &BlockId| link != 0 && self.index.key(*block).is_some_and(|key| key.link() == link);
        let Some(block) = known.filter(is_known) else { return self.parent(anchor) };
        debug_assert_eq!(self.index.find_link(link), Some(block), "a block of a chain that is not published");
        Ok(Some(block))
    }

    /// An anchor has become live: so are those `before` it in its chain, last one first; what they leave out is looked up.
    fn enliven(&mut self, mut anchor: BlockId, mut before: impl Iterator<Item = Option<BlockId>>) {
        let has_dead = self.points.outside.has_dead();
        loop {
            if has_dead {
                if self.points.outside.unbury(anchor) {
                    self.order.insert(anchor);
                }
                // A sequence can use it, and have copies of its companions, while these are still among the dead.
                self.points.bring_companions(anchor, false);
            }
            self.points.is_broken |= self.points.companions(anchor).is_none();
            match self.parent_or(anchor, before.next().flatten()) {
                Ok(Some(parent)) => {
                    self.points.know(parent);
                    let reasons = &mut self.points.reasons[parent.index()];
                    *reasons = one_more(*reasons);
                    if *reasons != 1 {
                        return;
                    }
                    anchor = parent;
                }
                Ok(None) => return,
                Err(()) => {
                    self.points.is_broken = true;
                    return;
                }
            }
        }
    }

    /// An anchor has lost a reason: if it was the last, it is dead, and counts no longer for the one before it.
    fn settle(&mut self, mut anchor: BlockId) {
        while !self.points.is_live(anchor) {
            if self.order.remove(anchor, Departure::Gone) {
                self.bury(anchor);
            } else if self.points.goes_to == Grave::Leaving {
                self.points.followers.insert(anchor); // it is in use, and follows later
            }
            let Ok(Some(parent)) = self.parent(anchor) else { return };
            // After a loss a parent may be back that does not count this one yet: the next sweep counts all again.
            let reasons = &mut self.points.reasons[parent.index()];
            if matches!(*reasons & !POINT, 0 | MANY) {
                return;
            }
            *reasons -= 1;
            anchor = parent;
        }
    }

    /// Puts an unused anchor that is in no order among the dead, behind its companions; it may be a tail's block, too.
    fn bury(&mut self, anchor: BlockId) {
        let points = &mut *self.points;
        if points.is_owned(anchor) {
            points.outside.insert_idle(anchor);
            return;
        }
        points.bring_companions(anchor, true);
        points.outside.bury(points.goes_to, anchor);
        if points.goes_to == Grave::Leaving {
            points.followers.insert(anchor);
        }
    }

    /// Takes the point of an anchor away; returns whether it had one.
    fn take_point(&mut self, anchor: BlockId) -> bool {
        let points = &mut *self.points;
        let had_point = !points.is_dense && points.reasons(anchor) & POINT != 0;
        if had_point {
            points.reasons[anchor.index()] &= !POINT;
        }
        if had_point && points.goes_to == Grave::Leaving {
            points.send_tail(anchor);
        } else {
            points.drop_tail(anchor);
        }
        had_point
    }

    /// Drops the point of an anchor, if it has one.
    fn drop_point(&mut self, anchor: BlockId) {
        if self.take_point(anchor) {
            self.settle(anchor);
        }
    }

    /// An anchor was popped from the order: its point goes, then it, then all that only led to it.
    fn pass(&mut self, anchor: BlockId) {
        let had_point = self.take_point(anchor);
        // Its companions go before it: nothing has to look for what they hang on.
        self.points.drop_companions(anchor);
        self.bury(anchor);
        if self.points.reasons(anchor) > 0 {
            self.points.is_broken = true;
        } else if had_point {
            self.settle(anchor);
        }
        if self.points.outside.is_idle(anchor) {
            self.drop_owners(anchor);
        }
    }

    /// Makes a change whose points leave for the host, together and with this rank.
    fn send(&mut self, rank: Rank, change: impl FnOnce(&mut Self)) {
        let number = self.points.leaving.number + 1;
        self.points.leaving = Unit { number, rank: Some(rank), staying: Vec::new(), going: 0 };
        self.points.goes_to = Grave::Leaving;
        change(self);
        self.points.goes_to = Grave::Dead;
    }

    /// A block without a key is gone, or about to go: so are the points that it belongs to.
    fn drop_owners(&mut self, block: BlockId) {
        for anchor in self.points.hung_on(block) {
            let Some(bundle) = self.points.bundles.get_mut(&anchor) else { continue };
            if bundle.companions.contains(&block) {
                let companions = std::mem::take(&mut bundle.companions);
                self.points.is_broken |= self.points.reasons(anchor) > 0;
                self.points.disown(anchor, &companions);
            }
            self.drop_point(anchor);
        }
    }

    /// The bytes of a block are gone.
    fn forget(&mut self, block: BlockId) {
        let points = &mut *self.points;
        points.outside.remove(block);
        points.followers.remove(block);
        if points.keyless.remove(block) {
            // Nothing hangs on it.
            if points.is_owned(block) {
                self.drop_owners(block);
            }
            return;
        }
        if block.index() >= points.owners.len() {
            return;
        }
        self.drop_point(block);
        if self.points.reasons(block) > 0 {
            // Those behind it are cut off; the one before it counts it no longer.
            self.points.is_broken = true;
            self.points.reasons[block.index()] = 0;
            self.settle(block);
        }
        if self.points.is_owned(block) {
            self.drop_owners(block);
        }
        let points = &mut *self.points;
        points.drop_companions(block);
        points.parents[block.index()] = 0;
    }
}

/// The order of a cache with points. Without points, each is one call of the policy.
impl PrefixCache {
    /// Starts to keep points, while nothing is cached; blocks with keys are of the page class `ordered`.
    pub(crate) fn use_points(&mut self, points: Points, ordered: usize) {
        self.ordered = ordered;
        if points.num_classes() > 1 {
            self.index.expect(points.outside.capacity_of(ordered));
        }
        self.points = Some(Box::new(points));
    }

    /// The points, if the groups have any.
    #[inline]
    pub(crate) fn points(&self) -> Option<&Points> {
        self.points.as_deref()
    }

    fn both(&mut self) -> Option<Both<'_>> {
        let Self { index, order, points, .. } = self;
        Some(Both { points: points.as_deref_mut()?, index, order })
    }

    /// See [`Both::note_idle`].
    pub(super) fn note_idle(&mut self) {
        if let Some(mut both) = self.both() {
            both.note_idle();
        }
    }

    /// Notes the link to the block before a published one, 0 for the first.
    #[inline]
    pub(crate) fn set_parent(&mut self, anchor: BlockId, parent: u64) {
        if let Some(points) = self.points.as_deref_mut() {
            points.know(anchor);
            points.parents[anchor.index()] = parent;
        }
    }

    /// Link to the block before one; 0 for the first, and without points.
    pub(crate) fn parent(&self, anchor: BlockId) -> u64 {
        self.points().and_then(|points| points.parents.get(anchor.index())).copied().unwrap_or(0)
    }

    /// Hangs the blocks of the other groups on a published block that lacks them.
    pub(crate) fn add_companions(&mut self, anchor: BlockId, companions: &[BlockId]) {
        if let Some(points) = self.points.as_deref_mut().filter(|points| points.companions > 0) {
            points.own(anchor, companions);
            points.bundles.entry(anchor).or_default().companions = companions.into();
        }
    }

    /// Makes a point of blocks that are in use.
    pub(crate) fn add_point(
        &mut self,
        anchor: BlockId,
        (tail, is_junction): (&[BlockId], bool),
        before: impl Iterator<Item = Option<BlockId>>,
    ) {
        let Some(mut both) = self.both() else { return };
        let points = &mut *both.points;
        points.drop_tail(anchor);
        points.own(anchor, tail);
        points.know(anchor);
        if !tail.is_empty() {
            let bundle = points.bundles.entry(anchor).or_default();
            (bundle.tail, bundle.is_junction) = (Some(tail.into()), is_junction);
        }
        let was_live = points.reasons(anchor) > 0;
        points.reasons[anchor.index()] |= POINT;
        if !was_live {
            both.enliven(anchor, before);
        }
    }

    /// Publishes a block that is found with others, not by its key; returns whether it was not published before.
    pub(crate) fn add_keyless(&mut self, block: BlockId, key: Key) -> bool {
        let is_new = self.points.as_deref_mut().is_some_and(|points| points.keyless.insert(block));
        if is_new {
            self.index.set_key(block, key);
        }
        is_new
    }

    /// The key of a published block by which the host finds its copy.
    pub(crate) fn own_key(&self, block: BlockId) -> Option<Key> {
        self.index.key(block).copied()
    }

    /// Whether a block is published without a key.
    #[inline]
    pub(crate) fn is_keyless(&self, block: BlockId) -> bool {
        self.points.as_deref().is_some_and(|points| points.keyless.contains(block))
    }

    /// A block without a key is about to get one; returns whether it had none.
    pub(super) fn take_keyless(&mut self, block: BlockId) -> bool {
        self.points.as_deref_mut().is_some_and(|points| points.keyless.remove(block))
    }

    /// Number of blocks published without a key.
    pub(super) fn num_keyless(&self) -> usize {
        self.points.as_deref().map_or(0, |points| points.keyless.len())
    }

    /// Drops the point of an anchor: a later one takes its place.
    pub(crate) fn drop_point(&mut self, anchor: BlockId) {
        if let Some(mut both) = self.both() {
            both.drop_point(anchor);
        }
    }

    /// Makes a block evictable.
    #[inline]
    pub(super) fn enqueue(&mut self, block: BlockId) {
        if !self.points.as_deref_mut().is_some_and(|points| points.park_outside(block)) {
            self.order.insert(block);
        }
    }

    /// A block can no longer be evicted: it is used again.
    #[inline]
    pub(super) fn dequeue(&mut self, block: BlockId) {
        if let Some(points) = self.points.as_deref_mut() {
            if points.outside.remove(block) {
                return;
            }
        }
        self.order.remove(block, Departure::Hit);
    }

    /// The bytes of a block, evictable or not, are gone.
    #[inline]
    pub(super) fn leave(&mut self, block: BlockId) {
        self.order.remove(block, Departure::Gone);
        if let Some(mut both) = self.both() {
            both.forget(block);
        }
    }

    /// The bytes of a block in no order are gone; `tag` is that of its key, if it has one.
    pub(super) fn forget_popped(&mut self, block: BlockId, tag: u32) {
        if !self.is_keyless(block) {
            self.index.remove(block, tag);
        }
        if let Some(mut both) = self.both() {
            both.forget(block);
        }
    }

    /// Takes out up to `count` blocks of a class that go first. What goes with them in other classes is next there.
    pub(super) fn pop_points(&mut self, class: usize, count: usize, out: &mut Vec<BlockId>) {
        let end = out.len() + count;
        let Some(mut both) = self.both() else { return };
        both.sweep();
        while out.len() < end {
            if both.points.pop_dead(class, end - out.len(), out) {
                continue;
            }
            both.note_idle();
            let mut next = Vec::with_capacity(1);
            both.order.pop_into(1, &mut next);
            if let Some(&anchor) = next.first() {
                both.pass(anchor);
                continue;
            }
            // What hangs on blocks in use goes last.
            let Some(block) = both.points.outside.first_idle(class) else { return };
            both.drop_owners(block);
            debug_assert!(both.points.outside.is_dead(block), "an idle block that hangs on nothing");
        }
    }

    /// Takes out the next block that the host may get, if there is one, until one of a class, or of any, is there.
    /// Ahead of a need, not what hangs on blocks in use: the prompts to come may find it here.
    pub(super) fn pop_departing(&mut self, class: Option<usize>, is_ahead: bool) -> Option<Departing> {
        let mut both = self.both()?;
        both.sweep();
        let classes = class.map_or(0..both.points.num_classes(), |class| class..class + 1);
        loop {
            let points = &mut *both.points;
            let of_unit =
                |block, stays| Departing { block, rank: points.leaving.rank, unit: points.leaving.number, stays };
            if let Some(block) = points.leaving.staying.pop() {
                return Some(of_unit(block, true));
            }
            if let Some(block) = classes.clone().find_map(|class| points.outside.take_dead(class)) {
                return Some(Departing { block, rank: None, unit: 0, stays: false });
            }
            if let Some(block) = points.outside.pop_leaving() {
                points.leaving.going = points.leaving.going.saturating_sub(1);
                return Some(of_unit(block, false));
            }
            both.note_idle();
            if let Some((anchor, rank)) = both.order.pop_ranked() {
                both.send(rank, |both| both.pass(anchor));
                continue;
            }
            // What hangs on blocks in use goes last, and is the newest on the host: prompts are found behind these blocks.
            let first =
                classes.clone().find_map(|class| both.points.outside.first_idle(class)).filter(|_| !is_ahead)?;
            let rank = both.order.newest();
            both.send(rank, |both| both.drop_owners(first));
        }
    }

    /// Number of blocks to be popped next that must not stay behind.
    pub(crate) fn num_going(&self) -> usize {
        self.points.as_deref().map_or(0, |points| points.leaving.going)
    }

    /// The host does not get all of what is leaving: the rest serves nobody.
    pub(crate) fn stop_departing(&mut self) {
        if let Some(points) = self.points.as_deref_mut() {
            (points.leaving.going, points.leaving.staying) = (0, Vec::new());
            while let Some(block) = points.outside.pop_leaving() {
                points.outside.bury(Grave::Dead, block);
            }
        }
    }

    /// After a block was popped out of order: what hangs on it goes first from now on.
    pub(super) fn pass_popped(&mut self, anchor: BlockId) {
        if let Some(mut both) = self.both() {
            both.pass(anchor);
            both.points.outside.unbury(anchor);
        }
    }

    /// Replaces a block by another that has nothing.
    pub(super) fn rename_points(&mut self, from: BlockId, to: BlockId) {
        let Some(points) = self.points.as_deref_mut() else { return };
        points.know(from);
        points.know(to);
        let (from_at, to_at) = (from.index(), to.index());
        if points.owners[from_at] > 0 {
            for anchor in points.hung_on(from) {
                let Some(bundle) = points.bundles.get_mut(&anchor) else { continue };
                let named = bundle.companions.iter_mut().chain(bundle.tail.iter_mut().flatten());
                named.filter(|block| **block == from).for_each(|block| *block = to);
                if let Some(all) = &mut points.hangs_on {
                    all.remove(&(from, anchor));
                    all.insert((to, anchor));
                }
            }
        }
        if let Some(bundle) = points.bundles.remove(&from) {
            if let Some(all) = &mut points.hangs_on {
                for block in bundle.blocks() {
                    all.remove(&(block, from));
                    all.insert((block, to));
                }
            }
            points.bundles.insert(to, bundle);
        }
        points.reasons[to_at] = std::mem::take(&mut points.reasons[from_at]);
        points.owners[to_at] = std::mem::take(&mut points.owners[from_at]);
        points.parents[to_at] = std::mem::take(&mut points.parents[from_at]);
        points.leaving.staying.iter_mut().filter(|block| **block == from).for_each(|block| *block = to);
        for set in [&mut points.keyless, &mut points.departing, &mut points.followers] {
            if set.remove(from) {
                set.insert(to);
            }
        }
        points.outside.rename(from, to);
    }

    /// Makes room for a pool of `blocks` blocks.
    pub(super) fn resize_points(&mut self, blocks: usize) {
        if let Some(points) = self.points.as_deref_mut() {
            points.keyless.grow(blocks);
            points.departing.grow(blocks);
            points.followers.grow(blocks);
            points.outside.grow(blocks);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{Chain, KeySpec};
    use crate::prefix::evict::Eviction;

    /// The blocks of prompts of 8 blocks each, in two groups that keep every block: all evictable.
    fn cached(prompts: u32) -> PrefixCache {
        let mut cache = PrefixCache::new(prompts as usize * 16, Eviction::Lru);
        cache.use_points(Points::new(prompts as usize * 16, Classes::new(&[prompts as usize * 16]), 1, true), 0);
        for prompt in 0..prompts {
            let (mut chain, mut parent) = (Chain::new(&KeySpec::default(), 1, 0), 0);
            for at in 0..8 {
                let [block, companion] = [0, 8].map(|group| BlockId(prompt * 16 + group + at));
                let key = chain.block(&[prompt * 8 + at], &[]).unwrap();
                cache.add(block, key, at);
                cache.set_parent(block, parent);
                cache.add_keyless(companion, key.of_group(1));
                cache.add_companions(block, &[companion]);
                cache.enqueue(block);
                cache.enqueue(companion);
                parent = key.link();
            }
        }
        cache
    }

    #[test]
    fn what_hangs_on_an_evicted_block_goes_with_it_without_a_search() {
        let mut cache = cached(9);
        for left in (0..9).rev() {
            let mut gone = Vec::new();
            cache.pop_into(0, 16, &mut gone);
            for &block in &gone {
                let tag = cache.key(block).filter(|_| !cache.is_keyless(block)).map_or(1, |key| key.tag());
                cache.remove_evicted(block, tag, false);
            }
            assert_eq!((gone.len(), cache.evictable(), cache.published()), (16, left * 16, left * 16));
            assert_eq!(cache.check_points(), None);
        }
        assert!(cache.points().is_some_and(|points| points.hangs_on.is_none()), "each eviction looked at all points");
    }

    #[test]
    fn what_a_block_hangs_on_is_searched_once_however_many_are_lost_or_renamed() {
        let mut cache = cached(9);
        cache.points.as_deref_mut().unwrap().hung_on(BlockId(8));
        for prompt in 0..8 {
            cache.remove(BlockId(prompt * 16 + 8 + prompt), 1);
            assert!(cache.points().is_some_and(|points| points.hangs_on.is_some()), "the next loss searches again");
            assert_eq!(cache.check_points(), None);
            let anchor = BlockId(prompt * 16 + prompt);
            assert_eq!(cache.points().unwrap().companions(anchor), None);
        }
    }
}
