"""Runs a scheduler's steps over a cache: transfers overlap compute, and every ticket is ended exactly once.

Each call updates these lists in the same operation as the state they track, so an exception at any line loses nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from blockyard._core import BlockManager, Pairs, StepOwner
from blockyard.errors import InvariantError, StepOrderError, UnknownTicketError
from blockyard.stores.threaded.runtime import runtime
from blockyard.workers import RateLimit, keep

if TYPE_CHECKING:
    from blockyard.executor.executor import Executor, StepDone
    from blockyard.scheduler.scheduler import Scheduler
    from blockyard.scheduler.step import Step

__all__ = ["Cache", "CacheLoop"]

_log = logging.getLogger("blockyard.scheduler")
_IDLE_STEPS: Final = 2
"""Consecutive steps that may do nothing while requests wait. More than that would loop forever."""
_IDLE_SECONDS: Final = 0.0002
"""Poll interval while there is nothing to do but wait for transfers."""


@runtime_checkable
class Cache(Protocol):
    """The cache whose blocks a scheduler's steps move; a `KVCache`."""

    manager: BlockManager
    prefix_store: Any
    _steps: StepOwner  # for its scheduler

    @property
    def executor(self) -> Any:
        """The executor of decisions."""

    def give_back(self) -> object:
        """Return memory that a smaller device no longer uses."""


class CacheLoop:
    """Submits a scheduler's decisions to an executor, and completes them in the scheduler.

    Args:
        scheduler: makes the decisions.
        cache: over the scheduler's manager.
        executor: carries out the decisions; None means the cache's executor.
        count_loading: counts the prompts that are loading from the cache's prefix store.

    Attributes:
        open: the step whose `with` block has not ended.
    """

    def __init__(
        self, scheduler: Scheduler, cache: Cache, executor: Executor | None, count_loading: Callable[[], int]
    ) -> None:
        self.open: Step | None = None
        self._scheduler = scheduler
        self._cache = cache
        self._runtime = runtime()
        self._count_loading = count_loading
        self._executor: Executor = cache.executor if executor is None else executor
        self._tickets: list[int] = []  # in flight, oldest first
        self._ended: list[Sequence[StepDone]] = []  # not yet reported to the scheduler
        self._collecting: int | None = None  # ticket of a call of `collect` that was interrupted
        self._idle = 0.0  # steps in a row that did nothing; one that waited for a load counts a quarter
        self._limit = RateLimit()

    def begin(self, step: Step, *, by_layer: bool) -> None:
        """Start a step's transfers."""
        self.open, step.loop = step, self
        self._executor.submit(step.decision, by_layer=by_layer)
        self._tickets.append(step.decision.ticket)

    def check_order(self, in_flight: Step | None) -> None:
        """Check that no step is in flight."""
        if in_flight is None:
            return
        what = f"the step of ticket {in_flight.decision.ticket}"
        if self.open is not None:
            raise StepOrderError(
                f"{what} is not over: leave its `with` block, then give its tokens to update, or give_up() to drop it"
            )
        raise StepOrderError(f"{what} was not given to update: call update(step, sampled), or give_up() to drop it")

    def prepare(self) -> None:
        """Get ready for the next step.

        Raises:
            InvariantError: the last steps did nothing, and this one would do nothing either.
        """
        self._cache.give_back()
        if self._idle > _IDLE_STEPS and self._scheduler.num_unfinished:
            self._idle = 0.0
            pool = self._scheduler.manager.pool("device")
            raise InvariantError(
                f"{self._scheduler.num_unfinished} requests wait, {pool.num_free} of {pool.num_blocks} device blocks "
                f"are free, and nothing is scheduled"
            )

    def wait_for_layer(self, ticket: int, layer: int) -> None:
        """Make compute queued from now on wait for one layer of a step's loads."""
        self._executor.wait_for_layer(ticket, layer)

    def end(self, step: Step, *, failed: bool) -> None:
        """Complete landed transfers at the end of a step's `with` block; give up the step if the block raised."""
        if self.open is not step:
            return  # given up inside its block
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
        """Drop a step that was given up. Its transfers count as lost if they have not started."""
        ticket, self.open = step.decision.ticket, None
        if ticket in self._tickets:
            return
        # It is unknown what landed: count everything as lost, and end the leases.
        with contextlib.suppress(UnknownTicketError):
            self._executor.wait(ticket)
        with contextlib.suppress(UnknownTicketError):
            self._scheduler.complete(ticket, [pairs for _, pairs in step.decision.transfers()])

    def poll(self) -> None:
        """End the tickets of finished transfers, and advance the prefix store; never waits."""
        if self._collecting is not None and not self._executor.is_awaited(self._collecting):
            self._collect(self._collecting)
        keep(self._ended, self._executor.poll)
        self._complete_ended()
        if self._cache.prefix_store is not None:
            self._cache.prefix_store.poll()

    def drain(self) -> None:
        """Wait for all transfers, and end their tickets."""
        if self._collecting is not None:
            self._collect(self._collecting)
        self._complete_ended()
        while self._tickets:
            # One C call moves the executor's answer into the list.
            self._ended.extend(zip(map(self._executor.wait, self._tickets[:1]), strict=True))
            self._complete_ended()

    def _take_in(self, step: Step) -> None:
        """End finished tickets. Wait for this step's ticket if its computation depended on it."""
        ended = self._collect(step.decision.ticket)
        while not (step.rows or ended) and self._tickets:
            self._runtime.sleep(_IDLE_SECONDS)
            ended = keep(self._ended, self._executor.poll)
        self._complete_ended()
        is_idle = not (step.rows or self._tickets)
        was_loading = self._scheduler.num_loading > 0  # when this step was decided
        has_others_load = self._advance_prefixes(may_wait=is_idle)
        is_stuck = is_idle and not has_others_load and not len(step.decision) and self._scheduler.num_unfinished
        if is_stuck and self._scheduler.manager.stats().pinned_blocks["device"]:
            self._runtime.sleep(_IDLE_SECONDS)  # whoever pinned blocks ends the pin
            is_stuck = False
        # Requests whose loads are interrupted, or that are aborted, may need several such steps; endless loads end.
        self._idle = self._idle + (0.25 if was_loading else 1.0) if is_stuck else 0.0

    def _collect(self, ticket: int) -> Sequence[StepDone]:
        """Collect what has ended. After an interrupted call, the executor may report it to the next one only."""
        self._collecting = ticket
        ended = keep(self._ended, self._executor.collect, ticket)
        self._collecting = None
        return ended

    def _advance_prefixes(self, *, may_wait: bool) -> bool:
        """Advance the prefix store; if there is nothing else to do, wait for a load.

        Returns:
            Whether it waited for a load that no request waits for, such as an aborted request's: these hold blocks too.
        """
        prefixes = self._cache.prefix_store
        if prefixes is None:
            return False
        prefixes.poll()
        if not may_wait:
            return False
        if loading := self._count_loading():
            prefixes.wait(until=lambda: self._count_loading() < loading)
            return False
        loading = prefixes.num_open if self._scheduler.num_unfinished else 0
        if loading:
            prefixes.wait(until=lambda: prefixes.num_open < loading)
        return loading > 0

    def _complete_ended(self) -> None:
        """Complete ended tickets in the scheduler, and warn the user of errors."""
        while self._ended:
            for done in self._ended[0]:
                if done.ticket in self._tickets:
                    self._end(done.ticket, done.lost, done.errors)
            del self._ended[0]

    def _end(self, ticket: int, lost: Sequence[Pairs], errors: Sequence[Exception]) -> None:
        self._scheduler.complete(ticket, lost)
        self._tickets.remove(ticket)
        for error in errors:
            if self._limit.passes(type(error).__name__):
                fields = {"blocks": sum(map(len, lost)), "error": type(error).__name__}
                _log.warning("%d blocks were lost in a transfer: %s", fields["blocks"], error, extra=fields)
