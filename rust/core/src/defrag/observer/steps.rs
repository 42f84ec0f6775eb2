//! An observer's steps: plan, and commit once the bytes have moved.

use super::Observer;
use crate::defrag::facts::{Budget, Facts, HoleUse};
use crate::defrag::plan::Plan;
use crate::defrag::planner::Planner;
use crate::error::Result;
use crate::id::BlockId;
use crate::placement::Occupancy;
use crate::reuse::BlockSet;
use std::collections::HashSet;

/// The observer's facts for a planner.
struct Known<'a> {
    blank: &'a BlockSet,
    hot: HashSet<u32>,
}

impl Facts for Known<'_> {
    fn hole_use(&self, hole: BlockId) -> HoleUse {
        if self.blank.contains(hole) { HoleUse::Move } else { HoleUse::Exchange }
    }

    fn is_hot(&self, live: BlockId) -> bool {
        !self.hot.is_empty() && self.hot.contains(&live.0)
    }
}

impl Observer {
    /// The moves that the planner's goals ask for now; nothing changes until [`Observer::commit`]. Holes that may be
    /// cached are exchanged.
    ///
    /// # Arguments
    /// `sequences` are the ids of sequences, most important first; null ids are skipped. `hot` are ids of running
    /// sequences.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) if an id is out of range.
    pub fn plan(&mut self, planner: &mut Planner, sequences: &[Vec<u32>], hot: &[u32], budget: Budget) -> Result<Plan> {
        let tables = self.tables(sequences)?;
        self.reach(hot)?;
        let tables: Vec<&[BlockId]> = tables.iter().map(Vec::as_slice).collect();
        let hot = hot.iter().map(|&id| self.forward[id as usize]).collect();
        let known = Known { blank: &self.blank, hot };
        Ok(planner.plan(&mut self.places, &tables, &known, budget))
    }

    /// Runs in which the blocks of sequences of ids lie. See [`runs`](crate::defrag::runs()).
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) if an id is out of range.
    pub fn runs(&mut self, sequences: &[Vec<u32>]) -> Result<(usize, usize)> {
        let tables = self.tables(sequences)?;
        Ok(crate::defrag::runs(&tables.iter().map(Vec::as_slice).collect::<Vec<_>>()))
    }

    /// The blocks of sequences of ids, without null blocks.
    fn tables(&mut self, sequences: &[Vec<u32>]) -> Result<Vec<Vec<BlockId>>> {
        for ids in sequences {
            self.reach(ids)?;
        }
        let blocks =
            |ids: &Vec<u32>| ids.iter().filter(|&&id| id != 0).map(|&id| BlockId(self.forward[id as usize])).collect();
        Ok(sequences.iter().map(blocks).collect())
    }

    /// Whether a block is a hole whose bytes will never be read, so that a one-way move into it suffices.
    #[must_use]
    pub fn is_blank(&self, block: BlockId) -> bool {
        self.blank.contains(block)
    }

    /// Commits a plan's pairs whose bytes have moved: the two ids of each pair swap blocks.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) if the plan no longer fits; nothing has changed.
    pub fn commit(&mut self, pairs: &[[u32; 2]]) -> Result<()> {
        self.places.check_pairs(pairs)?;
        for &[from, to] in pairs {
            self.swap_places(from, to);
            self.places.set(BlockId(from), Occupancy::Hole);
            self.places.set(BlockId(to), Occupancy::Live);
            if self.blank.remove(BlockId(to)) {
                self.blank.insert(BlockId(from));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::defrag::{Goal, Wanted};

    #[test]
    fn blank_holes_are_moved_into_before_cached_ones_are_exchanged_and_hot_ids_come_last() -> Result<()> {
        let mut observer = Observer::new(32, 32).unwrap();
        observer.use_ids(&[20, 21, 22, 23])?;
        observer.forget_ids(&[2, 3])?;
        let mut planner = Planner::new(&[Wanted::from(Goal::Dense(0))]);
        let plan = observer.plan(&mut planner, &[], &[23, 22], Budget::of_moves(3))?;
        assert_eq!((plan.moves(), plan.exchanges()), (&[[20, 2], [21, 3]][..], &[[23, 1]][..]));
        assert_eq!((plan.writes(), plan.left), (4, 1));
        observer.commit(&plan.pairs)?;
        assert_eq!([20, 21, 22, 23].map(|id| observer.resolve(id)), [2, 3, 22, 1]);
        assert!(!observer.is_blank(BlockId(2)) && observer.is_blank(BlockId(20)) && !observer.is_blank(BlockId(23)));
        assert!(observer.plan(&mut planner, &[vec![32]], &[], Budget::UNLIMITED).is_err());
        assert_eq!(observer.runs(&[vec![0, 20, 21, 22], vec![20, 21]])?, (2, 2));
        observer.check()
    }
}
