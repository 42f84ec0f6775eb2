"""Tracks what a scheduler has opened in its manager, even after an exception at any line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import starmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockyard._core import BlockManager, Sequence, StepDecision, StepOwner
from blockyard.errors import UnknownSequenceError, UnknownTicketError

__all__ = ["Opened", "handles_of"]


class Opened:
    """Sequences and decisions that a scheduler has taken from its manager.

    Python may handle a signal right after a call returns, before its result is assigned. So each such call runs inside
    a list slice assignment: either the call has not run, or the list has its result.

    Args:
        manager: the scheduler's manager.
        steps: ends its steps: the manager itself, or what its cache uses.
        overlap_io: whether a step may compute while its loads arrive.
    """

    def __init__(self, manager: BlockManager, steps: BlockManager | StepOwner, *, overlap_io: bool) -> None:
        self.manager = manager
        self.steps = steps
        self._take = partial(steps.take_decision, prefetch=overlap_io)
        self._handles: set[int] = set()
        self._latest: list[Any] = []
        self._taken: list[StepDecision] = []

    def open(self, call: Callable[[], object]) -> Any:
        """Open sequences by a manager call, and return its result."""
        self._latest[:] = starmap(call, ((),))
        self._handles.update(handles_of(self._latest[0]))
        return self._latest[0]

    def free(self, handles: NDArray[np.uint64]) -> None:
        """Free sequences."""
        self.manager.free(handles)
        self._handles.difference_update(handles.tolist())

    def free_all(self) -> None:
        """Free every sequence. If interrupted, it can be called again."""
        for found in self._latest:
            self._handles.update(handles_of(found))
        for handle in sorted(self._handles):
            with suppress(UnknownSequenceError):
                self.manager.free([handle])
        self._handles.clear()
        self._latest.clear()

    def take_decision(self) -> StepDecision:
        """End the manager's step."""
        self._taken[:] = starmap(self._take, ((),))
        return self._taken[0]

    def hand_over(self) -> None:
        """Note that the caller has the last decision and will end its ticket."""
        self._taken.clear()

    def fail_decision(self) -> bool:
        """Fail the ticket of a decision that never reached the caller. Returns whether there was one."""
        for decision in self._taken:
            with suppress(UnknownTicketError):
                self.steps.fail(decision.ticket)
        return bool(self._taken)


def handles_of(found: NDArray[np.uint64] | Sequence | tuple[Sequence, ...]) -> list[int]:
    """Return the handles in the manager's result."""
    if isinstance(found, np.ndarray):
        return [int(handle) for handle in found.tolist()]
    return list(map(int, found)) if isinstance(found, tuple) else [int(found)]
