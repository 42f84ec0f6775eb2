//! The verbs of a prefix store: what is to be loaded for a prompt, and what is to be written.

use super::Manager;
use crate::error::{Result, invalid};
use crate::hash::ExportedKey;
use crate::id::JobId;
use crate::sequence::Prompt;
use crate::tiers::{StoreWriteQueue, StoreWrites};
use crate::transfer::StoreJob;

impl Manager {
    /// Notes from now on which blocks a prefix store is to be given.
    ///
    /// # Errors
    /// The prefix cache is off, something is cached already, or there are several cache groups or null blocks.
    pub fn use_store(&mut self, writes: StoreWrites) -> Result<()> {
        let cached = self.tiers.device().published();
        if !self.is_caching() || cached > 0 || self.groups().len() > 1 || self.sequences.has_nulls() {
            let must = "0, with prefix caching and one cache group without a window, for a prefix store".to_owned();
            return Err(invalid("cached blocks", cached as i128, must));
        }
        self.tiers.use_write_queue(writes);
        Ok(())
    }

    /// Keys of a prompt's blocks that neither device nor host has and no load is bringing, first to last, at most `most`.
    ///
    /// # Errors
    /// A token has the reserved id.
    pub fn missing_blocks(&self, prompt: &Prompt<'_>, most: usize) -> Result<Vec<ExportedKey>> {
        let wanted = self.sequences.missing_blocks(self.view(), prompt, most)?;
        Ok(wanted.missing.iter().map(|missing| missing.chain.export()).collect())
    }

    /// Begins to load the first of those blocks, at most `most` and as far as there is room, to the host, or to the device
    /// where the host keeps no copies or has no room. Nobody finds them before [`Manager::end_load`]. A job without blocks has ended.
    ///
    /// # Errors
    /// A token has the reserved id.
    pub fn begin_load(&mut self, prompt: &Prompt<'_>, most: usize) -> Result<StoreJob> {
        let wanted = self.sequences.missing_blocks(self.view(), prompt, most)?;
        let kept_free = self.watermark_blocks();
        Ok(self.jobs.begin_load(&mut self.tiers, wanted, kept_free))
    }

    /// Ends a load: prompts find the blocks that have landed, the others go free. Returns how many can be found for it.
    ///
    /// # Errors
    /// The job is unknown, or there is not one result a block.
    pub fn end_load(&mut self, job: JobId, landed: &[bool]) -> Result<usize> {
        let tokens = self.block_size();
        let published = self.jobs.end_load(&mut self.tiers, job, landed, tokens)?;
        self.tiers.enforce_quotas();
        Ok(published)
    }

    /// Blocks that wait to be written to the store, those included whose bytes are gone meanwhile.
    #[must_use]
    pub fn waiting_for_store(&self) -> usize {
        self.tiers.write_queue().map_or(0, StoreWriteQueue::waiting)
    }

    /// Begins to read blocks for the store, at most `most`, all of one tier. A job without blocks has ended.
    pub fn begin_write(&mut self, most: usize) -> StoreJob {
        self.jobs.begin_write(&mut self.tiers, most)
    }

    /// Ends the reading of blocks for the store. Returns false if a verb has taken some of them meanwhile: what was read must not
    /// be stored.
    ///
    /// # Errors
    /// The job is unknown.
    pub fn end_write(&mut self, job: JobId) -> Result<bool> {
        let is_whole = self.jobs.end_write(&mut self.tiers, job)?;
        self.tiers.enforce_quotas();
        Ok(is_whole)
    }
}
