//! Which block table a device block is in. An entry may be stale: verify it before use.

use super::{GroupTable, Row, SequenceRows, Sequences, TableId, require_tier};
use crate::error::Result;
use crate::group::Groups;
use crate::id::{BlockId, SequenceId, Tier};
use crate::memory;
use crate::pool::Pool;
use crate::transfer::OpenStep;
use std::cell::Cell;

/// The table that a block was last known to be in, and its index. All tables that share a block have it at the same
/// index.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    /// Its number, see [`SequenceRows::number`].
    pub(crate) table: u32,
    pub(crate) index: u32,
}

const UNKNOWN: Owner = Owner { table: u32::MAX, index: u32::MAX };

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
    pub(crate) fn note(&mut self, table: u32, from: usize, blocks: &[BlockId]) {
        if self.are_noted() {
            for (index, block) in (u32::try_from(from).unwrap_or(u32::MAX)..).zip(blocks) {
                self.0[block.index()] = Owner { table, index };
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
    pub(crate) fn on_device(&self) -> impl Iterator<Item = (TableId, &Row, &GroupTable)> {
        self.rows.tables().filter(|(_, row, _)| row.tier == Tier::Device)
    }

    /// Tables of the named sequences, which must be on the device, or of all on the device, for all groups and without
    /// null blocks. Empty unless `wanted`.
    pub(crate) fn device_tables(&self, named: Option<&[SequenceId]>, wanted: bool) -> Result<Vec<Vec<BlockId>>> {
        for &sequence in named.unwrap_or_default() {
            require_tier(sequence, self.rows.get(sequence)?, Tier::Device)?;
        }
        let blocks = |GroupTable { table, .. }: &GroupTable| {
            table.iter().copied().filter(|&block| !self.is_null(block)).collect()
        };
        Ok(match named {
            _ if !wanted => Vec::new(),
            Some(named) => self.tables_of(named).map(|id| blocks(self.rows.table(id))).collect(),
            None => self.on_device().map(|(_, _, table)| blocks(table)).collect(),
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
            let tables = self.on_device().filter(|&(id, ..)| self.rows.written(id) == open);
            let blocks = tables.flat_map(|(_, _, table)| table.table.iter().copied());
            blocks.filter(|&block| !pool.block(block).is_published()).collect()
        };
        step.tiers.track_moves(written)?;
        self.owners.grow(known);
        for (id, _, table) in self.rows.tables().filter(|(_, row, _)| row.tier == Tier::Device) {
            self.owners.note(self.rows.number(id), 0, &table.table);
        }
        Ok(())
    }

    /// The table that a device block was last known to be in.
    pub(crate) fn owner(&self, block: BlockId) -> Owner {
        self.owners.get(block)
    }

    /// All rows, the groups, and the owner of each device block, which readers may correct.
    pub(crate) fn owners(&mut self) -> (&SequenceRows, &Groups, &[Cell<Owner>]) {
        (&self.rows, &self.groups, self.owners.cells())
    }

    /// Makes the next append to a block that is about to move go through the pool.
    pub(crate) fn seal(&mut self, block: BlockId) {
        let owner = self.owner(block);
        let Some((id, row)) = self.rows.numbered(owner.table).filter(|(_, row)| row.len < row.writable) else { return };
        if self.rows.table(id).table.get(((row.writable - 1) / self.groups.tokens(id.group)) as usize) == Some(&block) {
            self.rows.at_mut(id.sequence).writable = 0;
        }
    }

    /// Replaces a block by another in the same entry of some tables.
    pub(crate) fn replace(&mut self, from: BlockId, to: BlockId, tables: &[TableId], index: usize) {
        let owner = self.owner(from);
        if self.owners.are_noted() {
            self.owners.0[to.index()] = owner;
        }
        for &id in tables {
            self.rows.table_mut(id).table.replace(index, to);
        }
        if let Some(&id) = tables.first() {
            self.owners.note(self.rows.number(id), index, &[to]);
        }
    }
}
