//! Offsets of the slots. All are multiples of 4 KiB, and the user's size covers the whole file.

use crate::error::{Error, Result};

/// Unit of direct I/O and length of a header, in bytes.
pub const PAGE: usize = 4096;

/// Slots of one length in a slab: a superblock page, then header page and payload for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of a block without its header.
    pub payload_bytes: usize,
    /// Slots in the slab.
    pub slots: u32,
}

impl Geometry {
    /// Returns a geometry with as many slots as the size holds, or exactly the requested number.
    ///
    /// # Errors
    /// `TooSmall` if no slot fits, `TooManySlots` if the size holds fewer than requested, `InvalidOption` for a
    /// block without bytes, no slots, or if neither size nor slots are given.
    pub fn fit(payload_bytes: usize, size: Option<u64>, slots: Option<u64>) -> Result<Self> {
        let invalid = |what, found, must: &str| Err(Error::InvalidOption { what, found, must: must.to_owned() });
        if payload_bytes == 0 || payload_bytes > 1 << 40 {
            return invalid("bytes_per_block", payload_bytes as u64, "between 1 and 1 TiB");
        }
        let stride = stride(payload_bytes) as u64;
        let fits = size.map(|size| size.saturating_sub(PAGE as u64) / stride);
        if let (Some(size), Some(0)) = (size, fits) {
            return Err(Error::TooSmall { size, stride, superblock: PAGE as u64 });
        }
        let slots = match (slots, fits, size) {
            (None, None, _) => return invalid("size", 0, "at least 1 unless num_slots is given"),
            (Some(wanted), Some(fits), Some(size)) if wanted > fits => {
                return Err(Error::TooManySlots { wanted, stride, size, fits });
            }
            (Some(slots), _, _) => slots,
            (None, Some(fits), _) => fits.min(u64::from(u32::MAX)),
        };
        match u32::try_from(slots) {
            Ok(slots) if slots > 0 => Ok(Self { payload_bytes, slots }),
            _ => invalid("num_slots", slots, "between 1 and 4294967295"),
        }
    }

    /// Bytes from slot to slot.
    #[must_use]
    pub fn stride(&self) -> usize {
        stride(self.payload_bytes)
    }

    /// Offset of a slot's header.
    #[must_use]
    pub fn offset(&self, slot: u32) -> u64 {
        PAGE as u64 + u64::from(slot) * self.stride() as u64
    }

    /// Bytes of the whole slab.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.offset(self.slots)
    }
}

fn stride(payload_bytes: usize) -> usize {
    PAGE + payload_bytes.next_multiple_of(PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn size_covers_headers_and_superblock() {
        let geometry = Geometry::fit(65536, Some(4096 + 2 * 69632), None).unwrap();
        assert_eq!((geometry.slots, geometry.stride(), geometry.total()), (2, 69632, 143_360));
        assert_eq!(Geometry::fit(65536, Some(4096 + 2 * 69632 - 1), None).unwrap().slots, 1);
    }

    #[test]
    fn too_small_says_what_is_needed() {
        let error = Geometry::fit(65536, Some(69632), None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "size is 69632 bytes, must be at least 73728: one slot of 69632 and a superblock of 4096"
        );
    }

    #[test]
    fn more_slots_than_the_size_holds_are_refused() {
        let error = Geometry::fit(4096, Some(4096 + 3 * 8192), Some(4)).unwrap_err();
        assert_eq!(error.to_string(), "asked for 4 slots of 8192 bytes, size is 28672 bytes and holds 3");
    }

    #[test]
    fn slots_alone_decide_the_size() {
        assert_eq!(Geometry::fit(1, None, Some(5)).unwrap().total(), 4096 + 5 * 8192);
    }

    #[test]
    fn neither_size_nor_slots_is_refused() {
        assert!(Geometry::fit(1, None, None).is_err());
        assert!(Geometry::fit(1, None, Some(0)).is_err());
        assert!(Geometry::fit(0, None, Some(1)).is_err());
        assert!(Geometry::fit(1, None, Some(1 << 32)).is_err());
    }

    proptest! {
        #[test]
        fn the_size_is_a_hard_cap(payload in 1usize..100_000, size in 1u64..100_000_000) {
            if let Ok(geometry) = Geometry::fit(payload, Some(size), None) {
                prop_assert!(geometry.total() <= size);
                prop_assert!(geometry.total() + geometry.stride() as u64 > size);
                prop_assert_eq!(geometry.offset(geometry.slots - 1) % PAGE as u64, 0);
            }
        }
    }
}
