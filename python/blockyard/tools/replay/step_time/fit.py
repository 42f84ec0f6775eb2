"""Least-squares fit of a step's time to a recorded run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError
from blockyard.tools.replay.engine import StepTime
from blockyard.tools.replay.step_time.run import EngineLimits, EngineRun
from blockyard.tools.replay.step_time.serve import ServedRun, serve

__all__ = ["LONG_STEP", "Fit", "errors_text", "fit_run", "lower_bounds"]

_ROUNDS: Final = 30
_CLOSE: Final = 1e-3
"""Largest relative change of a predicted time at which the fit ends."""


_UNSURE: Final = 300
"""Condition above which a run does not tell the four numbers apart: 74, 97 and 221 for runs that did, 445 and 996 for
runs that did not (`benches/bench_step_time.py`)."""
_FAR: Final = 0.05
"""Error of a mean time above which the four numbers do not explain the run: at most .003 for the two real runs."""
_SINGLY_FAR: Final = 0.1
"""The same for the mean error of single requests: at most .007 there, .145 or more if times are of other requests."""
_UNSEEN: Final = 0.01
"""Share of every step up to which a number is 0: a run does not tell so little from nothing."""
LONG_STEP: Final = 1.0
"""Seconds of a step above which the times of the run are probably in another unit."""
_MEASURED: Final = {"ttft": "first token", "tpot": "time per token", "latency": "end to end"}
_TAKE_TIME: Final = {0: "a step", 1: "a prompt token", 3: "a cached token"}
"""The numbers that are above 0 in an engine, by their place; the reads of the weights can hide a decoding sequence."""
_log = logging.getLogger("blockyard.tools.replay")


@dataclass(frozen=True)
class Fit:
    """Four numbers fitted to a run.

    Attributes:
        numbers: those of a `LinearStepTime`.
        condition: how much an error of the recorded times can grow in the numbers, at least 1.
        at_least: the lower bounds.
        errors: relative errors of the predicted mean `"ttft"`, `"tpot"` and `"latency"` of the fitted requests.
        single_errors: mean errors of single requests, relative to the mean time.
    """

    numbers: tuple[float, ...]
    condition: float
    at_least: tuple[float, ...]
    errors: Mapping[str, float]
    single_errors: Mapping[str, float]

    @property
    def doubts(self) -> list[str]:
        """Reasons not to trust the numbers, each with what to do about it."""
        found = []
        if self.numbers[0] > LONG_STEP:
            found.append(f"a step takes {self.numbers[0]:.3g} s: are the times of the run in seconds?")
        far = any(abs(error) > _FAR for error in self.errors.values())
        if far or max(self.single_errors.values()) > _SINGLY_FAR:
            found.append(
                f"the fit does not explain the run: it predicts {errors_text(self.errors)}, and single requests "
                f"{errors_text(self.single_errors)}. Check the run's number of blocks (--fit-blocks), its limits, and "
                "that each line has the times of its own request"
            )
        if zeros := [name for place, name in _TAKE_TIME.items() if not self.numbers[place]]:
            found.append(
                f"{' and '.join(zeros)} would take no time, which no engine reaches: do not use these numbers for "
                "other loads than that of the run"
            )
        if self.condition > _UNSURE:
            bounded = (
                "The lower bounds stand for what the run leaves open"
                if any(self.at_least)
                else "Give lower bounds from the hardware (at_least, or --device-bandwidth with --model-config)"
            )
            found.append(
                f"the run does not tell the four numbers apart (condition {self.condition:.3g}, above {_UNSURE}). "
                f"{bounded}; a run whose batch sizes and prompt lengths vary more tells them apart"
            )
        return found


def errors_text(errors: Mapping[str, float]) -> str:
    """Return errors in words: `first token within 0.1 %, time per token within ...`."""
    found = []
    for name, error in errors.items():
        share = 100 * abs(error)
        found.append(f"{_MEASURED[name]} within {share:.{0 if share >= 100 else 1}f} %")
    return ", ".join(found)


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
    best, least, condition, explained, steps = numbers, np.inf, 1.0, run, np.ones((1, 4))
    before = np.zeros(0)
    is_close = False
    for _ in range(_ROUNDS):
        served = serve(run, make(*numbers.tolist()), limits)
        work, seconds = _sums(run, served, known)
        if (error := _error(run, served, known)) < least:
            best, least, condition, explained, steps = numbers, error, _condition(work), served.run, served.work
        if is_close:
            break
        found = bounds + _nonnegative_least_squares(work, seconds - work @ bounds)
        numbers = (numbers + found) / 2  # only half way: the steps depend on the numbers
        after = work @ numbers
        is_close = before.shape == after.shape and np.abs(after / np.maximum(before, 1e-12) - 1).max() < _CLOSE
        before = after
    # A preemption more or less changes all that follows, so rounds need not converge: the best one counts.
    errors, single = _errors(run.part(known), explained.part(known))
    best = np.where(_unseen(best, steps), bounds, best)
    fit = Fit(tuple(best.tolist()), condition, tuple(bounds.tolist()), errors, single)
    for doubt in fit.doubts:
        _log.warning("the fit is doubtful: %s", doubt)
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


def _errors(recorded: EngineRun, found: EngineRun) -> tuple[dict[str, float], dict[str, float]]:
    """Return the errors of the mean times, and the mean errors of single requests, both relative to the mean."""
    means, single = {}, {}
    for name in _MEASURED:
        before, after = getattr(recorded, name), getattr(found, name)
        mean = max(float(before.mean()), 1e-12) if len(before) else 1.0
        means[name] = float((after - before).sum()) / max(len(before), 1) / mean
        single[name] = float(np.abs(after - before).sum()) / max(len(before), 1) / mean
    return means, single


def _error(run: EngineRun, served: ServedRun, known: slice) -> float:
    """Return the sum of the squared errors of the times to first and to last token, each relative to its mean."""
    recorded, found = run.part(known), served.run.part(known)
    error = 0.0
    for name in ("ttft", "latency"):
        before = getattr(recorded, name)
        error += float(np.square((getattr(found, name) - before) / max(before.mean(), 1e-12)).sum())
    return error


def _unseen(numbers: NDArray[np.float64], work: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which numbers add so little to every step that the run does not show it, bool `[4]`."""
    parts = numbers * work
    found: NDArray[np.bool_] = (parts <= _UNSEEN * parts.sum(axis=1, keepdims=True)).all(axis=0)
    return found


def _condition(work: NDArray[np.float64]) -> float:
    """Return the condition of the work, each column scaled to length 1; columns of zeros aside."""
    sizes = np.linalg.norm(work, axis=0)
    return float(np.linalg.cond(work[:, sizes > 0] / sizes[sizes > 0])) if sizes.any() else 1.0


def _guess(run: EngineRun) -> tuple[float, ...]:
    """Guess from the median time between tokens, and the shortest time to first token per prompt token."""
    prompt = float(np.min((run.first_token - run.scheduled) / run.input_tokens))
    times = run.tpot if len(run.tpot) else run.first_token - run.scheduled  # answers of one token each
    return float(np.median(times)) / 2, prompt / 2, 0.0, 0.0


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
