//! Many blocks at once. Most blocks are plain: one reference, and neither lease nor key nor twin. What is to be done to
//! these needs no questions, and their neighbours go in and out of the free ones by the word.

use super::{Node, Pool, WRITING};
use crate::id::BlockId;
use crate::lease::LeaseKind;
use crate::reuse::Gathered;

impl Node {
    /// Whether the block has one reference and nothing else.
    #[inline]
    fn is_plain(self) -> bool {
        (self.refs ^ 1) | u32::from(self.reads | self.drains) | self.twin | self.tag == 0
    }
}

impl Pool {
    /// Whether each block has one reference, no lease, no key and no twin.
    pub(crate) fn are_plain(&self, blocks: &[BlockId]) -> bool {
        blocks.iter().all(|&block| self.node(block).is_plain())
    }

    /// Drops one reference to each block, to the last one first. As [`Pool::release`], but that twins of blocks whose bytes
    /// are not kept are left in [`Pool::take_orphans`].
    pub(crate) fn release_all(&mut self, blocks: &[BlockId]) {
        let mut gathered = Gathered::default();
        for &block in blocks.iter().rev() {
            let node = &mut self.nodes[block.index()];
            if node.is_plain() {
                node.refs = 0;
                node.generation = node.generation.wrapping_add(1);
                self.free.used(block);
                self.free.gather(&mut gathered, block);
            } else {
                let twin = self.release(block);
                self.orphans.extend(twin);
            }
        }
        self.free.flush(gathered);
    }

    /// Drops the references to plain blocks whose bytes a transfer reads; it holds them from now on.
    pub(crate) fn depart(&mut self, blocks: &[BlockId], reads: LeaseKind) {
        let drains = reads == LeaseKind::Drain;
        let mut gathered = Gathered::default();
        for &block in blocks {
            let node = &mut self.nodes[block.index()];
            debug_assert!(node.is_plain(), "departing from a block that others use");
            node.refs = 0;
            node.generation = node.generation.wrapping_add(1);
            (node.reads, node.drains) = (u16::from(!drains), u16::from(drains));
            self.free.used(block);
            if drains {
                gathered.insert(&mut self.draining, block);
            }
        }
        gathered.flush_insert(&mut self.draining);
    }

    /// Takes write leases on blocks that have just been taken, and so have none.
    pub(crate) fn arrive(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            let node = &mut self.nodes[block.index()];
            debug_assert!(node.refs == 1 && node.drains & WRITING == 0, "arriving in a block that is in use");
            node.drains |= WRITING;
        }
    }

    /// Ends a lease on each block, in their order. As [`Pool::end_lease`].
    pub(crate) fn end_leases(&mut self, blocks: impl Iterator<Item = BlockId>, kind: LeaseKind) {
        let (mut drained, mut freed) = (Gathered::default(), Gathered::default());
        let alone = match kind {
            LeaseKind::Drain => (0, 1),
            LeaseKind::Read => (1, 0),
            LeaseKind::Write => (0, WRITING),
        };
        for block in blocks {
            let node = &mut self.nodes[block.index()];
            if node.refs | node.tag == 0 && (node.reads, node.drains) == alone {
                (node.reads, node.drains) = (0, 0);
                if kind == LeaseKind::Drain {
                    drained.remove(&mut self.draining, block);
                }
                self.free.gather(&mut freed, block);
            } else if node.refs > 0 && kind == LeaseKind::Write {
                node.drains &= !WRITING;
            } else {
                self.end_lease(block, kind);
            }
        }
        drained.flush_remove(&mut self.draining);
        self.free.flush(freed);
    }
}
