//! Memory sized by a caller's number. Calls check that it is available before taking it, so that an excessive size is
//! an error and does not abort the process.
//!
//! Only `vec!` provides zeroed memory that is not touched before use, and it aborts if there is none. So a call first
//! requests the sum of all it is going to take, frees that, and then takes it part by part. Another thread may take the
//! memory in between.

use crate::error::fault;
use crate::error::{Error, Result};
use std::hint::black_box;

/// Smaller amounts are not checked: a process without them is doomed anyway, and a check costs a system call.
const SMALL: usize = 1 << 20;

/// Fails unless `bytes` bytes of memory are available.
///
/// # Errors
/// They are not available.
pub fn require(bytes: usize) -> Result<()> {
    fault::point()?;
    if bytes < SMALL {
        return Ok(());
    }
    let mut asked: Vec<u8> = Vec::new();
    let answer = asked.try_reserve_exact(bytes);
    // Without this, the compiler may remove an allocation that is never used.
    black_box(&mut asked);
    answer.map_err(|_| Error::OutOfMemory { wanted: bytes as u64 })
}

/// As [`require`], for `count` items.
///
/// # Errors
/// As [`require`].
pub fn require_items<T>(count: usize) -> Result<()> {
    require(count.saturating_mul(size_of::<T>()))
}

/// A vector with room for `count` items.
///
/// # Errors
/// The system has no memory for them.
pub fn with_room<T>(count: usize) -> Result<Vec<T>> {
    let mut items = Vec::new();
    make_room(&mut items, count)?;
    Ok(items)
}

/// Makes room for `more` further items.
///
/// # Errors
/// The system has no memory for them.
#[inline]
pub fn make_room<T>(items: &mut Vec<T>, more: usize) -> Result<()> {
    fault::point()?;
    let wanted = items.len().saturating_add(more).saturating_mul(size_of::<T>()) as u64;
    items.try_reserve(more).map_err(|_| Error::OutOfMemory { wanted })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_impossible_size_is_an_error_with_the_bytes_wanted() {
        // More than any address space, and more bytes than can be counted.
        for bytes in [1 << 56, usize::MAX] {
            assert_eq!(require(bytes), Err(Error::OutOfMemory { wanted: bytes as u64 }));
        }
        assert_eq!(with_room::<u64>(1 << 56), Err(Error::OutOfMemory { wanted: 1 << 59 }));
        assert_eq!(require_items::<u64>(usize::MAX), Err(Error::OutOfMemory { wanted: u64::MAX }));
        assert_eq!((require(0), require(SMALL)), (Ok(()), Ok(())));
    }
}
