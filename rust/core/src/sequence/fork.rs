//! Forks: sequences that share blocks of another.

use super::table::{Row, RowKeys};
use super::{Sequences, blocks_for, refuse_lost};
use crate::error::{Error, Result, invalid};
use crate::group::Group;
use crate::id::{SequenceId, TicketId, Tier};
use crate::memory;
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
        self.require_forks(step.view(), &members, count)?;
        if row.keys.is_some() {
            self.rows.require_followed((count as usize).saturating_mul(members.len()))?;
        }
        let first = out.len();
        let mut others = Vec::new();
        for &member in &members {
            self.fork_row(step, member, count, if member == sequence { out } else { &mut others });
        }
        self.link_group_tables(&out[first..], &others);
        Ok(())
    }

    fn fork_row(&mut self, step: &mut OpenStep<'_>, sequence: SequenceId, count: u32, out: &mut Vec<SequenceId>) {
        let begun = self.begun.contains(&sequence);
        let row = self.rows.at_mut(sequence);
        row.writable = 0;
        let parent = row.clone();
        for &block in &*parent.table {
            step.tiers.share((parent.tier, block), count);
        }
        for _ in 0..count {
            let child = self.rows.open(parent.tier, parent.table.to_vec());
            let row = self.rows.at_mut(child);
            inherit(row, &parent, parent.len, parent.written);
            (row.published, row.priority) = (parent.published, parent.priority);
            self.rows.follow_as(child, sequence);
            self.begun.extend(begun.then_some(child));
            out.push(child);
        }
    }

    pub(crate) fn fork_prefix(
        &mut self,
        step: &mut OpenStep<'_>,
        sequence: SequenceId,
        shared: u32,
        tokens: u32,
    ) -> Result<SequenceId> {
        let mut all = Vec::new();
        let members = self.members(&[sequence], &mut all)?.to_vec();
        self.rows.require(members.len())?;
        let row = self.readable(step.view(), sequence)?;
        if shared % self.block_size != 0 || shared > row.len.min(tokens) {
            let must = format!("a multiple of {} and at most {}", self.block_size, row.len.min(tokens));
            return Err(invalid("shared_tokens", shared, must));
        }
        let mut wanted = 0;
        for &member in &members {
            wanted += self.blocks_behind_prefix(step.view(), member, shared, tokens)?;
        }
        step.view().require(Request::device(wanted), Vec::new)?;
        self.note_reads(step.transfers, members.iter().copied());
        let children: Vec<_> =
            members.iter().map(|&member| self.fork_row_prefix(step, member, shared, tokens)).collect();
        self.link_group_tables(&children[..1], &children[1..]);
        Ok(children[0])
    }

    /// Number of new blocks for a row that shares the first `shared` tokens of another and then diverges.
    pub(super) fn blocks_behind_prefix(
        &self,
        view: View<'_>,
        member: SequenceId,
        shared: u32,
        tokens: u32,
    ) -> Result<usize> {
        let (row, size) = (self.rows.at(member), self.block_size);
        let (group, kept) = (self.groups.get(row.group), (shared / size) as usize);
        let needed = group.unneeded(shared, size)..kept;
        // A state in the middle of a row may belong to a token before its block's last.
        let state = group == Group::Recurrent && shared > 0 && shared != row.len;
        if group == Group::CrossAttention {
            return Ok(0);
        }
        // A step writes a sequence's state at its end, too late for tokens of the same step that need it.
        if group == Group::Recurrent && shared > 0 && tokens > shared && row.written == view.transfers.open() {
            return Err(Error::Unwritten { sequence: member });
        }
        if state || needed.clone().any(|i| self.is_null(row.table[i])) {
            let must = format!("what sequence {member} still has in cache group {}", row.group);
            return Err(invalid("shared_tokens", shared, must));
        }
        let wanted = blocks_for(u64::from(tokens), size) - kept;
        let skipped = group.skipped(shared, tokens - shared, kept, size);
        let null_prefix = needed.start.max(row.null_prefix as usize).min(kept);
        self.require_nulls(view, [null_prefix, skipped].into_iter())?;
        Ok(wanted - skipped)
    }

    pub(super) fn fork_row_prefix(
        &mut self,
        step: &mut OpenStep<'_>,
        member: SequenceId,
        shared: u32,
        tokens: u32,
    ) -> SequenceId {
        let parent = self.rows.at(member).clone();
        let group = self.groups.get(parent.group);
        if group == Group::CrossAttention {
            let mut child = Vec::with_capacity(1);
            self.fork_row(step, member, 1, &mut child);
            return child[0];
        }
        let kept = (shared / self.block_size) as usize;
        let settled = step.transfers.is_settled(parent.ticket);
        let null_prefix =
            if settled { group.unneeded(shared, self.block_size) } else { parent.null_prefix as usize }.min(kept);
        let mut table = Vec::with_capacity(kept);
        Self::pass_over(step, null_prefix, &mut table);
        table.extend_from_slice(&parent.table[null_prefix..kept]);
        for &block in &table[null_prefix..] {
            step.tiers.share((Tier::Device, block), 1);
        }
        let child = self.open_row(step, parent.group, shared, tokens, table);
        let open = step.transfers.open();
        let row = self.rows.at_mut(child);
        let null_prefix = row.null_prefix;
        inherit(row, &parent, tokens, open);
        row.null_prefix = null_prefix;
        self.rows.at_mut(member).writable = 0;
        child
    }

    /// Fails unless there is memory for `count` forks of a sequence, whose rows are given.
    pub(super) fn require_forks(&self, view: View<'_>, members: &[SequenceId], count: u32) -> Result<()> {
        /// Allocator overhead of a row's allocations, plus a handle.
        const OVERHEAD: usize = 64;
        let (mut bytes, mut nulls) = (0, 0);
        for &member in members {
            let row = self.rows.at(member);
            let keys = row.keys.as_ref().map_or(0, |keys| size_of::<RowKeys>() + size_of_val(&*keys.keys) + OVERHEAD);
            bytes += size_of_val(&*row.table) + keys + OVERHEAD;
            if self.groups.has_nulls() {
                nulls += row.table.iter().filter(|&&block| self.is_null(block)).count();
            }
        }
        memory::require(bytes.saturating_mul(count as usize))?;
        self.require_nulls(view, std::iter::repeat_n(nulls, count as usize))
    }
}

/// A child's bytes are in flight as long as its parent's.
fn inherit(child: &mut Row, parent: &Row, len: u32, written: TicketId) {
    child.len = len;
    child.written = written;
    child.ticket = parent.ticket;
    child.moving = parent.moving;
    child.group = parent.group;
    child.null_prefix = parent.null_prefix;
}
