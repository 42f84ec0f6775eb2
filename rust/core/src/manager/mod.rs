//! The block manager: who may run, which blocks hold whose tokens, and which blocks are to be copied or moved.
//!
//! A step is: decide (`allocate`, `append`, `swap_out`, ...), [`Manager::take_decision`], carry the decision out,
//! [`Manager::complete`] or [`Manager::fail`] its ticket. Within a step the transfers run in the order of
//! `Kind`, then new tokens are written; what that order cannot make safe is refused.
//!
//! Invariant: every reference that a pool counts is an entry of one table, every lease belongs to one ticket
//! ([`Manager::check`]). The manager has no lock; who shares it brings one.

mod append;
mod chunk;
mod goals;
mod groups;
mod hostcache;
mod moves;
mod pass;
mod pin;
mod prefix;
mod quota;
mod relocate;
mod resize;
mod retention;
mod snapshot;
mod stats;
mod tables;
mod ticket;
mod truncate;
mod window;

use crate::defrag::Planner;
use crate::error::{Error, Result};
use crate::event::EventBatch;
use crate::group::{Group, Groups};
use crate::id::{BlockId, SequenceId, TicketId, Tier};
use crate::pool::{Policies, Pool};
use crate::table::{Row, Rows};
use crate::tiers::Tiers;
use crate::transfer::{Step, Transfers};
use resize::share;
use std::collections::HashSet;

pub use append::Counts;
pub use groups::Demand;
pub use moves::{Cached, Fragmentation, MoveStats, Moves};
pub use pin::Expired;
pub use prefix::{BlockExtra, PrefixHit, PrefixStats, Prompt};
pub use resize::Resize;
pub use stats::{Stats, TierUse};
pub use tables::TableRows;

/// Most block table entries that one fork may write.
const MAX_FORKED: usize = 1 << 30;

/// Largest block size, in tokens.
const MAX_BLOCK_SIZE: u32 = 1 << 20;

/// Sizes of a manager's tiers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Token slots in a block.
    pub block_size: u32,
    /// Blocks of each tier: device, host, external.
    pub blocks: [usize; 3],
    /// Fraction of the device blocks that admission keeps free, `0.0..1.0`.
    pub watermark: f64,
    /// Whether full device blocks stay cached after their sequences have gone, until evicted.
    pub prefix_caching: bool,
}

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
    /// Blocks that the request takes; 0 if its sequences cannot move in their present state.
    pub blocks: usize,
    /// Blocks that can be given out now, the watermark subtracted where the request must keep it.
    pub free: usize,
}

impl Fit {
    fn new(blocks: usize, free: usize, total: usize) -> Self {
        let status = match blocks {
            _ if blocks <= free => AllocStatus::Ok,
            _ if blocks <= total => AllocStatus::Later,
            _ => AllocStatus::Never,
        };
        Self { status, blocks, free }
    }
}

/// Sequences and their blocks on the device, the host and the external tier.
#[derive(Debug, Clone)]
pub struct Manager {
    block_size: u32,
    groups: Groups,
    watermark: usize,
    watermark_fraction: f64,
    pub(crate) tiers: Tiers,
    rows: Rows,
    transfers: Transfers,
    /// Rows of recurrent groups that began the block of their last token in the open step: the step is yet to write the state
    /// there.
    begun: HashSet<SequenceId>,
    stats: PrefixStats,
    /// Pairs decided so far, by kind.
    decided: [u64; 7],
    moved: MoveStats,
    planner: Planner,
    pins: pin::Pins,
    scratch: Vec<BlockId>,
    work: pass::Work,
}

impl Manager {
    /// A manager without sequences.
    ///
    /// # Errors
    /// A size or the watermark is out of range.
    pub fn new(config: Config) -> Result<Self> {
        Self::with_policies(config, Policies::default())
    }

    /// A manager without sequences, with orders of reuse and eviction of the caller's choice.
    ///
    /// # Errors
    /// A size or the watermark is out of range.
    pub fn with_policies(config: Config, policies: Policies) -> Result<Self> {
        Self::with_groups(config, policies, &[Group::Full])
    }

    /// A manager of a model whose layers need different things of the tokens before: every sequence has one block table a
    /// group, all over the same pools. Where tables have null blocks, block 0 of every tier is theirs.
    ///
    /// # Errors
    /// A size, the watermark or a group is out of range, or an encoder's tokens would be cached.
    pub fn with_groups(config: Config, policies: Policies, groups: &[Group]) -> Result<Self> {
        let groups = Groups::new(groups)?;
        let Config { block_size, blocks, watermark, prefix_caching } = config;
        if !(1..=MAX_BLOCK_SIZE).contains(&block_size) {
            return Err(invalid("block_size", block_size, format!("1 to {MAX_BLOCK_SIZE}")));
        }
        let least = if groups.slide() { 2 } else { 1 };
        if blocks[0] < least {
            return Err(invalid("device_blocks", blocks[0] as i128, format!("at least {least}")));
        }
        if groups.cross() && prefix_caching {
            let must = "no cross attention, whose blocks a prompt's tokens do not identify".to_owned();
            return Err(invalid("prefix_caching with groups", groups.all().len() as i128, must));
        }
        require_fraction("watermark", watermark)?;
        let tiers = Tiers::new(blocks, block_size, prefix_caching, groups.slide(), policies)?;
        Ok(Self {
            block_size,
            groups,
            watermark: share(watermark, blocks[0]),
            watermark_fraction: watermark,
            tiers,
            rows: Rows::new(),
            transfers: Transfers::new(),
            begun: HashSet::new(),
            stats: PrefixStats::default(),
            decided: [0; 7],
            moved: MoveStats::default(),
            planner: Planner::default(),
            pins: pin::Pins::new(0.5, blocks[0]),
            scratch: Vec::new(),
            work: pass::Work::default(),
        })
    }

    /// Keeps the last `capacity` events of the prefix cache from now on, which must not have cached anything yet.
    ///
    /// # Errors
    /// The capacity is out of range, the cache is off, or something has been published.
    pub fn record_events(&mut self, capacity: usize) -> Result<()> {
        self.tiers.record_events(capacity)
    }

    /// Takes all events that wait; none where they were not asked for.
    pub fn take_events(&mut self) -> EventBatch {
        self.tiers.take_events()
    }

    /// Token slots in a block.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Device blocks that admission keeps free.
    #[must_use]
    pub fn watermark_blocks(&self) -> usize {
        self.watermark
    }

    /// The blocks of a tier.
    #[must_use]
    pub fn pool(&self, tier: Tier) -> &Pool {
        self.tiers.pool(tier)
    }

    /// Sequences that have not been freed.
    #[must_use]
    pub fn num_sequences(&self) -> usize {
        self.rows.len() / self.groups.all().len()
    }

    /// Whether a new sequence of so many tokens may be admitted, the watermark kept.
    #[must_use]
    pub fn can_allocate(&self, tokens: u32, lookahead: u32) -> Fit {
        self.can_admit(&Demand { tokens, lookahead, ..Demand::default() })
    }

    /// Opens one sequence for each entry of `tokens`, with blocks for that many tokens; appends their handles to `out`.
    ///
    /// # Errors
    /// The device has too few blocks for the whole batch; a group wants an encoder's tokens.
    pub fn allocate(&mut self, tokens: &[u32], out: &mut Vec<SequenceId>) -> Result<()> {
        if !self.groups.is_single() {
            return self.allocate_groups(tokens, None, out);
        }
        let group = self.groups.get(0);
        let wanted = tokens.iter().map(|&n| self.blocks_at_start(group, n)).sum();
        self.tiers.device().require(wanted, true)?;
        self.require_nulls(tokens.iter().map(|&n| group.skipped(0, n, 0, self.block_size)))?;
        self.rows.require(tokens.len())?;
        for &n in tokens {
            out.push(self.open_row(0, 0, n, Vec::new()));
        }
        Ok(())
    }

    /// Opens `count` sequences that share all blocks of one; a write to a shared block copies it first.
    ///
    /// # Errors
    /// The sequence is unknown or has lost bytes; so many forks are more than there is room for.
    pub fn fork(&mut self, sequence: SequenceId, count: u32, out: &mut Vec<SequenceId>) -> Result<()> {
        let mut all = Vec::new();
        let members = self.members(&[sequence], &mut all)?.to_vec();
        self.rows.require((count as usize).saturating_mul(members.len()))?;
        let row = self.rows.get(sequence)?;
        refuse_lost(sequence, row)?;
        let entries = members.iter().map(|&member| self.rows.at(member).table.len()).sum::<usize>();
        let entries = entries.saturating_mul(count as usize);
        if entries > MAX_FORKED {
            let must = format!("at most {MAX_FORKED} block table entries, not {entries}");
            return Err(invalid("number of forks", count, must));
        }
        self.require_forks(&members, count)?;
        let first = out.len();
        let mut others = Vec::new();
        for &member in &members {
            self.fork_row(member, count, if member == sequence { out } else { &mut others });
        }
        self.link_group_tables(&out[first..], &others);
        Ok(())
    }

    fn fork_row(&mut self, sequence: SequenceId, count: u32, out: &mut Vec<SequenceId>) {
        let begun = self.begun.contains(&sequence);
        let row = self.rows.at_mut(sequence);
        row.writable = 0;
        let parent = row.clone();
        for &block in &*parent.table {
            self.tiers.share((parent.tier, block), count);
        }
        for _ in 0..count {
            let child = self.rows.open(parent.tier, parent.table.to_vec());
            let row = self.rows.at_mut(child);
            inherit(row, &parent, parent.len, parent.written);
            (row.published, row.priority) = (parent.published, parent.priority);
            row.keys.clone_from(&parent.keys);
            self.begun.extend(begun.then_some(child));
            out.push(child);
        }
    }

    /// Opens a sequence of `tokens` tokens that shares the first `shared` of another's, whole blocks on the device.
    ///
    /// # Errors
    /// `shared` is not a multiple of the block size or longer than either sequence; the other is not on the device, still
    /// loading or has lost bytes, or no longer has what is to be shared; the device has too few blocks.
    pub fn fork_prefix(&mut self, sequence: SequenceId, shared: u32, tokens: u32) -> Result<SequenceId> {
        let mut all = Vec::new();
        let members = self.members(&[sequence], &mut all)?.to_vec();
        self.rows.require(members.len())?;
        let row = self.readable(sequence)?;
        if shared % self.block_size != 0 || shared > row.len.min(tokens) {
            let must = format!("a multiple of {} and at most {}", self.block_size, row.len.min(tokens));
            return Err(invalid("shared_tokens", shared, must));
        }
        let mut wanted = 0;
        for &member in &members {
            wanted += self.blocks_behind_prefix(member, shared, tokens)?;
        }
        self.tiers.device().require(wanted, true)?;
        let children: Vec<_> = members.iter().map(|&member| self.fork_row_prefix(member, shared, tokens)).collect();
        self.link_group_tables(&children[..1], &children[1..]);
        Ok(children[0])
    }

    /// Forgets sequences; blocks that nothing else references go free, once no transfer holds them.
    ///
    /// # Errors
    /// A handle is unknown or named twice.
    pub fn free(&mut self, sequences: &[SequenceId]) -> Result<()> {
        let mut all = Vec::new();
        let sequences = self.members(sequences, &mut all)?;
        self.rows.begin_batch();
        for &sequence in sequences {
            self.rows.next_in_batch(sequence)?;
        }
        for &sequence in sequences {
            let tier = self.rows.at(sequence).tier;
            self.begin_release(sequence);
            // The last block goes first, so that a cached chain is evicted from its end.
            let table = self.rows.close(sequence);
            self.tiers.release_all(tier, &table);
        }
        self.tiers.enforce_quotas();
        Ok(())
    }

    /// Tokens in a sequence.
    ///
    /// # Errors
    /// The sequence is unknown.
    pub fn num_tokens(&self, sequence: SequenceId) -> Result<u32> {
        Ok(self.rows.get(sequence)?.len)
    }

    /// Tier that a sequence's blocks are in.
    ///
    /// # Errors
    /// The sequence is unknown.
    pub fn tier(&self, sequence: SequenceId) -> Result<Tier> {
        Ok(self.rows.get(sequence)?.tier)
    }

    /// Blocks of a sequence, in its present tier.
    ///
    /// # Errors
    /// The sequence is unknown.
    pub fn block_table(&self, sequence: SequenceId) -> Result<&[BlockId]> {
        Ok(&self.rows.get(sequence)?.table)
    }

    /// Longest table among the sequences, in blocks.
    ///
    /// # Errors
    /// A sequence is unknown.
    pub fn max_blocks(&self, sequences: &[SequenceId]) -> Result<usize> {
        sequences.iter().try_fold(0, |most, &s| Ok(most.max(self.rows.get(s)?.table.len())))
    }

    /// Slots of tokens `first..first + out.len()` of a sequence on the device.
    ///
    /// # Errors
    /// The sequence is unknown, not on the device, still moving or shorter.
    pub fn slot_mapping(&self, sequence: SequenceId, first: u32, out: &mut [i64]) -> Result<()> {
        let row = self.readable(sequence)?;
        let last = u64::from(first) + out.len() as u64;
        if last > u64::from(row.len) {
            return Err(invalid("last token", i128::from(last), format!("at most {}", row.len)));
        }
        write_slots(row, first, self.block_size, out);
        Ok(())
    }

    /// Whether the device has so many blocks of `free`, the watermark kept.
    fn admit(&self, wanted: usize, free: usize) -> Fit {
        let kept = self.watermark + usize::from(self.groups.slide());
        let fit = Fit::new(wanted, free.saturating_sub(self.watermark), self.tiers.device().len().saturating_sub(kept));
        let is_short = fit.status == AllocStatus::Ok && free < self.watermark;
        if is_short { Fit { status: AllocStatus::Later, ..fit } } else { fit }
    }

    /// A row whose device blocks the present step may read.
    fn readable(&self, sequence: SequenceId) -> Result<&Row> {
        let row = self.rows.get(sequence)?;
        refuse_lost(sequence, row)?;
        require_tier(sequence, row, Tier::Device)?;
        refuse_loading(sequence, row, &self.transfers)?;
        Ok(row)
    }

    /// What it takes to decide a transfer.
    fn step(&mut self) -> Step<'_> {
        Step { tiers: &mut self.tiers, transfers: &mut self.transfers }
    }
}

/// Blocks for so many tokens.
fn blocks_for(tokens: u64, block_size: u32) -> usize {
    usize::try_from(tokens.div_ceil(u64::from(block_size))).unwrap_or(usize::MAX)
}

fn invalid(what: &'static str, found: impl Into<i128>, must: String) -> Error {
    Error::InvalidArgument { what, found: found.into(), must }
}

fn require_fraction(what: &'static str, found: f64) -> Result<()> {
    if (0.0..1.0).contains(&found) { Ok(()) } else { Err(Error::InvalidFraction { what, found: found.to_string() }) }
}

fn refuse_lost(sequence: SequenceId, row: &Row) -> Result<()> {
    if row.lost { Err(Error::Lost { sequence }) } else { Ok(()) }
}

fn require_tier(sequence: SequenceId, row: &Row, wanted: Tier) -> Result<()> {
    if row.tier == wanted { Ok(()) } else { Err(Error::WrongTier { sequence, wanted, found: row.tier }) }
}

/// A load of the present step lands before its tokens are written; one of an earlier step must have landed.
fn refuse_loading(sequence: SequenceId, row: &Row, transfers: &Transfers) -> Result<()> {
    if row.moving && row.ticket != transfers.open() && transfers.in_flight(row.ticket) {
        return Err(Error::InFlight { sequence, ticket: row.ticket });
    }
    Ok(())
}

/// A child's bytes are on their way as long as its parent's.
fn inherit(child: &mut Row, parent: &Row, len: u32, written: TicketId) {
    child.len = len;
    child.written = written;
    child.ticket = parent.ticket;
    child.moving = parent.moving;
    child.group = parent.group;
    child.null_prefix = parent.null_prefix;
}

fn write_slots(row: &Row, first: u32, block_size: u32, out: &mut [i64]) {
    let (mut index, mut offset) = ((first / block_size) as usize, i64::from(first % block_size));
    let size = i64::from(block_size);
    for slot in out {
        if offset == size {
            (index, offset) = (index + 1, 0);
        }
        *slot = i64::from(row.table[index].0) * size + offset;
        offset += 1;
    }
}

/// What `check` looks at.
impl Manager {
    pub(crate) fn rows(&self) -> &Rows {
        &self.rows
    }

    #[cfg(test)]
    pub(crate) fn rows_mut(&mut self) -> &mut Rows {
        &mut self.rows
    }

    pub(crate) fn transfers(&self) -> &Transfers {
        &self.transfers
    }
}
