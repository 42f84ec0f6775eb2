//! A cache as rows of bytes.

/// Rows of bytes in host memory: `count` of `width` bytes, the first at `base`, each `stride` bytes after the one
/// before.
///
/// Like a pointer, it can be copied and keeps nothing alive. Several `Rows` may refer to the same memory; code that
/// copies them checks that.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    base: *mut u8,
    count: usize,
    width: usize,
    stride: usize,
}

// SAFETY: the maker of `Rows` promises that any thread can use the memory until their last use.
unsafe impl Send for Rows {}
// SAFETY: as above; code that reads or writes the bytes is unsafe itself.
unsafe impl Sync for Rows {}

impl Rows {
    /// Rows of some memory.
    ///
    /// # Safety
    /// All `count` rows lie in one allocation. Until the last use of the result and its copies, any thread can read it,
    /// and write it if calls change these rows. No two rows share memory: with two or more, `stride` is at least
    /// `width`. Until a call returns, nobody else writes rows that it reads, or uses rows that it writes.
    #[must_use]
    pub const unsafe fn new(base: *mut u8, count: usize, width: usize, stride: usize) -> Self {
        Self { base, count, width, stride }
    }

    /// Number of rows.
    #[must_use]
    pub const fn count(self) -> usize {
        self.count
    }

    /// Bytes of a row.
    #[must_use]
    pub const fn width(self) -> usize {
        self.width
    }

    /// Bytes from row to row.
    pub(crate) const fn stride(self) -> usize {
        self.stride
    }

    /// The first address, and the first one behind the last row; `None` without bytes.
    pub(crate) fn extent(self) -> Option<[usize; 2]> {
        let last = self.count.checked_sub(1).filter(|_| self.width > 0)?.saturating_mul(self.stride);
        let start = self.base.addr();
        Some([start, start.saturating_add(last).saturating_add(self.width)])
    }

    /// Whether each row begins where the one before ends.
    pub(crate) const fn are_dense(self) -> bool {
        self.stride == self.width
    }

    /// The address of a row.
    ///
    /// # Safety
    /// The row exists.
    pub(crate) unsafe fn row(self, row: u32) -> *mut u8 {
        let row = row as usize;
        debug_assert!(row < self.count, "row {row} of {}", self.count);
        // SAFETY: the row exists, so it lies in the allocation.
        unsafe { self.base.add(row * self.stride) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_lies_its_number_of_strides_behind_the_first() {
        let mut memory = [0_u8; 24];
        let base = memory.as_mut_ptr();
        // SAFETY: three rows of 5 bytes end after 21.
        let rows = unsafe { Rows::new(base, 3, 5, 8) };
        assert_eq!((rows.count(), rows.width(), rows.are_dense()), (3, 5, false));
        // SAFETY: there are three.
        let behind = [0, 1, 2].map(|row| unsafe { rows.row(row).offset_from(base) });
        assert_eq!(behind, [0, 8, 16]);
    }
}
