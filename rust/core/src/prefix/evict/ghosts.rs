//! Remembers evicted blocks, to recognize them when they come back.

/// One slot per tag, which holds 16 bits of it; a tag is forgotten when another takes its slot.
#[derive(Debug, Clone)]
struct Ghosts(Vec<u16>);

impl Ghosts {
    fn new(places: usize) -> Self {
        Self(vec![0; places])
    }

    /// Remembers a tag.
    #[inline]
    fn insert(&mut self, tag: u32) {
        if let Some(place) = self.place(tag) {
            *place = mark(tag);
        }
    }

    /// Forgets a tag; returns whether it was there.
    #[inline]
    fn take(&mut self, tag: u32) -> bool {
        self.place(tag).filter(|place| **place == mark(tag)).is_some_and(|place| std::mem::take(place) != 0)
    }

    #[inline]
    fn place(&mut self, tag: u32) -> Option<&mut u16> {
        let at = (u64::from(tag) * self.0.len() as u64) >> 32;
        self.0.get_mut(usize::try_from(at).ok()?)
    }
}

/// The stored bits of a tag: not those that select its slot, and never 0.
#[inline]
fn mark(tag: u32) -> u16 {
    let [low, high, ..] = tag.wrapping_mul(0x9e37_79b1).rotate_left(16).to_le_bytes();
    u16::from_le_bytes([low, high]).max(1)
}

/// Slots that fit into a core's L1 cache besides other data; a pool that needs more remembers a sample. For a returning
/// chain a sample suffices: knowledge of a block holds for all blocks before it.
const PLACES_IN_FIRST_CACHE: usize = 12 << 10;
/// At least one block in 4 is remembered.
const MAX_SPARSE: u32 = 4;
/// Tags processed together.
const TOGETHER: usize = 128;

/// A sample of evicted tags. Half of them are forgotten after 0.7 turnovers of the pool.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    places: Ghosts,
    /// One tag in `one_in` is remembered, a power of 2.
    one_in: u32,
}

impl Sample {
    /// One tag in `one_in`, a power of 2, is remembered.
    pub(super) fn new(places: usize, one_in: u32) -> Self {
        Self { places: Ghosts::new(places), one_in }
    }

    /// A sample for a pool of `blocks` blocks.
    pub(super) fn of_pool(blocks: usize) -> Self {
        let one_in = Self::one_in(blocks);
        Self::new(blocks.div_ceil(one_in as usize), one_in)
    }

    /// Sampling interval for a pool of `blocks` blocks.
    pub(super) fn one_in(blocks: usize) -> u32 {
        let fits = |&one_in: &u32| blocks / one_in as usize <= PLACES_IN_FIRST_CACHE;
        [1, 2].into_iter().find(fits).unwrap_or(MAX_SPARSE)
    }

    /// Whether a tag is in the sample.
    #[inline]
    fn is_sampled(&self, tag: u32) -> bool {
        tag & (self.one_in - 1) == 0
    }

    /// Remembers tags.
    pub(super) fn insert(&mut self, tags: &[u32]) {
        if self.one_in == 1 {
            for &tag in tags {
                self.places.insert(tag);
            }
            return;
        }
        for tags in tags.chunks(TOGETHER) {
            // Select them first, without a branch that would be mispredicted.
            let (mut sample, mut count) = ([0; TOGETHER], 0);
            for &tag in tags {
                sample[count] = tag;
                count += usize::from(self.is_sampled(tag));
            }
            for &tag in &sample[..count] {
                self.places.insert(tag);
            }
        }
    }

    /// Forgets a tag; returns whether it was there.
    #[inline]
    pub(super) fn take(&mut self, tag: u32) -> bool {
        let is_sampled = self.is_sampled(tag);
        // All unsampled tags read the same slot, which is in the CPU cache.
        self.places.take(tag * u32::from(is_sampled)) & is_sampled
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        #[test]
        fn a_tag_that_was_not_evicted_is_rarely_known(tags in prop::collection::hash_set(1u32.., 200..400)) {
            let mut ghosts = Ghosts::new(1000);
            let tags: Vec<_> = tags.into_iter().collect();
            let gone: HashSet<_> = tags.iter().step_by(2).copied().collect();
            for &tag in &gone {
                ghosts.insert(tag);
            }
            let known = tags.iter().filter(|&&tag| ghosts.take(tag)).filter(|tag| gone.contains(tag)).count();
            prop_assert!(known * 10 >= gone.len() * 7, "{known} of {} are known", gone.len());
            prop_assert!(tags.iter().all(|&tag| !ghosts.take(tag)), "a tag was remembered twice");
        }

        #[test]
        fn tags_evicted_long_ago_are_forgotten(one_in in prop::sample::select(vec![1u32, 2, 4]), first in any::<u32>()) {
            let blocks = 4000;
            let mut sample = Sample::new(blocks / one_in as usize, one_in);
            let tag = |pool: usize, block: usize| {
                let number = (u64::from(first) << 32 | (pool * blocks + block) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                ((number ^ number >> 32).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) as u32
            };
            for pool in 0..20 {
                sample.insert(&(0..blocks).map(|block| tag(pool, block)).collect::<Vec<_>>());
            }
            // By age in turnovers of the pool, each of which takes some of the slots.
            for age in 1..20 {
                let known = (0..blocks).filter(|&block| sample.take(tag(19 - age, block))).count();
                let most = 2 * ((blocks / one_in as usize) >> age) + 20;
                prop_assert!(known < most, "{known} of {blocks} after {age} pools");
            }
        }
    }
}
