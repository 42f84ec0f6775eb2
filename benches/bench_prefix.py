"""The prefix cache's and eviction's cost per unit, from Python: thread-CPU time, minimum of repeats.

    python benches/bench_prefix.py [--policies]

prints a table; with BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE. `--policies` prints
the hit rate of every eviction policy instead.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import random
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from figures import keep
from numpy.typing import NDArray

from blockyard import BlockManager, PrefixCaching
from blockyard.types import Sequence as Handle

BLOCK_SIZE = 16
LIVE = 16
PROMPTS_SHA256 = "d79e42a65481b8c081c23a28949d646358c3e092b126dcf49c48d04ed1ae1a02"
HUGE = 1 << 24
# The peers' policy; bench_policies.py compares the policies.
LRU = PrefixCaching(eviction="lru")
POLICIES = ("lru", "adaptive", "priority")

Prompts = Sequence[NDArray[np.uint32]] | Sequence[list[int]]


def prompts() -> list[NDArray[np.uint32]]:
    """W-prefix: 1000 prompts of 2048 tokens; 20 groups of 50 share their first 1024 tokens."""
    rng = random.Random(1)
    prefixes = [[rng.randrange(32000) for _ in range(1024)] for _ in range(20)]
    order = [i % 20 for i in range(1000)]
    rng.shuffle(order)
    tokens = [prefixes[group] + [rng.randrange(32000) for _ in range(1024)] for group in order]
    all_tokens = np.array(tokens, dtype="<u4")
    digest = hashlib.sha256(all_tokens.tobytes()).hexdigest()
    if digest != PROMPTS_SHA256:
        raise RuntimeError(f"the prompts' SHA-256 is {digest}, must be {PROMPTS_SHA256}")
    return [np.ascontiguousarray(row) for row in all_tokens.astype(np.uint32)]


def serve(manager: BlockManager, requests: Prompts) -> float:
    """Serve requests, 16 live at a time, first in, first out; returns microseconds per request."""
    live: deque[Handle] = deque()
    start = time.thread_time_ns()
    for prompt in requests:
        if len(live) == LIVE:
            manager.free(live.popleft())
        sequence = manager.allocate(prompt)
        manager.complete(manager.take_decision().ticket)
        manager.mark_computed(sequence)
        live.append(sequence)
    while live:
        manager.free(live.popleft())
    spent = time.thread_time_ns() - start
    return spent / len(requests) / 1000


def w_prefix(requests: Prompts, blocks: int, caching: PrefixCaching = LRU) -> tuple[float, float]:
    """Return microseconds per request and the block hit rate, with 16 requests live at a time, first in, first out."""
    manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=blocks, watermark=0.0, prefix_caching=caching)
    return serve(manager, requests), manager.stats().hit_rate


def compare_policies() -> None:
    """Print hit rate and cost of every eviction policy."""
    arrays = prompts()
    for eviction in POLICIES:
        for blocks in (20_000, 4_000):
            us, hit = w_prefix(arrays, blocks, PrefixCaching(eviction=eviction))
            print(f"{eviction:10} {blocks:6} blocks  hit rate {hit:.4f}  {us:6.2f} us per request")


def host_fill(requests: Prompts, copies: int) -> tuple[float, float, float]:
    """W-prefix over 4,000 device and 16,000 host blocks: as `w_prefix`, and blocks copied to the host per request."""
    manager = BlockManager(
        block_size=BLOCK_SIZE,
        device_blocks=4_000,
        host_blocks=16_000,
        watermark=0.0,
        prefix_caching=PrefixCaching(eviction="lru", host=True, host_copies_per_step=copies),
    )
    us = serve(manager, requests)
    return us, manager.stats().hit_rate, manager.stats().swapped_out_blocks["host"] / len(requests)


def full_of_chains(evictable: int, chain: int = 4) -> BlockManager:
    """Return a pool full of cached chains, released in random order of ids, as in a server that has run for a while."""
    manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=evictable, watermark=0.0, prefix_caching=LRU)
    batch = min(evictable // chain, 25_000)
    handles = np.zeros(evictable // chain, dtype=np.uint64)
    for first in range(0, len(handles), batch):
        numbers = np.arange(first, first + batch, dtype=np.uint32)
        some = manager.allocate(*np.repeat(numbers, chain * BLOCK_SIZE).reshape(batch, -1))
        manager.complete(manager.take_decision().ticket)
        manager.mark_computed(some)
        handles[first : first + batch] = np.array(some, np.uint64)
    np.random.default_rng(1).shuffle(handles)
    manager.free(handles)
    if manager.stats().cached_blocks["device"] != evictable:
        raise RuntimeError(f"{manager.stats().cached_blocks['device']} blocks are cached, must be {evictable}")
    return manager


def evict(evictable: int, repeats: int) -> float:
    """W-evict: nanoseconds per block to allocate cached blocks, 250 per call."""
    call = np.full(1, 250 * BLOCK_SIZE, dtype=np.uint32)
    best = float("inf")
    manager = full_of_chains(evictable)
    for _ in range(repeats):
        if manager.stats().cached_blocks["device"] < min(evictable, 50_000):
            manager = full_of_chains(evictable)
        calls = min(evictable, 50_000) // 250
        start = time.thread_time_ns()
        for _ in range(calls):
            manager.allocate(counts=call)
        best = min(best, (time.thread_time_ns() - start) / calls / 250)
    return best


def resident_bytes() -> int:
    """Return this process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def construct() -> float:
    """Milliseconds to make a pool of 16M blocks with prefix caching."""
    start = time.thread_time_ns()
    manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=HUGE, prefix_caching=LRU)
    spent = time.thread_time_ns() - start
    del manager
    return spent / 1e6


def bytes_per_block() -> float:
    """Return bytes per block of a pool of 16M blocks, all cached and released."""
    before = resident_bytes()
    manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=HUGE, watermark=0.0, prefix_caching=LRU)
    chain = 4096
    numbers = np.arange(chain * BLOCK_SIZE, dtype=np.uint32)
    for first in range(0, HUGE, chain):
        numbers[0] = first
        sequence = manager.allocate(numbers)
        manager.complete(manager.take_decision().ticket)
        manager.mark_computed(sequence)
        manager.free(sequence)
    if manager.stats().cached_blocks["device"] != HUGE:
        raise RuntimeError(f"{manager.stats().cached_blocks['device']} blocks are cached, must be {HUGE}")
    return (resident_bytes() - before) / HUGE


def figures(repeats: int) -> dict[str, float]:
    """Return all figures by their names in BENCH_JSON; memory first, while the heap is still small."""
    found = {
        "pool_16m_bytes_per_block": bytes_per_block(),
        "pool_16m_construct_ms": min(construct() for _ in range(repeats)),
    }
    arrays = prompts()
    for name, blocks in (("20k", 20_000), ("4k", 4_000)):
        runs = [w_prefix(arrays, blocks) for _ in range(repeats)]
        found[f"w_prefix_{name}_us"] = min(us for us, _ in runs)
        found[f"w_prefix_{name}_hit"] = runs[0][1]
    for name, copies in (("off", 0), ("64", 64), ("256", 256)):
        fills = [host_fill(arrays, copies) for _ in range(repeats)]
        found[f"host_fill_{name}_us"] = min(us for us, _, _ in fills)
        _, found[f"host_fill_{name}_hit"], found[f"host_fill_{name}_blocks"] = fills[0]
    lists = [array.tolist() for array in arrays]
    found["w_prefix_lists_us"] = min(w_prefix(lists, 20_000)[0] for _ in range(repeats))
    for name, evictable in (("1k", 1_000), ("10k", 10_000), ("100k", 100_000), ("1m", 10**6), ("10m", 10**7)):
        found[f"evict_{name}_ns"] = evict(evictable, 5 * repeats if evictable < 100_000 else repeats)
    return found


def main() -> None:
    """Measure, print, and add to BENCH_JSON."""
    gc.disable()  # its walks would count against the next allocation
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", action="store_true", help="print the hit rate of every eviction policy, and stop")
    if parser.parse_args().policies:
        compare_policies()
        return
    found = figures(repeats=9)
    for name, value in found.items():
        print(f"{name:26} {value:10.4f}")
    keep(found)


if __name__ == "__main__":
    main()
