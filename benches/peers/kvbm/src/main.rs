//! kvbm-logical on W-prefix and W-evict: thread-CPU time, minimum of repeats, one JSON object on the standard output.
//!
//!     kvbm-bench PROMPTS
//!
//! `PROMPTS` holds 1000 prompts of 2048 tokens as little-endian u32. Each way that its interface leaves open is taken as
//! it costs least: keys without token blocks, registration in batches, no events, no frequency tracker.

use dynamo_tokens::{PositionalLineageHash, TokenBlockSequence, compute_block_hash_for_tokens};
use kvbm_logical::blocks::ImmutableBlock;
use kvbm_logical::{BlockManager, BlockRegistry, KvbmSequenceHashProvider, SequenceHash};
use rustix::time::{ClockId, clock_gettime};
use std::collections::VecDeque;
use std::error::Error;

const BLOCK: u32 = 16;
const PROMPT: usize = 2048;
const LIVE: usize = 16;
const REPEATS: usize = 3;
/// Blocks of an evictable chain, and blocks taken a call.
const CHAIN: usize = 4;
const TAKEN: usize = 250;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(Clone)]
struct Device;

/// Thread-CPU time in nanoseconds.
fn now() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

fn lru(blocks: usize) -> Result<BlockManager<Device>> {
    let builder = BlockManager::builder().block_count(blocks).block_size(BLOCK as usize);
    Ok(builder.registry(BlockRegistry::builder().build()).with_lru_backend().build()?)
}

/// Keys of a prompt's full blocks.
fn keys(prompt: &[u32], out: &mut Vec<SequenceHash>) {
    out.clear();
    for block in prompt.chunks_exact(BLOCK as usize) {
        let hash = compute_block_hash_for_tokens(block, 0);
        let key = out.last().map_or_else(|| PositionalLineageHash::root(hash), |parent| parent.extend(hash));
        out.push(key);
    }
}

/// Matches a prompt, takes blocks for the rest and publishes them; also says how many it found.
fn admit(manager: &BlockManager<Device>, keys: &[SequenceHash]) -> Result<(Vec<ImmutableBlock<Device>>, usize)> {
    let mut held = manager.match_blocks(keys);
    let hits = held.len();
    let fresh = manager.allocate_blocks(keys.len() - hits).ok_or("the pool has too few blocks")?;
    let mut staged = Vec::with_capacity(fresh.len());
    for (block, key) in fresh.into_iter().zip(&keys[hits..]) {
        staged.push(block.stage(*key, BLOCK as usize).map_err(|_| "the block has another size")?);
    }
    held.extend(manager.register_blocks(staged));
    Ok((held, hits))
}

/// Releases a request's blocks, the last first: those at its end are the first to be evicted.
fn release(mut held: Vec<ImmutableBlock<Device>>) {
    while held.pop().is_some() {}
}

/// W-prefix: nanoseconds per request, and the block hit rate.
fn w_prefix(prompts: &[u32], blocks: usize) -> Result<(f64, f64)> {
    let manager = lru(blocks)?;
    let mut live = VecDeque::with_capacity(LIVE);
    let mut hashes = Vec::new();
    let mut found = 0;
    let start = now();
    for prompt in prompts.chunks_exact(PROMPT) {
        if live.len() == LIVE {
            live.pop_front().map(release);
        }
        keys(prompt, &mut hashes);
        let (held, hits) = admit(&manager, &hashes)?;
        found += hits;
        live.push_back(held);
    }
    live.into_iter().for_each(release);
    let spent = now() - start;
    let requests = prompts.len() / PROMPT;
    Ok((spent / requests as f64, found as f64 / (requests * PROMPT / BLOCK as usize) as f64))
}

/// A pool full of evictable chains, released in no order of ids.
fn full_of_chains(evictable: usize) -> Result<BlockManager<Device>> {
    let manager = lru(evictable)?;
    let mut hashes = Vec::new();
    let mut chains = Vec::with_capacity(evictable / CHAIN);
    for chain in 0..evictable / CHAIN {
        keys(&[u32::try_from(chain)?; CHAIN * BLOCK as usize], &mut hashes);
        chains.push(admit(&manager, &hashes)?.0);
    }
    let mut state = 1_u64;
    for i in (1..chains.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        chains.swap(i, (state >> 33) as usize % (i + 1));
    }
    chains.into_iter().for_each(release);
    Ok(manager)
}

/// W-evict: nanoseconds per block to take blocks from a pool that was full of evictable ones.
fn w_evict(evictable: usize) -> Result<f64> {
    let manager = full_of_chains(evictable)?;
    let calls = evictable.min(50_000) / TAKEN;
    let mut taken = Vec::with_capacity(calls);
    let start = now();
    for _ in 0..calls {
        let (blocks, evicted) = manager.allocate_blocks_with_evictions(TAKEN).ok_or("the pool has too few blocks")?;
        if evicted.len() != TAKEN {
            return Err(format!("evicted {} blocks, must be {TAKEN}", evicted.len()).into());
        }
        // Kept: a block given back would be taken again before any is evicted.
        taken.push(blocks);
    }
    Ok((now() - start) / (calls * TAKEN) as f64)
}

/// The least of some runs.
fn least(repeats: usize, run: impl Fn() -> Result<f64>) -> Result<f64> {
    (0..repeats).try_fold(f64::INFINITY, |best, _| Ok(best.min(run()?)))
}

fn read(path: &str) -> Result<Vec<u32>> {
    let bytes = std::fs::read(path)?;
    if bytes.is_empty() || bytes.len() % (PROMPT * 4) != 0 {
        return Err(format!("{path} holds {} bytes, must be a multiple of {}", bytes.len(), PROMPT * 4).into());
    }
    Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

/// Whether `keys` gives what the peer's own token blocks give.
fn compare_keys(prompt: &[u32]) -> Result<()> {
    let mut hashes = Vec::new();
    keys(prompt, &mut hashes);
    let sequence = TokenBlockSequence::from_slice(prompt, BLOCK, None);
    if !sequence.blocks().iter().map(KvbmSequenceHashProvider::kvbm_sequence_hash).eq(hashes) {
        return Err("the keys are not those of the peer's token blocks".into());
    }
    Ok(())
}

fn main() -> Result<()> {
    let path = std::env::args().nth(1).ok_or("usage: kvbm-bench PROMPTS")?;
    let prompts = read(&path)?;
    compare_keys(&prompts[..PROMPT])?;
    let mut figures = Vec::new();
    for (name, blocks) in [("20k", 20_000), ("4k", 4_000)] {
        let cost = least(REPEATS, || Ok(w_prefix(&prompts, blocks)?.0))?;
        figures.push((format!("prefix_{name}_us"), cost / 1000.0));
        figures.push((format!("prefix_{name}_hit"), w_prefix(&prompts, blocks)?.1));
    }
    for (name, evictable) in [("1k", 1_000), ("10k", 10_000), ("100k", 100_000), ("1m", 1_000_000)] {
        // To fill a large pool costs far more than what is measured.
        let repeats = if evictable > 50_000 { 1 } else { REPEATS };
        figures.push((format!("evict_{name}_ns"), least(repeats, || w_evict(evictable))?));
    }
    let fields: Vec<_> = figures.iter().map(|(name, value)| format!("\"{name}\": [{value:.4}]")).collect();
    println!("{{{}}}", fields.join(", "));
    Ok(())
}
