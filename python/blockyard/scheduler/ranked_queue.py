"""A priority queue whose cost does not grow with its length."""

from __future__ import annotations

import heapq

from blockyard.scheduler.request import IdleSequences, Rank, SequenceStatus

__all__ = ["RankedQueue"]

MIN_SWEPT = 64


class RankedQueue:
    """Idle sequences, lowest rank first. Entries removed from the middle stay in the heap until they surface.

    Args:
        status: the status of sequences in this queue.
    """

    def __init__(self, status: SequenceStatus) -> None:
        self._status = status
        self._heap: list[tuple[Rank, int, int, IdleSequences]] = []
        self._entries = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, idle: IdleSequences) -> None:
        """Insert sequences by rank; those of one request by index."""
        idle.status = self._status
        idle.state.idle.append(idle)
        self._entries += 1
        self._live += 1
        heapq.heappush(self._heap, (idle.rank, idle.indices[0], self._entries, idle))

    def head(self) -> IdleSequences | None:
        """Return the first without removing it."""
        while self._heap:
            idle = self._heap[0][3]
            if idle.status is self._status:
                return idle
            heapq.heappop(self._heap)
        return None

    def first(self, count: int) -> list[IdleSequences]:
        """Return the first few, in order, without removing them. The cost does not grow with the queue's length."""
        heap, found = self._heap, list[IdleSequences]()
        near = [(heap[0], 0)] if heap else []
        while near and len(found) < count:
            entry, at = heapq.heappop(near)
            if entry[3].status is self._status:
                found.append(entry[3])
            for child in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heapq.heappush(near, (heap[child], child))
        return found

    def pop(self) -> IdleSequences:
        """Remove the sequences that `head` returned."""
        idle = heapq.heappop(self._heap)[3]
        self._take(idle)
        return idle

    def discard(self, idle: IdleSequences) -> None:
        """Remove sequences from the middle in constant time, except for a sweep once half of the heap is dead."""
        self._take(idle)
        if len(self._heap) > MIN_SWEPT and self._live * 2 < len(self._heap):
            self._heap = [entry for entry in self._heap if entry[3].status is self._status]
            heapq.heapify(self._heap)

    def _take(self, idle: IdleSequences) -> None:
        idle.status = SequenceStatus.RUNNING
        idle.state.idle.remove(idle)
        self._live -= 1
