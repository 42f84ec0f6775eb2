//! Rules for cache groups: what each sequence must find in the tables of its groups when it computes.

use super::World;
use super::bytes::{Slot, place};
use blockyard_core::{Group, SequenceId, Tier};
use proptest::prelude::*;
use std::ops::Range;

const FULL: Group = Group::Full;
const WINDOW: Group = Group::SlidingWindow { window: 6 };
const STATE: Group = Group::Recurrent;
const DRAFTER: Group = Group::Drafter;
const NEAR_DRAFTER: Group = Group::WindowedDrafter { window: 5 };
const CHUNKED: Group = Group::Chunked { chunk: 8 };

/// Models with one group that frees blocks while it runs, and with several groups.
const SINGLE: [&[Group]; 6] =
    [&[WINDOW], &[Group::SlidingWindow { window: 1 }], &[STATE], &[CHUNKED], &[DRAFTER], &[NEAR_DRAFTER]];
pub(crate) const NINE: [Group; 9] = [
    STATE,
    FULL,
    Group::SlidingWindow { window: 8 },
    WINDOW,
    CHUNKED,
    FULL,
    DRAFTER,
    Group::Chunked { chunk: 6 },
    WINDOW,
];
const HYBRID: [&[Group]; 16] = [
    &[FULL, WINDOW],
    &[FULL, STATE],
    &[WINDOW, STATE, FULL],
    &[FULL, CHUNKED],
    &[FULL, FULL],
    &[FULL, DRAFTER],
    &[DRAFTER, STATE, FULL],
    &[FULL, WINDOW, DRAFTER, FULL],
    &[FULL, WINDOW, FULL, STATE],
    &[FULL, WINDOW, NEAR_DRAFTER],
    &[WINDOW, Group::WindowedDrafter { window: 4 }, STATE],
    &[DRAFTER, Group::WindowedDrafter { window: 1 }],
    &[WINDOW, Group::WindowedDrafter { window: 4 }],
    &NINE,
    &[FULL, Group::CrossAttention],
    &[Group::SlidingWindow { window: 9 }, Group::SlidingWindow { window: 4 }, Group::CrossAttention],
];

/// Groups of the tested models; most have one group.
pub(crate) fn groups() -> impl Strategy<Value = &'static [Group]> {
    let single = prop::sample::select(&SINGLE[..]);
    // Where a fault is planted, it is in what only these have.
    let hybrid = if std::env::var_os("PLANTED").is_some() { 40 } else { 3 };
    prop_oneof![6 => Just(&[FULL][..]), 2 => single, hybrid => prop::sample::select(&HYBRID[..])]
}

/// Groups of the tested models with blocks of several sizes; most have several.
pub(crate) fn paged() -> impl Strategy<Value = &'static [Group]> {
    prop_oneof![
        1 => Just(&[FULL][..]),
        1 => prop::sample::select(&SINGLE[..]),
        12 => prop::sample::select(&HYBRID[..]),
        1 => Just(&[FULL, STATE, STATE][..]),
    ]
}

/// Tokens of `len` that a group needs when those from `first` on are computed.
pub(crate) fn needed(group: Group, first: u32, len: u32) -> Range<u32> {
    match group {
        Group::SlidingWindow { window } => (first + 1).saturating_sub(window)..len,
        Group::Chunked { chunk } => first - first % chunk..len,
        // The states in between are passed over.
        Group::Recurrent => first.saturating_sub(1)..first.min(len),
        // The next step writes the last entry.
        Group::Drafter => 0..len.saturating_sub(1),
        // The step writes the entry before its tokens, too, unless it was found.
        Group::WindowedDrafter { window } => first.saturating_sub(window)..len.saturating_sub(1),
        _ => 0..len,
    }
}

/// What the layers of a group write for a token: another group's block is never as good.
pub(crate) fn in_group(number: usize, value: u64) -> u64 {
    value ^ (number as u64) << 40
}

/// What a group has of a token of a sequence: a drafter's entry depends on the next token, too.
pub(crate) fn entry((number, group): (usize, Group), tokens: &[u64], at: u32) -> u64 {
    let next = tokens.get(at as usize + 1).filter(|_| drafts_ahead(group));
    in_group(number, tokens[at as usize]) ^ next.map_or(0, |next| next.rotate_left(17))
}

/// Whether an entry of a group depends on the next token, too.
pub(crate) fn drafts_ahead(group: Group) -> bool {
    matches!(group, Group::Drafter | Group::WindowedDrafter { .. })
}

/// Whether a group leaves blocks behind.
pub(crate) fn leaves(group: Group) -> bool {
    !matches!(group, Group::Full | Group::Drafter | Group::CrossAttention)
}

impl World {
    pub(crate) fn growing(&self) -> impl Iterator<Item = (usize, Group)> + use<> {
        self.groups.iter().copied().enumerate().filter(|&(_, group)| group != Group::CrossAttention)
    }

    pub(crate) fn has_encoder(&self) -> bool {
        self.groups.last() == Some(&Group::CrossAttention)
    }

    /// Number of null blocks of a tier.
    pub(crate) fn null_blocks(&self, tier: Tier) -> usize {
        usize::from(self.groups.iter().any(|group| leaves(*group)) && !self.manager.pool(tier).is_empty())
    }

    /// Records what a sequence's tokens from `first` on write. A recurrent group writes one state per step, when the step
    /// runs.
    pub(crate) fn place(&mut self, group: (usize, Group), slots: &[i64], tokens: &[u64], first: u32) {
        let places: Vec<Slot> = slots.iter().map(|&slot| self.slot(group.0, slot)).collect();
        self.place_at(group, &places, tokens, first);
    }

    pub(crate) fn place_at(&mut self, group: (usize, Group), slots: &[Slot], tokens: &[u64], first: u32) {
        if group.1 != Group::Recurrent {
            let entries = (first..).map(|at| entry(group, tokens, at));
            self.pending.extend(slots.iter().copied().zip(entries));
        }
    }

    /// The place of a slot of a group.
    pub(crate) fn slot(&self, number: usize, slot: i64) -> Slot {
        let (class, tokens, _) = self.manager.page(number).unwrap();
        let slot = u32::try_from(slot).unwrap();
        (class, slot / tokens, slot % tokens)
    }

    /// Writes the tokens of a new sequence from `first` on in all groups, including its encoder's.
    pub(crate) fn write(&mut self, sequence: SequenceId, first: u32) {
        let tokens = self.truth[&sequence].clone();
        for (number, group) in self.growing() {
            let row = self.manager.table_of(sequence, number).unwrap();
            let mut slots = vec![0; tokens.len() - first as usize];
            self.manager.slot_mapping(&[(row, first..tokens.len() as u32)], &mut slots).unwrap();
            self.place((number, group), &slots, &tokens, first);
        }
        self.dirty.push(sequence);
        self.computed.push((sequence, first));
    }

    /// Gives a new sequence an encoder's tokens.
    pub(crate) fn encode(&mut self, sequence: SequenceId, tokens: u32) {
        let content = self.tokens(tokens);
        let row = self.manager.table_of(sequence, self.groups.len() - 1).unwrap();
        let mut slots = vec![0; content.len()];
        self.manager.slot_mapping(&[(row, 0..tokens)], &mut slots).unwrap();
        self.place((self.groups.len() - 1, Group::CrossAttention), &slots, &content, 0);
        self.encoded.insert(sequence, content);
    }

    /// Reads the states that the tokens from `first` on continue from, unless there are none yet.
    pub(crate) fn read_states(&self, sequence: SequenceId, first: u32) {
        let tokens = &self.truth[&sequence];
        if (first as usize) < tokens.len() {
            for (number, group) in self.growing().filter(|&(_, group)| group == Group::Recurrent) {
                self.compare(sequence, (number, group), needed(group, first, tokens.len() as u32), tokens);
            }
        }
    }

    /// Reads, in every group, what is needed to compute the tokens from `first` on; a step that computed them has read
    /// their states before, and may have overwritten them.
    pub(crate) fn read(&self, sequence: SequenceId, first: u32) {
        let tokens = &self.truth[&sequence];
        let is_overwritten = |group| group == Group::Recurrent && (first as usize) < tokens.len();
        for (number, group) in self.growing().filter(|&(_, group)| !is_overwritten(group)) {
            let range = needed(group, first, tokens.len() as u32);
            self.compare(sequence, (number, group), range, tokens);
        }
        if let Some(tokens) = self.encoded.get(&sequence) {
            let encoder = (self.groups.len() - 1, Group::CrossAttention);
            self.compare(sequence, encoder, 0..tokens.len() as u32, tokens);
        }
    }

    fn compare(&self, sequence: SequenceId, group: (usize, Group), range: Range<u32>, tokens: &[u64]) {
        let (tier, size) = (self.manager.tier(sequence).unwrap(), self.tokens_of(group.0));
        let table = self.manager.block_table(self.manager.table_of(sequence, group.0).unwrap()).unwrap();
        for i in range {
            let at = place(&self.manager, tier, table[(i / size) as usize]);
            let found = self.memory.get(at)[(i % size) as usize];
            assert_eq!(found, entry(group, tokens, i), "token {i} of {sequence} in group {group:?}");
        }
    }

    /// Blocks of the tables of all groups.
    pub(crate) fn blocks_of(&self, sequence: SequenceId) -> Vec<(usize, u32)> {
        let rows = (0..self.groups.len()).filter_map(|group| self.manager.table_of(sequence, group).ok());
        let tables = rows.filter_map(|row| self.manager.block_table(row).ok());
        tables.flatten().map(|&block| self.manager.pool(Tier::Device).local(block)).collect()
    }
}
