"""Defragmentation beside vllm-gaudi's allocator, or any other that is not Blockyard's.

`OnlineDefragmenter` and `CacheSwapUtils` have the names of vllm-gaudi's classes and need no Gaudi.
`docs/engines/gaudi.md` shows how.
"""

from blockyard.workers import missing

try:
    from blockyard.integrations.gaudi.defragmenter import DefragStats, OnlineDefragmenter
    from blockyard.integrations.gaudi.mover import BlockMover
    from blockyard.integrations.gaudi.swap import CacheSwapUtils
except ModuleNotFoundError as error:
    raise missing("blockyard.integrations.gaudi", error) from None

__all__ = ["BlockMover", "CacheSwapUtils", "DefragStats", "OnlineDefragmenter"]
