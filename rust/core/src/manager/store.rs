//! Calls for a prefix store: which blocks to load for a prompt, and which to write.

use super::Manager;
use crate::error::{Result, invalid};
use crate::hash::{ExportedKey, Key};
use crate::id::{JobId, LeaseId, Tier};
use crate::page::PerClass;
use crate::sequence::{Prompt, StoreSearch};
use crate::tiers::{StoreWriteQueue, StoreWrites, Unwritten};
use crate::transfer::{LeaseShare, Missing, StoreJob, Wanted};

/// Blocks of a prompt that neither device nor host have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MissingBlocks {
    /// Keys in the store of those that no load is bringing.
    pub keys: Vec<ExportedKey>,
    /// The page class of each.
    pub page_classes: Vec<u8>,
    /// Page classes of those that loads are bringing.
    pub loading: Vec<u8>,
}

impl Manager {
    /// Starts recording which blocks to write to a prefix store.
    ///
    /// # Errors
    /// The prefix cache is off, something is cached already, or the host keeps no copies although there are several groups,
    /// null blocks, a drafter, or blocks with fewer tokens than a key stands for.
    pub fn use_store(&mut self, writes: StoreWrites) -> Result<()> {
        if !self.is_caching() {
            return Err(invalid("prefix_caching", 0, "1 for a prefix store".to_owned()));
        }
        if !self.sequences.is_full_attention() && !self.tiers.keeps_host_copies() {
            let must = "at least 1 for a prefix store of several groups, windows, states or drafters: their blocks are \
                        loaded by way of the host, with PrefixCaching(host=True)";
            return Err(invalid("host blocks of the prefix cache", 0, must.to_owned()));
        }
        let cached = self.tiers.device().published();
        if cached > 0 {
            return Err(invalid("cached blocks", cached as i128, "0 when a prefix store joins".to_owned()));
        }
        self.tiers.use_write_queue(writes, self.sequences.store_groups());
        Ok(())
    }

    /// What a store could complete of a prompt that continues only at resume points.
    ///
    /// # Errors
    /// A token has the reserved id.
    pub fn search_store(&self, prompt: &Prompt<'_>) -> Result<StoreSearch> {
        self.sequences.search_store(self.view(), prompt)
    }

    /// A prompt's blocks that are neither on device or host nor being loaded, in order, at most `most`; and those before
    /// the end of these that are being loaded. With `point`, those that a resume point after that many blocks needs; else
    /// those up to the prompt's last boundary.
    ///
    /// # Errors
    /// A token has the reserved id.
    pub fn missing_blocks(&self, prompt: &Prompt<'_>, most: usize, point: Option<usize>) -> Result<MissingBlocks> {
        let Wanted { missing, loading, .. } = self.sequences.missing_blocks(self.view(), prompt, most, point)?;
        let page_classes = missing.iter().map(|missing| missing.page_class).collect();
        Ok(MissingBlocks { keys: missing.iter().map(Missing::exported).collect(), page_classes, loading })
    }

    /// Number of blocks of a page class that the next loads of a prompt may take, one on the host and one on the device;
    /// `point` as for [`Manager::missing_blocks`].
    ///
    /// # Errors
    /// A token has the reserved id, or there is no such class.
    pub fn room_to_load(&self, prompt: &Prompt<'_>, point: Option<usize>, class: usize) -> Result<usize> {
        if class >= self.num_classes() {
            return Err(invalid("page_class", class as i128, format!("below {}", self.num_classes())));
        }
        let wanted = self.sequences.missing_blocks(self.view(), prompt, usize::MAX, point)?;
        Ok(self.jobs.room(&self.tiers, &wanted, class, self.watermark_blocks()).iter().map(|(_, room)| room).sum())
    }

    /// [`StoreSearch::deepest`] of a search for whose blocks the host has room besides `coming` ones of each page class,
    /// which have no block yet.
    ///
    /// # Errors
    /// There is not one entry per key, or per page class.
    pub fn deepest_with_room(&self, search: &StoreSearch, has: &[bool], coming: &[usize]) -> Result<usize> {
        if coming.len() != self.num_classes() {
            let must = format!("{}, the page classes", self.num_classes());
            return Err(invalid("length of coming", coming.len() as i128, must));
        }
        let coming: PerClass = (0..).zip(coming).map(|(class, &count)| PerClass::of(class, count)).sum();
        let (wanted, tiers) = (Wanted { by_host: true, ..Wanted::default() }, &self.tiers);
        let rooms: PerClass = (0..self.num_classes())
            .map(|class| PerClass::of(class, self.jobs.room(tiers, &wanted, class, 0)[0].1))
            .sum();
        let share = self.jobs.host_share(tiers);
        search.deepest_that(has, |loads| {
            let all = loads + coming;
            all.saturating_sub(rooms).total() == 0 && tiers.host().weigh(all) <= share
        })
    }

    /// Leases the blocks of a prompt that waits: those that device and host have, and those that loads bring. Until
    /// [`Manager::end_lease`], they are neither evicted nor moved. Returns `None`, without leasing anything, if that is
    /// more than its share.
    ///
    /// # Errors
    /// A token has the reserved id.
    pub fn lease_prompt(&mut self, prompt: &Prompt<'_>, share: LeaseShare) -> Result<Option<LeaseId>> {
        let wanted =
            if self.is_caching() { self.sequences.blocks_to_lease(self.view(), prompt)? } else { Wanted::default() };
        let kept_free = self.watermark_blocks();
        Ok(self.jobs.lease(&mut self.tiers, &wanted, share, kept_free))
    }

    /// The load of a lease's prompt has ended: from now on, the lease holds the blocks that the prompt finds.
    ///
    /// # Errors
    /// There was never such a lease, or a token has the reserved id.
    pub fn settle_lease(&mut self, lease: LeaseId, prompt: &Prompt<'_>) -> Result<()> {
        let found = if self.is_caching() { self.sequences.blocks_to_keep(self.view(), prompt)? } else { Vec::new() };
        self.jobs.prompt_leases_mut().settle(&mut self.tiers, lease, &found)
    }

    /// Ends a prompt's lease, if it has not ended.
    ///
    /// # Errors
    /// There was never such a lease.
    pub fn end_lease(&mut self, lease: LeaseId) -> Result<()> {
        self.jobs.prompt_leases_mut().end(&mut self.tiers, lease)?;
        self.tiers.enforce_quotas();
        Ok(())
    }

    /// Ends the leases of all prompts.
    pub fn end_leases(&mut self) {
        self.jobs.prompt_leases_mut().end_all(&mut self.tiers);
        self.tiers.enforce_quotas();
    }

    /// Number of leases of prompts.
    #[must_use]
    pub fn num_leases(&self) -> usize {
        self.jobs.prompt_leases().len()
    }

    /// Number of distinct blocks that loads have still to take for prompts with a lease.
    #[must_use]
    pub fn num_promised(&self) -> usize {
        self.jobs.num_promised()
    }

    /// Bytes of those blocks.
    #[must_use]
    pub fn promised_bytes(&self) -> u64 {
        self.tiers.device().bytes_of(self.jobs.promised_blocks())
    }

    /// Number of device blocks that only leases of prompts, or transfers of them, hold.
    #[must_use]
    pub fn num_leased_idle(&self) -> usize {
        self.jobs.prompt_leases().num_idle(&self.tiers, Tier::Device)
    }

    /// Begins to load the first of those blocks, at most `most` of one page class and as room permits, to the host, or to
    /// the device if the host keeps no copies or has no room. They cannot be found before [`Manager::end_load`]. A job without blocks
    /// has already ended. With several groups, windows or states, they go to the host only.
    ///
    /// # Errors
    /// A token has the reserved id.
    pub fn begin_load(&mut self, prompt: &Prompt<'_>, most: usize, point: Option<usize>) -> Result<StoreJob> {
        let wanted = self.sequences.missing_blocks(self.view(), prompt, most, point)?;
        let kept_free = self.watermark_blocks();
        Ok(self.jobs.begin_load(&mut self.tiers, wanted, kept_free))
    }

    /// Ends a load: blocks that landed can now be found, the others are freed. Returns how many can be found.
    ///
    /// # Errors
    /// The job is unknown, or there is not one result per block.
    pub fn end_load(&mut self, job: JobId, landed: &[bool]) -> Result<usize> {
        let tokens = self.block_size();
        let published = self.jobs.end_load(&mut self.tiers, job, landed, tokens)?;
        self.tiers.enforce_quotas();
        Ok(published)
    }

    /// Lets all queued blocks be written now: the process is about to end.
    pub fn flush_to_store(&mut self) {
        if let Some(write_queue) = self.tiers.write_queue_mut() {
            write_queue.flush();
        }
    }

    /// Number of blocks queued for writing to the store, including those whose bytes are gone by now.
    #[must_use]
    pub fn waiting_for_store(&self) -> usize {
        self.tiers.write_queue().map_or(0, StoreWriteQueue::waiting)
    }

    /// Begins to read blocks for the store, at most `most`, all of one tier and page class. A job without blocks has
    /// already ended.
    pub fn begin_write(&mut self, most: usize) -> StoreJob {
        self.begin_write_of(most, usize::MAX)
    }

    /// Like [`Manager::begin_write`], at most `most_bytes` or one block; with one page class there is no such bound.
    pub fn begin_write_of(&mut self, most: usize, most_bytes: usize) -> StoreJob {
        let most_weight = if self.num_classes() == 1 { usize::MAX } else { most_bytes };
        let Self { jobs, tiers, transfers, .. } = self;
        jobs.begin_write(tiers, (most, most_weight), |key| transfers.promised().any(|(link, _)| link == key.link()))
    }

    /// Ends reading blocks for the store. Returns false if a call took some of them in the meantime; then the bytes
    /// read must not be stored.
    ///
    /// # Errors
    /// The job is unknown.
    pub fn end_write(&mut self, job: JobId) -> Result<bool> {
        let is_whole = self.jobs.end_write(&mut self.tiers, job)?;
        self.tiers.enforce_quotas();
        Ok(is_whole)
    }

    /// Notes that the store did not keep blocks of writes, by [`StoreJob::cache_keys`].
    pub fn note_unwritten(&mut self, cache_keys: &[Key], why: Unwritten) {
        if let Some(write_queue) = self.tiers.write_queue_mut() {
            write_queue.note_unwritten(cache_keys, why);
        }
    }

    /// Ends all loads, none of whose bytes have landed, and all writes, whose blocks may be written later.
    ///
    /// # Errors
    /// None in a consistent manager.
    pub fn give_up_store_jobs(&mut self) -> Result<()> {
        let tokens = self.block_size();
        self.jobs.give_up_all(&mut self.tiers, tokens)?;
        self.tiers.enforce_quotas();
        Ok(())
    }
}
