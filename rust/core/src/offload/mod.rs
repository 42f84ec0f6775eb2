//! Decisions of an engine's offload manager: which chunks of a host cache hold which keys, which may be read, and which
//! are reused.
//!
//! A chunk is written before it can be found, and read only while a load holds it. If a key is forgotten while its
//! transfers run, its chunks stay reserved until all of them have ended, so a late transfer never touches another key's
//! bytes.

use crate::block::MAX_BLOCKS;
use crate::error::{Error, Result, invalid};
use crate::hash::Key;
use crate::id::{BlockId, Tier};
use crate::pool::{Policies, Pool};
use crate::prefix::evict::{Hint, HintCount};
use std::collections::{HashMap, HashSet};
use std::hint::black_box;

mod names;
mod stores;
use names::ByKey;
pub use names::Names;
use stores::{DistinctKeys, Stores};

/// Result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// No chunk has the key.
    Miss,
    /// A chunk holds the key's bytes.
    Hit,
    /// A chunk is being written.
    Pending,
}

/// Result of ending a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// The key is a hit.
    Found,
    /// The store failed: the chunk is free.
    Freed(BlockId),
    /// No store of the key runs, or it was forgotten.
    Unknown,
}

/// Chunks of a key that was forgotten while transfers of it ran.
#[derive(Clone, Debug, Default)]
struct Detached {
    /// Chunks that loads read, with their references.
    loaded: Vec<(BlockId, u32)>,
    /// Loads of the key that have not ended, of these chunks or of a newer one.
    loads: u32,
    stored: Option<BlockId>,
}

impl Detached {
    fn is_done(&self) -> bool {
        self.loads == 0 && self.stored.is_none()
    }
}

/// The chunks of a host cache and the keys whose bytes they hold.
///
/// ```
/// use blockyard_core::Policies;
/// use blockyard_core::offload::{Lookup, Names, OffloadCache};
///
/// # fn main() -> blockyard_core::Result<()> {
/// let mut cache = OffloadCache::new(2, Policies::default())?;
/// let names = Names::default();
/// let keys = [names.key(b"first"), names.key(b"second")];
/// let mut chunks = Vec::new();
/// assert!(cache.prepare_store(&keys, u64::MAX, &mut chunks));
/// assert_eq!(cache.lookup(&keys[0]), Lookup::Pending);
/// cache.complete_store(&keys[0], true);
/// cache.complete_store(&keys[1], false);
/// assert_eq!((cache.lookup(&keys[0]), cache.lookup(&keys[1])), (Lookup::Hit, Lookup::Miss));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct OffloadCache {
    /// A chunk has its key from the moment its store is prepared.
    pool: Pool,
    stores: Stores,
    detached: ByKey<Detached>,
    /// The new keys of one `prepare_store`.
    batch: DistinctKeys,
}

impl OffloadCache {
    /// A cache of `chunks` empty chunks.
    ///
    /// # Errors
    /// More chunks than a tier can have, or than there is memory for.
    pub fn new(chunks: usize, policies: Policies) -> Result<Self> {
        if chunks > MAX_BLOCKS {
            return Err(invalid("num_chunks", chunks as i128, format!("at most {MAX_BLOCKS}")));
        }
        let pool = Pool::with_policies(Tier::Host, chunks, true, policies)?;
        Ok(Self { pool, stores: Stores::default(), detached: ByKey::default(), batch: DistinctKeys::default() })
    }

    /// Total number of chunks.
    #[must_use]
    pub fn num_chunks(&self) -> usize {
        self.pool.len()
    }

    /// Chunks available to a store now: empty ones, and those that can be evicted.
    #[must_use]
    pub fn num_free(&self) -> usize {
        self.pool.free()
    }

    /// Chunks whose bytes can be loaded.
    #[must_use]
    pub fn num_stored(&self) -> usize {
        self.pool.published() - self.stores.len()
    }

    /// Chunks that are being written and will be found.
    #[must_use]
    pub fn num_storing(&self) -> usize {
        self.stores.len()
    }

    /// Stored chunks that were evicted.
    #[must_use]
    pub fn num_evicted(&self) -> u64 {
        self.pool.evictions()
    }

    /// Whether a chunk holds the bytes of a key, or will.
    #[inline]
    #[must_use]
    pub fn lookup(&self, key: &Key) -> Lookup {
        match self.pool.find(key) {
            None => Lookup::Miss,
            Some(chunk) if self.stores.has(chunk) => Lookup::Pending,
            Some(_) => Lookup::Hit,
        }
    }

    /// The chunk that holds a key's bytes.
    #[inline]
    fn stored(&self, key: &Key) -> Option<BlockId> {
        self.pool.find(key).filter(|&chunk| !self.stores.has(chunk))
    }

    /// Reads the memory that calls with these keys are going to need, so that cache misses overlap.
    pub fn look_ahead(&self, keys: &[Key]) {
        for key in keys {
            self.pool.look_ahead(key);
        }
    }

    /// As [`OffloadCache::look_ahead`], where most keys have chunks.
    pub fn look_ahead_chunks(&self, keys: &[Key]) {
        self.look_ahead(keys);
        let refs = keys.iter().filter_map(|key| self.pool.find(key)).map(|chunk| self.pool.refs(chunk));
        black_box(refs.fold(0, |all, refs| all | refs));
    }

    /// Takes a chunk for each key without one, and appends the key's index in `keys` and the chunk to `out`. Keys that
    /// have a chunk count as just used and are not evicted for it. Keys given twice, and keys whose forgotten store
    /// still runs, get no chunk. Returns false, and changes nothing, if there are too few chunks.
    pub fn prepare_store(&mut self, keys: &[Key], deadline: u64, out: &mut Vec<(usize, BlockId)>) -> bool {
        let first = out.len();
        let mut found = Vec::new();
        self.look_ahead(keys);
        self.batch.begin(keys.len());
        for (place, key) in keys.iter().enumerate() {
            if let Some(chunk) = self.pool.find(key) {
                if !self.stores.has(chunk) {
                    found.push(chunk);
                }
            } else if self.detached.get(key).is_none_or(|detached| detached.stored.is_none())
                && self.batch.add(keys, place)
            {
                out.push((place, BlockId(0)));
            }
        }
        let wanted = out.len() - first;
        let mut idle: Vec<BlockId> = found.iter().copied().filter(|&chunk| self.pool.refs(chunk) == 0).collect();
        idle.sort_unstable();
        idle.dedup();
        if wanted + idle.len() > self.pool.free() {
            out.truncate(first);
            return false;
        }
        // Claimed first, so that the new chunks cannot evict them.
        for &chunk in &found {
            self.pool.claim(chunk);
        }
        let mut chunks = Vec::with_capacity(wanted);
        self.pool.take(wanted, false, &mut chunks);
        self.pool.begin_chain();
        // Last key first: a prompt finds nothing behind an evicted key, so its last chunks must be evicted first.
        for &chunk in found.iter().rev() {
            self.pool.release(chunk);
        }
        for (new, chunk) in out[first..].iter_mut().zip(chunks) {
            new.1 = chunk;
            self.pool.add(chunk, keys[new.0]);
            self.stores.begin(chunk, deadline);
        }
        true
    }

    /// Ends the store of a key.
    pub fn complete_store(&mut self, key: &Key, success: bool) -> Stored {
        if let Some(detached) = self.detached.get_mut(key) {
            if let Some(chunk) = detached.stored.take() {
                self.drop_done(key);
                self.pool.release(chunk);
                return Stored::Unknown;
            }
        }
        let Some(chunk) = self.pool.find(key).filter(|&chunk| self.stores.end(chunk)) else { return Stored::Unknown };
        if !success {
            self.pool.unpublish(chunk);
        }
        self.pool.begin_chain();
        self.pool.release(chunk);
        if success { Stored::Found } else { Stored::Freed(chunk) }
    }

    /// Holds the chunks of keys for loads, and appends them to `out`.
    ///
    /// # Errors
    /// The index of the first key that is not a hit; nothing was changed.
    pub fn prepare_load(&mut self, keys: &[Key], out: &mut Vec<BlockId>) -> std::result::Result<(), usize> {
        let first = out.len();
        for (place, key) in keys.iter().enumerate() {
            let Some(chunk) = self.stored(key) else {
                out.truncate(first);
                return Err(place);
            };
            out.push(chunk);
        }
        for (key, &chunk) in keys.iter().zip(&out[first..]) {
            self.pool.claim(chunk);
            if let Some(detached) = self.detached.get_mut(key) {
                detached.loads += 1;
            }
        }
        Ok(())
    }

    /// Ends one load of a key. Returns whether there was one.
    #[must_use]
    pub fn complete_load(&mut self, key: &Key) -> bool {
        if let Some(detached) = self.detached.get_mut(key).filter(|detached| detached.loads > 0) {
            // It is unknown which chunk it read, so they are freed together.
            detached.loads -= 1;
            if detached.loads == 0 {
                let loaded = std::mem::take(&mut detached.loaded);
                self.drop_done(key);
                let newer = self.stored(key).map(|chunk| (chunk, self.pool.refs(chunk)));
                for (chunk, refs) in loaded.into_iter().chain(newer) {
                    (0..refs).for_each(|_| self.pool.release(chunk));
                }
            }
            return true;
        }
        let Some(chunk) = self.stored(key).filter(|&chunk| self.pool.refs(chunk) > 0) else { return false };
        self.pool.begin_chain();
        self.pool.release(chunk);
        true
    }

    /// Counts the chunks of keys as just used, the first key's as the last one; those of `inserted` keys are put in the
    /// same order, but not counted. Keys without a chunk are passed over.
    pub fn touch(&mut self, keys: &[Key], inserted: &HashSet<Key>) {
        self.pool.begin_chain();
        for key in keys.iter().rev() {
            let Some(chunk) = self.stored(key) else { continue };
            if inserted.contains(key) {
                self.pool.reorder(chunk);
            } else {
                self.pool.claim(chunk);
                self.pool.release(chunk);
            }
        }
        self.pool.end_chain();
    }

    /// Notes at a time in seconds, of a clock that never goes back, that a request has ended whose chunks are touched next;
    /// `keys` are all its keys.
    pub fn end_turn(&mut self, keys: &[Key], now: f64, hint: Option<Hint>) {
        self.pool.set_now(now);
        self.pool.end_turn(keys, hint);
    }

    /// By hint, see [`Hint::ALL`]: the requests that ended with it.
    #[must_use]
    pub fn hint_counts(&self) -> [HintCount; Hint::ALL.len()] {
        self.pool.hint_counts()
    }

    /// Evicts `count` keys that are not being loaded and not in `protected`, and appends their chunks, now free, to
    /// `out`. Returns false, and changes nothing, if there are fewer than `count`.
    pub fn evict(&mut self, count: usize, protected: &[Key], out: &mut Vec<BlockId>) -> bool {
        let kept = |key| self.pool.find(key).filter(|&chunk| self.pool.refs(chunk) == 0);
        let mut kept: Vec<BlockId> = protected.iter().filter_map(kept).collect();
        kept.sort_unstable();
        kept.dedup();
        if count.saturating_add(kept.len()) > self.pool.evictable() {
            return false;
        }
        let first = out.len();
        for &chunk in &kept {
            self.pool.claim(chunk);
        }
        self.pool.evict(0, count, false, out);
        self.pool.begin_chain();
        kept.iter().chain(&out[first..]).for_each(|&chunk| self.pool.release(chunk));
        true
    }

    /// Forgets a key: it is a miss from now on, even when a store of it ends. Returns the chunk that it had.
    pub fn forget(&mut self, key: &Key) -> Option<BlockId> {
        let chunk = self.pool.find(key)?;
        if self.stores.end(chunk) {
            self.pool.unpublish(chunk);
            self.detached.entry(*key).or_default().stored = Some(chunk);
            return Some(chunk);
        }
        let refs = self.pool.refs(chunk);
        self.pool.unpublish(chunk);
        if refs > 0 {
            let detached = self.detached.entry(*key).or_default();
            // After an earlier chunk of the key was forgotten, the loads of this one are counted already.
            if detached.loads == 0 {
                detached.loads = refs;
            }
            detached.loaded.push((chunk, refs));
        }
        Some(chunk)
    }

    /// Forgets the keys whose stores have not ended by `now`, so that lookups do not wait forever. Appends them to
    /// `out`.
    pub fn expire(&mut self, now: u64, out: &mut Vec<(Key, BlockId)>) {
        for chunk in self.stores.late(now) {
            if let Some(key) = self.pool.key(chunk) {
                self.forget(&key);
                out.push((key, chunk));
            }
        }
    }

    /// Forgets all keys.
    pub fn reset(&mut self) {
        let keys = (0..).map(BlockId).take(self.pool.len()).filter_map(|chunk| self.pool.key(chunk));
        for key in keys.collect::<Vec<_>>() {
            self.forget(&key);
        }
    }

    fn drop_done(&mut self, key: &Key) {
        if self.detached.get(key).is_some_and(Detached::is_done) {
            self.detached.remove(key);
        }
    }

    /// Checks the whole state.
    ///
    /// # Errors
    /// The first thing that does not hold.
    pub fn check(&self) -> Result<()> {
        let mut refs: HashMap<BlockId, u32> = self.stores.iter().map(|chunk| (chunk, 1)).collect();
        let is_keyed = refs.keys().all(|&chunk| self.pool.block(chunk).is_published());
        let mut problem = (refs.len() != self.stores.len() || !is_keyed)
            .then(|| format!("{} stores, {} chunks are being written", self.stores.len(), refs.len()));
        for (key, detached) in &self.detached {
            let held = detached.loaded.iter().copied().chain(detached.stored.map(|chunk| (chunk, 1)));
            for (chunk, count) in held {
                if refs.insert(chunk, count).is_some() || self.pool.block(chunk).is_published() {
                    problem = Some(format!("chunk {} of a forgotten key is used elsewhere", chunk.0));
                }
            }
            let newer = self.stored(key).map_or(0, |chunk| self.pool.refs(chunk));
            let loads = newer + detached.loaded.iter().map(|(_, refs)| refs).sum::<u32>();
            if detached.is_done() || detached.loads > loads {
                problem = Some(format!("{} loads of a forgotten key, its chunks have {loads}", detached.loads));
            }
        }
        for chunk in (0..).map(BlockId).take(self.pool.len()) {
            let block = self.pool.block(chunk);
            let expected = refs.get(&chunk).copied().unwrap_or(if block.is_published() { block.refs() } else { 0 });
            if block.refs() != expected {
                problem = Some(format!("chunk {} has {} references, not {expected}", chunk.0, block.refs()));
            }
        }
        problem.map_or(Ok(()), |what| Err(Error::Broken { what }))
    }
}
