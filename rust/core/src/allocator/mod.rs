//! Standalone allocators: the blocks of one tier, for an engine that keeps its own tables.
//!
//! [`NaiveAllocator`] counts references; [`PrefixCachingAllocator`] also finds full blocks by their keys. Both are used
//! through [`BlockAllocator`]. Every call takes a batch and either succeeds completely or changes nothing. The caller
//! owns one reference for each id it received and returns it with [`BlockAllocator::free`]. There are no locks: to
//! share an allocator, add your own.
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

/// Key of a full block, and the length of the prefix that ends with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keyed {
    /// Key of the block.
    pub key: Key,
    /// Length of the prefix up to the block's end, in any unit; among blocks of equal age the longest is evicted first.
    pub depth: u32,
}

/// Lookups of keys so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookups {
    /// Keys looked up.
    pub queries: u64,
    /// Keys for which a block was found.
    pub hits: u64,
}

/// Allocates the blocks of one tier by reference counting.
pub trait BlockAllocator: Send {
    /// The blocks: how many, how many free, and their reference counts.
    fn pool(&self) -> &Pool;

    /// Takes `count` blocks and appends them to `out`.
    ///
    /// # Errors
    /// Fewer are free.
    fn allocate(&mut self, count: usize, out: &mut Vec<BlockId>) -> Result<()>;

    /// Takes one block per key, reusing the block that already has the key, then `plain` more; appends them to `out`.
    /// Returns how many keys had a block. New blocks get their keys at once but count as computed only after
    /// [`BlockAllocator::mark_computed`].
    ///
    /// # Errors
    /// Fewer blocks are free than are new or not already in use.
    fn allocate_keyed(&mut self, keys: &[Keyed], plain: usize, out: &mut Vec<BlockId>) -> Result<usize>;

    /// Whether [`BlockAllocator::free`] would succeed; changes nothing.
    ///
    /// # Errors
    /// As [`BlockAllocator::free`].
    fn require(&self, blocks: &[BlockId]) -> Result<()>;

    /// Adds one reference to each block; a block named twice gets two.
    ///
    /// # Errors
    /// A block is not in use, or is the null block.
    fn share(&mut self, blocks: &[BlockId]) -> Result<()>;

    /// Drops one reference to each block, in order; a block named twice loses two.
    ///
    /// # Errors
    /// A block has fewer references than times it is named, or is the null block.
    fn free(&mut self, blocks: &[BlockId]) -> Result<()>;

    /// Replaces references to shared blocks, which must not be written, by new blocks; appends one block for each to
    /// `out`. Where it differs from the input, the caller copies the bytes.
    ///
    /// # Errors
    /// As [`BlockAllocator::allocate`] and [`BlockAllocator::free`].
    fn make_writable(&mut self, blocks: &[BlockId], out: &mut Vec<BlockId>) -> Result<()>;

    /// Gives a block its key once it is full. If another block already has that key, the reference is replaced by one
    /// to that block.
    ///
    /// # Errors
    /// The block is not in use.
    fn publish(&mut self, block: BlockId, keyed: Keyed) -> Result<BlockId>;

    /// Blocks of the longest computed prefix of `keys`; takes none.
    fn find(&self, keys: &[Key]) -> Vec<BlockId>;

    /// The block with a key, computed or not; takes no reference.
    fn holder(&self, key: &Key) -> Option<BlockId> {
        self.pool().find(key)
    }

    /// Number of free blocks that taking these keys would use; takes none. A block already in use costs nothing.
    fn cost(&self, keys: &[Key]) -> usize;

    /// Whether a block's tokens have been computed, as far as its key is known.
    fn is_computed(&self, block: BlockId) -> bool;

    /// Marks blocks with a key as computed, either those named or all in use: the step that writes them is over.
    fn mark_computed(&mut self, blocks: Option<&[BlockId]>);

    /// Notes when blocks were last used, for eviction.
    ///
    /// # Errors
    /// A block is neither in use nor cached, or the time is not a number.
    fn touch(&mut self, blocks: &[BlockId], now: f64) -> Result<()>;

    /// Clears all keys and counters; returns false and does nothing while a block is in use.
    fn reset(&mut self) -> bool;

    /// The null block, which replaces blocks that left a window: one per allocator, taken on first use, never freed.
    ///
    /// # Errors
    /// No block is free.
    fn null_block(&mut self) -> Result<BlockId>;

    /// Free blocks in allocation order, cached ones last; takes none.
    fn upcoming(&self) -> Box<dyn Iterator<Item = BlockId> + '_>;

    /// Lookups since the start or the last reset; `None` without keys.
    fn lookups(&self) -> Option<Lookups>;

    /// Compares all structures with each other.
    ///
    /// # Errors
    /// They contradict each other.
    fn check(&self) -> Result<()>;
}
