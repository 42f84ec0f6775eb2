//! Copies and exchanges rows of paged caches in host memory, at the memory's speed.
//!
//! A cache is [`Rows`]: one for each block, of one width, a stride apart. One call does all caches of a model; large calls
//! are shared among threads. What is larger than the processor's caches is read from several rows at once, and written past
//! the caches.
//!
//! Memory is the promise of who makes [`Rows`]. All else is checked before the first byte moves: that rows exist, that no row
//! is written twice or both read and written, that no caches share memory.

mod apart;
mod copy;
mod lanes;
mod lines;
mod order;
mod pieces;
mod rows;
mod share;

pub use copy::{CopyError, copy_rows, exchange_rows, move_rows};
pub use rows::Rows;
