"""Tracks tickets from the manager to their ends; an exception at any line loses none.

Each call changes its lists before, or in the same operation as, the state they track. So an interrupted call can be
retried, and then reports what it could not report before.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockyard._core import BlockManager, StepDecision, StepOwner
from blockyard.errors import BlockyardError, StepOrderError, UnknownTicketError
from blockyard.executor.executor import StepDone, StepExecutor, all_lost
from blockyard.workers import keep

__all__ = ["StepEnd", "Tickets"]

_NONE: Final = np.zeros(0, np.uint64)


class StepEnd(NamedTuple):
    """A ticket that has ended.

    Attributes:
        ticket: its number.
        lost: sequences that lost bytes, uint64 `[n]`; they can only be freed and started again.
        errors: what went wrong in its transfers.
    """

    ticket: int
    lost: NDArray[np.uint64]
    errors: tuple[Exception, ...]


class Tickets:
    """Takes decisions from a manager, and ends their tickets when an executor has carried them out.

    Args:
        manager: the manager.
        steps: ends its steps.
        executor: carries out the decisions.
    """

    def __init__(self, manager: BlockManager, steps: StepOwner, executor: StepExecutor) -> None:
        self._manager = manager
        self._steps = steps
        self._executor = executor
        self._prefetch = partial(steps.take_decision, prefetch=True)
        self._open: list[StepDecision] = []  # tickets open in the manager
        self._done: dict[int, StepDone] = {}  # transfers have ended, tickets not yet
        self._ended: list[tuple[int, NDArray[np.uint64], tuple[Exception, ...]]] = []  # not reported yet

    def __len__(self) -> int:
        return len(self._open)

    def refuse_others(self, call: str) -> None:
        """Refuse a call of the cache while something else ends the manager's tickets: it would take their reports.

        Raises:
            StepOrderError: a ticket is open that was taken elsewhere.
        """
        others = set(self._manager.stats().open_tickets).difference(decision.ticket for decision in self._open)
        if others:
            raise StepOrderError(
                f"KVCache.{call} was called, but ticket {min(others)} was not taken by KVCache.step: "
                f"make a scheduler with Scheduler(cache), and call its step, poll and drain"
            )

    def take(self, *, prefetch: bool) -> StepDecision:
        """End the manager's step; see `BlockManager.take_decision`."""
        if self._open:
            self._end_abandoned()
        return keep(self._open, self._prefetch if prefetch else self._steps.take_decision)

    def fail(self, decision: StepDecision, error: BaseException) -> None:
        """End a decision that the executor refused. It is unknown what landed, so all of it counts as lost."""
        with suppress(UnknownTicketError):
            self._executor.wait(decision.ticket)
        self._end(all_lost(decision, error))

    def end(self, reported: list[StepDone]) -> None:
        """End the tickets that the executor reported."""
        for done in reported:
            self._done[done.ticket] = done
        if len(self._open) > len(self._done):
            self._end_abandoned()
        for done in list(self._done.values()):
            self._end(done)

    def wait(self) -> None:
        """Wait for all tickets, and end them."""
        for decision in self._open:
            with suppress(UnknownTicketError):
                self._done[decision.ticket] = self._executor.wait(decision.ticket)
        self.end([])

    def known_lost(self) -> NDArray[np.uint64]:
        """Return the sequences known to have lost bytes but not reported yet, uint64 `[n]`."""
        found = [lost for _, lost, _ in self._ended]
        for ticket in [decision.ticket for decision in self._open]:
            pairs = self._executor.lost(ticket)
            found += [self._steps.lose(ticket, pairs)] if pairs else []
        return np.unique(np.concatenate(found)) if found else _NONE

    def report(self) -> list[StepEnd]:
        """Return the tickets that ended since the last call."""
        if not self._ended:
            return []
        ended = [StepEnd(*end) for end in self._ended]
        self._ended = []
        return ended

    def _end_abandoned(self) -> None:
        """End decisions that an interrupted call did not submit, before a step computes with them."""
        for decision in list(self._open):
            ticket = decision.ticket
            if ticket not in self._done and not self._executor.is_open(ticket):
                why = "a call was interrupted: it is unknown whether the blocks landed"
                self._end(all_lost(decision, BlockyardError(why)))

    def _end(self, done: StepDone) -> None:
        """End a ticket. Idempotent."""
        ticket = done.ticket
        if not self._ended or ticket not in [end[0] for end in self._ended]:
            # Runs entirely in C: no interrupt can come between the manager's answer and the list.
            ends = zip((ticket,), map(self._steps.complete, (ticket,), (done.lost,)), (done.errors,))  # noqa: B905
            try:  # noqa: SIM105 (a `with` would slow down every step)
                self._ended.extend(ends)
            except UnknownTicketError:
                pass  # already ended by the caller
        self._open = [decision for decision in self._open if decision.ticket != ticket]
        self._done.pop(ticket, None)
