//! Evictable blocks that the policy's order does not have: those that go with what they hang on, and those that lead to
//! no point.

use super::PrefixCache;
use crate::id::BlockId;
use crate::page::{Classes, PerClass};
use crate::reuse::BlockSet;
use crate::ring::Rings;

/// Ring of evictable blocks whose point has gone to the host: they follow it, first of all, whatever their class.
pub(super) const LEAVING: usize = 0;
/// Ring of evictable blocks that serve nobody; each class has its own, from here on.
pub(super) const DEAD: usize = 1;

/// The blocks, by page class.
#[derive(Debug, Clone)]
pub(super) struct Outside {
    classes: Classes,
    /// By class: blocks published without a key that can be evicted, together with what they hang on.
    idle: Box<[BlockSet]>,
    /// Blocks that lead to no point.
    dead: Rings,
    /// Numbers of dead blocks.
    num_dead: PerClass,
}

impl Outside {
    pub(super) fn new(blocks: usize, classes: Classes) -> Self {
        let idle = vec![BlockSet::empty(blocks); classes.len()].into();
        Self { classes, idle, dead: Rings::new(blocks, DEAD + classes.len()), num_dead: PerClass::default() }
    }

    pub(super) fn num_classes(&self) -> usize {
        self.classes.len()
    }

    fn set_of(&mut self, block: BlockId) -> &mut BlockSet {
        &mut self.idle[self.classes.of(block)]
    }

    pub(super) fn insert_idle(&mut self, block: BlockId) {
        self.set_of(block).insert(block);
    }

    /// Takes an idle block out; returns whether it was one.
    pub(super) fn remove_idle(&mut self, block: BlockId) -> bool {
        self.set_of(block).remove(block)
    }

    pub(super) fn is_idle(&self, block: BlockId) -> bool {
        self.idle[self.classes.of(block)].contains(block)
    }

    /// The lowest idle block of a class.
    pub(super) fn first_idle(&self, class: usize) -> Option<BlockId> {
        self.idle[class].next(0)
    }

    /// Puts a block into a ring, of its class if each has one.
    pub(super) fn bury(&mut self, ring: usize, block: BlockId) {
        let class = self.classes.of(block);
        self.dead.push(if ring == LEAVING { LEAVING } else { DEAD + class }, block);
        *self.num_dead.at(class) += 1;
    }

    /// Takes a dead block out; returns whether it was one.
    pub(super) fn unbury(&mut self, block: BlockId) -> bool {
        let was_dead = self.dead.remove(block);
        *self.num_dead.at(self.classes.of(block)) -= usize::from(was_dead);
        was_dead
    }

    pub(super) fn is_dead(&self, block: BlockId) -> bool {
        self.dead.contains(block)
    }

    /// Takes the first block of a class out that serves nobody.
    pub(super) fn pop_dead(&mut self, class: usize) -> Option<BlockId> {
        let block = self.dead.pop(DEAD + class)?;
        *self.num_dead.at(class) -= 1;
        Some(block)
    }

    /// Takes the first block out that follows its point.
    pub(super) fn pop_leaving(&mut self) -> Option<BlockId> {
        let block = self.dead.pop(LEAVING)?;
        *self.num_dead.at(self.classes.of(block)) -= 1;
        Some(block)
    }

    pub(super) fn contains(&self, block: BlockId) -> bool {
        self.is_idle(block) || self.is_dead(block)
    }

    /// Takes a block out, if it is here; returns whether it was.
    pub(super) fn remove(&mut self, block: BlockId) -> bool {
        self.remove_idle(block) || self.unbury(block)
    }

    /// Number of dead blocks of a class.
    pub(super) fn num_dead(&self, class: usize) -> usize {
        self.num_dead.get(class)
    }

    /// Number of blocks of a class.
    #[inline]
    pub(super) fn len_of(&self, class: usize) -> usize {
        self.idle[class].len() + self.num_dead.get(class)
    }

    /// Number of blocks of all classes.
    #[inline]
    pub(super) fn len(&self) -> usize {
        (0..self.classes.len()).map(|class| self.len_of(class)).sum()
    }

    /// Replaces a block by another of its class.
    pub(super) fn rename(&mut self, from: BlockId, to: BlockId) {
        if self.remove_idle(from) {
            self.insert_idle(to);
        }
        self.dead.rename(from, to);
    }

    /// Makes room for ids below `blocks`.
    pub(super) fn grow(&mut self, blocks: usize) {
        self.idle.iter_mut().for_each(|idle| idle.grow(blocks));
        self.dead.make_room(blocks);
        self.classes.resize(blocks);
    }
}

/// What of the cache is outside the policy's order.
impl PrefixCache {
    /// Takes a block out that is evictable, and not in the policy's order.
    pub(super) fn take_outside(&mut self, block: BlockId) {
        if let Some(points) = self.points.as_deref_mut() {
            points.outside.remove(block);
        }
    }

    /// Evictable blocks that are not in the policy's order.
    #[inline]
    pub(super) fn num_outside(&self) -> usize {
        self.points.as_deref().map_or(0, |points| points.outside.len())
    }

    /// Takes out an evictable block of a class that serves nobody, and follows no point to the host.
    pub(crate) fn pop_dead(&mut self, class: usize) -> Option<BlockId> {
        self.points.as_deref_mut()?.outside.pop_dead(class)
    }

    /// Evictable blocks of a class that serve nobody.
    pub(crate) fn num_dead(&self, class: usize) -> usize {
        self.points().map_or(0, |points| points.outside.num_dead(class))
    }

    /// Those of them that are of a class.
    #[inline]
    pub(super) fn num_outside_of(&self, class: usize) -> usize {
        self.points.as_deref().map_or(0, |points| points.outside.len_of(class))
    }

    /// Whether a block is evictable, and not in the policy's order.
    pub(super) fn is_outside(&self, block: BlockId) -> bool {
        self.points.as_deref().is_some_and(|points| points.outside.contains(block))
    }
}
