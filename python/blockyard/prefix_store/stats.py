"""Counters of a prefix store."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from blockyard.types import Histogram

__all__ = ["PrefixStoreStats"]


@dataclass
class PrefixStoreStats:
    """Counters since the store was connected.

    Attributes:
        prefetches: prefetched prompts with missing blocks.
        hit_blocks: blocks loaded from the store into the cache.
        hit_bytes: their bytes.
        misses: prefetches that did not load all missing blocks, by reason: `"absent"`, `"timeout"`, `"no_room"`,
            `"unavailable"`, `"copy_failed"` and the store's own reasons. Prompts whose first block is known to be
            missing in the store count as `"absent"`, see `ExternalStore.lacks`.
        written_blocks: blocks that the store accepted or already had.
        written_bytes: their bytes.
        unwritten_blocks: blocks that were not written: because the manager reused them first, a copy failed, or the
            store failed or refused them, for instance beyond a quota. A block that is offered again can count again.
        write_pauses: how often the average write took a second. From then on one write at a time is in flight, until
            the average is half a second, and further blocks wait; those evicted meanwhile are not written.
        load_seconds: how long prefetches took.
        forgets: calls of `PrefixStore.forget` that the store confirmed.
    """

    prefetches: int = 0
    hit_blocks: int = 0
    hit_bytes: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    written_blocks: int = 0
    written_bytes: int = 0
    unwritten_blocks: int = 0
    write_pauses: int = 0
    load_seconds: Histogram = field(default_factory=Histogram)
    forgets: int = 0
