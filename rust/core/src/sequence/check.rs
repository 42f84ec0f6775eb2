//! Consistency checks of the sequences, by themselves and against the tiers.

use super::{GroupTable, PrefixStats, Row, Sequences, TableId};
use crate::group::Group;
use crate::id::{BlockId, SequenceId, Tier};
use crate::tiers::Tiers;
use std::collections::{HashMap, HashSet};

impl Sequences {
    /// References to the blocks of a tier, counted from the tables.
    pub(crate) fn references(&self, tier: Tier) -> HashMap<BlockId, u32> {
        let mut refs = HashMap::new();
        for (_, _, table) in self.rows.tables().filter(|(_, row, _)| row.tier == tier) {
            for &block in &*table.table {
                *refs.entry(block).or_default() += 1;
            }
        }
        refs
    }

    /// Checks rows and counters, also against the tiers.
    pub(crate) fn check(&self, tiers: &Tiers) -> Result<(), String> {
        tiers.check_settings(self.groups.cross())?;
        let tenants = tiers.num_tenants();
        let stray = |row: &Row| row.keys.as_ref().is_some_and(|keys| usize::from(keys.tenant) > tenants);
        if let Some((sequence, _)) = self.rows.iter().find(|(_, row)| stray(row)) {
            return Err(format!("sequence {sequence} is of a tenant beyond {tenants}"));
        }
        let per_key = (0..self.groups.growing().len()).map(|group| self.groups.per_key(group)).sum();
        if !self.stats.holds(self.block_size, per_key) {
            let PrefixStats { blocks, hit_blocks, tokens, hit_tokens, loaded, .. } = self.stats;
            return Err(format!(
                "{hit_blocks} of {blocks} blocks and {hit_tokens} of {tokens} tokens were found, {loaded} loaded"
            ));
        }
        self.check_rows(tiers)
    }

    fn check_rows(&self, tiers: &Tiers) -> Result<(), String> {
        let size = u64::from(self.block_size);
        for (sequence, row) in self.rows.iter() {
            let full = row.keys.as_ref().map(|keys| keys.keys.len() as u64);
            let known = u64::from(self.groups.whole(row.known, self.block_size));
            if full != (row.known != Row::NOT_FOLLOWED).then_some(known) {
                return Err(format!(
                    "sequence {sequence}: {} tokens known, keys of {full:?} blocks of {size}",
                    row.known
                ));
            }
            for (number, table) in (0..).zip(self.rows.tables_of(sequence)) {
                self.check_entries(tiers, sequence, row, number, table)?;
            }
            let growing = || self.rows.tables_of(sequence).take(self.groups.growing().len());
            let lengths = self.growing_tables_of(&[sequence]).map(|id| self.entries(id).len()).collect::<HashSet<_>>();
            if self.groups.is_even() && lengths.len() > 1 {
                return Err(format!("the tables of sequence {sequence} differ in length"));
            }
            let drafts = self.num_drafts(sequence);
            if drafts > 0 && (drafts >= row.len || row.tier != Tier::Device || row.writable > 0) {
                return Err(format!("sequence {sequence} of {} tokens in {} has {drafts} drafts", row.len, row.tier));
            }
            if row.writable <= row.len {
                continue; // nothing fits there
            }
            for (number, table) in (0..).zip(growing()) {
                self.check_writable(tiers, sequence, row, (number, table))?;
            }
        }
        Ok(())
    }

    /// Checks that a row may write the last block of a table.
    fn check_writable(
        &self,
        tiers: &Tiers,
        sequence: SequenceId,
        row: &Row,
        (number, table): (u8, &GroupTable),
    ) -> Result<(), String> {
        let (tokens, first) = self.geometry(number);
        let (len, size) = (u64::from(row.len), u64::from(tokens));
        let index = (u64::from(row.writable) - 1) / size;
        let block = usize::try_from(index).ok().and_then(|i| table.table.get(i));
        let Some(&block) = block.filter(|_| row.tier == Tier::Device && len >= index * size) else {
            return Err(format!("sequence {sequence}: {len} tokens, writable to {}", row.writable));
        };
        if tiers.device().is_moving(block) {
            return Err(format!("sequence {sequence} would write a block that moves"));
        }
        let base = (i64::from(block.0 - first) - i64::try_from(index).unwrap_or(i64::MAX)) * i64::from(tokens);
        if !tiers.device().block(block).is_exclusive() || table.slot_base != base {
            return Err(format!("sequence {sequence}: block {block} is not its own to write"));
        }
        Ok(())
    }

    /// Checks a table against its row's tokens and keys.
    fn check_entries(
        &self,
        tiers: &Tiers,
        sequence: SequenceId,
        row: &Row,
        number: u8,
        GroupTable { null_prefix, published, .. }: &GroupTable,
    ) -> Result<(), String> {
        let (size, pool, group) = (self.groups.tokens(number), tiers.pool(row.tier), self.groups.get(number));
        let id = TableId { sequence, group: number };
        if let Some(block) = self.states_behind(id).iter().find(|&&block| !pool.block(block).is_exclusive()) {
            return Err(format!("sequence {sequence}: block {block} with the state after a draft is not its own"));
        }
        let (len, table) = (self.rows.len_of(id), self.entries(id));
        let held = table.len() as u64;
        if held * u64::from(size) < u64::from(len) {
            return Err(format!("sequence {sequence}: {len} tokens in {held} blocks of {size}"));
        }
        if u64::from(u32::MAX.div_ceil(size)) < held {
            return Err(format!("sequence {sequence}: {held} blocks of {size} are more than a sequence can fill"));
        }
        let needed = group.needs(len, size);
        let (nulls, rest) = table.split_at(*null_prefix as usize);
        if nulls.iter().any(|&block| !self.is_null(block)) || needed.clone().any(|i| self.is_null(table[i])) {
            return Err(format!("sequence {sequence} has {nulls:?} and {rest:?}, needs entries {needed:?}"));
        }
        // A recurrent group also skips states after the first that it holds.
        let nulls = if group == Group::Recurrent { needed.start } else { nulls.len() };
        if let Some(at) = (nulls..table.len()).find(|&at| self.is_null(table[at])) {
            return Err(format!("sequence {sequence} of {len} tokens has no block at {at}"));
        }
        if u64::from(*published) * u64::from(self.block_size) > u64::from(len) {
            return Err(format!("sequence {sequence}: {published} blocks published of {len} tokens"));
        }
        let filled = len.div_ceil(size) as usize;
        if let Some(block) = table.iter().skip(filled).find(|&&block| pool.block(block).is_published()) {
            return Err(format!("sequence {sequence} has no tokens in block {block}, which is published"));
        }
        let Some(keys) = &row.keys else { return Ok(()) };
        let class = self.groups.class(number);
        if let Some(block) = table.iter().find(|&&block| !self.is_null(block) && pool.class_of(block) != class) {
            return Err(format!("sequence {sequence} has block {block} of another class than {class}"));
        }
        let per_key = self.groups.per_key(usize::from(number));
        let last_of_key = table.iter().skip(per_key - 1).step_by(per_key);
        for (at, (&block, key)) in last_of_key.zip(keys.found_by()).enumerate() {
            if pool.key(block).is_some_and(|found| found != key.of_group(number)) {
                return Err(format!("sequence {sequence} has block {block} at {at}, published under another key"));
            }
        }
        Ok(())
    }
}
