//! What a policy let go, to know it when it comes back.

use std::hint::black_box;

/// One place a tag, which holds 16 bits of it; a tag is forgotten when another takes its place.
#[derive(Debug, Clone)]
pub(super) struct Ghosts(Vec<u16>);

impl Ghosts {
    pub(super) fn new(places: usize) -> Self {
        Self(vec![0; places])
    }

    /// Remembers a tag; returns whether its place was empty.
    #[inline]
    pub(super) fn insert(&mut self, tag: u32) -> bool {
        self.place(tag).is_some_and(|place| std::mem::replace(place, mark(tag)) == 0)
    }

    /// Forgets a tag; returns whether it was there.
    #[inline]
    pub(super) fn take(&mut self, tag: u32) -> bool {
        self.place(tag).filter(|place| **place == mark(tag)).is_some_and(|place| std::mem::take(place) != 0)
    }

    #[inline]
    fn place(&mut self, tag: u32) -> Option<&mut u16> {
        let at = (u64::from(tag) * self.0.len() as u64) >> 32;
        self.0.get_mut(usize::try_from(at).ok()?)
    }
}

/// What is remembered of a tag: other bits than those that decide its place, and never 0.
#[inline]
fn mark(tag: u32) -> u16 {
    let [low, high, ..] = tag.wrapping_mul(0x9e37_79b1).rotate_left(16).to_le_bytes();
    u16::from_le_bytes([low, high]).max(1)
}

/// Pools whose blocks are remembered with their ages.
const POOLS: usize = 4;
/// Places that a core's cache holds: larger pools remember fewer blocks, but as many as they have.
const PLACES_IN_CACHE: usize = 1 << 19;
/// Ages that are told apart, in halves of the pool.
pub(super) const AGES: usize = 1 << AGE_BITS;
const AGE_BITS: u32 = 4;

/// What a pool let go and how long ago: four bits of a place are the age, the others the tag's.
#[derive(Debug, Clone)]
pub(super) struct Aged {
    places: Ghosts,
    /// In halves of the pool, of which a place has the last bits.
    now: u16,
    half: usize,
    until_next: usize,
}

impl Aged {
    /// For a pool of so many blocks.
    pub(super) fn new(blocks: usize) -> Self {
        let half = (blocks / 2).max(1);
        let places = (POOLS * blocks).min(PLACES_IN_CACHE).max(blocks);
        Self { places: Ghosts::new(places), now: 0, half, until_next: half }
    }

    /// Remembers tags; they count as at most one half of the pool.
    pub(super) fn insert(&mut self, tags: &[u32]) {
        if self.places.0.len() > PLACES_IN_CACHE {
            // Nothing else in this pass, so that many cache misses overlap.
            black_box(tags.iter().fold(0, |all, &tag| all ^ self.places.place(tag).map_or(0, |place| *place)));
        }
        for &tag in tags {
            let mark = aged(tag, self.now);
            if let Some(place) = self.places.place(tag) {
                *place = mark;
            }
        }
        let Some(left) = self.until_next.checked_sub(tags.len()) else {
            self.now = self.now.wrapping_add(1);
            self.until_next = self.half;
            return;
        };
        self.until_next = left;
    }

    /// Forgets a tag; returns its age, if it was there.
    #[inline]
    pub(super) fn take(&mut self, tag: u32) -> Option<u16> {
        let now = self.now;
        let place = self.places.place(tag)?;
        let age = now.wrapping_sub(*place) & AGE;
        let is_there = *place == aged(tag, now.wrapping_sub(age));
        is_there.then(|| {
            *place = 0;
            age
        })
    }
}

/// Bits of a place that are the age.
const AGE: u16 = (1 << AGE_BITS) - 1;

/// What is remembered of a tag that is let go at some time, never 0.
#[inline]
fn aged(tag: u32, time: u16) -> u16 {
    (mark(tag) | 1 << AGE_BITS) & !AGE | time & AGE
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        #[test]
        fn what_was_not_let_go_is_hardly_ever_known(tags in prop::collection::hash_set(1u32.., 200..400)) {
            let mut ghosts = Ghosts::new(1000);
            let tags: Vec<_> = tags.into_iter().collect();
            let gone: HashSet<_> = tags.iter().step_by(2).copied().collect();
            let empty = gone.iter().filter(|&&tag| ghosts.insert(tag)).count();
            let known = tags.iter().filter(|&&tag| ghosts.take(tag)).filter(|tag| gone.contains(tag)).count();
            prop_assert!(known * 10 >= gone.len() * 7, "{known} of {} are known", gone.len());
            prop_assert!(known <= empty, "{known} are known in {empty} places");
            prop_assert!(tags.iter().all(|&tag| !ghosts.take(tag)), "a tag is there twice");
        }
    }
}
