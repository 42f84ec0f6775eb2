//! Admission of prompts: the blocks that they need, for both query and call, and the blocks to look up in a prefix
//! store.

use super::prompt::{Match, Prompt};
use super::{Sequences, blocks_for};
use crate::error::Result;
use crate::fit::{AllocStatus, Fit};
use crate::id::{BlockId, Tier};
use crate::transfer::{Missing, Request, View, Wanted};

impl Sequences {
    pub(crate) fn can_admit_prompt(
        &self,
        view: View<'_>,
        prompt: &Prompt<'_>,
        chunk: u32,
        lookahead: u32,
    ) -> Result<Fit> {
        self.require_chunks(chunk)?;
        self.require_states(view, prompt.tokens.len(), chunk)?;
        let found = [self.find_prefix(view, prompt, 1)?];
        // The larger of two needs: the whole prompt at once, and one chunk of it at a time.
        let blocks = |hits| {
            let missing = |chunk| self.missing(view, prompt, (hits, found[0].run), chunk);
            missing(u32::MAX).max(missing(chunk)) + self.ahead(prompt, lookahead)
        };
        let request = Self::request_prompts(view, &found, blocks(found[0].hits));
        // Whether it can ever fit: either without the cached blocks, which may be evicted by then, or with them, since
        // a window then needs less.
        let held = found[0].blocks().filter(|&&block| !self.is_null(block)).count() + found[0].num_on_host();
        let request = Request { least: blocks(0).min(blocks(found[0].hits) + held), ..request };
        let fit = view.fit(request, self.watermark.blocks(), || Self::idle_blocks(view, &found));
        let passes = self.require_nulls(view, [self.passed(view, prompt, &found[0], chunk)].into_iter()).is_err();
        Ok(if passes { Fit { status: AllocStatus::Never, ..fit } } else { fit })
    }

    /// What a batch of prompts takes of the device: `new` blocks, blocks to load into, and found blocks that are
    /// currently available. Blocks that are pinned, written to a store or offloaded are not available.
    pub(super) fn request_prompts(view: View<'_>, matches: &[Match<'_>], new: usize) -> Request {
        let loads = view.blocks_to_load(matches.iter().flat_map(|found| &found.tail));
        let found = if let [one] = matches {
            view.cost(Tier::Device, one.blocks(), true)
        } else {
            let mut idle = Self::idle_blocks(view, matches);
            idle.dedup();
            view.cost(Tier::Device, &idle, true)
        };
        Request::device(new + loads + found)
    }

    /// Found blocks that nothing uses yet, ascending.
    pub(super) fn idle_blocks(view: View<'_>, matches: &[Match<'_>]) -> Vec<BlockId> {
        let idle = |block: &&BlockId| !view.tiers.device().block(**block).is_used();
        let mut blocks: Vec<BlockId> = matches.iter().flat_map(Match::blocks).filter(idle).copied().collect();
        blocks.sort_unstable();
        blocks
    }

    /// Blocks for lookahead slots after a prompt.
    fn ahead(&self, prompt: &Prompt<'_>, lookahead: u32) -> usize {
        let tokens = prompt.tokens.len() as u64;
        let ahead = blocks_for(tokens + u64::from(lookahead), self.block_size) - blocks_for(tokens, self.block_size);
        ahead * self.groups.growing().len()
    }

    /// Blocks of a prompt that neither device nor host has, up to `most`. None with several cache groups or a window,
    /// whose blocks do not go to a prefix store.
    pub(crate) fn missing_blocks(&self, view: View<'_>, prompt: &Prompt<'_>, most: usize) -> Result<Wanted> {
        let (mut wanted, mut on_host) = (Wanted::default(), Vec::new());
        let keys = self.keys_of(prompt)?;
        if !self.groups.is_single() || self.groups.has_nulls() {
            return Ok(wanted);
        }
        let limit = prompt.tokens.len().saturating_sub(1) / self.block_size as usize;
        for (at, key) in keys.keys[..limit].iter().enumerate() {
            let depth = u32::try_from(at).unwrap_or(u32::MAX);
            if let Some(block) = view.tiers.device().find(key) {
                wanted.on_device.push((*key, block));
                wanted.found.push((depth, (Tier::Device, block)));
            } else if let Some(block) = view.tiers.host().find(key) {
                on_host.push(block);
                wanted.found.push((depth, (Tier::Host, block)));
            } else if view.jobs.is_loading(key) {
                wanted.lacking.push((depth, *key));
            } else {
                if wanted.missing.len() == most {
                    break;
                }
                let Some(chain) = keys.chain_at(at, self.block_size) else { break };
                let parent = at.checked_sub(1).and_then(|before| keys.chain_at(before, self.block_size));
                let (tenant, salt, lora_id) = (view.tiers.tenant_of(&prompt.spec), keys.salt, keys.lora_id);
                wanted.lacking.push((depth, *key));
                wanted.missing.push(Missing { chain, parent, depth, tenant, salt, lora_id });
            }
        }
        wanted.on_host = on_host;
        Ok(wanted)
    }
}
