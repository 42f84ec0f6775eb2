//! Twins: blocks of two tiers that hold the same bytes. A block keeps tier and id of its own in one word.

use super::Pool;
use crate::id::{BlockId, Tier};

/// A copy of the same bytes in another tier, so that sharing survives a swap.
pub(crate) type Twin = (Tier, BlockId);

impl Pool {
    /// The copy of the block's bytes in another tier.
    pub(crate) fn twin(&self, block: BlockId) -> Option<Twin> {
        decode(self.node(block).twin)
    }

    /// Sets or clears the twin; returns the one before.
    pub(crate) fn set_twin(&mut self, block: BlockId, twin: Option<Twin>) -> Option<Twin> {
        decode(std::mem::replace(&mut self.nodes[block.index()].twin, encode(twin)))
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a tier's index is below 3")]
pub(super) fn encode(twin: Option<Twin>) -> u32 {
    twin.map_or(0, |(tier, block)| ((tier.index() as u32) << 30 | block.0) + 1)
}

pub(super) fn decode(word: u32) -> Option<Twin> {
    let word = word.checked_sub(1)?;
    Some((Tier::ALL[(word >> 30) as usize], BlockId(word & ((1 << 30) - 1))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::MAX_BLOCKS;

    #[test]
    fn twins_of_every_tier_and_the_highest_id_survive_encoding() {
        for tier in Tier::ALL {
            for id in [0, 1, u32::try_from(MAX_BLOCKS).unwrap()] {
                assert_eq!(decode(encode(Some((tier, BlockId(id))))), Some((tier, BlockId(id))));
            }
        }
        assert_eq!(decode(encode(None)), None);
    }
}
