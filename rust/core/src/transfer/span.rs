//! Blocks of unequal size: one host block holds several device blocks. Transfers use ids of device blocks.

use crate::error::{Error, Result};

/// A range of small blocks that begins and ends within large ones.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    /// The large blocks, in their order.
    pub blocks: &'a [i64],
    /// Small blocks in a large one.
    pub per_block: u32,
    /// Index of the first small block within the first large one.
    pub first: u32,
    /// End index (exclusive) within the last large one.
    pub last: u32,
}

impl Span<'_> {
    /// Number of small blocks in the range.
    ///
    /// # Errors
    /// The offsets are outside a large block, or the range is empty; without large blocks the length is 0.
    pub fn len(&self) -> Result<usize> {
        let Self { blocks, per_block, first, last } = *self;
        if first >= per_block || last == 0 || last > per_block || (blocks.len() == 1 && first >= last) {
            let what = format!(
                "no span from offset {first} of the first to {last} of the last of {} blocks of {per_block}",
                blocks.len()
            );
            return Err(Error::BadMapping { what });
        }
        let whole = blocks.len().saturating_mul(per_block as usize);
        Ok(if blocks.is_empty() { 0 } else { whole - first as usize - (per_block - last) as usize })
    }

    /// Whether there are no large blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Writes the ids of the small blocks, `block * per_block + offset`.
    ///
    /// # Errors
    /// As [`Span::len`]; the output does not match the number of small blocks, or an id exceeds `u32::MAX`. Nothing was
    /// written.
    pub fn expand<'o>(&self, out: impl ExactSizeIterator<Item = &'o mut i64>) -> Result<()> {
        let (wanted, found) = (self.len()?, out.len());
        if wanted != found {
            let (blocks, per_block) = (self.blocks.len(), self.per_block);
            let Self { first, last, .. } = self;
            return Err(Error::BadMapping {
                what: format!(
                    "{blocks} blocks of {per_block}, from offset {first} to {last}, hold {wanted} small blocks, \
                     {found} are given"
                ),
            });
        }
        let most = i64::from(u32::MAX / self.per_block);
        if let Some(id) = self.blocks.iter().find(|&&id| !(0..most).contains(&id)) {
            let what = format!("a block of {} small blocks is {id}, must be 0 to {}", self.per_block, most - 1);
            return Err(Error::BadMapping { what });
        }
        let mut out = out;
        let per_block = i64::from(self.per_block);
        let end = self.blocks.len().wrapping_sub(1);
        for (at, id) in self.blocks.iter().enumerate() {
            let first = if at == 0 { self.first } else { 0 };
            let last = if at == end { self.last } else { self.per_block };
            let base = id * per_block;
            for (unit, to) in (base + i64::from(first)..base + i64::from(last)).zip(&mut out) {
                *to = unit;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn expand(span: Span<'_>, len: usize) -> Result<Vec<i64>> {
        let mut out = vec![-1; len];
        span.expand(out.iter_mut()).map(|()| out)
    }

    #[test]
    fn a_span_begins_and_ends_at_its_offsets() {
        // A load of the small blocks 28 and 29: the tail of the large block is left out.
        let span = Span { blocks: &[7], per_block: 4, first: 0, last: 2 };
        assert_eq!(expand(span, 2), Ok(vec![28, 29]));
        let span = Span { blocks: &[7, 2, 0], per_block: 3, first: 2, last: 1 };
        assert_eq!(expand(span, 5), Ok(vec![23, 6, 7, 8, 0]));
        assert_eq!(expand(Span { blocks: &[], ..span }, 0), Ok(vec![]));
    }

    #[test]
    fn inconsistent_spans_are_refused() {
        let span = Span { blocks: &[7, 2], per_block: 3, first: 1, last: 2 };
        let message = expand(span, 5).unwrap_err().to_string();
        assert!(message.contains("2 blocks of 3, from offset 1 to 2, hold 4 small blocks, 5 are given"), "{message}");
        let cases = [
            Span { first: 3, ..span },
            Span { last: 0, ..span },
            Span { last: 4, ..span },
            Span { blocks: &[1], first: 2, last: 2, ..span },
            Span { per_block: 0, ..span },
            Span { blocks: &[-1, 2], ..span },
            Span { blocks: &[i64::from(u32::MAX / 3), 2], ..span },
        ];
        for span in cases {
            assert!(expand(span, 4).is_err(), "{span:?}");
        }
    }

    proptest! {
        #[test]
        fn a_span_has_all_small_blocks_except_those_cut_off_at_its_ends(
            blocks in prop::collection::vec(0i64..50, 1..8),
            per_block in 1u32..9,
            ends in any::<(u32, u32)>(),
        ) {
            let (first, last) = (ends.0 % per_block, ends.1 % per_block + 1);
            let span = Span { blocks: &blocks, per_block, first, last };
            let k = i64::from(per_block);
            let all: Vec<_> = blocks.iter().flat_map(|id| id * k..(id + 1) * k).collect();
            let (from, to) = (first as usize, all.len() - (per_block - last) as usize);
            if from >= to {
                prop_assert!(span.len().is_err());
            } else {
                prop_assert_eq!(expand(span, span.len().unwrap()).unwrap(), &all[from..to]);
            }
        }
    }
}
