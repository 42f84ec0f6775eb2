//! Whole-state invariant check: counts everything again and compares. For tests, fuzzing and the `strict` feature.

use crate::block::Leases;
use crate::error::{self, Error, Result};
use crate::group::{Group, NULL_BLOCK};
use crate::id::{BlockId, SequenceId, Tier};

use crate::manager::Manager;
use crate::table::Row;
use crate::transfer::Lease;
use std::collections::HashMap;

impl Manager {
    /// Counts references and leases again from the tables and tickets, and compares them with the pools.
    ///
    /// # Errors
    /// The manager contradicts itself.
    pub fn check(&self) -> Result<()> {
        let open: Vec<_> = self.open_tickets().take(error::MAX_NAMED).collect();
        self.check_all().map_err(|what| Error::Broken { what: what + &error::named(&open) })
    }

    fn check_all(&self) -> std::result::Result<(), String> {
        for tier in Tier::ALL {
            self.check_tier(tier)?;
        }
        self.check_publishes()
            .and_then(|()| self.check_pins())
            .and_then(|()| self.check_moves())
            .and_then(|()| self.check_settings())
            .and_then(|()| self.check_stats())
            .and_then(|()| self.check_rows())
    }

    fn check_tier(&self, tier: Tier) -> std::result::Result<(), String> {
        let mut refs: HashMap<BlockId, u32> = HashMap::new();
        for (_, row) in self.rows().iter().filter(|(_, row)| row.tier == tier) {
            for &block in &*row.table {
                *refs.entry(block).or_default() += 1;
            }
        }
        let mut leases: HashMap<BlockId, Leases> = HashMap::new();
        let held = self.transfers().leases().chain(self.pin_leases());
        for Lease { kind, block, .. } in held.filter(|lease| lease.tier == tier) {
            leases.entry(block).or_default().add(kind);
        }
        self.tiers.check_tier(tier, refs, leases)
    }

    fn has_nulls(&self) -> bool {
        self.groups().iter().any(|group| group.slides())
    }

    fn check_rows(&self) -> std::result::Result<(), String> {
        let size = u64::from(self.block_size());
        for (sequence, row) in self.rows().iter() {
            let (len, held) = (u64::from(row.len), row.table.len() as u64);
            if held * size < len {
                return Err(format!("sequence {sequence}: {len} tokens in {held} blocks of {size}"));
            }
            if u64::from(u32::MAX).div_ceil(size) < held {
                return Err(format!("sequence {sequence}: {held} blocks of {size} are more than a sequence can fill"));
            }
            self.check_group_tables(sequence, row)?;
            self.check_entries(sequence, row)?;
            if row.writable <= row.len {
                continue; // nothing fits there
            }
            let index = u64::from(row.writable) / size - 1;
            let block = usize::try_from(index).ok().and_then(|i| row.table.get(i));
            let Some(&block) = block.filter(|_| row.tier == Tier::Device && len >= index * size) else {
                return Err(format!("sequence {sequence}: {len} tokens, writable to {}", row.writable));
            };
            let base = (i64::from(block.0) - i64::try_from(index).unwrap_or(i64::MAX)) * i64::from(self.block_size());
            if !self.pool(Tier::Device).block(block).is_exclusive() || row.slot_base != base {
                return Err(format!("sequence {sequence}: block {block} is not its own to write"));
            }
        }
        Ok(())
    }

    /// What a row's table, keys and counts say of each other.
    fn check_entries(&self, sequence: SequenceId, row: &Row) -> std::result::Result<(), String> {
        let Some(&group) = self.groups().get(usize::from(row.group)) else { return Ok(()) };
        let (size, pool) = (self.block_size(), self.pool(row.tier));
        let is_null = |block: BlockId| self.has_nulls() && block == NULL_BLOCK;
        // A recurrent row also passes over states behind the first that it holds.
        let nulls = if group == Group::Recurrent { group.unneeded(row.len, size) } else { row.null_prefix as usize };
        if let Some(at) = (nulls..row.table.len()).find(|&at| is_null(row.table[at])) {
            return Err(format!("sequence {sequence} of {} tokens has no block at {at}", row.len));
        }
        let member = row
            .group_tables
            .as_deref()
            .is_none_or(|group_tables| group_tables.get(usize::from(row.group)) == Some(&sequence));
        if !member || row.group_tables.is_some() != (self.groups().len() > 1) {
            return Err(format!("sequence {sequence} is not of its own group_tables"));
        }
        if u64::from(row.published) * u64::from(size) > u64::from(row.len) {
            return Err(format!("sequence {sequence}: {} blocks published of {} tokens", row.published, row.len));
        }
        let filled = row.len.div_ceil(size) as usize;
        if let Some(block) = row.table.iter().skip(filled).find(|&&block| pool.block(block).is_published()) {
            return Err(format!("sequence {sequence} has no tokens in block {block}, which is published"));
        }
        let first = row.group_tables.as_deref().and_then(<[SequenceId]>::first).copied().unwrap_or(sequence);
        let Some(keys) = &self.rows().at(first).keys else { return Ok(()) };
        if first != sequence && row.keys.is_some() {
            return Err(format!("sequence {sequence} has keys, which are for the first group to have"));
        }
        for (at, (&block, key)) in row.table.iter().zip(&keys.keys).enumerate() {
            if pool.key(block).is_some_and(|found| found != key.of_group(row.group)) {
                return Err(format!("sequence {sequence} has block {block} at {at}, published under another key"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::LeaseKind;
    use crate::manager::{Config, Counts};

    /// Two sequences that share a block, one of them with room to write, and an unfinished swap.
    fn sample() -> Manager {
        let config = Config { block_size: 4, blocks: [8, 8, 0], watermark: 0.0, prefix_caching: true };
        let mut manager = Manager::new(config).unwrap();
        let mut sequences = Vec::new();
        manager.allocate(&[6, 3], &mut sequences).unwrap();
        let first = manager.take_decision();
        manager.complete(first.ticket).unwrap();
        manager.fork(sequences[0], 1, &mut sequences).unwrap();
        manager.append(&sequences[..1], Counts::All(1), 0, &mut [0]).unwrap();
        manager.swap_out(&sequences[1..2], Tier::Host).unwrap();
        let _ = manager.take_decision();
        manager.check().unwrap();
        manager
    }

    fn complaint(spoil: impl FnOnce(&mut Manager)) -> String {
        let mut manager = sample();
        spoil(&mut manager);
        manager.check().unwrap_err().to_string()
    }

    #[test]
    fn a_reference_that_no_table_has_is_noticed() {
        let what = complaint(|manager| manager.tiers.pool_mut(Tier::Device).share(BlockId(0), 1));
        assert!(what.contains("device block 0: 3 references, counted 2"), "{what}");
    }

    #[test]
    fn a_reference_that_the_pool_has_lost_is_noticed() {
        let what = complaint(|manager| manager.tiers.pool_mut(Tier::Device).release(BlockId(0)));
        assert!(what.contains("device block 0: 1 references, counted 2"), "{what}");
    }

    #[test]
    fn a_lease_without_a_ticket_is_noticed() {
        let what = complaint(|manager| manager.tiers.pool_mut(Tier::Host).lease(BlockId(5), LeaseKind::Read).unwrap());
        assert!(
            what.contains(
                "host block 5: Leases { reads: 1, overlappable: 0, filling: false }, counted Leases { reads: 0"
            ),
            "{what}"
        );
    }

    #[test]
    fn a_lease_that_ended_before_its_ticket_is_noticed() {
        let what = complaint(|manager| manager.tiers.pool_mut(Tier::Host).end_lease(BlockId(0), LeaseKind::Write));
        assert!(what.contains("host block 0: Leases"), "{what}");
    }

    #[test]
    fn a_block_lost_from_the_free_ones_is_noticed() {
        let mut taken = Vec::new();
        let what = complaint(|manager| {
            manager.tiers.pool_mut(Tier::Host).take(1, false, &mut taken);
        });
        assert!(what.contains("1 references, counted 0"), "{what}");
    }

    #[test]
    fn a_one_sided_copy_is_noticed() {
        let what = complaint(|manager| {
            manager.tiers.pool_mut(Tier::Device).set_tier_copy(BlockId(0), Some((Tier::Host, BlockId(0))));
        });
        assert!(what.contains("has another copy"), "{what}");
    }

    #[test]
    fn a_row_that_would_write_a_shared_block_is_noticed() {
        let what = complaint(|manager| {
            let writer = manager.rows().iter().find(|(_, row)| row.writable > row.len).map(|(id, _)| id).unwrap();
            let own = manager.rows().at(writer).table[1];
            let mut forks = Vec::new();
            manager.fork(writer, 1, &mut forks).unwrap();
            let row = manager.rows_mut().at_mut(writer);
            (row.writable, row.slot_base) = (8, (i64::from(own.0) - 1) * 4);
        });
        assert!(what.ends_with("is not its own to write (open tickets, first to last: 2)"), "{what}");
    }
}
