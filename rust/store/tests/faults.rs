//! A store over a real file. One in `every` calls fails, or calls never return: the store must return no wrong byte,
//! leak nothing, and not block.
#![expect(clippy::unwrap_used, reason = "test code")]

#[path = "common/disk.rs"]
#[expect(dead_code, reason = "only its generator and its errors")]
mod disk;

use blockyard_store::{
    BlockDevice, DirectMode, Geometry, Progress, SlabFile, SlabOptions, SlabStore, StoreOptions, checksum,
};
use disk::{ERRORS, Random};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const BYTES: usize = 4096;
const SLOTS: u32 = 64;
const KEYS: u64 = 200;
const PATIENCE: Duration = Duration::from_secs(1);

/// Held by each test, since they count the resources of the whole process.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A slab whose calls fail at intervals, or block.
struct Faulty {
    file: SlabFile,
    calls: AtomicU64,
    /// Every `nth` call fails; 0 for none.
    nth: AtomicU64,
    frozen: Mutex<bool>,
    thawed: Condvar,
}

impl Faulty {
    fn open(folder: &Path) -> (Arc<Self>, SlabStore) {
        let geometry = Geometry { payload_bytes: BYTES, slots: SLOTS };
        let namespace = [7; 32];
        let direct = DirectMode::Auto;
        let file = SlabFile::open_kept(&SlabOptions { directory: folder.to_owned(), geometry, namespace, direct });
        let (calls, nth) = (AtomicU64::new(0), AtomicU64::new(0));
        let device = Self { file: file.unwrap(), calls, nth, frozen: Mutex::default(), thawed: Condvar::new() };
        let device = Arc::new(device);
        let options = StoreOptions {
            geometry,
            namespace,
            revision: [0; 32],
            threads: 4,
            memory_bytes: 1 << 22,
            timeout_base: PATIENCE,
            hidden: PATIENCE,
        };
        let store = SlabStore::open_keyed(Arc::clone(&device) as _, options).unwrap();
        (device, store)
    }

    fn freeze(&self, frozen: bool) {
        *self.frozen.lock().unwrap() = frozen;
        self.thawed.notify_all();
    }

    fn call(&self) -> io::Result<()> {
        drop(self.thawed.wait_while(self.frozen.lock().unwrap(), |frozen| *frozen).unwrap());
        let (call, nth) = (self.calls.fetch_add(1, Ordering::Relaxed), self.nth.load(Ordering::Relaxed));
        if nth > 0 && call % nth == 0 {
            let which = usize::try_from(call / nth).unwrap() % ERRORS.len();
            return Err(io::Error::from_raw_os_error(ERRORS[which]));
        }
        Ok(())
    }
}

impl BlockDevice for Faulty {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        self.call().and_then(|()| self.file.read_at(bytes, offset))
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.call().and_then(|()| self.file.write_at(bytes, offset))
    }

    fn sync(&self) -> io::Result<()> {
        self.call().and_then(|()| self.file.sync())
    }
}

fn key(n: u64) -> [u8; 32] {
    let mut key = [0x5A; 32];
    key[..8].copy_from_slice(&n.to_le_bytes());
    key
}

/// A block whose bytes identify its key.
fn row(n: u64) -> Vec<u8> {
    checksum(&n.to_le_bytes()).into_iter().cycle().take(BYTES).collect()
}

/// Puts, gets and deletes random keys until this many blocks have been requested.
fn work(store: &SlabStore, random: &mut Random, blocks: usize) {
    let mut done = 0;
    while done < blocks {
        let ids: Vec<u64> = (0..=random.below(7)).map(|_| random.below(KEYS)).collect();
        let keys: Vec<_> = ids.iter().map(|&n| key(n)).collect();
        let ticket = match random.below(8) {
            0 => store.submit_delete(&keys),
            1..4 => store.submit_put(&keys, &ids.iter().flat_map(|&n| row(n)).collect::<Vec<u8>>(), None),
            _ => store.submit_get(&keys),
        };
        let ticket = ticket.unwrap();
        store.wait_for(ticket, 60 * PATIENCE).unwrap();
        for (block, &n) in store.take(ticket).unwrap().blocks().zip(&ids) {
            assert!(!matches!(block, Ok(Some(bytes)) if bytes != row(n)), "wrong bytes of key {n}");
        }
        done += ids.len();
    }
}

/// Open file descriptors, and bytes of memory in use.
fn resources() -> (usize, u64) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    (descriptors, status.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096)
}

fn errors_everywhere(blocks: usize) {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let (device, store) = Faulty::open(folder.path());
    let random = &mut Random::new(1);
    // First let the allocator settle.
    work(&store, random, blocks / 10);
    let before = resources();
    for nth in [1, 2, 3, 7, 50] {
        device.nth.store(nth, Ordering::Relaxed);
        work(&store, random, blocks / 5);
    }
    device.nth.store(0, Ordering::Relaxed);
    let after = resources();
    let stats = store.stats().unwrap();
    println!("{blocks} blocks, {} errors: {before:?} -> {after:?} descriptors and bytes", stats.errors);
    assert!(stats.errors > 0 && stats.pending_bytes == 0);
    assert!(after.0 <= before.0, "{before:?} {after:?}");
    assert!(after.1 < before.1 + (8 << 20), "{before:?} {after:?}");
    // It recovers without a restart: every slot can be filled.
    let fresh: Vec<_> = (1 << 40..(1 << 40) + u64::from(SLOTS)).map(key).collect();
    let rows = vec![1; BYTES * fresh.len()];
    let ticket = store.submit_put(&fresh, &rows, None).unwrap();
    assert_eq!(store.wait_for(ticket, 60 * PATIENCE).unwrap(), Progress::Finished);
    assert!(store.take(ticket).unwrap().blocks().all(|block| block.is_ok()));
    assert!(store.contains(&fresh).unwrap().into_iter().all(|held| held));
    assert!(store.close(60 * PATIENCE));
}

#[test]
fn errors_at_every_nth_call_of_a_file_leave_nothing_behind() {
    errors_everywhere(20_000);
}

#[test]
#[ignore = "slow: a million operations"]
fn a_million_operations_with_errors_leave_nothing_behind() {
    errors_everywhere(1_000_000);
}

/// Calls on a store whose device hangs. Returns how long each took.
fn calls_while_frozen(store: &SlabStore, count: u64) -> Vec<Duration> {
    let mut times = Vec::new();
    let mut clock = |call: &mut dyn FnMut()| {
        let started = Instant::now();
        call();
        times.push(started.elapsed());
    };
    for n in 0..count {
        let mut ticket = 0;
        if n % 2 == 0 {
            clock(&mut || ticket = store.submit_get(&[key(n % 8)]).unwrap());
        } else {
            clock(&mut || ticket = store.submit_put(&[key(1000 + n)], &row(n), None).unwrap());
        }
        clock(&mut || drop(store.poll().unwrap()));
        clock(&mut || drop(store.contains(&[key(n % 8)]).unwrap()));
        clock(&mut || drop(store.take(ticket).unwrap()));
    }
    times
}

/// Freezes a store under loads; prints what calls and loads cost, and thaws it again.
fn hang(count: u64) {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let (device, store) = Faulty::open(folder.path());
    let keys: Vec<_> = (0..8).map(key).collect();
    let ticket = store.submit_put(&keys, &(0..8).flat_map(row).collect::<Vec<u8>>(), None).unwrap();
    store.wait_for(ticket, 60 * PATIENCE).unwrap();
    drop(store.take(ticket).unwrap());
    device.freeze(true);
    let load = |n: u64| {
        let started = Instant::now();
        let ticket = store.submit_get(&[key(n)]).unwrap();
        store.wait_for(ticket, 60 * PATIENCE).unwrap();
        assert!(store.take(ticket).unwrap().blocks().all(|block| block.is_err()));
        started.elapsed()
    };
    let (first, second) = (load(0), load(1));
    assert!(first >= PATIENCE && second < PATIENCE, "{first:?} {second:?}");
    assert_eq!(store.contains(&keys).unwrap(), [false; 8], "the store does not claim blocks that a load would miss");
    let mut times = calls_while_frozen(&store, count);
    times.sort_unstable();
    let (median, late) = (times[times.len() / 2], times[times.len() - 1 - times.len() / 1000]);
    println!("first load {first:?}, second {second:?}; {} calls: median {median:?}, p99.9 {late:?}", times.len());
    device.freeze(false);
    // Once the hung thread answers, the tier is back.
    while !store.contains(&keys[1..2]).unwrap()[0] {
        std::thread::yield_now();
    }
    let ticket = store.submit_get(&keys[1..2]).unwrap();
    store.wait_for(ticket, 60 * PATIENCE).unwrap();
    assert_eq!(store.take(ticket).unwrap().blocks().collect::<Vec<_>>(), [Ok(Some(&row(1)[..]))]);
    assert!(store.close(60 * PATIENCE));
}

#[test]
fn a_device_that_hangs_stops_no_call_and_comes_back() {
    hang(100);
}

#[test]
#[ignore = "slow: ten thousand calls, for the figures in docs/operate/reliability.md"]
fn calls_on_a_device_that_hangs_take_microseconds() {
    hang(10_000);
}
