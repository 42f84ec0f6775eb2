//! Errors of a call; nothing has been copied.

/// A fault in the caches or in the named rows; nothing has been copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    /// An entry of a mapping names a block that does not exist.
    #[error("entry {entry}: block {block} cannot be {verb}, there are {blocks} blocks")]
    OutOfRange {
        /// Its index in the list.
        entry: usize,
        /// The id that it names.
        block: i64,
        /// What the entry does to the block.
        verb: &'static str,
        /// Number of blocks.
        blocks: usize,
    },
    /// A block is written, or exchanged, twice.
    #[error("block {block} is {verb} twice, by entries {first} and {second}")]
    Repeated {
        /// The block.
        block: u32,
        /// What is done to it.
        verb: &'static str,
        /// The first entry that names it.
        first: usize,
        /// The second, which may be the same.
        second: usize,
    },
    /// A block is read and written by a copy within caches.
    #[error("block {block} is both read (pair {entry}) and written in one copy")]
    ReadAndWritten {
        /// Index of the entry that reads it.
        entry: usize,
        /// The block.
        block: u32,
    },
    /// A mapping names blocks that the caches do not have.
    #[error("a mapping up to block {last} does not fit caches of {rows} blocks")]
    Reach {
        /// The highest block that it names.
        last: usize,
        /// Blocks of the caches.
        rows: usize,
    },
    /// A mapping between caches was run within caches, or the other way round.
    #[error("a mapping by the rule {rule:?} cannot be run {place}")]
    Place {
        /// Its rule.
        rule: &'static str,
        /// Where it cannot be run.
        place: &'static str,
    },
    /// The numbers of caches to read and to write differ.
    #[error("cannot copy {read} caches to {written}")]
    Caches {
        /// Caches that are read.
        read: usize,
        /// Caches that are written.
        written: usize,
    },
    /// A cache is copied to one with other rows.
    #[error("cannot copy rows of {read} bytes to rows of {written} bytes, in cache {cache}")]
    Widths {
        /// Its index in the list.
        cache: usize,
        /// Bytes of a row that is read.
        read: usize,
        /// Bytes of a row that is written.
        written: usize,
    },
    /// Two caches that are written share memory.
    #[error("caches {one} and {other} share memory")]
    Shared {
        /// Index of one of them.
        one: usize,
        /// Index of the other.
        other: usize,
    },
    /// A cache that is read and one that is written share memory.
    #[error("cache {read} to read and cache {written} to write share memory")]
    ReadAndWrittenCaches {
        /// Index among the caches to read.
        read: usize,
        /// Index among the caches to write.
        written: usize,
    },
    /// There is not enough memory to set rows aside.
    #[error("asked for {bytes} bytes, which the system does not have")]
    OutOfMemory {
        /// Bytes that were asked for.
        bytes: usize,
    },
}
