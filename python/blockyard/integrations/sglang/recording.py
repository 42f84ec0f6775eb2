"""Records to a trace what SGLang looks up in its storage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from threading import Lock
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

from blockyard.traces.recorder import TraceRecorder, record_from_environment

__all__ = ["QueryRecorder", "record_queries"]


class QueryRecorder:
    """Records each lookup as a request whose prompt is the pages before the lookup and those that it asks for.

    Args:
        recorder: its blocks are pages.
    """

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder
        self._lock = Lock()
        self._numbers = count()
        self._last: list[str] = []

    def add(self, keys: Sequence[str], extra_info: Any) -> None:
        """Record a lookup, once if SGLang repeats it."""
        prompt = [*(getattr(extra_info, "prefix_keys", None) or ()), *keys]
        with self._lock:
            is_repeated, self._last = prompt == self._last, prompt
            number = next(self._numbers)
        if prompt and not is_repeated:
            self._recorder.add(number, prompt, len(prompt) * self._recorder.block_size)
            self._recorder.finish(number, 1)

    def close(self) -> None:
        """Write what is left."""
        self._recorder.close()


def record_queries(config: HiCacheStorageConfig, page_size: int) -> QueryRecorder | None:
    """Record if `BLOCKYARD_RECORD` is set, on the first of the ranks, which all look up the same pages."""
    if config.tp_rank or config.pp_rank or config.attn_cp_rank or config.dcp_rank:
        return None
    recorder = record_from_environment(page_size)
    return None if recorder is None else QueryRecorder(recorder)
