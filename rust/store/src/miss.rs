//! Why a block was not read or written. A miss is counted and reported; it is never an error of the engine.

/// Why one block of a batch failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Miss {
    /// The slot was never written by this store.
    Empty,
    /// The last write to the slot failed, was abandoned or was refused.
    Lost,
    /// The store has no block under the key.
    Absent,
    /// The header does not start with the magic bytes.
    Magic,
    /// The header has another format version.
    Version,
    /// The header's own checksum does not match: damaged on the medium.
    HeaderChecksum,
    /// The block was written under another namespace.
    Namespace,
    /// The block has another key.
    Key,
    /// The block was written for another slot.
    Slot,
    /// The block is from another write: the last one never reached the medium.
    Generation,
    /// The payload has another length.
    Length,
    /// The payload's checksum does not match: damaged or torn.
    PayloadChecksum,
    /// The file ends before the block does.
    Truncated,
    /// The system reported an error.
    Io,
    /// The ticket's deadline passed first.
    Timeout,
    /// The store's memory for blocks in flight was exhausted when the batch was submitted.
    QueueFull,
    /// The store was closed first.
    Closed,
    /// The device has not confirmed yet that everything was forgotten.
    Forgotten,
    /// The tenant is beyond its quota.
    Refused,
}

impl Miss {
    /// All reasons, in the order of the type.
    pub const ALL: [Self; 19] = [
        Self::Empty,
        Self::Lost,
        Self::Absent,
        Self::Magic,
        Self::Version,
        Self::HeaderChecksum,
        Self::Namespace,
        Self::Key,
        Self::Slot,
        Self::Generation,
        Self::Length,
        Self::PayloadChecksum,
        Self::Truncated,
        Self::Io,
        Self::Timeout,
        Self::QueueFull,
        Self::Closed,
        Self::Forgotten,
        Self::Refused,
    ];

    /// The reason's name in counters, messages and Python.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Lost => "lost",
            Self::Absent => "absent",
            Self::Magic => "magic",
            Self::Version => "version",
            Self::HeaderChecksum => "header_checksum",
            Self::Namespace => "namespace",
            Self::Key => "key",
            Self::Slot => "slot",
            Self::Generation => "generation",
            Self::Length => "length",
            Self::PayloadChecksum => "payload_checksum",
            Self::Truncated => "truncated",
            Self::Io => "io",
            Self::Timeout => "timeout",
            Self::QueueFull => "queue_full",
            Self::Closed => "closed",
            Self::Forgotten => "forgotten",
            Self::Refused => "refused",
        }
    }

    /// Position in arrays with one counter per reason.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_stands_at_its_own_index() {
        for (i, miss) in Miss::ALL.into_iter().enumerate() {
            assert_eq!(miss.index(), i);
        }
    }
}
