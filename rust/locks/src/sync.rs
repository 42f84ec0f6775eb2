//! What the locks are made of: the standard library's parts, or those of `shuttle`, which chooses the schedule.

pub(crate) use std::cell::Cell;
pub(crate) use std::sync::TryLockError;
#[cfg(not(test))]
pub(crate) use std::{
    sync::{Mutex, MutexGuard},
    thread_local,
};

#[cfg(test)]
pub(crate) use shuttle::{
    sync::{Mutex, MutexGuard},
    thread_local,
};
