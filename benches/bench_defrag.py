"""Defragmentation with an allocator that hands out ids first in, first out: moves, gap, runs, and time per step.

It also measures the effect of `contiguous` on a transfer's descriptors.

    python benches/bench_defrag.py

prints a table; with BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE. W-defrag: 256 sequences
run and append one token per step; in each step 8 end and 8 of 64 blocks start. In the variant with shared prefixes,
every second new sequence shares its first 32 blocks with the previous one.
"""

from __future__ import annotations

import gc
import random
import time
from collections import Counter, deque
from typing import NamedTuple

import numpy as np
from figures import keep
from numpy.typing import NDArray

from blockyard.allocators import BlockObserver

Ids = NDArray[np.int64]
Figures = dict[str, float]

RUNNING = 256
STARTS = 8
PROMPT_BLOCKS = 64
BLOCK_SIZE = 16
THRESHOLD = 64
MARGIN = 16
MOVES = 8
SHARED_BLOCKS = 32
TRANSFER_TOKENS = 2048


class AllocatorStep(NamedTuple):
    """What the allocator reports about a step."""

    freed: Ids
    new: Ids
    tables: list[list[int]] | None
    ended: list[int]
    """Numbers of the sequences that end."""
    grown: dict[int, list[int]]
    """New blocks by the sequence's number."""


class Churn:
    """W-defrag's allocator and scheduler: ids first in, first out; any 8 of the running sequences end."""

    def __init__(self, blocks: int, *, starts: int = STARTS, shared: bool = False, seed: int = 1) -> None:
        self._rng = random.Random(seed)
        self._free = deque(range(1, blocks))
        self._starts = starts
        self._shared = shared
        self._refs: Counter[int] = Counter()
        self._tables: list[list[int]] = []
        self._tokens: list[int] = []
        self._numbers: list[int] = []
        self._count = 0

    def take(self, count: int) -> list[int]:
        """Hand out ids."""
        return [self._free.popleft() for _ in range(count)]

    def step(self, *, tables: bool = False) -> AllocatorStep:
        """End, append, start; the new sequences' blocks come first."""
        freed: list[int] = []
        new: list[int] = []
        appended: list[int] = []
        ended: list[int] = []
        grown: dict[int, list[int]] = {}
        if len(self._tables) + self._starts > RUNNING:
            for _ in range(self._starts):
                i = self._rng.randrange(len(self._tables))
                freed += self._tables[i]
                ended.append(self._numbers[i])
                for rows in (self._tables, self._tokens, self._numbers):
                    rows[i] = rows[-1]
                    rows.pop()
        self._free.extend(self._released(freed))
        for table, at in zip(self._tables, range(len(self._tokens)), strict=True):
            self._tokens[at] += 1
            if self._tokens[at] > len(table) * BLOCK_SIZE:
                table.append(self._free.popleft())
                appended.append(table[-1])
                grown[self._numbers[at]] = table[-1:]
        for number in range(self._starts):
            prefix = self._tables[-1][:SHARED_BLOCKS] if self._shared and number % 2 else []
            self._tables.append(prefix + self.take(PROMPT_BLOCKS - len(prefix)))
            self._tokens.append(
                self._rng.randrange(PROMPT_BLOCKS * BLOCK_SIZE - BLOCK_SIZE, PROMPT_BLOCKS * BLOCK_SIZE)
            )
            self._numbers.append(self._count)
            grown[self._count] = self._tables[-1][:]
            self._count += 1
            new += self._tables[-1]
        if self._shared:
            self._refs.update(new + appended)
        copied = [list(table) for table in self._tables] if tables else None
        return AllocatorStep(np.array(freed, np.int64), np.array(new + appended, np.int64), copied, ended, grown)

    def _released(self, freed: list[int]) -> list[int]:
        """Return the ids that are no longer referenced."""
        if not self._shared:
            return freed
        self._refs.subtract(freed)
        return [block for block in dict.fromkeys(freed) if not self._refs[block]]


def runs_of(blocks: Ids) -> int:
    """Return the number of contiguous runs in a block table."""
    return 1 + int((np.diff(blocks) != 1).sum())


def quality(blocks: int, steps: int, *, starts: int = STARTS, fresh: bool = True, moves: int | None = MOVES) -> Figures:
    """Return mean moves per step, mean gap, and blocks per contiguous run, once the pool is full of sequences."""
    churn, observer = Churn(blocks, starts=starts), BlockObserver(blocks)
    warm_up = 2 * RUNNING // starts
    moved = gap = runs = held = 0
    for number in range(warm_up + steps):
        step = churn.step(tables=number % 16 == 0)
        observer.release_ids(step.freed, fresh=fresh)
        observer.use_ids(step.new, fresh=fresh)
        plan = observer.plan("dense", MARGIN, slack=THRESHOLD - MARGIN, moves=moves)
        observer.commit(plan)
        if number < warm_up:
            continue
        moved += len(plan)
        gap += observer.gap
        for table in step.tables or ():
            found = observer.resolve(np.array(table, np.int64))
            held += len(found)
            runs += runs_of(found)
    return {"moves": moved / steps, "gap": gap / steps, "run": held / runs}


def one_run(blocks: int, steps: list[AllocatorStep]) -> NDArray[np.int64]:
    """Return the nanoseconds of each step: plan and remap, and everything. The steps are always the same."""
    observer = BlockObserver(blocks)
    clock = time.perf_counter_ns
    spent = np.zeros((len(steps), 2), np.int64)
    for number, step in enumerate(steps):
        begin = clock()
        observer.release_ids(step.freed, fresh=True)
        observer.use_ids(step.new, fresh=True)
        planned = clock()
        plan = observer.plan("dense", MARGIN, slack=THRESHOLD - MARGIN, moves=MOVES)
        if len(plan):
            observer.commit(plan)
        done = clock()
        observer.resolve(step.new)
        spent[number] = done - planned, clock() - begin
    return spent


def cost(blocks: int, steps: int, repeats: int, *, shared: bool = False) -> Figures:
    """Return microseconds per step: plan and remap alone, and with the step's releases, uses and new ids resolved.

    Each step's time is the minimum of all repeats, so other work on the machine does not count.
    """
    churn = Churn(blocks, shared=shared)
    warm_up = 2 * RUNNING // STARTS
    # Prepared in advance: the allocator's work would evict the observer from the CPU caches.
    made = [churn.step() for _ in range(warm_up + steps)]
    least = np.min([one_run(blocks, made)[warm_up:] for _ in range(repeats)], axis=0) / 1000
    (plan, everything), (plan_p99, all_p99) = least.mean(axis=0), np.percentile(least, 99, axis=0)
    return {"plan_us": plan, "plan_p99_us": plan_p99, "all_us": everything, "all_p99_us": all_p99}


def descriptors(blocks: int) -> Figures:
    """Return the pieces of a 2,048-token transfer from an aged pool, before and after `contiguous`, and its moves."""
    churn, observer = Churn(blocks), BlockObserver(blocks)
    for _ in range(1000):
        step = churn.step()
        observer.release_ids(step.freed, fresh=True)
        observer.use_ids(step.new)
    ids = np.array(churn.take(TRANSFER_TOKENS // BLOCK_SIZE), np.int64)
    observer.use_ids(ids)

    def pieces() -> int:
        return 1 + int((np.diff(observer.resolve(ids)) != 1).sum())

    before, least = pieces(), float("inf")
    for _ in range(20):
        begin = time.perf_counter_ns()
        plan = observer.plan_all([("contiguous", 1)], sequences=[ids])
        least = min(least, (time.perf_counter_ns() - begin) / 1000)
    observer.commit(plan)
    return {"pieces_before": before, "pieces_after": pieces(), "moves": len(plan), "plan_us": least}


def figures(repeats: int) -> Figures:
    """Return all figures by their names in BENCH_JSON."""
    found = {f"w_defrag_32k_{name}": value for name, value in quality(32768, 2000).items()}
    found |= {f"w_defrag_32k_{name}": value for name, value in cost(32768, 2000, repeats).items()}
    found |= {f"w_defrag_256k_{name}": value for name, value in cost(262144, 2000, repeats).items()}
    shared = cost(262144, 2000, repeats, shared=True)
    found |= {f"w_defrag_256k_shared_{name}": value for name, value in shared.items()}
    crowd = quality(32768, 500, starts=16, moves=None)
    identity = quality(32768, 200, fresh=False, moves=None)
    found |= {f"w_defrag_32k_{name}_1024_new": value for name, value in crowd.items()}
    found |= {f"w_defrag_32k_{name}_kept_ids": value for name, value in identity.items()}
    return found | {f"contiguous_{name}": value for name, value in descriptors(32768).items()}


def main() -> None:
    """Measure, print, and add to BENCH_JSON."""
    gc.disable()  # its walks would count against the next allocation
    found = figures(repeats=7)
    for name, value in found.items():
        print(f"{name:32} {value:10.4f}")
    keep(found)


if __name__ == "__main__":
    main()
