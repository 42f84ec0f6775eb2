//! The manager's calls; each delegates to the component that does the work.

use super::Manager;
use crate::block::{BlockState, MAX_BLOCKS};
use crate::defrag::{self, Budget, Cached, Defrag, Fragmentation, Moves, Wanted};
use crate::error::{Result, invalid};
use crate::fit::{Fit, Share};
use crate::group::Group;
use crate::id::{BlockId, PinId, SequenceId, Tier};
use crate::page::PerClass;
use crate::prefix::evict::Hint;
use crate::sequence::{Append, Counts, Demand, PrefixHit, PrefixStats, Prompt, PromptOptions, TableId};
use crate::transfer::OpenStep;
use std::ops::Range;

/// Progress of resizing the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resize {
    /// Blocks in the device, of all page classes; extents of an arena, then `extent` counts those, too.
    pub blocks: usize,
    /// Blocks beyond them that sequences use.
    pub live: usize,
    /// Blocks beyond them that only transfers and pins hold.
    pub held: usize,
    /// One past the highest block in use, at least `blocks`: memory after it can be freed.
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
    /// The device has too few blocks for the whole batch; a group needs an encoder's tokens.
    pub fn allocate(&mut self, tokens: &[u32], out: &mut Vec<SequenceId>) -> Result<()> {
        let (state, mut step) = self.parts();
        state.allocate(&mut step, tokens, out)
    }

    /// As [`Manager::allocate`], for sequences whose encoders read `encoder_tokens` tokens.
    ///
    /// # Errors
    /// No group is cross attention; there is not one number of encoder tokens per sequence; the device has too few
    /// blocks.
    pub fn allocate_encoded(
        &mut self,
        tokens: &[u32],
        encoder_tokens: &[u32],
        out: &mut Vec<SequenceId>,
    ) -> Result<()> {
        let (state, mut step) = self.parts();
        state.allocate_groups(&mut step, tokens, Some(encoder_tokens), out)
    }

    /// Whether a new sequence may be admitted above the watermark. A chunked prompt counts with the blocks that its
    /// groups hold at once.
    #[must_use]
    pub fn can_admit(&self, demand: &Demand) -> Fit {
        self.sequences.can_admit(self.view(), demand)
    }

    /// Opens one sequence per prompt, sharing its longest cached prefix; appends to `out` each handle and the number of
    /// leading tokens that need not be computed. The last token must always be computed.
    ///
    /// # Errors
    /// The device has too few blocks for the whole batch; a token has the reserved id; the chunk is 0; a group wants an
    /// encoder's tokens.
    pub fn allocate_prompts(
        &mut self,
        prompts: &[Prompt<'_>],
        options: PromptOptions,
        out: &mut Vec<(SequenceId, u32)>,
    ) -> Result<()> {
        let (state, mut step) = self.parts();
        state.allocate_prompts(&mut step, prompts, options, out)
    }

    /// Whether a prompt may be admitted above the watermark, and computed to its last token, even if
    /// [`Manager::allocate_prompts`] takes blocks only for its first chunk: with the blocks that it holds at most at one
    /// time, `lookahead` slots beyond its last token, and as many tokens of an answer, one at a time. New blocks count, blocks to load into, and
    /// cached blocks that nothing uses or holds. Blocks that other sequences, pins or transfers already have cost
    /// nothing.
    ///
    /// # Errors
    /// A token has the reserved id; `chunk` is 0; a group wants an encoder's tokens.
    pub fn can_admit_prompt(&self, prompt: &Prompt<'_>, chunk: u32, lookahead: u32, answer: u32) -> Result<Fit> {
        self.sequences.can_admit_prompt(self.view(), prompt, (chunk, lookahead, answer))
    }

    /// The cached part of a prompt's start; takes no references.
    ///
    /// # Errors
    /// A token has the reserved id.
    pub fn lookup(&self, prompt: &Prompt<'_>) -> Result<PrefixHit> {
        self.sequences.lookup(self.view(), prompt)
    }

    /// Number of prompt tokens to add next with [`Manager::append`], at most `budget`; 0 once all are in. With a
    /// recurrent group and the prefix cache, a chunk ends on a block boundary if possible, because only states there
    /// are cached.
    ///
    /// # Errors
    /// The sequence is unknown.
    pub fn next_chunk(&self, sequence: SequenceId, budget: u32) -> Result<u32> {
        self.sequences.next_chunk(self.view(), sequence, budget)
    }

    /// Appends tokens to a batch of sequences and writes the slot of each.
    ///
    /// Blocks that leave a window are freed: tokens appended in earlier steps are computed before these. A shared block
    /// that would be written is copied first, by a copy in this step. For a recurrent group, the step writes only the
    /// state after its last token: blocks of tokens added by an earlier call of the step become null blocks. With
    /// [`Counts::Drafted`] it also writes the state after each token that [`Manager::truncate`] may make the last one, to
    /// the block of the token's slot.
    ///
    /// # Errors
    /// The device has too few blocks for the whole batch; a sequence is unknown, named twice, not on the device, still
    /// loading or has lost bytes, or this step has yet to write states of its drafts; a sequence gets as many drafts as
    /// tokens; a token has the reserved id; there is not one slot, or one id, per token; the table has fewer rows than
    /// there are sequences, or a sequence more blocks than a row.
    pub fn append(&mut self, batch: Append<'_>) -> Result<()> {
        let (state, mut step) = self.parts();
        match batch.token_ids {
            Some(ids) => state.append_tokens(&mut step, ids, batch),
            None => state.append(&mut step, batch),
        }
    }

    /// Gives the prefix cache the ids of tokens that were appended without them, as a scheduler that runs a step ahead
    /// does: the ids continue after the known ones. Sequences admitted without ids are skipped, and so are those that
    /// share the blocks of such tokens with a fork.
    ///
    /// # Errors
    /// A handle is unknown or named twice, a token has the reserved id, or there are more ids than tokens without ids.
    pub fn note_tokens(&mut self, sequences: &[SequenceId], counts: Counts<'_>, tokens: &[u32]) -> Result<()> {
        let (state, step) = self.parts();
        state.note_tokens(step.view(), sequences, counts, tokens)
    }

    /// Device blocks that [`Manager::append`] would take: new ones, and one for each copy-on-write.
    ///
    /// # Errors
    /// As [`Manager::append`], except for a shortage of blocks.
    pub fn blocks_to_append(&mut self, sequences: &[SequenceId], counts: Counts<'_>, lookahead: u32) -> Result<usize> {
        let (state, step) = self.parts();
        state.blocks_to_append(step.view(), sequences, counts, lookahead)
    }

    /// Whether [`Manager::append`] has enough blocks.
    ///
    /// # Errors
    /// As [`Manager::append`], except for a shortage of blocks.
    pub fn can_append(&mut self, sequences: &[SequenceId], counts: Counts<'_>, lookahead: u32) -> Result<Fit> {
        let (state, step) = self.parts();
        state.can_append(step.view(), sequences, counts, lookahead)
    }

    /// Fails unless [`Manager::append`] has enough blocks; callers check this before they allocate slots.
    ///
    /// # Errors
    /// As [`Manager::append`].
    pub fn require_append(&mut self, sequences: &[SequenceId], counts: Counts<'_>, lookahead: u32) -> Result<()> {
        let (state, step) = self.parts();
        state.require_append(step.view(), sequences, counts, lookahead)
    }

    /// Publishes the full blocks of the sequences: the model has computed all their tokens. A block whose key another
    /// block already has is replaced by that one; blocks that left a window are freed.
    ///
    /// # Errors
    /// A handle is unknown or named twice, or the sequence has tokens that the current step has yet to write.
    pub fn mark_computed(&mut self, sequences: &[SequenceId]) -> Result<()> {
        self.mark_computed_to(sequences, None)
    }

    /// Like [`Manager::mark_computed`], for the first `computed` tokens of each sequence, for prompts computed in
    /// chunks.
    ///
    /// # Errors
    /// As [`Manager::mark_computed`]; the numbers and sequences differ in length, or a sequence is shorter.
    pub fn mark_computed_to(&mut self, sequences: &[SequenceId], computed: Option<&[u32]>) -> Result<()> {
        let (state, mut step) = self.parts();
        state.mark_computed_to(&mut step, sequences, computed)
    }

    /// The leading blocks that all the sequences share and that are computed.
    ///
    /// # Errors
    /// A handle is unknown.
    pub fn common_computed_blocks(&self, sequences: &[SequenceId]) -> Result<Vec<BlockId>> {
        self.sequences.common_computed_blocks(sequences)
    }

    /// Clears the cache, host copies included, unless a block is in use; returns whether it did.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.end_leases();
        self.tiers.reset_cache()
    }

    /// Whether prompts share cached blocks.
    #[must_use]
    pub fn is_caching(&self) -> bool {
        self.tiers.device().is_caching()
    }

    /// Counters since the manager was created.
    #[must_use]
    pub fn prefix_stats(&self) -> PrefixStats {
        self.sequences.stats()
    }

    /// Opens `count` sequences that share all blocks of one; a write to a shared block copies it first. In recurrent
    /// groups only the sequence itself can still reject its drafts.
    ///
    /// # Errors
    /// The sequence is unknown or has lost bytes, or this step has yet to write states of its drafts; there is no room
    /// for `count` forks.
    pub fn fork(&mut self, sequence: SequenceId, count: u32, out: &mut Vec<SequenceId>) -> Result<()> {
        let (state, mut step) = self.parts();
        state.fork(&mut step, sequence, count, out)
    }

    /// Opens a sequence of `tokens` tokens that shares the first `shared` of another's, whole blocks on the device.
    ///
    /// # Errors
    /// `shared` is not a multiple of the block size or longer than either sequence; the other is not on the device,
    /// still loading or has lost bytes, or no longer has the shared blocks; the device has too few blocks.
    pub fn fork_prefix(&mut self, sequence: SequenceId, shared: u32, tokens: u32) -> Result<SequenceId> {
        let (state, mut step) = self.parts();
        state.fork_prefix(&mut step, sequence, shared, tokens)
    }

    /// Truncates a sequence to its first `tokens` tokens, in any tier; blocks that hold none of them are freed,
    /// including those of an earlier lookahead. The next append copies the last block first if another sequence or the
    /// cache shares it. A recurrent group can drop the drafts of the last append, until the sequence is appended to,
    /// swapped or truncated again: the state after the last token that stays is kept, the others are freed. Marking drafts
    /// as computed may free states between them.
    ///
    /// # Errors
    /// The sequence is unknown, shorter, has lost bytes, or has tokens that the current step has yet to write; it no
    /// longer has what later tokens would need, because their window or recurrent state was freed.
    pub fn truncate(&mut self, sequence: SequenceId, tokens: u32) -> Result<()> {
        let (state, mut step) = self.parts();
        state.truncate(&mut step, sequence, tokens)
    }

    /// Frees sequences; blocks that nothing else references become free once no transfer holds them.
    ///
    /// # Errors
    /// A handle is unknown or named twice.
    pub fn free(&mut self, sequences: &[SequenceId]) -> Result<()> {
        self.free_with_hint(sequences, None)
    }

    /// As [`Manager::free`], with what the engine knows of the conversation that the sequences belong to.
    ///
    /// # Errors
    /// As [`Manager::free`].
    pub fn free_with_hint(&mut self, sequences: &[SequenceId], hint: Option<Hint>) -> Result<()> {
        let (state, mut step) = self.parts();
        state.free(&mut step, sequences, hint)
    }

    /// Tells the prefix cache something of a conversation after its last turn was freed: `prompt` are all its tokens, or
    /// those of its beginning. Returns how many of them are cached on the device; these count as just used.
    ///
    /// # Errors
    /// A token has the reserved id.
    pub fn hint(&mut self, prompt: &Prompt<'_>, hint: Hint) -> Result<u32> {
        let (state, mut step) = self.parts();
        let hits = state.hint(&mut step, prompt, hint)?;
        Ok(u32::try_from(hits).unwrap_or(u32::MAX).saturating_mul(self.block_size()))
    }

    /// Frees all sequences.
    ///
    /// # Errors
    /// None in a consistent manager.
    pub fn free_all(&mut self) -> Result<()> {
        let (state, mut step) = self.parts();
        let all = state.handles();
        state.free(&mut step, &all, None)
    }

    /// Sets the retention priority of the sequences' cached blocks, from 0, the default, to
    /// [`MAX_PRIORITY`](crate::MAX_PRIORITY).
    ///
    /// A shared block has the highest priority among its users. Policies other than `priority` ignore it.
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
    /// A sequence is unknown, named twice, of another tier, moving, written in this step or has lost bytes; `to` has
    /// too few blocks for the whole batch.
    pub fn swap_out(&mut self, sequences: &[SequenceId], to: Tier) -> Result<()> {
        let (state, mut step) = self.parts();
        state.relocate(&mut step, sequences, to, true)
    }

    /// Whether [`Manager::swap_in`] can move the sequences. On the device, one token with `lookahead` more slots can
    /// then be appended to each, above the watermark.
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

    /// Writes the tables of sequences on the device as rows of `width`, as ids in their page classes, the rest of each row
    /// 0.
    ///
    /// # Errors
    /// A sequence is unknown, not on the device, still moving or longer than a row; `out` has another size.
    pub fn block_tables(&mut self, tables: &[TableId], width: usize, out: &mut [i32]) -> Result<()> {
        self.sequences.block_tables(self.view(), tables, width, out)?;
        self.sequences.note_reads(&mut self.transfers, tables.iter().map(|table| table.sequence));
        Ok(())
    }

    /// Slots of ranges of tokens of sequences on the device, one range after the other.
    ///
    /// # Errors
    /// A sequence is unknown, not on the device, still moving or shorter; `out` has another size.
    pub fn slot_mapping(&mut self, ranges: &[(TableId, Range<u32>)], out: &mut [i64]) -> Result<()> {
        self.sequences.slot_mapping(self.view(), ranges, out)?;
        self.sequences.note_reads(&mut self.transfers, ranges.iter().map(|(table, _)| table.sequence));
        Ok(())
    }

    /// Tokens in ranges of sequences on the device.
    ///
    /// # Errors
    /// As [`Self::slot_mapping`].
    pub fn num_slots(&self, ranges: &[(TableId, Range<u32>)]) -> Result<usize> {
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

    /// The table of a sequence in one group.
    ///
    /// # Errors
    /// There is no such sequence, or no such group.
    pub fn table_of(&self, sequence: SequenceId, group: usize) -> Result<TableId> {
        self.sequences.table_of(sequence, group)
    }

    /// Resizes the device to `blocks` blocks, and reports what is in use beyond them.
    ///
    /// Blocks beyond the end are no longer allocated, cached ones there are dropped, and each block that a sequence
    /// still uses there leaves one block fewer to allocate. The watermark and the pin limit stay the same fractions;
    /// quotas stay the same numbers. A second call, larger or smaller, overrides an unfinished one.
    ///
    /// # Errors
    /// Too many blocks; or too few for the null block, pinned blocks, the watermark, and one to allocate; there are several
    /// page classes, see [`Manager::resize_extents`] and [`Manager::resize_split`].
    pub fn resize_device(&mut self, blocks: usize) -> Result<Resize> {
        if blocks > MAX_BLOCKS {
            return Err(invalid("device_blocks", blocks as i128, format!("at most {MAX_BLOCKS}")));
        }
        if self.num_classes() > 1 {
            let has_extents = self.tiers.device().num_extents().is_some();
            let instead = if has_extents { "device_bytes, for an arena" } else { "a list, one number for each class" };
            let must = format!("1 to resize one number of blocks; give {instead}");
            return Err(invalid("number of page classes", self.num_classes() as i128, must));
        }
        let (null, pinned) = (usize::from(self.sequences.has_nulls()), self.pins.num_blocks());
        let watermark = self.sequences.watermark().of(blocks);
        let least = null + pinned + watermark + 1;
        if blocks < least {
            let kept = format!("{null} null, {pinned} pinned, {watermark} kept free by the watermark, 1 to allocate");
            return Err(invalid("device_blocks", blocks as i128, format!("at least {least}: {kept}")));
        }
        self.sequences.require_growth(blocks)?;
        let shrinks = blocks < self.tiers.device().len();
        self.tiers.resize_device(blocks)?;
        if shrinks {
            self.end_leases(); // what they hold beyond the end can no longer be found
        }
        self.sequences.resize_device(blocks);
        self.pins.limit_mut().resize(blocks);
        Ok(self.resize_progress())
    }

    /// Resizes the arena of several page classes to a number of extents, as [`Manager::resize_device`] does with blocks.
    ///
    /// Extents beyond the end go to no class any longer, and what is only cached there is dropped. Each block in use there
    /// keeps its place, and leaves one block of its class fewer to allocate.
    ///
    /// # Errors
    /// There is no arena; the number is larger than [`Space::Extents`](crate::Space::Extents) has room for, or too small for
    /// the extent with the null blocks, pinned blocks, the watermark, and one to allocate.
    pub fn resize_extents(&mut self, extents: usize) -> Result<Resize> {
        let device = self.tiers.device();
        let (Some(most), Some(bytes)) = (device.most_extents(), device.extent_bytes()) else {
            let instead =
                if self.num_classes() == 1 { "a number of blocks" } else { "a list, one number for each class" };
            let must = format!("at least 1 to resize device_bytes; give {instead}");
            return Err(invalid("number of extents that page classes share", 0, must));
        };
        let null = usize::from(self.sequences.has_nulls());
        let pinned = device.filled_by(device.count(self.pins.all()));
        let watermark = self.sequences.watermark().of(extents.saturating_sub(null));
        let least = null + pinned + watermark + 1;
        if !(least..=most).contains(&extents) {
            let kept = format!(
                "{null} for null blocks, {pinned} pinned, {watermark} kept free by the watermark, 1 to allocate; an extent \
                 has {bytes} bytes"
            );
            return Err(invalid("device extents", extents as i128, format!("{least} to {most}: {kept}")));
        }
        let per_extent = |class| PerClass::of(class, device.per_extent(class).unwrap_or(0) * extents);
        let blocks = (0..device.num_classes()).map(per_extent).sum();
        Ok(self.resize_classes(blocks, extents))
    }

    /// Resizes page classes that have their blocks for good, each to a number of blocks, as [`Manager::resize_device`].
    ///
    /// # Errors
    /// There is not one number for each of several classes; one is larger than [`Space::Split`](crate::Space::Split) has room
    /// for, or too small for the null block, pinned blocks, the watermark, and one to allocate.
    pub fn resize_split(&mut self, blocks: &[usize]) -> Result<Resize> {
        let (device, classes) = (self.tiers.device(), self.num_classes());
        if classes == 1 {
            let must = "at least 2 to resize a list of blocks; give one number".to_owned();
            return Err(invalid("number of page classes", 1, must));
        }
        if device.num_extents().is_some() {
            let must = "0 over an arena, whose classes share its extents; give device_bytes".to_owned();
            return Err(invalid("number of sizes in blocks", blocks.len() as i128, must));
        }
        if blocks.len() != classes {
            let must = format!("{classes}, one for each page class");
            return Err(invalid("numbers of device blocks", blocks.len() as i128, must));
        }
        let (null, pinned) = (usize::from(self.sequences.has_nulls()), device.count(self.pins.all()));
        for (class, &blocks) in blocks.iter().enumerate() {
            let (pinned, watermark) = (pinned.get(class), self.sequences.watermark().of(blocks));
            let (least, capacity) = (null + pinned + watermark + 1, device.capacity_of(class));
            if !(least..=capacity).contains(&blocks) {
                let kept =
                    format!("{null} null, {pinned} pinned, {watermark} kept free by the watermark, 1 to allocate");
                let must = format!("{least} to {capacity} of page class {class}: {kept}");
                return Err(invalid("device_blocks", blocks as i128, must));
            }
        }
        Ok(self.resize_classes(PerClass::from_slice(blocks), 0))
    }

    fn resize_classes(&mut self, blocks: PerClass, extents: usize) -> Resize {
        self.tiers.resize_classes(blocks, extents);
        self.end_leases(); // what they hold beyond the end can no longer be found
        let least = self.tiers.device().least_len();
        self.sequences.resize_watermark(least);
        self.pins.limit_mut().resize(least);
        self.resize_progress()
    }

    /// The state of every block of a tier, by number, including those in use beyond the end.
    #[must_use]
    pub fn uses(&self, tier: Tier) -> Vec<BlockState> {
        let pool = self.pool(tier);
        (0..).map(BlockId).take(pool.extent()).map(|block| pool.block(block).state()).collect()
    }

    /// Progress of the last resize: blocks in use beyond the device's end.
    #[must_use]
    pub fn resize_progress(&self) -> Resize {
        let pool = self.tiers.device();
        let tail = pool.tail();
        if pool.num_classes() > 1 {
            let ids = (0..pool.num_classes()).map(|class| pool.len_of(class)).sum();
            let (blocks, extent) = (pool.num_extents().unwrap_or(ids), pool.extent_of_classes());
            return Resize { blocks, live: tail.live, held: tail.held, extent };
        }
        Resize { blocks: pool.len(), live: tail.live, held: tail.held, extent: pool.extent() }
    }

    /// Decides moves of device blocks towards goals, most important first, within a budget, as pairs of
    /// [`Kind::Move`](crate::Kind::Move) in the current step's decision. Running sequences are moved last.
    ///
    /// Nothing changes before the step's ticket is completed: until then, block tables, slots and cached blocks stay
    /// the same. A target leaves the free blocks at once; a source that is written, freed or leased in the meantime
    /// stays where it is.
    ///
    /// # Arguments
    /// `sequences` are those that [`Goal::Contiguous`](crate::defrag::Goal::Contiguous) applies to, most important
    /// first; all on the device if none are named. A goal's slack carries over from call to call as long as the goals
    /// are the same.
    ///
    /// # Errors
    /// A sequence is unknown or not on the device, or there are several page classes; nothing has changed.
    pub fn defragment(
        &mut self,
        goals: &[Wanted],
        sequences: Option<&[SequenceId]>,
        budget: Budget,
        cached: Cached,
    ) -> Result<Moves> {
        self.require_one_class("defragmentation")?;
        let Self { tiers, transfers, sequences: state, defrag, jobs, .. } = self;
        defrag.request((state, &mut OpenStep { tiers, transfers, jobs }), goals, sequences, budget, cached)
    }

    /// Decides moves that empty extents, as [`Manager::defragment`] does, until page classes could take `wanted` blocks while
    /// `kept` extents, and those of the watermark, are empty. Blocks in use move to other extents of their class, which
    /// may evict cached blocks there. Nothing moves if the extents that are lacking cannot all be emptied now.
    ///
    /// # Errors
    /// The page classes have no extents, or there is not one number for each; nothing has changed.
    pub fn empty_extents(&mut self, wanted: &[usize], kept: usize, budget: Budget) -> Result<Moves> {
        let classes = self.num_classes();
        if self.tiers.device().per_extent(0).is_none() {
            return Err(invalid(
                "number of page classes",
                classes as i128,
                "at least 2, over an arena of extents".to_owned(),
            ));
        }
        if wanted.len() > classes {
            return Err(invalid(
                "numbers of blocks",
                wanted.len() as i128,
                format!("at most {classes}, the page classes"),
            ));
        }
        let kept = kept.saturating_add(self.tiers.device().kept(self.sequences.watermark()).get(0));
        let (sequences, mut step) = self.parts();
        Defrag::empty_extents((sequences, &mut step), PerClass::from_slice(wanted), kept, budget)
    }

    /// Measures fragmentation of the device; takes time proportional to the pool and the tables.
    ///
    /// # Errors
    /// There is not enough memory for it, or there are several page classes.
    pub fn fragmentation(&self) -> Result<Fragmentation> {
        self.require_one_class("a measure of fragmentation")?;
        defrag::fragmentation(&self.sequences, &self.tiers)
    }

    /// Limits pins to this fraction of the device blocks, by default a half; existing pins stay.
    ///
    /// # Errors
    /// The fraction is not at least 0 and below 1: a fully pinned pool would have nothing to allocate.
    pub fn limit_pins(&mut self, fraction: f64) -> Result<()> {
        *self.pins.limit_mut() = Share::new("max_pinned", fraction, self.tiers.device().len())?;
        Ok(())
    }

    /// Keeps the published blocks of a sequence on the device for a reader, even after the sequence is freed.
    ///
    /// # Errors
    /// The sequence is unknown, not on the device, still loading or has lost bytes; pins would hold too many blocks.
    pub fn pin(&mut self, sequence: SequenceId) -> Result<PinId> {
        let blocks = self.sequences.published_blocks(self.view(), sequence)?;
        self.pins.pin(&mut self.tiers, blocks)
    }

    /// Like [`Manager::pin`], for the leading blocks of a prompt that are cached on the device; also returns how many
    /// tokens they hold.
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

    /// Ends a pin: the reader no longer needs the blocks.
    ///
    /// # Errors
    /// The pin is unknown.
    pub fn unpin(&mut self, pin: PinId) -> Result<()> {
        self.pins.release(&mut self.tiers, pin)
    }

    /// Limits the cached device blocks of a salt's tenant that no sequence uses, to a number of blocks, or with several page
    /// classes to a number of bytes, padding included; `None` means no limit. Blocks published before the tenant's first
    /// quota are not counted.
    ///
    /// # Errors
    /// The prefix cache is off, the device has less, or 65535 tenants have quotas.
    pub fn set_quota(&mut self, salt: [u8; 32], quota: Option<usize>) -> Result<()> {
        self.tiers.set_quota(salt, quota)
    }

    /// Cached device blocks of a tenant that no sequence uses, in the unit of quotas, and its quota; `None` for a tenant that
    /// never had one.
    #[must_use]
    pub fn quota(&self, salt: [u8; 32]) -> Option<(usize, Option<usize>)> {
        self.tiers.quota(salt)
    }
}
