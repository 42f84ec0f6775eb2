//! Running stores by chunk, and the distinct keys of one call.

use crate::hash::Key;
use crate::id::BlockId;

/// Chunks being written, and the deadlines until which lookups wait for them.
#[derive(Debug, Default)]
pub(super) struct Stores {
    /// By chunk, up to the highest chunk written so far.
    running: Vec<bool>,
    deadlines: Vec<u64>,
    len: usize,
    /// Lower bound on the deadlines of running stores.
    soonest: u64,
}

impl Stores {
    /// Stores that run.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Whether a chunk is being written.
    #[inline]
    pub(super) fn has(&self, chunk: BlockId) -> bool {
        self.running.get(chunk.index()).copied().unwrap_or_default()
    }

    /// Marks a chunk as being written.
    #[inline]
    pub(super) fn begin(&mut self, chunk: BlockId, deadline: u64) {
        let at = chunk.index();
        if at >= self.running.len() {
            self.running.resize(at + 1, false);
            self.deadlines.resize(at + 1, 0);
        }
        self.soonest = if self.len == 0 { deadline } else { self.soonest.min(deadline) };
        (self.running[at], self.deadlines[at]) = (true, deadline);
        self.len += 1;
    }

    /// Ends or abandons the writing of a chunk; returns whether it was being written.
    #[inline]
    pub(super) fn end(&mut self, chunk: BlockId) -> bool {
        let was = self.running.get_mut(chunk.index()).is_some_and(std::mem::take);
        self.len -= usize::from(was);
        was
    }

    /// Chunks being written, in ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        (0..).map(BlockId).zip(&self.running).filter_map(|(chunk, &runs)| runs.then_some(chunk))
    }

    /// Chunks whose deadlines have passed by `now`.
    pub(super) fn late(&mut self, now: u64) -> Vec<BlockId> {
        if self.len == 0 || now < self.soonest {
            return Vec::new();
        }
        let deadline = |chunk: &BlockId| self.deadlines[chunk.index()];
        let (late, rest): (Vec<_>, Vec<_>) = self.iter().partition(|chunk| deadline(chunk) <= now);
        self.soonest = rest.iter().map(deadline).min().unwrap_or(u64::MAX);
        late
    }
}

/// Detects repeated keys in one call: a hash table of their indices by tag.
#[derive(Debug, Default)]
pub(super) struct DistinctKeys {
    /// 0 if empty, else the index of a key plus 1. The length is a power of two, at least twice the number of keys.
    places: Vec<u32>,
}

impl DistinctKeys {
    /// Forgets all keys, and makes room for `keys`.
    pub(super) fn begin(&mut self, keys: usize) {
        self.places.clear();
        self.places.resize((2 * keys).next_power_of_two(), 0);
    }

    /// Adds the key at an index; returns whether it is new.
    #[inline]
    pub(super) fn add(&mut self, keys: &[Key], place: usize) -> bool {
        let last = self.places.len() - 1;
        let mut at = keys[place].tag() as usize & last;
        loop {
            match self.places[at] {
                0 => {
                    self.places[at] = u32::try_from(place + 1).unwrap_or(u32::MAX);
                    return true;
                }
                other if keys[other as usize - 1] == keys[place] => return false,
                _ => at = (at + 1) & last,
            }
        }
    }
}
