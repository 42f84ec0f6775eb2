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
    """

    prefetches: int = 0
    hit_blocks: int = 0
    hit_bytes: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    written_blocks: int = 0
    written_bytes: int = 0
    unwritten_blocks: int = 0
    load_seconds: list[int] = field(default_factory=lambda: [0] * (len(LOAD_SECONDS) + 1))

    def as_dict(self) -> dict[str, int]:
        """Return all counters by name, for metrics; the ranges of `load_seconds` are cumulative."""
        counters = {
            "prefix_store_prefetches": self.prefetches,
            "prefix_store_hit_blocks": self.hit_blocks,
            "prefix_store_hit_bytes": self.hit_bytes,
            "prefix_store_written_blocks": self.written_blocks,
            "prefix_store_written_bytes": self.written_bytes,
            "prefix_store_unwritten_blocks": self.unwritten_blocks,
        }
        counters |= {f"prefix_store_misses_{reason}": count for reason, count in sorted(self.misses.items())}
        total = 0
        for end, count in zip((*LOAD_SECONDS, "inf"), self.load_seconds, strict=True):
            total += count
            counters[f"prefix_store_load_seconds_le_{end}"] = total
        return counters
