"""The most hits that any eviction policy could have: it knows all requests."""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from blockyard.replay.packed import NEVER, PackedTrace

__all__ = ["optimal_hits"]


def optimal_hits(trace: PackedTrace, blocks: int) -> NDArray[np.int64]:
    """Count the hits of the policy that evicts the block whose next use is furthest (Belady).

    The next use of a block never comes after that of a block behind it in a prompt. So the cached blocks with one next
    use are the beginning of one prompt, and their number says which they are: the cost grows with the next uses of a
    prompt, not with its blocks.

    Args:
        trace: the requests, served one at a time.
        blocks: size of the pool.

    Returns:
        Blocks that each request finds cached, int64 `[r]`; 0 for a request that is longer than the pool.
    """
    needed, findable = trace.needed.tolist(), trace.hittable.tolist()
    uses = trace.next_uses(trace.needed <= blocks)
    cached: dict[int, int] = {}  # blocks by next use
    furthest: list[int] = []  # the next uses, the furthest first
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
                # Those that it had already are blocks of this request that it could not find.
                cached[use] = max(stop, findable[number] + before) - begin
            total += cached[use] - before
    return hits
