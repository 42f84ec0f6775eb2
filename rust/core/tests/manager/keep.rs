//! Rules for host copies made ahead of need, pins, quotas, hints and time, and for tickets that fail as a whole.

use super::bytes::place;
use super::{Bytes, World};
use blockyard_core::{BlockId, Error, Group, Hint, KeySpec, PinId, Prompt, TicketId, Tier};
use proptest::prelude::*;

#[derive(Debug, Clone, Copy)]
pub(crate) enum Op {
    Offload(usize),
    /// Everything lands and is published, the oldest sequences are freed, and cached blocks are offloaded to the host.
    Demote(usize),
    /// A prompt is computed, swapped out, and loaded again together with another of its family; the load may fail.
    Reload {
        tokens: u32,
        family: u32,
        count: usize,
        lost: Option<usize>,
    },
    Quota(u8, usize),
    Pin(usize),
    Unpin(usize),
    /// The engine says something of a conversation.
    Hint {
        tokens: u32,
        family: u32,
        hint: Hint,
    },
    /// The clock says something.
    Now(f64),
    /// The last ticket is never carried out.
    GiveUp,
    /// A pair of a ticket is reported lost while the others are still running.
    Lose(usize),
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    let pick = 0usize..64;
    prop_oneof![
        4 => (1usize..8).prop_map(Op::Offload),
        3 => (0usize..6).prop_map(Op::Demote),
        3 => (5u32..20, 0u32..3, 0usize..6, prop::option::of(pick.clone()))
            .prop_map(|(tokens, family, count, lost)| Op::Reload { tokens, family, count, lost }),
        1 => (0u8..2, 0usize..6).prop_map(|(tenant, quota)| Op::Quota(tenant, quota)),
        2 => pick.clone().prop_map(Op::Pin),
        1 => pick.clone().prop_map(Op::Unpin),
        2 => (0u32..20, 0u32..3, prop::sample::select(&Hint::ALL[..]))
            .prop_map(|(tokens, family, hint)| Op::Hint { tokens, family, hint }),
        2 => prop::sample::select(&TIMES[..]).prop_map(Op::Now),
        1 => Just(Op::GiveUp),
        1 => pick.prop_map(Op::Lose),
    ]
}

/// Also such as no clock may say.
const TIMES: [f64; 9] = [0.0, 1.0, 30.0, 31.5, 4e3, 1e18, -1.0, f64::NAN, f64::INFINITY];

/// A pin, and the content of its blocks when it began.
pub(crate) struct Held {
    pin: PinId,
    blocks: Vec<(BlockId, Bytes)>,
}

/// The first token determines the tenant, so that prompts of a family have the same one.
pub(crate) fn spec(ids: &[u32]) -> KeySpec {
    KeySpec { salt: [(ids.first().copied().unwrap_or(0) & 1) as u8; 32], lora_id: 0 }
}

impl World {
    pub(crate) fn apply_keep(&mut self, op: Op) {
        match op {
            Op::Offload(count) => {
                let free = [Tier::Device, Tier::Host].map(|tier| self.manager.pool(tier).free());
                match self.manager.offload_cached(count) {
                    Ok(copied) => {
                        let left = [Tier::Device, Tier::Host].map(|tier| self.manager.pool(tier).free());
                        let short = self.manager.resize_progress().live > 0;
                        // The tail of a resume point goes as a whole; what of it is in use stays on the device.
                        let is_whole = self.groups.iter().all(|group| *group == Group::Full);
                        assert!(copied <= count || !is_whole, "{copied} of {count}");
                        let moved = [free[0].saturating_sub(left[0]), free[1].saturating_sub(left[1])];
                        let [here, there] = moved;
                        assert!(
                            self.has_pages()
                                || short
                                || (there == copied && (here == copied || (!is_whole && here < copied)))
                        );
                    }
                    Err(_) => assert!(!self.manager.keeps_host_copies()),
                }
            }
            Op::Demote(count) => self.demote(count),
            Op::Reload { tokens, family, count, lost } => self.reload(tokens, family, count, lost),
            Op::Quota(tenant, quota) => {
                let salt = [tenant; 32];
                let classes = self.manager.num_classes();
                let (quota, total) = match classes {
                    1 => (quota, self.manager.pool(Tier::Device).len()),
                    _ => (quota * 40, usize::try_from(self.manager.stats().tiers[0].bytes).unwrap()),
                };
                let fits = self.manager.set_quota(salt, Some(quota)).is_ok();
                // Null blocks have bytes, too.
                let is_odd = fits != (quota <= total && !self.has_encoder());
                assert!(!is_odd || (classes > 1 && fits && !self.has_encoder()), "{quota} of {total}");
                // What hangs on blocks in use stays with these.
                let may_stay = self.groups != [Group::Full];
                assert!(!fits || self.manager.quota(salt).is_some_and(|(held, _)| held <= quota || may_stay));
            }
            Op::Pin(s) => self.pick(s, 1).into_iter().for_each(|s| self.pin(s)),
            Op::Unpin(n) => {
                if !self.pins.is_empty() {
                    let held = self.pins.swap_remove(n % self.pins.len());
                    self.manager.unpin(held.pin).unwrap();
                    assert_eq!(self.manager.unpin(held.pin), Err(Error::UnknownPin { pin: held.pin }));
                }
            }
            Op::Hint { tokens, family, hint } => {
                let ids = super::store::family_ids(tokens, family);
                let prompt = Prompt { tokens: &ids, spec: spec(&ids), extras: &[], hashed: None };
                let (before, pools) =
                    (self.manager.stats().hints, [Tier::Device, Tier::Host].map(|tier| self.free_in(tier)));
                let cached = self.manager.hint(&prompt, hint).unwrap();
                assert!(cached <= tokens && cached % super::BLOCK == 0, "{cached} of {tokens} tokens");
                let given = self.manager.stats().hints[hint as usize].given - before[hint as usize].given;
                assert!(given <= 1 && pools == [Tier::Device, Tier::Host].map(|tier| self.free_in(tier)));
            }
            Op::Now(seconds) => assert_eq!(self.manager.set_now(seconds).is_ok(), (0.0..1e300).contains(&seconds)),
            Op::GiveUp => {
                if let Some(&ticket) = self.tickets.keys().next_back() {
                    self.give_up(ticket);
                }
            }
            Op::Lose(n) => self.nth_ticket(n).into_iter().for_each(|ticket| self.lose(ticket, n)),
        }
    }

    fn free_in(&self, tier: Tier) -> (usize, usize) {
        let pool = self.manager.pool(tier);
        (pool.free(), pool.published())
    }

    pub(crate) fn demote(&mut self, count: usize) {
        self.settle();
        let all: Vec<_> = self.truth.keys().copied().collect();
        self.mark(&all);
        self.free(&all[..count.min(all.len())]);
        if self.manager.offload_cached(usize::MAX).is_ok() {
            self.settle();
        }
    }

    fn reload(&mut self, tokens: u32, family: u32, count: usize, lost: Option<usize>) {
        self.prompt(tokens, family, u32::MAX);
        self.demote(usize::MAX);
        self.prompt(tokens, family, u32::MAX);
        self.prompt(tokens, family, 3);
        let others = self.pick(0, count);
        if let Some((&first, rest)) = others.split_first() {
            // The sources of the loads must survive other transfers to the host in their step.
            let _ = self.manager.swap_out(rest, Tier::Host);
            if count % 2 == 1 {
                self.free(&[first]);
            }
        }
        self.step(lost);
    }

    /// One of the tickets that have not ended.
    pub(crate) fn nth_ticket(&self, n: usize) -> Option<TicketId> {
        self.tickets.keys().copied().nth(n % self.tickets.len().max(1))
    }

    /// Both tiers of the prefix cache must be unused for it to forget everything; leases of prompts that wait are no use.
    pub(crate) fn reset(&mut self) {
        let mut without = self.manager.clone();
        without.end_leases();
        let progress = without.resize_progress();
        let beyond = |tier| if tier == Tier::Device { progress.held } else { 0 };
        let idle = |tier: Tier| without.stats().tiers[tier.index()].used == beyond(tier);
        let idle = idle(Tier::Device) && (idle(Tier::Host) || !self.manager.keeps_host_copies());
        assert_eq!(self.manager.reset_prefix_cache(), idle);
    }

    fn pin(&mut self, sequence: blockyard_core::SequenceId) {
        let before = self.manager.stats().tiers[0].pinned;
        match self.manager.pin(sequence) {
            Ok(pin) => {
                assert!(self.manager.stats().tiers[0].pinned <= self.manager.pool(Tier::Device).len() / 2);
                let blocks = self.manager.pinned_blocks(pin).unwrap().iter();
                let blocks =
                    blocks.map(|&block| (block, self.memory.get(place(&self.manager, Tier::Device, block)))).collect();
                self.pins.push(Held { pin, blocks });
            }
            Err(Error::TooManyPinned { wanted, held, limit }) => assert!(held == before && wanted + held > limit),
            Err(error) => assert!(self.manager.fork_prefix(sequence, 0, 0).is_err(), "{error}"),
        }
    }

    /// Pinned blocks are never written or allocated.
    pub(crate) fn watch_pins(&self) {
        for (block, bytes) in self.pins.iter().flat_map(|held| &held.blocks) {
            assert_eq!(
                self.memory.get(place(&self.manager, Tier::Device, *block)),
                *bytes,
                "pinned block {block} was overwritten"
            );
        }
    }

    pub(crate) fn unpin_all(&mut self) {
        for held in std::mem::take(&mut self.pins) {
            self.manager.unpin(held.pin).unwrap();
        }
    }
}
