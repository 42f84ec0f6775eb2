//! A policy under quotas: blocks beyond a tenant's quota are evicted before all others, least recently used first.
//!
//! A quota is a number of blocks, or with several page classes a number of bytes: each block has a weight.

use super::{Departure, Evictor, Policy, Rank};
use crate::id::BlockId;
use crate::ring::Rings;
use std::collections::BTreeSet;

/// One tenant's evictable blocks.
#[derive(Debug, Clone, Copy)]
struct Tenant {
    /// Maximum weight of its blocks.
    quota: usize,
    /// Number of those in the order.
    held: usize,
    /// Weight of those that hang on others, such as windows and states: they go with these.
    idle: usize,
}

impl Tenant {
    /// Whether blocks of the order, which each have a weight, have to go.
    fn is_over(self, weight: usize) -> bool {
        self.held > 0 && self.held.saturating_mul(weight).saturating_add(self.idle) > self.quota
    }
}

/// Another policy, and the tenants that own its blocks. Tenants are numbered from 1; 0 means no quota.
#[derive(Debug, Clone)]
pub(crate) struct Quotas {
    pub(super) inner: Policy,
    tenants: Vec<Tenant>,
    /// Of a block in the order.
    weight: usize,
    /// By block.
    owners: Vec<u16>,
    /// Each tenant's evictable blocks, least recently used first.
    rings: Rings,
    /// Tenants that have more than their quotas.
    over: BTreeSet<u16>,
    /// Tenants with none in the order that have more than their quotas outside, and more or fewer than when it was last
    /// asked for them.
    idle_over: BTreeSet<u16>,
}

impl Quotas {
    pub(super) fn new(inner: Policy, blocks: usize, weight: usize) -> Self {
        let (owners, rings) = (vec![0; blocks], Rings::new(blocks, 0));
        let (over, idle_over) = Default::default();
        Self { inner, tenants: Vec::new(), weight, owners, rings, over, idle_over }
    }

    /// Sets a tenant's quota; a new tenant has the next number.
    pub(super) fn set(&mut self, tenant: u16, quota: usize) {
        let index = usize::from(tenant).saturating_sub(1);
        if index >= self.tenants.len() {
            self.tenants.resize(index + 1, Tenant { quota: usize::MAX, held: 0, idle: 0 });
            self.rings.grow(index + 1);
        }
        self.tenants[index].quota = quota;
        self.note(tenant);
    }

    /// All quotas, in the order of their tenants' numbers.
    pub(crate) fn all(&self) -> Vec<usize> {
        self.tenants.iter().map(|tenant| tenant.quota).collect()
    }

    /// Notes the weight of a tenant's evictable blocks that are not in the order.
    pub(crate) fn set_idle(&mut self, tenant: u16, idle: usize) {
        if let Some(known) = usize::from(tenant).checked_sub(1).and_then(|at| self.tenants.get_mut(at)) {
            known.idle = idle;
            self.note(tenant);
        }
    }

    /// Weight of a tenant's evictable blocks in the order.
    pub(crate) fn held(&self, tenant: u16) -> usize {
        let known = usize::from(tenant).checked_sub(1).and_then(|i| self.tenants.get(i));
        known.map_or(0, |tenant| tenant.held.saturating_mul(self.weight))
    }

    /// Assigns a block in use to a tenant.
    pub(crate) fn assign(&mut self, block: BlockId, tenant: u16) {
        debug_assert!(!self.contains(block), "an evictable block changes its owner");
        if usize::from(tenant) <= self.tenants.len() {
            self.owners[block.index()] = tenant;
        }
    }

    pub(crate) fn owner(&self, block: BlockId) -> u16 {
        self.owners[block.index()]
    }

    /// Removes a block of a tenant that is over its quota.
    pub(crate) fn pop_over(&mut self) -> Option<BlockId> {
        let tenant = *self.over.first()?;
        let block = self.rings.pop(usize::from(tenant) - 1)?;
        self.count(tenant, false);
        self.inner.remove(block, Departure::Gone);
        Some(block)
    }

    /// Takes out the block that goes first, with its rank.
    pub(super) fn pop_ranked(&mut self) -> Option<(BlockId, Rank)> {
        // A block over a quota has no rank: its copy is as old as its arrival on the host.
        if let Some(block) = self.pop_over() {
            return Some((block, Rank { ring: 0, stamp: 0 }));
        }
        let first = self.inner.pop_ranked()?;
        self.left(first.0);
        Some(first)
    }

    fn count(&mut self, tenant: u16, more: bool) {
        let held = &mut self.tenants[usize::from(tenant) - 1].held;
        *held = if more { *held + 1 } else { *held - 1 };
        self.note(tenant);
    }

    pub(crate) fn note(&mut self, tenant: u16) {
        let known = self.tenants[usize::from(tenant) - 1];
        let put = |set: &mut BTreeSet<u16>, is_in| if is_in { set.insert(tenant) } else { set.remove(&tenant) };
        put(&mut self.over, known.is_over(self.weight));
        put(&mut self.idle_over, known.held == 0 && known.idle > known.quota);
    }

    /// Takes out a tenant that has more than its quota although none of its blocks is in the order.
    pub(crate) fn pop_idle_over(&mut self) -> Option<u16> {
        self.idle_over.pop_first()
    }

    fn left(&mut self, block: BlockId) {
        let owner = self.owner(block);
        if owner > 0 && self.rings.remove(block) {
            self.count(owner, false);
        }
    }

    /// Checks the state.
    pub(crate) fn check(&self) -> Option<String> {
        (1u16..).zip(&self.tenants).find_map(|(number, tenant)| {
            let blocks: Vec<_> = self.rings.iter(usize::from(number) - 1).collect();
            let strange = blocks.iter().any(|&block| self.owner(block) != number || !self.inner.contains(block));
            let over = self.over.contains(&number) != tenant.is_over(self.weight);
            (strange || over || blocks.len() != tenant.held)
                .then(|| format!("tenant {number} has {} evictable blocks, counted {}", tenant.held, blocks.len()))
        })
    }
}

impl Evictor for Quotas {
    fn len(&self) -> usize {
        self.inner.len()
    }

    fn contains(&self, block: BlockId) -> bool {
        self.inner.contains(block)
    }

    fn insert(&mut self, block: BlockId) {
        self.inner.insert(block);
        let owner = self.owner(block);
        if owner > 0 {
            self.rings.push(usize::from(owner) - 1, block);
            self.count(owner, true);
        }
    }

    fn remove(&mut self, block: BlockId, departure: Departure) -> bool {
        self.left(block);
        self.inner.remove(block, departure)
    }

    fn pop(&mut self) -> Option<BlockId> {
        if let Some(block) = self.pop_over() {
            return Some(block);
        }
        let mut first = Vec::with_capacity(1);
        self.inner.pop_into(1, &mut first);
        let block = first.pop()?;
        self.left(block);
        Some(block)
    }

    fn publish(&mut self, block: BlockId, depth: u32, tag: u32) {
        self.owners[block.index()] = 0;
        self.inner.publish(block, depth, tag);
    }

    fn evicted(&mut self, tags: &[u32]) {
        self.inner.evicted(tags);
    }

    fn resize(&mut self, blocks: usize) {
        self.inner.resize(blocks);
        self.owners.resize(blocks.max(self.owners.len()), 0);
        self.rings.make_room(blocks);
    }

    fn continue_chain(&mut self, parent: Option<BlockId>) {
        self.inner.continue_chain(parent);
    }

    fn begin_chain(&mut self) {
        self.inner.begin_chain();
    }

    fn hold(&mut self, block: BlockId) {
        self.inner.hold(block);
    }

    fn prioritise(&mut self, block: BlockId, priority: u8) {
        self.inner.prioritise(block, priority);
    }

    fn relocate(&mut self, from: BlockId, to: BlockId) {
        self.rings.rename(from, to);
        self.owners[to.index()] = std::mem::take(&mut self.owners[from.index()]);
        self.inner.relocate(from, to);
    }

    fn boxed_clone(&self) -> Box<dyn Evictor> {
        Box::new(self.clone())
    }
}
