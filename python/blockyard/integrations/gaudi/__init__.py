"""Defragmentation for vllm-gaudi's allocator, or any other foreign allocator; see `docs/engines/gaudi.md`.

`OnlineDefragmenter` and `CacheSwapUtils` are named after vllm-gaudi's classes, and do not require a Gaudi.
"""

from blockyard.workers.extras import missing

try:
    from blockyard.integrations.gaudi.defragmenter import DefragStats, OnlineDefragmenter
    from blockyard.integrations.gaudi.mover import BlockMover
    from blockyard.integrations.gaudi.swap import CacheSwapUtils
except ModuleNotFoundError as error:
    raise missing("blockyard.integrations.gaudi", error) from None

__all__ = ["BlockMover", "CacheSwapUtils", "DefragStats", "OnlineDefragmenter"]
