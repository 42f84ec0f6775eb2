"""Replays whose plain steps are decided one by one, compared with those decided at once."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from blockyard import Scheduler
from blockyard.scheduler.step import Step
from blockyard.tools.replay import engine
from blockyard.tools.replay.engine import EngineOptions, StepTime, Times, replay_times
from blockyard.traces import TraceRequest


class Seen:
    """What a step and the whole cache look like at the end of each step."""

    def __init__(self) -> None:
        self.at: dict[float, Any] = {}
        self.copied: list[tuple[object, ...]] = []
        self.contexts: list[list[int]] = []

    def step(self, start: float, end: float, step: Step, scheduler: Scheduler, stored: int) -> None:
        manager = scheduler.manager
        tables = [(manager.block_table(handle).tolist()) for handle in step.handles.tolist()]
        owners = [step.owner(row) for row in range(step.rows)]
        texts = [step.all_token_ids(row).tolist() for row in range(step.rows)]
        decision = (step.decision.to_bytes(), step.start.tolist(), step.token_ids.tolist())
        pools = [manager.pool(tier).free_ids().tolist() for tier in ("device", "host")]
        # A lease of cached blocks raises the number in use; the peak shows it only once another block is taken.
        stats = replace(manager.stats(), peak_blocks={})
        self.at[end] = (owners, tables, texts, decision, pools, str(stats), scheduler.stats(), stored)
        self.contexts.append([start + 1 for start in step.start[: step.decodes].tolist()])

    def plain_steps(self, start: float, end: float, contexts: NDArray[np.int64], scheduler: Scheduler) -> None:
        self.contexts += contexts.tolist()

    def idle(self, time: float, scheduler: Scheduler) -> None:
        """Nothing happens."""

    def copies(self, start: float, end: float, way: str, blocks: int) -> None:
        self.copied.append((start, end, way, blocks))


def check_against_steps_one_by_one(requests: list[TraceRequest], options: EngineOptions, step_time: StepTime) -> Times:
    """Assert that a replay is the same as one that decides each step by itself."""
    at_once, one_by_one = Seen(), Seen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_MAX_STEPS", 0)
        plain = replay_times(requests, options, step_time, watch=one_by_one)
    times = replay_times(requests, options, step_time, watch=at_once)
    unwatched = replay_times(requests, options, step_time)  # whose plain steps include those that end sequences
    for field in fields(Times):
        one, other, third = (getattr(each, field.name) for each in (plain, times, unwatched))
        np.testing.assert_equal(other, one, err_msg=field.name)
        np.testing.assert_equal(third, one, err_msg=field.name)
    assert at_once.copied == one_by_one.copied
    assert at_once.at == {end: one_by_one.at[end] for end in at_once.at}
    assert at_once.contexts == one_by_one.contexts
    return times
