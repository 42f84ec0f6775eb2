"""Blockyard's eviction policies in vLLM's own CPU offloading manager."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from blockyard.errors import InvalidArgumentError
from blockyard.offload import OffloadManager

__all__ = ["AdaptivePolicy", "LRUPolicy", "S3FIFOPolicy"]


class _Policy(CachePolicy):
    """Keeps the chunks of vLLM's manager, and says which of them go first.

    vLLM hands out the chunks; `OffloadManager` has one of its own for each, and with it the order of eviction.

    Args:
        cache_capacity: most chunks at a time.
    """

    eviction: ClassVar[str]

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._pinned: set[OffloadKey] = set()
        self._fresh()

    def _fresh(self) -> None:
        self._order = OffloadManager(self.cache_capacity, eviction=self.eviction)
        self._chunks.clear()
        self._pinned.clear()

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Return the chunk of a key, or None."""
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        """Add a chunk.

        Raises:
            InvalidArgumentError: the key has one, or there are `cache_capacity` chunks; nothing is changed.
        """
        if key in self._chunks or len(self._chunks) >= self.cache_capacity:
            known = "has a chunk already" if key in self._chunks else f"would be more than {self.cache_capacity} chunks"
            raise InvalidArgumentError(f"key is {key!r}, which {known}")
        self._order.prepare_store([key])
        self._chunks[key] = chunk
        if chunk.ref_cnt >= 0:
            self.mark_evictable(key)
        if chunk.ref_cnt > 0:
            self.mark_non_evictable(key)

    def remove(self, key: OffloadKey) -> None:
        """Drop a chunk; raises KeyError if the key has none."""
        del self._chunks[key]
        self._order.forget([key])
        self._order.complete_store([key], success=False)
        if key in self._pinned:
            self._pinned.discard(key)
            self._order.complete_load([key])

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Count keys as just used, the first as the last to be evicted."""
        self._order.touch([*keys])

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Drop and return `n` chunks that nothing reads; None, and nothing is changed, if there are not so many."""
        if n <= 0:
            return []
        evicted = self._order.evict(n, list(protected & self._chunks.keys()))
        if evicted is None:
            return None
        return [(key, self._chunks.pop(key)) for key in evicted]

    def mark_evictable(self, key: OffloadKey) -> None:
        """Let a chunk be evicted: its store, or its last load, has ended."""
        if key in self._pinned:
            self._pinned.discard(key)
            self._order.complete_load([key])
        elif key in self._chunks:
            self._order.complete_store([key])
        else:
            raise InvalidArgumentError(f"key is {key!r}, which has no chunk")

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """Keep a chunk from being evicted: its first load begins."""
        self._order.prepare_load([key])
        self._pinned.add(key)

    def clear(self) -> None:
        """Drop all chunks."""
        self._fresh()


class LRUPolicy(_Policy):
    """The least recently used chunk goes first."""

    eviction = "lru"


class S3FIFOPolicy(_Policy):
    """S3-FIFO: chunks that were used once go before those that were used again."""

    eviction = "s3fifo"


class AdaptivePolicy(_Policy):
    """Learns which of recency and frequency serves better, see `blockyard.PrefixCaching`."""

    eviction = "adaptive"
