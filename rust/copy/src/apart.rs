//! Checks that a mapping is sound: no byte is written twice, or read by one pair and written by another.

use crate::error::CopyError;
use crate::rows::Rows;

/// Checks that no two caches that are written share memory: they follow one another, or their rows alternate within one
/// stride, as those of layers in one tensor do.
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

/// Checks that no cache that is read shares memory with one that is written, unless each is copied within itself; returns
/// whether they are.
pub(crate) fn check_lists(sources: &[Rows], targets: &[Rows]) -> Result<bool, CopyError> {
    if sources.len() == targets.len()
        && sources.iter().zip(targets).all(|(source, target)| source.are_those_of(*target))
    {
        return Ok(true);
    }
    let mut all = reserved(sources.len() + targets.len())?;
    for (is_written, caches) in [(false, sources), (true, targets)] {
        let extents = caches.iter().enumerate().filter_map(|(index, rows)| Some((rows.extent()?, is_written, index)));
        all.extend(extents);
    }
    all.sort_unstable();
    // How far those go that begin before, of either list.
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
    Ok(false)
}

/// Rows that a call writes.
pub(crate) enum Written {
    /// One bit for each row that there is.
    Bits(Vec<u64>),
    /// The rows in order, where they are few among many.
    Sorted(Vec<u32>),
}

/// So many rows are no dearer to clear than one is to sort.
const ROWS_PER_SORTED: usize = 4096;

impl Written {
    /// Takes rows below `rows`; of one that is there twice the inner error.
    fn new(rows: usize, named: impl ExactSizeIterator<Item = u32>) -> Result<Result<Self, u32>, CopyError> {
        if rows / ROWS_PER_SORTED > named.len() {
            let mut sorted = reserved(named.len())?;
            sorted.extend(named);
            sorted.sort_unstable();
            let twice = sorted.windows(2).find(|two| two[0] == two[1]).map(|two| two[0]);
            return Ok(twice.map_or(Ok(Self::Sorted(sorted)), Err));
        }
        let mut bits = reserved(rows.div_ceil(64))?;
        bits.resize(rows.div_ceil(64), 0_u64);
        for row in named {
            let (word, bit) = (&mut bits[row as usize / 64], 1 << (row % 64));
            if *word & bit != 0 {
                return Ok(Err(row));
            }
            *word |= bit;
        }
        Ok(Ok(Self::Bits(bits)))
    }

    fn has(&self, row: u32) -> bool {
        match self {
            Self::Bits(bits) => bits.get(row as usize / 64).is_some_and(|word| word & 1 << (row % 64) != 0),
            Self::Sorted(rows) => rows.binary_search(&row).is_ok(),
        }
    }
}

/// Checks that no row of the caches is named twice in the second place of the pairs, which name rows that exist.
pub(crate) fn check_targets(pairs: &[[u32; 2]], caches: &[Rows]) -> Result<Written, CopyError> {
    Written::new(most(caches), pairs.iter().map(|pair| pair[1]))?.map_err(|row| {
        let mut named = pairs.iter().enumerate().filter(|(_, pair)| pair[1] == row).map(|(at, _)| at);
        let [first, second] = [(); 2].map(|()| named.next().unwrap_or_default());
        CopyError::Repeated { row, first, second }
    })
}

/// Checks that no row of the caches is named twice, in either place of the pairs, which name rows that exist.
pub(crate) fn check_exchange(pairs: &[[u32; 2]], caches: &[Rows]) -> Result<(), CopyError> {
    let written = Written::new(most(caches), pairs.as_flattened().iter().copied())?;
    written.map(drop).map_err(|row| {
        let named = pairs.as_flattened().iter().enumerate().filter(|&(_, &named)| named == row);
        let mut named = named.map(|(at, _)| at / 2);
        let [first, second] = [(); 2].map(|()| named.next().unwrap_or_default());
        CopyError::Repeated { row, first, second }
    })
}

/// Checks that no row of `pairs` is both read and written.
pub(crate) fn check_in_place(pairs: &[[u32; 2]], written: &Written) -> Result<(), CopyError> {
    match pairs.iter().enumerate().find(|(_, [from, _])| written.has(*from)) {
        Some((pair, &[row, _])) => Err(CopyError::ReadAndWritten { pair, row }),
        None => Ok(()),
    }
}

/// Rows of the cache that has the most.
fn most(caches: &[Rows]) -> usize {
    caches.iter().map(|rows| rows.count()).max().unwrap_or_default()
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

    /// Rows at an address that nobody uses: `(start, count, width, gap)`.
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
        /// What is let through has no byte in common, whatever it is.
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
        fn lists_that_share_a_byte_are_refused_unless_they_are_one(
            read in prop::collection::vec(any_rows(), 0..4),
            written in prop::collection::vec(any_rows(), 0..4),
        ) {
            let used: Vec<_> = read.iter().copied().flat_map(bytes).collect();
            let shared = written.iter().copied().flat_map(bytes).any(|byte| used.contains(&byte));
            let [sources, targets] = [&read, &written].map(|list| list.iter().copied().map(rows).collect::<Vec<_>>());
            match check_lists(&sources, &targets) {
                Ok(false) => prop_assert!(!shared),
                Ok(true) => prop_assert!(read.iter().zip(&written).all(|(a, b)| (a.0, a.2, a.3) == (b.0, b.2, b.3))),
                Err(_) => {}
            }
            prop_assert!(check_lists(&sources, &sources).unwrap());
        }

        #[test]
        fn a_row_that_is_named_twice_is_found(
            pairs in prop::collection::vec([0..12_u32, 0..12_u32], 0..8),
            count in prop_oneof![Just(12), Just(1 << 20)],
        ) {
            let caches = [rows((0, count, 4, 0))];
            let targets = |row| pairs.iter().filter(|pair| pair[1] == row).count();
            let named = |row| pairs.as_flattened().iter().filter(|&&named| named == row).count();
            prop_assert_eq!(check_targets(&pairs, &caches).is_ok(), (0..12).all(|row| targets(row) < 2));
            prop_assert_eq!(check_exchange(&pairs, &caches).is_ok(), (0..12).all(|row| named(row) < 2));
            if let Ok(written) = check_targets(&pairs, &caches) {
                let both = pairs.iter().any(|pair| targets(pair[0]) > 0);
                prop_assert_eq!(check_in_place(&pairs, &written).is_err(), both);
            }
        }
    }

    #[test]
    fn layers_of_one_tensor_and_of_tensors_side_by_side_are_apart() {
        // [blocks, 2 layers, K and V]: a row of 4 bytes of each 16.
        let woven: Vec<_> = [4, 12, 0, 8].map(|start| rows((start, 5, 4, 12))).into();
        assert_eq!(check_apart(&woven), Ok(()));
        let beside: Vec<_> = [40, 0, 80].map(|start| rows((start, 5, 8, 0))).into();
        assert_eq!(check_apart(&beside), Ok(()));
        assert_eq!(check_lists(&woven, &[rows((80, 5, 4, 12))]), Ok(false));
        assert_eq!(
            check_lists(&woven, &[rows((79, 5, 4, 12))]),
            Err(CopyError::ReadAndWrittenCaches { read: 1, written: 0 })
        );
        let shared = Err(CopyError::Shared { one: 0, other: 1 });
        assert_eq!(check_apart(&[rows((0, 5, 4, 12)), rows((3, 5, 4, 12))]), shared);
        assert_eq!(check_apart(&[rows((0, 5, 4, 12)), rows((13, 5, 4, 12))]), shared);
        assert_eq!(check_apart(&[rows((0, 5, 4, 12)), rows((4, 5, 4, 11))]), shared);
    }

    #[test]
    fn the_pairs_that_name_a_row_twice_are_told() {
        let caches = [rows((0, 8, 4, 0))];
        let repeated = |row, first, second| Some(CopyError::Repeated { row, first, second });
        assert_eq!(check_targets(&[[0, 4], [1, 2], [4, 4]], &caches).err(), repeated(4, 0, 2));
        assert_eq!(check_exchange(&[[0, 1], [2, 3], [3, 5]], &caches).err(), repeated(3, 1, 2));
        assert_eq!(check_exchange(&[[0, 1], [2, 2]], &caches).err(), repeated(2, 1, 1));
        let both = CopyError::ReadAndWritten { pair: 1, row: 7 };
        let written = check_targets(&[[0, 7], [7, 1]], &caches).unwrap();
        assert_eq!(check_in_place(&[[0, 7], [7, 1]], &written), Err(both));
        assert_eq!(both.to_string(), "pair 1 reads row 7, which is written too");
    }
}
