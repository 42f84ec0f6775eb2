//! Orders moves within a cache so that no row is overwritten before it is read.

use std::collections::HashMap;

/// Moves that can be made one after the other.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Order {
    /// `[from, to]`: each row is read before it is written.
    pub(crate) steps: Vec<[u32; 2]>,
    /// One move of each ring (a->b->c->a): the steps overwrite its source, which is set aside before and put into its place
    /// behind them.
    pub(crate) closing: Vec<[u32; 2]>,
    /// Whether a row is both read and written.
    pub(crate) is_bound: bool,
}

impl Order {
    /// Orders moves that write no row twice; those of no consequence for one another keep the order they have.
    pub(crate) fn new(pairs: &[[u32; 2]]) -> Self {
        let mut moves = Moves::new(pairs);
        let is_bound = moves.pairs.iter().any(|[_, to]| moves.unread.contains_key(to));
        let mut order = Self { is_bound, ..Self::default() };
        if !is_bound {
            order.steps = moves.pairs;
            return order;
        }
        for first in 0..moves.pairs.len() {
            // A move that has become possible may make possible the one that overwrites what it has read.
            let mut next = Some(first);
            while let Some(at) = next.filter(|&at| moves.is_possible(at)) {
                order.steps.push(moves.pairs[at]);
                next = moves.make(at);
            }
        }
        for first in 0..moves.pairs.len() {
            if moves.made[first] {
                continue;
            }
            // What is left lies on rings: each row is read by the next of its ring alone.
            order.closing.push(moves.pairs[first]);
            let mut next = moves.make(first);
            while let Some(at) = next.filter(|&at| !moves.made[at]) {
                order.steps.push(moves.pairs[at]);
                next = moves.make(at);
            }
        }
        order
    }
}

/// What rows are to a set of moves.
struct Moves {
    /// Without those of a row onto itself.
    pairs: Vec<[u32; 2]>,
    made: Vec<bool>,
    /// The move that writes a row.
    writer: HashMap<u32, usize>,
    /// Moves that have yet to read a row, of those that are read at all.
    unread: HashMap<u32, usize>,
}

impl Moves {
    fn new(pairs: &[[u32; 2]]) -> Self {
        let pairs: Vec<_> = pairs.iter().copied().filter(|[from, to]| from != to).collect();
        let mut unread = HashMap::with_capacity(pairs.len());
        for [from, _] in &pairs {
            *unread.entry(*from).or_default() += 1;
        }
        let writer = pairs.iter().enumerate().map(|(at, &[_, to])| (to, at)).collect();
        Self { made: vec![false; pairs.len()], pairs, writer, unread }
    }

    fn is_possible(&self, at: usize) -> bool {
        !self.made[at] && self.unread.get(&self.pairs[at][1]).is_none_or(|&left| left == 0)
    }

    /// Makes a move; returns the one that writes what it has read, if nobody else has yet to read it.
    fn make(&mut self, at: usize) -> Option<usize> {
        self.made[at] = true;
        let from = self.pairs[at][0];
        let left = self.unread.get_mut(&from)?;
        *left -= 1;
        if *left == 0 { self.writer.get(&from).copied() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        /// No target repeats; sources do as they please.
        #[test]
        fn moves_are_as_if_all_were_read_first_and_little_is_set_aside(
            (targets, sources) in (1..24_u32).prop_flat_map(|rows| {
                let targets = prop::sample::subsequence((0..rows).collect::<Vec<_>>(), 0..=rows as usize).prop_shuffle();
                targets.prop_flat_map(move |targets| {
                    let any = prop::collection::vec(0..rows, targets.len()).boxed();
                    let rings = Just(targets.clone()).prop_shuffle().boxed();
                    let shifted = Just(targets.iter().map(|to| (to + 1) % rows).collect()).boxed();
                    (Just(targets), prop_oneof![any, rings, shifted])
                })
            })
        ) {
            let pairs: Vec<[u32; 2]> = sources.into_iter().zip(targets).map(|(from, to)| [from, to]).collect();
            let before: Vec<u32> = (100..124).collect();
            let mut wanted = before.clone();
            for &[from, to] in &pairs {
                wanted[to as usize] = before[from as usize];
            }
            let order = Order::new(&pairs);
            let mut rows = before.clone();
            for &[from, to] in &order.steps {
                rows[to as usize] = rows[from as usize];
            }
            for &[from, to] in &order.closing {
                rows[to as usize] = before[from as usize];
            }
            prop_assert_eq!(rows, wanted);
            let read: HashSet<u32> = order.steps.iter().chain(&order.closing).map(|pair| pair[0]).collect();
            prop_assert_eq!(order.is_bound, order.steps.iter().chain(&order.closing).any(|pair| read.contains(&pair[1])));
            prop_assert!(2 * order.closing.len() <= order.steps.len() + order.closing.len());
        }
    }

    #[test]
    fn free_moves_keep_their_order_and_rings_set_one_row_aside() {
        let free = [[5, 1], [9, 0], [5, 2]];
        assert_eq!(Order::new(&free), Order { steps: free.to_vec(), ..Order::default() });
        let ring = Order::new(&[[0, 1], [1, 2], [2, 0], [2, 7], [3, 3]]);
        assert_eq!((ring.steps, ring.closing), (vec![[2, 7], [2, 0], [1, 2]], vec![[0, 1]]));
    }
}
