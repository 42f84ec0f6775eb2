//! Published blocks to write to a prefix store, and their keys.
//!
//! A key is recorded when its block is published on the device. Once neither device nor host has the block, its record
//! is dropped, a few at a time as new ones are added. So there are never many more records than blocks.

use crate::event::Publication;
use crate::hash::{Chain, ExportedKey, Key};
use std::collections::{HashMap, VecDeque};

/// Records examined for each new one, once there are too many.
const SWEPT: usize = 2;

/// When a block is written to a prefix store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StoreWrites {
    /// As soon as it is computed.
    #[default]
    Through,
    /// When it is among the next to be evicted, and no other copy is on device or host.
    Back,
    /// When it is computed or hit a second time.
    SecondUse,
    /// Never: the store is only read.
    Never,
}

impl StoreWrites {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Through, Self::Back, Self::SecondUse, Self::Never];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Through => "through",
            Self::Back => "back",
            Self::SecondUse => "second_use",
            Self::Never => "never",
        }
    }

    /// The one of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|writes| writes.name() == name)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteState {
    Published,
    Queued,
    /// It was given to the store, or came from there.
    Stored,
}

#[derive(Clone, Copy, Debug)]
struct Note {
    /// Frames hashed up to its end, which the exported key depends on.
    frames: u32,
    /// Frames up to its parent's end; 0 without a parent.
    parent_frames: u32,
    parent: Key,
    salt: [u8; 32],
    state: WriteState,
}

impl Note {
    fn new(publication: &Publication, state: WriteState) -> Self {
        let Publication { key, parent, salt, .. } = publication;
        let (parent, parent_frames) = parent.map_or((Key::default(), 0), |parent| (parent.key(), parent.frames()));
        Self { frames: key.frames(), parent_frames, parent, salt: *salt, state }
    }
}

/// A recorded block, with keys for other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exported {
    pub(crate) key: ExportedKey,
    /// Key of the block before it in its prompt; zeros for the first.
    pub(crate) parent: ExportedKey,
    pub(crate) salt: [u8; 32],
}

/// The recorded keys, and those queued for writing.
#[derive(Debug, Clone)]
pub(crate) struct StoreWriteQueue {
    writes: StoreWrites,
    /// Number of records above which those of missing blocks are dropped.
    capacity: usize,
    notes: HashMap<Key, Note>,
    /// Each recorded key once.
    order: VecDeque<Key>,
    /// Keys to write, oldest first; those without a record are skipped.
    queue: VecDeque<Key>,
}

impl StoreWriteQueue {
    /// An empty queue for pools of `blocks` blocks in total.
    pub(crate) fn new(writes: StoreWrites, blocks: usize) -> Self {
        let (notes, order, queue) = (HashMap::new(), VecDeque::new(), VecDeque::new());
        Self { writes, capacity: blocks.saturating_mul(2).max(64), notes, order, queue }
    }

    pub(crate) fn writes(&self) -> StoreWrites {
        self.writes
    }

    /// Records a computed block; `is_cached` tells whether device or host have a key.
    pub(crate) fn note_computed(&mut self, publication: &Publication, is_cached: impl Fn(&Key) -> bool) {
        let key = publication.key.key();
        let Some(known) = self.notes.get(&key).map(|note| note.state) else {
            self.insert(key, Note::new(publication, WriteState::Published), is_cached);
            if self.writes == StoreWrites::Through {
                self.enqueue(key);
            }
            return;
        };
        match (self.writes, known) {
            // Recomputed: it was evicted here, and the store did not have it either.
            (StoreWrites::Through | StoreWrites::SecondUse, WriteState::Published | WriteState::Stored) => {
                self.enqueue(key);
            }
            (StoreWrites::Back, WriteState::Stored) => self.set(key, WriteState::Published),
            _ => {}
        }
    }

    /// Records that a prompt found a cached block.
    pub(crate) fn note_hit(&mut self, key: Key) {
        if self.writes == StoreWrites::SecondUse
            && self.notes.get(&key).is_some_and(|note| note.state == WriteState::Published)
        {
            self.enqueue(key);
        }
    }

    /// Records a block that came from the store.
    pub(crate) fn note_loaded(&mut self, publication: &Publication, is_cached: impl Fn(&Key) -> bool) {
        let key = publication.key.key();
        if self.notes.contains_key(&key) {
            self.set(key, WriteState::Stored);
        } else {
            self.insert(key, Note::new(publication, WriteState::Stored), is_cached);
        }
    }

    /// Number of keys queued for writing.
    pub(crate) fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Pops the next key of the queue, which then counts as stored.
    pub(crate) fn pop(&mut self) -> Option<Key> {
        while let Some(key) = self.queue.pop_front() {
            if self.notes.get(&key).is_some_and(|note| note.state == WriteState::Queued) {
                self.set(key, WriteState::Stored);
                return Some(key);
            }
        }
        None
    }

    /// Puts a popped key back at the front: it was not written.
    pub(crate) fn push_back_in(&mut self, key: Key) {
        self.set(key, WriteState::Queued);
        self.queue.push_front(key);
    }

    /// Marks a published block as stored. Returns false if it was already stored or queued.
    pub(crate) fn claim(&mut self, key: &Key) -> bool {
        let is_new = self.notes.get(key).is_some_and(|note| note.state == WriteState::Published);
        if is_new {
            self.set(*key, WriteState::Stored);
        }
        is_new
    }

    /// Reverts a claim, for a block that was not written.
    pub(crate) fn unclaim(&mut self, key: &Key) {
        if self.notes.get(key).is_some_and(|note| note.state == WriteState::Stored) {
            self.set(*key, WriteState::Published);
        }
    }

    /// A recorded block, with keys for other processes.
    pub(crate) fn export(&self, key: &Key) -> Option<Exported> {
        self.notes.get(key).map(|note| {
            let parent = Chain::resume(note.parent, note.parent_frames);
            let parent = if note.parent_frames == 0 { ExportedKey([0; 32]) } else { parent.export() };
            Exported { key: Chain::resume(*key, note.frames).export(), parent, salt: note.salt }
        })
    }

    /// Frames up to the end of a recorded block; always more than its parent's.
    pub(crate) fn frames(&self, key: &Key) -> u32 {
        self.notes.get(key).map_or(0, |note| note.frames)
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        *self = Self { capacity: self.capacity, ..Self::new(self.writes, 0) };
    }

    fn insert(&mut self, key: Key, note: Note, is_cached: impl Fn(&Key) -> bool) {
        for _ in 0..SWEPT {
            if self.notes.len() < self.capacity {
                break;
            }
            let Some(oldest) = self.order.pop_front() else { break };
            if is_cached(&oldest) {
                self.order.push_back(oldest);
            } else {
                self.notes.remove(&oldest);
            }
        }
        self.notes.insert(key, note);
        self.order.push_back(key);
    }

    fn enqueue(&mut self, key: Key) {
        self.set(key, WriteState::Queued);
        self.queue.push_back(key);
        // Blocks evicted before they were written leave only their keys.
        if self.queue.len() > self.capacity {
            self.queue.pop_front();
        }
    }

    fn set(&mut self, key: Key, state: WriteState) {
        if let Some(note) = self.notes.get_mut(&key) {
            note.state = state;
        }
    }

    /// Checks that each recorded key is in the order once.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.order.len() != self.notes.len() || self.order.iter().any(|key| !self.notes.contains_key(key)) {
            return Err(format!(
                "{} keys are recorded for the store, {} are in the order",
                self.notes.len(),
                self.order.len()
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::KeySpec;
    use crate::id::BlockId;

    fn chain(token: u32) -> Chain {
        let mut chain = Chain::new(&KeySpec::default(), 1, 0);
        chain.block(&[token], &[]).unwrap();
        chain
    }

    fn published(token: u32) -> Publication {
        let (block, key, salt) = (BlockId(0), chain(token), [7; 32]);
        Publication { block, key, parent: None, tokens: 1, salt, lora_id: 0, group: 0 }
    }

    fn taken(write_queue: &mut StoreWriteQueue) -> Vec<Key> {
        std::iter::from_fn(|| write_queue.pop()).collect()
    }

    #[test]
    fn a_block_is_written_once_and_again_when_it_had_to_be_computed_again() {
        let mut write_queue = StoreWriteQueue::new(StoreWrites::Through, 4);
        write_queue.note_computed(&published(1), |_| true);
        assert_eq!((taken(&mut write_queue), taken(&mut write_queue)), (vec![chain(1).key()], vec![]));
        write_queue.note_computed(&published(1), |_| true);
        assert_eq!(taken(&mut write_queue), [chain(1).key()]);
        let exported = Exported { key: chain(1).export(), parent: ExportedKey([0; 32]), salt: [7; 32] };
        assert_eq!(write_queue.export(&chain(1).key()), Some(exported));
    }

    #[test]
    fn a_block_loaded_from_the_store_is_not_written_back() {
        for writes in StoreWrites::ALL {
            let mut write_queue = StoreWriteQueue::new(writes, 4);
            write_queue.note_loaded(&published(1), |_| true);
            write_queue.note_hit(chain(1).key());
            assert_eq!(
                (taken(&mut write_queue), write_queue.claim(&chain(1).key())),
                (vec![], false),
                "{}",
                writes.name()
            );
        }
    }

    #[test]
    fn with_second_use_a_block_is_written_when_it_is_hit_or_computed_again() {
        let mut write_queue = StoreWriteQueue::new(StoreWrites::SecondUse, 4);
        write_queue.note_computed(&published(1), |_| true);
        write_queue.note_computed(&published(2), |_| false);
        assert_eq!(taken(&mut write_queue), []);
        write_queue.note_hit(chain(1).key());
        write_queue.note_hit(chain(1).key());
        write_queue.note_computed(&published(2), |_| false);
        assert_eq!(taken(&mut write_queue), [chain(1).key(), chain(2).key()]);
    }

    #[test]
    fn records_of_evicted_blocks_make_room() {
        let mut write_queue = StoreWriteQueue::new(StoreWrites::Through, 32);
        let kept = chain(1_000_000).key();
        write_queue.note_computed(&published(1_000_000), |_| true);
        for token in 0..1000 {
            write_queue.note_computed(&published(token), |key| *key == kept);
            write_queue.check().unwrap();
        }
        assert!(write_queue.notes.len() <= 66 && write_queue.queue.len() <= 64, "{}", write_queue.notes.len());
        assert!(write_queue.export(&kept).is_some());
    }

    #[test]
    fn a_cleared_queue_records_as_many_keys_as_before() {
        let mut write_queue = StoreWriteQueue::new(StoreWrites::Through, 100);
        write_queue.clear();
        for token in 0..200 {
            write_queue.note_computed(&published(token), |_| false);
        }
        assert!((0..200).all(|token| write_queue.export(&chain(token).key()).is_some()));
        assert_eq!(write_queue.waiting(), 200);
    }
}
