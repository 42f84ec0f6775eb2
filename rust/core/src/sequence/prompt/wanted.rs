//! What a prefix store can bring for a prompt: the blocks that device and host lack, and the resume points that these
//! complete.

use super::{Match, Prompt};
use crate::block::TierBlock;
use crate::error::{Result, invalid};
use crate::group::Groups;
use crate::hash::ExportedKey;
use crate::host_cache::Found;
use crate::id::Tier;
use crate::page::PerClass;
use crate::sequence::Sequences;
use crate::sequence::table::RowKeys;
use crate::transfer::{Missing, View, Wanted};
use std::collections::HashSet;

/// The blocks that device and host lack of a prompt that continues only at resume points, and which of these points a
/// store completes.
///
/// The store is asked for all of the keys; [`StoreSearch::deepest`] then tells where the prompt can continue.
#[derive(Clone, Debug)]
pub struct StoreSearch {
    keys: Vec<ExportedKey>,
    /// Entries of the blocks in their tables, and their groups.
    places: Vec<(usize, usize)>,
    groups: Groups,
    block_size: u32,
    /// First blocks of the prompt that device and host can serve.
    hits: usize,
    /// Maximum number of blocks that the prompt can share.
    limit: usize,
}

impl StoreSearch {
    /// Keys of the blocks.
    #[must_use]
    pub fn keys(&self) -> &[ExportedKey] {
        &self.keys
    }

    /// Page class of each block.
    #[must_use]
    pub fn page_classes(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.places.iter().map(|&(_, group)| self.class(group))
    }

    fn class(&self, group: usize) -> usize {
        self.groups.class(u8::try_from(group).unwrap_or(u8::MAX))
    }

    /// First blocks of the prompt up to the deepest point that is whole with those of the blocks that the store `has`,
    /// if at most `most` of them have to be loaded for it. 0 if no point is deeper than what device and host serve.
    ///
    /// # Errors
    /// There is not one entry per key.
    pub fn deepest(&self, has: &[bool], most: usize) -> Result<usize> {
        self.deepest_that(has, |loads| loads.total() <= most)
    }

    /// Like [`StoreSearch::deepest`], if the numbers of blocks of each page class that have to be loaded fit.
    ///
    /// # Errors
    /// There is not one entry per key.
    pub fn deepest_that(&self, has: &[bool], have_room: impl Fn(PerClass) -> bool) -> Result<usize> {
        if has.len() != self.keys.len() {
            let wanted = format!("{}, the keys", self.keys.len());
            return Err(invalid("length of has", has.len() as i128, wanted));
        }
        let (mut absent, mut to_load, mut run) = (HashSet::new(), HashSet::new(), self.limit);
        // By place: blocks to load of the groups that keep every block, up to it.
        let mut loads_before = vec![PerClass::default(); self.limit + 1];
        for (&(entry, group), &has) in self.places.iter().zip(has) {
            if !self.groups.leaving().contains(&group) {
                let (at, _) = self.groups.key_of(group, entry);
                loads_before[at + 1] += PerClass::of(self.class(group), 1);
                run = if has { run } else { run.min(at) };
            } else if has {
                to_load.insert((entry, group));
            } else {
                absent.insert((entry, group));
            }
        }
        for at in 0..self.limit {
            let before = loads_before[at];
            loads_before[at + 1] += before;
        }
        let fits = |end: &usize| {
            let mut loads = loads_before[*end];
            let mut point = self.groups.point(*end, self.block_size);
            let is_whole = point.all(|part| {
                loads += PerClass::of(self.class(part.1), usize::from(to_load.contains(&part)));
                !absent.contains(&part)
            });
            is_whole && have_room(loads)
        };
        Ok((self.hits + 1..=run).rev().find(fits).unwrap_or(0))
    }
}

impl Sequences {
    /// The blocks that a point behind the first `at` keys of a prompt needs: the entry of each in its table, and its group.
    fn parts(&self, at: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let kept = (0..at).flat_map(|at| self.groups.kept(at));
        kept.chain(self.groups.point(at, self.block_size))
    }

    /// Where device or host have a block of a prompt. On the device, the blocks of points are found with these only.
    fn find_part(&self, view: View<'_>, keys: &RowKeys, (entry, group): (usize, usize)) -> Option<TierBlock> {
        let (device, anchor) = (view.tiers.device(), self.groups.anchor());
        let (at, part) = self.groups.key_of(group, entry);
        let find = || device.find(&self.own_key(keys.found_by(), anchor, self.anchor_entry(at)));
        let on_device = if group == anchor && part == 0 {
            find()
        } else {
            let own = self.companions_of(group);
            let companions = own.and_then(|own| Some((own, device.points()?.companions(find()?)?)));
            companions.map(|(own, all)| all[own.start + entry - at * self.groups.per_key(group)])
        };
        let on_host = || view.tiers.host().find(&self.own_key(keys.found_by(), group, entry));
        let on_host = || on_host().map(|block| (Tier::Host, block));
        on_device.map(|block| (Tier::Device, block)).or_else(on_host)
    }

    /// Whether prompts can be loaded from a store: by way of the host, unless there is one group of full attention whose
    /// blocks each have a key.
    fn loads_from_store(&self, view: View<'_>) -> bool {
        self.is_full_attention() || view.tiers.keeps_host_copies()
    }

    /// Blocks of a prompt that neither device nor host has, at most `most`, up to the point behind its first `at`; without
    /// `at`, up to its last boundary.
    pub(crate) fn missing_blocks(
        &self,
        view: View<'_>,
        prompt: &Prompt<'_>,
        most: usize,
        at: Option<usize>,
    ) -> Result<Wanted> {
        let mut wanted = Wanted { by_host: !self.is_full_attention(), ..Wanted::default() };
        let keys = self.keys_of(prompt)?;
        let limit = prompt.tokens.len().saturating_sub(1) / self.block_size as usize;
        if !self.loads_from_store(view) {
            return Ok(wanted);
        }
        let tenant = view.tiers.tenant_of(&prompt.spec);
        for (place, part) in self.parts(at.unwrap_or(limit).min(limit)).enumerate() {
            let key = self.own_key(keys.found_by(), part.1, part.0);
            let place = u32::try_from(place).unwrap_or(u32::MAX);
            match self.find_part(view, &keys, part) {
                Some(block) => {
                    wanted.found.push((place, block));
                    match block.0 {
                        Tier::Device => wanted.on_device.push((key, block.1)),
                        _ => wanted.on_host.push(block.1),
                    }
                }
                None if view.jobs.is_loading(&key) => {
                    let class = self.class_of(part.1);
                    wanted.lacking.push((place, key, class));
                    wanted.loading.push(class);
                }
                None if wanted.missing.len() == most => break,
                None => {
                    let Some(missing) = self.missing_part(&keys, part, tenant) else { break };
                    wanted.lacking.push((place, key, missing.page_class));
                    wanted.missing.push(missing);
                }
            }
        }
        Ok(wanted)
    }

    /// The same up to the prompt's last boundary, for a prompt that waits.
    pub(crate) fn blocks_to_lease(&self, view: View<'_>, prompt: &Prompt<'_>) -> Result<Wanted> {
        let mut wanted = self.missing_blocks(view, prompt, usize::MAX, None)?;
        if wanted.by_host {
            wanted.found.extend(self.found_blocks(view, prompt)?);
            wanted.found.retain(|(_, (tier, _))| *tier == Tier::Host);
            wanted.on_device.clear();
        }
        Ok(wanted)
    }

    /// The blocks that a waiting prompt's lease holds once its load has ended. On the device, a prompt with windows may
    /// need room that blocks it has left behind would take.
    pub(crate) fn blocks_to_keep(&self, view: View<'_>, prompt: &Prompt<'_>) -> Result<Vec<(u32, TierBlock)>> {
        let mut found = self.found_blocks(view, prompt)?;
        found.retain(|(_, (tier, _))| *tier == Tier::Host || self.is_full_attention());
        Ok(found)
    }

    fn class_of(&self, group: usize) -> u8 {
        let class = self.groups.class(u8::try_from(group).unwrap_or(u8::MAX));
        u8::try_from(class).unwrap_or(u8::MAX)
    }

    /// The groups, for the queue of blocks to write to a store.
    pub(crate) fn store_groups(&self) -> Groups {
        self.groups.clone()
    }

    fn missing_part(&self, keys: &RowKeys, (entry, group): (usize, usize), tenant: u16) -> Option<Missing> {
        let (at, part) = self.groups.key_of(group, entry);
        let group = u8::try_from(group).ok()?;
        let chain = keys.chain_at(at, self.block_size)?;
        let before = at.checked_sub(1).and_then(|before| keys.chain_at(before, self.block_size));
        Some(Missing {
            chain,
            before,
            hangs_on: self.groups.hangs_on((group, part), chain, before),
            page_class: self.class_of(usize::from(group)),
            group,
            part,
            anchor: u8::try_from(self.groups.anchor()).ok()?,
            mark: self.groups.mark((group, part)),
            ahead: self.ahead_keys(keys, at, (group, part)),
            depth: u32::try_from(at).unwrap_or(u32::MAX),
            tenant,
            salt: keys.salt,
            lora_id: keys.lora_id,
        })
    }

    /// What a store could complete of a prompt, see [`StoreSearch`].
    pub(crate) fn search_store(&self, view: View<'_>, prompt: &Prompt<'_>) -> Result<StoreSearch> {
        let keys = self.keys_of(prompt)?;
        let limit = prompt.tokens.len().saturating_sub(1) / self.block_size as usize;
        let hits = self.find_prefix(view, prompt, 1)?.hits;
        let limit = if self.loads_from_store(view) { limit.max(hits) } else { hits };
        let places = self.groups.point(hits + 1, self.block_size);
        let first = places.map(|(entry, group)| self.groups.key_of(group, entry).0).min().unwrap_or(hits);
        let kept = (hits..limit).flat_map(|at| self.groups.kept(at));
        let tails = (first.min(limit)..limit).flat_map(|at| {
            self.groups.leaving().iter().flat_map(move |&group| {
                let per_key = self.groups.per_key(group);
                (at * per_key..(at + 1) * per_key).map(move |entry| (entry, group))
            })
        });
        let mut places: Vec<_> = kept.chain(tails).collect();
        places.retain(|&part| self.find_part(view, &keys, part).is_none());
        let export = |&(entry, group): &(usize, usize)| {
            let (at, part) = self.groups.key_of(group, entry);
            keys.export(at, self.groups.mark((u8::try_from(group).unwrap_or(u8::MAX), part)), self.block_size)
        };
        let exported = places.iter().filter_map(export).collect();
        Ok(StoreSearch {
            keys: exported,
            places,
            groups: self.groups.clone(),
            block_size: self.block_size,
            hits,
            limit,
        })
    }

    /// Blocks of device and host that a prompt finds, and their places in its tables.
    fn found_blocks(&self, view: View<'_>, prompt: &Prompt<'_>) -> Result<Vec<(u32, TierBlock)>> {
        let found = self.find_prefix(view, prompt, 1)?;
        let tables = (0..self.groups.growing().len()).flat_map(|group| Match::table(&found, group, 0).zip(0u32..));
        let blocks = tables.filter_map(|(found, place)| match found {
            Found::Device(block) => Some((place, (Tier::Device, block))).filter(|_| !self.is_null(block)),
            Found::Host(copy) => Some((place, (Tier::Host, copy))),
        });
        Ok(blocks.collect())
    }
}
