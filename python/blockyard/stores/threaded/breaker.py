"""`Breaker`: tracks whether the storage answers. While it does not, it receives only probes, no batches."""

from collections.abc import Callable
from typing import Final

__all__ = ["Breaker"]

_PAUSES: Final = (0.5, 8.0)  # minimum and maximum seconds between probes


class Breaker:
    """Tracks whether the storage answers, and when to probe it if it does not. The caller holds a lock.

    Args:
        clock: returns the time in seconds.

    Attributes:
        is_down: whether the storage has stopped answering.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.is_down = False
        self._retry_at, self._pause = 0.0, _PAUSES[0]

    def is_probe_due(self, now: float) -> bool:
        """Return whether it is time for the next probe."""
        return self.is_down and self._retry_at <= now

    def trip(self) -> bool:
        """Record that a call hung. Returns whether the storage was up until now."""
        is_new = not self.is_down
        if is_new:
            self.is_down, self._pause = True, _PAUSES[0]
        self._retry_at = self._clock() + self._pause
        return is_new

    def end_probe(self, *, answered: bool) -> bool:
        """Record how a probe ended. Returns whether the storage works again."""
        if not self.is_down:
            return False
        if answered:
            self.is_down = False
            return True
        self._pause = min(2 * self._pause, _PAUSES[1])
        self._retry_at = self._clock() + self._pause
        return False
