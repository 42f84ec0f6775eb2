//! Blocks that can no longer be found: a pool records them until an event reports them.

use crate::id::BlockId;
use std::collections::VecDeque;

/// Why a block can no longer be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// It was reallocated.
    Evicted,
    /// A transfer failed, and its bytes with it.
    Lost,
    /// It holds other tokens now.
    Replaced,
    /// Its bytes are in another block now. A `stored` event for that block follows, at once or when they have landed.
    Moved,
}

impl Reason {
    /// All reasons, in the order of their numbers.
    pub const ALL: [Self; 4] = [Self::Evicted, Self::Lost, Self::Replaced, Self::Moved];

    /// The reason's name in Python.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Evicted => "evicted",
            Self::Lost => "lost",
            Self::Replaced => "replaced",
            Self::Moved => "moved",
        }
    }
}

/// A bounded queue of the newest items, numbered.
#[derive(Debug, Clone)]
pub(crate) struct Ring<T> {
    pub(crate) items: VecDeque<T>,
    pub(crate) capacity: usize,
    pub(crate) next: u64,
}

impl<T> Ring<T> {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { items: VecDeque::new(), capacity, next: 0 }
    }

    pub(crate) fn push(&mut self, item: T) {
        if self.items.len() == self.capacity {
            self.items.pop_front();
        }
        if self.capacity > 0 {
            self.items.push_back(item);
        }
        self.next += 1;
    }

    /// Takes all items; also returns how many were dropped before them since the last call.
    pub(crate) fn take_all(&mut self) -> (u64, impl Iterator<Item = T>) {
        let dropped = self.first();
        self.next = 0;
        (dropped, self.items.drain(..))
    }

    /// Number of the first item.
    pub(crate) fn first(&self) -> u64 {
        self.next - self.items.len() as u64
    }
}

/// A removed block; its exported key stays known until the block is published again, and removals are gathered before
/// that.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Removal {
    pub(crate) block: BlockId,
    pub(crate) reason: Reason,
    pub(crate) remaining: u8,
}

/// Blocks that one pool removed since they were last gathered.
pub(crate) type Removals = Ring<Removal>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_ring_drops_its_oldest_and_their_numbers_show_it() {
        let mut ring = Ring::new(3);
        for item in 0..5 {
            ring.push(item);
        }
        assert_eq!((ring.first(), ring.next), (2, 5));
        assert_eq!(ring.items, [2, 3, 4]);
    }
}
