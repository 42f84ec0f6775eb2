"""For engines that keep their own block tables: the blocks of one tier, given out and taken back by reference.

`BlockObserver` is for engines that keep their own allocator too: it plans moves, and knows where each block went.
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
