//! The whole manager as bytes, and back.

use super::pass::Work;
use super::pin::Pins;
use super::resize::share;
use super::{MAX_BLOCK_SIZE, Manager, MoveStats, PrefixStats, blocks_for};
use crate::block::TierBlock;
use crate::defrag::Planner;
use crate::error::{self, Error, Result};
use crate::event::EventsImage;
use crate::group::{Group, Groups, NULL_BLOCK};
use crate::id::{BlockId, TicketId};
use crate::pool::PoolImage;
use crate::snapshot::{Contents, MAX_COUNT, seal, unseal};
use crate::table::{Rows, RowsImage};
use crate::tiers::{Tiers, TiersImage};
use crate::transfer::Transfers;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};

#[derive(Serialize, Deserialize)]
struct Image {
    block_size: u32,
    groups: Vec<Group>,
    /// Fraction of the device's blocks.
    watermark: f64,
    open: TicketId,
    overlaps: bool,
    pools: [PoolImage; 3],
    rows: RowsImage,
    /// Blocks of two tiers that hold the same bytes, each pair once.
    copies: Vec<(TierBlock, TierBlock)>,
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
    /// The whole manager as bytes: versioned, checksummed, for [`Manager::restore`] of the same version.
    ///
    /// They say what the caches hold and are worth nothing without the caches' bytes. They hold the in-process keys of
    /// cached blocks: keep them as the caches themselves are kept. The order of eviction is kept; what `s3fifo` and
    /// `adaptive` have learnt is not, so that they may evict in another order later.
    ///
    /// # Errors
    /// Tickets are in flight, or pins, which count as such, or the open step has transfers.
    pub fn snapshot(&mut self) -> Result<Vec<u8>> {
        let tickets = self.transfers.in_flight_count() + self.pins.len();
        let pairs = self.transfers.num_pairs();
        if tickets > 0 || pairs > 0 {
            let open = self.open_tickets().take(error::MAX_NAMED).collect();
            return Err(Error::Busy { tickets, open, pairs });
        }
        let TiersImage { pools, copies, events, salts } = self.tiers.image();
        // Named one by one: a new field has to be thought of here.
        let Self {
            block_size,
            groups,
            watermark: _,
            watermark_fraction,
            tiers: _,
            rows,
            transfers,
            // A state that the open step has begun is not cached then.
            begun: _,
            stats,
            decided,
            moved,
            pins,
            scratch: _,
            planner: _,
            work: _,
        } = &*self;
        seal(&Image {
            block_size: *block_size,
            groups: groups.all().to_vec(),
            watermark: *watermark_fraction,
            open: transfers.open(),
            overlaps: transfers.overlaps(),
            pools,
            rows: rows.image(),
            copies,
            stats: *stats,
            decided: *decided,
            moved: *moved,
            events,
            pin_limit: pins.fraction(),
            next_pin: pins.next(),
            salts,
        })
    }

    /// The manager that [`Manager::snapshot`] wrote. What `s3fifo` and `adaptive` had learnt they learn again.
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
            overlaps,
            pools,
            rows,
            copies,
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
        let null = groups.slide();
        let tiers = Tiers::restore(TiersImage { pools, copies, events, salts }, &refs, block_size, null)?;
        check_places(&rows, &tiers, &groups, block_size)?;
        Ok(Manager {
            block_size,
            groups,
            watermark: share(watermark, sizes[0]),
            watermark_fraction: watermark,
            tiers,
            rows,
            transfers: Transfers::resume(open, overlaps),
            begun: HashSet::new(),
            stats,
            decided,
            moved,
            planner: Planner::default(),
            pins: Pins::resume(pin_limit, sizes[0], next_pin),
            scratch: Vec::new(),
            work: Work::default(),
        })
    }
}

/// Fails unless each block, its copy in another tier and each key have one place, an entry of the tables of one group, and
/// all who use a block know it by one key, and either have tokens there or not. What is published later goes by its key alone, so that keys that were forged
/// may give a block two places then.
fn check_places(rows: &Rows, tiers: &Tiers, groups: &Groups, block_size: u32) -> Contents<()> {
    let (mut blocks, mut keys) = (HashMap::new(), HashMap::new());
    for (sequence, row) in rows.iter() {
        let pool = tiers.pool(row.tier);
        let first = row
            .group_tables
            .as_deref()
            .and_then(|group_tables| group_tables.first())
            .and_then(|&first| rows.get(first).ok());
        let of_row = first.unwrap_or(row).keys.as_deref().map_or(&[][..], |keys| &keys.keys);
        let is_null = |block: BlockId| groups.slide() && block == NULL_BLOCK;
        let mut holds = true;
        for (at, &block) in row.table.iter().enumerate().filter(|(_, block)| !is_null(**block)) {
            let (place, is_filled) = ((row.group, at), at < blocks_for(u64::from(row.len), block_size));
            let key = pool.key(block).or_else(|| of_row.get(at).map(|key| key.of_group(row.group)));
            for (tier, block) in [Some((row.tier, block)), pool.block(block).tier_copy()].into_iter().flatten() {
                let own = tiers.pool(tier).key(block).or(key);
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
