//! Forged snapshots and decisions, as in the test of that name, with bytes that libFuzzer chooses: `make fuzz`.
#![no_main]

#[path = "../../tests/forged.rs"]
mod forged;
mod mutator;

use libfuzzer_sys::{fuzz_mutator, fuzz_target};

fuzz_target!(|data: &[u8]| match data {
    [0, bytes @ ..] => forged::run_decision(bytes),
    [_, bytes @ ..] => forged::run(bytes),
    [] => {}
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    mutator::mutate(data, size, max_size, seed)
});
