//! Host copies as the second level of the prefix cache. Swapped-out blocks can still be found on the host, and a prompt
//! whose blocks are only there loads them in its own step.
//!
//! A transfer publishes its target under its source's key once the bytes have landed. A load does so only if its target
//! is still linked to the copy it was read from, so a block written or freed in the meantime is not published. A failed
//! load also removes the key of the host copy.

use crate::block::{LeaseKind, TierBlock};
use crate::decision::Kind;
use crate::hash::Key;
use crate::id::{BlockId, TicketId, Tier};
use crate::page::{MAX_CLASSES, PerClass};
use crate::prefix::evict::Rank;
use crate::prefix::{CachedIdentity, Departing};
use crate::transfer::{OpenStep, PendingPublish, View};
use std::collections::HashSet;

/// A block of a prompt that was found in one of the two tiers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Found {
    Device(BlockId),
    Host(BlockId),
}

/// The rank of a block that the host does not get: it serves nobody.
const NOBODY: Rank = Rank { ring: u8::MAX, stamp: 0 };

fn depth(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX)
}

impl View<'_> {
    /// The blocks of the leading keys that the device or the host has. Host copies must have room for the read leases
    /// of `batch` prompts.
    pub(crate) fn find_on_host(self, keys: &[Key], batch: usize) -> Vec<Found> {
        let (device, host) = (self.tiers.device(), self.tiers.host());
        let find = |key: &Key| {
            let copy = || {
                host.find(key).filter(|&block| host.block(block).lease_room(LeaseKind::Read) >= batch).map(Found::Host)
            };
            device.find(key).map(Found::Device).or_else(copy)
        };
        keys.iter().map_while(find).collect()
    }

    /// Device blocks that a batch takes to load host copies; a copy that several prompts want is loaded once.
    pub(crate) fn blocks_to_load<'a>(self, found: impl Iterator<Item = &'a Found>) -> PerClass {
        let copies = found.filter_map(|found| match found {
            Found::Host(copy) if self.loading(*copy).is_none() => Some(*copy),
            _ => None,
        });
        let mut copies: Vec<BlockId> = copies.collect();
        copies.sort_unstable();
        copies.dedup();
        copies.into_iter().map(|copy| PerClass::of(self.tiers.host().class_of(copy), 1)).sum()
    }

    /// Number of cached blocks that no prompt can find; see [`Tiers::num_unfindable`](crate::tiers::Tiers).
    pub(crate) fn num_unfindable(self) -> usize {
        self.tiers.num_unfindable(self.transfers.promised().chain(self.jobs.promised()))
    }

    /// The device block that the open step loads a host copy into.
    pub(crate) fn loading(self, copy: BlockId) -> Option<BlockId> {
        let target = self.tiers.host().block(copy).tier_copy()?;
        (target.0 == Tier::Device && self.transfers.is_fresh(target)).then_some(target.1)
    }
}

impl OpenStep<'_> {
    /// Appends found blocks to a new table: device blocks and host copies, all of which have been claimed; the copies are
    /// loaded. `identity` names the block at an index of the table, and whether it is found by its key. Returns how
    /// many loads this starts.
    pub(crate) fn load(
        &mut self,
        tail: &[Found],
        identity: impl Fn(usize) -> (CachedIdentity, bool),
        table: &mut Vec<BlockId>,
    ) -> u64 {
        let (loads, mut targets) = (self.view().blocks_to_load(tail.iter()), [const { Vec::new() }; MAX_CLASSES]);
        for (class, targets) in targets.iter_mut().enumerate().filter(|(class, _)| loads.get(*class) > 0) {
            self.take((Tier::Device, class), loads.get(class), true, targets);
        }
        let mut next = targets.each_ref().map(|targets| targets.iter());
        for found in tail {
            let at = table.len();
            match *found {
                Found::Device(block) => table.push(block),
                Found::Host(copy) => {
                    // Another prompt of this step loads it already: both wait for one copy.
                    if let Some(block) = self.view().loading(copy) {
                        self.tiers.share((Tier::Device, block), 1);
                        table.push(block);
                    } else if let Some(&block) = next[self.tiers.host().class_of(copy)].next() {
                        table.push(block);
                        self.load_block(copy, block, identity(at));
                    }
                    self.tiers.release((Tier::Host, copy));
                }
            }
        }
        loads.total() as u64
    }

    fn load_block(&mut self, copy: BlockId, target: BlockId, identity: (CachedIdentity, bool)) {
        let (from, to) = ((Tier::Host, copy), (Tier::Device, target));
        self.transfer_cached(Kind::SwapIn, from, to, LeaseKind::Read);
        self.tiers.link(from, to);
        self.transfers.add_fresh(to);
        self.publish_later(from, to, identity, None);
    }

    /// If the open step swaps a published block out to the host, publishes the copy once it has landed.
    #[inline]
    pub(crate) fn publish_copy_later(&mut self, from: TierBlock, to: TierBlock, at: usize) {
        if (from.0, to.0) == (Tier::Device, Tier::Host) && self.tiers.keeps_host_copies() {
            if let Some(key) = self.tiers.device().key(from.1) {
                let parent = self.tiers.parent(from);
                let identity = CachedIdentity { key, depth: depth(at), parent, tenant: 0 };
                self.publish_later(from, to, (identity, true), None);
            }
        }
    }

    fn publish_later(
        &mut self,
        from: TierBlock,
        to: TierBlock,
        (identity, is_found): (CachedIdentity, bool),
        rank: Option<Rank>,
    ) {
        let event = self.tiers.published_event(from);
        let demotes = rank.is_some();
        let on_host = (from.0 == Tier::Host).then(|| Rank { ring: self.tiers.host_ring(from.1), stamp: 0 });
        let rank = rank.or(on_host);
        self.transfers.publish(PendingPublish { from, to, identity, is_found, demotes, rank, event });
    }

    /// Evicts as many device blocks of a class to the host as are missing to `count` empty ones.
    #[inline]
    pub(crate) fn make_room(&mut self, class: usize, count: usize) {
        let device = self.tiers.device();
        let empty = device.ready(class);
        if empty < count && device.evictable_of(class) > 0 {
            self.evict(Some(class), count - empty, self.tiers.host_copies_left(), false);
        }
    }

    /// Offloads the next `count` device blocks to be evicted: copies those without a host copy, as far as there is room,
    /// and frees the others. Returns how many are copied.
    pub(crate) fn offload_cached(&mut self, count: usize) -> usize {
        let host = self.tiers.host();
        let count = count.min((0..host.num_classes()).map(|class| host.free_in(class)).sum());
        self.evict(None, count, count, true)
    }

    /// Takes `count` blocks of a class, or of any, out of the device's eviction order, with what goes with them. Those
    /// without a host copy are copied, at most `most`; the ends of chains come first, so of more than these the first are
    /// dropped. `is_ahead`: nothing needs them yet. Returns how many are copied.
    fn evict(&mut self, class: Option<usize>, count: usize, most: usize, is_ahead: bool) -> usize {
        let (mut sources, mut copied, mut popped) = (Vec::with_capacity(count), 0, 0);
        while popped < count || self.tiers.device().num_going() > 0 {
            let Some(Departing { block, rank, unit, stays }) = self.tiers.pop_ranked(class, is_ahead) else { break };
            popped += usize::from(!stays && class.is_none_or(|class| class == self.tiers.device().class_of(block)));
            match (self.tiers.device().own_key(block), rank) {
                // At once: when the rest is copied, it may have left, too.
                (Some(key), Some(rank)) if stays && copied < most => {
                    copied += usize::from(self.copy_to_host(block, (key, rank)));
                }
                _ if stays => {}
                (Some(key), Some(rank)) => sources.push((block, key, rank, unit)),
                _ => sources.push((block, Key::default(), NOBODY, 0)),
            }
        }
        let is_copied = |key: &Key, rank: &Rank| *rank == NOBODY || self.tiers.host().find(key).is_some();
        let needed = sources.iter().take(count).filter(|(_, key, rank, _)| !is_copied(key, rank)).count();
        let (mut dropped, mut last_dropped) = ((copied + needed).saturating_sub(most), 0);
        // First those that have copies: they take their places in the host's order before others push it on.
        for (_, key, rank, _) in sources.iter().filter(|(.., rank, _)| *rank != NOBODY) {
            if let Some(copy) = self.tiers.host().find(key) {
                self.tiers.set_rank(copy, *rank);
            }
        }
        let last = sources.last().map_or(0, |&(.., unit)| unit);
        for (block, key, rank, unit) in sources {
            // Looked up now: an earlier one of these may have taken its place.
            if rank == NOBODY {
                self.tiers.drop_popped(block, false);
            } else if self.tiers.host().find(&key).is_some() {
                self.tiers.drop_popped(block, true);
            } else if dropped > 0 || (unit > 0 && unit == last_dropped) || !self.has_host_room(block, rank) {
                self.tiers.note_uncopied(1);
                (dropped, last_dropped) = (dropped.saturating_sub(1), unit);
                self.tiers.drop_popped(block, false);
            } else if let Some(to) = self.take_on_host(block) {
                self.transfer_popped(block, to, rank.ring);
                self.tiers.release((Tier::Host, to));
                let parent = self.tiers.parent((Tier::Device, block));
                let identity = CachedIdentity { key, depth: 0, parent, tenant: 0 };
                self.publish_later((Tier::Device, block), (Tier::Host, to), (identity, true), Some(rank));
                copied += 1;
            }
        }
        if last > 0 && last == last_dropped {
            self.tiers.stop_departing();
        }
        self.tiers.note_host_copies(copied);
        copied
    }

    /// Whether a device block of this rank is copied to the host; see [`Tiers::has_host_room`](crate::tiers::Tiers).
    fn has_host_room(&mut self, block: BlockId, rank: Rank) -> bool {
        self.tiers.has_host_room(self.tiers.device().class_of(block), rank)
    }

    /// A block of the host for a copy of a device block, which has room there.
    fn take_on_host(&mut self, block: BlockId) -> Option<BlockId> {
        let (class, mut target) = (self.tiers.device().class_of(block), Vec::with_capacity(1));
        if self.tiers.host().ready(class) == 0 {
            self.prepare(Tier::Host, PerClass::of(class, 1), true);
        }
        self.take((Tier::Host, class), 1, true, &mut target);
        target.pop()
    }

    /// Copies a cached device block that stays, unless the host has it or no room; returns whether it does.
    fn copy_to_host(&mut self, block: BlockId, (key, rank): (Key, Rank)) -> bool {
        if let Some(copy) = self.tiers.host().find(&key) {
            // Several points need it: it must not go before the last of them.
            self.tiers.set_rank(copy, rank);
            return false;
        }
        let has_lease = self.tiers.device().block(block).lease_room(LeaseKind::OverlappableRead) > 0;
        if !has_lease || !self.has_host_room(block, rank) {
            return false;
        }
        let Some(copy) = self.take_on_host(block) else { return false };
        let (from, to) = ((Tier::Device, block), (Tier::Host, copy));
        self.transfer_cached(Kind::SwapOut, from, to, LeaseKind::OverlappableRead);
        self.tiers.release(to);
        let identity = CachedIdentity { key, depth: 0, parent: self.tiers.parent(from), tenant: 0 };
        let event = self.tiers.published_event(from);
        let rank = Some(rank);
        self.transfers.publish(PendingPublish { from, to, identity, is_found: true, demotes: false, rank, event });
        true
    }

    /// Empties blocks for the next step, so that it need not wait for its copies to the host: `wanted`, and a reserve for
    /// prompts that no one can foresee.
    pub(crate) fn offload_ahead(&mut self, wanted: PerClass) {
        for class in 0..self.tiers.device().num_classes() {
            let (device, wanted) = (self.tiers.device(), wanted.get(class).max(self.tiers.reserve(class)));
            let empty = device.ready(class) + device.vacant(class);
            let (missing, left) = (wanted.saturating_sub(empty), self.tiers.host_copies_left());
            // Not a part of it: the ends of prompts would be copied, and what the next step evicts beyond the bound dropped.
            if missing > 0 && missing <= left && device.evictable_of(class) > 0 {
                self.evict(Some(class), missing, left, true);
            }
        }
    }

    /// Frees cached blocks that no prompt can find; see [`Tiers::cut_off`](crate::tiers::Tiers::cut_off).
    pub(crate) fn cut_off(&mut self) {
        let Self { tiers, transfers, jobs } = self;
        tiers.cut_off(|parent| transfers.promised().chain(jobs.promised()).any(|(link, _)| link == parent));
    }

    /// Forgets device blocks whose bytes are now on the host, if only the copy that is ending holds them.
    pub(crate) fn demote(&mut self, blocks: &[(BlockId, Key)]) {
        for (block, key) in blocks {
            if self.tiers.device().own_key(*block) == Some(*key) {
                self.tiers.demote(*block);
            }
        }
    }

    /// Publishes the blocks that have landed under a ticket, before its leases end. Returns the device blocks to free
    /// in favor of their host copies.
    pub(crate) fn publish_landed(&mut self, landed: &[PendingPublish]) -> Vec<(BlockId, Key)> {
        let mut demoted = Vec::new();
        for &PendingPublish { from, to, identity, is_found, demotes, rank, event } in landed {
            if demotes {
                demoted.push((from.1, identity.key));
            }
            let is_linked = || {
                self.tiers.block(to).tier_copy() == Some(from) && self.tiers.host().key(from.1) == Some(identity.key)
            };
            if !is_found && is_linked() {
                // Other points of the host may need it: it keeps its place there.
                self.tiers.unlink(to);
            } else if is_found && (to.0 != Tier::Device || is_linked()) {
                self.tiers.publish_copy(to, identity, event, rank);
            }
        }
        demoted
    }

    /// Cancels the publication of a ticket's lost blocks, and unpublishes the host copies they were read from.
    pub(crate) fn cancel_publishes(&mut self, ticket: TicketId, lost: &HashSet<TierBlock>) {
        let Some(pending) = self.transfers.publishes_mut(ticket) else { return };
        let is_lost = |pending: &PendingPublish| lost.contains(&pending.to);
        let unread = pending.iter().filter(|pending| pending.from.0 == Tier::Host && is_lost(pending));
        let unread: Vec<TierBlock> = unread.map(|pending| pending.from).collect();
        pending.retain(|pending| !is_lost(pending));
        for copy in unread {
            self.tiers.lose(copy);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Append, Config, Counts, KeySpec, Manager, Prompt, PromptOptions, SequenceId};

    const TOKENS: [u32; 5] = [1, 2, 3, 4, 5];

    fn prompt(tokens: &[u32]) -> Prompt<'_> {
        Prompt { tokens, spec: KeySpec::default(), extras: &[], hashed: None }
    }

    fn admit(manager: &mut Manager, tokens: &[u32]) -> SequenceId {
        let mut out = Vec::new();
        manager.allocate_prompts(&[prompt(tokens)], PromptOptions::default(), &mut out).unwrap();
        out[0].0
    }

    fn step(manager: &mut Manager) {
        let ticket = manager.take_decision().ticket;
        manager.complete(ticket).unwrap();
        manager.check().unwrap();
    }

    /// A sequence that is on the host, its two full blocks cached there and nowhere else.
    fn swapped() -> (Manager, SequenceId) {
        let config = Config { prefix_caching: true, ..Config::new(2, [8, 8, 0]) };
        let mut manager = Manager::new(config).unwrap();
        manager.keep_host_copies(0).unwrap();
        let sequence = admit(&mut manager, &TOKENS);
        step(&mut manager);
        manager.mark_computed(&[sequence]).unwrap();
        manager.swap_out(&[sequence], Tier::Host).unwrap();
        step(&mut manager);
        let mut out = Vec::new();
        manager.allocate(&[16], &mut out).unwrap();
        manager.free(&out).unwrap();
        step(&mut manager);
        assert_eq!((manager.pool(Tier::Device).published(), manager.pool(Tier::Host).published()), (0, 2));
        (manager, sequence)
    }

    #[test]
    fn a_loaded_block_that_another_sequence_has_written_since_is_not_published() {
        let (mut manager, sequence) = swapped();
        manager.truncate(sequence, 3).unwrap();
        let loader = admit(&mut manager, &TOKENS);
        manager.swap_in(&[sequence], Tier::Device).unwrap();
        let block = manager.block_table(sequence).unwrap()[1];
        assert_eq!(manager.block_table(loader).unwrap()[1], block, "one load serves both");
        manager.free(&[loader]).unwrap();
        let mut slot = [0];
        manager.append(Append::new(&[sequence], Counts::All(1), &mut slot)).unwrap();
        assert_eq!(slot, [i64::from(block.0) * 2 + 1], "the last user writes in place");
        step(&mut manager);
        assert_eq!(manager.pool(Tier::Device).published(), 1);
        assert_eq!(manager.lookup(&prompt(&TOKENS)).map(|hit| hit.tokens), Ok(4), "the host still has it");
    }

    #[test]
    fn a_failed_load_takes_the_copys_key_with_it() {
        for whole in [false, true] {
            let (mut manager, sequence) = swapped();
            manager.free(&[sequence]).unwrap();
            let loader = admit(&mut manager, &TOKENS);
            let decision = manager.take_decision();
            let lost: Vec<_> = decision.of(Kind::SwapIn).cloned().collect();
            let hit = if whole { manager.fail_whole(decision.ticket) } else { manager.fail(decision.ticket, &lost) };
            assert_eq!(hit, Ok(vec![loader]));
            manager.free(&[loader]).unwrap();
            manager.check().unwrap();
            assert_eq!(manager.lookup(&prompt(&TOKENS)).map(|hit| hit.tokens), Ok(0));
        }
    }

    #[test]
    fn a_batch_that_does_not_fit_loads_nothing() {
        let (mut manager, sequence) = swapped();
        let mut out = Vec::new();
        manager.allocate(&[12], &mut out).unwrap();
        let mut handles = Vec::new();
        assert!(manager.allocate_prompts(&[prompt(&TOKENS)], PromptOptions::default(), &mut handles).is_err());
        assert!(handles.is_empty() && manager.take_decision().is_empty());
        manager.free(&[sequence]).unwrap();
        assert_eq!(manager.pool(Tier::Host).free(), 8);
    }
}
