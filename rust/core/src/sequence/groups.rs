//! Sequences with a block table in each cache group. Each table is a separate row; the first group's row represents the
//! sequence, and callers' handles refer to it.

use super::admission::Run;
use super::{Counts, Sequences, blocks_for};
use crate::error::{Error, Result, invalid};
use crate::fit::{AllocStatus, Fit};
use crate::group::{Group, MAX_PASSED, NULL_BLOCK};
use crate::id::{BlockId, SequenceId, Tier};
use crate::memory;
use crate::transfer::{OpenStep, Request, View};
use std::ops::Range;

/// What a new sequence will need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Its tokens.
    pub tokens: u32,
    /// Slots beyond them.
    pub lookahead: u32,
    /// Tokens of its encoder, for a cross attention group.
    pub encoder_tokens: u32,
    /// Maximum tokens added at a time, if the prompt is computed in chunks; 0 for all at once.
    pub chunk: u32,
    /// Tokens that follow the prompt one at a time.
    pub answer: u32,
}

impl Sequences {
    /// Whether prompts look for copies on the host: not with several groups or a window.
    pub(crate) fn finds_on_host(&self) -> bool {
        self.groups.is_single() && !self.groups.has_nulls()
    }

    pub(crate) fn groups(&self) -> &[Group] {
        self.groups.all()
    }

    pub(crate) fn growing_groups(&self) -> usize {
        self.groups.growing().len()
    }

    pub(crate) fn can_admit(&self, view: View<'_>, demand: &Demand) -> Fit {
        let Demand { tokens, lookahead, encoder_tokens, chunk, answer } = *demand;
        let chunk = if chunk == 0 { tokens } else { chunk };
        let run = Run { start: 0, prompt: tokens, answer, chunk, lookahead };
        let encoder = if self.groups.cross() { blocks_for(u64::from(encoder_tokens), self.block_size) } else { 0 };
        let wanted = self.peak(run, &[], |_, _| 0).saturating_add(encoder);
        let passes = |group: &Group| group.skipped(0, chunk.min(tokens), 0, self.block_size) > MAX_PASSED;
        let fit = view.fit(Request::device(wanted), self.watermark.blocks(), Vec::new);
        if self.groups.growing().iter().any(passes) { Fit { status: AllocStatus::Never, ..fit } } else { fit }
    }

    /// The rows of all tables of sequences, group by group; with a single group, the sequences themselves.
    pub(crate) fn members<'a>(
        &self,
        sequences: &'a [SequenceId],
        all: &'a mut Vec<SequenceId>,
    ) -> Result<&'a [SequenceId]> {
        self.rows_of(sequences, self.groups.all().len(), all)
    }

    /// Like [`Manager::members`], for the growing groups.
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

    /// The rows of one sequence, with several groups.
    ///
    /// # Errors
    /// The sequence is unknown, or the handle belongs to another group's row.
    pub(super) fn group_tables(&self, sequence: SequenceId) -> Result<&[SequenceId]> {
        let group_tables = self.rows.get(sequence)?.group_tables.as_deref();
        group_tables.filter(|group_tables| group_tables[0] == sequence).ok_or(Error::UnknownSequence { sequence })
    }

    pub(crate) fn table_of(&self, sequence: SequenceId, group: usize) -> Result<SequenceId> {
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

    /// A step that computes sequences also waits for their encoders' loads.
    pub(super) fn await_encoders(&mut self, sequences: &[SequenceId]) {
        for &sequence in sequences {
            let row = self.rows.at(sequence);
            let (moving, last) = (row.moving, row.group_tables.as_deref().and_then(<[SequenceId]>::last).copied());
            if let Some(last) = last {
                self.rows.at_mut(last).moving &= moving;
            }
        }
    }

    /// Fails unless these counts of null entries can be appended to their tables.
    pub(super) fn require_nulls(&self, view: View<'_>, counts: impl Iterator<Item = usize>) -> Result<()> {
        if !self.groups.has_nulls() {
            return Ok(());
        }
        let sum = |(longest, all): (usize, usize), count| (longest.max(count), all.saturating_add(count));
        let (longest, all) = counts.fold((0, 0), sum);
        let room = (u32::MAX - view.tiers.device().refs(NULL_BLOCK)) as usize;
        if longest > MAX_PASSED || all > room {
            let must = format!("at most {MAX_PASSED} for one block table, and {room} in all");
            return Err(invalid("number of blocks passed over", all as i128, must));
        }
        memory::require_items::<BlockId>(all)
    }

    /// Appends null blocks to a table.
    pub(super) fn pass_over(step: &mut OpenStep<'_>, count: usize, table: &mut Vec<BlockId>) {
        if count > 0 {
            step.tiers.share((Tier::Device, NULL_BLOCK), u32::try_from(count).unwrap_or(u32::MAX));
            table.resize(table.len() + count, NULL_BLOCK);
        }
    }

    /// Appends null blocks to a row.
    pub(super) fn skip(&mut self, step: &mut OpenStep<'_>, sequence: SequenceId, count: usize) {
        step.tiers.share((Tier::Device, NULL_BLOCK), u32::try_from(count).unwrap_or(u32::MAX));
        let row = self.rows.at_mut(sequence);
        row.table.extend_with(|table| table.resize(table.len() + count, NULL_BLOCK));
    }

    /// Whether a row holds states.
    #[inline]
    pub(super) fn is_recurrent(&self, sequence: SequenceId) -> bool {
        self.groups.has_nulls() && self.groups.get(self.rows.at(sequence).group) == Group::Recurrent
    }

    /// Records whether `count` tokens, added to a row of a recurrent group after the first `len`, begin a block.
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

    /// Entries of a row left without a state when `count` tokens are added.
    #[inline]
    pub(super) fn passed_over(&self, sequence: SequenceId, count: u32) -> Range<usize> {
        if !self.is_recurrent(sequence) {
            return 0..0;
        }
        let (row, begun) = (self.rows.at(sequence), self.begun.contains(&sequence));
        Group::Recurrent.passed_over(row.len, count, row.table.len(), begun, self.block_size)
    }

    /// Frees the blocks of a row left without a state when `count` tokens are added.
    pub(super) fn pass(&mut self, step: &mut OpenStep<'_>, sequence: SequenceId, count: u32) {
        let (open, size) = (step.transfers.open(), u64::from(self.block_size));
        let passed = self.passed_over(sequence, count);
        let begun = self.begun.contains(&sequence);
        let row = self.rows.at_mut(sequence);
        let len = u64::from(row.len);
        let leaves = len > 0 && (len + u64::from(count) - 1) / size > (len - 1) / size;
        // A state that an earlier step wrote in the middle of a block stays there; it is not the state of the block's
        // last token.
        if leaves && !begun && (len % size > 0 || row.written == open) {
            row.published = row.published.max(row.len.div_ceil(self.block_size));
        }
        if !passed.is_empty() {
            let gone = row.table.blank(passed.start, passed.end, NULL_BLOCK);
            step.tiers.share((Tier::Device, NULL_BLOCK), u32::try_from(gone.len()).unwrap_or(u32::MAX));
            step.tiers.release_all(Tier::Device, &gone);
        }
    }

    /// Whether a table's entry is empty.
    #[inline]
    pub(crate) fn is_null(&self, block: BlockId) -> bool {
        block == NULL_BLOCK && self.groups.has_nulls()
    }
}
