//! One ticket: the leases of its transfers, and the actions once their bytes have landed.

use crate::block::{BlockVersion, LeaseKind, TierBlock};
use crate::event::PublishedEvent;
use crate::id::{BlockId, Tier};
use crate::prefix::CachedIdentity;
use crate::prefix::evict::Rank;
use crate::transfer::Run;

/// One block held by one ticket or pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Lease {
    /// Tier of the block.
    pub(crate) tier: Tier,
    /// How the transfer uses it.
    pub(crate) kind: LeaseKind,
    /// The block.
    pub(crate) block: BlockId,
}

/// Leases of a ticket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Held {
    One(Lease),
    Runs(HeldRuns),
    /// A device block that was evicted, the host block that it is copied to, and its segment or level.
    Evicted(BlockId, BlockId, u8),
}

/// Leases on all blocks of some runs: those read, and those written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeldRuns {
    pub(crate) from: Tier,
    /// How the transfer uses its source blocks.
    pub(crate) reads: LeaseKind,
    pub(crate) to: Tier,
    pub(crate) runs: Vec<Run>,
}

/// A block to publish once its bytes have landed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingPublish {
    pub(crate) from: TierBlock,
    pub(crate) to: TierBlock,
    pub(crate) identity: CachedIdentity,
    /// Whether it is found in its new place by its key. If not, whoever uses it there publishes it with others.
    pub(crate) is_found: bool,
    /// Whether the unused source is freed in favor of its copy.
    pub(crate) demotes: bool,
    /// Its place in the eviction order of both tiers, if it has one.
    pub(crate) rank: Option<Rank>,
    /// The event that published the source, with events on.
    pub(crate) event: Option<PublishedEvent>,
}

/// Cached contents that can be found in a block once their bytes have landed there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PendingRehome {
    pub(crate) from: BlockId,
    pub(crate) to: BlockId,
    pub(crate) identity: CachedIdentity,
    /// The event that published the source, with events on.
    pub(crate) event: Option<PublishedEvent>,
}

/// Device blocks whose bytes are moving to others. The targets are filled under the ticket.
#[derive(Debug, Clone, Default)]
pub(crate) struct PendingMoves {
    /// `[from, to]`: tables name the source until the ticket has ended.
    pub(crate) moves: Vec<[u32; 2]>,
    /// Cached blocks that some of these moves overwrite. They cannot be found until the ticket has ended.
    pub(crate) rehomes: Vec<PendingRehome>,
}

impl PendingMoves {
    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.moves.is_empty() && self.rehomes.is_empty()
    }

    /// `[from, to]` of all.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = [u32; 2]> {
        self.moves.iter().copied().chain(self.rehomes.iter().map(|rehome| [rehome.from.0, rehome.to.0]))
    }
}

/// Fields that few tickets need.
#[derive(Debug, Clone, Default)]
struct Rare {
    moves: PendingMoves,
    publishes: Vec<PendingPublish>,
    /// Whether its step does not compute with its loads, so does not wait for them.
    prefetch: bool,
}

/// One step's transfers, until they are completed or failed.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ticket {
    /// In acquisition order.
    leases: Vec<Held>,
    /// Device bytes that its copies read and wrote.
    copies: Vec<[BlockVersion; 2]>,
    rare: Option<Box<Rare>>,
}

const NO_PUBLISHES: &[PendingPublish] = &[];

impl Ticket {
    /// Notes a lease.
    pub(super) fn lease(&mut self, lease: Lease) {
        self.leases.push(Held::One(lease));
    }

    /// Notes leases on an evicted block and on its copy.
    pub(super) fn lease_evicted(&mut self, from: BlockId, to: BlockId, ring: u8) {
        self.leases.push(Held::Evicted(from, to, ring));
    }

    /// Notes leases on all blocks of a run.
    pub(super) fn lease_run(&mut self, from: Tier, reads: LeaseKind, to: Tier, run: Run) {
        match self.leases.last_mut() {
            Some(Held::Runs(held)) if (held.from, held.reads, held.to) == (from, reads, to) => held.runs.push(run),
            _ => self.leases.push(Held::Runs(HeldRuns { from, reads, to, runs: vec![run] })),
        }
    }

    pub(super) fn set_copies(&mut self, copies: Vec<[BlockVersion; 2]>) {
        self.copies = copies;
    }

    pub(super) fn take_copies(&mut self) -> Vec<[BlockVersion; 2]> {
        std::mem::take(&mut self.copies)
    }

    pub(super) fn copies(&self) -> &[[BlockVersion; 2]] {
        &self.copies
    }

    /// Its leases in acquisition order, without targets of moves.
    pub(crate) fn held(&self) -> &[Held] {
        &self.leases
    }

    /// All leases, those on the targets of moves last.
    pub(crate) fn leases(&self) -> impl Iterator<Item = Lease> {
        let targets = self.rare.iter().flat_map(|rare| rare.moves.pairs());
        let targets = targets.map(|[_, to]| Lease { tier: Tier::Device, kind: LeaseKind::Write, block: BlockId(to) });
        self.leases.iter().flat_map(Held::leases).chain(targets)
    }

    /// Blocks that its transfers write.
    pub(crate) fn written(&self) -> impl Iterator<Item = TierBlock> {
        self.leases().filter(|lease| lease.kind == LeaseKind::Write).map(|lease| (lease.tier, lease.block))
    }

    /// Whether it reads device blocks that may already have been reallocated.
    pub(super) fn is_overlapped(&self) -> bool {
        self.leases.iter().any(Held::is_overlappable)
    }

    /// Moves under way.
    pub(crate) fn move_pairs(&self) -> impl Iterator<Item = [u32; 2]> {
        self.rare.iter().flat_map(|rare| rare.moves.pairs())
    }

    /// Cached contents that its moves bring to other blocks.
    pub(super) fn rehomes(&self) -> impl Iterator<Item = &PendingRehome> {
        self.rare.iter().flat_map(|rare| &rare.moves.rehomes)
    }

    /// Takes the moves.
    pub(crate) fn take_moves(&mut self) -> PendingMoves {
        self.rare.as_mut().map(|rare| std::mem::take(&mut rare.moves)).unwrap_or_default()
    }

    /// The moves, mutable.
    pub(crate) fn moves_mut(&mut self) -> &mut PendingMoves {
        &mut self.rare_mut().moves
    }

    /// Blocks to publish once their bytes have landed.
    pub(crate) fn publishes(&self) -> &[PendingPublish] {
        self.rare.as_ref().map_or(NO_PUBLISHES, |rare| &rare.publishes)
    }

    /// Like [`Ticket::publishes`], mutable; `None` if there never were any.
    pub(crate) fn publishes_mut(&mut self) -> Option<&mut Vec<PendingPublish>> {
        self.rare.as_mut().map(|rare| &mut rare.publishes)
    }

    pub(super) fn publish(&mut self, pending: PendingPublish) {
        self.rare_mut().publishes.push(pending);
    }

    pub(super) fn is_prefetch(&self) -> bool {
        self.rare.as_ref().is_some_and(|rare| rare.prefetch)
    }

    pub(super) fn set_prefetch(&mut self) {
        self.rare_mut().prefetch = true;
    }

    fn rare_mut(&mut self) -> &mut Rare {
        self.rare.get_or_insert_default()
    }
}

impl Held {
    fn leases(&self) -> impl Iterator<Item = Lease> {
        let (pair, held) = match self {
            Self::One(lease) => ([Some(*lease), None], None),
            Self::Runs(held) => ([None, None], Some(held)),
            Self::Evicted(from, to, _) => (evicted(*from, *to).map(Some), None),
        };
        let of_runs = held.into_iter().flat_map(|held| held.runs.iter().flat_map(|run| held.of(*run)));
        pair.into_iter().flatten().chain(of_runs)
    }

    fn is_overlappable(&self) -> bool {
        match self {
            Self::One(lease) => lease.kind == LeaseKind::OverlappableRead,
            Self::Runs(held) => held.reads == LeaseKind::OverlappableRead,
            Self::Evicted(..) => true,
        }
    }
}

/// The leases on an evicted block and on its copy.
pub(crate) fn evicted(from: BlockId, to: BlockId) -> [Lease; 2] {
    let read = Lease { tier: Tier::Device, kind: LeaseKind::OverlappableRead, block: from };
    [read, Lease { tier: Tier::Host, kind: LeaseKind::Write, block: to }]
}

impl HeldRuns {
    fn of(&self, run: Run) -> impl Iterator<Item = Lease> + use<> {
        let Self { from, reads, to, .. } = *self;
        (0..run.len).flat_map(move |i| {
            let read = Lease { tier: from, kind: reads, block: BlockId(run.src + i) };
            [read, Lease { tier: to, kind: LeaseKind::Write, block: BlockId(run.dst + i) }]
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_hold_both_their_sides_and_keep_the_order_of_the_leases() {
        let mut ticket = Ticket::default();
        let one = Lease { tier: Tier::Device, kind: LeaseKind::Read, block: BlockId(9) };
        let reads = LeaseKind::OverlappableRead;
        ticket.lease_run(Tier::Device, reads, Tier::Host, Run { src: 1, dst: 4, len: 2 });
        ticket.lease_run(Tier::Device, reads, Tier::Host, Run { src: 7, dst: 6, len: 1 });
        ticket.lease(one);
        ticket.lease_run(Tier::Host, LeaseKind::Read, Tier::Device, Run { src: 0, dst: 3, len: 1 });
        let leases: Vec<_> = ticket.leases().collect();
        assert_eq!(leases.iter().map(|lease| lease.block.0).collect::<Vec<_>>(), [1, 4, 2, 5, 7, 6, 9, 0, 3]);
        assert_eq!(leases[2], Lease { tier: Tier::Device, kind: reads, block: BlockId(2) });
        assert_eq!(leases[3], Lease { tier: Tier::Host, kind: LeaseKind::Write, block: BlockId(5) });
        assert!(ticket.is_overlapped());
        assert_eq!(ticket.held().len(), 3);
    }
}
