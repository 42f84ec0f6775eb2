//! Blocks without keys: references and an order of reuse.

use super::{BlockAllocator, Keyed, Lookups, Reuse};
use crate::block::Leases;
use crate::error::{Error, Result};
use crate::hash::Key;
use crate::id::{BlockId, Tier};
use crate::memory;
use crate::pool::Pool;
use std::collections::VecDeque;

/// An allocator that counts references and knows nothing of tokens.
#[derive(Debug, Clone)]
pub struct NaiveAllocator {
    pub(super) pool: Pool,
    reuse: Reuse,
    /// Free blocks in their order, unless that is by id.
    queue: VecDeque<BlockId>,
    null: Option<BlockId>,
}

impl NaiveAllocator {
    /// An allocator of `blocks` free blocks.
    ///
    /// # Errors
    /// More blocks than a tier can have, or than there is memory for.
    pub fn new(tier: Tier, blocks: usize, reuse: Reuse) -> Result<Self> {
        Self::over(Pool::new(tier, blocks, false)?, reuse)
    }

    pub(super) fn over(pool: Pool, reuse: Reuse) -> Result<Self> {
        if reuse != Reuse::Lowest {
            // It grows as it is filled.
            memory::require_items::<BlockId>(pool.len().saturating_mul(2))?;
        }
        let queue = if reuse == Reuse::Lowest { VecDeque::new() } else { pool.free_blocks().collect() };
        Ok(Self { pool, reuse, queue, null: None })
    }

    /// Free blocks that are not cached.
    pub(super) fn idle(&self) -> usize {
        self.pool.free() - self.pool.evictable()
    }

    /// Takes blocks out of those that are free and not cached; there are so many.
    pub(super) fn take_idle(&mut self, count: usize, out: &mut Vec<BlockId>) {
        if self.reuse == Reuse::Lowest {
            self.pool.take(count, false, out);
            return;
        }
        for block in self.queue.drain(..count) {
            self.pool.take_free(block);
            out.push(block);
        }
    }

    /// Puts a block that went free where the order wants it.
    pub(super) fn queue_idle(&mut self, block: BlockId) {
        match self.reuse {
            Reuse::Lowest => {}
            Reuse::Fifo => self.queue.push_back(block),
            Reuse::Lifo => self.queue.push_front(block),
        }
    }

    /// Free blocks that are not cached, next one first.
    pub(super) fn upcoming_idle(&self) -> Box<dyn Iterator<Item = BlockId> + '_> {
        if self.reuse == Reuse::Lowest {
            Box::new(self.pool.free_blocks())
        } else {
            Box::new(self.queue.iter().copied())
        }
    }

    /// Fails unless each block is in use, as often as it is named, and not the null block.
    pub(super) fn require_refs(&self, blocks: &[BlockId]) -> Result<()> {
        let mut sorted = blocks.to_vec();
        sorted.sort_unstable();
        for same in sorted.chunk_by(|a, b| a == b) {
            self.require_block(same[0], same.len())?;
        }
        Ok(())
    }

    pub(super) fn require_block(&self, block: BlockId, wanted: usize) -> Result<()> {
        let total = self.pool.len();
        if block.index() >= total {
            return Err(Error::InvalidArgument {
                what: "block",
                found: block.0.into(),
                must: format!("below {total}"),
            });
        }
        let refs = self.pool.refs(block);
        if wanted > refs as usize {
            return Err(Error::NotReferenced { tier: self.pool.tier(), block, wanted, refs });
        }
        if self.null == Some(block) {
            let must = format!("other than {block}, the null block");
            return Err(Error::InvalidArgument { what: "block", found: block.0.into(), must });
        }
        Ok(())
    }

    /// Takes a reference to each block; the caller has checked that they are in use.
    pub(super) fn add_refs(&mut self, blocks: &[BlockId]) -> Result<()> {
        if let Some(&block) =
            blocks.iter().find(|&&block| self.pool.refs(block) as usize > u32::MAX as usize - blocks.len())
        {
            let must = format!("one of fewer than {} references", u32::MAX);
            return Err(Error::InvalidArgument { what: "block", found: block.0.into(), must });
        }
        for &block in blocks {
            self.pool.share(block, 1);
        }
        Ok(())
    }

    /// New blocks that writing these takes, given whether a block must not be written even by its only owner.
    pub(super) fn copies(&self, blocks: &[BlockId], sealed: impl Fn(BlockId) -> bool) -> Result<usize> {
        self.require_refs(blocks)?;
        let mut sorted = blocks.to_vec();
        sorted.sort_unstable();
        let copies = |same: &[BlockId]| {
            let others = if sealed(same[0]) { same.len() } else { self.pool.refs(same[0]) as usize - 1 };
            same.len().min(others)
        };
        Ok(sorted.chunk_by(|a, b| a == b).map(copies).sum())
    }

    pub(super) fn set_null(&mut self, block: BlockId) -> BlockId {
        self.null = Some(block);
        block
    }

    pub(super) fn null(&self) -> Option<BlockId> {
        self.null
    }
}

impl BlockAllocator for NaiveAllocator {
    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn allocate(&mut self, count: usize, out: &mut Vec<BlockId>) -> Result<()> {
        self.pool.require(count, false)?;
        self.take_idle(count, out);
        Ok(())
    }

    fn allocate_keyed(&mut self, keys: &[Keyed], plain: usize, out: &mut Vec<BlockId>) -> Result<usize> {
        self.allocate(keys.len().saturating_add(plain), out)?;
        Ok(0)
    }

    fn require(&self, blocks: &[BlockId]) -> Result<()> {
        self.require_refs(blocks)
    }

    fn share(&mut self, blocks: &[BlockId]) -> Result<()> {
        blocks.iter().try_for_each(|&block| self.require_block(block, 1))?;
        self.add_refs(blocks)
    }

    fn free(&mut self, blocks: &[BlockId]) -> Result<()> {
        self.require_refs(blocks)?;
        for &block in blocks {
            self.pool.release(block);
            if self.pool.refs(block) == 0 {
                self.queue_idle(block);
            }
        }
        Ok(())
    }

    fn make_writable(&mut self, blocks: &[BlockId], out: &mut Vec<BlockId>) -> Result<()> {
        let copies = self.copies(blocks, |_| false)?;
        self.pool.require(copies, false)?;
        for &block in blocks {
            if self.pool.refs(block) == 1 {
                out.push(block);
            } else {
                self.take_idle(1, out);
                self.pool.release(block);
            }
        }
        Ok(())
    }

    fn publish(&mut self, block: BlockId, _: Keyed) -> Result<BlockId> {
        self.require_block(block, 1)?;
        Ok(block)
    }

    fn find(&self, _: &[Key]) -> Vec<BlockId> {
        Vec::new()
    }

    fn cost(&self, keys: &[Key]) -> usize {
        keys.len()
    }

    fn is_computed(&self, _: BlockId) -> bool {
        false
    }

    fn mark_computed(&mut self, _: Option<&[BlockId]>) {}

    fn touch(&mut self, _: &[BlockId], _: f64) -> Result<()> {
        Ok(())
    }

    fn reset(&mut self) -> bool {
        true
    }

    fn null_block(&mut self) -> Result<BlockId> {
        if let Some(block) = self.null {
            return Ok(block);
        }
        let mut out = Vec::with_capacity(1);
        self.allocate(1, &mut out)?;
        Ok(self.set_null(out[0]))
    }

    fn upcoming(&self) -> Box<dyn Iterator<Item = BlockId> + '_> {
        self.upcoming_idle()
    }

    fn lookups(&self) -> Option<Lookups> {
        None
    }

    fn check(&self) -> Result<()> {
        for block in (0..).map(BlockId).take(self.pool.len()) {
            if let Some(what) = self.pool.check(block, self.pool.refs(block), Leases::default()) {
                return Err(Error::Broken { what });
            }
        }
        if self.reuse == Reuse::Lowest {
            return Ok(());
        }
        let mut queued: Vec<BlockId> = self.queue.iter().copied().collect();
        queued.sort_unstable();
        if queued.iter().copied().eq(self.pool.free_blocks()) {
            return Ok(());
        }
        Err(Error::Broken { what: format!("{} blocks wait for reuse, {} are free", queued.len(), self.idle()) })
    }
}
