//! Forks: sequences that share blocks of another.

use super::table::{GroupTable, Row, RowKeys, TableId};
use super::{Sequences, blocks_for, refuse_lost};
use crate::error::{Error, Result, invalid};
use crate::group::Group;
use crate::id::{SequenceId, Tier};
use crate::memory;
use crate::page::PerClass;
use crate::transfer::{OpenStep, Request, View};

/// Maximum number of block table entries written by one fork.
const MAX_FORKED: usize = 1 << 30;

impl Sequences {
    pub(crate) fn fork(
        &mut self,
        step: &mut OpenStep<'_>,
        sequence: SequenceId,
        count: u32,
        out: &mut Vec<SequenceId>,
    ) -> Result<()> {
        self.rows.require(count as usize)?;
        let row = self.rows.get(sequence)?;
        refuse_lost(sequence, row)?;
        let entries = self.rows.tables_of(sequence).map(|table| table.table.len()).sum::<usize>();
        let entries = entries.saturating_mul(count as usize);
        if entries > MAX_FORKED {
            let must = format!("at most {MAX_FORKED} block table entries, not {entries}");
            return Err(invalid("count", count, must));
        }
        self.refuse_unwritten_drafts(step.view(), sequence)?;
        self.require_forks(step.view(), sequence, count)?;
        if self.rows.at(sequence).keys.is_some() {
            self.rows.require_followed(count as usize)?;
        }
        let first = out.len();
        self.fork_row(sequence, count, out);
        for id in self.tables_of(&[sequence]) {
            self.fork_table(step, id, &out[first..]);
        }
        Ok(())
    }

    /// Opens rows with all that a sequence has, except its tables.
    fn fork_row(&mut self, sequence: SequenceId, count: u32, out: &mut Vec<SequenceId>) {
        let (begun, awaiting) = (self.begun.contains(sequence), self.awaiting.contains(sequence));
        for _ in 0..count {
            let child = self.open_child(sequence);
            self.rows.follow_as(child, sequence);
            if begun {
                self.begun.insert(child);
            }
            if awaiting {
                self.awaiting.insert(child);
            }
            out.push(child);
        }
    }

    /// Opens a row for a child of a sequence, whose bytes are in flight as long as its parent's.
    fn open_child(&mut self, sequence: SequenceId) -> SequenceId {
        let parent = self.rows.at_mut(sequence);
        parent.writable = 0;
        let Row { len, written, ticket, moving, priority, encoder_written, encoder_tokens, tier, .. } = *parent;
        let child = self.rows.open(tier);
        let row = self.rows.at_mut(child);
        (row.len, row.written, row.ticket, row.moving) = (len, written, ticket, moving);
        (row.priority, row.encoder_written, row.encoder_tokens) = (priority, encoder_written, encoder_tokens);
        child
    }

    /// Begins the tables of forks with the blocks of their parent's.
    fn fork_table(&mut self, step: &mut OpenStep<'_>, id: TableId, children: &[SequenceId]) {
        let (tier, parent) = (self.rows.at(id.sequence).tier, self.rows.table(id));
        let (table, null_prefix, published) = (self.entries(id).to_vec(), parent.null_prefix, parent.published);
        let count = u32::try_from(children.len()).unwrap_or(u32::MAX);
        for &block in &table {
            step.tiers.share((tier, block), count);
        }
        // The last fork takes the entries themselves.
        for (&sequence, table) in children.iter().zip(std::iter::repeat_n(table, children.len())) {
            let row = self.rows.open_table(TableId { sequence, ..id }, table);
            (row.null_prefix, row.published) = (null_prefix, published);
        }
    }

    pub(crate) fn fork_prefix(
        &mut self,
        step: &mut OpenStep<'_>,
        sequence: SequenceId,
        shared: u32,
        tokens: u32,
    ) -> Result<SequenceId> {
        self.rows.require(1)?;
        let row = self.readable(step.view(), sequence)?;
        if shared % self.block_size != 0 || shared > row.len.min(tokens) {
            let must = format!("a multiple of {} and at most {}", self.block_size, row.len.min(tokens));
            return Err(invalid("shared_tokens", shared, must));
        }
        if shared > 0 && self.groups.ahead() > 0 {
            let must =
                "0 with a drafter's group, which has an entry of the shared tokens and the token after them".to_owned();
            return Err(invalid("shared_tokens", shared, must));
        }
        self.refuse_unwritten_drafts(step.view(), sequence)?;
        let mut wanted = PerClass::default();
        for id in self.tables_of(&[sequence]) {
            let blocks = self.blocks_behind_prefix(step.view(), id, shared, tokens)?;
            wanted += self.groups.blocks(id.group, blocks);
        }
        step.view().require(Request::device(wanted), Vec::new)?;
        step.prepare(Tier::Device, wanted, true);
        self.note_reads(step.transfers, std::iter::once(sequence));
        let awaits = shared > 0 && self.groups.has_states() && self.rows.at(sequence).written == step.transfers.open();
        let child = self.open_child(sequence);
        if awaits {
            self.awaiting.insert(child);
        }
        let row = self.rows.at_mut(child);
        (row.len, row.written, row.priority) = (tokens, step.transfers.open(), 0);
        self.note_begun(child, shared, tokens - shared);
        for id in self.tables_of(&[sequence]) {
            if self.groups.get(id.group) == Group::CrossAttention {
                self.fork_table(step, id, &[child]);
            } else {
                self.fork_table_prefix(step, id, child, shared, tokens);
            }
        }
        Ok(child)
    }

    /// Number of new blocks for a table that shares the first `shared` tokens of another and then diverges.
    pub(super) fn blocks_behind_prefix(&self, view: View<'_>, id: TableId, shared: u32, tokens: u32) -> Result<usize> {
        let TableId { sequence, group: number } = id;
        let (row, table, size) = (self.rows.at(sequence), self.rows.table(id), self.groups.tokens(number));
        let (group, kept) = (self.groups.get(number), (shared / size) as usize);
        let needed = group.needs(shared, size);
        // A state in the middle of a row may belong to a token before its block's last.
        let state = group == Group::Recurrent && shared > 0 && shared != row.len;
        if group == Group::CrossAttention {
            return Ok(0);
        }
        // A step writes a sequence's state at its end, too late for tokens of the same step that need it.
        if group == Group::Recurrent && shared > 0 && tokens > shared && row.written == view.transfers.open() {
            return Err(Error::Unwritten { sequence });
        }
        if state || needed.clone().any(|i| self.is_null(table.table[i])) {
            let must = format!("what sequence {sequence} still has in cache group {number}");
            return Err(invalid("shared_tokens", shared, must));
        }
        let wanted = blocks_for(u64::from(tokens), size) - kept;
        let skipped = group.skipped(shared, tokens - shared, kept, size);
        let null_prefix = needed.start.max(table.null_prefix as usize).min(kept);
        self.require_nulls(view, [null_prefix, skipped].into_iter())?;
        Ok(wanted - skipped)
    }

    fn fork_table_prefix(&mut self, step: &mut OpenStep<'_>, id: TableId, child: SequenceId, shared: u32, tokens: u32) {
        let (group, parent) = (self.groups.get(id.group), self.rows.table(id));
        let size = self.groups.tokens(id.group);
        let kept = (shared / size) as usize;
        let settled = step.transfers.is_settled(self.rows.at(id.sequence).ticket);
        let null_prefix = if settled { group.needs(shared, size).start } else { parent.null_prefix as usize }.min(kept);
        let mut table = Vec::with_capacity(kept);
        Self::pass_over(step, null_prefix, &mut table);
        table.extend_from_slice(&parent.table[null_prefix..kept]);
        for &block in &table[null_prefix..] {
            step.tiers.share((Tier::Device, block), 1);
        }
        self.open_table(step, TableId { sequence: child, ..id }, shared, tokens, table);
    }

    /// Fails unless there is memory for `count` forks of a sequence.
    fn require_forks(&self, view: View<'_>, sequence: SequenceId, count: u32) -> Result<()> {
        /// Allocator overhead of a row's allocations, plus a handle.
        const OVERHEAD: usize = 64;
        let keys = self.rows.at(sequence).keys.as_ref();
        let keys = keys.map_or(0, |keys| {
            let ahead = size_of_val(&*keys.ahead) + size_of_val(&*keys.following);
            size_of::<RowKeys>() + size_of_val(&*keys.keys) + ahead + OVERHEAD
        });
        let (mut bytes, mut nulls) = (keys, 0);
        for GroupTable { table, .. } in self.rows.tables_of(sequence) {
            bytes += size_of_val(&**table) + OVERHEAD;
            if self.groups.has_nulls() {
                nulls += table.iter().filter(|&&block| self.is_null(block)).count();
            }
        }
        memory::require(bytes.saturating_mul(count as usize))?;
        self.require_nulls(view, std::iter::repeat_n(nulls, count as usize))
    }
}
