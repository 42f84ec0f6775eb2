//! The file of a keyed store, which outlives its process, and its checkpoint and quotas in the same directory.

use super::{SlabFile, SlabOptions, available, failed, open_directory};
use crate::buffer::Buffer;
use crate::device::read_whole;
use crate::error::{Error, Result};
use crate::geometry::PAGE;
use rustix::fs::{self, AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

pub(super) const NAME: &str = "blockyard-prefix.slab";
const CHECKPOINT: &str = "blockyard-prefix.checkpoint";
const QUOTAS: &str = "blockyard-prefix.quotas";
const LOCK_WAIT: Duration = Duration::from_secs(1);
const LOCK_PAUSE: Duration = Duration::from_millis(2);

/// Flags for opening files: links are not followed, descriptors are not inherited, and pipes do not block.
pub(super) const CAREFULLY: OFlags = OFlags::NOFOLLOW.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);
const PRIVATE: Mode = Mode::RUSR.union(Mode::WUSR);

impl SlabFile {
    /// Opens the keyed slab of a directory, or creates it, and sets its size from the options. Slots of the same
    /// length keep their blocks.
    ///
    /// # Errors
    /// `InUse` if another store has it open, `NotPrivate` if other users could have written it, `SymbolicLink` if the
    /// name is a link; and as [`SlabFile::create`].
    pub fn open_kept(options: &SlabOptions) -> Result<Self> {
        let path: PathBuf = options.directory.components().collect();
        let (directory, made) = open_directory(&path)?;
        let result = Self::open_kept_in(directory, options);
        if result.is_err() && made {
            let _ = fs::unlinkat(CWD, &path, AtFlags::REMOVEDIR);
        }
        result
    }

    fn open_kept_in(directory: OwnedFd, options: &SlabOptions) -> Result<Self> {
        let path = options.directory.join(NAME);
        let file = open_locked(&directory, &path, OFlags::RDWR | OFlags::CREATE)?;
        let before = fs::fstat(&file).map_err(failed("examine", &path))?;
        let notes = Vec::new();
        // There is nothing to unlink.
        let unlinked = AtomicBool::new(true);
        let name = NAME.to_owned();
        let mut slab = Self { file, directory, name, path, owner: std::process::id(), direct: false, notes, unlinked };
        let result = slab.resize(&before, options).and_then(|()| slab.choose_direct(options, Self::prove_by_reading));
        if result.is_err() && before.st_size == 0 {
            let _ = fs::unlinkat(&slab.directory, NAME, AtFlags::empty());
        }
        result.map(|()| slab)
    }

    /// Extends the file to its size, if the disk has room for the missing part.
    fn resize(&mut self, before: &Stat, options: &SlabOptions) -> Result<()> {
        let asked = options.geometry.total();
        let size = u64::try_from(before.st_size).unwrap_or(0);
        if size > asked {
            rustix::io::retry_on_intr(|| fs::ftruncate(&self.file, asked)).map_err(failed("shorten", &self.path))?;
        }
        let allocated = u64::try_from(before.st_blocks).unwrap_or(0).saturating_mul(512).min(size);
        let missing = asked.saturating_sub(allocated);
        match available(&self.directory) {
            Some(available) if available < missing => {
                Err(Error::NoSpace { path: options.directory.clone(), asked: missing, available })
            }
            _ => self.preallocate(options),
        }
    }

    fn prove_by_reading(&self, _options: &SlabOptions) -> io::Result<()> {
        read_whole(self, Buffer::new(PAGE).as_mut_slice(), 0)
    }
}

/// Opens a slab with a permanent name, and locks it. Waits up to a second for the lock: a killed process holds it
/// until its last write has ended.
fn open_locked(directory: &OwnedFd, path: &Path, flags: OFlags) -> Result<File> {
    let until = Instant::now() + LOCK_WAIT;
    loop {
        let file = match fs::openat(directory, NAME, flags | CAREFULLY, PRIVATE) {
            Err(Errno::LOOP) => return Err(Error::SymbolicLink { path: path.to_owned() }),
            other => File::from(other.map_err(failed("open", path))?),
        };
        let stat = fs::fstat(&file).map_err(failed("examine", path))?;
        if !is_private(&stat) {
            return Err(Error::NotPrivate { path: path.to_owned() });
        }
        match rustix::io::retry_on_intr(|| fs::flock(&file, FlockOperation::NonBlockingLockExclusive)) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) if Instant::now() < until => {
                thread::sleep(LOCK_PAUSE);
                continue;
            }
            Err(Errno::WOULDBLOCK) => return Err(Error::InUse { path: path.to_owned() }),
            Err(errno) => {
                if stat.st_size == 0 {
                    let _ = fs::unlinkat(directory, NAME, AtFlags::empty());
                }
                return Err(Error::NoLocks { path: path.to_owned(), source: errno.into() });
            }
        }
        // It may have been removed between opening and locking.
        let named = fs::statat(directory, NAME, AtFlags::SYMLINK_NOFOLLOW);
        if named.is_ok_and(|named| (named.st_dev, named.st_ino) == (stat.st_dev, stat.st_ino)) {
            return Ok(file);
        }
    }
}

/// Whether it is a regular file that only its owner can read or write.
pub(super) fn is_private(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        && stat.st_uid == rustix::process::geteuid().as_raw()
        && Mode::from_raw_mode(stat.st_mode).intersection(Mode::RWXG | Mode::RWXO).is_empty()
}

/// Returns the checkpoint of the directory; its name is removed before this returns.
pub(super) fn take_checkpoint(directory: &OwnedFd, limit: u64) -> Option<Vec<u8>> {
    let _ = fs::unlinkat(directory, unfinished(CHECKPOINT), AtFlags::empty());
    let opened = fs::openat(directory, CHECKPOINT, OFlags::RDONLY | CAREFULLY, Mode::empty());
    match fs::unlinkat(directory, CHECKPOINT, AtFlags::empty()) {
        Ok(()) => {}
        // A checkpoint that remained would be mistaken for a later one.
        Err(_) => return None,
    }
    read_private(File::from(opened.ok()?), limit)
}

/// Returns the quotas of the directory.
pub(super) fn kept_quotas(directory: &OwnedFd, limit: u64) -> Option<Vec<u8>> {
    let opened = fs::openat(directory, QUOTAS, OFlags::RDONLY | CAREFULLY, Mode::empty());
    read_private(File::from(opened.ok()?), limit)
}

fn read_private(file: File, limit: u64) -> Option<Vec<u8>> {
    fs::fstat(&file).ok().filter(is_private)?;
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// Removes the checkpoint beside a slab, if there is one.
pub(super) fn drop_checkpoint(slab: &Path) -> io::Result<()> {
    match fs::unlinkat(CWD, slab.with_file_name(CHECKPOINT), AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

pub(super) fn save_checkpoint(directory: &OwnedFd, bytes: &[u8]) -> io::Result<()> {
    save(directory, CHECKPOINT, bytes)
}

/// Writes the quotas, and syncs their name, too.
pub(super) fn save_quotas(directory: &OwnedFd, bytes: &[u8]) -> io::Result<()> {
    // A killed process may have left one.
    let _ = fs::unlinkat(directory, unfinished(QUOTAS), AtFlags::empty());
    save(directory, QUOTAS, bytes)?;
    Ok(fs::fsync(directory)?)
}

/// Writes a file under a temporary name first, so that its final name always has a complete file.
fn save(directory: &OwnedFd, name: &str, bytes: &[u8]) -> io::Result<()> {
    let (flags, new) = (OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | CAREFULLY, unfinished(name));
    let mut file = File::from(fs::openat(directory, &new, flags, PRIVATE)?);
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    if written.is_err() {
        let _ = fs::unlinkat(directory, &new, AtFlags::empty());
    }
    written?;
    Ok(fs::renameat(directory, &new, directory, name)?)
}

fn unfinished(name: &str) -> String {
    format!("{name}.new")
}
