//! The standalone allocators against a plain model, a map of references. After each operation every count is compared.

#![expect(clippy::unwrap_used, reason = "helpers of tests, beside the test functions that clippy.toml exempts")]

use blockyard_core::ReuseOrder;
use blockyard_core::allocator::Eviction;
use blockyard_core::allocator::Lookups;
use blockyard_core::hash::{Chain, Key, KeySpec};
use blockyard_core::{BlockAllocator, BlockId, Error, Keyed, NaiveAllocator, PrefixCachingAllocator, Tier};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

const BLOCKS: usize = 12;

fn naive(reuse: ReuseOrder) -> NaiveAllocator {
    NaiveAllocator::new(Tier::Device, BLOCKS, reuse).unwrap()
}

fn caching(reuse: ReuseOrder, eviction: Eviction) -> PrefixCachingAllocator {
    PrefixCachingAllocator::new(Tier::Device, BLOCKS, reuse, eviction).unwrap()
}

fn key(n: u32) -> Key {
    Chain::new(&KeySpec::default(), 1, 0).block(&[n], &[]).unwrap()
}

fn keyed(n: u32) -> Keyed {
    Keyed { key: key(n), depth: n }
}

fn take(allocator: &mut dyn BlockAllocator, count: usize) -> Vec<u32> {
    let mut out = Vec::new();
    allocator.allocate(count, &mut out).unwrap();
    out.iter().map(|block| block.0).collect()
}

fn take_keys(allocator: &mut dyn BlockAllocator, keys: &[u32]) -> (Vec<BlockId>, usize) {
    let (mut out, keys): (Vec<BlockId>, Vec<Keyed>) = (Vec::new(), keys.iter().map(|&n| keyed(n)).collect());
    let hits = allocator.allocate_keyed(&keys, 0, &mut out).unwrap();
    (out, hits)
}

fn free(allocator: &mut dyn BlockAllocator, blocks: &[u32]) {
    allocator.free(&blocks.iter().copied().map(BlockId).collect::<Vec<_>>()).unwrap();
}

#[test]
fn each_order_takes_blocks_as_its_name_says() {
    for (reuse, expected) in
        [(ReuseOrder::Lowest, [1, 3, 4]), (ReuseOrder::Fifo, [5, 6, 7]), (ReuseOrder::Lifo, [1, 4, 3])]
    {
        let mut allocator = naive(reuse);
        assert_eq!(take(&mut allocator, 5), [0, 1, 2, 3, 4]);
        free(&mut allocator, &[3, 4, 1]);
        let upcoming: Vec<u32> = allocator.upcoming().take(3).map(|block| block.0).collect();
        assert_eq!(upcoming, expected);
        assert_eq!(take(&mut allocator, 3), expected);
        allocator.check().unwrap();
    }
}

#[test]
fn a_batch_that_does_not_fit_changes_nothing_and_its_error_has_the_numbers() {
    let mut allocator = caching(ReuseOrder::Lifo, Eviction::Accessed);
    take(&mut allocator, 8);
    let before = format!("{allocator:?}");
    let error = allocator.allocate_keyed(&[keyed(1), keyed(2)], 3, &mut Vec::new()).unwrap_err();
    assert_eq!(error, Error::OutOfBlocks { tier: Tier::Device, wanted: 5, free: 4, total: BLOCKS, page_class: None });
    assert!(allocator.free(&[BlockId(0), BlockId(1), BlockId(0)]).is_err());
    assert!(allocator.share(&[BlockId(0), BlockId(11)]).is_err());
    assert_eq!(format!("{allocator:?}"), before);
}

#[test]
fn the_null_block_is_taken_once_and_never_freed() {
    for allocator in
        [&mut naive(ReuseOrder::Lowest) as &mut dyn BlockAllocator, &mut caching(ReuseOrder::Fifo, Eviction::Released)]
    {
        let null = allocator.null_block().unwrap();
        assert_eq!(allocator.null_block().unwrap(), null);
        assert!(allocator.free(&[null]).is_err());
        assert!(allocator.share(&[null]).is_err());
        assert_eq!(allocator.pool().free(), BLOCKS - 1);
    }
}

#[test]
fn a_shared_block_is_copied_and_the_last_owner_writes_in_place() {
    let mut allocator = naive(ReuseOrder::Lowest);
    take(&mut allocator, 1);
    allocator.share(&[BlockId(0)]).unwrap();
    let mut out = Vec::new();
    allocator.make_writable(&[BlockId(0), BlockId(0)], &mut out).unwrap();
    assert_eq!(out, [BlockId(1), BlockId(0)]);
    allocator.check().unwrap();
}

#[test]
fn a_block_counts_as_computed_only_after_its_step() {
    let mut allocator = caching(ReuseOrder::Lowest, Eviction::Released);
    let (blocks, hits) = take_keys(&mut allocator, &[1, 2]);
    assert_eq!((hits, allocator.find(&[key(1)]).len()), (0, 0));
    assert_eq!(take_keys(&mut allocator, &[1]), (blocks[..1].to_vec(), 1));
    allocator.mark_computed(Some(&blocks[..1]));
    assert_eq!(allocator.find(&[key(1), key(2)]), blocks[..1]);
    allocator.mark_computed(None);
    assert_eq!(allocator.find(&[key(1), key(2)]), blocks);
    assert_eq!(allocator.lookups(), Some(Lookups { queries: 3, hits: 1 }));
}

#[test]
fn a_block_freed_before_it_was_computed_is_never_found() {
    let mut allocator = caching(ReuseOrder::Lowest, Eviction::Accessed);
    let (blocks, _) = take_keys(&mut allocator, &[1]);
    allocator.free(&blocks).unwrap();
    allocator.mark_computed(None);
    assert!(allocator.find(&[key(1)]).is_empty());
    assert_eq!(take_keys(&mut allocator, &[1]).0, blocks);
    assert!(allocator.find(&[key(1)]).is_empty());
    allocator.mark_computed(None);
    assert_eq!(allocator.find(&[key(1)]), blocks);
}

#[test]
fn of_blocks_last_used_at_the_same_time_the_longest_prefix_is_evicted_first() {
    let mut allocator = caching(ReuseOrder::Lifo, Eviction::Accessed);
    let keys: Vec<u32> = (0..u32::try_from(BLOCKS).unwrap()).collect();
    let (blocks, _) = take_keys(&mut allocator, &keys);
    allocator.mark_computed(None);
    allocator.touch(&blocks[..6], 5.0).unwrap();
    allocator.touch(&blocks[6..], -2.0).unwrap();
    allocator.free(&blocks).unwrap();
    allocator.touch(&blocks[9..10], 9.0).unwrap();
    assert_eq!(take(&mut allocator, 7), [11, 10, 8, 7, 6, 5, 4]);
    assert_eq!((allocator.pool().evictions(), allocator.pool().published()), (7, 5));
    assert!(allocator.touch(&[BlockId(0)], f64::NAN).is_err());
    allocator.check().unwrap();
}

#[test]
fn a_full_block_takes_the_id_of_the_one_that_has_its_key() {
    let mut allocator = caching(ReuseOrder::Lowest, Eviction::Released);
    let (first, _) = take_keys(&mut allocator, &[7]);
    let own = BlockId(take(&mut allocator, 1)[0]);
    assert_eq!(allocator.publish(own, keyed(7)).unwrap(), first[0]);
    assert_eq!((allocator.pool().refs(first[0]), allocator.pool().refs(own)), (2, 0));
    allocator.check().unwrap();
}

#[test]
fn reset_forgets_all_unless_a_block_is_in_use() {
    for eviction in [Eviction::Released, Eviction::Accessed] {
        let mut allocator = caching(ReuseOrder::Lifo, eviction);
        let (blocks, _) = take_keys(&mut allocator, &[1, 2]);
        assert!(!allocator.reset());
        allocator.free(&blocks).unwrap();
        assert!(allocator.reset());
        assert_eq!((allocator.holder(&key(1)), allocator.pool().free()), (None, BLOCKS));
        allocator.check().unwrap();
    }
}

#[derive(Clone, Debug)]
enum Op {
    Take(usize),
    Keys(Vec<u32>, usize),
    Share(usize),
    Free(usize),
    Write(usize),
    Publish(usize, u32),
    Mark,
    Touch(usize, i8),
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (0usize..5).prop_map(Op::Take),
        (prop::collection::vec(0u32..20, 0..5), 0usize..3).prop_map(|(keys, plain)| Op::Keys(keys, plain)),
        any::<usize>().prop_map(Op::Share),
        any::<usize>().prop_map(Op::Free),
        any::<usize>().prop_map(Op::Free),
        any::<usize>().prop_map(Op::Free),
        any::<usize>().prop_map(Op::Write),
        (any::<usize>(), 0u32..20).prop_map(|(at, key)| Op::Publish(at, key)),
        Just(Op::Mark),
        (any::<usize>(), any::<i8>()).prop_map(|(at, now)| Op::Touch(at, now)),
        Just(Op::Reset),
    ]
}

/// References that the model holds.
#[derive(Default)]
struct Model {
    held: Vec<BlockId>,
}

fn apply(allocator: &mut dyn BlockAllocator, model: &mut Model, op: &Op) {
    let pick = |at: usize| (!model.held.is_empty()).then(|| at % model.held.len());
    match op {
        Op::Take(count) => {
            let free = allocator.pool().free();
            assert_eq!(allocator.allocate(*count, &mut model.held).is_ok(), *count <= free);
        }
        Op::Keys(keys, plain) => {
            let first = model.held.len();
            let wanted = allocator.cost(&keys.iter().map(|&n| key(n)).collect::<Vec<_>>()) + plain;
            let fits = allocator.lookups().is_some() || keys.len() + plain <= allocator.pool().free();
            let fits = fits && wanted <= allocator.pool().free();
            let unknown: HashSet<u32> = keys.iter().copied().filter(|&n| allocator.holder(&key(n)).is_none()).collect();
            let hits = if allocator.lookups().is_some() { keys.len() - unknown.len() } else { 0 };
            let keys: Vec<Keyed> = keys.iter().map(|&n| keyed(n)).collect();
            assert_eq!(allocator.allocate_keyed(&keys, *plain, &mut model.held).ok(), fits.then_some(hits));
            if !fits {
                assert_eq!(model.held.len(), first);
            }
        }
        Op::Share(at) => {
            if let Some(at) = pick(*at) {
                allocator.share(&[model.held[at]]).unwrap();
                model.held.push(model.held[at]);
            }
        }
        Op::Free(at) => {
            if let Some(at) = pick(*at) {
                let block = model.held.swap_remove(at);
                allocator.free(&[block]).unwrap();
            }
        }
        Op::Write(at) => {
            if let Some(at) = pick(*at) {
                let mut out = Vec::new();
                if allocator.make_writable(&[model.held[at]], &mut out).is_ok() {
                    model.held[at] = out[0];
                    assert_eq!(allocator.pool().refs(out[0]), 1);
                }
            }
        }
        Op::Publish(at, n) => {
            if let Some(at) = pick(*at) {
                model.held[at] = allocator.publish(model.held[at], keyed(*n)).unwrap();
            }
        }
        Op::Mark => allocator.mark_computed(None),
        Op::Touch(at, now) => {
            if let Some(at) = pick(*at) {
                allocator.touch(&[model.held[at]], f64::from(*now)).unwrap();
            }
        }
        Op::Reset => {
            let naive = allocator.lookups().is_none();
            assert_eq!(allocator.reset(), naive || model.held.is_empty());
        }
    }
}

fn agree(allocator: &dyn BlockAllocator, model: &Model) {
    allocator.check().unwrap();
    let mut refs: HashMap<BlockId, u32> = HashMap::new();
    for &block in &model.held {
        *refs.entry(block).or_default() += 1;
    }
    for block in (0..).map(BlockId).take(BLOCKS) {
        assert_eq!(allocator.pool().refs(block), refs.get(&block).copied().unwrap_or(0));
    }
    assert_eq!(allocator.pool().free(), BLOCKS - refs.len());
    let found: Vec<BlockId> = (0..20).filter_map(|n| allocator.holder(&key(n))).collect();
    assert_eq!(found.iter().collect::<HashSet<_>>().len(), found.len(), "two keys, one block");
    assert_eq!(found.len(), allocator.pool().published(), "every published block is found by its key");
}

proptest! {
    #[test]
    fn references_agree_with_a_plain_count(
        kind in 0usize..9, ops in prop::collection::vec(op(), 0..120),
    ) {
        let reuse = [ReuseOrder::Lowest, ReuseOrder::Fifo, ReuseOrder::Lifo][kind % 3];
        let mut allocator: Box<dyn BlockAllocator> = match kind / 3 {
            0 => Box::new(naive(reuse)),
            1 => Box::new(caching(reuse, Eviction::Released)),
            _ => Box::new(caching(reuse, Eviction::Accessed)),
        };
        let mut model = Model::default();
        for op in &ops {
            apply(allocator.as_mut(), &mut model, op);
            agree(allocator.as_ref(), &model);
        }
    }
}

#[test]
fn cached_blocks_are_kept_while_others_are_free() {
    for eviction in [Eviction::Released, Eviction::Accessed] {
        let mut allocator = caching(ReuseOrder::Lowest, eviction);
        let (blocks, _) = take_keys(&mut allocator, &[1, 2, 3]);
        allocator.mark_computed(None);
        free(&mut allocator, &blocks.iter().map(|block| block.0).collect::<Vec<_>>());
        assert_eq!(take(&mut allocator, BLOCKS - 3), (3..12).collect::<Vec<_>>());
        assert_eq!(take_keys(&mut allocator, &[1, 2, 3]), (blocks, 3));
        allocator.check().unwrap();
    }
}
