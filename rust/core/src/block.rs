//! One block of a tier: its references, its leases, its copy in another tier, and the tag of its key.
//!
//! These counts are independent of each other. A block can be in use, read by two transfers and published, all at once.
//! So a [`Block`] stores the counts, and [`Block::state`] computes the state from them. Only this file changes a count.

use crate::id::{BlockId, Tier};
use std::num::NonZeroU32;

/// Maximum number of blocks in a tier: [`Block`] packs the tier and id of a copy into one word.
pub const MAX_BLOCKS: usize = (1 << 30) - 2;

/// Maximum number of leases of one kind on a block.
pub(crate) const MAX_LEASES: u16 = u16::MAX >> 1;

/// Bit of `overlap` that is set while a transfer writes the block.
const FILLING: u16 = 1 << 15;

/// A block of one of the tiers.
pub(crate) type TierBlock = (Tier, BlockId);

/// Identifies the bytes of a block from its allocation until it is freed: the block, and its generation.
pub(crate) type BlockVersion = (BlockId, u32);

/// How a transfer uses a block, which determines what else may use it meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LeaseKind {
    /// The device reads the block before the same step writes there. Once unused, the block may be allocated to device
    /// work that is ordered after the ticket.
    OverlappableRead,
    /// Read: the block is not allocated until the ticket ends.
    Read,
    /// Written: the block holds no bytes yet and is not allocated until the ticket ends.
    Write,
}

/// The leases on one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leases {
    /// Leases of [`LeaseKind::Read`].
    pub reads: u16,
    /// Leases of [`LeaseKind::OverlappableRead`].
    pub overlappable: u16,
    /// Whether there is a lease of [`LeaseKind::Write`].
    pub filling: bool,
}

impl Leases {
    /// Adds one lease.
    pub(crate) fn add(&mut self, kind: LeaseKind) {
        match kind {
            LeaseKind::OverlappableRead => self.overlappable += 1,
            LeaseKind::Read => self.reads += 1,
            LeaseKind::Write => self.filling = true,
        }
    }
}

/// What a block is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// Unused, and holds nothing.
    Free,
    /// Unused, but a prompt can find its bytes until it is evicted.
    Cached,
    /// Unused, except for reads that later device work is ordered after.
    Overlappable(Leases),
    /// Unused, but unavailable until its leases end.
    Held(Leases),
    /// Block tables refer to it.
    InUse {
        /// Entries of tables.
        refs: NonZeroU32,
        /// Whether a prompt can find its bytes.
        published: bool,
        /// Leases on it.
        leases: Leases,
    },
}

impl BlockState {
    /// The state's number in Python: 0 free, 1 cached, 2 held by transfers or pins, 3 in use.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Free => 0,
            Self::Cached => 1,
            Self::Overlappable(_) | Self::Held(_) => 2,
            Self::InUse { .. } => 3,
        }
    }
}

/// Which of a pool's sets a block is in; see `Pool::moved`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Membership {
    Free,
    Evictable,
    Overlappable,
    /// In use, or held by leases.
    Neither,
}

/// One block of a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Block {
    /// 0 for none, else tier and id of the copy, plus 1.
    tier_copy: u32,
    /// 0 unless published, else the tag of its key.
    tag: u32,
    /// Entries of block tables.
    refs: u32,
    /// Leases of [`LeaseKind::Read`].
    reads: u16,
    /// Leases of [`LeaseKind::OverlappableRead`], and [`FILLING`].
    overlap: u16,
    /// How often the block has been freed.
    generation: u32,
}

const _: () = assert!(size_of::<Block>() == 20, "the loops over runs of blocks rely on small blocks");

impl Block {
    /// What the block is used for.
    #[must_use]
    pub fn state(self) -> BlockState {
        match (NonZeroU32::new(self.refs), self.membership()) {
            (Some(refs), _) => BlockState::InUse { refs, published: self.is_published(), leases: self.leases() },
            (None, Membership::Free) => BlockState::Free,
            (None, Membership::Evictable) => BlockState::Cached,
            (None, Membership::Overlappable) => BlockState::Overlappable(self.leases()),
            (None, Membership::Neither) => BlockState::Held(self.leases()),
        }
    }

    /// The set that the block belongs to.
    #[inline]
    pub(crate) fn membership(self) -> Membership {
        if self.refs > 0 {
            Membership::Neither
        } else if !self.is_leased() {
            if self.tag == 0 { Membership::Free } else { Membership::Evictable }
        } else if self.reads == 0 && self.overlap & FILLING == 0 {
            Membership::Overlappable
        } else {
            Membership::Neither
        }
    }

    /// Leases on the block.
    #[must_use]
    pub fn leases(self) -> Leases {
        Leases { reads: self.reads, overlappable: self.overlap & !FILLING, filling: self.is_filling() }
    }

    /// Entries of block tables that refer to the block.
    #[must_use]
    pub fn refs(self) -> u32 {
        self.refs
    }

    /// How often the block has been freed.
    #[must_use]
    pub fn generation(self) -> u32 {
        self.generation
    }

    /// The tag of its key, 0 unless published.
    pub(crate) fn tag(self) -> u32 {
        self.tag
    }

    /// The copy of its bytes in another tier.
    pub(crate) fn tier_copy(self) -> Option<TierBlock> {
        decode(self.tier_copy)
    }

    /// The copy of its bytes on the device.
    pub(crate) fn copy_on_device(self) -> Option<BlockId> {
        self.tier_copy().filter(|(tier, _)| *tier == Tier::Device).map(|(_, block)| block)
    }

    /// Whether tables refer to the block.
    pub(crate) fn is_used(self) -> bool {
        self.refs > 0
    }

    /// Whether transfers or pins hold the block.
    pub(crate) fn is_leased(self) -> bool {
        self.reads | self.overlap != 0
    }

    /// Whether a prompt can find the block.
    pub(crate) fn is_published(self) -> bool {
        self.tag != 0
    }

    /// Whether no table refers to the block, and it holds nothing that can be found.
    pub(crate) fn is_empty(self) -> bool {
        self.refs | self.tag == 0
    }

    /// Whether the block's bytes have not landed yet.
    pub(crate) fn is_filling(self) -> bool {
        self.overlap & FILLING != 0
    }

    /// Whether nothing but a transfer that fills it holds the block.
    pub(crate) fn is_only_filling(self) -> bool {
        self.refs == 0 && self.overlap == FILLING
    }

    /// Whether a ticket reads the block on the device before this step's writes.
    pub(crate) fn is_read_ahead(self) -> bool {
        self.overlap & !FILLING != 0
    }

    /// Whether the only table that has the block may write in place, since nothing else refers to it or can find it.
    pub(crate) fn is_exclusive(self) -> bool {
        self.refs == 1 && self.tag == 0
    }

    /// Whether the block has one reference and nothing else: no lease, key or copy.
    #[inline]
    pub(crate) fn is_private(self) -> bool {
        self.is_only(1, 0)
    }

    /// Whether two blocks differ in their generations only.
    #[inline]
    pub(crate) fn is_like(self, other: Self) -> bool {
        self.is(other.words())
    }

    /// Whether the block has `refs` references and the tag, and nothing else: no lease, no copy.
    #[inline]
    pub(crate) fn is_only(self, refs: u32, tag: u32) -> bool {
        self.is(Self { tag, refs, ..Self::default() }.words())
    }

    /// All but the generation. Laid out so that the compiler reads it as two words.
    #[inline]
    fn words(self) -> [u64; 2] {
        let leases = u64::from(self.reads) << 32 | u64::from(self.overlap) << 48;
        [u64::from(self.refs) | leases, u64::from(self.tier_copy) | u64::from(self.tag) << 32]
    }

    #[inline]
    fn is(self, [first, second]: [u64; 2]) -> bool {
        let [own_first, own_second] = self.words();
        (own_first ^ first) | (own_second ^ second) == 0
    }

    /// The generation of the bytes that the block holds. In a leased block it may have ended already, with the last
    /// reference.
    pub(crate) fn version(self) -> u32 {
        self.generation.wrapping_sub(u32::from(self.refs == 0))
    }

    /// Whether sequences still have the bytes of that generation in the block.
    pub(crate) fn is_used_as(self, version: u32) -> bool {
        self.refs > 0 && self.generation == version
    }

    /// Whether sequences or transfers still have the bytes of that generation in the block.
    pub(crate) fn has_version(self, version: u32) -> bool {
        (self.refs > 0 || self.is_leased()) && self.version() == version
    }

    /// How many more leases of a kind the block can have.
    pub(crate) fn lease_room(self, kind: LeaseKind) -> usize {
        usize::from(match kind {
            LeaseKind::Read => MAX_LEASES - self.reads,
            LeaseKind::OverlappableRead => MAX_LEASES - (self.overlap & !FILLING),
            LeaseKind::Write => u16::from(!self.is_filling()),
        })
    }

    /// Whether only `reads` leases of [`LeaseKind::Read`] keep the block from being allocated.
    pub(crate) fn is_only_read_by(self, reads: usize, overlappable_too: bool) -> bool {
        let overlaps = self.overlap != 0 && (!overlappable_too || self.is_filling());
        self.refs == 0 && !overlaps && usize::from(self.reads) == reads
    }

    /// Gives an unused block its first reference.
    #[inline]
    pub(crate) fn take(&mut self, filling: bool) {
        debug_assert!(self.is_empty(), "taking a block that is in use or holds something: {self:?}");
        self.refs = 1;
        self.overlap |= if filling { FILLING } else { 0 };
    }

    /// Lets a transfer write a free block that no table refers to.
    pub(crate) fn fill(&mut self) {
        debug_assert!(self.membership() == Membership::Free, "filling a block that is not free: {self:?}");
        self.overlap = FILLING;
    }

    /// Adds references.
    #[inline]
    pub(crate) fn add_refs(&mut self, count: u32) {
        self.refs += count;
    }

    /// Drops references, but not the last one.
    pub(crate) fn drop_refs(&mut self, count: u32) {
        debug_assert!(self.refs > count, "releasing a block more often than it is referenced");
        self.refs -= count;
    }

    /// Drops one reference; returns whether it was the last one.
    #[inline]
    pub(crate) fn drop_ref(&mut self) -> bool {
        debug_assert!(self.refs > 0, "releasing a block that nothing references");
        self.refs -= 1;
        // A branch on purpose: with rustc 1.95, adding `u32::from(self.refs == 0)` adds nothing in release builds.
        if self.refs > 0 {
            return false;
        }
        self.generation = self.generation.wrapping_add(1);
        true
    }

    /// Adds a lease, for which there is room.
    pub(crate) fn add_lease(&mut self, kind: LeaseKind) {
        debug_assert!(self.lease_room(kind) > 0, "one lease too many: {self:?}");
        match kind {
            LeaseKind::Read => self.reads += 1,
            LeaseKind::OverlappableRead => self.overlap += 1,
            LeaseKind::Write => self.overlap |= FILLING,
        }
    }

    /// Ends a lease.
    pub(crate) fn end_lease(&mut self, kind: LeaseKind) {
        match kind {
            LeaseKind::Read => self.reads -= 1,
            LeaseKind::OverlappableRead => {
                debug_assert!(self.is_read_ahead(), "ending a lease that does not exist: {self:?}");
                self.overlap -= 1;
            }
            LeaseKind::Write => self.overlap &= !FILLING,
        }
    }

    /// Notes the tag of the key that the block is published under.
    #[inline]
    pub(crate) fn set_tag(&mut self, tag: u32) {
        self.tag = tag;
    }

    /// Forgets the key; returns its tag, 0 if there was none.
    #[inline]
    pub(crate) fn take_tag(&mut self) -> u32 {
        std::mem::take(&mut self.tag)
    }

    /// Sets or clears the copy in another tier; returns the one before.
    #[inline]
    pub(crate) fn set_tier_copy(&mut self, copy: Option<TierBlock>) -> Option<TierBlock> {
        decode(std::mem::replace(&mut self.tier_copy, encode(copy)))
    }

    /// Moves the block's state to another block that is being filled for it, except its copy in another tier, which is
    /// returned. The target keeps its generation.
    pub(crate) fn move_into(&mut self, to: &mut Self) -> Option<TierBlock> {
        debug_assert!(
            !self.is_empty() && !self.is_leased(),
            "moving a block that holds nothing, or is leased: {self:?}"
        );
        debug_assert!(to.is_only_filling(), "moving into a block that is not being filled: {to:?}");
        let generation = self.generation.wrapping_add(u32::from(self.refs > 0));
        let from = std::mem::replace(self, Self { generation, ..Self::default() });
        *to = Self { generation: to.generation, tier_copy: 0, ..from };
        decode(from.tier_copy)
    }

    /// Describes a contradiction within the block, or with the references and leases counted elsewhere; `None` if there
    /// is none.
    pub(crate) fn check(self, refs: u32, leases: Leases) -> Option<String> {
        if self.refs != refs {
            Some(format!("{} references, counted {refs}", self.refs))
        } else if self.leases() != leases {
            Some(format!("{:?}, counted {leases:?}", self.leases()))
        } else if self.is_empty() && self.tier_copy != 0 {
            Some("a copy in another tier, and no bytes".to_owned())
        } else {
            None
        }
    }
}

/// Runs of adjacent blocks in the same state: loops without a branch per block.
impl Block {
    /// Gives free blocks their first reference.
    #[inline]
    pub(crate) fn take_run(blocks: &mut [Self], filling: bool) {
        let overlap = if filling { FILLING } else { 0 };
        for block in blocks {
            (block.refs, block.overlap) = (1, overlap);
        }
    }

    /// Adds a reference to blocks.
    #[inline]
    pub(crate) fn share_run(blocks: &mut [Self]) {
        for block in blocks {
            block.refs += 1;
        }
    }

    /// Notes a tag in blocks.
    #[inline]
    pub(crate) fn set_tags(blocks: &mut [Self], tag: u32) {
        for block in blocks {
            block.tag = tag;
        }
    }

    /// Drops the one reference of private blocks.
    #[inline]
    pub(crate) fn release_run(blocks: &mut [Self]) {
        for block in blocks {
            block.refs = 0;
            block.generation = block.generation.wrapping_add(1);
        }
    }

    /// Puts a lease in place of the one reference of private blocks.
    #[inline]
    pub(crate) fn depart_run(blocks: &mut [Self], reads: LeaseKind) {
        let leases = alone(reads);
        for block in blocks {
            debug_assert!(block.is_private(), "departing from a block that others use");
            block.refs = 0;
            block.generation = block.generation.wrapping_add(1);
            (block.reads, block.overlap) = leases;
        }
    }

    /// Ends the writes to blocks that are all in use; returns false and does nothing if one is not.
    #[inline]
    pub(crate) fn land_run(blocks: &mut [Self]) -> bool {
        let all = blocks.iter().all(|block| block.refs > 0);
        if all {
            for block in blocks {
                block.overlap &= !FILLING;
            }
        }
        all
    }

    /// Ends the one lease of blocks that have nothing else; returns false and does nothing if one has.
    #[inline]
    pub(crate) fn end_run(blocks: &mut [Self], kind: LeaseKind) -> bool {
        let leases = alone(kind);
        let all = blocks.iter().all(|block| block.is_empty() && (block.reads, block.overlap) == leases);
        if all {
            for block in blocks {
                (block.reads, block.overlap) = (0, 0);
            }
        }
        all
    }
}

/// `reads` and `overlap` of a block with one lease.
fn alone(kind: LeaseKind) -> (u16, u16) {
    match kind {
        LeaseKind::OverlappableRead => (0, 1),
        LeaseKind::Read => (1, 0),
        LeaseKind::Write => (0, FILLING),
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a tier's index is below 3")]
fn encode(copy: Option<TierBlock>) -> u32 {
    copy.map_or(0, |(tier, block)| ((tier.index() as u32) << 30 | block.0) + 1)
}

fn decode(word: u32) -> Option<TierBlock> {
    let word = word.checked_sub(1)?;
    Some((Tier::ALL[(word >> 30) as usize], BlockId(word & ((1 << 30) - 1))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_in_every_tier_and_with_the_highest_id_survive_encoding() {
        for tier in Tier::ALL {
            for id in [0, 1, u32::try_from(MAX_BLOCKS).unwrap()] {
                assert_eq!(decode(encode(Some((tier, BlockId(id))))), Some((tier, BlockId(id))));
            }
        }
        assert_eq!(decode(encode(None)), None);
    }

    #[test]
    fn a_block_goes_through_its_states() {
        let mut block = Block::default();
        block.take(true);
        assert!(block.is_filling() && block.is_exclusive() && !block.is_private());
        block.end_lease(LeaseKind::Write);
        assert!(block.is_private());
        block.set_tag(7);
        let published = BlockState::InUse { refs: NonZeroU32::MIN, published: true, leases: Leases::default() };
        assert_eq!((block.state(), block.is_exclusive()), (published, false));
        block.add_lease(LeaseKind::OverlappableRead);
        assert!(block.drop_ref());
        assert_eq!(block.state().number(), 2);
        assert_eq!(block.membership(), Membership::Overlappable);
        block.add_lease(LeaseKind::Read);
        assert_eq!(block.membership(), Membership::Neither);
        block.end_lease(LeaseKind::Read);
        block.end_lease(LeaseKind::OverlappableRead);
        assert_eq!(block.state(), BlockState::Cached);
        assert_eq!((block.take_tag(), block.state()), (7, BlockState::Free));
        assert_eq!((block.generation(), block.version()), (1, 0));
    }

    #[test]
    fn a_block_has_room_for_one_writer_and_a_limited_number_of_readers_of_each_kind() {
        let mut block = Block::default();
        for (kind, most) in
            [(LeaseKind::Write, 1), (LeaseKind::Read, MAX_LEASES), (LeaseKind::OverlappableRead, MAX_LEASES)]
        {
            assert_eq!(block.lease_room(kind), usize::from(most));
            (0..most).for_each(|_| block.add_lease(kind));
            assert_eq!(block.lease_room(kind), 0);
        }
        assert_eq!(block.leases(), Leases { reads: MAX_LEASES, overlappable: MAX_LEASES, filling: true });
    }
}
