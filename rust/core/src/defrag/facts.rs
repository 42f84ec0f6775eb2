//! What a planner asks the owner of the blocks, and the budget it may spend.

use crate::id::BlockId;
use crate::reuse::BlockSet;

/// What happens to a hole's bytes when a block moves into it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HoleUse {
    /// It is empty: its bytes are overwritten.
    #[default]
    Move,
    /// It is cached and may be evicted: its key is dropped and its bytes are overwritten.
    Drop,
    /// Its bytes are kept: the two blocks change places. If it is among [`Facts::content`], its bytes move on to an
    /// empty hole instead, or are dropped if there is none.
    Exchange,
    /// No block may move into it now.
    Never,
}

/// Per-block knowledge of the owner; queried only for the blocks that a plan considers.
pub trait Facts {
    /// How a hole may be used; the owner's policy decides for cached ones.
    fn hole_use(&self, hole: BlockId) -> HoleUse {
        let _ = hole;
        HoleUse::Move
    }

    /// Holes with cached content. Goals that want blocks to be empty count it as in the way. `None`: no content is ever
    /// in the way.
    fn content(&self) -> Option<&BlockSet> {
        None
    }

    /// Whether a live block belongs to a running sequence; it moves only if nothing else can.
    fn is_hot(&self, live: BlockId) -> bool {
        let _ = live;
        false
    }

    /// Whether a live block may move now, apart from its occupancy.
    fn may_leave(&self, live: BlockId) -> bool {
        let _ = live;
        true
    }
}

/// All holes are blank, nothing is hot, and every live block may move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plain;

impl Facts for Plain {}

/// Limits of one plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Pairs.
    pub moves: usize,
    /// Bytes written: those of a block for a move, twice as many for an exchange.
    pub bytes: u64,
    /// Bytes of a block, all layers; 0 makes `bytes` meaningless.
    pub block_bytes: u64,
}

impl Budget {
    /// No limits.
    pub const UNLIMITED: Self = Self { moves: usize::MAX, bytes: u64::MAX, block_bytes: 0 };

    /// At most `moves` pairs, without a byte limit.
    #[must_use]
    pub const fn of_moves(moves: usize) -> Self {
        Self { moves, ..Self::UNLIMITED }
    }

    /// Number of pairs it allows if none is an exchange.
    #[must_use]
    pub fn one_way(self) -> usize {
        Remaining::new(self).buys(HoleUse::Move)
    }
}

/// The remaining budget during planning.
#[derive(Clone, Copy, Debug)]
pub(super) struct Remaining {
    pub(super) moves: usize,
    /// Blocks that may still be written.
    pub(super) writes: usize,
}

impl Remaining {
    pub(super) fn new(budget: Budget) -> Self {
        let writes = budget
            .bytes
            .checked_div(budget.block_bytes)
            .map_or(usize::MAX, |writes| usize::try_from(writes).unwrap_or(usize::MAX));
        Self { moves: budget.moves, writes }
    }

    /// Number of pairs of that kind it still allows.
    pub(super) fn buys(self, hole_use: HoleUse) -> usize {
        self.moves.min(if hole_use == HoleUse::Exchange { self.writes / 2 } else { self.writes })
    }

    /// Refunds a pair.
    pub(super) fn refund(&mut self, hole_use: HoleUse) {
        self.moves += 1;
        self.writes += if hole_use == HoleUse::Exchange { 2 } else { 1 };
    }

    pub(super) fn pay(&mut self, hole_use: HoleUse, pairs: usize) {
        self.moves -= pairs;
        self.writes -= pairs * if hole_use == HoleUse::Exchange { 2 } else { 1 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exchange_writes_twice() {
        let mut budget_left = Remaining::new(Budget { moves: 10, bytes: 5 * 64 + 63, block_bytes: 64 });
        assert_eq!((budget_left.buys(HoleUse::Move), budget_left.buys(HoleUse::Exchange)), (5, 2));
        budget_left.pay(HoleUse::Exchange, 2);
        budget_left.pay(HoleUse::Drop, 1);
        assert_eq!((budget_left.buys(HoleUse::Move), budget_left.moves), (0, 7));
        assert_eq!(Remaining::new(Budget::of_moves(3)).buys(HoleUse::Exchange), 3);
        assert_eq!(Budget { moves: 10, bytes: 127, block_bytes: 64 }.one_way(), 1);
    }

    #[test]
    fn a_refund_gives_back_what_a_pair_cost() {
        for hole_use in [HoleUse::Move, HoleUse::Drop, HoleUse::Exchange] {
            let mut budget_left = Remaining::new(Budget { moves: 10, bytes: 64 * 64, block_bytes: 64 });
            let before = (budget_left.moves, budget_left.writes);
            budget_left.pay(hole_use, 3);
            (0..3).for_each(|_| budget_left.refund(hole_use));
            assert_eq!((budget_left.moves, budget_left.writes), before, "{hole_use:?}");
        }
    }
}
