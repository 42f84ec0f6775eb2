//! Fault injection for tests: makes the n-th fallible step of a call fail. Compiled out of release builds.
//!
//! A call that fails changes nothing, so it takes each such step before its first change.

#[cfg(debug_assertions)]
mod armed {
    use crate::error::{Error, Result};
    use std::cell::Cell;

    thread_local! {
        /// Steps up to the one that fails, 0 for none.
        static LEFT: Cell<usize> = const { Cell::new(0) };
    }

    /// Makes this thread's `n`-th fallible step fail, counting from 1; 0 for none. Returns whether the previous fault
    /// had not fired.
    #[must_use]
    pub fn arm(n: usize) -> bool {
        LEFT.replace(n) > 0
    }

    /// A step that may fail.
    pub(crate) fn point() -> Result<()> {
        let left = LEFT.get();
        LEFT.set(left.saturating_sub(1));
        if left == 1 { Err(Error::OutOfMemory { wanted: 0 }) } else { Ok(()) }
    }
}

#[cfg(debug_assertions)]
pub use armed::arm;
#[cfg(debug_assertions)]
pub(crate) use armed::point;

/// A step that may fail.
#[cfg(not(debug_assertions))]
#[inline(always)]
#[expect(clippy::inline_always, clippy::unnecessary_wraps, reason = "it compiles to nothing")]
pub(crate) const fn point() -> crate::error::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    #[cfg(debug_assertions)]
    fn the_nth_step_fails_and_no_other() {
        let _ = super::arm(2);
        assert_eq!([(); 4].map(|()| super::point().is_ok()), [true, false, true, true]);
        assert!(!super::arm(1) && super::arm(0), "the first fault fired, the second did not");
    }
}
