"""Notices a prefix cache that cannot hit because a call or an option is missing, and logs what it is."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from blockyard._core import BlockManager
from blockyard.types import ManagerStats

if TYPE_CHECKING:
    from blockyard.prefix_store.store import PrefixStore

__all__ = ["Unused"]

_MANY: Final = 32
"""Prompts, and steps between two looks at the counters: a caller that does something at all has done it by then."""

_log = logging.getLogger("blockyard.cache")


class Unused:
    """Looks at a cache's counters now and then, and logs each warning once.

    Args:
        manager: the cache's manager, with prefix caching.
        prefix_store: the cache's prefix store, if it has one.
        keeps_host_copies: whether the host is a second level of the prefix cache.
    """

    def __init__(self, manager: BlockManager, prefix_store: PrefixStore | None, *, keeps_host_copies: bool) -> None:
        self._manager, self._prefix_store = manager, prefix_store
        self._steps = 0
        self._checks: list[Callable[[ManagerStats], bool]] = [self._marks]  # each returns whether it is decided
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
        """Log what the counters show, and forget checks that are decided."""
        if sys.is_finalizing():
            return  # a cache that a finalizer closes; modules can no longer be imported
        stats = self._manager.stats()
        self._checks = [check for check in self._checks if not check(stats)]

    def _marks(self, stats: ManagerStats) -> bool:
        if any((stats.cached_blocks["device"], stats.evicted_blocks["device"], stats.hit_blocks, stats.loaded_blocks)):
            return True
        ended = stats.prompts - stats.sequences
        is_sure = min(ended, stats.missed_blocks) >= _MANY
        if is_sure:
            _log.warning("no block of %d prompts can be found again: call manager.mark_computed", ended)
        return is_sure

    def _prefetches(self, stats: ManagerStats) -> bool:
        if self._prefix_store is None or self._prefix_store.has_prefetched:
            return True
        is_sure = stats.prompts >= _MANY
        if is_sure:
            _log.warning("the prefix store was read for none of %d prompts: call its prefetch first", stats.prompts)
        return is_sure

    def _host(self, stats: ManagerStats) -> bool:
        if stats.peak_blocks["host"]:
            return True
        evicted, blocks = stats.evicted_blocks["device"], stats.num_blocks
        is_sure = evicted >= blocks["device"]
        if is_sure:
            _log.warning(
                "%d cached blocks were evicted, %d host blocks are unused: PrefixCaching(host=True) keeps blocks there",
                evicted,
                blocks["host"],
            )
        return is_sure
