"""The interfaces of vLLM's V0 block manager (0.7.3), and the parts of the engine's sequences that it uses."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from blockyard.errors import OutOfBlocksError


class Device(enum.Enum):
    """Where blocks are. An engine's own enum with these names works too, such as V0's, which has no `EXTERNAL`."""

    GPU = enum.auto()
    CPU = enum.auto()
    EXTERNAL = enum.auto()


class AllocStatus(enum.Enum):
    """Whether a sequence group fits: now, once others have left, or never, not even on an empty device."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class Sequence(Protocol):
    """The parts of a V0 sequence in use; also `extra_hash()` and `is_prefill()`, which some versions lack."""

    seq_id: int
    status: Any
    data: Any

    def get_token_ids(self) -> list[int]: ...


class SequenceGroup(Protocol):
    """The parts of a V0 sequence group in use."""

    request_id: str

    def get_seqs(self) -> Any: ...
    def is_encoder_decoder(self) -> bool: ...
    def get_encoder_seq(self) -> Sequence | None: ...


def require(holds: object, message: str) -> None:
    """Raise AssertionError, as V0 does; its callers may rely on the exception, even under `python -O`."""
    if not holds:
        raise AssertionError(message)


def _declare(*args: Any, **kwargs: Any) -> Any:
    """A placeholder for a method of the implementation, which has V0's signature."""


abstract: Callable[..., Any] = abstractmethod(_declare)


class Block(ABC):
    """One block of one sequence; several may refer to one physical block."""

    __slots__ = ()

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
