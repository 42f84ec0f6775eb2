//! Whole-state invariant check: counts everything again and compares. For tests, fuzzing and the `strict` feature.

use crate::error::{Error, Result};
use crate::id::{BlockId, Tier};
use crate::lease::{Lease, LeaseKind};
use crate::manager::Manager;
use std::collections::HashMap;

impl Manager {
    /// Counts references and leases again from the tables and tickets, and compares them with the pools.
    ///
    /// # Errors
    /// The books contradict themselves.
    pub fn check(&self) -> Result<()> {
        for tier in Tier::ALL {
            self.check_tier(tier).map_err(|what| Error::Broken { what })?;
        }
        self.check_rows().map_err(|what| Error::Broken { what })
    }

    fn check_tier(&self, tier: Tier) -> std::result::Result<(), String> {
        let mut refs: HashMap<BlockId, u32> = HashMap::new();
        for (_, row) in self.rows().iter().filter(|(_, row)| row.tier == tier) {
            for &block in &row.table {
                *refs.entry(block).or_default() += 1;
            }
        }
        let mut leases: HashMap<BlockId, [u16; 3]> = HashMap::new();
        for Lease { kind, block, .. } in self.tickets().leases().filter(|lease| lease.tier == tier) {
            let counters = leases.entry(*block).or_default();
            match kind {
                LeaseKind::Drain => counters[0] += 1,
                LeaseKind::Read => counters[1] += 1,
                LeaseKind::Write => counters[2] += 1,
            }
        }
        let pool = self.pool(tier);
        for block in (0..).map(BlockId).take(pool.len()) {
            let refs = refs.remove(&block).unwrap_or(0);
            if let Some(what) = pool.check(block, refs, leases.remove(&block).unwrap_or_default()) {
                return Err(what);
            }
            if let Some((other, twin)) = pool.twin(block) {
                if self.pool(other).twin(twin) != Some((tier, block)) {
                    return Err(format!("{tier} block {block}: its twin, {other} block {twin}, has another twin"));
                }
            }
        }
        match refs.keys().chain(leases.keys()).next() {
            Some(block) => Err(format!("{tier} block {block} is in use and beyond the {} of the tier", pool.len())),
            None => Ok(()),
        }
    }

    fn check_rows(&self) -> std::result::Result<(), String> {
        let size = u64::from(self.block_size());
        for (sequence, row) in self.rows().iter() {
            let (len, held) = (u64::from(row.len), row.table.len() as u64);
            if held * size < len {
                return Err(format!("sequence {sequence}: {len} tokens in {held} blocks of {size}"));
            }
            if row.writable <= row.len {
                continue; // nothing fits there
            }
            let index = u64::from(row.writable) / size - 1;
            let block = usize::try_from(index).ok().and_then(|i| row.table.get(i));
            let Some(&block) = block.filter(|_| row.tier == Tier::Device && len >= index * size) else {
                return Err(format!("sequence {sequence}: {len} tokens, writable to {}", row.writable));
            };
            let base = (i64::from(block.0) - i64::try_from(index).unwrap_or(i64::MAX)) * i64::from(self.block_size());
            if self.pool(Tier::Device).refs(block) != 1 || row.slot_base != base {
                return Err(format!("sequence {sequence}: block {block} is not its own to write"));
            }
        }
        Ok(())
    }
}
