//! Memory for direct I/O: address and length are multiples of 4 KiB. A block is in the store's own memory, or in a row
//! that the caller lends. The operation owns it until its thread has ended the operation, even if the thread hangs in
//! the kernel beyond every deadline.

use crate::geometry::PAGE;
use std::fmt;
use std::io::{IoSlice, IoSliceMut};

/// A payload in the caller's memory, which a store reads or writes in place. The memory lives as long as this,
/// starts at a 4 KiB boundary, and its length is a multiple of 4 KiB.
pub trait LentRow: Send {
    /// The bytes.
    fn bytes(&self) -> &[u8];

    /// The bytes, to be written.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// A block: its header page, and the payload behind it or in a row that was lent. Zero at first.
pub struct Buffer {
    /// Never grown, so that it stays aligned.
    bytes: Vec<u8>,
    start: usize,
    len: usize,
    lent: Option<Box<dyn LentRow>>,
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).field("is_lent", &self.is_lent()).finish_non_exhaustive()
    }
}

impl Buffer {
    /// A buffer of `len` bytes.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let bytes = vec![0; len + PAGE];
        let address = bytes.as_ptr() as usize;
        Self { start: address.next_multiple_of(PAGE) - address, bytes, len, lent: None }
    }

    /// A header page with a payload in the caller's memory.
    pub(crate) fn around(self, row: Box<dyn LentRow>) -> Self {
        Self { lent: Some(row), ..self }
    }

    /// Removes and returns the lent row; keeps the header page.
    pub(crate) fn take_row(&mut self) -> Option<Box<dyn LentRow>> {
        self.lent.take()
    }

    /// Whether the payload is in the caller's memory.
    pub(crate) fn is_lent(&self) -> bool {
        self.lent.is_some()
    }

    /// The store's own bytes: a block's header page, and its payload unless that is lent.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    /// The same, to be written.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    /// The first `len` bytes after the header page, or as many as there are.
    #[must_use]
    pub fn payload(&self, len: usize) -> &[u8] {
        let whole = self.lent.as_ref().map_or_else(|| &self.as_slice()[PAGE..], |row| row.bytes());
        &whole[..len.min(whole.len())]
    }

    /// All bytes of the block for a write, in order.
    pub(crate) fn parts(&self) -> impl Iterator<Item = IoSlice<'_>> {
        [Some(self.as_slice()), self.lent.as_ref().map(|row| row.bytes())].into_iter().flatten().map(IoSlice::new)
    }

    /// All bytes of the block for a read, in order.
    pub(crate) fn parts_mut(&mut self) -> impl Iterator<Item = IoSliceMut<'_>> {
        let own = &mut self.bytes[self.start..self.start + self.len];
        [Some(own), self.lent.as_mut().map(|row| row.bytes_mut())].into_iter().flatten().map(IoSliceMut::new)
    }

    /// Copies a payload after the header page and clears the padding.
    pub(crate) fn fill_payload(&mut self, payload: &[u8]) {
        let room = &mut self.as_mut_slice()[PAGE..];
        let (head, padding) = room.split_at_mut(payload.len());
        head.copy_from_slice(payload);
        padding.fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_lie_on_page_boundaries_and_stay_there_when_moved() {
        let buffers: Vec<_> = (0..20).map(|i| Buffer::new(PAGE * (i + 1))).collect();
        for buffer in buffers {
            assert_eq!(buffer.as_slice().as_ptr() as usize % PAGE, 0);
        }
    }

    #[test]
    fn filling_clears_what_an_earlier_payload_left() {
        let mut buffer = Buffer::new(PAGE * 2);
        buffer.fill_payload(&[7; PAGE]);
        buffer.fill_payload(&[9; 3]);
        assert_eq!(buffer.payload(5), [9, 9, 9, 0, 0]);
        assert!(buffer.as_slice()[PAGE + 3..].iter().all(|&b| b == 0));
    }
}
