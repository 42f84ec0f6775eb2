"""A priority queue whose head is found at once, however long it is."""

from __future__ import annotations

from bisect import bisect

from blockyard.scheduler.request import IdleSequences, Rank, SequenceStatus

__all__ = ["RankedQueue"]

MIN_SWEPT = 64


class RankedQueue:
    """Idle sequences, lowest rank first. Entries removed from the middle stay in the list until they surface.

    The list is sorted: most sequences come last, those that were set aside or preempted come near the head.

    Args:
        status: the status of sequences in this queue.
    """

    def __init__(self, status: SequenceStatus) -> None:
        self._status = status
        self._sorted: list[tuple[Rank, int, int, IdleSequences]] = []  # from `_begin` on
        self._begin = 0
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
        entry = (idle.rank, idle.indices[0], self._entries, idle)
        if not self._sorted or self._sorted[-1] < entry:
            self._sorted.append(entry)
            return
        place = bisect(self._sorted, entry, self._begin)
        if place > self._begin or not place:
            self._sorted.insert(place, entry)
        else:  # where one before it was
            self._begin -= 1
            self._sorted[self._begin] = entry

    def head(self) -> IdleSequences | None:
        """Return the first without removing it."""
        while self._begin < len(self._sorted):
            idle = self._sorted[self._begin][3]
            if idle.status is self._status:
                return idle
            self._begin += 1
        self._sorted.clear()
        self._begin = 0
        return None

    def first(self, count: int) -> list[IdleSequences]:
        """Return the first few, in order, without removing them. The cost does not grow with the queue's length."""
        found = list[IdleSequences]()
        for at in range(self._begin, len(self._sorted)):
            if len(found) == count:
                break
            if (idle := self._sorted[at][3]).status is self._status:
                found.append(idle)
        return found

    def pop(self) -> IdleSequences:
        """Remove the sequences that `head` returned."""
        idle = self._sorted[self._begin][3]
        self._begin += 1
        self._take(idle)
        return idle

    def discard(self, idle: IdleSequences) -> None:
        """Remove sequences from the middle in constant time, except for a sweep once half of the list is dead."""
        self._take(idle)

    def _take(self, idle: IdleSequences) -> None:
        idle.status = SequenceStatus.RUNNING
        idle.state.idle.remove(idle)
        self._live -= 1
        if len(self._sorted) > MIN_SWEPT and self._live * 2 < len(self._sorted):
            self._sorted = [entry for entry in self._sorted[self._begin :] if entry[3].status is self._status]
            self._begin = 0
