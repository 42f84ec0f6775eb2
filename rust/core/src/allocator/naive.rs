//! Blocks without keys: reference counts and a reuse order.

use super::{BlockAllocator, Keyed, Lookups};
use crate::block::Leases;
use crate::error::{Error, Result};
use crate::hash::Key;
use crate::id::{BlockId, Tier};
use crate::pool::{Policies, Pool};
use crate::reuse::ReuseOrder;

/// An allocator that counts references and knows nothing of tokens.
#[derive(Debug, Clone)]
pub struct NaiveAllocator {
    pub(super) pool: Pool,
    null: Option<BlockId>,
}

impl NaiveAllocator {
    /// An allocator of `blocks` free blocks.
    ///
    /// # Errors
    /// More blocks than a tier can have, or than there is memory for.
    pub fn new(tier: Tier, blocks: usize, reuse: ReuseOrder) -> Result<Self> {
        Self::over(tier, blocks, reuse, false)
    }

    pub(super) fn over(tier: Tier, blocks: usize, reuse: ReuseOrder, caching: bool) -> Result<Self> {
        let policies = Policies { reuse, ..Policies::default() };
        Ok(Self { pool: Pool::with_policies(tier, blocks, caching, policies)?, null: None })
    }

    /// Free blocks that are not cached.
    pub(super) fn idle(&self) -> usize {
        self.pool.uncached()
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
        if let Some(&block) = blocks
            .iter()
            .find(|&&block| self.pool.refs(block) as usize > (u32::MAX as usize).saturating_sub(blocks.len()))
        {
            let must = format!("one of fewer than {} references", u32::MAX);
            return Err(Error::InvalidArgument { what: "block", found: block.0.into(), must });
        }
        for &block in blocks {
            self.pool.share(block, 1);
        }
        Ok(())
    }

    /// Number of new blocks needed to write these; `sealed` tells if even a sole owner must not write a block.
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
        self.pool.take(count, false, out);
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
                self.pool.take(1, false, out);
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
        Box::new(self.pool.free_blocks())
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
        Ok(())
    }
}
