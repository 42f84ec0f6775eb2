//! I/O of the external tiers: of all crates, only this one accesses the file system.
//!
//! ```text
//! geometry, buffer, header -> device -> slab; ranks, quotas -> index; index, ticket -> queue -> store
//! ```
//!
//! A [`SlabStore`] keeps blocks in the slots of one preallocated file: swap space that is addressed by slot and dies
//! with the process, or blocks under keys that outlive it. Callers submit batches, threads carry them out, and callers
//! collect them by ticket. Every read is checked against the write: a mismatch is a [`Miss`], never wrong bytes. The
//! format is in `docs/decisions/0002-slab-header.md`; the format of keyed slabs is in `0022-prefix-store-in-a-slab.md`.
#![forbid(unsafe_code)]

mod buffer;
mod device;
mod error;
mod geometry;
mod header;
mod index;
mod miss;
mod queue;
mod quotas;
mod ranks;
mod slab;
mod store;
mod sync;
mod ticket;

pub use buffer::{Buffer, LentRow};
pub use device::BlockDevice;
pub use error::{Error, Result};
pub use geometry::{Geometry, PAGE};
pub use header::{Expected, Header, Owner, checksum, checksum_of_two, keyed_checksum};
pub use miss::Miss;
pub use queue::Stats;
pub use slab::{DirectMode, SlabFile, SlabOptions};
pub use store::{Completion, SlabContents, SlabStore, StoreOptions, revision_name};
pub use ticket::Progress;
