//! Determines whether streaming writes are faster with several pieces at a time or with one after the other. Processors
//! differ by up to a factor of four, even within a family, so the first parts of large copies alternate between both
//! ways and are timed.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Number of timed parts, half for each way.
const TIMED: u32 = 32;

/// Bytes of a timed part.
const PART_BYTES: usize = 1 << 20;

/// Smaller parts are not representative.
const MIN_BYTES: usize = 256 << 10;

/// How the pieces of a part are streamed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// A line of each of several pieces in turn.
    InLanes,
    /// One piece after the other.
    OneByOne,
}

/// A race between the two ways.
pub(crate) struct Contest {
    timed: AtomicU32,
    /// Minimum time for a MiB each way, in nanoseconds.
    best: [AtomicU64; 2],
}

impl Contest {
    pub(crate) const fn new() -> Self {
        Self { timed: AtomicU32::new(0), best: [const { AtomicU64::new(u64::MAX) }; 2] }
    }

    /// Number of entries of `width` bytes in a part: all of them once one way has won.
    pub(crate) fn entries(&self, count: usize, width: usize) -> usize {
        let is_open = self.timed.load(Ordering::Relaxed) < TIMED;
        (if is_open { PART_BYTES / width.max(1) } else { count }).clamp(1, count.max(1))
    }

    /// Copies a part in the way chosen for it.
    pub(crate) fn run(&self, bytes: usize, copy: impl FnOnce(Way)) {
        let (way, is_timed) = self.enter(bytes);
        let begun = is_timed.then(Instant::now);
        copy(way);
        if let Some(begun) = begun {
            self.note(way, bytes, begun.elapsed());
        }
    }

    /// The way for the next part, and whether to time it.
    fn enter(&self, bytes: usize) -> (Way, bool) {
        if bytes >= MIN_BYTES && self.timed.load(Ordering::Relaxed) < TIMED {
            let turn = self.timed.fetch_add(1, Ordering::Relaxed);
            return (if turn % 2 == 0 { Way::InLanes } else { Way::OneByOne }, true);
        }
        let [in_lanes, one_by_one] = [0, 1].map(|way: usize| self.best[way].load(Ordering::Relaxed));
        (if one_by_one < in_lanes { Way::OneByOne } else { Way::InLanes }, false)
    }

    /// Records how long a part took.
    fn note(&self, way: Way, bytes: usize, time: Duration) {
        let nanos = time.as_nanos().saturating_mul(1 << 20) / bytes.max(1) as u128;
        self.best[way as usize].fetch_min(u64::try_from(nanos).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies parts of 1 MiB, which take this long each way, and returns how many went each way.
    fn copy(contest: &Contest, parts: u32, times: [u64; 2]) -> [u32; 2] {
        let mut went = [0; 2];
        for _ in 0..parts {
            let (way, is_timed) = contest.enter(1 << 20);
            went[way as usize] += 1;
            if is_timed {
                contest.note(way, 1 << 20, Duration::from_nanos(times[way as usize]));
            }
        }
        went
    }

    #[test]
    fn after_its_turns_the_faster_way_is_taken_for_good() {
        for (times, winner) in [([50, 200], Way::InLanes), ([200, 50], Way::OneByOne)] {
            let contest = Contest::new();
            assert_eq!(copy(&contest, TIMED, times), [TIMED / 2; 2]);
            let mut wanted = [0; 2];
            wanted[winner as usize] = 100;
            assert_eq!(copy(&contest, 100, [1, 1]), wanted);
        }
    }

    #[test]
    fn the_best_turn_counts_and_a_turn_that_was_held_up_does_not() {
        let contest = Contest::new();
        for turn in 0..TIMED {
            let (way, is_timed) = contest.enter(1 << 20);
            assert!(is_timed);
            let slow = u64::from(turn % 4 == 0) * 1000;
            contest.note(way, 1 << 20, Duration::from_nanos(slow + if way == Way::InLanes { 50 } else { 60 }));
        }
        assert_eq!(contest.enter(1 << 20), (Way::InLanes, false));
    }

    #[test]
    fn parts_are_short_until_one_way_has_won() {
        let contest = Contest::new();
        assert_eq!(contest.entries(100, 64 << 10), 16);
        assert_eq!((contest.entries(100, 0), contest.entries(100, 2 << 20), contest.entries(0, 1)), (100, 1, 1));
        copy(&contest, TIMED, [1, 2]);
        assert_eq!(contest.entries(100, 64 << 10), 100);
    }

    #[test]
    fn small_parts_are_not_timed() {
        let contest = Contest::new();
        for _ in 0..2 * TIMED {
            assert_eq!(contest.enter(MIN_BYTES - 1), (Way::InLanes, false));
        }
        assert!(contest.enter(MIN_BYTES).1);
    }
}
