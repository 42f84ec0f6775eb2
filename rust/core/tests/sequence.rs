//! Truncated sequences among others that share their blocks.

use blockyard_core::{Config, Error, KeySpec, Manager, Prompt, Tier};

#[test]
fn a_truncated_fork_is_swapped_in_with_its_origin_and_shares_its_blocks() {
    for keep in [6, 7, 9, 10, 14] {
        let config = Config { block_size: 4, blocks: [4, 14, 0], watermark: 0.0, prefix_caching: true };
        let mut manager = Manager::new(config).unwrap();
        let tokens: Vec<u32> = (0..16).collect();
        let prompt = Prompt { tokens: &tokens, spec: KeySpec::default(), extras: &[], hashed: None };
        let mut opened = Vec::new();
        manager.allocate_prompts(&[prompt], &mut opened).unwrap();
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
fn forks_with_too_many_block_table_entries_are_refused_by_number_and_not_for_memory() {
    let config = Config { block_size: 1, blocks: [1 << 16, 0, 0], watermark: 0.0, prefix_caching: false };
    let mut manager = Manager::new(config).unwrap();
    let mut opened = Vec::new();
    manager.allocate(&[1 << 16], &mut opened).unwrap();
    let result = manager.fork(opened[0], 1 << 20, &mut opened);
    assert!(matches!(result, Err(Error::InvalidArgument { what: "number of forks", found: 0x10_0000, .. })));
    assert_eq!(opened.len(), 1);
    manager.check().unwrap();
}
