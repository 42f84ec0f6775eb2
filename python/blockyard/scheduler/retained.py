"""Retained blocks: what an ended request leaves in the cache is evicted after all else, until a deadline.

A lease holds the blocks. It yields: before anything in the scheduler lacks blocks, the lease whose
time ends first goes.
"""

from __future__ import annotations

import heapq
from math import inf

import numpy as np

from blockyard._core import BlockManager
from blockyard.scheduler.request import RequestState
from blockyard.scheduler.step import SchedulerStats

__all__ = ["Retained"]


class Retained:
    """The leases of ended requests.

    Args:
        manager: the scheduler's manager.
        stats: counts what became of them.
    """

    def __init__(self, manager: BlockManager, stats: SchedulerStats) -> None:
        self._prefix, self._jobs, self._stats = manager.prefix, manager.prefix.store_jobs, stats
        self._order: list[tuple[float, int]] = []  # deadlines and leases, a heap

    def __len__(self) -> int:
        return len(self._order)

    def add(self, state: RequestState, now: float) -> None:
        """Lease the blocks of a request's sequences, which were freed, as far as half of the unused blocks suffice."""
        request = state.request
        for generated in map(state.generated, range(request.n)):
            tokens = np.concatenate([state.prompt, generated])
            hashed = self._prefix.hash(tokens, salt=request.salt, lora_id=request.lora_id, extras=state.extras)
            lease = self._jobs.lease(hashed, share="half")
            if lease is None:
                self._stats.retain_refused += 1
                continue
            self._jobs.settle_lease(lease, hashed)
            heapq.heappush(self._order, (now + request.retain, lease))
            self._stats.retained += 1

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        while self._order and self._order[0][0] <= now:
            self._end_first()

    def give_up(self) -> bool:
        """End the lease whose time ends first. Returns whether there was one."""
        if not self._order:
            return False
        self._end_first()
        self._stats.retain_given_up += 1
        return True

    def clear(self) -> None:
        """End all leases, after the manager has ended some."""
        self.expire(inf)

    def _end_first(self) -> None:
        self._jobs.end_lease(self._order[0][1])
        heapq.heappop(self._order)
