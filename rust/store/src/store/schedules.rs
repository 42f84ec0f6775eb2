//! The store's threads and callers in schedules that `shuttle` chooses. No wait times out there, so a missing wake-up
//! shows as a deadlock.

use super::{SlabStore, StoreOptions};
use crate::device::BlockDevice;
use crate::error::Error;
use crate::geometry::Geometry;
use crate::index::Landed;
use crate::miss::Miss;
use crate::ticket::Progress;
use shuttle::{check_pct, check_random, thread};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const BYTES: usize = 16;
const LONG: Duration = Duration::from_secs(3600);

/// Bytes in memory; each access lets other threads go first.
struct Memory(Mutex<Vec<u8>>);

impl BlockDevice for Memory {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        thread::yield_now();
        let at = usize::try_from(offset).unwrap();
        bytes.copy_from_slice(&self.0.lock().unwrap()[at..at + bytes.len()]);
        Ok(bytes.len())
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        thread::yield_now();
        let at = usize::try_from(offset).unwrap();
        self.0.lock().unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(bytes.len())
    }
}

fn store() -> Arc<SlabStore> {
    let geometry = Geometry::fit(BYTES, None, Some(4)).unwrap();
    let options = StoreOptions {
        geometry,
        namespace: [0; 32],
        revision: [0; 32],
        threads: 2,
        memory_bytes: 1 << 20,
        timeout_base: LONG,
        hidden: LONG,
    };
    let memory = Memory(Mutex::new(vec![0; usize::try_from(geometry.total()).unwrap()]));
    Arc::new(SlabStore::open(Arc::new(memory), options).unwrap())
}

/// Writes two slots, reads them back, and compares.
fn round_trip(store: &SlabStore, slots: [i64; 2], mark: u8) {
    let rows: Vec<u8> = (0..2 * BYTES).map(|i| mark + u8::from(i >= BYTES)).collect();
    let written = store.submit_write(&slots, &rows).unwrap();
    let read = store.submit_read(&slots).unwrap();
    assert_eq!(store.wait_for(read, LONG).unwrap(), Progress::Finished);
    let completion = store.take(read).unwrap();
    let blocks: Vec<&[u8]> = completion.blocks().map(|block| block.unwrap().unwrap()).collect();
    assert_eq!(blocks.concat(), rows);
    assert_eq!(store.wait_for(written, LONG).unwrap(), Progress::Finished);
    assert!(store.take(written).unwrap().blocks().all(|block| block == Ok(None)));
}

fn two_callers() {
    let store = store();
    let other = Arc::clone(&store);
    let caller = thread::spawn(move || round_trip(&other, [2, 3], 40));
    round_trip(&store, [0, 1], 10);
    caller.join().unwrap();
    assert_eq!(store.stats().unwrap().pending_bytes, 0);
    assert!(store.close(LONG));
}

#[test]
fn callers_find_what_they_wrote_whatever_the_schedule() {
    check_random(two_callers, 200);
    check_pct(two_callers, 200, 3);
}

/// More callers than threads, each with one block at a time: first in its own slot, then in a slot that all share.
fn callers_of_single_blocks() {
    let store = store();
    let caller = |slot: u8| {
        let store = Arc::clone(&store);
        move || {
            for slot in [i64::from(slot), 3] {
                let written = store.submit_write(&[slot], &[7; BYTES]).unwrap();
                assert_eq!(ends(&store, written, &[7]), [Ok(())]);
                let read = store.submit_read(&[slot]).unwrap();
                assert_eq!(ends(&store, read, &[7]), [Ok(())]);
            }
        }
    };
    let others = [thread::spawn(caller(1)), thread::spawn(caller(2))];
    caller(0)();
    for other in others {
        other.join().unwrap();
    }
    assert!(store.close(LONG));
}

#[test]
fn no_caller_of_a_single_block_waits_forever_whatever_the_schedule() {
    check_random(callers_of_single_blocks, 400);
    check_pct(callers_of_single_blocks, 400, 3);
}

/// A keyed store of two slots, as opened over an empty slab.
fn keyed() -> Arc<SlabStore> {
    let geometry = Geometry::fit(BYTES, None, Some(2)).unwrap();
    let options = StoreOptions {
        geometry,
        namespace: [0; 32],
        revision: [0; 32],
        threads: 2,
        memory_bytes: 1 << 20,
        timeout_base: LONG,
        hidden: LONG,
    };
    let memory = Memory(Mutex::new(vec![0; usize::try_from(geometry.total()).unwrap()]));
    let mut queue = options.queue(1);
    queue.restore(&Landed { floor: 1, next_generation: 2, blocks: Vec::new(), older: Vec::new() });
    Arc::new(SlabStore::start(Arc::new(memory), options, queue, true).unwrap())
}

/// The outcome of each block of a ticket; a block that was read must be its key's.
fn ends(store: &SlabStore, ticket: u64, keys: &[u8]) -> Vec<Result<(), Miss>> {
    assert_eq!(store.wait_for(ticket, LONG).unwrap(), Progress::Finished);
    let done = store.take(ticket).unwrap();
    let end = |(block, key): (Result<Option<&[u8]>, Miss>, &u8)| {
        block.map(|bytes| assert!(bytes.is_none_or(|bytes| bytes == [*key; BYTES])))
    };
    done.blocks().zip(keys).map(end).collect()
}

fn callers_by_key() {
    let store = keyed();
    let other = Arc::clone(&store);
    let caller = thread::spawn(move || {
        let put = other.submit_put(&[[1; 32], [2; 32]], &[[1; BYTES], [2; BYTES]].concat(), None).unwrap();
        let deleted = other.submit_delete(&[[1; 32]]).unwrap();
        assert_eq!(ends(&other, put, &[1, 2]), [Ok(()); 2]);
        assert_eq!(ends(&other, deleted, &[1]), [Ok(())]);
    });
    // Key 3 takes the slot of one of the others, or they take its slot.
    let put = store.submit_put(&[[3; 32], [1; 32]], &[[3; BYTES], [1; BYTES]].concat(), None).unwrap();
    let get = store.submit_get(&[[1; 32], [2; 32], [3; 32]]).unwrap();
    let get = ends(&store, get, &[1, 2, 3]);
    assert!(get.iter().all(|end| matches!(end, Ok(()) | Err(Miss::Absent | Miss::Lost))), "{get:?}");
    assert_eq!(ends(&store, put, &[3, 1]), [Ok(()); 2]);
    caller.join().unwrap();
    let held = store.contains(&[[1; 32], [2; 32], [3; 32]]).unwrap().into_iter().filter(|held| *held).count() as u64;
    let stats = store.stats().unwrap();
    assert_eq!((stats.cached_blocks, stats.pending_bytes), (held, 0));
    assert!(held > 0 && store.close(LONG));
}

#[test]
fn callers_by_key_find_right_blocks_whatever_the_schedule() {
    check_random(callers_by_key, 400);
    check_pct(callers_by_key, 400, 3);
}

/// A thread that waits while another closes the store wakes up.
fn close_meanwhile() {
    let store = store();
    let other = Arc::clone(&store);
    let caller = thread::spawn(move || {
        let rows = [7; 2 * BYTES];
        match other.submit_write(&[0, 1], &rows) {
            Ok(ticket) => assert_eq!(other.wait_for(ticket, LONG).unwrap(), Progress::Finished),
            Err(error) => assert!(matches!(error, Error::Closed)),
        }
    });
    assert!(store.close(LONG));
    caller.join().unwrap();
    assert!(store.close(LONG));
}

#[test]
fn a_close_wakes_whoever_waits() {
    check_random(close_meanwhile, 400);
    check_pct(close_meanwhile, 400, 3);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_missing_wake_up_is_noticed() {
    check_random(
        || {
            let store = store();
            let ticket = store.shared.lock().queue.submit_reads(&[0], None, Instant::now()).unwrap();
            let _ = store.wait_for(ticket, LONG);
            let _ = store.close(LONG);
        },
        500,
    );
}
