//! The slab's file: its format on disk, its lock, and what is left behind when creating it fails.
#![expect(clippy::unwrap_used, reason = "test code")]

use blockyard_store::{
    BlockDevice, DirectMode, Error, Geometry, Miss, SlabContents, SlabFile, SlabOptions, SlabStore, StoreOptions,
};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

fn options(directory: &Path) -> SlabOptions {
    let geometry = Geometry { payload_bytes: 5000, slots: 4 };
    SlabOptions { directory: directory.to_owned(), geometry, namespace: [7; 32], direct: DirectMode::Auto }
}

fn names(directory: &Path) -> Vec<String> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_slab_is_private_whole_and_begins_with_its_superblock() {
    let folder = tempfile::tempdir().unwrap();
    let slab = SlabFile::create(&options(&folder.path().join("swap"))).unwrap();
    let data = fs::metadata(slab.path()).unwrap();
    assert_eq!(data.permissions().mode() & 0o777, 0o600);
    assert_eq!(data.len(), 4096 + 4 * 12288);
    assert!(data.blocks() * 512 >= data.len());
    let bytes = fs::read(slab.path()).unwrap();
    assert_eq!(&bytes[..8], b"BLKYSLAB");
    assert_eq!(bytes[8..16], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[16..48], [7; 32]);
    let numbers: Vec<u64> = bytes[48..80].chunks(8).map(|n| u64::from_le_bytes(n.try_into().unwrap())).collect();
    assert_eq!(numbers, [u64::from(std::process::id()), 4, 12288, 5000]);
}

#[test]
fn a_slab_removes_its_name_once_and_never_another_file() {
    let folder = tempfile::tempdir().unwrap();
    for discard in [true, false] {
        let slab = SlabFile::create(&options(folder.path())).unwrap();
        let path = slab.path().to_owned();
        if discard {
            slab.discard();
            assert!(names(folder.path()).is_empty());
        } else {
            fs::remove_file(&path).unwrap();
        }
        fs::write(&path, "mine").unwrap();
        drop(slab);
        assert_eq!(fs::read(&path).unwrap(), b"mine");
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn slabs_whose_lock_is_free_are_removed_and_others_stay() {
    let folder = tempfile::tempdir().unwrap();
    let dead = "blockyard-swap-1-0.slab";
    for name in [dead, "blockyard-swap-1-0.slab.bak", "other.slab"] {
        fs::write(folder.path().join(name), "old").unwrap();
    }
    let live = SlabFile::create(&options(folder.path())).unwrap();
    let second = SlabFile::create(&options(folder.path())).unwrap();
    let found = names(folder.path());
    assert_eq!(found.len(), 4);
    assert!(!found.iter().any(|name| name == dead));
    assert!(live.path().exists() && live.path() != second.path());
}

#[test]
fn links_and_files_in_the_place_of_the_directory_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("link");
    symlink(folder.path(), &link).unwrap();
    assert!(matches!(SlabFile::create(&options(&link)), Err(Error::SymbolicLink { .. })));
    assert!(matches!(SlabFile::create(&options(&link.join(""))), Err(Error::SymbolicLink { .. })));
    let file = folder.path().join("file");
    fs::write(&file, "mine").unwrap();
    assert!(matches!(SlabFile::create(&options(&file)), Err(Error::NotADirectory { .. })));
    assert!(matches!(SlabFile::create(&options(&file.join("x"))), Err(Error::Io { .. })));
}

#[test]
fn more_than_the_disk_has_names_the_numbers_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(&folder.path().join("swap"));
    options.geometry = Geometry { payload_bytes: 1 << 30, slots: 1 << 20 };
    let error = SlabFile::create(&options).unwrap_err();
    let Error::NoSpace { asked, available, .. } = error else { unreachable!("{error}") };
    assert_eq!(asked, options.geometry.total());
    assert!(available < asked);
    assert!(names(folder.path()).is_empty());
}

#[test]
fn buffered_and_direct_slabs_hold_the_same() {
    for direct in [DirectMode::Auto, DirectMode::Off] {
        let folder = tempfile::tempdir().unwrap();
        let slab = SlabFile::create(&SlabOptions { direct, ..options(folder.path()) }).unwrap();
        assert!(direct == DirectMode::Auto || !slab.direct());
        let store = SlabStore::open(
            Arc::new(slab),
            StoreOptions {
                geometry: options(folder.path()).geometry,
                namespace: [7; 32],
                revision: [0; 32],
                threads: 2,
                memory_bytes: 1 << 20,
                timeout_base: Duration::from_secs(20),
                hidden: Duration::ZERO,
            },
        )
        .unwrap();
        let ticket = store.submit_write(&[3], &[9; 5000]).unwrap();
        store.wait_for(ticket, Duration::from_secs(20)).unwrap();
        let ticket = store.submit_read(&[3]).unwrap();
        store.wait_for(ticket, Duration::from_secs(20)).unwrap();
        assert_eq!(store.take(ticket).unwrap().blocks().next(), Some(Ok(Some([9; 5000].as_slice()))));
        assert!(store.close(Duration::from_secs(20)));
        assert!(names(folder.path()).is_empty());
    }
}

fn keyed(options: &SlabOptions) -> SlabStore {
    let slab = SlabFile::open_kept(options).unwrap();
    let store = StoreOptions {
        geometry: options.geometry,
        namespace: options.namespace,
        revision: [0; 32],
        threads: 2,
        memory_bytes: 1 << 20,
        timeout_base: Duration::from_secs(20),
        hidden: Duration::ZERO,
    };
    SlabStore::open_keyed(Arc::new(slab), store).unwrap()
}

fn put(store: &SlabStore, key: u8) {
    let ticket = store.submit_put(&[[key; 32]], &vec![key; store.geometry().payload_bytes], None).unwrap();
    store.wait_for(ticket, Duration::from_secs(20)).unwrap();
    assert_eq!(store.take(ticket).unwrap().blocks().next(), Some(Ok(None)));
}

#[test]
fn a_kept_slab_is_private_and_stays_with_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let options = options(&folder.path().join("kv"));
    let store = keyed(&options);
    put(&store, 1);
    assert!(store.close(Duration::from_secs(20)));
    let mut found = names(&options.directory);
    found.sort();
    assert_eq!(found, ["blockyard-prefix.checkpoint", "blockyard-prefix.slab"]);
    for name in found {
        assert_eq!(fs::metadata(options.directory.join(name)).unwrap().permissions().mode() & 0o777, 0o600);
    }
    assert_eq!(fs::metadata(&options.directory).unwrap().permissions().mode() & 0o777, 0o700);
    let store = keyed(&options);
    assert_eq!(names(&options.directory), ["blockyard-prefix.slab"]);
    assert_eq!(store.contains(&[[1; 32], [2; 32]]).unwrap(), [true, false]);
}

#[test]
fn a_kept_slab_has_one_store_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let options = options(folder.path());
    let store = keyed(&options);
    let error = SlabFile::open_kept(&options).unwrap_err();
    assert!(error.to_string().contains("blockyard-prefix.slab is in use by another store"), "{error}");
    assert!(matches!(SlabContents::read(folder.path(), true), Err(Error::InUse { .. })));
    assert!(matches!(SlabContents::wipe(folder.path(), &[]), Err(Error::InUse { .. })));
    assert_eq!(SlabContents::read(folder.path(), false).unwrap().empty, 4);
    drop(store);
    SlabFile::open_kept(&options).unwrap();
}

#[test]
fn a_kept_slab_that_others_could_have_written_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("blockyard-prefix.slab");
    fs::write(&path, b"").unwrap();
    for mode in [0o640, 0o602] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        assert!(matches!(SlabFile::open_kept(&options(folder.path())), Err(Error::NotPrivate { .. })));
    }
    fs::remove_file(&path).unwrap();
    symlink(folder.path().join("elsewhere"), &path).unwrap();
    assert!(matches!(SlabFile::open_kept(&options(folder.path())), Err(Error::SymbolicLink { .. })));
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(SlabFile::open_kept(&options(folder.path())).is_err());
    assert_eq!(names(folder.path()), ["blockyard-prefix.slab"]);
}

#[test]
fn a_checkpoint_that_is_a_link_is_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let options = options(folder.path());
    put(&keyed(&options), 1);
    let (path, moved) = (folder.path().join("blockyard-prefix.checkpoint"), folder.path().join("moved"));
    fs::rename(&path, &moved).unwrap();
    symlink(&moved, &path).unwrap();
    assert!(keyed(&options).contains(&[[1; 32]]).unwrap()[0], "the headers suffice");
    assert!(moved.exists());
}

#[test]
fn a_kept_slab_takes_another_size_and_keeps_its_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(folder.path());
    let path = folder.path().join("blockyard-prefix.slab");
    put(&keyed(&options), 1);
    for slots in [9, 2, 4] {
        options.geometry.slots = slots;
        let store = keyed(&options);
        assert_eq!(fs::metadata(&path).unwrap().len(), options.geometry.total());
        assert!(store.contains(&[[1; 32]]).unwrap()[0]);
    }
    options.geometry.slots = u32::MAX;
    options.geometry.payload_bytes = 1 << 30;
    assert!(matches!(SlabFile::open_kept(&options), Err(Error::NoSpace { .. })));
    assert_eq!(fs::metadata(&path).unwrap().len(), 4096 + 4 * 12288, "a size that does not fit changes nothing");
}

#[test]
fn damaged_slots_are_named_and_a_wipe_removes_what_the_caller_saw() {
    let folder = tempfile::tempdir().unwrap();
    let options = options(folder.path());
    let store = keyed(&options);
    put(&store, 1);
    put(&store, 2);
    put(&store, 3);
    drop(store);
    let other = SlabOptions { namespace: [8; 32], ..options.clone() };
    put(&keyed(&other), 9);
    let path = folder.path().join("blockyard-prefix.slab");
    let mut bytes = fs::read(&path).unwrap();
    let slot = |n: u32| usize::try_from(options.geometry.offset(n)).unwrap();
    bytes[slot(1) + 4096 + 4999] ^= 1;
    bytes[slot(2) + 50] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let headers = SlabContents::read(&path, false).unwrap();
    assert_eq!(headers.damaged, [(2, 0, Miss::HeaderChecksum)], "payloads are not read");
    assert_eq!(fs::read(&path).unwrap(), bytes);
    let found = SlabContents::read(folder.path(), true).unwrap();
    let generation = headers.blocks.iter().find(|(slot, _)| *slot == 1).unwrap().1.generation;
    assert_eq!(found.damaged, [(1, generation, Miss::PayloadChecksum), (2, 0, Miss::HeaderChecksum)]);
    let blocks: Vec<_> = found.blocks.iter().map(|(slot, header)| (*slot, header.namespace)).collect();
    assert_eq!((found.empty, blocks), (0, vec![(0, [7; 32]), (3, [8; 32])]));
    let error = SlabContents::wipe(&path, &[(1, generation), (4, 0)]).unwrap_err();
    assert_eq!(error.to_string(), "slot 4 is out of range, the store has 4 slots");
    assert_eq!(fs::read(&path).unwrap(), bytes);
    let checkpoint = folder.path().join("blockyard-prefix.checkpoint");
    assert!(checkpoint.exists());
    assert_eq!(SlabContents::wipe(&path, &[(0, generation), (1, generation), (2, 0), (3, 0)]).unwrap(), 2);
    assert!(!checkpoint.exists(), "it lists the wiped blocks");
    let found = SlabContents::read(folder.path(), true).unwrap();
    assert_eq!((found.blocks.len(), found.empty, found.damaged), (2, 2, vec![]), "others were written since");
    keyed(&options).forget(None).unwrap();
    let found = SlabContents::read(folder.path(), true).unwrap();
    assert_eq!((found.empty, found.forgotten, found.blocks.len()), (2, 2, 0));
    bytes[0] ^= 1;
    fs::write(&path, &bytes).unwrap();
    assert!(matches!(SlabContents::read(&path, false), Err(Error::NotASlab { .. })));
}

#[test]
fn a_generation_tells_when_its_block_was_put() {
    let folder = tempfile::tempdir().unwrap();
    let now = || u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()).unwrap();
    let store = keyed(&options(folder.path()));
    put(&store, 1);
    let between = now();
    put(&store, 2);
    let contents = SlabContents::read(folder.path(), false).unwrap();
    let put_at: Vec<_> = contents.blocks.iter().map(|(_, header)| header.generation).collect();
    assert!(put_at[0] < between && between <= put_at[1] && put_at[1] <= now(), "{put_at:?}, {between}");
}
