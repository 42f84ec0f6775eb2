//! The pieces of memory that a mapping copies between two caches: adjacent pairs of rows become one piece.

use crate::rows::Rows;
use std::slice::Iter;

/// Bytes to copy from one place to another; the two do not overlap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) from: *mut u8,
    pub(crate) to: *mut u8,
    pub(crate) bytes: usize,
}

impl Piece {
    /// Copies the bytes.
    ///
    /// # Safety
    /// Both places are valid and do not overlap, and nobody else uses them meanwhile.
    pub(crate) unsafe fn copy(self) {
        // SAFETY: the caller promises it.
        unsafe { self.to.copy_from_nonoverlapping(self.from, self.bytes) }
    }

    /// Exchanges the bytes of the two places.
    ///
    /// # Safety
    /// As for [`Piece::copy`].
    pub(crate) unsafe fn exchange(self) {
        // SAFETY: the caller promises it.
        unsafe { std::ptr::swap_nonoverlapping(self.from, self.to, self.bytes) }
    }
}

/// The pieces of a mapping.
#[derive(Clone, Debug)]
pub(crate) struct Pieces<'a> {
    source: Rows,
    target: Rows,
    pairs: Iter<'a, [u32; 2]>,
    /// Maximum bytes of a piece.
    longest: usize,
    /// The rest of the run that is being cut.
    rest: Piece,
}

impl<'a> Pieces<'a> {
    /// Pieces of at most `longest` bytes.
    ///
    /// # Safety
    /// The pairs name rows that exist, and the caches have rows of one width.
    pub(crate) unsafe fn new(source: Rows, target: Rows, pairs: &'a [[u32; 2]], longest: usize) -> Self {
        let rest = Piece { from: std::ptr::null_mut(), to: std::ptr::null_mut(), bytes: 0 };
        Self { source, target, pairs: pairs.iter(), longest, rest }
    }

    /// The next pairs whose rows follow one another on both sides.
    fn next_run(&mut self) -> Option<Piece> {
        let &[from, to] = self.pairs.next()?;
        let mut rows = 1;
        if self.source.are_dense() && self.target.are_dense() {
            for &[next_from, next_to] in self.pairs.as_slice() {
                if [next_from, next_to] != [from + rows, to + rows] {
                    break;
                }
                rows += 1;
            }
            self.pairs = self.pairs.as_slice()[rows as usize - 1..].iter();
        }
        let bytes = rows as usize * self.source.width();
        // SAFETY: the pairs name rows that exist.
        let (from, to) = unsafe { (self.source.row(from), self.target.row(to)) };
        Some(Piece { from, to, bytes })
    }
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        if self.rest.bytes == 0 {
            self.rest = self.next_run()?;
        }
        let piece = Piece { bytes: self.rest.bytes.min(self.longest), ..self.rest };
        // SAFETY: a piece ends within its run or at the run's end.
        let (from, to) = unsafe { (piece.from.add(piece.bytes), piece.to.add(piece.bytes)) };
        self.rest = Piece { from, to, bytes: self.rest.bytes - piece.bytes };
        Some(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (from, to, bytes) of each piece, in bytes from the first row on.
    fn pieces(stride: usize, pairs: &[[u32; 2]], longest: usize) -> Vec<(isize, isize, usize)> {
        let (mut source, mut target) = ([0_u8; 128], [0_u8; 128]);
        // SAFETY: eight rows of 10 bytes, 16 bytes apart, end within 128.
        unsafe {
            let (source, target) =
                (Rows::new(source.as_mut_ptr(), 8, 10, 10), Rows::new(target.as_mut_ptr(), 8, 10, stride));
            let (read, written) = (source.row(0), target.row(0));
            let all = Pieces::new(source, target, pairs, longest);
            all.map(|piece| (piece.from.offset_from(read), piece.to.offset_from(written), piece.bytes)).collect()
        }
    }

    #[test]
    fn neighbours_on_both_sides_are_one_piece() {
        let pairs = [[0, 3], [1, 4], [2, 5], [3, 0], [4, 2], [5, 7]];
        assert_eq!(pieces(10, &pairs, usize::MAX), [(0, 30, 30), (30, 0, 10), (40, 20, 10), (50, 70, 10)]);
    }

    #[test]
    fn rows_that_lie_apart_are_not() {
        assert_eq!(pieces(16, &[[0, 3], [1, 4]], usize::MAX), [(0, 48, 10), (10, 64, 10)]);
    }

    #[test]
    fn long_runs_are_cut() {
        assert_eq!(pieces(10, &[[0, 1], [1, 2], [7, 0]], 12), [(0, 10, 12), (12, 22, 8), (70, 0, 10)]);
    }
}
