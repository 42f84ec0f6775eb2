//! The store over devices that fail: every failure is a miss of that block, and nothing else.
#![expect(clippy::unwrap_used, reason = "test code")]

mod common;

use blockyard_store::{BlockDevice, Buffer, Error, Geometry, LentRow, Miss, PAGE, Progress, SlabStore, StoreOptions};
use common::{Fault, LONG, Memory, PAYLOAD, SLOTS, options, row, store};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

fn write(store: &SlabStore, slots: &[i64], seed: u8) -> Vec<Result<(), Miss>> {
    let ticket = store.submit_write(slots, &row(seed).repeat(slots.len())).unwrap();
    store.wait_for(ticket, LONG).unwrap();
    store.take(ticket).unwrap().blocks().map(|block| block.map(|_| ())).collect()
}

fn read(store: &SlabStore, slots: &[i64]) -> Vec<Result<Vec<u8>, Miss>> {
    let ticket = store.submit_read(slots).unwrap();
    store.wait_for(ticket, LONG).unwrap();
    store.take(ticket).unwrap().blocks().map(|block| block.map(|bytes| bytes.unwrap().to_vec())).collect()
}

#[test]
fn short_reads_and_writes_go_on() {
    let (memory, store) = store();
    memory.set_faults(Fault::Short(4096 + 77), Fault::Short(4096));
    assert_eq!(write(&store, &[3], 1), [Ok(())]);
    assert_eq!(read(&store, &[3]), [Ok(row(1))]);
}

#[test]
fn a_failed_write_loses_the_slot_until_the_next() {
    for (errno, words) in [(5, "Input/output error"), (28, "No space left on device")] {
        let (memory, store) = store();
        write(&store, &[3, 4], 1);
        memory.set_faults(Fault::None, Fault::Errno(errno));
        assert_eq!(write(&store, &[3], 2), [Err(Miss::Io)]);
        memory.set_faults(Fault::None, Fault::None);
        assert_eq!(read(&store, &[3, 4]), [Err(Miss::Lost), Ok(row(1))]);
        let stats = store.stats().unwrap();
        assert_eq!((stats.errors, stats.misses[Miss::Io.index()]), (1, 1));
        assert!(stats.last_error.starts_with(&format!("write of slot 3: {words}")));
        write(&store, &[3], 3);
        assert_eq!(read(&store, &[3]), [Ok(row(3))]);
    }
}

#[test]
fn a_failed_read_is_a_miss_and_the_next_may_succeed() {
    let (memory, store) = store();
    write(&store, &[3], 1);
    memory.set_faults(Fault::Errno(5), Fault::None);
    assert_eq!(read(&store, &[3]), [Err(Miss::Io)]);
    memory.set_faults(Fault::Short(0), Fault::None);
    assert_eq!(read(&store, &[3]), [Err(Miss::Truncated)]);
    memory.set_faults(Fault::None, Fault::None);
    assert_eq!(read(&store, &[3]), [Ok(row(1))]);
}

#[test]
fn a_write_that_was_swallowed_or_torn_is_noticed() {
    let (memory, store) = store();
    write(&store, &[3], 1);
    memory.set_faults(Fault::None, Fault::Swallow);
    write(&store, &[3], 2);
    assert_eq!(read(&store, &[3]), [Err(Miss::Generation)]);
    memory.set_faults(Fault::None, Fault::Tear);
    write(&store, &[3], 3);
    assert_eq!(read(&store, &[3]), [Err(Miss::PayloadChecksum)]);
}

#[test]
fn a_block_of_an_earlier_life_is_not_taken_for_a_swallowed_write() {
    let (memory, first) = store();
    write(&first, &[3], 1);
    assert!(first.close(LONG));
    let device: Arc<dyn BlockDevice> = Arc::clone(&memory) as _;
    let second = SlabStore::open(device, options()).unwrap();
    memory.set_faults(Fault::None, Fault::Swallow);
    write(&second, &[3], 2);
    assert_eq!(read(&second, &[3]), [Err(Miss::Generation)]);
}

#[test]
fn another_namespace_reads_nothing() {
    let memory = Memory::new(options().geometry.total());
    let open = |namespace| {
        let device: Arc<dyn BlockDevice> = Arc::clone(&memory) as _;
        SlabStore::open(device, StoreOptions { namespace, ..options() }).unwrap()
    };
    let (one, two) = (open([1; 32]), open([2; 32]));
    write(&two, &[3], 2);
    write(&one, &[3], 1);
    assert_eq!(read(&two, &[3]), [Err(Miss::Namespace)]);
}

#[test]
fn a_deadline_gives_up_and_the_late_write_counts_for_nothing() {
    let (memory, store) = store();
    write(&store, &[3], 1);
    memory.freeze(true);
    let late = store.submit_write(&[3], &row(2)).unwrap();
    assert_eq!(store.wait_for(late, Duration::from_millis(20)).unwrap(), Progress::Pending);
    assert_eq!(store.take(late).unwrap().blocks().collect::<Vec<_>>(), [Err(Miss::Timeout)]);
    let after = store.submit_read(&[3]).unwrap();
    memory.freeze(false);
    store.wait_for(after, LONG).unwrap();
    assert_eq!(store.take(after).unwrap().blocks().collect::<Vec<_>>(), [Err(Miss::Lost)]);
    assert!(matches!(store.wait_for(late, LONG), Err(Error::UnknownTicket { .. })));
    let stats = store.stats().unwrap();
    assert_eq!((stats.written_blocks, stats.pending_bytes, stats.misses[Miss::Timeout.index()]), (1, 0, 1));
}

/// A row of one page; a clone of its handle shows whether the store still holds it.
struct Row {
    page: Buffer,
    _held: Arc<()>,
}

impl LentRow for Row {
    fn bytes(&self) -> &[u8] {
        self.page.as_slice()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.page.as_mut_slice()
    }
}

fn lent(held: &Arc<()>) -> Vec<Box<dyn LentRow>> {
    vec![Box::new(Row { page: Buffer::new(PAGE), _held: Arc::clone(held) })]
}

/// A store of one-page blocks with a timeout of a second, and a block in slot 0.
fn pages() -> (Arc<Memory>, SlabStore) {
    let geometry = Geometry { payload_bytes: PAGE, slots: 9 };
    let memory = Memory::new(geometry.total());
    let device: Arc<dyn BlockDevice> = Arc::clone(&memory) as _;
    let options = StoreOptions { geometry, timeout_base: Duration::from_secs(1), ..options() };
    let store = SlabStore::open(device, options).unwrap();
    let ticket = store.lend_write(&[0], lent(&Arc::default())).unwrap();
    assert_eq!(store.wait_for(ticket, LONG).unwrap(), Progress::Finished);
    assert!(store.take(ticket).unwrap().blocks().all(|block| block.is_ok()));
    (memory, store)
}

#[test]
fn a_thread_that_hangs_keeps_the_row_and_then_lets_go() {
    let (memory, store) = pages();
    memory.freeze(true);
    let held = Arc::new(());
    let ticket = store.lend_read(&[0], lent(&held)).unwrap();
    assert_eq!(store.wait_for(ticket, LONG).unwrap(), Progress::Expired);
    assert_eq!(store.take(ticket).unwrap().blocks().collect::<Vec<_>>(), [Err(Miss::Timeout)]);
    assert_eq!(Arc::strong_count(&held), 2, "the thread may still write to it");
    assert!(!store.close(Duration::ZERO));
    assert_eq!(Arc::strong_count(&held), 2);
    drop(store);
    memory.freeze(false);
    while Arc::strong_count(&held) > 1 {
        thread::yield_now();
    }
}

#[test]
fn a_device_that_hangs_costs_one_deadline_and_then_refuses_until_it_answers() {
    let (memory, store) = pages();
    memory.freeze(true);
    let first = store.submit_read(&[0]).unwrap();
    assert_eq!(store.wait_for(first, LONG).unwrap(), Progress::Expired);
    drop(store.take(first).unwrap());
    let refused = |ticket| {
        assert_eq!(store.wait_for(ticket, Duration::ZERO).unwrap(), Progress::Finished);
        store.take(ticket).unwrap().blocks().all(|block| block == Err(Miss::Timeout))
    };
    assert!(refused(store.submit_read(&[0]).unwrap()));
    assert!(refused(store.submit_write(&[1], &[1; PAGE]).unwrap()));
    assert!(store.stats().unwrap().is_down);
    // Now and then a batch is let through as a probe, as long as a thread is free for it.
    thread::sleep(Duration::from_secs(1));
    let probe = store.submit_read(&[0]).unwrap();
    assert_eq!(store.wait_for(probe, Duration::ZERO).unwrap(), Progress::Pending);
    assert!(refused(store.submit_read(&[0]).unwrap()));
    memory.freeze(false);
    assert_eq!(store.wait_for(probe, LONG).unwrap(), Progress::Finished);
    assert_eq!(store.take(probe).unwrap().blocks().collect::<Vec<_>>(), [Ok(Some(&[0; PAGE][..]))]);
    assert!(!store.stats().unwrap().is_down);
    let after = store.submit_read(&[0, 1]).unwrap();
    assert_eq!(store.wait_for(after, LONG).unwrap(), Progress::Finished);
    let after: Vec<_> = store.take(after).unwrap().blocks().map(|block| block.map(drop)).collect();
    assert_eq!(after, [Ok(()), Err(Miss::Lost)], "a write that was refused lost its slot");
}

#[test]
fn a_bad_block_is_no_miss_of_its_neighbours() {
    let (memory, store) = pages();
    let slots: Vec<i64> = (0..8).collect();
    memory.freeze(true);
    let held = Arc::new(());
    // Keep the threads busy, so that the following blocks are written in runs.
    let busy: Vec<u64> = [7, 8].iter().map(|&slot| store.submit_write(&[slot], &[9; PAGE]).unwrap()).collect();
    while memory.calls.load(Ordering::SeqCst) < 3 {
        thread::yield_now();
    }
    let rows = slots.iter().flat_map(|_| lent(&held)).collect();
    let written = store.lend_write(&slots, rows).unwrap();
    memory.break_at(store.geometry().offset(3));
    memory.freeze(false);
    for ticket in busy {
        store.wait_for(ticket, LONG).unwrap();
        drop(store.take(ticket).unwrap());
    }
    assert_eq!(store.wait_for(written, LONG).unwrap(), Progress::Finished);
    let failed: Vec<bool> = store.take(written).unwrap().blocks().map(|block| block == Err(Miss::Io)).collect();
    assert_eq!(failed, slots.iter().map(|&slot| slot == 3).collect::<Vec<_>>());
    assert_eq!(Arc::strong_count(&held), 1);
}

#[test]
fn a_ticket_past_its_deadline_is_polled_and_expires() {
    let memory = Memory::new(options().geometry.total());
    let device: Arc<dyn BlockDevice> = Arc::clone(&memory) as _;
    let store = SlabStore::open(device, StoreOptions { timeout_base: Duration::from_secs(1), ..options() }).unwrap();
    memory.freeze(true);
    let ticket = store.submit_write(&[0], &row(1)).unwrap();
    assert_eq!(store.poll().unwrap(), [0; 0]);
    assert_eq!(store.wait_for(ticket, LONG).unwrap(), Progress::Expired);
    assert_eq!(store.poll().unwrap(), [ticket]);
    memory.freeze(false);
}

#[test]
fn closing_over_a_frozen_device_leaves_threads_behind_and_ends_tickets() {
    let (memory, store) = store();
    memory.freeze(true);
    let running = store.submit_write(&[0, 1], &row(1).repeat(2)).unwrap();
    let queued = store.submit_write(&[0, 5], &row(2).repeat(2)).unwrap();
    while memory.calls.load(Ordering::SeqCst) < 2 {
        thread::yield_now();
    }
    let begun = Instant::now();
    assert!(!store.close(Duration::from_millis(50)));
    assert!(begun.elapsed() < Duration::from_secs(10));
    for ticket in [running, queued] {
        assert_eq!(store.wait_for(ticket, LONG).unwrap(), Progress::Finished);
        assert!(store.take(ticket).unwrap().blocks().all(|block| block == Err(Miss::Closed)));
    }
    assert_eq!(store.stats().unwrap().misses[Miss::Closed.index()], 4);
    assert!(matches!(store.submit_read(&[0]), Err(Error::Closed)));
    memory.freeze(false);
    assert!(store.close(LONG));
    assert!(memory.discarded.load(Ordering::SeqCst));
    assert_eq!(store.stats().unwrap().pending_bytes, 0);
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn dropping_a_store_ends_its_threads() {
    let (memory, store) = store();
    write(&store, &[0], 1);
    drop(store);
    assert!(memory.discarded.load(Ordering::SeqCst));
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn what_does_not_fit_into_memory_is_refused_block_by_block() {
    let stride = options().geometry.stride() as u64;
    let memory = Memory::new(options().geometry.total());
    let device: Arc<dyn BlockDevice> = Arc::clone(&memory) as _;
    let store = SlabStore::open(device, StoreOptions { memory_bytes: 3 * stride, ..options() }).unwrap();
    for slots in [[0, 1], [2, 3]] {
        assert_eq!(write(&store, &slots, 1), [Ok(()), Ok(())]);
    }
    memory.freeze(true);
    let first = store.submit_write(&[0, 1], &row(2).repeat(2)).unwrap();
    let second = store.submit_write(&[2, 3, 0], &row(3).repeat(3)).unwrap();
    assert_eq!(store.stats().unwrap().pending_bytes, 3 * stride);
    memory.freeze(false);
    store.wait_for(first, LONG).unwrap();
    store.wait_for(second, LONG).unwrap();
    let full = Err(Miss::QueueFull);
    assert_eq!(store.take(second).unwrap().blocks().collect::<Vec<_>>(), [Ok(None), full, full]);
    assert_eq!(read(&store, &[0, 3, 1]), [Err(Miss::Lost), Err(Miss::Lost), Ok(row(2))]);
    assert_eq!(read(&store, &[2]), [Ok(row(3))]);
    drop(store.take(first).unwrap());
    assert_eq!(store.stats().unwrap().pending_bytes, 0);
}

#[test]
fn bad_calls_change_nothing() {
    let (_memory, store) = store();
    assert!(matches!(store.submit_write(&[0, 16], &row(1).repeat(2)), Err(Error::SlotOutOfRange { slot: 16, .. })));
    assert!(matches!(store.submit_write(&[0, -1], &row(1).repeat(2)), Err(Error::SlotOutOfRange { slot: -1, .. })));
    assert!(matches!(store.submit_write(&[4, 4], &row(1).repeat(2)), Err(Error::RepeatedSlot { slot: 4 })));
    assert!(matches!(store.submit_write(&[4], &row(1).repeat(2)), Err(Error::WrongLength { .. })));
    assert!(matches!(store.take(9), Err(Error::UnknownTicket { ticket: 9 })));
    assert_eq!(read(&store, &[0, 4]), [Err(Miss::Empty), Err(Miss::Empty)]);
    assert_eq!(store.stats().unwrap().pending_bytes, 0);
}

#[test]
fn options_out_of_range_are_refused() {
    let memory = Memory::new(0);
    for changed in [
        StoreOptions { threads: 1, ..options() },
        StoreOptions { threads: 17, ..options() },
        StoreOptions { memory_bytes: 12287, ..options() },
        StoreOptions { memory_bytes: u64::MAX, ..options() },
        StoreOptions { timeout_base: Duration::MAX, ..options() },
        StoreOptions { timeout_base: Duration::ZERO, ..options() },
    ] {
        let device: Arc<dyn BlockDevice> = Arc::clone(&memory) as _;
        assert!(matches!(SlabStore::open(device, changed), Err(Error::InvalidOption { .. })));
    }
}

/// One action of a random history.
#[derive(Clone, Debug)]
enum Action {
    Write(Vec<i64>, u8),
    Read(Vec<i64>),
    FailingWrite(i64),
    Damage(i64, u64, u8),
    Collect,
    Reopen,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let slot = 0..i64::from(SLOTS);
    let slots = prop::collection::btree_set(slot.clone(), 0..6).prop_map(|set| set.into_iter().collect::<Vec<_>>());
    let action = prop_oneof![
        4 => (slots, any::<u8>()).prop_map(|(slots, seed)| Action::Write(slots, seed)),
        4 => prop::collection::vec(slot.clone(), 0..6).prop_map(Action::Read),
        1 => slot.clone().prop_map(Action::FailingWrite),
        1 => (slot, 0..4096 + PAYLOAD as u64, 1u8..).prop_map(|(slot, at, mask)| Action::Damage(slot, at, mask)),
        3 => Just(Action::Collect),
        1 => Just(Action::Reopen),
    ];
    prop::collection::vec(action, 1..40)
}

/// What a read of a slot must return.
#[derive(Clone, Debug, PartialEq)]
enum Slot {
    Missing(Miss),
    Holds(u8),
    Damaged,
}

/// The store, and a model: a plain list of slots. Reads are predicted when they are submitted.
struct Pair {
    memory: Arc<Memory>,
    store: SlabStore,
    model: Vec<Slot>,
    open: Vec<(u64, Option<Vec<Slot>>)>,
}

impl Pair {
    fn new() -> Self {
        let (memory, store) = store();
        Self { memory, store, model: vec![Slot::Missing(Miss::Empty); SLOTS as usize], open: Vec::new() }
    }

    fn apply(&mut self, action: Action) {
        match action {
            Action::Write(slots, seed) => {
                let rows: Vec<u8> = slots.iter().flat_map(|&slot| row(seed ^ u8::try_from(slot).unwrap())).collect();
                self.open.push((self.store.submit_write(&slots, &rows).unwrap(), None));
                for slot in slots {
                    self.model[usize::try_from(slot).unwrap()] = Slot::Holds(seed ^ u8::try_from(slot).unwrap());
                }
            }
            Action::Read(slots) => {
                let expected = slots.iter().map(|&slot| self.model[usize::try_from(slot).unwrap()].clone()).collect();
                self.open.push((self.store.submit_read(&slots).unwrap(), Some(expected)));
            }
            Action::FailingWrite(slot) => {
                self.collect();
                self.memory.set_faults(Fault::None, Fault::Errno(5));
                assert_eq!(write(&self.store, &[slot], 9), [Err(Miss::Io)]);
                self.memory.set_faults(Fault::None, Fault::None);
                self.model[usize::try_from(slot).unwrap()] = Slot::Missing(Miss::Lost);
            }
            Action::Damage(slot, at, mask) => {
                self.collect();
                let at = options().geometry.offset(u32::try_from(slot).unwrap()) + at;
                // Only once between two writes: the same change twice would repair the block.
                if let holds @ Slot::Holds(_) = &mut self.model[usize::try_from(slot).unwrap()] {
                    *holds = Slot::Damaged;
                    self.memory.flip(at, mask);
                }
            }
            Action::Collect => self.collect(),
            Action::Reopen => {
                self.collect();
                assert!(self.store.close(LONG));
                let device: Arc<dyn BlockDevice> = Arc::clone(&self.memory) as _;
                self.store = SlabStore::open(device, options()).unwrap();
                self.model.fill(Slot::Missing(Miss::Empty));
            }
        }
    }

    fn collect(&mut self) {
        for (ticket, expected) in self.open.drain(..) {
            assert_eq!(self.store.wait_for(ticket, LONG).unwrap(), Progress::Finished);
            let done = self.store.take(ticket).unwrap();
            let Some(expected) = expected else {
                assert!(done.blocks().all(|block| block == Ok(None)));
                continue;
            };
            for (found, expected) in done.blocks().zip(expected) {
                match expected {
                    Slot::Missing(miss) => assert_eq!(found, Err(miss)),
                    Slot::Holds(seed) => assert_eq!(found, Ok(Some(row(seed).as_slice()))),
                    Slot::Damaged => assert!(found.is_err()),
                }
            }
        }
        assert_eq!(self.store.stats().unwrap().pending_bytes, 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_random_history_gives_what_a_plain_list_gives(actions in actions()) {
        let mut pair = Pair::new();
        for action in actions {
            pair.apply(action);
        }
        pair.collect();
    }
}

#[test]
fn a_ticket_says_what_it_will_bring() {
    let (_memory, store) = pages();
    let write = store.submit_write(&[1, 2], &[1; 2 * PAGE]).unwrap();
    let read = store.submit_read(&[0, 1, 2]).unwrap();
    assert_eq!((store.expects(write).unwrap(), store.expects(read).unwrap()), ((false, 2), (true, 3)));
    for ticket in [write, read] {
        store.wait_for(ticket, LONG).unwrap();
        store.take(ticket).unwrap();
        assert!(matches!(store.expects(ticket), Err(Error::UnknownTicket { .. })));
    }
}
