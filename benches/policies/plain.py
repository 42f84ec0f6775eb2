"""Serves a trace with a manager alone, for groups with blocks of their own bytes: transfers land at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from blockyard import Arena, BlockManager, CacheGroup, PrefixCaching
from blockyard.errors import OutOfBlocksError
from policies.server import SIZE

Tokens = NDArray[np.uint32]


def arena_manager(groups: Sequence[CacheGroup], device: int, host: int, policy: str) -> BlockManager:
    """Make a manager over arenas of as many bytes as so many blocks of the first group."""
    unit = groups[0].block_bytes or 0
    arena = Arena(device_bytes=device * unit, host_bytes=host * unit)
    caching = PrefixCaching(eviction=policy, host=host > 0)
    return BlockManager(block_size=SIZE, groups=list(groups), arena=arena, prefix_caching=caching)


def serve_plainly(manager: BlockManager, prompts: Sequence[Callable[[], Tokens]], users: int, tokens: int) -> int:
    """Serve prompts in order, so many at a time, each in chunks of its share of a step's tokens. Returns the hits in
    blocks. If there is no room for a chunk, the last prompt begins again."""
    running: list[tuple[int, int]] = []  # handle, and number of its prompt
    hits, number, seen, share = 0, 0, 0, tokens // users
    while number < len(prompts) or running:
        while number < len(prompts) and len(running) < users:
            prompt = prompts[number]()
            if manager.can_allocate(prompt, chunk_tokens=share).status.name != "OK":
                break
            sequence = manager.allocate(prompt, chunk_tokens=share)
            running.append((int(sequence), number))
            hits += sequence.cached_tokens // SIZE if number >= seen else 0
            number, seen = number + 1, max(seen, number + 1)
        assert running, f"prompt {number} does not fit"
        manager.complete(manager.take_decision().ticket)
        manager.mark_computed([handle for handle, _ in running])
        for handle, which in list(running):
            if (handle, which) not in running:
                continue
            chunk = manager.next_chunk(handle, share)
            while chunk and (handle, which) in running:
                try:
                    manager.append([handle], chunk)
                    break
                except OutOfBlocksError:
                    last, number = running.pop()
                    manager.free([last])
            if not chunk:
                manager.free([handle])
                running.remove((handle, which))
    return hits
