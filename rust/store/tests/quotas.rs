//! Quotas of tenants in a keyed store: what is dropped, what is refused, and what the next opener counts.
#![expect(clippy::unwrap_used, reason = "test code")]

#[path = "common/disk.rs"]
#[expect(dead_code, reason = "shared with other tests")]
mod disk;
#[path = "common/keyed.rs"]
mod keyed;

use blockyard_store::{Error, Geometry, Miss, Owner, SlabStore, StoreOptions};
use disk::Disk;
use keyed::{LONG, SLOTS, assert_no_slot_leaked, collect, contains, delete, disk, get, key, open, options, put, row};
use proptest::prelude::*;
use std::collections::BTreeMap;

const REFUSED: Result<(), Miss> = Err(Miss::Refused);

/// Tenant and parent of a block.
type Of = (u8, Option<u64>);

/// Tenant 0 has no salt.
fn tenant(n: u8) -> [u8; 32] {
    [n; 32]
}

fn owner((of, parent): Of) -> Owner {
    Owner { tenant: tenant(of), parent: parent.map_or([0; 32], key) }
}

fn put_owned(store: &SlabStore, blocks: &[(u64, Of)], epoch: u64) -> Vec<Result<(), Miss>> {
    let keys: Vec<_> = blocks.iter().map(|&(n, _)| key(n)).collect();
    let rows: Vec<u8> = blocks.iter().flat_map(|&(n, _)| row(n, epoch)).collect();
    let owners: Vec<_> = blocks.iter().map(|&(_, of)| owner(of)).collect();
    let ticket = store.submit_put(&keys, &rows, Some(&owners)).unwrap();
    collect(store, ticket).into_iter().map(|block| block.map(drop)).collect()
}

/// The blocks of a prompt, the first without a parent.
fn chain(of: u8, ids: std::ops::Range<u64>) -> Vec<(u64, Of)> {
    let first = ids.start;
    ids.map(|n| (n, (of, (n > first).then(|| n - 1)))).collect()
}

fn put_chain(store: &SlabStore, of: u8, ids: std::ops::Range<u64>) -> usize {
    put_owned(store, &chain(of, ids), 0).into_iter().take_while(Result::is_ok).count()
}

fn held(store: &SlabStore, ids: std::ops::Range<u64>) -> Vec<u64> {
    let ids: Vec<u64> = ids.collect();
    let held = contains(store, &ids);
    ids.into_iter().zip(held).filter_map(|(n, held)| held.then_some(n)).collect()
}

fn of_slots(slots: u32) -> (Disk, StoreOptions) {
    let geometry = Geometry { slots, ..options().geometry };
    (Disk::new(geometry.total()), StoreOptions { geometry, ..options() })
}

#[test]
fn of_a_prompt_longer_than_its_quota_the_beginning_stays_however_often_it_is_put() {
    let (disk, options) = of_slots(32);
    let store = SlabStore::open_keyed(disk.device(), options).unwrap();
    store.set_quota(tenant(1), Some(9)).unwrap();
    put(&store, &[100, 101], 0);
    put_chain(&store, 2, 200..203);
    for round in 0..3 {
        let done = put_owned(&store, &chain(1, 0..18), 0);
        assert_eq!(done, [[Ok(()); 9], [REFUSED; 9]].concat());
        assert_eq!(held(&store, 0..18), (0..9).collect::<Vec<_>>());
        assert!(get(&store, &(0..9).collect::<Vec<_>>()).iter().all(Result::is_ok));
        assert_eq!(store.quota(tenant(1)).unwrap(), Some((9, 9)));
        let stats = store.stats().unwrap();
        assert_eq!(stats.written_blocks, 5 + 9, "refused blocks are not written");
        assert_eq!(stats.misses[Miss::Refused.index()], 9 * (round + 1));
        store.check().unwrap();
    }
    assert_eq!(held(&store, 100..300), [100, 101, 200, 201, 202]);
    assert_eq!(store.quota(tenant(2)).unwrap(), None);
}

#[test]
fn older_prompts_go_before_a_new_one_and_their_ends_before_their_beginnings() {
    let (disk, options) = of_slots(32);
    let store = SlabStore::open_keyed(disk.device(), options).unwrap();
    store.set_quota(tenant(0), Some(6)).unwrap();
    assert_eq!((put_chain(&store, 0, 0..3), put_chain(&store, 0, 10..13)), (3, 3));
    assert_eq!(put_chain(&store, 0, 20..22), 2);
    assert_eq!(held(&store, 0..30), [0, 10, 11, 12, 20, 21]);
    get(&store, &[0]);
    assert_eq!(put_chain(&store, 0, 20..23), 3);
    assert_eq!(held(&store, 0..30), [0, 10, 11, 20, 21, 22], "block 0 was used last");
    assert_eq!(put_chain(&store, 0, 20..28), 6);
    assert_eq!(held(&store, 0..30), [20, 21, 22, 23, 24, 25]);
    store.check().unwrap();
}

#[test]
fn a_block_whose_parent_is_not_stored_is_the_first_to_go() {
    let store = open(&disk());
    store.set_quota(tenant(1), Some(3)).unwrap();
    assert_eq!(put_chain(&store, 1, 0..2), 2);
    assert_eq!(put_owned(&store, &[(9, (1, Some(8)))], 0), [Ok(())]);
    assert_eq!(put_owned(&store, &[(7, (1, Some(6)))], 0), [REFUSED]);
    assert_eq!(put_chain(&store, 1, 0..3), 3);
    assert_eq!(held(&store, 0..10), [0, 1, 2]);
}

#[test]
fn of_a_prompt_longer_than_the_store_the_beginning_stays_however_it_is_cut() {
    for piece in [1, 7, 80] {
        let (disk, options) = of_slots(90);
        let store = SlabStore::open_keyed(disk.device(), options).unwrap();
        put_chain(&store, 2, 500..520);
        for round in 0..2 {
            for blocks in chain(1, 0..100).chunks(piece) {
                put_owned(&store, blocks, 0);
            }
            assert_eq!(held(&store, 0..100), (0..90).collect::<Vec<_>>(), "in pieces of {piece}");
            assert_eq!(held(&store, 500..520), [], "an older prompt makes room");
            assert_eq!(store.stats().unwrap().evicted_blocks, 20, "blocks evicted by round {round}");
        }
        store.check().unwrap();
    }
}

#[test]
fn six_prompts_that_do_not_fit_are_found_as_often_as_whole_prompts_would_be() {
    let (disk, options) = of_slots(250);
    let store = SlabStore::open_keyed(disk.device(), options).unwrap();
    let (mut found, mut state) = (0, 1u64);
    for _ in 0..120 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let first = (state >> 33) % 6 * 1000;
        let hits =
            contains(&store, &(first..first + 100).collect::<Vec<_>>()).into_iter().take_while(|hit| *hit).count();
        get(&store, &(first..first + hits as u64).collect::<Vec<_>>());
        for blocks in chain(1, first..first + 100)[hits..].chunks(16) {
            put_owned(&store, blocks, 0);
        }
        found += hits;
    }
    assert!(found > 4_800, "{found} of 12000; 250 slots hold 2.5 of 6 prompts");
}

#[test]
fn a_quota_of_nothing_stores_nothing_and_a_smaller_one_drops_at_once() {
    let disk = disk();
    let store = open(&disk);
    put_chain(&store, 1, 0..5);
    put_chain(&store, 2, 5..7);
    store.set_quota(tenant(1), Some(2)).unwrap();
    assert_eq!(store.poll().unwrap(), [], "its ticket is internal to the store");
    assert_eq!(held(&store, 0..8), [0, 1, 5, 6]);
    assert_eq!(held(&open(&disk.killed()), 0..8), [0, 1, 5, 6], "no later opener finds dropped blocks");
    store.set_quota(tenant(1), Some(0)).unwrap();
    assert_eq!((put_chain(&store, 1, 0..1), held(&store, 0..8)), (0, vec![5, 6]));
    store.set_quota(tenant(1), None).unwrap();
    assert_eq!((put_chain(&store, 1, 0..3), store.quota(tenant(1)).unwrap()), (3, None));
    store.check().unwrap();
    assert_no_slot_leaked(&store, 0);
}

#[test]
fn the_next_life_counts_what_earlier_ones_have_stored() {
    for (is_killed, with_checkpoint) in [(false, true), (false, false), (true, false)] {
        let mut disk = disk();
        let store = open(&disk);
        put_chain(&store, 1, 0..4);
        put(&store, &[7], 0);
        if is_killed {
            disk = disk.killed();
        } else {
            assert!(store.close(LONG));
        }
        if !with_checkpoint {
            disk.drop_checkpoint();
        }
        let store = open(&disk);
        assert_eq!(store.quota(tenant(1)).unwrap(), None);
        store.set_quota(tenant(1), Some(5)).unwrap();
        assert_eq!(store.quota(tenant(1)).unwrap(), Some((4, 5)));
        assert_eq!(put_chain(&store, 1, 0..6), 5);
        store.set_quota(tenant(1), Some(3)).unwrap();
        assert_eq!(held(&store, 0..8), [0, 1, 2, 7]);
        store.check().unwrap();
    }
}

#[test]
fn a_quota_outlives_its_store_and_forget_and_so_does_its_end() {
    let mut disk = disk();
    for is_killed in [false, true] {
        let store = open(&disk);
        store.set_quota(tenant(1), Some(3)).unwrap();
        store.set_quota(tenant(2), Some(0)).unwrap();
        assert_eq!(put_chain(&store, 1, 0..5), 3);
        if is_killed {
            disk = disk.killed();
        } else {
            assert!(store.close(LONG));
        }
        let store = open(&disk);
        let quota = |of| store.quota(tenant(of)).unwrap();
        assert_eq!((quota(1), quota(2), quota(3)), (Some((3, 3)), Some((0, 0)), None));
        assert_eq!((put_chain(&store, 1, 0..5), put_chain(&store, 2, 5..6)), (3, 0));
        store.forget(None).unwrap();
        store.set_quota(tenant(2), None).unwrap();
        assert!(store.close(LONG));
        let store = open(&disk);
        assert_eq!((store.quota(tenant(1)).unwrap(), store.quota(tenant(2)).unwrap()), (Some((0, 3)), None));
        store.check().unwrap();
        assert!(store.close(LONG));
        let other = SlabStore::open_keyed(disk.device(), StoreOptions { namespace: [9; 32], ..options() }).unwrap();
        assert_eq!(other.quota(tenant(1)).unwrap(), None, "quotas are a namespace's own");
    }
}

#[test]
fn a_kept_quota_holds_for_blocks_that_its_setter_was_killed_before_wiping() {
    let (with_quota, disk) = (disk(), disk());
    open(&with_quota).set_quota(tenant(1), Some(2)).unwrap();
    put_chain(&open(&disk), 1, 0..5);
    let disk = disk.killed();
    disk.device().save_quotas(&with_quota.device().kept_quotas(1 << 20).unwrap()).unwrap();
    let store = open(&disk);
    assert_eq!(store.quota(tenant(1)).unwrap(), Some((2, 2)));
    store.check().unwrap();
    assert_eq!(held(&open(&disk.killed()), 0..5).len(), 2);
}

#[test]
fn a_quota_that_the_device_does_not_keep_is_an_error_and_holds_until_the_store_is_closed() {
    let disk = disk();
    let store = open(&disk);
    disk.fail(Some((1, 28)));
    assert!(matches!(store.set_quota(tenant(1), Some(1)), Err(Error::Io { .. })));
    disk.fail(None);
    assert_eq!(store.quota(tenant(1)).unwrap(), Some((0, 1)));
    assert_eq!(open(&disk.killed()).quota(tenant(1)).unwrap(), None);
}

#[test]
fn blocks_that_went_for_other_reasons_count_no_more() {
    let disk = disk();
    let store = open(&disk);
    let quota = |held| assert_eq!(store.quota(tenant(1)).unwrap(), Some((held, 4)));
    store.set_quota(tenant(1), Some(4)).unwrap();
    put_chain(&store, 1, 0..4);
    delete(&store, &[3]);
    quota(3);
    disk.fail(Some((1, 5)));
    assert_eq!(get(&store, &[2]), [Err(Miss::Io)]);
    quota(3);
    assert_eq!(put_chain(&store, 1, 0..3), 2, "a write that failed");
    quota(3);
    disk.fail(None);
    put(&store, &[10, 11, 12, 13, 14, 15], 0);
    quota(2);
    store.forget(None).unwrap();
    quota(0);
    assert_eq!(put_chain(&store, 1, 0..6), 4);
    quota(4);
    store.check().unwrap();
}

#[test]
fn blocks_that_name_each_other_or_themselves_as_parents_keep_to_the_quota() {
    let store = open(&disk());
    store.set_quota(tenant(1), Some(2)).unwrap();
    let blocks = [(0, Some(0)), (1, Some(2)), (2, Some(1)), (3, Some(2)), (4, None), (0, Some(4))];
    for (n, parent) in blocks {
        put_owned(&store, &[(n, (1, parent))], 0);
        assert!(store.quota(tenant(1)).unwrap().unwrap().0 <= 2);
        store.check().unwrap();
    }
    store.set_quota(tenant(1), Some(0)).unwrap();
    assert_eq!(store.stats().unwrap().cached_blocks, 0);
}

#[test]
fn a_quota_holds_though_the_disk_refuses_to_wipe() {
    let disk = disk();
    let store = open(&disk);
    put_chain(&store, 1, 0..4);
    disk.fail(Some((1, 5)));
    assert!(matches!(store.set_quota(tenant(1), Some(1)), Err(Error::Io { .. })));
    disk.fail(None);
    assert_eq!((held(&store, 0..4), store.quota(tenant(1)).unwrap()), (vec![0], Some((1, 1))));
    assert!(store.set_quota(tenant(1), Some(1)).is_ok());
}

#[test]
fn wrong_owners_and_swap_space_are_refused() {
    let disk = disk();
    let store = open(&disk);
    let wrong = store.submit_put(&[key(1)], &row(1, 0), Some(&[]));
    assert!(matches!(wrong, Err(Error::WrongOwners { found: 0, keys: 1 })));
    drop(store);
    let store = SlabStore::open(disk.device(), options()).unwrap();
    assert!(matches!(store.set_quota(tenant(1), None), Err(Error::NotKeyed)));
    assert!(matches!(store.quota(tenant(1)), Err(Error::NotKeyed)));
}

/// One action of a random history.
#[derive(Clone, Debug)]
enum Action {
    Put(Vec<(u64, Option<Of>)>),
    Get(Vec<u64>),
    Delete(u64),
    Quota(u8, Option<u32>),
    Forget,
    Reopen(bool),
    Kill,
}

/// More than there are slots.
const IDS: u64 = 12;

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let (id, of) = (0..IDS, 0u8..2);
    // As keys are hashes of chains, no block is among its own ancestors.
    let any_of = (id.clone(), prop::option::of((of.clone(), prop::option::of(id.clone()))));
    let any_of = any_of.prop_map(|(n, of)| (n, of.map(|(of, parent)| (of, parent.filter(|&parent| parent < n)))));
    let chain = (of.clone(), id.clone(), 1..9u64).prop_map(|(of, first, len)| {
        let chain = chain(of, first..IDS.min(first + len));
        chain.into_iter().map(|(n, of)| (n, Some(of))).collect::<Vec<_>>()
    });
    let action = prop_oneof![
        5 => chain.prop_map(Action::Put),
        3 => prop::collection::vec(any_of, 0..6).prop_map(Action::Put),
        4 => prop::collection::vec(id.clone(), 0..6).prop_map(Action::Get),
        2 => id.prop_map(Action::Delete),
        3 => (of, prop::option::weighted(0.8, 0..7u32)).prop_map(|(of, most)| Action::Quota(of, most)),
        1 => Just(Action::Forget),
        1 => any::<bool>().prop_map(Action::Reopen),
        1 => Just(Action::Kill),
    ];
    prop::collection::vec(action, 1..40)
}

#[derive(Clone, Copy, Debug)]
struct ModelBlock {
    of: Option<Of>,
    /// Last use, which the next opener finds.
    used: i64,
    /// Last use, or below all if its parent was not stored.
    rank: i64,
    written: i64,
    proven: bool,
}

/// The same rules over a map.
#[derive(Default)]
struct Model {
    blocks: BTreeMap<u64, ModelBlock>,
    most: BTreeMap<u8, u32>,
    clock: i64,
}

impl Model {
    fn tick(&mut self) -> i64 {
        self.clock += 1;
        self.clock
    }

    fn touch(&mut self, n: u64) {
        let now = self.tick();
        if let Some(block) = self.blocks.get_mut(&n) {
            (block.used, block.rank) = (now, now);
        }
    }

    fn held(&self, of: u8) -> usize {
        self.blocks.values().filter(|block| block.of.is_some_and(|(tenant, _)| tenant == of)).count()
    }

    fn touch_all(&mut self, ids: &[u64]) {
        ids.iter().rev().for_each(|&n| self.touch(n));
    }

    /// The block, of a tenant or of all, that is dropped first.
    fn first(&self, of: Option<u8>) -> Option<u64> {
        let is_of = |block: &ModelBlock| of.is_none_or(|of| block.of.is_some_and(|(tenant, _)| tenant == of));
        let all = self.blocks.iter().filter(|(_, block)| is_of(block));
        all.min_by_key(|&(&n, block)| (self.is_parent(n), block.rank)).map(|(&n, _)| n)
    }

    fn is_parent(&self, n: u64) -> bool {
        self.blocks.values().any(|block| block.of.is_some_and(|of| of.1 == Some(n)))
    }

    /// A block that was stored when the batch arrived has no buffer. If the batch itself then evicts it, it is not
    /// written again.
    fn put(&mut self, n: u64, of: Option<Of>, has_buffer: bool) -> Result<(), Miss> {
        let now = self.tick();
        if let Some(block) = self.blocks.get_mut(&n) {
            if !block.proven {
                *block = ModelBlock { used: now, rank: now, written: now, proven: true, ..*block };
            }
            return Ok(());
        }
        let parent = of.and_then(|(_, parent)| parent);
        let rank = |model: &Self| if parent.is_none_or(|n| model.blocks.contains_key(&n)) { now } else { -now };
        let block = |rank| ModelBlock { of, used: now, rank, written: now, proven: true };
        let quota = of.and_then(|(of, _)| self.most.get(&of).map(|&most| (of, most)));
        let full_quota = quota.filter(|&(of, most)| self.held(of) >= most as usize).map(|(of, _)| of);
        if full_quota.is_some() || self.blocks.len() == SLOTS as usize {
            // Blocks that are all followed by others, of other tenants, make room, too.
            let held = self.first(full_quota).filter(|&held| self.is_parent(held));
            self.blocks.insert(n, block(rank(self)));
            let first = held.or(self.first(full_quota)).unwrap();
            self.blocks.remove(&n);
            let is_refused = first == n || held.is_none() && Some(first) == parent;
            if is_refused || !has_buffer {
                return Err(if is_refused { Miss::Refused } else { Miss::QueueFull });
            }
            self.blocks.remove(&first);
        } else if !has_buffer {
            return Err(Miss::QueueFull);
        }
        // The dropped block may be its parent.
        self.blocks.insert(n, block(rank(self)));
        Ok(())
    }

    fn limit(&mut self, of: u8, most: Option<u32>) {
        match most {
            None => drop(self.most.remove(&of)),
            Some(most) => drop(self.most.insert(of, most)),
        }
        while most.is_some_and(|most| self.held(of) > most as usize) {
            let first = self.first(Some(of)).unwrap();
            self.blocks.remove(&first);
        }
    }

    /// The order that the next opener restores, from a checkpoint or from headers.
    fn age(&mut self, with_checkpoint: bool) {
        for block in self.blocks.values_mut() {
            block.used = if with_checkpoint { block.used } else { block.written };
            block.rank = block.used;
            block.proven &= with_checkpoint;
        }
    }
}

/// The store and its model.
struct Pair {
    disk: Disk,
    store: SlabStore,
    model: Model,
    epoch: u64,
}

impl Pair {
    fn put(&mut self, blocks: &[(u64, Option<Of>)]) {
        // Blocks with and without owners come in separate batches.
        for is_owned in [true, false] {
            let batch: Vec<_> = blocks.iter().copied().filter(|(_, of)| of.is_some() == is_owned).collect();
            let has_buffer = |&(n, _): &(u64, _)| self.model.blocks.get(&n).is_none_or(|block| !block.proven);
            let has_buffer: Vec<bool> = batch.iter().map(has_buffer).collect();
            let ids: Vec<u64> = batch.iter().map(|&(n, _)| n).collect();
            self.model.touch_all(&ids);
            let expected = |(&(n, of), has_buffer)| self.model.put(n, of, has_buffer);
            let expected: Vec<_> = batch.iter().zip(has_buffer).map(expected).collect();
            let done = if is_owned {
                let owned: Vec<_> = batch.iter().map(|&(n, of)| (n, of.unwrap())).collect();
                put_owned(&self.store, &owned, self.epoch)
            } else {
                self.model.touch_all(&ids);
                put(&self.store, &ids, self.epoch)
            };
            assert_eq!(done, expected);
        }
    }

    fn get(&mut self, ids: &[u64]) {
        let mut expected = Vec::new();
        self.model.touch_all(ids);
        for &n in ids {
            expected.push(match self.model.blocks.get_mut(&n) {
                Some(block) => {
                    block.proven = true;
                    Ok(row(n, self.epoch))
                }
                None => Err(Miss::Absent),
            });
        }
        assert_eq!(get(&self.store, ids), expected);
    }

    /// Opens the store again, which keeps its quotas.
    fn open(&mut self, with_checkpoint: bool) {
        self.store = open(&self.disk);
        self.model.age(with_checkpoint);
    }

    fn apply(&mut self, action: Action) {
        match action {
            Action::Put(blocks) => self.put(&blocks),
            Action::Get(ids) => self.get(&ids),
            Action::Delete(n) => {
                assert_eq!(delete(&self.store, &[n]), [Ok(())]);
                self.model.blocks.remove(&n);
            }
            Action::Quota(of, most) => {
                self.store.set_quota(tenant(of), most).unwrap();
                self.model.limit(of, most);
            }
            Action::Forget => {
                self.store.forget(None).unwrap();
                self.model.blocks.clear();
                self.epoch += 1;
            }
            Action::Reopen(with_checkpoint) => {
                assert!(self.store.close(LONG));
                if !with_checkpoint {
                    self.disk.drop_checkpoint();
                }
                self.open(with_checkpoint);
            }
            Action::Kill => {
                self.disk = self.disk.killed();
                self.open(false);
            }
        }
        self.check();
    }

    fn check(&self) {
        self.store.check().unwrap();
        assert_eq!(held(&self.store, 0..IDS), self.model.blocks.keys().copied().collect::<Vec<_>>());
        assert_eq!(self.store.stats().unwrap().cached_blocks, self.model.blocks.len() as u64);
        assert_eq!(self.store.stats().unwrap().pending_bytes, 0);
        for of in 0..2 {
            let expected = self.model.most.get(&of).map(|&most| (u32::try_from(self.model.held(of)).unwrap(), most));
            assert_eq!(self.store.quota(tenant(of)).unwrap(), expected);
            assert!(expected.is_none_or(|(held, most)| held <= most));
        }
    }
}

/// Prompts that share the beginning of the first: where each leaves it, and its length.
const PROMPTS: [(u64, u64); 4] = [(0, 20), (0, 14), (3, 20), (6, 9)];

/// The blocks of a prompt.
fn prompt(n: usize) -> Vec<(u64, Of)> {
    let (shared, len) = PROMPTS[n];
    let of = u8::from(shared > 0 || n == 0);
    let id = |at: u64| if at < shared { at } else { n as u64 * 100 + at };
    (0..len).map(|at| (id(at), (of, (at > 0).then(|| id(at - 1))))).collect()
}

#[derive(Clone, Debug)]
enum Use {
    /// The first blocks of a prompt that are not stored, in batches of a length.
    Put(usize, usize, usize),
    /// The first blocks of a prompt that are stored.
    Get(usize, usize),
    Quota(u8, Option<u32>),
    Reopen(bool),
    Kill,
}

fn uses() -> impl Strategy<Value = Vec<Use>> {
    let (prompt, count) = (0..PROMPTS.len(), 1..21usize);
    let action = prop_oneof![
        6 => (prompt.clone(), count.clone(), 1..9usize).prop_map(|(n, count, batch)| Use::Put(n, count, batch)),
        4 => (prompt, count).prop_map(|(n, count)| Use::Get(n, count)),
        1 => (0u8..2, prop::option::of(0..12u32)).prop_map(|(of, most)| Use::Quota(of, most)),
        1 => any::<bool>().prop_map(Use::Reopen),
        1 => Just(Use::Kill),
    ];
    prop::collection::vec(action, 1..30)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn what_is_found_of_a_prompt_is_its_beginning(uses in uses(), slots in 1..40u32) {
        let (mut disk, options) = of_slots(slots);
        let mut store = SlabStore::open_keyed(disk.device(), options.clone()).unwrap();
        for action in uses {
            match action {
                Use::Put(n, count, batch) => {
                    let new: Vec<_> = prompt(n).into_iter().filter(|&(id, _)| !contains(&store, &[id])[0]).collect();
                    for blocks in new[..count.min(new.len())].chunks(batch) {
                        put_owned(&store, blocks, 0);
                    }
                }
                Use::Get(n, count) => {
                    let ids: Vec<u64> = prompt(n).into_iter().map(|(id, _)| id).take(count).collect();
                    let hits = contains(&store, &ids).into_iter().take_while(|hit| *hit).count();
                    prop_assert!(get(&store, &ids[..hits]).iter().all(Result::is_ok));
                }
                Use::Quota(of, most) => store.set_quota(tenant(of), most).unwrap(),
                Use::Reopen(with_checkpoint) => {
                    assert!(store.close(LONG));
                    if !with_checkpoint {
                        disk.drop_checkpoint();
                    }
                    store = SlabStore::open_keyed(disk.device(), options.clone()).unwrap();
                }
                Use::Kill => {
                    disk = disk.killed();
                    store = SlabStore::open_keyed(disk.device(), options.clone()).unwrap();
                }
            }
            store.check().unwrap();
            for n in 0..PROMPTS.len() {
                let held = contains(&store, &prompt(n).into_iter().map(|(id, _)| id).collect::<Vec<_>>());
                prop_assert!(held.is_sorted_by(|before, after| before >= after), "prompt {}: {:?}", n, held);
            }
        }
    }

    #[test]
    fn a_random_history_gives_what_the_rules_say(actions in actions()) {
        let disk = disk();
        let store = open(&disk);
        let mut pair = Pair { disk, store, model: Model::default(), epoch: 0 };
        for action in actions {
            pair.apply(action);
        }
        assert_no_slot_leaked(&pair.store, pair.epoch);
    }
}
