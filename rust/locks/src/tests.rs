//! A real block manager under the real locks, in schedules of `shuttle`'s choosing, and faults that it must notice.

use crate::sync::Mutex;
use crate::{Guard, InnerLock, Lock, OuterLock, debug_assert_none_held};
use blockyard_core::{Config, Counts, Manager, SequenceId, TableRows, Tier};
use shuttle::scheduler::{DfsScheduler, PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Runner, thread};
use std::sync::Arc;

const WIDTH: usize = 6;

/// A block table with its slots, which two threads share.
type Shared = OuterLock<([i32; 2 * WIDTH], [i64; 2])>;

impl<T: ?Sized + Send, const RANK: u32> Lock<T, RANK> {
    /// Takes the lock as a thread that has no interpreter's lock.
    fn hold(&self) -> Guard<'_, T> {
        self.lock(|wait| wait())
    }
}

/// Stack of each thread in a schedule: debug builds of the manager need more than `shuttle` gives by default.
const STACK_BYTES: usize = 1 << 20;

/// Runs a test in the schedules that `scheduler` chooses.
fn check(scheduler: impl Scheduler + 'static, test: impl Fn() + Send + Sync + 'static) {
    let mut config = shuttle::Config::new();
    config.stack_size = STACK_BYTES;
    Runner::new(scheduler, config).run(test);
}

fn check_random(test: impl Fn() + Send + Sync + 'static, schedules: usize) {
    check(RandomScheduler::new(schedules), test);
}

fn new_manager(prefix_caching: bool) -> Arc<InnerLock<Manager>> {
    let config = Config { block_size: 4, blocks: [24, 16, 0], watermark: 0.0, prefix_caching };
    Arc::new(InnerLock::new(Manager::new(config).unwrap()))
}

/// Closes the step, as an engine does; all bytes have landed.
fn end_step(manager: &mut Manager) {
    let ticket = manager.take_decision().ticket;
    manager.complete(ticket).unwrap();
}

/// One engine thread: appends to its own sequences, with a block table, until `steps` are over.
fn decode(manager: &InnerLock<Manager>, steps: usize) {
    let mut sequences = Vec::new();
    manager.hold().allocate(&[5, 3], &mut sequences).unwrap();
    end_step(&mut manager.hold());
    let (mut table, mut slots) = ([0; 2 * WIDTH], [0; 2]);
    for _ in 0..steps {
        let rows = TableRows::new(&mut table, WIDTH);
        let mut manager = manager.hold();
        manager.append_with_tables(&sequences, Counts::All(1), 0, rows, &mut slots).unwrap();
        end_step(&mut manager);
    }
    let guard = manager.hold();
    for (&sequence, row) in sequences.iter().zip(table.chunks_exact(WIDTH)) {
        let own = guard.block_table(sequence).unwrap();
        assert!(own.iter().zip(row).all(|(block, &id)| i64::from(block.0) == i64::from(id)));
    }
    drop(guard);
    manager.hold().free(&sequences).unwrap();
}

/// Another: forks, swaps out and in, frees.
fn storm(manager: &InnerLock<Manager>) {
    let mut own: Vec<SequenceId> = Vec::new();
    manager.hold().allocate(&[9], &mut own).unwrap();
    end_step(&mut manager.hold());
    let first = own[0];
    manager.hold().fork(first, 2, &mut own).unwrap();
    manager.hold().swap_out(&own, Tier::Host).unwrap();
    end_step(&mut manager.hold());
    manager.hold().swap_in(&own, Tier::Device).unwrap();
    end_step(&mut manager.hold());
    manager.hold().free(&own).unwrap();
    debug_assert_none_held();
}

fn engine_threads(prefix_caching: bool) {
    let manager = new_manager(prefix_caching);
    let workers: [fn(&InnerLock<Manager>); 3] = [|manager| decode(manager, 3), |manager| decode(manager, 2), storm];
    let threads = workers.map(|work| {
        let manager = Arc::clone(&manager);
        thread::spawn(move || work(&manager))
    });
    for worker in threads {
        worker.join().unwrap();
    }
    let mut manager = manager.hold();
    end_step(&mut manager);
    manager.check().unwrap();
    assert_eq!((manager.num_sequences(), manager.pool(Tier::Device).available()), (0, 24));
}

#[test]
fn the_state_is_exact_whatever_the_schedule() {
    check_random(|| engine_threads(false), 300);
    check(PctScheduler::new(3, 300), || engine_threads(true));
}

/// Two threads share one block table: rows, slots and the manager agree after every call.
#[test]
fn one_block_table_is_shared_by_two_threads() {
    check(DfsScheduler::new(Some(2_000), false), || {
        let manager = new_manager(false);
        let mut sequences = Vec::new();
        manager.hold().allocate(&[4, 4], &mut sequences).unwrap();
        end_step(&mut manager.hold());
        let table: Arc<Shared> = Arc::new(OuterLock::new(([0; 2 * WIDTH], [0; 2])));
        let handles = sequences.clone();
        let step = move |manager: Arc<InnerLock<Manager>>, shared: Arc<Shared>| {
            let mut shared = shared.hold();
            let mut manager = manager.hold();
            let (table, slots) = &mut *shared;
            let rows = TableRows::new(table, WIDTH);
            manager.append_with_tables(&handles, Counts::All(1), 0, rows, slots).unwrap();
            end_step(&mut manager);
            assert_eq!(slots.map(|slot| slot / 4), [table[1], table[WIDTH + 1]].map(i64::from));
        };
        let (other_manager, other_table, other_step) = (Arc::clone(&manager), Arc::clone(&table), step.clone());
        let other = thread::spawn(move || other_step(other_manager, other_table));
        step(Arc::clone(&manager), table);
        other.join().unwrap();
        let manager = manager.hold();
        assert!(sequences.iter().all(|&sequence| manager.num_tokens(sequence) == Ok(6)));
        manager.check().unwrap();
    });
}

/// Two threads that take two locks in different orders, with nothing to tell them that they must not.
#[test]
#[should_panic(expected = "deadlock")]
fn an_inversion_is_found_by_the_schedules() {
    check_random(
        || {
            let (table, manager) = (Arc::new(Mutex::new(())), Arc::new(Mutex::new(())));
            let (other_table, other_manager) = (Arc::clone(&table), Arc::clone(&manager));
            let other = thread::spawn(move || {
                let _manager = other_manager.lock().unwrap();
                let _table = other_table.lock().unwrap();
            });
            let held = table.lock().unwrap();
            drop(manager.lock().unwrap());
            drop(held);
            other.join().unwrap();
        },
        500,
    );
}

/// A thread of Python that, under our lock, gives up the interpreter's lock and takes it back, as numpy does for an array.
fn makes_an_array(interpreter: &Mutex<()>, ours: &InnerLock<u32>, gives_up: bool) {
    let mut attached = Some(interpreter.lock().unwrap());
    let mut value = ours.lock(|wait| {
        if gives_up {
            drop(attached.take());
        }
        wait();
        attached.get_or_insert_with(|| interpreter.lock().unwrap());
    });
    drop(attached.take());
    *value += 1;
    attached = Some(interpreter.lock().unwrap());
    drop(value);
    drop(attached);
}

fn threads_that_make_arrays(gives_up: bool) {
    let (interpreter, ours) = (Arc::new(Mutex::new(())), Arc::new(InnerLock::new(0)));
    let threads = [(); 3].map(|()| {
        let (interpreter, ours) = (Arc::clone(&interpreter), Arc::clone(&ours));
        thread::spawn(move || makes_an_array(&interpreter, &ours, gives_up))
    });
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(*ours.hold(), 3);
}

#[test]
fn the_interpreter_may_switch_threads_under_a_lock() {
    check_random(|| threads_that_make_arrays(true), 2_000);
    check(PctScheduler::new(3, 2_000), || threads_that_make_arrays(true));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_thread_that_waits_with_the_interpreters_lock_is_found() {
    check_random(|| threads_that_make_arrays(false), 500);
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "lock order: rank 0")]
fn an_inversion_is_refused_even_where_nobody_waits() {
    check_random(
        || {
            let (table, manager) = (OuterLock::new(()), new_manager(false));
            let _held = manager.hold();
            drop(table.hold());
        },
        1,
    );
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "lock order: rank 1")]
fn two_managers_at_once_are_refused() {
    check_random(
        || {
            let (one, other) = (new_manager(false), new_manager(false));
            let _held = one.hold();
            drop(other.hold());
        },
        1,
    );
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "Python code is about to run under a lock")]
fn python_under_a_lock_is_noticed() {
    check_random(
        || {
            let manager = new_manager(false);
            let _held = manager.hold();
            debug_assert_none_held();
        },
        1,
    );
}

/// A thread that panicked under a lock does not keep others out, and what it held counts as given back.
#[test]
fn a_lock_outlives_a_panic_under_it() {
    check_random(
        || {
            let lock = InnerLock::new(7);
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let _held = lock.hold();
                std::panic::resume_unwind(Box::new("in use"));
            }));
            assert!(caught.is_err());
            debug_assert_none_held();
            assert_eq!(*lock.hold(), 7);
        },
        1,
    );
}
