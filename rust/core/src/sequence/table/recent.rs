//! The token ids of each row's last two blocks: those hashed next, and those rehashed when a row is truncated.

use super::{Row, RowKeys, SequenceRows};
use crate::error::Result;
use crate::id::SequenceId;
use crate::memory;

/// Blocks of a row whose token ids are kept: the one being filled, and the one before it.
const BLOCKS: usize = 2;

/// Token ids by row: position `p` is entry `p % span` of the row's `span` entries.
#[derive(Debug, Clone)]
pub(super) struct RecentTokens {
    ids: Vec<u32>,
    block_size: u32,
    /// Tokens after a block that it waits for, before it is hashed.
    ahead: u32,
    /// Entries whose tokens complete a block.
    last: [usize; BLOCKS],
}

impl RecentTokens {
    pub(super) fn new(block_size: u32, ahead: u32) -> Self {
        let (size, ahead_at) = (block_size as usize, ahead as usize);
        let last = [size - 1 + ahead_at, (2 * size - 1 + ahead_at) % (2 * size)];
        Self { ids: Vec::new(), block_size, ahead, last }
    }

    /// Entries of a row.
    #[inline]
    fn span(&self) -> usize {
        BLOCKS * self.block_size as usize
    }

    /// Makes room for `rows` rows in all, or fails.
    pub(super) fn require(&mut self, rows: usize) -> Result<()> {
        let more = rows.saturating_mul(self.span()).saturating_sub(self.ids.len());
        memory::make_room(&mut self.ids, more)
    }

    /// Writes the ids of a row's tokens from position `first` on; only the last ones are kept.
    pub(super) fn write(&mut self, row: usize, first: usize, tokens: &[u32]) {
        let span = self.span();
        self.open(row);
        let skipped = tokens.len().saturating_sub(span);
        for (position, token) in (first + skipped..).zip(&tokens[skipped..]) {
            self.ids[row * span + position % span] = *token;
        }
    }

    fn open(&mut self, row: usize) {
        let end = (row + 1) * self.span();
        if self.ids.len() < end {
            self.ids.resize(end, 0);
        }
    }

    /// The id of one of a row's last tokens.
    fn token(&self, row: usize, position: u32) -> u32 {
        self.ids[row * self.span() + position as usize % self.span()]
    }

    /// Token ids of one of a row's last two blocks.
    fn block(&self, row: usize, block: usize) -> &[u32] {
        let size = self.block_size as usize;
        &self.ids[row * self.span() + block % BLOCKS * size..][..size]
    }
}

impl SequenceRows {
    /// Makes room to follow `count` more rows, or fails.
    pub(crate) fn require_followed(&mut self, count: usize) -> Result<()> {
        let more = count.saturating_sub(self.unused.len());
        self.recent.require(self.entries.len().saturating_add(more))
    }

    /// Starts following a row that begins with these tokens; the caller has called [`SequenceRows::require_followed`].
    pub(crate) fn follow(&mut self, sequence: SequenceId, keys: RowKeys, tokens: &[u32]) {
        self.recent.write(sequence.row() as usize, 0, tokens);
        let row = self.at_mut(sequence);
        row.known = u32::try_from(tokens.len()).unwrap_or(Row::NOT_FOLLOWED);
        row.keys = Some(Box::new(keys));
    }

    /// Follows a child if its parent is; the caller has called [`SequenceRows::require_followed`].
    pub(crate) fn follow_as(&mut self, child: SequenceId, parent: SequenceId) {
        let Row { keys, known, .. } = self.at(parent);
        let (keys, known) = (keys.clone(), *known);
        if keys.is_some() {
            let (from, to, span) = (parent.row() as usize, child.row() as usize, self.recent.span());
            self.recent.open(to);
            self.recent.ids.copy_within(from * span..(from + 1) * span, to * span);
        }
        let row = self.at_mut(child);
        (row.keys, row.known) = (keys, known);
    }

    /// Records the id of the first token of a followed row that has none.
    #[inline]
    pub(crate) fn push_token(&mut self, sequence: SequenceId, token: u32) {
        let index = sequence.row() as usize;
        let (row, span) = (&mut self.entries[index], self.recent.span());
        let at = row.known as usize % span;
        self.recent.ids[index * span + at] = token;
        row.known += 1;
        if self.recent.last.contains(&at) {
            self.hash_block(index);
        }
    }

    /// Hashes the block that has just been filled.
    #[inline(never)]
    fn hash_block(&mut self, index: usize) {
        let row = &mut self.entries[index];
        let Some(keys) = &mut row.keys else { return };
        let RecentTokens { block_size, ahead, .. } = self.recent;
        // The first token completes no block.
        if (row.known.saturating_sub(ahead) / block_size) as usize == keys.keys.len() {
            return;
        }
        let tokens = self.recent.block(index, keys.keys.len());
        keys.push_block(tokens, block_size);
        if ahead > 0 {
            keys.push_ahead(self.recent.token(index, row.known - 1), block_size);
        }
    }
}
