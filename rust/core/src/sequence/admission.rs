//! Admission of prompts: the blocks that they need, for both query and call.

use super::Sequences;
use super::prompt::{Match, Prompt};
use crate::error::Result;
use crate::fit::{AllocStatus, Fit};
use crate::group::Group;
use crate::host_cache::Found;
use crate::id::{BlockId, Tier};
use crate::page::PerClass;
use crate::transfer::{Request, View};

/// How a sequence grows: its prompt by chunks, then its answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// Tokens that it begins with.
    pub(super) start: u32,
    pub(super) prompt: u32,
    /// Tokens after the prompt, one at a time.
    pub(super) answer: u32,
    pub(super) chunk: u32,
    /// Slots beyond the prompt's last token, and beyond each of the answer.
    pub(super) lookahead: u32,
}

impl Sequences {
    pub(crate) fn can_admit_prompt(
        &self,
        view: View<'_>,
        prompt: &Prompt<'_>,
        (chunk, lookahead, answer): (u32, u32, u32),
    ) -> Result<Fit> {
        self.require_chunks(chunk)?;
        self.require_states(view, prompt.tokens.len(), chunk)?;
        let mut matches = [self.find_prefix(view, prompt, 1)?];
        let grows = (chunk, lookahead, answer);
        self.give_up(view, &[*prompt], &mut matches, grows);
        Ok(self.fit_of(view, prompt, &matches, grows))
    }

    /// Gives up what keeps a prompt from fitting, where it fits without that. With several page classes that is what it
    /// found: an extent with a found block cannot go to another class, and the prompt could wait for it forever. A found
    /// window or chunk stays beside the blocks that the first new tokens take, so it could raise the peak: where nothing
    /// is in use, waiting would not help. While classes pack their blocks, the only sequence finds nothing: what it found
    /// would lie in as many extents as before. With states it is its resume points, if the device has no room for the
    /// states there besides its own.
    pub(super) fn give_up<'a>(
        &self,
        view: View<'_>,
        prompts: &[Prompt<'_>],
        matches: &mut [Match<'a>],
        grows: (u32, u32, u32),
    ) {
        let (device, keeps_states) = (view.tiers.device(), self.keeps_states(view));
        let hits_may_lack = device.num_classes() > 1 || (!self.groups.leaving().is_empty() && device.is_idle());
        if !hits_may_lack && !keeps_states {
            return;
        }
        let packs = self.begins_packed(view);
        for (prompt, found) in prompts.iter().zip(matches) {
            let status = |found: &Match<'a>| self.fit_of(view, prompt, std::slice::from_ref(found), grows).status;
            if hits_may_lack && found.hits > 0 && (packs || status(found) != AllocStatus::Ok) {
                let alone = found.without_hits();
                if status(&alone) == AllocStatus::Ok {
                    *found = alone;
                }
            }
            if keeps_states && status(found) == AllocStatus::Never {
                let mut alone = found.without_hits();
                alone.keeps_points = false;
                if status(&alone) != AllocStatus::Never {
                    *found = alone;
                }
            }
        }
    }

    /// Whether a sequence that begins now is the only one on a device whose classes pack their blocks.
    pub(super) fn begins_packed(&self, view: View<'_>) -> bool {
        view.tiers.device().is_packing() && !self.rows.iter().any(|(_, row)| row.tier == Tier::Device)
    }

    /// Whether a prompt fits that has found what is its only match.
    fn fit_of(
        &self,
        view: View<'_>,
        prompt: &Prompt<'_>,
        matches: &[Match<'_>],
        (chunk, lookahead, answer): (u32, u32, u32),
    ) -> Fit {
        let found = &matches[0];
        let length = u32::try_from(prompt.tokens.len()).unwrap_or(u32::MAX);
        let run = |hits: usize| {
            let start = u32::try_from(hits).unwrap_or(u32::MAX).saturating_mul(self.block_size);
            Run { start, prompt: length, answer, chunk, lookahead }
        };
        let due = |run: Run| self.chunk_ends(view, found, run.start, length);
        let alone = |hits: usize| self.peak(run(hits), &due(run(hits)), |_, _| 0);
        let blocks = if self.groups.leaving().is_empty() {
            let held = (0..self.groups.num_growing())
                .map(|group| self.groups.blocks(group, found.hits * self.groups.per_key(usize::from(group))));
            let new = alone(0).saturating_sub(held.sum());
            Self::request_prompts(view, matches, new).blocks
        } else {
            let device = view.tiers.device();
            let is_shared = |found: &Found| match *found {
                Found::Device(block) => !self.is_null(block) && !device.costs(block, true),
                Found::Host(copy) => view.loading(copy).is_some(),
            };
            self.peak(run(found.hits), &due(run(found.hits)), |group, first| {
                found.table(group, first).filter(is_shared).count()
            })
        };
        // Whether it can ever fit: either without the cached blocks, which may be evicted by then, or with them, since
        // a window then needs less.
        let least = alone(0).with(alone(found.hits), usize::min);
        let request = Request { least, ..Request::device(blocks) };
        let kept = view.tiers.device().kept(self.watermark);
        let fit = view.fit(request, kept, || Self::idle_blocks(view, matches));
        let passes = self.require_nulls(view, [self.passed(view, prompt, found, chunk)].into_iter()).is_err();
        if passes { Fit { status: AllocStatus::Never, ..fit } } else { fit }
    }

    /// The maximum number of blocks of each class that a sequence holds at once, without those of its first ones that
    /// `shared` counts: by group, from a block on.
    pub(super) fn peak(&self, run: Run, due: &[u32], shared: impl Fn(usize, usize) -> usize) -> PerClass {
        let Run { start, prompt, answer, chunk, lookahead } = run;
        let (size, mut most) = (self.block_size, PerClass::default());
        let mut hold = |from: u32, to: u32| {
            let ahead = if to >= prompt { lookahead } else { 0 };
            let group = |(number, group): (u8, &Group)| {
                let size = self.groups.tokens(number);
                let held = group.held(from, to, ahead, size);
                let own = held.saturating_sub(shared(usize::from(number), group.needs(from, size).start));
                self.groups.blocks(number, own)
            };
            most = most.with((0..).zip(self.groups.growing()).map(group).sum(), usize::max);
        };
        if self.groups.leaving().is_empty() {
            hold(start, prompt.saturating_add(answer));
            return most;
        }
        let mut grow = |from: u32, to: u32, chunk: u32| {
            let period = self.groups.period(chunk, size);
            // Most is held in the last steps, or in the last ones that begin before chunked attention leaves a chunk.
            let ends = self.groups.chunk_ends(from..to, chunk).map(|end| (end - from).div_ceil(chunk));
            for last in ends.chain([(to - from).div_ceil(chunk)]) {
                for step in last.saturating_sub(period)..last {
                    let begin = from + step * chunk;
                    hold(begin, to.min(begin.saturating_add(chunk)));
                }
            }
        };
        let mut from = start;
        for &at in due.iter().chain([&prompt]) {
            if (from..=prompt).contains(&at) {
                grow(from, at, chunk.max(1));
                from = at;
            }
        }
        grow(prompt, prompt.saturating_add(answer), 1);
        most
    }

    /// What a batch of prompts takes of the device: `new` blocks, blocks to load into, and found blocks that are
    /// currently available. Blocks that are pinned, written to a store or offloaded are not available.
    pub(super) fn request_prompts(view: View<'_>, matches: &[Match<'_>], new: PerClass) -> Request {
        let loads = view.blocks_to_load(matches.iter().flat_map(Match::behind));
        let found = if let [one] = matches {
            let tables = one.tables().map(|table| view.tiers.device().cost(table, true)).sum::<PerClass>();
            tables + view.cost(Tier::Device, one.blocks_behind(), true)
        } else {
            view.cost(Tier::Device, &Self::idle_blocks(view, matches), true)
        };
        Request::device(new + loads + found)
    }

    /// Distinct found blocks that nothing uses yet, ascending.
    pub(super) fn idle_blocks(view: View<'_>, matches: &[Match<'_>]) -> Vec<BlockId> {
        let idle = |block: &&BlockId| !view.tiers.device().block(**block).is_used();
        let mut blocks: Vec<BlockId> = matches.iter().flat_map(Match::blocks).filter(idle).copied().collect();
        blocks.sort_unstable();
        blocks.dedup(); // several prompts of a batch may share one
        blocks
    }
}
