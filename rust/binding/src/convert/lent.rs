//! Tracks memory that is lent beyond the end of a call: while a store writes to it, nobody else may use it.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The lent address ranges, and whether each is written.
static LENT: Mutex<Vec<(Range<usize>, bool)>> = Mutex::new(Vec::new());

/// A lent address range; dropping this returns it.
#[derive(Debug)]
pub(crate) struct Extent {
    addresses: Range<usize>,
    is_written: bool,
}

impl Extent {
    /// Lends a range; `None` if it overlaps another lent range and either is written.
    pub(crate) fn lend(addresses: Range<usize>, is_written: bool) -> Option<Self> {
        let mut lent = lock();
        let clashes = |(other, other_is_written): &(Range<usize>, bool)| {
            (is_written || *other_is_written) && other.start < addresses.end && addresses.start < other.end
        };
        if lent.iter().any(clashes) {
            return None;
        }
        lent.push((addresses.clone(), is_written));
        Some(Self { addresses, is_written })
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        let mut lent = lock();
        let ours =
            |(other, is_written): &(Range<usize>, bool)| *other == self.addresses && *is_written == self.is_written;
        if let Some(at) = lent.iter().position(ours) {
            lent.swap_remove(at);
        }
    }
}

fn lock() -> MutexGuard<'static, Vec<(Range<usize>, bool)>> {
    LENT.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::Extent;

    #[test]
    fn memory_that_is_written_is_lent_once_and_memory_that_is_read_many_times() {
        let start = usize::MAX - 1000;
        let one = Extent::lend(start..start + 10, false).unwrap();
        let other = Extent::lend(start..start + 10, false).unwrap();
        drop(one);
        assert!(Extent::lend(start + 9..start + 20, true).is_none());
        drop(other);
        let written = Extent::lend(start + 9..start + 20, true).unwrap();
        assert!(Extent::lend(start..start + 10, false).is_none());
        assert!(Extent::lend(start..start + 9, true).is_some());
        drop(written);
        assert!(Extent::lend(start..start + 10, false).is_some());
    }
}
