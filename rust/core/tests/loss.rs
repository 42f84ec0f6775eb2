//! Loads that fail late, and blocks that are read late: what happens to data derived from them in the meantime.
#![expect(clippy::unwrap_used, reason = "a test may fail by panicking")]

use blockyard_core::{
    Append, Config, Counts, KeySpec, Kind, Manager, Pairs, Prompt, PromptOptions, SequenceId, StepDecision, Tier,
};

fn manager() -> Manager {
    Manager::new(Config { prefix_caching: true, ..Config::new(4, [16, 16, 0]) }).unwrap()
}

fn prompt(tokens: &[u32]) -> Prompt<'_> {
    Prompt { tokens, spec: KeySpec::default(), extras: &[], hashed: None }
}

fn admit(manager: &mut Manager, tokens: &[u32]) -> SequenceId {
    let mut out = Vec::new();
    manager.allocate_prompts(&[prompt(tokens)], PromptOptions::default(), &mut out).unwrap();
    rest(manager);
    out[0].0
}

fn fork(manager: &mut Manager, sequence: SequenceId) -> SequenceId {
    let mut out = Vec::new();
    manager.fork(sequence, 1, &mut out).unwrap();
    out[0]
}

fn append(manager: &mut Manager, sequence: SequenceId, tokens: &[u32]) {
    let (counts, mut slots) = (Counts::All(u32::try_from(tokens.len()).unwrap()), vec![0; tokens.len()]);
    manager.append(Append { token_ids: Some(tokens), ..Append::new(&[sequence], counts, &mut slots) }).unwrap();
}

fn rest(manager: &mut Manager) {
    let decision = manager.take_decision();
    manager.complete(decision.ticket).unwrap();
}

/// Swaps a sequence in and appends to it; its load is still in flight.
fn returned(manager: &mut Manager, sequence: SequenceId) -> StepDecision {
    manager.swap_out(&[sequence], Tier::Host).unwrap();
    rest(manager);
    manager.swap_in(&[sequence], Tier::Device).unwrap();
    append(manager, sequence, &[7]);
    manager.take_decision()
}

fn loads(decision: &StepDecision) -> Vec<Pairs> {
    decision.of(Kind::SwapIn).cloned().collect()
}

#[test]
fn blocks_computed_from_a_copy_of_a_late_load_are_not_found_before_the_load_has_landed() {
    let mut manager = manager();
    let parent = admit(&mut manager, &[1, 2]);
    let load = returned(&mut manager, parent);
    let child = fork(&mut manager, parent);
    append(&mut manager, child, &[3, 4, 5, 6, 7, 8]);
    rest(&mut manager);
    let known = [1, 2, 7, 3, 4, 5, 6, 7, 8, 9];
    manager.mark_computed(&[child]).unwrap();
    assert_eq!(manager.lookup(&prompt(&known)).map(|hit| hit.tokens), Ok(0));
    let mut again = manager.clone();
    again.complete(load.ticket).unwrap();
    again.mark_computed(&[child]).unwrap();
    assert_eq!(again.lookup(&prompt(&known)).map(|hit| hit.tokens), Ok(8));
    let mut lost = manager.fail(load.ticket, &loads(&load)).unwrap();
    lost.sort_unstable();
    assert_eq!(lost, [parent, child]);
    manager.free(&lost).unwrap();
    let heir = admit(&mut manager, &known[..5]);
    manager.mark_computed(&[heir]).unwrap();
    assert_eq!(
        manager.lookup(&prompt(&known)).map(|hit| hit.tokens),
        Ok(4),
        "the first block is new, the second must be too"
    );
    manager.check().unwrap();
}

#[test]
fn a_block_that_once_held_a_copy_of_lost_bytes_is_not_lost_with_them() {
    let mut manager = manager();
    let parent = admit(&mut manager, &[1, 2]);
    let load = returned(&mut manager, parent);
    let child = fork(&mut manager, parent);
    append(&mut manager, child, &[3]);
    rest(&mut manager);
    let copy = manager.block_table(child).unwrap().to_vec();
    manager.free(&[child]).unwrap();
    let stranger = admit(&mut manager, &[9, 9, 9]);
    assert_eq!(manager.block_table(stranger).unwrap(), copy);
    // A copy made from it now is not lost either.
    let other = fork(&mut manager, stranger);
    append(&mut manager, other, &[8]);
    rest(&mut manager);
    assert_eq!(manager.fail(load.ticket, &loads(&load)), Ok(vec![parent]));
    manager.check().unwrap();
}

#[test]
fn an_append_of_no_tokens_does_not_let_the_next_one_write_a_block_that_is_being_read() {
    let mut manager = manager();
    let parent = admit(&mut manager, &[1, 2, 3]);
    let child = fork(&mut manager, parent);
    manager.swap_out(&[parent], Tier::Host).unwrap();
    let read = manager.take_decision();
    manager.truncate(child, 2).unwrap();
    append(&mut manager, child, &[]);
    append(&mut manager, child, &[5]);
    assert_eq!(manager.take_decision().after, [read.ticket]);
}

#[test]
fn an_append_of_no_tokens_does_not_keep_a_block_that_another_tier_has_a_copy_of() {
    let mut manager = manager();
    let parent = admit(&mut manager, &[1, 2, 3, 4]);
    let child = fork(&mut manager, parent);
    manager.swap_out(&[parent], Tier::Host).unwrap();
    rest(&mut manager);
    manager.truncate(child, 3).unwrap();
    append(&mut manager, child, &[]);
    manager.swap_in(&[parent], Tier::Device).unwrap();
    rest(&mut manager);
    manager.check().unwrap();
    append(&mut manager, child, &[5]);
    let written = manager.block_table(child).unwrap()[0];
    assert!(!manager.block_table(parent).unwrap().contains(&written) && manager.tier(parent) == Ok(Tier::Device));
}

#[test]
fn a_sequence_that_finds_its_blocks_on_the_device_does_not_wait_for_transfers_of_its_step() {
    let mut manager = manager();
    let sequence = admit(&mut manager, &[1, 2, 3, 4]);
    let (twin, other) = (fork(&mut manager, sequence), admit(&mut manager, &[5]));
    manager.swap_out(&[sequence], Tier::Host).unwrap();
    rest(&mut manager);
    manager.swap_out(&[other], Tier::Host).unwrap();
    manager.swap_in(&[sequence], Tier::Device).unwrap();
    let late = manager.take_decision();
    assert_eq!(late.of(Kind::SwapIn).count(), 0);
    append(&mut manager, sequence, &[6]);
    manager.check().unwrap();
    assert_eq!(manager.block_table(sequence).unwrap()[0], manager.block_table(twin).unwrap()[0]);
    assert_eq!(manager.fail(late.ticket, &late.of(Kind::SwapOut).cloned().collect::<Vec<_>>()), Ok(vec![other]));
}

#[test]
fn a_prefetched_sequence_has_no_block_table_until_its_load_has_landed_unless_its_step_reads_it() {
    let reads: [fn(&mut Manager, SequenceId); 6] = [
        |_, _| (),
        |manager, sequence| append(manager, sequence, &[6]),
        |manager, sequence| assert_eq!(manager.read_table(sequence).unwrap().len(), 1),
        |manager, sequence| manager.block_tables(&[sequence.into()], 1, &mut [0]).unwrap(),
        |manager, sequence| manager.slot_mapping(&[(sequence.into(), 0..1)], &mut [0]).unwrap(),
        |manager, sequence| assert!(manager.fork_prefix(sequence, 4, 5).is_ok()),
    ];
    for (at, read) in reads.into_iter().enumerate() {
        let mut manager = manager();
        let sequence = admit(&mut manager, &[1, 2, 3, 4]);
        manager.swap_out(&[sequence], Tier::Host).unwrap();
        rest(&mut manager);
        manager.swap_in(&[sequence], Tier::Device).unwrap();
        read(&mut manager, sequence);
        let step = manager.take_prefetch();
        assert_eq!((loads(&step).len(), step.prefetch), (1, at == 0));
        assert_eq!(manager.block_table(sequence).is_err(), at == 0);
        manager.complete(step.ticket).unwrap();
        assert!(manager.block_table(sequence).is_ok());
    }
}
