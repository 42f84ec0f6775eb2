//! The checkpoint of a keyed store: the contents of its slots, so that the next opener need not read every header. It
//! is only a hint: each read is still checked, and without a checkpoint the headers have the same information.

use super::StoreOptions;
use crate::header::Owner;
use crate::index::{Landed, StoredBlock};
use std::collections::HashSet;
use twox_hash::XxHash3_128;

const MAGIC: [u8; 8] = *b"BLKYCKPT";
const VERSION: u64 = 2;
/// Magic; version, payload length, slots, floor, next generation, blocks; namespace.
const HEAD: usize = 8 + 6 * 8 + 32;
/// Slot, generation with [`UNPROVEN`], key.
const BLOCK: usize = 4 + 8 + 32;
/// Slot, tenant, parent: such records follow the blocks, one for each block with an owner, in the same order.
const OWNER: usize = 4 + 32 + 32;
const CHECKSUM: usize = 16;
/// A bit that is never set in a generation.
const UNPROVEN: u64 = 1 << 63;

impl StoreOptions {
    /// The checkpoint of these blocks, in bytes.
    pub(super) fn checkpoint(&self, landed: &Landed) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD + landed.blocks.len() * BLOCK + CHECKSUM);
        bytes.extend(self.checkpoint_head(landed.floor, landed.next_generation, landed.blocks.len() as u64));
        for block in &landed.blocks {
            bytes.extend(block.slot.to_le_bytes());
            let mark = if block.proven || block.generation == 0 { 0 } else { UNPROVEN };
            bytes.extend((block.generation | mark).to_le_bytes());
            bytes.extend(block.key);
        }
        for (block, owner) in landed.blocks.iter().filter_map(|block| block.owner.map(|owner| (block, owner))) {
            bytes.extend(block.slot.to_le_bytes());
            bytes.extend(owner.tenant);
            bytes.extend(owner.parent);
        }
        let checksum = XxHash3_128::oneshot(&bytes);
        bytes.extend(checksum.to_le_bytes());
        bytes
    }

    /// Bytes of the checkpoint of a full store.
    pub(super) fn longest_checkpoint(&self) -> u64 {
        (HEAD + CHECKSUM) as u64 + u64::from(self.geometry.slots) * (BLOCK + OWNER) as u64
    }

    fn checkpoint_head(&self, floor: u64, next_generation: u64, count: u64) -> Vec<u8> {
        let numbers =
            [VERSION, self.geometry.payload_bytes as u64, self.geometry.slots.into(), floor, next_generation, count];
        let numbers = numbers.into_iter().flat_map(u64::to_le_bytes);
        MAGIC.into_iter().chain(numbers).chain(self.namespace).collect()
    }

    /// Reads a checkpoint; `None` if it is damaged, of another version, or of another store. `floor` is the
    /// superblock's.
    pub(super) fn read_checkpoint(&self, bytes: &[u8], floor: u64) -> Option<Landed> {
        let (bytes, checksum) = bytes.split_last_chunk::<CHECKSUM>()?;
        let (head, rest) = bytes.split_at_checked(HEAD)?;
        let next_generation = u64::from_le_bytes(*head.get(40..)?.first_chunk()?);
        let count = u64::from_le_bytes(*head.get(48..)?.first_chunk()?);
        let is_whole = head == self.checkpoint_head(floor, next_generation, count)
            && count <= self.geometry.slots.into()
            && XxHash3_128::oneshot(bytes).to_le_bytes() == *checksum;
        let count = usize::try_from(count).ok().filter(|_| is_whole)?;
        let (blocks, owners) = rest.split_at_checked(count * BLOCK)?;
        let mut blocks = blocks.chunks_exact(BLOCK).map(read_block).collect::<Option<Vec<StoredBlock>>>()?;
        read_owners(owners, &mut blocks)?;
        let landed = Landed { floor, next_generation, blocks, older: Vec::new() };
        self.is_plausible(&landed).then_some(landed)
    }

    /// A checksum proves that the bytes are unchanged, not that they make sense.
    fn is_plausible(&self, landed: &Landed) -> bool {
        let (mut slots, mut keys) = (HashSet::new(), HashSet::new());
        let generations = landed.floor..landed.next_generation;
        landed.blocks.iter().all(|block| {
            block.slot < self.geometry.slots
                && slots.insert(block.slot)
                && (block.generation == 0 || generations.contains(&block.generation) && keys.insert(block.key))
        })
    }
}

fn read_block(bytes: &[u8]) -> Option<StoredBlock> {
    let (slot, rest) = bytes.split_first_chunk()?;
    let (generation, rest) = rest.split_first_chunk()?;
    let (slot, marked, key) = (u32::from_le_bytes(*slot), u64::from_le_bytes(*generation), *rest.first_chunk()?);
    let generation = marked & !UNPROVEN;
    Some(StoredBlock { slot, key, generation, proven: generation > 0 && marked == generation, owner: None })
}

/// Sets the owners of blocks; `None` if they do not match.
fn read_owners(bytes: &[u8], blocks: &mut [StoredBlock]) -> Option<()> {
    let mut blocks = blocks.iter_mut().filter(|block| block.generation > 0);
    let mut owners = bytes.chunks_exact(OWNER);
    for bytes in owners.by_ref() {
        let (slot, rest) = bytes.split_first_chunk()?;
        let (tenant, rest) = rest.split_first_chunk()?;
        let slot = u32::from_le_bytes(*slot);
        let block = blocks.find(|block| block.slot == slot)?;
        block.owner = Some(Owner { tenant: *tenant, parent: *rest.first_chunk()? });
    }
    owners.remainder().is_empty().then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Geometry;
    use proptest::prelude::*;
    use std::time::Duration;

    fn options() -> StoreOptions {
        let geometry = Geometry { payload_bytes: 100, slots: 8 };
        let timeout_base = Duration::from_secs(1);
        StoreOptions {
            geometry,
            namespace: [3; 32],
            revision: [0; 32],
            threads: 2,
            memory_bytes: 1 << 20,
            timeout_base,
            hidden: Duration::ZERO,
        }
    }

    fn landed() -> Landed {
        let block = |slot: u8, proven| StoredBlock {
            slot: slot.into(),
            key: [slot; 32],
            generation: 50 + u64::from(slot),
            proven,
            owner: proven.then(|| Owner { tenant: [slot + 1; 32], parent: [slot + 2; 32] }),
        };
        let free = StoredBlock::none(4);
        Landed {
            floor: 50,
            next_generation: 60,
            blocks: vec![block(3, true), block(0, false), free, block(7, true)],
            older: Vec::new(),
        }
    }

    #[test]
    fn a_checkpoint_comes_back_in_its_order() {
        let bytes = options().checkpoint(&landed());
        assert_eq!(options().read_checkpoint(&bytes, 50), Some(landed()));
        let none = Landed { blocks: Vec::new(), ..landed() };
        assert_eq!(options().read_checkpoint(&options().checkpoint(&none), 50), Some(none));
    }

    #[test]
    fn the_checkpoint_of_another_store_is_not_taken() {
        let bytes = options().checkpoint(&landed());
        assert_eq!(options().read_checkpoint(&bytes, 51), None, "after keys were forgotten");
        for other in [
            StoreOptions { namespace: [4; 32], ..options() },
            StoreOptions { geometry: Geometry { payload_bytes: 101, slots: 8 }, ..options() },
            StoreOptions { geometry: Geometry { payload_bytes: 100, slots: 9 }, ..options() },
        ] {
            assert_eq!(other.read_checkpoint(&bytes, 50), None);
        }
    }

    #[test]
    fn a_checkpoint_that_makes_no_sense_is_not_taken() {
        let block = |slot, key, generation| StoredBlock { slot, key: [key; 32], generation, proven: true, owner: None };
        for wrong in [block(8, 9, 55), block(3, 9, 0), block(5, 0, 55), block(5, 9, 49), block(5, 9, 60)] {
            let mut landed = landed();
            landed.blocks.push(wrong);
            assert_eq!(options().read_checkpoint(&options().checkpoint(&landed), 50), None, "{wrong:?}");
        }
    }

    #[test]
    fn owners_of_other_slots_are_not_taken() {
        let whole = options().checkpoint(&landed());
        let end = whole.len() - CHECKSUM;
        for (at, slot) in [(end - OWNER, 3u32), (end - OWNER, 4), (end - 2 * OWNER, 7), (end - 2 * OWNER, 9)] {
            let mut bytes = whole[..end].to_vec();
            bytes[at..at + 4].copy_from_slice(&slot.to_le_bytes());
            bytes.extend(XxHash3_128::oneshot(&bytes).to_le_bytes());
            assert_eq!(options().read_checkpoint(&bytes, 50), None, "{slot} at {at}");
        }
    }

    proptest! {
        #[test]
        fn a_damaged_checkpoint_is_not_taken(at in any::<prop::sample::Index>(), mask in 1u8.., cut in any::<bool>()) {
            let mut bytes = options().checkpoint(&landed());
            let at = at.index(bytes.len());
            if cut { bytes.truncate(at) } else { bytes[at] ^= mask }
            prop_assert_eq!(options().read_checkpoint(&bytes, 50), None);
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), floor in any::<u64>()) {
            let mut bytes = bytes;
            let head = options().checkpoint_head(floor, u64::MAX, bytes.len() as u64 / BLOCK as u64);
            prop_assert_eq!(options().read_checkpoint(&bytes, floor), None);
            bytes.splice(..0, head);
            let checksum = XxHash3_128::oneshot(&bytes);
            bytes.extend(checksum.to_le_bytes());
            let _ = options().read_checkpoint(&bytes, floor);
        }
    }
}
