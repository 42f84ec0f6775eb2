"""Runs a scheduler's steps over a cache: transfers overlap compute, and every ticket is ended exactly once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from blockyard._core import BlockManager, StepDecision
from blockyard.errors import InvariantError, StepOrderError
from blockyard.stores.threaded.runtime import runtime
from blockyard.workers.logs import RateLimit

if TYPE_CHECKING:
    from blockyard.executor.executor import Executor
    from blockyard.executor.loop import StepLoop
    from blockyard.prefix_store import PrefixStore

__all__ = ["Cache", "CacheLoop", "Change", "LoopedScheduler", "LoopedStep"]

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

    def _step_loop(self, executor: Executor | None) -> Any:
        """Return a `StepLoop` over the cache; None means the cache's executor."""

    def give_back(self) -> object:
        """Return memory that a smaller device no longer uses."""


class LoopedStep(Protocol):
    """What a loop reads of a `Step`."""

    decision: StepDecision

    @property
    def rows(self) -> int:
        """Number of sequences in the step."""


class LoopedScheduler(Protocol):
    """What a loop asks of its `Scheduler`."""

    manager: BlockManager

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended."""

    @property
    def num_loading(self) -> int:
        """Number of waiting requests whose prompts are loading from a prefix store."""

    def give_up(self) -> object:
        """Give up the step in flight."""


@dataclass(slots=True)
class Change:
    """Whether a call of the scheduler is changing something. If so when a call begins, an exception ended the last."""

    begun: bool = False


class CacheLoop:
    """Has a scheduler's decisions carried out, and ends their tickets in the scheduler.

    Args:
        scheduler: makes the decisions.
        cache: over the scheduler's manager.
        executor: carries out the decisions; None means the cache's executor.
        change: of the scheduler.
        end_ticket: ends a ticket in the scheduler, whose sequences `[n]` have lost bytes.
        count_loading: counts the prompts that are loading from the cache's prefix store.

    Attributes:
        open: the step whose `with` block has not ended.
        steps: takes the decisions; call `end_tickets` after its `poll` or `drain`.
    """

    def __init__(
        self,
        scheduler: LoopedScheduler,
        cache: Cache,
        executor: Executor | None,
        change: Change,
        end_ticket: Callable[[int, NDArray[np.uint64]], object],
        count_loading: Callable[[], int],
    ) -> None:
        self.open: LoopedStep | None = None
        self._scheduler = scheduler
        self._cache = cache
        self._runtime = runtime()
        self._change = change
        self._end_ticket = end_ticket
        self._count_loading = count_loading
        self.steps: StepLoop = cache._step_loop(executor)  # noqa: SLF001 (the cache's own, for its scheduler)
        self._idle = 0.0  # steps in a row that did nothing; one that waited for a load counts a quarter
        self._limit = RateLimit()

    def refuse(self, in_flight: LoopedStep) -> NoReturn:
        """Refuse a step while another is in flight."""
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

    def end(self, step: LoopedStep, *, failed: bool) -> None:
        """Complete landed transfers at the end of a step's `with` block; give up the step if the block raised."""
        if self.open is not step:
            return  # given up inside its block
        if failed or self._change.begun:
            self._scheduler.give_up()
            return
        self._change.begun = True
        self._take_in(step)
        self.open = None
        self._change.begun = False

    def _take_in(self, step: LoopedStep) -> None:
        """End finished tickets. Wait for this step's ticket if its computation depended on it."""
        self.steps.finish(step.decision.ticket)
        ended = self.end_tickets()
        while not (step.rows or ended) and self.steps:
            self._runtime.sleep(_IDLE_SECONDS)
            self.steps.poll()
            ended = self.end_tickets()
        prefixes = self._cache.prefix_store
        if step.rows or self.steps:
            self._idle = 0.0
            if prefixes is not None:
                prefixes.poll()
            return
        was_loading = self._scheduler.num_loading > 0  # when this step was decided
        has_others_load = prefixes is not None and self._wait_for_prefixes(prefixes)
        is_stuck = not has_others_load and not len(step.decision) and self._scheduler.num_unfinished > 0
        if is_stuck and self._scheduler.manager.stats().pinned_blocks["device"]:
            self._runtime.sleep(_IDLE_SECONDS)  # whoever pinned blocks ends the pin
            is_stuck = False
        if is_stuck and prefixes is not None:
            is_stuck = not prefixes._wait_for_copies()  # noqa: SLF001 (which hold blocks that a prompt may need)
        # Requests whose loads are interrupted, or that are aborted, may need several such steps; endless loads end.
        self._idle = self._idle + (0.25 if was_loading else 1.0) if is_stuck else 0.0

    def _wait_for_prefixes(self, prefixes: PrefixStore) -> bool:
        """Advance the prefix store, and wait for a load, as there is nothing else to do.

        Returns:
            Whether it waited for a load that no request waits for, such as an aborted request's: these hold blocks too.
        """
        prefixes.poll()
        if loading := self._count_loading():
            prefixes.wait(until=lambda: self._count_loading() < loading)
            return False
        loading = prefixes.num_open if self._scheduler.num_unfinished else 0
        if loading:
            prefixes.wait(until=lambda: prefixes.num_open < loading)
        return loading > 0

    def end_tickets(self) -> bool:
        """End tickets in the scheduler, and warn the user of errors. Returns whether there were any."""
        ended = self.steps.report()
        for end in ended:
            self._end_ticket(end.ticket, end.lost)
            for error in end.errors:
                if self._limit.passes(type(error).__name__):
                    fields = {"blocks": end.lost_blocks, "error": type(error).__name__}
                    _log.warning("%d blocks were lost in a transfer: %s", end.lost_blocks, error, extra=fields)
        return bool(ended)
