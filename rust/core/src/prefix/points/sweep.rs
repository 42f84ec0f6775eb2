//! Finds what no prompt can reach since an anchor before it is gone.

use super::{Both, POINT, one_more};
use crate::id::BlockId;
use crate::prefix::evict::Departure;
use std::collections::HashMap;

impl Both<'_> {
    /// Buries what cannot be found because an anchor before it is gone.
    pub(super) fn sweep(&mut self) {
        if !std::mem::take(&mut self.points.is_broken) || self.points.is_dense {
            return;
        }
        for anchor in self.unfindable() {
            let points = &mut *self.points;
            points.reasons[anchor.index()] = 0;
            points.drop_tail(anchor);
            if self.order.remove(anchor, Departure::Gone) {
                self.bury(anchor);
            }
        }
        // An anchor before them that is still there has lost a reason; counting all again is simplest.
        self.recount();
    }

    /// Live anchors that no prompt can reach, by number.
    pub(super) fn unfindable(&self) -> Vec<BlockId> {
        let mut reached: HashMap<BlockId, bool> = HashMap::new();
        let mut lost = Vec::new();
        for block in (0..).map(BlockId).take(self.points.reasons.len()) {
            if self.points.reasons(block) == 0 {
                continue;
            }
            let (mut path, mut at) = (Vec::new(), block);
            let is_reached = loop {
                if let Some(&known) = reached.get(&at) {
                    break known;
                }
                path.push(at);
                if self.points.companions(at).is_none() {
                    break false;
                }
                match self.parent(at) {
                    Ok(Some(parent)) => at = parent,
                    Ok(None) => break true,
                    Err(()) => break false,
                }
            };
            reached.extend(path.into_iter().map(|at| (at, is_reached)));
            if !is_reached {
                lost.push(block);
            }
        }
        lost
    }

    /// Counts the reasons of all anchors again.
    fn recount(&mut self) {
        let counted = self.counted();
        let all = (0..).map(BlockId).take(self.points.reasons.len());
        for block in all {
            let (now, before) = (counted.get(&block).copied().unwrap_or(0), self.points.reasons(block));
            self.points.reasons[block.index()] = now;
            if now == 0 && before > 0 && self.order.remove(block, Departure::Gone) {
                self.bury(block);
            } else if now > 0 {
                if self.points.outside.unbury(block) {
                    self.order.insert(block);
                }
                self.points.bring_companions(block, false);
            }
        }
    }

    /// The reasons of all live anchors, counted from their points.
    pub(super) fn counted(&self) -> HashMap<BlockId, u16> {
        let mut counted = HashMap::new();
        for anchor in (0..).map(BlockId).take(self.points.reasons.len()) {
            if self.points.reasons(anchor) & POINT == 0 {
                continue;
            }
            let reasons: &mut u16 = counted.entry(anchor).or_default();
            let was_live = *reasons > 0;
            *reasons |= POINT;
            let mut at = anchor;
            let mut is_new = !was_live;
            while is_new {
                let Ok(Some(parent)) = self.parent(at) else { break };
                let reasons: &mut u16 = counted.entry(parent).or_default();
                is_new = *reasons == 0;
                *reasons = one_more(*reasons);
                at = parent;
            }
        }
        counted
    }
}
