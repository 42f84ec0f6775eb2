//! One digest of everything that the manager decides in 300 random runs. Correctness tests accept any block that is
//! free; this one notices when another block is chosen, or when events come in another order.

use super::{Op, Setup, World, op, setup};
use blockyard_core::{Error, Event, SequenceId, Stats, StepDecision, TicketId, Tier};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::hash::{Hash, Hasher};

const RUNS: usize = 300;
const OPS: usize = 100;

/// Change it only when decisions are meant to change, or when the strategies change.
const EXPECTED: &str = "f0bd752260fb36c4a1f5488d5b9bc306fdeba336d3a0f98154eb26eca89d012a";

/// Digest of all decisions of a run so far. The standard hash of a value does not depend on the names of its fields.
#[derive(Default)]
pub(crate) struct Trace(Sha256);

impl Hasher for Trace {
    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn finish(&self) -> u64 {
        0
    }
}

impl Trace {
    pub(crate) fn decision(&mut self, decision: &StepDecision) {
        decision.to_bytes().unwrap().hash(self);
    }

    pub(crate) fn events(&mut self, first: u64, events: &[Event]) {
        (first, events).hash(self);
    }

    /// The kind of an error; its text may change.
    pub(crate) fn result<T>(&mut self, result: &Result<T, Error>) {
        let kind = result.as_ref().err().map(|error| format!("{error:?}"));
        let name = kind.as_deref().and_then(|kind| kind.split(|c: char| !c.is_alphanumeric()).next());
        name.hash(self);
    }

    fn stats(&mut self, stats: &Stats) {
        let Stats { sequences, steps, open_tickets, prefix, moves, .. } = *stats;
        (sequences, steps, open_tickets).hash(self);
        (prefix.prompts, prefix.blocks, prefix.hit_blocks, prefix.tokens, prefix.hit_tokens).hash(self);
        (prefix.merged, prefix.loaded, moves.done, moves.cancelled, moves.failed).hash(self);
        for tier in stats.tiers {
            (tier.blocks, tier.used, tier.peak, tier.leased, tier.cached).hash(self);
            (tier.evicted, tier.pinned).hash(self);
        }
    }
}

impl World {
    /// Records the answers of all queries.
    pub(crate) fn record(&mut self) {
        let mut trace = std::mem::take(&mut self.trace);
        let (manager, sequences) = (&mut self.manager, self.truth.keys().copied().collect::<Vec<SequenceId>>());
        for sequence in sequences {
            let len = manager.num_tokens(sequence).unwrap();
            (sequence.row(), sequence.generation(), len, manager.tier(sequence).unwrap()).hash(&mut trace);
            for group in 0..self.groups.len() {
                let row = manager.table_of(sequence, group).unwrap();
                manager.block_table(row).unwrap().hash(&mut trace);
                let len = manager.num_tokens(row).unwrap();
                let mut slot = vec![0; usize::from(len > 0)];
                trace.result(&manager.slot_mapping(&[(row, len.saturating_sub(1)..len)], &mut slot));
                slot.hash(&mut trace);
            }
        }
        for tier in Tier::ALL {
            let pool = manager.pool(tier);
            (pool.free(), pool.available()).hash(&mut trace);
            pool.free_blocks().for_each(|block| block.hash(&mut trace));
            pool.evictable_blocks().hash(&mut trace);
        }
        manager.open_tickets().collect::<Vec<TicketId>>().hash(&mut trace);
        let resize = manager.resize_progress();
        (resize.blocks, resize.live, resize.held, resize.extent).hash(&mut trace);
        trace.stats(&manager.stats());
        self.trace = trace;
    }
}

#[test]
fn every_choice_is_unchanged() {
    let mut runner = TestRunner::deterministic();
    let cases = (setup(), prop::collection::vec(op(), OPS));
    let mut all = Sha256::new();
    for _ in 0..RUNS {
        let (setup, ops): (Setup, Vec<Op>) = cases.new_tree(&mut runner).unwrap().current();
        let mut world = World::new(setup);
        for op in ops {
            world.apply(op);
            world.record();
        }
        world.verify();
        all.update(world.trace.0.finalize());
    }
    let digest = all.finalize().iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    });
    assert_eq!(digest, EXPECTED, "the manager decides differently than before");
}
