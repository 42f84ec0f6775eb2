//! Where the blocks of a pool lie: which can move, which can be moved into, and which must stay.

mod block_map;
mod pages;
mod tracker;

pub use block_map::BlockMap;
pub(crate) use pages::{Keep, Pages};
pub(crate) use tracker::{PlannerView, Tracker};

/// What may be done with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occupancy {
    /// Nobody refers to it: it can be moved into.
    Hole,
    /// In use, and can be moved.
    Live,
    /// Leased, pinned or the null block: stays, and is nobody's destination.
    Fixed,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::BlockId;

    #[test]
    fn the_densest_arrangement_goes_around_fixed_blocks() {
        let mut places = BlockMap::new(10);
        assert_eq!((places.densest(), places.gap()), (None, 0));
        for block in [0, 2] {
            places.set(BlockId(block), Occupancy::Fixed);
        }
        for block in [1, 8] {
            places.set(BlockId(block), Occupancy::Live);
        }
        assert_eq!(places.densest(), Some(BlockId(3)));
        assert_eq!(places.gap(), 5);
        places.set(BlockId(9), Occupancy::Fixed);
        assert_eq!((places.highest(), places.gap()), (Some(BlockId(9)), 5));
        assert_eq!(places.live_runs(), [1..2, 8..9]);
    }

    #[test]
    fn growing_adds_holes() {
        let mut places = BlockMap::new(3);
        places.set(BlockId(1), Occupancy::Live);
        places.grow(70);
        places.grow(5);
        assert_eq!((places.capacity(), places.holes().len()), (70, 69));
        assert_eq!((places.get(BlockId(1)), places.get(BlockId(69))), (Occupancy::Live, Occupancy::Hole));
    }
}
