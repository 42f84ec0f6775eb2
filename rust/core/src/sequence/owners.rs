//! Which block table a device block is in. An entry may be stale: verify it before use.

use super::{Row, SequenceRows, Sequences, require_tier};
use crate::error::Result;
use crate::id::{BlockId, SequenceId, Tier};
use crate::memory;
use crate::pool::Pool;
use crate::transfer::OpenStep;
use std::cell::Cell;

/// The table that a block was last known to be in, and its index. All tables that share a block have it at the same
/// index.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    pub(crate) row: u32,
    pub(crate) index: u32,
}

const UNKNOWN: Owner = Owner { row: u32::MAX, index: u32::MAX };

/// Last known owner of each device block; empty until moves are used.
#[derive(Clone, Debug, Default)]
pub(crate) struct Owners(Vec<Owner>);

impl Owners {
    /// Whether owners are recorded.
    #[inline]
    pub(crate) fn are_noted(&self) -> bool {
        !self.0.is_empty()
    }

    /// Fails unless there is memory for `blocks` blocks.
    pub(crate) fn require(&self, blocks: usize) -> Result<()> {
        memory::require_items::<Owner>(blocks.saturating_sub(self.0.len()))
    }

    /// Records the owners of at least `blocks` blocks from now on.
    pub(crate) fn grow(&mut self, blocks: usize) {
        self.0.resize(blocks.max(self.0.len()), UNKNOWN);
    }

    /// Records which table blocks are in, starting at which entry.
    #[inline]
    pub(crate) fn note(&mut self, row: u32, from: usize, blocks: &[BlockId]) {
        if self.are_noted() {
            for (index, block) in (u32::try_from(from).unwrap_or(u32::MAX)..).zip(blocks) {
                self.0[block.index()] = Owner { row, index };
            }
        }
    }

    /// The table that a block was last known to be in.
    pub(crate) fn get(&self, block: BlockId) -> Owner {
        self.0.get(block.index()).copied().unwrap_or(UNKNOWN)
    }

    /// All owners, which readers may correct.
    pub(crate) fn cells(&mut self) -> &[Cell<Owner>] {
        Cell::from_mut(&mut self.0[..]).as_slice_of_cells()
    }
}

impl Sequences {
    /// Tables on the device.
    pub(crate) fn on_device(&self) -> impl Iterator<Item = (SequenceId, &Row)> {
        self.rows.iter().filter(|(_, row)| row.tier == Tier::Device)
    }

    /// Tables of the named sequences, which must be on the device, or of all on the device, for all groups and without
    /// null blocks. Empty unless `wanted`.
    pub(crate) fn device_tables(&self, named: Option<&[SequenceId]>, wanted: bool) -> Result<Vec<Vec<BlockId>>> {
        let mut all = Vec::new();
        let named = named.map(|named| self.members(named, &mut all)).transpose()?;
        for &member in named.unwrap_or_default() {
            require_tier(member, self.rows.get(member)?, Tier::Device)?;
        }
        let blocks = |row: &Row| row.table.iter().copied().filter(|&block| !self.is_null(block)).collect();
        Ok(match named {
            _ if !wanted => Vec::new(),
            Some(named) => named.iter().map(|&member| blocks(self.rows.at(member))).collect(),
            None => self.on_device().map(|(_, row)| blocks(row)).collect(),
        })
    }

    /// Starts recording owners and tracking the placement of the device's blocks.
    pub(crate) fn track_owners(&mut self, step: &mut OpenStep<'_>) -> Result<()> {
        if self.owners.are_noted() {
            return Ok(());
        }
        let (open, known) = (step.transfers.open(), step.tiers.device().extent());
        self.owners.require(known)?;
        let written = |pool: &Pool| {
            let rows = self.on_device().filter(|(_, row)| row.written == open);
            let blocks = rows.flat_map(|(_, row)| row.table.iter().copied());
            blocks.filter(|&block| !pool.block(block).is_published()).collect()
        };
        step.tiers.track_moves(written)?;
        self.owners.grow(known);
        for (sequence, row) in self.rows.iter().filter(|(_, row)| row.tier == Tier::Device) {
            self.owners.note(sequence.row(), 0, &row.table);
        }
        Ok(())
    }

    /// The table that a device block was last known to be in.
    pub(crate) fn owner(&self, block: BlockId) -> Owner {
        self.owners.get(block)
    }

    /// All rows, and the owner of each device block, which readers may correct.
    pub(crate) fn owners(&mut self) -> (&SequenceRows, &[Cell<Owner>]) {
        (&self.rows, self.owners.cells())
    }

    /// Makes the next append to a block that is about to move go through the pool.
    pub(crate) fn seal(&mut self, block: BlockId) {
        let (owner, size) = (self.owner(block), self.block_size);
        let (rows, _) = self.rows.entries();
        if let Some(row) = rows.get_mut(owner.row as usize).filter(|row| row.len < row.writable) {
            if row.table.get((row.writable / size - 1) as usize) == Some(&block) {
                row.writable = 0;
            }
        }
    }

    /// Replaces a block by another in the same entry of some tables.
    pub(crate) fn replace(&mut self, from: BlockId, to: BlockId, rows: &[u32], index: usize) {
        let owner = self.owner(from);
        if self.owners.are_noted() {
            self.owners.0[to.index()] = owner;
        }
        let (entries, _) = self.rows.entries();
        for &row in rows {
            entries[row as usize].table.replace(index, to);
        }
        if let Some(&row) = rows.first() {
            self.owners.note(row, index, &[to]);
        }
    }
}
