"""Hits of every eviction policy, by workload and pool size, compared with the optimum.

    python benches/bench_policies.py [TRACE...] [--workloads chat,rag] [--mixtures 40] [--seed 0]
        [--percents 2,10,50] [--users 8,32] [--part 0] [--hints] [--json FILE]

Replays traces (all formats of `blockyard.traces` with hash ids) and generated workloads through a `BlockManager`, one
request at a time, and prints a table. Policies of `policies/fixed.py` are replayed without a manager; the hits are
those that a manager would have. A pool's size is a percentage of the distinct blocks. A request longer than the pool is
left out and counted. Without arguments it takes the generated workloads, and the traces in the folder that
BLOCKYARD_TRACES names (../shared/traces). Output tokens are not cached, because traces do not contain them. `--mixtures
N` takes N random mixtures of the generated workloads instead: two to four of them at once, half of the mixtures with
other shares after a shift in the middle. Agent sessions, which all begin at 0, run 8 and 32 at a time (`--users`,
`policies/sessions.py`); a block is 16 of the trace's. `--part 0` and `--part 1` are halves of the
sessions. A step's time is its request's arrival. `--hints` tells the cache what a trace knows when an answer ends.

`optimal` knows the future: it evicts the block whose next use is furthest (Belady). On prefix trees that is a leaf.
A policy's `way` is the share of the gap from `lru` to `optimal` that it closes: 0 for `lru`, 1 for `optimal`.

With BENCH_JSON=FILE it measures only some points, and adds two figures to that file: `policy_adaptive_worst`, the
lowest ratio of adaptive's hits to the best other policy's (see EVEN), and `policy_adaptive_cost`, the ratio of its time
in W-prefix to `lru`'s.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from bench_prefix import prompts, w_prefix
from figures import keep
from policies.evictor import chains, replay
from policies.fixed import POLICIES, SETTINGS
from policies.sessions import at_a_time, coarser
from policies.traffic import WORKLOADS, traffic

from blockyard import BlockManager, PrefixCaching
from blockyard.errors import InvalidArgumentError
from blockyard.tools.replay.optimal import optimal_hits
from blockyard.tools.replay.packed import PackedTrace
from blockyard.traces import TraceRequest, read_trace
from blockyard.types import HashedPrompt

FIXED = ("lru", "priority", *POLICIES)
PERCENTS = (2, 3, 5, 7, 10, 15, 20, 30, 40, 55, 70, 85, 100)
EVEN = 0.01
"""This share of a workload's blocks is added to both sides of a ratio: a few hits by chance are no merit."""

GOAL = 0.97
"""Least ratio that is wanted."""

USERS = (8, 32)
"""Sessions at a time."""

COARSER = 16
"""Blocks of an agent trace that become one: its prompts have 2,000 blocks of 64 tokens."""

Point = dict[str, float]


class Workload:
    """Requests for a `BlockManager`: hashed once, with a block of a few tokens for each hash id."""

    block_size = 2

    def __init__(self, name: str, requests: Sequence[TraceRequest], *, hints: bool = False) -> None:
        self._hints = hints
        self.name, self.requests, self.chains = name, requests, chains(requests)
        self.packed = PackedTrace.of(requests)
        hasher = BlockManager(block_size=self.block_size, device_blocks=1, prefix_caching=True).prefix
        self.hashed: list[HashedPrompt] = []
        for request, chain in zip(requests, self.chains, strict=True):
            ids = np.array(request.hash_ids[: len(chain.keys)], np.uint64)
            tail = [0] * (chain.needed - len(chain.keys))
            tokens = np.stack([ids >> np.uint64(16), ids & np.uint64(0xFFFF)], axis=1).reshape(-1)
            self.hashed.append(hasher.hash(np.append(tokens, tail).astype(np.uint32)))
        self.blocks = sum(len(chain.keys) for chain in self.chains)
        self.distinct = len({key for chain in self.chains for key in chain.keys})

    def pool(self, percent: float) -> int:
        """Return a pool's size in blocks, from its percentage of the distinct blocks."""
        return max(1, round(self.distinct * percent / 100))

    def fitting(self, blocks: int) -> list[int]:
        """Return the indices of the requests that fit in a pool of `blocks` blocks."""
        return [number for number, chain in enumerate(self.chains) if chain.needed <= blocks]

    def hits(self, eviction: str, blocks: int) -> list[int]:
        """Return the number of cached blocks found by each request that fits."""
        if eviction in POLICIES:
            return replay(self.requests, blocks, POLICIES[eviction](blocks))
        manager = BlockManager(
            block_size=self.block_size,
            device_blocks=blocks,
            watermark=0.0,
            prefix_caching=PrefixCaching(eviction=eviction),
        )
        found = []
        for number in self.fitting(blocks):
            found.append(manager.prefix.lookup(self.hashed[number]).tokens // self.block_size)
            sequence = manager.allocate(self.hashed[number])
            request = self.requests[number]
            manager.complete(manager.take_decision(now=request.arrival).ticket)
            manager.mark_computed(sequence)
            manager.free(sequence, hint=request.hint if self._hints else None)
        return found


def measure(workload: Workload, percent: float, policies: Sequence[str]) -> Point:
    """Return each policy's hits in a pool of that percentage of the distinct blocks."""
    blocks = workload.pool(percent)
    point = {policy: float(sum(workload.hits(policy, blocks))) for policy in policies}
    point["optimal"] = float(optimal_hits(workload.packed, blocks).sum())
    point["blocks"] = blocks
    point["too_long"] = len(workload.chains) - len(workload.fitting(blocks))
    return point


def ratio(point: Point, workload: Workload) -> float:
    """Return the ratio of `adaptive`'s hits to the best other policy's, one hit per 100 blocks added to both."""
    best = max(point[policy] for policy in FIXED if policy in point)
    return (point["adaptive"] + EVEN * workload.blocks) / (best + EVEN * workload.blocks)


def way(point: Point, policy: str) -> float:
    """Return the share of the gap from `lru` to `optimal` that a policy closes."""
    return (point[policy] - point["lru"]) / max(point["optimal"] - point["lru"], 1)


def show(workload: Workload, percent: float, point: Point) -> None:
    """Print one line: hits of the policies with names, the best setting, and `optimal`; ratio and way of `adaptive`."""
    setting = max((name for name in SETTINGS if name in point), key=point.__getitem__)
    named = " ".join(f"{point[name]:8.0f}" for name in ("lru", "arc", "lfu", setting, "adaptive", "optimal"))
    print(
        f"{workload.name:24} {percent:4.0f} % {point['blocks']:7.0f} {named}  {setting:12} "
        f"{ratio(point, workload):6.3f} {way(point, 'adaptive'):6.2f} {point['too_long'] or '':>5}",
        flush=True,
    )


def mixture(seed: int, requests: int = 3000) -> tuple[str, list[TraceRequest]]:
    """Mix random workloads with disjoint hash ids. Returns a descriptive name, and the requests."""
    rng = random.Random(f"mixture {seed}")
    kinds = rng.sample([name for name in WORKLOADS if "-" not in name], rng.randint(2, 4))
    weights = [rng.choice((1, 2, 4, 8)) for _ in kinds]
    streams = [iter(traffic(kind, requests=requests, seed=seed)) for kind in kinds]
    # Half of the mixtures have other weights after a shift in the middle.
    after = rng.sample(weights, len(weights)) if rng.random() < 0.5 else weights
    mixed = []
    for number in range(requests):
        part = rng.choices(range(len(kinds)), weights if number < requests // 2 else after)[0]
        request = next(streams[part])
        mixed.append(replace(request, hash_ids=tuple(part << 24 | hash_id for hash_id in request.hash_ids)))
    return f"{seed}:" + "+".join(f"{kind[:5]}{weight}" for kind, weight in zip(kinds, weights, strict=True)), mixed


def sources(
    traces: Sequence[str],
    workloads: Sequence[str],
    seed: int = 0,
    users: Sequence[int] = USERS,
    part: int | None = None,
) -> Iterator[tuple[str, list[TraceRequest]]]:
    """Yield the names and the requests."""
    for name in workloads:
        yield name, traffic(name, seed=seed)
    for trace in traces:
        name, requests = Path(trace).name.split(".")[0], read_trace(trace)
        if all(request.session is not None for request in requests) and any(request.after for request in requests):
            requests = coarser(requests, COARSER)
            for count in users:
                yield f"{name}-{count}", at_a_time(requests, count, part)
        else:
            yield name, requests


def known_traces() -> list[str]:
    """Return the available traces with hash ids."""
    folder = os.environ.get("BLOCKYARD_TRACES", "../shared/traces")
    return sorted(str(path) for path in Path(folder).glob("*.jsonl*"))


def compare(chosen: argparse.Namespace) -> None:
    """Measure and print every point, and write them to the JSON file."""
    policies = (*FIXED, "adaptive")
    print(f"{'workload':24} {'pool':>6} {'blocks':>7}", *(f"{name:>8}" for name in ("lru", "arc", "lfu")), end=" ")
    print(f"{'setting':>8} {'adaptive':>8} {'optimal':>8}  {'setting':12} {'ratio':>6} {'way':>6} {'too long':>5}")
    points: dict[str, dict[str, Point]] = {}
    judged: list[tuple[float, str, float]] = []
    mixtures = map(mixture, range(chosen.seed, chosen.seed + chosen.mixtures))
    named = () if chosen.mixtures else sources(chosen.traces, chosen.workloads, chosen.seed, chosen.users, chosen.part)
    for name, requests in itertools.chain(mixtures, named):
        workload = Workload(name, requests, hints=chosen.hints)
        for percent in chosen.percents:
            point = measure(workload, percent, policies)
            points.setdefault(name, {})[f"{percent:g}"] = point
            show(workload, percent, point)
            judged.append((ratio(point, workload), name, percent))
    total = {name: sum(p[name] for at in points.values() for p in at.values()) for name in (*policies, "optimal")}
    total["best fixed of each point"] = sum(
        max(p[name] for name in FIXED) for at in points.values() for p in at.values()
    )
    print("all points:", ", ".join(f"{name} {hits:.0f}" for name, hits in sorted(total.items(), key=lambda x: -x[1])))
    named_ways = ", ".join(f"{name} {way(total, name):.3f}" for name in total)
    print("way from lru to optimal:", named_ways)
    missed = sum(found < GOAL for found, _, _ in judged)
    print(f"{missed} of {len(judged)} points are below {GOAL}")
    print(
        "least ratios:", ", ".join(f"{found:.3f} {name} {percent:g} %" for found, name, percent in sorted(judged)[:5])
    )
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(points, indent=1) + "\n")


def shift(name: str, percent: float, seed: int) -> float:
    """Return the ratio of `adaptive` to the best other policy, from two pool turnovers after the middle shift on."""
    workload = Workload(name, traffic(name, seed=seed))
    blocks = workload.pool(percent)
    hits = workload.hits("adaptive", blocks)
    start, turned = len(hits) // 2, 0
    while start < len(hits) and turned < 2 * blocks:
        turned += workload.chains[start].needed - hits[start]
        start += 1
    best = max(sum(workload.hits(policy, blocks)[start:]) for policy in FIXED)
    return sum(hits[start:]) / best if best else 1.0


def figures() -> dict[str, float]:
    """Return the figures for `make bench`: fewer points, so that it takes minutes."""
    worst = 1.0
    for name, requests in sources(known_traces(), ("chat", "rag", "batch", "loop", "templates", "mixed", "chat-rag")):
        workload = Workload(name, requests)
        for percent in (2, 5, 10, 20, 40):
            blocks = workload.pool(percent)
            point = {policy: float(sum(workload.hits(policy, blocks))) for policy in (*FIXED, "adaptive")}
            worst = min(worst, ratio(point, workload))
    arrays, costs = prompts(), []
    for blocks in (20_000, 4_000):
        # Alternating within each round, so that both see the same load.
        runs = [
            [w_prefix(arrays, blocks, PrefixCaching(eviction=name))[0] for name in ("lru", "adaptive")]
            for _ in range(20)
        ]
        lru, adaptive = (min(times) for times in zip(*runs, strict=True))
        costs.append(adaptive / lru)
    return {"policy_adaptive_worst": worst, "policy_adaptive_cost": max(costs)}


def main() -> None:
    """Compare policies, or measure the two figures for `make bench`."""
    gc.disable()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="TRACE", help="trace files with hash ids; no workloads, then")
    parser.add_argument("--workloads", help=f"some of {','.join(WORKLOADS)}")
    parser.add_argument("--mixtures", type=int, default=0, help="number of random mixtures, counted from the seed")
    parser.add_argument("--users", default=",".join(map(str, USERS)), help="agent sessions at a time")
    parser.add_argument("--part", type=int, choices=(0, 1), help="only this half of the agent sessions")
    parser.add_argument(
        "--hints", action="store_true", help="tell the cache what an agent trace knows of the ends of answers"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the workloads")
    parser.add_argument("--percents", default=",".join(map(str, PERCENTS)), help="pool sizes, of the distinct blocks")
    parser.add_argument("--json", metavar="FILE", help="where all hits go")
    parser.add_argument("--shifts", action="store_true", help="only how fast `adaptive` follows a shift")
    chosen = parser.parse_args()
    if "BENCH_JSON" in os.environ:
        found = figures()
        for name, value in found.items():
            print(f"{name:26} {value:10.4f}")
        keep(found)
        return
    if chosen.shifts:
        for name in (name for name in WORKLOADS if "-" in name):
            print(
                name,
                *(f"{percent} %: {shift(name, percent, chosen.seed):.3f}" for percent in (5, 10, 20, 40)),
                flush=True,
            )
        return
    if chosen.workloads is None:
        chosen.workloads = () if chosen.traces else WORKLOADS
    else:
        chosen.workloads = chosen.workloads.split(",")
    chosen.traces = chosen.traces or ([] if chosen.workloads != WORKLOADS else known_traces())
    chosen.users = [int(users) for users in chosen.users.split(",")]
    chosen.percents = [float(percent) for percent in chosen.percents.split(",")]
    if any(not 0 < percent <= 100 for percent in chosen.percents):
        raise InvalidArgumentError(f"--percents is {chosen.percents}, must be above 0, to 100")
    compare(chosen)


if __name__ == "__main__":
    main()
