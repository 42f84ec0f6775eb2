"""`WritePressure`: whether a store is too slow to be written at full rate, or fails."""

from __future__ import annotations

from typing import Final

__all__ = ["WritePressure"]

HIGH_SECONDS: Final = 1.0
LOW_SECONDS: Final = 0.5
_WEIGHT: Final = 0.3  # of the last write in the average
_PAUSES: Final = (0.5, 8.0)  # minimum and maximum seconds without writes after one that failed


class WritePressure:
    """Averages how long writes take. It is high from an average of one second on, until that falls to half a second.

    While it is high, one write at a time goes on and feeds the average; the rest waits, so that loads do not queue
    behind writes.

    After a write of which the store kept nothing, none goes on for a while: what is not read from the device stays
    queued.

    Attributes:
        is_high: whether writes must wait for one another.
        times: how often it has become high.
        paused_until: time before which no write goes on.

    Source: the marks are those of vLLM's back-pressure detection, pull request 50045.
    """

    def __init__(self) -> None:
        self.is_high = False
        self.times = 0
        self.paused_until = 0.0
        self._pause = 0.0
        self._average = 0.0

    def note(self, seconds: float) -> None:
        """Take in how long a write took."""
        self._average += _WEIGHT * (seconds - self._average)
        if self._average >= HIGH_SECONDS and not self.is_high:
            self.is_high = True
            self.times += 1
        elif self._average <= LOW_SECONDS:
            self.is_high = False

    def note_outcome(self, now: float, *, failed: bool) -> None:
        """Take in whether the store kept nothing of a write."""
        if failed and now < self.paused_until:
            return  # it began before the pause
        self._pause = min(max(2 * self._pause, _PAUSES[0]), _PAUSES[1]) if failed else 0.0
        self.paused_until = now + self._pause
