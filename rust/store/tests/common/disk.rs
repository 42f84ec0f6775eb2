//! A model of a disk and a file system: writes reach the medium at a sync; when power is lost, only some do, in any
//! order.

use blockyard_store::BlockDevice;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

pub(crate) const SECTOR: usize = 512;

/// Errors that the disk answers with: EIO, EMFILE, EFBIG, ENOSPC, EROFS, EDQUOT.
pub(crate) const ERRORS: [i32; 6] = [5, 24, 27, 28, 30, 122];

#[derive(Clone, Default)]
struct DiskState {
    /// The bytes that reads return.
    seen: Vec<u8>,
    /// The bytes that surely survive a loss of power.
    durable: Vec<u8>,
    /// Offset and bytes of the sectors written since, in order.
    unsynced: Vec<(usize, Vec<u8>)>,
    checkpoint: Option<Vec<u8>>,
    quotas: Option<Vec<u8>>,
    calls: u64,
    /// If set to `(n, error)`, every `n`-th call fails with the error.
    failing: Option<(u64, i32)>,
}

/// Storage in memory that loses power, or answers with errors.
#[derive(Clone, Default)]
pub(crate) struct Disk(Arc<Mutex<DiskState>>, Arc<Mutex<()>>, Arc<AtomicUsize>);

/// A small random number generator; a seed determines its numbers.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x1234_5678_9ABC_DEF1)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % bound
    }

    pub(crate) fn index(&mut self, bound: usize) -> usize {
        usize::try_from(self.below(bound as u64)).unwrap()
    }
}

impl Disk {
    pub(crate) fn new(len: u64) -> Self {
        let disk = Self::default();
        let zeros = vec![0; usize::try_from(len).unwrap()];
        *disk.0.lock().unwrap() = DiskState { seen: zeros.clone(), durable: zeros, ..DiskState::default() };
        disk
    }

    pub(crate) fn device(&self) -> Arc<dyn BlockDevice> {
        Arc::new(self.clone())
    }

    /// Another disk with the same bytes, as found after a `kill -9`.
    pub(crate) fn killed(&self) -> Self {
        Self(Arc::new(Mutex::new(self.0.lock().unwrap().clone())), Arc::default(), Arc::default())
    }

    /// Another disk with the bytes left after a loss of power: some of the unsynced sectors, in any order.
    pub(crate) fn without_power(&self, random: &mut Random) -> Self {
        let mut state = self.0.lock().unwrap().clone();
        let mut image = state.durable;
        let mut left = state.unsynced;
        let kept = random.index(left.len() + 1);
        for _ in 0..kept {
            let (at, sector) = left.swap_remove(random.index(left.len()));
            image[at..at + SECTOR].copy_from_slice(&sector);
        }
        match random.below(4) {
            0 => state.checkpoint = None,
            1 => {
                if let Some(bytes) = &mut state.checkpoint {
                    bytes.truncate(random.index(bytes.len() + 1));
                }
            }
            _ => {}
        }
        let state = DiskState { seen: image.clone(), durable: image, unsynced: Vec::new(), failing: None, ..state };
        Self(Arc::new(Mutex::new(state)), Arc::default(), Arc::default())
    }

    /// Makes every `nth` call fail, or none.
    pub(crate) fn fail(&self, failing: Option<(u64, i32)>) -> &Self {
        self.0.lock().unwrap().failing = failing;
        self
    }

    /// Changes the bytes permanently, behind the store's back.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.0.lock().unwrap();
        change(&mut state.seen);
        state.settle();
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().seen.clone()
    }

    /// Calls `work` while no call to the disk returns.
    pub(crate) fn frozen<T>(&self, work: impl FnOnce() -> T) -> T {
        let held = self.1.lock().unwrap();
        let result = work();
        drop(held);
        result
    }

    /// Reads and writes that have begun so far, those that wait in `frozen` included.
    pub(crate) fn begun(&self) -> usize {
        self.2.load(Ordering::SeqCst)
    }

    pub(crate) fn drop_checkpoint(&self) {
        self.0.lock().unwrap().checkpoint = None;
    }

    pub(crate) fn has_checkpoint(&self) -> bool {
        self.0.lock().unwrap().checkpoint.is_some()
    }
}

impl DiskState {
    /// Makes everything durable.
    fn settle(&mut self) {
        self.durable.clone_from(&self.seen);
        self.unsynced.clear();
    }

    fn call(&mut self) -> io::Result<()> {
        self.calls += 1;
        match self.failing {
            Some((nth, errno)) if self.calls % nth == 0 => Err(io::Error::from_raw_os_error(errno)),
            _ => Ok(()),
        }
    }
}

impl BlockDevice for Disk {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        self.2.fetch_add(1, Ordering::SeqCst);
        drop(self.1.lock().unwrap());
        let mut state = self.0.lock().unwrap();
        state.call()?;
        let offset = usize::try_from(offset).unwrap().min(state.seen.len());
        let len = bytes.len().min(state.seen.len() - offset);
        bytes[..len].copy_from_slice(&state.seen[offset..offset + len]);
        Ok(len)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.2.fetch_add(1, Ordering::SeqCst);
        drop(self.1.lock().unwrap());
        let mut state = self.0.lock().unwrap();
        let offset = usize::try_from(offset).unwrap();
        let failed = state.call();
        // A failed write may have changed any part, here the first half; on a read-only disk it has changed nothing.
        let len = match &failed {
            Ok(()) => bytes.len(),
            Err(error) if error.raw_os_error() == Some(30) => 0,
            Err(_) => bytes.len() / 2 / SECTOR * SECTOR,
        };
        if state.seen.len() < offset + len {
            state.seen.resize(offset + len, 0);
            state.durable.resize(offset + len, 0);
        }
        state.seen[offset..offset + len].copy_from_slice(&bytes[..len]);
        for (i, sector) in bytes[..len].chunks(SECTOR).enumerate() {
            state.unsynced.push((offset + i * SECTOR, sector.to_vec()));
        }
        failed.map(|()| len)
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        state.call()?;
        state.settle();
        Ok(())
    }

    fn take_checkpoint(&self, _limit: u64) -> Option<Vec<u8>> {
        self.0.lock().unwrap().checkpoint.take()
    }

    fn save_checkpoint(&self, bytes: &[u8]) {
        self.0.lock().unwrap().checkpoint = Some(bytes.to_vec());
    }

    fn kept_quotas(&self, _limit: u64) -> Option<Vec<u8>> {
        self.0.lock().unwrap().quotas.clone()
    }

    fn save_quotas(&self, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        state.call()?;
        state.quotas = Some(bytes.to_vec());
        Ok(())
    }
}
