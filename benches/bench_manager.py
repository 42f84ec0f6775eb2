"""The block manager's cost per unit, from Python: thread-CPU time, minimum of repeats.

    python benches/bench_manager.py

prints a table; with BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from figures import keep

from blockyard import BlockManager

SEQUENCES = 256
PROMPT = 1024
STEPS = 512
BLOCK_SIZE = 16
MANY_BLOCKS = 1 << 24
SCATTER = 64


def cpu_ns(run: Callable[[], None]) -> int:
    """Thread-CPU time of one run."""
    start = time.thread_time_ns()
    run()
    return time.thread_time_ns() - start


def decode(manager: BlockManager | None = None, *, tables: bool) -> float:
    """W-decode: nanoseconds per sequence and step, over all steps; checks the arrays at the end."""
    manager = manager or BlockManager(block_size=BLOCK_SIZE, device_blocks=32768)
    sequences = manager.allocate(counts=np.full(SEQUENCES, PROMPT, dtype=np.uint32))
    manager.complete(manager.take_decision().ticket)
    slots = np.zeros(SEQUENCES, dtype=np.int64)
    table = np.zeros((SEQUENCES, (PROMPT + STEPS) // BLOCK_SIZE), dtype=np.int32)

    def append_alone() -> None:
        for _ in range(STEPS):
            manager.append(sequences, out=slots)

    def with_tables() -> None:
        for _ in range(STEPS):
            manager.append(sequences, block_tables=table, out=slots)

    cost = cpu_ns(with_tables if tables else append_alone) / STEPS / SEQUENCES
    if tables and not np.array_equal(table, manager.block_tables(sequences)):
        raise AssertionError("the block table is not what the manager says")
    manager.free(sequences)
    return cost


def allocate_and_free() -> tuple[float, float]:
    """Nanoseconds per block to allocate and to free 256 sequences of 64 blocks."""
    manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=32768)
    lengths = np.full(SEQUENCES, PROMPT, dtype=np.uint32)
    start = time.thread_time_ns()
    sequences = manager.allocate(counts=lengths)
    middle = time.thread_time_ns()
    manager.complete(manager.take_decision().ticket)
    blocks = SEQUENCES * PROMPT // BLOCK_SIZE
    return (middle - start) / blocks, cpu_ns(lambda: manager.free(sequences)) / blocks


def swap() -> float:
    """W-swap: nanoseconds per block and direction, decision included."""
    manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=8192, host_blocks=8192, watermark=0.0)
    sequences = manager.allocate(counts=np.full(64, 2048, dtype=np.uint32))
    manager.complete(manager.take_decision().ticket)

    def run() -> None:
        for move in (manager.swap_out, manager.swap_in):
            move(sequences)
            manager.complete(manager.take_decision().ticket)

    return cpu_ns(run) / (64 * 128) / 2


def fork() -> float:
    """Microseconds to fork a sequence of 1000 blocks."""
    manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=32768)
    parent = int(manager.allocate(counts=[1000 * BLOCK_SIZE])[0])
    manager.complete(manager.take_decision().ticket)
    costs = []
    for _ in range(100):
        start = time.thread_time_ns()
        child = manager.fork(parent, 1)
        costs.append(time.thread_time_ns() - start)
        manager.free(child)
    return min(costs) / 1000


def scattered() -> tuple[BlockManager, float, float]:
    """Return a pool of 16M blocks of which every 64th is free, and nanoseconds per block to allocate and free those."""
    manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=MANY_BLOCKS, watermark=0.0)
    sequences = manager.allocate(counts=np.zeros(SCATTER, dtype=np.uint32))
    blocks = MANY_BLOCKS // SCATTER
    for _ in range(blocks):
        manager.append(sequences, BLOCK_SIZE)
    if not np.array_equal(manager.block_table(int(sequences[0])), np.arange(blocks) * SCATTER):
        raise AssertionError("the blocks of the first sequence are not scattered over the pool")
    one = sequences[:1]
    allocated, freed = [], []
    for _ in range(5):
        start = time.thread_time_ns()
        manager.free(one)
        middle = time.thread_time_ns()
        one = manager.allocate(counts=[blocks * BLOCK_SIZE])
        allocated.append((time.thread_time_ns() - middle) / blocks)
        freed.append((middle - start) / blocks)
        manager.complete(manager.take_decision().ticket)
    manager.free(one)
    return manager, min(allocated), min(freed)


def allocate_prompt() -> float:
    """Microseconds to allocate a prompt of 16,000 token ids and free it, without prefix caching."""
    manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=2048)
    prompt = np.arange(16_000, dtype=np.uint32)

    def run() -> None:
        for _ in range(100):
            manager.free(manager.allocate(prompt))

    return cpu_ns(run) / 100e3


def many_blocks(repeats: int) -> dict[str, float]:
    """A pool of 16M blocks: W-decode in its scattered free blocks against the pool of 32k; allocate and free there."""
    manager, allocated, freed = scattered()
    costs = [(decode(manager, tables=True), decode(tables=True)) for _ in range(repeats)]
    large, small = (min(side) for side in zip(*costs, strict=True))
    return {
        "pool_16m_decode_ratio": large / small,
        "pool_16m_allocate_ns": allocated,
        "pool_16m_free_ns": freed,
    }


def main() -> None:
    """Measure, print, and add to BENCH_JSON."""
    repeats = 15
    figures = {
        "append_256_ns": min(decode(tables=False) for _ in range(repeats)),
        "w_decode_ns": min(decode(tables=True) for _ in range(repeats)),
        "allocate_ns": min(allocate_and_free()[0] for _ in range(repeats)),
        "free_ns": min(allocate_and_free()[1] for _ in range(repeats)),
        "allocate_16k_tokens_us": min(allocate_prompt() for _ in range(repeats)),
        "fork_1000_us": min(fork() for _ in range(repeats)),
        "w_swap_ns": min(swap() for _ in range(repeats)),
        **many_blocks(repeats),
    }
    for name, value in figures.items():
        print(f"{name:24} {value:10.2f}")
    keep(figures)


if __name__ == "__main__":
    main()
