//! Copies and exchanges rows of paged caches in host memory, at the memory's speed.
//!
//! A cache is [`Rows`]: one row a block, of one width, a stride apart. One call covers all caches of a model; threads share
//! large calls. Copies larger than the processor's caches read several rows at once and write past the caches.
//!
//! The maker of [`Rows`] promises that the memory exists. Everything else is checked before the first byte moves: rows
//! exist, no row is written twice or both read and written, no caches share memory.

mod apart;
mod copy;
mod error;
mod lanes;
mod lines;
mod order;
mod pieces;
mod rows;
mod share;

pub use copy::{copy_rows, exchange_rows, move_rows};
pub use error::CopyError;
pub use rows::Rows;
