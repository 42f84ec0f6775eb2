"""A drop-in block manager for engines shaped like vLLM V0 (0.7.3), over the Rust pools.

An engine imports `AllocStatus` and `BlockSpaceManager` from here instead of from its `core.interfaces`. Nothing is
imported from the engine; its sequences are used as they are.
"""

from blockyard.integrations.vllm_v0.block import NaiveBlock, NullBlock, PrefixCachingBlock
from blockyard.integrations.vllm_v0.device import CpuGpuBlockAllocator
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
from blockyard.integrations.vllm_v0.pool import NaiveBlockAllocator, PrefixCachingBlockAllocator
from blockyard.integrations.vllm_v0.table import BlockTable
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
