//! The verbs: one call each to the components that do it.

use super::Manager;
use crate::block::{BlockState, MAX_BLOCKS};
use crate::defrag::{self, Budget, Cached, Fragmentation, Moves, Wanted};
use crate::error::{Result, invalid};
use crate::fit::{Fit, Share};
use crate::group::Group;
use crate::id::{BlockId, PinId, SequenceId, Tier};
use crate::sequence::{Batch, Counts, Demand, PrefixHit, PrefixStats, Prompt, TableRows};
use crate::transfer::OpenStep;
use std::ops::Range;

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
    /// Opens one sequence for each entry of `tokens`, with blocks for that many tokens; appends their handles to `out`.
    ///
    /// # Errors
    /// The device has too few blocks for the whole batch; a group wants an encoder's tokens.
    pub fn allocate(&mut self, tokens: &[u32], out: &mut Vec<SequenceId>) -> Result<()> {
        let (state, mut step) = self.parts();
        state.allocate(&mut step, tokens, out)
    }

    /// As [`Manager::allocate`], for sequences whose encoders read `encoder_tokens` tokens.
    ///
    /// # Errors
    /// No group is of cross attention; there is not one number of encoder tokens a sequence; the device has too few blocks.
    pub fn allocate_encoded(
        &mut self,
        tokens: &[u32],
        encoder_tokens: &[u32],
        out: &mut Vec<SequenceId>,
    ) -> Result<()> {
        let (state, mut step) = self.parts();
        state.allocate_groups(&mut step, tokens, Some(encoder_tokens), out)
    }

    /// Whether a new sequence may be admitted, the watermark kept. Of a prompt in chunks what its groups hold at once counts.
    #[must_use]
    pub fn can_admit(&self, demand: &Demand) -> Fit {
        self.sequences.can_admit(self.view(), demand)
    }

    /// Opens one sequence for each prompt, sharing the longest prefix of it that is cached; appends to `out` each handle
    /// and how many of its first tokens need not be computed. The last token always is to be computed.
    ///
    /// # Errors
    /// The device has too few blocks for the whole batch, or a token has the reserved id.
    pub fn allocate_prompts(&mut self, prompts: &[Prompt<'_>], out: &mut Vec<(SequenceId, u32)>) -> Result<()> {
        self.allocate_chunks(prompts, u32::MAX, out)
    }

    /// As [`Manager::allocate_prompts`], with blocks for at most `chunk` tokens of each prompt beyond the cached ones. The
    /// rest is put in by [`Manager::append`], a chunk at a time; the cache knows its tokens already.
    ///
    /// # Errors
    /// As [`Manager::allocate_prompts`]; `chunk` is 0; a group wants an encoder's tokens.
    pub fn allocate_chunks(
        &mut self,
        prompts: &[Prompt<'_>],
        chunk: u32,
        out: &mut Vec<(SequenceId, u32)>,
    ) -> Result<()> {
        let (state, mut step) = self.parts();
        state.allocate_chunks(&mut step, prompts, chunk, out)
    }

    /// Whether a prompt may be admitted, the watermark kept: all of it, even where [`Manager::allocate_chunks`] takes blocks for
    /// a first chunk only, and `lookahead` slots beyond. It takes new blocks, blocks to load into, and cached ones that nothing
    /// uses or holds; blocks that other sequences, pins or transfers have cost nothing.
    ///
    /// # Errors
    /// A token has the reserved id; `chunk` is 0; a group wants an encoder's tokens.
    pub fn can_admit_prompt(&self, prompt: &Prompt<'_>, chunk: u32, lookahead: u32) -> Result<Fit> {
        self.sequences.can_admit_prompt(self.view(), prompt, chunk, lookahead)
    }

    /// What is cached of the start of a prompt; nothing is taken.
    ///
    /// # Errors
    /// A token has the reserved id.
    pub fn lookup(&self, prompt: &Prompt<'_>) -> Result<PrefixHit> {
        self.sequences.lookup(self.view(), prompt)
    }

    /// Tokens of a sequence's prompt to put in next with [`Manager::append`], at most `budget`; 0 once all are in. With a
    /// recurrent group and the prefix cache a chunk ends with a block where it can: only states there are cached.
    ///
    /// # Errors
    /// The sequence is unknown.
    pub fn next_chunk(&self, sequence: SequenceId, budget: u32) -> Result<u32> {
        self.sequences.next_chunk(self.view(), sequence, budget)
    }

    /// Appends tokens to a batch of sequences and writes the slot of each token, sequence by sequence, to `slots`; where
    /// there are several cache groups, those of one group after those of another.
    ///
    /// What falls out of a window is given back: tokens appended in earlier steps are computed before these.
    /// A shared block that would be written is copied first, by a copy of this step. `lookahead` more slots a sequence
    /// get blocks of its own, which drafts may be written to, but no tokens. Of a recurrent group the step writes the state
    /// after its last token alone: blocks of tokens that an earlier call of the step put in become null blocks.
    ///
    /// # Errors
    /// The device has too few blocks for the whole batch; a sequence is unknown, named twice, not on the device, still
    /// loading or has lost bytes; `slots` has another length than the tokens.
    pub fn append(
        &mut self,
        sequences: &[SequenceId],
        counts: Counts<'_>,
        lookahead: u32,
        slots: &mut [i64],
    ) -> Result<()> {
        let (state, mut step) = self.parts();
        state.append(&mut step, Batch { sequences, counts, lookahead, slots, tables: None })
    }

    /// [`Manager::append`], and brings the rows of a block table up to date that the caller keeps from call to call: row
    /// `i` belongs to sequence `i`, in the first cache group, then come those of the next. What has changed since the sequence's last such call is written, at its first one the
    /// whole row. Who moves a sequence to another row or table writes that with [`Manager::block_tables`] first.
    ///
    /// # Errors
    /// As [`Manager::append`]; the table has fewer rows than there are sequences, or a sequence more blocks than a row.
    pub fn append_with_tables(
        &mut self,
        sequences: &[SequenceId],
        counts: Counts<'_>,
        lookahead: u32,
        tables: TableRows<'_>,
        slots: &mut [i64],
    ) -> Result<()> {
        let (state, mut step) = self.parts();
        state.append(&mut step, Batch { sequences, counts, lookahead, slots, tables: Some(tables) })
    }

    /// Appends tokens like [`Manager::append`], or like [`Manager::append_with_tables`] where there are any, and lets the
    /// prefix cache know them: `tokens` are the ids, sequence by sequence.
    ///
    /// # Errors
    /// As [`Manager::append`]; a token has the reserved id; there are not as many ids as tokens.
    pub fn append_tokens(
        &mut self,
        sequences: &[SequenceId],
        counts: Counts<'_>,
        lookahead: u32,
        tokens: &[u32],
        tables: Option<TableRows<'_>>,
        slots: &mut [i64],
    ) -> Result<()> {
        let (state, mut step) = self.parts();
        state.append_tokens(&mut step, tokens, Batch { sequences, counts, lookahead, slots, tables })
    }

    /// Lets the prefix cache know tokens that were appended without their ids, as a scheduler does that runs a step
    /// ahead: the ids follow those that are known. Sequences that were admitted without ids are passed
    /// over, and so are those that share the blocks of such tokens with a fork.
    ///
    /// # Errors
    /// A handle is unknown or named twice, a token has the reserved id, or there are more ids than tokens without.
    pub fn note_tokens(&mut self, sequences: &[SequenceId], counts: Counts<'_>, tokens: &[u32]) -> Result<()> {
        let (state, step) = self.parts();
        state.note_tokens(step.view(), sequences, counts, tokens)
    }

    /// Device blocks that [`Manager::append`] would take: new ones, and one for each copy-on-write.
    ///
    /// # Errors
    /// As [`Manager::append`], but for blocks that are short.
    pub fn blocks_to_append(&mut self, sequences: &[SequenceId], counts: Counts<'_>, lookahead: u32) -> Result<usize> {
        let (state, step) = self.parts();
        state.blocks_to_append(step.view(), sequences, counts, lookahead)
    }

    /// Whether [`Manager::append`] has the blocks that it takes.
    ///
    /// # Errors
    /// As [`Manager::append`], but for blocks that are short.
    pub fn can_append(&mut self, sequences: &[SequenceId], counts: Counts<'_>, lookahead: u32) -> Result<Fit> {
        let (state, step) = self.parts();
        state.can_append(step.view(), sequences, counts, lookahead)
    }

    /// Fails unless [`Manager::append`] would find the blocks that it takes: what a caller asks before it makes slots.
    ///
    /// # Errors
    /// As [`Manager::append`].
    pub fn require_append(&mut self, sequences: &[SequenceId], counts: Counts<'_>, lookahead: u32) -> Result<()> {
        let (state, step) = self.parts();
        state.require_append(step.view(), sequences, counts, lookahead)
    }

    /// Publishes the full blocks of the sequences: the model has computed all their tokens. A block whose key another
    /// block already has is given up for that one; what fell out of a window is given back.
    ///
    /// # Errors
    /// A handle is unknown or named twice, or the sequence has tokens that the present step is yet to write.
    pub fn mark_computed(&mut self, sequences: &[SequenceId]) -> Result<()> {
        self.mark_computed_to(sequences, None)
    }

    /// As [`Manager::mark_computed`], of the first `computed` tokens of each sequence: a prompt is computed in chunks.
    ///
    /// # Errors
    /// As [`Manager::mark_computed`]; there is not one number a sequence, or a sequence is shorter.
    pub fn mark_computed_to(&mut self, sequences: &[SequenceId], computed: Option<&[u32]>) -> Result<()> {
        let (state, mut step) = self.parts();
        state.mark_computed_to(&mut step, sequences, computed)
    }

    /// Blocks at the start of all the sequences that they share and that are computed.
    ///
    /// # Errors
    /// A handle is unknown.
    pub fn common_computed_blocks(&self, sequences: &[SequenceId]) -> Result<Vec<BlockId>> {
        self.sequences.common_computed_blocks(sequences)
    }

    /// Forgets everything that is cached, host copies too, unless a block is in use; returns whether it did.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.tiers.reset_cache()
    }

    /// Whether prompts share cached blocks.
    #[must_use]
    pub fn is_caching(&self) -> bool {
        self.tiers.device().is_caching()
    }

    /// Counters since the manager was made.
    #[must_use]
    pub fn prefix_stats(&self) -> PrefixStats {
        self.sequences.stats()
    }

    /// Opens `count` sequences that share all blocks of one; a write to a shared block copies it first.
    ///
    /// # Errors
    /// The sequence is unknown or has lost bytes; there is no room for `count` forks.
    pub fn fork(&mut self, sequence: SequenceId, count: u32, out: &mut Vec<SequenceId>) -> Result<()> {
        let (state, mut step) = self.parts();
        state.fork(&mut step, sequence, count, out)
    }

    /// Opens a sequence of `tokens` tokens that shares the first `shared` of another's, whole blocks on the device.
    ///
    /// # Errors
    /// `shared` is not a multiple of the block size or longer than either sequence; the other is not on the device, still
    /// loading or has lost bytes, or no longer has what is to be shared; the device has too few blocks.
    pub fn fork_prefix(&mut self, sequence: SequenceId, shared: u32, tokens: u32) -> Result<SequenceId> {
        let (state, mut step) = self.parts();
        state.fork_prefix(&mut step, sequence, shared, tokens)
    }

    /// Cuts a sequence to its first `tokens` tokens, in whatever tier it is; blocks that hold none of them, those of an
    /// earlier lookahead too, go free. What is appended next copies the last block first if another sequence or the cache
    /// has it too.
    ///
    /// # Errors
    /// The sequence is unknown, shorter, has lost bytes, or has tokens that the present step is yet to write; it no longer
    /// has what the tokens after would need: their window has been given back, or a recurrent state.
    pub fn truncate(&mut self, sequence: SequenceId, tokens: u32) -> Result<()> {
        let (state, mut step) = self.parts();
        state.truncate(&mut step, sequence, tokens)
    }

    /// Forgets sequences; blocks that nothing else references go free, once no transfer holds them.
    ///
    /// # Errors
    /// A handle is unknown or named twice.
    pub fn free(&mut self, sequences: &[SequenceId]) -> Result<()> {
        let (state, mut step) = self.parts();
        state.free(&mut step, sequences)
    }

    /// Sets how much the sequences want their cached blocks to be kept, from 0, the default, to
    /// [`MAX_PRIORITY`](crate::MAX_PRIORITY).
    ///
    /// A shared block goes by the highest priority among its users. Policies other than `priority` take no notice.
    ///
    /// # Errors
    /// The priority is too high, or a handle is unknown.
    pub fn set_priority(&mut self, sequences: &[SequenceId], priority: u8) -> Result<()> {
        self.sequences.set_priority(sequences, priority)
    }

    /// Whether [`Manager::swap_out`] can move the sequences: nothing else moves them and `to` has room.
    ///
    /// # Errors
    /// A handle is unknown or named twice.
    pub fn can_swap_out(&mut self, sequences: &[SequenceId], to: Tier) -> Result<Fit> {
        let (state, step) = self.parts();
        state.can_swap_out(step.view(), sequences, to)
    }

    /// Moves sequences of one tier away from the device: from there to the host, or from either to the external tier. A
    /// block that several of them share moves once.
    ///
    /// # Errors
    /// A sequence is unknown, named twice, of another tier, moving, written in this step or has lost bytes; `to` has too
    /// few blocks for the whole batch.
    pub fn swap_out(&mut self, sequences: &[SequenceId], to: Tier) -> Result<()> {
        let (state, mut step) = self.parts();
        state.relocate(&mut step, sequences, to, true)
    }

    /// Whether [`Manager::swap_in`] can move the sequences. On the device one token with `lookahead` more slots can be
    /// appended to each after that, the watermark kept.
    ///
    /// # Errors
    /// A handle is unknown or named twice.
    pub fn can_swap_in(&mut self, sequences: &[SequenceId], to: Tier, lookahead: u32) -> Result<Fit> {
        let (state, step) = self.parts();
        state.can_swap_in(step.view(), sequences, to, lookahead)
    }

    /// Moves sequences of one tier towards the device: from the host or the external tier to the device, or from the
    /// external tier to the host.
    ///
    /// # Errors
    /// As [`Manager::swap_out`].
    pub fn swap_in(&mut self, sequences: &[SequenceId], to: Tier) -> Result<()> {
        let (state, mut step) = self.parts();
        state.relocate(&mut step, sequences, to, false)
    }

    /// Writes the tables of sequences on the device as rows of `width`, the rest of each row 0.
    ///
    /// # Errors
    /// A sequence is unknown, not on the device, still moving or longer than a row; `out` has another size.
    pub fn block_tables(&mut self, sequences: &[SequenceId], width: usize, out: &mut [i32]) -> Result<()> {
        self.sequences.block_tables(self.view(), sequences, width, out)?;
        self.sequences.note_reads(&mut self.transfers, sequences.iter().copied());
        Ok(())
    }

    /// Slots of ranges of tokens of sequences on the device, one range after the other.
    ///
    /// # Errors
    /// A sequence is unknown, not on the device, still moving or shorter; `out` has another size.
    pub fn slot_mapping(&mut self, ranges: &[(SequenceId, Range<u32>)], out: &mut [i64]) -> Result<()> {
        self.sequences.slot_mapping(self.view(), ranges, out)?;
        self.sequences.note_reads(&mut self.transfers, ranges.iter().map(|(sequence, _)| *sequence));
        Ok(())
    }

    /// Tokens in ranges of sequences on the device.
    ///
    /// # Errors
    /// As [`Self::slot_mapping`].
    pub fn num_slots(&self, ranges: &[(SequenceId, Range<u32>)]) -> Result<usize> {
        self.sequences.num_slots(self.view(), ranges)
    }

    /// The cache groups, in the order of their numbers.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        self.sequences.groups()
    }

    /// Groups whose tables grow with a sequence: all but an encoder's.
    #[must_use]
    pub fn growing_groups(&self) -> usize {
        self.sequences.growing_groups()
    }

    /// Row of a sequence in one group.
    ///
    /// # Errors
    /// There is no such sequence, or no such group.
    pub fn table_of(&self, sequence: SequenceId, group: usize) -> Result<SequenceId> {
        self.sequences.table_of(sequence, group)
    }

    /// Gives the device `blocks` blocks from now on, and says what is in use beyond them.
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
        let Self { tiers, transfers, sequences: state, defrag, jobs, .. } = self;
        defrag.request((state, &mut OpenStep { tiers, transfers, jobs }), goals, sequences, budget, cached)
    }

    /// How the device's blocks lie; takes time that rises with the pool and the tables.
    ///
    /// # Errors
    /// There is not the memory for it.
    pub fn fragmentation(&self) -> Result<Fragmentation> {
        defrag::fragmentation(&self.sequences, &self.tiers)
    }

    /// Lets pins hold at most this fraction of the device blocks, a half if never called; those that are held stay.
    ///
    /// # Errors
    /// The fraction is not at least 0 and below 1: a pool of pinned blocks would have nothing to give out.
    pub fn limit_pins(&mut self, fraction: f64) -> Result<()> {
        *self.pins.limit_mut() = Share::new("max_pinned", fraction, self.tiers.device().len())?;
        Ok(())
    }

    /// Keeps the published blocks of a sequence on the device for a reader, whatever becomes of the sequence.
    ///
    /// # Errors
    /// The sequence is unknown, not on the device, still loading or has lost bytes; pins would hold too many blocks.
    pub fn pin(&mut self, sequence: SequenceId) -> Result<PinId> {
        let blocks = self.sequences.published_blocks(self.view(), sequence)?;
        self.pins.pin(&mut self.tiers, blocks)
    }

    /// As [`Manager::pin`], for the blocks at the start of a prompt that are cached on the device; returns how many tokens
    /// those hold, too.
    ///
    /// # Errors
    /// A token has the reserved id, or pins would hold too many blocks.
    pub fn pin_prompt(&mut self, prompt: &Prompt<'_>) -> Result<(PinId, u32)> {
        let (blocks, hits) = self.sequences.cached_blocks(self.view(), prompt)?;
        let tokens = u32::try_from(hits).unwrap_or(u32::MAX).saturating_mul(self.block_size());
        Ok((self.pins.pin(&mut self.tiers, blocks)?, tokens))
    }

    /// Blocks of a pin, in the order of their tokens, one cache group after the other.
    ///
    /// # Errors
    /// The pin is unknown.
    pub fn pinned_blocks(&self, pin: PinId) -> Result<&[BlockId]> {
        self.pins.blocks(pin)
    }

    /// The reader needs the blocks no more.
    ///
    /// # Errors
    /// The pin is unknown.
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
