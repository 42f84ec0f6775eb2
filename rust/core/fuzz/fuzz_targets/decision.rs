//! Forged decisions, as in `tests/decision.rs`, with bytes that libFuzzer chooses: `make fuzz`.
#![no_main]

#[path = "../../tests/decision.rs"]
mod decision;
mod mutator;

use libfuzzer_sys::{fuzz_mutator, fuzz_target};

fuzz_target!(|data: &[u8]| decision::run(data));

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    mutator::mutate(data, size, max_size, seed)
});
