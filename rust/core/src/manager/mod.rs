//! The block manager: decides who may run, which blocks hold which tokens, and which blocks to copy or move.
//!
//! A step is: decide (`allocate`, `append`, `swap_out`, ...), [`Manager::take_decision`], carry the decision out,
//! [`Manager::complete`] or [`Manager::fail`] its ticket. Within a step the transfers run in the order of `Kind`, then
//! new tokens are written; calls that this order cannot make safe are refused.
//!
//! Invariant: every reference that a pool counts is an entry of one table, and every lease belongs to one ticket
//! ([`Manager::check`]). The manager has no lock; to share it, add your own.

mod check;
mod plain;
mod stats;
mod step;
mod store;
mod verbs;

use crate::block::MAX_BLOCKS;
use crate::defrag::Defrag;
use crate::error::{Result, invalid};
use crate::event::EventBatch;
use crate::fit::Share;
use crate::group::{Group, Groups, PagedGroup};
use crate::id::{BlockId, SequenceId, Tier};
use crate::page::{Shape, Space};
use crate::pins::Pins;
use crate::pool::{Policies, Pool};
use crate::prefix::Residency;
use crate::sequence::{Sequences, TableId};
use crate::tiers::Tiers;
use crate::transfer::{OpenStep, StoreJobs, Transfers, View};
use std::time::Duration;

pub use stats::{Stats, TierUse};
pub use store::MissingBlocks;
pub use verbs::Resize;

/// Largest block size, in tokens.
const MAX_BLOCK_SIZE: u32 = 1 << 20;

/// What a manager is made of. A model whose layers need different parts of the earlier tokens has several groups: every
/// sequence has one block table per group.
#[derive(Clone, Debug)]
pub struct Config {
    /// Token slots in a block. A prompt continues after a multiple of them.
    pub block_size: u32,
    /// Blocks of each page class: groups whose blocks have equal bytes share one. Ids of blocks count from 0 in each. If
    /// tables have null blocks, block 0 of every tier is reserved for them.
    pub space: Space,
    /// The model's cache groups.
    pub groups: Vec<PagedGroup>,
    /// Fraction of the device blocks that admission keeps free, `0.0..1.0`.
    pub watermark: f64,
    /// Whether full device blocks stay cached after their sequences are freed, until evicted.
    pub prefix_caching: bool,
    /// Order in which free blocks are reused, and cached ones evicted.
    pub policies: Policies,
}

impl Config {
    /// One group with full attention, without watermark or prefix caching. `blocks` are those of each tier: device, host,
    /// external.
    #[must_use]
    pub fn new(block_size: u32, blocks: [usize; 3]) -> Self {
        let space = Space::Split { blocks: vec![blocks], most: Vec::new() };
        let policies = Policies::default();
        let config = Self { block_size, space, groups: Vec::new(), watermark: 0.0, prefix_caching: false, policies };
        config.with_groups(&[Group::Full])
    }

    /// The same blocks, for other groups.
    #[must_use]
    pub fn with_groups(mut self, groups: &[Group]) -> Self {
        let paged = |&group| PagedGroup { group, block_tokens: self.block_size, block_bytes: 1 };
        self.groups = groups.iter().map(paged).collect();
        self
    }
}

/// Sequences and their blocks on the device, the host and the external tier.
#[derive(Debug, Clone)]
pub struct Manager {
    pub(crate) tiers: Tiers,
    transfers: Transfers,
    sequences: Sequences,
    pins: Pins,
    jobs: StoreJobs,
    defrag: Defrag,
    samples_residency: bool,
    clock: StepClock,
}

/// The clock that ages conversations: that of the caller, or else a second a step.
#[derive(Debug, Clone, Copy, Default)]
struct StepClock {
    /// Seconds so far.
    seconds: f64,
    /// What the caller's clock said last; `None` if it has none.
    given: Option<f64>,
}

impl Manager {
    /// A manager without sequences.
    ///
    /// # Errors
    /// A size, the watermark or a group is out of range; prefix caching is combined with an encoder's tokens; a group's
    /// block size does not divide that of the manager, or that of a recurrent group is not equal to it; there are too many
    /// classes, or too few blocks of one.
    pub fn new(config: Config) -> Result<Self> {
        let Config { block_size, space, groups, watermark, prefix_caching, policies } = config;
        if !(1..=MAX_BLOCK_SIZE).contains(&block_size) {
            return Err(invalid("block_size", block_size, format!("1 to {MAX_BLOCK_SIZE}")));
        }
        let mut groups = Groups::new(&groups, block_size)?;
        let shapes = Shape::of_tiers(&space, groups.class_bytes(), groups.has_nulls())?;
        for (what, shape) in ["device_blocks", "host_blocks", "external_blocks"].into_iter().zip(&shapes) {
            let blocks = shape.ids.iter().copied().fold(0, usize::saturating_add);
            if blocks > MAX_BLOCKS {
                return Err(invalid(what, blocks as i128, format!("at most {MAX_BLOCKS}")));
            }
        }
        let least = if groups.has_nulls() { 2 } else { 1 };
        if let Some(&blocks) = shapes[0].now.iter().find(|&&blocks| blocks < least) {
            return Err(invalid("device_blocks", blocks as i128, format!("at least {least}")));
        }
        if groups.cross() && prefix_caching {
            let must = "used without cross attention, whose blocks a prompt's tokens do not identify".to_owned();
            return Err(invalid("prefix_caching with groups", groups.all().len() as i128, must));
        }
        let least_blocks = shapes[0].now.iter().copied().min().unwrap_or(0);
        let watermark = Share::new("watermark", watermark, least_blocks)?;
        let mut tiers = Tiers::new(&shapes, block_size, prefix_caching, policies)?;
        groups.set_first_blocks(|class| tiers.device().first_of(class));
        let has_points = groups.has_nulls() || groups.num_companions() > 0 || groups.ahead() > 0;
        if prefix_caching && has_points {
            let anchor = u8::try_from(groups.anchor()).unwrap_or(u8::MAX);
            tiers.use_points(groups.class(anchor), groups.num_companions(), groups.leaving().is_empty())?;
        }
        Ok(Self {
            tiers,
            transfers: Transfers::new(),
            sequences: Sequences::new(block_size, groups, watermark),
            pins: Pins::new(Share::new("max_pinned", 0.5, least_blocks)?),
            jobs: StoreJobs::default(),
            defrag: Defrag::default(),
            samples_residency: false,
            clock: StepClock::default(),
        })
    }

    /// Numbers the manager. Handles carry the number, so another manager rejects them.
    ///
    /// # Errors
    /// There are sequences whose handles carry the old number.
    pub fn set_number(&mut self, number: u16) -> Result<()> {
        match self.num_sequences() {
            0 => self.sequences.set_manager(number),
            found => return Err(invalid("number of sequences", found as i128, "0 to number the manager".to_owned())),
        }
        Ok(())
    }

    /// The manager's number.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.sequences.rows().manager()
    }

    /// Starts recording the last `capacity` events of the prefix cache, which must not have cached anything yet.
    ///
    /// # Errors
    /// The capacity is out of range, the cache is off, something has been published, or the groups' blocks differ in tokens.
    pub fn record_events(&mut self, capacity: usize) -> Result<()> {
        self.require_even("events")?;
        self.tiers.record_events(capacity)
    }

    /// Takes all queued events; none if recording is off.
    pub fn take_events(&mut self) -> EventBatch {
        self.tiers.take_events()
    }

    /// Starts measuring how long blocks stay cached, on a sample of them: `rate` is the sampled fraction, 0 to 1. Call
    /// [`Manager::set_time`] before each later call.
    pub fn sample_residency(&mut self, rate: f64) {
        self.tiers.sample_residency(rate);
        self.samples_residency = true;
    }

    /// Whether calls need [`Manager::set_time`].
    #[inline]
    #[must_use]
    pub fn samples_residency(&self) -> bool {
        self.samples_residency
    }

    /// Sets the current time, by a monotonic clock. It applies to everything that happens until the next such call.
    pub fn set_time(&mut self, now: Duration) {
        self.tiers.set_time(now);
    }

    /// How long the sampled blocks of a tier stayed cached; `None` for a tier without a cache, and before sampling
    /// starts.
    #[must_use]
    pub fn residency(&self, tier: Tier) -> Option<&Residency> {
        self.pool(tier).residency()
    }

    /// Token slots in a block.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        self.sequences.block_size()
    }

    /// Device blocks that admission keeps free.
    #[must_use]
    pub fn watermark_blocks(&self) -> usize {
        self.sequences.watermark().blocks()
    }

    /// Device blocks of a page class that admission keeps free, or those in the extents that it keeps free.
    #[must_use]
    pub fn kept_blocks(&self, class: usize) -> usize {
        let (device, kept) = (self.tiers.device(), self.tiers.device().kept(self.sequences.watermark()));
        device.per_extent(class).map_or_else(|| kept.get(class), |per_extent| kept.get(0) * per_extent)
    }

    /// The blocks of a tier.
    #[must_use]
    pub fn pool(&self, tier: Tier) -> &Pool {
        self.tiers.pool(tier)
    }

    /// Sequences that have not been freed.
    #[must_use]
    pub fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Tokens in a sequence, or in one of its tables.
    ///
    /// # Errors
    /// The sequence is unknown.
    pub fn num_tokens(&self, table: impl Into<TableId>) -> Result<u32> {
        self.sequences.num_tokens(table.into())
    }

    /// Tier that a sequence's blocks are in.
    ///
    /// # Errors
    /// The sequence is unknown.
    pub fn tier(&self, sequence: SequenceId) -> Result<Tier> {
        Ok(self.sequences.get(sequence)?.tier)
    }

    /// Blocks of a sequence in its first group, or of one of its tables, in its current tier.
    ///
    /// # Errors
    /// The sequence is unknown, or is still being loaded to the device by a step that did not wait for it.
    pub fn block_table(&self, table: impl Into<TableId>) -> Result<&[BlockId]> {
        self.sequences.shown(self.view(), table.into())
    }

    /// Like [`Manager::block_table`], for computing: if the current step loads the sequence, the step will wait for the
    /// load.
    ///
    /// # Errors
    /// As [`Manager::block_table`].
    pub fn read_table(&mut self, table: impl Into<TableId>) -> Result<&[BlockId]> {
        let table = table.into();
        self.sequences.note_reads(&mut self.transfers, std::iter::once(table.sequence));
        self.block_table(table)
    }

    /// Length of the longest of some tables, in blocks.
    ///
    /// # Errors
    /// A sequence is unknown.
    pub fn max_blocks(&self, tables: &[TableId]) -> Result<usize> {
        tables.iter().try_fold(0, |most, &id| Ok(most.max(self.sequences.table(id)?.len())))
    }

    /// All counters. It counts leases, so call it once per step rather than once per call.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let mut leases: Vec<_> =
            self.transfers.leases().chain(self.jobs.leases()).map(|lease| (lease.tier, lease.block)).collect();
        leases.sort_unstable();
        leases.dedup();
        let tiers = Tier::ALL.map(|tier| {
            let pool = self.pool(tier);
            let null = usize::from(self.sequences.has_nulls() && !pool.is_empty());
            TierUse {
                blocks: pool.len() - pool.num_absent(),
                used: pool.used() - null,
                peak: pool.peak().saturating_sub(null),
                leased: leases.iter().filter(|lease| lease.0 == tier).count(),
                cached: pool.published(),
                evicted: pool.evictions(),
                pinned: if tier == Tier::Device { self.pins.num_blocks() } else { 0 },
                bytes: pool.total_bytes(),
                classes: pool.use_by_class(),
            }
        });
        Stats {
            sequences: self.num_sequences(),
            steps: self.transfers.open().0 - 1,
            open_tickets: self.transfers.in_flight_count(),
            prefix: self.sequences.stats(),
            moves: self.defrag.stats(),
            tiers,
            uncopied: self.tiers.uncopied(),
            hints: self.tiers.device().hint_counts(),
            decided: self.transfers.num_decided(),
        }
    }

    /// Starts keeping host copies of published blocks. What the device evicts is copied, at most `per_step` blocks a
    /// step: those that a step takes, and ahead of time those that the next one will. One eviction order spans both
    /// tiers. With 0, only explicit calls copy. What several groups, windows and states need of a prompt goes together,
    /// and is found together.
    ///
    /// # Errors
    /// The prefix cache is off, there are no host blocks, some of them are in use, events are already recorded or copies
    /// already kept.
    pub fn keep_host_copies(&mut self, per_step: u32) -> Result<()> {
        self.tiers.keep_host_copies(per_step)
    }

    /// Whether host copies are kept.
    #[must_use]
    pub fn keeps_host_copies(&self) -> bool {
        self.tiers.keeps_host_copies()
    }

    /// Copies the next `count` device blocks to be evicted to the host, as far as there is room. Blocks that have a
    /// host copy are freed at once. The others stay findable while they are copied; if no prompt has taken them by the
    /// time the copy lands, they are freed and stay cached on the host. Returns the number of blocks.
    ///
    /// # Errors
    /// Host copies are not kept.
    pub fn offload_cached(&mut self, count: usize) -> Result<usize> {
        if !self.keeps_host_copies() {
            return Err(invalid("blocks to offload", count as i128, "0 unless host copies are kept".to_owned()));
        }
        Ok(self.step().offload_cached(count))
    }

    /// Announces that prompts which start soon will take `count` device blocks. The step that ends next empties as many,
    /// at most a sixteenth of device and host or half of what the host is larger, so that the steps in which they start
    /// need not wait for copies.
    ///
    /// # Errors
    /// Host copies are not kept.
    pub fn expect_blocks(&mut self, count: usize) -> Result<()> {
        if !self.keeps_host_copies() {
            return Err(invalid("blocks to expect", count as i128, "0 unless host copies are kept".to_owned()));
        }
        self.tiers.expect(count);
        Ok(())
    }

    /// Number of cached blocks that no prompt can find, since one before them was lost or dropped; 0 without host copies.
    /// The time grows with both tiers.
    #[must_use]
    pub fn num_unfindable(&self) -> usize {
        self.view().num_unfindable()
    }

    /// Fails with several page classes, or block sizes, for what works with one only.
    fn require_one_class(&self, what: &str) -> Result<()> {
        let classes = self.num_classes();
        if classes > 1 {
            return Err(invalid("number of page classes", classes as i128, format!("1 for {what}")));
        }
        self.require_even(what)
    }

    /// Fails if blocks of some group hold fewer tokens than others.
    fn require_even(&self, what: &str) -> Result<()> {
        if self.sequences.groups_are_even() {
            return Ok(());
        }
        let least = self.sequences.least_tokens();
        Err(invalid("block_tokens", least, format!("{} in all groups for {what}", self.block_size())))
    }

    /// Page classes: numbers of block sizes in bytes.
    #[must_use]
    pub fn num_classes(&self) -> usize {
        self.tiers.device().num_classes()
    }

    /// Bytes of a block of a page class.
    #[must_use]
    pub fn class_bytes(&self, class: usize) -> u64 {
        self.sequences.class_bytes().get(class).copied().unwrap_or(0)
    }

    /// The page class of a group's blocks, and token slots and bytes of one of them; `None` if there is no such group.
    #[must_use]
    pub fn page(&self, group: usize) -> Option<(usize, u32, u64)> {
        self.sequences.page(group)
    }

    /// The parts needed to decide a transfer.
    fn step(&mut self) -> OpenStep<'_> {
        OpenStep { tiers: &mut self.tiers, transfers: &mut self.transfers, jobs: &mut self.jobs }
    }

    /// The sequences, and the parts needed to decide a transfer.
    fn parts(&mut self) -> (&mut Sequences, OpenStep<'_>) {
        let Self { tiers, transfers, sequences, jobs, .. } = self;
        (sequences, OpenStep { tiers, transfers, jobs })
    }

    /// A read-only view for queries.
    fn view(&self) -> View<'_> {
        View { tiers: &self.tiers, transfers: &self.transfers, jobs: &self.jobs }
    }
}
