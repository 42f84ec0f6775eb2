//! The whole manager as bytes, and back.

use super::{MAX_BLOCK_SIZE, Manager};
use crate::block::TierBlock;
use crate::defrag::{Defrag, MoveStats};
use crate::error::{self, Error, Result};
use crate::event::EventsImage;
use crate::fit::Share;
use crate::group::{Group, Groups};
use crate::id::TicketId;
use crate::pins::Pins;
use crate::pool::PoolImage;
use crate::sequence::{PrefixStats, Rows, RowsImage, Sequences};
use crate::snapshot::{Contents, MAX_COUNT, seal, unseal};
use crate::tiers::{Tiers, TiersImage};
use crate::transfer::{StoreJobs, Transfers};
use serde::{Deserialize, Serialize};

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
    /// Most cached device blocks that a step copies to the host unasked.
    host_copies_per_step: u32,
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
    /// Tickets are in flight, or pins or jobs of a prefix store, which count as such, or the open step has transfers.
    pub fn snapshot(&mut self) -> Result<Vec<u8>> {
        let tickets = self.transfers.in_flight_count() + self.pins.len() + self.jobs.len();
        let pairs = self.transfers.num_pairs();
        if tickets > 0 || pairs > 0 {
            let open = self.open_tickets().take(error::MAX_NAMED).collect();
            return Err(Error::Busy { tickets, open, pairs });
        }
        let TiersImage { pools, copies, events, host_copies_per_step, salts } = self.tiers.image();
        // Named one by one: a new field has to be thought of here.
        let Self { tiers: _, sequences, transfers, pins, jobs: _, defrag } = &*self;
        seal(&Image {
            block_size: sequences.block_size(),
            groups: sequences.groups().to_vec(),
            watermark: sequences.watermark().fraction(),
            open: transfers.open(),
            overlaps: transfers.overlaps(),
            pools,
            rows: sequences.rows().image(),
            copies,
            stats: sequences.stats(),
            decided: transfers.num_decided(),
            moved: defrag.stats(),
            events,
            pin_limit: pins.limit().fraction(),
            next_pin: pins.next(),
            host_copies_per_step,
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
            host_copies_per_step,
            salts,
        } = self;
        let groups = Groups::new(&groups).map_err(|error| error.to_string())?;
        let sizes = pools.each_ref().map(PoolImage::num_blocks);
        let share = |fraction| Share::new("share of the device", fraction, sizes[0]).map_err(|error| error.to_string());
        let watermark = share(watermark)?;
        let in_range = (1..=MAX_BLOCK_SIZE).contains(&block_size) && sizes[0] > 0;
        if !in_range || !(1..=MAX_COUNT).contains(&open.0) {
            return Err(format!("{} blocks of {block_size}, ticket {open}", sizes[0]));
        }
        let mut counters = stats.counters().into_iter().chain(decided).chain(moved.counters());
        if counters.any(|counter| counter > MAX_COUNT) || !(1..=MAX_COUNT).contains(&next_pin) {
            return Err(format!("a counter is beyond {MAX_COUNT}, or the next pin is {next_pin}"));
        }
        let rows = Rows::restore(rows, open, block_size)?;
        let null = groups.has_nulls();
        let sequences = Sequences::new(block_size, groups, watermark, rows, stats);
        let refs = sequences.count_references(pools.each_ref().map(PoolImage::extent))?;
        let tiers = TiersImage { pools, copies, events, host_copies_per_step, salts };
        let tiers = Tiers::restore(tiers, &refs, block_size, null)?;
        sequences.check_places(&tiers)?;
        Ok(Manager {
            tiers,
            transfers: Transfers::resume(open, overlaps, decided),
            sequences,
            pins: Pins::new(share(pin_limit)?, next_pin),
            jobs: StoreJobs::default(),
            defrag: Defrag::resume(moved),
        })
    }
}
