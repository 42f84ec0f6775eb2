//! Pins, which keep cached device blocks for a reader outside until a deadline: a dead reader cannot hold a block for ever.
//!
//! The clock is the caller's: any unit, rising. A pin that has been submitted ends only by its own call; past its deadline
//! its blocks are quarantined.

use crate::block::LeaseKind;
use crate::error::{Error, Result};
use crate::fit::Share;
use crate::id::{BlockId, PinId, Tier};
use crate::tiers::Tiers;
use crate::transfer::{Deadline, Lease};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// One reader's blocks.
#[derive(Debug, Clone)]
struct Pin {
    blocks: Vec<BlockId>,
    deadline: Deadline,
}

/// All pins.
#[derive(Debug, Clone)]
pub(crate) struct Pins {
    /// Device blocks that may be pinned at once.
    limit: Share,
    next: u64,
    held: BTreeMap<PinId, Pin>,
    /// Pins of each pinned block.
    counts: HashMap<BlockId, usize>,
    /// Submitted ones past their deadline.
    late: BTreeSet<PinId>,
}

impl Pins {
    /// No pins.
    pub(crate) fn new(limit: Share) -> Self {
        Self { limit, next: 1, held: BTreeMap::new(), counts: HashMap::new(), late: BTreeSet::new() }
    }

    /// Device blocks that may be pinned at once, to be changed; pins that are held stay.
    pub(crate) fn limit_mut(&mut self) -> &mut Share {
        &mut self.limit
    }

    /// Pinned device blocks.
    pub(crate) fn num_blocks(&self) -> usize {
        self.counts.len()
    }

    /// Keeps cached device blocks until a deadline.
    pub(crate) fn pin(&mut self, tiers: &mut Tiers, blocks: Vec<BlockId>, deadline: u64) -> Result<PinId> {
        let new = blocks.iter().filter(|block| !self.counts.contains_key(block)).count();
        let (held, limit) = (self.counts.len(), self.limit.blocks());
        if held + new > limit {
            return Err(Error::TooManyPinned { wanted: new, held, limit });
        }
        for &block in &blocks {
            tiers.device().require_leases(block, LeaseKind::Read, 1)?;
        }
        for &block in &blocks {
            // Out of the evictable ones, if it is one of them: a leased block is none.
            tiers.lease_cached((Tier::Device, block), LeaseKind::Read);
            *self.counts.entry(block).or_default() += 1;
        }
        let pin = PinId(self.next);
        self.next += 1;
        self.held.insert(pin, Pin { blocks, deadline: Deadline { at: deadline, submitted: false } });
        Ok(pin)
    }

    /// Blocks of a pin.
    pub(crate) fn blocks(&self, pin: PinId) -> Result<&[BlockId]> {
        self.held.get(&pin).map(|pin| pin.blocks.as_slice()).ok_or(Error::UnknownPin { pin })
    }

    /// The reader's transfer has begun: only [`Pins::release`] ends the pin from now on.
    pub(crate) fn mark_submitted(&mut self, pin: PinId) -> Result<()> {
        self.held.get_mut(&pin).ok_or(Error::UnknownPin { pin })?.deadline.submitted = true;
        Ok(())
    }

    /// Ends a pin.
    pub(crate) fn release(&mut self, tiers: &mut Tiers, pin: PinId) -> Result<()> {
        let Pin { blocks, .. } = self.held.remove(&pin).ok_or(Error::UnknownPin { pin })?;
        self.end(tiers, pin, blocks);
        Ok(())
    }

    fn end(&mut self, tiers: &mut Tiers, pin: PinId, blocks: Vec<BlockId>) {
        self.late.remove(&pin);
        // Backwards, so that the chain is evicted from its end.
        for block in blocks.into_iter().rev() {
            if let Some(count) = self.counts.get_mut(&block) {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(&block);
                }
            }
            tiers.end_lease((Tier::Device, block), LeaseKind::Read);
        }
    }

    /// Ends the pins whose deadline is `now` or earlier and that are not submitted; blocks of the others are quarantined.
    pub(crate) fn expire(&mut self, tiers: &mut Tiers, now: u64) -> Vec<PinId> {
        let late = self.held.iter().filter(|(_, pin)| pin.deadline.at <= now);
        let late: Vec<_> = late.map(|(&id, pin)| (id, pin.deadline.submitted)).collect();
        let (overdue, ended): (Vec<_>, Vec<_>) = late.into_iter().partition(|&(_, submitted)| submitted);
        self.late.extend(overdue.into_iter().map(|(id, _)| id));
        let ended: Vec<PinId> = ended.into_iter().map(|(id, _)| id).collect();
        for &pin in &ended {
            if let Some(Pin { blocks, .. }) = self.held.remove(&pin) {
                self.end(tiers, pin, blocks);
            }
        }
        ended
    }

    /// Device blocks of pins that are past their deadline.
    pub(crate) fn quarantined(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.late.iter().filter_map(|pin| self.held.get(pin)).flat_map(|pin| pin.blocks.iter().copied())
    }

    /// Leases that pins hold.
    pub(crate) fn leases(&self) -> impl Iterator<Item = Lease> + '_ {
        let blocks = self.held.values().flat_map(|pin| &pin.blocks);
        blocks.map(|&block| Lease { tier: Tier::Device, kind: LeaseKind::Read, block })
    }

    /// What does not hold of pins.
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
    use crate::pool::Policies;

    #[test]
    fn a_submitted_pin_outlives_its_deadline_and_another_does_not() {
        let mut tiers = Tiers::new([4, 0, 0], 1, true, false, Policies::default()).unwrap();
        let mut pins = Pins::new(Share::new("max_pinned", 0.5, 4).unwrap());
        let mut blocks = Vec::new();
        tiers.take(Tier::Device, 3, false, &mut blocks);
        assert!(pins.pin(&mut tiers, blocks.clone(), 5).is_err(), "more than half of the blocks");
        let one = pins.pin(&mut tiers, blocks[..1].to_vec(), 5).unwrap();
        let other = pins.pin(&mut tiers, blocks[..2].to_vec(), 5).unwrap();
        pins.mark_submitted(other).unwrap();
        assert_eq!((pins.held.len(), pins.num_blocks(), pins.leases().count()), (2, 2, 3));
        assert_eq!(pins.expire(&mut tiers, 4), []);
        assert_eq!(pins.expire(&mut tiers, 5), [one]);
        assert_eq!(pins.quarantined().collect::<Vec<_>>(), blocks[..2]);
        pins.check().unwrap();
        pins.release(&mut tiers, other).unwrap();
        assert!(pins.blocks(other).is_err());
        assert_eq!((pins.num_blocks(), pins.quarantined().count()), (0, 0));
    }
}
