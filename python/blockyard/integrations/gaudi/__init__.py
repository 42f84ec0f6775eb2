"""Defragmentation beside vllm-gaudi's allocator, or any other that is not Blockyard's; `docs/gaudi.md` shows how.

`OnlineDefragmenter` and `CacheSwapUtils` have the names of vllm-gaudi's classes and need no Gaudi.
"""

from blockyard.integrations.gaudi.defragmenter import DefragStats, OnlineDefragmenter
from blockyard.integrations.gaudi.mover import BlockMover
from blockyard.integrations.gaudi.swap import CacheSwapUtils

__all__ = ["BlockMover", "CacheSwapUtils", "DefragStats", "OnlineDefragmenter"]
