//! Pins keep cached device blocks for an external reader until it is done.

use crate::block::LeaseKind;
use crate::error::{Error, Result};
use crate::fit::Share;
use crate::id::{BlockId, PinId, Tier};
use crate::tiers::Tiers;
use crate::transfer::Lease;
use std::collections::{BTreeMap, HashMap};

/// All pins.
#[derive(Debug, Clone)]
pub(crate) struct Pins {
    /// Device blocks that may be pinned at once.
    limit: Share,
    next: u64,
    /// Each reader's blocks.
    held: BTreeMap<PinId, Vec<BlockId>>,
    /// Pins of each pinned block.
    counts: HashMap<BlockId, usize>,
}

impl Pins {
    /// No pins.
    pub(crate) fn new(limit: Share) -> Self {
        Self { limit, next: 1, held: BTreeMap::new(), counts: HashMap::new() }
    }

    /// Mutable limit of pinned device blocks; existing pins stay.
    pub(crate) fn limit_mut(&mut self) -> &mut Share {
        &mut self.limit
    }

    /// Pinned device blocks.
    pub(crate) fn num_blocks(&self) -> usize {
        self.counts.len()
    }

    /// Each pinned device block once.
    pub(crate) fn all(&self) -> impl Iterator<Item = &BlockId> {
        self.counts.keys()
    }

    /// Keeps cached device blocks until they are released.
    pub(crate) fn pin(&mut self, tiers: &mut Tiers, blocks: Vec<BlockId>) -> Result<PinId> {
        let new = blocks.iter().filter(|block| !self.counts.contains_key(block)).count();
        let (held, limit) = (self.counts.len(), self.limit.blocks());
        if held + new > limit {
            return Err(Error::TooManyPinned { wanted: new, held, limit });
        }
        for &block in &blocks {
            tiers.device().require_leases(block, LeaseKind::Read, 1)?;
        }
        for &block in &blocks {
            // This removes it from the evictable blocks, if it is one: a leased block is not evictable.
            tiers.lease_cached((Tier::Device, block), LeaseKind::Read);
            *self.counts.entry(block).or_default() += 1;
        }
        let pin = PinId(self.next);
        self.next += 1;
        self.held.insert(pin, blocks);
        Ok(pin)
    }

    /// Blocks of a pin.
    pub(crate) fn blocks(&self, pin: PinId) -> Result<&[BlockId]> {
        self.held.get(&pin).map(Vec::as_slice).ok_or(Error::UnknownPin { pin })
    }

    /// Ends a pin.
    pub(crate) fn release(&mut self, tiers: &mut Tiers, pin: PinId) -> Result<()> {
        let blocks = self.held.remove(&pin).ok_or(Error::UnknownPin { pin })?;
        // In reverse, so that the chain is evicted from its end.
        for block in blocks.into_iter().rev() {
            if let Some(count) = self.counts.get_mut(&block) {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(&block);
                }
            }
            tiers.end_lease((Tier::Device, block), LeaseKind::Read);
        }
        Ok(())
    }

    /// Leases that pins hold.
    pub(crate) fn leases(&self) -> impl Iterator<Item = Lease> + '_ {
        self.held.values().flatten().map(|&block| Lease { tier: Tier::Device, kind: LeaseKind::Read, block })
    }

    /// Checks the pins.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        let mut counts: HashMap<BlockId, usize> = HashMap::new();
        self.leases().for_each(|lease| *counts.entry(lease.block).or_default() += 1);
        if counts == self.counts {
            return Ok(());
        }
        Err(format!("{} blocks are pinned, counted {}", self.counts.len(), counts.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::Shape;
    use crate::pool::Policies;

    #[test]
    fn a_block_is_pinned_until_its_last_reader_is_done() {
        let mut tiers =
            Tiers::new(&[4, 0, 0].map(|blocks| Shape::single(blocks, false)), 1, true, Policies::default()).unwrap();
        let mut pins = Pins::new(Share::new("max_pinned", 0.5, 4).unwrap());
        let mut blocks = Vec::new();
        tiers.take((Tier::Device, 0), 3, false, &mut blocks);
        assert!(pins.pin(&mut tiers, blocks.clone()).is_err(), "more than half of the blocks");
        let one = pins.pin(&mut tiers, blocks[..1].to_vec()).unwrap();
        let other = pins.pin(&mut tiers, blocks[..2].to_vec()).unwrap();
        assert_eq!((pins.held.len(), pins.num_blocks(), pins.leases().count()), (2, 2, 3));
        assert_eq!(pins.blocks(other), Ok(&blocks[..2]));
        pins.release(&mut tiers, other).unwrap();
        pins.check().unwrap();
        assert_eq!((pins.held.len(), pins.num_blocks(), pins.leases().count()), (1, 1, 1));
        assert!(pins.blocks(other).is_err() && pins.release(&mut tiers, other).is_err());
        pins.release(&mut tiers, one).unwrap();
        assert_eq!((pins.held.len(), pins.num_blocks()), (0, 0));
    }
}
