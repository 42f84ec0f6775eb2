"""The cost of recording a request: a prompt of 128 blocks of 16 tokens and an answer of 64 tokens.

    python benches/bench_recording.py [--turns 200]

`add_us` and `finish_us` are the calls of a `TraceRecorder` with the engine's own keys. `scheduler_us` is the extra time
that `add` and the last `update` of a `Scheduler` take with a recorder, which includes hashing the tokens. Both are CPU
time of the engine's thread, the median of all turns; half of each prompt was seen before. `disk_bytes` is the size of a
request in the compressed file, `memory_bytes` that of a remembered block in memory. With BENCH_JSON=FILE it also adds
its figures to the flat JSON object in FILE.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from figures import keep

from blockyard import BlockManager, Request, Scheduler
from blockyard.traces import TraceRecorder

BLOCK, BLOCKS, ANSWER = 16, 128, 64
REMEMBERED = 1 << 20
RNG = np.random.default_rng(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200, help="requests of each kind")
    turns = parser.parse_args().turns
    folder = Path(tempfile.mkdtemp())
    figures = calls(folder / "calls.jsonl.gz", turns)
    with TraceRecorder(folder / "scheduler.jsonl.gz", block_size=BLOCK) as recorder:
        with_it = requests(turns, recorder)
    figures["scheduler_us"] = with_it - requests(turns, None)
    figures["memory_bytes"] = memory(folder / "memory.jsonl")
    for name, value in figures.items():
        print(f"{name:24} {value:10.1f}")
    keep(figures)


def calls(path: Path, turns: int) -> dict[str, float]:
    adds, ends = [], []
    shared = [os.urandom(32) for _ in range(BLOCKS // 2)]
    with TraceRecorder(path, block_size=BLOCK) as recorder:
        for turn in range(turns):
            keys = [*shared, *(os.urandom(32) for _ in range(BLOCKS // 2))]
            answer = [os.urandom(32) for _ in range(ANSWER // BLOCK)]
            adds.append(taken(lambda turn=turn, keys=keys: recorder.add(turn, keys, BLOCK * BLOCKS)))
            ends.append(taken(lambda turn=turn, answer=answer: recorder.finish(turn, ANSWER, answer)))
    return {
        "add_us": statistics.median(adds),
        "finish_us": statistics.median(ends),
        "disk_bytes": path.stat().st_size / turns,
    }


def requests(turns: int, recorder: TraceRecorder | None) -> float:
    """Return the microseconds of `add` and of the `update` that ends a request, one request at a time."""
    manager = BlockManager(block_size=BLOCK, device_blocks=64 * BLOCKS, prefix_caching=True)
    scheduler = Scheduler(manager, recorder=recorder)
    shared = RNG.integers(0, 1 << 17, BLOCK * BLOCKS // 2, np.uint32)
    found = []
    for turn in range(turns):
        prompt = np.concatenate((shared, RNG.integers(0, 1 << 17, BLOCK * BLOCKS // 2, np.uint32)))
        request = Request(str(turn), prompt, max_tokens=ANSWER)
        total = taken(lambda request=request: scheduler.add(request))
        while scheduler.num_unfinished:
            step = scheduler.schedule()
            scheduler.complete(step.decision.ticket)
            last = taken(lambda step=step: scheduler.update(step, [7] * step.num_draws))
        found.append(total + last)
    assert scheduler.stats().cached_tokens == (turns - 1) * BLOCK * BLOCKS // 2
    return statistics.median(found)


def memory(path: Path) -> float:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    with TraceRecorder(path, block_size=BLOCK, max_blocks=REMEMBERED) as recorder:
        for first in range(0, REMEMBERED, BLOCKS):
            recorder.add(first, [os.urandom(32) for _ in range(BLOCKS)], BLOCK * BLOCKS)
            recorder.finish(first, 1)
        return (resident() - before) / REMEMBERED


def taken(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return 1e6 * (time.thread_time() - began)


if __name__ == "__main__":
    main()
