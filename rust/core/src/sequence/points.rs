//! Resume points of models whose groups do not all keep every block: where prompts continue, and where sequences make
//! points for later ones. See [`crate::prefix`] for how they are kept.

use super::table::{RowKeys, TableId};
use super::{Sequences, blocks_for};
use crate::block::LeaseKind;
use crate::error::{Result, invalid};
use crate::event::Publication;
use crate::group::{Group, NULL_BLOCK};
use crate::hash::{AheadKeys, Key};
use crate::host_cache::Found;
use crate::id::{BlockId, SequenceId, Tier};
use crate::prefix::{CachedIdentity, Points, Published};
use crate::transfer::{OpenStep, View};
use std::collections::HashMap;

/// What the groups have of a prompt's start.
#[derive(Debug, Default)]
pub(super) struct Start {
    /// Its blocks up to the point where the prompt continues.
    pub(super) hits: usize,
    /// Its blocks up to where it parts from another cached prompt, which may be further; else `hits`.
    pub(super) run: usize,
    /// A point at an interval served it, or would have.
    pub(super) parts: bool,
    /// The groups' tables of the first `hits`.
    pub(super) tables: Vec<Vec<BlockId>>,
}

/// What device and host have of a prompt's start, see [`Start`].
#[derive(Debug)]
pub(super) struct Below {
    pub(super) hits: usize,
    pub(super) run: usize,
    pub(super) parts: bool,
    pub(super) tables: Vec<Vec<Found>>,
}

/// Points at intervals are made for as many turnovers of the device after one was of use. Agents' sessions lose nothing
/// so, and prompts that never part have the memory for themselves (`docs/benchmarks/hybrid.md`).
const TURNOVERS: u64 = 64;

impl Sequences {
    /// The deepest point of a prompt of `length` tokens that all groups can serve, at most `keys.len()` blocks into it. If
    /// a group keeps every block, `run` has the blocks found of the first such group.
    pub(super) fn find_groups(&self, view: View<'_>, keys: &[Key], length: usize, mut run: Vec<BlockId>) -> Start {
        let (device, anchor) = (view.tiers.device(), self.groups.anchor());
        let Some(points) = device.points() else { return self.nothing() };
        let mut hits = 0;
        if self.groups.keeps_all() {
            run.truncate(run.iter().take_while(|&&block| points.companions(block).is_some()).count());
            hits = run.iter().rposition(|&block| points.has_point(block)).map_or(0, |last| last + 1);
        } else {
            let number = u8::try_from(anchor).unwrap_or(u8::MAX);
            let find = |key: &Key| device.find(&key.of_group(number));
            let found = (1..=keys.len())
                .rev()
                .find_map(|at| find(&keys[at - 1]).filter(|&block| points.has_point(block)).map(|block| (at, block)));
            if let Some((at, block)) = found {
                hits = at;
                run = vec![NULL_BLOCK; at - 1];
                run.push(block);
            }
        }
        // Behind a run that no other prompt continues, a point would serve nobody but this prompt.
        let leads_on = |block: Option<&BlockId>| block.is_some_and(|&block| points.leads_on(block));
        let parting = if self.groups.keeps_all() && leads_on(run.last()) { run.len() } else { hits };
        let last = hits.checked_sub(1).and_then(|last| run.get(last));
        let parts = self.parts_inside(hits, run.len(), leads_on(last));
        let Some(&last) = last else {
            return Start { run: parting, parts, ..self.nothing() };
        };
        let (mut tail, mut tables) = (points.tail(last), Vec::with_capacity(self.groups.growing().len()));
        for group in 0..self.groups.growing().len() {
            let mut table = Vec::with_capacity(blocks_for(length as u64, self.size_of(group)) + 1);
            if let Some(places) = self.companions_of(group) {
                if places.is_empty() {
                    table.extend_from_slice(&run[..hits]);
                }
                for block in run[..hits].iter().filter(|_| !places.is_empty()) {
                    table.extend_from_slice(&points.companions(*block).unwrap_or_default()[places.clone()]);
                    table.extend((group == anchor).then_some(*block));
                }
                tables.push(table);
            } else {
                let needed = self.tail_of(group, hits);
                let (own, rest) = tail.split_at(needed.len());
                tail = rest;
                table.resize(needed.start, NULL_BLOCK);
                table.extend_from_slice(own);
                if group == anchor {
                    table.push(if self.needs_last(group, hits) { last } else { NULL_BLOCK });
                }
                tables.push(table);
            }
        }
        Start { hits, run: parting, parts, tables }
    }

    /// The deepest point of a prompt that device and host together can serve, if it lies behind what the device alone has.
    /// Host copies must have room for the read leases of `batch` prompts.
    pub(super) fn find_below(&self, view: View<'_>, keys: &[Key], batch: usize, alone: &Start) -> Option<Below> {
        let (device, host) = (view.tiers.device(), view.tiers.host());
        let points = device.points()?;
        let copy = |(group, entry): (usize, usize)| {
            let found = host.find(&self.own_key(keys, group, entry));
            found.filter(|&block| host.block(block).lease_room(LeaseKind::Read) >= batch).map(Found::Host)
        };
        let number = u8::try_from(self.groups.anchor()).unwrap_or(u8::MAX);
        let on_device = |at: usize| device.find(&keys[at].of_group(number));
        let anchor = |at: usize| {
            on_device(at).map(Found::Device).or_else(|| copy((self.groups.anchor(), self.anchor_entry(at))))
        };
        // What hangs on the anchor of a key, or would, in this order.
        let companion = |at: usize, (index, place): (usize, (usize, usize))| {
            let all = on_device(at).and_then(|block| points.companions(block));
            all.map(|all| Found::Device(all[index])).or_else(|| copy(place))
        };
        let is_whole = |at: &usize| {
            anchor(*at).is_some() && self.companion_places(*at).enumerate().all(|place| companion(*at, place).is_some())
        };
        let run = if self.groups.keeps_all() { (0..keys.len()).take_while(is_whole).count() } else { keys.len() };
        if alone.hits >= run {
            return None;
        }
        // The device finds a tail's blocks with their point only: those of other points of this prompt serve, too.
        let mut held: HashMap<(usize, usize), BlockId> = HashMap::new();
        for end in 1..=run {
            let Some(block) = on_device(end - 1).filter(|&block| points.has_tail(block)) else { continue };
            held.extend(self.tail_places(end).zip(points.tail(block).iter().copied()));
        }
        let tail = |end: usize| {
            if let Some(block) = on_device(end - 1).filter(|&block| points.has_point(block)) {
                return Some(points.tail(block).iter().map(|&block| Found::Device(block)).collect::<Vec<_>>());
            }
            anchor(end - 1)?;
            let part = |place| held.get(&place).copied().map(Found::Device).or_else(|| copy(place));
            self.tail_places(end).map(part).collect()
        };
        let (hits, tail) = (alone.hits + 1..=run).rev().find_map(|end| Some((end, tail(end)?)))?;
        let (mut tail, empty) = (tail.into_iter(), Found::Device(NULL_BLOCK));
        let mut tables = Vec::with_capacity(self.groups.growing().len());
        for group in 0..self.groups.growing().len() {
            let is_anchor = group == self.groups.anchor();
            if let Some(places) = self.companions_of(group) {
                let mut table = Vec::with_capacity(hits * self.groups.per_key(group));
                for at in 0..hits {
                    let own = self.companion_places(at).enumerate().skip(places.start).take(places.len());
                    table.extend(own.filter_map(|place| companion(at, place)));
                    table.extend(anchor(at).filter(|_| is_anchor));
                }
                tables.push(table);
            } else {
                let needed = self.tail_of(group, hits);
                let mut table = vec![empty; needed.start];
                table.extend(tail.by_ref().take(needed.len()));
                if is_anchor {
                    table.push(anchor(hits - 1).filter(|_| self.needs_last(group, hits)).unwrap_or(empty));
                }
                tables.push(table);
            }
        }
        let leads_on = self.groups.keeps_all() && on_device(run - 1).is_some_and(|last| points.leads_on(last));
        let parts = self.parts_inside(hits, run, run > hits);
        Some(Below { hits, run: if leads_on { run } else { hits.max(alone.run) }, parts, tables })
    }

    /// Which of the blocks that hang on one with a key are of a group that keeps every block: first those before it in
    /// its own group, then those of the other groups.
    pub(super) fn companions_of(&self, group: usize) -> Option<std::ops::Range<usize>> {
        let (anchor, others) = (self.groups.anchor(), self.groups.companions());
        if !self.groups.keeps_all() || (group != anchor && !others.contains(&group)) {
            return None;
        }
        let before = self.groups.per_key(anchor) - 1;
        if group == anchor {
            return Some(0..before);
        }
        let first = before
            + others.iter().take_while(|&&other| other != group).map(|&at| self.groups.per_key(at)).sum::<usize>();
        Some(first..first + self.groups.per_key(group))
    }

    /// Group and entry of its table of each block that hangs on the one with the key at an index.
    fn companion_places(&self, at: usize) -> impl Iterator<Item = (usize, usize)> {
        self.groups.companion_places(at)
    }

    /// The key of a block of a group by its entry in the table.
    pub(super) fn own_key(&self, keys: &[Key], group: usize, entry: usize) -> Key {
        let (at, part) = self.groups.key_of(group, entry);
        keys[at].of_part(u8::try_from(group).unwrap_or(u8::MAX), part)
    }

    /// The entry of the first group with keys that has the block with the key at an index: the last of those that the key
    /// stands for.
    pub(super) fn anchor_entry(&self, at: usize) -> usize {
        self.groups.anchor_entry(at)
    }

    /// Whether a token behind the first `hits` blocks needs the last of them.
    fn needs_last(&self, group: usize, hits: usize) -> bool {
        let tokens = u32::try_from(hits).unwrap_or(u32::MAX).saturating_mul(self.block_size);
        !self.groups.all()[group].needs(tokens, self.size_of(group)).is_empty()
    }

    fn size_of(&self, group: usize) -> u32 {
        self.groups.tokens(u8::try_from(group).unwrap_or(u8::MAX))
    }

    fn nothing(&self) -> Start {
        Start { tables: vec![Vec::new(); self.groups.growing().len()], ..Start::default() }
    }

    /// Indices of a group's blocks in the tail of a point behind `at` keys.
    fn tail_of(&self, group: usize, at: usize) -> std::ops::Range<usize> {
        self.groups.tail(group, at, self.block_size)
    }

    /// Whether a prompt that resumes behind `hits` blocks parts from a cached one where points at intervals are of use:
    /// it has at least an interval of cached blocks behind its point, or resumed at such a point, which leads on.
    fn parts_inside(&self, hits: usize, run: usize, leads_on: bool) -> bool {
        let interval = self.groups.interval();
        let is_between = hits > 0 && interval > 0 && hits % interval == 0 && leads_on;
        self.groups.keeps_all() && interval > 0 && (is_between || run >= hits + interval)
    }

    /// Notes that a point at an interval was of use to a prompt, or would have been.
    pub(super) fn note_parting(&mut self, view: View<'_>) {
        self.parted = Some(view.tiers.device().evictions());
    }

    /// Whether points at intervals were of use lately. A call that takes blocks asks once, before: taking changes it.
    pub(super) fn parted_lately(&self, view: View<'_>) -> bool {
        let device = view.tiers.device();
        let is_recent = |at: u64| device.evictions().saturating_sub(at) <= TURNOVERS * device.published() as u64;
        self.parted.is_some_and(is_recent)
    }

    /// Where a prompt of `length` tokens makes points, if the first `cached` are found: at its last boundary, where a
    /// longer run than its point was found, and, if prompts part there, at intervals before it.
    pub(super) fn due_points(&self, (run, at_intervals): (usize, bool), cached: u32, length: u32) -> Vec<u32> {
        if !self.groups.has_nulls() {
            return Vec::new();
        }
        let size = self.block_size;
        let interval = if at_intervals { self.groups.interval() } else { 0 };
        let tokens = |blocks: usize| u32::try_from(blocks).unwrap_or(u32::MAX).saturating_mul(size);
        let end = (length.saturating_sub(1) / size) as usize;
        let mut due = vec![tokens(run), tokens(end)];
        let mut last = end;
        while let Some(at) = last.checked_sub(least_gap(interval, end - last)).filter(|&at| at > 0 && interval > 0) {
            last = at / interval * interval;
            due.push(tokens(last));
        }
        due.retain(|&at| cached < at && at <= tokens(end));
        due.sort_unstable();
        due.dedup();
        due
    }

    /// Drops those points before the end of a prompt, `at` blocks into it, that are closer together than is worth their
    /// tails: the further back, the rarer. Where prompts part, they stay; so does the one where this prompt resumed, if
    /// it added a tail's blocks or more: its next prompt may part there, as a second question behind a system prompt does.
    fn thin(&mut self, step: &mut OpenStep<'_>, sequence: SequenceId, at: usize, resumed: usize) {
        let (interval, mut last, mut gone) = (self.groups.interval(), at, Vec::new());
        let Some(points) = step.tiers.device().points().filter(|_| interval > 0) else { return };
        let table = &self.rows.table(Self::member(sequence, self.groups.anchor())).table;
        let per_key = self.groups.per_key(self.groups.anchor());
        let anchor_at = |index: usize| table[index * per_key - 1];
        for index in (1..at).rev().filter(|&index| points.has_tail(anchor_at(index))) {
            let anchor = anchor_at(index);
            let is_used = index == resumed && at - index >= points.tail(anchor).len();
            if is_used || points.is_junction(anchor) || last - index >= least_gap(interval, at - last) {
                last = index;
            } else {
                gone.push(anchor);
            }
        }
        for anchor in gone {
            step.tiers.drop_point(anchor);
        }
    }

    /// Fails for a prompt whose states at its points would be passed over: it must be computed in chunks.
    pub(super) fn require_states(&self, view: View<'_>, tokens: usize, chunk: u32) -> Result<()> {
        let is_passed = chunk == u32::MAX && self.keeps_states(view) && tokens > self.block_size as usize;
        if !is_passed {
            return Ok(());
        }
        let must = format!(
            "at most {} at once in a recurrent group with prefix caching: give chunk_tokens, so that a step ends where \
             its state is kept",
            self.block_size
        );
        Err(invalid("number of tokens", tokens as i128, must))
    }

    /// Whether steps have to end at points, for the states there.
    pub(super) fn keeps_states(&self, view: View<'_>) -> bool {
        view.tiers.device().is_caching() && self.groups.growing().contains(&Group::Recurrent)
    }

    /// Publishes what a sequence has computed of its first `computed` tokens: blocks with keys, and points that are due.
    pub(super) fn publish_groups(
        &mut self,
        step: &mut OpenStep<'_>,
        sequence: SequenceId,
        keys: &mut RowKeys,
        computed: u32,
    ) {
        let row = self.rows.at(sequence);
        // The sources of its blocks may still turn out to be lost, and with them everything computed from them.
        if row.tier != Tier::Device || row.lost || !step.transfers.is_settled(row.ticket) {
            return;
        }
        let end = self.groups.whole(computed, self.block_size).min(u32::try_from(keys.keys.len()).unwrap_or(u32::MAX));
        if self.groups.keeps_all() {
            self.publish_row(step, sequence, keys, computed);
        }
        keys.computed = keys.computed.max(end);
        let ready = keys.due.partition_point(|&at| at <= end * self.block_size);
        let due: Vec<_> = keys.due.drain(..ready).map(|at| (at / self.block_size) as usize).collect();
        for &at in &due {
            self.make_point(step, sequence, keys, at);
        }
        if let Some(&last) = due.last().filter(|_| keys.due.is_empty()) {
            self.thin(step, sequence, last, keys.resumed as usize);
        }
    }

    /// Publishes the blocks with keys of a sequence on the device that have landed and are computed.
    pub(super) fn publish_row(&mut self, step: &mut OpenStep<'_>, sequence: SequenceId, keys: &RowKeys, computed: u32) {
        let id = Self::member(sequence, self.groups.anchor());
        let row = self.rows.at(sequence);
        // The sources of its blocks may still turn out to be lost, and with them everything computed from them.
        if row.tier != Tier::Device || row.lost || !step.transfers.is_settled(row.ticket) {
            return;
        }
        let (group, row) = (id.group, self.rows.table(id));
        let end = keys.keys.len().min(self.groups.whole(computed, self.block_size) as usize);
        let mut at = row.published as usize;
        // Without a prefix cache, states that are passed over count as published, and there are no keys.
        if at >= end {
            return;
        }
        let alone = self.groups.num_companions() == 0;
        step.tiers.continue_chain(at.checked_sub(1).map(|before| row.table[self.anchor_entry(before)]));
        let found_by = keys.found_by();
        let mut parent = at.checked_sub(1).map_or(0, |before| found_by[before].of_group(group).link());
        while at < end {
            let entry = self.anchor_entry(at);
            let block = self.rows.table(id).table[entry];
            if step.tiers.device().block(block).is_filling() {
                break;
            }
            let publication = || self.publication(keys, at, block, (group, 0));
            let key = found_by[at].of_group(group);
            let identity = CachedIdentity { key, depth: depth(at), parent, tenant: keys.tenant };
            parent = key.link();
            match step.tiers.publish((Tier::Device, block), identity, publication) {
                Published::Now | Published::Before if !alone => {
                    self.publish_companions(step, sequence, (keys, at), block);
                }
                Published::Now | Published::Before | Published::Beyond => {}
                Published::As(canonical) => {
                    self.merge(step, id, entry, canonical);
                    self.merge_companions(step, sequence, at, canonical);
                    self.publish_companions(step, sequence, (keys, at), canonical);
                    self.stats.merged += 1;
                }
            }
            at += 1;
        }
        step.tiers.continue_chain(None);
        let row = self.rows.table_mut(id);
        row.published = row.published.max(u32::try_from(at).unwrap_or(u32::MAX));
    }

    /// Makes a point where a sequence that is about to leave stands, unless one lies closer than is worth a tail: what
    /// an answer adds to its prompt is soon computed again.
    pub(super) fn make_last_point(&mut self, step: &mut OpenStep<'_>, sequence: SequenceId) {
        let row = self.rows.at_mut(sequence);
        if row.tier != Tier::Device || row.lost {
            return;
        }
        let Some(keys) = row.keys.take() else { return };
        let at = keys.computed.min(self.groups.whole(row.len, self.block_size)) as usize;
        let near = at.saturating_sub(self.groups.interval())..at;
        let table = &self.rows.table(Self::member(sequence, self.groups.anchor())).table;
        let points = step.tiers.device().points();
        let has_near =
            points.is_some_and(|points| near.clone().any(|at| points.has_tail(table[self.anchor_entry(at)])));
        if at > 0 && !has_near {
            self.make_point(step, sequence, &keys, at);
        }
        self.rows.at_mut(sequence).keys = Some(keys);
    }

    /// Makes a point behind the first `at` blocks of a sequence, if it still has what a token there needs.
    fn make_point(&mut self, step: &mut OpenStep<'_>, sequence: SequenceId, keys: &RowKeys, at: usize) {
        let anchor_group = self.groups.anchor();
        let anchor_row = Self::member(sequence, anchor_group);
        let entry = self.anchor_entry(at - 1);
        let Some((&key, &block)) = keys.found_by().get(at - 1).zip(self.rows.table(anchor_row).table.get(entry)) else {
            return;
        };
        let key = key.of_group(u8::try_from(anchor_group).unwrap_or(u8::MAX));
        let device = step.tiers.device();
        let found = device.find(&key);
        let has_point = found.is_some_and(|found| device.points().is_some_and(|points| points.has_point(found)));
        let is_known = !self.groups.keeps_all() || found == Some(block);
        if has_point || !is_known || self.is_null(block) || device.block(block).is_filling() {
            return;
        }
        let Some(tail) = self.collect_tail(step.view(), sequence, at) else { return };
        let mut anchor = block;
        if !self.groups.keeps_all() {
            // Only points have keys here, so there is no chain to follow.
            let identity = CachedIdentity { key, depth: depth(at - 1), parent: 0, tenant: keys.tenant };
            let group = u8::try_from(anchor_group).unwrap_or(u8::MAX);
            let publication = || self.publication(keys, at - 1, block, (group, 0));
            match step.tiers.publish((Tier::Device, block), identity, publication) {
                Published::Beyond => return,
                Published::As(canonical) => {
                    self.merge(step, anchor_row, entry, canonical);
                    anchor = canonical;
                }
                Published::Now | Published::Before => {}
            }
        }
        let is_junction = keys.junction > 0 && keys.junction as usize == at;
        let per_key = self.groups.per_key(anchor_group);
        let places: Vec<_> = if step.tiers.names_keyless() { self.tail_places(at).collect() } else { Vec::new() };
        let own_key = |index: usize| self.own_key(keys.found_by(), places[index].0, places[index].1);
        let publication = |index: usize| {
            let (group, entry) = places[index];
            let (at, part) = self.groups.key_of(group, entry);
            self.publication(keys, at, tail[index], (u8::try_from(group).unwrap_or(u8::MAX), part))
        };
        let table = &self.rows.table(anchor_row).table[..if self.groups.keeps_all() { entry } else { 0 }];
        let before = table.iter().rev().copied().skip(per_key - 1).step_by(per_key);
        step.tiers.add_point(anchor, (&tail, is_junction), before, own_key, publication);
    }

    /// The blocks of a point behind the first `at` blocks of a sequence; `None` if some are gone.
    fn collect_tail(&mut self, view: View<'_>, sequence: SequenceId, at: usize) -> Option<Vec<BlockId>> {
        let most = self.groups.leaving().iter().map(|&group| self.tail_of(group, at).len()).sum();
        let mut tail = Vec::with_capacity(most);
        for index in 0..self.groups.leaving().len() {
            let group = self.groups.leaving()[index];
            let (needed, row) = (self.tail_of(group, at), self.rows.table(Self::member(sequence, group)));
            // A state that an earlier step wrote in the middle of a block is not that of its last token.
            let is_passed = self.groups.all()[group] == Group::Recurrent && row.published as usize >= at;
            let blocks = row.table.get(needed)?;
            let lacks = |&block: &BlockId| self.is_null(block) || view.tiers.device().block(block).is_filling();
            if is_passed || blocks.iter().any(lacks) {
                return None;
            }
            tail.extend_from_slice(blocks);
        }
        Some(tail)
    }

    /// Group and index in its table of each block in the tail of a point behind `at` blocks.
    fn tail_places(&self, at: usize) -> impl Iterator<Item = (usize, usize)> {
        self.groups.leaving().iter().flat_map(move |&group| self.tail_of(group, at).map(move |entry| (group, entry)))
    }

    /// Hangs the blocks of the other groups that keep every block on a published one that lacks them.
    pub(super) fn publish_companions(
        &mut self,
        step: &mut OpenStep<'_>,
        sequence: SequenceId,
        (keys, at): (&RowKeys, usize),
        anchor: BlockId,
    ) {
        let has_all = |points: &Points| points.companions(anchor).is_some();
        if self.groups.num_companions() == 0 || step.tiers.device().points().is_none_or(has_all) {
            return;
        }
        let places: Vec<_> = self.companion_places(at).collect();
        let block = |&(group, entry): &(usize, usize)| self.rows.table(Self::member(sequence, group)).table[entry];
        let blocks: Vec<_> = places.iter().map(block).collect();
        let part = |index: usize| {
            let (group, entry) = places[index];
            (u8::try_from(group).unwrap_or(u8::MAX), self.groups.key_of(group, entry).1)
        };
        let own_key = |index: usize| self.own_key(keys.found_by(), places[index].0, places[index].1);
        step.tiers
            .add_companions(anchor, &blocks, own_key, |index| self.publication(keys, at, blocks[index], part(index)));
    }

    /// Replaces the blocks of the other groups by those that hang on the one that was published first.
    pub(super) fn merge_companions(
        &mut self,
        step: &mut OpenStep<'_>,
        sequence: SequenceId,
        at: usize,
        anchor: BlockId,
    ) {
        let found = step.tiers.device().points().and_then(|points| points.companions(anchor)).unwrap_or_default();
        let places: Vec<_> = self.companion_places(at).zip(found.to_vec()).collect();
        for ((group, entry), canonical) in places {
            self.merge(step, Self::member(sequence, group), entry, canonical);
        }
    }

    /// Replaces a block of a row by another one with the same bytes.
    pub(super) fn merge(&mut self, step: &mut OpenStep<'_>, id: TableId, at: usize, canonical: BlockId) {
        let row = self.rows.table_mut(id);
        let block = row.table[at];
        if block == canonical {
            return;
        }
        step.tiers.claim((Tier::Device, canonical));
        row.table.replace(at, canonical);
        step.tiers.release((Tier::Device, block));
        // If others still use the replaced block, one more block is in use.
        step.tiers.note_peak();
    }

    /// The table of a sequence in a group.
    pub(super) fn member(sequence: SequenceId, group: usize) -> TableId {
        TableId { sequence, group: u8::try_from(group).unwrap_or(u8::MAX) }
    }

    /// The identity of a block of a chain.
    pub(super) fn identity(keys: &RowKeys, at: usize, group: u8) -> CachedIdentity {
        let found_by = keys.found_by();
        let parent = at.checked_sub(1).map_or(0, |before| found_by[before].of_group(group).link());
        CachedIdentity { key: found_by[at].of_group(group), depth: depth(at), parent, tenant: keys.tenant }
    }

    /// What events and a store's queue need to know of a block that a row publishes: of a group, and which of its blocks
    /// that the key at an index stands for.
    fn publication(&self, keys: &RowKeys, at: usize, block: BlockId, of: (u8, u32)) -> Option<Publication> {
        let parent = at.checked_sub(1).and_then(|before| keys.chain_at(before, self.block_size));
        let (key, ahead) = (keys.chain_at(at, self.block_size)?, self.ahead_keys(keys, at, of).map(Box::new));
        let (tokens, salt, lora_id, (group, part)) = (self.block_size, keys.salt, keys.lora_id, of);
        Some(Publication { block, key, parent, tokens, salt, lora_id, group, part, ahead })
    }

    /// Keys of a group's block in a model with a drafter.
    pub(super) fn ahead_keys(&self, keys: &RowKeys, at: usize, of: (u8, u32)) -> Option<AheadKeys> {
        let both = |at: usize, of: (u8, u32)| {
            let own = keys.ahead.get(at)?.of_part(of.0, of.1);
            Some((own, keys.export(at, self.groups.mark(of), self.block_size)?))
        };
        let anchor = u8::try_from(self.groups.anchor()).ok()?;
        let hangs_on = self.groups.hangs_on(of, at, at.checked_sub(1));
        Some(AheadKeys { own: both(at, of)?, hangs_on: hangs_on.and_then(|at| both(at, (anchor, 0))) })
    }
}

/// A block's index in its prompt.
fn depth(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX)
}

/// Blocks that lie at least between two points, if the later one is `back` blocks before the end: in agents' sessions,
/// points at square distances had the most hits for their tails (`docs/benchmarks/hybrid.md`).
fn least_gap(interval: usize, back: usize) -> usize {
    interval.max((4 * interval * back).isqrt())
}
