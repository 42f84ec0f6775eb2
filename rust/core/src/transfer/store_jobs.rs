//! Blocks in transit between a prefix store and the manager's tiers.
//!
//! A *load* brings blocks from the store to the host, or to the device if the host keeps no copies or has no room. Its
//! targets are in no table and cannot be found until their bytes have landed. A *write* reads published blocks for the
//! store. Both hold only leases: whatever else ends in the meantime, no block is reallocated before its job has ended.
//! There is one exception: a write is cancelled if a call needs its blocks. The bytes read for it must then not reach
//! the store.

use super::{Lease, LeaseShare, PromptLeases};
use crate::block::{LeaseKind, TierBlock};
use crate::error::{Error, Result, invalid};
use crate::event::Publication;
use crate::hash::{AheadKeys, Chain, ExportedKey, GroupMark, Key};
use crate::id::{BlockId, JobId, LeaseId, Tier};
use crate::page::PerClass;
use crate::pool::Pool;
use crate::prefix::CachedIdentity;
use crate::tiers::{StoreWriteQueue, Tiers};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// A load or a write: which block of `tier` has, or will have, the bytes of which key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreJob {
    /// Number of the job.
    pub job: JobId,
    /// Tier of the blocks.
    pub tier: Tier,
    /// Page class of the blocks.
    pub page_class: usize,
    /// Keys in the store.
    pub keys: Vec<ExportedKey>,
    /// The blocks, by their ids in the class.
    pub blocks: Vec<BlockId>,
    /// Salt of each block's tenant.
    pub tenants: Vec<[u8; 32]>,
    /// Key of the block before each in its prompt; zeros for the first.
    pub parents: Vec<ExportedKey>,
    /// Keys under which device and host find the blocks.
    pub cache_keys: Vec<Key>,
}

impl StoreJob {
    fn empty(job: JobId, tier: Tier, page_class: usize) -> Self {
        let (keys, blocks, tenants, parents, cache_keys) = Default::default();
        Self { job, tier, page_class, keys, blocks, tenants, parents, cache_keys }
    }
}

/// A block of a prompt that neither device nor host has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Missing {
    pub(crate) chain: Chain,
    /// The chain before it.
    pub(crate) before: Option<Chain>,
    /// The anchor's block without which it is worth nothing, see [`Groups::hangs_on`](crate::group::Groups::hangs_on).
    pub(crate) hangs_on: Option<Chain>,
    pub(crate) group: u8,
    /// Which of the group's blocks that the key stands for.
    pub(crate) part: u32,
    pub(crate) page_class: u8,
    pub(crate) anchor: u8,
    pub(crate) mark: Option<GroupMark>,
    /// With a drafter.
    pub(crate) ahead: Option<AheadKeys>,
    pub(crate) depth: u32,
    pub(crate) tenant: u16,
    pub(crate) salt: [u8; 32],
    pub(crate) lora_id: u64,
}

impl Missing {
    /// Key under which it is found once it is loaded.
    fn key(&self) -> Key {
        self.ahead.map_or_else(|| self.chain.key().of_part(self.group, self.part), |ahead| ahead.own.0)
    }

    /// Key in the store.
    pub(crate) fn exported(&self) -> ExportedKey {
        self.ahead.map_or_else(|| self.chain.export_of(self.mark), |ahead| ahead.own.1)
    }

    /// Link to the block that it hangs on, 0 for none.
    fn parent(&self) -> u64 {
        let own = || self.hangs_on.map(|chain| chain.key().of_group(self.anchor));
        let ahead = self.ahead.map(|ahead| ahead.hangs_on.map(|(key, _)| key));
        ahead.unwrap_or_else(own).map_or(0, |key| key.link())
    }

    /// Key of that block in the store, zeros for none.
    fn exported_parent(&self) -> ExportedKey {
        let ahead = self.ahead.map(|ahead| ahead.hangs_on.map(|(_, key)| key));
        ahead.unwrap_or_else(|| self.hangs_on.map(|chain| chain.export())).unwrap_or(ExportedKey([0; 32]))
    }
}

/// Which of a prompt's full blocks the tiers have, and which are missing, up to a number of missing ones.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted {
    /// Blocks that the device has.
    pub(crate) on_device: Vec<(Key, BlockId)>,
    /// Host copies before missing blocks that the device does not have.
    pub(crate) on_host: Vec<BlockId>,
    /// All blocks that device and host have, and their places in the prompt.
    pub(crate) found: Vec<(u32, TierBlock)>,
    pub(crate) missing: Vec<Missing>,
    /// Keys and page classes of the blocks that neither tier has: missing ones, and those that a load is bringing.
    pub(crate) lacking: Vec<(u32, Key, u8)>,
    /// Page classes of those that a load is bringing.
    pub(crate) loading: Vec<u8>,
    /// Loads go to the host only: on the device, blocks of several groups are found together.
    pub(crate) by_host: bool,
}

impl Wanted {
    /// The weights of the prompt's blocks on device and host that could be evicted.
    pub(crate) fn evictable(&self, tiers: &Tiers) -> [usize; 2] {
        let weigh = |pool: &Pool, blocks: &mut dyn Iterator<Item = BlockId>| {
            let blocks = blocks.filter(|&block| pool.costs(block, false));
            blocks.map(|block| pool.weight(pool.class_of(block))).sum()
        };
        let on_device = weigh(tiers.device(), &mut self.on_device.iter().map(|(_, block)| *block));
        [on_device, weigh(tiers.host(), &mut self.on_host.iter().copied())]
    }
}

#[derive(Debug, Clone)]
struct Load {
    tier: Tier,
    targets: Vec<(BlockId, Missing)>,
    /// Host copies held until the load ends: without them the loaded blocks would be useless.
    kept: Vec<BlockId>,
    /// Blocks of its prompt on the device. They must not be evicted before the loaded ones.
    on_device: Vec<(Key, BlockId)>,
}

/// The jobs in flight.
#[derive(Debug, Clone, Default)]
pub(crate) struct StoreJobs {
    last: u64,
    loads: BTreeMap<JobId, Load>,
    writes: BTreeMap<JobId, (Tier, Vec<BlockId>)>,
    /// Cancelled writes that have not ended.
    given_up: BTreeSet<JobId>,
    /// Keys that loads are bringing.
    loading: HashSet<Key>,
    /// What is kept for prompts that wait.
    leases: PromptLeases,
}

impl StoreJobs {
    /// Whether a load is bringing a block.
    pub(crate) fn is_loading(&self, key: &Key) -> bool {
        self.loading.contains(key)
    }

    /// Links to the blocks that loads are bringing, and to those before them.
    pub(crate) fn promised(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let missing = self.loads.values().flat_map(|load| load.targets.iter().map(|(_, missing)| missing));
        missing.map(|missing| (missing.key().link(), missing.parent()))
    }

    /// Number of blocks promised to waiting prompts that no load has taken yet.
    pub(crate) fn num_promised(&self) -> usize {
        // There are far fewer loads in flight than promises.
        self.leases.num_promised() - self.loading.iter().filter(|key| self.leases.is_promised(key)).count()
    }

    /// These blocks by page class.
    pub(crate) fn promised_blocks(&self) -> PerClass {
        let promised = self.leases.promised().filter(|(key, _)| !self.is_loading(key));
        promised.map(|(_, class)| PerClass::of(class, 1)).sum()
    }

    fn next(&mut self) -> JobId {
        self.last += 1;
        JobId(self.last)
    }

    /// The leases of prompts that wait.
    pub(crate) fn prompt_leases(&self) -> &PromptLeases {
        &self.leases
    }

    /// Like [`StoreJobs::prompt_leases`], mutable.
    pub(crate) fn prompt_leases_mut(&mut self) -> &mut PromptLeases {
        &mut self.leases
    }

    /// Leases a prompt's blocks; see [`PromptLeases::lease`].
    pub(crate) fn lease(
        &mut self,
        tiers: &mut Tiers,
        wanted: &Wanted,
        share: LeaseShare,
        kept_free: usize,
    ) -> Option<LeaseId> {
        let targets = [Tier::Device, Tier::Host].map(|tier| self.targets(tiers.pool(tier)));
        self.leases.lease(tiers, wanted, share, targets, kept_free)
    }

    /// The weight of the blocks that loads are filling in a tier.
    fn targets(&self, pool: &Pool) -> usize {
        let loads = self.loads.values().filter(|load| load.tier == pool.tier());
        loads.flat_map(|load| &load.targets).map(|(_, missing)| pool.weight(usize::from(missing.page_class))).sum()
    }

    /// The weight of what loads may still take on the host: they and leases of prompts that wait hold at most half of the
    /// blocks that no table has.
    pub(crate) fn host_share(&self, tiers: &Tiers) -> usize {
        if !tiers.keeps_host_copies() {
            return 0;
        }
        let held = self.leases.idle_weight(tiers, Tier::Host) + self.targets(tiers.host());
        usize::midpoint(tiers.host().free_weight(), held).saturating_sub(held)
    }

    /// Number of blocks of a page class that a prompt's next loads may take on host and device: neither the prompt's own
    /// blocks nor those that a transfer still reads. On the host, no more than their share; on the device, `kept_free`
    /// stay free.
    pub(crate) fn room(&self, tiers: &Tiers, wanted: &Wanted, class: usize, kept_free: usize) -> [(Tier, usize); 2] {
        let (host, device) = (tiers.host(), tiers.device());
        let share = self.host_share(tiers) / host.weight(class).max(1);
        let on_host = if share == 0 { 0 } else { host.unread_in(class, &wanted.on_host).min(share) };
        if wanted.by_host {
            return [(Tier::Host, on_host), (Tier::Device, 0)];
        }
        let own: Vec<BlockId> = wanted.on_device.iter().map(|(_, block)| *block).collect();
        [(Tier::Host, on_host), (Tier::Device, device.unread_in(class, &own).saturating_sub(kept_free))]
    }

    /// Begins to load missing blocks of the first one's page class, as room permits.
    pub(crate) fn begin_load(&mut self, tiers: &mut Tiers, wanted: Wanted, kept_free: usize) -> StoreJob {
        let class = wanted.missing.first().map_or(0, |missing| usize::from(missing.page_class));
        let [host, device] = self.room(tiers, &wanted, class, kept_free);
        let (tier, room) = if host.1 > 0 { host } else { device };
        let Wanted { on_device, on_host: mut kept, mut missing, .. } = wanted;
        let others = missing.iter().position(|missing| usize::from(missing.page_class) != class);
        missing.truncate(others.unwrap_or(missing.len()));
        kept.retain(|&block| !missing.is_empty() && tiers.host().block(block).lease_room(LeaseKind::Read) > 0);
        for &block in &kept {
            tiers.lease_cached((Tier::Host, block), LeaseKind::Read);
        }
        // A prompt longer than the free blocks must not evict its own beginning.
        let spared = lease_unused(tiers, &on_device);
        missing.truncate(room);
        let (mut blocks, job) = (Vec::with_capacity(missing.len()), self.next());
        if tiers.pool(tier).num_classes() > 1 {
            tiers.make_room(tier, PerClass::of(class, missing.len()), false);
        }
        tiers.take((tier, class), missing.len(), true, &mut blocks);
        for &block in &blocks {
            tiers.release((tier, block));
        }
        end_leases(tiers, Tier::Device, &spared, LeaseKind::Read);
        self.loading.extend(missing.iter().map(Missing::key));
        let keys = missing.iter().map(Missing::exported).collect();
        let tenants = missing.iter().map(|missing| missing.salt).collect();
        let parents = missing.iter().map(Missing::exported_parent).collect();
        let cache_keys = missing.iter().map(Missing::key).collect();
        let load = Load { tier, targets: blocks.iter().copied().zip(missing).collect(), kept, on_device };
        let blocks = local(tiers.pool(tier), &blocks);
        if load.targets.is_empty() {
            end_leases(tiers, Tier::Host, &load.kept, LeaseKind::Read);
        } else {
            self.loads.insert(job, load);
        }
        StoreJob { job, tier, page_class: class, keys, blocks, tenants, parents, cache_keys }
    }

    /// Ends a load; `landed` tells which blocks have their bytes; those can now be found.
    pub(crate) fn end_load(&mut self, tiers: &mut Tiers, job: JobId, landed: &[bool], tokens: u32) -> Result<usize> {
        let load = self.loads.get(&job).ok_or(Error::UnknownJob { job })?;
        if load.targets.len() != landed.len() {
            let must = format!("{}, the blocks of job {job}", load.targets.len());
            return Err(invalid("length of landed", landed.len() as i128, must));
        }
        let Some(Load { tier, targets, kept, on_device }) = self.loads.remove(&job) else { return Ok(0) };
        let mut published = 0;
        for (&(block, missing), &landed) in targets.iter().zip(landed) {
            let Missing { chain, before, group, part, depth, tenant, salt, lora_id, .. } = missing;
            let ahead = missing.ahead.map(Box::new);
            let key = missing.key();
            self.loading.remove(&key);
            if landed {
                let identity = CachedIdentity { key, depth, parent: missing.parent(), tenant };
                let publication =
                    Publication { block, key: chain, parent: before, tokens, salt, lora_id, group, part, ahead };
                published += usize::from(tiers.publish_loaded((tier, block), identity, &publication));
            }
        }
        // In reverse, so that a chain is evicted from its end.
        let blocks: Vec<BlockId> = targets.iter().map(|(block, _)| *block).collect();
        end_leases(tiers, tier, &blocks, LeaseKind::Write);
        end_leases(tiers, Tier::Host, &kept, LeaseKind::Read);
        let used = lease_unused(tiers, &on_device);
        end_leases(tiers, Tier::Device, &used, LeaseKind::Read);
        if let Some(last) = targets.last() {
            tiers.touch_chain(last.1.parent());
        }
        self.leases.advance(tiers);
        Ok(published)
    }

    /// Begins to write at most `most` queued blocks of one page class, of `most_weight` together, as many as are due. A
    /// block follows its parent. Writes hold at most a quarter of the device. A block for which `is_coming` is true,
    /// because it is on its way to the host, and those after it wait.
    pub(crate) fn begin_write(
        &mut self,
        tiers: &mut Tiers,
        (most, most_weight): (usize, usize),
        is_coming: impl Fn(&Key) -> bool,
    ) -> StoreJob {
        let weight = |(tier, blocks): &(Tier, Vec<BlockId>)| -> usize {
            let pool = tiers.pool(*tier);
            blocks.iter().map(|&block| pool.weight(pool.class_of(block))).sum()
        };
        let reading: usize = self.writes.values().map(weight).sum();
        let quarter = tiers.device().whole_weight().div_ceil(4);
        let host = if tiers.keeps_host_copies() { tiers.host().uncached_weight() } else { 0 };
        let free = tiers.device().uncached_weight() + host;
        let weigh = |queued| tiers.device().weigh(queued);
        let due = tiers.write_queue().map_or(0, |write_queue| write_queue.due(weigh, free, quarter));
        // A block that is larger than all of that is written alone.
        let room = most_weight.min(quarter).saturating_sub(reading);
        let (at, mut found) = queued(tiers, (most, due, room, self.writes.is_empty()), is_coming);
        let (tier, class) = at;
        found.sort_by_key(|(key, _)| tiers.write_queue().map(|write_queue| write_queue.place(key)));
        let mut job = StoreJob::empty(self.next(), tier, class);
        for (key, block) in found {
            let exported = tiers.write_queue().and_then(|write_queue| write_queue.export(&key));
            if let Some(exported) = exported.filter(|_| tiers.block((tier, block)).lease_room(LeaseKind::Read) > 0) {
                tiers.lease_cached((tier, block), LeaseKind::Read);
                job.keys.push(exported.key);
                job.tenants.push(exported.salt);
                job.parents.push(exported.parent);
                job.cache_keys.push(key);
                job.blocks.push(block);
            } else if let Some(write_queue) = tiers.write_queue_mut() {
                write_queue.lose(key);
            }
        }
        if !job.blocks.is_empty() {
            let blocks = local(tiers.pool(tier), &job.blocks);
            self.writes.insert(job.job, (tier, std::mem::replace(&mut job.blocks, blocks)));
        }
        job
    }

    /// Whether blocks are being read for the store.
    #[inline]
    pub(crate) fn are_writing(&self) -> bool {
        !self.writes.is_empty()
    }

    /// Blocks of a tier that would be available without the writes, except `kept`, which is in ascending order.
    pub(crate) fn held(&self, pool: &Pool, overlappable_too: bool, kept: &[BlockId]) -> Vec<BlockId> {
        let mut reads: HashMap<BlockId, usize> = HashMap::new();
        let writes = self.writes.values().filter(|(tier, _)| *tier == pool.tier());
        writes.flat_map(|(_, blocks)| blocks).for_each(|&block| *reads.entry(block).or_default() += 1);
        let is_held = |(block, reads): &(&BlockId, &usize)| {
            !pool.is_beyond(**block)
                && pool.block(**block).is_only_read_by(**reads, overlappable_too)
                && kept.binary_search(block).is_err()
        };
        reads.iter().filter(is_held).map(|(&block, _)| block).collect()
    }

    /// Cancels writes of a tier, last one first, until `wanted` blocks are available. The store has not received their
    /// blocks.
    pub(crate) fn give_up_writes(&mut self, tiers: &mut Tiers, tier: Tier, wanted: PerClass, overlappable_too: bool) {
        let lacks = |pool: &Pool| {
            if pool.num_classes() == 1 {
                return pool.available() < wanted.get(0);
            }
            !pool.room(wanted, (&[], &[]), PerClass::default(), overlappable_too).is_enough
        };
        while lacks(tiers.pool(tier)) {
            let last = self.writes.iter().rev().find(|(_, (of, _))| *of == tier).map(|(job, _)| *job);
            let Some(job) = last else { return };
            self.cancel_write(tiers, job);
            self.given_up.insert(job);
        }
    }

    /// Cancels a write: its blocks are queued again, before the blocks that follow them.
    fn cancel_write(&mut self, tiers: &mut Tiers, job: JobId) {
        let Some((tier, blocks)) = self.writes.remove(&job) else { return };
        let keys: Vec<Key> = blocks.iter().filter_map(|&block| tiers.pool(tier).own_key(block)).collect();
        end_leases(tiers, tier, &blocks, LeaseKind::Read);
        if let Some(write_queue) = tiers.write_queue_mut() {
            keys.iter().rev().for_each(|key| write_queue.push_back_in(*key));
        }
    }

    /// Ends all jobs: nothing that they load has landed, and what they read may be written later.
    pub(crate) fn give_up_all(&mut self, tiers: &mut Tiers, tokens: u32) -> Result<()> {
        while let Some((&job, load)) = self.loads.first_key_value() {
            let landed = vec![false; load.targets.len()];
            self.end_load(tiers, job, &landed, tokens)?;
        }
        while let Some((&job, _)) = self.writes.last_key_value() {
            self.cancel_write(tiers, job);
        }
        self.given_up.clear();
        Ok(())
    }

    /// Ends a write: its blocks have been read. Returns false if it was cancelled: the bytes read may belong to other
    /// blocks.
    pub(crate) fn end_write(&mut self, tiers: &mut Tiers, job: JobId) -> Result<bool> {
        if self.given_up.remove(&job) {
            return Ok(false);
        }
        let (tier, blocks) = self.writes.remove(&job).ok_or(Error::UnknownJob { job })?;
        end_leases(tiers, tier, &blocks, LeaseKind::Read);
        Ok(true)
    }

    /// Leases that jobs and prompts that wait hold.
    pub(crate) fn leases(&self) -> impl Iterator<Item = Lease> + '_ {
        let targets = self.loads.values().flat_map(|load| {
            let targets = load.targets.iter().map(|(block, _)| (load.tier, LeaseKind::Write, *block));
            targets.chain(load.kept.iter().map(|&block| (Tier::Host, LeaseKind::Read, block)))
        });
        let reads = self.writes.values();
        let reads = reads.flat_map(|(tier, blocks)| blocks.iter().map(|&block| (*tier, LeaseKind::Read, block)));
        let jobs = targets.chain(reads).map(|(tier, kind, block)| Lease { tier, kind, block });
        jobs.chain(self.leases.leases())
    }

    /// Checks the jobs.
    pub(crate) fn check(&self, tiers: &Tiers) -> std::result::Result<(), String> {
        let targets =
            || self.loads.values().flat_map(|load| load.targets.iter().map(move |target| (load.tier, target)));
        for (tier, (block, missing)) in targets() {
            if tiers.pool(tier).refs(*block) > 0 || tiers.block((tier, *block)).is_published() {
                return Err(format!("{tier} block {block} is in use, and a load from the store has not ended"));
            }
            if !self.is_loading(&missing.key()) {
                return Err(format!("{tier} block {block} is loaded under a key that nobody is loading"));
            }
        }
        if targets().count() != self.loading.len() {
            return Err(format!("{} blocks are loaded, {} keys", targets().count(), self.loading.len()));
        }
        self.leases.check()?;
        tiers.write_queue().map_or(Ok(()), StoreWriteQueue::check)
    }
}

/// Leases blocks that the device still has under their keys and that are in no table.
fn lease_unused(tiers: &mut Tiers, blocks: &[(Key, BlockId)]) -> Vec<BlockId> {
    let mut leased = Vec::with_capacity(blocks.len());
    for &(key, block) in blocks {
        let is_there = tiers.device().find(&key) == Some(block) && tiers.device().refs(block) == 0;
        if is_there && tiers.device().block(block).lease_room(LeaseKind::Read) > 0 {
            tiers.lease_cached((Tier::Device, block), LeaseKind::Read);
            leased.push(block);
        }
    }
    leased
}

fn end_leases(tiers: &mut Tiers, tier: Tier, blocks: &[BlockId], kind: LeaseKind) {
    for &block in blocks.iter().rev() {
        tiers.end_lease((tier, block), kind);
    }
}

/// The next queued blocks, up to the first that is coming, or that another tier has, or that is of another page class: so no
/// block is written before its parent. At most `most` ones, until their weight is `due`, and within `room`; the first may
/// be larger if it goes `alone`.
fn queued(
    tiers: &mut Tiers,
    (most, due, room, alone): (usize, usize, usize, bool),
    is_coming: impl Fn(&Key) -> bool,
) -> ((Tier, usize), Vec<(Key, BlockId)>) {
    let (mut place, mut found, mut sum) = ((Tier::Device, 0), Vec::new(), 0);
    while found.len() < most && sum < due.min(room.max(usize::from(alone))) {
        let Some(key) = tiers.write_queue_mut().and_then(StoreWriteQueue::pop) else { break };
        let at = tiers.find_queued(&key);
        let of = at.map(|(tier, block)| ((tier, tiers.pool(tier).class_of(block)), block));
        let weight = of.map_or(0, |((_, class), _)| tiers.device().weight(class));
        let fits = sum + weight <= room || (alone && found.is_empty());
        let Some(write_queue) = tiers.write_queue_mut() else { break };
        match of {
            Some((of, block)) if fits && (found.is_empty() || of == place) => {
                place = of;
                sum += weight;
                found.push((key, block));
            }
            None if !is_coming(&key) => write_queue.lose(key),
            Some(_) | None => {
                write_queue.push_back_in(key);
                break;
            }
        }
    }
    (place, found)
}

/// The ids of blocks in their page class.
fn local(pool: &Pool, blocks: &[BlockId]) -> Vec<BlockId> {
    blocks.iter().map(|&block| BlockId(pool.local(block).1)).collect()
}
