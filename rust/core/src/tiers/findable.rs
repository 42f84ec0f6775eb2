//! Held means findable: which cached blocks a prompt can find, and what becomes of the others.
//!
//! A block is worth nothing without those before it in its prompt. Eviction takes the ends of chains first, so a chain
//! breaks only where bytes are lost or dropped out of order. What then hangs in the air is cut off: freed by a sweep,
//! at most one for every few blocks evicted, so that it costs O(1) for each.

use super::Tiers;
use crate::block::TierBlock;
use crate::id::{BlockId, Tier};
use std::collections::HashMap;

/// A sweep of all cached blocks is due once one in this many has been evicted since the last one.
const SWEPT: u64 = 16;

/// The chains of the cached blocks of device and host.
#[derive(Debug, Clone, Default)]
pub(super) struct Chains {
    /// By tier and block: the tag of the key of the block before it, 0 for the first of a prompt.
    parents: [Vec<u32>; 2],
    /// Whether a block may have been removed before those after it.
    is_broken: bool,
    /// Evictions up to the last sweep.
    swept: u64,
    /// Blocks that the device evicted and did not copy.
    uncopied: u64,
}

impl Chains {
    /// Notes that a block may be gone before those after it.
    pub(super) fn note_break(&mut self) {
        self.is_broken = true;
    }

    /// Notes the block before a published one, which may have replaced another.
    pub(super) fn set(&mut self, tier: Tier, block: BlockId, parent: u32, replaces: bool) {
        self.is_broken |= replaces;
        let parents = &mut self.parents[tier.index()];
        if block.index() >= parents.len() {
            parents.resize(crate::prefix::grown(block, parents.capacity()), 0);
        }
        parents[block.index()] = parent;
    }

    /// Follows a move within the device.
    pub(super) fn rename(&mut self, from: BlockId, to: BlockId) {
        let parent = self.parents[0].get(from.index()).copied();
        if let Some(parent) = parent.filter(|&parent| parent != 0 || to.index() < self.parents[0].len()) {
            self.set(Tier::Device, to, parent, false);
        }
    }
}

impl Tiers {
    /// Tag of the key of the block before a published one; 0 for the first of a prompt, and without host copies.
    pub(crate) fn parent(&self, (tier, block): TierBlock) -> u32 {
        self.chains.parents.get(tier.index()).and_then(|parents| parents.get(block.index())).copied().unwrap_or(0)
    }

    /// Counts a block that the device evicted without a copy; `out_of_order` if those after it may be on the host.
    pub(crate) fn note_uncopied(&mut self, out_of_order: bool) {
        self.chains.uncopied += 1;
        self.chains.is_broken |= out_of_order;
    }

    /// Blocks that the device evicted and did not copy.
    pub(crate) fn uncopied(&self) -> u64 {
        self.chains.uncopied
    }

    /// Whether a chain may be broken; if not, every cached block can be found.
    pub(crate) fn may_be_broken(&self) -> bool {
        self.keeps_host_copies() && self.chains.is_broken
    }

    /// Cached blocks of device and host whose chain is broken: a block before them is neither cached nor promised.
    /// `promised` are the tags of keys on their way, and of those before them. The time grows with the tiers.
    pub(crate) fn unfindable(&self, promised: impl Iterator<Item = (u32, u32)>) -> Vec<TierBlock> {
        if !self.keeps_host_copies() {
            return Vec::new();
        }
        let published = || {
            [Tier::Device, Tier::Host].into_iter().flat_map(move |tier| {
                let blocks = (0..).map(BlockId).take(self.pool(tier).known());
                blocks.map(move |block| (tier, block)).filter(|&block| self.block(block).is_published())
            })
        };
        let mut parents: HashMap<u32, u32> = promised.collect();
        parents.extend(published().map(|block| (self.block(block).tag(), self.parent(block))));
        let mut found: HashMap<u32, bool> = HashMap::new();
        let mut path = Vec::new();
        let mut is_found = |first: u32| {
            let mut tag = first;
            let whole = loop {
                match (found.get(&tag), parents.get(&tag)) {
                    (Some(&whole), _) => break whole,
                    (None, None) => break false,
                    // Tags may coincide, and so lead in a circle; such a block counts as found.
                    (None, Some(&parent)) if parent == 0 || path.len() > parents.len() => {
                        path.push(tag);
                        break true;
                    }
                    (None, Some(&parent)) => {
                        path.push(tag);
                        tag = parent;
                    }
                }
            };
            found.extend(path.drain(..).map(|tag| (tag, whole)));
            whole
        };
        published().filter(|&block| !is_found(self.block(block).tag())).collect()
    }

    /// Frees the cached blocks that no prompt can find, if there may be some and enough has happened since last time.
    pub(crate) fn cut_off(&mut self, promised: impl Iterator<Item = (u32, u32)>) {
        let evictions = self.device().evictions() + self.host().evictions();
        let published = (self.device().published() + self.host().published()) as u64;
        if !self.may_be_broken() || evictions - self.chains.swept < published / SWEPT {
            return;
        }
        self.chains.swept = evictions;
        let blocks = self.unfindable(promised);
        blocks.iter().for_each(|&block| self.drop_cached(block));
        // What is in use or leased stays for now.
        self.chains.is_broken = blocks.iter().any(|&block| self.block(block).is_published());
    }
}
