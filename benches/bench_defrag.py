"""Defragmentation beside an allocator that gives out ids first in, first out: moves, gap, runs, and time per step.

    python benches/bench_defrag.py

prints a table; with BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE. W-defrag: 256 sequences
run and append a token a step; in each step 8 end and 8 of 64 blocks start.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from typing import NamedTuple

import numpy as np
from figures import keep
from numpy.typing import NDArray

from blockyard import BlockObserver

Ids = NDArray[np.int64]

RUNNING = 256
STARTS = 8
PROMPT_BLOCKS = 64
BLOCK_SIZE = 16
THRESHOLD = 64
MARGIN = 16


class Step(NamedTuple):
    """What the allocator reports of a step."""

    freed: Ids
    new: Ids
    tables: list[list[int]] | None


class Churn:
    """W-defrag's allocator and scheduler: ids first in, first out; any 8 of the running sequences end."""

    def __init__(self, blocks: int, *, starts: int = STARTS, seed: int = 1) -> None:
        self._rng = random.Random(seed)
        self._free = deque(range(1, blocks))
        self._starts = starts
        self._tables: list[list[int]] = []
        self._tokens: list[int] = []

    def step(self, *, tables: bool = False) -> Step:
        """End, append, start; the blocks of those that start come first."""
        freed: list[int] = []
        new: list[int] = []
        appended: list[int] = []
        if len(self._tables) + self._starts > RUNNING:
            for _ in range(self._starts):
                i = self._rng.randrange(len(self._tables))
                freed += self._tables[i]
                self._tables[i], self._tokens[i] = self._tables[-1], self._tokens[-1]
                self._tables.pop()
                self._tokens.pop()
        self._free.extend(freed)
        for table, at in zip(self._tables, range(len(self._tokens)), strict=True):
            self._tokens[at] += 1
            if self._tokens[at] > len(table) * BLOCK_SIZE:
                table.append(self._free.popleft())
                appended.append(table[-1])
        for _ in range(self._starts):
            self._tables.append([self._free.popleft() for _ in range(PROMPT_BLOCKS)])
            self._tokens.append(
                self._rng.randrange(PROMPT_BLOCKS * BLOCK_SIZE - BLOCK_SIZE, PROMPT_BLOCKS * BLOCK_SIZE)
            )
            new += self._tables[-1]
        copied = [list(table) for table in self._tables] if tables else None
        return Step(np.array(freed, np.int64), np.array(new + appended, np.int64), copied)


def quality(blocks: int, steps: int, *, starts: int = STARTS, fresh: bool = True) -> dict[str, float]:
    """Mean moves a step, mean gap, and blocks per contiguous run of a sequence, once the pool is full of sequences."""
    churn, books = Churn(blocks, starts=starts), BlockObserver(blocks)
    warm_up = 2 * RUNNING // starts
    moves = gap = runs = held = 0
    for number in range(warm_up + steps):
        step = churn.step(tables=number % 16 == 0)
        books.release_ids(step.freed, fresh=fresh)
        books.use_ids(step.new, fresh=fresh)
        plan = books.plan("dense", MARGIN, slack=THRESHOLD - MARGIN)
        books.commit(plan)
        if number < warm_up:
            continue
        moves += len(plan)
        gap += books.gap
        for table in step.tables or ():
            found = books.resolve(np.array(table, np.int64))
            held += len(found)
            runs += 1 + int((np.diff(found) != 1).sum())
    return {"moves": moves / steps, "gap": gap / steps, "run": held / runs}


def cost(blocks: int, steps: int) -> dict[str, float]:
    """Microseconds a step: plan and remap alone, and with the step's releases, uses and resolving of its new ids."""
    churn, books = Churn(blocks), BlockObserver(blocks)
    plan_ns: list[int] = []
    all_ns: list[int] = []
    clock = time.thread_time_ns
    # Made beforehand: the allocator's own work would push the books out of the caches.
    for number, step in enumerate([churn.step() for _ in range(2 * RUNNING // STARTS + steps)]):
        begin = clock()
        books.release_ids(step.freed, fresh=True)
        books.use_ids(step.new, fresh=True)
        planned = clock()
        plan = books.plan("dense", MARGIN, slack=THRESHOLD - MARGIN)
        if len(plan):
            books.commit(plan)
        done = clock()
        books.resolve(step.new)
        end = clock()
        if number >= 2 * RUNNING // STARTS:
            plan_ns.append(done - planned)
            all_ns.append(end - begin)
    return {"plan_us": float(np.mean(plan_ns)) / 1000, "all_us": float(np.mean(all_ns)) / 1000}


def figures(repeats: int) -> dict[str, float]:
    """All figures, by their names in BENCH_JSON."""
    small = quality(32768, 2000)
    large = [cost(262144, 2000) for _ in range(repeats)]
    found = {f"w_defrag_32k_{name}": value for name, value in small.items()}
    found |= {f"w_defrag_256k_{name}": min(run[name] for run in large) for name in large[0]}
    crowd = quality(32768, 500, starts=16)
    identity = quality(32768, 200, fresh=False)
    found |= {f"w_defrag_32k_{name}_1024_new": value for name, value in crowd.items()}
    return found | {f"w_defrag_32k_{name}_kept_ids": value for name, value in identity.items()}


def main() -> None:
    """Measure, print, and add to BENCH_JSON."""
    gc.disable()  # its walks would be charged to whoever allocates next
    found = figures(repeats=5)
    for name, value in found.items():
        print(f"{name:26} {value:10.4f}")
    keep(found)


if __name__ == "__main__":
    main()
