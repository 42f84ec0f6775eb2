"""Serves a run's requests in virtual time: the real scheduler decides each step, a `StepTime` how long it takes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockyard import BlockManager
from blockyard.replay.step_time.base import StepTime
from blockyard.replay.step_time.run import EngineLimits, EngineRun, check_limits
from blockyard.scheduler import Request, Scheduler, Step

__all__ = ["Served", "serve"]


@dataclass(frozen=True, eq=False)
class Served:
    """Predicted times, and the steps behind them.

    Attributes:
        run: the requests, with predicted times.
        work: what each step computed, `[steps, 4]`: 1, prompt tokens, decoding rows, cached tokens read.
        first_step: step in flight or next when each request was scheduled, `[requests]`.
        token_step: step that gave its first token.
        last_step: step that gave its last token.
    """

    run: EngineRun
    work: NDArray[np.float64]
    first_step: NDArray[np.int64]
    token_step: NDArray[np.int64]
    last_step: NDArray[np.int64]


def serve(run: EngineRun, step_time: StepTime, limits: EngineLimits) -> Served:
    """Predict the times of a run from its arrivals and lengths.

    Args:
        run: the requests; only their arrivals and lengths are read.
        step_time: predicts each step.
        limits: limits of the engine.

    Raises:
        OutOfBlocksError: a request does not fit into the cache.
        InvalidArgumentError: a limit is not positive.
    """
    return _Engine(run, step_time, limits).serve()


class _Engine:
    """The state of one call of `serve`."""

    def __init__(self, run: EngineRun, step_time: StepTime, limits: EngineLimits) -> None:
        check_limits(limits)
        self._arrival, self._inputs = run.arrival.tolist(), run.input_tokens.tolist()
        self._outputs = run.output_tokens.tolist()
        self._run, self._step_time, self._limits = run, step_time, limits
        manager = BlockManager(block_size=limits.block_size, device_blocks=limits.num_blocks, watermark=0.0)
        self._scheduler = Scheduler(
            manager,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            preemption_mode="recompute",
        )
        count = len(run)
        self._times = np.zeros((4, count))  # queued, scheduled, first token, last token
        self._steps = np.full((3, count), -1)
        self._work: list[tuple[float, ...]] = []
        self._prompt = np.zeros(max(self._inputs), np.uint32)
        self._arrived = 0
        self._waiting: deque[int] = deque()
        self._seats = 0  # in use, as the scheduler of the engine sees it
        self._ended = 0  # requests that ended in the step in flight

    def serve(self) -> Served:
        schedule_at = free_at = self._arrival[0]  # when the next step is decided, and when it can start
        while True:
            self._take_in(schedule_at)
            if not self._scheduler.num_unfinished:
                self._seats = self._ended = 0
                if self._waiting:
                    schedule_at = free_at
                elif self._arrived < len(self._run):
                    schedule_at = free_at = max(free_at, self._arrival[self._arrived])
                else:
                    break
                continue
            start = max(schedule_at, free_at)
            free_at = self._compute(schedule_at, start)
            schedule_at = start if self._limits.async_scheduling else free_at
        run = self._run
        found = EngineRun(run.input_tokens, run.output_tokens, run.arrival, *self._times)
        return Served(found, np.array(self._work), *self._steps)

    def _take_in(self, now: float) -> None:
        """Queue what has arrived, and hand over what has a seat as the engine sees it."""
        while self._arrived < len(self._run) and self._arrival[self._arrived] <= now:
            self._times[0, self._arrived] = now
            self._waiting.append(self._arrived)
            self._arrived += 1
        while self._waiting and self._seats < self._limits.max_num_seqs:
            index = self._waiting.popleft()
            request = Request(str(index), self._prompt[: self._inputs[index]], max_tokens=self._outputs[index])
            self._scheduler.add(request)
            self._seats += 1

    def _compute(self, scheduled: float, start: float) -> float:
        """Run one step; return when it ends."""
        scheduler = self._scheduler
        step = scheduler.schedule()
        context = step.start[: step.decodes] + 1
        prefill = list(zip(step.start[step.decodes :].tolist(), step.lengths[step.decodes :].tolist(), strict=True))
        end = start + self._step_time.seconds(prefill, context)
        number = len(self._work)
        read = int(context.sum()) + sum(cached for cached, _ in prefill)
        self._work.append((1, sum(computed for _, computed in prefill), step.decodes, read))
        self._note_prompts(step, number, scheduled, start, end)
        scheduler.complete(step.decision.ticket)
        finished = scheduler.update(step, np.zeros(step.num_draws, np.uint32))
        for ended in finished:
            index = int(ended.request.request_id)
            self._times[3, index], self._steps[2, index] = end, number
        if self._limits.async_scheduling:  # the next step is decided before this one's ends are known
            self._seats, self._ended = self._seats - self._ended, len(finished)
        else:
            self._seats -= len(finished)
        return end

    def _note_prompts(self, step: Step, number: int, scheduled: float, start: float, end: float) -> None:
        for row in range(step.decodes, step.rows):
            index = int(step.owner(row)[0])
            if self._steps[0, index] < 0:
                self._times[1, index] = scheduled
                self._steps[0, index] = number - (scheduled < start)
            if row < step.samples and self._steps[1, index] < 0:
                self._times[2, index], self._steps[1, index] = end, number
