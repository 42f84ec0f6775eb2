"""W-prefix: what every prefix cache is measured on, and our cost on it."""

from __future__ import annotations

import gc
import hashlib
import random
import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from blockyard import BlockManager

BLOCK_SIZE = 16
LIVE = 16
REQUESTS = 1000
LENGTH = 2048
SHARED = 1024
GROUPS = 20
VOCABULARY = 32000
SHA256 = "d79e42a65481b8c081c23a28949d646358c3e092b126dcf49c48d04ed1ae1a02"


def prompts() -> NDArray[np.uint32]:
    """Token ids, uint32 `[1000, 2048]`: 20 shuffled groups of 50 requests share their first 1024 tokens.

    Raises:
        RuntimeError: they are not the ones that the published figures were measured on.
    """
    rng = random.Random(1)
    prefixes = [[rng.randrange(VOCABULARY) for _ in range(SHARED)] for _ in range(GROUPS)]
    order = [i % GROUPS for i in range(REQUESTS)]
    rng.shuffle(order)
    tokens = [prefixes[group] + [rng.randrange(VOCABULARY) for _ in range(LENGTH - SHARED)] for group in order]
    array = np.array(tokens, dtype="<u4")
    digest = hashlib.sha256(array.tobytes()).hexdigest()
    if digest != SHA256:
        raise RuntimeError(f"the prompts' SHA-256 is {digest}, must be {SHA256}")
    return array.astype(np.uint32)


def run(requests: NDArray[np.uint32], blocks: int) -> tuple[float, float]:
    """Thread-CPU microseconds per request, and the block hit rate; 16 requests live at a time, first in, first out."""
    manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=blocks, watermark=0.0, prefix_caching=True)
    live: deque[NDArray[np.uint64]] = deque()
    rows = list(requests)
    gc.collect()
    start = time.thread_time_ns()
    for prompt in rows:
        if len(live) == LIVE:
            manager.free(live.popleft())
        sequences, _ = manager.allocate_prompts([prompt])
        manager.complete(manager.take_decision().ticket)
        manager.mark_computed(sequences)
        live.append(sequences)
    while live:
        manager.free(live.popleft())
    spent = time.thread_time_ns() - start
    return spent / len(rows) / 1000, manager.prefix_stats.hit_rate
