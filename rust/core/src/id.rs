//! Ids of blocks, sequences, tickets, pins and tiers. Each is a type of its own, so that one is never
//! taken for another.

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

    /// Position in arrays that hold one entry a tier.
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[repr(transparent)]
pub struct BlockId(pub u32);

impl BlockId {
    /// Position in arrays that hold one entry a block.
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

/// A sequence: a row of the table store and that row's generation, so that a handle kept past `free` is
/// recognised and never means a later sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[repr(transparent)]
pub struct SequenceId(pub u64);

impl SequenceId {
    /// Joins a row and its generation.
    #[must_use]
    pub const fn new(row: u32, generation: u32) -> Self {
        Self((generation as u64) << 32 | row as u64)
    }

    /// Row of the table store.
    #[must_use]
    pub const fn row(self) -> u32 {
        (self.0 & 0xFFFF_FFFF) as u32
    }

    /// Generation that the row had when the handle was given out.
    #[must_use]
    pub const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (generation {})", self.row(), self.generation())
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

/// Load or write of a prefix store that is under way.
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
    fn handle_gives_back_row_and_generation() {
        let id = SequenceId::new(7, u32::MAX);
        assert_eq!((id.row(), id.generation()), (7, u32::MAX));
    }

    #[test]
    fn tier_names_round_trip() {
        for tier in Tier::ALL {
            assert_eq!(Tier::from_name(tier.name()), Some(tier));
        }
        assert_eq!(Tier::from_name("gpu"), None);
    }
}
