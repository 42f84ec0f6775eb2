//! Memory of blocks in flight, and idle buffers for reuse.
//!
//! Invariant: `used` counts the bytes of all blocks that belong to an operation or to an uncollected result, and never
//! exceeds `limit`.

use crate::buffer::{Buffer, LentRow};
use crate::geometry::PAGE;

/// Bytes of idle buffers that are kept for reuse.
const KEPT: usize = 64 << 20;

/// Header pages that are kept for reuse.
const KEPT_PAGES: usize = 1024;

pub(crate) struct Memory {
    stride: usize,
    limit: u64,
    used: u64,
    idle: Vec<Buffer>,
    /// Header pages whose rows were returned to the caller.
    pages: Vec<Buffer>,
}

impl Memory {
    pub(super) fn new(stride: usize, limit: u64) -> Self {
        Self { stride, limit, used: 0, idle: Vec::new(), pages: Vec::new() }
    }

    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    pub(super) fn used(&self) -> u64 {
        self.used
    }

    /// Reserves memory for up to `wanted` blocks, whoever owns it; returns for how many.
    pub(crate) fn reserve(&mut self, wanted: usize) -> usize {
        let room = (self.limit - self.used) / self.stride as u64;
        let count = usize::try_from(room).unwrap_or(usize::MAX).min(wanted);
        self.used += (count * self.stride) as u64;
        count
    }

    /// Reserves memory for up to `wanted` blocks; returns an entry for each that fits, with a buffer if one is idle.
    pub(crate) fn reserve_buffers(&mut self, wanted: usize) -> Vec<Option<Buffer>> {
        let count = self.reserve(wanted);
        (0..count).map(|_| self.idle.pop()).collect()
    }

    /// Releases memory that was reserved for blocks that were never submitted.
    pub(crate) fn unreserve(&mut self, count: usize) {
        self.used -= (count * self.stride) as u64;
    }

    /// A buffer for a block: around the row that was lent for it, or the store's own.
    pub(crate) fn buffer(&mut self, row: Option<Box<dyn LentRow>>) -> Buffer {
        match row {
            Some(row) => self.pages.pop().unwrap_or_else(|| Buffer::new(PAGE)).around(row),
            None => self.idle.pop().unwrap_or_else(|| Buffer::new(self.stride)),
        }
    }

    /// Releases one block's memory; keeps its buffer, if any, for reuse.
    pub(super) fn release(&mut self, buffer: Option<Buffer>) {
        self.unreserve(1);
        let Some(mut buffer) = buffer else { return };
        let (kept, most) = match buffer.take_row() {
            Some(_) => (&mut self.pages, KEPT_PAGES),
            None => (&mut self.idle, KEPT / self.stride),
        };
        if kept.len() < most {
            kept.push(buffer);
        }
    }
}
