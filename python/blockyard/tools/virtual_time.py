"""Time that passes when a program says so: the clock of simulated fleets, of replays, and of tests."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import Any, Generic, TypeVar

from blockyard.stores.threaded.runtime import Runtime

__all__ = ["Agenda", "CopyLink", "VirtualTime"]

T = TypeVar("T", bound=Any)  # comparable


class VirtualTime(Runtime):
    """A runtime whose clock stands still until someone sets it, or sleeps.

    Args:
        now: seconds since an arbitrary point.

    Attributes:
        now: as given, then the present time.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        """Return the present time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def wait_readable(self, descriptor: int, seconds: float) -> None:  # noqa: ARG002 (descriptors are real, time is not)
        """Let time pass."""
        self.sleep(seconds)


class Agenda(Generic[T]):
    """What is due at which time. Of one time, the smallest comes first."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, T]] = []

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._heap)

    def add(self, at: float, what: T) -> None:
        """Add an entry."""
        heappush(self._heap, (at, what))

    @property
    def next_at(self) -> float:
        """Time of the first entry; infinite if there is none."""
        return self._heap[0][0] if self._heap else inf

    def pop(self) -> tuple[float, T]:
        """Remove and return the first entry with its time."""
        return heappop(self._heap)

    def take(self, now: float) -> list[tuple[float, T]]:
        """Remove and return the entries that are due, with their times."""
        taken = []
        while self._heap and self._heap[0][0] <= now:
            taken.append(heappop(self._heap))
        return taken


class CopyLink:
    """One direction between two memories, which carries one batch at a time.

    Attributes:
        free_at: when the last queued batch arrives.
    """

    def __init__(self, bandwidth: float, latency: float) -> None:
        self._bandwidth, self._latency = bandwidth, latency
        self.free_at = 0.0

    def send(self, now: float, size: int) -> float:
        """Queue a batch; return when it arrives."""
        self.free_at = max(now, self.free_at) + self._latency + size / self._bandwidth
        return self.free_at
