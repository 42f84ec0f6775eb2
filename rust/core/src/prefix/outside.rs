//! Evictable blocks that the policy's order does not have: those that go with what they hang on, and those that lead to
//! no point.

use super::PrefixCache;
use super::evict::Quotas;
use crate::id::BlockId;
use crate::page::{Classes, MAX_CLASSES, PerClass};
use crate::reuse::BlockSet;
use crate::ring::Rings;
use std::ops::Range;

/// Where blocks go that have lost what they hang on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Grave {
    /// Their point has gone to the host: they follow it, first of all, whatever their class.
    Leaving,
    /// They serve nobody.
    Dead,
}

/// The blocks, by page class.
#[derive(Debug, Clone)]
pub(super) struct Outside {
    classes: Classes,
    /// By class: blocks published without a key that can be evicted, together with what they hang on.
    idle: Box<[BlockSet]>,
    /// By class: blocks that serve nobody.
    dead: Box<[BlockSet]>,
    /// Blocks that follow their points to the host.
    leaving: Rings,
    num_leaving: PerClass,
    owners: Owners,
}

/// Under quotas: whose the idle blocks are. Tenants are numbered from 1; 0 means no quota.
#[derive(Debug, Clone, Default)]
struct Owners {
    /// By block.
    tenants: Vec<u16>,
    /// By page class: what a block counts.
    weights: [usize; MAX_CLASSES],
    /// By tenant: the weight of its idle blocks.
    idle: Vec<usize>,
    /// Tenants whose numbers have changed since these were last taken.
    changed: Vec<u16>,
}

impl Owners {
    #[inline]
    fn count(&mut self, class: usize, block: BlockId, more: bool) {
        let Some(tenant @ 1..) = self.tenants.get(block.index()).copied() else { return };
        let (idle, weight) = (&mut self.idle[usize::from(tenant) - 1], self.weights[class]);
        *idle = if more { *idle + weight } else { *idle - weight };
        self.note(tenant);
    }

    fn note(&mut self, tenant: u16) {
        if self.changed.last() != Some(&tenant) {
            self.changed.push(tenant);
        }
    }

    /// Notes that a block serves nobody: what hangs on it may be beyond its tenant's quota, and can go now.
    #[inline]
    fn note_dead(&mut self, block: BlockId) {
        if let Some(tenant @ 1..) = self.tenants.get(block.index()).copied() {
            self.note(tenant);
        }
    }

    #[inline]
    fn count_run(&mut self, class: usize, run: Range<u32>, more: bool) {
        if !self.tenants.is_empty() {
            run.map(BlockId).for_each(|block| self.count(class, block, more));
        }
    }
}

impl Outside {
    pub(super) fn new(blocks: usize, classes: Classes) -> Self {
        // Not copies of one: those would touch their memory.
        let sets = || (0..classes.len()).map(|_| BlockSet::empty(blocks)).collect();
        let (idle, dead, leaving) = (sets(), sets(), Rings::new(blocks, 1));
        Self { classes, idle, dead, leaving, num_leaving: PerClass::default(), owners: Owners::default() }
    }

    pub(super) fn num_classes(&self) -> usize {
        self.classes.len()
    }

    /// Numbers that blocks of a class can have.
    pub(super) fn capacity_of(&self, class: usize) -> usize {
        self.classes.range(class).len()
    }

    pub(super) fn insert_idle(&mut self, block: BlockId) {
        let class = self.classes.of(block);
        if self.idle[class].insert(block) {
            self.owners.count(class, block, true);
        }
    }

    /// Takes an idle block out; returns whether it was one.
    pub(super) fn remove_idle(&mut self, block: BlockId) -> bool {
        let class = self.classes.of(block);
        let was_idle = self.idle[class].remove(block);
        if was_idle {
            self.owners.count(class, block, false);
        }
        was_idle
    }

    /// Assigns a block that is not idle to a tenant.
    pub(super) fn assign(&mut self, block: BlockId, tenant: u16) {
        debug_assert!(!self.is_idle(block), "an idle block changes its owner");
        let Owners { tenants, idle, .. } = &mut self.owners;
        tenants.resize(tenants.len().max(block.index() + 1), 0);
        idle.resize(idle.len().max(usize::from(tenant)), 0);
        tenants[block.index()] = tenant;
    }

    /// Weight of a tenant's idle blocks.
    pub(super) fn idle_of(&self, tenant: u16) -> usize {
        usize::from(tenant).checked_sub(1).and_then(|at| self.owners.idle.get(at)).copied().unwrap_or(0)
    }

    /// Tenants whose idle blocks have changed since the last call.
    pub(super) fn take_changed(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.owners.changed)
    }

    /// Checks the owners' numbers.
    pub(super) fn check_owners(&self) -> Option<String> {
        let owner = |block: BlockId| self.owners.tenants.get(block.index()).copied();
        let own = |tenant, set: &BlockSet| set.iter().filter(|&block| owner(block) == Some(tenant)).count();
        let both = || self.idle.iter().zip(self.owners.weights);
        let of = |tenant| both().map(|(set, weight)| own(tenant, set) * weight).sum::<usize>();
        (1u16..).zip(&self.owners.idle).find_map(|(tenant, &counted)| {
            let found = of(tenant);
            (found != counted).then(|| format!("tenant {tenant} has idle blocks of {found}, counted {counted}"))
        })
    }

    pub(super) fn is_idle(&self, block: BlockId) -> bool {
        self.idle[self.classes.of(block)].contains(block)
    }

    /// The lowest idle block of a class.
    pub(super) fn first_idle(&self, class: usize) -> Option<BlockId> {
        self.idle[class].next(0)
    }

    /// Puts a block that is in no set where it goes first of all.
    pub(super) fn bury(&mut self, grave: Grave, block: BlockId) {
        let class = self.classes.of(block);
        self.owners.note_dead(block);
        if grave == Grave::Leaving {
            self.leaving.push(0, block);
            *self.num_leaving.at(class) += 1;
        } else {
            self.dead[class].insert(block);
        }
    }

    /// Takes a dead block out; returns whether it was one.
    #[inline]
    pub(super) fn unbury(&mut self, block: BlockId) -> bool {
        let class = self.classes.of(block);
        let was_leaving = self.leaving.len() > 0 && self.leaving.remove(block);
        *self.num_leaving.at(class) -= usize::from(was_leaving);
        was_leaving || self.dead[class].remove(block)
    }

    pub(super) fn is_dead(&self, block: BlockId) -> bool {
        self.dead[self.classes.of(block)].contains(block) || self.leaving.contains(block)
    }

    /// Takes the lowest block of a class out that serves nobody.
    pub(super) fn take_dead(&mut self, class: usize) -> Option<BlockId> {
        let block = self.dead[class].next(0)?;
        self.dead[class].remove(block);
        Some(block)
    }

    /// Takes a tenant's lowest block out that serves nobody, else its first that follows its point.
    fn take_dead_of(&mut self, tenant: u16) -> Option<BlockId> {
        let owner = |block: &BlockId| self.owners.tenants.get(block.index()) == Some(&tenant);
        let block = self.dead.iter().flat_map(BlockSet::iter).chain(self.leaving.iter(0)).find(owner)?;
        self.unbury(block);
        Some(block)
    }

    /// Takes blocks of a class out that serve nobody, at most `count`, the lowest first.
    pub(super) fn pop_dead(&mut self, class: usize, count: usize, out: &mut Vec<BlockId>) {
        self.dead[class].take_runs(count, |run| out.extend(run.map(BlockId)));
    }

    /// Takes the first block out that follows its point.
    pub(super) fn pop_leaving(&mut self) -> Option<BlockId> {
        let block = self.leaving.pop(0)?;
        *self.num_leaving.at(self.classes.of(block)) -= 1;
        Some(block)
    }

    /// Makes neighbours of one class idle.
    pub(super) fn insert_idle_run(&mut self, run: Range<u32>) {
        let class = self.classes.of(BlockId(run.start));
        self.idle[class].insert_run(run.clone());
        self.owners.count_run(class, run, true);
    }

    /// Takes idle neighbours of one class out; returns false, and does nothing, if one is not idle.
    pub(super) fn remove_idle_run(&mut self, run: Range<u32>) -> bool {
        let class = self.classes.of(BlockId(run.start));
        let are_idle = self.idle[class].contains_run(run.clone());
        if are_idle {
            self.idle[class].remove_run(run.clone());
            self.owners.count_run(class, run, false);
        }
        are_idle
    }

    /// Puts neighbours of one class, which are in no set, where they go first of all.
    pub(super) fn bury_run(&mut self, run: Range<u32>) {
        if !self.owners.tenants.is_empty() {
            run.clone().map(BlockId).for_each(|block| self.owners.note_dead(block));
        }
        self.dead[self.classes.of(BlockId(run.start))].insert_run(run);
    }

    pub(super) fn contains(&self, block: BlockId) -> bool {
        self.is_idle(block) || self.is_dead(block)
    }

    /// Takes a block out, if it is here; returns whether it was.
    #[inline]
    pub(super) fn remove(&mut self, block: BlockId) -> bool {
        let class = self.classes.of(block);
        (!self.idle[class].is_empty() && self.remove_idle(block)) || (self.num_dead(class) > 0 && self.unbury(block))
    }

    /// Whether there are dead blocks.
    pub(super) fn has_dead(&self) -> bool {
        (0..self.classes.len()).any(|class| self.num_dead(class) > 0)
    }

    /// Number of dead blocks of a class.
    pub(super) fn num_dead(&self, class: usize) -> usize {
        self.dead[class].len() + self.num_leaving.get(class)
    }

    /// Number of blocks of a class.
    #[inline]
    pub(super) fn len_of(&self, class: usize) -> usize {
        self.idle[class].len() + self.num_dead(class)
    }

    /// Number of blocks of all classes.
    #[inline]
    pub(super) fn len(&self) -> usize {
        (0..self.classes.len()).map(|class| self.len_of(class)).sum()
    }

    /// Replaces a block by another of its class.
    pub(super) fn rename(&mut self, from: BlockId, to: BlockId) {
        let was_idle = self.remove_idle(from);
        if !self.owners.tenants.is_empty() {
            let owner = self.owners.tenants.get_mut(from.index()).map_or(0, std::mem::take);
            self.assign(to, owner);
        }
        if was_idle {
            self.insert_idle(to);
        }
        let dead = &mut self.dead[self.classes.of(from)];
        if dead.remove(from) {
            dead.insert(to);
        }
        self.leaving.rename(from, to);
    }

    /// Makes room for ids below `blocks`.
    pub(super) fn grow(&mut self, blocks: usize) {
        self.idle.iter_mut().chain(&mut self.dead).for_each(|set| set.grow(blocks));
        self.leaving.make_room(blocks);
        self.classes.resize(blocks);
    }
}

/// What of the cache is outside the policy's order.
impl PrefixCache {
    /// Sets what a block counts for its tenant's quota, by page class.
    pub(super) fn weigh_outside(&mut self, weights: [usize; MAX_CLASSES]) {
        if let Some(points) = self.points.as_deref_mut() {
            points.outside.owners.weights = weights;
        }
    }

    /// Weight of a tenant's evictable blocks that are not in the policy's order.
    pub(super) fn idle_of(&self, tenant: u16) -> usize {
        self.points().map_or(0, |points| points.outside.idle_of(tenant))
    }

    /// Assigns a newly published block to a tenant, for when it is not in the policy's order.
    pub(super) fn assign_outside(&mut self, block: BlockId, tenant: u16) {
        if let Some(points) = self.points.as_deref_mut() {
            points.outside.assign(block, tenant);
        }
    }

    /// Checks how many blocks of each tenant are not in the policy's order.
    pub(super) fn check_idle(&self) -> Option<String> {
        let outside = &self.points()?.outside;
        let owner = |block: BlockId| outside.owners.tenants.get(block.index()).copied().unwrap_or(0);
        let wrong = |block: &BlockId| owner(*block) != self.tenant(*block);
        outside.check_owners().or_else(|| {
            let block = outside.idle.iter().flat_map(BlockSet::iter).find(wrong)?;
            Some(format!(
                "idle block {block} is of tenant {}, and of {} outside the order",
                self.tenant(block),
                owner(block)
            ))
        })
    }

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
        self.points.as_deref_mut()?.outside.take_dead(class)
    }

    /// Takes out a block that serves nobody, of a tenant whose blocks outside the policy's order exceed its quota: they
    /// may hang on it.
    pub(super) fn pop_dead_over_quota(&mut self) -> Option<BlockId> {
        while let Some(tenant) = self.order.quotas_mut().and_then(Quotas::pop_idle_over) {
            let block = self.points.as_deref_mut()?.outside.take_dead_of(tenant);
            if block.is_some() {
                self.order.quotas_mut()?.note(tenant);
                return block;
            }
        }
        None
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_of_no_tenant_brings_none_where_another_tenants_block_was() {
        let mut outside = Outside::new(4, Classes::new(&[4]));
        outside.owners.weights = [1; MAX_CLASSES];
        outside.assign(BlockId(1), 1);
        outside.insert_idle(BlockId(3));
        outside.rename(BlockId(3), BlockId(1));
        assert_eq!((outside.is_idle(BlockId(1)), outside.idle_of(1)), (true, 0));
    }
}
