//! Cost of the manager's hot paths without Python: one element is one sequence or one block.
#![expect(
    missing_docs,
    clippy::unwrap_used,
    reason = "criterion's macro writes undocumented functions; a benchmark may panic"
)]

use blockyard_core::{Append, Config, Counts, Manager, SequenceId, Tier};
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};

const SEQUENCES: usize = 256;
const PROMPT: u32 = 1024;

fn manager(host: usize) -> (Manager, Vec<SequenceId>) {
    let mut manager = Manager::new(Config::new(16, [32_768, host, 0])).unwrap();
    let mut sequences = Vec::new();
    manager.allocate(&[PROMPT; SEQUENCES], &mut sequences).unwrap();
    let decision = manager.take_decision();
    manager.complete(decision.ticket).unwrap();
    (manager, sequences)
}

fn append(c: &mut Criterion) {
    let mut group = c.benchmark_group("append");
    group.throughput(Throughput::Elements(SEQUENCES as u64 * 512));
    let mut slots = [0; SEQUENCES];
    group.bench_function("512 steps of 256 sequences", |b| {
        b.iter_batched_ref(
            || manager(0),
            |(manager, sequences)| {
                for _ in 0..512 {
                    manager.append(Append::new(sequences, Counts::All(1), &mut slots)).unwrap();
                }
            },
            BatchSize::LargeInput,
        );
    });
    group.finish();
}

fn swap(c: &mut Criterion) {
    let mut group = c.benchmark_group("swap");
    group.throughput(Throughput::Elements(SEQUENCES as u64 * u64::from(PROMPT / 16)));
    group.bench_function("out, 256 sequences of 64 blocks", |b| {
        b.iter_batched_ref(
            || manager(32_768),
            |(manager, sequences)| {
                manager.swap_out(sequences, Tier::Host).unwrap();
                let decision = manager.take_decision();
                manager.complete(decision.ticket).unwrap();
            },
            BatchSize::LargeInput,
        );
    });
    group.finish();
}

fn fork(c: &mut Criterion) {
    let mut manager = Manager::new(Config::new(16, [32_768, 0, 0])).unwrap();
    let mut parent = Vec::new();
    manager.allocate(&[16_000], &mut parent).unwrap();
    let mut group = c.benchmark_group("fork");
    group.throughput(Throughput::Elements(1000));
    group.bench_function("fork and free, 1000 blocks", |b| {
        let mut child = Vec::new();
        b.iter(|| {
            child.clear();
            manager.fork(parent[0], 1, &mut child).unwrap();
            manager.free(&child).unwrap();
        });
    });
    group.finish();
}

criterion_group!(benches, append, swap, fork);
criterion_main!(benches);
