//! Cost of compiling plans without Python: one element is one piece before merging.
#![expect(
    missing_docs,
    clippy::unwrap_used,
    reason = "criterion's macro writes undocumented functions; a benchmark may panic"
)]

use blockyard_core::{End, Pieces, Region, Route, Side, Span};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const BLOCKS: u32 = 4096;
const TENSORS: u32 = 64;
const PER_ROW: u32 = 4;
const BYTES: u64 = 16_384;

fn route() -> Route {
    let region = |tensor: u32| {
        let src = Side { base: u64::from(tensor) << 32, row: BYTES, sub: 0 };
        let row = BYTES * u64::from(TENSORS * PER_ROW);
        let dst = Side { base: (1 << 44) + u64::from(tensor) * BYTES, row, sub: BYTES * u64::from(TENSORS) };
        Region { src, dst, bytes: BYTES, part: tensor }
    };
    let (src, dst) = (End { blocks: 1 << 16, per_row: 1 }, End { blocks: BLOCKS, per_row: PER_ROW });
    Route::new(&(0..TENSORS).map(region).collect::<Vec<_>>(), src, dst, false).unwrap()
}

fn plan(c: &mut Criterion) {
    let route = route();
    let pieces = (BLOCKS * TENSORS) as usize;
    let (mut from, mut to, mut bytes) = (vec![0; pieces], vec![0; pieces], vec![0; pieces]);
    // An odd factor visits every block once, and no two neighbours in turn.
    let host: Vec<i64> = (0..i64::from(BLOCKS / PER_ROW)).map(|i| i * 389 % 1024).collect();
    let mut units = vec![0i64; BLOCKS as usize];
    let mut group = c.benchmark_group("plan");
    group.throughput(Throughput::Elements(pieces as u64));
    group.bench_function("expand and compile, 4096 blocks in 64 tensors", |b| {
        b.iter(|| {
            let span = Span { blocks: &host, per_block: PER_ROW, first: 0, last: PER_ROW };
            span.expand(units.iter_mut()).unwrap();
            let pair = |(i, unit): (u32, &i64)| [i * 7919 % (1 << 16), u32::try_from(*unit).unwrap()];
            let pairs: Vec<_> = (0..BLOCKS).zip(&units).map(pair).collect();
            route.compile(&pairs, &mut Pieces { src: &mut from, dst: &mut to, bytes: &mut bytes }).unwrap()
        });
    });
    group.finish();
}

criterion_group!(benches, plan);
criterion_main!(benches);
