//! Whether the points agree with the keys and the eviction order.

use super::{Both, Bundle, MANY, PrefixCache};
use crate::hash::Key;
use crate::id::BlockId;
use std::collections::{BTreeSet, HashMap, HashSet};

impl PrefixCache {
    /// Describes a contradiction among the points; `None` if there is none.
    pub(crate) fn check_points(&mut self) -> Option<String> {
        let both = self.both()?;
        let points = &*both.points;
        let mut owners: HashMap<BlockId, u32> = HashMap::new();
        points.bundles.values().flat_map(Bundle::blocks).for_each(|block| *owners.entry(block).or_default() += 1);
        for block in (0..).map(BlockId).take(points.owners.len()) {
            let found = owners.get(&block).copied().unwrap_or(0);
            if points.owners[block.index()] != found {
                return Some(format!(
                    "block {block} hangs on {} points, counted {found}",
                    points.owners[block.index()]
                ));
            }
        }
        if let Some(block) = owners.keys().find(|block| !points.keyless.contains(**block) && !both.has_key(**block)) {
            return Some(format!("block {block} hangs on a point and is not published"));
        }
        let hung = |(&anchor, bundle): (&BlockId, &Bundle)| bundle.blocks().map(|block| (block, anchor)).collect();
        let hung = || points.bundles.iter().flat_map::<Vec<_>, _>(hung).collect::<BTreeSet<_>>();
        if points.hangs_on.as_ref().is_some_and(|all| *all != hung()) {
            return Some("what blocks hang on is not what the points say".to_owned());
        }
        let is_left = |anchor: &BlockId, bundle: &Bundle| {
            both.index.key(*anchor).is_none() || (bundle.tail.is_some() && !points.has_point(*anchor))
        };
        if let Some((anchor, _)) = points.bundles.iter().find(|(anchor, bundle)| is_left(anchor, bundle)) {
            return Some(format!("blocks hang on block {anchor}, which has no point or is not published"));
        }
        let hangs_on_dead = |(anchor, bundle): (&BlockId, &Bundle)| {
            let is_kept = points.is_live(*anchor) && !points.outside.is_dead(*anchor);
            let companions = bundle.companions.iter().filter(|_| is_kept);
            let tail = bundle.tail.iter().flatten().filter(|_| !points.departing.contains(*anchor));
            companions.chain(tail).find(|block| points.outside.is_dead(**block)).copied()
        };
        if let Some(block) = points.bundles.iter().find_map(hangs_on_dead) {
            return Some(format!("block {block} hangs on a point, and is to go before it"));
        }
        if points.is_dense {
            return None;
        }
        let anchors: HashSet<_> = both.order.order().into_iter().collect();
        if let Some(anchor) = anchors.iter().find(|anchor| points.reasons(**anchor) == 0) {
            return Some(format!("block {anchor} leads to no point, and is not the next to go"));
        }
        if points.is_broken {
            return None; // the next eviction sweeps
        }
        if let Some(anchor) = both.unfindable().first() {
            return Some(format!("block {anchor} has a point behind it that no prompt can find"));
        }
        let counted = both.counted();
        let wrong = (0..)
            .map(BlockId)
            .take(points.reasons.len())
            .filter(|block| points.reasons(*block) & MANY < MANY)
            .find(|block| points.reasons(*block) != counted.get(block).copied().unwrap_or(0));
        wrong.map(|block| {
            format!("block {block} has reasons {:#x}, counted {:?}", points.reasons(block), counted.get(&block))
        })
    }
}

impl Both<'_> {
    fn has_key(&self, block: BlockId) -> bool {
        let key: Option<&Key> = self.index.key(block);
        key.and_then(|key| self.index.find(key)) == Some(block)
    }
}
