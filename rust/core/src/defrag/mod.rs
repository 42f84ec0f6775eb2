//! Defragmentation: which blocks move where so that a goal is met, and the books of a foreign allocator's ids that follow.
//!
//! [`Places`] knows which blocks are live, which are holes and which must stay. [`Goal`] says what is wanted of them,
//! [`Places::plan`] gives the fewest moves that bring it about. [`Observer`] keeps the places of an allocator that is not
//! ours: its ids stay as they are, and a pair of tables says where each one's bytes lie.

mod goal;
mod observer;
mod pair;
mod places;
mod plan;

pub use goal::Goal;
pub use observer::{Fresh, LeaseId, Observer};
pub use places::{Place, Places};
pub use plan::{Hysteresis, Plan};
