//! Blocks in rings of stamped entries: the building block of eviction policies and reuse orders.
//!
//! Inserting a block appends it to a ring with a new stamp; removing it only clears its stamp, and its old entry is
//! skipped later. So every operation touches one word of the block, rings are read in order, and no cost depends on the
//! number of blocks. Stale entries are swept out a few at a time, so that no call is slow.

use crate::id::BlockId;
use std::collections::{HashMap, VecDeque};

/// Maximum entries in a chunk: memory is allocated and freed in pieces of 8 KiB, ...
const CHUNK: usize = 1024;
/// ... or smaller ones if there are few blocks: one part in 16, ...
const CHUNKS: usize = 16;
/// ... but at least 16 entries.
const SMALL_CHUNK: usize = 16;
/// Entries whose blocks are processed together.
const TOGETHER: usize = 128;
/// Entries examined per insertion while a sweep is due.
const SWEPT: usize = 4;

/// A block, and the stamp that it had when it was put here.
type StampedBlock = (BlockId, u32);

/// First in, first out, in chunks: it grows without moving what it holds.
#[derive(Debug, Clone, Default)]
struct Queue {
    /// Read from `at` on.
    front: Vec<StampedBlock>,
    at: usize,
    full: VecDeque<Vec<StampedBlock>>,
    back: Vec<StampedBlock>,
    /// An empty chunk, to be filled next.
    spare: Vec<StampedBlock>,
    /// Entries in a chunk.
    chunk: usize,
}

impl Queue {
    fn new(chunk: usize) -> Self {
        Self { chunk, ..Self::default() }
    }

    #[inline]
    fn push(&mut self, entry: StampedBlock) {
        if self.back.len() == self.back.capacity() {
            self.next_chunk();
        }
        self.back.push(entry);
    }

    /// Chunks of entries that have not been read, last one first.
    fn chunks_mut(&mut self) -> impl Iterator<Item = (usize, &mut Vec<StampedBlock>)> {
        let Self { front, at, full, back, .. } = self;
        let rest = std::iter::once(back).chain(full.iter_mut().rev()).map(|chunk| (0, chunk));
        rest.chain(std::iter::once((*at, front)))
    }

    #[cold]
    fn next_chunk(&mut self) {
        let mut fresh = std::mem::take(&mut self.spare);
        fresh.reserve_exact(self.chunk);
        let full = std::mem::replace(&mut self.back, fresh);
        if !full.is_empty() {
            self.full.push_back(full);
        }
    }

    #[inline]
    fn first(&mut self) -> Option<StampedBlock> {
        if self.at == self.front.len() && !self.turn() {
            return None;
        }
        self.front.get(self.at).copied()
    }

    #[inline]
    fn pop(&mut self) -> Option<StampedBlock> {
        let entry = self.first()?;
        self.at += 1;
        Some(entry)
    }

    /// The first `count` entries, or fewer if they are in several chunks; at least one, if there is any.
    #[inline]
    fn firsts(&mut self, count: usize) -> &[StampedBlock] {
        if self.at == self.front.len() && !self.turn() {
            return &[];
        }
        let rest = &self.front[self.at..];
        &rest[..count.min(rest.len())]
    }

    fn iter(&self) -> impl Iterator<Item = &StampedBlock> {
        self.front[self.at..].iter().chain(self.full.iter().flatten()).chain(&self.back)
    }

    /// Goes on to the next chunk, once the front one has been read; returns whether there is one.
    #[cold]
    fn turn(&mut self) -> bool {
        let next = match self.full.pop_front() {
            Some(chunk) => chunk,
            None if self.back.is_empty() => return false,
            None => std::mem::take(&mut self.back),
        };
        let mut read = std::mem::replace(&mut self.front, next);
        self.at = 0;
        read.clear();
        self.spare = read;
        true
    }
}

/// One ring: the swept part, then the rest.
#[derive(Debug, Clone, Default)]
struct Ring {
    swept: Queue,
    rest: Queue,
}

impl Ring {
    /// A ring of a pool of `blocks` blocks.
    fn new(blocks: usize) -> Self {
        let chunk = (blocks / CHUNKS).clamp(SMALL_CHUNK, CHUNK);
        Self { swept: Queue::new(chunk), rest: Queue::new(chunk) }
    }
}

impl Ring {
    /// Inserts an entry behind those that are at least as old. Nearly all come in their order.
    fn insert(&mut self, entry: StampedBlock, clock: u32) {
        let is_older = |&(_, stamp): &StampedBlock| clock.wrapping_sub(stamp) >= clock.wrapping_sub(entry.1);
        let chunks = self.rest.chunks_mut().chain(self.swept.chunks_mut());
        let mut last = true;
        for (first, chunk) in chunks {
            if let Some(before) = chunk[first..].iter().rposition(is_older) {
                if last && first + before + 1 == chunk.len() {
                    break;
                }
                chunk.insert(first + before + 1, entry);
                return;
            }
            last &= chunk.len() == first;
        }
        if last {
            self.rest.push(entry);
        } else {
            self.insert_first(entry);
        }
    }

    /// Inserts an entry before all others.
    fn insert_first(&mut self, entry: StampedBlock) {
        let queue = if self.swept.first().is_some() { &mut self.swept } else { &mut self.rest };
        let _ = queue.first();
        queue.front.insert(queue.at, entry);
    }
}

/// Blocks in several rings, each in the order in which its blocks came.
#[derive(Debug, Clone)]
pub(crate) struct Rings {
    each: Vec<Ring>,
    /// 0 for a block that is in no ring.
    stamps: Vec<u32>,
    /// Stamp given last.
    clock: u32,
    len: usize,
    /// Entries in all rings, including stale ones.
    entries: usize,
    /// Ring that is being swept.
    sweeping: usize,
    /// Stamps of entries whose block was renamed, and the new block, until the entry is next visited.
    renamed: HashMap<u32, BlockId>,
}

impl Rings {
    pub(crate) fn new(blocks: usize, rings: usize) -> Self {
        let rings = vec![Ring::new(blocks); rings];
        let (stamps, renamed) = (vec![0; blocks], HashMap::new());
        Self { each: rings, stamps, clock: 0, len: 0, entries: 0, sweeping: 0, renamed }
    }

    /// Makes room for more rings.
    pub(crate) fn grow(&mut self, rings: usize) {
        self.each.resize(rings.max(self.each.len()), Ring::new(self.stamps.len()));
    }

    /// Makes room for ids below `blocks`.
    pub(crate) fn make_room(&mut self, blocks: usize) {
        let more = blocks.saturating_sub(self.stamps.len());
        self.stamps.reserve_exact(more);
        self.stamps.resize(self.stamps.len() + more, 0);
    }

    /// Stamp of the last insertion.
    pub(crate) fn clock(&self) -> u32 {
        self.clock
    }

    /// Blocks in all rings.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Blocks of a ring, first to last.
    pub(crate) fn iter(&self, ring: usize) -> impl Iterator<Item = BlockId> + '_ {
        let entries = self.each.get(ring).into_iter().flat_map(|ring| ring.swept.iter().chain(ring.rest.iter()));
        let block = |&(block, stamp): &StampedBlock| {
            let block =
                if self.stamps[block.index()] == stamp { Some(block) } else { self.renamed.get(&stamp).copied() };
            block.filter(|block| self.stamps[block.index()] == stamp)
        };
        entries.filter_map(block)
    }

    /// Replaces a block, if it is in a ring, by another that is in none.
    pub(crate) fn rename(&mut self, from: BlockId, to: BlockId) {
        let stamp = std::mem::take(&mut self.stamps[from.index()]);
        if stamp != 0 {
            debug_assert!(!self.contains(to), "a block in two places");
            self.stamps[to.index()] = stamp;
            self.renamed.insert(stamp, to);
        }
    }

    /// Whether a block is in a ring.
    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.stamps.get(block.index()).is_some_and(|&stamp| stamp != 0)
    }

    /// Whether a block is in a ring, with this stamp.
    pub(crate) fn has_stamp(&self, block: BlockId, stamp: u32) -> bool {
        stamp != 0 && self.stamps.get(block.index()) == Some(&stamp)
    }

    /// Puts a block that is in no ring at the end of one.
    #[inline]
    pub(crate) fn push(&mut self, ring: usize, block: BlockId) {
        debug_assert!(!self.contains(block), "a block in two rings");
        // A stamp repeats after 2^32 insertions; sweeps have dropped its old entries long before.
        self.clock = self.clock.wrapping_add(1).max(1);
        self.stamps[block.index()] = self.clock;
        self.each[ring].rest.push((block, self.clock));
        self.count_entry();
    }

    #[inline]
    fn count_entry(&mut self) {
        self.len += 1;
        self.entries += 1;
        if self.entries > self.len + self.len / 2 + 64 {
            self.sweep();
        }
    }

    /// Puts a block that is in no ring into one, with a stamp that other rings gave it, see [`Rings::set_clock`]: behind
    /// the blocks that have older ones.
    pub(crate) fn push_stamped(&mut self, ring: usize, block: BlockId, stamp: u32) {
        debug_assert!(!self.contains(block), "a block in two rings");
        self.stamps[block.index()] = stamp;
        self.each[ring].insert((block, stamp), self.clock);
        self.count_entry();
    }

    /// Continues at the stamp that other rings gave last. No two insertions of a block may have the same stamp.
    pub(crate) fn set_clock(&mut self, clock: u32) {
        self.clock = clock;
    }

    /// Takes a block out; returns whether it was in a ring.
    #[inline]
    pub(crate) fn remove(&mut self, block: BlockId) -> bool {
        let was = std::mem::take(&mut self.stamps[block.index()]) != 0;
        self.len -= usize::from(was);
        was
    }

    /// Takes the first block of a ring out.
    #[inline]
    pub(crate) fn pop(&mut self, ring: usize) -> Option<BlockId> {
        let ring = &mut self.each[ring];
        while let Some((block, stamp)) = ring.swept.pop().or_else(|| ring.rest.pop()) {
            self.entries -= 1;
            if let Some(block) = current((block, stamp), &self.stamps, &mut self.renamed) {
                self.stamps[block.index()] = 0;
                self.len -= 1;
                return Some(block);
            }
        }
        None
    }

    /// Takes the `count` first blocks of a ring out, or as many as there are, and appends them to `out`.
    pub(crate) fn pop_into(&mut self, ring: usize, count: usize, out: &mut Vec<BlockId>) {
        self.pop_older(ring, count, 0, out);
    }

    /// Like `pop_into`, but stops at a block that was put there fewer than `least_age` insertions ago. Returns the stamp
    /// of the last block; 0 if there is none.
    pub(crate) fn pop_older(&mut self, ring: usize, mut count: usize, least_age: u32, out: &mut Vec<BlockId>) -> u32 {
        let Ring { swept, rest } = &mut self.each[ring];
        let (mut stamps, mut last) = ([0; TOGETHER], 0);
        while count > 0 {
            let queue = if swept.first().is_some() { &mut *swept } else { &mut *rest };
            let mut entries = queue.firsts(count.min(TOGETHER));
            if least_age > 0 {
                let is_older = |&(_, stamp): &StampedBlock| self.clock.wrapping_sub(stamp) >= least_age;
                entries = &entries[..entries.partition_point(is_older)];
            }
            let read = entries.len();
            if read == 0 {
                break;
            }
            // Keep this loop minimal, so that many cache misses overlap.
            for (stamp, (block, _)) in stamps.iter_mut().zip(entries) {
                *stamp = self.stamps[block.index()];
            }
            for (found, &(block, stamp)) in stamps.iter().zip(entries) {
                let block = if *found == stamp {
                    Some(block)
                } else {
                    current((block, stamp), &self.stamps, &mut self.renamed)
                };
                if let Some(block) = block {
                    self.stamps[block.index()] = 0;
                    self.len -= 1;
                    count -= 1;
                    last = stamp;
                    out.push(block);
                }
            }
            queue.at += read;
            self.entries -= read;
        }
        last
    }

    /// Insertions since the first block of a ring was put there.
    #[inline]
    pub(crate) fn age(&mut self, ring: usize) -> Option<u32> {
        self.first(ring).map(|(_, age)| age)
    }

    /// The first block of a ring, and the insertions since it was put there.
    #[inline]
    pub(crate) fn first(&mut self, ring: usize) -> Option<(BlockId, u32)> {
        let ring = &mut self.each[ring];
        loop {
            let queue = if ring.swept.first().is_some() { &mut ring.swept } else { &mut ring.rest };
            let (entry, stamp) = queue.first()?;
            let is_current = |block: &BlockId| self.stamps[block.index()] == stamp;
            let block = Some(entry).filter(is_current).or_else(|| self.renamed.get(&stamp).copied().filter(is_current));
            if let Some(block) = block {
                return Some((block, self.clock.wrapping_sub(stamp)));
            }
            self.renamed.remove(&stamp);
            queue.pop();
            self.entries -= 1;
        }
    }

    /// Drops some stale entries.
    fn sweep(&mut self) {
        let Ring { swept, rest } = &mut self.each[self.sweeping];
        for _ in 0..SWEPT {
            let Some(entry) = rest.pop() else {
                std::mem::swap(swept, rest);
                self.sweeping = (self.sweeping + 1) % self.each.len();
                return;
            };
            if let Some(block) = current(entry, &self.stamps, &mut self.renamed) {
                swept.push((block, entry.1));
            } else {
                self.entries -= 1;
            }
        }
    }
}

/// The block of an entry, unless it is stale; consumes a pending rename.
#[inline]
fn current(entry: StampedBlock, stamps: &[u32], renamed: &mut HashMap<u32, BlockId>) -> Option<BlockId> {
    let (block, stamp) = entry;
    if stamps[block.index()] == stamp {
        return Some(block);
    }
    if renamed.is_empty() {
        return None;
    }
    renamed.remove(&stamp).filter(|block| stamps[block.index()] == stamp)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_ring_gives_its_blocks_in_the_order_in_which_they_came(
            ops in prop::collection::vec((0u8..7, 0u32..40, 0usize..3), 0..2000),
        ) {
            let mut rings = Rings::new(40, 3);
            let mut model: [Vec<u32>; 3] = [vec![], vec![], vec![]];
            let mut pushed = [0; 40];
            for (op, n, ring) in ops {
                let held = model.iter().any(|ring| ring.contains(&n));
                match op {
                    0 | 1 if !held => {
                        rings.push(ring, BlockId(n));
                        model[ring].push(n);
                        pushed[n as usize] = rings.clock();
                    }
                    2 => {
                        prop_assert_eq!(rings.remove(BlockId(n)), held);
                        for ring in &mut model {
                            ring.retain(|&m| m != n);
                        }
                    }
                    3 => {
                        let first = (!model[ring].is_empty()).then(|| BlockId(model[ring].remove(0)));
                        prop_assert_eq!(rings.pop(ring), first);
                    }
                    4 => prop_assert_eq!(rings.age(ring).is_some(), !model[ring].is_empty()),
                    5 => {
                        let mut taken = Vec::new();
                        let least_age = (n % 3) * 10;
                        rings.pop_older(ring, n as usize / 4, least_age, &mut taken);
                        let is_old = |block: &&u32| rings.clock() - pushed[**block as usize] >= least_age;
                        let count = model[ring].iter().take(n as usize / 4).take_while(is_old).count();
                        prop_assert!(taken.iter().map(|block| block.0).eq(model[ring].drain(..count)));
                    }
                    6 => {
                        let to = (n * 7 + 3) % 40;
                        let place = model.iter_mut().flatten().find(|m| **m == n);
                        if let Some(place) = place.filter(|_| !rings.contains(BlockId(to))) {
                            rings.rename(BlockId(n), BlockId(to));
                            *place = to;
                            pushed[to as usize] = pushed[n as usize];
                        }
                    }
                    _ => {}
                }
                prop_assert_eq!(rings.len(), model.iter().map(Vec::len).sum::<usize>());
                for (i, model) in model.iter().enumerate() {
                    prop_assert!(rings.iter(i).eq(model.iter().copied().map(BlockId)));
                }
            }
        }
    }

    #[test]
    fn nothing_is_swept_while_every_entry_counts() {
        let mut rings = Rings::new(5000, 2);
        for i in 0..5000 {
            rings.push((i % 3 == 0).into(), BlockId(i));
        }
        assert!(rings.each.iter().all(|ring| ring.swept.iter().next().is_none()));
    }

    #[test]
    fn rings_stay_small_however_often_blocks_come_and_go() {
        let mut rings = Rings::new(5000, 2);
        let mut most = 0;
        for i in 0..200_000 {
            let block = BlockId(i * 7 % 5000);
            rings.remove(block);
            rings.push((i % 3 == 0).into(), block);
            most = most.max(rings.entries);
            assert_eq!(
                rings.entries,
                rings.each.iter().map(|r| r.swept.iter().count() + r.rest.iter().count()).sum::<usize>()
            );
        }
        assert!(most < 5000 * 7 / 4, "{most} entries");
    }

    #[test]
    fn a_queue_begins_a_chunk_when_the_last_is_full() {
        let mut queue = Queue::new(4);
        for _ in 0..9 {
            queue.push(StampedBlock::default());
        }
        assert_eq!((queue.full.len(), queue.back.len()), (2, 1));
    }

    proptest! {
        #[test]
        fn a_block_with_a_stamp_of_other_rings_goes_behind_older_ones(
            ops in prop::collection::vec((0u8..5, any::<prop::sample::Index>()), 0..600),
        ) {
            let mut rings = Rings::new(700, 2);
            // The stamps that are in the ring, in order, and those that other rings have.
            let (mut held, mut others) = (Vec::<(u32, u32)>::new(), Vec::new());
            for (block, (op, pick)) in (0u32..).zip(ops) {
                match op {
                    0 | 1 => {
                        rings.push(0, BlockId(block));
                        held.push((rings.clock(), block));
                    }
                    2 => {
                        rings.set_clock(rings.clock() + 1);
                        others.push(rings.clock());
                    }
                    3 if !others.is_empty() => {
                        let stamp = others.swap_remove(pick.index(others.len()));
                        rings.push_stamped(0, BlockId(block), stamp);
                        held.insert(held.partition_point(|&(other, _)| other < stamp), (stamp, block));
                    }
                    4 if !held.is_empty() => {
                        // From the front or from anywhere.
                        let (_, gone) = held.remove(if block % 2 == 0 { 0 } else { pick.index(held.len()) });
                        prop_assert!(rings.remove(BlockId(gone)));
                    }
                    _ => {}
                }
                let first = held.first().map(|&(stamp, block)| (BlockId(block), rings.clock() - stamp));
                prop_assert_eq!(rings.first(0), first);
                prop_assert_eq!(rings.len(), held.len());
            }
            let order: Vec<_> = std::iter::from_fn(|| rings.pop(0)).map(|block| block.0).collect();
            prop_assert_eq!(order, held.iter().map(|&(_, block)| block).collect::<Vec<_>>());
        }
    }
}
