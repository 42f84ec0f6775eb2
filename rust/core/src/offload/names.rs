//! Keys of names, and maps by keys.

use crate::hash::Key;
use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher};

/// Makes keys of names. Its secret is drawn at random: nobody can find two names with one key.
#[derive(Clone, Debug)]
pub struct Names([u64; 2]);

impl Default for Names {
    fn default() -> Self {
        Self([(); 2].map(|()| RandomState::new().hash_one(0)))
    }
}

impl Names {
    /// The key of a name: its SipHash-1-3 of 128 bits, in one pass.
    #[inline]
    #[must_use]
    pub fn key(&self, name: &[u8]) -> Key {
        let [low, high] = sip_hash::<1, 3>(self.0, name);
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&low.to_le_bytes());
        bytes[8..16].copy_from_slice(&high.to_le_bytes());
        Key::from_bytes(&bytes)
    }
}

/// SipHash of 128 bits, with so many rounds for each word and at each end.
#[inline]
fn sip_hash<const WORD: usize, const END: usize>([k0, k1]: [u64; 2], name: &[u8]) -> [u64; 2] {
    let mut state = [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d ^ 0xee,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ];
    let mut add = |word: u64| {
        state[3] ^= word;
        (0..WORD).for_each(|_| round(&mut state));
        state[0] ^= word;
    };
    let mut words = name.chunks_exact(8);
    for word in &mut words {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(word);
        add(u64::from_le_bytes(bytes));
    }
    let mut last = [0; 8];
    last[..words.remainder().len()].copy_from_slice(words.remainder());
    add(u64::from_le_bytes(last) | (name.len() as u64) << 56);
    let mut end = |at: usize, mark: u64| {
        state[at] ^= mark;
        (0..END).for_each(|_| round(&mut state));
        state[0] ^ state[1] ^ state[2] ^ state[3]
    };
    [end(2, 0xee), end(1, 0xdd)]
}

#[inline]
fn round([v0, v1, v2, v3]: &mut [u64; 4]) {
    *v0 = v0.wrapping_add(*v1);
    *v2 = v2.wrapping_add(*v3);
    *v1 = v1.rotate_left(13) ^ *v0;
    *v3 = v3.rotate_left(16) ^ *v2;
    *v0 = v0.rotate_left(32);
    *v2 = v2.wrapping_add(*v1);
    *v0 = v0.wrapping_add(*v3);
    *v1 = v1.rotate_left(17) ^ *v2;
    *v3 = v3.rotate_left(21) ^ *v0;
    *v2 = v2.rotate_left(32);
}

/// A key is as random as a hash, so it is one.
#[derive(Debug, Default)]
pub(super) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        if let Some(first) = bytes.first_chunk() {
            self.0 = u64::from_le_bytes(*first);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// A map by keys.
pub(super) type ByKey<T> = HashMap<Key, T, BuildHasherDefault<KeyHasher>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_siphash() {
        // From the reference implementation, with its two and four rounds.
        let of = |bytes: [u8; 8]| u64::from_le_bytes(bytes);
        let secret = [of([0, 1, 2, 3, 4, 5, 6, 7]), of([8, 9, 10, 11, 12, 13, 14, 15])];
        let [low, high] = sip_hash::<2, 4>(secret, &[]);
        assert_eq!(low.to_le_bytes(), [0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6]);
        assert_eq!(high.to_le_bytes(), [0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55, 0x02, 0x93]);
        let input: Vec<u8> = (0..64).collect();
        let all: std::collections::HashSet<_> = (0..64).map(|end| sip_hash::<1, 3>(secret, &input[..end])).collect();
        assert_eq!(all.len(), 64);
    }

    #[test]
    fn one_name_has_one_key_and_another_process_could_not_tell_it() {
        let (names, others) = (Names::default(), Names::default());
        assert_eq!(names.key(b"name"), names.clone().key(b"name"));
        assert_ne!(names.key(b"name"), names.key(b"nam"));
        assert_ne!(names.key(b"name"), others.key(b"name"));
    }
}
