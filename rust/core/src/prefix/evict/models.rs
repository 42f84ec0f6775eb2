//! Policies against plain models: lists that are searched from their beginning.

use super::arc::Arc;
use super::ghosts::{Ghosts, Sample};
use super::miniature::{Chain, Miniatures};
use super::policy::Lfu;
use super::s3fifo::{S3Fifo, S3FifoSettings};
use super::segments::{Rule, Segments};
use super::{Departure, Evictor};
use crate::id::BlockId;
use proptest::prelude::*;
use std::collections::HashMap;

const BLOCKS: usize = 24;

/// What a pool asks of a policy, for policies and models alike.
trait Plain {
    fn publish(&mut self, block: BlockId, tag: u32);
    fn begin_chain(&mut self);
    fn insert(&mut self, block: BlockId);
    fn hit(&mut self, block: BlockId);
    fn take(&mut self, count: usize) -> Vec<BlockId>;
}

impl<E: Evictor> Plain for E {
    fn publish(&mut self, block: BlockId, tag: u32) {
        Evictor::publish(self, block, 0, tag);
    }

    fn begin_chain(&mut self) {
        Evictor::begin_chain(self);
    }

    fn insert(&mut self, block: BlockId) {
        Evictor::insert(self, block);
    }

    fn hit(&mut self, block: BlockId) {
        assert!(self.remove(block, Departure::Hit), "{block} is not evictable");
    }

    fn take(&mut self, count: usize) -> Vec<BlockId> {
        (0..count).map(|_| Evictor::pop(self).unwrap()).collect()
    }
}

/// An evictable block of a model.
#[derive(Clone, Copy)]
struct Entry {
    block: BlockId,
    tag: u32,
    /// Hits, or the segment it is in.
    class: usize,
}

/// Which entry a model takes; of those before it in the list all are older. It may put others back first.
trait Choice {
    /// Class of a block that was hit or published, given its class before.
    fn class(&mut self, before: Option<usize>, tag: u32) -> usize;
    /// Class of a block that is released in a chain with such a highest class so far.
    fn floor(&self, class: usize, floor: usize) -> usize {
        class.max(floor)
    }
    fn choose(&mut self, entries: &mut Vec<Entry>) -> usize;
    /// Entries that were taken together.
    fn gone(&mut self, entries: &[Entry]);
    fn inserted(&mut self) {}
    fn begin_chain(&mut self, _entries: &[Entry]) {}
}

struct Model<C> {
    choice: C,
    entries: Vec<Entry>,
    known: HashMap<BlockId, Entry>,
    floor: usize,
}

impl<C: Choice> Model<C> {
    fn new(choice: C) -> Self {
        Self { choice, entries: Vec::new(), known: HashMap::new(), floor: 0 }
    }
}

impl<C: Choice> Plain for Model<C> {
    fn publish(&mut self, block: BlockId, tag: u32) {
        let class = self.choice.class(None, tag);
        self.known.insert(block, Entry { block, tag, class });
    }

    fn begin_chain(&mut self) {
        self.floor = 0;
        self.choice.begin_chain(&self.entries);
    }

    fn insert(&mut self, block: BlockId) {
        let mut entry = self.known[&block];
        entry.class = self.choice.floor(entry.class, self.floor);
        self.floor = entry.class;
        self.entries.push(entry);
        self.choice.inserted();
    }

    fn hit(&mut self, block: BlockId) {
        let at = self.entries.iter().position(|entry| entry.block == block).unwrap();
        let mut entry = self.entries.remove(at);
        entry.class = self.choice.class(Some(entry.class), entry.tag);
        self.known.insert(block, entry);
    }

    fn take(&mut self, count: usize) -> Vec<BlockId> {
        let one = |_| {
            let at = self.choice.choose(&mut self.entries);
            self.entries.remove(at)
        };
        let taken: Vec<Entry> = (0..count).map(one).collect();
        self.choice.gone(&taken);
        taken.iter().map(|entry| entry.block).collect()
    }
}

fn first(entries: &[Entry], is_wanted: impl Fn(&Entry) -> bool) -> Option<usize> {
    entries.iter().position(is_wanted)
}

struct LfuModel;

impl Choice for LfuModel {
    fn class(&mut self, before: Option<usize>, _: u32) -> usize {
        before.map_or(0, |hits| (hits + 1).min(15))
    }

    fn choose(&mut self, entries: &mut Vec<Entry>) -> usize {
        let least = entries.iter().map(|entry| entry.class).min();
        first(entries, |entry| Some(entry.class) == least).unwrap()
    }

    fn gone(&mut self, _: &[Entry]) {}
}

struct S3FifoModel(Ghosts);

impl Choice for S3FifoModel {
    fn class(&mut self, before: Option<usize>, tag: u32) -> usize {
        before.map_or_else(|| usize::from(self.0.take(tag)), |hits| (hits + 1).min(3))
    }

    fn choose(&mut self, entries: &mut Vec<Entry>) -> usize {
        loop {
            let small = entries.iter().filter(|entry| entry.class == 0).count();
            let is_small = small > BLOCKS * 30 / 100 || entries[0].class == 0 || small == entries.len();
            if is_small {
                return first(entries, |entry| entry.class == 0).unwrap();
            }
            let mut oldest = entries[0];
            if oldest.class == 1 {
                return 0;
            }
            oldest.class -= 1;
            entries.remove(0);
            entries.push(oldest);
        }
    }

    fn gone(&mut self, entries: &[Entry]) {
        for entry in entries.iter().filter(|entry| entry.class == 0) {
            self.0.insert(entry.tag);
        }
    }
}

/// Tags that each list let go, how many there are, and the target.
struct ArcModel([Ghosts; 2], [usize; 2], usize);

impl Choice for ArcModel {
    fn class(&mut self, before: Option<usize>, tag: u32) -> usize {
        let Self(ghosts, counts, target) = self;
        if before.is_some() {
            return 1;
        }
        if ghosts[0].take(tag) {
            *target = (*target + (counts[1] / counts[0]).max(1)).min(BLOCKS);
            counts[0] -= 1;
            return 1;
        }
        if ghosts[1].take(tag) {
            *target = target.saturating_sub((counts[0] / counts[1]).max(1));
            counts[1] -= 1;
            return 1;
        }
        0
    }

    fn choose(&mut self, entries: &mut Vec<Entry>) -> usize {
        let once = entries.iter().filter(|entry| entry.class == 0).count();
        if once > self.2 { first(entries, |entry| entry.class == 0).unwrap() } else { 0 }
    }

    fn gone(&mut self, entries: &[Entry]) {
        for entry in entries {
            self.1[entry.class] += usize::from(self.0[entry.class].insert(entry.tag));
        }
    }
}

/// Segments under a rule; each eviction is reported to them, as the pool does.
struct Reported(Segments, HashMap<BlockId, u32>);

impl Plain for Reported {
    fn publish(&mut self, block: BlockId, tag: u32) {
        self.1.insert(block, tag);
        self.0.publish(block, tag);
    }

    fn begin_chain(&mut self) {
        self.0.begin_chain();
    }

    fn insert(&mut self, block: BlockId) {
        self.0.insert(block);
    }

    fn hit(&mut self, block: BlockId) {
        assert!(self.0.remove(block, true), "{block} is not evictable");
    }

    fn take(&mut self, count: usize) -> Vec<BlockId> {
        let mut out = Vec::new();
        self.0.pop_into(count, &mut out);
        self.0.evicted(&out.iter().map(|block| self.1[block]).collect::<Vec<_>>());
        out
    }
}

/// Classes: 0 on probation or used once, 1 on probation, 2 used once, 3 to 5 used again.
struct SegmentsModel {
    rule: Rule,
    ghosts: Sample,
    chains: usize,
    fresh: usize,
    /// Blocks of the chain that is being released, and of the longest of late.
    inserted: usize,
    longest: usize,
}

impl Choice for SegmentsModel {
    fn class(&mut self, before: Option<usize>, tag: u32) -> usize {
        match before {
            Some(class) => (class.max(2) + 1).min(5),
            None => usize::from(self.ghosts.take(tag) && self.rule != Rule::Keep) * 3,
        }
    }

    fn floor(&self, class: usize, floor: usize) -> usize {
        if class.max(floor) >= 3 { class.max(floor) } else { self.fresh }
    }

    fn inserted(&mut self) {
        self.inserted += 1;
    }

    fn choose(&mut self, entries: &mut Vec<Entry>) -> usize {
        if let Some(at) = first(entries, |entry| entry.class == 1) {
            return at;
        }
        let once = entries.iter().filter(|entry| entry.class == 2).count();
        loop {
            match self.rule {
                Rule::Once(share) | Rule::Chances(share) if once > BLOCKS * usize::from(share) / 1024 => {
                    return first(entries, |entry| entry.class == 2).unwrap();
                }
                Rule::Chances(_) if entries[0].class > 3 => {
                    let mut entry = entries.remove(0);
                    entry.class -= 1;
                    entries.push(entry);
                    self.inserted += 1;
                }
                _ => return 0,
            }
        }
    }

    fn gone(&mut self, entries: &[Entry]) {
        self.ghosts.insert(&entries.iter().map(|entry| entry.tag).collect::<Vec<_>>());
    }

    fn begin_chain(&mut self, entries: &[Entry]) {
        self.chains += 1;
        self.longest = std::mem::take(&mut self.inserted).max(self.longest - self.longest.div_ceil(16));
        let probation = entries.iter().filter(|entry| entry.class == 1).count();
        let is_kept = self.chains % 256 == 0 || probation > (2 * self.longest).clamp(BLOCKS / 16, BLOCKS / 2);
        self.fresh = if self.rule == Rule::Keep && !is_kept { 1 } else { 2 };
    }
}

fn rules() -> impl Strategy<Value = Rule> {
    let shares = [10, 300, 700];
    let rules = shares.map(Rule::Once).into_iter().chain(shares.map(Rule::Chances)).chain([Rule::Keep]);
    prop::sample::select(rules.collect::<Vec<_>>())
}

/// Prompts as paths in a tree: how far one goes along with the prompt before it, and which branch it takes then.
fn prompts() -> impl Strategy<Value = Vec<Vec<u32>>> {
    let step = (0usize..6, prop::collection::vec(0u32..4, 1..6));
    prop::collection::vec(step, 1..120).prop_map(|steps| {
        let mut prompts: Vec<Vec<u32>> = vec![vec![1]];
        for (shared, branch) in steps {
            let mut prompt: Vec<u32> = prompts[prompts.len() / 2].iter().copied().take(shared).collect();
            for digit in branch {
                // A tag is a block's and of all before it.
                let before = prompt.last().copied().unwrap_or(2);
                prompt.push(before.rotate_left(7).wrapping_add(digit + 1).wrapping_mul(0x9e37_79b1));
            }
            prompts.push(prompt);
        }
        prompts
    })
}

/// Serves the prompts one after the other; which blocks are popped, and how many are hit.
fn serve(policy: &mut impl Plain, prompts: &[Vec<u32>]) -> (Vec<BlockId>, usize) {
    let (mut at, mut tags) = (HashMap::<u32, BlockId>::new(), HashMap::<BlockId, u32>::new());
    let (mut popped, mut hits, mut unused) = (Vec::new(), 0, 0);
    for prompt in prompts {
        let mut table: Vec<BlockId> = prompt.iter().map_while(|tag| at.get(tag).copied()).collect();
        hits += table.len();
        for &block in &table {
            policy.hit(block);
        }
        let missing = &prompt[table.len()..];
        // As in a pool: blocks are taken for the whole prompt, and published when they are computed.
        let fresh = missing.len().min(BLOCKS - unused);
        table.extend((unused..unused + fresh).map(|id| BlockId(u32::try_from(id).unwrap())));
        unused += fresh;
        for block in policy.take(missing.len() - fresh) {
            at.remove(&tags[&block]);
            popped.push(block);
            table.push(block);
        }
        for (&tag, &block) in missing.iter().zip(&table[prompt.len() - missing.len()..]) {
            at.insert(tag, block);
            tags.insert(block, tag);
            policy.publish(block, tag);
        }
        policy.begin_chain();
        for &block in table.iter().rev() {
            policy.insert(block);
        }
    }
    (popped, hits)
}

/// Running prompts that share blocks, over segments whose rule changes.
struct Shared {
    segments: Segments,
    at: HashMap<u32, BlockId>,
    /// By tag: how many running prompts use its block, and the tag before it.
    users: HashMap<u32, usize>,
    before: HashMap<u32, Option<u32>>,
    running: Vec<Vec<u32>>,
    free: Vec<BlockId>,
}

impl Shared {
    fn new() -> Self {
        let segments = Segments::new(BLOCKS, Rule::Once(300), Sample::new(BLOCKS, 1));
        let free = (0..u32::try_from(BLOCKS).unwrap()).map(BlockId).collect();
        Self { segments, at: HashMap::new(), users: HashMap::new(), before: HashMap::new(), running: Vec::new(), free }
    }

    /// Ends the prompt that has run longest.
    fn release(&mut self) {
        let prompt = self.running.remove(0);
        self.segments.begin_chain();
        for tag in prompt.iter().rev() {
            let users = self.users.get_mut(tag).unwrap();
            *users -= 1;
            if *users == 0 {
                self.segments.insert(self.at[tag]);
            } else {
                self.segments.hold(self.at[tag]);
            }
        }
    }

    /// Starts a prompt; no block may be evicted before one that needs it.
    fn serve(&mut self, prompt: &[u32]) {
        let found = prompt.iter().take_while(|tag| self.at.contains_key(tag)).count();
        for tag in &prompt[..found] {
            self.segments.remove(self.at[tag], true);
            *self.users.get_mut(tag).unwrap() += 1;
        }
        while self.free.len() + self.segments.rings().len() < prompt.len() - found {
            self.release();
        }
        let mut before = found.checked_sub(1).map(|last| prompt[last]);
        for &tag in &prompt[found..] {
            let block = self.free.pop().unwrap_or_else(|| {
                let block = self.segments.pop().unwrap();
                let gone = *self.at.iter().find(|&(_, &at)| at == block).unwrap().0;
                self.at.remove(&gone);
                let needed = self.at.keys().any(|tag| self.before[tag] == Some(gone));
                assert!(!needed, "{gone} went before one that needs it");
                self.segments.evicted(&[gone]);
                block
            });
            self.at.insert(tag, block);
            self.users.insert(tag, 1);
            self.before.insert(tag, before);
            self.segments.publish(block, tag);
            before = Some(tag);
        }
        self.running.push(prompt.to_vec());
    }
}

proptest! {
    #[test]
    fn lfu_takes_what_its_model_takes(prompts in prompts()) {
        prop_assert_eq!(serve(&mut Lfu::new(BLOCKS), &prompts), serve(&mut Model::new(LfuModel), &prompts));
    }

    #[test]
    fn s3fifo_takes_what_its_model_takes(prompts in prompts(), ghost_pools in 1u8..4) {
        let settings = S3FifoSettings { small_percent: 30, ghost_pools };
        let model = S3FifoModel(Ghosts::new(BLOCKS * usize::from(ghost_pools)));
        prop_assert_eq!(serve(&mut S3Fifo::new(BLOCKS, settings), &prompts), serve(&mut Model::new(model), &prompts));
    }

    #[test]
    fn arc_takes_what_its_model_takes(prompts in prompts()) {
        let model = ArcModel([Ghosts::new(BLOCKS), Ghosts::new(BLOCKS)], [0; 2], 0);
        prop_assert_eq!(serve(&mut Arc::new(BLOCKS), &prompts), serve(&mut Model::new(model), &prompts));
    }

    #[test]
    fn segments_take_what_their_model_takes(
        prompts in prompts(),
        rule in rules(),
        one_in in prop::sample::select(vec![1u32, 2, 4]),
    ) {
        let mut segments = Reported(Segments::new(BLOCKS, rule, Sample::new(BLOCKS, one_in)), HashMap::new());
        let ghosts = Sample::new(BLOCKS, one_in);
        let model = SegmentsModel { rule, ghosts, chains: 0, fresh: 2, inserted: 0, longest: 0 };
        prop_assert_eq!(serve(&mut segments, &prompts), serve(&mut Model::new(model), &prompts));
    }

    #[test]
    fn miniatures_that_follow_all_blocks_have_the_hits_of_the_pool(
        prompts in prompts(),
        rules in [rules(), rules()],
        together in 1usize..4,
    ) {
        let pool = |rule| serve(&mut Reported(Segments::new(BLOCKS, rule, Sample::new(BLOCKS, 1)), HashMap::new()), &prompts).1;
        let mut miniatures = Miniatures::new(BLOCKS, rules, 1);
        let mut hits = [0, 0];
        for prompts in prompts.chunks(together) {
            let (mut tags, mut chains) = (Vec::new(), Vec::new());
            for prompt in prompts {
                tags.extend(prompt.iter().rev());
                chains.push(Chain { end: tags.len(), hits: [0; 2] });
            }
            miniatures.follow(&tags, &mut chains);
            for chain in chains {
                hits = [0, 1].map(|rule| hits[rule] + chain.hits[rule]);
            }
        }
        prop_assert_eq!(hits, rules.map(pool));
    }

    #[test]
    fn no_block_goes_before_one_behind_it_though_rules_change(
        steps in (prompts(), prop::collection::vec((rules(), 0usize..4), 120)),
    ) {
        let mut shared = Shared::new();
        for (prompt, (rule, running)) in steps.0.iter().zip(steps.1) {
            shared.segments.set_rule(rule);
            while shared.running.len() > running {
                shared.release();
            }
            shared.serve(prompt);
        }
    }
}
