//! Published blocks to write to a prefix store, and their keys.
//!
//! A key is recorded when its block is published on the device. Once neither device nor host has the block, its record
//! is dropped, a few at a time as new ones are added. So there are never many more records than blocks.
//!
//! Blocks are queued in the order in which they are computed, so a block follows its parent, and the store gets a prompt
//! from its beginning. A block that was evicted before its turn is *lost*, and so are the queued blocks that follow it:
//! without it, nothing would find them in the store. So is a block that the store did not keep, see [`Unwritten`]. A
//! prompt that computes or hits them again queues them again.

use crate::event::Publication;
use crate::group::Groups;
use crate::hash::{AheadKeys, Chain, ExportedKey, Key};
use crate::id::BlockId;
use crate::page::PerClass;
use std::collections::{HashMap, VecDeque};

/// Records examined for each new one, once there are too many.
const SWEPT: usize = 2;

/// When a block is written to a prefix store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StoreWrites {
    /// As soon as it is computed.
    #[default]
    Through,
    /// Later, in the same order: while blocks that are not written yet outnumber the free ones.
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
    /// The store lacks it: it was evicted before it was written, or a block before it was, or the store did not keep it.
    Lost,
    /// The store has no room for it, or not for a block before it.
    Refused,
}

/// Why the store does not have a block that it was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unwritten {
    /// It failed. A prompt that hits or computes the block queues it again.
    Failed,
    /// It has lost what comes before the block. A prompt that hits them queues them all again.
    WithItsChain,
    /// What comes before the block fills it. Neither the block nor what follows it is queued before it is computed again.
    Refused,
}

impl Unwritten {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Failed, Self::WithItsChain, Self::Refused];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::WithItsChain => "chain",
            Self::Refused => "refused",
        }
    }

    /// The one of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|why| why.name() == name)
    }
}

#[derive(Clone, Debug)]
struct Note {
    /// Frames hashed up to its end, which the exported key depends on.
    frames: u32,
    /// Frames up to its parent's end; 0 without a parent.
    parent_frames: u32,
    /// Key of the block that it hangs on, see [`Groups::hangs_on`].
    parent: Key,
    group: u8,
    /// Which of the group's blocks that the key stands for.
    part: u32,
    /// The block as which it was published: one that is found with others has no key on the device.
    block: BlockId,
    salt: [u8; 32],
    state: WriteState,
    /// With a drafter, whose keys do not tell those for other processes: these, its own and its parent's.
    exported: Option<Box<[ExportedKey; 2]>>,
}

/// A recorded block, with keys for other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exported {
    pub(crate) key: ExportedKey,
    /// Key of the block before it in its prompt; zeros for the first.
    pub(crate) parent: ExportedKey,
    pub(crate) salt: [u8; 32],
}

/// Whether device or host have a key, which was published as a block.
type IsCached<'a> = dyn Fn(&Key, BlockId) -> bool + 'a;

/// The recorded keys, and those queued for writing.
#[derive(Debug, Clone)]
pub(crate) struct StoreWriteQueue {
    writes: StoreWrites,
    groups: Groups,
    /// Number of records above which those of missing blocks are dropped.
    capacity: usize,
    notes: HashMap<Key, Note>,
    /// Each recorded key once.
    order: VecDeque<Key>,
    /// Keys to write, oldest first; those without a record are skipped.
    queue: VecDeque<Key>,
    /// Recorded keys that are queued, by page class.
    queued: PerClass,
    /// Whether all queued blocks are written now.
    is_flushing: bool,
}

impl StoreWriteQueue {
    /// An empty queue for pools of `blocks` blocks in total.
    pub(crate) fn new(writes: StoreWrites, groups: Groups, blocks: usize) -> Self {
        let (notes, order, queue) = (HashMap::new(), VecDeque::new(), VecDeque::new());
        let (capacity, queued) = (blocks.saturating_mul(2).max(64), PerClass::default());
        Self { writes, groups, capacity, notes, order, queue, queued, is_flushing: false }
    }

    /// Key of a published block in its group.
    fn own_key(publication: &Publication) -> Key {
        let Publication { key, group, part, ahead, .. } = publication;
        ahead.as_deref().map_or_else(|| key.key().of_part(*group, *part), |ahead| ahead.own.0)
    }

    fn anchor(&self) -> u8 {
        u8::try_from(self.groups.anchor()).unwrap_or(u8::MAX)
    }

    fn note(&self, publication: &Publication, state: WriteState) -> Note {
        let Publication { block, key, parent, salt, group, part, .. } = *publication;
        let parent = self.groups.hangs_on((group, part), key, parent);
        let own = |parent: Chain| (parent.key().of_group(self.anchor()), parent.frames());
        let (mut parent, parent_frames) = parent.map_or((Key::default(), 0), own);
        let exported = publication.ahead.as_deref().map(|&AheadKeys { own, hangs_on }| {
            let (key, of_parent) = hangs_on.unwrap_or((Key::default(), ExportedKey([0; 32])));
            parent = key;
            Box::new([own.1, of_parent])
        });
        Note { frames: key.frames(), parent_frames, parent, group, part, block, salt, state, exported }
    }

    /// Lets all queued blocks be written now, whatever room there is.
    pub(crate) fn flush(&mut self) {
        self.is_flushing = true;
    }

    /// The weight of queued blocks that may be written now, while `free` is free and `reserve` of that may be taken at once.
    pub(crate) fn due(&self, weigh: impl Fn(PerClass) -> usize, free: usize, reserve: usize) -> usize {
        let is_single = self.groups.class_bytes().len() == 1;
        let queued = if is_single { PerClass::of(0, self.queue.len()) } else { self.queued };
        match self.writes {
            StoreWrites::Never => 0,
            StoreWrites::Back if !self.is_flushing => weigh(queued).saturating_add(reserve).saturating_sub(free),
            StoreWrites::Through | StoreWrites::SecondUse | StoreWrites::Back => usize::MAX,
        }
    }

    /// Records a computed block; `is_cached` tells whether device or host have a key, which was published as a block.
    pub(crate) fn note_computed(&mut self, publication: &Publication, is_cached: impl Fn(&Key, BlockId) -> bool) {
        let key = Self::own_key(publication);
        let known = self.notes.get(&key).map(|note| note.state);
        if known.is_none() {
            self.insert(key, self.note(publication, WriteState::Published), &is_cached);
        }
        self.note_moved(key, publication.block);
        let is_due = match (self.writes, known) {
            (StoreWrites::Never, _) | (_, Some(WriteState::Queued)) => false,
            // Recomputed: it was evicted here, and the store did not have it either.
            (_, Some(_)) => true,
            (writes, None) => writes != StoreWrites::SecondUse,
        };
        if is_due {
            self.enqueue(key, Some(&is_cached));
        }
    }

    /// Records that a prompt found a cached block.
    pub(crate) fn note_hit(&mut self, key: Key) {
        let state = self.notes.get(&key).map(|note| note.state);
        let is_second_use = self.writes == StoreWrites::SecondUse && state == Some(WriteState::Published);
        if is_second_use || state == Some(WriteState::Lost) {
            self.enqueue(key, None);
        }
    }

    /// Records that a block with this key lies elsewhere on the device now.
    pub(crate) fn note_moved(&mut self, key: Key, block: BlockId) {
        if let Some(note) = self.notes.get_mut(&key) {
            note.block = block;
        }
    }

    /// The block as which a recorded key was published.
    pub(crate) fn published_as(&self, key: &Key) -> Option<BlockId> {
        self.notes.get(key).map(|note| note.block)
    }

    /// Records a block that came from the store.
    pub(crate) fn note_loaded(&mut self, publication: &Publication, is_cached: impl Fn(&Key, BlockId) -> bool) {
        let key = Self::own_key(publication);
        if self.notes.contains_key(&key) {
            self.set(key, WriteState::Stored);
        } else {
            self.insert(key, self.note(publication, WriteState::Stored), is_cached);
        }
    }

    /// Number of keys queued for writing.
    pub(crate) fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Pops the next key of the queue whose parent is neither lost nor refused; it then counts as stored.
    pub(crate) fn pop(&mut self) -> Option<Key> {
        while let Some(key) = self.queue.pop_front() {
            let Some(note) = self.notes.get(&key).filter(|note| note.state == WriteState::Queued) else { continue };
            let before = self.notes.get(&note.parent).map(|parent| parent.state);
            let cut_off = before.filter(|state| matches!(state, WriteState::Lost | WriteState::Refused));
            self.set(key, cut_off.unwrap_or(WriteState::Stored));
            if cut_off.is_none() {
                return Some(key);
            }
        }
        None
    }

    /// Notes that the block of a popped key is gone.
    pub(crate) fn lose(&mut self, key: Key) {
        self.set(key, WriteState::Lost);
    }

    /// Notes that the store did not keep blocks that it was given.
    pub(crate) fn note_unwritten(&mut self, keys: &[Key], why: Unwritten) {
        for &last in keys {
            let mut next = Some(last);
            while let Some((&key, note)) = next.and_then(|key| self.notes.get_key_value(&key)) {
                let (state, is_last) = (note.state, key == last);
                if state == WriteState::Refused || (state == WriteState::Lost && !is_last) {
                    break; // and so are those before it
                }
                next = (why == Unwritten::WithItsChain && note.parent_frames > 0).then_some(note.parent);
                if state == WriteState::Stored {
                    let is_refused = why == Unwritten::Refused;
                    self.set(key, if is_refused { WriteState::Refused } else { WriteState::Lost });
                }
            }
        }
    }

    /// Puts a popped key back at the front: it was not written.
    pub(crate) fn push_back_in(&mut self, key: Key) {
        if self.notes.contains_key(&key) {
            self.set(key, WriteState::Queued);
            self.queue.push_front(key);
        }
    }

    /// A recorded block, with keys for other processes.
    pub(crate) fn export(&self, key: &Key) -> Option<Exported> {
        self.notes.get(key).map(|note| {
            if let Some([key, parent]) = note.exported.as_deref().copied() {
                return Exported { key, parent, salt: note.salt };
            }
            // Marking a key with its group twice takes the mark away.
            let parent = Chain::resume(note.parent.of_group(self.anchor()), note.parent_frames);
            let parent = if note.parent_frames == 0 { ExportedKey([0; 32]) } else { parent.export() };
            let chain = Chain::resume(key.of_part(note.group, note.part), note.frames);
            Exported { key: chain.export_of(self.groups.mark((note.group, note.part))), parent, salt: note.salt }
        })
    }

    /// Where a recorded block comes in a write: after the one that it hangs on.
    pub(crate) fn place(&self, key: &Key) -> (u32, bool) {
        self.notes.get(key).map_or((0, false), |note| (note.frames, note.group != self.anchor() || note.part > 0))
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        *self = Self { capacity: self.capacity, ..Self::new(self.writes, self.groups.clone(), 0) };
    }

    fn insert(&mut self, key: Key, note: Note, is_cached: impl Fn(&Key, BlockId) -> bool) {
        for _ in 0..SWEPT {
            if self.notes.len() < self.capacity {
                break;
            }
            let Some(oldest) = self.order.pop_front() else { break };
            if self.notes.get(&oldest).is_some_and(|note| is_cached(&oldest, note.block)) {
                self.order.push_back(oldest);
            } else if let Some(note) = self.notes.remove(&oldest) {
                self.count(note.group, note.state, false);
            }
        }
        self.count(note.group, note.state, true);
        self.notes.insert(key, note);
        self.order.push_back(key);
    }

    fn enqueue(&mut self, key: Key, is_cached: Option<&IsCached<'_>>) {
        self.set(key, WriteState::Queued);
        self.queue.push_back(key);
        // Blocks evicted before they were written leave only their keys: more than half of those in a full queue.
        if let Some(is_cached) = is_cached.filter(|_| self.queue.len() > self.capacity) {
            for key in std::mem::take(&mut self.queue) {
                if self.notes.get(&key).is_some_and(|note| is_cached(&key, note.block)) {
                    self.queue.push_back(key);
                } else {
                    self.set(key, WriteState::Lost);
                }
            }
            // The pools may have grown.
            self.capacity = self.capacity.max(self.queue.len() * 2);
        }
    }

    fn set(&mut self, key: Key, state: WriteState) {
        let Some(note) = self.notes.get_mut(&key) else { return };
        let (group, before) = (note.group, std::mem::replace(&mut note.state, state));
        self.count(group, before, false);
        self.count(group, state, true);
    }

    /// Counts a record in or out, if it is queued.
    fn count(&mut self, group: u8, state: WriteState, is_new: bool) {
        if state == WriteState::Queued {
            let count = self.queued.at(self.groups.class(group));
            *count = if is_new { *count + 1 } else { *count - 1 };
        }
    }

    /// Checks that each recorded key is in the order once, and the numbers of queued ones.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.order.len() != self.notes.len() || self.order.iter().any(|key| !self.notes.contains_key(key)) {
            return Err(format!(
                "{} keys are recorded for the store, {} are in the order",
                self.notes.len(),
                self.order.len()
            ));
        }
        let queued = self.notes.values().filter(|note| note.state == WriteState::Queued);
        let counted: PerClass = queued.map(|note| PerClass::of(self.groups.class(note.group), 1)).sum();
        if counted != self.queued {
            return Err(format!("queued for the store are {counted:?}, counted {:?}", self.queued));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::{Group, PagedGroup};
    use crate::hash::KeySpec;

    fn queue(writes: StoreWrites, blocks: usize) -> StoreWriteQueue {
        let full = PagedGroup { group: Group::Full, block_tokens: 1, block_bytes: 1 };
        StoreWriteQueue::new(writes, Groups::new(&[full], 1).unwrap(), blocks)
    }

    fn chain(token: u32) -> Chain {
        let mut chain = Chain::new(&KeySpec::default(), 1, 0);
        chain.block(&[token], &[]).unwrap();
        chain
    }

    fn published(token: u32) -> Publication {
        let (block, key, salt) = (BlockId(0), chain(token), [7; 32]);
        Publication { block, key, parent: None, tokens: 1, salt, lora_id: 0, group: 0, part: 0, ahead: None }
    }

    fn taken(write_queue: &mut StoreWriteQueue) -> Vec<Key> {
        std::iter::from_fn(|| write_queue.pop()).collect()
    }

    #[test]
    fn a_block_is_written_once_and_again_when_it_had_to_be_computed_again() {
        let mut write_queue = queue(StoreWrites::Through, 4);
        write_queue.note_computed(&published(1), |_, _| true);
        assert_eq!((taken(&mut write_queue), taken(&mut write_queue)), (vec![chain(1).key()], vec![]));
        write_queue.note_computed(&published(1), |_, _| true);
        assert_eq!(taken(&mut write_queue), [chain(1).key()]);
        let exported = Exported { key: chain(1).export(), parent: ExportedKey([0; 32]), salt: [7; 32] };
        assert_eq!(write_queue.export(&chain(1).key()), Some(exported));
    }

    #[test]
    fn a_block_loaded_from_the_store_is_not_written_back() {
        for writes in StoreWrites::ALL {
            let mut write_queue = queue(writes, 4);
            write_queue.note_loaded(&published(1), |_, _| true);
            write_queue.note_hit(chain(1).key());
            assert_eq!(taken(&mut write_queue), [], "{}", writes.name());
        }
    }

    #[test]
    fn what_follows_a_lost_block_is_lost_until_a_prompt_has_it_again() {
        for writes in [StoreWrites::Through, StoreWrites::Back] {
            let mut write_queue = queue(writes, 4);
            let after = |token: u32, parent| Publication { parent: Some(chain(parent)), ..published(token) };
            let prompt = [published(1), after(2, 1), after(3, 2)];
            for block in &prompt {
                write_queue.note_computed(block, |_, _| true);
            }
            write_queue.note_computed(&published(9), |_, _| true);
            assert_eq!(write_queue.pop(), Some(chain(1).key()));
            write_queue.lose(chain(1).key());
            assert_eq!(taken(&mut write_queue), [chain(9).key()], "{}", writes.name());
            write_queue.note_computed(&prompt[0], |_, _| true);
            write_queue.note_hit(chain(2).key());
            write_queue.note_computed(&prompt[2], |_, _| true);
            assert_eq!(taken(&mut write_queue), [1, 2, 3].map(|token| chain(token).key()));
        }
    }

    #[test]
    fn what_the_store_did_not_keep_is_queued_again_when_it_is_hit() {
        use Unwritten::{Failed, Refused, WithItsChain};
        let after = |token: u32, parent| Publication { parent: Some(chain(parent)), ..published(token) };
        let prompt = [published(1), after(2, 1), after(3, 2), after(4, 3)];
        for (unwritten, why, again) in [
            (2, Failed, vec![2, 4]),
            (3, WithItsChain, vec![1, 2, 3, 4]),
            (9, WithItsChain, vec![4]),
            (2, Refused, vec![4]),
            (3, Refused, vec![]),
        ] {
            let mut write_queue = queue(StoreWrites::Through, 4);
            prompt[..3].iter().for_each(|block| write_queue.note_computed(block, |_, _| true));
            assert_eq!(taken(&mut write_queue).len(), 3);
            write_queue.note_unwritten(&[chain(unwritten).key(), chain(unwritten).key()], why);
            assert_eq!(taken(&mut write_queue), [], "nothing has hit them");
            (1..=3).for_each(|token| write_queue.note_hit(chain(token).key()));
            write_queue.note_computed(&prompt[3], |_, _| true);
            let again: Vec<Key> = again.into_iter().map(|token| chain(token).key()).collect();
            assert_eq!(taken(&mut write_queue), again, "{}", why.name());
            write_queue.check().unwrap();
        }
    }

    #[test]
    fn what_follows_a_refused_block_is_not_lost_with_its_chain() {
        let mut write_queue = queue(StoreWrites::Through, 4);
        let after = |token: u32, parent| Publication { parent: Some(chain(parent)), ..published(token) };
        for block in [published(1), after(2, 1), after(3, 2)] {
            write_queue.note_computed(&block, |_, _| true);
        }
        assert_eq!(taken(&mut write_queue).len(), 3);
        write_queue.note_unwritten(&[chain(2).key()], Unwritten::Refused);
        write_queue.note_unwritten(&[chain(3).key()], Unwritten::WithItsChain);
        (1..=3).for_each(|token| write_queue.note_hit(chain(token).key()));
        assert_eq!(taken(&mut write_queue), []);
        write_queue.note_computed(&after(2, 1), |_, _| true);
        write_queue.note_computed(&after(3, 2), |_, _| true);
        assert_eq!(taken(&mut write_queue), [2, 3].map(|token| chain(token).key()));
    }

    #[test]
    fn writing_back_keeps_as_many_blocks_unwritten_as_are_free() {
        let mut write_queue = queue(StoreWrites::Back, 40);
        let one = |queued: PerClass| queued.get(0);
        (0..10).for_each(|token| write_queue.note_computed(&published(token), |_, _| true));
        assert_eq!([20, 13, 12, 5, 0].map(|free| write_queue.due(one, free, 3)), [0, 0, 1, 8, 13]);
        write_queue.flush();
        assert_eq!(write_queue.due(one, 20, 3), usize::MAX);
        assert_eq!(queue(StoreWrites::Never, 40).due(one, 0, 3), 0);
    }

    #[test]
    fn with_second_use_a_block_is_written_when_it_is_hit_or_computed_again() {
        let mut write_queue = queue(StoreWrites::SecondUse, 4);
        write_queue.note_computed(&published(1), |_, _| true);
        write_queue.note_computed(&published(2), |_, _| false);
        assert_eq!(taken(&mut write_queue), []);
        write_queue.note_hit(chain(1).key());
        write_queue.note_hit(chain(1).key());
        write_queue.note_computed(&published(2), |_, _| false);
        assert_eq!(taken(&mut write_queue), [chain(1).key(), chain(2).key()]);
    }

    #[test]
    fn records_of_evicted_blocks_make_room() {
        let mut write_queue = queue(StoreWrites::Through, 32);
        let kept = chain(1_000_000).key();
        write_queue.note_computed(&published(1_000_000), |_, _| true);
        for token in 0..1000 {
            write_queue.note_computed(&published(token), |key, _| *key == kept);
            write_queue.check().unwrap();
        }
        assert!(write_queue.notes.len() <= 66 && write_queue.queue.len() <= 64, "{}", write_queue.notes.len());
        assert!(write_queue.export(&kept).is_some());
    }

    #[test]
    fn a_cleared_queue_records_as_many_keys_as_before() {
        let mut write_queue = queue(StoreWrites::Through, 100);
        write_queue.clear();
        for token in 0..200 {
            write_queue.note_computed(&published(token), |_, _| false);
        }
        assert!((0..200).all(|token| write_queue.export(&chain(token).key()).is_some()));
        assert_eq!(write_queue.waiting(), 200);
    }
}
