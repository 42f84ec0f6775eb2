"""A scheduler's steps over a cache: transfers run beside compute, and every ticket is ended once.

Calls change the lists here together with what the lists stand for, so that an exception at any line loses nothing.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from blockyard._core import BlockManager, Pairs
from blockyard.errors import InvariantError, StepOrderError, UnknownTicketError
from blockyard.workers import keep

if TYPE_CHECKING:
    from blockyard.executor.executor import Executor, StepDone
    from blockyard.scheduler.scheduler import Scheduler
    from blockyard.scheduler.step import Step

__all__ = ["Cache", "CacheLoop"]

_IDLE_STEPS: Final = 2
"""Steps in a row that may do nothing although requests wait. More would repeat for ever."""
_IDLE_SECONDS: Final = 0.0002
"""Between two looks at what is under way, where nothing else is left to do."""


@runtime_checkable
class Cache(Protocol):
    """What a scheduler's steps move blocks in; a `KVCache`."""

    manager: BlockManager
    prefix_store: Any

    @property
    def executor(self) -> Any:
        """What carries decisions out."""

    def give_back(self) -> object:
        """Return memory that a smaller device no longer uses."""


class CacheLoop:
    """Submits a scheduler's decisions to an executor, and tells the scheduler which have ended.

    Args:
        scheduler: whose decisions these are.
        cache: over the scheduler's manager.
        executor: carries the decisions out; the cache's if None.

    Attributes:
        open: the step whose `with` block has not ended.
    """

    def __init__(self, scheduler: Scheduler, cache: Cache, executor: Executor | None) -> None:
        self.open: Step | None = None
        self._scheduler = scheduler
        self._cache = cache
        self._executor: Executor = cache.executor if executor is None else executor
        self._tickets: list[int] = []  # under way, the oldest first
        self._ended: list[Sequence[StepDone]] = []  # the scheduler does not know yet
        self._idle = 0

    def begin(self, step: Step, *, by_layer: bool) -> None:
        """Start a step's transfers."""
        self.open, step.loop = step, self
        self._executor.submit(step.decision, by_layer=by_layer)
        self._tickets.append(step.decision.ticket)

    def check_order(self, in_flight: Step | None) -> None:
        """Refuse a new step while one is in flight."""
        if in_flight is None:
            return
        what = f"the step of ticket {in_flight.decision.ticket}"
        if self.open is not None:
            raise StepOrderError(f"{what} is not over: leave its `with` block, then give its tokens to update")
        raise StepOrderError(f"{what} was not given to update: call update(step, sampled), or give_up() to drop it")

    def prepare(self) -> None:
        """Get ready for the next step.

        Raises:
            InvariantError: the steps before did nothing, and this one would not either.
        """
        self._cache.give_back()
        if self._idle > _IDLE_STEPS and self._scheduler.num_unfinished:
            self._idle = 0
            pool = self._scheduler.manager.pool("device")
            raise InvariantError(
                f"{self._scheduler.num_unfinished} requests wait, {pool.num_free} of {pool.num_blocks} device blocks "
                f"are free, and nothing is scheduled"
            )

    def wait_for_layer(self, ticket: int, layer: int) -> None:
        """Let compute that is queued from now on wait for one layer of a step's loads."""
        self._executor.wait_for_layer(ticket, layer)

    def end(self, step: Step, *, failed: bool) -> None:
        """Take in what has landed, at the end of a step's `with` block; give the step up if the block has raised."""
        if self.open is not step:
            return  # its block has given it up
        if failed:
            self._scheduler.give_up()
            return
        try:
            self._take_in(step)
        except BaseException:
            self._scheduler.give_up()
            raise
        self.open = None

    def drop(self, step: Step) -> None:
        """Forget a step that is given up. If its transfers have not begun, they count as lost."""
        ticket, self.open = step.decision.ticket, None
        if ticket in self._tickets:
            return
        # What landed is not known: nothing counts as landed, and the leases end.
        with contextlib.suppress(UnknownTicketError):
            self._executor.wait(ticket)
        with contextlib.suppress(UnknownTicketError):
            self._scheduler.complete(ticket, [pairs for _, pairs in step.decision.transfers()])

    def poll(self) -> None:
        """End the tickets whose transfers have ended, and move the prefix store on; never waits."""
        keep(self._ended, self._executor.poll)
        self._tell()
        if self._cache.prefix_store is not None:
            self._cache.prefix_store.poll()

    def drain(self) -> None:
        """Wait for all transfers, and end their tickets."""
        self._tell()
        while self._tickets:
            # One call of C code, from the executor's answer to the list.
            self._ended.extend(zip(map(self._executor.wait, self._tickets[:1]), strict=True))
            self._tell()

    def _take_in(self, step: Step) -> None:
        """End the tickets that are done, and wait for this step's if what it computed depends on it."""
        ended = keep(self._ended, self._executor.collect, step.decision.ticket)
        while not (step.rows or ended) and self._tickets:
            time.sleep(_IDLE_SECONDS)
            ended = keep(self._ended, self._executor.poll)
        self._tell()
        prefixes, is_idle = self._cache.prefix_store, not (step.rows or self._tickets)
        if prefixes is not None:
            prefixes.poll()
            if is_idle and (loading := self._scheduler.num_loading):
                prefixes.wait(until=lambda: self._scheduler.num_loading < loading)
        self._idle = self._idle + 1 if is_idle and not len(step.decision) else 0

    def _tell(self) -> None:
        """Tell the scheduler which tickets have ended, and the user what went wrong."""
        while self._ended:
            for done in self._ended[0]:
                if done.ticket in self._tickets:
                    self._end(done.ticket, done.lost, done.errors)
            del self._ended[0]

    def _end(self, ticket: int, lost: Sequence[Pairs], errors: Sequence[Exception]) -> None:
        self._scheduler.complete(ticket, lost)
        self._tickets.remove(ticket)
        for error in errors:
            warnings.warn(f"{sum(map(len, lost))} blocks did not land: {error}", RuntimeWarning, stacklevel=6)
