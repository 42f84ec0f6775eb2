//! Copies, exchanges and moves of rows, in all caches of a call.

use crate::apart::{check_apart, check_exchange, check_in_place, check_lists, check_targets, reserved};
use crate::error::CopyError;
use crate::lanes::{PIECE_BYTES, in_lanes};
use crate::lines::{exchange_line, fence, stream_line};
use crate::order::Order;
use crate::pieces::Pieces;
use crate::rows::Rows;
use crate::share::share;
use std::sync::{Mutex, PoisonError};

/// From this many bytes on, what is written goes past the processor's caches: there it would push out what is in use.
const STREAM_BYTES: usize = 2 << 20;

/// Copies row `from` of each source to row `to` of its target, for each pair `[from, to]`.
///
/// # Errors
/// The caches do not fit one another, or a row does not exist, is written twice or shares memory with another that is
/// written, or read; nothing has been copied. Sources may be the targets, if no row is both read and written.
pub fn copy_rows(sources: &[Rows], targets: &[Rows], pairs: &[[u32; 2]], threads: usize) -> Result<(), CopyError> {
    if sources.len() != targets.len() {
        return Err(CopyError::Caches { read: sources.len(), written: targets.len() });
    }
    let widths = sources.iter().map(|rows| rows.width()).zip(targets.iter().map(|rows| rows.width()));
    if let Some((cache, (read, written))) = widths.enumerate().find(|(_, (read, written))| read != written) {
        return Err(CopyError::Widths { cache, read, written });
    }
    check_pairs(pairs, sources, targets)?;
    check_apart(targets)?;
    let written = check_targets(pairs, targets)?;
    if check_lists(sources, targets)? {
        check_in_place(pairs, &written)?;
    }
    // SAFETY: just checked.
    unsafe { copy_apart(sources, targets, pairs, threads) };
    Ok(())
}

/// Copies rows.
///
/// # Safety
/// The caches have the rows that are named, of one width. No row of a target is named twice, and none shares memory with a
/// row that is read or with one of another target.
unsafe fn copy_apart(sources: &[Rows], targets: &[Rows], pairs: &[[u32; 2]], threads: usize) {
    let bytes = sources.iter().map(|rows| rows.width()).fold(0, usize::saturating_add).saturating_mul(pairs.len());
    share(sources.len(), pairs, widest(sources), threads, |cache, part| {
        // SAFETY: the rows are there, of one width, and lie apart, as the caller says; who made them says that they are ours.
        unsafe {
            if bytes < STREAM_BYTES {
                Pieces::new(sources[cache], targets[cache], part, usize::MAX).for_each(|piece| piece.copy());
            } else {
                let pieces = Pieces::new(sources[cache], targets[cache], part, PIECE_BYTES);
                in_lanes(pieces, |odd| odd.copy(), |from, to| stream_line(from, to));
                fence();
            }
        }
    });
}

/// Lets two rows of each pair change places, in each cache.
///
/// # Errors
/// A row does not exist or is named twice, or caches share memory; nothing has been exchanged.
pub fn exchange_rows(caches: &[Rows], pairs: &[[u32; 2]], threads: usize) -> Result<(), CopyError> {
    check_pairs(pairs, caches, caches)?;
    check_apart(caches)?;
    check_exchange(pairs, caches)?;
    share(caches.len(), pairs, widest(caches), threads, |cache, part| {
        // SAFETY: the rows are there and lie apart, as just checked; who made them says that they are ours.
        unsafe {
            let pieces = Pieces::new(caches[cache], caches[cache], part, PIECE_BYTES);
            in_lanes(pieces, |odd| odd.exchange(), |from, to| exchange_line(from, to));
        }
    });
    Ok(())
}

/// Copies row `from` of each cache to row `to` of the same, for each pair `[from, to]`, as if all were read before the first
/// is written: chains (a->b, b->c) and rings (a->b, b->a) are legal.
///
/// # Errors
/// A row does not exist or is written twice, or caches share memory; or there is none for the rows that close rings. Nothing
/// has been moved.
pub fn move_rows(caches: &[Rows], pairs: &[[u32; 2]], threads: usize) -> Result<(), CopyError> {
    check_pairs(pairs, caches, caches)?;
    check_apart(caches)?;
    check_targets(pairs, caches)?;
    let Order { steps, closing, is_bound } = Order::new(pairs);
    if !is_bound {
        // SAFETY: nothing is both read and written; the rest is just checked.
        unsafe { copy_apart(caches, caches, &steps, threads) };
        return Ok(());
    }
    let mut room = reserved(caches.len())?;
    for rows in caches {
        room.push(Mutex::new(reserved::<u8>(closing.len().saturating_mul(rows.width()))?));
    }
    // No step may overtake another, so a cache is not divided.
    share(caches.len(), &[()], widest(caches).saturating_mul(pairs.len()), threads, |cache, _| {
        let (rows, bytes) = (caches[cache], caches[cache].width());
        let mut aside = std::mem::take(&mut *room[cache].lock().unwrap_or_else(PoisonError::into_inner));
        // SAFETY: the rows are there, and who made them says that they are ours; two rows are the same or lie apart, and no
        // move has one row at both ends.
        unsafe {
            for &[from, _] in &closing {
                aside.extend_from_slice(std::slice::from_raw_parts(rows.row(from), bytes));
            }
            for &[from, to] in &steps {
                rows.row(to).copy_from_nonoverlapping(rows.row(from), bytes);
            }
            for (&[_, to], kept) in closing.iter().zip(aside.chunks_exact(bytes.max(1))) {
                rows.row(to).copy_from_nonoverlapping(kept.as_ptr(), bytes);
            }
        }
    });
    Ok(())
}

/// Checks that all caches have the rows that are named.
fn check_pairs(pairs: &[[u32; 2]], sources: &[Rows], targets: &[Rows]) -> Result<(), CopyError> {
    let rows = [sources, targets].map(|caches| caches.iter().map(|rows| rows.count()).min().unwrap_or_default());
    for (pair, &named) in pairs.iter().enumerate() {
        if let Some((row, rows)) = named.into_iter().zip(rows).find(|&(row, rows)| row as usize >= rows) {
            return Err(CopyError::OutOfRange { pair, row, rows });
        }
    }
    Ok(())
}

/// Bytes of the widest row.
fn widest(caches: &[Rows]) -> usize {
    caches.iter().map(|rows| rows.width()).max().unwrap_or_default()
}
