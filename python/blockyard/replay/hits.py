"""Counts the hits of a cache of one size and policy: sends one prompt at a time through a real `BlockManager`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard import BlockManager, PrefixCaching
from blockyard.errors import InvalidArgumentError
from blockyard.replay.optimal import optimal_hits
from blockyard.replay.packed import PackedTrace

__all__ = ["OPTIMAL", "POLICIES", "Hits", "replay_hits"]

POLICIES: Final = ("lru", "adaptive")
OPTIMAL: Final = "optimal"
_TOKENS: Final = 2
"""Tokens of a block in the manager: the block's number and a zero, so that a tail of one token fills no block."""


@dataclass(frozen=True, eq=False)
class Hits:
    """The hits of a cache of one size and policy.

    Attributes:
        policy: the eviction policy.
        device_blocks: size of the pool.
        host_blocks: size of the host tier.
        device: number of blocks that each request found on the device, int64 `[r]`.
        host: number of blocks that each request found on the host, int64 `[r]`.
        too_long: number of requests that need more blocks than the pool has; they are left out.
    """

    policy: str
    device_blocks: int
    host_blocks: int
    device: NDArray[np.int64]
    host: NDArray[np.int64]
    too_long: int


def replay_hits(trace: PackedTrace, policy: str, device_blocks: int, *, host_blocks: int = 0) -> Hits:
    """Send every prompt through a pool. Each is looked up, computed and freed before the next one comes.

    Blocks that the device evicts move to the host, if there is one. Answers are cached if the trace identifies them, as
    recordings do; otherwise they enter the cache with the next turn's prompt.

    Args:
        trace: the requests.
        policy: `"lru"`, `"adaptive"`, or `"optimal"`, which knows the future and has no host tier.
        device_blocks: size of the pool, at least 1.
        host_blocks: size of the host tier.

    Raises:
        InvalidArgumentError: the policy is unknown, a size is out of range, or `"optimal"` has a host tier.
    """
    if policy not in (*POLICIES, OPTIMAL):
        raise InvalidArgumentError(f"policy is {policy!r}, must be one of {', '.join((*POLICIES, OPTIMAL))}")
    if device_blocks < 1 or host_blocks < 0:
        raise InvalidArgumentError(
            f"device_blocks is {device_blocks}, host_blocks {host_blocks}, must be at least 1 and 0"
        )
    if policy == OPTIMAL and host_blocks:
        raise InvalidArgumentError(f"host_blocks is {host_blocks}, must be 0 with policy 'optimal'")
    too_long = int((trace.needed > device_blocks).sum())
    none = np.zeros(len(trace), np.int64)
    if policy == OPTIMAL:
        return Hits(policy, device_blocks, 0, optimal_hits(trace, device_blocks), none, too_long)
    caching = PrefixCaching(eviction=policy, host=host_blocks > 0)
    manager = BlockManager(
        block_size=_TOKENS,
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        watermark=0.0,
        prefix_caching=caching,
    )
    device, host = _replay(trace, manager, device_blocks)
    return Hits(policy, device_blocks, host_blocks, device, host, too_long)


def _replay(
    trace: PackedTrace, manager: BlockManager, device_blocks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    tokens = np.zeros(_TOKENS * len(trace.blocks), np.uint32)
    tokens[::_TOKENS] = trace.blocks
    needed, starts = trace.needed.tolist(), (trace.starts * _TOKENS).tolist()
    ends = ((trace.starts[:-1] + trace.prompt_blocks) * _TOKENS).tolist()
    rest = -(-(trace.input_tokens - trace.prompt_blocks * trace.block_tokens) // trace.block_tokens)
    tails = (rest * _TOKENS - trace.has_tail).tolist()
    device, host = np.zeros(len(trace), np.int64), np.zeros(len(trace), np.int64)
    with_host = bool(manager.pool("host").num_blocks)
    allocate, take, complete, computed, free = (
        manager.allocate,
        manager.take_decision,
        manager.complete,
        manager.mark_computed,
        manager.free,
    )
    for number, (start, end, tail) in enumerate(zip(starts[:-1], ends, tails, strict=True)):
        if needed[number] > device_blocks:
            continue
        prompt, answer = tokens[start:end], tokens[end : starts[number + 1]]
        if len(answer):  # the prompt's tail is the beginning of the answer's first block
            prompt, answer = np.append(prompt, answer[:tail]), answer[tail:]
        elif tail:
            prompt = np.append(prompt, np.zeros(tail, np.uint32))
        if with_host:
            host[number] = _make_room(manager, prompt, needed[number], device_blocks)
        sequence = allocate(prompt)
        complete(take().ticket)
        computed(sequence)
        if len(answer):
            manager.append(sequence, len(answer), token_ids=answer)
            complete(take().ticket)
            computed(sequence)
        free(sequence)
        device[number] = sequence.cached_tokens // _TOKENS
    return device - host, host


def _make_room(manager: BlockManager, prompt: NDArray[np.uint32], needed: int, device_blocks: int) -> int:
    """Copy to the host the blocks that the prompt will evict, as an engine's steps would. Returns its host hits."""
    hit = manager.prefix.lookup(prompt)
    empty = device_blocks - manager.stats().cached_blocks["device"]
    ahead = needed - (hit.tokens // _TOKENS - hit.host_blocks) - empty
    if ahead > 0:
        manager.prefix.offload(ahead)
        manager.complete(manager.take_decision().ticket)
        hit = manager.prefix.lookup(prompt)
    return hit.host_blocks
