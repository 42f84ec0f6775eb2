//! Rules for jobs of a prefix store. A load's bytes land only when it ends, and a write reads only when it ends,
//! whatever else happens meanwhile, and whatever the size of the device.

use super::{BLOCK, Bytes, GARBAGE, World, keep, values};
use blockyard_core::hash::Chain;
use blockyard_core::{
    BlockId, BlockState, Error, Group, JobId, LeaseId, LeaseShare, Prompt, StoreJob, StoreWrites, Tier,
};
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy)]
pub(crate) enum Op {
    /// Up to `most` blocks of a prompt that another process has stored.
    Load {
        tokens: u32,
        family: u32,
        most: usize,
    },
    /// A load ends, perhaps without one of its blocks.
    EndLoad(usize, Option<usize>),
    /// A prompt waits, with a share of the blocks.
    Lease {
        tokens: u32,
        family: u32,
        share: usize,
    },
    /// It is loaded, or starts.
    Settle(usize),
    EndLease(usize),
    Write(usize),
    EndWrite(usize),
    /// The device shrinks while a prompt is loaded beyond its new end, and may grow again; then the prompt is admitted.
    LoadAndShrink {
        tokens: u32,
        family: u32,
        grown: Option<usize>,
    },
    /// Jobs begin on a full device that shrinks by a few blocks; some of its blocks are cached, others are being read.
    Crowded {
        freed: usize,
        fewer: usize,
        tokens: u32,
        family: u32,
    },
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    let (tokens, family) = (5u32..40, 0u32..3);
    prop_oneof![
        4 => (tokens.clone(), family.clone(), 1usize..8)
            .prop_map(|(tokens, family, most)| Op::Load { tokens, family, most }),
        3 => (0usize..8, prop::option::weighted(0.3, 0usize..8)).prop_map(|(n, lost)| Op::EndLoad(n, lost)),
        3 => (tokens.clone(), family.clone(), 0usize..3)
            .prop_map(|(tokens, family, share)| Op::Lease { tokens, family, share }),
        1 => (0usize..8).prop_map(Op::Settle),
        2 => (0usize..8).prop_map(Op::EndLease),
        4 => (1usize..6).prop_map(Op::Write),
        2 => (0usize..8).prop_map(Op::EndWrite),
        1 => (tokens.clone(), family.clone(), prop::option::weighted(0.3, 1usize..12))
            .prop_map(|(tokens, family, grown)| Op::LoadAndShrink { tokens, family, grown }),
        2 => (0usize..4, 1usize..4, tokens, family)
            .prop_map(|(freed, fewer, tokens, family)| Op::Crowded { freed, fewer, tokens, family }),
    ]
}

/// When blocks are written to a store, if there is one.
pub(crate) fn writes() -> impl Strategy<Value = Option<StoreWrites>> {
    prop::option::weighted(0.7, prop::sample::select(&StoreWrites::ALL[..]))
}

/// Jobs in flight with the correct bytes of their blocks, and what was written.
#[derive(Default)]
pub(crate) struct Jobs {
    loads: Vec<(StoreJob, Vec<Bytes>)>,
    writes: Vec<(StoreJob, Vec<Bytes>)>,
    stored: BTreeMap<[u8; 32], Bytes>,
    /// And the prompts that they are for.
    leases: Vec<(LeaseId, Vec<u32>)>,
}

impl Jobs {
    /// The loads and the writes.
    pub(crate) fn under_way(self) -> (Vec<StoreJob>, Vec<StoreJob>) {
        let jobs = |jobs: Vec<(StoreJob, Vec<Bytes>)>| jobs.into_iter().map(|(job, _)| job).collect();
        (jobs(self.loads), jobs(self.writes))
    }

    pub(crate) fn are_writing(&self) -> bool {
        !self.writes.is_empty()
    }
}

/// The ids of a prompt of a family.
pub(crate) fn family_ids(tokens: u32, family: u32) -> Vec<u32> {
    (0..tokens).map(|i| family + i / 9).collect()
}

/// What a prompt's full blocks hold, by their exported keys.
fn contents(prompt: &Prompt<'_>) -> BTreeMap<[u8; 32], Bytes> {
    let mut chain = Chain::new(&prompt.spec, BLOCK, 0);
    let values = values(prompt.tokens);
    let full = prompt.tokens.chunks_exact(BLOCK as usize).zip(values.chunks_exact(BLOCK as usize));
    full.map(|(tokens, values)| {
        chain.block(tokens, &[]).unwrap();
        (chain.export().0, values.try_into().unwrap())
    })
    .collect()
}

impl World {
    pub(crate) fn apply_store(&mut self, op: Op) {
        match op {
            Op::Load { tokens, family, most } => self.begin_load(&family_ids(tokens, family), most),
            Op::EndLoad(n, lost) => {
                if !self.jobs.loads.is_empty() {
                    self.end_load(n % self.jobs.loads.len(), lost);
                }
            }
            Op::Lease { tokens, family, share } => {
                self.lease(&family_ids(tokens, family), LeaseShare::ALL[share]);
            }
            Op::Settle(n) => {
                if let Some((lease, ids)) = self.jobs.leases.get(n) {
                    let prompt = Prompt { tokens: ids, spec: keep::spec(ids), extras: &[], hashed: None };
                    self.manager.settle_lease(*lease, &prompt).unwrap();
                }
            }
            Op::EndLease(n) => {
                if n < self.jobs.leases.len() {
                    self.manager.end_lease(self.jobs.leases.remove(n).0).unwrap();
                }
            }
            Op::Write(most) => self.begin_write(most),
            Op::EndWrite(n) => {
                if self.jobs.are_writing() {
                    self.end_write(n % self.jobs.writes.len());
                }
            }
            Op::LoadAndShrink { tokens, family, grown } => {
                self.settle();
                let free = self.manager.pool(Tier::Device).free_blocks().count();
                self.allocate(u32::try_from(free / 2).unwrap() * BLOCK);
                self.step(None);
                self.begin_load(&family_ids(tokens, family), usize::MAX);
                let some = self.pick(0, usize::MAX);
                self.free(&some);
                let target = |(job, _): &(StoreJob, _)| job.blocks[0].index();
                if let Some(end) = self.jobs.loads.last().map(target) {
                    self.resize(end);
                    self.give_back();
                    if let Some(grown) = grown {
                        self.resize(end + grown);
                        self.give_back();
                    }
                }
                self.end_jobs();
                self.give_back();
                self.prompt(tokens, family, u32::MAX);
            }
            Op::Crowded { freed, fewer, tokens, family } => {
                self.settle();
                let all = self.pick(0, usize::MAX);
                self.mark(&all);
                self.free(&all[..freed.min(all.len())]);
                let pool = self.manager.pool(Tier::Device);
                let (blocks, free) = (pool.len(), pool.free_blocks().count());
                self.allocate(u32::try_from(free).unwrap() * BLOCK);
                self.step(None);
                self.swap_out(0, 1, Tier::Host);
                self.step(None);
                self.resize(blocks - fewer.min(blocks));
                self.give_back();
                self.begin_load(&family_ids(tokens, family), usize::MAX);
                self.begin_write(4);
            }
        }
    }

    fn lease(&mut self, ids: &[u32], share: LeaseShare) {
        let prompt = Prompt { tokens: ids, spec: keep::spec(ids), extras: &[], hashed: None };
        let before = self.manager.num_leases();
        let lease = self.manager.lease_prompt(&prompt, share).unwrap();
        assert_eq!(self.manager.num_leases(), before + usize::from(lease.is_some()));
        self.jobs.leases.extend(lease.map(|lease| (lease, ids.to_vec())));
    }

    fn begin_load(&mut self, ids: &[u32], most: usize) {
        let prompt = Prompt { tokens: ids, spec: keep::spec(ids), extras: &[], hashed: None };
        let has_points = self.groups != [Group::Full] || self.tokens_of(0) != BLOCK;
        let point = has_points.then(|| self.point(&prompt));
        let missing = self.manager.missing_blocks(&prompt, most, point).unwrap();
        let job = self.manager.begin_load(&prompt, most, point).unwrap();
        assert!(job.keys.len() == job.blocks.len() && missing.keys.starts_with(&job.keys));
        let classes = missing.page_classes.iter().take(job.keys.len());
        assert!(classes.into_iter().all(|&class| usize::from(class) == job.page_class), "{missing:?} as {job:?}");
        assert!(!has_points || job.blocks.is_empty() || job.tier == Tier::Host);
        let pool = self.manager.pool(job.tier);
        let number = |block: &BlockId| pool.global(job.page_class, block.0).unwrap();
        assert!(job.blocks.iter().map(number).all(|block| block.index() < pool.len() && pool.refs(block) == 0));
        // Only what was written has points; full blocks may come from other processes.
        let contents = if has_points { self.jobs.stored.clone() } else { contents(&prompt) };
        let right: Vec<Bytes> = job.keys.iter().map(|key| contents[&key.0]).collect();
        for (key, bytes) in job.keys.iter().zip(&right) {
            assert!(self.jobs.stored.get(&key.0).is_none_or(|stored| stored == bytes), "the store has other bytes");
        }
        if job.blocks.is_empty() {
            assert_eq!(self.manager.end_load(job.job, &[]), Err(Error::UnknownJob { job: job.job }));
        } else {
            self.jobs.loads.push((job, right));
        }
    }

    /// The point of a prompt that the store completes, in blocks. Each block that it then misses is in the store.
    fn point(&self, prompt: &Prompt<'_>) -> usize {
        let search = self.manager.search_store(prompt).unwrap();
        let has: Vec<bool> = search.keys().iter().map(|key| self.jobs.stored.contains_key(&key.0)).collect();
        let point = search.deepest(&has, usize::MAX).unwrap();
        let missing = self.manager.missing_blocks(prompt, usize::MAX, Some(point)).unwrap();
        assert!(missing.keys.iter().all(|key| self.jobs.stored.contains_key(&key.0)), "a point that is not whole");
        assert!(point == 0 || search.deepest(&has, missing.keys.len() + missing.loading.len()).unwrap() == point);
        let coming = vec![0; self.manager.num_classes()];
        let with_room = self.manager.deepest_with_room(&search, &has, &coming).unwrap();
        assert!(with_room <= point);
        if self.has_pages() { with_room } else { point }
    }

    fn end_load(&mut self, n: usize, lost: Option<usize>) {
        let (StoreJob { job, tier, page_class, blocks, .. }, right) = self.jobs.loads.swap_remove(n);
        let landed: Vec<bool> = (0..blocks.len()).map(|i| Some(i) != lost).collect();
        for ((block, bytes), landed) in blocks.iter().zip(right).zip(&landed) {
            self.put((tier, page_class, block.0), if *landed { bytes } else { GARBAGE });
        }
        let found = self.manager.end_load(job, &landed).unwrap();
        // No block beyond the current end is found, wherever the end was when the load began.
        let end = self.manager.pool(tier).len_of(page_class);
        assert!(found <= blocks.iter().zip(&landed).filter(|&(block, landed)| *landed && block.index() < end).count());
        self.assert_ended(job);
    }

    fn begin_write(&mut self, most: usize) {
        let job = self.manager.begin_write(most);
        assert!(job.keys.len() == job.blocks.len() && job.blocks.len() <= most);
        let at = |block: &BlockId| (job.tier, job.page_class, block.0);
        let held: Vec<Bytes> = job.blocks.iter().map(|block| self.memory.get(at(block))).collect();
        if !held.is_empty() {
            self.jobs.writes.push((job, held));
        }
    }

    fn end_write(&mut self, n: usize) {
        let (StoreJob { job, tier, page_class, keys, blocks, .. }, held) = self.jobs.writes.swap_remove(n);
        let read: Vec<Bytes> = blocks.iter().map(|block| self.memory.get((tier, page_class, block.0))).collect();
        // If a call has taken the blocks, the bytes read are not stored.
        if self.manager.end_write(job).unwrap() {
            assert_eq!(read, held, "blocks were written while the store read them");
            let of_class = |group: &usize| self.manager.page(*group).is_some_and(|page| page.0 == page_class);
            let groups = (0..self.groups.len()).filter(of_class);
            let filled = groups.map(|group| self.tokens_of(group)).min().unwrap_or(BLOCK) as usize;
            for (key, bytes) in keys.iter().zip(read) {
                let before = self.jobs.stored.insert(key.0, bytes);
                // A state's block has slots that nothing reads, and one of fewer tokens has some behind these.
                let is_same = before.is_none_or(|before| before[..filled] == bytes[..filled])
                    || self.groups.contains(&Group::Recurrent);
                assert!(is_same, "one key, two contents");
            }
        }
        self.assert_ended(job);
    }

    fn assert_ended(&mut self, job: JobId) {
        assert_eq!(self.manager.end_write(job), Err(Error::UnknownJob { job }));
        assert_eq!(self.manager.end_load(job, &[]), Err(Error::UnknownJob { job }));
    }

    pub(crate) fn end_jobs(&mut self) {
        self.manager.end_leases();
        assert_eq!((self.manager.num_promised(), self.manager.num_leased_idle()), (0, 0));
        while !self.jobs.loads.is_empty() {
            self.end_load(0, None);
        }
        while self.jobs.are_writing() {
            self.end_write(0);
        }
    }

    /// Number of available device blocks, counted one by one: those that nothing uses, and those that only writes hold,
    /// which can be cancelled. One fewer for each block in use beyond the end.
    pub(crate) fn room(&self) -> usize {
        let device = self.manager.pool(Tier::Device).len();
        let mut reads = BTreeMap::new();
        for (job, _) in self.jobs.writes.iter().filter(|(job, _)| job.tier == Tier::Device) {
            let is_given_up = self.manager.clone().end_write(job.job) == Ok(false);
            for block in job.blocks.iter().filter(|_| !is_given_up) {
                *reads.entry(block.index()).or_insert(0u16) += 1;
            }
        }
        let (mut room, mut live) = (0, 0);
        for (block, state) in self.manager.uses(Tier::Device).into_iter().enumerate() {
            match state {
                BlockState::InUse { .. } => live += usize::from(block >= device),
                _ if block >= device => {}
                BlockState::Free | BlockState::Cached | BlockState::Overlappable(_) => room += 1,
                BlockState::Held(leases) => {
                    room += usize::from(!leases.filling && Some(&leases.reads) == reads.get(&block));
                }
            }
        }
        room.saturating_sub(live)
    }
}
