//! Block tables: which blocks hold a sequence's tokens. One row per sequence, with a table in each cache group; rows are
//! reused, and a handle carries the manager's number and the row's generation, so that a foreign or stale handle is
//! detected.

use super::extras::Extras;
use crate::error::fault;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::hash::{Chain, ExportedKey, GroupMark, Key, RESERVED_TOKEN};
use crate::id::{BlockId, SequenceId, TicketId, Tier};
use crate::memory;
use std::ops::Deref;

mod marks;
mod recent;
pub(super) use marks::Marks;
use recent::RecentTokens;

/// Maximum number of sequences.
const MAX_SEQUENCES: usize = SequenceId::FIELD_MAX as usize + 1;

/// The blocks of one sequence, as a slice. Changes are tracked, so that a copy, such as a row of an attention kernel's
/// block table, can be updated incrementally.
#[derive(Debug, Clone, Default)]
#[repr(C)]
pub(crate) struct BlockTable {
    /// Counts changes.
    version: u32,
    /// Version after the last change to existing entries.
    edited: u32,
    /// First entry changed since version `edited_since`.
    edited_from: u32,
    edited_since: u32,
    blocks: Vec<BlockId>,
}

impl BlockTable {
    pub(crate) fn version(&self) -> u32 {
        self.version
    }

    /// Number of entries still correct in a copy of `version` with `filled` entries.
    pub(crate) fn unchanged(&self, version: u32, filled: usize) -> usize {
        if version == self.version || version.wrapping_sub(self.edited) < 1 << 31 {
            filled
        } else if version.wrapping_sub(self.edited_since) < 1 << 31 {
            filled.min(self.edited_from as usize)
        } else {
            0
        }
    }

    /// Adds entries at the end; `add` must not change existing ones.
    #[inline]
    pub(crate) fn extend_with<T>(&mut self, add: impl FnOnce(&mut Vec<BlockId>) -> T) -> T {
        self.version = self.version.wrapping_add(1);
        add(&mut self.blocks)
    }

    /// The blocks, to add, change or remove those behind the entries, which no copy of the table shows.
    pub(crate) fn behind(&mut self) -> &mut Vec<BlockId> {
        &mut self.blocks
    }

    /// Replaces an entry.
    pub(crate) fn replace(&mut self, index: usize, block: BlockId) {
        self.blocks[index] = block;
        self.edit(index);
    }

    /// Sets entries `from..to` to one block; `gone` becomes the previous ones.
    pub(crate) fn blank(&mut self, from: usize, to: usize, block: BlockId, gone: &mut Vec<BlockId>) {
        gone.clear();
        gone.extend_from_slice(&self.blocks[from..to]);
        self.blocks[from..to].fill(block);
        self.edit(from);
    }

    /// Removes the entries from `len` on.
    pub(crate) fn cut(&mut self, len: usize) -> Vec<BlockId> {
        if len >= self.blocks.len() {
            return Vec::new();
        }
        self.edit(len);
        self.blocks.split_off(len)
    }

    /// Removes all entries.
    pub(crate) fn take(&mut self) -> Vec<BlockId> {
        self.edit(0);
        std::mem::take(&mut self.blocks)
    }

    /// Replaces all entries.
    pub(crate) fn set(&mut self, blocks: Vec<BlockId>) {
        self.edit(0);
        self.blocks = blocks;
    }

    /// Updates a row of a block table and its sync state. Blocks are counted from the first of their class.
    #[inline]
    pub(crate) fn sync(&self, synced: &mut SyncState, row: &mut [i32], first_block: u32) {
        let added = synced.version.wrapping_add(1) == self.version && synced.filled as usize + 1 == self.blocks.len();
        match (self.blocks.last(), row.get_mut(synced.filled as usize)) {
            (Some(&block), Some(to)) if added && self.edited != self.version => {
                *to = as_i32(block, first_block);
                *synced = SyncState { version: self.version, filled: synced.filled + 1 };
            }
            _ => self.sync_all(synced, row, first_block),
        }
    }

    #[inline(never)]
    fn sync_all(&self, synced: &mut SyncState, row: &mut [i32], first_block: u32) {
        let (kept, stale) = match synced.filled {
            SyncState::UNKNOWN => (0, row.len()),
            filled => (self.unchanged(synced.version, filled as usize), filled as usize),
        };
        let len = self.blocks.len();
        let kept = kept.min(len);
        for (to, block) in row[kept..len].iter_mut().zip(&self.blocks[kept..]) {
            *to = as_i32(*block, first_block);
        }
        // The row may belong to another, narrower table than last time.
        if let Some(rest) = row.get_mut(len..stale.min(row.len())) {
            rest.fill(0);
        }
        *synced = SyncState { version: self.version, filled: u32::try_from(len).unwrap_or(SyncState::UNKNOWN) };
    }

    fn edit(&mut self, from: usize) {
        let from = u32::try_from(from).unwrap_or(u32::MAX);
        // Entries often change several at a time, before a copy is updated.
        if self.edited == self.version && self.edited_from > 0 {
            self.edited_from = self.edited_from.min(from);
        } else {
            (self.edited_from, self.edited_since) = (from, self.version);
        }
        self.version = self.version.wrapping_add(1);
        self.edited = self.version;
    }
}

impl Deref for BlockTable {
    type Target = [BlockId];

    fn deref(&self) -> &[BlockId] {
        &self.blocks
    }
}

/// What a row of a block table shows: the first `filled` entries of a version, then zeros.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SyncState {
    pub(crate) version: u32,
    filled: u32,
}

impl SyncState {
    const UNKNOWN: u32 = u32::MAX;

    /// The state of uninitialized memory.
    pub(crate) fn nothing() -> Self {
        Self { version: u32::MAX, filled: Self::UNKNOWN }
    }
}

/// The table of one sequence in one cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TableId {
    /// The sequence.
    pub sequence: SequenceId,
    /// Number of the group.
    pub group: u8,
}

impl From<SequenceId> for TableId {
    /// The table in the first group.
    fn from(sequence: SequenceId) -> Self {
        Self { sequence, group: 0 }
    }
}

/// What a sequence has in one cache group. It fills a cache line, and its first half is what a decode step uses.
#[derive(Debug, Clone)]
#[repr(C)]
pub(crate) struct GroupTable {
    /// Slot that token 0 would have if the block being written extended backwards; a token's slot is this plus its
    /// position.
    pub(crate) slot_base: i64,
    /// What the caller's block table, if it keeps one, shows of this table.
    pub(crate) synced: SyncState,
    pub(crate) table: BlockTable,
    /// Entries at the start that are null blocks.
    pub(crate) null_prefix: u32,
    /// Blocks published since the sequence arrived in its tier.
    pub(crate) published: u32,
}

impl GroupTable {
    fn unused() -> Self {
        let (synced, table) = (SyncState::nothing(), BlockTable::default());
        Self { slot_base: 0, synced, table, null_prefix: 0, published: 0 }
    }

    /// Call before removing entries: entries added since the last sync may have been written to a caller's row by other
    /// means, so that row must then be rewritten completely.
    pub(crate) fn note_cut(&mut self) {
        if self.synced.version != self.table.version() && self.table.len() > self.synced.filled as usize {
            self.synced = SyncState::nothing();
        }
    }
}

/// One sequence: what its tables have in common, and the first group's. The fields that a decode step uses with one
/// group fit in one cache line.
#[derive(Debug, Clone)]
#[repr(C, align(64))]
pub(crate) struct Row {
    /// The handle of the row's sequence; its generation is odd while the row is in use.
    pub(crate) id: SequenceId,
    /// Tokens in the sequence.
    pub(crate) len: u32,
    /// Tokens that fit without asking the pool: the end of the blocks being written while they are exclusive in all
    /// growing groups, else 0.
    pub(crate) writable: u32,
    /// Step in which tokens were last given slots.
    pub(crate) written: TicketId,
    /// Last batch call that named the row.
    pub(crate) stamp: u32,
    /// Number of leading tokens with known ids, which `keys` are made of; [`Row::NOT_FOLLOWED`] without `keys`.
    pub(crate) known: u32,
    /// The table in the first group.
    pub(crate) first: GroupTable,
    /// Last ticket that moves or copies blocks of this row.
    pub(crate) ticket: TicketId,
    /// Keys of the full blocks, if the prefix cache knows the row's tokens.
    pub(crate) keys: Option<Box<RowKeys>>,
    /// Step in which the encoder's tokens were given slots.
    pub(crate) encoder_written: TicketId,
    /// Tokens of the encoder, in a cross attention group.
    pub(crate) encoder_tokens: u32,
    pub(crate) tier: Tier,
    /// Whether blocks of this row are moving between tiers under `ticket`.
    pub(crate) moving: bool,
    /// Whether a failed transfer lost bytes of this row.
    pub(crate) lost: bool,
    /// Retention priority of the sequence's cached blocks.
    pub(crate) priority: u8,
}

// A cache line for a table, and two for a row.
const _: () = assert!(size_of::<GroupTable>() == 64 && size_of::<Row>() == 128);

/// What the prefix cache knows of a row. Every token is hashed once.
#[derive(Debug, Clone)]
pub(crate) struct RowKeys {
    pub(crate) chain: Chain,
    /// Keys of the full blocks, first to last.
    pub(crate) keys: Vec<Key>,
    /// With a drafter, the keys by which the blocks are found: each is that of a block and the token after it.
    pub(crate) ahead: Vec<Key>,
    /// And these tokens.
    pub(crate) following: Vec<u32>,
    /// Adapter that the sequence runs with.
    pub(crate) lora_id: u64,
    /// Salt of the sequence's tenant.
    pub(crate) salt: [u8; 32],
    /// Its number, if it has a quota on the device; else 0.
    pub(crate) tenant: u16,
    /// Its extras, also those of blocks that are not full yet.
    pub(crate) extras: Extras,
    /// Blocks with extras, and the number of extra frames in the chain up to each.
    pub(crate) surplus: Vec<(u32, u32)>,
    /// The chain before the last full block, to reopen that block; `None` if it was already reopened.
    pub(crate) before_last: Option<Chain>,
    /// Tokens after which resume points are yet to be made, rising.
    pub(crate) due: Vec<u32>,
    /// Blocks that were cached when the prompt came, beyond the point where it continues; 0 if there were none.
    pub(crate) junction: u32,
    /// Blocks up to the point where the prompt continues.
    pub(crate) resumed: u32,
    /// Tokens of the sequence when it was last given blocks in another step.
    pub(crate) appended: u32,
    /// Full blocks that are known to be computed, with resume points.
    pub(crate) computed: u32,
}

impl RowKeys {
    /// Hashes one more full block, the last one so far.
    #[inline]
    pub(crate) fn push_block(&mut self, tokens: &[u32], block_size: u32) {
        let before = self.chain;
        self.push_key(tokens, block_size);
        self.before_last = Some(before);
    }

    /// Hashes one more full block, which another one follows.
    #[inline]
    pub(crate) fn push_key(&mut self, tokens: &[u32], block_size: u32) {
        if self.extras.is_empty() {
            self.keys.push(self.chain.plain_block(tokens));
        } else {
            self.push_with_extras(tokens, block_size);
        }
    }

    #[inline(never)]
    fn push_with_extras(&mut self, tokens: &[u32], block_size: u32) {
        let index = self.keys.len();
        let frames = self.extras.frames(index, block_size);
        let has_extras = !frames.is_empty();
        self.keys.push(self.chain.framed_block(frames, tokens));
        if has_extras {
            let regular = frames_before_extras(index + 1, block_size);
            let surplus = self.chain.frames().saturating_sub(regular);
            self.surplus.push((u32::try_from(index).unwrap_or(u32::MAX), surplus));
        }
    }

    /// The keys by which the blocks are found.
    #[inline]
    pub(crate) fn found_by(&self) -> &[Key] {
        if self.ahead.is_empty() { &self.keys } else { &self.ahead }
    }

    /// Makes the key by which the next block is found, whose next token is known now.
    pub(crate) fn push_ahead(&mut self, next: u32, block_size: u32) {
        let at = self.ahead.len();
        // An image has the same ids as another one.
        let frames = self.frames_after(at, block_size);
        let key = match self.chain_at(at, block_size) {
            // With blocks of one token, this is also the next block's key, which no token makes of this one.
            Some(mut chain) if !frames.is_empty() => chain.framed_block(frames, &[next]).before(RESERVED_TOKEN),
            _ => self.keys[at].before(next),
        };
        self.ahead.push(key);
        self.following.push(next);
    }

    /// The frames of the extras of the token after a block.
    fn frames_after(&self, at: usize, block_size: u32) -> Vec<u8> {
        self.extras.frames((at + 1) * block_size as usize, 1)
    }

    /// Makes the keys by which a prompt's blocks are found with a drafter; the last is still open if no token follows.
    pub(crate) fn look_ahead(&mut self, tokens: &[u32], block_size: u32) {
        if self.keys.len() * block_size as usize == tokens.len() {
            self.reopen_last();
        }
        for at in 1..=self.keys.len() {
            self.push_ahead(tokens[at * block_size as usize], block_size);
        }
    }

    /// Reopens the last full block. Returns false if the chain before it is no longer known.
    pub(crate) fn reopen_last(&mut self) -> bool {
        let Some(before) = self.before_last.take() else { return false };
        self.chain = before;
        self.keys.pop();
        let full = self.keys.len();
        self.ahead.truncate(full);
        self.following.truncate(full);
        self.surplus.truncate(self.surplus.partition_point(|&(block, _)| (block as usize) < full));
        true
    }

    /// The chain up to one of the full blocks.
    pub(crate) fn chain_at(&self, index: usize, block_size: u32) -> Option<Chain> {
        let after = self.surplus.partition_point(|&(block, _)| block as usize <= index);
        let surplus = after.checked_sub(1).map_or(0, |last| self.surplus[last].1);
        let frames = frames_before_extras(index + 1, block_size).saturating_add(surplus);
        Some(Chain::resume(*self.keys.get(index)?, frames))
    }

    /// Key for other processes of what a group with this mark has of one of the full blocks.
    pub(crate) fn export(&self, index: usize, mark: Option<GroupMark>, block_size: u32) -> Option<ExportedKey> {
        let chain = self.chain_at(index, block_size)?;
        Some(match (mark, self.following.get(index)) {
            (Some(mark), Some(&next)) => chain.export_before(mark, next, self.frames_after(index, block_size)),
            _ => chain.export_of(mark),
        })
    }
}

/// Frames of a chain over `blocks` blocks of tokens.
pub(crate) fn frames_before_extras(blocks: usize, block_size: u32) -> u32 {
    let of_block = u64::from(block_size).div_ceil(16);
    u32::try_from((blocks as u64).saturating_mul(of_block).saturating_add(1)).unwrap_or(u32::MAX)
}

impl Row {
    /// The prefix cache does not know the row's token ids.
    pub(crate) const NOT_FOLLOWED: u32 = u32::MAX;

    fn unused() -> Self {
        Self {
            id: SequenceId(0),
            len: 0,
            writable: 0,
            written: TicketId(0),
            stamp: 0,
            known: Self::NOT_FOLLOWED,
            first: GroupTable::unused(),
            ticket: TicketId(0),
            keys: None,
            encoder_written: TicketId(0),
            encoder_tokens: 0,
            tier: Tier::Device,
            moving: false,
            lost: false,
            priority: 0,
        }
    }

    pub(crate) fn is_in_use(&self) -> bool {
        self.id.generation() & 1 == 1
    }

    /// Whether the row has no generation left for another sequence.
    fn is_worn_out(&self) -> bool {
        self.id.generation() >= SequenceId::FIELD_MAX - 1 && !self.is_in_use()
    }

    /// Stops following the row: later tokens have no known ids and are not published.
    pub(crate) fn unfollow(&mut self) {
        (self.keys, self.known) = (None, Self::NOT_FOLLOWED);
    }
}

/// All sequences.
#[derive(Debug, Clone)]
pub(crate) struct SequenceRows {
    /// Number of the manager, in all handles.
    manager: u16,
    entries: Vec<Row>,
    /// The tables of the groups after the first, `others_per_row` for each row.
    others: Vec<GroupTable>,
    others_per_row: usize,
    /// The cross attention group, whose tables hold other tokens.
    encoder: Option<usize>,
    /// Rows for reuse, without those that have worn out.
    unused: Vec<u32>,
    worn_out: usize,
    epoch: u32,
    recent: RecentTokens,
}

impl SequenceRows {
    pub(crate) fn new(block_size: u32, groups: &[Group]) -> Self {
        Self {
            manager: 0,
            entries: Vec::new(),
            others: Vec::new(),
            others_per_row: groups.len().saturating_sub(1),
            encoder: groups.iter().position(|&group| group == Group::CrossAttention),
            unused: Vec::new(),
            worn_out: 0,
            epoch: 0,
            recent: RecentTokens::new(block_size, u32::from(groups.iter().any(|group| group.is_drafter()))),
        }
    }

    pub(crate) fn manager(&self) -> u16 {
        self.manager
    }

    /// Sets the manager's number, which new handles carry.
    pub(crate) fn set_manager(&mut self, number: u16) {
        self.manager = number;
    }

    /// Sequences that have not been freed.
    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.unused.len() - self.worn_out
    }

    /// Makes room for `count` more rows, or fails.
    pub(crate) fn require(&mut self, count: usize) -> Result<()> {
        let free = MAX_SEQUENCES.saturating_sub(self.len() + self.worn_out);
        if count <= free {
            let more = count.saturating_sub(self.unused.len());
            memory::make_room(&mut self.others, more.saturating_mul(self.others_per_row))?;
            return memory::make_room(&mut self.entries, more);
        }
        Err(Error::InvalidArgument {
            what: "number of new sequences",
            found: count as i128,
            must: format!("at most {free}"),
        })
    }

    /// Opens a row without tokens. The caller has called [`SequenceRows::require`], and begins each table next.
    pub(crate) fn open(&mut self, tier: Tier) -> SequenceId {
        let Some(index) = self.unused.pop() else {
            let id = SequenceId::new(self.manager, row_index(self.entries.len()), 1);
            self.entries.push(Row { id, tier, ..Row::unused() });
            self.others.extend(std::iter::repeat_with(GroupTable::unused).take(self.others_per_row));
            return id;
        };
        let row = &mut self.entries[index as usize];
        let id = SequenceId::new(self.manager, index, row.id.generation() + 1);
        let first = std::mem::replace(&mut row.first, GroupTable::unused());
        *row = Row { id, first, tier, ..Row::unused() };
        id
    }

    /// Begins a table of a new row. Versions continue from one sequence to the next, so that they distinguish the two.
    pub(crate) fn open_table(&mut self, id: TableId, blocks: Vec<BlockId>) -> &mut GroupTable {
        let GroupTable { slot_base, synced, null_prefix, published, .. } = GroupTable::unused();
        let row = self.table_mut(id);
        row.table.set(blocks);
        (row.slot_base, row.synced, row.null_prefix, row.published) = (slot_base, synced, null_prefix, published);
        row
    }

    /// Closes a row whose tables have been taken.
    pub(crate) fn close(&mut self, sequence: SequenceId) {
        let row = &mut self.entries[sequence.row() as usize];
        row.id = SequenceId::new(self.manager, sequence.row(), sequence.generation() + 1);
        row.writable = 0;
        row.unfollow();
        if row.is_worn_out() {
            self.worn_out += 1;
        } else {
            self.unused.push(sequence.row());
        }
    }

    pub(crate) fn get(&self, sequence: SequenceId) -> Result<&Row> {
        fault::point()?;
        match self.entries.get(sequence.row() as usize) {
            Some(row) if row.id == sequence && row.is_in_use() => Ok(row),
            _ => Err(self.unknown(sequence)),
        }
    }

    /// The error for an unknown sequence.
    #[cold]
    fn unknown(&self, sequence: SequenceId) -> Error {
        let last = self.entries.get(sequence.row() as usize).map_or(0, |row| row.id.generation());
        if sequence.manager() != self.manager {
            Error::ForeignSequence { sequence, manager: sequence.manager(), asked: self.manager }
        } else if sequence.generation() & 1 == 1 && sequence.generation() < last {
            Error::FreedSequence { sequence }
        } else {
            Error::UnknownSequence { sequence }
        }
    }

    pub(crate) fn get_mut(&mut self, sequence: SequenceId) -> Result<&mut Row> {
        fault::point()?;
        // Borrow again, since an error reads all rows.
        match self.entries.get(sequence.row() as usize) {
            Some(row) if row.id == sequence && row.is_in_use() => Ok(self.at_mut(sequence)),
            _ => Err(self.unknown(sequence)),
        }
    }

    /// A row that a call has already found.
    pub(crate) fn at(&self, sequence: SequenceId) -> &Row {
        &self.entries[sequence.row() as usize]
    }

    /// A row that a call has already found.
    pub(crate) fn at_mut(&mut self, sequence: SequenceId) -> &mut Row {
        &mut self.entries[sequence.row() as usize]
    }

    /// The table of a row that a call has already found.
    #[inline]
    pub(crate) fn table(&self, id: TableId) -> &GroupTable {
        let row = id.sequence.row() as usize;
        match usize::from(id.group).checked_sub(1) {
            None => &self.entries[row].first,
            Some(other) => &self.others[row * self.others_per_row + other],
        }
    }

    /// The table of a row that a call has already found.
    #[inline]
    pub(crate) fn table_mut(&mut self, id: TableId) -> &mut GroupTable {
        let row = id.sequence.row() as usize;
        match usize::from(id.group).checked_sub(1) {
            None => &mut self.entries[row].first,
            Some(other) => &mut self.others[row * self.others_per_row + other],
        }
    }

    /// Tokens of a table.
    #[inline]
    pub(crate) fn len_of(&self, id: TableId) -> u32 {
        let row = self.at(id.sequence);
        if Some(usize::from(id.group)) == self.encoder { row.encoder_tokens } else { row.len }
    }

    /// Step in which tokens of a table were last given slots.
    #[inline]
    pub(crate) fn written(&self, id: TableId) -> TicketId {
        let row = self.at(id.sequence);
        if Some(usize::from(id.group)) == self.encoder { row.encoder_written } else { row.written }
    }

    /// Number of a table among all tables of all rows.
    pub(crate) fn number(&self, id: TableId) -> u32 {
        let groups = self.others_per_row + 1;
        u32::try_from(id.sequence.row() as usize * groups + usize::from(id.group)).unwrap_or(u32::MAX)
    }

    /// The table of that number, if its row is in use.
    #[inline]
    pub(crate) fn numbered(&self, number: u32) -> Option<(TableId, &Row)> {
        let groups = self.others_per_row + 1;
        // Planning a move asks this for each block that it considers, and dividing takes longer than all else here.
        let (row, group) =
            if groups == 1 { (number as usize, 0) } else { (number as usize / groups, number as usize % groups) };
        let row = self.entries.get(row).filter(|row| row.is_in_use())?;
        Some((TableId { sequence: row.id, group: group.try_into().unwrap_or(u8::MAX) }, row))
    }

    /// Begins a batch call: rows named from now on are marked, to detect repetitions.
    pub(crate) fn begin_batch(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
        if self.epoch == 0 {
            for row in &mut self.entries {
                row.stamp = 0;
            }
            self.epoch = 1;
        }
    }

    /// A row of the current batch call.
    #[inline]
    pub(crate) fn next_in_batch(&mut self, sequence: SequenceId) -> Result<&mut Row> {
        let epoch = self.epoch;
        let row = self.get_mut(sequence)?;
        if row.stamp == epoch {
            return Err(Error::RepeatedSequence { sequence });
        }
        row.stamp = epoch;
        Ok(row)
    }

    /// All rows and the number of the current batch call, for passes that check handles themselves.
    pub(crate) fn entries(&mut self) -> Entries<'_> {
        Entries { rows: &mut self.entries, others: &mut self.others, per_row: self.others_per_row, epoch: self.epoch }
    }

    /// Rows in use, with their handles.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (SequenceId, &Row)> {
        self.entries.iter().filter(|row| row.is_in_use()).map(|row| (row.id, row))
    }

    /// The tables of a row.
    pub(crate) fn tables_of(&self, sequence: SequenceId) -> impl Iterator<Item = &GroupTable> {
        let row = sequence.row() as usize;
        let others = &self.others[row * self.others_per_row..][..self.others_per_row];
        std::iter::once(&self.entries[row].first).chain(others)
    }

    /// The tables of all rows in use.
    pub(crate) fn tables(&self) -> impl Iterator<Item = (TableId, &Row, &GroupTable)> {
        self.iter().flat_map(|(sequence, row)| {
            (0..).zip(self.tables_of(sequence)).map(move |(group, table)| (TableId { sequence, group }, row, table))
        })
    }
}

/// The tables of sequences in the first `groups` groups, group by group.
pub(super) fn group_by_group(groups: usize, sequences: &[SequenceId]) -> impl Iterator<Item = TableId> {
    let groups = 0..u8::try_from(groups).unwrap_or(u8::MAX);
    groups.flat_map(move |group| sequences.iter().map(move |&sequence| TableId { sequence, group }))
}

/// All rows and their tables, for passes that check handles themselves.
pub(crate) struct Entries<'a> {
    pub(crate) rows: &'a mut [Row],
    /// The tables of the groups after the first, `per_row` for each row.
    pub(crate) others: &'a mut [GroupTable],
    pub(crate) per_row: usize,
    /// Number of the current batch call.
    pub(crate) epoch: u32,
}

#[expect(clippy::cast_possible_wrap, reason = "ids stay below 2^30")]
fn as_i32(block: BlockId, first_block: u32) -> i32 {
    // A null block counts as the first of every class.
    block.0.saturating_sub(first_block) as i32
}

#[expect(clippy::cast_possible_truncation, reason = "`require` bounds the number of rows")]
fn row_index(index: usize) -> u32 {
    index as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_handle_is_unknown_even_after_its_row_is_used_again() {
        let mut rows = SequenceRows::new(16, &[Group::Full]);
        let first = rows.open(Tier::Device);
        rows.close(first);
        assert!(rows.get(first).is_err());
        let second = rows.open(Tier::Host);
        assert_eq!(first.row(), second.row());
        assert!(rows.get(first).is_err());
        assert!(rows.get(second).is_ok());
        assert!(rows.get(SequenceId::new(0, first.row(), 2)).is_err());
    }

    #[test]
    fn a_handle_that_is_not_valid_says_why() {
        let mut rows = SequenceRows::new(16, &[Group::Full]);
        rows.set_manager(3);
        let sequence = rows.open(Tier::Device);
        let foreign = SequenceId::new(5, sequence.row(), sequence.generation());
        assert_eq!(rows.get(foreign).unwrap_err(), Error::ForeignSequence { sequence: foreign, manager: 5, asked: 3 });
        for forged in [SequenceId::new(3, 0, 3), SequenceId::new(3, 0, 0), SequenceId::new(3, 1, 1)] {
            assert_eq!(rows.get_mut(forged).unwrap_err(), Error::UnknownSequence { sequence: forged });
        }
        rows.close(sequence);
        assert_eq!(rows.get(sequence).unwrap_err(), Error::FreedSequence { sequence });
        let never = SequenceId::new(3, 0, 2);
        assert_eq!(rows.get(never).unwrap_err(), Error::UnknownSequence { sequence: never });
    }

    #[test]
    fn a_row_whose_generations_are_used_up_is_not_used_again() {
        let mut rows = SequenceRows::new(16, &[Group::Full]);
        let first = rows.open(Tier::Device);
        rows.close(first);
        rows.entries[0].id = SequenceId::new(0, 0, SequenceId::FIELD_MAX - 3);
        let last = rows.open(Tier::Device);
        assert_eq!((last.row(), last.generation()), (0, SequenceId::FIELD_MAX - 2));
        rows.close(last);
        let next = rows.open(Tier::Device);
        assert_eq!((next.row(), rows.len()), (1, 1));
        assert_eq!(rows.get(last).unwrap_err(), Error::FreedSequence { sequence: last });
        assert!(rows.get(next).is_ok());
        assert!(rows.require(MAX_SEQUENCES - 1).is_err());
        assert_eq!((rows.open(Tier::Device).row(), rows.len()), (2, 2));
    }

    #[test]
    fn a_reused_row_continues_its_versions() {
        let mut rows = SequenceRows::new(16, &[Group::Full; 2]);
        let mut open = || {
            let sequence = rows.open(Tier::Device);
            let table = |group| rows.open_table(TableId { sequence, group }, vec![BlockId(5)]).table.version();
            let versions = [0, 1].map(table);
            rows.close(sequence);
            (sequence.row(), versions)
        };
        let ((first, before), (second, after)) = (open(), open());
        assert_eq!(first, second);
        assert!(after[0] > before[0] && after[1] > before[1]);
    }

    #[test]
    fn tables_are_numbered_row_by_row() {
        let mut rows = SequenceRows::new(16, &[Group::Full; 3]);
        let sequences = [rows.open(Tier::Device), rows.open(Tier::Device)];
        let ids = sequences.iter().flat_map(|&sequence| (0..3).map(move |group| TableId { sequence, group }));
        for (number, id) in (0..).zip(ids) {
            rows.open_table(id, vec![BlockId(number)]);
            assert_eq!((rows.number(id), rows.numbered(number).map(|(id, _)| id)), (number, Some(id)));
        }
        let blocks = |(id, _, table): (TableId, &Row, &GroupTable)| (rows.number(id), table.table.to_vec());
        assert!(rows.tables().map(blocks).eq((0..6).map(|number| (number, vec![BlockId(number)]))));
        rows.close(sequences[0]);
        assert!(rows.numbered(2).is_none() && rows.numbered(3).is_some() && rows.numbered(u32::MAX).is_none());
    }

    #[test]
    fn a_copy_keeps_the_entries_before_the_first_one_changed_since() {
        let mut table = BlockTable { blocks: (0..8).map(BlockId).collect(), ..BlockTable::default() };
        table.extend_with(|blocks| blocks.push(BlockId(8)));
        let before = table.version();
        table.replace(7, BlockId(17));
        let between = table.version();
        table.replace(3, BlockId(13));
        table.replace(5, BlockId(15));
        assert_eq!((table.unchanged(before, 9), table.unchanged(between, 9)), (3, 3));
        assert_eq!((table.unchanged(table.version(), 9), table.unchanged(before - 1, 8)), (9, 0));
        table.set(Vec::new());
        assert_eq!(table.unchanged(before, 9), 0);
        table.extend_with(|blocks| blocks.extend((0..9).map(BlockId)));
        let filled = table.version();
        table.replace(4, BlockId(14));
        assert_eq!(table.unchanged(filled, 9), 4);
    }

    #[test]
    fn a_batch_notices_a_row_named_twice_and_the_next_batch_does_not() {
        let mut rows = SequenceRows::new(16, &[Group::Full]);
        let a = rows.open(Tier::Device);
        rows.begin_batch();
        assert!(rows.next_in_batch(a).is_ok());
        assert_eq!(rows.next_in_batch(a).unwrap_err(), Error::RepeatedSequence { sequence: a });
        rows.begin_batch();
        assert!(rows.next_in_batch(a).is_ok());
    }
}
