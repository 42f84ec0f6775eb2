//! Remembers evicted blocks, to recognize them when they come back.

/// One slot per tag, which holds 16 bits of it; a tag is forgotten when another takes its slot. With a slot for each block
/// of the pool, half of the tags are forgotten after 0.7 turnovers.
#[derive(Debug, Clone)]
pub(super) struct Ghosts(Vec<u16>);

impl Ghosts {
    pub(super) fn new(places: usize) -> Self {
        Self(vec![0; places])
    }

    /// Remembers a tag.
    #[inline]
    pub(super) fn insert(&mut self, tag: u32) {
        if let Some(place) = self.place(tag) {
            *place = mark(tag);
        }
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

/// The stored bits of a tag: not those that select its slot, and never 0.
#[inline]
fn mark(tag: u32) -> u16 {
    let [low, high, ..] = tag.wrapping_mul(0x9e37_79b1).rotate_left(16).to_le_bytes();
    u16::from_le_bytes([low, high]).max(1)
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
        fn tags_evicted_long_ago_are_forgotten(first in any::<u32>()) {
            let blocks = 4000;
            let mut ghosts = Ghosts::new(blocks);
            let tag = |pool: usize, block: usize| {
                let number = (u64::from(first) << 32 | (pool * blocks + block) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                ((number ^ number >> 32).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) as u32
            };
            for pool in 0..20 {
                (0..blocks).for_each(|block| ghosts.insert(tag(pool, block)));
            }
            // By age in turnovers of the pool, each of which takes some of the slots.
            for age in 1..20 {
                let known = (0..blocks).filter(|&block| ghosts.take(tag(19 - age, block))).count();
                let most = 2 * (blocks >> age) + 20;
                prop_assert!(known < most, "{known} of {blocks} after {age} pools");
            }
        }
    }
}
