//! The slab's file: its format on disk, its lock and what is left when making it fails.
#![expect(clippy::unwrap_used, reason = "test code")]

use blockyard_store::{BlockDevice, DirectMode, Error, Geometry, SlabFile, SlabOptions, SlabStore, StoreOptions};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

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
                threads: 2,
                memory_bytes: 1 << 20,
                patience: Duration::from_secs(20),
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
