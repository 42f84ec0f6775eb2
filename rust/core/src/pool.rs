//! The blocks of one tier: reference counts, leases, which of them are free, and which still hold findable bytes.
//!
//! Invariant, for a block without references: without leases it is in `free`, or evictable if it is published; with none
//! but drains it is in `draining`; else its leases hold it. Beyond the end of a pool that has shrunk it is in none of
//! them, and none of its bytes are findable. `Pool::take`, `Pool::claim`, `Pool::release` and the calls
//! of `bulk`, which do the same to many blocks, are the only ways in and out.

use crate::error::{Error, Result};
use crate::event::Removals;
use crate::evict::Eviction;
use crate::group::NULL_BLOCK;
use crate::id::{BlockId, Tier};
use crate::lease::Bytes;
use crate::memory;
use crate::prefix::grown;
use crate::reuse::{BlockSet, FreeBlocks, ReuseOrder};
use cached::Cache;

mod bulk;
mod cached;
mod leases;
mod places;
mod publish;
mod quota;
mod resize;
mod snapshot;
mod twin;
pub(crate) use cached::Findable;
pub(crate) use places::{Hint, Seen};
pub(crate) use publish::Published;
pub use resize::BlockUse;
pub(crate) use resize::Tail;
pub(crate) use snapshot::PoolImage;
pub(crate) use twin::Twin;
use twin::decode;

/// Most blocks that one tier can have: ids share a word with a tier where a block's twin is kept.
pub const MAX_BLOCKS: usize = (1 << 30) - 2;

/// Most leases of one kind on one block.
const MAX_LEASES: u16 = u16::MAX >> 1;
const WRITING: u16 = 1 << 15;

#[derive(Clone, Copy, Debug, Default)]
struct Node {
    refs: u32,
    generation: u32,
    /// Leases that read; those among them that only drain, and [`WRITING`].
    reads: u16,
    drains: u16,
    /// 0 for none, else tier and id of the twin, plus 1.
    twin: u32,
    /// 0 unless published, else the tag of its key.
    tag: u32,
}

impl Node {
    fn is_leased(self) -> bool {
        self.reads | self.drains != 0
    }

    /// Neither free nor referenced, but device work ordered after the readers may have it.
    fn is_draining(self) -> bool {
        self.refs == 0 && self.reads == 0 && self.drains & WRITING == 0 && self.drains != 0
    }
}

/// Which blocks a pool gives out first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Policies {
    /// Among those that are free.
    pub reuse: ReuseOrder,
    /// Among those that are cached, which go when none is free.
    pub eviction: Eviction,
}

/// The blocks of one tier.
#[derive(Debug, Clone)]
pub struct Pool {
    tier: Tier,
    blocks: usize,
    /// By block id, as far as blocks have ever been taken: a pool costs what is used of it.
    nodes: Vec<Node>,
    free: FreeBlocks,
    draining: BlockSet,
    cache: Option<Cache>,
    /// Twins of blocks whose bytes went with an eviction; the owner of all pools lets them forget.
    orphans: Vec<Twin>,
    evictions: u64,
    /// Most blocks that were not free at once.
    peak: usize,
    /// What is in use beyond the end, where the pool has shrunk.
    tail: Tail,
    /// Where events are on: what was removed and not yet gathered.
    removals: Option<Box<Removals>>,
    /// Where blocks have been asked to move.
    moves: Option<Box<places::Moves>>,
}

impl Pool {
    /// A pool of `blocks` free blocks; with `caching`, released blocks stay findable by their keys until evicted.
    ///
    /// # Errors
    /// More than [`MAX_BLOCKS`] blocks, or than there is memory for.
    pub fn new(tier: Tier, blocks: usize, caching: bool) -> Result<Self> {
        Self::with_policies(tier, blocks, caching, Policies::default())
    }

    /// As [`Pool::new`], with orders of the caller's choice.
    ///
    /// # Errors
    /// As [`Pool::new`].
    pub fn with_policies(tier: Tier, blocks: usize, caching: bool, policies: Policies) -> Result<Self> {
        if blocks > MAX_BLOCKS {
            let must = format!("at most {MAX_BLOCKS}");
            return Err(Error::InvalidArgument { what: "number of blocks", found: blocks as i128, must });
        }
        Self::require_memory(blocks, caching)?;
        let nodes = Vec::with_capacity(blocks);
        let cache = caching.then(|| Cache::new(blocks, policies.eviction));
        let (free, draining) = (FreeBlocks::full(policies.reuse, blocks), BlockSet::empty(blocks));
        let (orphans, tail) = (Vec::new(), Tail::default());
        Ok(Self {
            tier,
            blocks,
            nodes,
            free,
            draining,
            cache,
            orphans,
            evictions: 0,
            peak: 0,
            tail,
            removals: None,
            moves: None,
        })
    }

    /// Fails unless there is memory for a pool of so many blocks, whatever its policies.
    pub(crate) fn require_memory(blocks: usize, caching: bool) -> Result<()> {
        // Free and draining blocks as bits, or a queue of them.
        const PLAIN: usize = size_of::<Node>() + 10;
        let block = if caching { PLAIN + Cache::BYTES } else { PLAIN };
        memory::require(blocks.saturating_mul(block))
    }

    /// The tier that the blocks are in.
    #[must_use]
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Blocks in the pool.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks
    }

    /// Whether the pool has no blocks at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks == 0
    }

    /// Free blocks that hold nothing findable, in the order in which they are given out; nothing is taken.
    pub fn free_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.free.iter()
    }

    /// Whether nothing references a block.
    pub(crate) fn is_idle(&self, block: BlockId) -> bool {
        self.node(block).refs == 0
    }

    /// References to a block.
    #[must_use]
    pub fn refs(&self, block: BlockId) -> u32 {
        self.node(block).refs
    }

    /// How often a block has been freed.
    #[must_use]
    pub fn generation(&self, block: BlockId) -> u32 {
        self.node(block).generation
    }

    /// The generation of the bytes that a leased block holds, which may have been freed, but not given out again.
    pub(crate) fn leased_generation(&self, block: BlockId) -> u32 {
        let node = self.node(block);
        node.generation.wrapping_sub(u32::from(node.refs == 0))
    }

    /// Whether a block still holds the bytes that it had in that generation, for sequences.
    pub(crate) fn holds(&self, (block, generation): Bytes) -> bool {
        let node = self.node(block);
        node.refs > 0 && node.generation == generation
    }

    /// As [`Pool::holds`], or for a transfer.
    pub(crate) fn has_bytes(&self, (block, generation): Bytes) -> bool {
        let node = self.node(block);
        (node.refs > 0 || node.is_leased()) && self.leased_generation(block) == generation
    }

    /// Whether the block's one owner may write it in place: nobody else refers to it or can find it.
    pub(crate) fn is_exclusive(&self, block: BlockId) -> bool {
        let node = self.nodes[block.index()];
        node.refs == 1 && node.tag == 0
    }

    /// Whether some ticket reads the block on the device ahead of this step's writes.
    pub(crate) fn is_drained(&self, block: BlockId) -> bool {
        self.nodes[block.index()].drains & !WRITING != 0
    }

    /// Whether the block's bytes have not landed yet.
    pub(crate) fn is_writing(&self, block: BlockId) -> bool {
        self.nodes[block.index()].drains & WRITING != 0
    }

    /// Fails unless `wanted` blocks can be had.
    pub(crate) fn require(&self, wanted: usize, draining_too: bool) -> Result<()> {
        let free = if draining_too { self.available() } else { self.free() };
        if wanted <= free {
            return Ok(());
        }
        Err(Error::OutOfBlocks { tier: self.tier, wanted, free, total: self.len() })
    }

    /// Takes `count` blocks with one reference each: free ones, lowest ids first, then draining ones, then cached ones, least
    /// recently used first. Returns whether any was draining. The caller has called [`Pool::require`].
    pub(crate) fn take(&mut self, count: usize, out: &mut Vec<BlockId>) -> bool {
        self.take_as(count, 0, out)
    }

    /// As [`Pool::take`], with a write lease on each block.
    pub(crate) fn take_to_write(&mut self, count: usize, out: &mut Vec<BlockId>) -> bool {
        self.take_as(count, WRITING, out)
    }

    #[inline]
    fn take_as(&mut self, count: usize, leases: u16, out: &mut Vec<BlockId>) -> bool {
        let first = out.len();
        let mut end = 0;
        self.free.take_runs(count, |run| {
            end = end.max(run.end);
            out.extend(run.map(BlockId));
        });
        if end as usize > self.nodes.len() {
            self.nodes.resize(grown(BlockId(end - 1), self.nodes.capacity()), Node::default());
        }
        self.open(&out[first..], leases);
        let ready = out.len() - first;
        if ready == count {
            if self.moves.is_some() {
                self.note_taken(&out[first..], leases != 0);
            }
            self.note_peak();
            return false;
        }
        self.draining.take_lowest(count - ready, |block| out.push(block));
        let drained = out.len() > first + ready;
        for &block in &out[first + ready..] {
            self.retire(block);
            self.drop_bytes(block);
            self.nodes[block.index()].refs = 1;
        }
        self.evict(first + count - out.len(), out);
        for &block in &out[first + ready..] {
            self.nodes[block.index()].drains |= leases;
        }
        if self.moves.is_some() {
            self.note_taken(&out[first..first + ready], leases != 0);
            out[first + ready..].iter().for_each(|&block| self.note_written(block));
        }
        self.note_peak();
        drained
    }

    /// What is known of a block; nothing, if it was never taken.
    #[inline]
    fn node(&self, block: BlockId) -> Node {
        self.nodes.get(block.index()).copied().unwrap_or_default()
    }

    /// Takes one free block with one reference, out of its turn; the pool's own order is the lowest id.
    pub(crate) fn take_free(&mut self, block: BlockId) {
        let was_free = self.free.remove(block);
        debug_assert!(was_free, "taking a block that is not free");
        if block.index() >= self.nodes.len() {
            self.nodes.resize(grown(block, self.nodes.capacity()), Node::default());
        }
        self.nodes[block.index()].refs = 1;
        self.note_written(block);
    }

    /// Takes block 0 of a new pool, the first one in every order, for good: it stands in tables for what is not there.
    pub(crate) fn reserve_null(&mut self) {
        let mut first = Vec::with_capacity(1);
        self.take(1, &mut first);
        debug_assert!(first == [NULL_BLOCK], "the pool has been used");
    }

    /// Twins of blocks that were evicted since the last call.
    pub(crate) fn take_orphans(&mut self) -> Vec<Twin> {
        std::mem::take(&mut self.orphans)
    }

    /// Notes how many blocks are not free, where a call has made them more.
    pub(crate) fn note_peak(&mut self) {
        self.peak = self.peak.max(self.used());
    }

    /// Adds references to a block that has some.
    pub(crate) fn share(&mut self, block: BlockId, count: u32) {
        let node = &mut self.nodes[block.index()];
        debug_assert!(node.refs > 0, "sharing a block that nothing references");
        node.refs += count;
    }

    /// Drops one reference; the last one frees the block, or leaves it to the cache or its leases. A block whose bytes are
    /// not kept returns its twin.
    pub(crate) fn release(&mut self, block: BlockId) -> Option<Twin> {
        let node = &mut self.nodes[block.index()];
        debug_assert!(node.refs > 0, "releasing a block that nothing references");
        node.refs -= 1;
        if node.refs > 0 {
            if node.tag != 0 {
                self.hold(block);
            }
            return None;
        }
        node.generation = node.generation.wrapping_add(1);
        let twin = if node.tag == 0 { decode(std::mem::take(&mut node.twin)) } else { None };
        self.free.used(block);
        if self.is_beyond(block) {
            return self.leave(block).or(twin);
        }
        self.settle(block, false);
        twin
    }

    /// Puts a block without references where its leases say that it belongs; `drained` if it may have been draining.
    #[inline]
    fn settle(&mut self, block: BlockId, drained: bool) {
        let node = self.nodes[block.index()];
        if !node.is_leased() {
            if drained {
                self.draining.remove(block);
            }
            match &mut self.cache {
                Some(cache) if node.tag != 0 => cache.policy.insert(block),
                _ => self.free.insert(block),
            }
        } else if node.is_draining() {
            self.draining.insert(block);
        }
        self.refresh(block);
    }

    /// What does not hold about one block, given the references and leases counted from outside.
    pub(crate) fn check(&self, block: BlockId, refs: u32, leases: [u16; 3]) -> Option<String> {
        let node = self.node(block);
        let found = [node.drains & !WRITING, node.reads, u16::from(node.drains & WRITING != 0)];
        let idle = refs == 0 && !node.is_leased() && !self.is_beyond(block);
        let what = if node.refs != refs {
            format!("{} references, counted {refs}", node.refs)
        } else if found != leases {
            format!("leases [drain, read, write] {found:?}, counted {leases:?}")
        } else if self.is_beyond(block) && refs == 0 && node.tag != 0 {
            "findable, unused and beyond the end".to_owned()
        } else if self.free.contains(block) != (idle && node.tag == 0) {
            format!("free is {}", self.free.contains(block))
        } else if self.is_evictable(block) != (idle && node.tag != 0) {
            format!("evictable is {}", self.is_evictable(block))
        } else if self.finds(block) != (node.tag != 0) {
            format!("found by its key is {}", self.finds(block))
        } else if self.draining.contains(block) != (node.is_draining() && !self.is_beyond(block)) {
            format!("draining is {}", self.draining.contains(block))
        } else if refs == 0 && node.tag == 0 && node.twin != 0 {
            "a twin without bytes".to_owned()
        } else {
            self.check_place(block, node)?
        };
        Some(format!("{} block {block}: {what}", self.tier))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(blocks: usize) -> Pool {
        Pool::new(Tier::Device, blocks, false).unwrap()
    }

    fn take(pool: &mut Pool, count: usize) -> Vec<BlockId> {
        let mut out = Vec::new();
        pool.take(count, &mut out);
        out
    }

    #[test]
    fn released_blocks_are_reused_lowest_first() {
        let mut pool = pool(4);
        let blocks = take(&mut pool, 4);
        pool.release(blocks[2]);
        pool.release(blocks[0]);
        assert_eq!(take(&mut pool, 2), [BlockId(0), BlockId(2)]);
    }

    #[test]
    fn a_shared_block_is_free_only_after_its_last_reference() {
        let mut pool = pool(1);
        let block = take(&mut pool, 1)[0];
        pool.share(block, 1);
        pool.release(block);
        assert_eq!(pool.free(), 0);
        pool.release(block);
        assert_eq!(pool.free(), 1);
        assert_eq!(pool.generation(block), 1);
    }

    #[test]
    fn too_large_a_pool_is_refused_before_memory_is_taken() {
        assert!(Pool::new(Tier::Host, MAX_BLOCKS + 1, false).is_err());
    }
}
