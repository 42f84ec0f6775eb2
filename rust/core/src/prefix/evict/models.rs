//! Segments and miniature caches against a plain model: a list that is searched from its beginning.

use super::ghosts::Ghosts;
use super::miniature::{Miniatures, SampledChain};
use super::rank::EvictionRule;
use super::segments::Segments;
use super::turns::{GAPS, OVER, Turn, UNKNOWN};
use crate::id::BlockId;
use proptest::prelude::*;
use std::collections::HashMap;

const BLOCKS: usize = 24;
/// How many insertions older a block counts under [`EvictionRule::Gaps`], by class.
const CREDITS: [u32; GAPS] = [0, 3, 6, 9, 20, 35, 50];

/// The operations that a pool uses, for both segments and their model.
trait Plain {
    fn continue_chain(&mut self, parent: Option<BlockId>);
    fn publish(&mut self, block: BlockId, tag: u32);
    fn begin_chain(&mut self, turn: Turn);
    fn insert(&mut self, block: BlockId);
    fn hit(&mut self, block: BlockId);
    fn take(&mut self, count: usize) -> Vec<BlockId>;
}

/// Segments under a rule; each eviction is reported to them, as the pool does.
struct Reported(Segments, HashMap<BlockId, u32>);

impl Plain for Reported {
    fn continue_chain(&mut self, parent: Option<BlockId>) {
        self.0.continue_chain(parent);
    }

    fn publish(&mut self, block: BlockId, tag: u32) {
        self.1.insert(block, tag);
        self.0.publish(block, tag);
    }

    fn begin_chain(&mut self, turn: Turn) {
        self.0.set_turn(turn, CREDITS);
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

/// A block of the model. Levels: 0 on probation or used once, 1 on probation, 2 used once, 3 used again.
#[derive(Clone, Copy)]
struct ModelBlock {
    block: BlockId,
    tag: u32,
    level: usize,
    /// Class of gaps, or [`OVER`].
    gap: u8,
    /// Whether it is the last block of its chain.
    ends: bool,
    /// Whether it was released behind the block before it; and how many blocks were released behind it, at most 2.
    is_linked: bool,
    behind: u8,
    /// Insertions before it became evictable.
    since: usize,
}

impl ModelBlock {
    /// Level and class that decide when it goes.
    fn ring(&self) -> (usize, u8) {
        if self.gap == OVER { (0, OVER) } else { (self.level, self.gap) }
    }
}

struct Model {
    rule: EvictionRule,
    ghosts: Ghosts,
    /// Oldest first.
    entries: Vec<ModelBlock>,
    known: HashMap<BlockId, ModelBlock>,
    chains: usize,
    /// Highest level in the chain that is being released, and of the chain that is being continued.
    floor: usize,
    inherited: usize,
    turn: Turn,
    /// Lowest class in the chain that is being released, and its block released last.
    gap: u8,
    child: Option<BlockId>,
    /// Insertions so far, blocks of the chain that is being released, and of the longest recent chain.
    now: usize,
    inserted: usize,
    longest: usize,
}

impl Model {
    fn new(rule: EvictionRule) -> Self {
        let (entries, known) = (Vec::new(), HashMap::new());
        Self {
            rule,
            ghosts: Ghosts::new(BLOCKS),
            entries,
            known,
            chains: 0,
            floor: 2,
            inherited: 0,
            turn: None,
            gap: OVER,
            child: None,
            now: 0,
            inserted: 0,
            longest: 0,
        }
    }

    fn first(&self, level: usize) -> Option<usize> {
        self.entries.iter().position(|entry| entry.ring().0 == level)
    }

    /// Index of the entry to evict first.
    fn choose(&self) -> usize {
        if let Some(at) = self.first(0).or_else(|| self.first(1)) {
            return at;
        }
        let once = self.entries.iter().filter(|entry| entry.level == 2).count();
        if matches!(self.rule, EvictionRule::Once(share) if once > BLOCKS * usize::from(share) / 1024) {
            return self.first(2).unwrap();
        }
        // The first of several, which is the oldest, of the lowest level.
        let credit = |gap: u8| CREDITS[GAPS - 1] as usize - CREDITS[usize::from(gap)] as usize;
        let rank = |entry: &ModelBlock| match self.rule {
            EvictionRule::Gaps => entry.since + credit(entry.gap),
            _ => entry.since,
        };
        (0..self.entries.len())
            .min_by_key(|&at| (rank(&self.entries[at]), self.entries[at].level, self.entries[at].gap))
            .unwrap()
    }

    /// Gives a released block its level and class.
    fn settle(&mut self, block: BlockId) -> ModelBlock {
        let mut entry = self.known[&block];
        let others = if let Some(child) = self.child.replace(block) {
            let was_linked = std::mem::replace(&mut self.known.get_mut(&child).unwrap().is_linked, true);
            entry.behind = (entry.behind + u8::from(!was_linked)).clamp(1, 2);
            entry.behind > 1
        } else {
            entry.behind > 0
        };
        entry.ends = self.inserted == 0;
        self.floor = self.floor.max(entry.level);
        if others || self.turn.is_none() {
            self.gap = self.gap.min(entry.gap);
        }
        (entry.level, entry.gap, entry.since) = (self.floor, self.gap, self.now);
        if entry.level == 1 && entry.gap != OVER {
            entry.gap = UNKNOWN;
        }
        self.known.insert(block, entry);
        entry
    }
}

impl Plain for Model {
    fn continue_chain(&mut self, parent: Option<BlockId>) {
        self.inherited = parent
            .map(|parent| self.known[&parent])
            .filter(|parent| parent.ends && parent.level > 2)
            .map_or(0, |parent| parent.level);
    }

    fn publish(&mut self, block: BlockId, tag: u32) {
        let level = usize::from(self.ghosts.take(tag) && self.rule != EvictionRule::Keep) * 3;
        let level = level.max(self.inherited);
        let entry = ModelBlock { block, tag, level, gap: UNKNOWN, ends: true, is_linked: false, behind: 0, since: 0 };
        self.known.insert(block, entry);
    }

    fn begin_chain(&mut self, turn: Turn) {
        (self.turn, self.gap, self.child) = (turn, turn.unwrap_or(OVER - 1), None);
        self.chains += 1;
        self.longest = std::mem::take(&mut self.inserted).max(self.longest - self.longest.div_ceil(16));
        let probation = self.entries.iter().filter(|entry| entry.ring().0 == 1).count();
        let is_kept = self.chains % 251 == 0 || probation > (2 * self.longest).clamp(BLOCKS / 16, BLOCKS / 2);
        self.floor = if self.rule == EvictionRule::Keep && !is_kept { 1 } else { 2 };
    }

    fn insert(&mut self, block: BlockId) {
        let entry = self.settle(block);
        self.entries.push(entry);
        self.inserted += 1;
        self.now += 1;
    }

    fn hit(&mut self, block: BlockId) {
        let at = self.entries.iter().position(|entry| entry.block == block).unwrap();
        let mut entry = self.entries.remove(at);
        (entry.is_linked, entry.level) = (self.known[&block].is_linked, 3);
        if entry.gap == OVER {
            entry.gap = UNKNOWN;
        }
        self.known.insert(block, entry);
    }

    fn take(&mut self, count: usize) -> Vec<BlockId> {
        let mut taken = Vec::new();
        for _ in 0..count {
            let at = self.choose();
            let gone = self.entries.remove(at);
            taken.push(gone);
            // The next of its ring came right after it: that one has no other block behind it.
            let next = self.entries.iter_mut().find(|entry| entry.ring() == gone.ring());
            if let Some(next) = next.filter(|next| next.since == gone.since + 1 && !next.ends && next.behind == 1) {
                next.behind = 0;
            }
        }
        for entry in &taken {
            self.ghosts.insert(entry.tag);
        }
        taken.iter().map(|entry| entry.block).collect()
    }
}

fn rules() -> impl Strategy<Value = EvictionRule> {
    let shares = [10, 300, 700].map(EvictionRule::Once);
    prop::sample::select([&shares[..], &[EvictionRule::Keep, EvictionRule::Gaps]].concat())
}

/// Prompts as paths in a tree: how far each follows an earlier prompt, and which branch it takes from there.
fn prompts() -> impl Strategy<Value = Vec<Vec<u32>>> {
    let step = (0usize..6, prop::collection::vec(0u32..4, 1..6));
    prop::collection::vec(step, 1..120).prop_map(|steps| {
        let mut prompts: Vec<Vec<u32>> = vec![vec![1]];
        for (shared, branch) in steps {
            let mut prompt: Vec<u32> = prompts[prompts.len() / 2].iter().copied().take(shared).collect();
            for digit in branch {
                // A tag identifies a block and all blocks before it.
                let before = prompt.last().copied().unwrap_or(2);
                prompt.push(before.rotate_left(7).wrapping_add(digit + 1).wrapping_mul(0x9e37_79b1));
            }
            prompts.push(prompt);
        }
        prompts
    })
}

/// What is known of a prompt's turn.
fn turns() -> impl Strategy<Value = Turn> {
    prop::option::of(0..=OVER)
}

/// Serves the prompts one after the other, and all turns again and again; returns the popped blocks and the number of
/// hits. With `continues`, the policy learns which chain a prompt continues.
fn serve(policy: &mut impl Plain, prompts: &[Vec<u32>], turns: &[Turn], continues: bool) -> (Vec<BlockId>, usize) {
    let (mut at, mut tags) = (HashMap::<u32, BlockId>::new(), HashMap::<BlockId, u32>::new());
    let (mut popped, mut hits, mut unused) = (Vec::new(), 0, 0);
    for (prompt, turn) in prompts.iter().zip(turns.iter().cycle()) {
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
        let found = prompt.len() - missing.len();
        policy.continue_chain(found.checked_sub(1).filter(|_| continues).map(|last| table[last]));
        for (&tag, &block) in missing.iter().zip(&table[found..]) {
            at.insert(tag, block);
            tags.insert(block, tag);
            policy.publish(block, tag);
        }
        policy.begin_chain(*turn);
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
    running: Vec<(Vec<u32>, Turn)>,
    free: Vec<BlockId>,
}

impl Shared {
    fn new() -> Self {
        let segments = Segments::new(BLOCKS, EvictionRule::Once(300), BLOCKS);
        let free = (0..u32::try_from(BLOCKS).unwrap()).map(BlockId).collect();
        Self { segments, at: HashMap::new(), users: HashMap::new(), before: HashMap::new(), running: Vec::new(), free }
    }

    /// Ends the prompt that has run longest.
    fn release(&mut self) {
        let (prompt, turn) = self.running.remove(0);
        self.segments.set_turn(turn, CREDITS);
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
    fn serve(&mut self, prompt: &[u32], turn: Turn) {
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
                assert!(!needed, "{gone} was evicted before one that needs it");
                self.segments.evicted(&[gone]);
                block
            });
            self.at.insert(tag, block);
            self.users.insert(tag, 1);
            self.before.insert(tag, before);
            self.segments.continue_chain(before.map(|tag| self.at[&tag]));
            self.segments.publish(block, tag);
            before = Some(tag);
        }
        self.running.push((prompt.to_vec(), turn));
    }
}

proptest! {
    #[test]
    fn segments_evict_the_blocks_that_their_model_evicts(
        prompts in prompts(),
        rule in rules(),
        turns in prop::collection::vec(turns(), 1..20),
    ) {
        let mut segments = Reported(Segments::new(BLOCKS, rule, BLOCKS), HashMap::new());
        let mut model = Model::new(rule);
        prop_assert_eq!(serve(&mut segments, &prompts, &turns, true), serve(&mut model, &prompts, &turns, true));
    }

    #[test]
    fn miniatures_that_follow_all_blocks_have_the_hits_of_the_pool(
        prompts in prompts(),
        rules in [rules(), rules()],
        together in 1usize..4,
        turns in prop::collection::vec(turns(), 1..20),
    ) {
        let pool = |rule| serve(&mut Reported(Segments::new(BLOCKS, rule, BLOCKS), HashMap::new()), &prompts, &turns, false).1;
        let mut miniatures = Miniatures::new(BLOCKS, rules, 1);
        let mut hits = [0, 0];
        let prompts: Vec<_> = prompts.iter().zip(turns.iter().cycle()).collect();
        for prompts in prompts.chunks(together) {
            let (mut tags, mut chains) = (Vec::new(), Vec::new());
            for (prompt, turn) in prompts {
                tags.extend(prompt.iter().rev());
                chains.push(SampledChain { end: tags.len(), last: 1, turn: **turn, hits: [0; 2] });
            }
            miniatures.follow(&tags, &mut chains, CREDITS);
            for chain in chains {
                hits = [0, 1].map(|rule| hits[rule] + chain.hits[rule]);
            }
        }
        prop_assert_eq!(hits, rules.map(pool));
    }

    #[test]
    fn no_block_is_evicted_before_one_behind_it_even_if_rules_change(
        steps in (prompts(), prop::collection::vec((rules(), 0usize..4, turns()), 120)),
    ) {
        let mut shared = Shared::new();
        for (prompt, (rule, running, turn)) in steps.0.iter().zip(steps.1) {
            shared.segments.set_rule(rule);
            while shared.running.len() > running {
                shared.release();
            }
            shared.serve(prompt, turn);
        }
    }
}
