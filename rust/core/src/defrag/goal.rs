//! Goals for the positions of blocks.

use crate::error::{Error, Result};
use crate::placement::BlockMap;

/// A goal of defragmentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// No live block has an id above this one.
    MaxId(u32),
    /// This many blocks at the end of the pool are free.
    FreeTail(u32),
    /// Live blocks lie as low as possible, with at most this many ids of slack at the top.
    Dense(u32),
    /// None of the given sequences has more than this many runs.
    Contiguous(u32),
}

impl Goal {
    /// The goal's name in messages and in Python.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::MaxId(_) => "max_id",
            Self::FreeTail(_) => "free_tail",
            Self::Dense(_) => "dense",
            Self::Contiguous(_) => "contiguous",
        }
    }

    /// The goal's number.
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            Self::MaxId(n) | Self::FreeTail(n) | Self::Dense(n) | Self::Contiguous(n) => n,
        }
    }

    /// The goal of that name.
    ///
    /// # Errors
    /// [`Error::UnknownGoal`] if there is no such goal, [`Error::InvalidArgument`] if the number of runs is 0.
    pub fn from_name(name: &str, number: u32) -> Result<Self> {
        match name {
            "max_id" => Ok(Self::MaxId(number)),
            "free_tail" => Ok(Self::FreeTail(number)),
            "dense" => Ok(Self::Dense(number)),
            "contiguous" if number > 0 => Ok(Self::Contiguous(number)),
            "contiguous" => Err(Error::InvalidArgument { what: "runs", found: 0, must: "at least 1".to_owned() }),
            _ => Err(Error::UnknownGoal { name: name.to_owned() }),
        }
    }

    /// First id that must be free of live blocks; meaningless for runs.
    pub(super) fn end(self, places: &BlockMap) -> u32 {
        match self {
            Self::MaxId(n) => n.saturating_add(1).min(places.capacity()),
            Self::FreeTail(k) => places.capacity().saturating_sub(k),
            Self::Dense(margin) => {
                let densest = places.densest().map_or(0, |block| block.0 + 1);
                densest.saturating_add(margin).min(places.capacity())
            }
            Self::Contiguous(_) => places.capacity(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_others_are_refused() {
        for goal in [Goal::MaxId(3), Goal::FreeTail(0), Goal::Dense(64), Goal::Contiguous(4)] {
            assert_eq!(Goal::from_name(goal.name(), goal.number()), Ok(goal));
        }
        assert!(Goal::from_name("contiguous", 0).is_err());
        assert!(Goal::from_name("tidy", 1).is_err());
    }
}
