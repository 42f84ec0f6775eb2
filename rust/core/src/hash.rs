//! Keys of full blocks: hashes of all earlier blocks, the block's tokens, and other inputs that determine its bytes.
//!
//! Each sequence is one byte stream: a 64-byte header frame, then for each block its extra frames and its tokens as
//! little-endian u32, padded to 64 bytes with 0xFF. The in-process [`Key`] of a block is SHA-256's chaining value after
//! it, so hashing a parent's key into its children costs nothing; the [`ExportedKey`] is the finished SHA-256 of the
//! same stream. They are separate types and never compared.

use crate::error::{Error, Result};
use sha2::digest::generic_array::GenericArray;
use sha2::digest::typenum::U64;
use sha2::{Digest, Sha256};

/// Version of the byte stream.
const FORMAT: u32 = 1;
/// Marks an extra frame and pads a block; no token has this id.
pub const RESERVED_TOKEN: u32 = u32::MAX;

const INITIAL: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

/// In-process key of a full block: SHA-256's chaining value. Never leaves the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Key([u32; 8]);

impl Key {
    /// Key of the next block, with these tokens and extras.
    ///
    /// # Errors
    /// As [`Chain::block`].
    pub fn child(&self, tokens: &[u32], extras: &[Extra<'_>]) -> Result<Self> {
        Chain { state: self.0, frames: 0 }.block(tokens, extras)
    }

    /// The key of the same tokens in a cache group. Deriving it saves hashing the tokens once per group, and makes no
    /// two keys collide: they are SHA-256 states, which differ in more than a group's number.
    #[inline]
    pub(crate) fn of_group(self, group: u8) -> Self {
        self.of_part(group, 0)
    }

    /// The key of one of several blocks that hold the same tokens in a cache group.
    #[inline]
    pub(crate) fn of_part(mut self, group: u8, part: u32) -> Self {
        self.0[0] ^= (u32::from(group) + (part << 8)).wrapping_mul(0x9E37_79B9);
        self
    }

    /// The key of the same block before one of its next tokens; as with groups, no two keys collide.
    #[inline]
    pub(crate) fn before(mut self, token: u32) -> Self {
        self.0[0] ^= token.wrapping_mul(0x85EB_CA6B);
        self.0[1] ^= token;
        self
    }

    /// A word of the key, for hash tables; never 0.
    #[inline]
    pub(crate) fn tag(&self) -> u32 {
        self.0[0].max(1)
    }

    /// Names the key in the links from a block to the one before it; never 0, which stands for none. Of 77,000 tags two
    /// are alike in every second cache, of a billion links in every 37th.
    #[inline]
    pub(crate) fn link(&self) -> u64 {
        u64::from(self.0[1]) << 32 | u64::from(self.tag())
    }

    /// A key made from another 128-bit hash.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
    pub(crate) fn from_hash(low: u64, high: u64) -> Self {
        Self([low as u32, (low >> 32) as u32, high as u32, (high >> 32) as u32, 0, 0, 0, 0])
    }

    /// The key as bytes, for a caller in this process to keep.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 32] {
        let mut bytes = [0; 32];
        for (bytes, word) in bytes.chunks_exact_mut(4).zip(self.0) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The key that [`Key::to_bytes`] returned as these bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; 32]) -> Self {
        let mut words = [0; 8];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Self(words)
    }
}

/// Key that leaves the process: the SHA-256 digest of the stream up to a block's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExportedKey(pub [u8; 32]);

/// Keys of a block in a model with a drafter, which depend on the token after it: the one under which device and host
/// find it, and the one for other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AheadKeys {
    pub(crate) own: (Key, ExportedKey),
    /// Those of the block that it hangs on, see [`Groups::hangs_on`](crate::group::Groups::hangs_on).
    pub(crate) hangs_on: Option<(Key, ExportedKey)>,
}

/// Names a cache group in exported keys: its number, its kind, and the kind's parameter; then, with a drafter, the token
/// after the block; and which of the blocks it is that a key stands for. These are [`RESERVED_TOKEN`] if there is none, or
/// if it is the first.
pub(crate) type GroupMark = [u32; 5];

/// What a sequence's keys depend on besides its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct KeySpec {
    /// Isolates tenants; all zero for none. A longer salt is stored as its digest.
    pub salt: [u8; 32],
    /// Adapter that the sequence runs with; 0 for none.
    pub lora_id: u64,
}

impl KeySpec {
    /// Keys for a tenant's salt, of any length, and an adapter. An empty salt is a salt like any other.
    #[must_use]
    pub fn new(salt: Option<&[u8]>, lora_id: u64) -> Self {
        Self { salt: salt.map_or([0; 32], |salt| Sha256::digest(salt).into()), lora_id }
    }
}

/// An input besides tokens that determines a block's bytes, such as the hash of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extra<'a> {
    /// What it is, in the caller's numbering.
    pub kind: u32,
    /// Its bytes.
    pub bytes: &'a [u8],
}

/// The chain of one sequence's keys, one block after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain {
    state: [u32; 8],
    /// 64-byte frames hashed so far.
    frames: u64,
}

impl Chain {
    /// The chain before a sequence's first block.
    #[must_use]
    pub fn new(spec: &KeySpec, block_size: u32, cache_group: u32) -> Self {
        let mut header = [0; 64];
        header[..8].copy_from_slice(b"BLKYKEYS");
        header[8..12].copy_from_slice(&FORMAT.to_le_bytes());
        header[12..16].copy_from_slice(&block_size.to_le_bytes());
        header[16..20].copy_from_slice(&cache_group.to_le_bytes());
        header[24..32].copy_from_slice(&spec.lora_id.to_le_bytes());
        header[32..].copy_from_slice(&spec.salt);
        let mut chain = Self { state: INITIAL, frames: 0 };
        chain.absorb(&header);
        chain
    }

    /// The chain that had a key after `frames` frames.
    pub(crate) fn resume(key: Key, frames: u32) -> Self {
        Self { state: key.0, frames: u64::from(frames) }
    }

    /// Key of everything hashed so far.
    #[must_use]
    pub fn key(&self) -> Key {
        Key(self.state)
    }

    /// 64-byte frames hashed so far. No sequence comes near the 256 GiB that a u32 can count.
    pub(crate) fn frames(&self) -> u32 {
        u32::try_from(self.frames).unwrap_or(u32::MAX)
    }

    /// Hashes one more full block and returns its key.
    ///
    /// # Errors
    /// A token is [`RESERVED_TOKEN`], or an extra is longer than `u32::MAX` bytes; the chain is unchanged.
    pub fn block(&mut self, tokens: &[u32], extras: &[Extra<'_>]) -> Result<Key> {
        refuse_reserved("a token id", tokens)?;
        Ok(self.framed_block(frames_of_extras(extras)?, tokens))
    }

    /// As [`Chain::block`], for a block without extras and tokens that [`refuse_reserved`] has accepted.
    #[inline]
    pub(crate) fn plain_block(&mut self, tokens: &[u32]) -> Key {
        if let Ok(tokens) = <&[u32; 16]>::try_from(tokens) {
            // Keep this loop minimal, so that it compiles to four vector moves.
            let mut frame = [0; 64];
            for (bytes, token) in frame.chunks_exact_mut(4).zip(tokens) {
                bytes.copy_from_slice(&token.to_le_bytes());
            }
            self.absorb(&frame);
            Key(self.state)
        } else {
            self.absorb_stream(Vec::with_capacity(tokens.len() * 4 + 64), tokens)
        }
    }

    /// As [`Chain::plain_block`], for a block whose extras have these frames.
    #[inline]
    pub(crate) fn framed_block(&mut self, frames: Vec<u8>, tokens: &[u32]) -> Key {
        if frames.is_empty() { self.plain_block(tokens) } else { self.absorb_stream(frames, tokens) }
    }

    /// Hashes the frames in `stream`, then a block's tokens and their padding.
    fn absorb_stream(&mut self, mut stream: Vec<u8>, tokens: &[u32]) -> Key {
        stream.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
        stream.resize(stream.len().next_multiple_of(64), 0xFF);
        for frame in stream.chunks_exact(64) {
            if let Ok(frame) = frame.try_into() {
                self.absorb(frame);
            }
        }
        Key(self.state)
    }

    /// Key for other processes: the digest of everything so far.
    #[must_use]
    pub fn export(&self) -> ExportedKey {
        let mut last = [0; 64];
        last[0] = 0x80;
        last[56..].copy_from_slice(&(self.frames * 512).to_be_bytes());
        let mut end = *self;
        end.absorb(&last);
        let mut digest = [0; 32];
        for (bytes, word) in digest.chunks_exact_mut(4).zip(end.state) {
            bytes.copy_from_slice(&word.to_be_bytes());
        }
        ExportedKey(digest)
    }

    /// Key for other processes of what one cache group has of the last block. The group without a mark has the key of
    /// models with one group.
    ///
    /// The mark's frame is followed by one of padding alone, in which no stream of tokens ends: each has a token there.
    pub(crate) fn export_of(mut self, mark: Option<GroupMark>) -> ExportedKey {
        if let Some(mark) = mark {
            self.absorb_mark(mark.into_iter(), Vec::new());
        }
        self.export()
    }

    /// As [`Chain::export_of`], in a model with a drafter: the next token, and the frames of its extras, belong to the
    /// mark.
    pub(crate) fn export_before(mut self, mut mark: GroupMark, next: u32, frames: Vec<u8>) -> ExportedKey {
        mark[3] = next;
        self.absorb_mark(mark.into_iter(), frames);
        self.export()
    }

    fn absorb_mark(&mut self, words: impl Iterator<Item = u32>, frames: Vec<u8>) {
        let mut frame = [0xFF; 64];
        for (bytes, word) in frame[4..].chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        self.absorb(&frame);
        self.absorb_stream(frames, &[]);
        self.absorb(&[0xFF; 64]);
    }

    #[inline]
    fn absorb(&mut self, frame: &[u8; 64]) {
        sha2::compress256(&mut self.state, std::slice::from_ref(GenericArray::<u8, U64>::from_slice(frame)));
        self.frames += 1;
    }
}

/// Whether any token is [`RESERVED_TOKEN`].
#[inline]
pub(crate) fn has_reserved(tokens: &[u32]) -> bool {
    // No early exit, so that it vectorizes.
    tokens.iter().fold(0, |any, &token| any | u32::from(token == RESERVED_TOKEN)) != 0
}

/// Fails if any token is [`RESERVED_TOKEN`]; `what` says whose id it is.
pub(crate) fn refuse_reserved(what: &'static str, tokens: &[u32]) -> Result<()> {
    if !has_reserved(tokens) {
        return Ok(());
    }
    let at = tokens.iter().take_while(|&&token| token != RESERVED_TOKEN).count();
    let must = format!("at most {}, at {at}", RESERVED_TOKEN - 1);
    Err(Error::InvalidArgument { what, found: i128::from(RESERVED_TOKEN), must })
}

/// The frames of a block's extras.
pub(crate) fn frames_of_extras(extras: &[Extra<'_>]) -> Result<Vec<u8>> {
    let mut stream = Vec::new();
    for extra in extras {
        let length = u32::try_from(extra.bytes.len()).map_err(|_| Error::InvalidArgument {
            what: "length of an extra key",
            found: extra.bytes.len() as i128,
            must: format!("at most {}", u32::MAX),
        })?;
        for word in [RESERVED_TOKEN, extra.kind, length] {
            stream.extend(word.to_le_bytes());
        }
        stream.extend(extra.bytes);
        stream.resize(stream.len().next_multiple_of(4), 0xFF);
    }
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stream_of_header(spec: &KeySpec, block_size: u32, group: u32) -> Vec<u8> {
        let mut bytes = b"BLKYKEYS".to_vec();
        for word in [FORMAT, block_size, group, 0] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(spec.lora_id.to_le_bytes());
        bytes.extend(spec.salt);
        bytes
    }

    proptest! {
        #[test]
        fn the_reserved_token_is_refused_with_its_first_position(tokens in prop::collection::vec(u32::MAX - 9..=u32::MAX, 0..20)) {
            let place = tokens.iter().position(|&token| token == u32::MAX);
            let refused = place.map(|at| format!("at most 4294967294, at {at}"));
            let said = refuse_reserved("a token id", &tokens).err().map(|error| match error {
                Error::InvalidArgument { what: "a token id", found: 0xFFFF_FFFF, must } => must,
                other => other.to_string(),
            });
            prop_assert_eq!(said, refused);
        }

        #[test]
        fn the_exported_key_is_the_plain_sha256_of_the_stream(
            blocks in prop::collection::vec(prop::collection::vec(0u32..u32::MAX, 1..40), 0..6),
            salt in any::<[u8; 32]>(), lora_id in any::<u64>(), image in prop::collection::vec(any::<u8>(), 0..70),
        ) {
            let spec = KeySpec { salt, lora_id };
            let mut chain = Chain::new(&spec, 16, 3);
            let mut stream = stream_of_header(&spec, 16, 3);
            for (i, tokens) in blocks.iter().enumerate() {
                let extra = [Extra { kind: 7, bytes: &image }];
                let extras = if i % 2 == 1 { &extra[..] } else { &[] };
                chain.block(tokens, extras).unwrap();
                if i % 2 == 1 {
                    for word in [u32::MAX, 7, u32::try_from(image.len()).unwrap()] { stream.extend(word.to_le_bytes()); }
                    stream.extend(&image);
                    while stream.len() % 4 != 0 { stream.push(0xFF); }
                }
                for token in tokens { stream.extend(token.to_le_bytes()); }
                while stream.len() % 64 != 0 { stream.push(0xFF); }
            }
            prop_assert_eq!(chain.export().0.to_vec(), Sha256::digest(&stream).to_vec());
        }
    }

    #[test]
    fn keys_differ_with_salt_adapter_group_parent_and_extra() {
        let tokens: Vec<u32> = (0..16).collect();
        let key = |spec: KeySpec, group, extras: &[Extra<'_>], before: &[u32]| {
            let mut chain = Chain::new(&spec, 16, group);
            if !before.is_empty() {
                chain.block(before, &[]).unwrap();
            }
            chain.block(&tokens, extras).unwrap()
        };
        let plain = KeySpec::default();
        let keys = [
            key(plain, 0, &[], &[]),
            key(KeySpec { salt: [1; 32], ..plain }, 0, &[], &[]),
            key(KeySpec { lora_id: 1, ..plain }, 0, &[], &[]),
            key(plain, 1, &[], &[]),
            key(plain, 0, &[], &tokens),
            key(plain, 0, &[Extra { kind: 1, bytes: b"image" }], &[]),
        ];
        let distinct: std::collections::HashSet<_> = keys.iter().collect();
        assert_eq!(distinct.len(), keys.len());
    }

    #[test]
    fn a_groups_exported_keys_are_its_own_and_the_unmarked_ones_those_of_one_group() {
        const NONE: u32 = RESERVED_TOKEN;
        let mut chain = Chain::new(&KeySpec::default(), 4, 0);
        chain.block(&[1, 2, 3, 4], &[]).unwrap();
        let marks = [[0, 2, 6, NONE, NONE], [1, 2, 6, NONE, NONE], [1, 2, 7, NONE, NONE], [1, 4, 6, NONE, NONE]];
        let marks: Vec<_> =
            marks.into_iter().chain([[1, 2, 6, NONE, 1], [1, 2, 6, NONE, 2]]).map(Some).chain([None]).collect();
        let mut keys: std::collections::HashSet<_> = marks.iter().map(|mark| chain.export_of(*mark)).collect();
        assert_eq!((keys.len(), chain.export_of(None)), (marks.len(), chain.export()));
        let images = [&b""[..], b"cat", b"dog"].map(|bytes| match bytes {
            b"" => Vec::new(),
            bytes => frames_of_extras(&[Extra { kind: 1, bytes }]).unwrap(),
        });
        keys.extend(
            [0, 6]
                .into_iter()
                .flat_map(|next| images.clone().map(|frames| (next, frames)))
                .map(|(next, frames)| chain.export_before([1, 2, 6, NONE, NONE], next, frames)),
        );
        assert_eq!(keys.len(), marks.len() + 6);
        let mut stream = stream_of_header(&KeySpec::default(), 4, 0);
        for word in [1, 2, 3, 4].into_iter().chain([u32::MAX; 12]) {
            stream.extend(word.to_le_bytes());
        }
        let marked = |words: &[u32], frames: &[u8]| {
            let mut stream = stream.clone();
            stream.extend(words.iter().flat_map(|word| word.to_le_bytes()));
            for bytes in [frames, &[0xFF; 64]] {
                stream.resize(stream.len().next_multiple_of(64), 0xFF);
                stream.extend(bytes);
            }
            Sha256::digest(&stream).to_vec()
        };
        assert_eq!(chain.export_of(Some([1, 2, 6, NONE, NONE])).0.to_vec(), marked(&[u32::MAX, 1, 2, 6], b""));
        let before = chain.export_before([1, 2, 6, NONE, NONE], 9, images[1].clone());
        assert_eq!(before.0.to_vec(), marked(&[u32::MAX, 1, 2, 6, 9], &images[1]));
    }

    #[test]
    fn the_reserved_token_is_refused_and_the_chain_unchanged() {
        let mut chain = Chain::new(&KeySpec::default(), 16, 0);
        let before = chain;
        assert!(chain.block(&[1, RESERVED_TOKEN], &[]).is_err());
        assert_eq!(chain, before);
    }
}
