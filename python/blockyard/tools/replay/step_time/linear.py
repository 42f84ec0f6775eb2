"""`LinearStepTime`: a linear model of a step's time, with given coefficients or fitted to a recorded run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockyard.tools.replay.step_time.fit import fit_run
from blockyard.tools.replay.step_time.run import EngineLimits, EngineRun

__all__ = ["LinearStepTime"]


@dataclass(frozen=True)
class LinearStepTime:
    """A step's time as a sum: `fixed`, and a time for each token and row.

    Attributes:
        fixed: seconds of an empty step.
        prefill_token: seconds per prompt token that the step computes.
        decode_row: seconds per decoding row.
        context_token: seconds per cached token that attention reads: the contexts of all decoding rows, and the tokens
            before each prompt chunk.

    Example:
        >>> import numpy as np
        >>> from blockyard.tools.replay.step_time import LinearStepTime
        >>> step_time = LinearStepTime(fixed=0.010, prefill_token=40e-6, decode_row=20e-6, context_token=90e-9)
        >>> round(step_time.seconds([(0, 512)], np.array([1000, 2000])), 5)
        0.03079
    """

    fixed: float
    prefill_token: float
    decode_row: float
    context_token: float

    def __str__(self) -> str:
        return (
            f"{_digits(self.fixed * 1e3)} ms a step, {_digits(self.prefill_token * 1e6)} us a prompt token, "
            f"{_digits(self.decode_row * 1e6)} us a decoding sequence, "
            f"{_digits(self.context_token * 1e9)} ns a cached token"
        )

    def seconds(self, prefill: Sequence[tuple[int, int]], decode_context: NDArray[np.int64]) -> float:
        """Return the seconds of one step; see `StepTime`."""
        tokens, context = 0, int(decode_context.sum())
        for cached, computed in prefill:
            tokens += computed
            context += cached
        return (
            self.fixed
            + self.prefill_token * tokens
            + self.decode_row * len(decode_context)
            + self.context_token * context
        )

    def decode_seconds(self, decode_context: NDArray[np.int64]) -> Iterator[float]:
        """Yield the seconds of steps of plain decoding; see `StepTime`."""
        rows, context = len(decode_context), int(decode_context.sum())
        step = self.fixed + self.decode_row * rows
        while True:
            yield step + self.context_token * context
            context += rows

    @classmethod
    def fit_requests(
        cls,
        path: str | Path,
        limits: EngineLimits,
        *,
        first: int | None = None,
        at_least: Sequence[float] = (0.0, 0.0, 0.0, 0.0),
    ) -> LinearStepTime:
        """Fit the four numbers to a run of an engine.

        Replays the run with the real scheduler to find each request's steps, then finds the numbers whose sums over
        these steps match the recorded times best, by least squares. Repeats both until the numbers no longer change.

        Args:
            path: `requests.jsonl` of the run; see `EngineRun.read`.
            limits: limits that the engine ran with.
            first: fit the times of the first requests only; all are replayed.
            at_least: lower bounds of the four numbers, such as `fit.lower_bounds` of the hardware. In a run whose cache
                was always full, the number of rows hardly changes, and several fits match equally well. A warning in
                the log says so, and also if the fit does not explain the run.

        Raises:
            TraceError: the file cannot be read or a line is malformed.
            OutOfBlocksError: a request does not fit into the cache that `limits` describes.
            InvalidArgumentError: a bound is out of range.
        """
        return cls(*fit_run(EngineRun.read(path), limits, cls, first=first, at_least=at_least).numbers)


def _digits(value: float) -> str:
    """Return a number with four significant digits, or as a whole number."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
