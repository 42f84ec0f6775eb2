//! Many blocks at once, as runs of neighbours: most sequences have taken theirs at one go, lowest ids first.
//!
//! Most blocks are plain, too: one reference, and neither lease nor key nor twin. What is to be done to a run of these needs
//! no questions; other runs go block by block.

use super::resize::id;
use super::{Node, Pool, WRITING};
use crate::id::BlockId;
use crate::lease::LeaseKind;
use std::hint::black_box;
use std::ops::Range;

/// Blocks that are looked at before the first of them is changed, so that cache misses overlap.
const LOOK_AHEAD: usize = 64;

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

/// The blocks as one run, if they are neighbours in rising order.
#[inline]
fn as_run(blocks: &[BlockId]) -> Option<Range<u32>> {
    let rising = blocks.windows(2).fold(true, |rising, pair| rising & (pair[0].0.wrapping_add(1) == pair[1].0));
    rising.then_some(blocks.first()?.0..blocks.last()?.0 + 1)
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
        for blocks in blocks.rchunks(LOOK_AHEAD) {
            let beyond = self.tail().live > 0 && blocks.iter().any(|&block| self.is_beyond(block));
            if beyond || !self.are_plain(blocks) {
                for &block in blocks.iter().rev() {
                    let twin = self.release(block);
                    self.orphans.extend(twin);
                }
            } else if let Some(run) = as_run(blocks) {
                self.nodes[indices(&run)].iter_mut().for_each(Node::part);
                self.free.used_run(run.clone());
                self.free.insert_run(run);
                if self.moves.is_some() {
                    self.refresh_all(blocks);
                }
            } else {
                for &block in blocks.iter().rev() {
                    self.nodes[block.index()].part();
                    self.free.used(block);
                    self.free.insert(block);
                }
                if self.moves.is_some() {
                    self.refresh_all(blocks);
                }
            }
        }
    }

    /// Gives free blocks their first reference, and write leases if `leases` says so.
    pub(super) fn open(&mut self, blocks: &[BlockId], leases: u16) {
        let (refs, drains) = (1, leases);
        for blocks in blocks.chunks(LOOK_AHEAD) {
            if let Some(run) = as_run(blocks) {
                for node in &mut self.nodes[indices(&run)] {
                    (node.refs, node.drains) = (refs, drains);
                }
                continue;
            }
            black_box(blocks.iter().fold(0, |all, &block| all | self.node(block).refs));
            for &block in blocks {
                let node = &mut self.nodes[block.index()];
                (node.refs, node.drains) = (refs, drains);
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
        let beyond = self.beyond(&run);
        self.hold_beyond(beyond);
        if reads == LeaseKind::Drain {
            self.draining.insert_run(run.start..run.end - id(beyond));
        }
        self.refresh_run(run);
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
            self.refresh_run(run);
        } else if nodes.iter().all(|node| node.refs | node.tag == 0 && (node.reads, node.drains) == alone) {
            for node in nodes {
                (node.reads, node.drains) = (0, 0);
            }
            if kind == LeaseKind::Drain {
                self.draining.remove_run(run.clone());
            }
            let beyond = self.beyond(&run);
            self.free.insert_run(run.start..run.end - id(beyond));
            self.let_go(beyond);
            self.refresh_run(run);
        } else {
            for block in run.rev().map(BlockId) {
                self.end_lease(block, kind);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{Chain, KeySpec};
    use crate::id::Tier;
    use crate::pool::Policies;
    use crate::reuse::ReuseOrder;
    use proptest::prelude::*;

    const BLOCKS: u32 = 200;

    /// A pool of which `count` blocks are taken, some of them shared, leased or published.
    fn pool(reuse: ReuseOrder, count: usize, marks: &[(u8, usize)]) -> (Pool, Vec<BlockId>) {
        let policies = Policies { reuse, ..Policies::default() };
        let mut pool = Pool::with_policies(Tier::Device, BLOCKS as usize, true, policies).unwrap();
        let mut blocks = Vec::new();
        pool.take(count, &mut blocks);
        for &(mark, at) in marks {
            let block = blocks[at % count];
            match mark {
                0 => pool.share(block, 1),
                1 => pool.lease(block, LeaseKind::Read).unwrap(),
                2 => pool.lease(block, LeaseKind::Drain).unwrap(),
                3 => {
                    let _ = pool.lease(block, LeaseKind::Write);
                }
                _ => {
                    let key = Chain::new(&KeySpec::default(), 1, 0).block(&[block.0], &[]).unwrap();
                    pool.publish(block, key, 0);
                    pool.set_twin(block, Some((Tier::Host, block)));
                }
            }
        }
        (pool, blocks)
    }

    /// All that can be told of a pool, the order of what it gives out next included.
    fn state(mut pool: Pool) -> impl PartialEq + std::fmt::Debug {
        let nodes = format!("{:?}", pool.nodes);
        let (free, available) = (pool.free(), pool.available());
        let mut next = Vec::new();
        pool.take(available, &mut next);
        (nodes, free, available, next)
    }

    fn orders() -> impl Strategy<Value = ReuseOrder> {
        prop::sample::select(ReuseOrder::ALL.to_vec())
    }

    proptest! {
        #[test]
        fn many_blocks_are_released_as_one_by_one(
            reuse in orders(), count in 1usize..200, step in 1usize..4,
            marks in prop::collection::vec((0u8..5, any::<usize>()), 0..6),
        ) {
            let (mut one, blocks) = pool(reuse, count, &marks);
            let mut all = one.clone();
            let table: Vec<_> = blocks.into_iter().step_by(step).collect();
            let twins: Vec<_> = table.iter().rev().filter_map(|&block| one.release(block)).collect();
            all.release_all(&table);
            prop_assert_eq!(all.take_orphans(), twins);
            prop_assert_eq!(state(all), state(one));
        }

        #[test]
        fn leases_of_a_run_end_as_one_by_one(
            reuse in orders(), count in 1usize..200, kind in 0usize..3, released in any::<bool>(),
            marks in prop::collection::vec((0u8..5, any::<usize>()), 0..3),
        ) {
            let kind = [LeaseKind::Drain, LeaseKind::Read, LeaseKind::Write][kind];
            let marks: Vec<_> = marks.into_iter().filter(|mark| mark.0 != 3).collect();
            let (mut one, blocks) = pool(reuse, count, &marks);
            for &block in &blocks {
                one.lease(block, kind).unwrap();
                if released {
                    one.release(block);
                }
            }
            let mut all = one.clone();
            blocks.iter().rev().for_each(|&block| one.end_lease(block, kind));
            all.end_leases(blocks[0].0..blocks[0].0 + u32::try_from(count).unwrap(), kind);
            prop_assert_eq!(state(all), state(one));
        }

        #[test]
        fn departing_is_a_lease_and_a_release(reuse in orders(), count in 1usize..200, drains in any::<bool>()) {
            let kind = if drains { LeaseKind::Drain } else { LeaseKind::Read };
            let (mut one, blocks) = pool(reuse, count, &[]);
            let mut all = one.clone();
            prop_assert!(all.are_plain(&blocks));
            for &block in blocks.iter().rev() {
                one.lease(block, kind).unwrap();
                one.release(block);
            }
            all.depart(blocks[0].0..blocks[0].0 + u32::try_from(count).unwrap(), kind);
            prop_assert_eq!(state(all.clone()), state(one));
            prop_assert!(!all.are_plain(&blocks[..1]));
        }
    }

    #[test]
    fn blocks_taken_to_be_written_hold_no_bytes_yet_wherever_they_come_from() {
        let (mut pool, blocks) = pool(ReuseOrder::Lowest, BLOCKS as usize, &[(2, 7), (4, 9)]);
        pool.release_all(&blocks[..10]);
        let mut taken = Vec::new();
        assert!(pool.take_to_write(10, &mut taken));
        assert_eq!(taken.len(), 10);
        assert!(taken.iter().all(|&block| pool.is_writing(block) && pool.refs(block) == 1));
    }
}
