"""What the offload manager costs a chunk and call: thread-CPU time, batches of 128 keys, best of some rounds.

    python benches/bench_offload.py [--chunks 60000] [--batches 400]

In each round all batches are stored, then looked up, loaded and touched. Each round has new keys of 36 bytes, as vLLM's
offloading connector, so that stores evict. Prints a table; with BENCH_JSON=FILE it also adds its figures to the flat
JSON object in FILE.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

from figures import keep

from blockyard.offload import OffloadManager

BATCH, KEY_BYTES = 128, 36


def measure(chunks: int, batches: int, rounds: int) -> dict[str, float]:
    """Microseconds a chunk of each call: the best round."""
    manager = OffloadManager(chunks)
    best: dict[str, float] = {}
    for _ in range(rounds):
        keys = [[os.urandom(KEY_BYTES) for _ in range(BATCH)] for _ in range(batches)]
        calls: list[tuple[str, Callable[[list[bytes]], object]]] = [
            ("prepare_store", manager.prepare_store),
            ("complete_store", manager.complete_store),
            ("lookup", manager.lookup),
            ("prepare_load", manager.prepare_load),
            ("complete_load", manager.complete_load),
            ("touch", manager.touch),
        ]
        for name, call in calls:
            start = time.thread_time()
            for batch in keys:
                call(batch)
            taken = (time.thread_time() - start) * 1e6 / (batches * BATCH)
            best[name] = min(taken, best.get(name, taken))
        if manager.lookup(keys[-1]) != ["hit"] * BATCH:
            raise AssertionError(manager)
    return best


def main() -> None:
    """Measure, print, and add to BENCH_JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=60_000, help="of the host cache")
    parser.add_argument("--batches", type=int, default=400, help="of 128 keys, fewer than the chunks")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    found = measure(options.chunks, options.batches, options.rounds)
    for name, value in found.items():
        print(f"{name:16} {value:8.3f} us a chunk")
    keep({f"offload_{name}_us": value for name, value in found.items()})


if __name__ == "__main__":
    main()
