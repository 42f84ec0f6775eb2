//! Whole-state invariant check: counts everything again and compares. For tests, fuzzing and the `strict` feature.

use super::Manager;
use crate::block::Leases;
use crate::defrag::check_moves;
use crate::error::{self, Error, Result};
use crate::id::{BlockId, Tier};
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
            let mut leases: HashMap<BlockId, Leases> = HashMap::new();
            let held = self.transfers.leases().chain(self.pins.leases()).chain(self.jobs.leases());
            for Lease { kind, block, .. } in held.filter(|lease| lease.tier == tier) {
                leases.entry(block).or_default().add(kind);
            }
            self.tiers.check_tier(tier, self.sequences.references(tier), leases)?;
        }
        self.transfers.check()?;
        self.pins.check()?;
        self.jobs.check(&self.tiers)?;
        check_moves(self.view())?;
        self.sequences.check(&self.tiers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::LeaseKind;
    use crate::{Append, Config, Counts};

    /// Two sequences that share a block, one of them with room to write, and an unfinished swap.
    fn sample() -> Manager {
        let config = Config { prefix_caching: true, ..Config::new(4, [8, 8, 0]) };
        let mut manager = Manager::new(config).unwrap();
        let mut sequences = Vec::new();
        manager.allocate(&[6, 3], &mut sequences).unwrap();
        let first = manager.take_decision();
        manager.complete(first.ticket).unwrap();
        manager.fork(sequences[0], 1, &mut sequences).unwrap();
        manager.append(Append::new(&sequences[..1], Counts::All(1), &mut [0])).unwrap();
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
        let what = complaint(|manager| manager.tiers.pool_mut(Tier::Host).lease(BlockId(5), LeaseKind::Read));
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
            let writer =
                manager.sequences.rows().iter().find(|(_, row)| row.writable > row.len).map(|(id, _)| id).unwrap();
            let own = manager.sequences.rows().at(writer).first.table[1];
            let mut forks = Vec::new();
            manager.fork(writer, 1, &mut forks).unwrap();
            let row = manager.sequences.rows_mut().at_mut(writer);
            (row.writable, row.first.slot_base) = (8, (i64::from(own.0) - 1) * 4);
        });
        assert!(what.ends_with("is not its own to write (open tickets, first to last: 2)"), "{what}");
    }
}
