//! Events of the prefix cache: which blocks prompts can find by key, and which they no longer can.
//!
//! Replaying them in order yields exactly the blocks that can be found. They are queued in a bounded ring until taken;
//! on overflow the oldest are dropped, which shows as a gap in the numbers. Nothing here runs unless events are
//! enabled.

use crate::error::{Error, Result};
use crate::hash::{AheadKeys, Chain, ExportedKey};
use crate::id::{BlockId, Tier};
use crate::memory;
use crate::pool::Pool;
pub use crate::prefix::Reason;
use crate::prefix::{Removal, Ring};
use std::collections::HashMap;

/// Maximum event capacity, which takes about 2 GB.
pub const MAX_EVENTS: usize = 1 << 24;

/// The event that published a block, which the events of its copies repeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PublishedEvent {
    key: ExportedKey,
    parent: Option<ExportedKey>,
    lora_id: u64,
    group: u8,
}

const NOTHING: PublishedEvent = PublishedEvent { key: ExportedKey([0; 32]), parent: None, lora_id: 0, group: 0 };

impl Default for PublishedEvent {
    fn default() -> Self {
        NOTHING
    }
}

/// One change to the set of blocks that can be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// A block can be found by its key.
    Stored {
        /// Its key.
        key: ExportedKey,
        /// Key of the block before it; none for a sequence's first.
        parent: Option<ExportedKey>,
        /// Tier of the block.
        tier: Tier,
        /// The block.
        block: BlockId,
        /// Tokens in it.
        tokens: u32,
        /// Adapter that its sequence ran with; 0 for none.
        lora_id: u64,
        /// Cache group of the block; it is not part of the key.
        group: u8,
    },
    /// A block can no longer be found.
    Removed {
        /// Its key.
        key: ExportedKey,
        /// Tier of the block.
        tier: Tier,
        /// The block.
        block: BlockId,
        /// Why.
        reason: Reason,
        /// Copies of its bytes in other tiers, including those in transfer. They can be found again once a swapped
        /// sequence returns.
        remaining: u8,
        /// Cache group that the block was of.
        group: u8,
    },
    /// No block of the tier can be found any longer.
    Cleared {
        /// The tier.
        tier: Tier,
    },
}

impl Event {
    /// The event with the block's id in its page class.
    fn in_class(mut self, pools: &[Pool; 3]) -> Self {
        if let Self::Stored { tier, block, .. } | Self::Removed { tier, block, .. } = &mut self {
            block.0 = pools[tier.index()].local(*block).1;
        }
        self
    }
}

/// A batch of events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventBatch {
    /// Number of the first event, counted from the start of recording. The numbers of the others follow.
    pub first: u64,
    /// Events dropped for lack of room since the last batch: the numbers before `first`.
    pub dropped: u64,
    /// The events, oldest first.
    pub events: Vec<Event>,
}

/// A published block, and the data of its event.
#[derive(Debug, Clone)]
pub(crate) struct Publication {
    pub(crate) block: BlockId,
    pub(crate) key: Chain,
    pub(crate) parent: Option<Chain>,
    pub(crate) tokens: u32,
    pub(crate) salt: [u8; 32],
    pub(crate) lora_id: u64,
    pub(crate) group: u8,
    /// Which of the group's blocks that the key stands for.
    pub(crate) part: u32,
    /// With a drafter.
    pub(crate) ahead: Option<Box<AheadKeys>>,
}

/// The queued events, and the data needed to name removed blocks.
#[derive(Debug, Clone)]
pub(crate) struct Events {
    ring: Ring<Event>,
    /// End of the numbers that the last [`Events::take`] covered: those taken, and those dropped before them.
    taken: u64,
    /// Exported key of each published block, so that its removal costs no hashing.
    keys: [Vec<PublishedEvent>; 3],
    /// The last key exported: usually the parent of the next.
    last: Option<(Chain, ExportedKey)>,
}

impl Events {
    /// Starts recording for pools that have published nothing; they record their removals from now on.
    pub(crate) fn new(capacity: usize, pools: &mut [Pool; 3]) -> Result<Self> {
        if !(1..=MAX_EVENTS).contains(&capacity) {
            let must = format!("1 to {MAX_EVENTS}");
            return Err(Error::InvalidArgument { what: "number of events", found: capacity as i128, must });
        }
        let blocks = pools.iter().filter(|pool| pool.is_caching()).map(Pool::extent).sum();
        memory::require_items::<PublishedEvent>(blocks)?;
        let mut keys = [const { Vec::new() }; 3];
        for (keys, pool) in keys.iter_mut().zip(pools) {
            if pool.is_caching() {
                pool.note_removals(capacity);
                keys.resize(pool.extent(), NOTHING);
            }
        }
        Ok(Self { ring: Ring::new(capacity), taken: 0, keys, last: None })
    }

    pub(crate) fn stored(&mut self, pools: &mut [Pool; 3], tier: Tier, publication: &Publication) {
        self.gather(pools);
        let Publication { block, key, parent, tokens, lora_id, group, .. } = *publication;
        let last = self.last;
        let known = |parent: &Chain| last.and_then(|(chain, key)| (chain == *parent).then_some(key));
        let parent = parent.map(|parent| known(&parent).unwrap_or_else(|| parent.export()));
        let exported = key.export();
        self.last = Some((key, exported));
        if let Some(known) = self.keys[tier.index()].get_mut(block.index()) {
            *known = PublishedEvent { key: exported, parent, lora_id, group };
        }
        self.ring.push(Event::Stored { key: exported, parent, tier, block, tokens, lora_id, group });
    }

    /// Follows a resize of the pools.
    pub(crate) fn grow(&mut self, pools: &[Pool; 3]) {
        for (keys, pool) in self.keys.iter_mut().zip(pools).filter(|(_, pool)| pool.is_caching()) {
            keys.resize(pool.extent().max(keys.len()), NOTHING);
        }
    }

    /// The event that published a block.
    pub(crate) fn of(&self, tier: Tier, block: BlockId) -> PublishedEvent {
        self.keys[tier.index()].get(block.index()).copied().unwrap_or(NOTHING)
    }

    /// Records that a copy of a block can be found in another tier.
    pub(crate) fn copied(&mut self, pools: &mut [Pool; 3], to: (Tier, BlockId), event: PublishedEvent, tokens: u32) {
        self.gather(pools);
        let (tier, block) = to;
        let PublishedEvent { key, parent, lora_id, group } = event;
        if let Some(known) = self.keys[tier.index()].get_mut(block.index()) {
            *known = event;
        }
        self.ring.push(Event::Stored { key, parent, tier, block, tokens, lora_id, group });
    }

    pub(crate) fn cleared(&mut self, pools: &mut [Pool; 3], tier: Tier) {
        self.gather(pools);
        self.ring.push(Event::Cleared { tier });
    }

    /// Queues the removals that the pools have recorded. Called before each publication, so that events stay in order
    /// and no pool records more removals than it has blocks.
    fn gather(&mut self, pools: &mut [Pool; 3]) {
        for pool in pools {
            let tier = pool.tier();
            if let Some(removals) = pool.removals() {
                let (dropped, removals) = removals.take_all();
                self.ring.next += dropped;
                for removal in removals {
                    let Removal { block, reason, remaining } = removal;
                    let known = self.keys[tier.index()].get(block.index());
                    let PublishedEvent { key, group, .. } = known.copied().unwrap_or(NOTHING);
                    self.ring.push(Event::Removed { key, tier, block, reason, remaining, group });
                }
            }
        }
    }

    /// Takes all queued events.
    pub(crate) fn take(&mut self, pools: &mut [Pool; 3]) -> EventBatch {
        self.gather(pools);
        let (first, taken) = (self.ring.first(), self.taken);
        self.taken = self.ring.next;
        let events = self.ring.items.drain(..).map(|event| event.in_class(pools)).collect();
        EventBatch { first, dropped: first - taken, events }
    }

    /// Compares the events with the pools; returns the first contradiction.
    pub(crate) fn check(&self, pools: &[Pool; 3]) -> Option<String> {
        if self.ring.items.len() > self.ring.capacity || self.taken > self.ring.first() {
            return Some(format!(
                "{} events are queued from {}, {} were taken",
                self.ring.items.len(),
                self.ring.first(),
                self.taken
            ));
        }
        for pool in pools.iter().filter(|pool| pool.is_caching()) {
            let keys = &self.keys[pool.tier().index()];
            if keys.len() < pool.extent() || pool.noted_removals().is_none() {
                return Some(format!("events of {} {} blocks are kept for {}", pool.len(), pool.tier(), keys.len()));
            }
            let mut blocks = (0..).map(BlockId).zip(keys);
            if let Some((block, _)) = blocks.find(|(block, key)| pool.block(*block).is_published() && **key == NOTHING)
            {
                return Some(format!("{} block {block} was published without an event", pool.tier()));
            }
            if let Some(block) = self.unreported(pool) {
                return Some(format!("{} block {block} contradicts the queued events", pool.tier()));
            }
        }
        None
    }

    /// A block whose last queued event contradicts its pool.
    fn unreported(&self, pool: &Pool) -> Option<BlockId> {
        let tier = pool.tier();
        let removals = pool.noted_removals()?;
        let mut last = HashMap::new();
        // Whether the queued events cover all published blocks.
        let mut all = self.ring.first() == 0 && removals.first() == 0;
        // If a pool has dropped removals, those it kept fill the whole queue.
        let waiting = self.ring.items.iter().filter(|_| removals.first() == 0);
        for event in waiting {
            match *event {
                Event::Stored { key, parent, tier: of, block, lora_id, group, .. } if of == tier => {
                    last.insert(block, Some(PublishedEvent { key, parent, lora_id, group }));
                }
                Event::Removed { tier: of, block, .. } if of == tier => {
                    last.insert(block, None);
                }
                Event::Cleared { tier: of } if of == tier => {
                    last.clear();
                    all = true;
                }
                _ => {}
            }
        }
        last.extend(removals.items.iter().map(|removal| (removal.block, None)));
        let found = |block| pool.block(block).is_published().then(|| self.of(tier, block));
        let published = (0..).map(BlockId).take(pool.extent()).filter(|&block| pool.block(block).is_published());
        let missing = published.into_iter().find(|block| all && !last.contains_key(block));
        last.iter().find(|&(&block, event)| found(block) != *event).map(|(&block, _)| block).or(missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removals_that_a_pool_dropped_are_counted() {
        let pool = |tier| Pool::new(tier, 4, true).unwrap();
        let mut pools = Tier::ALL.map(pool);
        let mut events = Events::new(2, &mut pools).unwrap();
        for n in 0..3 {
            let removal = Removal { block: BlockId(n), reason: Reason::Lost, remaining: 0 };
            pools[0].removals().unwrap().push(removal);
        }
        events.cleared(&mut pools, Tier::Device);
        let batch = events.take(&mut pools);
        assert_eq!((batch.first, batch.dropped, batch.events.len()), (2, 2, 2));
        assert_eq!(batch.events[1], Event::Cleared { tier: Tier::Device });
        assert_eq!(events.take(&mut pools), EventBatch { first: 4, ..EventBatch::default() });
    }

    #[test]
    fn a_ring_without_room_or_too_large_is_refused() {
        let mut pools = Tier::ALL.map(|tier| Pool::new(tier, 4, false).unwrap());
        assert!(Events::new(0, &mut pools).is_err() && Events::new(MAX_EVENTS + 1, &mut pools).is_err());
    }
}
