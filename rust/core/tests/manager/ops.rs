//! Random operations, for the test and for the fuzzer (`fuzz/fuzz_targets/manager.rs`).

use super::bytes::{Pages, pages};
use super::{groups, keep, moves, store, tables};
use blockyard_core::{Eviction, Group, Policies, ReuseOrder, StoreWrites};
use proptest::prelude::*;

/// Blocks of the three tiers, and the policies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) blocks: [usize; 3],
    pub(crate) policies: Policies,
    pub(crate) groups: &'static [Group],
    pub(crate) pages: Pages,
    /// Whether host copies are kept as a second level of the prefix cache.
    pub(crate) host_cache: bool,
    /// When blocks are written to a prefix store, if there is one.
    pub(crate) store: Option<StoreWrites>,
}

pub(crate) fn setup() -> impl Strategy<Value = Setup> {
    let reuse = prop::sample::select(&ReuseOrder::ALL[..]);
    let eviction = prop::sample::select(&Eviction::NAMED[..]);
    let blocks = (3usize..24, 0usize..16, 0usize..16);
    let made = (blocks, reuse, eviction, groups::groups(), any::<bool>(), store::writes());
    made.prop_map(|((device, host, external), reuse, eviction, groups, host_cache, store)| {
        let host_cache = host_cache && host > 1 && !groups.contains(&Group::CrossAttention);
        Setup {
            blocks: [device, host, external],
            policies: Policies { reuse, eviction },
            groups,
            pages: Pages::EQUAL,
            host_cache,
            store: store.filter(|_| groups == [Group::Full] || host_cache),
        }
    })
}

/// Groups with blocks of several sizes, mostly of several page classes.
pub(crate) fn paged_setup() -> impl Strategy<Value = Setup> {
    let reuse = prop::sample::select(&ReuseOrder::ALL[..]);
    let eviction = prop::sample::select(&Eviction::NAMED[..]);
    let blocks = (4usize..24, 0usize..16, 0usize..16);
    let made = (blocks, reuse, eviction, groups::paged(), pages(), any::<bool>(), store::writes());
    made.prop_map(|((device, host, external), reuse, eviction, groups, pages, host_cache, store)| {
        let host_cache = host_cache && host > 1 && !groups.contains(&Group::CrossAttention);
        Setup {
            blocks: [device, host, external],
            policies: Policies { reuse, eviction },
            groups,
            pages,
            host_cache,
            store: store.filter(|_| host_cache),
        }
    })
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Op {
    Allocate(u32),
    Prompt {
        tokens: u32,
        family: u32,
        chunk: u32,
    },
    Mark(usize, usize),
    MarkTo(usize, u32),
    Reset,
    Priority(usize, usize, u8),
    Fork(usize, u32),
    ForkPrefix(usize, u32),
    Append {
        first: usize,
        count: usize,
        tokens: u32,
        drafts: u32,
        lookahead: u32,
    },
    /// Appends several chunks to one sequence in one step.
    AppendTwice {
        pick: usize,
        tokens: [u32; 2],
        drafts: u32,
        lookahead: u32,
    },
    Tables(tables::Op),
    Keep(keep::Op),
    Moves(moves::Op),
    Store(store::Op),
    /// Adds a token to each of some sequences in each of some steps.
    Plain {
        first: usize,
        count: usize,
        steps: usize,
    },
    Free(usize, usize),
    SwapOut(usize, usize),
    SwapIn(usize, usize),
    SwapOutExternal(usize, usize),
    SwapInExternal(usize, usize, bool),
    /// Ends the step; the transfer of that number, if there is one, will fail.
    Step(Option<usize>),
    End(usize),
    /// A sequence is swapped out and in, and the block that it appends to is copied before the load has ended or
    /// failed.
    Return {
        pick: usize,
        lost: Option<usize>,
        tokens: u32,
    },
    /// Resizes the device to `blocks` blocks.
    Resize(usize),
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    let pick = 0usize..64;
    prop_oneof![
        3 => (0u32..14).prop_map(Op::Allocate),
        5 => (0u32..20, 0u32..3, prop_oneof![3 => Just(u32::MAX), 1 => 1u32..9])
            .prop_map(|(tokens, family, chunk)| Op::Prompt { tokens, family, chunk }),
        6 => (pick.clone(), 1usize..6).prop_map(|(s, n)| Op::Mark(s, n)),
        2 => (pick.clone(), 0u32..20).prop_map(|(s, n)| Op::MarkTo(s, n)),
        1 => Just(Op::Reset),
        1 => (pick.clone(), 1usize..4, 0u8..16).prop_map(|(s, n, p)| Op::Priority(s, n, p)),
        3 => (pick.clone(), 1u32..3).prop_map(|(s, n)| Op::Fork(s, n)),
        1 => (pick.clone(), 0u32..9).prop_map(|(s, n)| Op::ForkPrefix(s, n)),
        8 => (pick.clone(), 1usize..5, 0u32..6, tables::drafts(), 0u32..4)
            .prop_map(|(first, count, tokens, drafts, lookahead)| Op::Append { first, count, tokens, drafts, lookahead }),
        5 => (pick.clone(), [1u32..9, 1u32..9], tables::drafts(), prop_oneof![2 => Just(0), 1 => 1u32..6])
            .prop_map(|(pick, tokens, drafts, lookahead)| Op::AppendTwice { pick, tokens, drafts, lookahead }),
        12 => tables::op().prop_map(Op::Tables),
        2 => (pick.clone(), 1usize..4, 1usize..10)
            .prop_map(|(first, count, steps)| Op::Plain { first, count, steps }),
        7 => keep::op().prop_map(Op::Keep),
        8 => moves::op().prop_map(Op::Moves),
        8 => store::op().prop_map(Op::Store),
        3 => (pick.clone(), 1usize..3).prop_map(|(s, n)| Op::Free(s, n)),
        4 => (pick.clone(), 1usize..4).prop_map(|(s, n)| Op::SwapOut(s, n)),
        4 => (pick.clone(), 1usize..4).prop_map(|(s, n)| Op::SwapIn(s, n)),
        3 => (pick.clone(), 1usize..4).prop_map(|(s, n)| Op::SwapOutExternal(s, n)),
        3 => (pick.clone(), 1usize..4, any::<bool>()).prop_map(|(s, n, d)| Op::SwapInExternal(s, n, d)),
        12 => Just(Op::Step(None)),
        2 => pick.clone().prop_map(|n| Op::Step(Some(n))),
        8 => pick.clone().prop_map(Op::End),
        2 => (pick.clone(), prop::option::of(pick.clone()), 1u32..9)
            .prop_map(|(pick, lost, tokens)| Op::Return { pick, lost, tokens }),
        3 => (0usize..40).prop_map(Op::Resize),
    ]
}
