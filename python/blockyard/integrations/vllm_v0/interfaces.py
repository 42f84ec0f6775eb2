"""The interfaces of vLLM's V0 block manager (0.7.3), and what it takes of the engine's sequences."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from blockyard import _core
from blockyard.errors import OutOfBlocksError


class Device(enum.Enum):
    """Where blocks are; an engine's own enum of these names will do as well, which V0's without `EXTERNAL` is."""

    GPU = enum.auto()
    CPU = enum.auto()
    EXTERNAL = enum.auto()


class AllocStatus(enum.Enum):
    """Whether a sequence group fits: now, once others have left, or not even into an empty device."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class Sequence(Protocol):
    """What is used of a V0 sequence; also `extra_hash()` and `is_prefill()`, which some versions lack."""

    seq_id: int
    status: Any
    data: Any

    def get_token_ids(self) -> list[int]: ...


class SequenceGroup(Protocol):
    """What is used of a V0 sequence group."""

    request_id: str

    def get_seqs(self) -> Any: ...
    def is_encoder_decoder(self) -> bool: ...
    def get_encoder_seq(self) -> Sequence | None: ...


def _declare(*args: Any, **kwargs: Any) -> Any:
    """Stand for a method that the implementation brings; its signature is V0's and shown there."""


abstract: Callable[..., Any] = abstractmethod(_declare)


class Block(ABC):
    """One block of one sequence; several may name one physical block."""

    append_token_ids: Callable[..., None] = abstract
    block_id: Any  # int, or None once freed
    computed: Any
    content_hash: Any  # int, or None while not full
    extra_hash: int | None
    is_full: Any
    last_accessed: Any
    num_empty_slots: Any
    num_tokens_total: Any
    prev_block: Block | None
    token_ids: list[int]


class NoFreeBlocksError(OutOfBlocksError, ValueError):
    """Fewer blocks are free than the call needs; nothing was changed."""


class BlockAllocator(ABC):
    """Blocks of one device."""

    NoFreeBlocksError = NoFreeBlocksError
    allocate_mutable_block = allocate_immutable_block = allocate_immutable_blocks = abstract
    free = fork = swap_out = swap_in = clear_copy_on_writes = abstract
    get_num_total_blocks = get_num_free_blocks = get_num_full_blocks_touched = get_physical_block_id = abstract
    mark_blocks_as_accessed = mark_blocks_as_computed = get_common_computed_block_ids = abstract
    cow_block_if_not_appendable = promote_to_immutable_block = abstract
    get_prefix_cache_hit_rate = reset_prefix_cache = find_cached_blocks_prefix = abstract
    all_block_ids: Any = property(abstract)


class DeviceAwareBlockAllocator(ABC):
    """Blocks of several devices."""

    allocate_mutable_block = allocate_immutable_block = allocate_immutable_blocks = abstract
    free = fork = swap = clear_copy_on_writes = allocate_or_get_null_block = abstract
    get_num_total_blocks = get_num_free_blocks = get_num_full_blocks_touched = get_physical_block_id = abstract
    mark_blocks_as_accessed = mark_blocks_as_computed = get_common_computed_block_ids = abstract
    get_prefix_cache_hit_rate = reset_prefix_cache = find_cached_blocks_prefix = abstract
    all_block_ids: Any = property(abstract)


for _kind in (_core.V0NaiveBlock, _core.V0NullBlock):
    Block.register(_kind)
BlockAllocator.register(_core.V0PoolAllocator)
DeviceAwareBlockAllocator.register(_core.V0CpuGpuBlockAllocator)
