"""The loop over steps: takes a manager's decisions, has them carried out, and ends their tickets."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockyard._core import BlockManager, StepDecision, StepOwner
from blockyard.errors import BlockyardError, StepOrderError, UnknownTicketError
from blockyard.executor.executor import Executor, StepDone, all_lost
from blockyard.stores.threaded.runtime import runtime

if TYPE_CHECKING:
    from blockyard.prefix_store import PrefixStore

__all__ = ["StepEnd", "StepLoop"]

_NONE: Final = np.zeros(0, np.uint64)


class StepEnd(NamedTuple):
    """A ticket that has ended.

    Attributes:
        ticket: its number.
        lost: sequences that lost bytes, uint64 `[n]`; they can only be freed and started again.
        errors: what went wrong in its transfers.
        lost_blocks: number of blocks that did not land, where it is known.
    """

    ticket: int
    lost: NDArray[np.uint64]
    errors: tuple[Exception, ...]
    lost_blocks: int = 0


class StepLoop:
    """The steps over a manager.

    If an exception, such as `KeyboardInterrupt`, ends a call, the next one first calls `give_up_all`: this is the one
    place where a cache recovers.

    Args:
        manager: the manager.
        steps: ends its steps.
        executor: carries out the decisions.
        prefix_store: makes progress with each `poll`, if there is one.
    """

    def __init__(
        self, manager: BlockManager, steps: StepOwner, executor: Executor, prefix_store: PrefixStore | None = None
    ) -> None:
        self.executor = executor
        self.prefix_store = prefix_store
        self._manager = manager
        self._steps = steps
        self._clock = runtime().monotonic if manager.prefix.enabled else None  # only the prefix cache asks for times
        self._open: set[int] = set()  # tickets whose transfers have not been reported
        self._ended: dict[int, StepEnd] = {}  # not reported yet
        self._is_changing = False  # if set when a call begins, an exception ended the last one

    def __len__(self) -> int:
        """Return the number of open tickets."""
        return len(self._open)

    def check(self, call: str) -> None:
        """Recover from an exception that ended the last call, and refuse a call while others take decisions.

        Raises:
            StepOrderError: a ticket is open that was taken elsewhere.
        """
        if self._is_changing:
            self.give_up_all()
        if self._manager.num_open_tickets > len(self._open):
            other = min(set(self._manager.stats().open_tickets) - self._open)
            raise StepOrderError(
                f"KVCache.{call} was called, but ticket {other} was not taken by KVCache.step: make a scheduler with "
                f"Scheduler(cache), and call its step, poll and drain"
            )

    def begin(self, *, by_layer: bool = False, prefetch: bool = False) -> StepDecision:
        """End the manager's step and start its transfers; see `KVCache.step`."""
        if self._is_changing:
            self.give_up_all()
        self._is_changing = True
        now = None if self._clock is None else self._clock()
        decision = self._steps.take_decision(prefetch=prefetch, now=now)
        self._open.add(decision.ticket)
        try:
            self.executor.submit(decision, by_layer=by_layer)
        except BlockyardError as error:
            # It is unknown what has landed.
            with suppress(UnknownTicketError):
                self.executor.wait(decision.ticket)
            self._end(all_lost(decision, error))
            self._is_changing = False
            raise
        self._is_changing = False
        return decision

    def finish(self, ticket: int) -> None:
        """End the tickets of landed transfers. Wait for this one if its step's results depend on it."""
        if self._is_changing:
            self.give_up_all()
        self._is_changing = True
        for done in self.executor.collect(ticket):
            self._end(done)
        self._is_changing = False

    def poll(self) -> None:
        """End the tickets of landed transfers, and advance the prefix store; never waits."""
        if self._is_changing:
            self.give_up_all()
        self._is_changing = True
        for done in self.executor.poll():
            self._end(done)
        self._is_changing = False
        if self.prefix_store is not None:
            self.prefix_store.poll()

    def drain(self) -> None:
        """Wait for all transfers, and end their tickets."""
        if self._is_changing:
            self.give_up_all()
        self._is_changing = True
        for ticket in sorted(self._open):
            self._end(self.executor.wait(ticket))
        self._is_changing = False

    def known_lost(self) -> NDArray[np.uint64]:
        """Return the sequences known to have lost bytes but not reported yet, uint64 `[n]`."""
        found = [end.lost for end in self._ended.values() if len(end.lost)]
        for ticket in self._open:
            pairs = self.executor.lost(ticket)
            found += [self._steps.lose(ticket, pairs)] if pairs else []
        return np.unique(np.concatenate(found)) if found else _NONE

    def report(self) -> list[StepEnd]:
        """Return the tickets that ended since the last call."""
        if not self._ended:
            return []
        ended, self._ended = list(self._ended.values()), {}
        return ended

    def give_up_all(self) -> None:
        """Count everything in flight as lost, after an exception has ended a call. May be called again.

        Waits for the copies under way, and for the swap store at most until its deadline: so no lease ends before its
        transfer. `report` then returns the tickets, with the sequences that lost bytes.
        """
        self._is_changing = True
        self.executor.give_up_all()
        if self.prefix_store is not None:
            self.prefix_store.give_up_all()
        self.executor.poll()  # these reports are among the tickets below
        error = BlockyardError("a call was interrupted, so everything in flight counts as lost")
        for ticket in self._manager.stats().open_tickets:
            # First the report, then the end: a second interrupt in between leaves the ticket to the next call.
            self._ended[ticket] = StepEnd(ticket, self._steps.lose(ticket), (error,))
            self._steps.fail(ticket)
        self._open.clear()
        self._is_changing = False

    def _end(self, done: StepDone) -> None:
        """End a ticket in the manager."""
        ticket = done.ticket
        lost, blocks = _NONE, 0
        try:
            if done.lost:
                lost, blocks = self._steps.lose(ticket, done.lost), sum(map(len, done.lost))
            self._ended[ticket] = StepEnd(ticket, lost, done.errors, blocks)  # first, as in `give_up_all`
            self._steps.complete(ticket, done.lost)
        except UnknownTicketError:
            self._ended.pop(ticket, None)  # the caller has ended it
        self._open.discard(ticket)
