//! What may be done with a block, as far as moving goes.

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
