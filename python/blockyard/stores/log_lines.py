"""Log lines of stores: when one fails and works again, and which of its blocks are damaged or refused."""

import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from blockyard.stores.value import is_damage
from blockyard.workers.logs import RateLimit

__all__ = ["FailureLog", "MissLog"]

_log = logging.getLogger("blockyard.stores")


class FailureLog:
    """Logs when a store fails and when it works again: one line per minute and cause, to the logger `blockyard.stores`.

    Of failures at most eight lines a minute: a storage may have something else in each message.

    The other methods only queue lines, so they may be called under a lock; `flush` writes the lines.

    Args:
        clock: returns the time in seconds; None for the system's clock.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._limit = RateLimit(clock, most=8)
        self._failures = 0  # since the store last worked
        self._is_known = False  # whether one of these failures was logged
        self._lines: deque[str | int] = deque()  # the cause of a failure, or the number of failures before a recovery

    def failed(self, cause: str) -> None:
        """Note a failure.

        Args:
            cause: one line; without its digits, it identifies the cause.
        """
        self._failures += 1
        if self._limit.passes(re.sub(r"\d+", "", cause)):
            self._is_known = True
            self._lines.append(cause)

    def worked(self) -> None:
        """Note that a batch succeeded."""
        if self._failures:
            if self._is_known:
                self._lines.append(self._failures)
            self._failures, self._is_known = 0, False

    def flush(self, store: object) -> None:
        """Write the queued lines, with `store` as the name. Thread-safe."""
        while self._lines:
            with suppress(IndexError):  # another thread took it
                line = self._lines.popleft()
                if isinstance(line, str):
                    fields: dict[str, object] = {"store": str(store), "cause": line}
                    _log.warning("%s fails, blocks are misses: %s", store, line, extra=fields)
                else:
                    fields = {"store": str(store), "failures": line}
                    _log.warning("%s works again after %d failures", store, line, extra=fields)


class MissLog:
    """Logs damaged and refused blocks: one line per minute and reason, to the logger `blockyard.stores`.

    Args:
        store: the name in the log line.
        clock: returns the time in seconds; None for the system's clock.
    """

    def __init__(self, store: object, clock: Callable[[], float] | None = None) -> None:
        self._store = store
        self._limit = RateLimit(clock)

    def note(self, reasons: Iterable[str]) -> None:
        """Log the reasons of a batch's misses."""
        store = self._store
        for reason, count in Counter(reasons).items():
            if not ((is_damage(reason) or reason == "refused") and self._limit.passes(reason)):
                continue
            fields = {"store": str(store), "blocks": count, "reason": reason}
            if reason == "refused":
                _log.warning("%s refuses %d blocks, for instance beyond a quota", store, count, extra=fields)
            else:
                _log.warning("%s has %d damaged blocks, which are misses: %s", store, count, reason, extra=fields)
