"""Blockyard's allocator for transformers' own continuous batching, for models with only full attention.

transformers has a table of allocators by attention type and a class of block pools; this module replaces them while
`blockyard_allocator` is open. The gain: 256-bit keys instead of 64-bit ones, and eviction of cached blocks one at a
time, oldest first, where transformers drops all of them once memory is short.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from blockyard.allocators import PrefixCachingAllocator, chain_keys
from blockyard.errors import UnsupportedModelError
from blockyard.integrations.compat import require_fit, warn_version

SUPPORTED = "5.24"
_WHICH = f"transformers {transformers.__version__} (Blockyard supports {SUPPORTED})"

try:
    from transformers.generation.continuous_batching import cache as _cache
    from transformers.generation.continuous_batching.cache_allocators import CachePool, FullAttentionCacheAllocator
    from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger
except ImportError as error:
    raise ImportError(f"{_WHICH} has another continuous batching: {error}") from error

__all__ = ["blockyard_allocator"]


class _SectorPool(CachePool):
    """All sectors as blocks of the single allocator; cached blocks count as free."""

    def __init__(self, num_sectors: int, num_allocators: int, num_reserved_sectors: int = 2) -> None:
        if num_allocators != 1:
            raise UnsupportedModelError(
                f"the model has {num_allocators} types of attention, blockyard_allocator supports only full attention"
            )
        self._blocks: PrefixCachingAllocator | None = None
        super().__init__(num_sectors, num_allocators, num_reserved_sectors)

    @property
    def blocks(self) -> PrefixCachingAllocator:
        assert self._blocks is not None  # noqa: S101 (transformers sets the size before it asks for blocks)
        return self._blocks

    def reset(self) -> None:
        self.free_sectors: list[int] = []
        if self._blocks is not None:
            self._blocks.reset()

    def set_blocks_per_sector(self, index: int, blocks_per_sector: int) -> None:
        self.blocks_per_sector[index] = blocks_per_sector
        self.offset = self.num_reserved_sectors * blocks_per_sector
        self._blocks = PrefixCachingAllocator(self.num_sectors * blocks_per_sector)

    def try_to_free_sectors(self) -> None:
        """Do nothing: the allocator owns all sectors."""

    def free_blocks(self, index: int, block_ids: list[int]) -> None:
        self.blocks.free([block - self.offset for block in block_ids])

    def get_free_blocks(self, index: int, num_blocks: int) -> list[int]:
        return [int(block) + self.offset for block in self.blocks.allocate(num_blocks)]

    def count_free_blocks(self, index: int) -> int:
        return self.blocks.num_free


class _Ledger(BlockLedger):
    """References to blocks of the pool; the allocator keeps their keys."""

    def __init__(self, pool: _SectorPool) -> None:
        super().__init__()
        self._pool = pool

    def acquire(self, block_id: int) -> None:
        self._pool.blocks.share([block_id - self._pool.offset])

    def release(self, block_id: int, no_cache: bool = False) -> bool:
        """Drop a reference. The pool frees the block itself, so transformers has nothing to free."""
        self._pool.free_blocks(0, [block_id])
        return False

    def evict_cached_blocks(self) -> list[int]:
        """Evict none: cached blocks count as free, and are evicted one by one when needed."""
        return []

    def reset(self) -> None:
        self._pool.blocks.reset()


class _Allocator(FullAttentionCacheAllocator):
    """transformers' allocator of full attention, over the pool above."""

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: Any
    ) -> None:
        super().register_cache_tensor(bytes_per_sector, non_trash_bytes, cache_tensor, pool)
        self.ledger = _Ledger(pool)
        self._ours: _SectorPool = pool
        self._keys: dict[str, list[bytes]] = {}
        self._matched: list[bytes] = []

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        self._keys.pop(request_id, None)
        super().free_blocks(request_id, no_cache)

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        num_shared = self.count_shareable_blocks(source_request_id, past_length)
        self._keys[dest_request_id] = self._keys.get(source_request_id, [])[:num_shared]
        pairs: tuple[list[int], list[int]] = super().fork_blocks(source_request_id, dest_request_id, past_length)
        return pairs

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        # At least one token must be computed, for its logits.
        self._matched = chain_keys(prompt_ids[:-1], block_size=self.tokens_per_page)
        return [int(block) + self._ours.offset for block in self._ours.blocks.find(self._matched)]

    def acquire_prefix_blocks(self, request_id: str, prefix_len: int, block_ids: list[int]) -> None:
        keys = self._matched[: prefix_len // self.tokens_per_page]
        blocks, _ = self._ours.blocks.allocate_keyed(keys, range(1, len(keys) + 1))
        self.block_table[request_id] = [int(block) + self._ours.offset for block in blocks]
        self._keys[request_id] = keys

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """Publish the blocks that the last forward pass completed; duplicates are merged."""
        table, keys = self.block_table[request_id], self._keys.setdefault(request_id, [])
        first, size = len(keys), self.tokens_per_page
        last = min(first + new_new_blocks, len(table), len(token_ids) // size)
        tokens = token_ids[first * size : last * size]
        keys += chain_keys(tokens, block_size=size, parent=keys[-1] if keys else None)
        for index in range(first, last):
            block = self._ours.blocks.publish(table[index] - self._ours.offset, keys[index], index + 1)
            table[index] = block + self._ours.offset
        self._ours.blocks.mark_computed([block - self._ours.offset for block in table[first:last]])


require_fit(_Allocator, FullAttentionCacheAllocator, _WHICH)
require_fit(_SectorPool, CachePool, _WHICH)
require_fit(_Ledger, BlockLedger, _WHICH)


@contextmanager
def blockyard_allocator() -> Iterator[None]:
    """Make caches created by transformers' continuous batching inside this context use Blockyard's allocator.

    Prefix sharing, forking, sampling, offloading and CUDA graphs work as before. A cache keeps its allocator after the
    context ends.

    Raises:
        ImportError: transformers has no such hooks; Blockyard was tested with 5.24.
        UnsupportedModelError: from the cache, if the model has other attention than full attention.

    Example:
        >>> from blockyard.integrations.transformers.continuous import blockyard_allocator
        >>> with blockyard_allocator():
        ...     pass  # outputs = model.generate_batch(prompts, generation_config=config)
    """
    kind = FullAttentionCacheAllocator.layer_type
    names = vars(_cache)
    table: dict[str, Any] = names.get("ATTN_TYPE_TO_ALLOCATOR", {})
    if table.get(kind) is not FullAttentionCacheAllocator or names.get("CachePool") is not CachePool:
        raise ImportError(f"{_WHICH} has no ATTN_TYPE_TO_ALLOCATOR and CachePool, or another has replaced them")
    warn_version("transformers", transformers.__version__, SUPPORTED)
    table[kind], names["CachePool"] = _Allocator, _SectorPool
    try:
        yield
    finally:
        table[kind], names["CachePool"] = FullAttentionCacheAllocator, CachePool
