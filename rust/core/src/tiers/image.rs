//! What of the tiers outlives the process.

use super::Tiers;
use super::quota::Tenants;
use crate::block::TierBlock;
use crate::event::{Events, EventsImage};
use crate::id::{BlockId, Tier};
use crate::pool::{Pool, PoolImage};
use crate::snapshot::Contents;

/// The tiers of a snapshot.
pub(crate) struct TiersImage {
    pub(crate) pools: [PoolImage; 3],
    /// Blocks of two tiers that hold the same bytes, each pair once.
    pub(crate) copies: Vec<(TierBlock, TierBlock)>,
    pub(crate) events: Option<EventsImage>,
    pub(crate) host_copies_per_step: u32,
    /// Salts of the tenants with quotas, in the order of their numbers.
    pub(crate) salts: Vec<[u8; 32]>,
}

impl Tiers {
    /// What a snapshot keeps of tiers without leases.
    pub(crate) fn image(&mut self) -> TiersImage {
        // Named one by one: a new field has to be thought of here.
        let Self { pools, events, outbox: _, tenants, host_copies_per_step, block_size: _, null: _ } = self;
        let events = events.as_mut().map(|events| events.image(pools));
        let mut copies = Vec::new();
        for pool in &*pools {
            for block in (0..).map(BlockId).take(pool.extent()) {
                let copy = pool.block(block).tier_copy().filter(|copy| pool.tier() < copy.0);
                copies.extend(copy.map(|copy| ((pool.tier(), block), copy)));
            }
        }
        let salts = tenants.all().iter().map(|(salt, _)| *salt).collect();
        TiersImage {
            pools: pools.each_ref().map(Pool::image),
            copies,
            events,
            host_copies_per_step: *host_copies_per_step,
            salts,
        }
    }

    /// The tiers of a snapshot, given the references that the tables hold.
    pub(crate) fn restore(image: TiersImage, refs: &[Vec<u32>; 3], block_size: u32, null: bool) -> Contents<Self> {
        let TiersImage { pools, copies, events, host_copies_per_step, salts } = image;
        let mut images = Tier::ALL.into_iter().zip(pools).zip(refs);
        let mut next = || match images.next() {
            Some(((tier, image), refs)) => Pool::restore(tier, image, refs),
            None => Err("a tier is missing".to_owned()),
        };
        let mut pools = [next()?, next()?, next()?];
        for (one, other) in copies {
            if !pools[other.0.index()].is_known(other.1) {
                return Err(format!("{} block {} is a copy, and not there", other.0, other.1));
            }
            pools[one.0.index()].restore_tier_copy(one.1, other)?;
            pools[other.0.index()].restore_tier_copy(other.1, one)?;
        }
        let events = events.map(|events| Events::restore(events, &mut pools).map(Box::new)).transpose()?;
        let tenants = Tenants::restore(salts, pools[0].quotas())?;
        Ok(Self { pools, events, outbox: None, tenants, host_copies_per_step, block_size, null })
    }
}
