//! Locks, waits and threads: the standard library's, or in unit tests those of `shuttle`, which chooses the schedule.

#[cfg(not(test))]
pub(crate) use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

#[cfg(test)]
pub(crate) use shuttle::{
    sync::{Condvar, Mutex, MutexGuard},
    thread,
};
#[cfg(test)]
pub(crate) use std::sync::{Arc, PoisonError};
