//! How a thread of Python takes a lock.

use blockyard_locks::{Guard, Lock};
use pyo3::prelude::*;

/// Takes a lock. While another thread has it, this one gives up the interpreter's lock, which the other may need.
pub(crate) fn lock<T: ?Sized + Send, const RANK: u32>(lock: &Lock<T, RANK>) -> Guard<'_, T> {
    lock.lock(|wait| Python::attach(|py| py.detach(wait)))
}
