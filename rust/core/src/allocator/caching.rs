//! Blocks that can be found again by their keys.
//!
//! Invariant: a block without references that has a key is evictable, and in `order` if eviction goes by access;
//! `pending` holds the blocks with a key whose tokens are not computed yet; lookups never return them.

use super::{BlockAllocator, Keyed, Lookups, NaiveAllocator};
use crate::error::{Error, Result};
use crate::hash::Key;
use crate::id::{BlockId, Tier};
use crate::memory;
use crate::pool::Pool;
use crate::reuse::ReuseOrder;
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashSet};

/// Which cached block is evicted first once no other is free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Eviction {
    /// The block whose last reference was dropped first.
    #[default]
    Released,
    /// The least recently touched block; ties go to the longest prefix, then the lowest id.
    Accessed,
}

impl Eviction {
    /// The order of that name: `released` or `accessed`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "released" => Some(Self::Released),
            "accessed" => Some(Self::Accessed),
            _ => None,
        }
    }
}

/// State of a block for eviction and lookups, besides its key.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    /// Time of the last touch, as bits that sort like it; 0 for never.
    touched: u64,
    depth: u32,
    computed: bool,
}

/// Eviction order of a block: the smallest is evicted first.
type Turn = (u64, Reverse<u32>, BlockId);

/// An allocator that can find full blocks by key, even after their last reference is dropped.
#[derive(Debug, Clone)]
pub struct PrefixCachingAllocator {
    plain: NaiveAllocator,
    eviction: Eviction,
    uses: Vec<Use>,
    order: BTreeSet<Turn>,
    pending: HashSet<BlockId>,
    lookups: Lookups,
}

impl PrefixCachingAllocator {
    /// An allocator of `blocks` free blocks.
    ///
    /// # Errors
    /// More blocks than a tier can have, or than there is memory for.
    pub fn new(tier: Tier, blocks: usize, reuse: ReuseOrder, eviction: Eviction) -> Result<Self> {
        let plain = NaiveAllocator::over(tier, blocks, reuse, true)?;
        memory::require_items::<Use>(blocks)?;
        let uses = vec![Use::default(); blocks];
        Ok(Self { plain, eviction, uses, order: BTreeSet::new(), pending: HashSet::new(), lookups: Lookups::default() })
    }

    fn place(&self, block: BlockId) -> Turn {
        let Use { touched, depth, .. } = self.uses[block.index()];
        (touched, Reverse(depth), block)
    }

    /// Takes blocks, cached ones last; the caller has checked that `count` are available.
    fn take(&mut self, count: usize, out: &mut Vec<BlockId>) {
        let first = out.len();
        self.plain.pool.take(count.min(self.plain.idle()), false, out);
        while self.eviction == Eviction::Accessed && out.len() < first + count {
            let Some((.., block)) = self.order.pop_first() else { break };
            self.plain.pool.claim(block);
            self.plain.pool.evict_bytes(block);
            out.push(block);
        }
        let left = first + count - out.len();
        self.plain.pool.take(left, false, out);
        for &block in &out[first..] {
            self.uses[block.index()] = Use::default();
            self.pending.remove(&block);
        }
    }

    /// Takes a reference to a block that has a key.
    fn claim(&mut self, block: BlockId) {
        if !self.plain.pool.block(block).is_used() {
            self.order.remove(&self.place(block));
            self.uses[block.index()].touched = 0;
        }
        self.plain.pool.claim(block);
    }

    fn release(&mut self, block: BlockId) {
        self.plain.pool.release(block);
        let now = self.plain.pool.block(block);
        if self.eviction == Eviction::Accessed && now.is_published() && !now.is_used() {
            self.order.insert(self.place(block));
        }
    }

    /// Gives a block a new, unique key; the current step computes it.
    fn enter(&mut self, block: BlockId, keyed: Keyed) {
        self.plain.pool.publish(block, keyed.key, 0);
        self.uses[block.index()] = Use { depth: keyed.depth, computed: false, ..self.uses[block.index()] };
        self.pending.insert(block);
    }
}

impl BlockAllocator for PrefixCachingAllocator {
    fn pool(&self) -> &Pool {
        &self.plain.pool
    }

    fn allocate(&mut self, count: usize, out: &mut Vec<BlockId>) -> Result<()> {
        self.plain.pool.require(count, false)?;
        self.take(count, out);
        Ok(())
    }

    fn allocate_keyed(&mut self, keys: &[Keyed], plain: usize, out: &mut Vec<BlockId>) -> Result<usize> {
        let found: Vec<Option<BlockId>> = keys.iter().map(|keyed| self.plain.pool.find(&keyed.key)).collect();
        let mut distinct = HashSet::with_capacity(keys.len());
        let costs = |(keyed, block): &(&Keyed, &Option<BlockId>)| {
            block.is_none_or(|block| !self.plain.pool.block(block).is_used()) && distinct.insert(keyed.key)
        };
        let wanted = keys.iter().zip(&found).filter(costs).count();
        self.plain.pool.require(wanted.saturating_add(plain), false)?;
        // Claimed before any block is taken, which could evict one of them.
        for &block in found.iter().flatten() {
            self.claim(block);
        }
        let mut hits = 0;
        for (&keyed, block) in keys.iter().zip(found) {
            if let Some(block) = block {
                hits += 1;
                out.push(block);
            // An earlier entry of this call may have the same key.
            } else if let Some(block) = self.plain.pool.find(&keyed.key) {
                hits += 1;
                self.claim(block);
                out.push(block);
            } else {
                self.take(1, out);
                self.enter(out[out.len() - 1], keyed);
            }
        }
        self.take(plain, out);
        self.lookups.queries += keys.len() as u64;
        self.lookups.hits += hits as u64;
        Ok(hits)
    }

    fn require(&self, blocks: &[BlockId]) -> Result<()> {
        self.plain.require_refs(blocks)
    }

    fn share(&mut self, blocks: &[BlockId]) -> Result<()> {
        self.plain.share(blocks)
    }

    fn free(&mut self, blocks: &[BlockId]) -> Result<()> {
        self.plain.require_refs(blocks)?;
        for &block in blocks {
            self.release(block);
        }
        Ok(())
    }

    fn make_writable(&mut self, blocks: &[BlockId], out: &mut Vec<BlockId>) -> Result<()> {
        let copies = self.plain.copies(blocks, |block| self.plain.pool.block(block).is_published())?;
        self.plain.pool.require(copies, false)?;
        let mut left = Vec::with_capacity(copies);
        for &block in blocks {
            if self.plain.pool.refs(block) == 1 && !self.plain.pool.block(block).is_published() {
                out.push(block);
            } else if self.plain.pool.refs(block) == 1 {
                // The bytes must still be copied, so this block itself must not be taken.
                self.take(1, out);
                left.push(block);
            } else {
                self.take(1, out);
                self.plain.pool.release(block);
            }
        }
        for block in left {
            self.release(block);
        }
        Ok(())
    }

    fn publish(&mut self, block: BlockId, keyed: Keyed) -> Result<BlockId> {
        self.plain.require_block(block, 1)?;
        match self.plain.pool.find(&keyed.key) {
            None => self.enter(block, keyed),
            Some(other) if other == block => {}
            Some(other) => {
                self.claim(other);
                self.release(block);
                return Ok(other);
            }
        }
        Ok(block)
    }

    fn find(&self, keys: &[Key]) -> Vec<BlockId> {
        let computed = |key| self.plain.pool.find(key).filter(|&block| self.is_computed(block));
        keys.iter().map_while(computed).collect()
    }

    fn cost(&self, keys: &[Key]) -> usize {
        let mut distinct = HashSet::with_capacity(keys.len());
        let in_use = |key| self.plain.pool.find(key).is_some_and(|block| self.plain.pool.block(block).is_used());
        keys.iter().filter(|key| !in_use(key) && distinct.insert(**key)).count()
    }

    fn is_computed(&self, block: BlockId) -> bool {
        self.uses.get(block.index()).is_some_and(|known| known.computed)
    }

    fn mark_computed(&mut self, blocks: Option<&[BlockId]>) {
        let (uses, pool) = (&mut self.uses, &self.plain.pool);
        // A block freed before it was computed holds no bytes: it stays pending until it is taken and computed.
        let mut mark = |block: BlockId| {
            uses[block.index()].computed |= pool.block(block).is_used();
            !pool.block(block).is_used()
        };
        match blocks {
            None => self.pending.retain(|&block| mark(block)),
            Some(blocks) => {
                for block in blocks {
                    if self.pending.contains(block) && !mark(*block) {
                        self.pending.remove(block);
                    }
                }
            }
        }
    }

    fn touch(&mut self, blocks: &[BlockId], now: f64) -> Result<()> {
        if now.is_nan() {
            return Err(Error::InvalidTime { found: now.to_string() });
        }
        for &block in blocks {
            let known = block.index() < self.uses.len()
                && (self.plain.pool.block(block).is_published() || self.plain.pool.block(block).is_used());
            if !known {
                return Err(Error::NotReferenced { tier: self.plain.pool.tier(), block, wanted: 1, refs: 0 });
            }
        }
        for &block in blocks {
            let waiting = self.order.remove(&self.place(block));
            self.uses[block.index()].touched = ordered(now);
            if waiting {
                self.order.insert(self.place(block));
            }
        }
        Ok(())
    }

    fn reset(&mut self) -> bool {
        if self.plain.pool.free() != self.plain.pool.len() {
            return false;
        }
        let mut cached: Vec<BlockId> = std::mem::take(&mut self.order).into_iter().map(|(.., block)| block).collect();
        if self.eviction == Eviction::Released {
            let blocks = (0..).map(BlockId).take(self.plain.pool.len());
            cached.extend(blocks.filter(|&block| self.plain.pool.block(block).is_published()));
        }
        for block in cached {
            self.plain.pool.unpublish(block);
        }
        self.uses.fill(Use::default());
        self.pending.clear();
        self.lookups = Lookups::default();
        true
    }

    fn null_block(&mut self) -> Result<BlockId> {
        if let Some(block) = self.plain.null() {
            return Ok(block);
        }
        let mut out = Vec::with_capacity(1);
        self.allocate(1, &mut out)?;
        Ok(self.plain.set_null(out[0]))
    }

    fn upcoming(&self) -> Box<dyn Iterator<Item = BlockId> + '_> {
        let accessed = self.order.iter().map(|&(.., block)| block);
        // The pool can only list its whole release order, so ask it only if the other blocks are not enough.
        let released = std::iter::once_with(|| match self.eviction {
            Eviction::Released => self.plain.pool.evictable_blocks(),
            Eviction::Accessed => Vec::new(),
        });
        Box::new(self.plain.pool.free_blocks().chain(accessed).chain(released.flatten()))
    }

    fn lookups(&self) -> Option<Lookups> {
        Some(self.lookups)
    }

    fn check(&self) -> Result<()> {
        self.plain.check()?;
        let broken = |what: String| Err(Error::Broken { what });
        for block in (0..).map(BlockId).take(self.plain.pool.len()) {
            let (idle, published) =
                (!self.plain.pool.block(block).is_used(), self.plain.pool.block(block).is_published());
            let waits = self.order.contains(&self.place(block));
            if waits != (self.eviction == Eviction::Accessed && idle && published) {
                return broken(format!("block {block}: in the order of eviction is {waits}"));
            }
            let pending = self.pending.contains(&block);
            if pending && (!published || self.is_computed(block)) {
                return broken(format!("block {block}: pending, but published is {published}"));
            }
            if published && !pending && !self.is_computed(block) {
                return broken(format!("block {block}: published, neither pending nor computed"));
            }
        }
        let evictable = self.plain.pool.evictable();
        if self.eviction == Eviction::Accessed && self.order.len() != evictable {
            return broken(format!("{} blocks in the order of eviction, {evictable} evictable", self.order.len()));
        }
        Ok(())
    }
}

/// A time as bits that sort like the times; never 0, which means no time.
fn ordered(time: f64) -> u64 {
    let bits = time.to_bits();
    if bits >> 63 == 0 { bits | 1 << 63 } else { !bits }.max(1)
}
