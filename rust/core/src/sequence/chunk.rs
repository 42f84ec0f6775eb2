//! Chunked prefill: how much of a prompt to add next.

use super::Sequences;
use crate::error::Result;
use crate::group::Group;
use crate::id::SequenceId;
use crate::page::PerClass;
use crate::transfer::View;

impl Sequences {
    pub(crate) fn next_chunk(&self, view: View<'_>, sequence: SequenceId, budget: u32) -> Result<u32> {
        let row = self.rows.get(sequence)?;
        let known = if row.keys.is_some() { row.known.max(row.len) } else { row.len };
        let due = row.keys.as_ref().map_or(&[][..], |keys| &keys.due);
        Ok(self.chunk_end(view, (row.len, known), budget, due) - row.len)
    }

    /// Device blocks that the prompts computed in chunks will take in the next step, if their chunks are as long as in
    /// the current one.
    pub(crate) fn blocks_of_next_chunks(&mut self) -> PerClass {
        let (mut blocks, mut states, size) = (0, 0, self.block_size);
        let rows = &self.rows;
        self.prefilling.retain_mut(|(sequence, before)| {
            let Ok(row) = rows.get(*sequence) else { return false };
            let rest = if row.keys.is_some() { row.known.saturating_sub(row.len) } else { 0 };
            let added = row.len.saturating_sub(std::mem::replace(before, row.len));
            let more = added.min(rest).div_ceil(size) as usize;
            blocks += more;
            states += more.min(1);
            rest > 0
        });
        // A state is much larger than what other groups have of a block's tokens, and a chunk keeps one.
        let has_states = |group: u8| self.groups.get(group) == Group::Recurrent && self.groups.class_bytes().len() > 1;
        let count = |group: u8| {
            let blocks = if has_states(group) { states } else { blocks * self.groups.per_key(group.into()) };
            self.groups.blocks(group, blocks)
        };
        (0..self.groups.num_growing()).map(count).sum()
    }

    /// End of a chunk of at most `budget` tokens that begins after the first of two lengths and ends at the second: at
    /// the first point that is due, if states are kept there.
    pub(super) fn chunk_end(&self, view: View<'_>, (start, length): (u32, u32), budget: u32, due: &[u32]) -> u32 {
        let end = length.min(start.saturating_add(budget));
        let point = due.iter().find(|&&at| at > start).filter(|&&at| at < end && self.keeps_states(view));
        point.copied().unwrap_or(end)
    }
}

#[cfg(test)]
mod tests {
    use crate::{Append, Config, Counts, Error, Group, KeySpec, Manager, Prompt, PromptOptions, Tier};

    fn manager(groups: &[Group]) -> Manager {
        let config = Config { prefix_caching: true, ..Config::new(4, [32, 0, 0]) };
        Manager::new(config.with_groups(groups)).unwrap()
    }

    /// Adds a prompt in chunks of at most `budget`; returns the number of cached tokens, and the length after each
    /// chunk.
    fn run(manager: &mut Manager, tokens: &[u32], budget: u32) -> (u32, Vec<u32>) {
        let mut out = Vec::new();
        let prompt = Prompt { tokens, spec: KeySpec::default(), extras: &[], hashed: None };
        manager.allocate_prompts(&[prompt], PromptOptions { chunk: budget, preempted: false }, &mut out).unwrap();
        let (sequence, cached) = out[0];
        let mut lengths = vec![];
        loop {
            lengths.push(manager.num_tokens(sequence).unwrap());
            let ticket = manager.take_decision().ticket;
            manager.complete(ticket).unwrap();
            manager.mark_computed(&[sequence]).unwrap();
            manager.check().unwrap();
            let chunk = manager.next_chunk(sequence, budget).unwrap();
            if chunk == 0 {
                manager.free(&[sequence]).unwrap();
                return (cached, lengths);
            }
            let mut slots = vec![0; chunk as usize * manager.groups().len()];
            manager.append(Append::new(&[sequence], Counts::All(chunk), &mut slots)).unwrap();
        }
    }

    #[test]
    fn the_chunks_of_a_prompt_are_cached_as_they_are_computed() {
        let mut manager = manager(&[Group::Full]);
        let tokens: Vec<u32> = (0..18).collect();
        assert_eq!(run(&mut manager, &tokens, 7), (0, vec![7, 14, 18]));
        assert_eq!(run(&mut manager, &tokens, 7), (16, vec![18]));
    }

    #[test]
    fn a_chunk_ends_where_a_state_is_kept_and_nowhere_else() {
        let mut manager = manager(&[Group::Full, Group::Recurrent]);
        let tokens: Vec<u32> = (0..18).collect();
        assert_eq!(run(&mut manager, &tokens, 7), (0, vec![7, 14, 16, 18]));
        assert_eq!(run(&mut manager, &tokens, 100), (16, vec![18]));
        // Three full blocks are cached, and no state behind them; this prompt keeps one.
        assert_eq!(run(&mut manager, &tokens[..14], 100), (0, vec![12, 14]));
        assert_eq!(run(&mut manager, &tokens[..14], 100), (12, vec![14]));
    }

    #[test]
    fn a_state_in_the_middle_of_a_block_that_was_passed_over_is_never_cached() {
        let tokens: Vec<u32> = (0..9).collect();
        let prompt = Prompt { tokens: &tokens, spec: KeySpec::default(), extras: &[], hashed: None };
        let config = Config { prefix_caching: true, ..Config::new(4, [32, 8, 0]).with_groups(&[Group::Recurrent]) };
        for swapped in [false, true] {
            let mut manager = Manager::new(config.clone()).unwrap();
            let mut out = Vec::new();
            // These chunks are not aligned: 6 tokens, then 3.
            manager.allocate_prompts(&[prompt], PromptOptions { chunk: 6, preempted: false }, &mut out).unwrap();
            let sequence = out[0].0;
            let step = |manager: &mut Manager| {
                let ticket = manager.take_decision().ticket;
                manager.complete(ticket).unwrap();
            };
            step(&mut manager);
            manager
                .append(Append {
                    token_ids: Some(&tokens[6..]),
                    ..Append::new(&[sequence], Counts::All(3), &mut [0; 3])
                })
                .unwrap();
            step(&mut manager);
            if swapped {
                manager.swap_out(&[sequence], Tier::Host).unwrap();
                step(&mut manager);
                manager.swap_in(&[sequence], Tier::Device).unwrap();
                step(&mut manager);
            }
            manager.mark_computed(&[sequence]).unwrap();
            assert_eq!(manager.lookup(&prompt).unwrap().tokens, 0, "swapped {swapped}");
            manager.free(&[sequence]).unwrap();
            assert_eq!(manager.lookup(&prompt).unwrap().tokens, 0, "swapped {swapped}");
        }
    }

    /// Adds a prompt in chunks, given by step. Returns the cached length of its first 1 to 10 blocks, and which entries of
    /// the last group's table are not null.
    fn published(steps: &[&[u32]], groups: &[Group], lookahead: u32) -> (Vec<u32>, Vec<u32>) {
        let (mut manager, tokens) = (manager(groups), (0..40).collect::<Vec<u32>>());
        let prompt = Prompt { tokens: &tokens, spec: KeySpec::default(), extras: &[], hashed: None };
        let mut out = Vec::new();
        manager.allocate_prompts(&[prompt], PromptOptions { chunk: steps[0][0], preempted: false }, &mut out).unwrap();
        let sequence = out[0].0;
        assert_eq!(manager.num_tokens(sequence), Ok(steps[0][0]));
        for (i, chunks) in steps.iter().enumerate() {
            for &chunk in &chunks[usize::from(i == 0)..] {
                let mut slots = vec![0; chunk as usize * groups.len()];
                manager
                    .append(Append { lookahead, ..Append::new(&[sequence], Counts::All(chunk), &mut slots) })
                    .unwrap();
                manager.check().unwrap();
            }
            let ticket = manager.take_decision().ticket;
            manager.complete(ticket).unwrap();
            manager.mark_computed(&[sequence]).unwrap();
        }
        let last = manager.table_of(sequence, groups.len() - 1).unwrap();
        let used = manager.block_table(last).unwrap().iter().map(|block| block.0.min(1)).collect();
        manager.free(&[sequence]).unwrap();
        manager.check().unwrap();
        let cached = (1..=10).map(|blocks| {
            let more = [&tokens[..blocks * 4], &[99]].concat();
            manager.lookup(&Prompt { tokens: &more, ..prompt }).unwrap().tokens
        });
        (cached.collect(), used)
    }

    #[test]
    fn several_chunks_in_one_step_publish_the_same_blocks_as_one_chunk() {
        for groups in [&[Group::Recurrent][..], &[Group::Full, Group::Recurrent]] {
            for (apart, whole) in [
                (&[&[4, 4][..]][..], &[&[8][..]][..]),
                (&[&[4, 4, 4, 12]], &[&[24]]),
                (&[&[4], &[4, 8, 1, 7]], &[&[4], &[20]]),
                (&[&[4], &[1], &[2, 3, 2, 4]], &[&[4], &[1], &[11]]),
                (&[&[8], &[2], &[2, 4]], &[&[8], &[2], &[6]]),
            ] {
                assert_eq!(published(apart, groups, 0), published(whole, groups, 0), "{apart:?}");
                assert_eq!(published(apart, groups, 7).0, published(whole, groups, 0).0, "{apart:?} with lookahead");
            }
        }
        // The state that an earlier step wrote is kept, even before lookahead slots.
        assert_eq!(published(&[&[4], &[4, 4]], &[Group::Recurrent], 9).0[..4], [0, 0, 12, 12]);
    }

    #[test]
    fn a_state_that_another_sequence_waits_for_is_not_passed_over() {
        let (mut manager, mut out) = (manager(&[Group::Recurrent]), Vec::new());
        manager.allocate(&[4], &mut out).unwrap();
        let parent = out[0];
        assert_eq!(manager.fork_prefix(parent, 4, 6), Err(Error::Unwritten { sequence: parent }));
        let child = manager.fork_prefix(parent, 4, 4).unwrap();
        let append = |manager: &mut Manager| manager.append(Append::new(&[parent], Counts::All(1), &mut [0]));
        assert_eq!(append(&mut manager), Err(Error::Unwritten { sequence: parent }));
        let ticket = manager.take_decision().ticket;
        manager.complete(ticket).unwrap();
        append(&mut manager).unwrap();
        manager.check().unwrap();
        manager.free(&[parent, child]).unwrap();
    }

    #[test]
    fn a_state_that_a_child_waits_for_is_not_left_in_a_block_of_an_earlier_step() {
        let (mut manager, mut out) = (manager(&[Group::Recurrent]), Vec::new());
        manager.allocate(&[3], &mut out).unwrap();
        let (parent, ticket) = (out[0], manager.take_decision().ticket);
        manager.complete(ticket).unwrap();
        manager.append(Append::new(&[parent], Counts::All(1), &mut [0])).unwrap();
        let child = manager.fork_prefix(parent, 4, 4).unwrap();
        for sequence in [parent, child] {
            let refused = manager.append(Append::new(&[sequence], Counts::All(2), &mut [0; 2]));
            assert_eq!(refused, Err(Error::Unwritten { sequence }), "the state after 4 tokens is yet to be written");
        }
        let ticket = manager.take_decision().ticket;
        manager.complete(ticket).unwrap();
        manager.append(Append::new(&[parent, child], Counts::All(2), &mut [0; 4])).unwrap();
        manager.check().unwrap();
    }

    #[test]
    fn a_window_frees_its_blocks_chunk_by_chunk() {
        let mut manager = manager(&[Group::SlidingWindow { window: 6 }]);
        let tokens: Vec<u32> = (0..60).collect();
        let mut out = Vec::new();
        let prompt = Prompt { tokens: &tokens, spec: KeySpec::default(), extras: &[], hashed: None };
        manager.allocate_prompts(&[prompt], PromptOptions { chunk: 8, preempted: false }, &mut out).unwrap();
        let most = Group::SlidingWindow { window: 6 }.peak_blocks(60, 0, 8, 4);
        while manager.num_tokens(out[0].0).unwrap() < 60 {
            let ticket = manager.take_decision().ticket;
            manager.complete(ticket).unwrap();
            let chunk = manager.next_chunk(out[0].0, 8).unwrap();
            manager.append(Append::new(&[out[0].0], Counts::All(chunk), &mut vec![0; chunk as usize])).unwrap();
            assert!(manager.stats().tiers[0].used <= most, "{} of {most}", manager.stats().tiers[0].used);
        }
    }
}
