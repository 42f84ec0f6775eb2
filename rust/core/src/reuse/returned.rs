//! Free blocks that were used before, in the order in which they are taken again.

use super::{BlockSet, ReuseOrder};
use crate::id::BlockId;
use crate::ring::Rings;
use std::collections::VecDeque;
use std::ops::Range;

/// Previously used free blocks, for the orders that depend on time.
#[derive(Debug, Clone)]
pub(super) enum Returned {
    Fifo(Rings),
    Lru(ByLastUse),
    Lifo(Stack),
}

/// Calls a method of the variant.
macro_rules! dispatch {
    ($returned:expr, $each:ident => $call:expr) => {
        match $returned {
            Returned::Fifo($each) => $call,
            Returned::Lru($each) => $call,
            Returned::Lifo($each) => $call,
        }
    };
}

impl Returned {
    /// No blocks yet, for a pool of `blocks` blocks; `None` for [`ReuseOrder::Lowest`].
    pub(super) fn none(order: ReuseOrder, blocks: usize) -> Option<Self> {
        match order {
            ReuseOrder::Lowest => None,
            ReuseOrder::Fifo => Some(Self::Fifo(Rings::new(blocks, 1))),
            ReuseOrder::Lru => Some(Self::Lru(ByLastUse::new(blocks))),
            ReuseOrder::Lifo => Some(Self::Lifo(Stack::new(blocks))),
        }
    }

    /// Whether these are taken before blocks that were never used.
    pub(super) fn goes_first(&self) -> bool {
        matches!(self, Self::Lifo(_))
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        dispatch!(self, each => each.len())
    }

    pub(super) fn contains(&self, block: BlockId) -> bool {
        dispatch!(self, each => each.contains(block))
    }

    pub(super) fn remove(&mut self, block: BlockId) -> bool {
        dispatch!(self, each => each.remove(block))
    }

    #[inline]
    pub(super) fn used(&mut self, block: BlockId) {
        if let Self::Lru(blocks) = self {
            blocks.used(block);
        }
    }

    #[inline]
    pub(super) fn insert(&mut self, block: BlockId) {
        match self {
            Self::Fifo(ring) => ring.push(0, block),
            Self::Lru(blocks) => blocks.insert(block),
            Self::Lifo(stack) => stack.insert(block),
        }
    }

    /// Takes the first block.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<BlockId> {
        match self {
            Self::Fifo(ring) => ring.pop(0),
            Self::Lru(blocks) => blocks.pop(),
            Self::Lifo(stack) => stack.pop(),
        }
    }

    /// The blocks in order.
    pub(super) fn iter(&self) -> Box<dyn Iterator<Item = BlockId> + '_> {
        match self {
            Self::Fifo(ring) => Box::new(ring.iter(0)),
            Self::Lru(blocks) => Box::new(blocks.iter()),
            Self::Lifo(stack) => Box::new(stack.blocks.iter().rev().copied()),
        }
    }

    /// Forgets neighbours: those at the end of a pool, or of an extent.
    pub(super) fn cut(&mut self, gone: Range<u32>) {
        match self {
            Self::Fifo(ring) => gone.for_each(|block| {
                ring.remove(BlockId(block));
            }),
            Self::Lru(blocks) => blocks.cut(gone),
            Self::Lifo(stack) => stack.cut(gone),
        }
    }

    /// Makes room for ids below `blocks`.
    pub(super) fn make_room(&mut self, blocks: usize) {
        dispatch!(self, each => each.make_room(blocks));
    }
}

/// Blocks by the end of their last use; transfers may hold a block for longer.
#[derive(Debug, Clone)]
pub(super) struct ByLastUse {
    /// Includes blocks that are not free: held by transfers or reallocated.
    uses: Rings,
    /// Free blocks whose turn came before they were free: these are taken first.
    overdue: VecDeque<BlockId>,
    free: BlockSet,
}

impl ByLastUse {
    fn new(blocks: usize) -> Self {
        Self { uses: Rings::new(blocks, 1), overdue: VecDeque::new(), free: BlockSet::empty(blocks) }
    }

    fn len(&self) -> usize {
        self.free.len()
    }

    fn contains(&self, block: BlockId) -> bool {
        self.free.contains(block)
    }

    fn remove(&mut self, block: BlockId) -> bool {
        let was_free = self.free.remove(block);
        if was_free && !self.uses.remove(block) {
            self.overdue.retain(|&other| other != block);
        }
        was_free
    }

    fn used(&mut self, block: BlockId) {
        self.uses.remove(block);
        self.uses.push(0, block);
    }

    fn insert(&mut self, block: BlockId) {
        self.free.insert(block);
        if !self.uses.contains(block) {
            self.overdue.push_back(block);
        }
    }

    fn pop(&mut self) -> Option<BlockId> {
        loop {
            let block = self.overdue.pop_front().or_else(|| self.uses.pop(0))?;
            if self.free.remove(block) {
                return Some(block);
            }
        }
    }

    fn iter(&self) -> impl Iterator<Item = BlockId> {
        let used = self.uses.iter(0).filter(|&block| self.free.contains(block));
        self.overdue.iter().copied().chain(used)
    }

    fn cut(&mut self, gone: Range<u32>) {
        self.overdue.retain(|block| !gone.contains(&block.0));
        for block in gone.map(BlockId) {
            if self.free.remove(block) {
                self.uses.remove(block);
            }
        }
    }

    fn make_room(&mut self, blocks: usize) {
        self.uses.make_room(blocks);
        self.free.grow(blocks);
    }
}

/// Last in, first out.
#[derive(Debug, Clone)]
pub(super) struct Stack {
    /// The last one is taken first.
    blocks: Vec<BlockId>,
    /// The same blocks, for lookups.
    known: BlockSet,
}

impl Stack {
    fn new(blocks: usize) -> Self {
        Self { blocks: Vec::new(), known: BlockSet::empty(blocks) }
    }

    fn len(&self) -> usize {
        self.blocks.len()
    }

    fn contains(&self, block: BlockId) -> bool {
        self.known.contains(block)
    }

    fn remove(&mut self, block: BlockId) -> bool {
        let was_there = self.known.remove(block);
        if was_there {
            self.blocks.retain(|&other| other != block);
        }
        was_there
    }

    fn insert(&mut self, block: BlockId) {
        self.known.insert(block);
        self.blocks.push(block);
    }

    fn pop(&mut self) -> Option<BlockId> {
        let block = self.blocks.pop()?;
        self.known.remove(block);
        Some(block)
    }

    fn cut(&mut self, gone: Range<u32>) {
        self.blocks.retain(|block| !gone.contains(&block.0));
        self.known.remove_run(gone);
    }

    fn make_room(&mut self, blocks: usize) {
        self.known.grow(blocks);
    }
}
