"""A drop-in block manager for engines shaped like vLLM V0 (0.7.3), over the Rust pools.

An engine imports `AllocStatus` and `BlockSpaceManager` from here instead of from its `core.interfaces`. Nothing is
imported from the engine; its sequences are used as they are.
"""

from blockyard._core import V0BlockTable as BlockTable
from blockyard._core import V0CpuGpuBlockAllocator as CpuGpuBlockAllocator
from blockyard._core import V0NaiveBlock as NaiveBlock
from blockyard._core import V0NaiveBlockAllocator as NaiveBlockAllocator
from blockyard._core import V0NullBlock as NullBlock
from blockyard._core import V0PrefixCachingBlock as PrefixCachingBlock
from blockyard._core import V0PrefixCachingBlockAllocator as PrefixCachingBlockAllocator
from blockyard.integrations.vllm_v0.interfaces import (
    AllocStatus,
    Block,
    BlockAllocator,
    Device,
    DeviceAwareBlockAllocator,
)
from blockyard.integrations.vllm_v0.manager import (
    BlockSpaceManager,
    ComputedBlocksTracker,
    LastAccessBlocksTracker,
    SelfAttnBlockSpaceManager,
)
from blockyard.integrations.vllm_v0.worker import CacheSwapper

__all__ = [
    "AllocStatus",
    "Block",
    "BlockAllocator",
    "BlockSpaceManager",
    "BlockTable",
    "CacheSwapper",
    "ComputedBlocksTracker",
    "CpuGpuBlockAllocator",
    "Device",
    "DeviceAwareBlockAllocator",
    "LastAccessBlocksTracker",
    "NaiveBlock",
    "NaiveBlockAllocator",
    "NullBlock",
    "PrefixCachingBlock",
    "PrefixCachingBlockAllocator",
    "SelfAttnBlockSpaceManager",
]
