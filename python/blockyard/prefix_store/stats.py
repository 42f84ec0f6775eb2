"""Counters of a prefix store."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

__all__ = ["LOAD_SECONDS", "PrefixStoreStats"]

LOAD_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper ends of the ranges that `PrefixStoreStats.load_seconds` counts prefetches in; the last range has no end."""


@dataclass
class PrefixStoreStats:
    """Counters since the store was connected.

    Attributes:
        prefetches: prompts that lacked blocks when they were prefetched.
        hit_blocks: blocks that were loaded, and then could be found.
        hit_bytes: their bytes.
        misses: blocks or prompts that did not get a block from the store, by reason: `"absent"`, `"timeout"`,
            `"no_room"`, `"unavailable"`, `"copy_failed"` and the store's own reasons. Prompts whose first block the
            store is known to lack count as `"absent"`, see `ExternalStore.lacks`.
        written_blocks: blocks that the store has taken, or had.
        written_bytes: their bytes.
        unwritten_blocks: blocks that it has not. Those that a call of the manager took first, and those that the store
            refused, for instance beyond a quota, count here too.
        load_seconds: prefetches by how long they took, see `LOAD_SECONDS`.
        load_seconds_sum: how long all of them took together.
    """

    prefetches: int = 0
    hit_blocks: int = 0
    hit_bytes: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    written_blocks: int = 0
    written_bytes: int = 0
    unwritten_blocks: int = 0
    load_seconds: list[int] = field(default_factory=lambda: [0] * (len(LOAD_SECONDS) + 1))
    load_seconds_sum: float = 0.0
