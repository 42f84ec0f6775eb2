//! What a call takes of a tier. The call and its `can_` query make the same request.

use super::View;
use crate::error::{Error, Result};
use crate::fit::{AllocStatus, Fit};
use crate::id::{BlockId, Tier};

/// What a verb takes of a tier.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    pub(crate) tier: Tier,
    /// Available blocks that it takes: new ones, and unused ones whose bytes it shares.
    pub(crate) blocks: usize,
    /// Blocks that it and its sequences would need of an empty tier.
    pub(crate) least: usize,
    /// Whether it may take blocks that device work still reads.
    pub(crate) overlappable: bool,
}

impl Request {
    /// New blocks of the device.
    pub(crate) fn device(blocks: usize) -> Self {
        Self { tier: Tier::Device, blocks, least: blocks, overlappable: true }
    }
}

impl View<'_> {
    /// How many of some distinct blocks with contents are currently available.
    pub(crate) fn cost<'a>(
        self,
        tier: Tier,
        found: impl IntoIterator<Item = &'a BlockId>,
        overlappable_too: bool,
    ) -> usize {
        let pool = self.tiers.pool(tier);
        found.into_iter().filter(|&&block| pool.costs(block, overlappable_too)).count()
    }

    /// Fails unless a request can be met; `found` returns the unused blocks whose bytes it shares.
    pub(crate) fn require(self, request: Request, found: impl FnOnce() -> Vec<BlockId>) -> Result<()> {
        let pool = self.tiers.pool(request.tier);
        let free = pool.require(request.blocks, request.overlappable);
        match free {
            Err(Error::OutOfBlocks { .. }) if request.blocks <= self.room(request, request.blocks, found) => Ok(()),
            result => result,
        }
    }

    /// Whether a request can be met while `kept` device blocks stay free.
    pub(crate) fn fit(self, request: Request, kept: usize, found: impl FnOnce() -> Vec<BlockId>) -> Fit {
        let room = self.room(request, request.blocks.saturating_add(kept), found);
        let status = if request.blocks.saturating_add(kept) <= room {
            AllocStatus::Ok
        } else if request.least.saturating_add(kept) <= self.tiers.usable(request.tier) {
            AllocStatus::Later
        } else {
            AllocStatus::Never
        };
        Fit { status, blocks: request.blocks, free: room.saturating_sub(kept) }
    }

    /// Number of available blocks. If it is below `wanted`, blocks held only by prefix-store writes count too: such
    /// writes can be cancelled.
    fn room(self, request: Request, wanted: usize, found: impl FnOnce() -> Vec<BlockId>) -> usize {
        let pool = self.tiers.pool(request.tier);
        let free = pool.free_with(request.overlappable, 0);
        if wanted <= free || !self.jobs.are_writing() {
            return free;
        }
        let mut kept = found();
        kept.sort_unstable();
        pool.free_with(request.overlappable, self.jobs.num_held(pool, request.overlappable, &kept))
    }
}
