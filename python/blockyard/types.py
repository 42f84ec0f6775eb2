"""Results of managers and stores, the facets of a `BlockManager`, and `Histogram`."""

from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import (
    Defrag,
    Fit,
    FreeBlocks,
    HashedPrompt,
    Pins,
    Pool,
    Prefix,
    PrefixHit,
    Sequence,
    StoreJobs,
)

__all__ = [
    "Defrag",
    "DefragReport",
    "Fit",
    "Fragmentation",
    "FreeBlocks",
    "HashedPrompt",
    "Histogram",
    "ManagerStats",
    "Pins",
    "Pool",
    "Prefix",
    "PrefixHit",
    "Residency",
    "ResizeProgress",
    "Sequence",
    "SlabContents",
    "StoreJobs",
    "StoreStats",
]

_SECONDS: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


_DAMAGE: Final = (
    *("magic", "version", "header_checksum", "namespace", "key", "slot", "generation", "length"),
    *("payload_checksum", "truncated"),
)
"""Reasons of misses that say that the stored block is damaged."""


@dataclass(frozen=True)
class ManagerStats:
    """Counters since the manager was created, and the current state of each tier.

    Transfers count when they are decided. Fields by tier are dicts from the tier's name.

    Attributes:
        sequences: number of open sequences.
        steps: number of decisions taken.
        open_tickets: tickets neither completed nor failed, oldest first.
        prompts: number of prompts admitted with token ids. Like hits and misses, it leaves out preempted prompts that
            are admitted again.
        hit_blocks: number of full blocks of those prompts that were cached.
        missed_blocks: number of full blocks of those prompts that were not cached.
        hit_tokens: number of prompt tokens that needed no compute.
        missed_tokens: number of prompt tokens to compute.
        merged_blocks: number of blocks that were computed twice and merged.
        loaded_blocks: number of those hit blocks that only the host had.
        copied_blocks: number of blocks copied on write.
        swapped_out_blocks: for host and external tier, number of blocks swapped out to it.
        swapped_in_blocks: for host and external tier, number of blocks swapped in from it.
        moved_blocks: number of finished defragmentation moves.
        cancelled_moves: number of moves cancelled because the block was written, freed or leased in the meantime.
        failed_moves: number of moves whose bytes did not land.
        num_blocks: for each tier, its current number of blocks.
        used_blocks: for each tier, number of blocks that are referenced or leased.
        peak_blocks: for each tier, the highest number of used blocks so far.
        leased_blocks: for each tier, number of blocks leased by transfers.
        cached_blocks: for each tier, number of blocks that can be found by key.
        evicted_blocks: for each tier, number of cached blocks evicted.
        pinned_blocks: for each tier, number of pinned blocks.
        num_bytes: for each tier, its bytes, without null blocks; 0 if blocks have no bytes of their own.
        class_bytes: for each tier, bytes of the blocks of each page class, with their padding; over an arena, those of
            the extents that the class has now. 0 if blocks have no bytes of their own, as the next two.
        used_bytes: for each tier, bytes of each class's blocks that are referenced or leased.
        cached_bytes: for each tier, bytes of each class's blocks that can be found.
        uncopied_blocks: number of evicted device blocks that did not go to the host: it had no room for them,
            `host_copies_per_step` was reached, or another page class took their extent. 0 without host copies.
        hinted_turns: for each hint, how often it was given; 0 if the eviction policy takes no hints.
        resumed_turns: for each hint, number of those turns that another turn of the conversation followed.
    """

    sequences: int
    steps: int
    open_tickets: list[int]
    prompts: int
    hit_blocks: int
    missed_blocks: int
    hit_tokens: int
    missed_tokens: int
    merged_blocks: int
    loaded_blocks: int
    copied_blocks: int
    swapped_out_blocks: dict[str, int]
    swapped_in_blocks: dict[str, int]
    moved_blocks: int
    cancelled_moves: int
    failed_moves: int
    num_blocks: dict[str, int]
    used_blocks: dict[str, int]
    peak_blocks: dict[str, int]
    leased_blocks: dict[str, int]
    cached_blocks: dict[str, int]
    evicted_blocks: dict[str, int]
    pinned_blocks: dict[str, int]
    num_bytes: dict[str, int]
    class_bytes: dict[str, list[int]]
    used_bytes: dict[str, list[int]]
    cached_bytes: dict[str, list[int]]
    uncopied_blocks: int
    hinted_turns: dict[str, int]
    resumed_turns: dict[str, int]

    def usage(self, tier: str) -> float:
        """Fraction of a tier in use, 0 to 1: of its bytes if blocks have bytes of their own, else of its blocks."""
        if total := self.num_bytes[tier]:
            return sum(self.used_bytes[tier]) / total
        return _share(self.used_blocks[tier], self.num_blocks[tier])

    @property
    def hit_rate(self) -> float:
        """Fraction of the full blocks looked up that were hits; 0 before the first."""
        return _share(self.hit_blocks, self.hit_blocks + self.missed_blocks)

    def as_dict(self) -> dict[str, int | float]:
        """Return all counters by name, for metrics.

        Returns:
            A dict of numbers. Those of a tier are named `used_blocks_device` and so on, with the number of a page class
            `used_bytes_device_0`; `open_tickets` is their number;
            `device_cache_usage_sys` and so on are the fraction of a tier in use, 0 to 1.
        """
        found: dict[str, int | float] = {}
        for name, value in vars(self).items():
            if isinstance(value, list):
                found[name] = len(value)
            elif not isinstance(value, dict):
                found[name] = value
            elif name in {"class_bytes", "used_bytes", "cached_bytes"}:
                found |= {f"{name}_{tier}_{at}": count for tier, all_ in value.items() for at, count in enumerate(all_)}
            elif name not in {"num_blocks", "num_bytes"}:
                end = "_total" if name.startswith("swapped") else ""
                found |= {f"{name}_{tier}{end}": count for tier, count in value.items()}
        for tier in self.used_blocks:
            found[f"{tier}_cache_usage_sys"] = self.usage(tier)
        return found


@dataclass(frozen=True)
class Residency:
    """How long the sampled blocks of a tier stayed cached. Each field has counts per range and a sum in seconds.

    Attributes:
        bounds: upper bounds of the ranges in seconds; the last range is unbounded.
        lifetime: time from when a block was first cached to its eviction.
        idle_before_evict: time from a block's last use to its eviction.
        reuse_gap: time during which no sequence used a block, until a prompt used it again.
    """

    bounds: list[float]
    lifetime: tuple[list[int], float]
    idle_before_evict: tuple[list[int], float]
    reuse_gap: tuple[list[int], float]


@dataclass(frozen=True)
class Fragmentation:
    """How fragmented the device pool is.

    Attributes:
        max_id: highest block that is not free; None if all are.
        gap: by how many blocks the highest movable block could be lower.
        holes: number of free blocks without cached content.
        tables: number of block tables that are not empty.
        runs: number of runs of adjacent blocks in those tables.
    """

    max_id: int | None
    gap: int
    holes: int
    tables: int
    runs: int


@dataclass(frozen=True)
class DefragReport:
    """The result of one call of `defrag.run`.

    Attributes:
        planned: number of moves planned, also `len(report)`.
        left: number of blocks in the way of the goals that the budget leaves for later.
        stuck: number of blocks in the way of the goals that have nowhere to go.
        held: number of blocks in the way of the goals that transfers or pins hold.
        dropped: number of cached blocks dropped.
    """

    planned: int
    left: int
    stuck: int
    held: int
    dropped: int

    def __len__(self) -> int:
        return self.planned


@dataclass(frozen=True)
class ResizeProgress:
    """The progress of a resize of the device pool.

    Attributes:
        blocks: number of device blocks, of all page classes; over an `Arena` of several classes, number of extents.
        live: number of blocks beyond these that sequences use.
        held: number of blocks beyond these that only transfers or pins hold.
        extent: one past the highest block, or extent, in use, at least `blocks`: memory beyond it can be released. With
            `Arena.split`, the sum over the page classes.
    """

    blocks: int
    live: int
    held: int
    extent: int

    @property
    def done(self) -> bool:
        """Whether no block beyond `blocks` is in use."""
        return self.extent == self.blocks


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """Counters of a store since it was opened.

    Attributes:
        written_blocks: number of blocks written.
        written_bytes: bytes of those blocks, without headers.
        read_blocks: number of blocks read and found intact.
        read_bytes: bytes of those blocks, without headers.
        misses: number of blocks not read or written, by reason.
        errors: number of operations that failed with a system error.
        last_error: message of the last of those errors.
        errors_in_a_row: number of those errors since the last successful operation: 0 means healthy.
        is_down: whether the storage hangs; batches are then refused until it answers a probe. One that refuses
            connections or calls is asked again by each batch: see `errors_in_a_row`.
        pending_bytes: bytes of blocks in flight and of uncollected results.
        cached_blocks: number of keys with a block; on a server or in a bucket, those that this process has stored or
            found, also if others have evicted them since. `blockyard store URL stat` asks the server.
        evicted_blocks: number of keys whose block was evicted; 0 on a server or in a bucket.
    """

    written_blocks: int = 0
    written_bytes: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    errors: int = 0
    last_error: str = ""
    errors_in_a_row: int = 0
    is_down: bool = False
    pending_bytes: int = 0
    cached_blocks: int = 0
    evicted_blocks: int = 0

    @property
    def checksum_failures(self) -> int:
        """Number of reads whose header or payload checksum did not match."""
        return sum(self.misses.get(reason, 0) for reason in ("header_checksum", "payload_checksum"))

    @property
    def damaged_blocks(self) -> int:
        """Number of reads that returned a damaged block, for any reason."""
        return sum(self.misses.get(reason, 0) for reason in _DAMAGE)

    def as_dict(self) -> dict[str, int | str | dict[str, int]]:
        """Return all counters, for JSON."""
        more = {"checksum_failures": self.checksum_failures, "damaged_blocks": self.damaged_blocks}
        return vars(self) | {"misses": dict(self.misses)} | more


@dataclass(frozen=True)
class SlabContents:
    """The contents of a slab's slots, for `blockyard store`.

    Attributes:
        path: the slab's file.
        num_slots: number of slots in the slab.
        bytes_per_block: bytes of a block in one slot.
        empty: number of slots without a block.
        forgotten: number of blocks forgotten by `forget`.
        replaced: number of blocks replaced by a newer write of their key.
        slots: slots whose block a store can find, int64 `[n]`, ascending.
        generations: when each was written, or the store that wrote it opened, in nanoseconds since 1970, uint64 `[n]`.
        namespaces: namespace of each, uint8 `[n, 32]`.
        tenants: tenant of each, uint8 `[n, 32]`; zeros for none.
        damaged: each damaged slot with its generation, 0 if unknown, and the reason that a read would report.
    """

    path: Path
    num_slots: int
    bytes_per_block: int
    empty: int
    forgotten: int
    replaced: int
    slots: NDArray[np.int64]
    generations: NDArray[np.uint64]
    namespaces: NDArray[np.uint8]
    tenants: NDArray[np.uint8]
    damaged: list[tuple[int, int, str]]


@dataclass
class Histogram:
    """A histogram of durations, in seconds.

    Attributes:
        bounds: upper bounds of the buckets; one more bucket has no bound.
        counts: number of durations in each bucket.
        sum: sum of all durations.
    """

    bounds: ClassVar[tuple[float, ...]] = _SECONDS
    counts: list[int] = field(default_factory=lambda: [0] * (len(_SECONDS) + 1))
    sum: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count a duration. Must be called by one thread only."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
