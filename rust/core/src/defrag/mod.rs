//! Defragmentation: which blocks move where so that a goal is met, and where a foreign allocator's ids lie after that.
//!
//! [`BlockMap`] knows which blocks are live, which are holes and which must stay. [`Goal`] says what is wanted of them,
//! [`BlockMap::plan`] gives the fewest moves that bring it about. A [`Planner`] works for several goals by priority, step by
//! step, within a [`Budget`], and asks the blocks' owner for the [`Facts`] that places do not tell. [`Observer`] keeps the
//! places of an allocator that is not ours: its ids stay as they are, and a pair of tables says where each one's bytes lie.

mod content;
mod contiguous;
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
