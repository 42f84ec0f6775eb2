//! Blockyard's locks for Python's threads, and the order in which a thread takes them.
//!
//! ```text
//! OuterLock (an iterator over free blocks) -> InnerLock (a manager, an allocator, a list of copies)
//! ```
//!
//! A thread that holds an inner lock takes no other, so no two threads can wait for each other. The interpreter's lock is
//! one more: numpy gives it up while it makes an array, and waits for it again. So whoever waits for a lock of ours gives
//! it up first. Python code does not run under a lock. Debug builds assert the order; release builds pay for the mutex
//! alone. The tests run a real block manager behind these locks in schedules chosen by `shuttle`.
#![forbid(unsafe_code)]

mod sync;
#[cfg(test)]
mod tests;

use std::ops::{Deref, DerefMut};
use sync::{Cell, Mutex, MutexGuard, TryLockError, thread_local};

/// The lock that is taken first.
pub type OuterLock<T> = Lock<T, 0>;

/// The lock that is taken last: under it no other is.
pub type InnerLock<T> = Lock<T, 1>;

thread_local! {
    /// One bit for the rank of each lock that this thread holds.
    static HELD: Cell<u8> = const { Cell::new(0) };
}

/// A value that one thread at a time can use, and the lock's place in the order: a thread takes locks by rising rank.
#[derive(Debug, Default)]
pub struct Lock<T: ?Sized, const RANK: u32>(Mutex<T>);

impl<T, const RANK: u32> Lock<T, RANK> {
    /// A value nobody uses yet.
    pub const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }
}

impl<T: ?Sized, const RANK: u32> Lock<T, RANK> {
    /// Waits until no other thread uses the value. One that panicked meanwhile does not keep others out.
    ///
    /// `detached` makes this thread wait: it gives up the interpreter's lock, calls what it is given, and takes the
    /// interpreter's lock back. It is not called if nobody uses the value.
    pub fn lock(&self, mut detached: impl FnMut(&(dyn Fn() + Sync))) -> Guard<'_, T>
    where
        T: Send,
    {
        loop {
            let held = Held::new(RANK);
            match self.0.try_lock() {
                Ok(value) => return Guard { value, _held: held },
                Err(TryLockError::Poisoned(value)) => return Guard { value: value.into_inner(), _held: held },
                Err(TryLockError::WouldBlock) => {}
            }
            drop(held);
            detached(&|| drop(self.0.lock()));
        }
    }
}

/// Debug builds: fails if this thread holds a lock. For where Python code is about to run.
pub fn debug_assert_none_held() {
    debug_assert!(HELD.with(Cell::get) == 0, "lock order: Python code is about to run under a lock");
}

/// The value, until this is dropped.
#[derive(Debug)]
pub struct Guard<'a, T: ?Sized> {
    // Dropped in this order: the mutex is free before the thread says so.
    value: MutexGuard<'a, T>,
    _held: Held,
}

impl<T: ?Sized> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: ?Sized> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

/// Says that this thread holds a lock of a rank; nothing in release builds.
#[derive(Debug)]
struct Held {
    #[cfg(debug_assertions)]
    rank: u32,
}

#[cfg(debug_assertions)]
impl Held {
    fn new(rank: u32) -> Self {
        let held = HELD.with(Cell::get);
        assert!(held >> rank == 0, "lock order: rank {rank} is asked for under ranks of the bits {held:#b}");
        HELD.with(|all| all.set(held | 1 << rank));
        Self { rank }
    }
}

#[cfg(debug_assertions)]
impl Drop for Held {
    fn drop(&mut self) {
        HELD.with(|all| all.set(all.get() & !(1 << self.rank)));
    }
}

#[cfg(not(debug_assertions))]
impl Held {
    #[inline]
    fn new(_: u32) -> Self {
        Self {}
    }
}
