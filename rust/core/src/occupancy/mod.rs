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
