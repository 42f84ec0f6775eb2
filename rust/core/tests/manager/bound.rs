//! Rules for the batch object and for truncation, and what they share with append.

use super::{BLOCK, COLUMNS, ROWS, World};
use blockyard_core::{Counts, Error, SequenceId, TableRows, Tier};
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy)]
pub(crate) enum Op {
    Truncate(usize, u32),
    Bind(usize, usize),
    Unbind(usize),
    Append {
        tokens: u32,
        lookahead: u32,
    },
    /// Appends and keeps the block tables in one of two arrays.
    Shown {
        first: usize,
        count: usize,
        tokens: u32,
        array: usize,
    },
}

/// Block tables that are kept without a batch object.
#[derive(Default)]
pub(crate) struct Arrays {
    arrays: [Vec<i32>; 2],
    /// Array and row that a table was last written to.
    places: BTreeMap<SequenceId, (usize, usize)>,
}

/// Columns of these arrays.
const WIDE: usize = 512;

impl Arrays {
    pub(crate) fn rows(&mut self, array: usize) -> TableRows<'_> {
        TableRows::new(&mut self.arrays[array], WIDE)
    }
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    let pick = 0usize..64;
    prop_oneof![
        4 => (pick.clone(), 0u32..9).prop_map(|(s, n)| Op::Truncate(s, n)),
        3 => (pick.clone(), 1usize..4).prop_map(|(s, n)| Op::Bind(s, n)),
        1 => pick.prop_map(Op::Unbind),
        5 => (0u32..4, 0u32..3).prop_map(|(tokens, lookahead)| Op::Append { tokens, lookahead }),
        3 => (0usize..64, 1usize..4, 0u32..9, 0usize..2)
            .prop_map(|(first, count, tokens, array)| Op::Shown { first, count, tokens, array }),
    ]
}

impl World {
    pub(crate) fn apply_bound(&mut self, op: Op) {
        match op {
            Op::Truncate(s, n) => self.pick(s, 1).into_iter().for_each(|s| self.truncate(s, n)),
            Op::Bind(s, n) => {
                let s = self.pick(s, n);
                self.bind(&s);
            }
            Op::Unbind(row) => self.unbind(row % (self.batch.sequences().len() + 1)),
            Op::Append { tokens, lookahead } => self.append_bound(tokens, lookahead),
            Op::Shown { first, count, tokens, array } => {
                let s = self.pick(first, count);
                self.append_shown(&s, tokens, array);
            }
        }
    }

    /// Appends with block tables in an array, to which those of other places are written first.
    fn append_shown(&mut self, sequences: &[SequenceId], tokens: u32, array: usize) {
        let groups = 0..self.growing().count();
        let of_group = |group| sequences.iter().map(move |&s| (s, group));
        let members: Vec<_> =
            groups.flat_map(of_group).map(|(s, group)| self.manager.table_of(s, group).unwrap()).collect();
        let table = &mut self.shown.arrays[array];
        table.resize(table.len().max(members.len() * WIDE), -1);
        for (i, (member, row)) in members.iter().zip(table.chunks_exact_mut(WIDE)).enumerate() {
            if self.shown.places.get(member) != Some(&(array, i)) {
                if self.manager.block_tables(&[*member], WIDE, row).is_err() {
                    return;
                }
                self.shown.places.retain(|_, place| *place != (array, i));
                self.shown.places.insert(*member, (array, i));
            }
        }
        if self.append(sequences, tokens, 0, Some(array)) {
            let mut expected = vec![0; members.len() * WIDE];
            self.manager.block_tables(&members, WIDE, &mut expected).unwrap();
            assert!(self.shown.arrays[array][..expected.len()] == expected, "a row shows another table");
        }
    }

    /// Notes what a successful append has to be written to its slots.
    pub(crate) fn appended(
        &mut self,
        sequences: &[SequenceId],
        (tokens, lookahead): (u32, u32),
        known: bool,
        slots: &[i64],
    ) {
        self.dirty.extend(sequences);
        for sequence in sequences {
            let len = self.truth[sequence].len() as u32;
            self.drafts.insert(*sequence, len + tokens + lookahead);
            // Several appends of one step are computed at once.
            if tokens > 0 && !self.computed.iter().any(|(s, _)| s == sequence) {
                self.computed.push((*sequence, len));
            }
        }
        for (i, sequence) in sequences.iter().enumerate() {
            let next = self.next_ids(*sequence, tokens);
            let content = self.content(*sequence, &next, known);
            let groups = self.growing().zip(slots.chunks_exact((sequences.len() * tokens as usize).max(1)));
            for ((_, group), slots) in groups {
                let at = i * tokens as usize;
                self.place(group, &slots[at..at + tokens as usize], &content);
            }
            self.truth.get_mut(sequence).unwrap().extend(content);
        }
    }

    /// Cuts the last `dropped` tokens off.
    fn truncate(&mut self, sequence: SequenceId, dropped: u32) {
        let len = self.truth[&sequence].len() as u32;
        let kept = len.saturating_sub(dropped);
        match self.manager.truncate(sequence, kept) {
            Ok(()) => {
                assert!(!self.dirty.contains(&sequence));
                assert_eq!(self.manager.block_table(sequence).unwrap().len() as u32, kept.div_ceil(BLOCK));
                self.truth.get_mut(&sequence).unwrap().truncate(kept as usize);
                if let Some(ids) = self.ids.get_mut(&sequence) {
                    ids.truncate(kept as usize);
                }
                if kept < len {
                    self.rest.remove(&sequence);
                }
            }
            Err(Error::Unwritten { .. }) => assert!(self.dirty.contains(&sequence)),
            Err(Error::InvalidArgument { .. }) => assert!(kept < len && self.null_blocks(Tier::Device) > 0),
            Err(error) => assert_eq!(error, Error::Lost { sequence }),
        }
        let error = self.manager.truncate(sequence, len + 1).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. } | Error::Lost { .. }));
    }

    fn bind(&mut self, sequences: &[SequenceId]) {
        let rows = self.batch.sequences().len() + sequences.len();
        let tables = TableRows::new(&mut self.table, COLUMNS);
        match self.batch.add(&mut self.manager, sequences, tables) {
            Ok(first) => assert!(first + sequences.len() == self.batch.sequences().len()),
            Err(Error::InvalidArgument { what, .. }) if what.starts_with("number") => {
                assert!(rows > ROWS / self.growing().count());
            }
            Err(Error::InvalidArgument { .. }) => {
                let long = |s: &SequenceId| self.manager.block_table(*s).unwrap().len() > COLUMNS;
                assert!(sequences.iter().any(long));
            }
            Err(Error::RepeatedSequence { sequence }) => assert!(self.batch.find(sequence).is_ok()),
            Err(error) => assert!(self.manager.block_tables(sequences, 64, &mut [0; 64 * 8]).is_err(), "{error}"),
        }
    }

    fn unbind(&mut self, row: usize) {
        let last = self.batch.sequences().len().checked_sub(1);
        let result = self.batch.remove(row, TableRows::new(&mut self.table, COLUMNS));
        match last {
            Some(last) if row <= last => assert_eq!(result, Ok((row != last).then_some(last))),
            _ => assert!(result.is_err()),
        }
    }

    /// Appends to the batch object; its table must then be what the books say.
    fn append_bound(&mut self, tokens: u32, lookahead: u32) {
        let sequences = self.batch.sequences().to_vec();
        let total = sequences.len() * tokens as usize;
        let groups = self.growing().count();
        let mut slots = vec![-1; groups * (total + 1)];
        let wanted = self.manager.blocks_to_append(&sequences, Counts::All(tokens), lookahead);
        let before = (self.manager.pool(Tier::Device).available(), self.table.clone());
        let tables = TableRows::new(&mut self.table, COLUMNS);
        match self.batch.append(&mut self.manager, Counts::All(tokens), lookahead, tables, &mut slots) {
            Ok(appended) => {
                assert!(appended == total);
                let parts = slots.chunks_exact(total + 1);
                let slots: Vec<i64> = parts.flat_map(|part| part.strip_suffix(&[-1]).unwrap().to_vec()).collect();
                assert!(before.0.saturating_sub(self.manager.pool(Tier::Device).available()) <= wanted.unwrap());
                self.appended(&sequences, (tokens, lookahead), false, &slots);
                for group in 0..groups {
                    let rows: Vec<_> = sequences.iter().map(|&s| self.manager.table_of(s, group).unwrap()).collect();
                    let mut expected = vec![0; rows.len() * COLUMNS];
                    self.manager.block_tables(&rows, COLUMNS, &mut expected).unwrap();
                    let first = group * (ROWS / groups) * COLUMNS;
                    assert_eq!(self.table[first..first + expected.len()], expected);
                }
            }
            Err(error) => {
                assert_eq!(before, (self.manager.pool(Tier::Device).available(), self.table.clone()));
                match error {
                    Error::OutOfBlocks { wanted: asked, free, .. } => assert_eq!((Ok(asked), free), (wanted, before.0)),
                    Error::InvalidArgument { what: "width of the block tables", .. } => {}
                    Error::UnknownSequence { sequence } => {
                        assert!(!self.truth.contains_key(&sequence));
                        self.unbind(self.batch.find(sequence).unwrap());
                    }
                    error => assert!(wanted.is_err(), "{error}"),
                }
                for &sequence in sequences.iter().filter(|s| self.truth.contains_key(s)) {
                    assert_eq!(self.manager.num_tokens(sequence).unwrap() as usize, self.truth[&sequence].len());
                }
            }
        }
    }
}
