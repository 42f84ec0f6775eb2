//! Sequences with a block table in each cache group. Each table is a row of its own; the first group's row stands for the
//! sequence, and the handles that callers have are its.

use super::{AllocStatus, Counts, Fit, Manager, blocks_for, inherit, invalid};
use crate::error::{Error, Result};
use crate::group::{Group, MAX_PASSED, NULL_BLOCK};
use crate::id::{BlockId, SequenceId, Tier};
use crate::memory;
use crate::table::{Row, RowKeys};
use std::ops::Range;

/// What a new sequence is going to need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Its tokens.
    pub tokens: u32,
    /// Slots beyond them.
    pub lookahead: u32,
    /// Tokens of its encoder, for a group of cross attention.
    pub encoder_tokens: u32,
    /// Most tokens that are put in at a time, where the prompt is computed in chunks; 0 for all at once.
    pub chunk: u32,
}

impl Manager {
    /// The cache groups, in the order of their numbers.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        self.groups.all()
    }

    /// Groups whose tables grow with a sequence: all but an encoder's.
    #[must_use]
    pub fn growing_groups(&self) -> usize {
        self.groups.growing().len()
    }

    /// Whether a new sequence may be admitted, the watermark kept. Of a prompt in chunks what its groups hold at once counts.
    #[must_use]
    pub fn can_admit(&self, demand: &Demand) -> Fit {
        let Demand { tokens, lookahead, encoder_tokens, chunk } = *demand;
        let chunk = if chunk == 0 { tokens } else { chunk };
        let peak = |&group: &Group| match group {
            Group::CrossAttention => blocks_for(u64::from(encoder_tokens), self.block_size),
            group if chunk >= tokens => {
                let whole = blocks_for(u64::from(tokens) + u64::from(lookahead), self.block_size);
                whole - group.skipped(0, tokens, 0, self.block_size)
            }
            group => group.peak_blocks(tokens, lookahead, chunk, self.block_size),
        };
        let wanted = self.groups.all().iter().map(peak).fold(0, usize::saturating_add);
        let passes = |group: &Group| group.skipped(0, chunk.min(tokens), 0, self.block_size) > MAX_PASSED;
        if self.groups.growing().iter().any(passes) {
            return Fit { status: AllocStatus::Never, ..self.admit(wanted, self.tiers.device().available()) };
        }
        self.admit(wanted, self.tiers.device().available())
    }

    /// As [`Manager::allocate`], for sequences whose encoders read so many tokens.
    ///
    /// # Errors
    /// No group is of cross attention; there is not one number of encoder tokens a sequence; the device has too few blocks.
    pub fn allocate_encoded(
        &mut self,
        tokens: &[u32],
        encoder_tokens: &[u32],
        out: &mut Vec<SequenceId>,
    ) -> Result<()> {
        self.allocate_groups(tokens, Some(encoder_tokens), out)
    }

    pub(super) fn allocate_groups(
        &mut self,
        tokens: &[u32],
        encoder_tokens: Option<&[u32]>,
        out: &mut Vec<SequenceId>,
    ) -> Result<()> {
        let encoders = if self.groups.cross() { tokens.len() } else { 0 };
        let found = encoder_tokens.map_or(0, <[u32]>::len);
        if found != encoders || (encoder_tokens.is_some() && !self.groups.cross()) {
            let must = format!("{encoders}, for {} sequences of {} groups", tokens.len(), self.groups.all().len());
            return Err(invalid("number of encoder lengths", found as i128, must));
        }
        let length = |group, i: usize| match (group, encoder_tokens) {
            (Group::CrossAttention, Some(encoder)) => encoder[i],
            _ => tokens[i],
        };
        let sequences = 0..tokens.len();
        let groups = self.groups.all().to_vec();
        let wanted = groups.iter().flat_map(|&group| sequences.clone().map(move |i| (group, i)));
        let wanted = wanted.map(|(group, i)| self.blocks_at_start(group, length(group, i))).sum();
        self.tiers.device().require(wanted, true)?;
        let passed = groups.iter().flat_map(|&group| sequences.clone().map(move |i| (group, i)));
        self.require_nulls(passed.map(|(group, i)| group.skipped(0, length(group, i), 0, self.block_size)))?;
        self.rows.require(tokens.len().saturating_mul(groups.len()))?;
        let (first, mut others) = (out.len(), Vec::new());
        for (number, &group) in (0u8..).zip(&groups) {
            for i in sequences.clone() {
                let row = self.open_row(number, 0, length(group, i), Vec::new());
                if number == 0 { out.push(row) } else { others.push(row) }
            }
        }
        self.link_group_tables(&out[first..], &others);
        Ok(())
    }

    /// The rows of all tables of sequences, group by group: themselves where there is one group.
    pub(super) fn members<'a>(
        &self,
        sequences: &'a [SequenceId],
        all: &'a mut Vec<SequenceId>,
    ) -> Result<&'a [SequenceId]> {
        self.rows_of(sequences, self.groups.all().len(), all)
    }

    /// As [`Manager::members`], of the groups that grow.
    pub(super) fn growing<'a>(
        &self,
        sequences: &'a [SequenceId],
        all: &'a mut Vec<SequenceId>,
    ) -> Result<&'a [SequenceId]> {
        self.rows_of(sequences, self.groups.growing().len(), all)
    }

    /// Numbers of tokens for the rows of [`Manager::growing`].
    pub(super) fn spread<'a>(&self, counts: Counts<'a>, all: &'a mut Vec<u32>) -> Counts<'a> {
        match counts {
            Counts::Each(each) if !self.groups.is_single() => {
                *all = each.repeat(self.groups.growing().len());
                Counts::Each(all)
            }
            counts => counts,
        }
    }

    fn rows_of<'a>(
        &self,
        sequences: &'a [SequenceId],
        groups: usize,
        all: &'a mut Vec<SequenceId>,
    ) -> Result<&'a [SequenceId]> {
        if self.groups.is_single() {
            return Ok(sequences);
        }
        memory::make_room(all, sequences.len().saturating_mul(groups))?;
        for group in 0..groups {
            for &sequence in sequences {
                all.push(self.group_tables(sequence)?[group]);
            }
        }
        Ok(all)
    }

    /// The rows of one sequence, where there are several groups.
    ///
    /// # Errors
    /// The sequence is unknown, or the handle is that of another group's row.
    pub(super) fn group_tables(&self, sequence: SequenceId) -> Result<&[SequenceId]> {
        let group_tables = self.rows.get(sequence)?.group_tables.as_deref();
        group_tables.filter(|group_tables| group_tables[0] == sequence).ok_or(Error::UnknownSequence { sequence })
    }

    /// Row of a sequence in one group.
    ///
    /// # Errors
    /// There is no such sequence, or no such group.
    pub fn table_of(&self, sequence: SequenceId, group: usize) -> Result<SequenceId> {
        let groups = self.groups.all().len();
        if group >= groups {
            return Err(invalid("cache group", group as i128, format!("below {groups}")));
        }
        if self.groups.is_single() {
            return Ok(sequence);
        }
        Ok(self.group_tables(sequence)?[group])
    }

    /// Joins rows to sequences: `others` are the other groups' rows, group by group.
    pub(super) fn link_group_tables(&mut self, first: &[SequenceId], others: &[SequenceId]) {
        if self.groups.is_single() {
            return;
        }
        for (i, &primary) in first.iter().enumerate() {
            let rest = others.iter().skip(i).step_by(first.len());
            let group_tables: Box<[SequenceId]> = std::iter::once(primary).chain(rest.copied()).collect();
            for &member in &group_tables {
                self.rows.at_mut(member).group_tables = Some(group_tables.clone());
            }
        }
    }

    /// A step that computes sequences waits for their encoders' loads, too.
    pub(super) fn await_encoders(&mut self, sequences: &[SequenceId]) {
        for &sequence in sequences {
            let row = self.rows.at(sequence);
            let (moving, last) = (row.moving, row.group_tables.as_deref().and_then(<[SequenceId]>::last).copied());
            if let Some(last) = last {
                self.rows.at_mut(last).moving &= moving;
            }
        }
    }

    /// Blocks of one group's table for a new sequence.
    pub(super) fn blocks_at_start(&self, group: Group, tokens: u32) -> usize {
        blocks_for(u64::from(tokens), self.block_size) - group.skipped(0, tokens, 0, self.block_size)
    }

    /// Opens the row of a sequence of `tokens` tokens in one group, of which the blocks in `table` hold the first `held`;
    /// the others are taken.
    pub(super) fn open_row(&mut self, group: u8, held: u32, tokens: u32, mut table: Vec<BlockId>) -> SequenceId {
        let kind = self.groups.get(group);
        let wanted = blocks_for(u64::from(tokens), self.block_size) - table.len();
        table.reserve(wanted + 1);
        let skipped = kind.skipped(held, tokens - held, table.len(), self.block_size);
        self.pass_over(skipped, &mut table);
        self.step().take(Tier::Device, wanted - skipped, false, &mut table);
        let null_prefix = table.iter().take_while(|&&block| self.is_null(block)).count();
        let sequence = self.rows.open(Tier::Device, table);
        if self.tiers.device().follows_places() {
            self.tiers.note_owner(sequence.row(), null_prefix, &self.rows.at(sequence).table[null_prefix..]);
        }
        let open = self.transfers.open();
        let row = self.rows.at_mut(sequence);
        row.len = tokens;
        row.written = open;
        row.group = group;
        row.null_prefix = u32::try_from(null_prefix).unwrap_or(u32::MAX);
        self.note_begun(sequence, held, tokens - held);
        sequence
    }

    /// Blocks that a row takes which shares the first `shared` tokens of another, and then has others.
    pub(super) fn blocks_behind_prefix(&self, member: SequenceId, shared: u32, tokens: u32) -> Result<usize> {
        let (row, size) = (self.rows.at(member), self.block_size);
        let (group, kept) = (self.groups.get(row.group), (shared / size) as usize);
        let needed = group.unneeded(shared, size)..kept;
        // A state in the middle of a row may be that of an earlier token than its block's last.
        let state = group == Group::Recurrent && shared > 0 && shared != row.len;
        if group == Group::CrossAttention {
            return Ok(0);
        }
        // A step writes a sequence's state at its end: too late for tokens of the same step that need it.
        if group == Group::Recurrent && shared > 0 && tokens > shared && row.written == self.transfers.open() {
            return Err(Error::Unwritten { sequence: member });
        }
        if state || needed.clone().any(|i| self.is_null(row.table[i])) {
            let must = format!("what sequence {member} still has in cache group {}", row.group);
            return Err(invalid("shared_tokens", shared, must));
        }
        let wanted = blocks_for(u64::from(tokens), size) - kept;
        let skipped = group.skipped(shared, tokens - shared, kept, size);
        let null_prefix = needed.start.max(row.null_prefix as usize).min(kept);
        self.require_nulls([null_prefix, skipped].into_iter())?;
        Ok(wanted - skipped)
    }

    pub(super) fn fork_row_prefix(&mut self, member: SequenceId, shared: u32, tokens: u32) -> SequenceId {
        let parent = self.rows.at(member).clone();
        let group = self.groups.get(parent.group);
        if group == Group::CrossAttention {
            let mut child = Vec::with_capacity(1);
            self.fork_row(member, 1, &mut child);
            return child[0];
        }
        let kept = (shared / self.block_size) as usize;
        let settled = self.transfers.is_settled(parent.ticket);
        let null_prefix =
            if settled { group.unneeded(shared, self.block_size) } else { parent.null_prefix as usize }.min(kept);
        let mut table = Vec::with_capacity(kept);
        self.pass_over(null_prefix, &mut table);
        table.extend_from_slice(&parent.table[null_prefix..kept]);
        for &block in &table[null_prefix..] {
            self.tiers.share((Tier::Device, block), 1);
        }
        let child = self.open_row(parent.group, shared, tokens, table);
        let open = self.transfers.open();
        let row = self.rows.at_mut(child);
        let null_prefix = row.null_prefix;
        inherit(row, &parent, tokens, open);
        row.null_prefix = null_prefix;
        self.rows.at_mut(member).writable = 0;
        child
    }

    /// What does not hold of the rows of one sequence, seen from one of them.
    pub(crate) fn check_group_tables(&self, sequence: SequenceId, row: &Row) -> std::result::Result<(), String> {
        let group = self.groups.all().get(usize::from(row.group));
        let Some(&group) = group else { return Err(format!("sequence {sequence} is of cache group {}", row.group)) };
        let size = self.block_size;
        let needed = group.unneeded(row.len, size)..blocks_for(u64::from(row.len), size);
        let (null_prefix, table) = row.table.split_at(row.null_prefix as usize);
        if null_prefix.iter().any(|&block| !self.is_null(block)) || needed.clone().any(|i| self.is_null(row.table[i])) {
            return Err(format!("sequence {sequence} has {null_prefix:?} and {table:?}, needs entries {needed:?}"));
        }
        let Some(group_tables) = &row.group_tables else {
            return if self.groups.is_single() { Ok(()) } else { Err(format!("sequence {sequence} has one group")) };
        };
        let relative = |(number, &id): (u8, &SequenceId)| {
            let Ok(other) = self.rows.get(id) else { return false };
            let grown = self.groups.growing().len() > usize::from(number.max(row.group));
            other.group_tables.as_ref() == Some(group_tables)
                && other.group == number
                && (other.tier, other.lost) == (row.tier, row.lost)
                && (!grown || other.len == row.len)
        };
        let whole = group_tables.len() == self.groups.all().len() && (0u8..).zip(group_tables.iter()).all(relative);
        if whole { Ok(()) } else { Err(format!("the rows of sequence {sequence} are not alike")) }
    }

    /// Fails unless so many null entries can be appended to each of some tables.
    pub(super) fn require_nulls(&self, counts: impl Iterator<Item = usize>) -> Result<()> {
        if !self.groups.slide() {
            return Ok(());
        }
        let sum = |(longest, all): (usize, usize), count| (longest.max(count), all.saturating_add(count));
        let (longest, all) = counts.fold((0, 0), sum);
        let room = (u32::MAX - self.tiers.device().refs(NULL_BLOCK)) as usize;
        if longest > MAX_PASSED || all > room {
            let must = format!("at most {MAX_PASSED} for one block table, and {room} in all");
            return Err(invalid("number of blocks passed over", all as i128, must));
        }
        memory::require_items::<BlockId>(all)
    }

    /// Fails unless there is memory for so many forks of a sequence, whose rows are given.
    pub(super) fn require_forks(&self, members: &[SequenceId], count: u32) -> Result<()> {
        /// What the system keeps for itself of each of a row's allocations, and a handle.
        const OVERHEAD: usize = 64;
        let (mut bytes, mut nulls) = (0, 0);
        for &member in members {
            let row = self.rows.at(member);
            let keys = row.keys.as_ref().map_or(0, |keys| {
                size_of::<RowKeys>() + size_of_val(&*keys.keys) + size_of_val(&*keys.pending) + OVERHEAD
            });
            bytes += size_of_val(&*row.table) + keys + OVERHEAD;
            if self.groups.slide() {
                nulls += row.table.iter().filter(|&&block| self.is_null(block)).count();
            }
        }
        memory::require(bytes.saturating_mul(count as usize))?;
        self.require_nulls(std::iter::repeat_n(nulls, count as usize))
    }

    /// Appends null blocks to a table.
    pub(super) fn pass_over(&mut self, count: usize, table: &mut Vec<BlockId>) {
        if count > 0 {
            self.tiers.share((Tier::Device, NULL_BLOCK), u32::try_from(count).unwrap_or(u32::MAX));
            table.resize(table.len() + count, NULL_BLOCK);
        }
    }

    /// Appends null blocks to a row.
    pub(super) fn skip(&mut self, sequence: SequenceId, count: usize) {
        self.tiers.share((Tier::Device, NULL_BLOCK), u32::try_from(count).unwrap_or(u32::MAX));
        let row = self.rows.at_mut(sequence);
        row.table.extend_with(|table| table.resize(table.len() + count, NULL_BLOCK));
    }

    /// Whether a row holds states.
    #[inline]
    pub(super) fn is_recurrent(&self, sequence: SequenceId) -> bool {
        self.groups.slide() && self.groups.get(self.rows.at(sequence).group) == Group::Recurrent
    }

    /// Notes whether `count` tokens, put into a row of a recurrent group after the first `len`, begin a block.
    #[inline]
    pub(super) fn note_begun(&mut self, sequence: SequenceId, len: u32, count: u32) {
        let end = u64::from(len) + u64::from(count);
        if self.is_recurrent(sequence)
            && count > 0
            && (end - 1) / u64::from(self.block_size) >= u64::from(len.div_ceil(self.block_size))
        {
            self.begun.insert(sequence);
        }
    }

    /// Entries of a row that are left without a state when `count` tokens are put in.
    #[inline]
    pub(super) fn passed_over(&self, sequence: SequenceId, count: u32) -> Range<usize> {
        if !self.is_recurrent(sequence) {
            return 0..0;
        }
        let (row, begun) = (self.rows.at(sequence), self.begun.contains(&sequence));
        Group::Recurrent.passed_over(row.len, count, row.table.len(), begun, self.block_size)
    }

    /// Gives up the blocks of a row that are left without a state when `count` tokens are put in.
    pub(super) fn pass(&mut self, sequence: SequenceId, count: u32) {
        let (open, size) = (self.transfers.open(), u64::from(self.block_size));
        let passed = self.passed_over(sequence, count);
        let begun = self.begun.contains(&sequence);
        let row = self.rows.at_mut(sequence);
        let len = u64::from(row.len);
        let leaves = len > 0 && (len + u64::from(count) - 1) / size > (len - 1) / size;
        // A state that an earlier step wrote in the middle of a block stays there, and is not that of its last token.
        if leaves && !begun && (len % size > 0 || row.written == open) {
            row.published = row.published.max(row.len.div_ceil(self.block_size));
        }
        if !passed.is_empty() {
            let gone = row.table.blank(passed.start, passed.end, NULL_BLOCK);
            self.tiers.share((Tier::Device, NULL_BLOCK), u32::try_from(gone.len()).unwrap_or(u32::MAX));
            self.tiers.release_all(Tier::Device, &gone);
        }
    }

    /// Whether a table's entry is empty.
    #[inline]
    pub(super) fn is_null(&self, block: BlockId) -> bool {
        block == NULL_BLOCK && self.groups.slide()
    }
}
