//! What can be wrong with a call. Nothing has been copied then.

/// What is wrong with the caches, or with the rows that are named; nothing has been copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    /// A pair names a row that there is not.
    #[error("pair {pair} names row {row}, there are {rows}")]
    OutOfRange {
        /// Its place in the list.
        pair: usize,
        /// The row it names.
        row: u32,
        /// Rows that there are.
        rows: usize,
    },
    /// There are not as many caches to write as to read.
    #[error("{read} caches are to be copied to {written}")]
    Caches {
        /// Caches that are read.
        read: usize,
        /// Caches that are written.
        written: usize,
    },
    /// A cache is copied to one with other rows.
    #[error("rows of {read} bytes are to be copied to rows of {written}, in cache {cache}")]
    Widths {
        /// Its place in the list.
        cache: usize,
        /// Bytes of a row that is read.
        read: usize,
        /// Bytes of a row that is written.
        written: usize,
    },
    /// A row is written, or exchanged, twice.
    #[error("row {row} is written twice, by pairs {first} and {second}")]
    Repeated {
        /// The row.
        row: u32,
        /// The first pair that names it.
        first: usize,
        /// The second, which may be the same.
        second: usize,
    },
    /// A row is read and written by a copy within caches.
    #[error("pair {pair} reads row {row}, which is written too")]
    ReadAndWritten {
        /// Place of the pair that reads it.
        pair: usize,
        /// The row.
        row: u32,
    },
    /// Two caches that are written share memory.
    #[error("caches {one} and {other} share memory")]
    Shared {
        /// Place of the one in the list.
        one: usize,
        /// Place of the other.
        other: usize,
    },
    /// A cache that is read and one that is written share memory.
    #[error("cache {read} to read and cache {written} to write share memory")]
    ReadAndWrittenCaches {
        /// Place among the caches that are read.
        read: usize,
        /// Place among those that are written.
        written: usize,
    },
    /// There is no memory for what has to be set aside.
    #[error("asked for {bytes} bytes, the system has not so many")]
    OutOfMemory {
        /// Bytes that were asked for.
        bytes: usize,
    },
}
