//! Sudden ends: a process that is killed while it writes, and a loss of power before the disk has synced.
#![expect(clippy::unwrap_used, reason = "test code")]

#[path = "common/disk.rs"]
#[expect(dead_code, reason = "shared with other tests")]
mod disk;
#[path = "common/keyed.rs"]
#[expect(dead_code, reason = "shared with other tests")]
mod keyed;

use blockyard_store::{DirectMode, Geometry, SlabFile, SlabOptions, SlabStore, StoreOptions};
use disk::Random;
use keyed::{LONG, PAYLOAD, SLOTS, assert_no_slot_leaked, collect, contains, disk, get, key, put, row, submit_put};
use std::collections::{BTreeSet, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Loses power at random moments of random histories; returns the number of reads, and of those with wrong bytes.
fn power_cuts(cuts: u64) -> (usize, usize) {
    let (mut reads, mut wrong) = (0, 0);
    for seed in 0..cuts {
        let random = &mut Random::new(seed);
        let (mut disk, mut epoch) = (disk(), 0);
        for _ in 0..=random.below(3) {
            let store = keyed::open(&disk);
            let mut open = Vec::new();
            for _ in 0..random.below(12) {
                let n = random.below(16);
                match random.below(8) {
                    0 => {
                        store.forget(None).unwrap();
                        epoch += 1;
                    }
                    1 => drop(store.submit_delete(&[key(n)]).unwrap()),
                    2 => drop(get(&store, &[n])),
                    _ => open.push(([n, n + 1], submit_put(&store, &[n, n + 1], epoch).unwrap())),
                }
            }
            // Some writes have landed, some are in flight.
            let mut stored = BTreeSet::new();
            for (ids, ticket) in open.drain(..open.len() / 2) {
                let ends = collect(&store, ticket);
                stored.extend(ids.into_iter().zip(ends).filter(|(_, end)| end.is_ok()).map(|(n, _)| n));
            }
            let closed = random.below(4) == 0;
            // Some acknowledged blocks have since been deleted, evicted or forgotten.
            stored.retain(|&n| contains(&store, &[n])[0]);
            if closed {
                assert!(store.close(LONG));
            }
            disk = disk.without_power(random);
            let store = keyed::open(&disk);
            for n in 0..17 {
                let found = get(&store, &[n]).remove(0);
                reads += 1;
                wrong += usize::from(found.as_ref().is_ok_and(|bytes| *bytes != row(n, epoch)));
                assert!(!closed || !stored.contains(&n) || found.is_ok(), "block {n} was synced by close");
            }
            if random.below(8) == 0 {
                assert_no_slot_leaked(&store, epoch);
                store.forget(None).unwrap();
                epoch += 1;
            }
            assert!(store.close(LONG));
        }
    }
    (reads, wrong)
}

#[test]
fn a_loss_of_power_gives_misses_and_no_wrong_bytes() {
    assert_eq!(power_cuts(300).1, 0);
}

#[test]
#[ignore = "slow: thousands of losses of power"]
fn no_loss_of_power_of_thousands_gives_wrong_bytes() {
    let (reads, wrong) = power_cuts(3000);
    println!("{reads} reads after losses of power, {wrong} wrong");
    assert_eq!(wrong, 0);
}

const KILLED_SLOTS: u32 = 64;
/// Tickets that the child has open at once.
const OPEN: usize = 8;

fn open_file(folder: &Path, direct: DirectMode) -> SlabStore {
    let geometry = Geometry { payload_bytes: PAYLOAD, slots: KILLED_SLOTS };
    let options = StoreOptions { geometry, threads: 4, ..keyed::options() };
    let slab = SlabOptions { directory: folder.to_owned(), geometry, namespace: options.namespace, direct };
    SlabStore::open_keyed(Arc::new(SlabFile::open_kept(&slab).unwrap()), options).unwrap()
}

/// The child of the test below: prints what it submits, and then what has ended.
#[test]
#[ignore = "runs as the child of another test"]
fn writes_until_killed() {
    let Ok(folder) = std::env::var("BLOCKYARD_KILLED_FOLDER") else { return };
    let number = |name| std::env::var(name).unwrap().parse::<u64>().unwrap();
    let direct = if number("BLOCKYARD_KILLED_DIRECT") == 0 { DirectMode::Off } else { DirectMode::Auto };
    let store = open_file(Path::new(&folder), direct);
    let say = |what: &str, n: u64| std::io::stdout().write_all(format!("\n{what} {n}\n").as_bytes()).unwrap();
    let mut open = VecDeque::new();
    let first = number("BLOCKYARD_KILLED_FIRST");
    // Writes the last blocks of the previous process again: some have landed, some have not, and some only in part.
    for n in (first - 12..first).chain(first..) {
        say("put", n);
        open.push_back(("stored", n, submit_put(&store, &[n], 0).unwrap()));
        if n % 16 == 0 {
            say("delete", n - 9);
            open.push_back(("deleted", n - 9, store.submit_delete(&[key(n - 9)]).unwrap()));
        }
        while open.len() > OPEN {
            let (what, n, ticket) = open.pop_front().unwrap();
            assert!(collect(&store, ticket).remove(0).is_ok());
            say(what, n);
        }
    }
}

/// What the killed processes have printed.
#[derive(Default)]
struct Said {
    put: Vec<u64>,
    stored: BTreeSet<u64>,
    delete: BTreeSet<u64>,
    deleted: BTreeSet<u64>,
}

/// Starts a process that writes, and kills it after `lines` lines.
fn write_and_kill(folder: &Path, said: &mut Said, lines: usize, direct: bool) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "writes_until_killed", "--ignored", "--nocapture", "--test-threads=1"])
        .env("BLOCKYARD_KILLED_FOLDER", folder)
        .env("BLOCKYARD_KILLED_DIRECT", u64::from(direct).to_string())
        .env("BLOCKYARD_KILLED_FIRST", (said.put.iter().max().unwrap_or(&99) + 1).to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut seen = 0;
    for line in BufReader::new(child.stdout.take().unwrap()).split(b'\n') {
        let line = String::from_utf8(line.unwrap()).unwrap();
        let Some((what, Ok(n))) = line.split_once(' ').map(|(what, n)| (what, n.parse())) else { continue };
        match what {
            "put" => {
                said.put.push(n);
                if said.delete.remove(&n) {
                    said.deleted.remove(&n);
                    said.stored.remove(&n);
                }
            }
            "stored" => drop(said.stored.insert(n)),
            "delete" => drop(said.delete.insert(n)),
            "deleted" => drop(said.deleted.insert(n)),
            _ => continue,
        }
        seen += 1;
        if seen == lines {
            child.kill().unwrap();
        }
    }
    assert!(!child.wait().unwrap().success());
}

/// Reads the blocks that must be stored, oldest first; returns reads, wrong blocks, and lost acknowledged blocks.
fn read_back(store: &SlabStore, said: &Said) -> (usize, usize, usize) {
    let (mut wrong, mut lost) = (0, 0);
    let recent = said.put.iter().rev().take(KILLED_SLOTS as usize).rev();
    for &n in recent.clone() {
        let found = get(store, &[n]).remove(0);
        wrong += usize::from(
            found.as_ref().is_ok_and(|bytes| *bytes != row(n, 0)) || (said.deleted.contains(&n) && found.is_ok()),
        );
        lost += usize::from(found.is_err() && said.stored.contains(&n) && !said.delete.contains(&n));
    }
    (recent.len(), wrong, lost)
}

fn kills(cycles: usize) {
    let folder = tempfile::tempdir().unwrap();
    let (mut said, mut sums, random) = (Said::default(), (0, 0, 0), &mut Random::new(7));
    for cycle in 0..cycles {
        let direct = cycle % 2 == 0;
        write_and_kill(folder.path(), &mut said, 1 + random.index(300), direct);
        std::thread::sleep(Duration::from_micros(random.below(300)));
        let store = open_file(folder.path(), if direct { DirectMode::Auto } else { DirectMode::Off });
        let (reads, wrong, lost) = read_back(&store, &said);
        sums = (sums.0 + reads, sums.1 + wrong, sums.2 + lost);
        assert!(store.close(LONG));
        if random.below(2) == 0 {
            let _ = std::fs::remove_file(folder.path().join("blockyard-prefix.checkpoint"));
        }
    }
    println!(
        "{cycles} kills, {} blocks acknowledged, {} read, {} wrong, {} lost",
        said.stored.len(),
        sums.0,
        sums.1,
        sums.2
    );
    assert!(said.stored.len() > 10 * cycles && said.deleted.len() > cycles / 2);
    assert_eq!((sums.1, sums.2), (0, 0), "wrong and lost blocks");
    assert_no_slot_leaked(&open_file(folder.path(), DirectMode::Auto), 0);
}

#[test]
fn a_hundred_kills_lose_no_acknowledged_block_and_no_slot() {
    kills(100);
}

#[test]
#[ignore = "slow: ten thousand processes"]
fn ten_thousand_kills_lose_no_acknowledged_block_and_no_slot() {
    kills(10_000);
}

#[test]
fn a_store_that_was_closed_is_whole_after_a_loss_of_power() {
    let disk = disk();
    let store = keyed::open(&disk);
    let ids: Vec<u64> = (0..SLOTS.into()).collect();
    put(&store, &ids, 0);
    assert!(store.close(LONG));
    for seed in 0..20 {
        let store = keyed::open(&disk.without_power(&mut Random::new(seed)));
        for &n in &ids {
            assert_eq!(get(&store, &[n]), [Ok(row(n, 0))]);
        }
    }
}
