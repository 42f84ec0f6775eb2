//! Checks of the simulated world: of events after each operation, and of everything at the end.

use super::groups::{drafts_ahead, leaves, needed};
use super::{BLOCK, World, keep};
use blockyard_core::hash::Chain;
use blockyard_core::{Event, EventBatch, Prompt, Tier};

impl World {
    /// Runs everything to its end and reads every token of every sequence.
    pub(crate) fn verify(&mut self) {
        self.settle();
        self.unpin_all();
        self.end_jobs();
        self.manager.check().unwrap();
        for (&sequence, tokens) in self.truth.iter().filter(|(s, _)| !self.lost.contains(s)) {
            self.read(sequence, tokens.len() as u32);
        }
        let all: Vec<_> = self.truth.keys().copied().collect();
        self.free(&all);
        self.follow();
        assert!(self.manager.resize_progress().is_done());
        for tier in Tier::ALL {
            assert_eq!(self.manager.stats().tiers[tier.index()].used, 0, "{tier} blocks leaked");
        }
    }

    /// Replays the events, and compares the resulting blocks with those that can be found.
    pub(super) fn follow(&mut self) {
        if !self.has_events {
            return;
        }
        let EventBatch { first, dropped, events } = self.manager.take_events();
        assert_eq!((first, dropped), (self.events, 0));
        self.trace.events(first, &events);
        self.events += events.len() as u64;
        for event in events {
            match event {
                Event::Stored { key, parent, tier, block, tokens, group, .. } => {
                    assert_eq!(tokens, BLOCK);
                    // Only one group's blocks have keys; two points may have a block each of the same bytes of another. With
                    // a drafter, a block is cached once for each next token.
                    let keyed = self.groups.iter().position(|group| !leaves(*group));
                    let blocks = self.cached.entry((tier, group, key.0)).or_default();
                    let many = Some(group.into()) != keyed || self.groups.iter().any(|group| drafts_ahead(*group));
                    assert!(blocks.insert(block) && (many || blocks.len() == 1), "stored twice");
                    assert!(parent.is_none_or(|parent| parent != key));
                }
                Event::Removed { key, tier, block, group, .. } => {
                    let blocks = self.cached.get_mut(&(tier, group, key.0)).unwrap();
                    assert!(blocks.remove(&block));
                    if blocks.is_empty() {
                        self.cached.remove(&(tier, group, key.0));
                    }
                }
                Event::Cleared { tier } => self.cached.retain(|(at, ..), _| *at != tier),
            }
        }
        for tier in Tier::ALL {
            let at = self.cached.iter().filter(|((at, ..), _)| *at == tier);
            assert_eq!(at.map(|(_, blocks)| blocks.len()).sum::<usize>(), self.manager.pool(tier).published());
        }
        for (&sequence, ids) in &self.ids {
            let prompt = Prompt { tokens: ids, spec: keep::spec(ids), extras: &[], hashed: None };
            let cached = self.manager.lookup(&prompt).unwrap().tokens;
            let mut chain = Chain::new(&prompt.spec, BLOCK, 0);
            let mut keys = Vec::new();
            for tokens in ids.chunks_exact(BLOCK as usize) {
                chain.block(tokens, &[]).unwrap();
                keys.push(chain.export().0);
            }
            for (number, group) in self.growing() {
                for token in needed(group, cached, cached) {
                    let block = (token / BLOCK) as usize;
                    let found = |tier| self.cached.contains_key(&(tier, number as u8, keys[block]));
                    let found = found(Tier::Device) || found(Tier::Host);
                    assert!(found, "block {block} of {sequence} is cached without an event in group {number}");
                }
            }
        }
    }
}
