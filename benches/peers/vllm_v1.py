"""vLLM V1's KVCacheManager, 0.33.0, on W-decode, W-prefix and W-evict; it neither forks nor swaps.

One group of full attention, except for the figures of `groups_N`: full attention and windows, on W-decode and W-prefix
with fewer prompts. They keep window blocks as vLLM's default does (`prefix_cache_retention_interval=0`). Called as its
scheduler calls it; requests are made outside the measured time, but the hashes of their blocks (SHA-256, its default)
inside. Block tables and slots are filled by its workers: not measured.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from common import (
    BLOCK_SIZE,
    EVICTABLE,
    GROUP,
    GROUPED_POOL,
    GROUPED_SHAPES,
    LIVE,
    POOLS,
    PROMPT,
    SEQUENCES,
    STEPS,
    TAKEN,
    Figures,
    chains,
    grouped_prompts,
    groups,
    laps,
    prompts,
    report,
    shuffled,
)
from stand_ins import bare, stand_in

bare("vllm")
stand_in(
    *("psutil", "uvloop", "vllm.config", "vllm.distributed", "vllm.logger", "vllm.lora", "vllm.multimodal"),
    *("vllm.platforms", "vllm.pooling_params", "vllm.sampling_params", "vllm.usage", "vllm.utils.network_utils"),
    *("vllm.utils.system_utils", "vllm.v1.attention", "vllm.v1.core.sched", "vllm.v1.engine", "vllm.v1.kv_hints"),
    *("vllm.v1.metrics", "vllm.v1.structured_output"),
)

import torch  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request  # noqa: E402

NUMBERS = itertools.count()
init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK_SIZE, sha256)


class _Pooling:
    """The least that a request wants to know."""

    skip_reading_prefix_cache = False


def manager_of(blocks: int, *, caching: bool, windows: Sequence[int | None] = (None,)) -> Any:
    shape = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float16}
    specs = [
        SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
        for window in windows
    ]
    # One more: it keeps block 0 as its null block.
    config = KVCacheConfig(blocks + 1, [], [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)])
    if len(specs) > 1:
        config.prefix_cache_retention_interval = 0
    return KVCacheManager(config, 1 << 16, BLOCK_SIZE, BLOCK_SIZE, enable_caching=caching)


def request_of(tokens: list[int]) -> Any:
    return Request(str(next(NUMBERS)), tokens, None, _Pooling())


def start(manager: Any, request: Any, *, caching: bool) -> int:
    """Hash, match, allocate and publish; also says how many tokens it found."""
    found, hits = None, 0
    if caching:
        request.block_hashes = HASHER(request)
        found, hits, request.shared_prefix_boundary = manager.get_computed_blocks(request)
    if manager.allocate_slots(request, request.num_prompt_tokens - hits, hits, found) is None:
        raise RuntimeError("the pool has too few blocks")
    request.num_computed_tokens = request.num_prompt_tokens
    return hits


def decode(windows: Sequence[int | None] = (None,)) -> Figures:
    manager = manager_of(32768 * len(windows), caching=False, windows=windows)
    requests = [request_of([1] * PROMPT) for _ in range(SEQUENCES)]

    def tokens() -> Iterator[None]:
        for _ in range(STEPS):
            for request in requests:
                request.append_output_token_ids(1)
            yield
            for request in requests:
                request.num_computed_tokens += 1

    def step(_: None) -> None:
        for request in requests:
            if manager.allocate_slots(request, 1) is None:
                raise RuntimeError("the pool has too few blocks")

    allocated = laps(requests, lambda request: start(manager, request, caching=False), PROMPT // BLOCK_SIZE)
    appended = laps(tokens(), step, SEQUENCES)
    freed = laps(requests, manager.free, (PROMPT + STEPS) // BLOCK_SIZE)
    return {"decode_ns": appended, "allocate_ns": allocated, "free_ns": freed}


def prefix(
    requests: list[list[int]], blocks: int, windows: Sequence[int | None] = (None,)
) -> tuple[list[float], list[float]]:
    manager = manager_of(blocks, caching=True, windows=windows)
    live: deque[Any] = deque()
    hits = 0

    def run(some: Sequence[Any]) -> None:
        nonlocal hits
        for request in some:
            if len(live) == LIVE:
                manager.free(live.popleft())
            hits += start(manager, request, caching=True)
            live.append(request)

    costs = laps(groups([request_of(tokens) for tokens in requests]), run, GROUP * 1000)
    return costs, [hits / sum(map(len, requests))]


def evict(evictable: int) -> list[float]:
    manager = manager_of(evictable, caching=True)
    requests = [request_of(tokens) for tokens in chains(evictable)]
    for request in requests:
        start(manager, request, caching=True)
    for number in shuffled(len(requests)):
        manager.free(requests[number])
    kept = []
    calls = range(min(evictable, 50_000) // TAKEN)
    return laps(calls, lambda _: kept.append(manager.block_pool.get_new_blocks(TAKEN)), TAKEN)


def measure(requests: list[list[int]]) -> Figures:
    figures = decode()
    for name, blocks in POOLS.items():
        figures[f"prefix_{name}_us"], figures[f"prefix_{name}_hit"] = prefix(requests, blocks)
    figures |= {f"evict_{name}_ns": evict(evictable) for name, evictable in EVICTABLE.items()}
    for count, windows in GROUPED_SHAPES.items():
        name = f"groups_{count}"
        figures[f"{name}_append_mean_ns"] = decode(windows)["decode_ns"]
        figures[f"{name}_prefix_us"], figures[f"{name}_prefix_hit"] = prefix(grouped_prompts(), GROUPED_POOL, windows)
    return figures


if __name__ == "__main__":
    REQUESTS = prompts()
    report(lambda: measure(REQUESTS))
