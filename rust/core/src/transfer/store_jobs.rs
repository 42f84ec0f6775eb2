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
use crate::hash::{Chain, ExportedKey, GroupMark, Key};
use crate::id::{BlockId, JobId, LeaseId, Tier};
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
    /// Keys in the store.
    pub keys: Vec<ExportedKey>,
    /// The blocks.
    pub blocks: Vec<BlockId>,
    /// Salt of each block's tenant.
    pub tenants: Vec<[u8; 32]>,
    /// Key of the block before each in its prompt; zeros for the first.
    pub parents: Vec<ExportedKey>,
}

impl StoreJob {
    fn empty(job: JobId, tier: Tier) -> Self {
        let (keys, blocks, tenants, parents) = Default::default();
        Self { job, tier, keys, blocks, tenants, parents }
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
    pub(crate) anchor: u8,
    pub(crate) mark: Option<GroupMark>,
    pub(crate) depth: u32,
    pub(crate) tenant: u16,
    pub(crate) salt: [u8; 32],
    pub(crate) lora_id: u64,
}

impl Missing {
    /// Key under which it is found once it is loaded.
    fn key(&self) -> Key {
        self.chain.key().of_group(self.group)
    }

    /// Key in the store.
    pub(crate) fn exported(&self) -> ExportedKey {
        self.chain.export_of(self.mark)
    }

    /// Tag of the key of the block that it hangs on, 0 for none.
    fn parent(&self) -> u32 {
        self.hangs_on.map_or(0, |chain| chain.key().of_group(self.anchor).tag())
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
    /// Keys of the blocks that neither tier has: missing ones, and those that a load is bringing.
    pub(crate) lacking: Vec<(u32, Key)>,
    /// Loads go to the host only: on the device, blocks of several groups are found together.
    pub(crate) by_host: bool,
}

impl Wanted {
    /// Number of the prompt's blocks on device and host that could be evicted.
    pub(crate) fn num_evictable(&self, tiers: &Tiers) -> [usize; 2] {
        let on_device = self.on_device.iter().filter(|(_, block)| tiers.device().costs(*block, false)).count();
        [on_device, self.on_host.iter().filter(|&&block| tiers.host().costs(block, false)).count()]
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

    /// Tags of the keys that loads are bringing, and of those before them.
    pub(crate) fn promised(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let missing = self.loads.values().flat_map(|load| load.targets.iter().map(|(_, missing)| missing));
        missing.map(|missing| (missing.key().tag(), missing.parent()))
    }

    /// Number of blocks promised to waiting prompts that no load has taken yet.
    pub(crate) fn num_promised(&self) -> usize {
        // There are far fewer loads in flight than promises.
        self.leases.num_promised() - self.loading.iter().filter(|key| self.leases.is_promised(key)).count()
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
        let targets = [Tier::Device, Tier::Host].map(|tier| self.num_targets(tier));
        self.leases.lease(tiers, wanted, share, targets, kept_free)
    }

    /// Number of blocks that loads are filling.
    fn num_targets(&self, tier: Tier) -> usize {
        self.loads.values().filter(|load| load.tier == tier).map(|load| load.targets.len()).sum()
    }

    /// Number of blocks that a prompt's next loads may take on host and device: neither the prompt's own blocks nor those
    /// that a transfer still reads. On the host, loads and leases of prompts that wait hold at most half of the blocks
    /// that no table has. On the device, `kept_free` stay free.
    pub(crate) fn room(&self, tiers: &Tiers, wanted: &Wanted, kept_free: usize) -> [(Tier, usize); 2] {
        let room = |pool: &Pool, own: usize| {
            let free = if pool.available() > pool.free() { pool.uncached() } else { pool.free() };
            pool.free().saturating_sub(own).min(free)
        };
        let ([own, copies], host) = (wanted.num_evictable(tiers), tiers.host());
        let on_host = if tiers.keeps_host_copies() {
            let held = self.leases.num_idle(tiers, Tier::Host) + self.num_targets(Tier::Host);
            room(host, copies).min(usize::midpoint(host.free(), held).saturating_sub(held))
        } else {
            0
        };
        let on_device = if wanted.by_host { 0 } else { room(tiers.device(), own).saturating_sub(kept_free) };
        [(Tier::Host, on_host), (Tier::Device, on_device)]
    }

    /// Begins to load missing blocks, as room permits.
    pub(crate) fn begin_load(&mut self, tiers: &mut Tiers, wanted: Wanted, kept_free: usize) -> StoreJob {
        let [host, device] = self.room(tiers, &wanted, kept_free);
        let (tier, room) = if host.1 > 0 { host } else { device };
        let Wanted { on_device, on_host: mut kept, mut missing, .. } = wanted;
        kept.retain(|&block| !missing.is_empty() && tiers.host().block(block).lease_room(LeaseKind::Read) > 0);
        for &block in &kept {
            tiers.lease_cached((Tier::Host, block), LeaseKind::Read);
        }
        // A prompt longer than the free blocks must not evict its own beginning.
        let spared = lease_unused(tiers, &on_device);
        missing.truncate(room);
        let (mut blocks, job) = (Vec::with_capacity(missing.len()), self.next());
        tiers.take((tier, 0), missing.len(), true, &mut blocks);
        for &block in &blocks {
            tiers.release((tier, block));
        }
        end_leases(tiers, Tier::Device, &spared, LeaseKind::Read);
        self.loading.extend(missing.iter().map(Missing::key));
        let keys = missing.iter().map(Missing::exported).collect();
        let tenants = missing.iter().map(|missing| missing.salt).collect();
        let parent = |missing: &Missing| missing.hangs_on.map_or(ExportedKey([0; 32]), |chain| chain.export());
        let parents = missing.iter().map(parent).collect();
        let load = Load { tier, targets: blocks.iter().copied().zip(missing).collect(), kept, on_device };
        if load.targets.is_empty() {
            end_leases(tiers, Tier::Host, &load.kept, LeaseKind::Read);
        } else {
            self.loads.insert(job, load);
        }
        StoreJob { job, tier, keys, blocks, tenants, parents }
    }

    /// Ends a load; `landed` tells which blocks have their bytes; those can now be found.
    pub(crate) fn end_load(&mut self, tiers: &mut Tiers, job: JobId, landed: &[bool], tokens: u32) -> Result<usize> {
        let load = self.loads.get(&job).ok_or(Error::UnknownJob { job })?;
        if load.targets.len() != landed.len() {
            let must = format!("{}, the blocks of job {job}", load.targets.len());
            return Err(invalid("number of results", landed.len() as i128, must));
        }
        let Some(Load { tier, targets, kept, on_device }) = self.loads.remove(&job) else { return Ok(0) };
        let mut published = 0;
        for (&(block, missing), &landed) in targets.iter().zip(landed) {
            let Missing { chain, before, group, depth, tenant, salt, lora_id, .. } = missing;
            let key = missing.key();
            self.loading.remove(&key);
            if landed {
                let identity = CachedIdentity { key, depth, parent: missing.parent(), tenant };
                let publication = Publication { block, key: chain, parent: before, tokens, salt, lora_id, group };
                published += usize::from(tiers.publish_loaded((tier, block), identity, publication));
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

    /// Begins to write at most `most` queued blocks, as many as are due. A block follows its parent. Writes hold at most a
    /// quarter of the device's blocks. A block for which `is_coming` is true, because it is on its way to the host, and
    /// those after it wait.
    pub(crate) fn begin_write(&mut self, tiers: &mut Tiers, most: usize, is_coming: impl Fn(&Key) -> bool) -> StoreJob {
        let reading: usize = self.writes.values().map(|(_, blocks)| blocks.len()).sum();
        let quarter = tiers.device().len().div_ceil(4);
        let host = if tiers.keeps_host_copies() { tiers.host().uncached() } else { 0 };
        let free = tiers.device().uncached() + host;
        let due = tiers.write_queue().map_or(0, |write_queue| write_queue.due(free, quarter));
        let most = most.min(due).min(quarter.saturating_sub(reading));
        let (tier, mut found) = queued(tiers, most, is_coming);
        found.sort_by_key(|(key, _)| tiers.write_queue().map(|write_queue| write_queue.place(key)));
        let mut job = StoreJob::empty(self.next(), tier);
        for (key, block) in found {
            let exported = tiers.write_queue().and_then(|write_queue| write_queue.export(&key));
            if let Some(exported) = exported.filter(|_| tiers.block((tier, block)).lease_room(LeaseKind::Read) > 0) {
                tiers.lease_cached((tier, block), LeaseKind::Read);
                job.keys.push(exported.key);
                job.tenants.push(exported.salt);
                job.parents.push(exported.parent);
                job.blocks.push(block);
            } else if let Some(write_queue) = tiers.write_queue_mut() {
                write_queue.lose(key);
            }
        }
        if !job.blocks.is_empty() {
            self.writes.insert(job.job, (tier, job.blocks.clone()));
        }
        job
    }

    /// Whether blocks are being read for the store.
    #[inline]
    pub(crate) fn are_writing(&self) -> bool {
        !self.writes.is_empty()
    }

    /// Number of blocks of a tier that would be available without the writes, except `kept`, which is in ascending
    /// order.
    pub(crate) fn num_held(&self, pool: &Pool, overlappable_too: bool, kept: &[BlockId]) -> usize {
        let mut reads: HashMap<BlockId, usize> = HashMap::new();
        let writes = self.writes.values().filter(|(tier, _)| *tier == pool.tier());
        writes.flat_map(|(_, blocks)| blocks).for_each(|&block| *reads.entry(block).or_default() += 1);
        let is_held = |(block, reads): &(&BlockId, &usize)| {
            !pool.is_beyond(**block)
                && pool.block(**block).is_only_read_by(**reads, overlappable_too)
                && kept.binary_search(block).is_err()
        };
        reads.iter().filter(is_held).count()
    }

    /// Cancels writes of a tier, last one first, until `wanted` blocks are available. The store has not received their
    /// blocks.
    pub(crate) fn give_up_writes(&mut self, tiers: &mut Tiers, tier: Tier, wanted: usize) {
        while tiers.pool(tier).available() < wanted {
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

/// The next queued blocks, up to the first that is coming or that another tier has: so no block is written before its
/// parent.
fn queued(tiers: &mut Tiers, most: usize, is_coming: impl Fn(&Key) -> bool) -> (Tier, Vec<(Key, BlockId)>) {
    let (mut tier, mut found) = (Tier::Device, Vec::new());
    while found.len() < most {
        let Some(key) = tiers.write_queue_mut().and_then(StoreWriteQueue::pop) else { break };
        let at = tiers.find_queued(&key);
        let Some(write_queue) = tiers.write_queue_mut() else { break };
        match at {
            Some((of, block)) if found.is_empty() || of == tier => {
                tier = of;
                found.push((key, block));
            }
            None if !is_coming(&key) => write_queue.lose(key),
            Some(_) | None => {
                write_queue.push_back_in(key);
                break;
            }
        }
    }
    (tier, found)
}
