"""The books' cost per unit, from Python: thread-CPU time, minimum of repeats.

    python benches/bench_manager.py

prints a table; with BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from blockyard import BlockManager, DecodeBatch

SEQUENCES = 256
PROMPT = 1024
STEPS = 512
BLOCK_SIZE = 16


def cpu_ns(run: Callable[[], None]) -> int:
    """Thread-CPU time of one run."""
    start = time.thread_time_ns()
    run()
    return time.thread_time_ns() - start


def decode(kind: str) -> float:
    """W-decode: nanoseconds per sequence and step, over all steps; the arrays are right at the end."""
    manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=32768)
    sequences = manager.allocate(np.full(SEQUENCES, PROMPT, dtype=np.uint32))
    manager.complete(manager.take_decision().ticket)
    slots = np.zeros(SEQUENCES, dtype=np.int64)
    table = np.zeros((SEQUENCES, (PROMPT + STEPS) // BLOCK_SIZE), dtype=np.int32)

    def append_alone() -> None:
        for _ in range(STEPS):
            manager.append(sequences, out=slots)

    def stateless() -> None:
        for _ in range(STEPS):
            manager.append(sequences, block_tables=table, out=slots)

    def bound() -> None:
        for _ in range(STEPS):
            batch.append()

    if kind == "batch":
        batch = DecodeBatch(manager, table, slots)
        batch.add(sequences)
    cost = cpu_ns({"append": append_alone, "stateless": stateless, "batch": bound}[kind]) / STEPS / SEQUENCES
    if kind != "append" and not np.array_equal(table, manager.block_tables(sequences)):
        raise AssertionError("the block table is not what the books say")
    return cost


def allocate_and_free() -> tuple[float, float]:
    """Nanoseconds per block to allocate and to free 256 sequences of 64 blocks."""
    manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=32768)
    lengths = np.full(SEQUENCES, PROMPT, dtype=np.uint32)
    start = time.thread_time_ns()
    sequences = manager.allocate(lengths)
    middle = time.thread_time_ns()
    manager.complete(manager.take_decision().ticket)
    blocks = SEQUENCES * PROMPT // BLOCK_SIZE
    return (middle - start) / blocks, cpu_ns(lambda: manager.free(sequences)) / blocks


def swap() -> float:
    """W-swap: nanoseconds per block and direction, decision included."""
    manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=8192, host_blocks=8192, watermark=0.0)
    sequences = manager.allocate(np.full(64, 2048, dtype=np.uint32))
    manager.complete(manager.take_decision().ticket)

    def run() -> None:
        for move in (manager.swap_out, manager.swap_in):
            move(sequences)
            manager.complete(manager.take_decision().ticket)

    return cpu_ns(run) / (64 * 128) / 2


def fork() -> float:
    """Microseconds to fork a sequence of 1000 blocks."""
    manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=32768)
    parent = int(manager.allocate([1000 * BLOCK_SIZE])[0])
    manager.complete(manager.take_decision().ticket)
    costs = []
    for _ in range(100):
        start = time.thread_time_ns()
        child = manager.fork(parent)
        costs.append(time.thread_time_ns() - start)
        manager.free(child)
    return min(costs) / 1000


def main() -> None:
    """Measure, print, and add to BENCH_JSON."""
    repeats = 15
    figures = {
        "append_256_ns": min(decode("append") for _ in range(repeats)),
        "w_decode_ns": min(decode("stateless") for _ in range(repeats)),
        "w_decode_batch_ns": min(decode("batch") for _ in range(repeats)),
        "allocate_ns": min(allocate_and_free()[0] for _ in range(repeats)),
        "free_ns": min(allocate_and_free()[1] for _ in range(repeats)),
        "fork_1000_us": min(fork() for _ in range(repeats)),
        "w_swap_ns": min(swap() for _ in range(repeats)),
    }
    for name, value in figures.items():
        print(f"{name:24} {value:10.2f}")
    if path := os.environ.get("BENCH_JSON"):
        file = Path(path)
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
