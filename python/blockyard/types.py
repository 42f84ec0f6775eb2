"""Return types of `BlockManager` and its facets, for annotations."""

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
    "ManagerStats",
    "Pins",
    "Pool",
    "Prefix",
    "PrefixHit",
    "ResizeProgress",
    "Sequence",
]
