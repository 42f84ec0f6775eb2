"""Records SGLang's storage lookups to a trace."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from threading import Lock
from typing import Any, Final

from blockyard.traces.recorder import TraceRecorder, record_from_environment

__all__ = ["QueryRecorder", "record_queries"]

_MAX_REQUESTS: Final = 1 << 14
_MAX_PAGES: Final = 1 << 18
"""Pages whose previous page is remembered, about 250 bytes each."""


class QueryRecorder:
    """Records each lookup as a request. Its prompt consists of the pages before the lookup and those looked up.

    Args:
        recorder: a recorder whose blocks are pages.
    """

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder
        self._lock = Lock()
        self._numbers = count()
        self._last: list[str] = []
        self._requests: dict[str, None] = {}
        self._previous: dict[str, str] = {}

    def add(self, keys: Sequence[str], extra_info: Any) -> None:
        """Record a lookup of HiCache, once if SGLang repeats it."""
        prompt = [*(getattr(extra_info, "prefix_keys", None) or ()), *keys]
        with self._lock:
            is_repeated, self._last = prompt == self._last, prompt
        if prompt and not is_repeated:
            self._record(prompt, 0)

    def add_request(self, request_id: str, keys: Sequence[str]) -> None:
        """Record the first lookup of a request, with the pages that came before these in earlier lookups.

        SGLang never looks up the page of a prompt's last token.
        """
        with self._lock:
            if not keys or request_id in self._requests:
                return
            self._requests[request_id] = None
            prompt = [*self._pages_before(keys[0]), *keys]
            self._previous.update(zip(keys[1:], keys, strict=False))
            _drop_oldest(self._requests, _MAX_REQUESTS)
            _drop_oldest(self._previous, _MAX_PAGES)
        self._record(prompt, 1)

    def close(self) -> None:
        """Write the remaining requests."""
        self._recorder.close()

    def _pages_before(self, key: str) -> list[str]:
        found = {key: None}
        while (previous := self._previous.get(key)) is not None and previous not in found:
            key = previous
            found[key] = None
        return list(found)[:0:-1]

    def _record(self, prompt: list[str], more_tokens: int) -> None:
        number = next(self._numbers)
        self._recorder.add(number, prompt, len(prompt) * self._recorder.block_size + more_tokens)
        self._recorder.finish(number, 1)


def _drop_oldest(entries: dict[str, Any], max_entries: int) -> None:
    while len(entries) > max_entries:
        del entries[next(iter(entries))]


def record_queries(ranks: Sequence[int], page_size: int) -> QueryRecorder | None:
    """Return a recorder if `BLOCKYARD_RECORD` is set and this is the first rank; all ranks look up the same pages.

    Args:
        ranks: this process's rank in each dimension of parallelism.
        page_size: tokens of a page.
    """
    recorder = None if any(ranks) else record_from_environment(page_size)
    return None if recorder is None else QueryRecorder(recorder)
