"""SGLang's prefix cache, 0.5.23, on W-prefix and W-evict: UnifiedRadixCache over its Rust tree, its default, on a CPU.

Pages of 16 tokens from its paged allocator; called as its scheduler calls it, keys made outside the measured time.
It compares tokens instead of hashing them. W-decode has no counterpart in the tree, nor have fork and swap.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from common import (
    BLOCK_SIZE,
    EVICTABLE,
    GROUP,
    LIVE,
    POOLS,
    TAKEN,
    Figures,
    chains,
    groups,
    laps,
    prompts,
    report,
    shuffled,
)
from stand_ins import bare, stand_in

bare("sglang", "sglang.srt", "sglang.srt.mem_cache")
stand_in("PIL", "orjson", "packaging", "psutil", "pybase64", "requests", "starlette", "triton", "sglang.kernels")
stand_in(
    *(f"sglang.srt.{name}" for name in ("arg_groups", "disaggregation", "distributed", "managers", "observability")),
    *(f"sglang.srt.{name}" for name in ("platforms", "runtime_context")),
    *(f"sglang.srt.mem_cache.{name}" for name in ("buffer_mode", "common", "cpp_utils", "hicache_storage")),
    *(f"sglang.srt.mem_cache.{name}" for name in ("hybrid_cache", "memory_pool", "storage_prefetch")),
    *(f"sglang.srt.mem_cache.{name}" for name in ("swa_memory_pool", "unified_cache.storage_attachment")),
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker",
    *(f"sglang.srt.utils.{name}" for name in ("msgspec_utils", "network", "poll_timer", "rank_consensus_checker")),
    "sglang.srt.utils.video_decoder",
)

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402


def cache_of(blocks: int) -> Any:
    tokens = blocks * BLOCK_SIZE
    allocator = PagedTokenToKVPoolAllocator(tokens, BLOCK_SIZE, torch.float16, "cpu", None, need_sort=False)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=allocator,
        page_size=BLOCK_SIZE,
        tree_components=(ComponentType.FULL,),
        tree_core_backend="rust",
    )
    cache = UnifiedRadixCache(params)
    if type(cache.tree_core).__name__ != "RustUnifiedTreeCore":
        raise RuntimeError("the Rust tree does not load")
    return cache


def key_of(tokens: list[int]) -> Any:
    return RadixKey(array("q", tokens))


def take(cache: Any, tokens: int) -> Any:
    """Slots for `tokens` tokens, evicting for them where too few are free."""
    allocator = cache.token_to_kv_pool_allocator
    shortfall = tokens - allocator.available_size()
    if shortfall > 0:
        cache.evict_for_alloc(EvictParams(num_tokens=shortfall))
    slots = allocator.alloc(tokens)
    if slots is None:
        raise RuntimeError("the pool has too few blocks")
    return slots


def start(cache: Any, key: Any) -> tuple[Any, int]:
    """Match, allocate and publish; returns the lock that holds the request's blocks, and how many tokens it found."""
    match = cache.match_prefix(MatchPrefixParams(key=key))
    lock, hits = cache.lock(match.last_device_node), match.device_prefix_len
    slots = take(cache, len(key) - hits)
    found = cache.path_device_indices(match.last_device_node)
    inserted = cache.insert(InsertParams(key=key, value=torch.cat((found, slots)), prev_prefix_len=hits))
    longer = cache.lock(inserted.last_device_node)
    cache.unlock(lock)
    return longer, hits


def prefix(requests: list[list[int]], blocks: int) -> tuple[list[float], list[float]]:
    cache = cache_of(blocks)
    live: deque[Any] = deque()
    hits = 0

    def run(keys: Sequence[Any]) -> None:
        nonlocal hits
        for key in keys:
            if len(live) == LIVE:
                cache.unlock(live.popleft())
            lock, found = start(cache, key)
            hits += found
            live.append(lock)

    costs = laps(groups([key_of(tokens) for tokens in requests]), run, GROUP * 1000)
    return costs, [hits / sum(map(len, requests))]


def evict(evictable: int) -> list[float]:
    cache = cache_of(evictable)
    locks = [start(cache, key_of(tokens))[0] for tokens in chains(evictable)]
    for number in shuffled(len(locks)):
        cache.unlock(locks[number])
    kept = []
    calls = range(min(evictable, 50_000) // TAKEN)
    return laps(calls, lambda _: kept.append(take(cache, TAKEN * BLOCK_SIZE)), TAKEN)


def measure(requests: list[list[int]]) -> Figures:
    figures: Figures = {}
    for name, blocks in POOLS.items():
        figures[f"prefix_{name}_us"], figures[f"prefix_{name}_hit"] = prefix(requests, blocks)
    return figures | {f"evict_{name}_ns": evict(evictable) for name, evictable in EVICTABLE.items()}


if __name__ == "__main__":
    REQUESTS = prompts()
    report(lambda: measure(REQUESTS))
