//! Locks for Python's threads, and the order in which a thread takes them.
//!
//! ```text
//! OuterLock (an iterator over free blocks) -> InnerLock (a manager, an allocator, a list of copies)
//! ```
//!
//! A thread that holds an inner lock takes no other, so no two threads can wait for each other. The interpreter's lock
//! also counts: numpy may release it while it creates an array, and then waits for it. So a thread releases the
//! interpreter's lock before it waits for one of ours, and holds none of ours while it waits to get the interpreter's
//! lock back. (`MutexExt::lock_py_attached` would hold it; a fork at that moment would leave it locked forever.) Python
//! code never runs under our locks. Debug builds assert the order; in release builds a lock costs only its mutex.

use pyo3::prelude::*;
use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, TryLockError};

/// The lock to take first.
pub(crate) type OuterLock<T> = Lock<T, 0>;

/// The lock to take last: no other lock is taken while holding it.
pub(crate) type InnerLock<T> = Lock<T, 1>;

thread_local! {
    /// One bit for the rank of each lock that this thread holds; only in debug builds.
    static HELD: Cell<u8> = const { Cell::new(0) };
}

/// A value behind a lock. A thread takes locks by rising rank.
#[derive(Debug, Default)]
pub(crate) struct Lock<T, const RANK: u32>(Mutex<T>);

impl<T, const RANK: u32> Lock<T, RANK> {
    /// Creates an unlocked value.
    pub(crate) const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }
}

/// Waits until no other thread uses the value. A panic while holding the lock does not lock others out.
pub(crate) fn lock<T: Send, const RANK: u32>(lock: &Lock<T, RANK>) -> Guard<'_, T> {
    loop {
        let held = Held::new(RANK);
        match lock.0.try_lock() {
            Ok(value) => return Guard { value, _held: held },
            Err(TryLockError::Poisoned(value)) => return Guard { value: value.into_inner(), _held: held },
            Err(TryLockError::WouldBlock) => {}
        }
        drop(held);
        Python::attach(|py| py.detach(|| drop(lock.0.lock())));
    }
}

/// Access to the value, until this is dropped.
#[derive(Debug)]
pub(crate) struct Guard<'a, T> {
    // Dropped in this order: the mutex is released before the thread's bit is cleared.
    value: MutexGuard<'a, T>,
    _held: Held,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

/// Records that this thread holds a lock of a rank; does nothing in release builds.
#[derive(Debug)]
struct Held(u32);

impl Held {
    fn new(rank: u32) -> Self {
        if cfg!(debug_assertions) {
            let held = HELD.get();
            assert!(
                held >> rank == 0,
                "lock order: rank {rank} requested while holding the ranks of the bits {held:#b}"
            );
            HELD.set(held | 1 << rank);
        }
        Self(rank)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if cfg!(debug_assertions) {
            HELD.set(HELD.get() & !(1 << self.0));
        }
    }
}
