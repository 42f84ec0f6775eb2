//! A device that grows and shrinks, against a plain count of the blocks in use. What sequences read back meanwhile is
//! tested in `manager.rs`, which also resizes the device at random and makes everything beyond its extent garbage.
#![expect(clippy::unwrap_used, reason = "a test may fail by panicking")]

use blockyard_core::{
    AllocStatus, Append, BlockId, Config, Counts, Demand, Error, Eviction, Manager, Policies, Resize, ReuseOrder,
    SequenceId, Tier,
};
use proptest::prelude::*;
use std::collections::BTreeSet;

const SIZE: u32 = 4;

#[derive(Debug, Clone, Copy)]
enum Op {
    Resize(usize),
    Allocate(u32),
    Append(usize, u32),
    Free(usize),
    SwapOut(usize),
    SwapIn(usize),
    Step,
    End,
}

fn op() -> impl Strategy<Value = Op> {
    let pick = 0usize..64;
    prop_oneof![
        3 => (0usize..40).prop_map(Op::Resize),
        4 => (1u32..20).prop_map(Op::Allocate),
        4 => (pick.clone(), 1u32..9).prop_map(|(s, n)| Op::Append(s, n)),
        4 => pick.clone().prop_map(Op::Free),
        2 => pick.clone().prop_map(Op::SwapOut),
        2 => pick.prop_map(Op::SwapIn),
        4 => Just(Op::Step),
        3 => Just(Op::End),
    ]
}

/// The manager, and a model of its device.
struct Plain {
    manager: Manager,
    watermark: f64,
    sequences: Vec<SequenceId>,
    /// Device blocks that each open ticket reads, oldest first.
    tickets: Vec<(blockyard_core::TicketId, BTreeSet<u32>)>,
    reading: BTreeSet<u32>,
    /// Blocks beyond the end that were in use when the device shrank.
    beyond: BTreeSet<u32>,
}

impl Plain {
    fn live(&self) -> BTreeSet<u32> {
        let device = |s: &&SequenceId| self.manager.tier(**s) == Ok(Tier::Device);
        let tables = self.sequences.iter().filter(device).map(|&s| self.manager.block_table(s).unwrap());
        tables.flatten().map(|block| block.0).collect()
    }

    fn compare(&mut self) {
        self.manager.check().unwrap();
        let (live, blocks) = (self.live(), self.manager.pool(Tier::Device).len());
        let leased: BTreeSet<u32> =
            self.tickets.iter().flat_map(|(_, read)| read).chain(&self.reading).copied().collect();
        let past = |block: &&u32| **block as usize >= blocks;
        let (tail, held) = (live.iter().filter(past).count(), leased.difference(&live).filter(past).count());
        let highest = live.union(&leased).last().map_or(0, |block| *block as usize + 1);
        let wanted = Resize { blocks, live: tail, held, extent: blocks.max(highest) };
        assert_eq!(self.manager.resize_progress(), wanted);
        let in_use: BTreeSet<u32> = live.union(&leased).copied().collect();
        let below = in_use.iter().filter(|block| !past(block)).count();
        let pool = self.manager.pool(Tier::Device);
        assert_eq!(pool.free(), (blocks - below).saturating_sub(tail));
        assert_eq!(self.manager.stats().tiers[0].used, in_use.len());
        let new: Vec<_> = live.iter().filter(|block| past(block) && !self.beyond.contains(block)).collect();
        assert!(new.is_empty(), "{new:?} were allocated beyond {blocks}");
        let uses = self.manager.uses(Tier::Device);
        assert_eq!(uses.len(), wanted.extent);
        let all =
            |number: u8| (0u32..).zip(&uses).filter(move |(_, state)| state.number() == number).map(|(block, _)| block);
        assert!(all(3).eq(live.iter().copied()) && all(2).eq(leased.difference(&live).copied()));
        self.beyond = in_use.iter().filter(past).copied().collect();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "small"
        )]
        let watermark = (self.watermark * blocks as f64) as usize;
        assert_eq!(self.manager.watermark_blocks(), watermark);
        for wanted in 1..8 {
            let demand = Demand { tokens: SIZE * wanted, ..Demand::default() };
            let (wanted, status) = (wanted as usize, self.manager.can_admit(&demand).status);
            assert_eq!(status == AllocStatus::Never, wanted + watermark > blocks);
            assert!(status != AllocStatus::Ok || wanted + watermark <= pool.available());
        }
    }

    fn apply(&mut self, op: Op) {
        let pick = |n: usize| self.sequences.get(n % self.sequences.len().max(1)).copied();
        match op {
            Op::Resize(blocks) => match self.manager.resize_device(blocks) {
                // Blocks in use may now be beyond the end.
                Ok(_) => self.beyond = self.live(),
                Err(error) => assert!(blocks == 0 && matches!(error, Error::InvalidArgument { .. }), "{error}"),
            },
            Op::Allocate(tokens) => {
                let _ = self.manager.allocate(&[tokens], &mut self.sequences);
            }
            Op::Append(n, tokens) => {
                let mut slots = vec![0; tokens as usize];
                let _ = pick(n).map(|s| self.manager.append(Append::new(&[s], Counts::All(tokens), &mut slots)));
            }
            Op::Free(n) => {
                if let Some(sequence) = pick(n) {
                    self.manager.free(&[sequence]).unwrap();
                    self.sequences.retain(|s| *s != sequence);
                }
            }
            Op::SwapOut(n) => {
                if let Some(sequence) = pick(n) {
                    let table: Vec<BlockId> = self.manager.block_table(sequence).unwrap().to_vec();
                    let held = self.manager.num_tokens(sequence).unwrap().div_ceil(SIZE) as usize;
                    if self.manager.swap_out(&[sequence], Tier::Host).is_ok() {
                        self.reading.extend(table[..held].iter().map(|block| block.0));
                    }
                }
            }
            Op::SwapIn(n) => {
                if let Some(sequence) = pick(n).filter(|&s| self.manager.swap_in(&[s], Tier::Device).is_ok()) {
                    self.reading.extend(self.manager.block_table(sequence).unwrap().iter().map(|block| block.0));
                }
            }
            Op::Step => {
                let ticket = self.manager.take_decision().ticket;
                self.tickets.push((ticket, std::mem::take(&mut self.reading)));
            }
            Op::End if !self.tickets.is_empty() => {
                let (ticket, _) = self.tickets.remove(0);
                self.manager.complete(ticket).unwrap();
            }
            Op::End => {}
        }
        self.compare();
    }
}

proptest! {
    #[test]
    fn a_manager_knows_which_blocks_are_in_use_beyond_the_end_and_allocates_none_there(
        blocks in 1usize..30,
        watermark in 0.0..0.5,
        reuse in prop::sample::select(ReuseOrder::ALL.to_vec()),
        eviction in prop::sample::select(Eviction::NAMED.to_vec()),
        ops in prop::collection::vec(op(), 1..80),
    ) {
        let policies = Policies { reuse, eviction };
        let config = Config { watermark, prefix_caching: true, policies, ..Config::new(SIZE, [blocks, 16, 0]) };
        let manager = Manager::new(config).unwrap();
        let (sequences, tickets) = (Vec::new(), Vec::new());
        let (reading, beyond) = (BTreeSet::new(), BTreeSet::new());
        let mut plain = Plain { manager, watermark, sequences, tickets, reading, beyond };
        for op in ops {
            plain.apply(op);
        }
        while let Some(sequence) = plain.sequences.pop() {
            plain.manager.free(&[sequence]).unwrap();
        }
        plain.apply(Op::Step);
        while !plain.tickets.is_empty() {
            plain.apply(Op::End);
        }
        prop_assert!(plain.manager.resize_progress().is_done());
    }
}
