//! Storage that reads and writes at an offset: the slab's file, or a faulty one in tests.

use crate::buffer::Buffer;
use crate::geometry::PAGE;
use std::io::{self, IoSlice, IoSliceMut};

/// Storage that is addressed by byte offset. Offsets, lengths and addresses are multiples of 4 KiB.
pub trait BlockDevice: Send + Sync {
    /// Reads at an offset; returns the number of bytes read, 0 at the end of the storage.
    ///
    /// # Errors
    /// The system's.
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes at an offset; returns the number of bytes written.
    ///
    /// # Errors
    /// The system's.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize>;

    /// Reads at an offset into several pieces of memory, in order; returns the number of bytes read.
    ///
    /// # Errors
    /// The system's.
    fn read_vectored_at(&self, parts: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        parts.iter_mut().find(|part| !part.is_empty()).map_or(Ok(0), |part| self.read_at(part, offset))
    }

    /// Writes several pieces of memory at an offset, in order; returns the number of bytes written.
    ///
    /// # Errors
    /// The system's.
    fn write_vectored_at(&self, parts: &[IoSlice<'_>], offset: u64) -> io::Result<usize> {
        parts.iter().find(|part| !part.is_empty()).map_or(Ok(0), |part| self.write_at(part, offset))
    }

    /// Makes completed writes survive a loss of power.
    ///
    /// # Errors
    /// The system's.
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    /// Returns the bytes of the last [`BlockDevice::save_checkpoint`], once: they are deleted before this returns,
    /// so that no later opener finds them with newer blocks. At most `limit` bytes; `None` if there are none. They are
    /// untrusted.
    fn take_checkpoint(&self, _limit: u64) -> Option<Vec<u8>> {
        None
    }

    /// Keeps bytes for the next opener, if it can. Called when a keyed store is closed, after a sync.
    fn save_checkpoint(&self, _bytes: &[u8]) {}

    /// Returns the bytes of the last [`BlockDevice::save_quotas`], at most `limit`; `None` if there are none. They are
    /// untrusted.
    fn kept_quotas(&self, _limit: u64) -> Option<Vec<u8>> {
        None
    }

    /// Keeps the quotas of a keyed store for later openers, in place of those before; returns once they would survive a
    /// loss of power.
    ///
    /// # Errors
    /// The system's.
    fn save_quotas(&self, _bytes: &[u8]) -> io::Result<()> {
        Ok(())
    }

    /// Called once, from a separate thread, when the store is closed.
    fn discard(&self) {}
}

/// Reads until the buffer is full, continuing after short reads.
pub(crate) fn read_whole(device: &dyn BlockDevice, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    let whole = bytes.len();
    in_steps(whole, io::ErrorKind::UnexpectedEof, |done| device.read_at(&mut bytes[done..], offset + done as u64))
}

/// Writes all bytes, continuing after short writes.
pub(crate) fn write_whole(device: &dyn BlockDevice, bytes: &[u8], offset: u64) -> io::Result<()> {
    in_steps(bytes.len(), io::ErrorKind::WriteZero, |done| device.write_at(&bytes[done..], offset + done as u64))
}

/// Reads adjacent blocks in one call, or more after short reads.
pub(crate) fn read_blocks<'a>(
    device: &dyn BlockDevice,
    blocks: impl Iterator<Item = &'a mut Buffer>,
    offset: u64,
) -> io::Result<()> {
    let mut parts: Vec<IoSliceMut<'_>> = blocks.flat_map(Buffer::parts_mut).collect();
    let (whole, mut left, mut before) = (parts.iter().map(|part| part.len()).sum(), &mut parts[..], 0);
    in_steps(whole, io::ErrorKind::UnexpectedEof, |done| {
        IoSliceMut::advance_slices(&mut left, done - before);
        before = done;
        device.read_vectored_at(left, offset + done as u64)
    })
}

/// Writes adjacent blocks in one call, or more after short writes.
pub(crate) fn write_blocks<'a>(
    device: &dyn BlockDevice,
    blocks: impl Iterator<Item = &'a Buffer>,
    offset: u64,
) -> io::Result<()> {
    let mut parts: Vec<IoSlice<'_>> = blocks.flat_map(Buffer::parts).collect();
    let (whole, mut left, mut before) = (parts.iter().map(|part| part.len()).sum(), &mut parts[..], 0);
    in_steps(whole, io::ErrorKind::WriteZero, |done| {
        IoSlice::advance_slices(&mut left, done - before);
        before = done;
        device.write_vectored_at(left, offset + done as u64)
    })
}

/// Repeats a step from the end of the last one, on page boundaries, until `whole` bytes are done. A step without
/// progress is the error `stuck`.
fn in_steps(whole: usize, stuck: io::ErrorKind, mut step: impl FnMut(usize) -> io::Result<usize>) -> io::Result<()> {
    let mut done = 0;
    while done < whole {
        let moved = match step(done) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            other => other?,
        };
        let next = (done + moved).min(whole);
        let next = if next == whole { next } else { next - next % PAGE };
        if next <= done {
            return Err(stuck.into());
        }
        done = next;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;
    use std::sync::Mutex;

    /// Transfers as many bytes per call as its script says.
    struct Scripted {
        script: Mutex<VecDeque<io::Result<usize>>>,
        calls: Mutex<Vec<(u64, usize)>>,
    }

    impl Scripted {
        fn new(script: Vec<io::Result<usize>>) -> Self {
            Self { script: Mutex::new(script.into()), calls: Mutex::default() }
        }

        fn next(&self, offset: u64, len: usize) -> io::Result<usize> {
            self.calls.lock().unwrap().push((offset, len));
            self.script.lock().unwrap().pop_front().unwrap_or(Ok(len))
        }

        fn calls(&self) -> Vec<(u64, usize)> {
            self.calls.lock().unwrap().clone()
        }
    }

    impl BlockDevice for Scripted {
        fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
            self.next(offset, bytes.len())
        }

        fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
            self.next(offset, bytes.len())
        }
    }

    #[test]
    fn short_steps_go_on_at_the_last_whole_page() {
        let device = Scripted::new(vec![Ok(PAGE + 5), Err(io::ErrorKind::Interrupted.into()), Ok(PAGE)]);
        write_whole(&device, &[0; PAGE * 3], 8192).unwrap();
        let calls = [(8192, PAGE * 3), (8192 + 4096, PAGE * 2), (8192 + 4096, PAGE * 2), (8192 + 8192, PAGE)];
        assert_eq!(device.calls(), calls);
    }

    #[test]
    fn no_progress_is_an_error_and_not_a_loop() {
        let device = Scripted::new(vec![Ok(100)]);
        let error = read_whole(&device, &mut [0; PAGE], 0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        let device = Scripted::new(vec![Ok(0)]);
        assert_eq!(write_whole(&device, &[0; PAGE], 0).unwrap_err().kind(), io::ErrorKind::WriteZero);
    }

    #[test]
    fn an_error_of_the_device_comes_through() {
        let device = Scripted::new(vec![Ok(PAGE), Err(io::Error::from_raw_os_error(5))]);
        assert_eq!(write_whole(&device, &[0; PAGE * 2], 0).unwrap_err().raw_os_error(), Some(5));
    }
}
