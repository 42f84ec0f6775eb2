//! The verbs of blocks: the size of the device, moves within it, pins, quotas and the host's copies.

use super::Manager;
use crate::block::{BlockState, MAX_BLOCKS};
use crate::defrag::{self, Budget, Cached, Fragmentation, Moves, Wanted};
use crate::error::{Result, invalid};
use crate::fit::Share;
use crate::id::{BlockId, PinId, SequenceId, Tier};
use crate::sequence::Prompt;
use crate::transfer::Step;

/// How far the device's size has changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resize {
    /// Blocks that the device has.
    pub blocks: usize,
    /// Blocks beyond them that sequences use.
    pub live: usize,
    /// Blocks beyond them that only transfers and pins hold.
    pub held: usize,
    /// One past the highest block in use, at least `blocks`: the memory behind it can be given back.
    pub extent: usize,
}

impl Resize {
    /// Whether nothing is in use beyond the end.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.extent == self.blocks
    }
}

impl Manager {
    /// Gives the device so many blocks from now on, and says what is in use beyond them.
    ///
    /// Blocks beyond are not given out any more, those cached there are dropped, and each that a sequence uses there counts
    /// as one fewer to be given out. Watermark and limit of pins stay the fractions that they were; quotas stay numbers.
    /// A second call, larger or smaller, changes what a first one has not ended.
    ///
    /// # Errors
    /// Too many blocks; or too few for the null block, what is pinned, the watermark, and one to give out.
    pub fn resize_device(&mut self, blocks: usize) -> Result<Resize> {
        if blocks > MAX_BLOCKS {
            return Err(invalid("device_blocks", blocks as i128, format!("at most {MAX_BLOCKS}")));
        }
        let (null, pinned) = (usize::from(self.sequences.has_nulls()), self.pins.num_blocks());
        let watermark = self.sequences.watermark().of(blocks);
        let least = null + pinned + watermark + 1;
        if blocks < least {
            let kept = format!("{null} null, {pinned} pinned, {watermark} kept free by the watermark, 1 to give out");
            return Err(invalid("device_blocks", blocks as i128, format!("at least {least}: {kept}")));
        }
        self.sequences.require_growth(blocks)?;
        self.tiers.resize_device(blocks)?;
        self.sequences.resize_device(blocks);
        self.pins.limit_mut().resize(blocks);
        Ok(self.resize_progress())
    }

    /// What every block of a tier is used for, by id, those in use beyond the end included.
    #[must_use]
    pub fn uses(&self, tier: Tier) -> Vec<BlockState> {
        let pool = self.pool(tier);
        (0..).map(BlockId).take(pool.extent()).map(|block| pool.block(block).state()).collect()
    }

    /// What is in use beyond the device's blocks.
    #[must_use]
    pub fn resize_progress(&self) -> Resize {
        let pool = self.tiers.device();
        let tail = pool.tail();
        Resize { blocks: pool.len(), live: tail.live, held: tail.held, extent: pool.extent() }
    }

    /// Decides moves of device blocks towards goals, the most important first, within a budget, as pairs of
    /// [`Kind::Move`](crate::Kind::Move) in the present step's decision. Sequences that run now are moved last.
    ///
    /// Nobody notices before the step's ticket is completed: block tables, slots and cached blocks stay as they are until
    /// then. A target is taken out of the free blocks at once; a source that is written, freed or leased meanwhile stays
    /// where it is.
    ///
    /// # Arguments
    /// `sequences` are those that [`Goal::Contiguous`](crate::defrag::Goal::Contiguous) is about, the first in front; all on
    /// the device if none are named. A goal's slack counts from call to call as long as the goals are the same.
    ///
    /// # Errors
    /// A sequence is unknown or not on the device; nothing has changed.
    pub fn defragment(
        &mut self,
        goals: &[Wanted],
        sequences: Option<&[SequenceId]>,
        budget: Budget,
        cached: Cached,
    ) -> Result<Moves> {
        let Self { tiers, transfers, sequences: state, defrag, .. } = self;
        defrag.request((state, &mut Step { tiers, transfers }), goals, sequences, budget, cached)
    }

    /// How the device's blocks lie; takes time that rises with the pool and the tables.
    ///
    /// # Errors
    /// A page has no blocks.
    pub fn fragmentation(&self, page_blocks: u32) -> Result<Fragmentation> {
        defrag::fragmentation(&self.sequences, &self.tiers, page_blocks)
    }

    /// Lets pins hold at most this fraction of the device blocks, a half if never called; those that are held stay.
    ///
    /// # Errors
    /// The fraction is not at least 0 and below 1: a pool of pinned blocks would have nothing to give out.
    pub fn limit_pins(&mut self, fraction: f64) -> Result<()> {
        *self.pins.limit_mut() = Share::new("max_pinned", fraction, self.tiers.device().len())?;
        Ok(())
    }

    /// Keeps the published blocks of a sequence on the device for a reader until `deadline`, whatever becomes of the
    /// sequence.
    ///
    /// # Errors
    /// The sequence is unknown, not on the device, still loading or has lost bytes; pins would hold too many blocks.
    pub fn pin(&mut self, sequence: SequenceId, deadline: u64) -> Result<PinId> {
        let blocks = self.sequences.published_blocks(self.view(), sequence)?;
        self.pins.pin(&mut self.tiers, blocks, deadline)
    }

    /// As [`Manager::pin`], for the blocks at the start of a prompt that are cached on the device; returns how many tokens
    /// those hold, too.
    ///
    /// # Errors
    /// A token has the reserved id, or pins would hold too many blocks.
    pub fn pin_prompt(&mut self, prompt: &Prompt<'_>, deadline: u64) -> Result<(PinId, u32)> {
        let (blocks, hits) = self.sequences.cached_blocks(self.view(), prompt)?;
        let tokens = u32::try_from(hits).unwrap_or(u32::MAX).saturating_mul(self.block_size());
        Ok((self.pins.pin(&mut self.tiers, blocks, deadline)?, tokens))
    }

    /// Blocks of a pin, in the order of their tokens, one cache group after the other.
    ///
    /// # Errors
    /// The pin is unknown or has expired.
    pub fn pinned_blocks(&self, pin: PinId) -> Result<&[BlockId]> {
        self.pins.blocks(pin)
    }

    /// The reader's transfer has begun: only [`Manager::unpin`] ends the pin from now on.
    ///
    /// # Errors
    /// The pin is unknown or has expired: the blocks must not be read.
    pub fn submit_pin(&mut self, pin: PinId) -> Result<()> {
        self.pins.mark_submitted(pin)
    }

    /// The reader needs the blocks no more.
    ///
    /// # Errors
    /// The pin is unknown or has expired.
    pub fn unpin(&mut self, pin: PinId) -> Result<()> {
        self.pins.release(&mut self.tiers, pin)
    }

    /// Lets the tenant of a salt keep at most `blocks` cached device blocks that no sequence uses; none for as many as
    /// there is room for. Blocks published before the tenant had its first quota are nobody's.
    ///
    /// # Errors
    /// The prefix cache is off, the device has fewer blocks, or 65535 tenants have quotas.
    pub fn set_quota(&mut self, salt: [u8; 32], blocks: Option<usize>) -> Result<()> {
        self.tiers.set_quota(salt, blocks)
    }

    /// Cached device blocks of a tenant that no sequence uses, and its quota; none for a tenant that never had one.
    #[must_use]
    pub fn quota(&self, salt: [u8; 32]) -> Option<(usize, Option<usize>)> {
        self.tiers.quota(salt)
    }
}
