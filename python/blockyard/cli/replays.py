"""`blockyard replay`: from the parsed options to a table of hits."""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from pathlib import Path
from typing import TextIO

from blockyard.cli.result import Result
from blockyard.progress import Progress, show_progress
from blockyard.replay.hits import OPTIMAL
from blockyard.replay.packed import PackedTrace
from blockyard.replay.sweep import Point, open_executor, read_blocks, sweep
from blockyard.traces import read_trace

__all__ = ["replay"]


def replay(options: argparse.Namespace) -> Result:
    """Send the prompts of traces through caches."""
    reports = []
    with (
        open_executor(options.jobs, options.executor) as executor,
        show_progress("replay", quiet=options.quiet) as view,
    ):
        for path in options.traces:
            trace = PackedTrace.of(read_trace(path, first=options.first))
            caches = _caches(options, trace.num_distinct)
            first, show_step = int(len(trace) * options.window), partial(_show_step, view, len(caches))
            points = sweep(trace, caches, first=first, executor=executor, show=show_step)
            reports.append((path, trace, points))

    def show(stream: TextIO) -> None:
        for path, trace, points in reports:
            _show(path, trace, points, stream)

    traces = [
        {
            "trace": str(path),
            "num_requests": len(trace),
            "num_blocks": len(trace.blocks),
            "num_distinct_blocks": trace.num_distinct,
            "block_tokens": trace.block_tokens,
            "caches": [point.as_dict() for point in points],
        }
        for path, trace, points in reports
    ]
    return Result({"window": options.window, "traces": traces}, show)


def _show_step(view: Progress, count: int, done: int) -> None:
    view.step(done, count, "caches")


def _caches(options: argparse.Namespace, distinct: int) -> list[tuple[str, int, int]]:
    sizes = product(read_blocks(options.device_blocks, distinct), read_blocks(options.host_blocks, distinct))
    policies = [name.strip() for name in options.policies.split(",")]
    caches = [(policy, max(device, 1), host) for device, host in sizes for policy in policies]
    return [cache for cache in caches if cache[0] != OPTIMAL or not cache[2]]  # it has no host tier


def _show(path: Path, trace: PackedTrace, points: list[Point], stream: TextIO) -> None:
    print(
        f"{path.name}: {len(trace)} requests, {len(trace.blocks)} blocks of {trace.block_tokens} tokens, "
        f"{trace.num_distinct} distinct",
        file=stream,
    )
    print("   device      host policy    hit rate of it host LRU to best too long", file=stream)
    hits = {(point.device_blocks, point.policy): point.hit_tokens for point in points if not point.host_blocks}
    for point in points:
        host, way = _share_of(point.host_hit_tokens, point.hit_tokens), _way(point, hits)
        sizes = f"{point.device_blocks:>9} {point.host_blocks:>9}"
        found = f"{sizes} {point.policy:<9} {point.hit_rate:>8.2%} {host:>10} {way:>11} {point.too_long or '':>8}"
        print(found.rstrip(), file=stream)


def _share_of(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if part else ""


def _way(point: Point, hits: dict[tuple[int, str], int]) -> str:
    """How much of the way from LRU to the optimum a policy goes, at one size without a host tier."""
    worst, best = (hits.get((point.device_blocks, name), 0) for name in ("lru", OPTIMAL))
    if point.policy in {"lru", OPTIMAL} or point.host_blocks or best <= worst or not worst:
        return ""
    return f"{(point.hit_tokens - worst) / (best - worst):.0%}"
