//! Defragmentation: plans moves to meet a goal, and tracks where a foreign allocator's ids lie afterwards.
//!
//! [`BlockMap`] knows which blocks are live, which are holes and which must stay. A [`Goal`] describes the desired
//! state, and [`BlockMap::plan`] returns the fewest moves that reach it. A [`Planner`] works towards several goals by
//! priority, step by step, within a [`Budget`], and asks the blocks' owner for further [`Facts`]. An [`Observer`]
//! tracks blocks of a foreign allocator: its ids stay the same, and a pair of tables maps each id to the block that
//! holds its bytes.

mod content;
mod contiguous;
mod extents;
mod facts;
mod goal;
mod moves;
mod observer;
mod pair;
mod plan;
mod planner;
mod rules;
mod spans;
mod view;

pub use crate::placement::{BlockMap, Occupancy};
pub use contiguous::{Sequences, runs};
pub use facts::{Budget, Facts, HoleUse, Plain};
pub use goal::Goal;
pub use moves::{Cached, Fragmentation, MoveStats, Moves};
pub(crate) use moves::{Defrag, check_moves, fragmentation};
pub use observer::{Fresh, LeaseId, Observer};
pub use plan::Plan;
pub use planner::{Planner, Wanted};
