//! Copies, exchanges and moves of rows, in all caches of a call.

use crate::apart::{check_apart, check_lists, reserved};
use crate::contest::{Contest, Way};
use crate::error::CopyError;
use crate::lanes::{LANES, PIECE_BYTES, in_lanes};
use crate::lines::{exchange_line, fence, stream_line};
use crate::mapping::{ASIDE, Mapping, MappingRule, Steps};
use crate::pieces::{Piece, Pieces};
use crate::rows::Rows;
use crate::share::share;
use std::sync::{Mutex, PoisonError};

/// From this many bytes on, writes bypass the processor's caches, where they would evict data in use. Not those of rows
/// that alternate: line by line, short pieces take longer that way.
const STREAM_BYTES: usize = 2 << 20;

/// Rows of at most this many bytes that alternate with those of other caches are copied with those.
const WOVEN_ROW_BYTES: usize = 64 << 10;

/// Determines how this process streams.
static STREAMING: Contest = Contest::new();

/// Matching caches, checked once for any number of mappings.
#[derive(Debug, Clone)]
pub struct Caches {
    sources: Vec<Rows>,
    /// `None` if the sources are changed in place.
    targets: Option<Vec<Rows>>,
    /// Blocks of each source and of each target.
    blocks: [usize; 2],
}

impl Caches {
    /// Caches to read, each with one to write.
    ///
    /// # Errors
    /// Their numbers or row widths differ, or a written cache shares memory with another.
    pub fn between(sources: Vec<Rows>, targets: Vec<Rows>) -> Result<Self, CopyError> {
        if sources.len() != targets.len() {
            return Err(CopyError::Caches { read: sources.len(), written: targets.len() });
        }
        let widths = sources.iter().map(|rows| rows.width()).zip(targets.iter().map(|rows| rows.width()));
        if let Some((cache, (read, written))) = widths.enumerate().find(|(_, (read, written))| read != written) {
            return Err(CopyError::Widths { cache, read, written });
        }
        check_apart(&targets)?;
        check_lists(&sources, &targets)?;
        let blocks = [fewest(&sources), fewest(&targets)];
        Ok(Self { sources, targets: Some(targets), blocks })
    }

    /// Caches to change in place.
    ///
    /// # Errors
    /// Two share memory.
    pub fn within(caches: Vec<Rows>) -> Result<Self, CopyError> {
        check_apart(&caches)?;
        let blocks = [fewest(&caches); 2];
        Ok(Self { sources: caches, targets: None, blocks })
    }

    /// Carries out a mapping in each cache, with up to `threads` threads.
    ///
    /// # Errors
    /// The mapping names blocks that the caches do not have, its rule does not allow such caches, or there is not
    /// enough memory to set aside rows of rings. Nothing has been copied.
    pub fn run(&self, mapping: &Mapping, threads: usize) -> Result<(), CopyError> {
        for (reach, rows) in mapping.reach().into_iter().zip(self.blocks) {
            if reach > rows {
                return Err(CopyError::Reach { last: reach - 1, rows });
            }
        }
        let (rule, pairs) = (mapping.rule(), mapping.pairs());
        let targets = match (&self.targets, rule) {
            (Some(targets), MappingRule::Swap | MappingRule::Copy) => targets,
            (Some(_), _) => return Err(CopyError::Place { rule: rule.name(), place: "between caches" }),
            (None, MappingRule::Swap) => return Err(CopyError::Place { rule: rule.name(), place: "within caches" }),
            (None, MappingRule::Exchange) => {
                self.exchange(pairs, threads);
                return Ok(());
            }
            (None, _) => &self.sources,
        };
        if let Some(order) = mapping.order() {
            return self.run_steps(order, threads);
        }
        // SAFETY: the caches have the rows, since the mapping's reach was checked, and they match. Every rule ensures
        // that no row is written twice. No row is both read and written: source and target caches share no memory, and
        // within caches the rule excludes it, or the mapping needs no order.
        unsafe { copy_apart(&self.sources, targets, pairs, threads) };
        Ok(())
    }

    /// Swaps rows that are each named once.
    fn exchange(&self, pairs: &[[u32; 2]], threads: usize) {
        let caches = &self.sources;
        share(caches.len(), pairs, widest(caches), threads, |cache, part| {
            // SAFETY: `run` checked that the rows exist, and the rule that they are distinct; the maker of `Rows`
            // promised that nobody else uses them.
            unsafe {
                let pieces = Pieces::new(caches[cache], caches[cache], part, PIECE_BYTES);
                in_lanes::<LANES>(pieces, |odd| odd.exchange(), |from, to| exchange_line(from, to));
            }
        });
    }

    /// Runs steps on existing rows within each cache.
    fn run_steps(&self, Steps { steps, .. }: &Steps, threads: usize) -> Result<(), CopyError> {
        let caches = &self.sources;
        let has_rings = steps.iter().any(|step| step[1] == ASIDE);
        let mut room = reserved(caches.len())?;
        for rows in caches {
            room.push(Mutex::new(reserved::<u8>(if has_rings { rows.width() } else { 0 })?));
        }
        // Steps must stay in order, so a cache is not divided among threads.
        share(caches.len(), &[()], widest(caches).saturating_mul(steps.len()), threads, |cache, _| {
            let (rows, bytes) = (caches[cache], caches[cache].width());
            let mut aside = std::mem::take(&mut *room[cache].lock().unwrap_or_else(PoisonError::into_inner));
            for &[from, to] in steps {
                // SAFETY: the rows exist, and the maker of `Rows` promised that nobody else uses them. Two rows share
                // no memory, and no step has one row at both ends. A row is set aside before it is written.
                unsafe {
                    if to == ASIDE {
                        aside.clear();
                        aside.extend_from_slice(std::slice::from_raw_parts(rows.row(from), bytes));
                    } else if from == ASIDE {
                        rows.row(to).copy_from_nonoverlapping(aside.as_ptr(), bytes);
                    } else {
                        rows.row(to).copy_from_nonoverlapping(rows.row(from), bytes);
                    }
                }
            }
        });
        Ok(())
    }
}

/// Copies rows.
///
/// # Safety
/// The caches have the named rows, all of one width. No row of a target is named twice, and none shares memory with a
/// row that is read or with a row of another target.
unsafe fn copy_apart(sources: &[Rows], targets: &[Rows], pairs: &[[u32; 2]], threads: usize) {
    let each = sources.iter().map(|rows| rows.width()).fold(0, usize::saturating_add);
    let bytes = each.saturating_mul(pairs.len());
    let alternate = sources.len() > 1 && sources.iter().chain(targets).any(|rows| !rows.are_dense());
    if alternate && widest(sources) <= WOVEN_ROW_BYTES {
        // In the order of addresses, which the processor fetches ahead.
        share(1, pairs, each, threads, |_, part| {
            for &[from, to] in part {
                for (source, target) in sources.iter().zip(targets) {
                    // SAFETY: the caller promises that the rows exist, have one width and share no memory; the maker of
                    // `Rows` promised that nobody else uses them.
                    unsafe { target.row(to).copy_from_nonoverlapping(source.row(from), source.width()) };
                }
            }
        });
        return;
    }
    share(sources.len(), pairs, widest(sources), threads, |cache, part| {
        let width = sources[cache].width();
        if bytes < STREAM_BYTES {
            // SAFETY: the caller promises that the rows exist, have one width and share no memory; the maker of `Rows`
            // promised that nobody else uses them.
            unsafe { Pieces::new(sources[cache], targets[cache], part, usize::MAX).for_each(|piece| piece.copy()) };
            return;
        }
        for part in part.chunks(STREAMING.entries(part.len(), width)) {
            STREAMING.run(part.len() * width, |way| {
                let line = |from: *mut u8, to: *mut u8| {
                    // SAFETY: as above; the fence follows.
                    unsafe { stream_line(from, to) };
                };
                // SAFETY: as above.
                let copy = |odd: Piece| unsafe { odd.copy() };
                // SAFETY: as above.
                let pieces = unsafe { Pieces::new(sources[cache], targets[cache], part, PIECE_BYTES) };
                match way {
                    Way::OneByOne => in_lanes::<1>(pieces, copy, line),
                    Way::InLanes => in_lanes::<LANES>(pieces, copy, line),
                }
                fence();
            });
        }
    });
}

/// The minimum number of blocks of any cache.
fn fewest(caches: &[Rows]) -> usize {
    caches.iter().map(|rows| rows.count()).min().unwrap_or_default()
}

/// Bytes of the widest row.
fn widest(caches: &[Rows]) -> usize {
    caches.iter().map(|rows| rows.width()).max().unwrap_or_default()
}
