"""Blockyard keeps the books of a paged KV cache and moves its blocks.

    ids -> pool -> table -> manager -> decision | plan -> transfer | tiers -> offload -> integrations -> cli
    ^------------------ Rust ------------------^ ^------------------------ Python ------------------------^

Importing it loads neither torch nor CUDA.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from blockyard._core import (
    AllocStatus,
    BlockManager,
    BlockObserver,
    CacheGroup,
    DefragReport,
    EventBatch,
    Expired,
    Fragmentation,
    ManagerStats,
    MovePlan,
    NaiveAllocator,
    Pairs,
    PrefixCachingAllocator,
    PrefixStats,
    ResizeProgress,
    StepDecision,
    __version__,
    chain_keys,
    export_keys,
)
from blockyard.errors import (
    BlockyardError,
    CaptureError,
    ForkedError,
    InvalidArgumentError,
    InvariantError,
    LayoutError,
    MappingError,
    OpLibraryError,
    OutOfBlocksError,
    OutOfMemoryError,
    PageLockError,
    SequenceStateError,
    SnapshotError,
    StoreError,
    StoreFullError,
    StoreURLError,
    TraceError,
    TransferCancelledError,
    TransferQueueFullError,
    UnknownSequenceError,
    UnknownTicketError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from blockyard.defrag import OnlineDefragmenter

__all__ = [
    "AllocStatus",
    "BlockManager",
    "BlockObserver",
    "BlockyardError",
    "CacheGroup",
    "CaptureError",
    "DefragReport",
    "EventBatch",
    "Expired",
    "ForkedError",
    "Fragmentation",
    "InvalidArgumentError",
    "InvariantError",
    "LayoutError",
    "ManagerStats",
    "MappingError",
    "MovePlan",
    "NaiveAllocator",
    "OnlineDefragmenter",
    "OpLibraryError",
    "OutOfBlocksError",
    "OutOfMemoryError",
    "PageLockError",
    "Pairs",
    "PrefixCachingAllocator",
    "PrefixStats",
    "ResizeProgress",
    "SequenceStateError",
    "SnapshotError",
    "StepDecision",
    "StoreError",
    "StoreFullError",
    "StoreURLError",
    "TraceError",
    "TransferCancelledError",
    "TransferQueueFullError",
    "UnknownSequenceError",
    "UnknownTicketError",
    "UnsupportedModelError",
    "__version__",
    "chain_keys",
    "export_keys",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # It stands above modules that import this one.
        if name == "OnlineDefragmenter":
            return import_module("blockyard.defrag").OnlineDefragmenter
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
