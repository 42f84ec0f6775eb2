//! Allocators that stand alone: the blocks of one tier for an engine that keeps its own tables.
//!
//! [`NaiveAllocator`] counts references; [`PrefixCachingAllocator`] also finds full blocks by their keys. Both are used
//! through [`BlockAllocator`]. Every verb takes a batch and succeeds whole or changes nothing. The caller owns one
//! reference for each id that it was given and gives it back with [`BlockAllocator::free`]. No locks: who shares an
//! allocator brings one.
//!
//! ```
//! use blockyard_core::allocator::{BlockAllocator, NaiveAllocator};
//! use blockyard_core::{BlockId, ReuseOrder, Tier};
//!
//! # fn main() -> blockyard_core::Result<()> {
//! let mut allocator = NaiveAllocator::new(Tier::Device, 4, ReuseOrder::Lowest)?;
//! let mut table = Vec::new();
//! allocator.allocate(3, &mut table)?;
//! assert!(allocator.allocate(2, &mut table).is_err() && table.len() == 3); // all or nothing
//!
//! allocator.share(&table[..1])?; // another table names the first block
//! allocator.free(&table)?;
//! let mut next = Vec::new();
//! allocator.allocate(1, &mut next)?;
//! assert_eq!(next, [BlockId(1)]);
//! # Ok(())
//! # }
//! ```

mod caching;
mod naive;

use crate::error::Result;
use crate::hash::Key;
use crate::id::BlockId;
use crate::pool::Pool;

pub use caching::{Eviction, PrefixCachingAllocator};
pub use naive::NaiveAllocator;

/// Key of a full block, and how long the prefix is that it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keyed {
    /// Key of the block.
    pub key: Key,
    /// Length of the prefix up to the block's end, in any unit: of blocks used equally long ago the longest goes first.
    pub depth: u32,
}

/// Lookups of keys so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookups {
    /// Keys that blocks were asked for by.
    pub queries: u64,
    /// Keys that a block had.
    pub hits: u64,
}

/// The blocks of one tier, given out and taken back by reference.
pub trait BlockAllocator: Send {
    /// The blocks: how many, how many free, and their reference counts.
    fn pool(&self) -> &Pool;

    /// Takes `count` blocks and appends them to `out`.
    ///
    /// # Errors
    /// Fewer are free.
    fn allocate(&mut self, count: usize, out: &mut Vec<BlockId>) -> Result<()>;

    /// Takes one block for each key, the one that has it where there is one, then `plain` more; appends them to `out`.
    /// Returns how many keys had one. New blocks get their keys at once but count as computed only after
    /// [`BlockAllocator::mark_computed`].
    ///
    /// # Errors
    /// Fewer are free than are new or nowhere else in use.
    fn allocate_keyed(&mut self, keys: &[Keyed], plain: usize, out: &mut Vec<BlockId>) -> Result<usize>;

    /// Whether [`BlockAllocator::free`] would do; nothing is changed.
    ///
    /// # Errors
    /// As [`BlockAllocator::free`].
    fn require(&self, blocks: &[BlockId]) -> Result<()>;

    /// Takes one more reference to each block; one that is named twice gets two.
    ///
    /// # Errors
    /// A block is not in use, or is the null block.
    fn share(&mut self, blocks: &[BlockId]) -> Result<()>;

    /// Gives back one reference to each block, in order; one that is named twice loses two.
    ///
    /// # Errors
    /// A block is referenced less often than it is named, or is the null block.
    fn free(&mut self, blocks: &[BlockId]) -> Result<()>;

    /// Exchanges references to blocks that must not be written, since others use them, for new blocks; appends one block
    /// for each to `out`. Where it differs, the caller copies the bytes.
    ///
    /// # Errors
    /// As [`BlockAllocator::allocate`] and [`BlockAllocator::free`].
    fn make_writable(&mut self, blocks: &[BlockId], out: &mut Vec<BlockId>) -> Result<()>;

    /// Gives a block its key once it is full. If another block has that key the reference is exchanged for one to that.
    ///
    /// # Errors
    /// The block is not in use.
    fn publish(&mut self, block: BlockId, keyed: Keyed) -> Result<BlockId>;

    /// Blocks of the longest prefix of `keys` that is computed; nothing is taken.
    fn find(&self, keys: &[Key]) -> Vec<BlockId>;

    /// The block that has a key, computed or not; nothing is taken.
    fn holder(&self, key: &Key) -> Option<BlockId> {
        self.pool().find(key)
    }

    /// Blocks that taking these keys would use up; nothing is taken. A block that is in use already costs nothing.
    fn cost(&self, keys: &[Key]) -> usize;

    /// Whether a block's tokens have been computed, as far as its key is known.
    fn is_computed(&self, block: BlockId) -> bool;

    /// Blocks that have a key count as computed from now on, those named or all that are in use: the step that writes
    /// them is over.
    fn mark_computed(&mut self, blocks: Option<&[BlockId]>);

    /// Notes when blocks were last used, for eviction.
    ///
    /// # Errors
    /// A block is neither in use nor cached, or the time is not a number.
    fn touch(&mut self, blocks: &[BlockId], now: f64) -> Result<()>;

    /// Forgets all keys and counters; returns false and does nothing while a block is in use.
    fn reset(&mut self) -> bool;

    /// The block that stands for those that fell out of a window: one an allocator, taken at the first call, never freed.
    ///
    /// # Errors
    /// No block is free.
    fn null_block(&mut self) -> Result<BlockId>;

    /// Free blocks in the order in which they would be given out, cached ones last; nothing is taken.
    fn upcoming(&self) -> Box<dyn Iterator<Item = BlockId> + '_>;

    /// Lookups since the start or the last reset; `None` where there are no keys.
    fn lookups(&self) -> Option<Lookups>;

    /// Compares all structures with each other.
    ///
    /// # Errors
    /// They contradict each other.
    fn check(&self) -> Result<()>;
}
