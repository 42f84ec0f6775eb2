//! Copies several pieces of memory at once, one line of each in turn.
//!
//! Copying one piece after another would stall at each page, since processors prefetch only within a page.

use crate::pieces::Piece;

/// Long runs are split into pieces of this size, so that there are several at a time.
pub(crate) const PIECE_BYTES: usize = 64 << 10;

/// Bytes of a line of the processor's caches.
pub(crate) const LINE: usize = 64;

/// Pieces at a time.
pub(crate) const LANES: usize = 4;

/// Remaining whole lines of a piece; those of `to` are aligned.
#[derive(Clone, Copy)]
struct Lane {
    from: *mut u8,
    to: *mut u8,
    lines: usize,
}

/// Processes all pieces, `LANES` at a time. Calls `line` with `(from, to)` of each whole line of [`LINE`] bytes, where
/// `to` is aligned to a line, and `odd` with the remaining bytes at both ends.
pub(crate) fn in_lanes<const LANES: usize>(
    mut pieces: impl Iterator<Item = Piece>,
    odd: impl Fn(Piece),
    line: impl Fn(*mut u8, *mut u8),
) {
    let mut lanes = [Lane { from: std::ptr::null_mut(), to: std::ptr::null_mut(), lines: 0 }; LANES];
    loop {
        for lane in &mut lanes {
            while lane.lines == 0 {
                let Some(piece) = pieces.next() else { break };
                *lane = begin(piece, &odd);
            }
        }
        let together = lanes.iter().map(|lane| lane.lines).min().unwrap_or_default();
        if together == 0 {
            break;
        }
        for _ in 0..together {
            for lane in &mut lanes {
                line(lane.from, lane.to);
                lane.advance();
            }
        }
        for lane in &mut lanes {
            lane.lines -= together;
        }
    }
    for lane in &mut lanes {
        for _ in 0..lane.lines {
            line(lane.from, lane.to);
            lane.advance();
        }
    }
}

/// Handles the bytes before the first whole line and after the last.
fn begin(piece: Piece, odd: &impl Fn(Piece)) -> Lane {
    let head = piece.to.align_offset(LINE).min(piece.bytes);
    let lines = (piece.bytes - head) / LINE;
    odd(Piece { bytes: head, ..piece });
    let behind = head + lines * LINE;
    odd(Piece {
        from: piece.from.wrapping_add(behind),
        to: piece.to.wrapping_add(behind),
        bytes: piece.bytes - behind,
    });
    Lane { from: piece.from.wrapping_add(head), to: piece.to.wrapping_add(head), lines }
}

impl Lane {
    fn advance(&mut self) {
        self.from = self.from.wrapping_add(LINE);
        self.to = self.to.wrapping_add(LINE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn each_byte_is_done_once_and_lines_begin_where_those_of_memory_do() {
        let base: *mut u8 = std::ptr::without_provenance_mut(1 << 20);
        let sizes = [0, 1, 63, 64, 65, 127, 128, 700, 4096, 5000, 190, 64];
        for (shift, is_single) in [0, 1, 60].into_iter().flat_map(|shift| [(shift, false), (shift, true)]) {
            let mut pieces = Vec::new();
            let mut at = shift;
            for bytes in sizes {
                pieces.push(Piece {
                    from: base.wrapping_add(1 << 18).wrapping_add(at),
                    to: base.wrapping_add(at),
                    bytes,
                });
                at += bytes + 7;
            }
            let done = RefCell::new(vec![0; at]);
            let note = |from: *mut u8, to: *mut u8, bytes| {
                assert_eq!(from.addr() - to.addr(), 1 << 18);
                done.borrow_mut()[to.addr() - base.addr()..][..bytes].iter_mut().for_each(|times| *times += 1);
            };
            let lines = |from, to: *mut u8| {
                assert_eq!(to.addr() % LINE, 0);
                note(from, to, LINE);
            };
            let odd = |odd: Piece| note(odd.from, odd.to, odd.bytes);
            if is_single {
                in_lanes::<1>(pieces.iter().copied(), odd, lines);
            } else {
                in_lanes::<LANES>(pieces.iter().copied(), odd, lines);
            }
            let mut wanted = vec![0; at];
            for piece in &pieces {
                wanted[piece.to.addr() - base.addr()..][..piece.bytes].fill(1);
            }
            assert_eq!(*done.borrow(), wanted);
        }
    }
}
