//! Checks that caches share no memory: no byte is written twice, or read by one pair and written by another.

use crate::error::CopyError;
use crate::rows::Rows;

/// Checks that no two written caches share memory. Allowed are caches one after the other, and caches whose rows
/// interleave within one stride, like layers in one tensor.
pub(crate) fn check_apart(caches: &[Rows]) -> Result<(), CopyError> {
    let mut all = reserved(caches.len())?;
    all.extend(caches.iter().enumerate().filter_map(|(index, rows)| Some((rows.extent()?, index))));
    all.sort_unstable();
    let ([mut base, mut period, mut row_end, mut reach], mut last) = ([0; 4], 0);
    for ([start, end], index) in all {
        let (width, stride) = (caches[index].width(), caches[index].stride());
        if start >= reach {
            (base, period, reach) = (start, stride, end);
        } else if stride != period || start < row_end || start.saturating_add(width) > base.saturating_add(period) {
            return Err(CopyError::Shared { one: last, other: index });
        }
        (row_end, reach, last) = (start.saturating_add(width), reach.max(end), index);
    }
    Ok(())
}

/// Checks that no cache to read shares memory with one to write.
pub(crate) fn check_lists(sources: &[Rows], targets: &[Rows]) -> Result<(), CopyError> {
    let mut all = reserved(sources.len() + targets.len())?;
    for (is_written, caches) in [(false, sources), (true, targets)] {
        let extents = caches.iter().enumerate().filter_map(|(index, rows)| Some((rows.extent()?, is_written, index)));
        all.extend(extents);
    }
    all.sort_unstable();
    // Where the caches seen so far end, in each list.
    let mut reach = [(0, 0); 2];
    for ([start, end], is_written, index) in all {
        let (far, other) = reach[usize::from(!is_written)];
        if start < far {
            let (read, written) = if is_written { (other, index) } else { (index, other) };
            return Err(CopyError::ReadAndWrittenCaches { read, written });
        }
        let own = &mut reach[usize::from(is_written)];
        *own = (*own).max((end, index));
    }
    Ok(())
}

/// An empty vector with room for `len` items.
pub(crate) fn reserved<T>(len: usize) -> Result<Vec<T>, CopyError> {
    let mut items = Vec::new();
    let bytes = len.saturating_mul(size_of::<T>());
    items.try_reserve_exact(len).map_err(|_| CopyError::OutOfMemory { bytes })?;
    Ok(items)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BASE: usize = 1 << 20;

    /// Rows at an unused address: `(start, count, width, gap)`.
    fn rows((start, count, width, gap): (usize, usize, usize, usize)) -> Rows {
        // SAFETY: nothing here touches their memory.
        unsafe { Rows::new(std::ptr::without_provenance_mut(BASE + start), count, width, width + gap) }
    }

    fn bytes((start, count, width, gap): (usize, usize, usize, usize)) -> impl Iterator<Item = usize> {
        (0..count).flat_map(move |row| (0..width).map(move |byte| start + row * (width + gap) + byte))
    }

    fn any_rows() -> impl Strategy<Value = (usize, usize, usize, usize)> {
        (0..60_usize, 0..4_usize, 0..8_usize, prop_oneof![Just(0), 0..8_usize])
    }

    proptest! {
        /// Caches that pass the check have no byte in common.
        #[test]
        fn caches_that_share_a_byte_are_refused(caches in prop::collection::vec(any_rows(), 0..5)) {
            let mut all: Vec<_> = caches.iter().copied().flat_map(bytes).collect();
            let total = all.len();
            all.sort_unstable();
            all.dedup();
            let caches: Vec<_> = caches.into_iter().map(rows).collect();
            prop_assert!(check_apart(&caches).is_err() || all.len() == total);
        }

        #[test]
        fn lists_that_share_a_byte_are_refused(
            read in prop::collection::vec(any_rows(), 0..4),
            written in prop::collection::vec(any_rows(), 0..4),
        ) {
            let used: Vec<_> = read.iter().copied().flat_map(bytes).collect();
            let shared = written.iter().copied().flat_map(bytes).any(|byte| used.contains(&byte));
            let [sources, targets] = [&read, &written].map(|list| list.iter().copied().map(rows).collect::<Vec<_>>());
            prop_assert!(check_lists(&sources, &targets).is_err() || !shared);
        }
    }

    #[test]
    fn layers_of_one_tensor_and_of_tensors_side_by_side_are_apart() {
        // [blocks, 2 layers, K and V]: a row of 4 bytes of each 16.
        let woven: Vec<_> = [4, 12, 0, 8].map(|start| rows((start, 5, 4, 12))).into();
        assert_eq!(check_apart(&woven), Ok(()));
        let beside: Vec<_> = [40, 0, 80].map(|start| rows((start, 5, 8, 0))).into();
        assert_eq!(check_apart(&beside), Ok(()));
        assert_eq!(check_lists(&woven, &[rows((80, 5, 4, 12))]), Ok(()));
        assert_eq!(
            check_lists(&woven, &[rows((79, 5, 4, 12))]),
            Err(CopyError::ReadAndWrittenCaches { read: 1, written: 0 })
        );
        let shared = Err(CopyError::Shared { one: 0, other: 1 });
        assert_eq!(check_apart(&[rows((0, 5, 4, 12)), rows((3, 5, 4, 12))]), shared);
        assert_eq!(check_apart(&[rows((0, 5, 4, 12)), rows((13, 5, 4, 12))]), shared);
        assert_eq!(check_apart(&[rows((0, 5, 4, 12)), rows((4, 5, 4, 11))]), shared);
    }
}
