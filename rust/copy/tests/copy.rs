//! Copies, exchanges and moves of rows against vectors of rows.

use blockyard_copy::{Caches as Checked, CopyError, Mapping, MappingRule, Rows};
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

/// Shape of some caches: number of rows, bytes of a row and of the gap behind it, and the address modulo a line.
#[derive(Debug, Clone)]
struct Shape {
    rows: u32,
    widths: Vec<usize>,
    gap: usize,
    shift: usize,
}

/// Caches and their memory.
struct Caches {
    memory: Vec<Vec<u8>>,
    shape: Shape,
}

impl Caches {
    fn new(shape: Shape, seed: u64) -> Self {
        let mut state = seed | 1;
        let mut word = |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_ne_bytes()
        };
        let words = |width: &usize| 16 + (shape.rows as usize * (width + shape.gap)).div_ceil(8);
        let memory = shape.widths.iter().map(|width| (0..words(width)).flat_map(&mut word).collect()).collect();
        Self { memory, shape }
    }

    fn rows(&mut self) -> Vec<Rows> {
        let Shape { rows, gap, shift, .. } = self.shape;
        let caches = self.memory.iter_mut().zip(&self.shape.widths);
        // SAFETY: nothing else refers to the memory of the rows.
        caches
            .map(|(memory, width)| unsafe {
                Rows::new(memory.as_mut_ptr().add(shift), rows as usize, *width, width + gap)
            })
            .collect()
    }

    fn row(&self, cache: usize, row: usize) -> std::ops::Range<usize> {
        let width = self.shape.widths[cache];
        let start = self.shape.shift + row * (width + self.shape.gap);
        start..start + width
    }
}

fn mapping(pairs: &[[u32; 2]], blocks: [usize; 2], rule: MappingRule) -> Result<Mapping, CopyError> {
    let entries: Vec<_> = pairs.iter().map(|pair| pair.map(i64::from)).collect();
    Mapping::new(&entries, blocks, rule)
}

fn shapes(rows: u32, widths: Vec<usize>) -> impl Strategy<Value = Shape> {
    let gap = prop_oneof![Just(0_usize), 1..100_usize];
    (gap, 0..64_usize).prop_map(move |(gap, shift)| Shape { rows, widths: widths.clone(), gap, shift })
}

/// Widths that are small, or so large that one cache is streamed.
fn widths() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        15 => prop::collection::vec(0..700_usize, 1..4),
        1 => prop::collection::vec(150_000..160_000_usize, 1..3),
    ]
}

/// Ids from 0 on in random order, some neighbours kept together.
fn shuffled(count: u32) -> impl Strategy<Value = Vec<u32>> {
    let runs = prop::collection::vec(1..6_usize, count as usize);
    runs.prop_flat_map(move |runs| {
        let mut ids = 0..count;
        let parts: Vec<Vec<u32>> = runs.into_iter().map(|run| ids.by_ref().take(run).collect()).collect();
        Just(parts).prop_shuffle().prop_map(|parts| parts.concat())
    })
}

proptest! {
    #[test]
    fn rows_are_copied_and_nothing_else_is_touched(
        (source, target, from, to, threads, seed) in (widths(), 1..80_u32, 1..80_u32).prop_flat_map(|(widths, read, written)| {
            let from = prop::collection::vec(0..read, written as usize);
            let either = prop_oneof![from.boxed(), shuffled(read).boxed()];
            (shapes(read, widths.clone()), shapes(written, widths), either, shuffled(written), 1..4_usize, any::<u64>())
        })
    ) {
        let (mut source, mut target) = (Caches::new(source, seed), Caches::new(target, !seed));
        let pairs: Vec<[u32; 2]> = from.into_iter().zip(to).map(|(from, to)| [from, to]).collect();
        let mut wanted = target.memory.clone();
        for (cache, memory) in wanted.iter_mut().enumerate() {
            for &[from, to] in &pairs {
                memory[target.row(cache, to as usize)].copy_from_slice(&source.memory[cache][source.row(cache, from as usize)]);
            }
        }
        let read = source.memory.clone();
        let blocks = [source.shape.rows as usize, target.shape.rows as usize];
        let caches = Checked::between(source.rows(), target.rows()).unwrap();
        caches.run(&mapping(&pairs, blocks, MappingRule::Swap).unwrap(), threads).unwrap();
        same(&target.memory, &wanted)?;
        same(&source.memory, &read)?;
    }

    #[test]
    fn rows_change_places(
        (shape, ids, threads, seed) in (widths(), 2..80_u32).prop_flat_map(|(widths, rows)| {
            (shapes(rows, widths), shuffled(rows), 1..4_usize, any::<u64>())
        })
    ) {
        let mut caches = Caches::new(shape, seed);
        // Halves of the list, so that neighbours stay neighbours on both sides.
        let (one, other) = ids.split_at(ids.len() / 2);
        let pairs: Vec<[u32; 2]> = one.iter().zip(other).map(|(&one, &other)| [one, other]).collect();
        let mut wanted = caches.memory.clone();
        for (cache, memory) in wanted.iter_mut().enumerate() {
            for &[one, other] in &pairs {
                memory[caches.row(cache, one as usize)].copy_from_slice(&caches.memory[cache][caches.row(cache, other as usize)]);
                memory[caches.row(cache, other as usize)].copy_from_slice(&caches.memory[cache][caches.row(cache, one as usize)]);
            }
        }
        let blocks = [caches.shape.rows as usize; 2];
        Checked::within(caches.rows()).unwrap().run(&mapping(&pairs, blocks, MappingRule::Exchange).unwrap(), threads).unwrap();
        same(&caches.memory, &wanted)?;
    }

    #[test]
    fn rows_move_as_if_all_were_read_first(
        (shape, from, to, threads, seed) in (widths(), 1..40_u32).prop_flat_map(|(widths, rows)| {
            let from = prop::collection::vec(0..rows, rows as usize);
            let from = prop_oneof![from.boxed(), shuffled(rows).boxed()];
            // Only the first targets, so that the remaining sources are only read.
            let to = shuffled(rows).prop_flat_map(move |to| (0..=to.len()).prop_map(move |some| to[..some].to_vec()));
            (shapes(rows, widths), from, to, 1..4_usize, any::<u64>())
        })
    ) {
        let mut caches = Caches::new(shape, seed);
        let pairs: Vec<[u32; 2]> = from.into_iter().zip(to).map(|(from, to)| [from, to]).collect();
        let mut wanted = caches.memory.clone();
        for (cache, memory) in wanted.iter_mut().enumerate() {
            for &[from, to] in &pairs {
                memory[caches.row(cache, to as usize)].copy_from_slice(&caches.memory[cache][caches.row(cache, from as usize)]);
            }
        }
        let blocks = [caches.shape.rows as usize; 2];
        Checked::within(caches.rows()).unwrap().run(&mapping(&pairs, blocks, MappingRule::Move).unwrap(), threads).unwrap();
        same(&caches.memory, &wanted)?;
    }
}

/// Compares without printing megabytes.
fn same(found: &[Vec<u8>], wanted: &[Vec<u8>]) -> TestCaseResult {
    for (cache, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let first = || found.iter().zip(wanted).position(|(found, wanted)| found != wanted);
        prop_assert!(found == wanted, "cache {cache} differs from byte {:?} on", first());
    }
    Ok(())
}

#[test]
fn caches_that_do_not_fit_are_refused_with_their_numbers() {
    let shape = |rows, width| Shape { rows, widths: vec![width, width + 1], gap: 0, shift: 0 };
    let (mut small, mut large) = (Caches::new(shape(4, 8), 1), Caches::new(shape(9, 8), 2));
    let mut wide = Caches::new(shape(9, 10), 3);
    let (few, many, others) = (small.rows(), large.rows(), wide.rows());
    let count = CopyError::Caches { read: 2, written: 1 };
    assert_eq!(Checked::between(few.clone(), many[..1].to_vec()).err(), Some(count));
    let widths = CopyError::Widths { cache: 0, read: 8, written: 10 };
    assert_eq!(Checked::between(few.clone(), others).err(), Some(widths));
    assert_eq!(widths.to_string(), "cannot copy rows of 8 bytes to rows of 10 bytes, in cache 0");
    let shared = Some(CopyError::Shared { one: 0, other: 1 });
    assert_eq!(
        Checked::between(many, vec![few[0], few[0]]).err(),
        Some(CopyError::Widths { cache: 1, read: 9, written: 8 })
    );
    assert_eq!(Checked::within(vec![few[0], few[0]]).err(), shared);
    let both = Checked::between(few.clone(), few).err();
    assert!(matches!(both, Some(CopyError::ReadAndWrittenCaches { .. })), "{both:?}");
}

#[test]
fn a_mapping_runs_only_where_its_blocks_are_and_as_its_rule_says() {
    let shape = |rows| Shape { rows, widths: vec![8, 9], gap: 0, shift: 0 };
    let (mut small, mut large) = (Caches::new(shape(4), 1), Caches::new(shape(9), 2));
    let before = [small.memory.clone(), large.memory.clone()];
    let within = Checked::within(small.rows()).unwrap();
    let between = Checked::between(large.rows(), small.rows()).unwrap();
    let reach = |last, rows| Err(CopyError::Reach { last, rows });
    assert_eq!(between.run(&mapping(&[[8, 4]], [9, 9], MappingRule::Swap).unwrap(), 1), reach(4, 4));
    assert_eq!(between.run(&mapping(&[[9, 3]], [10, 4], MappingRule::Swap).unwrap(), 1), reach(9, 9));
    assert_eq!(within.run(&mapping(&[[0, 1], [4, 2]], [5; 2], MappingRule::Exchange).unwrap(), 1), reach(4, 4));
    assert_eq!(within.run(&mapping(&[[0, 4], [4, 0]], [5; 2], MappingRule::Move).unwrap(), 1), reach(4, 4));
    let place = |rule: MappingRule, place| Err(CopyError::Place { rule: rule.name(), place });
    for rule in [MappingRule::Move, MappingRule::Exchange] {
        assert_eq!(between.run(&mapping(&[[0, 1]], [2; 2], rule).unwrap(), 1), place(rule, "between caches"));
    }
    assert_eq!(
        within.run(&mapping(&[[0, 1]], [2; 2], MappingRule::Swap).unwrap(), 1),
        place(MappingRule::Swap, "within caches")
    );
    let nothing = Checked::between(Vec::new(), Vec::new()).unwrap();
    assert_eq!(nothing.run(&mapping(&[], [0; 2], MappingRule::Swap).unwrap(), 1), Ok(()));
    assert_eq!([small.memory, large.memory], before);
}

#[test]
fn rings_that_no_memory_can_set_aside_are_refused() {
    // SAFETY: the call fails before it touches the memory.
    let rows = unsafe { Rows::new(std::ptr::without_provenance_mut(64), 2, 1 << 62, 1 << 62) };
    let bytes = 1 << 62;
    let ring = mapping(&[[0, 1], [1, 0]], [2; 2], MappingRule::Move).unwrap();
    let caches = Checked::within(vec![rows]).unwrap();
    assert_eq!(caches.run(&ring, 1), Err(CopyError::OutOfMemory { bytes }));
}
