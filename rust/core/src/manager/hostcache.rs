//! Host copies as the second level of the prefix cache: what was swapped out stays findable on the host, and a prompt
//! whose blocks are only there gets them back by transfers of its own step.
//!
//! A transfer comes with a promise: once its bytes have landed, its target is published under its source's key. A promise
//! to the device holds only while its target is still linked to the copy that it was read from, so what has been written
//! or freed meanwhile is not published. A failed load takes the key of the host's copy with it.

use super::{Manager, invalid, link, part_orphans, release, take, unlink};
use crate::block::{LeaseKind, TierBlock};
use crate::decision::Kind;
use crate::error::Result;
use crate::event::Told;
use crate::hash::Key;
use crate::id::{BlockId, TicketId, Tier};
use crate::lease::Lease;
use crate::pool::{Pool, Published};
use crate::table::RowKeys;
use std::collections::{BTreeMap, HashSet};

/// A block of a prompt that was found behind the first one that is not on the device.
#[derive(Clone, Copy, Debug)]
pub(super) enum Found {
    Device(BlockId),
    Host(BlockId),
}

/// A block that is to be published once its bytes have landed.
#[derive(Clone, Copy, Debug)]
struct Promise {
    from: TierBlock,
    to: TierBlock,
    key: Key,
    /// Blocks before it in its prompt.
    depth: u32,
    /// Tenant with a quota that a device block will belong to, 0 for none.
    tenant: u16,
    /// The source, which nothing uses, is given up for its copy.
    demotes: bool,
    /// What events have told of the source.
    told: Told,
}

/// Promises of the present step, and of the tickets that have not ended.
#[derive(Debug, Clone, Default)]
pub(super) struct HostCache {
    open: Vec<Promise>,
    submitted: BTreeMap<TicketId, Vec<Promise>>,
}

impl Promise {
    fn new(from: TierBlock, to: TierBlock, key: Key) -> Self {
        Self { from, to, key, depth: 0, tenant: 0, demotes: false, told: Told::default() }
    }
}

fn depth(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX)
}

impl HostCache {
    /// Ends the step: its promises are kept or broken with its ticket.
    pub(super) fn submit(&mut self, ticket: TicketId) {
        if !self.open.is_empty() {
            self.submitted.insert(ticket, std::mem::take(&mut self.open));
        }
    }
}

impl Manager {
    /// Keeps host copies of published blocks findable from now on, least recently used first to go.
    ///
    /// # Errors
    /// The prefix cache is off, there are no host blocks or some are in use, events are recorded already, or copies are.
    pub fn keep_host_copies(&mut self) -> Result<()> {
        let [device, host, _] = &self.pools;
        let null = usize::from(self.groups.slide());
        let fits = device.is_caching() && host.len() > null && host.free() + null == host.len();
        if !fits || self.events.is_some() || self.host_cache.is_some() {
            let must = "at least 1, none in use, with prefix caching, and asked for once and before events".to_owned();
            return Err(invalid("host blocks of a prefix cache", host.len() as i128, must));
        }
        self.pools[1].start_caching()?;
        self.host_cache = Some(Box::default());
        Ok(())
    }

    /// Whether host copies are kept.
    #[must_use]
    pub fn keeps_host_copies(&self) -> bool {
        self.host_cache.is_some()
    }

    /// What comes next of a prompt's first blocks, as far as either tier has it; at most `batch` prompts are to read it at
    /// once.
    pub(super) fn find_on_host(&self, keys: &[Key], batch: usize) -> Vec<Found> {
        let [device, host, _] = &self.pools;
        let find = |key: &Key| {
            let copy = || host.find(key).filter(|&block| host.block(block).lease_room() >= batch).map(Found::Host);
            device.find(key).map(Found::Device).or_else(copy)
        };
        keys.iter().map_while(find).collect()
    }

    /// Device blocks that a batch takes for what is on the host; a copy that several prompts want is loaded once.
    pub(super) fn blocks_to_load<'a>(&self, found: impl Iterator<Item = &'a Found>) -> usize {
        let copies = found.filter_map(|found| match found {
            Found::Host(copy) if self.loading(*copy).is_none() => Some(*copy),
            _ => None,
        });
        let mut copies: Vec<BlockId> = copies.collect();
        copies.sort_unstable();
        copies.dedup();
        copies.len()
    }

    /// The device block that the present step loads a host copy into.
    fn loading(&self, copy: BlockId) -> Option<BlockId> {
        let twin = self.pools[1]
            .block(copy)
            .tier_copy()
            .filter(|twin| twin.0 == Tier::Device && self.step.fresh.contains(twin))?;
        Some(twin.1)
    }

    /// Appends to a new table what was found behind its first blocks; device blocks have been claimed, host copies are
    /// loaded.
    pub(super) fn load(&mut self, tail: &[Found], keys: &RowKeys, table: &mut Vec<BlockId>) -> Result<()> {
        for found in tail {
            let at = table.len();
            match *found {
                Found::Device(block) => table.push(block),
                Found::Host(copy) => {
                    if let Some(block) = self.loading(copy) {
                        self.pools[0].share(block, 1);
                        table.push(block);
                    } else {
                        self.step.reuses_drained |= take(&mut self.pools, Tier::Device, 1, table);
                        self.load_block(copy, table[at], keys, at)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn load_block(&mut self, copy: BlockId, target: BlockId, keys: &RowKeys, at: usize) -> Result<()> {
        self.pools[1].lease_cached(copy, LeaseKind::Read)?;
        self.tickets.collect(Lease { tier: Tier::Host, kind: LeaseKind::Read, block: copy });
        self.lease(Tier::Device, target, LeaseKind::Write)?;
        self.step.pairs(Kind::SwapIn, Tier::Host, Tier::Device).push([copy.0, target.0]);
        let (from, to) = ((Tier::Host, copy), (Tier::Device, target));
        link(&mut self.pools, from, to);
        self.step.fresh.insert(to);
        self.promise(Promise { depth: depth(at), tenant: keys.tenant, ..Promise::new(from, to, keys.keys[at]) });
        self.stats.loaded += 1;
        Ok(())
    }

    /// Promises to publish the host copy of a device block that the present step swaps out, if that can be found.
    #[inline]
    pub(super) fn promise_copy(&mut self, from: TierBlock, to: TierBlock, at: usize) {
        if self.host_cache.is_some() && (from.0, to.0) == (Tier::Device, Tier::Host) {
            if let Some(key) = self.pools[0].key(from.1) {
                self.promise(Promise { depth: depth(at), ..Promise::new(from, to, key) });
            }
        }
    }

    fn promise(&mut self, mut promise: Promise) {
        let (tier, block) = promise.from;
        promise.told = self.events.as_ref().map(|events| events.told(tier, block)).unwrap_or_default();
        if let Some(cache) = &mut self.host_cache {
            cache.open.push(promise);
        }
    }

    /// Copies the next `count` device blocks to be evicted to the host, those that have no copy there and as far as there
    /// is room; returns how many. Nobody waits for them: as long as they are copied a prompt may still use them, or device
    /// work may have them; what is left once its copy has landed goes free, findable on the host.
    ///
    /// With the policy `lru` the time is in proportion to `count`; with others the policy is copied to be asked.
    ///
    /// # Errors
    /// Host copies are not kept.
    pub fn offload_cached(&mut self, count: usize) -> Result<usize> {
        if self.host_cache.is_none() {
            return Err(invalid("blocks to offload", count as i128, "asked for with host copies kept".to_owned()));
        }
        let mut sources = self.pools[0].eviction_candidates(count);
        let kept = |block: &BlockId| self.pools[0].key(*block).is_some_and(|key| self.pools[1].find(&key).is_none());
        sources.retain(|block| kept(block));
        sources.truncate(self.pools[1].free());
        let mut targets = Vec::with_capacity(sources.len());
        take(&mut self.pools, Tier::Host, sources.len(), &mut targets);
        for (&source, &target) in sources.iter().zip(&targets) {
            self.pools[0].lease_cached(source, LeaseKind::OverlappableRead)?;
            self.tickets.collect(Lease { tier: Tier::Device, kind: LeaseKind::OverlappableRead, block: source });
            self.lease(Tier::Host, target, LeaseKind::Write)?;
            release(&mut self.pools, Tier::Host, target);
            self.step.pairs(Kind::SwapOut, Tier::Device, Tier::Host).push([source.0, target.0]);
            if let Some(key) = self.pools[0].key(source) {
                let (from, to) = ((Tier::Device, source), (Tier::Host, target));
                self.promise(Promise { demotes: true, ..Promise::new(from, to, key) });
            }
        }
        Ok(sources.len())
    }

    /// Frees device blocks that have become evictable, and whose bytes are on the host.
    pub(super) fn demote(&mut self, blocks: &[(BlockId, Key)]) {
        for (block, key) in blocks {
            if self.pools[0].key(*block) == Some(*key) {
                self.pools[0].drop_cached(*block);
            }
        }
        if !blocks.is_empty() {
            part_orphans(&mut self.pools, Tier::Device);
        }
    }

    /// Publishes what a ticket has brought; its leases have not ended yet. Returns the device blocks that are given up.
    pub(super) fn keep_promises(&mut self, ticket: TicketId) -> Vec<(BlockId, Key)> {
        let mut demoted = Vec::new();
        let promises = self.host_cache.as_mut().and_then(|cache| cache.submitted.remove(&ticket));
        for Promise { from, to, key, depth, tenant, demotes, told } in promises.into_iter().flatten() {
            if demotes {
                demoted.push((from.1, key));
            }
            let (tier, block) = to;
            let linked =
                || self.pools[0].block(block).tier_copy() == Some(from) && self.pools[1].key(from.1) == Some(key);
            if tier == Tier::Device && !linked() {
                continue;
            }
            if self.pools[tier.index()].publish(block, key, depth) == Published::Now {
                if tier == Tier::Device && tenant != 0 {
                    self.pools[0].assign(block, tenant);
                }
                join_copies(&mut self.pools, &key);
                if let Some(events) = &mut self.events {
                    events.copied(&mut self.pools, to, told, self.block_size);
                }
            }
        }
        demoted
    }

    /// Forgets what a ticket has promised and not brought: the blocks that are lost, and the copies that were tried and
    /// could not be read.
    pub(super) fn break_promises(&mut self, ticket: TicketId, lost: &HashSet<TierBlock>, tried: bool) {
        let Some(promises) = self.host_cache.as_mut().and_then(|cache| cache.submitted.get_mut(&ticket)) else {
            return;
        };
        let broken = |promise: &Promise| lost.contains(&promise.to);
        let unread = promises.iter().filter(|promise| tried && promise.from.0 == Tier::Host && broken(promise));
        let unread: Vec<BlockId> = unread.map(|promise| promise.from.1).collect();
        promises.retain(|promise| !broken(promise));
        for copy in unread {
            unlink(&mut self.pools, Tier::Host, copy);
            self.pools[1].unpublish(copy);
        }
    }

    /// What does not hold of the promises: each target is being written under its ticket.
    pub(crate) fn check_promises(&self) -> std::result::Result<(), String> {
        let Some(cache) = &self.host_cache else { return Ok(()) };
        let open = self.tickets.open();
        let submitted = cache.submitted.iter().map(|(ticket, promises)| (*ticket, promises));
        for (ticket, promises) in submitted.chain([(open, &cache.open)]) {
            let leases: HashSet<Lease> = self.tickets.of(ticket).collect();
            for Promise { to: (tier, block), .. } in promises {
                if !leases.contains(&Lease { tier: *tier, kind: LeaseKind::Write, block: *block }) {
                    return Err(format!("{tier} block {block} is promised, but ticket {ticket} does not write it"));
                }
            }
        }
        Ok(())
    }
}

/// Links the two copies of a key, if both tiers have one and no other.
pub(super) fn join_copies(pools: &mut [Pool; 3], key: &Key) {
    if let (Some(device), Some(host)) = (pools[0].find(key), pools[1].find(key)) {
        if pools[0].block(device).tier_copy().is_none() && pools[1].block(host).tier_copy().is_none() {
            link(pools, (Tier::Device, device), (Tier::Host, host));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::{Config, Counts, Prompt};
    use crate::{KeySpec, Manager, SequenceId};

    const TOKENS: [u32; 5] = [1, 2, 3, 4, 5];

    fn prompt(tokens: &[u32]) -> Prompt<'_> {
        Prompt { tokens, spec: KeySpec::default(), extras: &[] }
    }

    fn admit(manager: &mut Manager, tokens: &[u32]) -> SequenceId {
        let mut out = Vec::new();
        manager.allocate_prompts(&[prompt(tokens)], &mut out).unwrap();
        out[0].0
    }

    fn step(manager: &mut Manager) {
        let ticket = manager.take_decision().ticket;
        manager.complete(ticket).unwrap();
        manager.check().unwrap();
    }

    /// A sequence that is on the host, its two full blocks findable there and nowhere else.
    fn swapped() -> (Manager, SequenceId) {
        let config = Config { block_size: 2, blocks: [8, 8, 0], watermark: 0.0, prefix_caching: true };
        let mut manager = Manager::new(config).unwrap();
        manager.keep_host_copies().unwrap();
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
        manager.append(&[sequence], Counts::All(1), 0, &mut slot).unwrap();
        assert_eq!(slot, [i64::from(block.0) * 2 + 1], "the last user writes in place");
        step(&mut manager);
        assert_eq!(manager.pool(Tier::Device).published(), 1);
        assert_eq!(manager.lookup(&prompt(&TOKENS)).map(|hit| hit.tokens), Ok(4), "the host still has it");
    }

    #[test]
    fn a_cancelled_load_leaves_the_copy_and_a_failed_one_does_not() {
        for fails in [false, true] {
            let (mut manager, sequence) = swapped();
            manager.free(&[sequence]).unwrap();
            let loader = admit(&mut manager, &TOKENS);
            let decision = manager.take_decision();
            let lost: Vec<_> = decision.of(Kind::SwapIn).cloned().collect();
            if fails {
                assert_eq!(manager.fail(decision.ticket, &lost), Ok(vec![loader]));
            } else {
                manager.set_deadline(decision.ticket, 5).unwrap();
                assert_eq!(manager.expire(5).unwrap().sequences, [loader]);
            }
            manager.free(&[loader]).unwrap();
            manager.check().unwrap();
            assert_eq!(manager.lookup(&prompt(&TOKENS)).map(|hit| hit.tokens), Ok(if fails { 0 } else { 4 }));
        }
    }

    #[test]
    fn a_batch_that_does_not_fit_loads_nothing() {
        let (mut manager, sequence) = swapped();
        let mut out = Vec::new();
        manager.allocate(&[12], &mut out).unwrap();
        let mut handles = Vec::new();
        assert!(manager.allocate_prompts(&[prompt(&TOKENS)], &mut handles).is_err());
        assert!(handles.is_empty() && manager.take_decision().is_empty());
        manager.free(&[sequence]).unwrap();
        assert_eq!(manager.pool(Tier::Host).free(), 8);
    }
}
