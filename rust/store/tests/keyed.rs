//! Blocks under keys: which are found, which are evicted, which the next opener finds, and that no wrong bytes ever
//! return.
#![expect(clippy::unwrap_used, reason = "test code")]

#[path = "common/disk.rs"]
#[expect(dead_code, reason = "shared with other tests")]
mod disk;
#[path = "common/keyed.rs"]
mod keyed;

use blockyard_store::{
    BlockDevice, Buffer, Error, Geometry, LentRow, Miss, PAGE, Progress, SlabStore, StoreOptions, revision_name,
};
use disk::Disk;
use keyed::{
    LONG, PAYLOAD, SLOTS, assert_no_slot_leaked, collect, contains, delete, disk, get, key, open, options, put, row,
    submit_put,
};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const ABSENT: Result<Vec<u8>, Miss> = Err(Miss::Absent);

fn reopened(disk: &Disk, store: SlabStore, with_checkpoint: bool) -> SlabStore {
    assert!(store.close(LONG));
    drop(store);
    assert!(disk.has_checkpoint());
    if !with_checkpoint {
        disk.drop_checkpoint();
    }
    open(disk)
}

#[test]
fn a_block_comes_back_under_its_key_and_another_key_is_absent() {
    let disk = disk();
    let store = open(&disk);
    assert_eq!(put(&store, &[1, 2, 1], 0), [Ok(()); 3]);
    assert_eq!(get(&store, &[2, 3, 1, 1]), [Ok(row(2, 0)), ABSENT, Ok(row(1, 0)), Ok(row(1, 0))]);
    assert_eq!(contains(&store, &[1, 2, 3]), [true, true, false]);
    let stats = store.stats().unwrap();
    assert_eq!((stats.written_blocks, stats.cached_blocks, stats.evicted_blocks), (2, 2, 0));
    disk.frozen(|| {
        submit_put(&store, &[3], 0).unwrap();
        assert_eq!((contains(&store, &[3]), store.lacks(&[key(3), key(4)]).unwrap()), (vec![false], vec![false, true]));
    });
}

#[test]
fn a_full_store_evicts_what_was_not_used_for_longest_and_the_end_of_a_batch_first() {
    let store = open(&disk());
    put(&store, &[0, 1, 2, 3, 4, 5, 6, 7], 0);
    get(&store, &[7]);
    put(&store, &[6, 8, 9], 0);
    assert_eq!(contains(&store, &[0, 3, 4, 5, 6, 7, 8, 9]), [true, true, false, false, true, true, true, true]);
    assert_eq!(store.stats().unwrap().evicted_blocks, 2);
    assert_eq!(get(&store, &[5]), [ABSENT]);
}

#[test]
fn a_batch_does_not_evict_what_it_names() {
    let store = open(&disk());
    put(&store, &[0, 1, 2, 3, 4, 5, 6, 7], 0);
    assert_eq!(put(&store, &[8, 9, 7, 6], 0), [Ok(()); 4]);
    assert_eq!(contains(&store, &[3, 4, 5, 6, 7, 8, 9]), [true, false, false, true, true, true, true]);
}

#[test]
fn a_slot_that_cannot_be_written_does_not_fail_every_put() {
    let disk = disk();
    let store = open(&disk);
    put(&store, &[0, 1, 2, 3, 4, 5, 6, 7], 0);
    disk.fail(Some((1, 5)));
    assert_eq!(put(&store, &[8], 0), [Err(Miss::Io)]);
    disk.fail(None);
    // The slot of key 7 has failed, so the others' slots are reused first.
    assert_eq!(put(&store, &[9], 0), [Ok(())]);
    assert_eq!(contains(&store, &[7, 6, 5, 9]), [false, false, true, true]);
    assert_no_slot_leaked(&store, 0);
}

#[test]
fn the_next_life_finds_the_blocks_with_and_without_a_checkpoint() {
    for with_checkpoint in [true, false] {
        let disk = disk();
        let store = open(&disk);
        put(&store, &[1, 2, 3], 0);
        let store = reopened(&disk, store, with_checkpoint);
        assert_eq!(get(&store, &[3, 4, 1]), [Ok(row(3, 0)), ABSENT, Ok(row(1, 0))]);
        assert_eq!(store.stats().unwrap().cached_blocks, 3);
        put(&store, &[4], 0);
        let store = reopened(&disk, store, with_checkpoint);
        assert_eq!(contains(&store, &[1, 2, 3, 4]), [true; 4]);
        assert_no_slot_leaked(&store, 0);
    }
}

#[test]
fn a_checkpoint_is_used_once_and_never_beside_newer_blocks() {
    let disk = disk();
    let store = open(&disk);
    put(&store, &[1, 2], 0);
    let store = reopened(&disk, store, true);
    assert!(!disk.has_checkpoint());
    put(&store, &[3], 0);
    let killed = open(&disk.killed());
    assert_eq!(contains(&killed, &[1, 2, 3]), [true; 3]);
}

#[test]
fn a_key_put_twice_waits_for_its_first_write_and_shares_its_end() {
    let disk = disk();
    let store = open(&disk);
    disk.fail(Some((1, 5)));
    let tickets = [submit_put(&store, &[1], 0).unwrap(), submit_put(&store, &[1], 0).unwrap()];
    let ends = tickets.map(|ticket| collect(&store, ticket).remove(0));
    // Either the second arrived while the first was in flight, or after it had failed.
    assert_eq!(ends[0], Err(Miss::Io));
    assert!(matches!(ends[1], Err(Miss::Lost | Miss::Io)), "{ends:?}");
    disk.fail(None);
    assert_eq!((contains(&store, &[1]), get(&store, &[1])), (vec![false], vec![ABSENT]));
    assert_eq!(put(&store, &[1, 1], 0), [Ok(()); 2]);
    assert_no_slot_leaked(&store, 0);
}

#[test]
fn a_key_whose_read_failed_is_absent_at_once_and_can_be_put_again() {
    let disk = disk();
    let store = open(&disk);
    put(&store, &[1, 2], 0);
    disk.fail(Some((1, 5)));
    assert_eq!(get(&store, &[1]), [Err(Miss::Io)]);
    assert_eq!((contains(&store, &[1, 2]), get(&store, &[1])), (vec![false, true], vec![ABSENT]));
    assert!(store.stats().unwrap().errors_in_a_row >= 1);
    disk.fail(None);
    assert_eq!(put(&store, &[1], 0), [Ok(())]);
    assert_eq!(get(&store, &[1, 2]), [Ok(row(1, 0)), Ok(row(2, 0))]);
    assert_eq!(store.stats().unwrap().errors_in_a_row, 0);
}

#[test]
fn a_key_whose_read_missed_its_deadline_is_a_hit_once_the_disk_has_answered() {
    let disk = disk();
    let store =
        SlabStore::open_keyed(disk.device(), StoreOptions { timeout_base: Duration::from_secs(1), ..options() });
    let store = store.unwrap();
    put(&store, &[1, 2], 0);
    let late = disk.frozen(|| {
        let late = store.submit_get(&[key(1)]).unwrap();
        assert_eq!(store.wait_for(late, LONG).unwrap(), Progress::Expired);
        collect(&store, late)
    });
    assert_eq!(late, [Err(Miss::Timeout)]);
    // The store claims no blocks until the hung thread has returned.
    let end = Instant::now() + LONG;
    while contains(&store, &[1, 2]) != [true, true] {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(get(&store, &[1, 2]), [Ok(row(1, 0)), Ok(row(2, 0))]);
    let given_up = store.submit_get(&[key(2)]).unwrap();
    drop(store.take(given_up).unwrap());
    assert_eq!(contains(&store, &[2]), [true], "a caller that gives up says nothing about the block");
    assert_no_slot_leaked(&store, 0);
}

/// A store that reads a block again at once after a failed read.
fn hiding_nothing(disk: &Disk) -> SlabStore {
    SlabStore::open_keyed(disk.device(), StoreOptions { hidden: Duration::ZERO, ..options() }).unwrap()
}

/// Offset of a byte in the payload of a slot.
fn within(slot: u32) -> usize {
    usize::try_from(options().geometry.offset(slot)).unwrap() + 4096 + 1000
}

const DAMAGED: Result<Vec<u8>, Miss> = Err(Miss::PayloadChecksum);

#[test]
fn a_read_that_fails_deletes_nothing() {
    let disk = disk();
    let store = hiding_nothing(&disk);
    put(&store, &[1, 2], 0);
    for _ in 0..3 {
        disk.fail(Some((1, 5)));
        assert_eq!(get(&store, &[1, 2]), [Err(Miss::Io), Err(Miss::Io)]);
        disk.fail(None);
        assert_eq!(contains(&store, &[1, 2]), [true; 2]);
        assert_eq!(get(&store, &[1, 2]), [Ok(row(1, 0)), Ok(row(2, 0))]);
    }
    disk.fail(Some((1, 5)));
    get(&store, &[1, 2]);
    disk.fail(None);
    assert_eq!(get(&open(&disk.killed()), &[1, 2]), [Ok(row(1, 0)), Ok(row(2, 0))]);
}

#[test]
fn a_block_that_two_reads_find_damaged_alike_is_deleted_for_good() {
    let disk = disk();
    let store = hiding_nothing(&disk);
    put(&store, &[1, 2], 0);
    disk.change(|bytes| bytes[within(0)] ^= 1);
    assert_eq!(get(&store, &[1]), [DAMAGED]);
    assert_eq!((contains(&store, &[1]), store.lacks(&[key(1)]).unwrap()), (vec![false], vec![false]), "look again");
    assert_eq!(store.stats().unwrap().cached_blocks, 2);
    assert_eq!(get(&store, &[1]), [DAMAGED]);
    assert_eq!((store.lacks(&[key(1)]).unwrap(), store.stats().unwrap().cached_blocks), (vec![true], 1));
    assert!(store.close(LONG));
    disk.drop_checkpoint();
    assert_eq!(get(&open(&disk), &[1, 2]), [ABSENT, Ok(row(2, 0))]);
}

#[test]
fn a_block_that_is_damaged_on_the_way_is_a_hit_later() {
    let disk = disk();
    let store = hiding_nothing(&disk);
    put(&store, &[1], 0);
    for at in 0..4 {
        disk.change(|bytes| bytes[within(0) + at] ^= 1);
        assert_eq!(get(&store, &[1]), [DAMAGED]);
        disk.change(|bytes| bytes[within(0) + at] ^= 1);
    }
    assert_eq!(get(&store, &[1]), [Ok(row(1, 0))]);
    assert_eq!(contains(&store, &[1]), [true]);
}

#[test]
fn reads_of_one_moment_are_one_look_at_damage() {
    let disk = disk();
    let store = open(&disk);
    put(&store, &[1], 0);
    disk.change(|bytes| bytes[within(0)] ^= 1);
    assert_eq!(get(&store, &[1, 1]), [DAMAGED, DAMAGED]);
    assert_eq!((get(&store, &[1]), store.stats().unwrap().cached_blocks), (vec![ABSENT], 1));
    disk.change(|bytes| bytes[within(0)] ^= 1);
    assert!(store.close(LONG));
    assert_eq!(get(&open(&disk), &[1]), [Ok(row(1, 0))]);
}

#[test]
fn a_put_replaces_a_block_whose_read_failed() {
    let disk = disk();
    let store = open(&disk);
    put(&store, &[1, 2], 0);
    disk.change(|bytes| bytes[within(0)] ^= 1);
    assert_eq!(get(&store, &[1]), [DAMAGED]);
    disk.fail(Some((1, 5)));
    assert_eq!(get(&store, &[2]), [Err(Miss::Io)]);
    disk.fail(None);
    assert_eq!(put(&store, &[1, 2], 0), [Ok(()); 2]);
    assert_eq!(get(&store, &[1, 2]), [Ok(row(1, 0)), Ok(row(2, 0))]);
    assert_eq!(store.stats().unwrap().written_blocks, 4);
}

#[test]
fn a_put_that_cannot_replace_a_block_leaves_it() {
    for (errno, left) in [(30, Ok(row(1, 0))), (5, DAMAGED)] {
        let disk = disk();
        let store = hiding_nothing(&disk);
        put(&store, &[1], 0);
        disk.fail(Some((1, errno)));
        assert_eq!((get(&store, &[1]), put(&store, &[1], 0)), (vec![Err(Miss::Io)], vec![Err(Miss::Io)]));
        disk.fail(None);
        assert!(matches!(&get(&store, &[1])[0], found if *found == left || left.is_err() && found.is_err()));
        assert_eq!(put(&store, &[1], 0), [Ok(())]);
        assert_eq!(get(&store, &[1]), [Ok(row(1, 0))]);
        assert_no_slot_leaked(&store, 0);
    }
}

#[test]
fn a_deleted_key_is_gone_in_this_life_and_the_next() {
    let disk = disk();
    let store = open(&disk);
    put(&store, &[1, 2], 0);
    assert_eq!(delete(&store, &[1, 9, 1]), [Ok(()); 3]);
    assert_eq!(contains(&store, &[1, 2]), [false, true]);
    let store = open(&disk.killed());
    assert_eq!(get(&store, &[1, 2]), [ABSENT, Ok(row(2, 0))]);
    assert_no_slot_leaked(&store, 0);
}

/// Deletes a key until the store confirms that no later opener finds it.
fn delete_surely(store: &SlabStore, n: u64) {
    let end = Instant::now() + LONG;
    while delete(store, &[n]) != [Ok(())] {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_deletion_that_the_disk_refuses_fails_until_no_header_has_the_key() {
    let disk = disk();
    let store = open(&disk);
    put(&store, &[1], 0);
    disk.fail(Some((1, 30)));
    assert_eq!(delete(&store, &[1]), [Err(Miss::Io)]);
    assert_eq!((get(&store, &[1]), delete(&store, &[1])), (vec![ABSENT], vec![Err(Miss::Io)]));
    assert_eq!(contains(&open(disk.killed().fail(None)), &[1]), [true], "this is why");
    disk.fail(None);
    delete_surely(&store, 1);
    assert_eq!(contains(&open(&disk.killed()), &[1]), [false]);
}

#[test]
fn the_deletion_of_an_evicted_key_ends_when_its_header_is_replaced() {
    let disk = disk();
    let store = open(&disk);
    put(&store, &[0, 1, 2, 3, 4, 5, 6, 7], 0);
    let (put_again, deleted) = disk.frozen(|| {
        // Key 8 takes the slot of key 0, which is then stored again in the slot of key 1.
        let tickets = [submit_put(&store, &[8], 0).unwrap(), submit_put(&store, &[0], 0).unwrap()];
        let deleted = store.submit_delete(&[key(0), key(1)]).unwrap();
        assert_eq!(store.wait_for(deleted, Duration::from_millis(50)).unwrap(), Progress::Pending);
        assert_eq!(contains(&open(&disk.killed()), &[0, 1]), [true; 2], "this is why");
        (tickets, deleted)
    });
    assert_eq!(collect(&store, deleted), [Ok(Vec::new()), Ok(Vec::new())]);
    assert_eq!(contains(&open(&disk.killed()), &[0, 1, 2]), [false, false, true]);
    for ticket in put_again {
        collect(&store, ticket);
    }
    assert_no_slot_leaked(&store, 0);
}

#[test]
fn what_close_has_left_undone_is_found_again_and_not_taken_for_deleted() {
    let disk = disk();
    let store = open(&disk);
    put(&store, &[0, 1, 2, 3, 4, 5, 6, 7], 0);
    let tickets = disk.frozen(|| {
        let begun = disk.begun();
        let tickets = [0, 1, 2, 3].map(|n| store.submit_delete(&[key(n)]).unwrap());
        while disk.begun() == begun {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!store.close(Duration::from_millis(20)));
        tickets
    });
    let ends = tickets.map(|ticket| collect(&store, ticket).remove(0));
    assert!(store.close(LONG));
    assert!(ends.contains(&Err(Miss::Closed)) && !disk.has_checkpoint());
    let store = open(&disk);
    for n in 0..4 {
        delete_surely(&store, n);
    }
    assert_eq!(contains(&open(&disk.killed()), &[0, 1, 2, 3, 4]), [false, false, false, false, true]);
}

#[test]
fn a_deleted_key_has_no_older_copy_in_another_slot() {
    let disk = disk();
    let store = open(&disk);
    put(&store, &[1, 2], 0);
    disk.fail(Some((1, 5)));
    assert_eq!(get(&store, &[1]), [Err(Miss::Io)]);
    // Another key takes the first slot, and its write fails, too: the header is still that of key 1.
    assert_eq!(put(&store, &[3], 0), [Err(Miss::Io)]);
    disk.fail(None);
    put(&store, &[1], 0);
    for store in [store, open(&disk.killed())] {
        delete_surely(&store, 1);
        assert!(store.close(LONG));
    }
    disk.drop_checkpoint();
    assert_eq!(contains(&open(&disk), &[1, 2]), [false, true]);
}

#[test]
fn forgetting_drops_every_key_with_writes_in_flight_and_lasts() {
    for with_checkpoint in [true, false] {
        let disk = disk();
        let store = open(&disk);
        put(&store, &[1, 2, 3], 0);
        let in_flight = submit_put(&store, &[4, 5], 0).unwrap();
        store.forget(None).unwrap();
        collect(&store, in_flight);
        assert_eq!(contains(&store, &[1, 2, 3, 4, 5]), [false; 5]);
        assert_eq!(store.stats().unwrap().cached_blocks, 0);
        put(&store, &[2, 4], 1);
        assert_eq!(get(&store, &[1, 2, 4]), [ABSENT, Ok(row(2, 1)), Ok(row(4, 1))]);
        let store = reopened(&disk, store, with_checkpoint);
        assert_eq!(get(&store, &[1, 2, 3, 4, 5]), [ABSENT, Ok(row(2, 1)), ABSENT, Ok(row(4, 1)), ABSENT]);
        assert_no_slot_leaked(&store, 1);
    }
}

#[test]
fn forgetting_that_the_disk_refuses_is_an_error_and_holds_for_this_life() {
    let disk = disk();
    let store = open(&disk);
    put(&store, &[1], 0);
    disk.fail(Some((1, 5)));
    assert!(matches!(store.forget(None), Err(Error::Io { .. })));
    disk.fail(None);
    assert_eq!(get(&store, &[1]), [ABSENT]);
}

#[test]
fn the_blocks_of_a_revision_are_found_under_that_revision_alone() {
    let disk = disk();
    let (base, new) = (revision_name(""), revision_name("step-1800"));
    let opened = |revision| SlabStore::open_keyed(disk.device(), StoreOptions { revision, ..options() }).unwrap();
    let store = opened(base);
    put(&store, &[1], 0);
    store.forget(Some(new)).unwrap();
    assert_eq!(get(&store, &[1]), [ABSENT]);
    put(&store, &[1], 1);
    store.forget(Some(new)).unwrap();
    assert_eq!(get(&store, &[1]), [Ok(row(1, 1))], "nothing is forgotten under the same revision");
    drop(store);
    assert_eq!(get(&opened(new), &[1]), [Ok(row(1, 1))]);
    let store = opened(base);
    assert_eq!(get(&store, &[1]), [ABSENT]);
    put(&store, &[1], 2);
    drop(store);
    assert_eq!(get(&opened(new), &[1]), [ABSENT]);
}

#[test]
fn forgetting_ends_in_time_though_the_disk_hangs_and_takes_no_puts_until_the_disk_knows() {
    let disk = disk();
    let store =
        SlabStore::open_keyed(disk.device(), StoreOptions { timeout_base: Duration::from_secs(1), ..options() });
    let store = store.unwrap();
    put(&store, &[1], 0);
    disk.frozen(|| {
        assert!(matches!(store.forget(None), Err(Error::Io { .. })));
        assert_eq!(contains(&store, &[1]), [false]);
        let refused = submit_put(&store, &[2], 0).unwrap();
        assert_eq!(collect(&store, refused), [Err(Miss::Forgotten)]);
    });
    store.forget(None).unwrap();
    put(&store, &[2], 0);
    assert_eq!(get(&store, &[1, 2]), [ABSENT, Ok(row(2, 0))]);
}

#[test]
fn without_its_superblock_a_slab_is_empty() {
    let disk = disk();
    let store = open(&disk);
    put(&store, &[1, 2], 0);
    drop(store);
    disk.change(|bytes| bytes[100] ^= 1);
    let store = open(&disk);
    assert_eq!((store.stats().unwrap().cached_blocks, store.lost_blocks()), (0, 2));
    assert_eq!(get(&store, &[1]), [ABSENT]);
    put(&store, &[1], 1);
    let store = open(&disk.killed());
    assert_eq!(store.lost_blocks(), 0);
    assert_eq!(get(&store, &[1, 2]), [Ok(row(1, 1)), ABSENT]);
    assert_no_slot_leaked(&store, 1);
}

/// A disk whose first read has a wrong byte.
struct FlipsOnce(Arc<dyn BlockDevice>, AtomicBool);

impl BlockDevice for FlipsOnce {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        let found = self.0.read_at(bytes, offset)?;
        bytes[100] ^= u8::from(!self.1.swap(true, Ordering::SeqCst));
        Ok(found)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.0.write_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }
}

#[test]
fn a_superblock_that_is_damaged_on_the_way_forgets_nothing() {
    let disk = disk();
    put(&open(&disk), &[1, 2], 0);
    let device = Arc::new(FlipsOnce(disk.device(), AtomicBool::new(false)));
    let store = SlabStore::open_keyed(device, options()).unwrap();
    assert_eq!(get(&store, &[1, 2]), [Ok(row(1, 0)), Ok(row(2, 0))]);
}

#[test]
fn another_namespace_or_length_finds_nothing_and_takes_the_slots() {
    let same = options().geometry;
    let cases = [
        StoreOptions { namespace: [8; 32], ..options() },
        StoreOptions { geometry: Geometry { payload_bytes: PAYLOAD - 1, ..same }, ..options() },
    ];
    for other in cases {
        for with_checkpoint in [true, false] {
            let disk = disk();
            let store = open(&disk);
            put(&store, &[1, 2], 0);
            assert!(store.close(LONG));
            if !with_checkpoint {
                disk.drop_checkpoint();
            }
            let store = SlabStore::open_keyed(disk.device(), other.clone()).unwrap();
            assert_eq!((contains(&store, &[1, 2]), store.stats().unwrap().cached_blocks), (vec![false; 2], 0));
            if other.geometry == same {
                assert_no_slot_leaked(&store, 0);
            }
        }
    }
}

#[test]
fn the_blocks_of_another_namespace_go_after_empty_slots_and_by_age() {
    for with_checkpoint in [true, false] {
        let disk = disk();
        let other = StoreOptions { namespace: [8; 32], ..options() };
        let store = open(&disk);
        put(&store, &[0, 1, 2], 0);
        assert!(store.close(LONG));
        let store = SlabStore::open_keyed(disk.device(), other).unwrap();
        put(&store, &[10, 11], 0);
        assert!(store.close(LONG));
        let store = open(&disk);
        put(&store, &[3, 4, 5], 0);
        let store = reopened(&disk, store, with_checkpoint);
        // All slots are taken: keys 0 to 2 are the oldest.
        put(&store, &[6], 0);
        assert_eq!(contains(&store, &[0, 1, 2, 3, 4, 5, 6]), [false, true, true, true, true, true, true]);
    }
}

#[test]
fn fewer_or_more_slots_keep_the_blocks_that_still_have_one() {
    let disk = disk();
    let store = open(&disk);
    put(&store, &[0, 1, 2, 3, 4, 5, 6, 7], 0);
    let mut store = reopened(&disk, store, true);
    for slots in [5, SLOTS] {
        assert!(store.close(LONG));
        let geometry = Geometry { slots, ..options().geometry };
        store = SlabStore::open_keyed(disk.device(), StoreOptions { geometry, ..options() }).unwrap();
        assert_eq!(contains(&store, &[0, 4]), [true; 2]);
    }
    assert_no_slot_leaked(&store, 0);
}

#[test]
fn each_use_refuses_the_calls_of_the_other() {
    let disk = disk();
    let store = open(&disk);
    assert!(matches!(store.submit_write(&[0], &row(1, 0)), Err(Error::SlotOutOfRange { slot: 0, slots: 0 })));
    assert!(matches!(store.submit_put(&[key(1)], &row(1, 0)[1..], None), Err(Error::WrongLength { .. })));
    drop(store);
    let store = SlabStore::open(disk.device(), options()).unwrap();
    assert!(matches!(store.submit_get(&[key(1)]), Err(Error::NotKeyed)));
    assert!(matches!(store.forget(None), Err(Error::NotKeyed)));
}

#[test]
fn blocks_beyond_the_memory_limit_are_refused_and_evict_nothing() {
    let disk = disk();
    let stride = options().geometry.stride() as u64;
    let options = StoreOptions { memory_bytes: 2 * stride, ..options() };
    let store = SlabStore::open_keyed(disk.device(), options).unwrap();
    assert_eq!(put(&store, &[1, 2, 3], 0), [Ok(()), Ok(()), Err(Miss::QueueFull)]);
    assert_eq!(contains(&store, &[1, 2, 3]), [true, true, false]);
    assert_eq!(get(&store, &[1, 2, 1]), [Ok(row(1, 0)), Ok(row(2, 0)), Err(Miss::QueueFull)]);
    assert_eq!(contains(&store, &[1]), [true], "a refused read says nothing about the block");
    assert_eq!(put(&store, &[1, 2, 3], 0), [Ok(()); 3], "existing keys need no memory");
    assert_eq!(store.stats().unwrap().pending_bytes, 0);
}

#[test]
fn an_event_says_that_tickets_have_ended_until_somebody_polls() {
    let store = open(&disk());
    let event = store.event_fd().unwrap();
    assert_eq!(store.event_fd().unwrap(), event);
    let readable = |timeout| {
        // The descriptor's counter.
        let deadline = Instant::now() + timeout;
        loop {
            let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{event}")).unwrap();
            let count = text.lines().find_map(|line| line.strip_prefix("eventfd-count:")).unwrap().trim();
            if u64::from_str_radix(count, 16).unwrap() > 0 {
                return true;
            }
            if Instant::now() > deadline {
                return false;
            }
            std::thread::yield_now();
        }
    };
    assert!(readable(Duration::ZERO), "tickets may have ended before the event was requested");
    store.poll().unwrap();
    assert!(!readable(Duration::ZERO));
    let ticket = submit_put(&store, &[1], 0).unwrap();
    assert!(readable(LONG));
    assert_eq!(store.poll().unwrap(), [ticket]);
    assert!(!readable(Duration::ZERO));
    let absent = store.submit_get(&[key(9)]).unwrap();
    assert!(readable(Duration::ZERO), "a ticket may have ended when it is submitted");
    assert_eq!(store.poll().unwrap(), [absent]);
}

/// One action of a random history.
#[derive(Clone, Debug)]
enum Action {
    Put(Vec<u64>),
    Get(Vec<u64>),
    Delete(u64),
    FailingGet(u64),
    Forget,
    Reopen(bool),
    Kill,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    // As many keys as slots: nothing is evicted, so each key's fate is known.
    let id = 0..u64::from(SLOTS);
    let ids = prop::collection::vec(id.clone(), 0..6);
    let action = prop_oneof![
        5 => ids.clone().prop_map(Action::Put),
        4 => ids.prop_map(Action::Get),
        2 => id.clone().prop_map(Action::Delete),
        1 => id.prop_map(Action::FailingGet),
        1 => Just(Action::Forget),
        1 => any::<bool>().prop_map(Action::Reopen),
        1 => Just(Action::Kill),
    ];
    prop::collection::vec(action, 1..40)
}

/// The store, and a model: a map from key to epoch.
struct Pair {
    disk: Disk,
    store: SlabStore,
    model: BTreeMap<u64, u64>,
    epoch: u64,
}

impl Pair {
    fn apply(&mut self, action: Action) {
        match action {
            Action::Put(ids) => {
                assert!(put(&self.store, &ids, self.epoch).iter().all(Result::is_ok));
                for n in ids {
                    self.model.entry(n).or_insert(self.epoch);
                }
            }
            Action::Get(ids) => {
                let expected: Vec<_> =
                    ids.iter().map(|n| self.model.get(n).map(|&epoch| row(*n, epoch)).ok_or(Miss::Absent)).collect();
                assert_eq!(get(&self.store, &ids), expected);
            }
            Action::Delete(n) => {
                assert_eq!(delete(&self.store, &[n]), [Ok(())]);
                self.model.remove(&n);
            }
            Action::FailingGet(n) => {
                self.disk.fail(Some((1, 5)));
                let expected = if self.model.contains_key(&n) { Miss::Io } else { Miss::Absent };
                assert_eq!(get(&self.store, &[n]), [Err(expected)]);
                self.disk.fail(None);
                assert_eq!((contains(&self.store, &[n]), get(&self.store, &[n])), (vec![false], vec![ABSENT]));
                if let Some(&epoch) = self.model.get(&n) {
                    assert_eq!(put(&self.store, &[n], epoch), [Ok(())], "a put ends that");
                }
            }
            Action::Forget => {
                self.store.forget(None).unwrap();
                self.model.clear();
                self.epoch += 1;
            }
            Action::Reopen(with_checkpoint) => {
                assert!(self.store.close(LONG));
                if !with_checkpoint {
                    self.disk.drop_checkpoint();
                }
                self.store = open(&self.disk);
            }
            Action::Kill => {
                self.disk = self.disk.killed();
                self.store = open(&self.disk);
            }
        }
        let all: Vec<u64> = (0..SLOTS.into()).collect();
        let held: Vec<bool> = all.iter().map(|n| self.model.contains_key(n)).collect();
        assert_eq!(contains(&self.store, &all), held);
        assert_eq!(self.store.stats().unwrap().cached_blocks, self.model.len() as u64);
        assert_eq!(self.store.stats().unwrap().pending_bytes, 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn a_random_history_gives_what_a_map_gives(actions in actions()) {
        let disk = disk();
        let store = open(&disk);
        let mut pair = Pair { disk, store, model: BTreeMap::new(), epoch: 0 };
        for action in actions {
            pair.apply(action);
        }
        assert_no_slot_leaked(&pair.store, pair.epoch);
    }
}

/// A page of caller memory.
struct Row(Buffer);

impl LentRow for Row {
    fn bytes(&self) -> &[u8] {
        self.0.as_slice()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_mut_slice()
    }
}

#[test]
fn blocks_come_back_by_key_in_rows_of_the_caller() {
    let geometry = Geometry { payload_bytes: PAGE, slots: SLOTS };
    let disk = Disk::new(geometry.total());
    let store = SlabStore::open_keyed(disk.device(), StoreOptions { geometry, ..options() }).unwrap();
    let block = |n| row(n, 0)[..PAGE].to_vec();
    let stored = store.submit_put(&[key(1), key(2)], &[block(1), block(2)].concat(), None).unwrap();
    assert!(collect(&store, stored).iter().all(Result::is_ok));
    for _ in 0..2 {
        let rows = || (0..3).map(|_| Box::new(Row(Buffer::new(PAGE))) as Box<dyn LentRow>).collect();
        let ticket = store.lend_get(&[key(2), key(7), key(1)], rows()).unwrap();
        assert_eq!(collect(&store, ticket), [Ok(block(2)), ABSENT, Ok(block(1))]);
        let refused = store.lend_get(&[key(1)], rows());
        assert!(matches!(refused, Err(Error::WrongLength { .. })), "{refused:?}");
    }
}
