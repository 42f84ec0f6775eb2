//! The methods of `BlockManager` on sequences and steps, by subject.

mod admission;
mod append;
mod block_tables;
mod relocate;
mod step;
