//! Retention priorities: how long a freed sequence's blocks should stay cached.

use super::{Prompt, Sequences, TableId};
use crate::error::{Result, invalid};
use crate::id::{SequenceId, Tier};
use crate::prefix::evict::{Hint, MAX_PRIORITY};
use crate::transfer::OpenStep;

impl Sequences {
    pub(crate) fn set_priority(&mut self, sequences: &[SequenceId], priority: u8) -> Result<()> {
        if priority > MAX_PRIORITY {
            return Err(invalid("priority", priority, format!("0 to {MAX_PRIORITY}")));
        }
        for &sequence in sequences {
            self.rows.get(sequence)?;
        }
        for &sequence in sequences {
            self.rows.at_mut(sequence).priority = priority;
        }
        Ok(())
    }

    /// Notes that a sequence's turn ends, before its blocks with keys are released.
    pub(super) fn end_turn(&mut self, step: &mut OpenStep<'_>, id: TableId, hint: Option<Hint>) {
        let row = self.rows.at(id.sequence);
        if let Some(keys) =
            row.keys.as_ref().filter(|_| usize::from(id.group) == self.groups.anchor() && row.tier == Tier::Device)
        {
            step.tiers.end_turn(&keys.keys, hint);
        }
    }

    /// Puts the cached device blocks of a prompt where a hint belongs; returns how many blocks of the prompt they hold.
    pub(crate) fn hint(&self, step: &mut OpenStep<'_>, prompt: &Prompt<'_>, hint: Hint) -> Result<usize> {
        let (keys, group) = (self.keys_of(prompt)?, u8::try_from(self.groups.anchor()).unwrap_or(u8::MAX));
        let device = step.tiers.device();
        let blocks: Vec<_> = keys.found_by().iter().map_while(|key| device.find(&key.of_group(group))).collect();
        step.tiers.hint(&keys.keys, hint, &blocks);
        Ok(blocks.len())
    }

    /// Begins the release of a table's blocks in the policy.
    pub(super) fn begin_release(&mut self, step: &mut OpenStep<'_>, id: TableId) {
        let row = self.rows.at(id.sequence);
        let is_kept = row.priority > 0 && row.tier == Tier::Device;
        step.tiers.begin_release(if is_kept { &self.rows.table(id).table } else { &[] }, row.priority);
    }
}

#[cfg(test)]
mod tests {
    use crate::{Config, Error, Eviction, KeySpec, Manager, Policies, Prompt, PromptOptions, SequenceId, Tier};

    fn manager(eviction: Eviction) -> Manager {
        let policies = Policies { eviction, ..Policies::default() };
        Manager::new(Config { prefix_caching: true, policies, ..Config::new(2, [8, 0, 0]) }).unwrap()
    }

    /// Admits and computes a prompt; returns its handle and how much of it was cached.
    fn run(manager: &mut Manager, tokens: &[u32], priority: u8) -> (SequenceId, u32) {
        let mut out = Vec::new();
        let prompt = Prompt { tokens, spec: KeySpec::default(), extras: &[], hashed: None };
        manager.allocate_prompts(&[prompt], PromptOptions::default(), &mut out).unwrap();
        let ticket = manager.take_decision().ticket;
        manager.complete(ticket).unwrap();
        manager.mark_computed(&[out[0].0]).unwrap();
        manager.set_priority(&[out[0].0], priority).unwrap();
        manager.check().unwrap();
        out[0]
    }

    #[test]
    fn a_priority_keeps_blocks_for_some_turnovers_but_not_forever() {
        let mut manager = manager(Eviction::Priority);
        let (kept, _) = run(&mut manager, &[1, 1, 2, 2, 3, 3], 3);
        manager.free(&[kept]).unwrap();
        let mut lasted = 0;
        for i in 100..200 {
            let cached = manager
                .lookup(&Prompt { tokens: &[1, 1, 2, 2, 3, 3, 9], spec: KeySpec::default(), extras: &[], hashed: None })
                .map(|hit| hit.tokens);
            if cached.unwrap() == 0 {
                break;
            }
            let (other, _) = run(&mut manager, &[i, i, i, i], 0);
            manager.free(&[other]).unwrap();
            lasted += 1;
        }
        // Three turnovers of 8 blocks at 2 blocks per prompt, and the 5 blocks that were free.
        assert!((12..20).contains(&lasted), "{lasted} prompts");
        let (all, _) = run(&mut manager, &[7; 16], 15);
        manager.free(&[all]).unwrap();
        let (again, cached) = run(&mut manager, &[8; 16], 0);
        assert_eq!(cached, 0, "a pool of retained blocks still evicts them");
        manager.free(&[again]).unwrap();
        assert_eq!(manager.pool(Tier::Device).free(), 8);
    }

    #[test]
    fn a_shared_block_has_the_highest_priority_among_its_users() {
        let mut manager = manager(Eviction::Priority);
        let (high, _) = run(&mut manager, &[1, 1, 2, 2], 5);
        let (low, cached) = run(&mut manager, &[1, 1, 3, 3], 0);
        assert_eq!(cached, 2);
        manager.free(&[high]).unwrap();
        manager.free(&[low]).unwrap();
        let (other, _) = run(&mut manager, &[9; 12], 0);
        manager.free(&[other]).unwrap();
        assert_eq!(run(&mut manager, &[1, 1, 2, 2, 4], 0).1, 4);
        assert_eq!(run(&mut manager, &[1, 1, 3, 3, 4], 0).1, 2);
    }

    #[test]
    fn a_priority_out_of_range_is_refused() {
        let mut manager = manager(Eviction::Lru);
        let (sequence, _) = run(&mut manager, &[1], 15);
        assert!(matches!(manager.set_priority(&[sequence], 16), Err(Error::InvalidArgument { what: "priority", .. })));
        manager.free(&[sequence]).unwrap();
        assert_eq!(manager.set_priority(&[sequence], 1), Err(Error::FreedSequence { sequence }));
    }
}
