//! Snapshots: manager read back go on like the ones that were written, and damaged ones are refused or sound.
#![expect(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test may fail by panicking")]

use blockyard_core::snapshot::SNAPSHOT_VERSION;
use blockyard_core::{
    Config, Counts, Error, EventBatch, KeySpec, Manager, Prompt, SequenceId, Stats, StepDecision, Tier,
};
use proptest::prelude::*;
use sha2::{Digest, Sha256};

#[derive(Debug, Clone, Copy)]
enum Op {
    Allocate(u32),
    Prompt(u32, u32),
    Mark(usize),
    Fork(usize),
    Append(usize, u32, bool),
    Free(usize),
    SwapOut(usize),
    SwapIn(usize),
    Step,
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    let pick = 0usize..16;
    prop_oneof![
        2 => (0u32..9).prop_map(Op::Allocate),
        5 => (0u32..14, 0u32..3).prop_map(|(n, family)| Op::Prompt(n, family)),
        6 => pick.clone().prop_map(Op::Mark),
        2 => pick.clone().prop_map(Op::Fork),
        6 => (pick.clone(), 0u32..4, any::<bool>()).prop_map(|(s, n, known)| Op::Append(s, n, known)),
        3 => pick.clone().prop_map(Op::Free),
        3 => pick.clone().prop_map(Op::SwapOut),
        3 => pick.prop_map(Op::SwapIn),
        8 => Just(Op::Step),
        1 => Just(Op::Reset),
    ]
}

/// What a caller sees of one operation and after it.
type Seen = (Result<Vec<i64>, Error>, Option<StepDecision>, Stats, EventBatch, Vec<Vec<u32>>);

/// Does one operation; `sequences` are those ever opened.
fn apply(manager: &mut Manager, sequences: &mut Vec<SequenceId>, op: Op) -> Seen {
    let at = |n: usize| sequences[n % sequences.len().max(1)..].iter().copied().take(1).collect::<Vec<_>>();
    let mut slots = Vec::new();
    let mut decision = None;
    let result = match op {
        Op::Allocate(n) => manager.allocate(&[n], sequences),
        Op::Prompt(n, family) => {
            let tokens: Vec<u32> = (0..n).map(|i| family + i / 9).collect();
            let mut out = Vec::new();
            let spec = KeySpec { lora_id: u64::from(family), ..KeySpec::default() };
            let result =
                manager.allocate_prompts(&[Prompt { tokens: &tokens, spec, extras: &[], hashed: None }], &mut out);
            slots.extend(out.iter().map(|(_, cached)| i64::from(*cached)));
            sequences.extend(out.iter().map(|(sequence, _)| *sequence));
            result
        }
        Op::Mark(s) => manager.mark_computed(&at(s)),
        Op::Fork(s) => match at(s)[..] {
            [sequence] => manager.fork(sequence, 1, sequences),
            _ => Ok(()),
        },
        Op::Append(s, n, known) => {
            let batch = at(s);
            slots.resize(batch.len() * n as usize, 0);
            let ids = vec![n; slots.len()];
            if known {
                manager.append_tokens(&batch, Counts::All(n), 1, &ids, None, &mut slots)
            } else {
                manager.append(&batch, Counts::All(n), 0, &mut slots)
            }
        }
        Op::Free(s) => manager.free(&at(s)),
        Op::SwapOut(s) => manager.swap_out(&at(s), Tier::Host),
        Op::SwapIn(s) => manager.swap_in(&at(s), Tier::Device),
        Op::Step => {
            let taken = manager.take_decision();
            let result = manager.complete(taken.ticket);
            decision = Some(taken);
            result
        }
        Op::Reset => {
            slots.push(i64::from(manager.reset_prefix_cache()));
            Ok(())
        }
    };
    let table = |s: &SequenceId| manager.block_table(*s).map(|blocks| blocks.iter().map(|b| b.0).collect());
    let tables = sequences.iter().map(|s| table(s).unwrap_or_default()).collect();
    (result.map(|()| slots), decision, manager.stats(), manager.take_events(), tables)
}

fn manager(events: bool) -> Manager {
    let config = Config { block_size: 3, blocks: [9, 7, 0], watermark: 0.1, prefix_caching: true };
    let mut manager = Manager::new(config).unwrap();
    if events {
        manager.record_events(5).unwrap();
    }
    manager
}

/// Driver after the operations, at rest.
fn after(ops: &[Op], events: bool) -> (Manager, Vec<SequenceId>) {
    let (mut manager, mut sequences) = (manager(events), Vec::new());
    for &op in ops {
        let _ = apply(&mut manager, &mut sequences, op);
    }
    if manager.snapshot().is_err() {
        let _ = apply(&mut manager, &mut sequences, Op::Step);
    }
    (manager, sequences)
}

fn is_refused(bytes: &[u8]) -> bool {
    matches!(Manager::restore(bytes), Err(Error::BadSnapshot { .. }))
}

/// Puts the right length and checksum on a payload that was tampered with.
fn reseal(bytes: &mut [u8]) {
    let end = bytes.len() - 32;
    let digest = Sha256::digest(&bytes[..end]);
    bytes[end..].copy_from_slice(&digest);
}

proptest! {
    #[test]
    fn a_restored_manager_goes_on_like_the_one_that_was_written(
        before in prop::collection::vec(op(), 0..60), then in prop::collection::vec(op(), 0..60), events in any::<bool>(),
    ) {
        let (mut manager, mut sequences) = after(&before, events);
        let bytes = manager.snapshot().unwrap();
        let mut restored = Manager::restore(&bytes).unwrap();
        prop_assert_eq!(restored.snapshot().unwrap(), bytes);
        let mut theirs = sequences.clone();
        for op in then {
            prop_assert_eq!(apply(&mut manager, &mut sequences, op), apply(&mut restored, &mut theirs, op));
            prop_assert_eq!(restored.check(), Ok(()));
        }
    }

    #[test]
    fn a_flipped_bit_or_a_missing_end_is_refused(
        before in prop::collection::vec(op(), 0..40), at in any::<prop::sample::Index>(), bit in 0u32..8,
    ) {
        let mut bytes = after(&before, true).0.snapshot().unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        prop_assert!(is_refused(&bytes));
        bytes[at] ^= 1 << bit;
        prop_assert!(is_refused(&bytes[..at]));
        bytes.push(0);
        prop_assert!(is_refused(&bytes));
    }

    /// Whoever writes a snapshot can write a checksum too: manager that pass must be sound and never panic.
    #[test]
    fn a_forged_payload_is_refused_or_gives_a_sound_manager(
        before in prop::collection::vec(op(), 0..40), then in prop::collection::vec(op(), 0..30),
        forged in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let (mut manager, mut sequences) = after(&before, true);
        let mut bytes = manager.snapshot().unwrap();
        for (at, value) in forged {
            let payload = 20..bytes.len() - 32;
            let at = payload.start + at.index(payload.len());
            bytes[at] = value;
        }
        reseal(&mut bytes);
        match Manager::restore(&bytes) {
            Err(_) => prop_assert!(is_refused(&bytes)),
            Ok(mut forged) => {
                for op in then {
                    let _ = apply(&mut forged, &mut sequences, op);
                    prop_assert_eq!(forged.check(), Ok(()));
                }
            }
        }
    }
}

#[test]
fn a_manager_is_written_only_at_rest_and_the_error_says_what_is_open() {
    let (mut manager, mut sequences) = (manager(false), Vec::new());
    manager.allocate(&[7], &mut sequences).unwrap();
    let first = manager.take_decision();
    assert_eq!(manager.snapshot(), Err(Error::Busy { tickets: 1, open: manager.open_tickets().collect(), pairs: 0 }));
    manager.complete(first.ticket).unwrap();
    manager.swap_out(&sequences, Tier::Host).unwrap();
    assert_eq!(manager.snapshot(), Err(Error::Busy { tickets: 0, open: vec![], pairs: 3 }));
    let swap = manager.take_decision();
    manager.complete(swap.ticket).unwrap();
    let restored = Manager::restore(&manager.snapshot().unwrap()).unwrap();
    assert_eq!(restored.tier(sequences[0]), Ok(Tier::Host));
}

#[test]
fn an_open_step_that_reused_overlappable_blocks_still_waits_for_their_readers() {
    let (mut manager, mut sequences) = (manager(false), Vec::new());
    manager.allocate(&[12, 12], &mut sequences).unwrap();
    let first = manager.take_decision();
    manager.complete(first.ticket).unwrap();
    manager.swap_out(&sequences[..1], Tier::Host).unwrap();
    let swap = manager.take_decision();
    manager.allocate(&[15], &mut sequences).unwrap();
    manager.complete(swap.ticket).unwrap();
    let mut restored = Manager::restore(&manager.snapshot().unwrap()).unwrap();
    for manager in [&mut manager, &mut restored] {
        manager.swap_out(&sequences[1..2], Tier::Host).unwrap_err();
        manager.free(&sequences[..1]).unwrap();
        manager.swap_out(&sequences[1..2], Tier::Host).unwrap();
        let decision = manager.take_decision();
        assert_eq!(decision.after, [decision.ticket]);
    }
}

#[test]
fn another_magic_version_or_length_is_named() {
    let bytes = manager(true).snapshot().unwrap();
    let refusal = |at: usize, value: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        Manager::restore(&bytes).unwrap_err().to_string()
    };
    assert_eq!(refusal(0, b'X'), "the snapshot is refused: it does not begin with BLKYSNAP");
    let next = SNAPSHOT_VERSION as u8 + 1;
    assert_eq!(refusal(8, next), format!("the snapshot is refused: its version is {next}, this is {SNAPSHOT_VERSION}"));
    assert!(refusal(19, 1).contains("its header says 720575940379"));
    assert!(refusal(25, 77).contains("checksum"));
}

#[test]
fn events_that_wait_and_their_numbers_survive() {
    let (mut manager, mut out) = (manager(true), Vec::new());
    let tokens: Vec<u32> = (0..7).collect();
    manager
        .allocate_prompts(&[Prompt { tokens: &tokens, spec: KeySpec::default(), extras: &[], hashed: None }], &mut out)
        .unwrap();
    let step = manager.take_decision();
    manager.complete(step.ticket).unwrap();
    manager.mark_computed(&[out[0].0]).unwrap();
    let mut restored = Manager::restore(&manager.snapshot().unwrap()).unwrap();
    let batch = restored.take_events();
    assert_eq!((batch.first, batch.events.len()), (0, 2));
    assert_eq!(batch, manager.take_events());
    assert_eq!(restored.take_events(), EventBatch { first: 2, ..EventBatch::default() });
}
