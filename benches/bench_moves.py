"""Defragmentation inside the manager: what planning a step's moves and rewriting the tables costs.

    python benches/bench_moves.py

prints a table; with BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE. W-defrag: 256 sequences
run and append one token per step; in each step 8 end and 8 of 64 blocks start. With a shared prefix, new sequences
share their first 16 blocks with a sequence that is replaced every 16 steps. Tickets end one step late.

Then, in a pool of 32k blocks whose unused blocks are all cached: runs per block table before and after `contiguous`,
with at most 512 moves per step, and the number of cached blocks lost, for each policy.
"""

from __future__ import annotations

import gc
import random
import time
from typing import Literal

import numpy as np
from figures import keep

from blockyard import BlockManager

RUNNING = 256
STARTS = 8
PROMPT_BLOCKS = 64
SHARED_BLOCKS = 16
BLOCK_SIZE = 16
BLOCKS = 262144
MARGIN = 16
# Moves begin once blocks are this far above the allowed height.
THRESHOLD = 64
MOVES = 8
STEPS = 2000
WARM_UP = 2 * RUNNING // STARTS
CACHED_BLOCKS = 32768
CACHED_RUNNING = 128


class Churn:
    """W-defrag's sequences, in one manager."""

    def __init__(self, *, shared: bool, defragment: bool, seed: int = 1) -> None:
        self._rng = random.Random(seed)
        self._shared = shared
        self._defragment = defragment
        self.manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=BLOCKS)
        self._running: list[int] = []
        self._prefix: int | None = None
        self._ticket: int | None = None
        self._slots = np.zeros(RUNNING, dtype=np.int64)
        self.moves = 0

    def step(self, number: int) -> int:
        """End, append, start, and issue the step. Returns the nanoseconds of the calls that moving affects."""
        manager, rng, running = self.manager, self._rng, self._running
        if len(running) + STARTS > RUNNING:
            rng.shuffle(running)
            manager.free(running[-STARTS:])
            del running[-STARTS:]
        manager.append(np.array(running, dtype=np.uint64), out=self._slots[: len(running)])
        self._start(number)
        clock = time.thread_time_ns
        begin = clock()
        if self._defragment:
            self.moves += len(manager.defrag.run([("dense", MARGIN, THRESHOLD)], max_moves=MOVES))
        decision = manager.take_decision()
        if self._ticket is not None:
            manager.complete(self._ticket)
        spent = clock() - begin
        self._ticket = decision.ticket
        return spent

    def _start(self, number: int) -> None:
        tokens = [
            self._rng.randrange(PROMPT_BLOCKS * BLOCK_SIZE - BLOCK_SIZE, PROMPT_BLOCKS * BLOCK_SIZE)
            for _ in range(STARTS)
        ]
        if not self._shared:
            self._running += self.manager.allocate(counts=tokens).tolist()
            return
        if number % 16 == 0:
            before, self._prefix = self._prefix, int(self.manager.allocate(counts=[SHARED_BLOCKS * BLOCK_SIZE])[0])
            if before is not None:
                self.manager.free([before])
        prefix = self._prefix or 0
        self._running += [
            int(self.manager.fork(prefix, shared_tokens=SHARED_BLOCKS * BLOCK_SIZE, num_tokens=n)) for n in tokens
        ]


def spent(*, shared: bool, defragment: bool) -> tuple[np.ndarray, float]:
    """Return the microseconds of each step, and moves per step."""
    churn = Churn(shared=shared, defragment=defragment)
    for number in range(WARM_UP):
        churn.step(number)
    churn.moves = 0
    found = np.array([churn.step(number) for number in range(WARM_UP, WARM_UP + STEPS)]) / 1000
    churn.manager.check()
    return found, churn.moves / STEPS


def cost(repeats: int, *, shared: bool) -> dict[str, float]:
    """Return the time that moving adds to a step, in microseconds: the minimum of several runs."""
    idle = [spent(shared=shared, defragment=False)[0] for _ in range(repeats)]
    moving = [spent(shared=shared, defragment=True) for _ in range(repeats)]
    without = min(float(np.mean(run)) for run in idle)
    return {
        "moves": moving[0][1],
        "mean_us": min(float(np.mean(run)) for run, _ in moving) - without,
        "p99_us": min(float(np.percentile(run, 99)) for run, _ in moving) - without,
        "without_us": without,
    }


def cached_pool(seed: int = 1) -> BlockManager:
    """Return 128 sequences of 30 to 90 blocks that have aged for 1,500 steps among the cached blocks of others."""
    rng = random.Random(seed)
    running: list[int] = []
    manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=CACHED_BLOCKS, prefix_caching=True)
    for step in range(1500):
        if len(running) >= CACHED_RUNNING:
            rng.shuffle(running)
            manager.free(running[-4:])
            del running[-4:]
        if running:
            manager.append(np.array(running, dtype=np.uint64), rng.randrange(1, 8))
        prompts = [[step * 4 + i] * rng.randrange(30, 90) * BLOCK_SIZE for i in range(4)]
        running += map(int, manager.allocate(*prompts))
        manager.complete(manager.take_decision().ticket)
        manager.mark_computed(running)
    for _ in range(2):
        manager.complete(manager.take_decision().ticket)
    return manager


def tidied(cached: Literal["move", "drop", "exchange"]) -> dict[str, float]:
    """Return runs per table and cached blocks, before and after; moves, steps and microseconds per step."""
    manager = cached_pool()
    before, kept = manager.defrag.fragmentation(), manager.stats().cached_blocks["device"]
    moves, spent = [0], 0
    while moves[-1] or len(moves) == 1:
        begin = time.thread_time_ns()
        moves.append(len(manager.defrag.run("contiguous", 1, cached=cached)))
        decision = manager.take_decision()
        manager.complete(decision.ticket)
        spent += time.thread_time_ns() - begin
    manager.check()
    after = manager.defrag.fragmentation()
    return {
        "runs_before": before.runs / before.tables,
        "runs": after.runs / after.tables,
        "moves": sum(moves),
        "cached_lost": kept - manager.stats().cached_blocks["device"],
        "step_us": spent / 1000 / (len(moves) - 1),
    }


def main() -> None:
    """Measure, print, and add to BENCH_JSON."""
    gc.disable()  # its walks would count against the next allocation
    found = {f"w_moves_256k_{name}": value for name, value in cost(5, shared=False).items()}
    found |= {f"w_moves_256k_shared_{name}": value for name, value in cost(5, shared=True).items()}
    for policy in ("move", "drop", "exchange"):
        found |= {f"contiguous_cached_{policy}_{name}": value for name, value in tidied(policy).items()}
    for name, value in found.items():
        print(f"{name:40} {value:12.4f}")
    keep(found)


if __name__ == "__main__":
    main()
