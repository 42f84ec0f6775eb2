//! Remembers conversations: how long each one pauses between its turns, and what the engine knew when a turn ended.
//!
//! A conversation is found by its prefix: a later turn begins with most of an earlier one. Its place is that of its
//! deepest sampled block, so that a turn that replaces the last blocks still finds it.

use super::Hint;
use crate::hash::Key;

/// Classes of gaps, each longer than the one before by the square root of 2; the middle one is the mean gap.
pub(super) const GAPS: usize = 7;
const MIDDLE: i32 = 3;
/// Class of blocks whose conversation is unknown: that of the mean gap.
pub(super) const UNKNOWN: u8 = 3;
/// Class of a conversation that is over.
pub(super) const OVER: u8 = 7;
/// Parts of a second in which time is counted.
const TICKS: f64 = 16.0;
/// One block in 4 can be a conversation's place, from the second one on.
const SAMPLED: usize = 4;
/// Blocks of a pool for each remembered conversation, and the least number of these.
const BLOCKS: usize = 16;
const LEAST: usize = 256;
/// Weight of a new gap in the mean of its conversation, ...
const OWN: f32 = 0.3;
/// ... and in the means of all and of each hint.
const COMMON: f32 = 0.02;
/// A conversation that pauses for its usual gap counts as this many gaps older.
const GAP_WEIGHT: f32 = 1.5;
/// Fraction of earlier insertions and seconds that counts in their rate, after each turn.
const REMAINING: f32 = 0.9;
/// Steps of a stored logarithm: an eighth of an octave, from 2^-4 ticks on.
const STEPS: f32 = 8.0;
const OFFSET: f32 = 4.0;

/// Class of the turn whose blocks are being released, or [`OVER`]; `None` for a release that ends no turn.
pub(super) type Turn = Option<u8>;

/// The last turn of a conversation, in 8 bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    /// Bits of its tag; 0 if empty.
    mark: u16,
    /// Mean logarithm of its gaps, in steps.
    gap: u8,
    /// The hint that its last turn ended with, counted from 1; 0 for none.
    hint: u8,
    /// When that turn ended, in ticks.
    ended: u32,
}

/// Turns that ended with a hint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HintCount {
    /// How many there were.
    pub given: u64,
    /// How many of their conversations went on.
    pub resumed: u64,
}

/// The conversations of a pool.
#[derive(Debug, Clone)]
pub(super) struct Turns {
    places: Vec<Place>,
    /// Time, in ticks.
    now: u32,
    /// Mean logarithm of all gaps, in octaves of a tick.
    mean: f32,
    /// By hint: how many octaves longer the gap after it is than its conversation's usual one.
    longer: [f32; Hint::ALL.len()],
    counts: [HintCount; Hint::ALL.len()],
    /// Recent insertions and the ticks that they took; the clock and the time at the last turn.
    insertions: f32,
    ticks: f32,
    last: (u32, u32),
}

impl Turns {
    pub(super) fn new(blocks: usize) -> Self {
        Self {
            places: vec![Place::default(); (blocks / BLOCKS).max(LEAST)],
            now: 0,
            mean: (16.0 * TICKS as f32).log2(),
            longer: [0.0; Hint::ALL.len()],
            counts: [HintCount::default(); Hint::ALL.len()],
            insertions: 0.0,
            ticks: 1.0,
            last: (0, 0),
        }
    }

    /// Follows a clock in seconds. If it goes back, no time passes until it is where it was; time ends after 8 years.
    pub(super) fn set_now(&mut self, seconds: f64) {
        self.now = self.now.max((seconds * TICKS) as u32);
    }

    pub(super) fn counts(&self) -> [HintCount; Hint::ALL.len()] {
        self.counts
    }

    /// Notes that a turn ends; `tags` are those of [`sampled`] blocks, last one first, and `clock` counts insertions.
    pub(super) fn end(&mut self, tags: impl Iterator<Item = u32>, hint: Option<Hint>, clock: u32) -> u8 {
        self.insertions = self.insertions * REMAINING + clock.wrapping_sub(self.last.0) as f32;
        self.ticks = self.ticks * REMAINING + self.now.wrapping_sub(self.last.1) as f32;
        self.last = (clock, self.now);
        if let Some(hint) = hint {
            self.counts[hint as usize].given += 1;
        }
        let (mut deepest, mut found) = (None, None);
        for tag in tags {
            let at = self.place(tag);
            deepest.get_or_insert((at, mark(tag)));
            if self.places[at].mark == mark(tag) {
                found = Some(self.places[at]);
                break;
            }
        }
        let gap = found.map_or(self.mean, |place| self.observe(place));
        let usual = gap + hint.map_or(0.0, |hint| self.longer[hint as usize]);
        // Only the last block remembers the turn: the next turn repeats it, and searches back from its own last block.
        if let Some((at, mark)) = deepest {
            let hint = hint.map_or(0, |hint| hint as u8 + 1);
            self.places[at] = Place { mark, gap: stored(gap), hint, ended: self.now };
        }
        if hint == Some(Hint::Over) { OVER } else { self.class(usual) }
    }

    /// Notes what the engine learns of a conversation after its last turn; `tags` are those of [`sampled`]
    /// blocks, last one first.
    pub(super) fn hint(&mut self, tags: impl Iterator<Item = u32>, hint: Hint) -> Turn {
        self.counts[hint as usize].given += 1;
        let mut gap = None;
        for tag in tags {
            let at = self.place(tag);
            if self.places[at].mark == mark(tag) {
                self.places[at].hint = hint as u8 + 1;
                gap = Some(self.class(usual(self.places[at]) + self.longer[hint as usize]));
                break;
            }
        }
        if hint == Hint::Over { Some(OVER) } else { gap }
    }

    /// Learns from a conversation that went on; returns its mean logarithm.
    fn observe(&mut self, place: Place) -> f32 {
        let gap = (self.now.saturating_sub(place.ended).max(1) as f32).log2();
        let usual = usual(place);
        self.mean += COMMON * (gap - self.mean);
        if let Some(hint) = usize::from(place.hint).checked_sub(1) {
            self.counts[hint].resumed += 1;
            self.longer[hint] += COMMON * (gap - usual - self.longer[hint]);
        }
        usual + OWN * (gap - usual)
    }

    /// By class: how many insertions older a block counts.
    pub(super) fn credits(&self) -> [u32; GAPS] {
        let mean = GAP_WEIGHT * self.mean.exp2() * self.insertions / self.ticks.max(1.0);
        std::array::from_fn(|class| (mean * ((class as i32 - MIDDLE) as f32 / 2.0).exp2()) as u32)
    }

    /// Class of a mean logarithm.
    fn class(&self, gap: f32) -> u8 {
        (((gap - self.mean) * 2.0).round() as i32 + MIDDLE).clamp(0, GAPS as i32 - 1) as u8
    }

    fn place(&self, tag: u32) -> usize {
        ((u64::from(tag.wrapping_mul(0x9e37_79b1)) * self.places.len() as u64) >> 32) as usize
    }
}

fn mark(tag: u32) -> u16 {
    (tag as u16).max(1)
}

/// Those keys of a conversation's blocks that can be its place, last one first.
pub(super) fn sampled(keys: &[Key]) -> impl Iterator<Item = u32> {
    keys.iter().skip(1).step_by(SAMPLED).rev().map(Key::tag)
}

/// Mean logarithm of a conversation's gaps.
fn usual(place: Place) -> f32 {
    f32::from(place.gap) / STEPS - OFFSET
}

fn stored(gap: f32) -> u8 {
    ((gap + OFFSET) * STEPS).round() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tags of a conversation's blocks, last one first; its first blocks are the same in every turn.
    fn tags(name: u32, blocks: u32) -> impl Iterator<Item = u32> {
        (1..=blocks).rev().map(move |block| (name << 16 | block).wrapping_mul(0x9e37_79b1) << 2)
    }

    #[test]
    fn a_conversation_is_known_by_its_beginning_and_its_class_is_that_of_its_gaps() {
        let mut turns = Turns::new(1000);
        let mut last = [OVER; 2];
        for step in 1..200u32 {
            turns.set_now(f64::from(step));
            // One comes every 2 seconds, the other every 32. Each turn lacks the last block of the one before.
            for (name, every) in [(0, 2), (1, 32)] {
                if step % every == 0 {
                    last[name as usize] = turns.end(tags(name, 20 + step % 2), None, step * 10);
                }
            }
        }
        assert!(last[0] < UNKNOWN && last[1] > UNKNOWN, "{last:?}");
        assert_eq!(turns.end(tags(2, 20), None, 5000), UNKNOWN, "it is not known");
        let credits = turns.credits();
        assert!(credits.is_sorted() && credits[6] > credits[0], "{credits:?}");
    }

    #[test]
    fn a_hint_has_its_own_gaps_and_is_counted_with_what_came_of_it() {
        let mut turns = Turns::new(1000);
        let (mut now, mut calls) = (0.0, OVER);
        for turn in 0..300 {
            let hint = if turn % 2 == 0 { Hint::ToolCall } else { Hint::Turn };
            let ended = turns.end(tags(0, 20), Some(hint), turn * 20);
            now += if hint == Hint::Turn { 400.0 } else { 5.0 };
            turns.set_now(now);
            if hint == Hint::ToolCall {
                calls = ended;
            } else {
                assert!(turn < 100 || ended > calls, "{ended:?} {calls:?}");
            }
        }
        let [over, calls, ends] = turns.counts();
        assert_eq!((over.given, calls.given, ends.given), (0, 150, 150));
        assert_eq!((calls.resumed, ends.resumed), (150, 149));
        assert_eq!(turns.end(tags(0, 20), Some(Hint::Over), 9000), OVER);
        assert_eq!(turns.hint(tags(1, 20), Hint::Over), Some(OVER));
        assert_eq!(turns.counts()[0].given, 2);
    }

    #[test]
    fn a_gap_of_any_length_fits_into_its_place() {
        assert_eq!(size_of::<Place>(), 8);
        for seconds in [0.0, 0.5, 1e3, 1e9] {
            let mut turns = Turns::new(16);
            turns.end(tags(0, 20), None, 20);
            turns.set_now(seconds);
            let turn = turns.end(tags(0, 20), None, 40);
            assert!(usize::from(turn) < GAPS);
        }
    }
}
