//! The 4 KiB header of every block, and the superblock of the file. Owns the byte format, which
//! `docs/decisions/0002-slab-header.md` fixes, and the order of the checks.

use crate::buffer::Buffer;
use crate::geometry::{Geometry, PAGE};
use crate::miss::Miss;
use twox_hash::XxHash3_128;

const VERSION: u32 = 1;
const SLOT_MAGIC: [u8; 8] = *b"BLKYSLOT";
const SLAB_MAGIC: [u8; 8] = *b"BLKYSLAB";
/// Marks that the owner follows; zeros mean a block without an owner, as in older slabs.
const OWNED: u64 = 1;
/// Offset of the page's checksum, which covers everything before it.
const CHECKSUM: usize = PAGE - 16;

/// XXH3-128 of `bytes`, little-endian: the checksum of every format of the stores.
#[must_use]
pub fn checksum(bytes: &[u8]) -> [u8; 16] {
    XxHash3_128::oneshot(bytes).to_le_bytes()
}

/// As [`checksum`] or, with a key, [`keyed_checksum`], of two pieces as if the second followed the first in memory.
#[must_use]
pub fn checksum_of_two(key: Option<&[u8; 32]>, head: &[u8], rest: &[u8]) -> [u8; 16] {
    if let Some(key) = key {
        let hash = blake3::Hasher::new_keyed(key).update(head).update(rest).finalize();
        return std::array::from_fn(|index| hash.as_bytes()[index]);
    }
    let mut state = XxHash3_128::new();
    state.write(head);
    state.write(rest);
    state.finish_128().to_le_bytes()
}

/// The first 16 bytes of the keyed BLAKE3: a checksum that only holders of the key can compute.
#[must_use]
pub fn keyed_checksum(key: &[u8; 32], bytes: &[u8]) -> [u8; 16] {
    let hash = blake3::keyed_hash(key, bytes);
    std::array::from_fn(|index| hash.as_bytes()[index])
}

/// One page of the format: magic, version, fields, checksum.
type Page = [u8; PAGE];

/// Full key of a block.
pub(crate) type Key = [u8; 32];

/// The tenant that a block of a keyed store counts for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// SHA-256 of the salt of its prompt; zeros without a salt.
    pub tenant: [u8; 32],
    /// Key of the preceding block in its prompt; zeros for the first.
    pub parent: [u8; 32],
}

impl Owner {
    pub(crate) fn has_parent(&self) -> bool {
        self.parent != [0; 32]
    }
}

/// The header of a written block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Digest of everything that determines the bytes.
    pub namespace: [u8; 32],
    /// Full key of the block, zero for swap slots.
    pub key: [u8; 32],
    /// Slot that the block was written to.
    pub slot: u64,
    /// Number of this write of the store.
    pub generation: u64,
    /// Length of the payload in bytes.
    pub payload_bytes: u64,
    /// XXH3-128 of the payload.
    pub payload_hash: u128,
    /// The tenant that the block counts for, if any.
    pub owner: Option<Owner>,
}

/// What a reader expects of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Digest of everything that determines the bytes.
    pub namespace: [u8; 32],
    /// Full key of the block, zero for swap slots.
    pub key: [u8; 32],
    /// Slot that is read.
    pub slot: u64,
    /// Last completed write to the slot.
    pub generation: u64,
    /// Length of the payload in bytes.
    pub payload_bytes: usize,
}

impl Expected {
    /// The header for a payload that is written now, without an owner.
    #[must_use]
    pub fn header(&self, payload: &[u8]) -> Header {
        Header {
            namespace: self.namespace,
            key: self.key,
            slot: self.slot,
            generation: self.generation,
            payload_bytes: payload.len() as u64,
            payload_hash: XxHash3_128::oneshot(payload),
            owner: None,
        }
    }

    /// Checks that a block (header page and payload, or part of them) is the expected one.
    ///
    /// # Errors
    /// The first mismatch.
    pub fn check(&self, page: &[u8], payload: &[u8]) -> Result<(), Miss> {
        let header = Header::decode(page.first_chunk().ok_or(Miss::Truncated)?)?;
        let payload = payload.get(..self.payload_bytes).ok_or(Miss::Truncated)?;
        let matches = [
            (header.namespace == self.namespace, Miss::Namespace),
            (header.key == self.key, Miss::Key),
            (header.slot == self.slot, Miss::Slot),
            (header.generation == self.generation, Miss::Generation),
            (header.payload_bytes == payload.len() as u64, Miss::Length),
        ];
        match matches.into_iter().find(|(same, _)| !same) {
            Some((_, miss)) => Err(miss),
            None if !header.is_of(payload) => Err(Miss::PayloadChecksum),
            None => Ok(()),
        }
    }
}

impl Header {
    /// Whether the payload is the one that the header was written for.
    #[must_use]
    pub fn is_of(&self, payload: &[u8]) -> bool {
        self.payload_bytes == payload.len() as u64 && self.payload_hash == XxHash3_128::oneshot(payload)
    }

    /// Writes the header over the first page of a block.
    ///
    /// A block shorter than a page is left unchanged; the store never creates one.
    pub fn encode(&self, block: &mut [u8]) {
        if let Some((page, _)) = block.split_first_chunk_mut::<PAGE>() {
            let mut out = Writer::new(page, SLOT_MAGIC);
            out.put(&self.namespace);
            out.put(&self.key);
            out.put(&self.slot.to_le_bytes());
            out.put(&self.generation.to_le_bytes());
            out.put(&self.payload_bytes.to_le_bytes());
            out.put(&self.payload_hash.to_le_bytes());
            if let Some(Owner { tenant, parent }) = self.owner {
                out.put(&OWNED.to_le_bytes());
                out.put(&tenant);
                out.put(&parent);
            }
            out.seal();
        }
    }

    /// Reads a header page.
    ///
    /// # Errors
    /// `Magic`, `Version` or `HeaderChecksum`, whichever is wrong first.
    pub fn decode(page: &Page) -> Result<Self, Miss> {
        let mut fields = Reader::open(page, SLOT_MAGIC)?;
        Ok(Self {
            namespace: fields.take(),
            key: fields.take(),
            slot: u64::from_le_bytes(fields.take()),
            generation: u64::from_le_bytes(fields.take()),
            payload_bytes: u64::from_le_bytes(fields.take()),
            payload_hash: u128::from_le_bytes(fields.take()),
            owner: (u64::from_le_bytes(fields.take()) == OWNED)
                .then(|| Owner { tenant: fields.take(), parent: fields.take() }),
        })
    }
}

/// The first page of a slab, for inspecting and reopening the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    /// Namespace of the store that wrote this page: a digest of everything that determines the bytes.
    pub(crate) namespace: [u8; 32],
    /// Process that created the slab.
    pub(crate) pid: u32,
    /// Slots in the slab.
    pub(crate) slots: u64,
    /// Bytes from slot to slot.
    pub(crate) stride: u64,
    /// Length of a payload in bytes.
    pub(crate) payload_bytes: u64,
    /// The first valid generation; blocks of earlier ones are forgotten.
    pub(crate) floor: u64,
    /// Which weights compute blocks from that generation on, see [`crate::StoreOptions::revision`].
    pub(crate) revision: [u8; 32],
}

impl Superblock {
    /// The superblock of a slab of this process.
    pub(crate) fn new(namespace: [u8; 32], geometry: Geometry, floor: u64, revision: [u8; 32]) -> Self {
        let Geometry { slots, payload_bytes } = geometry;
        let (pid, stride) = (std::process::id(), geometry.stride() as u64);
        Self { namespace, pid, slots: slots.into(), stride, payload_bytes: payload_bytes as u64, floor, revision }
    }

    /// The superblock as a page that can be written.
    pub(crate) fn page(&self) -> Buffer {
        let mut page = Buffer::new(PAGE);
        if let Some((page, _)) = page.as_mut_slice().split_first_chunk_mut::<PAGE>() {
            self.encode(page);
        }
        page
    }

    fn encode(&self, page: &mut Page) {
        let mut out = Writer::new(page, SLAB_MAGIC);
        out.put(&self.namespace);
        for value in [u64::from(self.pid), self.slots, self.stride, self.payload_bytes, self.floor] {
            out.put(&value.to_le_bytes());
        }
        out.put(&self.revision);
        out.seal();
    }

    /// Reads the first page of a slab.
    ///
    /// # Errors
    /// `Magic`, `Version` or `HeaderChecksum`, whichever is wrong first.
    pub(crate) fn decode(page: &Page) -> Result<Self, Miss> {
        let mut fields = Reader::open(page, SLAB_MAGIC)?;
        let namespace = fields.take();
        let mut next = || u64::from_le_bytes(fields.take());
        let (pid, slots, stride, payload_bytes, floor) = (next(), next(), next(), next(), next());
        let revision = fields.take();
        Ok(Self { namespace, pid: u32::try_from(pid).unwrap_or(0), slots, stride, payload_bytes, floor, revision })
    }
}

/// Writes fields one after the other into a zeroed page.
struct Writer<'a> {
    page: &'a mut Page,
    at: usize,
}

impl<'a> Writer<'a> {
    fn new(page: &'a mut Page, magic: [u8; 8]) -> Self {
        page.fill(0);
        let mut out = Self { page, at: 0 };
        out.put(&magic);
        out.put(&VERSION.to_le_bytes());
        out.put(&[0; 4]);
        out
    }

    fn put(&mut self, bytes: &[u8]) {
        self.page[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }

    fn seal(self) {
        let hash = XxHash3_128::oneshot(&self.page[..CHECKSUM]);
        self.page[CHECKSUM..].copy_from_slice(&hash.to_le_bytes());
    }
}

/// Reads the fields in the same order.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn open(page: &'a Page, magic: [u8; 8]) -> Result<Self, Miss> {
        let mut fields = Self { rest: page };
        if fields.take() != magic {
            return Err(Miss::Magic);
        }
        if u32::from_le_bytes(fields.take()) != VERSION {
            return Err(Miss::Version);
        }
        if XxHash3_128::oneshot(&page[..CHECKSUM]).to_le_bytes() != page[CHECKSUM..] {
            return Err(Miss::HeaderChecksum);
        }
        let _zero: [u8; 4] = fields.take();
        Ok(fields)
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut field = [0; N];
        let (head, rest) = self.rest.split_at(N);
        field.copy_from_slice(head);
        self.rest = rest;
        field
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn expected() -> Expected {
        Expected { namespace: [3; 32], key: [5; 32], slot: 7, generation: 1 << 40, payload_bytes: 5000 }
    }

    fn check(block: &[u8]) -> Result<(), Miss> {
        let (page, payload) = block.split_at(block.len().min(PAGE));
        expected().check(page, payload)
    }

    fn block(expected: &Expected, change: impl FnOnce(&mut Header)) -> Vec<u8> {
        let mut block = vec![0; PAGE * 3];
        for (i, byte) in block[PAGE..PAGE + 5000].iter_mut().enumerate() {
            *byte = u8::try_from(i % 251).unwrap();
        }
        let mut header = expected.header(&block[PAGE..PAGE + 5000]);
        change(&mut header);
        header.encode(&mut block);
        block
    }

    #[test]
    fn what_was_written_is_accepted() {
        assert_eq!(check(&block(&expected(), |_| ())), Ok(()));
    }

    #[test]
    fn fields_lie_where_the_decision_record_says() {
        let block = block(&expected(), |_| ());
        assert_eq!(&block[..8], b"BLKYSLOT");
        assert_eq!(block[8..16], [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(block[16..48], [3; 32]);
        assert_eq!(block[48..80], [5; 32]);
        assert_eq!(block[80..88], 7u64.to_le_bytes());
        assert_eq!(block[88..96], (1u64 << 40).to_le_bytes());
        assert_eq!(block[96..104], 5000u64.to_le_bytes());
        assert_eq!(block[104..120], XxHash3_128::oneshot(&block[PAGE..PAGE + 5000]).to_le_bytes());
        assert!(block[120..4080].iter().all(|&b| b == 0));
    }

    #[test]
    fn an_owner_lies_where_the_decision_record_says_and_comes_back() {
        let owner = Some(Owner { tenant: [8; 32], parent: [9; 32] });
        let block = block(&expected(), |header| header.owner = owner);
        assert_eq!(check(&block), Ok(()));
        assert_eq!(block[120..128], 1u64.to_le_bytes());
        assert_eq!((&block[128..160], &block[160..192]), (&[8; 32][..], &[9; 32][..]));
        assert!(block[192..4080].iter().all(|&b| b == 0));
        let owner_of = |page: &[u8]| Header::decode(page.first_chunk().unwrap()).unwrap().owner;
        assert_eq!(owner_of(&block), owner);
        let without_salt = Some(Owner::default());
        assert_eq!(owner_of(&self::block(&expected(), |header| header.owner = without_salt)), without_salt);
        assert_eq!(owner_of(&self::block(&expected(), |_| ())), None);
    }

    #[test]
    fn an_intact_header_of_another_block_is_named_by_its_field() {
        type Change = fn(&mut Header);
        let cases: [(Change, Miss); 6] = [
            (|h| h.namespace[31] ^= 1, Miss::Namespace),
            (|h| h.key[0] ^= 1, Miss::Key),
            (|h| h.slot += 1, Miss::Slot),
            (|h| h.generation -= 1, Miss::Generation),
            (|h| h.payload_bytes += 1, Miss::Length),
            (|h| h.payload_hash ^= 1, Miss::PayloadChecksum),
        ];
        for (change, miss) in cases {
            assert_eq!(check(&block(&expected(), change)), Err(miss));
        }
    }

    #[test]
    fn a_block_that_ends_early_is_truncated() {
        let block = block(&expected(), |_| ());
        for len in [0, 1, PAGE - 1, PAGE, PAGE + 4999] {
            assert_eq!(check(&block[..len]), Err(Miss::Truncated));
        }
    }

    #[test]
    fn a_superblock_comes_back_and_is_not_taken_for_a_slot() {
        let mut page = [0; PAGE];
        let block = Superblock {
            namespace: [4; 32],
            pid: 1,
            slots: 2,
            stride: 8192,
            payload_bytes: 4096,
            floor: 9,
            revision: [6; 32],
        };
        block.encode(&mut page);
        assert_eq!(Header::decode(&page), Err(Miss::Magic));
        assert_eq!(Superblock::decode(&page), Ok(block));
    }

    proptest! {
        #[test]
        fn any_flipped_bit_is_a_miss(at in 0usize..PAGE + 5000, bit in 0u8..8) {
            let mut block = block(&expected(), |_| ());
            block[at] ^= 1 << bit;
            let miss = match at {
                0..8 => Miss::Magic,
                8..12 => Miss::Version,
                12..PAGE => Miss::HeaderChecksum,
                _ => Miss::PayloadChecksum,
            };
            prop_assert_eq!(check(&block), Err(miss));
        }
    }
}
