"""The maximum hits of any eviction policy, computed with knowledge of all future requests."""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from blockyard.tools.replay.packed import NEVER, PackedTrace

__all__ = ["optimal_hits"]


def optimal_hits(trace: PackedTrace, blocks: int) -> NDArray[np.int64]:
    """Count the hits of the policy that evicts the block whose next use is furthest away (Belady).

    A block's next use is never later than that of the blocks after it in a prompt. So the cached blocks that share a
    next use are the beginning of one prompt, and their number identifies them. The cost therefore grows with the number
    of distinct next uses in a prompt, not with its blocks.

    Args:
        trace: the requests, served one at a time.
        blocks: size of the pool.

    Returns:
        Number of blocks that each request finds cached, int64 `[r]`; 0 for a request that is longer than the pool.
    """
    needed, findable = trace.needed.tolist(), trace.hittable.tolist()
    uses = trace.next_uses(trace.needed <= blocks)
    cached: dict[int, int] = {}  # number of cached blocks by next use
    furthest: list[int] = []  # heap of negated next uses
    total = 0
    hits = np.zeros(len(trace), np.int64)
    for number, (start, end) in enumerate(zip(trace.starts[:-1].tolist(), trace.starts[1:].tolist(), strict=True)):
        if needed[number] > blocks:
            continue
        hits[number] = found = cached.pop(number, 0)
        total -= found
        while total + needed[number] > blocks:
            use = -furthest[0]
            gone = min(cached.get(use, 0), total + needed[number] - blocks)
            total -= gone
            if gone < cached.get(use, 0):
                cached[use] -= gone
            else:
                cached.pop(use, None)
                heapq.heappop(furthest)
        own = uses[start:end]
        bounds = [0, *(np.nonzero(own[1:] != own[:-1])[0] + 1).tolist(), len(own)] if len(own) else [0]
        for begin, stop in pairwise(bounds):
            use = int(own[begin])
            if use not in cached:
                heapq.heappush(furthest, -use)
            before = cached.get(use, 0)
            cached[use] = before + stop - begin
            if before and use != NEVER and stop > findable[number]:
                # The blocks cached before belong to this request, which could not find them.
                cached[use] = max(stop, findable[number] + before) - begin
            total += cached[use] - before
    return hits
