//! I/O of the external tiers: only this crate has threads and file system calls.
//!
//! ```text
//! header, geometry, buffer -> device -> slab; ticket -> queue -> store
//! ```
//!
//! A [`SlabStore`] keeps blocks in the slots of one preallocated file. Callers submit writes and reads in batches, a
//! thread pool carries them out, and callers collect them by ticket. Every read is checked against the last write: a
//! mismatch is a [`Miss`], never wrong bytes. The format is in `docs/decisions/0002-slab-header.md`.
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
