"""The most hits that any eviction policy could have: it knows all requests."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from blockyard.replay.packed import PackedTrace

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
    needed, tails = trace.needed, trace.has_tail
    uses = trace.next_uses(needed <= blocks)
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
            gone = min(cached.get(use, 0), total + int(needed[number]) - blocks)
            total -= gone
            if gone < cached.get(use, 0):
                cached[use] -= gone
            else:
                cached.pop(use, None)
                heapq.heappop(furthest)
        own = uses[start:end]
        if len(own) and not tails[number] and cached.get(int(own[-1]), 0):
            own = own[:-1]  # computed again although it is cached: the copy is not kept
        begins = np.nonzero(np.append(True, own[1:] != own[:-1]))[0] if len(own) else np.zeros(0, np.int64)
        for use, count in zip(own[begins].tolist(), np.diff(np.append(begins, len(own))).tolist(), strict=True):
            if use not in cached:
                heapq.heappush(furthest, -use)
            cached[use] = cached.get(use, 0) + count
        total += len(own)
    return hits
