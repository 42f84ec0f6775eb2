"""What the peers' scripts share: the workloads' numbers, the prompts, the clock, the output."""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")

BLOCK_SIZE = 16
SEQUENCES = 256
PROMPT = 1024
STEPS = 512
LIVE = 16
POOLS = {"20k": 20_000, "4k": 4_000}
EVICTABLE = {"1k": 1_000, "10k": 10_000, "100k": 100_000}
CHAIN = 4
TAKEN = 250

GROUP = 50

GROUPED_SHAPES: dict[int, tuple[int | None, ...]] = {1: (None,), 2: (None, 128), 6: (None, *[1_024] * 5)}
"""Windows of the groups of W-prefix with groups, by their number; None is full attention."""
GROUPED_REQUESTS = 300
GROUPED_POOL = 60_000
"""Blocks, enough for all groups of all requests."""

# The costs of a figure's laps; their mean is the figure.
Figures = dict[str, list[float]]


def prompts() -> list[list[int]]:
    """W-prefix's prompts, from the file that the first argument names."""
    tokens: list[list[int]] = np.fromfile(sys.argv[1], "<u4").reshape(-1, 2048).tolist()
    return tokens


def grouped_prompts() -> list[list[int]]:
    """300 prompts of 2,048 tokens; 6 groups of 50 share their first 1,024 tokens."""
    rng = random.Random(1)
    prefixes = [[rng.randrange(32_000) for _ in range(1_024)] for _ in range(GROUPED_REQUESTS // GROUP)]
    order = [number % len(prefixes) for number in range(GROUPED_REQUESTS)]
    rng.shuffle(order)
    return [prefixes[group] + [rng.randrange(32_000) for _ in range(1_024)] for group in order]


def chains(evictable: int) -> Iterator[list[int]]:
    """Tokens of W-evict's chains, all different."""
    return ([number] * (CHAIN * BLOCK_SIZE) for number in range(evictable // CHAIN))


def shuffled(count: int) -> list[int]:
    """The order in which W-evict releases its chains."""
    order = list(range(count))
    random.Random(1).shuffle(order)
    return order


def cpu_ns(run: Callable[[], object]) -> int:
    """Thread-CPU time of one run."""
    start = time.thread_time_ns()
    run()
    return time.thread_time_ns() - start


def laps(items: Iterable[Item], run: Callable[[Item], object], units: float) -> list[float]:
    """Thread-CPU time of one run for each item, in nanoseconds a unit, of `units` units a run."""
    return [cpu_ns(lambda: run(item)) / units for item in items]  # noqa: B023


def groups(requests: Sequence[Item]) -> list[Sequence[Item]]:
    """W-prefix's requests, some at a time."""
    return [requests[first : first + GROUP] for first in range(0, len(requests), GROUP)]


def report(measure: Callable[[], Figures]) -> None:
    """Print the laps of each figure as one JSON object."""
    gc.disable()  # its walks would be charged to whoever allocates next
    print(json.dumps(measure()))
