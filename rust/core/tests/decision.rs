//! Forged decisions: the payload of a real one is changed and sealed again. It must be refused, or be a decision that
//! can be carried out. A byte string determines the changes, so that the fuzzer (`fuzz/fuzz_targets/decision.rs`) runs
//! the same code.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test may fail by panicking, its numbers are small"
)]

use blockyard_core::{Kind, Pairs, StepDecision, TicketId, Tier};
use proptest::prelude::*;
use sha2::{Digest, Sha256};

/// Magic, version, length of the payload.
const HEADER: usize = 20;
const DIGEST: usize = 32;

/// Numbers drawn from bytes; zeros after the last byte.
struct Draw<'a>(&'a [u8]);

impl Draw<'_> {
    fn below(&mut self, end: usize) -> usize {
        let (&first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        usize::from(first) % end
    }

    fn number(&mut self, end: u32) -> u32 {
        self.below(end as usize) as u32
    }
}

/// A decision that can be carried out.
fn decision(draw: &mut Draw<'_>) -> StepDecision {
    let mut transfers = Vec::new();
    let ways = Kind::ALL.into_iter().flat_map(|kind| Tier::ALL.map(|src| Tier::ALL.map(|dst| (kind, src, dst))));
    for (kind, src, dst) in ways.flatten().filter(|&(kind, src, dst)| kind.joins(src, dst)) {
        if draw.below(3) == 0 {
            // No source is a destination, and no block is named twice.
            let ids = (0..=draw.number(4)).map(|at| [256 * (at + 1) + draw.number(256), at]).collect();
            transfers.push((kind, Pairs { src, dst, page_class: 0, ids }));
        }
    }
    let after = (0..draw.below(3)).map(|_| TicketId(u64::from(draw.number(256)))).collect();
    StepDecision { ticket: TicketId(256), after, transfers, prefetch: draw.below(2) == 1 }
}

/// Gives a payload its correct length and checksum.
fn sealed(like: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut bytes = like[..12].to_vec();
    bytes.extend((payload.len() as u64).to_le_bytes());
    bytes.extend(payload);
    let digest = Sha256::digest(&bytes);
    bytes.extend(digest);
    bytes
}

/// Changes one place of a payload: sets, increments, inserts or removes a byte, or swaps two.
fn forge(payload: &mut Vec<u8>, draw: &mut Draw<'_>) {
    let (kind, at, value) = (draw.below(8), draw.below(256) << 8 | draw.below(256), draw.below(256) as u8);
    if payload.is_empty() {
        return;
    }
    let at = at % payload.len();
    match kind {
        0 => payload.insert(at, value),
        1 => {
            payload.remove(at);
        }
        2 => {
            let other = (at + 1 + usize::from(value)) % payload.len();
            payload.swap(at, other);
        }
        3 => payload[at] = payload[at].wrapping_add(1),
        4 => payload[at] = payload[at].wrapping_sub(1),
        5 => {
            payload.splice(at..=at, [0xFF, 0xFF, 0xFF, 0xFF, value & 0x0F]);
        }
        6 => payload[at] = value % 4,
        _ => payload[at] = value,
    }
}

/// Writes a decision, reads it, changes it in up to three places and reads it again.
pub(crate) fn run(bytes: &[u8]) {
    let mut draw = Draw(bytes);
    let decided = decision(&mut draw);
    let honest = decided.to_bytes().unwrap();
    assert_eq!(StepDecision::from_bytes(&honest), Ok(decided));
    let mut payload = honest[HEADER..honest.len() - DIGEST].to_vec();
    for _ in 0..=draw.below(3) {
        forge(&mut payload, &mut draw);
    }
    if let Ok(decision) = StepDecision::from_bytes(&sealed(&honest, &payload)) {
        assert_eq!(StepDecision::from_bytes(&decision.to_bytes().unwrap()), Ok(decision));
    }
}

proptest! {
    #[test]
    fn a_forged_decision_is_refused_or_can_be_carried_out(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        run(&bytes);
    }
}
