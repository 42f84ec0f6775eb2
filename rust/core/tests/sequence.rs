//! Sequences at their limits, and truncated ones among others that share their blocks.

use blockyard_core::{
    AllocStatus, Append, Config, Counts, Demand, Error, Group, KeySpec, Manager, Prompt, PromptOptions, Tier,
};

#[test]
fn a_truncated_fork_is_swapped_in_with_its_origin_and_shares_its_blocks() {
    for keep in [6, 7, 9, 10, 14] {
        let config = Config { prefix_caching: true, ..Config::new(4, [4, 14, 0]) };
        let mut manager = Manager::new(config).unwrap();
        let tokens: Vec<u32> = (0..16).collect();
        let prompt = Prompt { tokens: &tokens, spec: KeySpec::default(), extras: &[], hashed: None };
        let mut opened = Vec::new();
        manager.allocate_prompts(&[prompt], PromptOptions::default(), &mut opened).unwrap();
        let origin = opened[0].0;
        let ticket = manager.take_decision().ticket;
        manager.complete(ticket).unwrap();
        manager.mark_computed(&[origin]).unwrap();
        manager.swap_out(&[origin], Tier::Host).unwrap();
        let mut forks = Vec::new();
        manager.fork(origin, 1, &mut forks).unwrap();
        manager.truncate(forks[0], keep).unwrap();
        let ticket = manager.take_decision().ticket;
        manager.complete(ticket).unwrap();
        for order in [[forks[0], origin], [origin, forks[0]]] {
            let mut manager = manager.clone();
            manager.swap_in(&order, Tier::Device).unwrap();
            manager.check().unwrap();
            let cut = manager.block_table(forks[0]).unwrap();
            assert_eq!(cut, &manager.block_table(origin).unwrap()[..cut.len()]);
        }
    }
}

#[test]
fn forks_with_too_many_block_table_entries_are_refused_for_their_number_not_for_memory() {
    let config = Config::new(1, [1 << 16, 0, 0]);
    let mut manager = Manager::new(config).unwrap();
    let mut opened = Vec::new();
    manager.allocate(&[1 << 16], &mut opened).unwrap();
    let result = manager.fork(opened[0], 1 << 20, &mut opened);
    assert!(matches!(result, Err(Error::InvalidArgument { what: "count", found: 0x10_0000, .. })));
    assert_eq!(opened.len(), 1);
    manager.check().unwrap();
}

#[test]
fn a_state_passes_over_as_many_blocks_as_admission_allows() {
    let fits = |tokens| {
        let config = Config::new(1, [8, 0, 0]);
        let states = [Group::Recurrent];
        let mut manager = Manager::new(config.with_groups(&states)).unwrap();
        let fits = manager.can_admit(&Demand { tokens, ..Demand::default() }).status == AllocStatus::Ok;
        assert_eq!(manager.allocate(&[tokens], &mut Vec::new()).is_ok(), fits, "{tokens} tokens");
        fits
    };
    let most = 1 << 24;
    assert_eq!([most + 1, most + 2, 2 * most].map(fits), [true, false, false]);
}

#[test]
fn a_sequence_that_returns_to_the_host_needs_no_block_for_its_next_token() {
    let config = Config { watermark: 0.5, ..Config::new(4, [4, 2, 4]) };
    let mut manager = Manager::new(config).unwrap();
    let mut opened = Vec::new();
    manager.allocate(&[8], &mut opened).unwrap();
    for tier in [Tier::Host, Tier::External] {
        let ticket = manager.take_decision().ticket;
        manager.complete(ticket).unwrap();
        manager.swap_out(&opened, tier).unwrap();
    }
    let ticket = manager.take_decision().ticket;
    manager.complete(ticket).unwrap();
    // Two blocks, both full, and two free blocks to take them.
    assert_eq!(manager.can_swap_in(&opened, Tier::Host, 0).unwrap().status, AllocStatus::Ok);
    manager.swap_in(&opened, Tier::Host).unwrap();
    manager.check().unwrap();
}

#[test]
fn fragmentation_counts_tables_and_their_runs() {
    let config = Config::new(1, [16, 0, 0]);
    let mut manager = Manager::new(config).unwrap();
    let mut opened = Vec::new();
    manager.allocate(&[3, 2, 4, 0], &mut opened).unwrap();
    assert_eq!((manager.fragmentation().unwrap().tables, manager.fragmentation().unwrap().runs), (3, 3));
    manager.free(&opened[1..2]).unwrap();
    let ticket = manager.take_decision().ticket;
    manager.complete(ticket).unwrap();
    // Takes the two blocks of the hole, and two beyond the others.
    manager.allocate(&[4], &mut opened).unwrap();
    let found = manager.fragmentation().unwrap();
    assert_eq!((found.tables, found.runs, found.holes), (3, 4, 5));
}

#[test]
fn a_fork_that_is_too_long_for_a_shrinking_device_may_grow_within_its_last_block_once_it_is_alone() {
    let config = Config::new(4, [6, 0, 0]);
    let mut manager = Manager::new(config).unwrap();
    let mut opened = Vec::new();
    manager.allocate(&[17], &mut opened).unwrap();
    manager.fork(opened[0], 1, &mut opened).unwrap();
    let ticket = manager.take_decision().ticket;
    manager.complete(ticket).unwrap();
    manager.resize_device(1).unwrap();
    let fit = manager.can_append(&opened[1..], Counts::All(3), 0).unwrap();
    assert_eq!((fit.status, fit.blocks, fit.free), (AllocStatus::Later, 1, 0));
    assert_eq!(manager.can_append(&opened[1..], Counts::All(4), 0).unwrap().status, AllocStatus::Never);
    manager.free(&opened[..1]).unwrap();
    manager.append(Append::new(&opened[1..], Counts::All(3), &mut [0; 3])).unwrap();
    manager.check().unwrap();
}

#[test]
fn token_ids_without_a_cache_give_the_same_lengths_and_chunks_as_an_empty_cache() {
    let tokens: Vec<u32> = (0..22).collect();
    let prompt = Prompt { tokens: &tokens, spec: KeySpec::default(), extras: &[], hashed: None };
    let run = |prefix_caching, groups: &[Group]| {
        let config = Config { prefix_caching, ..Config::new(4, [64, 0, 0]) };
        let mut manager = Manager::new(config.with_groups(groups)).unwrap();
        let (mut opened, mut seen) = (Vec::new(), Vec::new());
        manager.allocate_prompts(&[prompt], PromptOptions { chunk: 7, preempted: false }, &mut opened).unwrap();
        let (sequence, cached) = opened[0];
        let note = |manager: &mut Manager, seen: &mut Vec<_>| {
            let ticket = manager.take_decision().ticket;
            manager.complete(ticket).unwrap();
            manager.mark_computed(&[sequence]).unwrap();
            manager.check().unwrap();
            let next = manager.next_chunk(sequence, 7).unwrap();
            seen.push((manager.num_tokens(sequence).unwrap(), manager.block_table(sequence).unwrap().len(), next));
            next
        };
        while note(&mut manager, &mut seen) > 0 {
            let chunk = seen.last().unwrap().2;
            manager
                .append(Append::new(&[sequence], Counts::All(chunk), &mut vec![0; groups.len() * chunk as usize]))
                .unwrap();
        }
        for length in [21, 23, 23] {
            manager.truncate(sequence, length).unwrap();
            note(&mut manager, &mut seen);
            manager
                .append(Append {
                    token_ids: Some(&[7; 3]),
                    ..Append::new(&[sequence], Counts::All(3), &mut vec![0; 3 * groups.len()])
                })
                .unwrap();
            note(&mut manager, &mut seen);
        }
        let mut forks = vec![sequence];
        manager.fork(sequence, 1, &mut forks).unwrap();
        assert_eq!(manager.common_computed_blocks(&forks).unwrap().len(), 6);
        assert_eq!(manager.lookup(&prompt).unwrap().tokens, if prefix_caching { 20 } else { 0 });
        let reserved = Prompt { tokens: &[1, u32::MAX], ..prompt };
        assert!(manager.allocate_prompts(&[reserved], PromptOptions::default(), &mut opened).is_err());
        (cached, seen)
    };
    for groups in [&[Group::Full][..], &[Group::Full, Group::Full]] {
        assert_eq!(run(false, groups), run(true, groups));
    }
}

#[test]
fn a_sequence_that_has_arrived_but_waits_for_an_older_ticket_names_that_ticket() {
    let config = Config::new(4, [8, 8, 0]);
    let (mut manager, mut opened) = (Manager::new(config).unwrap(), Vec::new());
    manager.allocate(&[8], &mut opened).unwrap();
    let earlier = manager.take_decision().ticket;
    manager.swap_out(&opened, Tier::Host).unwrap();
    let ticket = manager.take_decision().ticket;
    let sequence = opened[0];
    assert_eq!(manager.swap_in(&opened, Tier::Device), Err(Error::InFlight { sequence, ticket, blocks: 2 }));
    manager.complete(ticket).unwrap();
    assert_eq!(manager.swap_in(&opened, Tier::Device), Err(Error::EarlierInFlight { sequence, ticket, earlier }));
    manager.complete(earlier).unwrap();
    manager.swap_in(&opened, Tier::Device).unwrap();
}
