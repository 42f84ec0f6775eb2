//! Eviction policies: random prompts under each of them, and a caller's own policy.
#![expect(clippy::unwrap_used, reason = "a test may fail by panicking")]

use blockyard_core::{
    BlockId, Cached, Config, Departure, Eviction, Evictor, Hint, KeySpec, Manager, Policies, Prompt, PromptOptions,
    SequenceId, StoreWrites, Tier,
};
use proptest::prelude::*;
use std::collections::HashSet;

const BLOCK: usize = 2;

fn manager(blocks: usize, eviction: Eviction) -> Manager {
    let policies = Policies { eviction, ..Policies::default() };
    Manager::new(Config { prefix_caching: true, policies, ..Config::new(2, [blocks, 0, 0]) }).unwrap()
}

fn prompt(tokens: &[u32]) -> Prompt<'_> {
    Prompt { tokens, spec: KeySpec::default(), extras: &[], hashed: None }
}

/// Admits and computes a prompt, if it fits.
fn open(manager: &mut Manager, tokens: &[u32]) -> Option<SequenceId> {
    let mut out = Vec::new();
    manager.allocate_prompts(&[prompt(tokens)], PromptOptions::default(), &mut out).ok()?;
    let decision = manager.take_decision();
    manager.complete(decision.ticket).unwrap();
    manager.mark_computed(&[out[0].0]).unwrap();
    Some(out[0].0)
}

/// Number of cached blocks that any of these prompts would find.
fn reachable(manager: &Manager, prompts: &[Vec<u32>]) -> usize {
    let mut found = HashSet::new();
    for tokens in prompts {
        let full = tokens.len() / BLOCK * BLOCK;
        let asked = [&tokens[..full], &[u32::MAX - 1]].concat();
        let cached = manager.lookup(&prompt(&asked)).unwrap().tokens as usize;
        found.extend((1..=cached / BLOCK).map(|blocks| tokens[..blocks * BLOCK].to_vec()));
    }
    found.len()
}

fn policies() -> impl Strategy<Value = Eviction> {
    prop::sample::select(&Eviction::NAMED[..])
}

/// Prompts over few token ids that diverge at all depths.
fn prompts() -> impl Strategy<Value = Vec<(Vec<u32>, u8, usize)>> {
    let tokens = prop::collection::vec(0u32..2, 1..16);
    prop::collection::vec((tokens, 0u8..16, 0usize..4), 1..60)
}

type Ending = (Option<Hint>, f64, Option<(usize, Hint)>);

/// What the engine knows when each turn ends, how many seconds pass before it, and of which prompt it speaks after it.
fn endings() -> impl Strategy<Value = Vec<Ending>> {
    let hint = prop::sample::select(&Hint::ALL[..]);
    let seconds = prop::sample::select(vec![0.0, 0.3, 4.0, 60.0, 1e6]);
    let later = prop::option::weighted(0.2, (0usize..60, hint.clone()));
    prop::collection::vec((prop::option::of(hint), seconds, later), 1..60)
}

#[test]
fn a_prompt_admitted_again_is_found_and_not_counted() {
    let (mut manager, mut out) = (manager(8, Eviction::Lru), Vec::new());
    let first = open(&mut manager, &[1, 2, 3, 4, 5]).unwrap();
    manager.free(&[first]).unwrap();
    let before = manager.stats().prefix;
    manager
        .allocate_prompts(
            &[prompt(&[1, 2, 3, 4, 5])],
            PromptOptions { preempted: true, ..PromptOptions::default() },
            &mut out,
        )
        .unwrap();
    assert_eq!((out[0].1, manager.stats().prefix), (4, before));
    assert_eq!((before.prompts, before.tokens), (1, 5));
    manager.check().unwrap();
}

proptest! {
    #[test]
    fn no_block_is_evicted_before_one_that_needs_it(
        eviction in policies(),
        blocks in 8usize..40,
        prompts in prompts(),
        endings in endings(),
    ) {
        let mut manager = manager(blocks, eviction);
        let mut live = Vec::new();
        let mut seen: Vec<Vec<u32>> = Vec::new();
        let mut now = 0.0;
        for ((tokens, priority, left), (hint, seconds, later)) in prompts.into_iter().zip(endings.iter().cycle()) {
            now += seconds;
            manager.set_now(now).unwrap();
            while live.len() > left {
                manager.free_with_hint(&[live.remove(0)], *hint).unwrap();
                manager.check().unwrap();
            }
            if let Some((tokens, hint)) = later.and_then(|(at, hint)| Some((seen.get(at)?, hint))) {
                manager.hint(&prompt(tokens), hint).unwrap();
                manager.check().unwrap();
            }
            if let Some(sequence) = open(&mut manager, &tokens) {
                manager.set_priority(&[sequence], priority).unwrap();
                live.push(sequence);
                seen.push(tokens);
            }
            manager.check().unwrap();
            prop_assert_eq!(reachable(&manager, &seen), manager.pool(Tier::Device).published());
        }
        manager.free(&live).unwrap();
        let mut all = Vec::new();
        manager.allocate(&[u32::try_from(blocks * BLOCK).unwrap()], &mut all).unwrap();
        prop_assert_eq!(manager.pool(Tier::Device).published(), 0);
        manager.check().unwrap();
    }
}

proptest! {
    #[test]
    fn a_quota_that_nobody_reaches_changes_nothing(eviction in policies(), blocks in 8usize..40, prompts in prompts()) {
        let mut managers = [(); 2].map(|()| manager(blocks, eviction));
        managers[1].set_quota([0; 32], None).unwrap();
        let mut live = Vec::new();
        for (tokens, priority, left) in prompts {
            while live.len() > left {
                let sequence = live.remove(0);
                for manager in &mut managers {
                    manager.free(&[sequence]).unwrap();
                }
            }
            let [plain, limited] = managers.each_mut().map(|manager| {
                let sequence = open(manager, &tokens)?;
                manager.set_priority(&[sequence], priority).unwrap();
                Some((sequence, manager.block_table(sequence).unwrap().to_vec()))
            });
            prop_assert_eq!(&plain, &limited);
            live.extend(plain.map(|(sequence, _)| sequence));
            let [plain, limited] = managers.each_ref().map(|manager| manager.pool(Tier::Device).evictable_blocks());
            prop_assert_eq!(plain, limited);
        }
    }
}

#[test]
fn a_prompt_that_continues_another_outlives_new_prompts_and_a_branch_does_not() {
    let mut manager = manager(16, Eviction::Adaptive);
    let mut run = |tokens: &[u32]| {
        let sequence = open(&mut manager, tokens).unwrap();
        manager.free(&[sequence]).unwrap();
        manager.lookup(&prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9])).unwrap().tokens
    };
    run(&[1, 2, 3, 4]);
    run(&[1, 2, 3, 4, 5, 6, 7, 8]);
    run(&[1, 2, 30, 40]);
    for new in 1..20 {
        assert_eq!(run(&[100 * new, 2, 3, 4]), 8);
    }
    assert_eq!(manager.lookup(&prompt(&[1, 2, 30, 40, 50])).unwrap().tokens, 2);
}

/// Most recently used first.
#[derive(Debug, Clone, Default)]
struct Mru(Vec<BlockId>);

impl Evictor for Mru {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn contains(&self, block: BlockId) -> bool {
        self.0.contains(&block)
    }

    fn insert(&mut self, block: BlockId) {
        self.0.push(block);
    }

    fn remove(&mut self, block: BlockId, _: Departure) -> bool {
        let before = self.0.len();
        self.0.retain(|&other| other != block);
        self.0.len() < before
    }

    fn pop(&mut self) -> Option<BlockId> {
        self.0.pop()
    }

    fn boxed_clone(&self) -> Box<dyn Evictor> {
        Box::new(self.clone())
    }
}

#[test]
fn the_callers_own_policy_decides() {
    let mut manager = manager(4, Eviction::Custom(|_| Box::new(Mru::default())));
    for tokens in [[1, 1], [2, 2], [3, 3], [4, 4], [5, 5]] {
        let sequence = open(&mut manager, &tokens).unwrap();
        manager.free(&[sequence]).unwrap();
        manager.check().unwrap();
    }
    let cached = |token| manager.lookup(&prompt(&[token, token, 0])).unwrap().tokens;
    assert_eq!([1, 2, 3, 4, 5].map(cached), [2, 2, 2, 0, 2]);
    assert_eq!(manager.clone().pool(Tier::Device).evictable(), 4);
}

#[test]
fn policies_are_found_by_their_names_and_others_are_not() {
    for policy in Eviction::NAMED {
        assert_eq!(Eviction::from_name(policy.name()).unwrap().name(), policy.name());
    }
    for writes in StoreWrites::ALL {
        assert_eq!(StoreWrites::from_name(writes.name()), Some(writes));
    }
    for cached in Cached::ALL {
        assert_eq!(Cached::from_name(cached.name()), Some(cached));
    }
    assert!(Eviction::from_name("custom").is_none());
    assert_eq!((StoreWrites::from_name("always"), Cached::from_name("keep")), (None, None));
}
