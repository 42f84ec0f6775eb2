"""Serves one trace with many engines, and summarizes the times, rates and counters of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from blockyard.scheduler import PreemptionMode
from blockyard.tools.replay.engine import EngineOptions, StepTime, Times, replay_times
from blockyard.tools.replay.sweep import run_all
from blockyard.traces import TraceRequest

__all__ = ["QUANTILES", "Served", "modes_with", "serve_all"]

QUANTILES: Final = (0.5, 0.9, 0.99)


@dataclass(frozen=True, eq=False)
class Served:
    """How one engine served a trace.

    Attributes:
        options: options of the engine.
        times: times of its requests and steps.
    """

    options: EngineOptions
    times: Times

    @property
    def output_rate(self) -> float:
        """Generated tokens per second, from the start to the last token."""
        done = ~np.isnan(self.times.last_token)
        return float(self.times.output_tokens[done].sum() / self.times.seconds) if self.times.seconds else 0.0

    @property
    def preemptions(self) -> int:
        """Number of preemptions."""
        stats = self.times.scheduler
        return stats.preempted_swap_host + stats.preempted_swap_external + stats.preempted_recompute

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dictionary; times are in seconds."""
        times = self.times
        return {
            "engine": asdict(replace(self.options, hybrid=None)) | {"hybrid": self._hybrid()},
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
            "classes": [asdict(one) for one in times.classes],
        }

    def _hybrid(self) -> dict[str, Any] | None:
        hybrid = self.options.hybrid
        return None if hybrid is None else {"groups": list(map(str, hybrid.groups)), "block_bytes": hybrid.block_bytes}


def summary(values: NDArray[np.float64]) -> dict[str, float]:
    """Return the mean and quantiles of times; empty without any."""
    if not len(values):
        return {}
    quantiles = np.quantile(values, QUANTILES).tolist()
    names = [f"p{round(100 * share)}" for share in QUANTILES]
    return {"mean": float(values.mean())} | dict(zip(names, quantiles, strict=True))


def modes_with(host_blocks: int, modes: Sequence[PreemptionMode]) -> list[PreemptionMode]:
    """Return the preemption modes that differ; without a host nothing can be swapped, so one of them is enough."""
    if host_blocks:
        return list(modes)
    return ["auto" if modes[0] == "auto" else "recompute"]


def serve_all(
    requests: Sequence[TraceRequest],
    engines: Sequence[EngineOptions],
    step_time: StepTime,
    *,
    executor: Executor | None = None,
    show: Callable[[int], object] = bool,
) -> list[Served]:
    """Serve a trace with each of many engines.

    Args:
        requests: the trace.
        engines: options of each engine.
        step_time: predicts how long a step takes.
        executor: runs the replays; None for this thread.
        show: called with the number of engines that are done.

    Returns:
        One result per engine, in the same order.

    Raises:
        InvalidArgumentError: an option is out of range.
    """
    return run_all([partial(_serve, requests, options, step_time) for options in engines], executor, show)


def _serve(requests: Sequence[TraceRequest], options: EngineOptions, step_time: StepTime) -> Served:
    return Served(options, replay_times(requests, options, step_time))
