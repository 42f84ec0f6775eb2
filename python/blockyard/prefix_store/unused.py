"""Notices a prefix cache that cannot hit because a call or an option is missing, and logs what it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from blockyard._core import BlockManager, ManagerStats

if TYPE_CHECKING:
    from blockyard.prefix_store.store import PrefixStore

__all__ = ["Unused"]

_MANY: Final = 32
"""Prompts, and steps between two looks at the counters: a caller that does something at all has done it by then."""

_log = logging.getLogger("blockyard.cache")


class Unused:
    """Looks at a cache's counters now and then. Each warning is logged once.

    Args:
        manager: the cache's manager, with prefix caching.
        prefix_store: the cache's prefix store, if it has one.
        keeps_host_copies: whether the host is a second level of the prefix cache.
    """

    def __init__(self, manager: BlockManager, prefix_store: PrefixStore | None, *, keeps_host_copies: bool) -> None:
        self._manager, self._prefix_store = manager, prefix_store
        self._steps = 0
        self._checks: list[Callable[[ManagerStats], str | None]] = [self._marks]  # each returns "" once it is done
        if prefix_store is not None:
            self._checks.append(self._prefetches)
        if not keeps_host_copies and manager.pool("host").num_blocks:
            self._checks.append(self._host)

    def note_step(self) -> None:
        """Note a step; every few of them, look."""
        self._steps += 1
        if self._checks and self._steps % _MANY == 0:
            self.look()

    def look(self) -> None:
        """Log what the counters show."""
        stats = self._manager.stats()
        answers = [(check, check(stats)) for check in self._checks]
        self._checks = [check for check, answer in answers if answer is None]
        for _, answer in answers:
            if answer:
                _log.warning("%s", answer)

    def _marks(self, stats: ManagerStats) -> str | None:
        published = stats.cached_blocks["device"] + stats.evicted_blocks["device"] + stats.hit_blocks
        if published or stats.loaded_blocks:
            return ""
        ended = stats.prompts - stats.sequences
        if ended < _MANY or stats.missed_blocks < _MANY:
            return None
        return f"prefix caching is on, but none of {ended} prompts could be reused: call manager.mark_computed"

    def _prefetches(self, stats: ManagerStats) -> str | None:
        if self._prefix_store is None or self._prefix_store.has_prefetched:
            return ""
        if stats.prompts < _MANY:
            return None
        return (
            f"the prefix store was not read for any of {stats.prompts} prompts: call prefix_store.prefetch before "
            f"manager.allocate"
        )

    def _host(self, stats: ManagerStats) -> str | None:
        if stats.peak_blocks["host"]:
            return ""
        if (evicted := stats.evicted_blocks["device"]) < stats.num_blocks["device"]:
            return None
        return (
            f"the prefix cache has evicted {evicted} blocks, and none of the {stats.num_blocks['host']} host blocks is "
            f"used: prefix_caching=PrefixCaching(host=True) keeps evicted blocks there"
        )
