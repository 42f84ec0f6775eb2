"""Drop-in for the block manager of engines that have the shape of vLLM V0 (0.7.3), over the Rust pools.

An engine takes `AllocStatus` and `BlockSpaceManager` from here instead of from its `core.interfaces`; nothing of the
engine is imported, its sequences are taken as they are.
"""

from blockyard.integrations.vllm_v0.blocks import (
    NaiveBlock,
    NaiveBlockAllocator,
    PrefixCachingBlock,
    PrefixCachingBlockAllocator,
)
from blockyard.integrations.vllm_v0.interfaces import (
    AllocStatus,
    Block,
    BlockAllocator,
    BlockSpaceManager,
    Device,
    DeviceAwareBlockAllocator,
)
from blockyard.integrations.vllm_v0.manager import (
    ComputedBlocksTracker,
    LastAccessBlocksTracker,
    SelfAttnBlockSpaceManager,
)
from blockyard.integrations.vllm_v0.table import BlockTable, CpuGpuBlockAllocator, NullBlock

__all__ = [
    "AllocStatus",
    "Block",
    "BlockAllocator",
    "BlockSpaceManager",
    "BlockTable",
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
