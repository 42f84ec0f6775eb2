//! The I/O of the external tiers: threads and system calls live here and nowhere else.
//!
//! ```text
//! header, geometry, buffer -> device -> slab; ticket -> queue -> store
//! ```
//!
//! A [`SlabStore`] keeps blocks in the slots of one preallocated file. Writes and reads are submitted in batches,
//! carried out by a thread pool and collected by ticket; every read is checked against what was written last, and
//! whatever does not match is a [`Miss`], never wrong bytes. The format is in `docs/decisions/0002-slab-header.md`.
#![forbid(unsafe_code)]

mod buffer;
mod device;
mod error;
mod geometry;
mod header;
mod miss;
mod queue;
mod slab;
mod store;
mod sync;
mod ticket;

pub use buffer::Buffer;
pub use device::BlockDevice;
pub use error::{Error, Result};
pub use geometry::Geometry;
pub use header::{Expected, Header, PAGE};
pub use miss::Miss;
pub use queue::Stats;
pub use slab::{DirectMode, SlabFile, SlabOptions};
pub use store::{Completion, SlabStore, StoreOptions};
pub use ticket::Progress;
