//! Rules for truncation and for block tables that are kept from append to append.

use super::World;
use super::groups::{drafts_ahead, in_group};
use blockyard_core::{Error, Group, SequenceId, TableId, TableRows, Tier};
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy)]
pub(crate) enum Op {
    Truncate(usize, u32),
    /// Some of a sequence's draft tokens are rejected, and others follow.
    Reject {
        pick: usize,
        drafts: u32,
        rejected: u32,
    },
    /// Appends, and updates the block tables in one of two arrays.
    Append {
        first: usize,
        count: usize,
        tokens: u32,
        drafts: u32,
        lookahead: u32,
        array: usize,
    },
}

/// The caller's block tables.
#[derive(Default)]
pub(crate) struct Arrays {
    arrays: [Vec<i32>; 2],
    /// Array and row that a table was last written to.
    places: BTreeMap<TableId, (usize, usize)>,
}

/// Columns of these arrays: one array is wide enough for every sequence, the other too narrow for some.
const COLUMNS: [usize; 2] = [512, 8];

impl Arrays {
    pub(crate) fn rows(&mut self, array: usize) -> TableRows<'_> {
        TableRows::new(&mut self.arrays[array], COLUMNS[array])
    }
}

/// How many of an append's tokens are drafts, if it has more tokens than that.
pub(crate) fn drafts() -> impl Strategy<Value = u32> {
    prop_oneof![1 => Just(0), 1 => 1u32..6]
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    let pick = 0usize..64;
    prop_oneof![
        4 => (pick.clone(), 0u32..9).prop_map(|(s, n)| Op::Truncate(s, n)),
        1 => (pick.clone(), 2u32..6, 1u32..5)
            .prop_map(|(pick, drafts, rejected)| Op::Reject { pick, drafts, rejected: rejected.min(drafts) }),
        8 => (pick, 1usize..5, prop_oneof![0u32..4, 0u32..9], drafts(), prop_oneof![2 => Just(0), 1 => 1u32..3], 0usize..2)
            .prop_map(|(first, count, tokens, drafts, lookahead, array)| {
                Op::Append { first, count, tokens, drafts, lookahead, array }
            }),
    ]
}

impl World {
    pub(crate) fn apply_tables(&mut self, op: Op) {
        match op {
            Op::Truncate(s, n) => self.pick(s, 1).into_iter().for_each(|s| self.truncate(s, n)),
            Op::Reject { pick, drafts, rejected } => {
                self.settle();
                for sequence in self.pick(pick, 1) {
                    if self.append(&[sequence], (drafts + 1, drafts, 0), None) {
                        self.settle();
                        self.truncate(sequence, rejected);
                        self.append(&[sequence], (1, 0, 0), None);
                        self.step(None);
                    }
                }
            }
            Op::Append { first, count, tokens, drafts, lookahead, array } => {
                let s = self.pick(first, count);
                self.append_with_tables(&s, (tokens, drafts, lookahead), array);
            }
        }
    }

    /// Appends with block tables in an array; rows last written elsewhere are written there first.
    fn append_with_tables(&mut self, sequences: &[SequenceId], counts: (u32, u32, u32), array: usize) {
        let groups = self.growing().count();
        let (table, width) = (&mut self.tables.arrays[array], COLUMNS[array]);
        table.resize(table.len().max(sequences.len() * groups * width), -1);
        // Earlier batches may have been longer; each group has an equal share of the rows.
        let share = table.len() / width / groups;
        let of_group = |group| sequences.iter().enumerate().map(move |(i, &s)| (s, group, group * share + i));
        let members: Vec<_> = (0..groups)
            .flat_map(of_group)
            .map(|(s, group, row)| (self.manager.table_of(s, group).unwrap(), row))
            .collect();
        for &(member, i) in &members {
            let row = &mut table[i * width..(i + 1) * width];
            if self.tables.places.get(&member) != Some(&(array, i)) {
                if self.manager.block_tables(&[member], width, row).is_err() {
                    return;
                }
                self.tables.places.retain(|_, place| *place != (array, i));
                self.tables.places.insert(member, (array, i));
            }
        }
        let before = self.tables.arrays[array].clone();
        if self.append(sequences, counts, Some(array)) {
            let mut expected = before;
            for (member, i) in members {
                self.manager.block_tables(&[member], width, &mut expected[i * width..(i + 1) * width]).unwrap();
            }
            assert!(self.tables.arrays[array] == expected, "a row holds another table");
        } else {
            assert!(self.tables.arrays[array] == before, "an append that failed has changed a block table");
        }
    }

    /// Records what must be written to the slots of a successful append.
    pub(crate) fn appended(
        &mut self,
        sequences: &[SequenceId],
        (tokens, lookahead): (u32, u32),
        drafts: &[u32],
        known: bool,
        slots: &[i64],
    ) {
        self.dirty.extend(sequences);
        self.note_drafts(sequences, drafts);
        for sequence in sequences {
            let len = self.truth[sequence].len() as u32;
            self.drafts.insert(*sequence, len + tokens + lookahead);
            // Several appends of one step are computed together.
            if tokens > 0 && !self.computed.iter().any(|(s, _)| s == sequence) {
                self.computed.push((*sequence, len));
            }
        }
        for (i, sequence) in sequences.iter().enumerate() {
            let next = self.next_ids(*sequence, tokens);
            let content = self.content(*sequence, &next, known);
            let first = self.truth[sequence].len() as u32;
            let truth = self.truth.get_mut(sequence).unwrap();
            truth.extend(&content);
            let truth = truth.clone();
            let groups = self.growing().zip(slots.chunks_exact((sequences.len() * tokens as usize).max(1)));
            for (group, slots) in groups {
                let at = i * tokens as usize;
                let slots = &slots[at..at + tokens as usize];
                self.place(group, slots, &truth, first);
                if drafts_ahead(group.1) && first > 0 && tokens > 0 {
                    let before = self.slots(*sequence, group.0, first - 1..first);
                    self.place_at(group, &before, &truth, first - 1);
                }
                if group.1 == Group::Recurrent && drafts[i] > 0 {
                    let certain = (tokens - drafts[i] - 1) as usize;
                    let states = slots.iter().zip(&content).skip(certain);
                    let states =
                        states.map(|(&slot, &state)| (*sequence, self.slot(group.0, slot), in_group(group.0, state)));
                    let states: Vec<_> = states.collect();
                    self.draft_states.extend(states);
                }
            }
            self.compare_slots(*sequence, tokens, slots, i * tokens as usize);
        }
    }

    /// Records how many of the sequences' last tokens may be rejected.
    fn note_drafts(&mut self, sequences: &[SequenceId], drafts: &[u32]) {
        for (sequence, &drafts) in sequences.iter().zip(drafts) {
            self.drafted.remove(sequence);
            if drafts > 0 {
                self.drafted.insert(*sequence, drafts);
            }
        }
    }

    /// The slots of a sequence's last tokens must be those that the append has returned.
    fn compare_slots(&mut self, sequence: SequenceId, tokens: u32, slots: &[i64], at: usize) {
        let (len, share) = (self.manager.num_tokens(sequence).unwrap(), slots.len() / self.growing().count());
        for ((number, _), slots) in self.growing().zip(slots.chunks_exact(share.max(1))) {
            let (row, mut found) = (self.manager.table_of(sequence, number).unwrap(), vec![0; tokens as usize]);
            self.manager.slot_mapping(&[(row, len - tokens..len)], &mut found).unwrap();
            assert_eq!(found, slots[at..at + tokens as usize], "slots of {sequence} in group {number}");
        }
    }

    /// Removes the last `dropped` tokens.
    fn truncate(&mut self, sequence: SequenceId, dropped: u32) {
        let len = self.truth[&sequence].len() as u32;
        let kept = len.saturating_sub(dropped);
        let result = self.manager.truncate(sequence, kept);
        self.trace.result(&result);
        match result {
            Ok(()) => {
                assert!(!self.dirty.contains(&sequence));
                self.drafted.remove(&sequence);
                let size = self.tokens_of(0);
                assert_eq!(self.manager.block_table(sequence).unwrap().len() as u32, kept.div_ceil(size));
                self.truth.get_mut(&sequence).unwrap().truncate(kept as usize);
                if let Some(ids) = self.ids.get_mut(&sequence) {
                    ids.truncate(kept as usize);
                }
                if kept < len {
                    self.rest.remove(&sequence);
                }
            }
            Err(Error::Unwritten { .. }) => assert!(self.dirty.contains(&sequence)),
            Err(Error::InvalidArgument { .. }) => {
                let drafts = self.drafted.get(&sequence).copied().unwrap_or(0);
                assert!(kept < len - drafts && self.null_blocks(Tier::Device) > 0, "{drafts} drafts, {kept} of {len}");
            }
            Err(error) => assert_eq!(error, Error::Lost { sequence }),
        }
        let error = self.manager.truncate(sequence, len + 1).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. } | Error::Lost { .. }));
    }
}
