"""Allocators for engines that keep their own block tables: reference-counted blocks of one tier.

`BlockObserver` is for engines that also keep their own allocator: it plans moves, and tracks where each block went.
"""

from blockyard._core import (
    BlockAllocator,
    BlockObserver,
    MovePlan,
    NaiveAllocator,
    PrefixCachingAllocator,
    chain_keys,
)

__all__ = [
    "BlockAllocator",
    "BlockObserver",
    "MovePlan",
    "NaiveAllocator",
    "PrefixCachingAllocator",
    "chain_keys",
]
