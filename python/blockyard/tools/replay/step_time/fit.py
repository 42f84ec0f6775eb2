"""Least-squares fit of a step's time to a recorded run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError
from blockyard.tools.replay.engine import StepTime
from blockyard.tools.replay.step_time.run import EngineLimits, EngineRun
from blockyard.tools.replay.step_time.serve import ServedRun, serve

__all__ = ["Fit", "fit_run", "lower_bounds"]

_ROUNDS: Final = 30
_CLOSE: Final = 1e-3
"""Largest relative change of a predicted time at which the fit ends."""


_UNSURE: Final = 300
"""Condition above which a run does not tell the four numbers apart: 74, 97 and 221 for runs that did, 445 and 996 for
runs that did not (`benches/bench_step_time.py`)."""
_log = logging.getLogger("blockyard.tools.replay")


@dataclass(frozen=True)
class Fit:
    """Four numbers fitted to a run.

    Attributes:
        numbers: those of a `LinearStepTime`.
        condition: how much an error of the recorded times can grow in the numbers, at least 1.
        at_least: the lower bounds.
    """

    numbers: tuple[float, ...]
    condition: float
    at_least: tuple[float, ...]

    @property
    def remedy(self) -> str:
        """What to do about numbers that the run does not tell apart; empty if it does."""
        if self.condition <= _UNSURE:
            return ""
        bounded = "only their bounds hold" if any(self.at_least) else "give it lower bounds from the hardware"
        return f"{bounded}, or fit a run whose batches differ more"


def fit_run(
    run: EngineRun,
    limits: EngineLimits,
    make: Callable[..., StepTime],
    *,
    first: int | None = None,
    at_least: Sequence[float] = (0.0, 0.0, 0.0, 0.0),
) -> Fit:
    """Find the four numbers with which `serve` matches a run best; see `LinearStepTime.fit_requests`.

    Args:
        run: the recorded run.
        limits: limits that the engine ran with.
        make: makes a `StepTime` from the four numbers.
        first: fit the times of the first requests only.
        at_least: lower bounds of the four numbers.

    Raises:
        InvalidArgumentError: a bound is negative or not finite, or there are not four.
    """
    bounds = np.array(at_least, np.float64)
    if bounds.shape != (4,) or not (np.isfinite(bounds) & (bounds >= 0)).all():
        raise InvalidArgumentError(f"at_least is {tuple(at_least)}, must be four finite numbers of at least 0")
    known = slice(first)
    numbers = np.maximum(_guess(run), bounds)
    best, least, condition = numbers, np.inf, 1.0
    before = np.zeros(0)
    is_close = False
    for _ in range(_ROUNDS):
        served = serve(run, make(*numbers.tolist()), limits)
        work, seconds = _sums(run, served, known)
        if (error := _error(run, served, known)) < least:
            best, least, condition = numbers, error, _condition(work)
        if is_close:
            break
        found = bounds + _nonnegative_least_squares(work, seconds - work @ bounds)
        numbers = (numbers + found) / 2  # only half way: the steps depend on the numbers
        after = work @ numbers
        is_close = before.shape == after.shape and np.abs(after / np.maximum(before, 1e-12) - 1).max() < _CLOSE
        before = after
    # A preemption more or less changes all that follows, so rounds need not converge: the best one counts.
    fit = Fit(tuple(best.tolist()), condition, tuple(bounds.tolist()))
    if fit.remedy:
        _log.warning(
            "the run does not tell the four numbers apart (condition %d, above %d): %s",
            fit.condition,
            _UNSURE,
            fit.remedy,
        )
    return fit


def lower_bounds(weights: int, token_bytes: float, bandwidth: float) -> tuple[float, float, float, float]:
    """Return the least a step can take: it reads the weights, and the keys and values of the cached tokens.

    Args:
        weights: bytes of the weights that a step with one token reads.
        token_bytes: bytes of the keys and values of a token, all layers.
        bandwidth: bytes per second of the memories of all accelerators together.

    Raises:
        InvalidArgumentError: a number is out of range.
    """
    if weights < 0 or token_bytes < 0 or not bandwidth > 0:
        raise InvalidArgumentError(
            f"weights is {weights}, token_bytes {token_bytes}, bandwidth {bandwidth}; must be at least 0, 0, above 0"
        )
    return weights / bandwidth, 0.0, 0.0, token_bytes / bandwidth


def _error(run: EngineRun, served: ServedRun, known: slice) -> float:
    """Return the sum of the squared errors of the times to first and to last token, each relative to its mean."""
    recorded, found = run.part(known), served.run.part(known)
    error = 0.0
    for name in ("ttft", "latency"):
        before = getattr(recorded, name)
        error += float(np.square((getattr(found, name) - before) / max(before.mean(), 1e-12)).sum())
    return error


def _condition(work: NDArray[np.float64]) -> float:
    """Return the condition of the work, each column scaled to length 1; columns of zeros aside."""
    sizes = np.linalg.norm(work, axis=0)
    return float(np.linalg.cond(work[:, sizes > 0] / sizes[sizes > 0])) if sizes.any() else 1.0


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
