//! Orders that keep every byte from being overwritten before it is read.

use super::check;
use crate::decision::{Kind, StepDecision};
use crate::error::{Error, Result};
use crate::id::Tier;

/// Orders moves within one tier, such as into holes: `waves` of pairs, each to be finished before the next begins. Within a
/// wave no block is both read and written. Waves begin at the returned places of the returned pairs.
///
/// # Errors
/// A block is out of range or written twice, or moves follow one another in a circle, which only an exchange can do.
pub fn order_moves(pairs: &[[u32; 2]], blocks: u32) -> Result<(Vec<[u32; 2]>, Vec<usize>)> {
    check(pairs, [blocks, blocks], false)?;
    let mut writers: Vec<(u32, usize)> = pairs.iter().enumerate().map(|(i, pair)| (pair[1], i)).collect();
    writers.sort_unstable();
    // At most one pair writes what a pair reads, and that one must wait for it.
    let writer = |block: u32| writers.binary_search_by_key(&block, |entry| entry.0).ok().map(|at| writers[at].1);
    let next: Vec<Option<usize>> = pairs.iter().map(|pair| writer(pair[0])).collect();
    let mut readers = vec![0u32; pairs.len()];
    next.iter().flatten().for_each(|&at| readers[at] += 1);
    let mut wave: Vec<usize> = (0..pairs.len()).filter(|&at| readers[at] == 0).collect();
    let (mut ordered, mut starts) = (Vec::with_capacity(pairs.len()), vec![0]);
    while !wave.is_empty() {
        ordered.extend(wave.iter().map(|&at| pairs[at]));
        starts.push(ordered.len());
        let mut following = Vec::new();
        for at in wave.iter().filter_map(|&at| next[at]) {
            readers[at] -= 1;
            if readers[at] == 0 {
                following.push(at);
            }
        }
        following.sort_unstable();
        wave = following;
    }
    match readers.iter().position(|&left| left > 0) {
        None => Ok((ordered, starts)),
        Some(at) => Err(Error::BadMapping {
            what: format!("block {} is moved to {} in a circle of moves: exchange them", pairs[at][0], pairs[at][1]),
        }),
    }
}

/// For each transfer of a decision the earlier ones that must have finished before it begins: those that write what it
/// reads or writes, or read what it writes. The others may run beside it.
#[must_use]
pub fn orders(decision: &StepDecision) -> Vec<Vec<usize>> {
    let touched: Vec<_> = decision.transfers.iter().map(|(kind, pairs)| touched(*kind, pairs)).collect();
    let before = |at: usize| {
        let (reads, writes): &(Vec<_>, Vec<_>) = &touched[at];
        let waits = |earlier: &usize| {
            let (read, written) = &touched[*earlier];
            meet(written, reads) || meet(written, writes) || meet(read, writes)
        };
        (0..at).filter(waits).collect()
    };
    (0..touched.len()).map(before).collect()
}

type Place = (Tier, u32);

fn touched(kind: Kind, pairs: &crate::decision::Pairs) -> (Vec<Place>, Vec<Place>) {
    let column = |tier: Tier, at: usize| pairs.ids.iter().map(move |pair| (tier, pair[at]));
    let mut reads: Vec<_> = column(pairs.src, 0).collect();
    let mut writes: Vec<_> = column(pairs.dst, 1).collect();
    if kind == Kind::Exchange {
        reads.extend(column(pairs.dst, 1));
        writes.extend(column(pairs.src, 0));
    }
    reads.sort_unstable();
    writes.sort_unstable();
    (reads, writes)
}

/// Whether two sorted lists share an entry.
fn meet(one: &[Place], other: &[Place]) -> bool {
    let (short, long) = if one.len() <= other.len() { (one, other) } else { (other, one) };
    short.iter().any(|place| long.binary_search(place).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decision::Pairs;
    use crate::id::TicketId;
    use proptest::prelude::*;

    #[test]
    fn a_move_waits_for_those_that_read_its_hole() {
        let (ordered, starts) = order_moves(&[[3, 2], [2, 1], [5, 6], [1, 0]], 8).unwrap();
        assert_eq!(ordered, [[5, 6], [1, 0], [2, 1], [3, 2]]);
        assert_eq!(starts, [0, 2, 3, 4]);
        assert_eq!(order_moves(&[], 8).unwrap(), (Vec::new(), vec![0]));
    }

    #[test]
    fn circles_and_repeats_are_refused() {
        let message = order_moves(&[[0, 1], [1, 2], [2, 0]], 8).unwrap_err().to_string();
        assert!(message.contains("block 0 is moved to 1 in a circle"), "{message}");
        assert!(order_moves(&[[4, 4]], 8).is_err());
        assert!(order_moves(&[[4, 5], [3, 5]], 8).is_err());
        assert!(order_moves(&[[4, 8]], 8).is_err());
    }

    #[test]
    fn transfers_wait_only_for_those_that_touch_their_blocks() {
        let [d, h, _] = Tier::ALL;
        let pairs = |src, dst, ids: &[[u32; 2]]| Pairs { src, dst, ids: ids.to_vec() };
        let transfers = vec![
            (Kind::SwapOut, pairs(d, h, &[[1, 1], [2, 2]])),
            (Kind::SwapIn, pairs(h, d, &[[7, 2]])),
            (Kind::Copy, pairs(d, d, &[[2, 9]])),
            (Kind::Exchange, pairs(d, d, &[[5, 9]])),
        ];
        let decision = StepDecision { ticket: TicketId(1), after: Vec::new(), transfers };
        assert_eq!(orders(&decision), [vec![], vec![0], vec![1], vec![2]]);
    }

    proptest! {
        #[test]
        fn waves_move_every_block_as_if_all_were_read_first(
            list in prop::collection::vec((0u32..12, 0u32..12).prop_map(|(a, b)| [a, b]), 0..12),
        ) {
            let mut seen = [false; 12];
            let pairs: Vec<_> =
                list.into_iter().filter(|pair| !std::mem::replace(&mut seen[pair[1] as usize], true)).collect();
            let Ok((ordered, starts)) = order_moves(&pairs, 12) else { return Ok(()) };
            let mut blocks: Vec<u32> = (0..12).collect();
            for wave in starts.windows(2) {
                let wave = &ordered[wave[0]..wave[1]];
                prop_assert!(!wave.iter().any(|a| wave.iter().any(|b| a[0] == b[1])));
                for pair in wave {
                    blocks[pair[1] as usize] = blocks[pair[0] as usize];
                }
            }
            let mut wanted: Vec<u32> = (0..12).collect();
            for pair in &pairs {
                wanted[pair[1] as usize] = pair[0];
            }
            prop_assert_eq!(blocks, wanted);
        }
    }
}
