//! Devices for tests: memory, and memory that fails in chosen ways.
#![expect(clippy::unwrap_used, reason = "test code")]

mod options;

use blockyard_store::{BlockDevice, SlabStore};
pub(crate) use options::{LONG, PAYLOAD, SLOTS, options};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// What the device does with a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Transfers only this many bytes.
    Short(usize),
    /// Fails with an errno.
    Errno(i32),
    /// Reports success without writing.
    Swallow,
    /// Writes half of the bytes that it reports.
    Tear,
}

/// Bytes in memory, with a fault for all reads, one for all writes, and a switch that freezes it.
#[derive(Default)]
pub(crate) struct Memory {
    bytes: Mutex<Vec<u8>>,
    faults: Mutex<(Option<Fault>, Option<Fault>)>,
    /// A write that touches this byte fails.
    broken: Mutex<Option<u64>>,
    frozen: Mutex<bool>,
    thawed: Condvar,
    pub(crate) discarded: AtomicBool,
    /// Calls that have reached the device.
    pub(crate) calls: AtomicUsize,
}

impl Memory {
    pub(crate) fn new(len: u64) -> Arc<Self> {
        let memory = Self::default();
        *memory.bytes.lock().unwrap() = vec![0; usize::try_from(len).unwrap()];
        Arc::new(memory)
    }

    pub(crate) fn set_faults(&self, read: Fault, write: Fault) {
        *self.faults.lock().unwrap() = (Some(read), Some(write));
    }

    pub(crate) fn freeze(&self, frozen: bool) {
        *self.frozen.lock().unwrap() = frozen;
        self.thawed.notify_all();
    }

    pub(crate) fn break_at(&self, at: u64) {
        *self.broken.lock().unwrap() = Some(at);
    }

    pub(crate) fn flip(&self, at: u64, mask: u8) {
        self.bytes.lock().unwrap()[usize::try_from(at).unwrap()] ^= mask;
    }

    fn wait_for_thaw(&self) {
        self.calls.fetch_add(1, Ordering::SeqCst);
        drop(self.thawed.wait_while(self.frozen.lock().unwrap(), |frozen| *frozen).unwrap());
    }
}

impl BlockDevice for Memory {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        self.wait_for_thaw();
        let fault = self.faults.lock().unwrap().0.unwrap_or(Fault::None);
        let len = match fault {
            Fault::Errno(errno) => return Err(io::Error::from_raw_os_error(errno)),
            Fault::Short(len) => len.min(bytes.len()),
            _ => bytes.len(),
        };
        let offset = usize::try_from(offset).unwrap();
        bytes[..len].copy_from_slice(&self.bytes.lock().unwrap()[offset..offset + len]);
        Ok(len)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.wait_for_thaw();
        let fault = self.faults.lock().unwrap().1.unwrap_or(Fault::None);
        let (said, done) = match fault {
            Fault::Errno(errno) => return Err(io::Error::from_raw_os_error(errno)),
            Fault::Short(len) => (len.min(bytes.len()), len.min(bytes.len())),
            Fault::Swallow => (bytes.len(), 0),
            Fault::Tear => (bytes.len(), bytes.len() / 2),
            Fault::None => (bytes.len(), bytes.len()),
        };
        if self.broken.lock().unwrap().is_some_and(|at| (offset..offset + done as u64).contains(&at)) {
            return Err(io::Error::from_raw_os_error(5));
        }
        let offset = usize::try_from(offset).unwrap();
        self.bytes.lock().unwrap()[offset..offset + done].copy_from_slice(&bytes[..done]);
        Ok(said)
    }

    fn discard(&self) {
        self.wait_for_thaw();
        self.discarded.store(true, Ordering::SeqCst);
    }
}

pub(crate) fn store() -> (Arc<Memory>, SlabStore) {
    let memory = Memory::new(options().geometry.total());
    let device: Arc<dyn BlockDevice> = Arc::clone(&memory) as _;
    (memory, SlabStore::open(device, options()).unwrap())
}

/// A payload determined by its seed.
pub(crate) fn row(seed: u8) -> Vec<u8> {
    (0..PAYLOAD).map(|i| seed.wrapping_mul(31).wrapping_add(u8::try_from(i % 256).unwrap())).collect()
}
