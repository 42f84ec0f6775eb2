//! A slab opened for inspection.

use super::failed;
use super::kept::{CAREFULLY, NAME, drop_checkpoint, is_private};
use crate::device::BlockDevice;
use crate::error::{Error, Result};
use rustix::fs::{self, CWD, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// How to open a slab for inspection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Read it, even while a store has it open.
    Look,
    /// Read it while no store has it open.
    Check,
    /// Read and write it.
    Repair,
}

/// The file of a slab, with the page cache and without any change to it.
#[derive(Debug)]
pub(crate) struct PlainFile {
    file: File,
    path: PathBuf,
}

impl PlainFile {
    /// Opens a slab, or the keyed slab of a directory.
    pub(crate) fn open(path: &Path, access: Access) -> Result<Self> {
        let path = if path.is_dir() { path.join(NAME) } else { path.to_owned() };
        let mode = if access == Access::Repair { OFlags::RDWR } else { OFlags::RDONLY };
        let file = match fs::openat(CWD, &path, mode | CAREFULLY, Mode::empty()) {
            Err(Errno::LOOP) => return Err(Error::SymbolicLink { path }),
            other => File::from(other.map_err(failed("open", &path))?),
        };
        if !is_private(&fs::fstat(&file).map_err(failed("examine", &path))?) {
            return Err(Error::NotPrivate { path });
        }
        if access != Access::Look {
            match rustix::io::retry_on_intr(|| fs::flock(&file, FlockOperation::NonBlockingLockExclusive)) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Err(Error::InUse { path }),
                Err(errno) => return Err(Error::NoLocks { path, source: errno.into() }),
            }
        }
        Ok(Self { file, path })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the checkpoint beside the file, if there is one: it lists blocks that are wiped.
    pub(crate) fn drop_checkpoint(&self) -> io::Result<()> {
        drop_checkpoint(&self.path)
    }
}

impl BlockDevice for PlainFile {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(&self.file, bytes, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        FileExt::write_at(&self.file, bytes, offset)
    }
}
