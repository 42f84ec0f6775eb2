//! Moves under a foreign allocator: its block ids stay, the bytes move, and two tables map between them.
//!
//! An *id* is the foreign allocator's name for a block; a *block* is where the bytes lie. `forward` (id to block) and
//! `backward` are inverse permutations at all times. References, leases and places belong to blocks. A block without
//! references may still hold its id's cached content; it is *blank* once the caller declares that it does not.

use crate::error::{Error, Result};
use crate::id::{BlockId, Tier};
use crate::memory;
use crate::placement::{BlockMap, Occupancy};
use crate::reuse::BlockSet;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::Range;

mod steps;

/// Blocks held in place for an external reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct LeaseId(pub u64);

/// Whether released ids have content worth keeping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fresh {
    /// They may matter: a cached block.
    No,
    /// Their content will never be read.
    Yes,
}

/// State of a block, in one struct because a step touches many blocks once each.
#[derive(Clone, Copy, Debug)]
#[repr(align(8))]
struct ObservedBlock {
    /// The id whose bytes lie here.
    id: u32,
    refs: u32,
}

/// Maps a foreign allocator's ids to the blocks that hold their bytes.
#[derive(Clone, Debug)]
pub struct Observer {
    forward: Vec<u32>,
    blocks: Vec<ObservedBlock>,
    places: BlockMap,
    /// Holes whose bytes will never be read.
    blank: BlockSet,
    held: HashMap<LeaseId, Vec<u32>>,
    /// Leases of each leased block; these are few.
    leases: HashMap<u32, u32>,
    next_lease: u64,
    /// Maximum number of ids.
    limit: u32,
}

impl Observer {
    /// Creates ids `0..blocks`, each mapped to the block of that number; more are added when named, below `limit`.
    /// Block 0 is the null block.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if there is not enough memory for `blocks` blocks.
    pub fn new(blocks: u32, limit: u32) -> Result<Self> {
        let mut observer = Self {
            forward: Vec::new(),
            blocks: Vec::new(),
            places: BlockMap::new(0),
            blank: BlockSet::empty(0),
            held: HashMap::new(),
            leases: HashMap::new(),
            next_lease: 0,
            limit: limit.max(1),
        };
        observer.extend(blocks.clamp(1, observer.limit))?;
        observer.places.set(BlockId(0), Occupancy::Fixed);
        Ok(observer)
    }

    /// Ids known so far.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.places.capacity()
    }

    /// Always false: there is the null block.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Maximum number of ids.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Sets the number of blocks, once it is known.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if more ids are known already; [`Error::OutOfMemory`] if there is not enough memory.
    pub fn set_limit(&mut self, blocks: u32) -> Result<()> {
        if blocks < self.len() {
            let must = format!("at least {}, the number of known ids", self.len());
            return Err(Error::InvalidArgument { what: "num_blocks", found: blocks.into(), must });
        }
        self.extend(blocks)?;
        self.limit = blocks;
        Ok(())
    }

    /// What may be done with each block.
    #[must_use]
    pub fn places(&self) -> &BlockMap {
        &self.places
    }

    /// The block of each id; an id past the end maps to the block of that number.
    #[must_use]
    pub fn forward(&self) -> &[u32] {
        &self.forward
    }

    /// References to a block.
    #[must_use]
    pub fn refs(&self, block: BlockId) -> u32 {
        self.blocks.get(block.index()).map_or(0, |block| block.refs)
    }

    /// Blocks with references, in ascending order, and how many references each has.
    pub fn used(&self) -> impl Iterator<Item = (BlockId, u32)> + '_ {
        let used = |(id, block): (u32, &ObservedBlock)| (block.refs > 0).then_some((BlockId(id), block.refs));
        (0..).zip(&self.blocks).filter_map(used)
    }

    /// Returns the block of an id.
    #[must_use]
    #[inline]
    pub fn resolve(&self, id: u32) -> u32 {
        self.forward.get(id as usize).copied().unwrap_or(id)
    }

    /// Returns the id of a block.
    #[must_use]
    pub fn unresolve(&self, block: u32) -> u32 {
        self.blocks.get(block as usize).map_or(block, |block| block.id)
    }

    /// Adds a reference to the blocks of ids.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if an id is out of range; nothing has changed.
    pub fn use_ids(&mut self, ids: &[u32]) -> Result<()> {
        self.reach(ids)?;
        for &id in ids {
            self.take(self.forward[id as usize]);
        }
        Ok(())
    }

    /// Like [`Observer::use_ids`], but the ids have no content to keep: those not in use are bound to the lowest blank
    /// blocks, longest runs first. Pass the ids of one sequence together, long sequences first.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if an id is out of range; nothing has changed.
    pub fn use_fresh(&mut self, ids: &[u32]) -> Result<()> {
        self.reach(ids)?;
        let mut unused = Vec::with_capacity(ids.len());
        for &id in ids {
            let block = self.forward[id as usize];
            let known = &mut self.blocks[block as usize];
            known.refs += 1;
            if known.refs == 1 && !self.places.fixed().contains(BlockId(block)) {
                unused.push(id);
                self.blank.insert(BlockId(block));
            }
        }
        let mut unused = unused.into_iter();
        for run in self.blank_runs(unused.len()) {
            for (block, id) in run.clone().zip(unused.by_ref()) {
                self.swap_places(self.forward[id as usize], block);
            }
            self.blank.remove_run(run.clone());
            self.places.fill_run(run);
        }
        Ok(())
    }

    /// Drops a reference to the blocks of ids. Blocks without references keep their cached content, except with
    /// [`Fresh::Yes`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] or [`Error::NotReferenced`]; nothing has changed.
    pub fn release_ids(&mut self, ids: &[u32], fresh: Fresh) -> Result<()> {
        for (done, &id) in ids.iter().enumerate() {
            let block = self.resolve(id);
            match self.blocks.get_mut(block as usize) {
                Some(block) if block.refs > 0 => block.refs -= 1,
                _ => {
                    for &id in &ids[..done] {
                        let block = self.resolve(id);
                        self.blocks[block as usize].refs += 1;
                    }
                    return Err(self.not_referenced(block, ids));
                }
            }
        }
        let blocks = ids.iter().map(|&id| self.forward[id as usize]);
        let freed: Vec<_> = runs(blocks.filter(|&block| self.is_free(block))).collect();
        for run in freed {
            if fresh == Fresh::Yes {
                self.blank.insert_run(run.clone());
            }
            self.places.free_run(run);
        }
        Ok(())
    }

    /// Marks the blocks of these ids as blank, if they are not in use.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if an id is out of range; nothing has changed.
    pub fn forget_ids(&mut self, ids: &[u32]) -> Result<()> {
        self.reach(ids)?;
        for &id in ids {
            let block = self.forward[id as usize];
            if self.is_free(block) {
                self.blank.insert(BlockId(block));
            }
        }
        Ok(())
    }

    /// Holds the blocks of ids and their contents in place, even when they are no longer referenced.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if an id is out of range; nothing has changed.
    pub fn lease(&mut self, ids: &[u32]) -> Result<LeaseId> {
        self.reach(ids)?;
        let blocks: Vec<u32> = ids.iter().map(|&id| self.forward[id as usize]).collect();
        for &block in &blocks {
            *self.leases.entry(block).or_default() += 1;
            self.blank.remove(BlockId(block));
            self.places.set(BlockId(block), Occupancy::Fixed);
        }
        let lease = LeaseId(self.next_lease);
        self.next_lease += 1;
        self.held.insert(lease, blocks);
        Ok(lease)
    }

    /// Ends a lease.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it is not held.
    pub fn end_lease(&mut self, lease: LeaseId) -> Result<()> {
        let Some(blocks) = self.held.remove(&lease) else {
            let must = "a lease that is held".to_owned();
            return Err(Error::InvalidArgument { what: "lease", found: lease.0.into(), must });
        };
        for block in blocks {
            match self.leases.get_mut(&block) {
                Some(leases) if *leases > 1 => *leases -= 1,
                _ => {
                    self.leases.remove(&block);
                    if block != 0 {
                        let place = if self.refs(BlockId(block)) > 0 { Occupancy::Live } else { Occupancy::Hole };
                        self.places.set(BlockId(block), place);
                    }
                }
            }
        }
        Ok(())
    }

    /// Recounts everything and compares.
    ///
    /// # Errors
    /// [`Error::Broken`] with the first contradiction.
    pub fn check(&self) -> Result<()> {
        for block in 0..self.len() {
            let (id, i) = (BlockId(block), block as usize);
            let must_be = match (block == 0 || self.leases.contains_key(&block), self.blocks[i].refs > 0) {
                (true, _) => Occupancy::Fixed,
                (false, true) => Occupancy::Live,
                (false, false) => Occupancy::Hole,
            };
            let place = self.places.get(id);
            let linked = self.forward.get(self.blocks[i].id as usize) == Some(&block);
            if place != must_be || !linked || (self.blank.contains(id) && place != Occupancy::Hole) {
                let (refs, leases) = (self.blocks[i].refs, self.leases.get(&block).copied().unwrap_or(0));
                let what = format!("block {block} is {place:?} with {refs} references and {leases} leases");
                return Err(Error::Broken { what });
            }
        }
        Ok(())
    }

    /// Swaps the ids of two blocks, with all their state.
    #[inline]
    fn swap_places(&mut self, a: u32, b: u32) {
        self.blocks.swap(a as usize, b as usize);
        self.forward[self.blocks[a as usize].id as usize] = a;
        self.forward[self.blocks[b as usize].id as usize] = b;
    }

    /// Whether a block is neither referenced nor leased.
    #[inline]
    fn is_free(&self, block: u32) -> bool {
        self.blocks[block as usize].refs == 0 && !self.places.fixed().contains(BlockId(block))
    }

    /// Adds a reference to a block.
    fn take(&mut self, block: u32) {
        if self.is_free(block) {
            self.blank.remove(BlockId(block));
            self.places.set(BlockId(block), Occupancy::Live);
        }
        self.blocks[block as usize].refs += 1;
    }

    /// Runs of the lowest blank blocks, `count` blocks in all, longest first.
    fn blank_runs(&self, count: usize) -> Vec<Range<u32>> {
        let (mut found, mut from, mut left) = (Vec::new(), 0, u32::try_from(count).unwrap_or(u32::MAX));
        while let Some(run) = (left > 0).then(|| self.blank.next_run(from, left)).flatten() {
            left -= run.end - run.start;
            from = run.end;
            found.push(run);
        }
        found.sort_unstable_by_key(|run| (Reverse(run.len()), run.start));
        found
    }

    /// Adds the ids, if they are in range.
    fn reach(&mut self, ids: &[u32]) -> Result<()> {
        let Some(&highest) = ids.iter().max() else { return Ok(()) };
        if highest >= self.limit {
            let must = format!("below {}", self.limit);
            return Err(Error::InvalidArgument { what: "block", found: highest.into(), must });
        }
        self.extend(highest + 1)
    }

    fn extend(&mut self, blocks: u32) -> Result<()> {
        let known = self.len();
        if blocks > known {
            // A vector may double its capacity; the bits are those of `places` and `blank`.
            const BLOCK: usize = 2 * (size_of::<u32>() + size_of::<ObservedBlock>() + 1);
            memory::require((blocks as usize).saturating_mul(BLOCK))?;
            self.forward.extend(known..blocks);
            self.blocks.extend((known..blocks).map(|id| ObservedBlock { id, refs: 0 }));
            self.places.grow(blocks);
            self.blank.grow(blocks as usize);
        }
        Ok(())
    }

    fn not_referenced(&self, block: u32, ids: &[u32]) -> Error {
        let wanted = ids.iter().filter(|&&id| self.resolve(id) == block).count();
        Error::NotReferenced { tier: Tier::Device, block: BlockId(block), wanted, refs: self.refs(BlockId(block)) }
    }
}

/// Merges blocks that follow one another.
fn runs(blocks: impl Iterator<Item = u32>) -> impl Iterator<Item = Range<u32>> {
    let mut blocks = blocks.peekable();
    std::iter::from_fn(move || {
        let start = blocks.next()?;
        let mut end = start + 1;
        while blocks.next_if_eq(&end).is_some() {
            end += 1;
        }
        Some(start..end)
    })
}
