//! Consistency checks of the sequences, by themselves and against the tiers.

use super::{PrefixStats, Row, Sequences, blocks_for};
use crate::group::Group;
use crate::id::{BlockId, SequenceId, Tier};
use crate::tiers::Tiers;
use std::collections::HashMap;

impl Sequences {
    /// References to the blocks of a tier, counted from the tables.
    pub(crate) fn references(&self, tier: Tier) -> HashMap<BlockId, u32> {
        let mut refs = HashMap::new();
        for (_, row) in self.rows.iter().filter(|(_, row)| row.tier == tier) {
            for &block in &*row.table {
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
        if !self.stats.holds(self.block_size) {
            let PrefixStats { blocks, hit_blocks, tokens, hit_tokens, .. } = self.stats;
            return Err(format!("{hit_blocks} of {blocks} blocks and {hit_tokens} of {tokens} tokens were found"));
        }
        self.check_rows(tiers)
    }

    fn check_rows(&self, tiers: &Tiers) -> Result<(), String> {
        let size = u64::from(self.block_size);
        for (sequence, row) in self.rows.iter() {
            let (len, held) = (u64::from(row.len), row.table.len() as u64);
            let full = row.keys.as_ref().map(|keys| keys.keys.len() as u64);
            if full != (row.known != Row::NOT_FOLLOWED).then_some(u64::from(row.known) / size) {
                return Err(format!(
                    "sequence {sequence}: {} tokens known, keys of {full:?} blocks of {size}",
                    row.known
                ));
            }
            if held * size < len {
                return Err(format!("sequence {sequence}: {len} tokens in {held} blocks of {size}"));
            }
            if u64::from(u32::MAX).div_ceil(size) < held {
                return Err(format!("sequence {sequence}: {held} blocks of {size} are more than a sequence can fill"));
            }
            self.check_group_tables(sequence, row)?;
            self.check_entries(tiers, sequence, row)?;
            if row.writable <= row.len {
                continue; // nothing fits there
            }
            let index = u64::from(row.writable) / size - 1;
            let block = usize::try_from(index).ok().and_then(|i| row.table.get(i));
            let Some(&block) = block.filter(|_| row.tier == Tier::Device && len >= index * size) else {
                return Err(format!("sequence {sequence}: {len} tokens, writable to {}", row.writable));
            };
            if tiers.device().is_moving(block) {
                return Err(format!("sequence {sequence} would write a block that moves"));
            }
            let base = (i64::from(block.0) - i64::try_from(index).unwrap_or(i64::MAX)) * i64::from(self.block_size);
            if !tiers.device().block(block).is_exclusive() || row.slot_base != base {
                return Err(format!("sequence {sequence}: block {block} is not its own to write"));
            }
        }
        Ok(())
    }

    /// Checks a row's table, keys and counts against each other.
    fn check_entries(&self, tiers: &Tiers, sequence: SequenceId, row: &Row) -> Result<(), String> {
        let Some(&group) = self.groups.all().get(usize::from(row.group)) else { return Ok(()) };
        let (size, pool) = (self.block_size, tiers.pool(row.tier));
        // A recurrent row also skips states after the first that it holds.
        let nulls = if group == Group::Recurrent { group.unneeded(row.len, size) } else { row.null_prefix as usize };
        if let Some(at) = (nulls..row.table.len()).find(|&at| self.is_null(row.table[at])) {
            return Err(format!("sequence {sequence} of {} tokens has no block at {at}", row.len));
        }
        let member = row
            .group_tables
            .as_deref()
            .is_none_or(|group_tables| group_tables.get(usize::from(row.group)) == Some(&sequence));
        if !member || row.group_tables.is_some() == self.groups.is_single() {
            return Err(format!("sequence {sequence} is not in its own group_tables"));
        }
        if u64::from(row.published) * u64::from(size) > u64::from(row.len) {
            return Err(format!("sequence {sequence}: {} blocks published of {} tokens", row.published, row.len));
        }
        let filled = row.len.div_ceil(size) as usize;
        if let Some(block) = row.table.iter().skip(filled).find(|&&block| pool.block(block).is_published()) {
            return Err(format!("sequence {sequence} has no tokens in block {block}, which is published"));
        }
        let first = row.group_tables.as_deref().and_then(<[SequenceId]>::first).copied().unwrap_or(sequence);
        let Some(keys) = &self.rows.at(first).keys else { return Ok(()) };
        if first != sequence && row.keys.is_some() {
            return Err(format!("sequence {sequence} has keys, which only the first group's row may have"));
        }
        for (at, (&block, key)) in row.table.iter().zip(&keys.keys).enumerate() {
            if pool.key(block).is_some_and(|found| found != key.of_group(row.group)) {
                return Err(format!("sequence {sequence} has block {block} at {at}, published under another key"));
            }
        }
        Ok(())
    }

    /// Checks the rows of one sequence, starting from one of them.
    fn check_group_tables(&self, sequence: SequenceId, row: &Row) -> Result<(), String> {
        let group = self.groups.all().get(usize::from(row.group));
        let Some(&group) = group else { return Err(format!("sequence {sequence} is of cache group {}", row.group)) };
        let size = self.block_size;
        let needed = group.unneeded(row.len, size)..blocks_for(u64::from(row.len), size);
        let (null_prefix, table) = row.table.split_at(row.null_prefix as usize);
        if null_prefix.iter().any(|&block| !self.is_null(block)) || needed.clone().any(|i| self.is_null(row.table[i])) {
            return Err(format!("sequence {sequence} has {null_prefix:?} and {table:?}, needs entries {needed:?}"));
        }
        let Some(group_tables) = &row.group_tables else {
            return if self.groups.is_single() {
                Ok(())
            } else {
                Err(format!("sequence {sequence} has one table, needs one per group"))
            };
        };
        let relative = |(number, &id): (u8, &SequenceId)| {
            let Ok(other) = self.rows.get(id) else { return false };
            let grown = self.groups.growing().len() > usize::from(number.max(row.group));
            other.group_tables.as_ref() == Some(group_tables)
                && other.group == number
                && (other.tier, other.lost) == (row.tier, row.lost)
                && (!grown || other.len == row.len)
        };
        let whole = group_tables.len() == self.groups.all().len() && (0u8..).zip(group_tables.iter()).all(relative);
        if whole { Ok(()) } else { Err(format!("the rows of sequence {sequence} disagree")) }
    }
}
