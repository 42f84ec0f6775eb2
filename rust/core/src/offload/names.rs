//! Derives keys from names; maps keyed by them.

use crate::hash::Key;
use rustc_hash::FxHashMap;
use siphasher::sip128::SipHasher13;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

/// Derives keys from names with a random secret, so that collisions cannot be constructed.
#[derive(Clone, Debug)]
pub struct Names(SipHasher13);

impl Default for Names {
    fn default() -> Self {
        let [low, high] = [(); 2].map(|()| RandomState::new().hash_one(0));
        Self(SipHasher13::new_with_keys(low, high))
    }
}

impl Names {
    /// The key of a name: its `SipHash` 1-3 of 128 bits, in one pass.
    #[inline]
    #[must_use]
    pub fn key(&self, name: &[u8]) -> Key {
        let hash = self.0.hash(name);
        Key::from_hash(hash.h1, hash.h2)
    }
}

/// A map by keys.
pub(super) type ByKey<T> = FxHashMap<Key, T>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_key_which_another_process_cannot_predict() {
        let (names, others) = (Names::default(), Names::default());
        assert_eq!(names.key(b"name"), names.clone().key(b"name"));
        assert_ne!(names.key(b"name"), names.key(b"nam"));
        assert_ne!(names.key(b"name"), others.key(b"name"));
    }
}
