//! What of the tables outlives the process.

use super::{MAX_SEQUENCES, RecentTokens, Row, RowKeys, Rows, Table, frames_before_extras, row_index};
use crate::hash::{Chain, Key, RESERVED_TOKEN};
use crate::id::{BlockId, SequenceId, TicketId, Tier};
use crate::prefix::evict::MAX_PRIORITY;
use crate::snapshot::Contents;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub(crate) struct RowsImage {
    /// Number of the manager, in all handles.
    manager: u16,
    /// Of all rows; odd for those in use.
    generations: Vec<u32>,
    /// Rows in use, in the order of their numbers.
    rows: Vec<RowImage>,
    /// Rows to be used again, the last first.
    unused: Vec<u32>,
}

#[derive(Serialize, Deserialize)]
struct RowImage {
    len: u32,
    ticket: TicketId,
    written: TicketId,
    tier: Tier,
    moving: bool,
    lost: bool,
    table: Vec<BlockId>,
    group: u8,
    priority: u8,
    null_prefix: u32,
    published: u32,
    keys: Option<KeysImage>,
    group_tables: Option<Box<[SequenceId]>>,
}

#[derive(Serialize, Deserialize)]
struct KeysImage {
    state: [u8; 32],
    keys: Vec<[u8; 32]>,
    pending: Vec<u32>,
    lora_id: u64,
    salt: [u8; 32],
    tenant: u16,
    surplus: Vec<(u32, u32)>,
    last: Option<LastImage>,
}

#[derive(Serialize, Deserialize)]
struct LastImage {
    state: [u8; 32],
    frames: u32,
    tokens: Vec<u32>,
}

impl Rows {
    pub(crate) fn image(&self) -> RowsImage {
        // What is left out belongs to one batch call.
        let Self { manager, entries, unused, worn_out: _, epoch: _, recent: _ } = self;
        RowsImage {
            manager: *manager,
            generations: entries.iter().map(|row| row.id.generation()).collect(),
            rows: self.iter().map(|(sequence, row)| self.row_image(sequence.row() as usize, row)).collect(),
            unused: unused.clone(),
        }
    }

    /// The rows of a snapshot taken in the step `open`; tables are not compared with the pools yet.
    pub(crate) fn restore(image: RowsImage, open: TicketId, block_size: u32) -> Contents<Self> {
        let RowsImage { manager, generations, rows, unused } = image;
        let in_use = generations.iter().filter(|generation| *generation & 1 == 1).count();
        let worn_out = generations.iter().filter(|generation| **generation == SequenceId::FIELD_MAX - 1).count();
        let in_range = generations.len() <= MAX_SEQUENCES && generations.iter().all(|&one| one < SequenceId::FIELD_MAX);
        if !in_range || in_use != rows.len() || unused.len() != generations.len() - in_use - worn_out {
            return Err(format!(
                "{} rows, {in_use} in use, {} not, {} given",
                generations.len(),
                unused.len(),
                rows.len()
            ));
        }
        let mut named = vec![false; generations.len()];
        for &index in &unused {
            let generation = generations.get(index as usize);
            let free = generation.is_some_and(|one| one & 1 == 0 && *one < SequenceId::FIELD_MAX - 1);
            if !free || std::mem::replace(&mut named[index as usize], true) {
                return Err(format!("row {index} is in use, or free twice"));
            }
        }
        let (mut rows, mut recent) = (rows.into_iter(), RecentTokens::new(block_size));
        if rows.as_slice().iter().any(|row| row.keys.is_some()) {
            recent.require(generations.len()).map_err(|error| error.to_string())?;
        }
        let mut entries = Vec::with_capacity(generations.len());
        for (index, generation) in generations.into_iter().enumerate() {
            let row = if generation & 1 == 0 { None } else { rows.next() };
            let row = row.map_or_else(|| Ok(Row::unused()), |row| row.restore(open, block_size, index, &mut recent));
            entries.push(Row { id: SequenceId::new(manager, row_index(index), generation), ..row? });
        }
        Ok(Self { manager, entries, unused, worn_out, epoch: 0, recent })
    }

    fn row_image(&self, index: usize, row: &Row) -> RowImage {
        // What is left out is found again by the next append, or belongs to one batch call.
        let Row {
            id: _,
            len,
            writable: _,
            stamp: _,
            slot_base: _,
            synced: _,
            known: _,
            ticket,
            written,
            tier,
            moving,
            lost,
            table,
            group,
            priority,
            null_prefix,
            published,
            keys,
            group_tables,
        } = row;
        RowImage {
            len: *len,
            ticket: *ticket,
            written: *written,
            tier: *tier,
            moving: *moving,
            lost: *lost,
            table: table.to_vec(),
            group: *group,
            priority: *priority,
            null_prefix: *null_prefix,
            published: *published,
            keys: keys.as_deref().map(|keys| self.keys_image(index, keys)),
            group_tables: group_tables.clone(),
        }
    }

    fn keys_image(&self, index: usize, row_keys: &RowKeys) -> KeysImage {
        let RowKeys { chain, keys, lora_id, salt, tenant, surplus, before_last } = row_keys;
        KeysImage {
            state: chain.key().to_bytes(),
            keys: keys.iter().map(|key| key.to_bytes()).collect(),
            pending: self.pending(index, row_keys).to_vec(),
            lora_id: *lora_id,
            salt: *salt,
            tenant: *tenant,
            surplus: surplus.clone(),
            last: before_last.map(|before| LastImage {
                state: before.key().to_bytes(),
                frames: before.frames(),
                tokens: self.last_block(index, row_keys).to_vec(),
            }),
        }
    }
}

impl RowImage {
    fn restore(self, open: TicketId, block_size: u32, index: usize, recent: &mut RecentTokens) -> Contents<Row> {
        let Self {
            len,
            ticket,
            written,
            tier,
            moving,
            lost,
            table,
            group,
            priority,
            null_prefix,
            published,
            keys,
            group_tables,
        } = self;
        if ticket > open || written > open {
            return Err(format!("a sequence of tickets {ticket} and {written}, the next is {open}"));
        }
        let (keys, known) = match keys {
            None => (None, Row::NOT_FOLLOWED),
            Some(keys) => {
                let (keys, known) = keys.restore(block_size, index, recent)?;
                (Some(Box::new(keys)), known)
            }
        };
        if null_prefix as usize > table.len() || published as usize > table.len() || priority > MAX_PRIORITY {
            return Err(format!(
                "{null_prefix} null blocks and {published} published of {} blocks, priority {priority}",
                table.len()
            ));
        }
        let table = Table::new(table);
        let state = Row { len, written, known, table, ticket, tier, moving, lost, ..Row::unused() };
        Ok(Row { group, priority, null_prefix, published, keys, group_tables, ..state })
    }
}

impl KeysImage {
    /// The keys, and how many tokens are known by their ids, of which the last are written.
    fn restore(self, block_size: u32, row: usize, recent: &mut RecentTokens) -> Contents<(RowKeys, u32)> {
        let Self { state, keys, pending, lora_id, salt, tenant, surplus, last } = self;
        let rising = surplus.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1);
        let tokens = (pending.len() as u64) < u64::from(block_size) && !pending.contains(&RESERVED_TOKEN);
        if !tokens
            || !rising
            || last.as_ref().is_some_and(|last| keys.is_empty() || last.tokens.len() as u64 != u64::from(block_size))
            || surplus.last().is_some_and(|(block, _)| *block as usize >= keys.len())
            || keys.last().is_some_and(|last| *last != state)
        {
            return Err(format!("a sequence with {} keys and {} tokens more", keys.len(), pending.len()));
        }
        let frames =
            frames_before_extras(keys.len(), block_size).saturating_add(surplus.last().map_or(0, |last| last.1));
        let chain = Chain::resume(Key::from_bytes(&state), frames);
        let keys: Vec<_> = keys.iter().map(Key::from_bytes).collect();
        let before = keys.iter().nth_back(1).copied();
        let full = keys.len().saturating_mul(block_size as usize);
        let known = u32::try_from(full.saturating_add(pending.len())).ok().filter(|known| *known < Row::NOT_FOLLOWED);
        let known = known.ok_or_else(|| format!("a sequence with {} keys of {block_size} tokens", keys.len()))?;
        let mut before_last = None;
        if let Some(last) = last {
            recent.write(row, full - last.tokens.len(), &last.tokens);
            before_last = Some(last.restore(before, &chain)?);
        }
        recent.write(row, full, &pending);
        Ok((RowKeys { chain, keys, lora_id, salt, tenant, surplus, before_last }, known))
    }
}

impl LastImage {
    /// The chain before a last block, which follows the one of that key: the block's tokens lead from there to the chain's
    /// end.
    fn restore(self, key: Option<Key>, end: &Chain) -> Contents<Chain> {
        let Self { state, frames, tokens } = self;
        let before = Chain::resume(Key::from_bytes(&state), frames);
        let mut chain = before;
        let led = chain.block(&tokens, &[]).is_ok_and(|_| chain == *end);
        if !led || key.is_some_and(|key| key != before.key()) {
            return Err("a last block of other tokens than its key's".to_owned());
        }
        Ok(before)
    }
}
