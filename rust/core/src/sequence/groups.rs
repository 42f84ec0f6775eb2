//! Sequences with a block table in each cache group.

use super::Sequences;
use super::admission::Run;
use super::table::{Row, TableId, group_by_group};
use crate::error::{Result, invalid};
use crate::fit::{AllocStatus, Fit};
use crate::group::{Group, MAX_PASSED, NULL_BLOCK};
use crate::id::{BlockId, SequenceId, Tier};
use crate::memory;
use crate::page::PerClass;
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
    /// Whether there is one group, of full attention: each block is found by its own key, and serves by itself.
    pub(crate) fn is_full_attention(&self) -> bool {
        self.groups.is_single() && self.groups.is_even() && !self.groups.has_nulls() && self.groups.ahead() == 0
    }

    /// Whether blocks of all groups hold equally many tokens.
    pub(crate) fn groups_are_even(&self) -> bool {
        self.groups.is_even()
    }

    /// Bytes of a block of each page class.
    pub(crate) fn class_bytes(&self) -> &[u64] {
        self.groups.class_bytes()
    }

    /// Token slots in the smallest blocks.
    pub(crate) fn least_tokens(&self) -> u32 {
        self.groups.least_tokens()
    }

    /// The page class of a group's blocks, and token slots and bytes of one of them.
    pub(crate) fn page(&self, group: usize) -> Option<(usize, u32, u64)> {
        let group = u8::try_from(group).ok().filter(|&group| usize::from(group) < self.groups.all().len())?;
        let class = self.groups.class(group);
        Some((class, self.groups.tokens(group), self.groups.class_bytes()[class]))
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
        let encoder = (0..).zip(self.groups.all()).find(|(_, group)| **group == Group::CrossAttention);
        let encoder = encoder.map_or(PerClass::default(), |(number, _)| {
            self.groups.blocks(number, self.blocks_at_start(number, encoder_tokens))
        });
        let wanted = self.peak(run, &[], |_, _| 0) + encoder;
        let passes = |group: &Group| group.skipped(0, chunk.min(tokens), 0, self.block_size) > MAX_PASSED;
        let fit = view.fit(Request::device(wanted), view.tiers.device().kept(self.watermark), Vec::new);
        if self.groups.growing().iter().any(passes) { Fit { status: AllocStatus::Never, ..fit } } else { fit }
    }

    /// The tables of sequences, group by group.
    pub(super) fn tables_of<'a>(&self, sequences: &'a [SequenceId]) -> impl Iterator<Item = TableId> + use<'a> {
        group_by_group(self.groups.all().len(), sequences)
    }

    /// Like [`Sequences::tables_of`], for the growing groups.
    pub(super) fn growing_tables_of<'a>(&self, sequences: &'a [SequenceId]) -> impl Iterator<Item = TableId> + use<'a> {
        group_by_group(self.groups.growing().len(), sequences)
    }

    pub(crate) fn table_of(&self, sequence: SequenceId, group: usize) -> Result<TableId> {
        let groups = self.groups.all().len();
        let must = || invalid("group", group as i128, format!("below {groups}"));
        let group = u8::try_from(group).ok().filter(|&group| usize::from(group) < groups).ok_or_else(must)?;
        self.rows.get(sequence)?;
        Ok(TableId { sequence, group })
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

    /// Appends null blocks to a table in use.
    pub(super) fn skip(&mut self, step: &mut OpenStep<'_>, id: TableId, count: usize) {
        step.tiers.share((Tier::Device, NULL_BLOCK), u32::try_from(count).unwrap_or(u32::MAX));
        let row = self.rows.table_mut(id);
        row.table.extend_with(|table| table.resize(table.len() + count, NULL_BLOCK));
    }

    /// Whether a table holds states.
    #[inline]
    pub(super) fn is_recurrent(&self, id: TableId) -> bool {
        self.groups.has_nulls() && self.groups.get(id.group) == Group::Recurrent
    }

    /// Records whether `count` tokens, added to a row with recurrent groups after the first `len`, begin a block.
    #[inline]
    pub(super) fn note_begun(&mut self, sequence: SequenceId, len: u32, count: u32) {
        let end = u64::from(len) + u64::from(count);
        if self.groups.has_states()
            && count > 0
            && (end - 1) / u64::from(self.block_size) >= u64::from(len.div_ceil(self.block_size))
        {
            self.begun.insert(sequence);
        }
    }

    /// Entries of a table left without a state when `count` tokens are added.
    #[inline]
    pub(super) fn passed_over(&self, id: TableId, count: u32) -> Range<usize> {
        if !self.is_recurrent(id) {
            return 0..0;
        }
        let (row, begun) = (self.rows.at(id.sequence), self.begun.contains(id.sequence));
        Group::Recurrent.passed_over(row.len, count, self.entries(id).len(), begun, self.block_size)
    }

    /// Frees the blocks of a table left without a state when `count` tokens are added.
    pub(super) fn pass(&mut self, step: &mut OpenStep<'_>, id: TableId, count: u32) {
        let (open, size) = (step.transfers.open(), u64::from(self.block_size));
        let passed = self.passed_over(id, count);
        let begun = self.begun.contains(id.sequence);
        let Row { len: tokens, written, .. } = *self.rows.at(id.sequence);
        let row = self.rows.table_mut(id);
        let len = u64::from(tokens);
        let leaves = len > 0 && (len + u64::from(count) - 1) / size > (len - 1) / size;
        // A state that an earlier step wrote in the middle of a block stays there; it is not the state of the block's
        // last token.
        if leaves && !begun && (len % size > 0 || written == open) {
            row.published = row.published.max(tokens.div_ceil(self.block_size));
        }
        if !passed.is_empty() {
            let gone = &mut self.gone;
            row.table.blank(passed.start, passed.end, NULL_BLOCK, gone);
            step.tiers.share((Tier::Device, NULL_BLOCK), u32::try_from(gone.len()).unwrap_or(u32::MAX));
            step.tiers.release_all(Tier::Device, gone);
        }
    }

    /// Whether a table's entry is empty.
    #[inline]
    pub(crate) fn is_null(&self, block: BlockId) -> bool {
        block == NULL_BLOCK && self.groups.has_nulls()
    }
}
