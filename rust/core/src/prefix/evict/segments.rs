//! Evictable blocks in three segments: probation, used once, used again; and the rules by which one goes first.
//!
//! Every rule works on the same segments, so that it can change at any time and nothing cached is lost. Along a chain a
//! block is in the segment of those behind it, or in a later one, and each segment is in the order of release. So no block
//! goes before one that needs it, as long as blocks of a later segment go only if no earlier one has an older block.

use super::ghosts::Ghosts;
use crate::id::BlockId;
use crate::ring::Rings;

const PROBATION: u32 = 0;
const ONCE: u32 = 1;
const AGAIN: u32 = 2;

/// Bits of a note that say where its block is: its segment, and whether it was used again. The others are its tag's.
const SEGMENT: u32 = 3;
const WAS_AGAIN: u32 = 4;
const TAG: u32 = !7;

/// Of so many chains that are new, one is kept by [`Rule::Keep`].
const KEPT_CHAINS: u32 = 32;
/// Share of the pool that the other chains may have: one in so many blocks.
const PROBATION_SHARE: usize = 16;

/// Which block goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// As long as blocks used once are more than so many in 1024: the oldest of these.
    Once(u16),
    /// New blocks, but for one chain in [`KEPT_CHAINS`]: what is there stays, even if prompts come round in a loop that
    /// is longer than the pool.
    Keep,
}

#[derive(Debug, Clone)]
pub(super) struct Segments {
    rule: Rule,
    rings: Rings,
    /// By block.
    notes: Vec<u32>,
    /// Blocks in each segment.
    lens: [usize; 3],
    ghosts: Ghosts,
    blocks: usize,
    /// Whether a block of the chain that is being released was used again.
    again: bool,
    /// Segment of the chain's blocks that were not.
    fresh: u32,
    chains: u32,
}

impl Segments {
    pub(super) fn new(blocks: usize, rule: Rule) -> Self {
        Self {
            rule,
            rings: Rings::new(blocks, 3),
            notes: vec![0; blocks],
            lens: [0; 3],
            ghosts: Ghosts::new(blocks),
            blocks,
            again: false,
            fresh: ONCE,
            chains: 0,
        }
    }

    pub(super) fn set_rule(&mut self, rule: Rule) {
        self.rule = rule;
    }

    pub(super) fn rings(&self) -> &Rings {
        &self.rings
    }

    pub(super) fn begin_chain(&mut self) {
        self.again = false;
        self.chains = self.chains.wrapping_add(1);
        let is_kept = self.chains % KEPT_CHAINS == 0 || self.lens[PROBATION as usize] > self.blocks / PROBATION_SHARE;
        self.fresh = if self.rule == Rule::Keep && !is_kept { PROBATION } else { ONCE };
    }

    /// Returns what is known of the block's tag.
    #[inline]
    pub(super) fn hold(&mut self, block: BlockId) -> u32 {
        let note = &mut self.notes[block.index()];
        *note |= if self.again { WAS_AGAIN } else { 0 };
        *note & TAG
    }

    /// Returns what is known of the block's tag.
    #[inline]
    pub(super) fn insert(&mut self, block: BlockId) -> u32 {
        let note = &mut self.notes[block.index()];
        let tag = *note & TAG;
        self.again |= *note & WAS_AGAIN != 0;
        let (segment, bit) = if self.again { (AGAIN, WAS_AGAIN) } else { (self.fresh, 0) };
        *note = tag | bit | segment;
        self.lens[segment as usize] += 1;
        self.rings.push(segment as usize, block);
        tag
    }

    /// A block leaves the segments, or stays out of them; returns whether it was there.
    #[inline]
    pub(super) fn remove(&mut self, block: BlockId, is_hit: bool) -> bool {
        let was = self.rings.remove(block);
        let note = &mut self.notes[block.index()];
        self.lens[(*note & SEGMENT) as usize] -= usize::from(was);
        if !is_hit {
            *note = 0;
        } else if was {
            *note |= WAS_AGAIN;
        }
        was
    }

    #[inline]
    pub(super) fn publish(&mut self, block: BlockId, tag: u32) {
        let came_back = self.rule != Rule::Keep && self.ghosts.take(tag);
        self.notes[block.index()] = (tag & TAG) | if came_back { WAS_AGAIN } else { 0 };
    }

    /// Blocks with these tags are given out again.
    pub(super) fn evicted(&mut self, tags: &[u32]) {
        for &tag in tags {
            self.ghosts.insert(tag);
        }
    }

    /// Takes out the block that goes first.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<BlockId> {
        let segment = self.first().0 as usize;
        let block = self.rings.pop(segment)?;
        self.lens[segment] -= 1;
        Some(block)
    }

    /// Takes out the blocks that go first, or as many as there are.
    pub(super) fn pop_into(&mut self, mut count: usize, out: &mut Vec<BlockId>) {
        while count > 0 {
            let (segment, most) = self.first();
            let segment = segment as usize;
            let before = out.len();
            if most == 1 {
                out.extend(self.rings.pop(segment));
            } else {
                self.rings.pop_into(segment, count.min(most), out);
            }
            let popped = out.len() - before;
            if popped == 0 {
                return;
            }
            self.lens[segment] -= popped;
            count -= popped;
        }
    }

    /// The segment whose first block goes first, and how many of its blocks go before others do.
    fn first(&mut self) -> (u32, usize) {
        let [probation, once, again] = self.lens;
        if probation > 0 {
            return (PROBATION, probation);
        }
        if again == 0 {
            return (ONCE, once);
        }
        if let Rule::Once(share) = self.rule {
            let kept = (self.blocks * usize::from(share)) >> 10;
            if once > kept {
                return (ONCE, once - kept);
            }
        }
        let is_older = self.rings.age(AGAIN as usize) > self.rings.age(ONCE as usize);
        (if is_older { AGAIN } else { ONCE }, 1)
    }

    pub(super) fn resize(&mut self, blocks: usize) {
        if blocks > self.notes.len() {
            self.rings.make_room(blocks);
            self.notes.resize(blocks, 0);
            // A tag's place depends on the size of the table.
            self.ghosts = Ghosts::new(blocks);
        }
        self.blocks = blocks;
    }

    pub(super) fn relocate(&mut self, from: BlockId, to: BlockId) {
        self.rings.rename(from, to);
        self.notes[to.index()] = std::mem::take(&mut self.notes[from.index()]);
    }
}
