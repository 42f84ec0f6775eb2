//! Whether a request for blocks fits, and fractions of a pool.

use crate::error::{Error, Result};
use crate::page::PerClass;

/// Whether something fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocStatus {
    /// It fits now.
    Ok,
    /// It will fit once other sequences have left.
    Later,
    /// It does not fit even into an empty tier.
    Never,
}

/// Whether a request for blocks fits, and the numbers that decide it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fit {
    /// Whether it fits now, later or never.
    pub status: AllocStatus,
    /// Blocks that the request takes; 0 if its sequences cannot move in their current state.
    pub blocks: usize,
    /// Blocks available now, minus the watermark if the request must keep it. If those are too few, blocks held only by
    /// prefix-store writes count too, because the call cancels those writes.
    pub free: usize,
    /// Page class of these blocks: the one that has too few, or the one that the request needs most of.
    pub page_class: usize,
    /// Blocks of each page class that the request takes.
    pub wanted: PerClass,
    /// Bytes of the blocks of all classes that the request takes, padding included; blocks count 1 if they have no bytes.
    pub bytes: u64,
    /// Bytes available now to blocks of any class, as `free`. The request may still lack blocks of one class.
    pub free_bytes: u64,
}

/// A fraction of the device's blocks, rounded down.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    fraction: f64,
    blocks: usize,
}

impl Share {
    /// # Errors
    /// The fraction is not at least 0 and below 1; the error names `what`.
    pub(crate) fn new(what: &'static str, fraction: f64, of: usize) -> Result<Self> {
        if !(0.0..1.0).contains(&fraction) {
            return Err(Error::InvalidFraction { what, found: fraction.to_string() });
        }
        let mut share = Self { fraction, blocks: 0 };
        share.resize(of);
        Ok(share)
    }

    #[inline]
    pub(crate) fn blocks(self) -> usize {
        self.blocks
    }

    /// The share of `blocks` blocks.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a fraction below 1 of fewer than 2^30 blocks"
    )]
    pub(crate) fn of(self, blocks: usize) -> usize {
        (self.fraction * blocks as f64) as usize
    }

    /// Follows a resize of the device to `blocks` blocks.
    pub(crate) fn resize(&mut self, blocks: usize) {
        self.blocks = self.of(blocks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_follows_the_number_of_blocks_and_is_never_all_of_them() {
        let mut share = Share::new("watermark", 0.3, 10).unwrap();
        assert_eq!((share.blocks(), share.of(4)), (3, 1));
        share.resize(100);
        assert_eq!(share.blocks(), 30);
        assert!(Share::new("watermark", 1.0, 10).is_err());
    }
}
