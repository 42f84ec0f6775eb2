"""The cost of a reference scheduler step, by part: thread-CPU time, lowest mean of windows of steps.

    python benches/bench_scheduler.py [--steps N] [--prefix-caching | --no-prefix-caching]

Prompts of 512 random tokens, blocks of 16; drawing tokens is not counted. *decode*: every sequence runs to the end.
*turnover*: 1 % of the sequences end in each step, and as many prompts start. *waiting*: 50,000 requests wait.
Prints a table; with BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass

import numpy as np
from figures import keep

from blockyard import BlockManager
from blockyard.scheduler import Request, Scheduler

BLOCK_SIZE = 16
PROMPT = 512
LONGEST = 1024
VOCABULARY = 32_000
STOP = 2
LIFE = 100
"""Steps of a sequence where 1 % of them end in each step."""
WINDOW = 50
WARM_UP = 40
WAITING = 50_000
TURNS = 4


@dataclass
class Parts:
    """Microseconds per step: the lowest mean of a window, by part, and the mean and maximum of all steps."""

    schedule: float
    complete: float
    update: float
    mean: float
    largest: float

    @property
    def total(self) -> float:
        """The lowest mean of a window."""
        return self.schedule + self.complete + self.update


class Load:
    """A scheduler with `running` sequences.

    Args:
        running: number of running sequences.
        waiting: number of requests that wait behind them.
        turnover: whether 1 % of the sequences end in each step, and as many start.
        prefix_caching: whether manager and scheduler cache prefixes.

    Attributes:
        manager: the manager of its blocks.
    """

    def __init__(self, running: int, *, waiting: int = 0, turnover: bool = False, prefix_caching: bool = True) -> None:
        self._rng = np.random.default_rng(0)
        self._life = LIFE if turnover else LONGEST
        blocks = running * ((PROMPT + LONGEST) // BLOCK_SIZE + 2) + 200
        self.manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=blocks, prefix_caching=prefix_caching)
        budget = 8192 if running < 2000 else 16384
        self._scheduler = Scheduler(self.manager, max_num_seqs=running, max_num_batched_tokens=budget)
        self._added = 0
        for i in range(running):
            self._add(max(2, LIFE * (i + 1) // running) if turnover else LONGEST)
        while self._scheduler.num_running < running and self._added < 2 * running:
            self._step(again=turnover)
        for _ in range(waiting):
            self._add(self._life)
        for _ in range(WARM_UP):
            self._step(again=turnover and not waiting)
        self._again = turnover and not waiting

    def measure(self, steps: int) -> Parts:
        """Run `steps` steps."""
        gc.collect()
        times = np.array([self._step(again=self._again) for _ in range(steps)]) / 1e3
        total = times.sum(axis=1)
        windows = times[: steps // WINDOW * WINDOW].reshape(-1, WINDOW, 3).mean(axis=1)
        best = windows[windows.sum(axis=1).argmin()]
        return Parts(*best.tolist(), mean=float(total.mean()), largest=float(total.max()))

    def _add(self, max_tokens: int) -> None:
        self._added += 1
        prompt = self._rng.integers(0, VOCABULARY, PROMPT, dtype=np.uint32)
        self._scheduler.add(Request(str(self._added), prompt, max_tokens, stop_token_ids=frozenset((STOP,))))

    def _step(self, *, again: bool) -> tuple[int, int, int]:
        """Run a step, and add a request for each that ended. Returns nanoseconds of schedule, complete and update."""
        scheduler, clock = self._scheduler, time.thread_time_ns
        start = clock()
        step = scheduler.schedule()
        scheduled = clock()
        tokens = self._rng.integers(3, VOCABULARY, step.num_draws)
        drawn = clock()
        scheduler.complete(step.decision.ticket)
        completed = clock()
        finished = scheduler.update(step, tokens)
        updated = clock()
        for _ in finished if again else ():
            self._add(self._life)
        return scheduled - start, completed - drawn, updated - completed


def show(name: str, parts: Parts) -> None:
    """Print one load's row."""
    columns = (parts.total, parts.schedule, parts.complete, parts.update, parts.mean, parts.largest)
    print(f"{name:24}" + "".join(f"{value:10.1f}" for value in columns), flush=True)


def main() -> None:
    """Measure, print, and add to BENCH_JSON."""
    gc.disable()  # its walks would count against the next allocation
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="steps to measure of each load, at least 50")
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    found: dict[str, float] = {}
    print(f"{'us a step':24}{'total':>10}{'schedule':>10}{'complete':>10}{'update':>10}{'mean':>10}{'largest':>10}")
    for running in (256, 2000):
        for name, turnover in ((f"scheduler_{running}", False), (f"scheduler_{running}_turnover", True)):
            parts = Load(running, turnover=turnover, prefix_caching=options.prefix_caching).measure(options.steps)
            show(name, parts)
            found[f"{name}_us"] = parts.total
    # In turns, so that other work on the machine affects both.
    loads = [Load(256, waiting=waiting, prefix_caching=options.prefix_caching) for waiting in (0, WAITING)]
    turns = [[load.measure(max(WINDOW, options.steps // TURNS)) for load in loads] for _ in range(TURNS)]
    alone, crowded = (min(parts, key=lambda part: part.total) for parts in zip(*turns, strict=True))
    show("scheduler_256 waiting", crowded)
    found["scheduler_waiting_ratio"] = crowded.total / alone.total
    print(f"{'waiting over none':24}{found['scheduler_waiting_ratio']:10.2f}")
    if options.prefix_caching:
        keep(found)


if __name__ == "__main__":
    main()
