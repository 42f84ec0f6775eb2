"""Blockyard keeps the books of a paged KV cache and moves its blocks.

    ids -> pool -> table -> manager -> decision | plan -> transfer | tiers -> offload -> integrations -> cli
    ^------------------ Rust ------------------^ ^------------------------ Python ------------------------^

Importing it loads neither torch nor CUDA.
"""

from blockyard._core import (
    AllocStatus,
    BlockManager,
    CacheGroup,
    DecodeBatch,
    EventBatch,
    Expired,
    ManagerStats,
    NaiveAllocator,
    Pairs,
    PrefixCachingAllocator,
    PrefixStats,
    StepDecision,
    __version__,
    chain_keys,
    export_keys,
    merge_runs,
)
from blockyard.errors import (
    BlockyardError,
    InvalidArgumentError,
    InvariantError,
    LayoutError,
    MappingError,
    OpLibraryError,
    OutOfBlocksError,
    SequenceStateError,
    SnapshotError,
    TierError,
    TierFullError,
    TierURLError,
    TraceError,
    UnknownSequenceError,
    UnknownTicketError,
    UnsupportedModelError,
)

__all__ = [
    "AllocStatus",
    "BlockManager",
    "BlockyardError",
    "CacheGroup",
    "DecodeBatch",
    "EventBatch",
    "Expired",
    "InvalidArgumentError",
    "InvariantError",
    "LayoutError",
    "ManagerStats",
    "MappingError",
    "NaiveAllocator",
    "OpLibraryError",
    "OutOfBlocksError",
    "Pairs",
    "PrefixCachingAllocator",
    "PrefixStats",
    "SequenceStateError",
    "SnapshotError",
    "StepDecision",
    "TierError",
    "TierFullError",
    "TierURLError",
    "TraceError",
    "UnknownSequenceError",
    "UnknownTicketError",
    "UnsupportedModelError",
    "__version__",
    "chain_keys",
    "export_keys",
    "merge_runs",
]
