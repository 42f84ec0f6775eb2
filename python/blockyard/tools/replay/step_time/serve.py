"""Serves a run's requests in virtual time: the real scheduler decides the steps, a `StepTime` predicts their times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import OutOfBlocksError
from blockyard.scheduler import Scheduler, Step
from blockyard.tools.replay.engine import EngineOptions, StepTime, replay_times
from blockyard.tools.replay.step_time.run import EngineLimits, EngineRun, check_limits
from blockyard.traces import TraceRequest

__all__ = ["ServedRun", "serve"]


@dataclass(frozen=True, eq=False)
class ServedRun:
    """Predicted times, and the steps behind them.

    Attributes:
        run: the requests, with predicted times.
        work: work of each step, `[steps, 4]`: 1, prompt tokens, decoding rows, cached tokens read.
        first_step: for each request, the step in flight when it was scheduled, or else the next one, `[requests]`.
        token_step: the step that sampled its first token, `[requests]`.
        last_step: the step that sampled its last token, `[requests]`.
    """

    run: EngineRun
    work: NDArray[np.float64]
    first_step: NDArray[np.int64]
    token_step: NDArray[np.int64]
    last_step: NDArray[np.int64]


def serve(run: EngineRun, step_time: StepTime, limits: EngineLimits) -> ServedRun:
    """Predict the times of a run from its arrivals and lengths.

    Args:
        run: the requests; only their arrivals and lengths are read.
        step_time: predicts each step.
        limits: limits of the engine.

    Raises:
        OutOfBlocksError: a request does not fit into the cache.
        InvalidArgumentError: a limit is not positive.
    """
    check_limits(limits)
    requests = [
        TraceRequest(*row)
        for row in zip(run.arrival.tolist(), run.input_tokens.tolist(), run.output_tokens.tolist(), strict=True)
    ]
    options = EngineOptions(
        device_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        preemption_mode="recompute",
        prefix_caching=False,
        watermark=0.0,
        async_scheduling=limits.async_scheduling,
    )
    log = _Log(step_time)
    times = replay_times(requests, options, step_time, watch=log)
    if times.refused:
        index = int(np.isnan(times.last_token).argmax())
        tokens = int(run.input_tokens[index] + run.output_tokens[index])
        wanted, total = -(-tokens // limits.block_size), limits.num_blocks
        message = f"request {index} needs {wanted} blocks, the cache has {total}"
        raise OutOfBlocksError(message, "device", wanted, total, total)
    found = EngineRun(
        run.input_tokens,
        run.output_tokens,
        run.arrival,
        times.queued,
        times.scheduled,
        times.first_token,
        times.last_token,
    )
    return ServedRun(
        found,
        np.array(log.work, np.float64),
        np.searchsorted(log.starts, times.scheduled),
        np.searchsorted(log.ends, times.first_token),
        np.searchsorted(log.ends, times.last_token),
    )


class _Log:
    """Records the work and times of the steps of a replay.

    Attributes:
        work: work of each step, as in `ServedRun`.
        starts: when each step began.
        ends: when each step ended.
    """

    def __init__(self, step_time: StepTime) -> None:
        self.work: list[tuple[int, int, int, int]] = []
        self.starts: list[float] = []
        self.ends: list[float] = []
        self._step_time = step_time

    def step(self, start: float, end: float, step: Step, scheduler: Scheduler, stored: int) -> None:  # noqa: ARG002
        """Record a step."""
        decodes = step.decodes
        prefill = zip(step.start[decodes:].tolist(), step.lengths[decodes:].tolist(), strict=True)
        self._add(start, list(prefill), step.start[:decodes] + 1)

    def plain_steps(self, start: float, end: float, contexts: NDArray[np.int64], scheduler: Scheduler) -> None:  # noqa: ARG002
        """Record steps of plain decoding."""
        for context in contexts:
            start = self._add(start, [], context)

    def _add(self, start: float, prefill: list[tuple[int, int]], context: NDArray[np.int64]) -> float:
        """Record a step; return when it ends."""
        read = int(context.sum()) + sum(cached for cached, _ in prefill)
        self.work.append((1, sum(computed for _, computed in prefill), len(context), read))
        self.starts.append(start)
        self.ends.append(start + self._step_time.seconds(prefill, context))
        return self.ends[-1]

    def idle(self, time: float, scheduler: Scheduler) -> None:
        """Do nothing: only steps count."""

    def copies(self, start: float, end: float, way: str, blocks: int) -> None:
        """Do nothing: without a host, nothing is copied."""
