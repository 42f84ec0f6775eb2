//! Copies and exchanges of one line of memory.

use crate::lanes::LINE;

type Line = [u8; LINE];

/// Copies a line past the processor's caches. Memory that is written by whole lines need not be read first.
///
/// Only on x86-64. On aarch64 a line is two pairs of plain 32-byte loads and stores, as in a `memcpy`: its cores detect
/// streams of whole lines themselves, and whether the hint of `stnp` gains anything has not been measured.
///
/// # Safety
/// Both lines are valid and do not overlap, `to` is aligned to a line, and nobody else uses them meanwhile. The caller
/// calls [`fence`] before others may read `to`.
#[inline]
pub(crate) unsafe fn stream_line(from: *const u8, to: *mut u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        // SAFETY: a line has four such words, and every x86-64 processor has the instructions.
        #[expect(clippy::cast_ptr_alignment, reason = "`to` is aligned, and the load needs no alignment")]
        unsafe {
            let (from, to) = (from.cast::<__m128i>(), to.cast::<__m128i>());
            let words = [0, 1, 2, 3].map(|at| _mm_loadu_si128(from.add(at)));
            for (at, word) in words.into_iter().enumerate() {
                _mm_stream_si128(to.add(at), word);
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller promises it.
    unsafe {
        to.cast::<Line>().write(from.cast::<Line>().read());
    }
}

/// Orders streamed lines as plain writes are ordered: the lock or the join that hands them to another thread makes them
/// visible there. Plain lines need nothing for that.
#[inline]
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Exchanges two lines.
///
/// # Safety
/// Both are valid and do not overlap, and nobody else uses them meanwhile.
#[inline]
pub(crate) unsafe fn exchange_line(one: *mut u8, other: *mut u8) {
    let (one, other) = (one.cast::<Line>(), other.cast::<Line>());
    // SAFETY: the caller promises it; byte arrays need no alignment.
    unsafe {
        let (first, second) = (one.read(), other.read());
        one.write(second);
        other.write(first);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(64))]
    struct Aligned([u8; 4 * LINE]);

    #[test]
    fn a_line_is_copied_or_exchanged_and_nothing_beside_it() {
        for shift in [0, 3, 16] {
            let mut memory = Aligned(std::array::from_fn(|at| u8::try_from(at).unwrap()));
            let mut wanted = memory.0;
            wanted.copy_within(shift..shift + LINE, 2 * LINE);
            let base = memory.0.as_mut_ptr();
            // SAFETY: four lines of memory.
            unsafe { stream_line(base.add(shift), base.add(2 * LINE)) };
            fence();
            assert_eq!(memory.0, wanted);
            let (low, high) = wanted.split_at_mut(2 * LINE);
            low[shift..shift + LINE].swap_with_slice(&mut high[shift + 5..][..LINE]);
            // SAFETY: as above.
            unsafe { exchange_line(base.add(shift), base.add(2 * LINE + shift + 5)) };
            assert_eq!(memory.0, wanted);
        }
    }
}
