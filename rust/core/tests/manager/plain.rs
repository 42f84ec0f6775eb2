//! Rules for plain steps: many in one call leave the state of single calls.

use super::calls::{difference, dump};
use super::{BLOCK, World};
use blockyard_core::{Group, SequenceId, Tier};

impl World {
    /// Adds a token to each of some sequences in each of some steps: by single calls, and to a copy in one.
    pub(crate) fn plain_steps(&mut self, first: usize, count: usize, steps: usize) {
        self.settle();
        let mut sequences = self.pick(first, count);
        if first % 8 > 0 {
            sequences.retain(|&s| self.manager.tier(s) == Ok(Tier::Device) && !self.lost.contains(&s));
        }
        let start = self.now.unwrap_or(0.0);
        let times: Vec<f64> = (0..steps).map(|at| start + f64::from(at as u32)).collect();
        // Two copies: their lists have no room to spare, which decides how far these grow.
        let (mut whole, mut copy) = (self.manager.clone(), self.manager.clone());
        std::mem::swap(&mut self.manager, &mut whole);
        let tokens = self.plain_tokens(&sequences, steps);
        let together = copy.plain_steps(&sequences, &tokens, &times);
        let (mut done, mut peak_blocks, mut last) = (0, 0, None);
        for &now in &times {
            if !self.append(&sequences, (1, 0, 0), None) {
                break;
            }
            let device = self.manager.pool(Tier::Device);
            peak_blocks = peak_blocks.max(device.len() - device.free());
            self.manager.set_now(now).unwrap();
            self.now = Some(now + 1.0);
            let decision = self.prefetch_step();
            if !decision.is_empty() {
                last = Some(decision);
                break;
            }
            self.end(decision.ticket);
            self.mark_full(&sequences);
            done += 1;
        }
        match together {
            Ok(all) => assert_eq!((all.steps, all.peak_blocks, all.decision), (done, peak_blocks, last)),
            Err(error) => assert!(done == 0 && last.is_none(), "{error}, but {done} steps and {last:?}"),
        }
        assert_eq!(difference(&dump(&self.manager), &dump(&copy)), None, "one call does something else");
        let _ = whole.plain_steps(&sequences, &tokens, &times);
        self.manager = whole;
    }

    /// Ids of the next tokens of sequences, step by step; none unless the cache follows all.
    fn plain_tokens(&self, sequences: &[SequenceId], steps: usize) -> Vec<u32> {
        if sequences.iter().any(|s| !self.ids.contains_key(s)) {
            return vec![];
        }
        let of_step = |at: usize| {
            let next = move |s| self.rest.get(s).and_then(|rest| rest.get(at)).copied().unwrap_or(1);
            sequences.iter().map(next)
        };
        (0..steps).flat_map(of_step).collect()
    }

    fn mark_full(&mut self, sequences: &[SequenceId]) {
        let is_marked = self.manager.is_caching() || self.groups.iter().any(|group| *group != Group::Full);
        let is_full = |s: &&SequenceId| self.truth[*s].len() % BLOCK as usize == 0;
        let full: Vec<_> = sequences.iter().filter(is_full).copied().collect();
        if is_marked && !full.is_empty() {
            self.mark(&full);
        }
    }
}
