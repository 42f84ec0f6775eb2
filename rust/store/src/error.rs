//! Errors of opening and calling a store. A failure of a single block is a [`crate::Miss`].

use std::io;
use std::path::PathBuf;

/// Result of a call on a store.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of the store; nothing was changed and nothing is left behind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// File or directory.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The directory is a symbolic link.
    #[error("{} is a symbolic link; name the directory that it points to", path.display())]
    SymbolicLink {
        /// The path.
        path: PathBuf,
    },
    /// The path is not a directory.
    #[error("{} is not a directory", path.display())]
    NotADirectory {
        /// The path.
        path: PathBuf,
    },
    /// The file system cannot lock files, so a slab in use looks like an abandoned one.
    #[error("the file system of {} has no locks ({source}); mount it with them, or name another directory", path.display())]
    NoLocks {
        /// Directory of the slab.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// Another store has the slab open.
    #[error("{} is in use by another store; close that one, or name another directory", path.display())]
    InUse {
        /// The slab.
        path: PathBuf,
    },
    /// Others could have written the slab.
    #[error("{} is not a file that only this user can read and write; remove it, or name another directory", path.display())]
    NotPrivate {
        /// The slab.
        path: PathBuf,
    },
    /// The file does not begin with an intact superblock.
    #[error("{} is not a slab, or its superblock is damaged", path.display())]
    NotASlab {
        /// The file.
        path: PathBuf,
    },
    /// Opening a slab of keyed blocks would drop some of them.
    #[error(
        "{} has {slots} slots of {payload_bytes} bytes, asked for {wanted_slots} of {wanted_bytes}, which would drop \
         {blocks} blocks; name another directory, or drop them with drop=on in the URL",
        path.display()
    )]
    WouldDrop {
        /// The slab.
        path: PathBuf,
        /// Its slots.
        slots: u32,
        /// Bytes of a block in one of them.
        payload_bytes: usize,
        /// Slots asked for.
        wanted_slots: u32,
        /// Bytes of a block asked for.
        wanted_bytes: usize,
        /// Valid blocks in slots that would be gone.
        blocks: u64,
    },
    /// A call by key on a store of swap slots.
    #[error("the store was opened as swap space, which has no keys")]
    NotKeyed,
    /// The file system has less room than the slab needs.
    #[error("asked for {asked} bytes in {}, {available} are available", path.display())]
    NoSpace {
        /// Directory of the slab.
        path: PathBuf,
        /// Bytes of the whole slab.
        asked: u64,
        /// Bytes that the file system offers.
        available: u64,
    },
    /// The file would be larger than allowed.
    #[error("asked for a file of {asked} bytes in {}, the limit is {limit}", path.display())]
    FileTooLarge {
        /// Directory of the slab.
        path: PathBuf,
        /// Bytes of the whole slab.
        asked: u64,
        /// Bytes that the process or the file system allows, if known.
        limit: String,
    },
    /// The size holds no slot.
    #[error(
        "size is {size} bytes, must be at least {}: one slot of {stride} and a superblock of {superblock}",
        stride.saturating_add(*superblock)
    )]
    TooSmall {
        /// Bytes allowed.
        size: u64,
        /// Bytes of one slot with its header.
        stride: u64,
        /// Bytes before the first slot.
        superblock: u64,
    },
    /// More slots were asked for than the size holds.
    #[error("asked for {wanted} slots of {stride} bytes, size is {size} bytes and holds {fits}")]
    TooManySlots {
        /// Slots asked for.
        wanted: u64,
        /// Bytes of one slot with its header.
        stride: u64,
        /// Bytes allowed.
        size: u64,
        /// Slots that fit.
        fits: u64,
    },
    /// Direct I/O was required and the file system refuses it.
    #[error("direct=on, but {} refuses direct I/O: {reason}", path.display())]
    DirectRefused {
        /// Directory of the slab.
        path: PathBuf,
        /// The system's reason.
        reason: String,
    },
    /// An option is invalid.
    #[error("{what} is {found}, must be {must}")]
    InvalidOption {
        /// Name of the option.
        what: &'static str,
        /// Its value.
        found: u64,
        /// What it must be.
        must: String,
    },
    /// A slot lies outside the store.
    #[error("slot {slot} is out of range, the store has {slots} slots")]
    SlotOutOfRange {
        /// The slot.
        slot: i64,
        /// Slots of the store.
        slots: u32,
    },
    /// A batch writes a slot twice.
    #[error("slot {slot} is written twice in one batch")]
    RepeatedSlot {
        /// The slot.
        slot: i64,
    },
    /// The rows do not match the slots.
    #[error("rows hold {found} bytes, {slots} slots of {payload_bytes} bytes need {expected}")]
    WrongLength {
        /// Bytes given.
        found: usize,
        /// Slots named.
        slots: usize,
        /// Bytes of a block.
        payload_bytes: usize,
        /// Bytes needed.
        expected: usize,
    },
    /// The owners do not match the keys.
    #[error("{found} owners for {keys} keys, must be one per key")]
    WrongOwners {
        /// Owners given.
        found: usize,
        /// Keys named.
        keys: usize,
    },
    /// The ticket was never issued or has been collected.
    #[error("ticket {ticket} is not open")]
    UnknownTicket {
        /// The ticket.
        ticket: u64,
    },
    /// The store has been closed.
    #[error("the store is closed")]
    Closed,
    /// The store was opened by another process, of which this one is a fork.
    #[error("the store was opened by process {owner}, process {here} must open its own")]
    Forked {
        /// Process that opened the store.
        owner: u32,
        /// This process.
        here: u32,
    },
}
