//! Held means findable: which cached blocks a prompt can find, and how the others are freed.
//!
//! A block is worth nothing without those before it in its prompt. Eviction takes the ends of chains first, so a chain
//! breaks only where bytes are lost, or dropped out of order. What then hangs in the air is cut off: each eviction pays
//! for a look at a few blocks, all of them in turn. A block whose predecessor is gone is freed, and so the next turn
//! frees the one after it.

use super::Tiers;
use crate::block::{BlockState, TierBlock};
use crate::id::{BlockId, Tier};
use std::collections::HashMap;

/// Blocks looked at for each evicted one.
const LOOKS: u64 = 2;

/// The chains of the cached blocks of device and host.
#[derive(Debug, Clone, Default)]
pub(super) struct Chains {
    /// Whether they are followed: prompts find host copies.
    are_followed: bool,
    /// By tier and block: the link to the block before it, 0 for the first of a prompt.
    parents: [Vec<u64>; 2],
    /// The block to be looked at next: those of the device come before those of the host.
    next: usize,
    /// Evictions that have been paid for.
    evictions: u64,
    /// Blocks that the device evicted and did not copy.
    uncopied: u64,
}

impl Chains {
    /// Starts to follow chains, while nothing is cached.
    pub(super) fn follow(&mut self) {
        self.are_followed = true;
    }

    /// Notes the block before a published one.
    #[inline]
    pub(super) fn set(&mut self, tier: Tier, block: BlockId, parent: u64) {
        if self.are_followed {
            let parents = &mut self.parents[tier.index()];
            if block.index() >= parents.len() {
                parents.resize(crate::prefix::grown(block, parents.capacity()), 0);
            }
            parents[block.index()] = parent;
        }
    }

    /// Follows a move within the device.
    pub(super) fn rename(&mut self, from: BlockId, to: BlockId) {
        if let Some(&parent) = self.parents[0].get(from.index()) {
            self.set(Tier::Device, to, parent);
        }
    }
}

impl Tiers {
    /// Link to the block before a published one; 0 for the first of a prompt, and without host copies.
    pub(crate) fn parent(&self, (tier, block): TierBlock) -> u64 {
        self.chains.parents.get(tier.index()).and_then(|parents| parents.get(block.index())).copied().unwrap_or(0)
    }

    /// Counts blocks that the device evicted without a copy.
    pub(crate) fn note_uncopied(&mut self, count: usize) {
        self.chains.uncopied += count as u64;
    }

    /// Blocks that the device evicted and did not copy.
    pub(crate) fn uncopied(&self) -> u64 {
        self.chains.uncopied
    }

    /// The blocks of device and host whose key has this link.
    fn find_link(&self, link: u64) -> impl Iterator<Item = TierBlock> + use<> {
        let found = [Tier::Device, Tier::Host].map(|tier| self.pool(tier).find_link(link).map(|block| (tier, block)));
        found.into_iter().flatten()
    }

    /// Makes the blocks before one of a prompt the last to be evicted, its first one the very last: what comes from a
    /// store is younger than those, and depends on them. `parent` is the link to the last of them.
    pub(crate) fn touch_chain(&mut self, mut parent: u64) {
        let mut ring = None;
        while parent != 0 {
            let (link, mut next) = (parent, 0);
            for block in self.find_link(link) {
                next = self.parent(block);
                ring = self.touch(block, ring);
            }
            parent = next;
        }
    }

    /// Frees some of the cached blocks that no prompt can find, see above; `is_promised` tells of the link to a
    /// block whether its bytes are on their way.
    pub(crate) fn cut_off(&mut self, is_promised: impl Fn(u64) -> bool) {
        let evictions = self.device().evictions() + self.host().evictions();
        let looks = (evictions - std::mem::replace(&mut self.chains.evictions, evictions)) * LOOKS;
        let known = [self.device().known(), self.host().known()];
        if !self.chains.are_followed {
            return;
        }
        for _ in 0..looks.min((known[0] + known[1]) as u64) {
            let at = self.chains.next;
            self.chains.next = if at + 1 < known[0] + known[1] { at + 1 } else { 0 };
            let (tier, id) = if at < known[0] { (Tier::Device, at) } else { (Tier::Host, at - known[0]) };
            let block = (tier, BlockId(u32::try_from(id).unwrap_or(u32::MAX)));
            let parent = self.parent(block);
            let is_cached = parent != 0 && self.block(block).state() == BlockState::Cached;
            if is_cached && self.find_link(parent).next().is_none() && !is_promised(parent) {
                self.drop_cached(block);
            }
        }
    }

    /// Number of cached blocks of device and host that no prompt can find: a block before them is neither cached nor
    /// promised. `promised` are the links to blocks on their way, and to those before them. The time grows with the tiers.
    pub(crate) fn num_unfindable(&self, promised: impl Iterator<Item = (u64, u64)>) -> usize {
        if !self.chains.are_followed {
            return 0;
        }
        let published = || {
            [Tier::Device, Tier::Host].into_iter().flat_map(move |tier| {
                let blocks = (0..).map(BlockId).take(self.pool(tier).known());
                blocks.map(move |block| (tier, block)).filter(|&block| self.block(block).is_published())
            })
        };
        let is_keyless = |(tier, block): TierBlock| tier == Tier::Device && self.device().is_keyless(block);
        let link = |(tier, block): TierBlock| self.pool(tier).key(block).map_or(0, |key| key.link());
        let mut parents: HashMap<u64, u64> = promised.collect();
        let keyed = published().filter(|&block| !is_keyless(block));
        parents.extend(keyed.map(|block| (link(block), self.parent(block))));
        let mut found = HashMap::from([(0, true)]);
        let mut path = Vec::new();
        let mut is_found = |mut link: u64| {
            while !found.contains_key(&link) && parents.contains_key(&link) {
                path.push(link);
                link = parents[&link];
            }
            let is_whole = found.get(&link).copied().unwrap_or(false);
            found.extend(path.drain(..).map(|link| (link, is_whole)));
            is_whole
        };
        let by = |block| if is_keyless(block) { self.parent(block) } else { link(block) };
        published().filter(|&block| self.block(block).state() == BlockState::Cached && !is_found(by(block))).count()
    }
}
