//! Which parts of the host's blocks hold bytes, where a block of the host holds several of the device.
//!
//! A part is marked once its bytes have landed and cleared before its block is given out again.

use crate::error::{Error, Result};
use crate::memory;

/// One bit for each device block that the host has room for; ids count device blocks.
#[derive(Clone, Debug)]
pub struct FillMap {
    words: Vec<u64>,
    blocks: u32,
    per_block: u32,
}

impl FillMap {
    /// An empty map.
    ///
    /// # Errors
    /// A block holds no part, there are more than 2^32 parts, or more than there is memory for.
    pub fn new(blocks: u32, per_block: u32) -> Result<Self> {
        match blocks.checked_mul(per_block) {
            Some(parts) if per_block > 0 => {
                let words = parts.div_ceil(64) as usize;
                memory::require_items::<u64>(words)?;
                Ok(Self { words: vec![0; words], blocks, per_block })
            }
            _ => Err(Error::InvalidArgument {
                what: "device blocks per host block",
                found: per_block.into(),
                must: format!("at least 1, and less than 2^32 in all {blocks} blocks"),
            }),
        }
    }

    /// Blocks of the host.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Parts of a block.
    #[must_use]
    pub fn per_block(&self) -> u32 {
        self.per_block
    }

    /// Notes that parts hold bytes.
    ///
    /// # Errors
    /// A part is out of range; nothing was noted.
    pub fn mark(&mut self, parts: &[i64]) -> Result<()> {
        let all = u64::from(self.blocks) * u64::from(self.per_block);
        for &part in self.within(parts, all, "part")? {
            let (word, bit) = place(part);
            self.words[word] |= bit;
        }
        Ok(())
    }

    /// Notes that parts are empty.
    ///
    /// # Errors
    /// A part is out of range; nothing was noted.
    pub fn unmark(&mut self, parts: &[i64]) -> Result<()> {
        let all = u64::from(self.blocks) * u64::from(self.per_block);
        for &part in self.within(parts, all, "part")? {
            let (word, bit) = place(part);
            self.words[word] &= !bit;
        }
        Ok(())
    }

    /// Notes that all parts of blocks are empty.
    ///
    /// # Errors
    /// A block is out of range; nothing was noted.
    pub fn clear(&mut self, blocks: &[i64]) -> Result<()> {
        for &block in self.within(blocks, self.blocks.into(), "block")? {
            for (word, bit) in self.parts_of(block) {
                self.words[word] &= !bit;
            }
        }
        Ok(())
    }

    /// Fails at the first part that holds no bytes: what a load asks before it begins.
    ///
    /// # Errors
    /// A part is empty or out of range.
    pub fn require(&self, parts: &[i64]) -> Result<()> {
        let all = u64::from(self.blocks) * u64::from(self.per_block);
        let empty = self.within(parts, all, "part")?.iter().find(|&&part| !self.holds(part));
        empty.map_or(Ok(()), |part| {
            let per_block = i64::from(self.per_block);
            let (block, offset) = (part / per_block, part % per_block);
            Err(Error::BadMapping { what: format!("part {offset} of host block {block} holds no bytes (id {part})") })
        })
    }

    /// Parts of each block that hold bytes.
    ///
    /// # Errors
    /// A block is out of range.
    pub fn count(&self, blocks: &[i64]) -> Result<Vec<i64>> {
        let filled =
            |&block: &i64| self.parts_of(block).filter(|&(word, bit)| self.words[word] & bit != 0).map(|_| 1i64).sum();
        Ok(self.within(blocks, self.blocks.into(), "block")?.iter().map(filled).collect())
    }

    fn holds(&self, part: i64) -> bool {
        let (word, bit) = place(part);
        self.words[word] & bit != 0
    }

    fn parts_of(&self, block: i64) -> impl Iterator<Item = (usize, u64)> + use<> {
        let per_block = i64::from(self.per_block);
        (block * per_block..(block + 1) * per_block).map(place)
    }

    fn within<'a>(&self, ids: &'a [i64], limit: u64, noun: &str) -> Result<&'a [i64]> {
        let outside = ids.iter().find(|&&id| u64::try_from(id).map_or(true, |id| id >= limit));
        let per_block = self.per_block;
        outside.map_or(Ok(ids), |id| {
            Err(Error::BadMapping { what: format!("{noun} {id} of {limit} ({per_block} parts a block)") })
        })
    }
}

#[expect(clippy::cast_sign_loss, clippy::cast_possible_truncation, reason = "ids were checked: 0 to 2^32")]
fn place(part: i64) -> (usize, u64) {
    (part as usize / 64, 1 << (part as u64 % 64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_load_of_an_empty_part_is_refused_by_name() {
        let mut map = FillMap::new(3, 5).unwrap();
        map.mark(&[5, 6, 14]).unwrap();
        assert_eq!(map.require(&[6, 14, 5]), Ok(()));
        let message = map.require(&[6, 7]).unwrap_err().to_string();
        assert!(message.contains("part 2 of host block 1 holds no bytes (id 7)"), "{message}");
        assert_eq!((map.blocks(), map.per_block(), map.count(&[0, 1, 2])), (3, 5, Ok(vec![0, 2, 1])));
    }

    #[test]
    fn ids_out_of_range_change_nothing() {
        let mut map = FillMap::new(3, 5).unwrap();
        assert!(map.mark(&[0, 15]).is_err() && map.mark(&[0, -1]).is_err() && map.require(&[15]).is_err());
        assert!(map.unmark(&[0, 15]).is_err() && map.unmark(&[-1]).is_err());
        assert!(map.clear(&[3]).is_err() && map.count(&[-1]).is_err());
        assert_eq!(map.count(&[0]), Ok(vec![0]));
        assert!(FillMap::new(3, 0).is_err() && FillMap::new(1 << 31, 2).is_err());
    }

    proptest! {
        #[test]
        fn it_is_a_set_of_parts(
            per_block in 1u32..70,
            calls in prop::collection::vec((0u32..3, 0i64..1000), 0..60),
        ) {
            let (mut map, mut model) = (FillMap::new(4, per_block).unwrap(), BTreeSet::new());
            let k = i64::from(per_block);
            for (call, id) in calls {
                match call {
                    0 => {
                        map.mark(&[id % (4 * k)]).unwrap();
                        model.insert(id % (4 * k));
                    }
                    1 => {
                        map.unmark(&[id % (4 * k)]).unwrap();
                        model.remove(&(id % (4 * k)));
                    }
                    _ => {
                        map.clear(&[id % 4]).unwrap();
                        model.retain(|part| part / k != id % 4);
                    }
                }
            }
            for part in 0..4 * k {
                prop_assert_eq!(map.require(&[part]).is_ok(), model.contains(&part));
            }
            prop_assert_eq!(map.count(&[0, 1, 2, 3]).unwrap().iter().sum::<i64>(), i64::try_from(model.len()).unwrap());
        }
    }
}
