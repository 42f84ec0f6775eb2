//! Mappings of blocks: checked once, on entry, and put into a safe execution order.

use crate::error::CopyError;

/// What a mapping does to its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MappingRule {
    /// Copies from one cache to another: no block is written twice.
    Swap,
    /// Copies within a cache: in addition, no block is both read and written.
    Copy,
    /// Moves within a cache, as if all blocks were read before any is written: chains and rings are allowed.
    Move,
    /// Swaps the two blocks of each pair: no block is named twice.
    Exchange,
}

impl MappingRule {
    /// All rules.
    pub const ALL: [Self; 4] = [Self::Swap, Self::Copy, Self::Move, Self::Exchange];

    /// Its name: "swap", "copy", "move" or "exchange".
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Swap => "swap",
            Self::Copy => "copy",
            Self::Move => "move",
            Self::Exchange => "exchange",
        }
    }
}

/// As a step's target: set its source aside. As a step's source: write the row that was set aside.
pub const ASIDE: u32 = u32::MAX;

/// Longer rings are split into shorter ones, since a launch on a device holds a limited number of steps.
pub const MAX_RING: usize = 512;

/// A pair of two such ids is padding in an exchange.
const PADDING: i64 = -1;

/// Steps in groups. The steps of a group run one after the other, since each may overwrite the block that the previous
/// one has read. Groups have no block in common.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Steps {
    /// `[from, to]`, of which one may be [`ASIDE`].
    pub steps: Vec<[u32; 2]>,
    /// Where each group begins, and the number of steps.
    pub starts: Vec<usize>,
}

/// Pairs `[from, to]` of blocks that follow a [`MappingRule`], ordered by target.
#[derive(Debug, Clone)]
pub struct Mapping {
    rule: MappingRule,
    pairs: Vec<[u32; 2]>,
    reach: [usize; 2],
    /// The order of moves that depend on one another.
    order: Option<Steps>,
}

impl Mapping {
    /// Checks pairs against the numbers of blocks that can be read and written. Drops the padding of an exchange and
    /// moves of a block onto itself.
    ///
    /// # Errors
    /// An id is out of range, or the pairs break the rule.
    pub fn new(entries: &[[i64; 2]], blocks: [usize; 2], rule: MappingRule) -> Result<Self, CopyError> {
        let mut pairs = Vec::with_capacity(entries.len());
        let mut reach = [0; 2];
        for (entry, &ids) in entries.iter().enumerate() {
            if rule == MappingRule::Exchange && ids == [PADDING; 2] {
                continue;
            }
            let mut pair = [0; 2];
            for side in [0, 1] {
                // ASIDE is not a block.
                let found = u32::try_from(ids[side]).ok().filter(|&id| id < ASIDE && (id as usize) < blocks[side]);
                let verb = if rule == MappingRule::Exchange { "exchanged" } else { ["read", "written"][side] };
                let (block, blocks) = (ids[side], blocks[side]);
                pair[side] = found.ok_or(CopyError::OutOfRange { entry, block, verb, blocks })?;
                reach[side] = reach[side].max(pair[side] as usize + 1);
            }
            pairs.push(pair);
        }
        if rule == MappingRule::Exchange {
            check_named_once(entries, &pairs)?;
            return Ok(Self { rule, pairs, reach, order: None });
        }
        if !pairs.is_sorted_by(|one, other| one[1] < other[1]) {
            pairs.sort_unstable_by_key(|pair| pair[1]);
            if let Some(two) = pairs.windows(2).find(|two| two[0][1] == two[1][1]) {
                return Err(repeated(entries, two[0][1], "written", |ids| &ids[1..]));
            }
        }
        if rule == MappingRule::Copy {
            check_unread(entries, &pairs)?;
        }
        let mut mapping = Self { rule, pairs, reach, order: None };
        if rule == MappingRule::Move {
            mapping.pairs.retain(|[from, to]| from != to);
            mapping.order = order(&mapping.pairs);
        }
        Ok(mapping)
    }

    /// Its rule.
    #[must_use]
    pub const fn rule(&self) -> MappingRule {
        self.rule
    }

    /// The pairs, sorted by target, which merges into the fewest runs. Those of an exchange keep their order.
    #[must_use]
    pub fn pairs(&self) -> &[[u32; 2]] {
        &self.pairs
    }

    /// Required numbers of blocks to read and to write: one more than the highest id.
    #[must_use]
    pub const fn reach(&self) -> [usize; 2] {
        self.reach
    }

    /// The order of moves that depend on one another; `None` if any order will do.
    #[must_use]
    pub const fn order(&self) -> Option<&Steps> {
        self.order.as_ref()
    }

    /// The whole mapping as steps, even if any order will do.
    #[must_use]
    pub fn steps(&self) -> Steps {
        match &self.order {
            Some(order) => order.clone(),
            None if self.rule == MappingRule::Exchange => Steps {
                steps: self
                    .pairs
                    .iter()
                    .flat_map(|&[one, other]| [[one, ASIDE], [other, one], [ASIDE, other]])
                    .collect(),
                starts: (0..=self.pairs.len()).map(|pair| 3 * pair).collect(),
            },
            None => Steps { steps: self.pairs.clone(), starts: (0..=self.pairs.len()).collect() },
        }
    }

    /// Splits into mappings of at most `most` pairs, to carry out one after the other; moves that depend on one another
    /// stay together.
    #[must_use]
    pub fn split(&self, most: usize) -> Vec<Self> {
        if self.order.is_some() || self.pairs.len() <= most.max(1) {
            return vec![self.clone()];
        }
        let part = |pairs: &[[u32; 2]]| {
            let reach = [0, 1].map(|side| pairs.iter().map(|pair| pair[side] as usize + 1).max().unwrap_or_default());
            Self { rule: self.rule, pairs: pairs.to_vec(), reach, order: None }
        };
        self.pairs.chunks(most.max(1)).map(part).collect()
    }
}

/// The error for a block that is named twice, with the first two entries that name it.
fn repeated(entries: &[[i64; 2]], block: u32, verb: &'static str, ids_of: fn(&[i64; 2]) -> &[i64]) -> CopyError {
    let named = |(entry, ids)| ids_of(ids).iter().filter(|&&id| id == i64::from(block)).map(move |_| entry);
    let mut both = entries.iter().enumerate().flat_map(named);
    let [first, second] = [(); 2].map(|()| both.next().unwrap_or_default());
    CopyError::Repeated { block, verb, first, second }
}

/// Checks that the pairs of an exchange name each block at most once.
fn check_named_once(entries: &[[i64; 2]], pairs: &[[u32; 2]]) -> Result<(), CopyError> {
    let mut named = pairs.as_flattened().to_vec();
    named.sort_unstable();
    match named.windows(2).find(|two| two[0] == two[1]) {
        Some(two) => Err(repeated(entries, two[0], "exchanged", |ids| ids)),
        None => Ok(()),
    }
}

/// Checks that pairs ordered by target read no block that they write.
fn check_unread(entries: &[[i64; 2]], pairs: &[[u32; 2]]) -> Result<(), CopyError> {
    if pairs.iter().all(|&[from, _]| writer(pairs, from).is_none()) {
        return Ok(());
    }
    let both = |ids: &[i64; 2]| u32::try_from(ids[0]).ok().filter(|&from| writer(pairs, from).is_some());
    let found = entries.iter().enumerate().find_map(|(entry, ids)| Some((entry, both(ids)?)));
    let (entry, block) = found.unwrap_or_default();
    Err(CopyError::ReadAndWritten { entry, block })
}

/// The index of the pair that writes a block, among pairs ordered by target.
fn writer(pairs: &[[u32; 2]], block: u32) -> Option<usize> {
    let [first, last] = [pairs.first()?[1], pairs.last()?[1]];
    // Most mappings read and write separate ranges, or write adjacent blocks.
    if !(first..=last).contains(&block) {
        return None;
    }
    if (last - first) as usize + 1 == pairs.len() {
        return Some((block - first) as usize);
    }
    pairs.binary_search_by_key(&block, |pair| pair[1]).ok()
}

/// Orders moves so that no block is overwritten before it is read; `None` if no block is both read and written.
fn order(pairs: &[[u32; 2]]) -> Option<Steps> {
    let overwrites: Vec<_> = pairs.iter().map(|&[from, _]| writer(pairs, from)).collect();
    if overwrites.iter().all(Option::is_none) {
        return None;
    }
    let mut moves = Moves::new(pairs, overwrites);
    let mut made = Vec::with_capacity(pairs.len());
    for first in 0..pairs.len() {
        // A move that becomes possible may unblock the move that overwrites its source.
        let mut next = Some(first);
        while let Some(at) = next.filter(|&at| !moves.made[at] && moves.unread[at] == 0) {
            made.push((at, false));
            next = moves.make(at);
        }
    }
    // The remaining moves form rings, each of which is handled at once, represented by any of its moves.
    for first in 0..pairs.len() {
        if moves.made[first] {
            continue;
        }
        made.push((first, true));
        let mut next = Some(first);
        while let Some(at) = next.filter(|&at| !moves.made[at]) {
            next = moves.make(at);
        }
    }
    made.sort_by_key(|&(at, _)| moves.root(at));
    let mut order = Steps::default();
    let mut group = None;
    for (at, is_ring) in made {
        let root = moves.root(at);
        if group.replace(root) != Some(root) {
            order.starts.push(order.steps.len());
        }
        if is_ring { moves.add_ring(at, &mut order.steps) } else { order.steps.push(pairs[at]) }
    }
    order.starts.push(order.steps.len());
    Some(order)
}

/// Dependencies between moves, by their index in the list.
struct Moves<'a> {
    pairs: &'a [[u32; 2]],
    /// For each move, the move that overwrites its source.
    overwrites: Vec<Option<usize>>,
    /// For each move, the number of moves that have yet to read its target.
    unread: Vec<u32>,
    made: Vec<bool>,
    /// For each move, another move of its group; a group's root points to itself.
    parent: Vec<usize>,
}

impl<'a> Moves<'a> {
    fn new(pairs: &'a [[u32; 2]], overwrites: Vec<Option<usize>>) -> Self {
        let (unread, made, parent) = (vec![0; pairs.len()], vec![false; pairs.len()], (0..pairs.len()).collect());
        let mut moves = Self { pairs, overwrites, unread, made, parent };
        for at in 0..pairs.len() {
            if let Some(writer) = moves.overwrites[at] {
                moves.unread[writer] += 1;
                let [one, other] = [moves.root(at), moves.root(writer)];
                moves.parent[one] = other;
            }
        }
        moves
    }

    /// The root move of a move's group.
    fn root(&mut self, mut at: usize) -> usize {
        while self.parent[at] != at {
            self.parent[at] = self.parent[self.parent[at]];
            at = self.parent[at];
        }
        at
    }

    /// Performs a move; returns the move that overwrites its source, unless other moves have yet to read that source.
    fn make(&mut self, at: usize) -> Option<usize> {
        self.made[at] = true;
        let writer = self.overwrites[at]?;
        self.unread[writer] -= 1;
        (self.unread[writer] == 0).then_some(writer)
    }

    /// Adds the steps of the ring that a move lies on. A long ring becomes short ones that share the first block: after
    /// the ring c0 -> ... -> ck -> c0, block c0 holds what ck had.
    fn add_ring(&self, at: usize, steps: &mut Vec<[u32; 2]>) {
        let mut blocks = vec![self.pairs[at][1]];
        let mut next = self.overwrites[at];
        while let Some(writer) = next.filter(|&writer| writer != at) {
            blocks.push(self.pairs[writer][1]);
            next = self.overwrites[writer];
        }
        // From each block to the one that it moves to.
        blocks.reverse();
        let start = blocks[0];
        for part in blocks[1..].chunks(MAX_RING - 1) {
            let [first, last] = [part[0], part[part.len() - 1]];
            steps.push([last, ASIDE]);
            steps.extend(part.windows(2).rev().map(|two| [two[0], two[1]]));
            steps.push([start, first]);
            steps.push([ASIDE, start]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn distinct(ids: impl IntoIterator<Item = i64>) -> bool {
        let mut seen = HashSet::new();
        ids.into_iter().all(|id| seen.insert(id))
    }

    /// The rules, stated independently.
    fn is_sound(entries: &[[i64; 2]], blocks: [usize; 2], rule: MappingRule) -> bool {
        let padding = |ids: &&[i64; 2]| rule == MappingRule::Exchange && **ids == [-1, -1];
        let kept: Vec<_> = entries.iter().filter(|ids| !padding(ids)).collect();
        let inside = |id: i64, blocks| usize::try_from(id).is_ok_and(|id| id < blocks);
        kept.iter().all(|ids| inside(ids[0], blocks[0]) && inside(ids[1], blocks[1]))
            && match rule {
                MappingRule::Swap | MappingRule::Move => distinct(kept.iter().map(|ids| ids[1])),
                MappingRule::Copy => {
                    distinct(kept.iter().map(|ids| ids[1]))
                        && kept.iter().all(|ids| kept.iter().all(|other| other[1] != ids[0]))
                }
                MappingRule::Exchange => distinct(kept.iter().flat_map(|ids| **ids)),
            }
    }

    /// Runs steps over blocks that hold their own numbers, group by group in the given order.
    fn run(plan: &Steps, blocks: usize, backwards: bool) -> Vec<usize> {
        let mut rows: Vec<_> = (0..blocks).collect();
        let mut groups: Vec<_> = plan.starts.windows(2).map(|two| two[0]..two[1]).collect();
        assert_eq!((plan.starts[0], plan.starts[plan.starts.len() - 1]), (0, plan.steps.len()));
        if backwards {
            groups.reverse();
        }
        for group in groups {
            let mut aside = None;
            for &[from, to] in &plan.steps[group] {
                let value = if from == ASIDE { aside.take().unwrap() } else { rows[from as usize] };
                if to == ASIDE { assert!(aside.replace(value).is_none()) } else { rows[to as usize] = value }
            }
            assert!(aside.is_none());
        }
        rows
    }

    fn wanted(entries: &[[i64; 2]], blocks: usize, rule: MappingRule) -> Vec<usize> {
        let mut rows: Vec<_> = (0..blocks).collect();
        for ids in entries {
            if let [Ok(from), Ok(to)] = ids.map(usize::try_from) {
                rows[to] = from;
                if rule == MappingRule::Exchange {
                    rows[from] = to;
                }
            }
        }
        rows
    }

    fn any_entries() -> impl Strategy<Value = Vec<[i64; 2]>> {
        let edge = prop_oneof![Just(i64::MIN), Just(i64::MAX), Just(i64::from(u32::MAX)), Just(1 << 32), -2..12_i64];
        let id = prop_oneof![20 => 0..8_i64, 1 => edge];
        let pair = prop_oneof![20 => [id.clone(), id].boxed(), 1 => Just([-1, -1]).boxed()];
        prop::collection::vec(pair, 0..9)
    }

    /// Chains, rings and forks among a number of blocks, and some padding.
    fn sound_entries() -> impl Strategy<Value = (usize, Vec<[i64; 2]>)> {
        (1..24_i64).prop_flat_map(|blocks| {
            let all = (0..blocks).collect::<Vec<_>>();
            let targets = prop::sample::subsequence(all, 0..=usize::try_from(blocks).unwrap()).prop_shuffle();
            targets.prop_flat_map(move |targets| {
                let any = prop::collection::vec(0..blocks, targets.len()).boxed();
                let rings = Just(targets.clone()).prop_shuffle().boxed();
                let shifted = Just(targets.iter().map(|to| (to + 1) % blocks).collect()).boxed();
                let sources = prop_oneof![any, rings, shifted];
                sources.prop_map(move |sources| {
                    let pairs = sources.into_iter().zip(&targets).map(|(from, &to)| [from, to]).collect();
                    (usize::try_from(blocks).unwrap(), pairs)
                })
            })
        })
    }

    proptest! {
        #[test]
        fn a_mapping_passes_exactly_if_it_is_sound(entries in any_entries(), read in 0..9_usize, written in 0..9_usize) {
            for rule in MappingRule::ALL {
                let blocks = if matches!(rule, MappingRule::Swap) { [read, written] } else { [read; 2] };
                let made = Mapping::new(&entries, blocks, rule);
                prop_assert_eq!(made.is_ok(), is_sound(&entries, blocks, rule), "{:?}: {:?}", rule, made);
            }
        }

        #[test]
        fn steps_have_the_effect_of_reading_all_first((blocks, entries) in sound_entries(), backwards in any::<bool>()) {
            for rule in MappingRule::ALL {
                let Ok(mapping) = Mapping::new(&entries, [blocks; 2], rule) else { continue };
                for &[from, to] in mapping.pairs() {
                    prop_assert!((from as usize) < mapping.reach()[0] && (to as usize) < mapping.reach()[1]);
                }
                prop_assert!(rule == MappingRule::Exchange || mapping.pairs().is_sorted_by_key(|pair| pair[1]));
                if rule == MappingRule::Swap {
                    prop_assert_eq!(mapping.pairs().len(), entries.len());
                    continue;
                }
                prop_assert_eq!(run(&mapping.steps(), blocks, backwards), wanted(&entries, blocks, rule));
            }
        }

        /// Pairs from the two halves of a shuffled list, any number of them.
        #[test]
        fn exchanges_are_made((ids, some) in (Just((0..20_i64).collect::<Vec<_>>()).prop_shuffle(), 0..10_usize)) {
            let mut entries: Vec<_> = ids[..some].iter().zip(&ids[10..]).map(|(&one, &other)| [one, other]).collect();
            entries.insert(some / 2, [-1, -1]);
            let mapping = Mapping::new(&entries, [20; 2], MappingRule::Exchange).unwrap();
            prop_assert_eq!(run(&mapping.steps(), 20, false), wanted(&entries, 20, MappingRule::Exchange));
        }

        #[test]
        fn parts_hold_all_pairs_in_order_and_bound_moves_stay_whole(
            (blocks, entries) in sound_entries(), most in 0..6_usize
        ) {
            for rule in MappingRule::ALL {
                let Ok(mapping) = Mapping::new(&entries, [blocks; 2], rule) else { continue };
                let parts = mapping.split(most);
                let pairs: Vec<_> = parts.iter().flat_map(|part| part.pairs().to_vec()).collect();
                prop_assert_eq!(&pairs[..], mapping.pairs());
                prop_assert!(mapping.order().is_some() || parts.iter().all(|part| part.pairs().len() <= most.max(1)));
                prop_assert!(mapping.order().is_none() || parts.len() == 1);
            }
        }
    }

    #[test]
    fn independent_moves_need_no_order_and_a_ring_sets_one_block_aside() {
        let free = Mapping::new(&[[5, 1], [9, 0], [5, 2], [3, 3]], [10; 2], MappingRule::Move).unwrap();
        assert_eq!((free.pairs(), free.order()), (&[[9, 0], [5, 1], [5, 2]][..], None));
        let ring = Mapping::new(&[[0, 1], [1, 2], [2, 0], [2, 7], [8, 9]], [10; 2], MappingRule::Move).unwrap();
        let order = ring.order().unwrap();
        let aside = order.steps.iter().filter(|step| step[1] == ASIDE).count();
        assert_eq!((order.starts.len(), order.steps.len(), aside), (3, 6, 1), "{order:?}");
    }

    #[test]
    fn long_rings_are_cut_into_short_ones() {
        let blocks = 3 * MAX_RING + 7;
        let entries: Vec<_> =
            (0..blocks).map(|block| [block, (block + 5) % blocks].map(|id| i64::try_from(id).unwrap())).collect();
        let mapping = Mapping::new(&entries, [blocks; 2], MappingRule::Move).unwrap();
        assert_eq!(run(&mapping.steps(), blocks, false), wanted(&entries, blocks, MappingRule::Move));
        let (mut length, mut longest) = (0, 0);
        for step in &mapping.steps().steps {
            length = if step[1] == ASIDE { 1 } else { length + 1 };
            longest = longest.max(length);
        }
        assert_eq!(longest, MAX_RING + 1);
    }

    #[test]
    fn errors_carry_the_numbers() {
        let error = |entries: &[[i64; 2]], rule| Mapping::new(entries, [8, 4], rule).unwrap_err().to_string();
        let apart = MappingRule::Swap;
        assert_eq!(error(&[[3, 1], [9, 2]], apart), "entry 1: block 9 cannot be read, there are 8 blocks");
        assert_eq!(error(&[[3, -1]], apart), "entry 0: block -1 cannot be written, there are 4 blocks");
        assert_eq!(error(&[[3, 1], [4, 0], [5, 1]], apart), "block 1 is written twice, by entries 0 and 2");
        assert_eq!(
            error(&[[0, 3], [3, 1], [1, 2]], MappingRule::Copy),
            "block 3 is both read (pair 1) and written in one copy"
        );
        assert_eq!(
            error(&[[-1, -1], [1, 2], [3, 3]], MappingRule::Exchange),
            "block 3 is exchanged twice, by entries 2 and 2"
        );
        assert_eq!(
            error(&[[2, -1]], MappingRule::Exchange),
            "entry 0: block -1 cannot be exchanged, there are 4 blocks"
        );
    }
}
