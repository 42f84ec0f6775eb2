//! A keyed store over the model disk, with blocks whose bytes identify their key and epoch.

#[path = "options.rs"]
mod options;

use crate::disk::Disk;
use blockyard_store::{Error, Miss, SlabStore};
pub(crate) use options::{LONG, PAYLOAD, SLOTS, options};

pub(crate) fn disk() -> Disk {
    Disk::new(options().geometry.total())
}

pub(crate) fn open(disk: &Disk) -> SlabStore {
    SlabStore::open_keyed(disk.device(), options()).unwrap()
}

pub(crate) fn key(n: u64) -> [u8; 32] {
    let mut key = [0xA5; 32];
    key[8..16].copy_from_slice(&n.to_le_bytes());
    key
}

/// The block of a key and epoch. Any few adjacent bytes differ from those of other keys and epochs.
pub(crate) fn row(n: u64, epoch: u64) -> Vec<u8> {
    let mut state = n.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ epoch.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let words = (0..PAYLOAD.div_ceil(8)).flat_map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_le_bytes()
    });
    words.take(PAYLOAD).collect()
}

fn keys(ids: &[u64]) -> Vec<[u8; 32]> {
    ids.iter().map(|&n| key(n)).collect()
}

pub(crate) fn submit_put(store: &SlabStore, ids: &[u64], epoch: u64) -> Result<u64, Error> {
    let rows: Vec<u8> = ids.iter().flat_map(|&n| row(n, epoch)).collect();
    store.submit_put(&keys(ids), &rows, None)
}

/// The outcomes of a ticket's blocks: the bytes of a read, no bytes for a write, or the miss.
pub(crate) fn collect(store: &SlabStore, ticket: u64) -> Vec<Result<Vec<u8>, Miss>> {
    store.wait_for(ticket, LONG).unwrap();
    let done = store.take(ticket).unwrap();
    done.blocks().map(|block| block.map(|bytes| bytes.unwrap_or_default().to_vec())).collect()
}

pub(crate) fn put(store: &SlabStore, ids: &[u64], epoch: u64) -> Vec<Result<(), Miss>> {
    let ticket = submit_put(store, ids, epoch).unwrap();
    collect(store, ticket).into_iter().map(|block| block.map(drop)).collect()
}

pub(crate) fn get(store: &SlabStore, ids: &[u64]) -> Vec<Result<Vec<u8>, Miss>> {
    collect(store, store.submit_get(&keys(ids)).unwrap())
}

pub(crate) fn delete(store: &SlabStore, ids: &[u64]) -> Vec<Result<(), Miss>> {
    collect(store, store.submit_delete(&keys(ids)).unwrap()).into_iter().map(|block| block.map(drop)).collect()
}

pub(crate) fn contains(store: &SlabStore, ids: &[u64]) -> Vec<bool> {
    store.contains(&keys(ids)).unwrap()
}

/// Fills the store with fresh keys. All must fit, whatever happened before, which proves that no slot has leaked.
pub(crate) fn assert_no_slot_leaked(store: &SlabStore, epoch: u64) {
    let slots = u64::from(store.geometry().slots);
    let fresh: Vec<u64> = (1 << 40..(1 << 40) + slots).collect();
    for ids in fresh.chunks(4) {
        assert!(put(store, ids, epoch).iter().all(Result::is_ok));
    }
    assert!(contains(store, &fresh).into_iter().all(|held| held));
    assert_eq!(store.stats().unwrap().cached_blocks, slots);
    for &n in &fresh {
        assert_eq!(get(store, &[n]), [Ok(row(n, epoch))]);
    }
}
