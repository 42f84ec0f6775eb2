//! Copies, exchanges and moves of rows against vectors of rows.

use blockyard_copy::{CopyError, Rows, copy_rows, exchange_rows, move_rows};
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

/// Some caches: how many rows, bytes of a row and of the gap behind it, and the address modulo a line.
#[derive(Debug, Clone)]
struct Shape {
    rows: u32,
    widths: Vec<usize>,
    gap: usize,
    shift: usize,
}

/// Caches in memory of their own.
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
        // SAFETY: the rows lie in memory of their own.
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

fn shapes(rows: u32, widths: Vec<usize>) -> impl Strategy<Value = Shape> {
    let gap = prop_oneof![Just(0_usize), 1..100_usize];
    (gap, 0..64_usize).prop_map(move |(gap, shift)| Shape { rows, widths: widths.clone(), gap, shift })
}

/// Widths that are small, or with which one cache is enough for the large way.
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
        copy_rows(&source.rows(), &target.rows(), &pairs, threads).unwrap();
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
        exchange_rows(&caches.rows(), &pairs, threads).unwrap();
        same(&caches.memory, &wanted)?;
    }

    #[test]
    fn rows_move_as_if_all_were_read_first(
        (shape, from, to, threads, seed) in (widths(), 1..40_u32).prop_flat_map(|(widths, rows)| {
            let from = prop::collection::vec(0..rows, rows as usize);
            let from = prop_oneof![from.boxed(), shuffled(rows).boxed()];
            // The first so many targets: sources beyond them are read alone.
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
        move_rows(&caches.rows(), &pairs, threads).unwrap();
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
fn what_does_not_fit_is_refused_with_its_numbers_and_nothing_is_touched() {
    let shape = |rows, width| Shape { rows, widths: vec![width, width + 1], gap: 0, shift: 0 };
    let (mut small, mut large) = (Caches::new(shape(4, 8), 1), Caches::new(shape(9, 8), 2));
    let mut wide = Caches::new(shape(9, 10), 3);
    let before = [small.memory.clone(), large.memory.clone(), wide.memory.clone()];
    let (few, many, others) = (small.rows(), large.rows(), wide.rows());
    let out = |pair, row| Err(CopyError::OutOfRange { pair, row, rows: 4 });
    assert_eq!(copy_rows(&few, &many, &[[3, 8], [4, 0]], 1), out(1, 4));
    assert_eq!(copy_rows(&many, &few, &[[8, 3], [0, u32::MAX]], 1), out(1, u32::MAX));
    assert_eq!(exchange_rows(&few, &[[0, 1], [2, 4]], 1), out(1, 4));
    assert_eq!(exchange_rows(&few, &[[0, 1], [4, 3]], 1), out(1, 4));
    assert_eq!(move_rows(&few, &[[1, 3], [1, 7]], 1), out(1, 7));
    assert_eq!(copy_rows(&few, &many[..1], &[[0, 0]], 1), Err(CopyError::Caches { read: 2, written: 1 }));
    let widths = CopyError::Widths { cache: 0, read: 8, written: 10 };
    assert_eq!(copy_rows(&few, &others, &[[0, 0]], 1), Err(widths));
    assert_eq!(widths.to_string(), "rows of 8 bytes are to be copied to rows of 10, in cache 0");
    assert_eq!(copy_rows(&[], &[], &[], 1), Ok(()));
    assert_eq!([small.memory, large.memory, wide.memory], before);
}

#[test]
fn rows_and_caches_that_overlap_are_refused_and_nothing_is_touched() {
    let shape = Shape { rows: 4, widths: vec![8, 8], gap: 0, shift: 0 };
    let mut caches = Caches::new(shape, 1);
    let before = caches.memory.clone();
    let rows = caches.rows();
    let twice = [rows[0], rows[0]];
    let shared = Err(CopyError::Shared { one: 0, other: 1 });
    assert_eq!(copy_rows(&rows, &twice, &[[0, 1]], 1), shared);
    assert_eq!(exchange_rows(&twice, &[[0, 1]], 1), shared);
    assert_eq!(move_rows(&twice, &[[0, 1]], 1), shared);
    let crossed = [rows[1], rows[0]];
    assert!(matches!(copy_rows(&rows, &crossed, &[[0, 1]], 1), Err(CopyError::ReadAndWrittenCaches { .. })));
    let repeated = |first, second| Err(CopyError::Repeated { row: 1, first, second });
    assert_eq!(copy_rows(&rows[..1], &rows[1..], &[[0, 1], [2, 3], [2, 1]], 1), repeated(0, 2));
    assert_eq!(move_rows(&rows, &[[0, 1], [2, 1]], 1), repeated(0, 1));
    assert_eq!(exchange_rows(&rows, &[[1, 1]], 1), repeated(0, 0));
    let both = Err(CopyError::ReadAndWritten { pair: 1, row: 1 });
    assert_eq!(copy_rows(&rows, &rows, &[[0, 1], [1, 2]], 1), both);
    assert_eq!(caches.memory, before);
}

#[test]
fn rings_that_no_memory_can_set_aside_are_refused() {
    // SAFETY: the call fails before it touches the memory.
    let rows = unsafe { Rows::new(std::ptr::without_provenance_mut(64), 2, 1 << 62, 1 << 62) };
    let bytes = 1 << 62;
    assert_eq!(move_rows(&[rows], &[[0, 1], [1, 0]], 1), Err(CopyError::OutOfMemory { bytes }));
}
