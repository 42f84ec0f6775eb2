//! `Floor`: the first valid generation of a slab, and the weights that compute blocks from that generation on.
//!
//! A thread writes it to the superblock, since the device may hang; the newest floor is written last. One lock, never
//! held during a call to the device.

use super::keyed::failed;
use crate::device::BlockDevice;
use crate::error::{Error, Result};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// The name of a revision of weights; zeros for the revision that the namespace names.
#[must_use]
pub fn revision_name(revision: &str) -> [u8; 32] {
    if revision.is_empty() { [0; 32] } else { *blake3::hash(revision.as_bytes()).as_bytes() }
}

#[derive(Debug)]
pub(super) struct Floor {
    known: Mutex<Known>,
    changed: Condvar,
}

#[derive(Debug)]
struct Known {
    floor: u64,
    revision: [u8; 32],
    /// The highest floor that `forget` has written to the superblock.
    written: u64,
    is_writing: bool,
    /// Why the last write failed.
    error: Option<io::Error>,
}

impl Floor {
    pub(super) fn new(revision: [u8; 32]) -> Self {
        let known = Known { floor: 0, revision, written: 0, is_writing: false, error: None };
        Self { known: Mutex::new(known), changed: Condvar::new() }
    }

    /// Raises the floor and writes it, unless the revision is already current.
    pub(super) fn raise(
        self: &Arc<Self>,
        revision: Option<[u8; 32]>,
        patience: Duration,
        raise: impl FnOnce() -> Result<(Arc<dyn BlockDevice>, u64)>,
        write: impl Fn(&dyn BlockDevice, u64, [u8; 32]) -> io::Result<()> + Send + 'static,
    ) -> Result<()> {
        let mut known = self.lock();
        if revision == Some(known.revision) && known.written == known.floor {
            return Ok(());
        }
        let (device, floor) = raise()?;
        known.floor = floor;
        known.revision = revision.unwrap_or(known.revision);
        // A disk may hang for longer than the caller waits, so a thread writes. If one is writing already, it writes this
        // floor next.
        if !known.is_writing {
            let this = Arc::clone(self);
            let work = move || this.write(&*device, write);
            thread::Builder::new()
                .name("blockyard-forget".to_owned())
                .spawn(work)
                .map_err(failed("start a thread for"))?;
            known.is_writing = true;
        }
        let is_open = |known: &mut Known| known.written < floor && known.is_writing;
        let (mut known, _) =
            self.changed.wait_timeout_while(known, patience, is_open).unwrap_or_else(PoisonError::into_inner);
        if known.written >= floor {
            return Ok(());
        }
        let late = || io::Error::new(io::ErrorKind::TimedOut, "the disk does not answer");
        let error = if known.is_writing { late() } else { known.error.take().unwrap_or_else(late) };
        Err::<(), Error>(failed("write the superblock of")(error))
    }

    /// Writes floors until the newest is written.
    fn write(&self, device: &dyn BlockDevice, write: impl Fn(&dyn BlockDevice, u64, [u8; 32]) -> io::Result<()>) {
        let mut known = self.lock();
        loop {
            let (floor, revision) = (known.floor, known.revision);
            drop(known);
            let result = write(device, floor, revision);
            known = self.lock();
            match result {
                Ok(()) => known.written = floor,
                Err(error) => known.error = Some(error),
            }
            if known.floor == floor {
                known.is_writing = false;
                self.changed.notify_all();
                return;
            }
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
