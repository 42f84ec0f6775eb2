//! Extras: a block is shared only by sequences with the same extras up to its end, however its tokens arrived.
#![expect(clippy::unwrap_used, reason = "a test may fail by panicking")]

use blockyard_core::{Append, Config, Counts, KeySpec, Manager, Prompt, PromptExtra, PromptOptions, SequenceId};
use proptest::prelude::*;
use std::collections::BTreeSet;

type Drawn = BTreeSet<(u32, u32, u8)>;

fn extras() -> impl Strategy<Value = Drawn> {
    prop::collection::btree_set((0u32..40, 1u32..12, 0u8..2), 0..4)
}

fn spans(drawn: &Drawn) -> Vec<PromptExtra<'_>> {
    drawn
        .iter()
        .rev()
        .map(|(start, length, digest)| PromptExtra {
            start: *start,
            length: *length,
            digest: std::slice::from_ref(digest),
        })
        .collect()
}

/// Appends tokens, with slots for one more draft, and computes them.
fn append(manager: &mut Manager, sequence: SequenceId, tokens: &[u32]) {
    let mut slots = vec![0; tokens.len()];
    let count = Counts::All(u32::try_from(tokens.len()).unwrap());
    manager
        .append(Append { lookahead: 1, token_ids: Some(tokens), ..Append::new(&[sequence], count, &mut slots) })
        .unwrap();
    let ticket = manager.take_decision().ticket;
    manager.complete(ticket).unwrap();
}

/// The hit of a prompt that begins with these tokens.
fn hit(manager: &Manager, tokens: &[u32], extras: &Drawn) -> usize {
    let asked = [tokens, &[9]].concat();
    let prompt = Prompt { tokens: &asked, spec: KeySpec::default(), extras: &spans(extras), hashed: None };
    manager.lookup(&prompt).unwrap().tokens as usize
}

proptest! {
    /// Each step appends tokens and drafts, drops the drafts, and perhaps continues with a fork.
    #[test]
    fn a_block_is_found_exactly_with_the_extras_up_to_its_end(
        size in 1usize..18, prompt in prop::collection::vec(0u32..3, 1..24), own in extras(), other in extras(),
        steps in prop::collection::vec((prop::collection::vec(0u32..3, 0..9), 0usize..6, any::<bool>()), 0..6),
    ) {
        let config = Config { prefix_caching: true, ..Config::new(u32::try_from(size).unwrap(), [256, 0, 0]) };
        let mut manager = Manager::new(config).unwrap();
        let (mut out, mut text) = (Vec::new(), prompt.clone());
        let asked = Prompt { tokens: &prompt, spec: KeySpec::default(), extras: &spans(&own), hashed: None };
        manager.allocate_prompts(&[asked], PromptOptions::default(), &mut out).unwrap();
        let (mut sequence, mut followed) = (out[0].0, true);
        append(&mut manager, sequence, &[]);
        for (tokens, drafted, forks) in steps {
            let (full, kept): (usize, usize) = (text.len() / size, text.len() + tokens.len());
            append(&mut manager, sequence, &[&tokens[..], &vec![7; drafted]].concat());
            manager.truncate(sequence, u32::try_from(kept).unwrap()).unwrap();
            // Only the last full block can be reopened.
            followed &= (kept + drafted) / size <= kept / size + 1;
            prop_assert!(full <= kept / size);
            text.extend(tokens);
            if forks {
                let mut children = Vec::new();
                manager.fork(sequence, 1, &mut children).unwrap();
                manager.free(&[sequence]).unwrap();
                sequence = children[0];
            }
        }
        manager.mark_computed(&[sequence]).unwrap();
        manager.check().unwrap();
        let published = if followed { text.len() / size * size } else { 0 };
        prop_assert_eq!(hit(&manager, &text, &own), published);
        let apart = own.symmetric_difference(&other).map(|extra| extra.0 as usize / size * size).min();
        prop_assert_eq!(hit(&manager, &text, &other), published.min(apart.unwrap_or(usize::MAX)));
    }
}
