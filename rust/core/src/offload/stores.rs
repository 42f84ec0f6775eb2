//! The stores that run, by chunk, and the keys of one call, each once.

use crate::hash::Key;
use crate::id::BlockId;

/// Which chunks are being written, and until when lookups wait for them.
#[derive(Debug, Default)]
pub(super) struct Stores {
    /// By chunk, as far as chunks have been written.
    running: Vec<bool>,
    deadlines: Vec<u64>,
    len: usize,
    /// No deadline of a running store comes before.
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

    /// A chunk is being written from now on.
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

    /// A chunk is written no more, or to no purpose; returns whether it was.
    #[inline]
    pub(super) fn end(&mut self, chunk: BlockId) -> bool {
        let was = self.running.get_mut(chunk.index()).is_some_and(std::mem::take);
        self.len -= usize::from(was);
        was
    }

    /// Chunks that are being written, rising.
    pub(super) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        (0..).map(BlockId).zip(&self.running).filter_map(|(chunk, &runs)| runs.then_some(chunk))
    }

    /// Those whose deadlines have come by `now`.
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

/// The keys that one call adds, to see those that are given twice: a table of places by the keys' tags.
#[derive(Debug, Default)]
pub(super) struct DistinctKeys {
    /// 0 for none, else the place of a key plus 1; a power of two, twice as many as keys or more.
    places: Vec<u32>,
}

impl DistinctKeys {
    /// Forgets all keys, and makes room for `keys`.
    pub(super) fn begin(&mut self, keys: usize) {
        self.places.clear();
        self.places.resize((2 * keys).next_power_of_two(), 0);
    }

    /// Notes the key at a place; returns whether it is new.
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
