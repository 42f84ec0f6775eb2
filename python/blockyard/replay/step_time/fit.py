"""Least-squares fit of a step's time to a recorded run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard.replay.engine import StepTime
from blockyard.replay.step_time.run import EngineLimits, EngineRun
from blockyard.replay.step_time.serve import ServedRun, serve

__all__ = ["fit_run"]

_ROUNDS: Final = 30
_CLOSE: Final = 1e-3
"""Largest relative change of a predicted time at which the fit ends."""


def fit_run(
    run: EngineRun, limits: EngineLimits, make: Callable[..., StepTime], *, first: int | None = None
) -> tuple[float, ...]:
    """Find the four numbers with which `serve` matches a run best; see `LinearStepTime.fit_requests`.

    Args:
        run: the recorded run.
        limits: limits that the engine ran with.
        make: makes a `StepTime` from the four numbers.
        first: fit the times of the first requests only.
    """
    known = slice(first)
    numbers = _guess(run)
    before = np.zeros(0)
    for _ in range(_ROUNDS):
        served = serve(run, make(*numbers), limits)
        work, seconds = _sums(run, served, known)
        found = _nonnegative_least_squares(work, seconds)
        numbers = tuple(((np.array(numbers) + found) / 2).tolist())  # only half way: the steps depend on the numbers
        after = work @ np.array(numbers)
        if before.shape == after.shape and np.abs(after / np.maximum(before, 1e-12) - 1).max() < _CLOSE:
            break
        before = after
    return numbers


def _guess(run: EngineRun) -> tuple[float, ...]:
    """Guess from the median time between tokens, and the shortest time to first token per prompt token."""
    prompt = float(np.min((run.first_token - run.scheduled) / run.input_tokens))
    return float(np.median(run.tpot)) / 2, prompt / 2, 0.0, 0.0


def _sums(run: EngineRun, served: ServedRun, known: slice) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the work of each request's steps, `[2n, 4]`, and their time: to the first token, and after it."""
    total = np.vstack((np.zeros(4), np.cumsum(served.work, axis=0)))
    first, token, last = served.first_step[known], served.token_step[known] + 1, served.last_step[known] + 1
    seconds = np.concatenate(((run.first_token - run.scheduled)[known], (run.last_token - run.first_token)[known]))
    work = np.vstack((total[token] - total[first], total[last] - total[token]))
    some = seconds > 0
    return work[some], seconds[some]


def _nonnegative_least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve for non-negative numbers, by trying every set of non-zero ones."""
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1
    matrix = matrix / scale
    products, wanted = matrix.T @ matrix, matrix.T @ target
    best, best_error = np.zeros(len(scale)), 0.0
    for count in range(1, len(scale) + 1):
        for chosen in map(list, combinations(range(len(scale)), count)):
            part = np.linalg.lstsq(products[np.ix_(chosen, chosen)], wanted[chosen], rcond=None)[0]
            error = -float(part @ wanted[chosen])  # squared residual minus that of all zeros
            if (part >= 0).all() and error < best_error:
                best, best_error = np.zeros(len(scale)), error
                best[chosen] = part
    found: NDArray[np.float64] = best / scale
    return found
