//! The methods of `BlockManager` on sequences and steps, by subject.

mod admission;
mod append;
mod block_tables;
pub(crate) mod plain;
mod relocate;
mod step;
