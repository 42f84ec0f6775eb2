"""The cost of a replay: requests without times, and steps of whole engines, on one core.

    python benches/bench_replay.py [TRACE] [--requests 200000]

Requests of 50 blocks, of which 30 are one of 20,000 prefixes, go through a pool of 200,000 blocks. Then engines of
128 sequences, with and without tiers below the device, serve chats that arrive at 10 requests a second, and agent
sessions: `claude_code.jsonl.gz` in the folder that BLOCKYARD_TRACES names (../shared/traces), or TRACE. Each step of
the model is a decision, also if many plain ones are decided in one call. Times are of the thread's CPU. With
BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from figures import keep

from blockyard.tools.replay.engine import EngineOptions, replay_times
from blockyard.tools.replay.hits import replay_hits
from blockyard.tools.replay.packed import PackedTrace
from blockyard.tools.replay.step_time import LinearStepTime
from blockyard.traces import TraceRequest, read_trace

BLOCKS, SHARED, BEGINNINGS, POOL = 50, 30, 20_000, 200_000
STEP_TIME = LinearStepTime(fixed=0.01, prefill_token=4e-5, decode_row=2e-5, context_token=9e-8)
ENGINES = {
    "device": EngineOptions(30_000, max_num_seqs=128, max_concurrent_sessions=8),
    "device_host": EngineOptions(30_000, 120_000, max_num_seqs=128, max_concurrent_sessions=8),
    "device_host_store": EngineOptions(
        30_000, 120_000, store_blocks=400_000, max_num_seqs=128, max_concurrent_sessions=8
    ),
}


def requests_of(count: int) -> PackedTrace:
    """Make prompts with a few popular prefixes."""
    rng = np.random.default_rng(0)
    blocks = np.empty((count, BLOCKS), np.int64)
    blocks[:, :SHARED] = (rng.zipf(1.2, count) % BEGINNINGS)[:, None] * SHARED + np.arange(SHARED)
    own = BLOCKS - SHARED
    blocks[:, SHARED:] = BEGINNINGS * SHARED + np.arange(count * own).reshape(count, own)
    starts = np.arange(count + 1) * BLOCKS
    lengths = np.full(count, BLOCKS * 16 + 1)
    distinct = BEGINNINGS * SHARED + count * own
    none, one = np.zeros(count, np.int64), np.ones(count, np.int64)
    return PackedTrace(
        16, blocks.reshape(-1), starts, lengths, distinct, none, one, none.astype(np.float64), (None,) * len(none)
    )


def chats(count: int = 1500) -> list[TraceRequest]:
    """Make turns of chats, 10 a second: each turn's prompt continues the one before it, of 200 to 3,000 tokens."""
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(0.1, count)).tolist()
    lengths, answers = rng.integers(200, 3000, count).tolist(), rng.integers(20, 400, count).tolist()
    rows, blocks, used = [], dict[int, list[int]](), 0
    for arrival, length, answer, session in zip(
        arrivals, lengths, answers, rng.integers(0, 100, count).tolist(), strict=True
    ):
        known = blocks.get(session, [])[: length // 16 * 3 // 4]
        ids = known + list(range(used, used + length // 16 - len(known)))
        used += len(ids) - len(known)
        blocks[session] = ids
        rows.append(TraceRequest(arrival, length, answer, ids, 16.0))
    return rows


def main() -> None:
    """Print the costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    traces = Path(os.environ.get("BLOCKYARD_TRACES", "../shared/traces"))
    parser.add_argument("trace", nargs="?", type=Path, default=traces / "claude_code.jsonl.gz")
    parser.add_argument("--requests", type=int, default=200_000)
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    trace = requests_of(arguments.requests)
    for policy in ("lru", "adaptive", "optimal"):
        begin = time.thread_time()
        hits = replay_hits(trace, policy, POOL)
        cost = (time.thread_time() - begin) / len(trace) * 1e6
        figures[f"replay_{policy}_us"] = cost
        rate = hits.device.sum() / len(trace.blocks)
        print(f"{policy:<9} {cost:6.1f} us a request of {BLOCKS} blocks, hit rate {rate:.3f}")
    workloads = {"chat": chats()}
    if arguments.trace.exists():
        workloads["agents"] = read_trace(arguments.trace, first=700)
    else:
        print(f"no trace {arguments.trace}: agents are left out")
    for work, requests in workloads.items():
        for name, options in ENGINES.items():
            replay_times(requests[:1], options, STEP_TIME)  # the first with a store imports torch
            limits = replace(options, max_concurrent_sessions=None) if work == "chat" else options
            begin = time.thread_time()
            times = replay_times(requests, limits, STEP_TIME)
            took = time.thread_time() - begin
            figures[f"replay_{work}_{name}_decisions_per_s"] = times.scheduler.steps / took
            print(
                f"{work + ', ' + name.replace('_', ' + '):<30} {times.scheduler.steps / took:9.0f} decisions/s, "
                f"{times.scheduler.steps} of them in {took:.3f} s, hit rate {times.hit_rate:.3f}"
            )
    return keep(figures)


if __name__ == "__main__":
    main()
