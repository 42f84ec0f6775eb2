//! A device pool that grows and shrinks while sequences run.
//!
//! The new size holds at once for all that is asked: admission, the watermark, the limit of pins. Growing is done with
//! that. Shrinking goes on: what sequences use beyond the end leaves as they do, or is moved by defragmentation, and what
//! transfers and pins hold there is waited for. [`Resize::extent`] says how much of the caches must stay meanwhile.

use super::Manager;
use crate::block::{BlockState, MAX_BLOCKS};
use crate::error::{Result, invalid};
use crate::id::{BlockId, Tier};

/// How far the device's size has changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resize {
    /// Blocks that the device has.
    pub blocks: usize,
    /// Blocks beyond them that sequences use.
    pub live: usize,
    /// Blocks beyond them that only transfers and pins hold.
    pub held: usize,
    /// One past the highest block in use, at least `blocks`: the memory behind it can be given back.
    pub extent: usize,
}

impl Resize {
    /// Whether nothing is in use beyond the end.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.extent == self.blocks
    }
}

impl Manager {
    /// Gives the device so many blocks from now on, and says what is in use beyond them.
    ///
    /// Blocks beyond are not given out any more, those cached there are dropped, and each that a sequence uses there counts
    /// as one fewer to be given out. Watermark and limit of pins stay the fractions that they were; quotas stay numbers.
    /// A second call, larger or smaller, changes what a first one has not ended.
    ///
    /// # Errors
    /// Too many blocks; or too few for the null block, what is pinned, the watermark, and one to give out.
    pub fn resize_device(&mut self, blocks: usize) -> Result<Resize> {
        if blocks > MAX_BLOCKS {
            return Err(invalid("device_blocks", blocks as i128, format!("at most {MAX_BLOCKS}")));
        }
        let (null, pinned) = (usize::from(self.sequences.has_nulls()), self.pins.blocks());
        let watermark = self.sequences.watermark().of(blocks);
        let least = null + pinned + watermark + 1;
        if blocks < least {
            let kept = format!("{null} null, {pinned} pinned, {watermark} kept free by the watermark, 1 to give out");
            return Err(invalid("device_blocks", blocks as i128, format!("at least {least}: {kept}")));
        }
        self.tiers.resize_device(blocks)?;
        self.sequences.resize_device(blocks);
        self.pins.resize(blocks);
        Ok(self.resize_progress())
    }

    /// What every block of a tier is used for, by id, those in use beyond the end included.
    #[must_use]
    pub fn uses(&self, tier: Tier) -> Vec<BlockState> {
        let pool = self.pool(tier);
        (0..).map(BlockId).take(pool.extent()).map(|block| pool.block(block).state()).collect()
    }

    /// What is in use beyond the device's blocks.
    #[must_use]
    pub fn resize_progress(&self) -> Resize {
        let pool = &self.tiers.device();
        let tail = pool.tail();
        Resize { blocks: pool.len(), live: tail.live, held: tail.held, extent: pool.extent() }
    }
}
