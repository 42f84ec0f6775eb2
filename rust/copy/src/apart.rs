//! What makes a mapping sound: no byte is written twice, or read by one pair and written by another.

use crate::copy::CopyError;
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

/// Checks that no row is named twice in one place of the pairs; returns the rows, in order.
pub(crate) fn check_targets(pairs: &[[u32; 2]]) -> Result<Vec<u32>, CopyError> {
    let mut rows = reserved(pairs.len())?;
    rows.extend(pairs.iter().map(|pair| pair[1]));
    sort_unique(rows, |row| {
        let mut named = pairs.iter().enumerate().filter(|(_, pair)| pair[1] == row).map(|(at, _)| at);
        [(); 2].map(|()| named.next().unwrap_or_default())
    })
}

/// Checks that no row is named twice, in either place.
pub(crate) fn check_exchange(pairs: &[[u32; 2]]) -> Result<(), CopyError> {
    let mut rows = reserved(pairs.len().saturating_mul(2))?;
    rows.extend_from_slice(pairs.as_flattened());
    sort_unique(rows, |row| {
        let mut named = pairs.iter().enumerate().flat_map(|(at, pair)| pair.map(|named| (named == row).then_some(at)));
        [(); 2].map(|()| named.by_ref().flatten().next().unwrap_or_default())
    })
    .map(drop)
}

/// Checks that no row of `pairs` is both read and written, where the rows `written` are.
pub(crate) fn check_in_place(pairs: &[[u32; 2]], written: &[u32]) -> Result<(), CopyError> {
    let both = pairs.iter().enumerate().find(|(_, [from, _])| written.binary_search(from).is_ok());
    match both {
        Some((pair, &[row, _])) => Err(CopyError::ReadAndWritten { pair, row }),
        None => Ok(()),
    }
}

/// Sorts rows; fails if one is there twice, with the two pairs that `named` finds for it.
fn sort_unique(mut rows: Vec<u32>, named: impl Fn(u32) -> [usize; 2]) -> Result<Vec<u32>, CopyError> {
    rows.sort_unstable();
    match rows.windows(2).find(|two| two[0] == two[1]) {
        Some(&[row, _]) => {
            let [first, second] = named(row);
            Err(CopyError::Repeated { row, first, second })
        }
        _ => Ok(rows),
    }
}

/// An empty vector with room for `len` items.
pub(crate) fn reserved<T>(len: usize) -> Result<Vec<T>, CopyError> {
    let mut items = Vec::new();
    let bytes = len.saturating_mul(size_of::<T>());
    items.try_reserve_exact(len).map_err(|_| CopyError::OutOfMemory { bytes })?;
    Ok(items)
}
