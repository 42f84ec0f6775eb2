//! Every public verb on a copy of the manager, in random states: the answer of its `can_` query holds, and if any step
//! of a call fails, the call changes nothing.

use super::{BLOCK, Op, Setup, World, cases, keep, op, paged_setup, setup, store::family_ids};
use blockyard_core::defrag::{Budget, Goal};
use blockyard_core::{
    AllocStatus, Append, Cached, Counts, Demand, Error, Fit, Group, Manager, Prompt, PromptOptions, SequenceId,
    StoreJob, TableRows, Tier,
};
use proptest::prelude::*;

#[derive(Debug, Clone, Copy)]
enum Verb {
    Allocate,
    AllocateEncoded,
    Prompt,
    Prompts,
    Append,
    AppendDrafts,
    AppendTables,
    AppendTokens,
    Note,
    Mark,
    MarkTo,
    Fork,
    ForkPrefix,
    Truncate,
    Free,
    Priority,
    Swap(Tier),
    Complete,
    Fail,
    Pin,
    PinPrompt,
    Unpin,
    Offload,
    Quota,
    Resize,
    Defragment,
    Load,
    EndLoad,
    EndWrite,
}

const VERBS: [Verb; 31] = [
    Verb::Allocate,
    Verb::AllocateEncoded,
    Verb::Prompt,
    Verb::Prompts,
    Verb::Append,
    Verb::AppendDrafts,
    Verb::AppendTables,
    Verb::AppendTokens,
    Verb::Note,
    Verb::Mark,
    Verb::MarkTo,
    Verb::Fork,
    Verb::ForkPrefix,
    Verb::Truncate,
    Verb::Free,
    Verb::Priority,
    Verb::Swap(Tier::Device),
    Verb::Swap(Tier::Host),
    Verb::Swap(Tier::External),
    Verb::Complete,
    Verb::Fail,
    Verb::Pin,
    Verb::PinPrompt,
    Verb::Unpin,
    Verb::Offload,
    Verb::Quota,
    Verb::Resize,
    Verb::Defragment,
    Verb::Load,
    Verb::EndLoad,
    Verb::EndWrite,
];

/// One call; each verb interprets the numbers in its own way.
#[derive(Debug, Clone, Copy)]
struct Call {
    verb: Verb,
    first: usize,
    count: usize,
    tokens: u32,
    more: u32,
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let call = (prop::sample::select(&VERBS[..]), 0usize..64, 0usize..5, 0u32..20, 0u32..4);
    let call = call.prop_map(|(verb, first, count, tokens, more)| Call { verb, first, count, tokens, more });
    prop::collection::vec(call, 12)
}

/// A token and some drafts for each of a batch.
fn with_drafts<T>(sequences: usize, drafts: u32, append: impl FnOnce(Counts<'_>) -> T) -> T {
    let (tokens, drafts) = (vec![1 + drafts; sequences], vec![drafts; sequences]);
    append(Counts::Drafted { tokens: &tokens, drafts: &drafts })
}

fn prompt(ids: &[u32]) -> Prompt<'_> {
    Prompt { tokens: ids, spec: keep::spec(ids), extras: &[], hashed: None }
}

/// The sequences that a call names, and whether moving them leads away from the device.
struct Named {
    sequences: Vec<SequenceId>,
    leads_away: bool,
}

/// A manager, and the objects that a call on it may name.
struct ReachedState {
    manager: Manager,
    all: Vec<SequenceId>,
    loads: Vec<StoreJob>,
    writes: Vec<StoreJob>,
}

impl ReachedState {
    /// Runs a program.
    fn new(setup: Setup, ops: Vec<Op>) -> Self {
        let mut world = World::new(setup);
        for op in ops {
            world.apply(op);
            world.manager.check().unwrap();
        }
        let (loads, writes) = world.jobs.under_way();
        Self { all: world.truth.keys().copied().collect(), manager: world.manager, loads, writes }
    }

    /// The sequences that a call names: some of all, mostly of one tier. One call in 16 names an unknown one, or one
    /// twice.
    fn named(&self, call: Call) -> Named {
        let sequences = self.sequences(call);
        let from = sequences.first().and_then(|&sequence| self.manager.tier(sequence).ok());
        Named { leads_away: from.is_none_or(|from| matches!(call.verb, Verb::Swap(to) if from < to)), sequences }
    }

    fn sequences(&self, call: Call) -> Vec<SequenceId> {
        let tier = |sequence: &SequenceId| self.manager.tier(*sequence).unwrap();
        let mixed = call.first % 8 == 0;
        let Some(&first) = self.all.get(call.first % self.all.len().max(1)) else { return vec![] };
        let alike = self.all.iter().cycle().skip(call.first % self.all.len());
        let mut named: Vec<_> =
            alike.take(self.all.len()).filter(|s| mixed || tier(s) == tier(&first)).copied().collect();
        named.truncate(call.count);
        match call.first {
            61 => named.extend(named.first().copied()),
            62 => named.push(SequenceId::new(0, 9999, 1)),
            _ => {}
        }
        named
    }

    fn has_window(&self) -> bool {
        self.manager.groups().iter().any(|group| matches!(group, Group::SlidingWindow { .. } | Group::Chunked { .. }))
    }

    /// The answer of the call's `can_` query, if it has one.
    fn ask(&self, manager: &mut Manager, call: Call) -> Option<Result<Fit, Error>> {
        let (Call { verb, tokens, more, .. }, Named { sequences: named, leads_away }) = (call, self.named(call));
        Some(match verb {
            Verb::Allocate => Ok(manager.can_admit(&Demand { tokens, ..Demand::default() })),
            Verb::AllocateEncoded => {
                Ok(manager.can_admit(&Demand { tokens, encoder_tokens: more, ..Demand::default() }))
            }
            Verb::Prompt => manager.can_admit_prompt(&prompt(&family_ids(tokens, more)), u32::MAX, 0, 0),
            Verb::Append => manager.can_append(&named, Counts::All(tokens), more),
            Verb::AppendDrafts => {
                with_drafts(named.len(), more, |counts| manager.can_append(&named, counts, tokens % 3))
            }
            Verb::Swap(to) if leads_away && to != Tier::Device => manager.can_swap_out(&named, to),
            Verb::Swap(to) => manager.can_swap_in(&named, to, more),
            _ => return None,
        })
    }

    /// Makes the call. After a swap to the device, appends the token and the drafts that the query included.
    fn answer(&self, manager: &mut Manager, call: Call) -> Result<(), Error> {
        let named = self.named(call);
        self.run(manager, call, &named)?;
        let named = named.sequences;
        if !matches!(call.verb, Verb::Swap(Tier::Device)) {
            return Ok(());
        }
        let mut slots = vec![0; named.len() * (1 + call.more) as usize * manager.growing_groups()];
        with_drafts(named.len(), call.more, |counts| manager.append(Append::new(&named, counts, &mut slots)))
    }

    fn run(&self, manager: &mut Manager, call: Call, named: &Named) -> Result<(), Error> {
        let (Call { verb, first, count, tokens, more }, Named { sequences: named, leads_away }) = (call, named);
        let (one, mut out) = (named.first().copied().unwrap_or(SequenceId::new(0, 9999, 1)), Vec::new());
        let slots = &mut vec![0; named.len() * tokens as usize * manager.growing_groups()];
        let batch = Append { lookahead: more, ..Append::new(named, Counts::All(tokens), slots) };
        let ticket = manager.open_tickets().nth(first % manager.num_open_tickets().max(1));
        let encoded = manager.growing_groups() < manager.groups().len();
        match verb {
            Verb::Allocate if !encoded => manager.allocate(&[tokens], &mut out),
            Verb::Allocate => manager.allocate_encoded(&[tokens], &[0], &mut out),
            Verb::AllocateEncoded if encoded => manager.allocate_encoded(&[tokens], &[more], &mut out),
            Verb::AllocateEncoded => manager.allocate(&[tokens], &mut out),
            Verb::Prompt => {
                let ids = family_ids(tokens, more);
                manager.allocate_prompts(&[prompt(&ids)], PromptOptions::default(), &mut Vec::new())
            }
            Verb::Prompts => {
                let all = [family_ids(tokens, more), family_ids(tokens / 2, more), family_ids(tokens, 1)];
                let options = PromptOptions { chunk: 1 + more * 3, preempted: false };
                manager.allocate_prompts(&all.each_ref().map(|ids| prompt(ids)), options, &mut Vec::new())
            }
            Verb::Append => manager.append(batch),
            Verb::AppendDrafts => {
                let slots = &mut vec![0; named.len() * (1 + more) as usize * manager.growing_groups()];
                with_drafts(named.len(), more, |counts| {
                    manager.append(Append { lookahead: tokens % 3, ..Append::new(named, counts, slots) })
                })
            }
            Verb::AppendTables => {
                let tables = &mut vec![0; named.len() * manager.growing_groups() * 64];
                manager.append(Append { tables: Some(TableRows::new(tables, 64)), ..batch })
            }
            Verb::AppendTokens => {
                let ids = vec![more; named.len() * tokens as usize];
                manager.append(Append { token_ids: Some(&ids), ..batch })
            }
            Verb::Note => manager.note_tokens(named, Counts::All(more), &vec![7; named.len() * more as usize]),
            Verb::Mark => manager.mark_computed(named),
            Verb::MarkTo => manager.mark_computed_to(named, Some(&vec![tokens; named.len()])),
            Verb::Fork => manager.fork(one, more, &mut out),
            Verb::ForkPrefix => manager.fork_prefix(one, more * BLOCK, tokens).map(drop),
            Verb::Truncate => manager.truncate(one, tokens),
            Verb::Free => manager.free(named),
            Verb::Priority => manager.set_priority(named, 3),
            Verb::Swap(to) if *leads_away && to != Tier::Device => manager.swap_out(named, to),
            Verb::Swap(to) => manager.swap_in(named, to),
            Verb::Complete => ticket.map_or(Ok(()), |ticket| manager.complete(ticket)),
            Verb::Fail => ticket.map_or(Ok(()), |ticket| manager.fail_whole(ticket).map(drop)),
            Verb::Pin => manager.pin(one).map(drop),
            Verb::PinPrompt => manager.pin_prompt(&prompt(&family_ids(tokens, more))).map(drop),
            Verb::Unpin => manager.unpin(blockyard_core::PinId(first as u64)),
            Verb::Offload => manager.offload_cached(count).map(drop),
            Verb::Quota => manager.set_quota([more as u8; 32], Some(count)),
            Verb::Resize if manager.num_classes() == 1 => manager.resize_device(tokens as usize * 2).map(drop),
            Verb::Resize if first % 2 == 0 => manager.resize_extents(tokens as usize * 2).map(drop),
            Verb::Resize => manager.resize_split(&vec![tokens as usize * 2; manager.num_classes()]).map(drop),
            Verb::Defragment => {
                manager.defragment(&[Goal::Dense(more).into()], None, Budget::UNLIMITED, Cached::Exchange).map(drop)
            }
            Verb::Load => manager.begin_load(&prompt(&family_ids(tokens, more)), count, None).map(drop),
            Verb::EndLoad => self
                .loads
                .first()
                .map_or(Ok(()), |job| manager.end_load(job.job, &vec![more > 0; job.blocks.len()]).map(drop)),
            Verb::EndWrite => self.writes.first().map_or(Ok(()), |job| manager.end_write(job.job).map(drop)),
        }
    }

    /// The manager after all tickets have ended and only the call's sequences are left; without any, nothing is cached.
    fn emptied(&self, call: Call) -> Manager {
        let (mut manager, named) = (self.manager.clone(), self.sequences(call));
        let _ = manager.take_decision();
        for ticket in manager.open_tickets().collect::<Vec<_>>() {
            manager.complete(ticket).unwrap();
        }
        end_jobs(&mut manager, &self.loads, &self.writes);
        (0..99).for_each(|pin| drop(manager.unpin(blockyard_core::PinId(pin))));
        let is_named = matches!(call.verb, Verb::Append | Verb::AppendDrafts | Verb::Swap(_));
        let others: Vec<_> = self.all.iter().filter(|s| !(is_named && named.contains(s))).copied().collect();
        manager.free(&others).unwrap();
        assert!(is_named || !manager.is_caching() || manager.reset_prefix_cache());
        manager
    }
}

fn end_jobs(manager: &mut Manager, loads: &[StoreJob], writes: &[StoreJob]) {
    manager.end_leases();
    for job in loads {
        manager.end_load(job.job, &vec![false; job.blocks.len()]).unwrap();
    }
    for job in writes {
        manager.end_write(job.job).unwrap();
    }
}

/// The whole state of a manager, except scratch data that a call leaves behind, and whether classes pack their blocks,
/// as they do from an append on that failed for lack of an extent.
pub(crate) fn dump(manager: &Manager) -> String {
    let text = format!("{manager:?}");
    let (mut kept, mut rest) = (String::with_capacity(text.len()), text.as_str());
    let names = [" stamp: ", " epoch: ", " scratch: ", " work: ", " packing: "];
    while let Some((at, name)) = names.iter().filter_map(|name| Some((rest.find(name)?, name))).min() {
        kept.push_str(&rest[..at]);
        rest = &rest[at + name.len()..];
        let mut depth = 0;
        let ends = |c: char| {
            depth += i32::from("[{(".contains(c)) - i32::from("]})".contains(c));
            depth < 0 || (depth == 0 && c == ',')
        };
        rest = &rest[rest.find(ends).unwrap_or(0)..];
    }
    kept + rest
}

/// Where two dumps differ.
pub(crate) fn difference(before: &str, after: &str) -> Option<String> {
    let at = before.bytes().zip(after.bytes()).position(|(a, b)| a != b).unwrap_or(before.len().min(after.len()));
    let part = |text: &str| text.chars().skip(at.saturating_sub(60)).take(120).collect::<String>();
    (before != after).then(|| format!("{} became {}", part(before), part(after)))
}

/// Compares the answer of a query with the result of the call right after it.
fn agrees(state: &ReachedState, call: Call) {
    let (mut manager, before) = (state.manager.clone(), dump(&state.manager));
    let Some(asked) = state.ask(&mut manager, call) else { return };
    assert_eq!(difference(&before, &dump(&manager)), None, "{call:?}: a query has changed something");
    let result = state.answer(&mut manager, call);
    manager.check().unwrap();
    let fit = match asked {
        Ok(fit) => fit,
        Err(error) => return assert_eq!(Err(error), result, "{call:?}"),
    };
    assert_eq!(fit.status == AllocStatus::Ok, result.is_ok(), "{call:?}: {fit:?}, {result:?}");
    let alone = state.answer(&mut state.emptied(call), call);
    match fit.status {
        AllocStatus::Never => assert!(alone.is_err(), "{call:?}: {fit:?}"),
        // The exceptions: the blocks of sequences that cannot move yet are not counted; an append may free blocks of
        // its own sequences; a window may need fewer blocks while some are cached; and if there are too few blocks in
        // all, a cached copy must be evicted first.
        AllocStatus::Later
            if (1..=state.manager.pool(Tier::Device).len()).contains(&fit.blocks)
                && !matches!(call.verb, Verb::Append | Verb::AppendDrafts)
                && !state.has_window() =>
        {
            assert_eq!(alone, Ok(()), "{call:?}: {fit:?}");
        }
        _ => {}
    }
}

/// Makes each fallible step of a call fail, one after the other.
#[cfg(debug_assertions)]
fn fails_whole(state: &ReachedState, call: Call) {
    let (named, before) = (state.named(call), dump(&state.manager));
    let changed = |manager: &Manager, result: &Result<(), Error>| {
        result.as_ref().err().and_then(|_| difference(&before, &dump(manager)))
    };
    for n in 1.. {
        let mut manager = state.manager.clone();
        let _ = blockyard_core::error::fault::arm(n);
        let result = state.run(&mut manager, call, &named);
        if blockyard_core::error::fault::arm(0) {
            // The call has fewer steps: this is its own result.
            assert_eq!(changed(&manager, &result), None, "{call:?}: {result:?}");
            return manager.check().unwrap();
        }
        manager.check().unwrap();
        assert_eq!(changed(&manager, &result), None, "{call:?}: step {n} failed after a change");
    }
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(op(), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]
    #[test]
    fn a_call_does_what_its_query_said(setup in setup(), ops in ops(), calls in calls()) {
        let state = ReachedState::new(setup, ops);
        for call in calls {
            agrees(&state, call);
        }
    }

    #[test]
    fn a_call_with_blocks_of_several_sizes_does_what_its_query_said(
        setup in paged_setup(), ops in ops(), calls in calls()
    ) {
        let state = ReachedState::new(setup, ops);
        for call in calls {
            agrees(&state, call);
        }
    }

    #[cfg(debug_assertions)]
    #[test]
    fn a_call_that_fails_at_any_step_changes_nothing(
        setup in prop_oneof![setup(), paged_setup()], ops in ops(), calls in calls()
    ) {
        let state = ReachedState::new(setup, ops);
        for call in calls {
            fails_whole(&state, call);
        }
    }
}
