//! Plain steps: each sequence gets one token, and nothing else happens. Many of them in one call.

use super::Manager;
use crate::decision::StepDecision;
use crate::error::{Error, Result, invalid};
use crate::group::Group;
use crate::hash::refuse_reserved;
use crate::id::{SequenceId, Tier};
use crate::memory;
use crate::sequence::{Append, Counts};

/// What [`Manager::plain_steps`] did.
#[derive(Debug)]
pub struct PlainSteps {
    /// Steps that have ended, tickets included.
    pub steps: usize,
    /// Most device blocks in use before the end of a step.
    pub peak_blocks: usize,
    /// The step after them, if it has transfers: its ticket is open, and its tokens are not marked as computed.
    pub decision: Option<StepDecision>,
}

impl Manager {
    /// Appends a token to each sequence, ends the step and its ticket, and marks full blocks as computed: for each of
    /// some steps, as that many calls of [`Manager::append`], [`Manager::set_now`], [`Manager::take_prefetch`],
    /// [`Manager::complete`] and [`Manager::mark_computed`] would. It stops at a step that has transfers, and before
    /// one for which the device has too few free blocks.
    ///
    /// `tokens` are the ids, step by step, for the prefix cache: none if there is none. `times` are those of the steps.
    ///
    /// # Errors
    /// As these calls on the first step, except for a shortage of blocks; a later time is not finite, or a later token
    /// has the reserved id. Nothing has changed then.
    pub fn plain_steps(&mut self, sequences: &[SequenceId], tokens: &[u32], times: &[f64]) -> Result<PlainSteps> {
        let (count, size) = (sequences.len(), self.block_size());
        check(sequences, tokens, times)?;
        let marks = self.is_caching() || self.groups().iter().any(|group| *group != Group::Full);
        let mut lengths = memory::with_room(count)?;
        for &sequence in sequences {
            lengths.push(self.num_tokens(self.table_of(sequence, 0)?)?);
        }
        let (mut slots, mut due) = (vec![0; count * self.growing_groups()], memory::with_room(count)?);
        let mut done = PlainSteps { steps: 0, peak_blocks: 0, decision: None };
        for (step, &now) in times.iter().enumerate() {
            let token_ids = tokens.get(step * count..(step + 1) * count).filter(|_| !tokens.is_empty());
            match self.append(Append { token_ids, ..Append::new(sequences, Counts::All(1), &mut slots) }) {
                Err(Error::OutOfBlocks { .. }) => break,
                found => found?,
            }
            let device = self.pool(Tier::Device);
            done.peak_blocks = done.peak_blocks.max(device.len() - device.free());
            self.set_now(now)?;
            let decision = self.take_prefetch();
            if !decision.is_empty() {
                done.decision = Some(decision);
                break;
            }
            self.complete(decision.ticket)?;
            if marks {
                due.clear();
                let full = |length: &mut u32| {
                    *length += 1;
                    *length % size == 0
                };
                due.extend(sequences.iter().zip(&mut lengths).filter_map(|(id, length)| full(length).then_some(*id)));
                if !due.is_empty() {
                    self.mark_computed(&due)?;
                }
            }
            done.steps += 1;
        }
        Ok(done)
    }
}

/// Refuses ids unless there is one for each sequence and step, the reserved id, and negative or infinite times.
fn check(sequences: &[SequenceId], tokens: &[u32], times: &[f64]) -> Result<()> {
    let wanted = if tokens.is_empty() { 0 } else { sequences.len() * times.len() };
    if tokens.len() != wanted {
        let must = format!("{wanted}, one for each sequence and step");
        return Err(invalid("length of token_ids", tokens.len() as i128, must));
    }
    if let Some(time) = times.iter().find(|time| !(**time >= 0.0 && time.is_finite())) {
        return Err(Error::InvalidTime { found: time.to_string() });
    }
    refuse_reserved("an id in token_ids", tokens)
}
