"""A queue by rank whose cost does not grow with what waits in it."""

from __future__ import annotations

import heapq

from blockyard.scheduler.request import Parked, Place, Rank

__all__ = ["RankedQueue"]

FEWEST_SWEPT = 64


class RankedQueue:
    """Parked sequences, the lowest rank first; what is taken out of the middle stays in the heap until it is met.

    Args:
        place: the `Parked.place` of what is in this queue.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._heap: list[tuple[Rank, int, int, Parked]] = []
        self._entries = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, parked: Parked) -> None:
        """Put sequences in by their rank, those of one request by their index."""
        parked.place = self._place
        parked.state.parked.append(parked)
        self._entries += 1
        self._live += 1
        heapq.heappush(self._heap, (parked.rank, parked.indices[0], self._entries, parked))

    def head(self) -> Parked | None:
        """Give the first; it stays."""
        while self._heap:
            parked = self._heap[0][3]
            if parked.place == self._place:
                return parked
            heapq.heappop(self._heap)
        return None

    def first(self, count: int) -> list[Parked]:
        """Give the first few, in order; they stay. The cost does not grow with what waits behind them."""
        heap, found = self._heap, list[Parked]()
        near = [(heap[0], 0)] if heap else []
        while near and len(found) < count:
            entry, at = heapq.heappop(near)
            if entry[3].place == self._place:
                found.append(entry[3])
            for child in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heapq.heappush(near, (heap[child], child))
        return found

    def pop(self) -> Parked:
        """Take out what `head` has given."""
        parked = heapq.heappop(self._heap)[3]
        self._take(parked)
        return parked

    def discard(self, parked: Parked) -> None:
        """Take sequences out of the middle, in constant time but for a sweep once half of the heap is dead."""
        self._take(parked)
        if len(self._heap) > FEWEST_SWEPT and self._live * 2 < len(self._heap):
            self._heap = [entry for entry in self._heap if entry[3].place == self._place]
            heapq.heapify(self._heap)

    def _take(self, parked: Parked) -> None:
        parked.place = "running"
        parked.state.parked.remove(parked)
        self._live -= 1
