//! The whole books as bytes, and back.

use super::pass::Work;
use super::pin::Pins;
use super::quota::Tenants;
use super::resize::share;
use super::{MAX_BLOCK_SIZE, Manager, MoveStats, OpenStep, PrefixStats, blocks_for};
use crate::block::TierBlock;
use crate::defrag::Planner;
use crate::error::{self, Error, Result};
use crate::event::{Events, EventsImage};
use crate::group::{Group, Groups, NULL_BLOCK};
use crate::id::{BlockId, TicketId, Tier};
use crate::lease::Tickets;
use crate::pool::{Pool, PoolImage};
use crate::snapshot::{Contents, MAX_COUNT, seal, unseal};
use crate::table::{Rows, RowsImage};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

#[derive(Serialize, Deserialize)]
struct Image {
    block_size: u32,
    groups: Vec<Group>,
    /// Fraction of the device's blocks.
    watermark: f64,
    open: TicketId,
    reuses_drained: bool,
    pools: [PoolImage; 3],
    rows: RowsImage,
    /// Blocks of two tiers that hold the same bytes, each pair once.
    twins: Vec<(TierBlock, TierBlock)>,
    stats: PrefixStats,
    decided: [u64; 7],
    moved: MoveStats,
    events: Option<EventsImage>,
    /// Fraction of the device's blocks.
    pin_limit: f64,
    /// Number of the next pin, so that one from before never names another's.
    next_pin: u64,
    /// Salts of the tenants with quotas, in the order of their numbers.
    salts: Vec<[u8; 32]>,
}

impl Manager {
    /// The whole books as bytes: versioned, checksummed, for [`Manager::restore`] of the same version.
    ///
    /// They say what the caches hold and are worth nothing without the caches' bytes. They hold the in-process keys of
    /// cached blocks: keep them as the caches themselves are kept. The order of eviction is kept; what `s3fifo` and
    /// `adaptive` have learnt is not, so that they may evict in another order later.
    ///
    /// # Errors
    /// Tickets are in flight, or pins, which count as such, or the open step has transfers.
    pub fn snapshot(&mut self) -> Result<Vec<u8>> {
        let tickets = self.tickets.in_flight_count() + self.pins.len();
        let pairs = self.step.transfers.iter().map(|(_, pairs)| pairs.ids.len()).sum::<usize>();
        let pairs = pairs + self.tickets.open_moves().pairs().count();
        if tickets > 0 || pairs > 0 {
            let open = self.open_tickets().take(error::SHOWN).collect();
            return Err(Error::Busy { tickets, open, pairs });
        }
        let events = self.events.as_mut().map(|events| events.image(&mut self.pools));
        // Named one by one: a new field has to be thought of here.
        let Self {
            block_size,
            groups,
            watermark: _,
            watermark_fraction,
            pools,
            rows,
            tickets,
            step,
            stats,
            decided,
            moved,
            events: _,
            // Without tickets nothing is promised; that the host is a cache, its pool says.
            host_cache: _,
            pins,
            tenants,
            scratch: _,
            planner: _,
            work: _,
        } = &*self;
        // There are no transfers; a state that this step has begun is not cached then.
        let OpenStep { transfers: _, fresh: _, begun: _, reuses_drained } = step;
        let mut twins = Vec::new();
        for pool in pools {
            for block in (0..).map(BlockId).take(pool.extent()) {
                let twin = pool.block(block).tier_copy().filter(|twin| pool.tier() < twin.0);
                twins.extend(twin.map(|twin| ((pool.tier(), block), twin)));
            }
        }
        seal(&Image {
            block_size: *block_size,
            groups: groups.all().to_vec(),
            watermark: *watermark_fraction,
            open: tickets.open(),
            reuses_drained: *reuses_drained,
            pools: pools.each_ref().map(Pool::image),
            rows: rows.image(),
            twins,
            stats: *stats,
            decided: *decided,
            moved: *moved,
            events,
            pin_limit: pins.fraction(),
            next_pin: pins.next(),
            salts: tenants.all().iter().map(|(salt, _)| *salt).collect(),
        })
    }

    /// The books that [`Manager::snapshot`] wrote. What `s3fifo` and `adaptive` had learnt they learn anew.
    ///
    /// # Errors
    /// The bytes are no snapshot of this version, are cut short, damaged or too long, or contradict themselves.
    pub fn restore(bytes: &[u8]) -> Result<Self> {
        let image: Image = unseal(bytes)?;
        let manager = image.restore().map_err(|what| Error::BadSnapshot { what })?;
        manager.check().map_err(|error| Error::BadSnapshot { what: error.to_string() })?;
        Ok(manager)
    }
}

impl Image {
    fn restore(self) -> Contents<Manager> {
        let Self {
            block_size,
            groups,
            watermark,
            open,
            reuses_drained,
            pools,
            rows,
            twins,
            stats,
            decided,
            moved,
            events,
            pin_limit,
            next_pin,
            salts,
        } = self;
        let groups = Groups::new(&groups).map_err(|error| error.to_string())?;
        let sizes = pools.each_ref().map(PoolImage::num_blocks);
        let in_range = (0.0..1.0).contains(&pin_limit)
            && (1..=MAX_BLOCK_SIZE).contains(&block_size)
            && sizes[0] > 0
            && (0.0..1.0).contains(&watermark);
        if !in_range || !(1..=MAX_COUNT).contains(&open.0) {
            return Err(format!("{} blocks of {block_size}, {watermark} kept free, ticket {open}", sizes[0]));
        }
        let mut counters = stats.counters().into_iter().chain(decided).chain(moved.counters());
        if counters.any(|counter| counter > MAX_COUNT) || !(1..=MAX_COUNT).contains(&next_pin) {
            return Err(format!("a counter is beyond {MAX_COUNT}, or the next pin is {next_pin}"));
        }
        let rows = Rows::restore(rows, open, block_size)?;
        let refs = references(&rows, pools.each_ref().map(PoolImage::extent), groups.slide())?;
        let mut images = Tier::ALL.into_iter().zip(pools).zip(&refs);
        let mut next = || match images.next() {
            Some(((tier, image), refs)) => Pool::restore(tier, image, refs),
            None => Err("a tier is missing".to_owned()),
        };
        let mut pools = [next()?, next()?, next()?];
        restore_twins(&mut pools, twins)?;
        let events = events.map(|events| Events::restore(events, &mut pools).map(Box::new)).transpose()?;
        check_places(&rows, &pools, &groups, block_size)?;
        let step = OpenStep { reuses_drained, ..OpenStep::default() };
        let tickets = Tickets::resume(open);
        let tenants = Tenants::restore(salts, pools[0].quotas())?;
        let host_cache = pools[1].is_caching().then(Box::default);
        Ok(Manager {
            block_size,
            groups,
            watermark: share(watermark, sizes[0]),
            watermark_fraction: watermark,
            pools,
            rows,
            tickets,
            step,
            stats,
            decided,
            moved,
            planner: Planner::default(),
            events,
            host_cache,
            pins: Pins::resume(pin_limit, sizes[0], next_pin),
            tenants,
            scratch: Vec::new(),
            work: Work::default(),
        })
    }
}

fn restore_twins(pools: &mut [Pool; 3], twins: Vec<(TierBlock, TierBlock)>) -> Contents<()> {
    for (one, other) in twins {
        if !pools[other.0.index()].is_known(other.1) {
            return Err(format!("{} block {} is a twin, and not there", other.0, other.1));
        }
        pools[one.0.index()].restore_tier_copy(one.1, other)?;
        pools[other.0.index()].restore_tier_copy(other.1, one)?;
    }
    Ok(())
}

/// Fails unless each block, its copy in another tier and each key have one place, an entry of the tables of one group, and
/// all who use a block know it by one key, and either have tokens there or not. What is published later goes by its key alone, so that keys that were forged
/// may give a block two places then.
fn check_places(rows: &Rows, pools: &[Pool; 3], groups: &Groups, block_size: u32) -> Contents<()> {
    let (mut blocks, mut keys) = (HashMap::new(), HashMap::new());
    for (sequence, row) in rows.iter() {
        let pool = &pools[row.tier.index()];
        let first = row.family.as_deref().and_then(|family| family.first()).and_then(|&first| rows.get(first).ok());
        let of_row = first.unwrap_or(row).keys.as_deref().map_or(&[][..], |keys| &keys.keys);
        let is_null = |block: BlockId| groups.slide() && block == NULL_BLOCK;
        let mut holds = true;
        for (at, &block) in row.table.iter().enumerate().filter(|(_, block)| !is_null(**block)) {
            let (place, is_filled) = ((row.group, at), at < blocks_for(u64::from(row.len), block_size));
            let key = pool.key(block).or_else(|| of_row.get(at).map(|key| key.of_group(row.group)));
            for (tier, block) in [Some((row.tier, block)), pool.block(block).tier_copy()].into_iter().flatten() {
                let own = pools[tier.index()].key(block).or(key);
                let (found, known) = blocks.entry((tier, block)).or_insert(((place, is_filled), own));
                let named = [own, *known, key];
                let alike = named.iter().flatten().all(|one| named.iter().flatten().all(|other| one == other));
                holds &= *found == (place, is_filled) && alike;
                *known = known.or(own);
            }
            holds &= pool.key(block).is_none_or(|key| *keys.entry(key).or_insert(place) == place);
        }
        for (at, key) in row.keys.iter().flat_map(|keys| keys.keys.iter().enumerate()) {
            let places = (0u8..).take(groups.growing().len()).map(|group| (group, at));
            holds &= places.into_iter().all(|place| *keys.entry(key.of_group(place.0)).or_insert(place) == place);
        }
        if !holds {
            return Err(format!("sequence {sequence} has a block or a key that is elsewhere, too, or another's"));
        }
    }
    Ok(())
}

/// References to each block of each tier, counted from the tables.
fn references(rows: &Rows, sizes: [usize; 3], null: bool) -> Contents<[Vec<u32>; 3]> {
    let mut refs = sizes.map(|blocks| vec![0u32; blocks]);
    for count in refs.iter_mut().filter_map(|refs| refs.get_mut(NULL_BLOCK.index())) {
        *count = u32::from(null);
    }
    for (sequence, row) in rows.iter() {
        for block in &*row.table {
            let count = refs[row.tier.index()].get_mut(block.index());
            let more = count.as_ref().and_then(|count| count.checked_add(1));
            match (count, more) {
                (Some(count), Some(more)) => *count = more,
                _ => return Err(format!("sequence {sequence} has {} block {block}, which is not there", row.tier)),
            }
        }
    }
    Ok(refs)
}
