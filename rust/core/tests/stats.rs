//! The counters that a manager reports, counted again from outside.

use blockyard_core::{Config, KeySpec, Manager, PrefixStats, Prompt, PromptOptions, Tier};
use proptest::prelude::*;

const SIZE: u32 = 2;

fn salt(tenant: u8) -> [u8; 32] {
    [tenant; 32]
}

proptest! {
    #[test]
    fn the_counters_agree_with_a_count_from_outside(
        ops in prop::collection::vec((0u8..6, 0u8..2, prop::collection::vec(0u32..2, 1..16)), 1..60),
    ) {
        let config = Config { prefix_caching: true, ..Config::new(SIZE, [16, 0, 0]) };
        let mut manager = Manager::new(config).unwrap();
        let quotas = [None, Some(3)];
        for (tenant, quota) in (0..).zip(quotas) {
            manager.set_quota(salt(tenant), quota).unwrap();
        }
        let (mut count, mut live, mut steps, mut open) = (PrefixStats::default(), Vec::new(), 0, Vec::new());
        for (op, tenant, tokens) in ops {
            match op {
                0..3 => {
                    let prompt = Prompt { tokens: &tokens, spec: KeySpec { salt: salt(tenant), ..KeySpec::default() }, extras: &[], hashed: None };
                    let (found, mut out) = (manager.lookup(&prompt).unwrap().tokens, Vec::new());
                    if manager.allocate_prompts(&[prompt], PromptOptions::default(), &mut out).is_ok() {
                        prop_assert_eq!(out[0].1, found);
                        let len = u32::try_from(tokens.len()).unwrap();
                        count.prompts += 1;
                        count.tokens += u64::from(len);
                        count.blocks += u64::from(len / SIZE);
                        count.hit_tokens += u64::from(found);
                        count.hit_blocks += u64::from(found / SIZE);
                        live.push(out[0].0);
                        open.push(manager.take_decision().ticket);
                        steps += 1;
                        manager.mark_computed(&[out[0].0]).unwrap();
                    }
                }
                3 if !live.is_empty() => manager.free(&[live.remove(0)]).unwrap(),
                4 if !open.is_empty() => manager.complete(open.remove(0)).unwrap(),
                _ => {
                    open.push(manager.take_decision().ticket);
                    steps += 1;
                }
            }
            let stats = manager.stats();
            prop_assert_eq!((stats.sequences, stats.steps, stats.open_tickets), (live.len(), steps, open.len()));
            prop_assert_eq!(PrefixStats { merged: 0, ..stats.prefix }, count);
            prop_assert_eq!(stats.prefix.missed_blocks() + count.hit_blocks, count.blocks);
            prop_assert_eq!(stats.prefix.missed_tokens() + count.hit_tokens, count.tokens);
            let held = [0, 1].map(|tenant| manager.quota(salt(tenant)).unwrap());
            prop_assert_eq!(held.map(|(_, quota)| quota), quotas);
            prop_assert_eq!(held[0].0 + held[1].0, manager.pool(Tier::Device).evictable());
            prop_assert_eq!(manager.quota(salt(2)), None);
        }
    }
}
