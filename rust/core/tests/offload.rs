//! An offload cache against memory that is written and read as its transfers say: a hit's chunk has its key's bytes, a
//! running load reads them to its end, and a store is refused only if too few chunks are available.
#![expect(clippy::unwrap_used, reason = "a test may fail by panicking")]

use blockyard_core::offload::{Lookup, Names, OffloadCache, Stored};
use blockyard_core::{BlockId, Eviction, Key, Policies};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

#[derive(Debug, Clone)]
enum Op {
    Store(Vec<u8>, u64),
    EndStore(usize, bool),
    Load(Vec<u8>),
    EndLoad(usize),
    Touch(Vec<u8>, Vec<u8>),
    Forget(u8),
    Evict(usize, Vec<u8>),
    Expire(u64),
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    let names = || prop::collection::vec(0u8..12, 0..5);
    prop_oneof![
        6 => (names(), 0u64..4).prop_map(|(names, deadline)| Op::Store(names, deadline)),
        6 => (0usize..16, prop::bool::weighted(0.8)).prop_map(|(i, ok)| Op::EndStore(i, ok)),
        5 => names().prop_map(Op::Load),
        5 => (0usize..16).prop_map(Op::EndLoad),
        2 => (names(), names()).prop_map(|(names, inserted)| Op::Touch(names, inserted)),
        2 => (0u8..12).prop_map(Op::Forget),
        2 => (0usize..4, names()).prop_map(|(count, kept)| Op::Evict(count, kept)),
        1 => (0u64..4).prop_map(Op::Expire),
        1 => Just(Op::Reset),
    ]
}

struct Plain {
    cache: OffloadCache,
    /// What each chunk holds.
    memory: Vec<Option<u8>>,
    /// Running stores in the order of the calls: name, chunk, deadline, and whether the name was forgotten.
    stores: Vec<(u8, BlockId, u64, bool)>,
    loads: Vec<(u8, BlockId)>,
    hits: BTreeMap<u8, BlockId>,
}

fn key(name: u8) -> Key {
    static NAMES: LazyLock<Names> = LazyLock::new(Names::default);
    NAMES.key(&[name])
}

impl Plain {
    fn new(chunks: usize, eviction: Eviction) -> Self {
        let policies = Policies { eviction, ..Policies::default() };
        let cache = OffloadCache::new(chunks, policies).unwrap();
        Self { cache, memory: vec![None; chunks], stores: Vec::new(), loads: Vec::new(), hits: BTreeMap::new() }
    }

    fn is_storing(&self, name: u8) -> bool {
        self.stores.iter().any(|store| store.0 == name)
    }

    /// Chunks that transfers hold, of any name.
    fn held(&self) -> BTreeSet<u32> {
        let stores = self.stores.iter().map(|store| store.1.0);
        stores.chain(self.loads.iter().map(|load| load.1.0)).collect()
    }

    fn store(&mut self, names: &[u8], deadline: u64) {
        let keys: Vec<Key> = names.iter().copied().map(key).collect();
        let new: BTreeSet<u8> =
            names.iter().copied().filter(|name| !self.hits.contains_key(name) && !self.is_storing(*name)).collect();
        let mut kept = self.held();
        kept.extend(names.iter().filter_map(|name| self.hits.get(name)).map(|chunk| chunk.0));
        let mut out = Vec::new();
        let fits = self.cache.prepare_store(&keys, deadline, &mut out);
        assert_eq!(fits, new.len() <= self.memory.len() - kept.len(), "{names:?} with {kept:?} kept");
        if !fits {
            assert!(out.is_empty());
            return;
        }
        assert_eq!(out.iter().map(|(place, _)| names[*place]).collect::<BTreeSet<_>>(), new);
        assert_eq!(out.len(), new.len());
        for (place, chunk) in out {
            assert!(kept.insert(chunk.0), "{chunk} is in use");
            self.hits.retain(|_, hit| *hit != chunk);
            self.memory[chunk.index()] = None; // half-written
            self.stores.push((names[place], chunk, deadline, false));
        }
    }

    fn end_store(&mut self, at: usize, success: bool) {
        if self.stores.is_empty() {
            return;
        }
        let (name, chunk, _, late) = self.stores.remove(at % self.stores.len());
        self.memory[chunk.index()] = success.then_some(name);
        let expected = match (late, success) {
            (true, _) => Stored::Unknown,
            (false, true) => Stored::Found,
            (false, false) => Stored::Freed(chunk),
        };
        assert_eq!(self.cache.complete_store(&key(name), success), expected);
        if expected == Stored::Found {
            self.hits.insert(name, chunk);
        }
    }

    fn load(&mut self, names: &[u8]) {
        let keys: Vec<Key> = names.iter().copied().map(key).collect();
        let mut out = Vec::new();
        let miss = names.iter().position(|name| !self.hits.contains_key(name));
        assert_eq!(self.cache.prepare_load(&keys, &mut out).err(), miss);
        for (&name, chunk) in names.iter().zip(out) {
            assert_eq!(self.hits[&name], chunk);
            self.loads.push((name, chunk));
        }
    }

    fn end_load(&mut self, at: usize) {
        if self.loads.is_empty() {
            assert!(!(0..12).any(|name| self.cache.complete_load(&key(name))));
            return;
        }
        let (name, chunk) = self.loads.remove(at % self.loads.len());
        assert_eq!(self.memory[chunk.index()], Some(name), "{chunk} was written while a load read it");
        assert!(self.cache.complete_load(&key(name)));
    }

    fn evict(&mut self, count: usize, protected: &[u8]) {
        let keys: Vec<Key> = protected.iter().copied().map(key).collect();
        let held = self.held();
        let may_go = self.hits.iter().filter(|(name, chunk)| !protected.contains(name) && !held.contains(&chunk.0));
        let (fits, mut out) = (count <= may_go.count(), Vec::new());
        assert_eq!(self.cache.evict(count, &keys, &mut out), fits);
        assert_eq!(out.len(), if fits { count } else { 0 });
        for chunk in out {
            let (&name, _) = self.hits.iter().find(|(_, hit)| **hit == chunk).unwrap();
            assert!(!protected.contains(&name) && !held.contains(&chunk.0), "{name} must be kept");
            self.hits.remove(&name);
        }
    }

    fn forget(&mut self, name: u8) {
        self.hits.remove(&name);
        self.stores.iter_mut().filter(|store| store.0 == name).for_each(|store| store.3 = true);
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Store(names, deadline) => self.store(names, *deadline),
            Op::EndStore(at, success) => self.end_store(*at, *success),
            Op::Load(names) => self.load(names),
            Op::EndLoad(at) => self.end_load(*at),
            Op::Touch(names, inserted) => {
                let [names, inserted] = [names, inserted].map(|names| names.iter().copied().map(key));
                self.cache.touch(&names.collect::<Vec<_>>(), &inserted.collect());
            }
            Op::Forget(name) => {
                self.cache.forget(&key(*name));
                self.forget(*name);
            }
            Op::Evict(count, protected) => self.evict(*count, protected),
            Op::Expire(now) => {
                let (mut out, mut late) = (Vec::new(), Vec::new());
                self.cache.expire(*now, &mut out);
                late.extend(self.stores.iter().filter(|store| store.2 <= *now && !store.3).map(|store| store.0));
                assert_eq!(out.len(), late.len());
                for name in late {
                    self.forget(name);
                }
            }
            Op::Reset => {
                self.cache.reset();
                (0..12).for_each(|name| self.forget(name));
            }
        }
        self.compare();
    }

    fn compare(&self) {
        self.cache.check().unwrap();
        for name in 0..12 {
            let pending = self.stores.iter().any(|store| store.0 == name && !store.3);
            let expected = match self.hits.get(&name) {
                Some(chunk) => {
                    assert_eq!(self.memory[chunk.index()], Some(name));
                    Lookup::Hit
                }
                None if pending => Lookup::Pending,
                None => Lookup::Miss,
            };
            assert_eq!(self.cache.lookup(&key(name)), expected, "{name}");
        }
        let pending = self.stores.iter().filter(|store| !store.3).count();
        assert_eq!((self.cache.num_stored(), self.cache.num_storing()), (self.hits.len(), pending));
        assert_eq!(self.cache.num_free(), self.memory.len() - self.held().len());
    }
}

proptest! {
    #[test]
    fn every_hit_has_its_bytes_and_every_load_reads_them_to_its_end(
        chunks in 0usize..9,
        policy in 0usize..Eviction::NAMED.len(),
        ops in prop::collection::vec(op(), 1..120),
    ) {
        let mut plain = Plain::new(chunks, Eviction::NAMED[policy]);
        for op in &ops {
            plain.apply(op);
        }
    }
}

#[test]
fn all_loads_of_a_key_end_even_if_it_was_forgotten_and_stored_again() {
    for is_forgotten_again in [false, true] {
        let mut plain = Plain::new(4, Eviction::Lru);
        let (cache, keys) = (&mut plain.cache, [key(1)]);
        let (mut stored, mut loaded) = (Vec::new(), Vec::new());
        for forgets in [true, is_forgotten_again] {
            assert!(cache.prepare_store(&keys, u64::MAX, &mut stored));
            assert_eq!(cache.complete_store(&keys[0], true), Stored::Found);
            cache.prepare_load(&keys, &mut loaded).unwrap();
            assert!(!forgets || cache.forget(&keys[0]) == loaded.last().copied());
        }
        assert_eq!((loaded.len(), cache.num_free()), (2, 2));
        assert_eq!([(); 3].map(|()| cache.complete_load(&keys[0])), [true, true, false]);
        assert_eq!((cache.lookup(&keys[0]) == Lookup::Hit, cache.num_free()), (!is_forgotten_again, 4));
        cache.check().unwrap();
    }
}
