//! Memory for direct I/O: address and length are multiples of 4 KiB. Rust owns it, so a thread that hangs in the kernel
//! never holds the caller's memory.

use crate::geometry::PAGE;

/// Bytes on a 4 KiB boundary, zero at first.
#[derive(Debug)]
pub struct Buffer {
    /// Never grown, so that it stays aligned.
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// A buffer of `len` bytes.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let bytes = vec![0; len + PAGE];
        let address = bytes.as_ptr() as usize;
        Self { start: address.next_multiple_of(PAGE) - address, bytes, len }
    }

    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    /// The bytes, to be written.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    /// The first `len` bytes after the header page.
    #[must_use]
    pub fn payload(&self, len: usize) -> &[u8] {
        &self.as_slice()[PAGE..PAGE + len]
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
