//! Leases on blocks, and where a block belongs once one has ended.

use super::{MAX_LEASES, Pool, WRITING};
use crate::error::{Error, Result};
use crate::id::BlockId;
use crate::lease::LeaseKind;

impl Pool {
    /// Takes a lease.
    ///
    /// # Errors
    /// The block has as many leases of that kind as can be counted, or a second writer.
    pub(crate) fn lease(&mut self, block: BlockId, kind: LeaseKind) -> Result<()> {
        let node = &mut self.nodes[block.index()];
        let (counter, limit) = match kind {
            LeaseKind::Read => (node.reads, MAX_LEASES),
            LeaseKind::Drain => (node.drains & !WRITING, MAX_LEASES),
            LeaseKind::Write => (u16::from(node.drains & WRITING != 0), 1),
        };
        if counter >= limit {
            return Err(Error::TooManyLeases { tier: self.tier, block, limit: u32::from(limit) });
        }
        match kind {
            LeaseKind::Read => node.reads += 1,
            LeaseKind::Drain => node.drains += 1,
            LeaseKind::Write => node.drains |= WRITING,
        }
        self.refresh(block);
        Ok(())
    }

    /// Ends a lease; a block without references goes free once its last lease has ended.
    pub(crate) fn end_lease(&mut self, block: BlockId, kind: LeaseKind) {
        let node = &mut self.nodes[block.index()];
        match kind {
            LeaseKind::Read => node.reads -= 1,
            LeaseKind::Drain => node.drains -= 1,
            LeaseKind::Write => node.drains &= !WRITING,
        }
        if node.refs > 0 {
            return self.refresh(block);
        }
        let leased = node.is_leased();
        if self.is_beyond(block) {
            self.let_go(usize::from(!leased));
            self.refresh(block);
        } else {
            self.begin_chain();
            self.settle(block, true);
        }
    }

    /// Room for more read leases on a block.
    pub(crate) fn lease_room(&self, block: BlockId) -> usize {
        usize::from(MAX_LEASES - self.nodes[block.index()].reads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Tier;

    fn pool(blocks: usize) -> (Pool, Vec<BlockId>) {
        let mut pool = Pool::new(Tier::Device, blocks, false).unwrap();
        let mut taken = Vec::new();
        pool.take(blocks, &mut taken);
        (pool, taken)
    }

    #[test]
    fn a_read_lease_keeps_a_released_block_and_a_drain_lease_gives_it_to_ordered_work() {
        let (mut pool, blocks) = pool(2);
        pool.lease(blocks[0], LeaseKind::Read).unwrap();
        pool.lease(blocks[1], LeaseKind::Drain).unwrap();
        pool.release(blocks[0]);
        pool.release(blocks[1]);
        assert_eq!((pool.free(), pool.available()), (0, 1));
        assert!(pool.require(1, false).is_err());
        let mut out = Vec::new();
        assert!(pool.take(1, &mut out));
        assert_eq!(out, [blocks[1]]);
        pool.end_lease(blocks[1], LeaseKind::Drain);
        pool.end_lease(blocks[0], LeaseKind::Read);
        assert_eq!((pool.free(), pool.refs(blocks[1])), (1, 1));
    }

    #[test]
    fn a_second_writer_is_refused() {
        let (mut pool, blocks) = pool(1);
        let block = blocks[0];
        pool.lease(block, LeaseKind::Write).unwrap();
        assert!(matches!(pool.lease(block, LeaseKind::Write), Err(Error::TooManyLeases { limit: 1, .. })));
    }
}
