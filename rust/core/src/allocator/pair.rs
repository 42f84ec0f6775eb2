//! A device and a host allocator behind one space of ids: the device's first, then the host's.

use super::BlockAllocator;
use crate::error::{Error, Result};
use crate::id::{BlockId, Tier};
use std::collections::HashMap;

/// Two allocators of one kind. Ids that name a block of either are absolute: device ids as they are, host ids after them.
#[derive(Debug, Clone)]
pub struct AllocatorPair<A> {
    /// Blocks that kernels read.
    pub device: A,
    /// Blocks in host memory.
    pub host: A,
}

impl<A: BlockAllocator> AllocatorPair<A> {
    /// Tier and id within it of an absolute id.
    ///
    /// # Errors
    /// Neither allocator has that many blocks.
    pub fn locate(&self, absolute: u32) -> Result<(Tier, BlockId)> {
        let (device, host) = (self.device.pool().len() as u64, self.host.pool().len() as u64);
        let id = u64::from(absolute);
        if id < device {
            return Ok((Tier::Device, BlockId(absolute)));
        }
        if id < device + host {
            #[expect(clippy::cast_possible_truncation, reason = "fewer device blocks than the u32 it is taken from")]
            return Ok((Tier::Host, BlockId(absolute - device as u32)));
        }
        Err(Error::InvalidArgument { what: "block", found: id.into(), must: format!("below {}", device + host) })
    }

    /// Absolute id of a block.
    #[must_use]
    pub fn absolute(&self, tier: Tier, block: BlockId) -> u64 {
        let first = if tier == Tier::Device { 0 } else { self.device.pool().len() };
        first as u64 + u64::from(block.0)
    }

    /// Exchanges one reference to each device block for one to a host block. A block that is named several times stays
    /// one block, so sharing is kept. Appends one block for each to `out` and returns the copies, each source once.
    ///
    /// # Errors
    /// As [`BlockAllocator::allocate`] of the one and [`BlockAllocator::free`] of the other; nothing was changed.
    pub fn swap_out(&mut self, blocks: &[BlockId], out: &mut Vec<BlockId>) -> Result<Vec<[BlockId; 2]>> {
        swap(&mut self.device, &mut self.host, blocks, out)
    }

    /// As [`AllocatorPair::swap_out`], from host to device.
    ///
    /// # Errors
    /// As [`AllocatorPair::swap_out`].
    pub fn swap_in(&mut self, blocks: &[BlockId], out: &mut Vec<BlockId>) -> Result<Vec<[BlockId; 2]>> {
        swap(&mut self.host, &mut self.device, blocks, out)
    }
}

fn swap<A: BlockAllocator>(
    src: &mut A,
    dst: &mut A,
    blocks: &[BlockId],
    out: &mut Vec<BlockId>,
) -> Result<Vec<[BlockId; 2]>> {
    src.require(blocks)?;
    let mut index = HashMap::with_capacity(blocks.len());
    let mut distinct = Vec::with_capacity(blocks.len());
    for &block in blocks {
        index.entry(block).or_insert_with(|| {
            distinct.push(block);
            distinct.len() - 1
        });
    }
    let mut taken = Vec::with_capacity(distinct.len());
    dst.allocate(distinct.len(), &mut taken)?;
    src.free(blocks)?;
    let moved: Vec<BlockId> = blocks.iter().map(|block| taken[index[block]]).collect();
    let mut again = moved.clone();
    again.sort_unstable();
    let extra: Vec<BlockId> = again.windows(2).filter(|two| two[0] == two[1]).map(|two| two[0]).collect();
    dst.share(&extra)?;
    out.extend(&moved);
    Ok(distinct.into_iter().zip(taken).map(|(from, to)| [from, to]).collect())
}
