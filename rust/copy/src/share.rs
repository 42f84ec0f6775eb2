//! Shares a mapping of several caches among threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Minimum bytes for which starting another thread pays.
const BYTES_PER_THREAD: usize = 2 << 20;

/// Approximate bytes taken at a time, as some threads start late.
const BYTES_PER_PART: usize = 1 << 20;

/// Calls `work` with each cache and each part of the list, on up to `threads` threads. `bytes` is the size of one entry
/// in one cache.
pub(crate) fn share<T: Sync>(
    caches: usize,
    list: &[T],
    bytes: usize,
    threads: usize,
    work: impl Fn(usize, &[T]) + Sync,
) {
    if list.is_empty() || caches == 0 {
        return;
    }
    let all = bytes.saturating_mul(list.len()).saturating_mul(caches);
    let threads = threads.min(all / BYTES_PER_THREAD).max(1);
    let entries = if threads == 1 { list.len() } else { (BYTES_PER_PART / bytes.max(1)).clamp(1, list.len()) };
    let parts = list.len().div_ceil(entries);
    let next = AtomicUsize::new(0);
    let take = || {
        while let Some(part) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&part| part < parts * caches) {
            let first = part % parts * entries;
            work(part / parts, &list[first..list.len().min(first + entries)]);
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            // If a thread cannot be started, the existing ones do its part.
            let _ = thread::Builder::new().name("blockyard-copy".to_owned()).spawn_scoped(scope, take);
        }
        take();
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::sync::Mutex;

    #[test]
    fn each_entry_is_done_once_in_each_cache() {
        let list: Vec<usize> = (0..1000).collect();
        for (caches, bytes, threads) in [(1, 1, 8), (3, 1 << 14, 1), (3, 1 << 14, 5), (2, 3 << 20, 64), (4, 0, 2)] {
            let (done, ids) = (Mutex::new(Vec::new()), Mutex::new(HashSet::new()));
            share(caches, &list, bytes, threads, |cache, part| {
                ids.lock().unwrap().insert(thread::current().id());
                done.lock().unwrap().extend(part.iter().map(|&entry| (cache, entry)));
            });
            let mut done = done.into_inner().unwrap();
            done.sort_unstable();
            let wanted: Vec<_> = (0..caches).flat_map(|cache| (0..1000).map(move |entry| (cache, entry))).collect();
            assert_eq!(done, wanted);
            assert!(ids.into_inner().unwrap().len() <= threads);
        }
    }

    #[test]
    fn nothing_is_done_where_there_is_nothing() {
        let never = |_, _: &[u8]| panic!("called");
        share(0, &[1], 1, 2, never);
        share(5, &[], 1, 2, never);
    }
}
