"""Blockyard's eviction policies in vLLM's own CPU offloading manager."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

from blockyard.errors import InvalidArgumentError
from blockyard.offload import OffloadManager
from blockyard.workers.interrupts import keep

__all__ = ["AdaptivePolicy", "LRUPolicy"]


class _Policy(CachePolicy):
    """Holds the chunks of vLLM's manager, and decides which are evicted first.

    vLLM allocates the chunks; `OffloadManager` has a counterpart of each, which carries the eviction order.

    Args:
        cache_capacity: maximum number of chunks.
    """

    eviction: ClassVar[str]

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        # What a call pins or releases, and whether it did: after an exception the next call records it.
        self._key: OffloadKey | None = None
        self._held: list[object] = []
        self._ended: list[object] = []
        self._chunks: dict[OffloadKey, ChunkStatus]
        self._pinned: set[OffloadKey]
        self.clear()

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Return the chunk of a key, or None."""
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        """Add a chunk.

        Raises:
            InvalidArgumentError: the key already has a chunk, or the cache is full; nothing is changed.
        """
        if key in self._chunks or len(self._chunks) >= self.cache_capacity:
            known = "has a chunk already" if key in self._chunks else f"would exceed {self.cache_capacity} chunks"
            raise InvalidArgumentError(f"key is {key!r}, which {known}")
        try:
            self._order.prepare_store([key])
            self._chunks[key] = chunk
            if chunk.ref_cnt >= 0:
                self.mark_evictable(key)
            if chunk.ref_cnt > 0:
                self.mark_non_evictable(key)
        except BaseException:
            self._drop(key)
            raise

    def remove(self, key: OffloadKey) -> None:
        """Drop a chunk; raises KeyError if the key has none."""
        if key not in self._chunks:
            raise KeyError(key)
        self._drop(key)

    def _drop(self, key: OffloadKey) -> None:
        self._settle()
        self._order.forget([key])
        self._order.complete_store([key], success=False)
        if key in self._pinned:
            self._let_go(key)
        self._chunks.pop(key, None)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Mark keys as just used; the first key is evicted last."""
        self._order.touch([*keys])

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Let a request's chunks age as one chain, first to last; what it only inserted does not count as used."""
        self._order.touch(order_request_keys(key_groups, req_context), insertion_only_keys)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Drop and return `n` chunks that nothing reads; None, changing nothing, if there are fewer."""
        if n <= 0:
            return []
        evicted: list[list[bytes] | None] = []
        found: list[tuple[OffloadKey, ChunkStatus]] = []
        try:
            keys = keep(evicted, self._order.evict, n, list(protected & self._chunks.keys()))
            if keys is None:
                return None
            found = [(key, self._chunks[key]) for key in keys]
            for key in keys:
                del self._chunks[key]
            return found
        except BaseException:
            self._chunks.update(found)
            for keys in evicted:
                self._order.prepare_store(keys or [])
                self._order.complete_store(keys or [])
            raise

    def mark_evictable(self, key: OffloadKey) -> None:
        """Make a chunk evictable: its store or last load has ended."""
        self._settle()
        if key in self._pinned:
            self._let_go(key)
        elif key in self._chunks:
            self._order.complete_store([key])
        else:
            raise InvalidArgumentError(f"key is {key!r}, which has no chunk")

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """Protect a chunk from eviction: its first load begins."""
        self._settle()
        if key not in self._pinned:  # already pinned, if an interrupted call is repeated
            self._key = key
            keep(self._held, self._order.prepare_load, [key])
            self._settle()

    def clear(self) -> None:
        """Drop all chunks."""
        self._held, self._ended = [], []
        order = OffloadManager(self.cache_capacity, eviction=self.eviction)
        self._order, self._chunks, self._pinned = order, {}, set()

    def _let_go(self, key: OffloadKey) -> None:
        self._key = key
        keep(self._ended, self._order.complete_load, [key])
        self._settle()

    def _settle(self) -> None:
        """Record what the last call pinned or released."""
        if self._key is not None and self._held:
            self._pinned.add(self._key)
            del self._held[:]
        if self._key is not None and self._ended:
            self._pinned.discard(self._key)
            del self._ended[:]


class LRUPolicy(_Policy):
    """Evicts the least recently used chunk first."""

    eviction = "lru"


class AdaptivePolicy(_Policy):
    """Learns whether recency or frequency works better, see `blockyard.PrefixCaching`."""

    eviction = "adaptive"
