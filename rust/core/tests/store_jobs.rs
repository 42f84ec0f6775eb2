//! Loads from a prefix store and writes to it, while sequences run.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

use blockyard_core::{
    Append, BlockId, Config, Error, ExportedKey, KeySpec, Kind, LeaseShare, Manager, Prompt, PromptOptions, SequenceId,
    StoreJob, StoreWrites, Tier,
};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

fn prompt(tokens: &[u32]) -> Prompt<'_> {
    Prompt { tokens, spec: KeySpec::default(), extras: &[], hashed: None }
}

fn tokens(stream: u32, count: u32) -> Vec<u32> {
    (0..count).map(|at| stream * 1000 + at).collect()
}

fn manager(host: usize, writes: StoreWrites) -> Manager {
    let config = Config { prefix_caching: true, ..Config::new(4, [12, host, 0]) };
    let mut manager = Manager::new(config).unwrap();
    if host > 0 {
        manager.keep_host_copies(0).unwrap();
    }
    manager.use_store(writes).unwrap();
    manager
}

fn admit(manager: &mut Manager, tokens: &[u32]) -> (SequenceId, u32) {
    let mut out = Vec::new();
    manager.allocate_prompts(&[prompt(tokens)], PromptOptions::default(), &mut out).unwrap();
    out[0]
}

/// Ends the step, computes a sequence and frees it.
fn compute(manager: &mut Manager, sequence: SequenceId) {
    let ticket = manager.take_decision().ticket;
    manager.complete(ticket).unwrap();
    manager.mark_computed(&[sequence]).unwrap();
    manager.free(&[sequence]).unwrap();
    manager.check().unwrap();
}

fn load(manager: &mut Manager, tokens: &[u32]) -> StoreJob {
    let job = manager.begin_load(&prompt(tokens), 100, None).unwrap();
    manager.check().unwrap();
    job
}

fn hit(manager: &Manager, tokens: &[u32]) -> u32 {
    manager.lookup(&prompt(tokens)).unwrap().tokens
}

#[test]
fn a_loaded_block_is_found_only_once_its_bytes_have_landed() {
    for host in [8, 0] {
        let (mut manager, asked) = (manager(host, StoreWrites::Through), tokens(1, 14));
        let job = load(&mut manager, &asked);
        assert_eq!((job.tier, job.blocks.len()), (if host > 0 { Tier::Host } else { Tier::Device }, 3));
        assert_eq!(hit(&manager, &asked), 0);
        assert_eq!(load(&mut manager, &asked).blocks.len(), 0, "nobody loads a block twice");
        let missing = manager.missing_blocks(&prompt(&asked), 9, None).unwrap();
        assert_eq!((missing.keys.len(), missing.loading.len()), (0, 3));
        assert_eq!(manager.end_load(job.job, &[true, true, false]), Ok(2));
        assert_eq!(hit(&manager, &asked), 8, "the prefix ends before a missing block");
        manager.check().unwrap();
        assert_eq!(manager.end_load(job.job, &[true; 3]), Err(Error::UnknownJob { job: job.job }));
        let (sequence, cached) = admit(&mut manager, &asked);
        assert_eq!(cached, 8);
        compute(&mut manager, sequence);
        assert_eq!(manager.begin_write(100).blocks.len(), 1, "blocks that came from the store are not written");
    }
}

#[test]
fn what_lands_for_a_leased_prompt_stays_until_its_lease_ends() {
    for host in [16, 0] {
        for is_leased in [true, false] {
            let (mut manager, asked) = (manager(host, StoreWrites::Never), tokens(1, 17));
            let lease = is_leased.then(|| manager.lease_prompt(&prompt(&asked), LeaseShare::Half).unwrap().unwrap());
            assert_eq!(manager.num_promised(), if is_leased { 4 } else { 0 });
            let job = load(&mut manager, &asked);
            manager.end_load(job.job, &[true, true, false, false]).unwrap();
            manager.check().unwrap();
            assert_eq!(manager.num_promised(), if is_leased { 2 } else { 0 });
            for other in 2..8 {
                let job = load(&mut manager, &tokens(other, 33));
                if !job.blocks.is_empty() {
                    manager.end_load(job.job, &vec![true; job.blocks.len()]).unwrap();
                }
            }
            assert_eq!(hit(&manager, &asked), if is_leased { 8 } else { 0 }, "{host}");
            if let Some(lease) = lease {
                manager.settle_lease(lease, &prompt(&asked)).unwrap();
                assert_eq!(manager.num_promised(), 0);
                manager.end_lease(lease).unwrap();
                manager.end_lease(lease).unwrap();
            }
            manager.check().unwrap();
            assert_eq!(manager.num_leases(), 0);
            assert_eq!(manager.pool(Tier::Device).free() + manager.pool(Tier::Host).free(), 12 + host);
        }
    }
}

#[test]
fn leases_share_half_of_the_blocks_that_no_sequence_has() {
    let (mut manager, mut leases) = (manager(0, StoreWrites::Never), Vec::new());
    let mut lease = |manager: &mut Manager, stream, share| {
        let lease = manager.lease_prompt(&prompt(&tokens(stream, 13)), share).unwrap();
        leases.extend(lease);
        manager.check().unwrap();
        lease.is_some()
    };
    let (running, _) = admit(&mut manager, &tokens(9, 4));
    assert!(lease(&mut manager, 1, LeaseShare::Half), "3 of 11 blocks");
    assert!(lease(&mut manager, 1, LeaseShare::Half), "the same 3");
    assert!(!lease(&mut manager, 2, LeaseShare::Half), "6 of 11");
    assert!(lease(&mut manager, 2, LeaseShare::Free), "6 of 11");
    assert!(lease(&mut manager, 3, LeaseShare::Free), "9 of 11");
    assert!(!lease(&mut manager, 4, LeaseShare::Free), "12 of 11");
    assert!(lease(&mut manager, 4, LeaseShare::Any));
    assert_eq!((manager.num_leases(), manager.num_promised()), (5, 12));
    manager.end_leases();
    assert_eq!((manager.num_leases(), manager.num_promised()), (0, 0));
    manager.check().unwrap();
    assert!(!lease(&mut manager, 5, LeaseShare::Half) || manager.num_leases() == 1);
    compute(&mut manager, running);
    assert!(manager.end_lease(blockyard_core::LeaseId(99)).is_err(), "there was never such a lease");
}

#[test]
fn a_reset_and_a_smaller_device_end_all_leases() {
    let (mut manager, asked) = (manager(0, StoreWrites::Never), tokens(1, 17));
    for end in [
        |manager: &mut Manager| assert!(manager.reset_prefix_cache()),
        |manager: &mut Manager| {
            manager.resize_device(8).unwrap();
        },
    ] {
        let job = load(&mut manager, &asked);
        manager.end_load(job.job, &vec![true; job.blocks.len()]).unwrap();
        let lease = manager.lease_prompt(&prompt(&asked), LeaseShare::Half).unwrap().unwrap();
        assert_eq!(manager.num_leased_idle(), 4);
        end(&mut manager);
        assert_eq!((manager.num_leases(), manager.num_leased_idle()), (0, 0));
        manager.end_lease(lease).unwrap();
        manager.settle_lease(lease, &prompt(&asked)).unwrap();
        manager.check().unwrap();
    }
}

#[test]
fn a_wrong_number_of_results_changes_nothing() {
    let (mut manager, asked) = (manager(8, StoreWrites::Through), tokens(1, 9));
    let job = load(&mut manager, &asked);
    let before = format!("{manager:?}");
    assert!(manager.end_load(job.job, &[true]).is_err());
    assert_eq!(format!("{manager:?}"), before);
    assert_eq!(manager.end_load(job.job, &[true, true]), Ok(2));
}

#[test]
fn loads_leave_half_of_the_host_and_then_take_what_is_free_on_the_device() {
    let (mut manager, asked) = (manager(8, StoreWrites::Through), tokens(1, 90));
    assert_eq!(manager.room_to_load(&prompt(&asked), None, 0), Ok(16));
    let job = load(&mut manager, &asked);
    assert_eq!((job.tier, job.blocks.len()), (Tier::Host, 4));
    let missing = manager.missing_blocks(&prompt(&asked), 9, None).unwrap();
    assert_eq!((missing.keys.len(), missing.loading.len()), (9, 4));
    let rest = load(&mut manager, &asked);
    assert_eq!((rest.tier, rest.blocks.len()), (Tier::Device, 12));
    assert_eq!(manager.room_to_load(&prompt(&asked), None, 0), Ok(0));
    assert_eq!(load(&mut manager, &asked).blocks.len(), 0);
    manager.end_load(rest.job, &[true; 12]).unwrap();
    manager.end_load(job.job, &[true; 4]).unwrap();
    assert_eq!(hit(&manager, &asked), 64);
}

#[test]
fn with_write_through_each_computed_block_is_written_once_under_its_exported_key() {
    let (mut manager, asked) = (manager(8, StoreWrites::Through), tokens(1, 13));
    let wanted = manager.missing_blocks(&prompt(&asked), 100, None).unwrap().keys;
    let (sequence, _) = admit(&mut manager, &asked);
    compute(&mut manager, sequence);
    let job = manager.begin_write(2);
    assert_eq!((job.tier, job.keys.as_slice()), (Tier::Device, &wanted[..2]));
    let rest = manager.begin_write(2);
    assert_eq!(rest.keys, wanted[2..]);
    assert_eq!(manager.pool(Tier::Device).free(), 12 - 3, "blocks being read for the store are not allocated");
    manager.check().unwrap();
    manager.end_write(job.job).unwrap();
    manager.end_write(rest.job).unwrap();
    assert_eq!(manager.pool(Tier::Device).free(), 12);
    assert!(manager.begin_write(2).blocks.is_empty());
    assert!(manager.reset_prefix_cache());
    manager.check().unwrap();
}

#[test]
fn with_write_back_prompts_are_written_from_their_beginning_before_they_can_be_evicted() {
    let (mut manager, asked) = (manager(0, StoreWrites::Back), tokens(1, 17));
    let keys = manager.missing_blocks(&prompt(&asked), 9, None).unwrap().keys;
    let (sequence, _) = admit(&mut manager, &asked);
    compute(&mut manager, sequence);
    assert!(manager.begin_write(9).blocks.is_empty(), "eight blocks are free");
    assert_eq!(manager.waiting_for_store(), 4);
    let mut out = Vec::new();
    manager.allocate(&[12], &mut out).unwrap();
    let job = manager.begin_write(9);
    assert_eq!(job.keys, keys[..2], "five blocks are free, three of which may be taken at once");
    assert!(manager.begin_write(9).blocks.is_empty());
    manager.end_write(job.job).unwrap();
    assert_eq!(manager.pool(Tier::Device).published(), 4, "blocks that are written stay cached");
    manager.flush_to_store();
    let rest = manager.begin_write(9);
    assert_eq!(rest.keys, keys[2..]);
    manager.end_write(rest.job).unwrap();
    assert_eq!(manager.waiting_for_store(), 0);
    manager.check().unwrap();
}

#[test]
fn with_second_use_a_block_is_written_once_a_second_prompt_has_it() {
    let mut manager = manager(0, StoreWrites::SecondUse);
    for round in 0..2 {
        let (sequence, cached) = admit(&mut manager, &tokens(1, 9));
        assert_eq!(cached, round * 8);
        assert_eq!(manager.begin_write(9).blocks.len(), round as usize * 2);
        compute(&mut manager, sequence);
    }
}

#[test]
fn a_write_is_cancelled_if_a_call_needs_its_blocks() {
    let (mut manager, asked) = (manager(0, StoreWrites::Through), tokens(1, 29));
    let (sequence, _) = admit(&mut manager, &asked);
    compute(&mut manager, sequence);
    let job = manager.begin_write(100);
    assert_eq!(job.blocks.len(), 3, "a quarter of the device");
    assert!(manager.begin_write(100).blocks.is_empty());
    let mut out = Vec::new();
    manager.allocate(&[36], &mut out).unwrap();
    manager.check().unwrap();
    assert!(
        matches!(manager.allocate(&[20], &mut out), Err(Error::OutOfBlocks { .. })),
        "the write does not hold that many"
    );
    assert_eq!(manager.pool(Tier::Device).free(), 0);
    manager.append(Append::new(&[out[0]], blockyard_core::Counts::Each(&[12]), &mut [0; 12])).unwrap();
    manager.check().unwrap();
    assert_eq!(manager.end_write(job.job), Ok(false), "the bytes read may belong to other blocks");
    assert_eq!(manager.end_write(job.job), Err(Error::UnknownJob { job: job.job }));
    manager.free(&out).unwrap();
    let (sequence, _) = admit(&mut manager, &asked);
    compute(&mut manager, sequence);
    let mut written = Vec::new();
    while let Some(next) = Some(manager.begin_write(100)).filter(|next| !next.keys.is_empty()) {
        written.extend(next.keys);
        assert_eq!(manager.end_write(next.job), Ok(true));
    }
    assert_eq!(written.len(), 7);
    assert_eq!(job.keys, written[..3], "they are written once they are computed again");
}

#[test]
fn jobs_name_the_tenants_and_the_parents_of_their_blocks() {
    for writes in [StoreWrites::Through, StoreWrites::Back] {
        let (mut manager, asked) = (manager(0, writes), tokens(1, 21));
        let spec = KeySpec::new(Some(b"a tenant"), 0);
        let mine = Prompt { spec, ..prompt(&asked) };
        let keys = manager.missing_blocks(&mine, 9, None).unwrap().keys;
        let parents = [&[ExportedKey([0; 32])], &keys[..4]].concat();
        let job = manager.begin_load(&mine, 2, None).unwrap();
        assert_eq!(
            (&job.keys, &job.parents, &job.tenants),
            (&keys[..2].to_vec(), &parents[..2].to_vec(), &vec![spec.salt; 2])
        );
        manager.end_load(job.job, &[true, false]).unwrap();
        let mut out = Vec::new();
        manager.allocate_prompts(&[mine], PromptOptions::default(), &mut out).unwrap();
        compute(&mut manager, out[0].0);
        if writes == StoreWrites::Back {
            out.clear();
            manager.allocate_prompts(&[prompt(&tokens(9, 28))], PromptOptions::default(), &mut out).unwrap();
        }
        let job = manager.begin_write(2);
        let at = keys.iter().position(|key| *key == job.keys[0]).unwrap();
        assert_eq!(job.keys, keys[at..at + 2], "parents go first");
        assert_eq!((job.parents, job.tenants), (parents[at..at + 2].to_vec(), vec![spec.salt; 2]));
        assert!(at > 0, "the first block came from the store");
    }
    let (mut manager, asked) = (manager(8, StoreWrites::Through), tokens(1, 9));
    let (sequence, _) = admit(&mut manager, &asked);
    compute(&mut manager, sequence);
    assert_eq!(manager.begin_write(2).tenants, [[0; 32]; 2]);
}

/// The bytes of all blocks, and a store. The tokens alone determine the bytes of a key's block.
struct Model {
    manager: Manager,
    bytes: HashMap<(Tier, u32), Vec<u8>>,
    store: HashMap<[u8; 32], Vec<u8>>,
    running: Vec<(SequenceId, Vec<u32>)>,
    loads: Vec<StoreJob>,
    writes: Vec<StoreJob>,
}

/// The bytes of block `at` of a stream.
fn right_bytes(tokens: &[u32], at: usize) -> Vec<u8> {
    tokens[..(at + 1) * 4].iter().flat_map(|token| token.to_le_bytes()).collect()
}

impl Model {
    fn step(&mut self) {
        let decision = self.manager.take_decision();
        for kind in Kind::ALL {
            for pairs in decision.of(kind) {
                let read: Vec<_> = pairs.ids.iter().map(|&[from, _]| self.bytes[&(pairs.src, from)].clone()).collect();
                for (&[_, to], bytes) in pairs.ids.iter().zip(read) {
                    self.bytes.insert((pairs.dst, to), bytes);
                }
            }
        }
        self.manager.complete(decision.ticket).unwrap();
    }

    fn start(&mut self, stream: u32, count: u32) {
        let asked = tokens(stream, count);
        let mut out = Vec::new();
        if let Err(error) = self.manager.allocate_prompts(&[prompt(&asked)], PromptOptions::default(), &mut out) {
            let Error::OutOfBlocks { tier, wanted, free, .. } = error else { panic!("{error}") };
            let pool = self.manager.pool(tier);
            // A cancelled write still lists its blocks, and another write may have them, too.
            let writes = self.writes.iter().filter(|job| job.tier == tier);
            let ours: HashSet<BlockId> = writes.flat_map(|job| job.blocks.iter().copied()).collect();
            // Blocks that the prompt hits stay.
            let is_hit = |block: &BlockId| {
                let bytes = self.bytes.get(&(tier, block.0));
                (0..asked.len() / 4).any(|at| bytes == Some(&right_bytes(&asked, at)))
            };
            let ours = ours.iter().filter(|&block| !is_hit(block));
            let held = ours.filter(|&&block| pool.block(block).leases().reads == 1 && pool.refs(block) == 0).count();
            assert!(
                free + held < wanted,
                "{held} {tier:?} blocks read for the store and {free} free ones are enough for {wanted}"
            );
            return;
        }
        let (sequence, cached) = out[0];
        self.step();
        let table = self.manager.block_table(sequence).unwrap().to_vec();
        for (at, block) in table.iter().enumerate().take(asked.len() / 4) {
            if at < cached as usize / 4 {
                assert_eq!(self.bytes[&(Tier::Device, block.0)], right_bytes(&asked, at), "a hit has the right bytes");
            } else {
                self.bytes.insert((Tier::Device, block.0), right_bytes(&asked, at));
            }
        }
        if table.len() > asked.len() / 4 {
            self.bytes.insert((Tier::Device, table[table.len() - 1].0), vec![9]);
        }
        self.manager.mark_computed(&[sequence]).unwrap();
        self.running.push((sequence, asked));
    }

    fn end_load(&mut self, at: usize, lost: usize) {
        let job = self.loads.remove(at);
        let mut landed = Vec::new();
        for (i, (key, block)) in job.keys.iter().zip(&job.blocks).enumerate() {
            let found = self.store.get(&key.0).filter(|_| i != lost);
            landed.push(found.is_some());
            if let Some(bytes) = found {
                self.bytes.insert((job.tier, block.0), bytes.clone());
            }
        }
        self.manager.end_load(job.job, &landed).unwrap();
    }

    fn end_write(&mut self, at: usize) {
        let job = self.writes.remove(at);
        // Read only now: the lease has kept the bytes, unless a call took the blocks.
        let read: Vec<_> = job.blocks.iter().map(|block| self.bytes[&(job.tier, block.0)].clone()).collect();
        if self.manager.end_write(job.job).unwrap() {
            for (key, bytes) in job.keys.iter().zip(read) {
                assert!(
                    self.store.insert(key.0, bytes.clone()).is_none_or(|before| before == bytes),
                    "one key, one block"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.min(512)))]
    #[test]
    fn no_sequence_ever_reads_bytes_of_another_and_every_count_is_right(
        host in prop::sample::select(vec![0usize, 6, 20]),
        writes in prop::sample::select(StoreWrites::ALL.to_vec()),
        operations in prop::collection::vec((0u8..8, 0u32..3, 1u32..30, any::<prop::sample::Index>()), 1..60),
    ) {
        let (bytes, store) = (HashMap::new(), HashMap::new());
        let (running, loads, writing) = (Vec::new(), Vec::new(), Vec::new());
        let mut model = Model { manager: manager(host, writes), bytes, store, running, loads, writes: writing };
        for (operation, stream, count, index) in operations {
            match operation {
                0 | 1 => model.start(stream, count),
                2 if !model.running.is_empty() => {
                    let (sequence, _) = model.running.swap_remove(index.index(model.running.len()));
                    model.manager.free(&[sequence]).unwrap();
                }
                3 => {
                    let job = model.manager.begin_load(&prompt(&tokens(stream, count)), 4, None).unwrap();
                    if !job.blocks.is_empty() {
                        model.loads.push(job);
                    }
                }
                4 if !model.loads.is_empty() => model.end_load(index.index(model.loads.len()), count as usize % 4),
                5 => {
                    let job = model.manager.begin_write(3);
                    if !job.blocks.is_empty() {
                        model.writes.push(job);
                    }
                }
                6 if !model.writes.is_empty() => model.end_write(index.index(model.writes.len())),
                7 if host > 0 => {
                    model.manager.offload_cached(2).unwrap();
                    model.step();
                }
                _ => {}
            }
            model.manager.check().unwrap();
        }
        while !model.loads.is_empty() {
            model.end_load(0, 9);
        }
        while !model.writes.is_empty() {
            model.end_write(0);
        }
        for (sequence, _) in std::mem::take(&mut model.running) {
            model.manager.free(&[sequence]).unwrap();
        }
        model.manager.check().unwrap();
        for tier in [Tier::Device, Tier::Host] {
            let pool = model.manager.pool(tier);
            prop_assert_eq!(pool.free(), pool.len());
        }
    }
}
