"""`Link`: what copies take between two memories."""

from __future__ import annotations

__all__ = ["Link"]


class Link:
    """One way between two memories: batches go one after the other.

    Attributes:
        free_at: when the last batch has arrived.
        bytes: that went this way.
    """

    def __init__(self, bandwidth: float, latency: float) -> None:
        self._bandwidth, self._latency = bandwidth, latency
        self.free_at = 0.0
        self.bytes = 0

    def send(self, now: float, size: int) -> float:
        """Return when a batch that is queued now has arrived."""
        self.bytes += size
        self.free_at = max(now, self.free_at) + self._latency + size / self._bandwidth
        return self.free_at
