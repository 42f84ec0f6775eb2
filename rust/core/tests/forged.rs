//! Forged snapshots: the payload of a real one is changed and sealed again. What is accepted must hold through all that
//! follows: no panic, no broken invariant. Bytes say what is done, so that the fuzzer (`fuzz/fuzz_targets/snapshot.rs`)
//! runs the same.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test may fail by panicking, its numbers are small"
)]

use blockyard_core::defrag::{Budget, Goal, Wanted};
use blockyard_core::{
    BlockExtra, Cached, Config, Counts, Error, Eviction, Extra, Group, KeySpec, Manager, Policies, Prompt, ReuseOrder,
    SequenceId, StepDecision, Tier,
};
use proptest::prelude::*;
use sha2::{Digest, Sha256};

/// Magic, version, length of the payload.
const HEADER: usize = 20;
const DIGEST: usize = 32;

const WINDOW: Group = Group::SlidingWindow { window: 3 };
const GROUPS: [&[Group]; 8] = [
    &[Group::Full],
    &[Group::Full],
    &[WINDOW],
    &[Group::Recurrent],
    &[Group::Full, WINDOW],
    &[Group::Full, Group::Recurrent],
    &[WINDOW, Group::Recurrent],
    &[Group::Full, Group::CrossAttention],
];

/// Numbers drawn from bytes; zeros after their end.
pub(crate) struct Draw<'a>(&'a [u8]);

impl Draw<'_> {
    fn below(&mut self, end: usize) -> usize {
        let (&first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        usize::from(first) % end
    }

    fn number(&mut self, end: u32) -> u32 {
        self.below(end as usize) as u32
    }

    fn is_done(&self) -> bool {
        self.0.is_empty()
    }
}

/// Driver, and the handles of all that was ever opened in them.
struct World {
    manager: Manager,
    sequences: Vec<SequenceId>,
    tickets: Vec<StepDecision>,
}

impl World {
    fn new(draw: &mut Draw<'_>) -> Self {
        let groups = GROUPS[draw.below(GROUPS.len())];
        let options = draw.below(32);
        let prefix_caching = options & 1 == 0 && !groups.contains(&Group::CrossAttention);
        let blocks = [4 + draw.below(12), draw.below(8), draw.below(4)];
        let block_size = 1 + draw.number(3);
        let watermark = if options & 2 == 0 { 0.0 } else { 0.1 };
        let policies = Policies {
            reuse: ReuseOrder::ALL[draw.below(ReuseOrder::ALL.len())],
            eviction: Eviction::NAMED[draw.below(Eviction::NAMED.len())],
        };
        let config = Config { block_size, blocks, watermark, prefix_caching };
        let mut manager = Manager::with_groups(config, policies, groups).unwrap();
        if options & 4 == 0 && prefix_caching {
            let _ = manager.keep_host_copies(block_size - 1);
        }
        if options & 8 == 0 && prefix_caching {
            manager.record_events(6).unwrap();
        }
        if options & 16 == 0 && prefix_caching {
            manager.set_quota([1; 32], Some(draw.below(4))).unwrap();
            manager.set_quota([2; 32], None).unwrap();
        }
        Self { manager, sequences: Vec::new(), tickets: Vec::new() }
    }

    fn pick(&self, draw: &mut Draw<'_>) -> Vec<SequenceId> {
        let Some(last) = self.sequences.len().checked_sub(1) else { return Vec::new() };
        let first = last - draw.below(last + 1).min(last);
        self.sequences[first..].iter().copied().take(1 + draw.below(2)).collect()
    }

    /// One operation, which may be refused, but not because the manager is broken.
    fn apply(&mut self, draw: &mut Draw<'_>) {
        let result = match draw.below(24) {
            0..=1 => self.allocate(draw),
            2..=5 => self.prompt(draw),
            6..=9 => self.append(draw),
            10 => self.manager.mark_computed(&self.pick(draw)),
            11 => self.each(draw, |manager, sequence, sequences, n| manager.fork(sequence, n % 3, sequences)),
            12 => self.each(draw, |manager, sequence, sequences, n| {
                let shared = n % 3 * manager.block_size();
                manager.fork_prefix(sequence, shared, shared + n % 5).map(|child| sequences.push(child))
            }),
            13 => self.each(draw, |manager, sequence, _, n| manager.truncate(sequence, n)),
            14 => self.manager.free(&self.pick(draw)),
            15 => self.manager.swap_out(&self.pick(draw), Tier::Host),
            16 => self.manager.swap_in(&self.pick(draw), Tier::Device),
            17 => self.manager.swap_out(&self.pick(draw), Tier::External),
            18 => self.manager.swap_in(&self.pick(draw), Tier::ALL[draw.below(3)]),
            19 => self.rare(draw),
            20 => self.defragment(draw),
            _ => self.step(draw),
        };
        assert!(!matches!(result, Err(Error::Broken { .. })), "{result:?}");
    }

    fn each(
        &mut self,
        draw: &mut Draw<'_>,
        act: impl Fn(&mut Manager, SequenceId, &mut Vec<SequenceId>, u32) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let picked = self.pick(draw);
        let n = draw.number(10);
        picked.first().map_or(Ok(()), |&sequence| act(&mut self.manager, sequence, &mut self.sequences, n))
    }

    fn allocate(&mut self, draw: &mut Draw<'_>) -> Result<(), Error> {
        let tokens = [draw.number(9), draw.number(9)];
        let tokens = &tokens[..=draw.below(2)];
        if self.manager.groups().contains(&Group::CrossAttention) {
            return self.manager.allocate_encoded(tokens, &[3, 4][..tokens.len()], &mut self.sequences);
        }
        self.manager.allocate(tokens, &mut self.sequences)
    }

    fn prompt(&mut self, draw: &mut Draw<'_>) -> Result<(), Error> {
        let family = draw.number(3);
        let tokens: Vec<u32> = (0..draw.number(12)).map(|i| family + i / 7).collect();
        let spec = KeySpec { salt: [family as u8; 32], lora_id: 0 };
        let extra = [BlockExtra { block: 0, extra: Extra { kind: 1, bytes: &[7; 5] } }];
        let extras = if draw.below(4) == 0 && !tokens.is_empty() { &extra[..] } else { &[] };
        let chunk = if draw.below(3) == 0 { 1 + draw.number(4) } else { u32::MAX };
        let mut out = Vec::new();
        let prompt = Prompt { tokens: &tokens, spec, extras, hashed: None };
        let result = self.manager.allocate_chunks(&vec![prompt; 1 + draw.below(2)], chunk, &mut out);
        self.sequences.extend(out.iter().map(|(sequence, _)| *sequence));
        result
    }

    fn append(&mut self, draw: &mut Draw<'_>) -> Result<(), Error> {
        let (batch, n, lookahead) = (self.pick(draw), draw.number(5), draw.number(3));
        let mut slots = vec![0; batch.len() * n as usize * self.manager.growing_groups()];
        let ids = vec![draw.number(3); batch.len() * n as usize];
        if draw.below(2) == 0 {
            let mut slots = vec![0; slots.len()];
            return self.manager.append_tokens(&batch, Counts::All(n), lookahead, &ids, None, &mut slots);
        }
        self.manager.append(&batch, Counts::All(n), lookahead, &mut slots)
    }

    fn rare(&mut self, draw: &mut Draw<'_>) -> Result<(), Error> {
        match draw.below(8) {
            0 => {
                let pin = self.pick(draw).first().map(|&sequence| self.manager.pin(sequence, 3));
                pin.map_or(Ok(()), |pin| pin.and_then(|pin| self.manager.unpin(pin)))
            }
            1 => self.manager.set_quota([draw.number(3) as u8; 32], Some(draw.below(5))),
            2 => self.manager.set_priority(&self.pick(draw), 5),
            3 => self.manager.resize_device(3 + draw.below(16)).map(|_| ()),
            4 => self.manager.offload_cached(1 + draw.below(4)).map(|_| ()),
            5 => {
                let _ = self.manager.reset_prefix_cache();
                Ok(())
            }
            6 => {
                let _ = self.manager.take_events();
                self.manager.limit_pins(0.25)
            }
            _ => self.manager.common_computed_blocks(&self.pick(draw)).map(|_| ()),
        }
    }

    fn defragment(&mut self, draw: &mut Draw<'_>) -> Result<(), Error> {
        let goal = [Goal::MaxId(draw.number(8)), Goal::Dense(0), Goal::EmptyPages(2), Goal::Contiguous(1)];
        let wanted = Wanted { goal: goal[draw.below(goal.len())], slack: 0 };
        let budget = Budget { moves: usize::MAX, bytes: u64::MAX, block_bytes: 1 };
        self.manager.defragment(&[wanted], None, budget, Cached::ALL[draw.below(3)]).map(|_| ())
    }

    fn step(&mut self, draw: &mut Draw<'_>) -> Result<(), Error> {
        let action = draw.below(6);
        if action > 0 || self.tickets.is_empty() {
            self.tickets.push(self.manager.take_decision());
        }
        match action {
            1 => Ok(()),
            2 => {
                let StepDecision { ticket, transfers, .. } = self.tickets.remove(0);
                let lost: Vec<_> = transfers.into_iter().map(|(_, pairs)| pairs).take(1).collect();
                self.manager.fail(ticket, &lost).map(|_| ())
            }
            _ => {
                let ticket = self.tickets.remove(0).ticket;
                self.manager.complete(ticket)
            }
        }
    }

    fn rest(&mut self) -> Vec<u8> {
        self.tickets.push(self.manager.take_decision());
        for StepDecision { ticket, .. } in self.tickets.drain(..) {
            self.manager.complete(ticket).unwrap();
        }
        self.manager.snapshot().unwrap()
    }

    /// Every sequence is published, grows, leaves, comes back, is cut, grows again and is freed.
    fn live(&mut self) {
        for sequence in self.sequences.clone() {
            for call in 0..9 {
                let one = [sequence];
                let tokens = if call == 3 { 3 } else { 1 };
                let mut slots = vec![0; tokens as usize * self.manager.growing_groups()];
                let result = match call {
                    0 => self.manager.mark_computed(&one),
                    1 | 3 | 7 => self.manager.append(&one, Counts::All(tokens), 0, &mut slots),
                    2 => self.manager.fork(sequence, 1, &mut Vec::new()),
                    4 => self.manager.swap_out(&one, Tier::Host),
                    5 => self.manager.swap_in(&one, Tier::Device),
                    6 => self.manager.truncate(sequence, 0),
                    _ => self.manager.free(&one),
                };
                assert!(!matches!(result, Err(Error::Broken { .. })), "{result:?}");
                self.tickets.push(self.manager.take_decision());
                let ticket = self.tickets.remove(0).ticket;
                self.manager.complete(ticket).unwrap();
                self.look();
                self.manager.check().unwrap();
            }
        }
    }

    /// What a caller may read at any time.
    fn look(&mut self) {
        let _ = self.manager.stats();
        let _ = self.manager.fragmentation(2);
        for &sequence in &self.sequences {
            let width = self.manager.max_blocks(&[sequence]).unwrap_or(0);
            let _ = self.manager.block_tables(&[sequence], width, &mut vec![0; width]);
            let mut slots = vec![0; self.manager.num_tokens(sequence).unwrap_or(0).min(64) as usize];
            let _ = self.manager.slot_mapping(&[(sequence, 0..slots.len() as u32)], &mut slots);
            let _ = self.manager.blocks_to_append(&[sequence], Counts::All(2), 1);
            let _ = self.manager.can_swap_in(&[sequence], Tier::Device, 1);
        }
    }
}

/// Puts the right length and checksum on a payload.
fn sealed(like: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut bytes = like[..12].to_vec();
    bytes.extend((payload.len() as u64).to_le_bytes());
    bytes.extend(payload);
    let digest = Sha256::digest(&bytes);
    bytes.extend(digest);
    bytes
}

/// Changes one place of a payload: a byte is set, added to, put in or taken out, or two change places.
fn forge(payload: &mut Vec<u8>, draw: &mut Draw<'_>) {
    let (kind, at, value) = (draw.below(8), draw.below(256) << 8 | draw.below(256), draw.below(256) as u8);
    if payload.is_empty() {
        return;
    }
    // Numbers are small and keys are not: what looks like a key is changed less often.
    let small = (0..8).map(|step| (at + step * 37) % payload.len()).find(|&at| payload[at] < 32);
    let at = small.unwrap_or(at % payload.len());
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
            let end = (at + 1).min(payload.len());
            payload.splice(at..end, [0xFF, 0xFF, 0xFF, 0xFF, value & 0x0F]);
        }
        6 => payload[at] = value % 4,
        _ => payload[at] = value,
    }
}

/// Ways in which one run changes a snapshot: building the manager takes longer than reading them.
const FORGERIES: u32 = 24;

/// Bytes that follow from a number.
fn scattered(seed: u32) -> Vec<u8> {
    let mut state = u64::from(seed);
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_be_bytes()[1]
    };
    std::iter::repeat_with(next).take(16).collect()
}

/// Builds manager, changes their snapshot and, if that is accepted, goes on with what it gives.
pub(crate) fn run(bytes: &[u8]) {
    let mut draw = Draw(bytes);
    let mut world = World::new(&mut draw);
    for _ in 0..draw.below(24) {
        world.apply(&mut draw);
    }
    let honest = world.rest();
    assert_eq!(Manager::restore(&honest).unwrap().snapshot().unwrap(), honest);
    let seed = draw.number(256) << 8 | draw.number(256);
    for forgery in 0..FORGERIES {
        let bytes = scattered(seed * FORGERIES + forgery);
        use_forged(&honest, &world.sequences, &mut Draw(&bytes), &mut Draw(&[]));
    }
    use_forged(&honest, &world.sequences, &mut Draw(&scattered(seed)), &mut draw);
}

/// Changes a snapshot in up to three places; manager that it still gives go through what sequences do, and what is drawn.
fn use_forged(honest: &[u8], sequences: &[SequenceId], places: &mut Draw<'_>, draw: &mut Draw<'_>) {
    let mut payload = honest[HEADER..honest.len() - DIGEST].to_vec();
    for _ in 0..=places.below(3) {
        forge(&mut payload, places);
    }
    let Ok(manager) = Manager::restore(&sealed(honest, &payload)) else { return };
    let mut world = World { manager, sequences: sequences.to_vec(), tickets: Vec::new() };
    world.manager.check().unwrap();
    while !draw.is_done() {
        world.apply(draw);
        world.look();
        world.manager.check().unwrap();
    }
    world.live();
    let again = world.rest();
    assert_eq!(Manager::restore(&again).unwrap().snapshot().unwrap(), again);
}

/// Steps and pairs of a decision, sealed; then forged, and read.
pub(crate) fn run_decision(bytes: &[u8]) {
    let mut draw = Draw(bytes);
    let mut world = World::new(&mut draw);
    for _ in 0..draw.below(24) {
        world.apply(&mut draw);
    }
    let honest = world.manager.take_decision().to_bytes().unwrap();
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
    fn a_forged_snapshot_is_refused_or_gives_a_manager_that_holds(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        run(&bytes);
    }

    #[test]
    fn a_forged_decision_is_refused_or_says_what_can_be_carried_out(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        run_decision(&bytes);
    }
}
