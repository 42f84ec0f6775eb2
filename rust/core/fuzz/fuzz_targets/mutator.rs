//! Mutates the fuzzer's inputs.

use libfuzzer_sys::fuzzer_mutate;

/// On its own, libFuzzer keeps to short inputs of few different bytes, since longer ones cover no new lines, and misses
/// bugs that take many operations. So every second input continues at random from some position.
pub(crate) fn mutate(data: &mut [u8], size: usize, max_size: usize, seed: u32) -> usize {
    let mut state = u64::from(seed);
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap_or(0)
    };
    if random() % 2 == 0 {
        return fuzzer_mutate(data, size, max_size);
    }
    let start = random() % (size + 1);
    let end = start + random() % (max_size - start + 1);
    data[start..end].fill_with(|| random().to_le_bytes()[1]);
    end
}
