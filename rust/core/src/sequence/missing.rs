//! What a prefix store may have of a prompt: the blocks that no tier of the manager has.

use super::{Prompt, Sequences};
use crate::error::Result;
use crate::transfer::{Missing, StoreJobs, View, Wanted};

impl Sequences {
    /// What neither device nor host has of a prompt, up to `most` blocks. Nothing of several cache groups or of a window,
    /// whose blocks do not go to a prefix store.
    pub(crate) fn missing_blocks(
        &self,
        view: View<'_>,
        prompt: &Prompt<'_>,
        most: usize,
        jobs: &StoreJobs,
    ) -> Result<Wanted> {
        let (mut wanted, mut on_host) = (Wanted::default(), Vec::new());
        let keys = self.keys_of(prompt)?;
        if !self.groups.is_single() || self.groups.has_nulls() {
            return Ok(wanted);
        }
        let limit = prompt.tokens.len().saturating_sub(1) / self.block_size as usize;
        for (at, key) in keys.keys[..limit].iter().enumerate() {
            if view.tiers.device().find(key).is_some() {
                continue;
            }
            if let Some(block) = view.tiers.host().find(key) {
                on_host.push(block);
            } else if jobs.is_loading(key) {
                wanted.awaited += 1;
            } else {
                if wanted.missing.len() == most {
                    break;
                }
                let Some(chain) = keys.chain_at(at, self.block_size) else { break };
                let parent = at.checked_sub(1).and_then(|before| keys.chain_at(before, self.block_size));
                let (depth, tenant) = (u32::try_from(at).unwrap_or(u32::MAX), view.tiers.tenant_of(&prompt.spec));
                wanted.missing.push(Missing { chain, parent, depth, tenant, lora_id: keys.lora_id });
            }
        }
        wanted.on_host = on_host;
        Ok(wanted)
    }
}
