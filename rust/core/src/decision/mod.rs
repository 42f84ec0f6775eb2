//! The result of a scheduler step: typed pairs of block ids. See `docs/decisions/0001-step-decision.md`.

mod envelope;
mod wire;

use crate::id::{TicketId, Tier};
use serde::{Deserialize, Serialize};

pub use envelope::DECISION_VERSION;
pub use wire::MAX_DECISION_BYTES;

/// What a transfer is for. The order of the variants is the order in which one step's transfers are safe to run:
/// reads of device blocks first, then loads, then copies; new tokens write last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Kind {
    /// Away from the device: device to host, or either to external.
    SwapOut,
    /// Towards the device: external to host, or either to device.
    SwapIn,
    /// Copy-on-write within the device.
    Copy,
    /// Defragmentation, into holes.
    Move,
    /// Defragmentation, pairwise.
    Exchange,
}

impl Kind {
    /// All kinds, in the order in which they are safe to run.
    pub const ALL: [Self; 5] = [Self::SwapOut, Self::SwapIn, Self::Copy, Self::Move, Self::Exchange];

    /// The kind's name in Python.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SwapOut => "swap_out",
            Self::SwapIn => "swap_in",
            Self::Copy => "copy",
            Self::Move => "move",
            Self::Exchange => "exchange",
        }
    }
}

/// Pairs of block ids of one page class between two tiers, `[from, to]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pairs {
    /// Tier that is read.
    pub src: Tier,
    /// Tier that is written.
    pub dst: Tier,
    /// Page class of the blocks; 0 if there is only one.
    pub page_class: u8,
    /// `[from, to]`; ids are 0-based in their tier and page class, and no destination repeats.
    pub ids: Vec<[u32; 2]>,
}

/// The transfers of one step, and the ticket that holds leases on all their blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a decision that is not carried out leaves its blocks leased forever"]
pub struct StepDecision {
    /// Complete it once all bytes have landed, or fail it if some did not.
    pub ticket: TicketId,
    /// Tickets, possibly this one too, whose device reads must finish before this step writes to the device, because it
    /// reuses blocks that they read.
    pub after: Vec<TicketId>,
    /// Kinds and pairs in the order in which they are safe to run; no entry is empty.
    pub transfers: Vec<(Kind, Pairs)>,
    /// Whether the step computes nothing from what it loads, so need not wait for its loads.
    pub prefetch: bool,
}

impl StepDecision {
    /// Pairs of one kind, one entry per pair of tiers and page class.
    pub fn of(&self, kind: Kind) -> impl Iterator<Item = &Pairs> {
        self.transfers.iter().filter(move |(k, _)| *k == kind).map(|(_, pairs)| pairs)
    }

    /// Pairs of all kinds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.transfers.iter().map(|(_, pairs)| pairs.ids.len()).sum()
    }

    /// Whether there are no transfers.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.transfers.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_gives_one_entry_for_each_pair_of_tiers() {
        let pairs = |src, ids: &[[u32; 2]]| Pairs { src, dst: Tier::External, page_class: 0, ids: ids.to_vec() };
        let transfers = vec![
            (Kind::SwapOut, pairs(Tier::Device, &[[1, 2]])),
            (Kind::SwapOut, pairs(Tier::Host, &[[3, 4], [5, 6]])),
        ];
        let decision = StepDecision { ticket: TicketId(1), after: Vec::new(), transfers, prefetch: false };
        assert!(decision.of(Kind::SwapOut).map(|pairs| pairs.src).eq([Tier::Device, Tier::Host]));
        assert_eq!(decision.of(Kind::Copy).count(), 0);
        assert_eq!(decision.len(), 3);
        assert!(!decision.is_empty());
    }

    #[test]
    fn device_reads_come_before_loads_and_loads_before_copies() {
        assert!(Kind::ALL.is_sorted());
        assert!(Kind::SwapOut < Kind::SwapIn && Kind::SwapIn < Kind::Copy);
    }
}
