//! Ids of blocks, sequences, tickets, pins and tiers, as distinct types so that they cannot be confused.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Where a block lives. Block ids count from 0 in each tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Tier {
    /// The memory that attention kernels read: a GPU's, or CPU tensors where there is none.
    Device,
    /// Host memory, pinned where there is a GPU.
    Host,
    /// A file, a Redis or Valkey server, an object store or a plug-in.
    External,
}

impl Tier {
    /// All tiers, fastest first.
    pub const ALL: [Self; 3] = [Self::Device, Self::Host, Self::External];

    /// The tier's name in messages and in Python.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::External => "external",
        }
    }

    /// The tier of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|tier| tier.name() == name)
    }

    /// Position in arrays with one entry per tier.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One block of one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockId(pub u32);

impl BlockId {
    /// Position in arrays with one entry per block.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A sequence: the manager's number, a row of its table store and that row's generation. So a handle of another
/// manager, or one used after `free`, is rejected and never refers to another sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct SequenceId(pub u64);

impl SequenceId {
    const FIELD_BITS: u32 = 24;

    /// Largest row, and largest generation of a row.
    pub const FIELD_MAX: u32 = (1 << Self::FIELD_BITS) - 1;

    /// Joins a manager's number, a row and its generation, each of the latter at most [`Self::FIELD_MAX`].
    #[must_use]
    pub const fn new(manager: u16, row: u32, generation: u32) -> Self {
        let (row, generation) = (row & Self::FIELD_MAX, generation & Self::FIELD_MAX);
        Self((manager as u64) << (2 * Self::FIELD_BITS) | (generation as u64) << Self::FIELD_BITS | row as u64)
    }

    /// Number of the manager that issued the handle.
    #[must_use]
    pub const fn manager(self) -> u16 {
        (self.0 >> (2 * Self::FIELD_BITS)) as u16
    }

    /// Row of the table store.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "masked to 24 bits")]
    pub const fn row(self) -> u32 {
        (self.0 & Self::FIELD_MAX as u64) as u32
    }

    /// Generation of the row when the handle was issued.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "masked to 24 bits")]
    pub const fn generation(self) -> u32 {
        (self.0 >> Self::FIELD_BITS & Self::FIELD_MAX as u64) as u32
    }
}

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One step's transfers, until they are completed or failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[repr(transparent)]
pub struct TicketId(pub u64);

impl fmt::Display for TicketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Cached blocks that are kept for a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct PinId(pub u64);

impl fmt::Display for PinId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Blocks that are kept for a prompt that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A prefix-store load or write in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_returns_its_parts() {
        for parts in [(0, 7, SequenceId::FIELD_MAX), (u16::MAX, SequenceId::FIELD_MAX, 0), (3, 1, 2)] {
            let id = SequenceId::new(parts.0, parts.1, parts.2);
            assert_eq!((id.manager(), id.row(), id.generation()), parts);
        }
    }

    #[test]
    fn tier_names_round_trip() {
        for tier in Tier::ALL {
            assert_eq!(Tier::from_name(tier.name()), Some(tier));
        }
        assert_eq!(Tier::from_name("gpu"), None);
    }
}
