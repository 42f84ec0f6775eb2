//! The file of a slab: locked and preallocated. The file of swap space is removed when the store is closed, or by the
//! next opener if its process dies. The file of keyed blocks is kept.
//!
//! Invariant: the holder of the `flock` of a named slab owns it. Swap space whose lock is free belongs to a dead
//! process, and anyone may remove it.

mod kept;
mod plain;

pub(crate) use plain::{Access, PlainFile};

use crate::buffer::Buffer;
use crate::device::{BlockDevice, read_whole, write_whole};
use crate::error::{Error, Result};
use crate::geometry::{Geometry, PAGE};
use crate::header::Superblock;
use rustix::fs::{self, AtFlags, CWD, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

const PREFIX: &str = "blockyard-swap-";
const SUFFIX: &str = ".slab";
/// Number of names that one process tries.
const NAMES: u32 = 10_000;

/// Whether the page cache is bypassed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DirectMode {
    /// If the file system allows it; otherwise buffered, with a note.
    #[default]
    Auto,
    /// Always: opening fails if the file system refuses it.
    On,
    /// Never.
    Off,
}

/// Where a slab is created and how it is accessed.
#[derive(Clone, Debug)]
pub struct SlabOptions {
    /// Directory of the slab; its last component is created if missing, and must not be a symbolic link.
    pub directory: PathBuf,
    /// Slots and their length.
    pub geometry: Geometry,
    /// Digest for the superblock.
    pub namespace: [u8; 32],
    /// Whether the page cache is bypassed.
    pub direct: DirectMode,
}

/// An open, locked and preallocated slab. The file name of swap space is removed when it is discarded or dropped.
#[derive(Debug)]
pub struct SlabFile {
    file: File,
    directory: OwnedFd,
    name: String,
    path: PathBuf,
    owner: u32,
    direct: bool,
    notes: Vec<String>,
    /// Set from the start for a file that is kept.
    unlinked: AtomicBool,
}

impl SlabFile {
    /// Creates a slab for swap space. It first removes those that dead processes left in the directory.
    ///
    /// # Errors
    /// `NoSpace` or `FileTooLarge` if the slab does not fit, `DirectRefused` if direct I/O is required and not
    /// available, and system errors. Nothing is left behind.
    pub fn create(options: &SlabOptions) -> Result<Self> {
        // Without a trailing slash, which would follow a symbolic link.
        let path: PathBuf = options.directory.components().collect();
        let (directory, made) = open_directory(&path)?;
        remove_dead(&directory);
        let result = Self::create_in(directory, options);
        if result.is_err() && made {
            // Report the first failure; another process may already use the directory.
            let _ = fs::unlinkat(CWD, &path, AtFlags::REMOVEDIR);
        }
        result
    }

    fn create_in(directory: OwnedFd, options: &SlabOptions) -> Result<Self> {
        check_space(&directory, options)?;
        let mut slab = Self::claim(directory, &options.directory)?;
        slab.preallocate(options)?;
        slab.choose_direct(options, Self::prove_by_writing)?;
        Ok(slab)
    }

    /// Creates and locks the first name that is free.
    fn claim(directory: OwnedFd, path: &Path) -> Result<Self> {
        let owner = std::process::id();
        for n in 0..NAMES {
            let name = format!("{PREFIX}{owner}-{n}{SUFFIX}");
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = match fs::openat(&directory, &name, flags, Mode::RUSR | Mode::WUSR) {
                Err(Errno::EXIST) => continue,
                other => File::from(other.map_err(failed("create a slab in", path))?),
            };
            // Another opener that considers the owner dead may hold the lock for a moment; it removes the file.
            match rustix::io::retry_on_intr(|| fs::flock(&file, FlockOperation::NonBlockingLockExclusive)) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => continue,
                Err(errno) => {
                    let _ = fs::unlinkat(&directory, &name, AtFlags::empty());
                    return Err(Error::NoLocks { path: path.to_owned(), source: errno.into() });
                }
            }
            if fs::fstat(&file).is_ok_and(|stat| stat.st_nlink == 1) {
                let (path, notes, unlinked) = (path.join(&name), Vec::new(), AtomicBool::new(false));
                return Ok(Self { file, directory, name, path, owner, direct: false, notes, unlinked });
            }
        }
        Err(failed("find a free name in", path)(Errno::EXIST))
    }

    /// Allocates the whole file, so that a full disk shows at the start.
    fn preallocate(&mut self, options: &SlabOptions) -> Result<()> {
        let asked = options.geometry.total();
        let path = options.directory.clone();
        match rustix::io::retry_on_intr(|| fs::fallocate(&self.file, fs::FallocateFlags::empty(), 0, asked)) {
            Ok(()) => Ok(()),
            Err(Errno::NOSPC | Errno::DQUOT) => {
                Err(Error::NoSpace { available: available(&self.directory).unwrap_or(0), path, asked })
            }
            Err(Errno::FBIG) => Err(Error::FileTooLarge { path, asked, limit: file_size_limit() }),
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                self.notes.push("not preallocated: the file system cannot; a full disk will show as misses".to_owned());
                rustix::io::retry_on_intr(|| fs::ftruncate(&self.file, asked)).map_err(failed("enlarge", &self.path))
            }
            Err(errno) => Err(failed("preallocate", &self.path)(errno)),
        }
    }

    /// Turns direct I/O on if wanted, tests it, and turns it off if the test fails.
    fn choose_direct(
        &mut self,
        options: &SlabOptions,
        prove: impl Fn(&Self, &SlabOptions) -> io::Result<()>,
    ) -> Result<()> {
        if options.direct != DirectMode::Off {
            let reason = match self.set_direct(true).and_then(|()| prove(self, options)) {
                Ok(()) => {
                    self.direct = true;
                    return Ok(());
                }
                Err(error) => error.to_string(),
            };
            if options.direct == DirectMode::On {
                return Err(Error::DirectRefused { path: options.directory.clone(), reason });
            }
            self.notes.push(format!("buffered: the file system refuses direct I/O ({reason})"));
            self.set_direct(false).map_err(|source| self.error("turn direct I/O off for", source))?;
        }
        prove(self, options).map_err(|source| self.error("use the superblock of", source))
    }

    fn set_direct(&self, on: bool) -> io::Result<()> {
        let mut flags = fs::fcntl_getfl(&self.file)?;
        flags.set(OFlags::DIRECT, on);
        Ok(fs::fcntl_setfl(&self.file, flags)?)
    }

    /// Writes a superblock and reads it back.
    fn prove_by_writing(&self, options: &SlabOptions) -> io::Result<()> {
        let page = Superblock::new(options.namespace, options.geometry, 0, [0; 32]).page();
        write_whole(self, page.as_slice(), 0)?;
        let mut back = Buffer::new(PAGE);
        read_whole(self, back.as_mut_slice(), 0)?;
        if back.as_slice() == page.as_slice() { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    fn error(&self, action: &'static str, source: io::Error) -> Error {
        Error::Io { action, path: self.path.clone(), source }
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the page cache is bypassed.
    #[must_use]
    pub fn direct(&self) -> bool {
        self.direct
    }

    /// Messages about features that the file system refused.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Removes the name, at most once, unless another file has taken it or this process is a fork of the owner.
    fn unlink(&self) {
        if self.owner != std::process::id() || self.unlinked.swap(true, Ordering::Relaxed) {
            return;
        }
        let named = fs::statat(&self.directory, &self.name, AtFlags::SYMLINK_NOFOLLOW);
        if let (Ok(named), Ok(ours)) = (named, fs::fstat(&self.file)) {
            if (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino) {
                // If this fails, the next opener removes the name.
                let _ = fs::unlinkat(&self.directory, &self.name, AtFlags::empty());
            }
        }
    }
}

impl BlockDevice for SlabFile {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(&self.file, bytes, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        FileExt::write_at(&self.file, bytes, offset)
    }

    fn read_vectored_at(&self, parts: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        Ok(rustix::io::preadv(&self.file, parts, offset)?)
    }

    fn write_vectored_at(&self, parts: &[IoSlice<'_>], offset: u64) -> io::Result<usize> {
        Ok(rustix::io::pwritev(&self.file, parts, offset)?)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(fs::fdatasync(&self.file)?)
    }

    fn take_checkpoint(&self, limit: u64) -> Option<Vec<u8>> {
        kept::take_checkpoint(&self.directory, limit)
    }

    fn save_checkpoint(&self, bytes: &[u8]) {
        // The checkpoint is a hint: on any failure, the next opener reads the headers.
        let _ = kept::save_checkpoint(&self.directory, bytes);
    }

    fn kept_quotas(&self, limit: u64) -> Option<Vec<u8>> {
        kept::kept_quotas(&self.directory, limit)
    }

    fn save_quotas(&self, bytes: &[u8]) -> io::Result<()> {
        kept::save_quotas(&self.directory, bytes)
    }

    fn discard(&self) {
        self.unlink();
    }
}

impl Drop for SlabFile {
    fn drop(&mut self) {
        self.unlink();
        if self.owner == std::process::id() {
            // A surviving fork also has the file open, and with it the lock.
            let _ = fs::flock(&self.file, FlockOperation::Unlock);
        }
    }
}

/// Opens the directory and creates its last component if missing; returns whether it did.
fn open_directory(path: &Path) -> Result<(OwnedFd, bool)> {
    let made = match fs::mkdirat(CWD, path, Mode::RWXU) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(errno) => return Err(failed("make directory", path)(errno)),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match fs::openat(CWD, path, flags, Mode::empty()) {
        Ok(directory) => Ok((directory, made)),
        Err(Errno::NOTDIR | Errno::LOOP) => {
            let path = path.to_owned();
            let link = path.symlink_metadata().is_ok_and(|data| data.is_symlink());
            Err(if link { Error::SymbolicLink { path } } else { Error::NotADirectory { path } })
        }
        Err(errno) => Err(failed("open directory", path)(errno)),
    }
}

/// Removes slabs whose lock is free. Failures are left to the next opener.
fn remove_dead(directory: &OwnedFd) {
    let Ok(entries) = fs::Dir::read_from(directory) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let bytes = name.to_bytes();
        if !bytes.starts_with(PREFIX.as_bytes()) || !bytes.ends_with(SUFFIX.as_bytes()) {
            continue;
        }
        // NONBLOCK: a FIFO of that name must not block.
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let Ok(file) = fs::openat(directory, name, flags, Mode::empty()) else { continue };
        let regular = fs::fstat(&file).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
        if regular && fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = fs::unlinkat(directory, name, AtFlags::empty());
        }
    }
}

/// Refuses a slab that does not fit before anything is written.
fn check_space(directory: &OwnedFd, options: &SlabOptions) -> Result<()> {
    let asked = options.geometry.total();
    match available(directory) {
        Some(available) if available < asked => {
            Err(Error::NoSpace { path: options.directory.clone(), asked, available })
        }
        _ => Ok(()),
    }
}

/// Bytes that an unprivileged process may still allocate, if the file system reports them.
fn available(directory: &OwnedFd) -> Option<u64> {
    let stat = fs::fstatvfs(directory).ok()?;
    // Some file systems report no sizes at all.
    (stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize))
}

fn file_size_limit() -> String {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    limit.map_or_else(|| "set by the file system".to_owned(), |limit| format!("{limit} (RLIMIT_FSIZE)"))
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(Errno) -> Error {
    let path = path.to_owned();
    move |errno| Error::Io { action, path, source: errno.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn what_the_system_refuses_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let geometry = Geometry { payload_bytes: PAGE, slots: 1 };
        let directory = folder.path().to_owned();
        let options = SlabOptions { directory, geometry, namespace: [7; 32], direct: DirectMode::Off };
        let mut slab = SlabFile::create(&options).unwrap();
        // A socket has neither offsets nor a disk.
        let (socket, _other) = UnixStream::pair().unwrap();
        slab.file = File::from(OwnedFd::from(socket));
        let (mut page, whole) = ([0; PAGE], [1; PAGE]);
        assert!(slab.read_at(&mut page, 0).is_err() && slab.write_at(&whole, 0).is_err());
        assert!(slab.read_vectored_at(&mut [IoSliceMut::new(&mut page)], 0).is_err());
        assert!(slab.write_vectored_at(&[IoSlice::new(&whole)], 0).is_err());
        assert!(slab.sync().is_err());
    }
}
