//! Many blocks at once, as runs of neighbours: most sequences have taken theirs at one go, lowest ids first.
//!
//! Most blocks are plain, too: one reference, and neither lease nor key nor twin. What is to be done to a run of these needs
//! no questions; other runs go block by block.

use super::{Node, Pool, WRITING};
use crate::id::BlockId;
use crate::lease::LeaseKind;
use std::ops::Range;

impl Node {
    /// Whether the block has one reference and nothing else.
    #[inline]
    fn is_plain(self) -> bool {
        (self.refs ^ 1) | u32::from(self.reads | self.drains) | self.twin | self.tag == 0
    }

    /// Drops the one reference.
    #[inline]
    fn part(&mut self) {
        self.refs = 0;
        self.generation = self.generation.wrapping_add(1);
    }
}

/// The runs of neighbours in a table.
fn runs(blocks: &[BlockId]) -> impl DoubleEndedIterator<Item = Range<u32>> {
    let neighbours = blocks.chunk_by(|a, b| a.0.wrapping_add(1) == b.0);
    neighbours.filter_map(|run| Some(run.first()?.0..run.last()?.0 + 1))
}

fn indices(run: &Range<u32>) -> Range<usize> {
    run.start as usize..run.end as usize
}

impl Pool {
    /// Whether each block has one reference, no lease, no key and no twin.
    pub(crate) fn are_plain(&self, blocks: &[BlockId]) -> bool {
        blocks.iter().all(|&block| self.node(block).is_plain())
    }

    /// Drops one reference to each block, to the last one first. As [`Pool::release`], but that twins of blocks whose bytes
    /// are not kept are left in [`Pool::take_orphans`].
    pub(crate) fn release_all(&mut self, blocks: &[BlockId]) {
        for run in runs(blocks).rev() {
            let nodes = &mut self.nodes[indices(&run)];
            if nodes.iter().all(|node| node.is_plain()) {
                nodes.iter_mut().for_each(Node::part);
                self.free.used_run(run.clone());
                self.free.insert_run(run);
            } else {
                for block in run.rev().map(BlockId) {
                    let twin = self.release(block);
                    self.orphans.extend(twin);
                }
            }
        }
    }

    /// Drops the references to plain neighbours whose bytes a transfer reads; it holds them from now on.
    pub(crate) fn depart(&mut self, run: Range<u32>, reads: LeaseKind) {
        let leases = if reads == LeaseKind::Drain { (0, 1) } else { (1, 0) };
        for node in &mut self.nodes[indices(&run)] {
            debug_assert!(node.is_plain(), "departing from a block that others use");
            node.part();
            (node.reads, node.drains) = leases;
        }
        self.free.used_run(run.clone());
        if reads == LeaseKind::Drain {
            self.draining.insert_run(run);
        }
    }

    /// Ends a lease on each of some neighbours, on the last one first. As [`Pool::end_lease`].
    pub(crate) fn end_leases(&mut self, run: Range<u32>, kind: LeaseKind) {
        let nodes = &mut self.nodes[indices(&run)];
        let alone = match kind {
            LeaseKind::Drain => (0, 1),
            LeaseKind::Read => (1, 0),
            LeaseKind::Write => (0, WRITING),
        };
        if kind == LeaseKind::Write && nodes.iter().all(|node| node.refs > 0) {
            for node in nodes {
                node.drains &= !WRITING;
            }
        } else if nodes.iter().all(|node| node.refs | node.tag == 0 && (node.reads, node.drains) == alone) {
            for node in nodes {
                (node.reads, node.drains) = (0, 0);
            }
            if kind == LeaseKind::Drain {
                self.draining.remove_run(run.clone());
            }
            self.free.insert_run(run);
        } else {
            for block in run.rev().map(BlockId) {
                self.end_lease(block, kind);
            }
        }
    }
}
