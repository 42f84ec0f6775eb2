"""Many engines over one trace: the times, rates and counters of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from blockyard.replay.engine import EngineOptions, StepTime, Times, replay_times
from blockyard.replay.sweep import run_all
from blockyard.traces import TraceRequest

__all__ = ["QUANTILES", "Served", "serve_all"]

QUANTILES: Final = (0.5, 0.9, 0.99)


@dataclass(frozen=True, eq=False)
class Served:
    """How one engine served a trace.

    Attributes:
        options: the engine.
        times: what happened when.
    """

    options: EngineOptions
    times: Times

    @property
    def output_rate(self) -> float:
        """Generated tokens for each second from the first arrival to the last token."""
        done = ~np.isnan(self.times.last_token)
        return float(self.times.output_tokens[done].sum() / self.times.seconds) if self.times.seconds else 0.0

    @property
    def preemptions(self) -> int:
        """How often a request was preempted."""
        stats = self.times.scheduler
        return stats.preempted_swap_host + stats.preempted_swap_external + stats.preempted_recompute

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it; times in seconds."""
        times = self.times
        return {
            "engine": asdict(self.options),
            "requests": len(times.latency),
            "refused": times.refused,
            "seconds": times.seconds,
            "steps": times.steps,
            "busy_seconds": times.busy_seconds,
            "output_tokens_per_second": self.output_rate,
            "hit_rate": times.hit_rate,
            "loaded_blocks": times.loaded_blocks,
            "preemptions": self.preemptions,
            "ttft": summary(times.ttft),
            "tpot": summary(times.tpot),
            "latency": summary(times.latency),
        }


def summary(values: NDArray[np.float64]) -> dict[str, float]:
    """Return mean and quantiles of times; empty for none."""
    if not len(values):
        return {}
    quantiles = np.quantile(values, QUANTILES).tolist()
    names = [f"p{round(100 * share)}" for share in QUANTILES]
    return {"mean": float(values.mean())} | dict(zip(names, quantiles, strict=True))


def serve_all(
    requests: Sequence[TraceRequest],
    engines: Sequence[EngineOptions],
    step_time: StepTime,
    *,
    executor: Executor | None = None,
    show: Callable[[int], object] = bool,
) -> list[Served]:
    """Serve a trace by many engines, each alone.

    Args:
        requests: the trace.
        engines: of each replay.
        step_time: how long their steps take.
        executor: runs the replays; this thread if None.
        show: called with the number of engines that are done.

    Returns:
        One for each engine, in their order.

    Raises:
        InvalidArgumentError: an option is out of range.
    """
    return run_all([partial(_serve, requests, options, step_time) for options in engines], executor, show)


def _serve(requests: Sequence[TraceRequest], options: EngineOptions, step_time: StepTime) -> Served:
    return Served(options, replay_times(requests, options, step_time))
