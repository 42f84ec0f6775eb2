//! The manager against memory, as in `tests/manager.rs`, with operations that libFuzzer chooses: `make fuzz`.
//!
//! Two bytes are one operation, drawn from the test's own strategies. So operations added there are fuzzed without a
//! change here, and libFuzzer's changes to the bytes insert, remove, repeat and join whole operations.
#![no_main]

#[expect(dead_code, reason = "the test's own part is not used")]
#[path = "../../tests/manager.rs"]
mod manager;
mod mutator;

use libfuzzer_sys::arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use manager::{Op, Setup, World, op, paged_setup, setup};
use proptest::prop_oneof;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use std::fmt::Debug;
use std::sync::LazyLock;

static SETUPS: LazyLock<Vec<Setup>> = LazyLock::new(|| table(&prop_oneof![setup(), paged_setup()]));
static OPS: LazyLock<Vec<Op>> = LazyLock::new(|| table(&op()));

/// The value of each number, the same in every run. Sorted, so that numbers close to each other mean similar values.
fn table<T: Debug>(strategy: &impl Strategy<Value = T>) -> Vec<T> {
    let mut runner = TestRunner::deterministic();
    let draw = |_| strategy.new_tree(&mut runner).expect("the strategies reject nothing").current();
    let mut values: Vec<T> = (0..=u16::MAX).map(draw).collect();
    values.sort_by_cached_key(|value| format!("{value:?}"));
    values
}

/// One run, which libFuzzer prints if it fails.
#[derive(Debug)]
struct Case {
    setup: Setup,
    ops: Vec<Op>,
}

impl<'a> Arbitrary<'a> for Case {
    fn arbitrary(bytes: &mut Unstructured<'a>) -> Result<Self> {
        let setup = SETUPS[usize::from(bytes.arbitrary::<u16>()?)];
        let mut ops = Vec::with_capacity(bytes.len() / 2);
        while bytes.len() >= 2 {
            ops.push(OPS[usize::from(bytes.arbitrary::<u16>()?)]);
        }
        Ok(Self { setup, ops })
    }
}

fuzz_target!(
    init: {
        // Outside of the code that libFuzzer measures.
        LazyLock::force(&SETUPS);
        LazyLock::force(&OPS);
    },
    |case: Case| {
        let mut world = World::new(case.setup);
        for op in case.ops {
            world.apply(op);
        }
        world.verify();
    }
);

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    mutator::mutate(data, size, max_size, seed)
});
