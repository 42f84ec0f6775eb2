//! Damaged slabs and failing disks cause misses, never wrong bytes, and leak no slot.
#![expect(clippy::unwrap_used, reason = "test code")]

#[path = "common/disk.rs"]
#[expect(dead_code, reason = "shared with other tests")]
mod disk;
#[path = "common/keyed.rs"]
mod keyed;

use blockyard_store::{Miss, PAGE, SlabStore, StoreOptions};
use disk::{Disk, ERRORS, Random, SECTOR};
use keyed::{LONG, PAYLOAD, SLOTS, assert_no_slot_leaked, contains, delete, disk, get, key, open, options, put, row};
use proptest::prelude::*;
use twox_hash::XxHash3_128;

#[test]
fn a_block_that_a_crash_has_torn_is_written_again_when_it_is_put() {
    for with_checkpoint in [false, true] {
        let disk = disk();
        let store = open(&disk);
        put(&store, &[1, 2], 0);
        let torn = disk.killed();
        let end = usize::try_from(options().geometry.offset(1)).unwrap();
        torn.change(|bytes| bytes[end - 4000..end - SECTOR].fill(0));
        let mut store = open(&torn);
        assert_eq!(contains(&store, &[1, 2]), [true; 2], "a header proves nothing about its payload");
        if with_checkpoint {
            assert!(store.close(LONG) && torn.has_checkpoint());
            store = open(&torn);
        }
        assert_eq!(put(&store, &[1, 2, 1], 0), [Ok(()); 3]);
        assert_eq!(get(&store, &[1, 2]), [Ok(row(1, 0)), Ok(row(2, 0))]);
        assert_eq!(store.stats().unwrap().written_blocks, 2);
        assert_eq!(put(&store, &[1, 2], 0), [Ok(()); 2]);
        assert_eq!(store.stats().unwrap().written_blocks, 2, "proven blocks are not written again");
        assert_no_slot_leaked(&store, 0);
    }
}

/// One way to damage a slab behind the store's back.
fn damage(disk: &Disk, old: &[u8], other: &[u8], random: &mut Random) {
    let geometry = options().geometry;
    let stride = geometry.stride();
    let slot = random.index(SLOTS as usize);
    let at = usize::try_from(geometry.offset(u32::try_from(slot).unwrap())).unwrap();
    let kind = random.below(9);
    disk.change(|bytes| match kind {
        // A flipped bit, anywhere in the slot.
        0 | 1 => bytes[at + random.index(stride)] ^= 1 << random.index(8),
        // Some or all sectors zeroed.
        2 => {
            let first = random.index(stride / SECTOR);
            let last = first + 1 + random.index(stride / SECTOR - first);
            bytes[at + first * SECTOR..at + last * SECTOR].fill(0);
        }
        // Torn: the beginning is from another write.
        3 => {
            let cut = random.index(stride / SECTOR) * SECTOR;
            bytes[at..at + cut].copy_from_slice(&old[at..at + cut]);
        }
        // Two slots swapped, or one over the other.
        4 => {
            let from = usize::try_from(geometry.offset(u32::try_from(random.index(SLOTS as usize)).unwrap())).unwrap();
            let (one, two) = (bytes[at..at + stride].to_vec(), bytes[from..from + stride].to_vec());
            bytes[at..at + stride].copy_from_slice(&two);
            if random.below(2) == 0 {
                bytes[from..from + stride].copy_from_slice(&one);
            }
        }
        // An older write.
        5 => bytes[at..at + stride].copy_from_slice(&old[at..at + stride]),
        // Another namespace.
        6 => bytes[at..at + stride].copy_from_slice(&other[at..at + stride]),
        // The end of the file is missing.
        7 => bytes.truncate(at + random.index(stride)),
        // Another version of the format.
        _ => bytes[at + 8] ^= 1 + u8::try_from(random.below(255)).unwrap(),
    });
}

/// Damages slabs and reads them, in the store that wrote them and in the next; returns reads, misses and wrong blocks.
fn damaged_reads(wanted: usize, seed: u64) -> (usize, usize, usize) {
    let (mut reads, mut misses, mut wrong) = (0, 0, 0);
    let random = &mut Random::new(seed);
    let ids: Vec<u64> = (0..SLOTS.into()).collect();
    let fresh = disk();
    let other = disk();
    put(&SlabStore::open_keyed(other.device(), StoreOptions { namespace: [9; 32], ..options() }).unwrap(), &ids, 5);
    let written = open(&fresh);
    put(&written, &ids, 0);
    let old = fresh.killed().bytes();
    written.forget(None).unwrap();
    put(&written, &ids, 1);
    let (image, other) = (fresh.killed(), other.bytes());
    drop(written);
    while reads < wanted {
        let disk = image.killed();
        let mut store = open(&disk);
        if random.below(2) == 0 {
            put(&store, &[random.below(SLOTS.into()), SLOTS.into()], 1);
        }
        let in_this_life = random.below(2) == 0;
        if !in_this_life {
            assert!(store.close(LONG));
            if random.below(2) == 0 {
                disk.drop_checkpoint();
            }
        }
        for _ in 0..=random.below(3) {
            let len = disk.bytes().len();
            damage(&disk, &old, &other, random);
            // The next opener restores the file's size.
            if !in_this_life {
                disk.change(|bytes| bytes.resize(len, 0));
            } else if disk.bytes().len() < len {
                break;
            }
        }
        if !in_this_life {
            store = open(&disk);
        }
        let all: Vec<u64> = (0..=SLOTS.into()).collect();
        for (n, found) in all.iter().zip(get(&store, &all)) {
            reads += 1;
            misses += usize::from(found.is_err());
            wrong += usize::from(found.is_ok_and(|bytes| bytes != row(*n, 1)));
        }
    }
    (reads, misses, wrong)
}

#[test]
fn no_damaged_read_gives_wrong_bytes() {
    let (reads, misses, wrong) = damaged_reads(10_000, 1);
    assert_eq!(wrong, 0);
    assert!(misses > reads / 10, "{misses} of {reads} reads met damage");
}

#[test]
#[ignore = "slow: a million reads"]
fn no_damaged_read_of_a_million_gives_wrong_bytes() {
    let (reads, misses, wrong) = damaged_reads(1_000_000, 2);
    println!("{reads} reads, {misses} misses, {wrong} wrong");
    assert_eq!(wrong, 0);
}

/// A page of the format with chosen fields and a valid checksum.
fn sealed(magic: [u8; 8], fields: &[u8]) -> Vec<u8> {
    let mut page = vec![0; PAGE];
    page[..8].copy_from_slice(&magic);
    page[8] = 1;
    page[16..16 + fields.len()].copy_from_slice(fields);
    let checksum = XxHash3_128::oneshot(&page[..PAGE - 16]);
    page[PAGE - 16..].copy_from_slice(&checksum.to_le_bytes());
    page
}

/// Fields that are often near those of a real page.
fn fields(wanted: Vec<u64>) -> impl Strategy<Value = Vec<u8>> {
    let near = |number: u64| prop_oneof![4 => Just(number), 1 => any::<u64>(), 1 => Just(number ^ 1), 1 => Just(0)];
    let numbers: Vec<_> = wanted.into_iter().map(near).collect();
    let namespace = prop_oneof![4 => Just([7; 32]), 1 => any::<[u8; 32]>()];
    (namespace, numbers).prop_map(|(namespace, numbers)| {
        namespace.into_iter().chain(numbers.into_iter().flat_map(u64::to_le_bytes)).collect()
    })
}

/// Headers of one key, whose payload may be that of another.
fn header(slot: u64) -> impl Strategy<Value = Vec<u8>> {
    let hash = XxHash3_128::oneshot(&row(1, 0)).to_le_bytes();
    let half = |at: usize| u64::from_le_bytes(hash[at..at + 8].try_into().unwrap());
    let key: Vec<u64> = key(1).chunks(8).map(|part| u64::from_le_bytes(part.try_into().unwrap())).collect();
    fields([key, vec![slot, 1 << 40, PAYLOAD as u64, half(0), half(8)]].concat())
}

fn hostile_slabs() -> impl Strategy<Value = (Vec<u8>, Vec<Vec<u8>>, Vec<u8>)> {
    let geometry = options().geometry;
    let (slots, stride) = (u64::from(geometry.slots), geometry.stride() as u64);
    let superblock = fields(vec![1, slots, stride, PAYLOAD as u64, 1 << 39]);
    let headers: Vec<_> = (0..3).map(header).collect();
    (superblock, headers, prop::collection::vec(any::<u8>(), 0..200))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_hostile_slab_opens_and_gives_no_wrong_block((superblock, headers, checkpoint) in hostile_slabs()) {
        let (disk, geometry) = (disk(), options().geometry);
        disk.change(|bytes| {
            bytes[..PAGE].copy_from_slice(&sealed(*b"BLKYSLAB", &superblock));
            for (slot, header) in (0..).zip(&headers) {
                let at = usize::try_from(geometry.offset(slot)).unwrap();
                bytes[at..at + PAGE].copy_from_slice(&sealed(*b"BLKYSLOT", header));
                let payload = row(1 + u64::from(slot % 2), 0);
                bytes[at + PAGE..at + PAGE + PAYLOAD].copy_from_slice(&payload);
            }
        });
        disk.device().save_checkpoint(&checkpoint);
        let store = open(&disk);
        let found = get(&store, &[1, 2]);
        prop_assert!(found[0].is_err() || found[0] == Ok(row(1, 0)));
        prop_assert_eq!(&found[1], &Err(Miss::Absent));
        assert_no_slot_leaked(&store, 0);
    }
}

#[test]
fn errors_at_every_nth_call_give_misses_and_leak_nothing() {
    for errno in ERRORS {
        for nth in [1, 2, 3, 5, 8, 12] {
            let disk = disk();
            let store = open(&disk);
            put(&store, &[0, 1, 2, 3], 0);
            disk.fail(Some((nth, errno)));
            let random = &mut Random::new(nth);
            for _ in 0..40 {
                let n = random.below(12);
                match random.below(5) {
                    0 => drop(delete(&store, &[n])),
                    1 | 2 => drop(put(&store, &[n, n + 1], 0)),
                    _ => {
                        for (n, found) in [n, n + 3].into_iter().zip(get(&store, &[n, n + 3])) {
                            assert!(found.is_err() || found == Ok(row(n, 0)));
                            assert!(found.is_ok() || !contains(&store, &[n])[0]);
                        }
                    }
                }
            }
            assert!(nth > 10 || store.stats().unwrap().errors > 0);
            disk.fail(None);
            assert_no_slot_leaked(&store, 0);
            let store = open(&disk.killed());
            assert_no_slot_leaked(&store, 0);
            assert_eq!(store.stats().unwrap().pending_bytes, 0);
        }
    }
}
