//! Forged slabs: superblock, headers and checkpoint of a real slab are changed and sealed again. Whatever they say, the
//! store opens and works, or refuses the slab, without a panic. A byte string determines the changes, so that the
//! fuzzer (`core/fuzz/fuzz_targets/slab.rs`) runs the same code.
#![expect(clippy::unwrap_used, reason = "a test may fail by panicking")]

use blockyard_store::{BlockDevice, Expected, Geometry, Header, Owner, PAGE, SlabStore, StoreOptions, checksum};
use proptest::prelude::*;
use std::io;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

const BYTES: usize = 100;
const SLOTS: u32 = 4;
const LONG: Duration = Duration::from_secs(60);

/// A slab in memory.
#[derive(Default)]
struct Image {
    bytes: Mutex<Vec<u8>>,
    checkpoint: Mutex<Option<Vec<u8>>>,
}

impl BlockDevice for Image {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        let image = self.bytes.lock().unwrap();
        let rest = usize::try_from(offset).ok().and_then(|at| image.get(at..)).unwrap_or_default();
        let len = rest.len().min(bytes.len());
        bytes[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let (mut image, at) = (self.bytes.lock().unwrap(), usize::try_from(offset).unwrap());
        let len = image.len().max(at + bytes.len());
        image.resize(len, 0);
        image[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(bytes.len())
    }

    fn take_checkpoint(&self, limit: u64) -> Option<Vec<u8>> {
        let mut bytes = self.checkpoint.lock().unwrap().take()?;
        bytes.truncate(usize::try_from(limit).unwrap());
        Some(bytes)
    }

    fn save_checkpoint(&self, bytes: &[u8]) {
        *self.checkpoint.lock().unwrap() = Some(bytes.to_vec());
    }
}

fn options() -> StoreOptions {
    let geometry = Geometry { payload_bytes: BYTES, slots: SLOTS };
    StoreOptions {
        geometry,
        namespace: [7; 32],
        revision: [0; 32],
        threads: 2,
        memory_bytes: 1 << 20,
        timeout_base: Duration::from_secs(60),
        hidden: Duration::ZERO,
    }
}

fn keys() -> Vec<[u8; 32]> {
    (1..=6).map(|n| [n; 32]).collect()
}

/// One chain of blocks of one tenant.
fn owners() -> Vec<Owner> {
    (0..6).map(|n| Owner { tenant: [9; 32], parent: [n; 32] }).collect()
}

/// A slab with three blocks, and its checkpoint.
static REAL: LazyLock<(Vec<u8>, Vec<u8>)> = LazyLock::new(|| {
    let image = Arc::new(Image::default());
    *image.bytes.lock().unwrap() = vec![0; usize::try_from(options().geometry.total()).unwrap()];
    let store = SlabStore::open_keyed(Arc::clone(&image) as _, options()).unwrap();
    let ticket = store.submit_put(&keys()[..3], &[5; 3 * BYTES], Some(&owners()[..3])).unwrap();
    store.wait_for(ticket, LONG).unwrap();
    assert!(store.close(LONG));
    let (bytes, checkpoint) = (image.bytes.lock().unwrap().clone(), image.checkpoint.lock().unwrap().take());
    (bytes, checkpoint.unwrap())
});

/// Takes the first `len` bytes; zeros after the end.
fn draw(bytes: &mut &[u8], len: usize) -> Vec<u8> {
    let (head, rest) = bytes.split_at(bytes.len().min(len));
    *bytes = rest;
    let mut drawn = head.to_vec();
    drawn.resize(len, 0);
    drawn
}

/// Overwrites some bytes before the checksum, and recomputes the checksum if the bytes say so.
fn forge(whole: &mut [u8], fields: usize, bytes: &mut &[u8]) {
    let [at, more, len, seal] = draw(bytes, 4)[..] else { return };
    let at = (usize::from(at) + 256 * usize::from(more)) % fields.max(1);
    let len = usize::from(len % 33).min(whole.len() - at);
    let new = draw(bytes, len);
    whole[at..at + len].copy_from_slice(&new);
    if let Some((sealed, sum)) = whole.split_last_chunk_mut::<16>().filter(|_| seal % 4 > 0) {
        *sum = checksum(sealed);
    }
}

/// Changes a slab as the bytes say, opens it and uses it.
pub(crate) fn run(bytes: &[u8]) {
    let (mut image, mut checkpoint) = REAL.clone();
    let (mut bytes, geometry) = (bytes, options().geometry);
    let [kind, changes] = draw(&mut bytes, 2)[..] else { return };
    for _ in 0..changes % 5 {
        let which = draw(&mut bytes, 1)[0] % 7;
        match which {
            0 => forge(&mut image[..PAGE], 120, &mut bytes),
            1..5 => {
                let at = usize::try_from(geometry.offset(u32::from(which) - 1)).unwrap();
                forge(&mut image[at..at + PAGE], 200, &mut bytes);
            }
            _ => {
                let fields = checkpoint.len();
                forge(&mut checkpoint, fields, &mut bytes);
            }
        }
    }
    if kind & 1 == 1 {
        checkpoint = bytes.to_vec();
    }
    if kind & 6 == 6 {
        image.truncate(usize::from(draw(&mut bytes, 1)[0]) * 128);
    }
    let page = image.first_chunk::<PAGE>().map(Header::decode);
    assert!(page.is_none_or(|page| page.is_err()), "a superblock is not a header");
    let device = Image { bytes: Mutex::new(image), checkpoint: Mutex::new((kind & 8 == 0).then_some(checkpoint)) };
    // A slab that ends too early is refused.
    let Ok(store) = SlabStore::open_keyed(Arc::new(device), options()) else { return };
    let got = store.submit_get(&keys()).unwrap();
    store.wait_for(got, LONG).unwrap();
    for block in store.take(got).unwrap().blocks() {
        assert!(!matches!(block, Ok(Some(bytes)) if bytes != [5; BYTES]), "wrong bytes");
    }
    assert!(store.stats().unwrap().cached_blocks <= u64::from(SLOTS));
    store.check().unwrap();
    store.set_quota([9; 32], Some(2)).unwrap();
    let put = store.submit_put(&keys(), &[5; 6 * BYTES], Some(&owners())).unwrap();
    store.wait_for(put, LONG).unwrap();
    store.check().unwrap();
    assert!(store.quota([9; 32]).unwrap().is_some_and(|(held, most)| held <= 2 && most == 2));
    assert!(store.close(LONG));
}

/// Checks bytes as if they were a block.
pub(crate) fn run_block(bytes: &[u8]) {
    let (page, payload) = bytes.split_at(bytes.len().min(PAGE));
    let expected = Expected { namespace: [7; 32], key: [1; 32], slot: 0, generation: 1, payload_bytes: BYTES };
    assert!(expected.check(page, payload).is_err(), "nobody wrote this");
}

proptest! {
    #[test]
    fn a_forged_slab_opens_or_is_refused(bytes in prop::collection::vec(any::<u8>(), 0..160)) {
        run(&bytes);
    }

    #[test]
    fn arbitrary_bytes_are_no_block(bytes in prop::collection::vec(any::<u8>(), 0..160)) {
        run_block(&bytes);
    }
}
