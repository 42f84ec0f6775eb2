"""Limits the rate of log lines, and writes an error as one line."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Final

__all__ = ["RateLimit", "describe"]

_LOGGED_SECONDS: Final = 60.0


class RateLimit:
    """Allows one log line of each kind per minute.

    Args:
        clock: function that returns the time in seconds; the machine's clock if None.
        most: maximum number of lines per minute; None for no limit.
    """

    def __init__(self, clock: Callable[[], float] | None = None, most: int | None = None) -> None:
        self._most = most
        self._clock = clock or (lambda: time.monotonic())  # noqa: PLW0108 (tests replace the clock)
        self._passed: dict[str, float] = {}  # kinds logged in the last minute

    def passes(self, kind: str) -> bool:
        """Return whether to log a line of this kind now."""
        now = self._clock()
        self._passed = {known: at for known, at in self._passed.items() if now < at + _LOGGED_SECONDS}
        if kind in self._passed or len(self._passed) == self._most:
            return False
        self._passed[kind] = now
        return True


def describe(error: BaseException) -> str:
    """Return an error's class and message on one line, even if its `str` raises."""
    # Without a limit it would read the frames of all errors that led to this one.
    described = traceback.TracebackException(type(error), error, None, limit=0)
    return " ".join("".join(described.format_exception_only()).split())
