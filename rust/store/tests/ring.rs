//! The store with `io_uring`: what hangs in the kernel, ends in parts or fails, over pipes that stand for a disk and over
//! files. Without `io_uring` the tests say so and end.
#![expect(clippy::unwrap_used, reason = "test code")]

#[expect(dead_code, unused_imports, reason = "shared with other tests")]
mod common;

use blockyard_store::{
    BlockDevice, Buffer, DirectMode, Geometry, Io, LentRow, Miss, PAGE, Progress, SlabFile, SlabOptions, SlabStore,
    StoreOptions,
};
use common::{LONG, Memory, options};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

const GEOMETRY: Geometry = Geometry { payload_bytes: PAGE, slots: 8 };
const STRIDE: usize = 2 * PAGE;

/// A disk whose answers the test writes into the pipe.
struct Pipe(File);

impl BlockDevice for Pipe {
    fn read_at(&self, _bytes: &mut [u8], _offset: u64) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn write_at(&self, _bytes: &[u8], _offset: u64) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }
}

/// A file without direct I/O.
struct Plain(File);

impl BlockDevice for Plain {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(bytes, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.0.write_at(bytes, offset)
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }
}

/// Sets its flag when a read begins.
struct Row {
    buffer: Buffer,
    begun: Arc<AtomicBool>,
}

impl LentRow for Row {
    fn bytes(&self) -> &[u8] {
        self.buffer.as_slice()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.begun.store(true, Ordering::SeqCst);
        self.buffer.as_mut_slice()
    }
}

fn row(begun: &Arc<AtomicBool>) -> Box<dyn LentRow> {
    Box::new(Row { buffer: Buffer::new(PAGE), begun: Arc::clone(begun) })
}

fn wait_until_begun(begun: &AtomicBool) {
    while !begun.load(Ordering::SeqCst) {
        thread::yield_now();
    }
}

/// A store with rings; `None` where the system has none.
fn ring_store(device: Arc<dyn BlockDevice>, patience: Duration) -> Option<SlabStore> {
    let options = StoreOptions { geometry: GEOMETRY, io: Io::Uring, patience, ..options() };
    let store = SlabStore::open(device, options).unwrap();
    if let Some(reason) = store.refused() {
        eprintln!("no io_uring here: {reason}");
        return None;
    }
    assert_eq!(store.options().io, Io::Uring);
    Some(store)
}

fn pipe_store(patience: Duration) -> Option<(SlabStore, File)> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pipe");
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let pipe = File::options().read(true).write(true).open(path).unwrap();
    Some((ring_store(Arc::new(Pipe(pipe.try_clone().unwrap())), patience)?, pipe))
}

/// Writes a slot; returns what came to the disk.
fn write(store: &SlabStore, disk: &mut File, slot: i64) -> Vec<u8> {
    let ticket = store.submit_write(&[slot], &[7; PAGE]).unwrap();
    let mut block = vec![0; STRIDE];
    assert_eq!(outcomes(store, ticket), [Ok(None)]);
    disk.read_exact(&mut block).unwrap();
    block
}

fn outcomes(store: &SlabStore, ticket: u64) -> Vec<Result<Option<u8>, Miss>> {
    store.wait_for(ticket, LONG).unwrap();
    let first = |block: Result<Option<&[u8]>, Miss>| block.map(|bytes| bytes.map(|bytes| bytes[0]));
    store.take(ticket).unwrap().blocks().map(first).collect()
}

#[test]
fn an_abandoned_read_keeps_its_row_until_the_kernel_is_done_with_it() {
    let Some((store, mut disk)) = pipe_store(Duration::from_secs(1)) else { return };
    let begun = Arc::default();
    let block = write(&store, &mut disk, 3);
    let ticket = store.lend_read(&[3], vec![row(&begun)]).unwrap();
    wait_until_begun(&begun);
    assert_eq!(store.wait_for(ticket, LONG).unwrap(), Progress::Expired);
    assert_eq!(outcomes(&store, ticket), [Err(Miss::Timeout)]);
    assert!(!store.close(Duration::from_millis(50)));
    assert_eq!(Arc::strong_count(&begun), 2, "the kernel has the row");
    disk.write_all(&block).unwrap();
    assert!(store.close(LONG));
    assert_eq!(Arc::strong_count(&begun), 1);
    assert_eq!(store.stats().unwrap().pending_bytes, 0);
}

#[test]
fn a_store_that_is_dropped_leaves_what_hangs_to_the_kernel() {
    let Some((store, mut disk)) = pipe_store(LONG) else { return };
    let begun = Arc::default();
    let block = write(&store, &mut disk, 0);
    store.lend_read(&[0], vec![row(&begun)]).unwrap();
    wait_until_begun(&begun);
    drop(store);
    assert_eq!(Arc::strong_count(&begun), 2);
    disk.write_all(&block).unwrap();
    while Arc::strong_count(&begun) > 1 {
        thread::yield_now();
    }
}

#[test]
fn requests_that_hang_hold_up_no_others() {
    let Some((store, mut disk)) = pipe_store(LONG) else { return };
    let blocks: Vec<_> = (0..3).map(|slot| write(&store, &mut disk, slot)).collect();
    // More than there are threads.
    let reads: Vec<_> = (0..3).map(|slot| store.submit_read(&[slot]).unwrap()).collect();
    let ticket = store.submit_write(&[5], &[7; PAGE]).unwrap();
    assert_eq!(outcomes(&store, ticket), [Ok(None)]);
    // One of the reads has got that block out of the pipe, or will.
    let is_pending = |&&read: &&u64| store.wait_for(read, Duration::ZERO).unwrap() == Progress::Pending;
    assert!(reads.iter().filter(is_pending).count() >= 2);
    for block in &blocks[..2] {
        disk.write_all(block).unwrap();
    }
    let read: Vec<_> = reads.into_iter().flat_map(|ticket| outcomes(&store, ticket)).collect();
    // Which of them got which block is the pipe's choice; another slot's is no hit.
    assert!(read.iter().all(|block| matches!(block, Ok(Some(7)) | Err(Miss::Slot))), "{read:?}");
}

#[test]
fn a_read_that_comes_in_parts_goes_on() {
    let Some((store, mut disk)) = pipe_store(LONG) else { return };
    let block = write(&store, &mut disk, 2);
    let begun = Arc::default();
    let ticket = store.lend_read(&[2], vec![row(&begun)]).unwrap();
    disk.write_all(&block[..PAGE]).unwrap();
    // The first part has gone when the pipe is empty.
    while rustix::io::ioctl_fionread(&disk).unwrap() > 0 {
        thread::yield_now();
    }
    disk.write_all(&block[PAGE..]).unwrap();
    assert_eq!(outcomes(&store, ticket), [Ok(Some(7))]);
}

#[test]
fn one_block_of_several_that_fails_is_no_miss_of_the_others() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(GEOMETRY.total()).unwrap();
    let Some(store) = ring_store(Arc::new(Plain(file.try_clone().unwrap())), LONG) else { return };
    let rows: Vec<u8> = (0..8).flat_map(|mark| [mark; PAGE]).collect();
    let slots: Vec<i64> = (0..8).collect();
    let ticket = store.submit_write(&slots, &rows).unwrap();
    assert_eq!(outcomes(&store, ticket), [Ok(None); 8]);
    file.set_len(GEOMETRY.offset(6) + PAGE as u64).unwrap();
    let ticket = store.submit_read(&slots).unwrap();
    let mut expected: Vec<Result<Option<u8>, Miss>> = (0..8).map(|mark| Ok(Some(mark))).collect();
    expected[6..].fill(Err(Miss::Truncated));
    assert_eq!(outcomes(&store, ticket), expected);
    // The slots go on as before.
    file.set_len(GEOMETRY.total()).unwrap();
    let ticket = store.submit_write(&slots, &rows).unwrap();
    assert_eq!(outcomes(&store, ticket), [Ok(None); 8]);
    assert!(store.close(LONG));
}

#[test]
fn a_device_that_is_no_file_is_served_by_threads() {
    let memory = Memory::new(options().geometry.total());
    let store = SlabStore::open(memory, StoreOptions { io: Io::Uring, ..options() }).unwrap();
    assert_eq!(store.options().io, Io::Threads);
    assert!(store.refused().is_some());
    let ticket = store.submit_write(&[1], &[3; common::PAYLOAD]).unwrap();
    assert_eq!(outcomes(&store, ticket), [Ok(None)]);
}

/// Writes and reads its own slots in turn.
fn use_slots(store: &SlabStore, slots: [i64; 2], rounds: u8) {
    for mark in 0..rounds {
        let rows = [[mark; PAGE], [mark ^ 0x80; PAGE]].concat();
        let written = store.submit_write(&slots, &rows).unwrap();
        let read = store.submit_read(&slots).unwrap();
        assert_eq!(outcomes(store, read), [Ok(Some(mark)), Ok(Some(mark ^ 0x80))]);
        assert_eq!(outcomes(store, written), [Ok(None); 2]);
    }
}

#[test]
fn callers_on_several_threads_read_what_they_wrote_and_the_lock_goes_with_the_store() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_owned();
    for _ in 0..3 {
        let direct = DirectMode::Auto;
        let file = SlabOptions { directory: directory.clone(), geometry: GEOMETRY, namespace: [7; 32], direct };
        // A lock that outlives the store would be `InUse`.
        let slab = SlabFile::open_kept(&file).unwrap();
        let Some(store) = ring_store(Arc::new(slab), LONG) else { return };
        thread::scope(|scope| {
            for slots in [[0, 1], [2, 5], [4, 3], [7, 6]] {
                let store = &store;
                scope.spawn(move || use_slots(store, slots, 60));
            }
        });
        assert!(store.close(LONG));
    }
}
