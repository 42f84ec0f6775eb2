//! Copies and exchanges rows of paged caches in host memory, at the memory's speed.
//!
//! A cache is [`Rows`]: one row per block, of equal width, a stride apart. One call covers all [`Caches`] of a model;
//! threads share large calls. Copies larger than the processor's caches read several rows at once and bypass the caches
//! when writing.
//!
//! The maker of [`Rows`] promises that the memory exists. Everything else is checked once, before the first byte moves:
//! a [`Mapping`] when it is made (ids are in range, no block is written twice or both read and written), [`Caches`]
//! when they are made (they match and share no memory), and each call checks that the caches have the blocks that the
//! mapping names.

mod apart;
mod contest;
mod copy;
mod error;
mod lanes;
mod lines;
mod mapping;
mod pieces;
mod rows;
mod share;

pub use copy::Caches;
pub use error::CopyError;
pub use mapping::{ASIDE, MAX_RING, Mapping, MappingRule, Steps};
pub use rows::Rows;
