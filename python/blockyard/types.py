"""Return types of `BlockManager` and its facets, for annotations, and `Histogram`."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import ClassVar, Final

from blockyard._core import (
    Defrag,
    DefragReport,
    Fit,
    Fragmentation,
    FreeBlocks,
    HashedPrompt,
    ManagerStats,
    Pins,
    Pool,
    Prefix,
    PrefixHit,
    Residency,
    ResizeProgress,
    Sequence,
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
]

_SECONDS: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


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
