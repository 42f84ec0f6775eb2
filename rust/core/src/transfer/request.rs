//! What a call takes of a tier. The call and its `can_` query make the same request.

use super::View;
use crate::error::{Error, Result};
use crate::fit::{AllocStatus, Fit};
use crate::id::{BlockId, Tier};
use crate::page::PerClass;
use crate::pool::Room;

/// What a verb takes of a tier.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    pub(crate) tier: Tier,
    /// Available blocks that it takes: new ones, and unused ones whose bytes it shares.
    pub(crate) blocks: PerClass,
    /// Blocks that it and its sequences would need of an empty tier.
    pub(crate) least: PerClass,
    /// Whether it may take blocks that device work still reads.
    pub(crate) overlappable: bool,
}

impl Request {
    /// New blocks of the device.
    pub(crate) fn device(blocks: PerClass) -> Self {
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
    ) -> PerClass {
        let pool = self.tiers.pool(tier);
        let mut cost = PerClass::default();
        for &block in found.into_iter().filter(|&&block| pool.costs(block, overlappable_too)) {
            *cost.at(pool.class_of(block)) += 1;
        }
        cost
    }

    /// Fails unless a request can be met; `found` returns the unused blocks whose bytes it shares.
    pub(crate) fn require(self, request: Request, found: impl FnOnce() -> Vec<BlockId>) -> Result<()> {
        let pool = self.tiers.pool(request.tier);
        if pool.num_classes() > 1 {
            return self.require_each(request, found);
        }
        let wanted = request.blocks.get(0);
        let free = pool.require(wanted, request.overlappable);
        match free {
            Err(Error::OutOfBlocks { .. }) if wanted <= self.room(request, wanted, found) => Ok(()),
            result => result,
        }
    }

    /// Like [`View::require`], with several page classes.
    fn require_each(self, request: Request, found: impl FnOnce() -> Vec<BlockId>) -> Result<()> {
        crate::error::fault::point()?;
        let Room { class, free, is_enough } = self.room_of_each(request, PerClass::default(), found);
        if is_enough {
            return Ok(());
        }
        let (wanted, total) = (request.blocks.get(class), self.tiers.pool(request.tier).most_of(class));
        Err(Error::OutOfBlocks { tier: request.tier, wanted, free, total, page_class: Some(class) })
    }

    fn room_of_each(self, request: Request, kept: PerClass, found: impl FnOnce() -> Vec<BlockId>) -> Room {
        let (pool, mut found) = (self.tiers.pool(request.tier), found());
        let wanted = request.blocks.saturating_sub(self.cost(request.tier, &found, request.overlappable));
        let room = |held: &[BlockId]| pool.room(wanted, (&found, held), kept, request.overlappable);
        let now = room(&[]);
        if now.is_enough || !self.jobs.are_writing() {
            return now;
        }
        // Writes to a prefix store can be cancelled.
        found.sort_unstable();
        let held = self.jobs.held(pool, request.overlappable, &found);
        pool.room(wanted, (&found, &held), kept, request.overlappable)
    }

    /// Whether a request can be met while `kept` stays free; see [`Pool::kept`](crate::Pool::kept).
    pub(crate) fn fit(self, request: Request, kept: PerClass, found: impl FnOnce() -> Vec<BlockId>) -> Fit {
        let pool = self.tiers.pool(request.tier);
        let could = |blocks| pool.could_have(blocks, kept);
        let (page_class, free, free_bytes, is_enough) = if pool.num_classes() > 1 {
            let Room { class, free, is_enough } = self.room_of_each(request, kept, found);
            (class, free, pool.available_bytes(kept, request.overlappable), is_enough)
        } else {
            let wanted = request.blocks.get(0).saturating_add(kept.get(0));
            let room = self.room(request, wanted, found);
            let free = room.saturating_sub(kept.get(0));
            (0, free, pool.bytes_of(PerClass::of(0, free)), wanted <= room)
        };
        let status = if is_enough {
            AllocStatus::Ok
        } else if could(request.least) {
            AllocStatus::Later
        } else {
            AllocStatus::Never
        };
        let blocks = request.blocks.get(page_class);
        Fit {
            status,
            blocks,
            free,
            page_class,
            wanted: request.blocks,
            bytes: pool.bytes_of(request.blocks),
            free_bytes,
        }
    }

    /// Number of available blocks, with one page class. If it is below `wanted`, blocks held only by prefix-store writes
    /// count too: such writes can be cancelled.
    fn room(self, request: Request, wanted: usize, found: impl FnOnce() -> Vec<BlockId>) -> usize {
        let pool = self.tiers.pool(request.tier);
        let free = pool.free_with(0, request.overlappable, 0);
        if wanted <= free || !self.jobs.are_writing() {
            return free;
        }
        let mut kept = found();
        kept.sort_unstable();
        pool.free_with(0, request.overlappable, self.jobs.held(pool, request.overlappable, &kept).len())
    }
}
