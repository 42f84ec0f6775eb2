"""`CopyLink`: the time that copies between two memories take."""

from __future__ import annotations

__all__ = ["CopyLink"]


class CopyLink:
    """One direction between two memories, which carries one batch at a time.

    Attributes:
        free_at: when the last queued batch arrives.
        bytes: total bytes sent.
    """

    def __init__(self, bandwidth: float, latency: float) -> None:
        self._bandwidth, self._latency = bandwidth, latency
        self.free_at = 0.0
        self.bytes = 0

    def send(self, now: float, size: int) -> float:
        """Queue a batch; return when it arrives."""
        self.bytes += size
        self.free_at = max(now, self.free_at) + self._latency + size / self._bandwidth
        return self.free_at
