//! What of a snapshot's sequences must agree with its tiers.

use super::{Sequences, blocks_for};
use crate::group::NULL_BLOCK;
use crate::snapshot::Contents;
use crate::tiers::Tiers;
use std::collections::HashMap;

impl Sequences {
    /// Fails unless each block, its copy in another tier and each key have one place, an entry of the tables of one group, and
    /// all who use a block know it by one key, and either have tokens there or not. What is published later goes by its key alone, so that keys that were forged
    /// may give a block two places then.
    pub(crate) fn check_places(&self, tiers: &Tiers) -> Contents<()> {
        let (mut blocks, mut keys) = (HashMap::new(), HashMap::new());
        for (sequence, row) in self.rows.iter() {
            let pool = tiers.pool(row.tier);
            let first = row
                .group_tables
                .as_deref()
                .and_then(|group_tables| group_tables.first())
                .and_then(|&first| self.rows.get(first).ok());
            let of_row = first.unwrap_or(row).keys.as_deref().map_or(&[][..], |keys| &keys.keys);
            let mut holds = true;
            for (at, &block) in row.table.iter().enumerate().filter(|(_, block)| !self.is_null(**block)) {
                let (place, is_filled) = ((row.group, at), at < blocks_for(u64::from(row.len), self.block_size));
                let key = pool.key(block).or_else(|| of_row.get(at).map(|key| key.of_group(row.group)));
                for (tier, block) in [Some((row.tier, block)), pool.block(block).tier_copy()].into_iter().flatten() {
                    let own = tiers.pool(tier).key(block).or(key);
                    let (found, known) = blocks.entry((tier, block)).or_insert(((place, is_filled), own));
                    let named = [own, *known, key];
                    let alike = named.iter().flatten().all(|one| named.iter().flatten().all(|other| one == other));
                    holds &= *found == (place, is_filled) && alike;
                    *known = known.or(own);
                }
                holds &= pool.key(block).is_none_or(|key| *keys.entry(key).or_insert(place) == place);
            }
            for (at, key) in row.keys.iter().flat_map(|keys| keys.keys.iter().enumerate()) {
                let places = (0u8..).take(self.groups.growing().len()).map(|group| (group, at));
                holds &= places.into_iter().all(|place| *keys.entry(key.of_group(place.0)).or_insert(place) == place);
            }
            if !holds {
                return Err(format!("sequence {sequence} has a block or a key that is elsewhere, too, or another's"));
            }
        }
        Ok(())
    }

    /// References to each block of each tier, counted from the tables.
    pub(crate) fn count_references(&self, sizes: [usize; 3]) -> Contents<[Vec<u32>; 3]> {
        let mut refs = sizes.map(|blocks| vec![0u32; blocks]);
        for count in refs.iter_mut().filter_map(|refs| refs.get_mut(NULL_BLOCK.index())) {
            *count = u32::from(self.has_nulls());
        }
        for (sequence, row) in self.rows.iter() {
            for block in &*row.table {
                let count = refs[row.tier.index()].get_mut(block.index());
                let more = count.as_ref().and_then(|count| count.checked_add(1));
                match (count, more) {
                    (Some(count), Some(more)) => *count = more,
                    _ => return Err(format!("sequence {sequence} has {} block {block}, which is not there", row.tier)),
                }
            }
        }
        Ok(refs)
    }
}
