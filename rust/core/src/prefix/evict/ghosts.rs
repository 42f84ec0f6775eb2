//! What a policy let go, to know it when it comes back.

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
