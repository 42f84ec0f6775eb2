"""Plain steps that end requests: the state is that of single steps."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import Any

import numpy as np
import pytest

from blockyard import BlockManager, PrefixCaching
from blockyard.errors import InvalidArgumentError, StepOrderError
from blockyard.scheduler import Finished, Request, Scheduler

LENGTHS = (7, 4, 4)
SECONDS = 2.5
"""From the start of a step to its end, when the next one is decided."""


class Run:
    """Three requests past their prompts, of which the last two end first; one retains its blocks."""

    def __init__(self) -> None:
        caching = PrefixCaching(eviction="adaptive")
        self.manager = BlockManager(block_size=2, device_blocks=40, watermark=0.0, prefix_caching=caching)
        self.scheduler = Scheduler(self.manager, overlap_io=True)
        self.now = 10.0
        self.scheduler._clock = lambda: self.now
        self.ended: list[Finished] = []
        for number, length in enumerate(LENGTHS):
            hint = "turn" if number == 1 else None
            request = Request(f"{number}", [number, 9, 9], length, hint=hint, retain=9.0 * (number == 2))
            self.scheduler.add(request)
        self.one_step()

    def one_step(self) -> None:
        step = self.scheduler.schedule()
        self.scheduler.complete(step.decision.ticket)
        self.now += SECONDS
        self.ended += self.scheduler.update(step, [7] * step.samples)

    def one_by_one(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step()

    def at_once(self, steps: int) -> None:
        plain = self.scheduler.plain_steps()
        assert plain is not None
        times = [self.now + SECONDS * step for step in range(steps + 1)]
        done, step, ended = self.scheduler.schedule_plain(np.full((steps, len(plain.context)), 7), times)
        assert (done, step) == (steps, None)
        self.now = times[-1]
        self.ended += ended

    def seen(self) -> tuple[Any, ...]:
        """Return all that the next call could depend on."""
        self.manager.check()
        scheduler = self.scheduler
        ended = [(end.request.request_id, end.outputs, end.error) for end in self.ended]
        leases = scheduler._admission.retained._order
        pool, prefix = self.manager.pool(), self.manager.prefix
        cached = [prefix.lookup([number, 9, 9, *[7] * 8]).tokens for number in range(len(LENGTHS))]
        stats = (str(self.manager.stats()), scheduler.stats(), scheduler.num_unfinished)
        return ended, leases, pool.free_ids().tolist(), cached, stats


def both(*calls: Callable[[Run], None]) -> list[Run]:
    runs = [Run() for _ in calls]
    for run, call in zip(runs, calls, strict=True):
        call(run)
    return runs


def test_the_last_step_ends_requests_as_a_single_one_does():
    one, other = both(lambda run: run.one_by_one(3), lambda run: run.at_once(3))
    assert [end.request.request_id for end in one.ended] == ["1", "2"]
    assert one.seen() == other.seen()
    assert other.scheduler.plain_steps() is None  # it retains blocks until their time


def test_steps_before_the_last_end_nothing():
    one, other = both(lambda run: run.one_by_one(2), lambda run: run.at_once(2))
    assert one.ended == other.ended == []
    assert one.seen() == other.seen()


def test_steps_beyond_the_first_end_are_refused():
    run = Run()
    plain = run.scheduler.plain_steps()
    assert plain is not None
    assert plain.limit == 3
    before = run.seen()
    with pytest.raises(StepOrderError, match="only add a token to each sequence"):
        run.scheduler.schedule_plain(np.full((4, 3), 7), [1.0] * 5)
    for times, complaint in [
        ([], "token_ids have shape"),
        ([1.0] * 3, "token_ids have shape"),
        ([1.0, 2.0, nan, 3.0], "times"),
        ([1.0, 2.0, 3.0, nan], r"times\[-1\] is nan"),
        ([1.0, 2.0, 3.0, -1.0], r"times\[-1\] is -1.0"),
    ]:
        with pytest.raises(InvalidArgumentError, match=complaint):
            run.scheduler.schedule_plain(np.full((3, 3), 7), times)
    assert run.seen() == before
    run.at_once(3)
    assert len(run.ended) == 2
