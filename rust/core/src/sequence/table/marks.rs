//! A set of sequences that is emptied at the end of each step.

use crate::id::SequenceId;

/// Marks by row. A sequence is removed when it is freed, since its row is then used again.
#[derive(Debug, Clone, Default)]
pub(crate) struct Marks {
    marks: Vec<bool>,
    /// The marked rows; some may have been removed since.
    rows: Vec<u32>,
}

impl Marks {
    #[inline]
    pub(crate) fn contains(&self, sequence: SequenceId) -> bool {
        self.marks.get(sequence.row() as usize) == Some(&true)
    }

    pub(crate) fn insert(&mut self, sequence: SequenceId) {
        let row = sequence.row() as usize;
        if row >= self.marks.len() {
            self.marks.resize(row + 1, false);
        }
        if !std::mem::replace(&mut self.marks[row], true) {
            self.rows.push(sequence.row());
        }
    }

    pub(crate) fn remove(&mut self, sequence: SequenceId) {
        if let Some(mark) = self.marks.get_mut(sequence.row() as usize) {
            *mark = false;
        }
    }

    pub(crate) fn clear(&mut self) {
        for row in self.rows.drain(..) {
            self.marks[row as usize] = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_ends_with_its_sequence_or_its_step() {
        let [a, b] = [0, 7].map(|row| SequenceId::new(1, row, 1));
        let mut marks = Marks::default();
        marks.insert(a);
        marks.insert(b);
        marks.remove(a);
        assert!(!marks.contains(a) && marks.contains(b));
        assert!(!marks.contains(SequenceId::new(1, 3, 1)) && !marks.contains(SequenceId::new(1, 9, 1)));
        marks.insert(a);
        marks.clear();
        assert!(!marks.contains(a) && !marks.contains(b));
    }
}
