//! Copies, exchanges and moves of rows, in all caches of a call.

use crate::lanes::{PIECE_BYTES, in_lanes};
use crate::lines::{exchange_line, fence, stream_line};
use crate::order::Order;
use crate::pieces::Pieces;
use crate::rows::Rows;
use crate::share::share;

/// From this many bytes on, what is written goes past the processor's caches: there it would push out what is in use.
const STREAM_BYTES: usize = 2 << 20;

/// What is wrong with the caches, or with the rows that are named; nothing has been copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    /// A pair names a row that there is not.
    #[error("pair {pair} names row {row}, there are {rows}")]
    OutOfRange {
        /// Its place in the list.
        pair: usize,
        /// The row it names.
        row: u32,
        /// Rows that there are.
        rows: usize,
    },
    /// There are not as many caches to write as to read.
    #[error("{read} caches are to be copied to {written}")]
    Caches {
        /// Caches that are read.
        read: usize,
        /// Caches that are written.
        written: usize,
    },
    /// A cache is copied to one with other rows.
    #[error("rows of {read} bytes are to be copied to rows of {written}, in cache {cache}")]
    Widths {
        /// Its place in the list.
        cache: usize,
        /// Bytes of a row that is read.
        read: usize,
        /// Bytes of a row that is written.
        written: usize,
    },
}

/// Copies row `from` of each source to row `to` of its target, for each pair `[from, to]`.
///
/// # Errors
/// The caches do not fit one another, or a row does not exist; nothing has been copied.
///
/// # Safety
/// No row of a target is named twice, and none shares memory with a row that is read or with one of another target. Until the
/// call returns nobody else writes rows that are read, or uses rows that are written.
pub unsafe fn copy_rows(
    sources: &[Rows],
    targets: &[Rows],
    pairs: &[[u32; 2]],
    threads: usize,
) -> Result<(), CopyError> {
    if sources.len() != targets.len() {
        return Err(CopyError::Caches { read: sources.len(), written: targets.len() });
    }
    let widths = sources.iter().map(|rows| rows.width()).zip(targets.iter().map(|rows| rows.width()));
    if let Some((cache, (read, written))) = widths.enumerate().find(|(_, (read, written))| read != written) {
        return Err(CopyError::Widths { cache, read, written });
    }
    check_pairs(pairs, sources, targets)?;
    let bytes = sources.iter().map(|rows| rows.width()).sum::<usize>().saturating_mul(pairs.len());
    share(sources.len(), pairs, widest(sources), threads, |cache, part| {
        // SAFETY: the rows are there, and of one width; the caller says that they lie apart and are ours.
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
    Ok(())
}

/// Lets two rows of each pair change places, in each cache.
///
/// # Errors
/// A row does not exist; nothing has been exchanged.
///
/// # Safety
/// No row is named twice, in either place, and no cache shares memory with another. Nobody else uses the rows until the call
/// returns.
pub unsafe fn exchange_rows(caches: &[Rows], pairs: &[[u32; 2]], threads: usize) -> Result<(), CopyError> {
    check_pairs(pairs, caches, caches)?;
    share(caches.len(), pairs, widest(caches), threads, |cache, part| {
        // SAFETY: the rows are there; the caller says that they lie apart and are ours.
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
/// A row does not exist; nothing has been moved.
///
/// # Safety
/// No row is named twice as `to`, and no cache shares memory with another. Nobody else uses the rows until the call returns.
pub unsafe fn move_rows(caches: &[Rows], pairs: &[[u32; 2]], threads: usize) -> Result<(), CopyError> {
    check_pairs(pairs, caches, caches)?;
    let Order { steps, closing, is_bound } = Order::new(pairs);
    if !is_bound {
        // SAFETY: nothing is both read and written; the rest is as the caller says.
        return unsafe { copy_rows(caches, caches, &steps, threads) };
    }
    // No step may overtake another, so a cache is not divided.
    share(caches.len(), &[()], widest(caches).saturating_mul(pairs.len()), threads, |cache, _| {
        let (rows, bytes) = (caches[cache], caches[cache].width());
        let mut aside: Vec<u8> = Vec::with_capacity(closing.len() * bytes);
        // SAFETY: the rows are there, and the caller says that they are ours; two rows are the same or lie apart, and no
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
