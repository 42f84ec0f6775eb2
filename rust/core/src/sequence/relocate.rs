//! Moving whole sequences between tiers: swap out and swap in. Sequences that share blocks keep sharing them.

use super::append::{copied, end_of};
use super::{Sequences, TableId, blocks_for, refuse_lost, require_tier};
use crate::block::{Block, LeaseKind, MAX_LEASES};
use crate::decision::Kind;
use crate::error::{Error, Result};
use crate::fit::{AllocStatus, Fit};
use crate::group::Group;
use crate::id::{BlockId, SequenceId, TicketId, Tier};
use crate::page::{MAX_CLASSES, PerClass};
use crate::transfer::{OpenStep, Request, View};

/// Source and target of a move, and their consequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Route {
    from: Tier,
    to: Tier,
    kind: Kind,
    /// Kind of lease on source blocks: device blocks are read before the step's writes.
    reads: LeaseKind,
    /// Whether a target block may be one that device work of the same step still reads.
    takes_overlappable: bool,
}

impl Route {
    fn new(from: Tier, to: Tier) -> Self {
        let kind = if from < to { Kind::SwapOut } else { Kind::SwapIn };
        let reads = if from == Tier::Device { LeaseKind::OverlappableRead } else { LeaseKind::Read };
        Self { from, to, kind, reads, takes_overlappable: (from, to) == (Tier::Host, Tier::Device) }
    }
}

/// What a batch takes of its target tier.
struct Plan {
    request: Request,
    /// Blocks to be filled.
    new: PerClass,
    /// Unused blocks there that already hold the same bytes.
    found: Vec<BlockId>,
}

impl Sequences {
    pub(crate) fn can_swap_out(&mut self, view: View<'_>, sequences: &[SequenceId], to: Tier) -> Result<Fit> {
        let route = self.route(sequences, to, true);
        self.room(view, sequences, to, route)
    }

    pub(crate) fn can_swap_in(
        &mut self,
        view: View<'_>,
        sequences: &[SequenceId],
        to: Tier,
        lookahead: u32,
    ) -> Result<Fit> {
        let route = match self.route(sequences, to, false) {
            Ok(route) if to == Tier::Device => route,
            route => return self.room(view, sequences, to, route),
        };
        let planned = self.plan(view, sequences, route);
        let appended = planned.and_then(|plan| Ok((self.next_tokens(view, sequences, route, lookahead)?, plan)));
        let (next, plan) = match appended {
            Ok(planned) => planned,
            Err(error) => return Self::unmovable(view, to, error),
        };
        let moved = view.fit(plan.request, PerClass::default(), || plan.found.clone());
        let fit = self.fit_with_next(view, route, &plan, next);
        let is_short = fit.status == AllocStatus::Ok && moved.status != AllocStatus::Ok;
        Ok(if is_short {
            Fit { status: AllocStatus::Later, free: moved.free, free_bytes: moved.free_bytes, ..fit }
        } else {
            fit
        })
    }

    /// Whether rows that return to the device and what their next tokens take, as [`Sequences::next_tokens`] says, fit.
    fn fit_with_next(&self, view: View<'_>, route: Route, plan: &Plan, [next, least]: [PerClass; 2]) -> Fit {
        let Plan { request, new, found } = plan;
        // New tokens may use blocks that device work still reads; loads from the external tier may not, and these take
        // the extents for both.
        let overlappable = route.takes_overlappable || view.tiers.device().num_classes() == 1;
        let blocks = *new + view.cost(route.to, found, overlappable) + next;
        let all = Request { blocks, least: request.least + least, overlappable, ..*request };
        view.fit(all, view.tiers.device().kept(self.watermark), || found.clone())
    }

    /// What returning rows have to find room for at once: their blocks and, if these fit, those of their next tokens. A
    /// block that is taken now must not lie in the only extent that another class could have for its next token.
    fn wanted(&self, view: View<'_>, sequences: &[SequenceId], route: Route, plan: &Plan) -> PerClass {
        if route.to != Tier::Device || view.tiers.device().num_classes() == 1 {
            return plan.new;
        }
        let next = self.next_tokens(view, sequences, route, 0).ok();
        let fitting = next.filter(|&next| self.fit_with_next(view, route, plan, next).status == AllocStatus::Ok);
        fitting.map_or(plan.new, |[next, _]| plan.new + next)
    }

    /// Source and target tier of a batch.
    fn route(&self, sequences: &[SequenceId], to: Tier, away: bool) -> Result<Route> {
        let Some(&sequence) = sequences.first() else {
            return Ok(if away { Route::new(Tier::Device, Tier::Host) } else { Route::new(Tier::Host, Tier::Device) });
        };
        let from = self.get(sequence)?.tier;
        let leads_there = if away { from < to } else { from > to };
        if leads_there {
            return Ok(Route::new(from, to));
        }
        let wanted = match (away, to) {
            (true, Tier::External) | (false, Tier::Device) => Tier::Host,
            (true, _) => Tier::Device,
            (false, _) => Tier::External,
        };
        Err(Error::WrongTier { sequence, wanted, found: from })
    }

    /// Whether sequences can move and the tier has room, ignoring the watermark.
    fn room(&mut self, view: View<'_>, sequences: &[SequenceId], to: Tier, route: Result<Route>) -> Result<Fit> {
        match route.and_then(|route| self.plan(view, sequences, route)) {
            Ok(Plan { request, found, .. }) => Ok(view.fit(request, PerClass::default(), || found)),
            Err(error) => Self::unmovable(view, to, error),
        }
    }

    /// The answer for sequences that cannot move now: if in flight, unwritten or leased too often, later; else never.
    fn unmovable(view: View<'_>, to: Tier, error: Error) -> Result<Fit> {
        let status = match error {
            Error::InFlight { .. }
            | Error::EarlierInFlight { .. }
            | Error::Unwritten { .. }
            | Error::TooManyLeases { .. } => AllocStatus::Later,
            Error::Lost { .. } | Error::WrongTier { .. } => AllocStatus::Never,
            error => return Err(error),
        };
        let pool = view.tiers.pool(to);
        let free_bytes = pool.available_bytes(PerClass::default(), false);
        let wanted = PerClass::default();
        Ok(Fit { status, blocks: 0, free: pool.free(), page_class: 0, wanted, bytes: 0, free_bytes })
    }

    /// After [`Sequences::plan`]: blocks that returning rows take for their next tokens, new ones and copies of shared
    /// ones, in addition to those moved; and how many of these an empty tier would need.
    fn next_tokens(
        &self,
        view: View<'_>,
        sequences: &[SequenceId],
        route: Route,
        lookahead: u32,
    ) -> Result<[PerClass; 2]> {
        let (mut new, mut partial) = (PerClass::default(), Vec::<BlockId>::new());
        for id in self.growing_tables_of(sequences) {
            let row = self.rows.at(id.sequence);
            let size = self.groups.tokens(id.group);
            let held = blocks_for(u64::from(row.len), size);
            let (group, end) = (self.groups.get(id.group), end_of(row, 1, lookahead)?);
            // A recurrent group has a state for each draft token.
            let drafts = if group == Group::Recurrent { lookahead } else { 0 };
            let entries = blocks_for(end - u64::from(drafts), size) - held;
            let blocks = entries - group.skipped(row.len, 1, held, size) + drafts as usize;
            new += self.groups.blocks(id.group, blocks);
            // If the tokens are first written to a block that there is, it may have to be copied.
            let first = (self.groups.first_written(row.len, id.group) / size) as usize;
            if first < held {
                partial.extend(self.rows.table(id).table.get(first).filter(|&&block| !self.is_null(block)));
            }
        }
        partial.sort_unstable();
        let (mut copies, mut least) = (PerClass::default(), PerClass::default());
        for writers in partial.chunk_by(|a, b| a == b) {
            let block = writers[0];
            let copy = self.shareable(view, block, route).map(|copy| view.tiers.pool(route.to).block(copy));
            let users = self.users(block);
            let refs = users + copy.map_or(0, |copy| copy.refs() as usize);
            let made = copied(writers.len(), refs, copy.is_some_and(Block::is_published));
            if made > copy.unwrap_or_default().lease_room(LeaseKind::Read) {
                let limit = u32::from(MAX_LEASES);
                return Err(Error::TooManyLeases { tier: route.from, block, limit });
            }
            let class = view.tiers.pool(route.from).class_of(block);
            copies += PerClass::of(class, made);
            least += PerClass::of(class, made.min(users - 1));
        }
        Ok([new + copies, new + least])
    }

    /// Number of rows in the last [`Sequences::plan`] that have tokens in a block.
    fn users(&self, block: BlockId) -> usize {
        let at = |end: bool| self.scratch.partition_point(|&other| other < block || (end && other == block));
        (at(true) - at(false)).max(1)
    }

    /// Checks a batch and finds the distinct blocks that it needs in the other tier. Records which tables have private
    /// blocks.
    fn plan(&mut self, view: View<'_>, sequences: &[SequenceId], route: Route) -> Result<Plan> {
        self.rows.begin_batch();
        let mut sources = std::mem::take(&mut self.scratch);
        sources.clear();
        self.work.private.clear();
        let (mut alone, mut result) = (PerClass::default(), Ok(()));
        for id in self.tables_of(sequences) {
            let found = if id.group == 0 { self.rows.next_in_batch(id.sequence).map(|_| ()) } else { Ok(()) };
            match found.and_then(|()| self.sources(view, id, route, &mut sources)) {
                Ok(blocks) => {
                    self.work.private.push(blocks > 0);
                    alone += self.groups.blocks(id.group, blocks);
                }
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        sources.sort_unstable();
        let plan = result.and_then(|()| self.plan_shared(view, &sources, alone, route));
        self.scratch = sources;
        plan
    }

    /// Like [`Sequences::plan`], for `alone` private blocks and others.
    fn plan_shared(&self, view: View<'_>, sources: &[BlockId], alone: PerClass, route: Route) -> Result<Plan> {
        let (from, to) = (view.tiers.pool(route.from), view.tiers.pool(route.to));
        let (mut new, mut held, mut found) = (alone, alone, Vec::new());
        for block in sources.chunk_by(|a, b| a == b).map(|rows| rows[0]) {
            let one = PerClass::of(from.class_of(block), 1);
            held += one;
            match self.shareable(view, block, route) {
                // A tier without blocks has no null block either: this one is more than it can give.
                Some(_) if self.is_null(block) => new += one,
                None => {
                    from.require_leases(block, route.reads, 1)?;
                    new += one;
                }
                Some(copy) if !to.block(copy).is_used() => found.push(copy),
                Some(_) => {}
            }
        }
        let (tier, overlappable) = (route.to, route.takes_overlappable);
        let request = Request { tier, blocks: new + view.cost(tier, &found, overlappable), least: held, overlappable };
        Ok(Plan { request, new, found })
    }

    /// Checks one table and appends its blocks that have tokens, or returns their number if all are private.
    fn sources(&self, view: View<'_>, id: TableId, route: Route, sources: &mut Vec<BlockId>) -> Result<usize> {
        let (sequence, row, table) = (id.sequence, self.rows.at(id.sequence), &self.rows.table(id).table);
        refuse_lost(sequence, row)?;
        require_tier(sequence, row, route.from)?;
        if row.written == view.transfers.open() {
            return Err(Error::Unwritten { sequence });
        }
        if !view.transfers.is_settled(row.ticket) {
            return Err(self.in_flight(sequence, row, view));
        }
        let held = blocks_for(u64::from(self.rows.len_of(id)), self.groups.tokens(id.group));
        if view.tiers.pool(route.from).are_private(&table[..held]) {
            return Ok(held);
        }
        // An empty tier has no null block, and takes none.
        let to = view.tiers.pool(route.to);
        for &block in table[..held].iter().filter(|&&block| !self.is_null(block) || !to.block(block).is_used()) {
            if view.tiers.pool(route.from).block(block).is_filling() {
                return Err(self.in_flight(sequence, row, view));
            }
            sources.push(block);
        }
        Ok(0)
    }

    /// The block that already holds the same bytes in the other tier, or will within this step. A link outlives its
    /// call only between full blocks that are no longer written, so a row that uses only part of one may share it too.
    fn shareable(&self, view: View<'_>, block: BlockId, route: Route) -> Option<BlockId> {
        if self.is_null(block) {
            return Some(block);
        }
        let (tier, copy) = view.tiers.pool(route.from).block(block).tier_copy()?;
        let fresh = view.transfers.is_fresh((tier, copy));
        let landed = !view.tiers.pool(tier).block(copy).is_filling() || view.transfers.idle();
        (tier == route.to && (fresh || landed)).then_some(copy)
    }

    /// Moves a batch to a tier, away from the device or towards it.
    pub(crate) fn relocate(
        &mut self,
        step: &mut OpenStep<'_>,
        sequences: &[SequenceId],
        to: Tier,
        away: bool,
    ) -> Result<()> {
        let route = self.route(sequences, to, away)?;
        let plan = self.plan(step.view(), sequences, route)?;
        step.view().require(plan.request, || plan.found.clone())?;
        let wanted = self.wanted(step.view(), sequences, route, &plan);
        let Plan { new, found, .. } = plan;
        // Making room must not evict blocks that the rows will share.
        for &copy in &found {
            step.tiers.claim((route.to, copy));
        }
        step.prepare(route.to, wanted, route.takes_overlappable);
        let mut targets = [const { Vec::new() }; MAX_CLASSES];
        for (class, targets) in targets.iter_mut().enumerate().filter(|(class, _)| new.get(*class) > 0) {
            targets.reserve_exact(new.get(class));
            step.take((route.to, class), new.get(class), true, targets);
        }
        if new.total() > 0 {
            step.transfers.pairs(route.kind, route.from, route.to).reserve(new.total());
        }
        let mut rest = targets.each_ref().map(|targets| targets.iter());
        let mut partial = Vec::new();
        for (i, id) in self.tables_of(sequences).enumerate() {
            let rest = &mut rest[self.groups.class(id.group)];
            if self.work.private[i] {
                self.relocate_private(step, id, route, rest);
            } else {
                self.relocate_table(step, id, route, rest, &mut partial);
            }
        }
        for &sequence in sequences {
            let row = self.rows.at_mut(sequence);
            (row.tier, row.ticket, row.moving, row.writable) = (route.to, step.transfers.open(), true, 0);
            self.drafts.set(sequence, 0);
        }
        debug_assert!(rest.iter_mut().all(|rest| rest.next().is_none()), "more blocks were taken than moved");
        if new.total() == 0 {
            self.settle_found(step, sequences, route.to);
        }
        for block in found {
            step.tiers.release((route.to, block));
        }
        for block in partial {
            step.tiers.unlink((route.to, block));
            step.transfers.remove_fresh((route.to, block));
        }
        Ok(())
    }

    /// Rows that found all their blocks in the target tier have nothing to wait for.
    fn settle_found(&mut self, step: &OpenStep<'_>, sequences: &[SequenceId], tier: Tier) {
        let pool = step.tiers.pool(tier);
        let comes = |id| self.rows.table(id).table.iter().any(|&block| pool.block(block).is_filling());
        if self.tables_of(sequences).any(comes) {
            return;
        }
        for &sequence in sequences {
            let row = self.rows.at_mut(sequence);
            row.moving = false;
            row.ticket = TicketId(0);
        }
    }

    /// Moves one table. Shared blocks are linked to their copies so that the other rows find them; a partial block only
    /// for the rest of this call, since its owners may append to it.
    fn relocate_table(
        &mut self,
        step: &mut OpenStep<'_>,
        id: TableId,
        route: Route,
        targets: &mut std::slice::Iter<'_, BlockId>,
        partial: &mut Vec<BlockId>,
    ) {
        let full = self.groups.whole(self.rows.len_of(id), self.groups.tokens(id.group)) as usize;
        let mut table = self.take_filled(step, id, route.from);
        for (i, block) in table.iter_mut().enumerate() {
            let source = *block;
            if let Some(copy) = self.shareable(step.view(), source, route) {
                step.tiers.claim((route.to, copy));
                *block = copy;
            } else if let Some(&target) = targets.next() {
                let (from, to) = ((route.from, source), (route.to, target));
                step.transfer(route.kind, from, to, route.reads);
                step.publish_copy_later(from, to, i);
                let held = step.tiers.block(from);
                if held.refs() > 1 || (i < full && held.is_published()) {
                    step.tiers.link(from, to);
                    step.transfers.add_fresh(to);
                    if i >= full {
                        partial.push(target);
                    }
                }
                *block = target;
            }
            step.tiers.release((route.from, source));
        }
        self.arrive(id, route.to, table);
    }

    /// Moves one table whose blocks nothing else uses.
    fn relocate_private(
        &mut self,
        step: &mut OpenStep<'_>,
        id: TableId,
        route: Route,
        targets: &mut std::slice::Iter<'_, BlockId>,
    ) {
        let mut table = self.take_filled(step, id, route.from);
        let (to, rest) = targets.as_slice().split_at(table.len());
        *targets = rest.iter();
        step.transfer_private(route.kind, (route.from, &table), (route.to, to), route.reads);
        table.copy_from_slice(to);
        self.arrive(id, route.to, table);
    }

    /// Takes the blocks of a table; releases those without tokens, which hold nothing to move.
    fn take_filled(&mut self, step: &mut OpenStep<'_>, id: TableId, tier: Tier) -> Vec<BlockId> {
        let held = blocks_for(u64::from(self.rows.len_of(id)), self.groups.tokens(id.group));
        let row = self.rows.table_mut(id);
        row.note_cut();
        let mut table = row.table.take();
        step.tiers.release_all(tier, &table[held..]);
        table.truncate(held);
        table
    }

    /// Gives a table its blocks in the target tier.
    fn arrive(&mut self, id: TableId, tier: Tier, table: Vec<BlockId>) {
        if tier == Tier::Device {
            self.owners.note(self.rows.number(id), 0, &table);
        }
        let last = self.rows.at(id.sequence).len.saturating_sub(1) / self.block_size;
        // Only a row's last state is known to be that of its block's last token.
        let published = if self.is_recurrent(id) { last } else { 0 };
        let row = self.rows.table_mut(id);
        row.table.set(table);
        row.published = published;
    }
}
