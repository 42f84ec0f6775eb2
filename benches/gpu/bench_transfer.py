"""GPU copies: GB/s over sizes and numbers of pieces, beside one large copy and a loop of single copies in the same run.

    python benches/gpu/bench_transfer.py [--json FILE] [--quick] [--require]

Directions: d2h, h2d (page-locked memory), both (d2h and h2d at once, on two streams; bytes of both count), d2d. Copies
go through `bind`, as an engine's do. Times are the device's, by events: the device waits until the host has queued the
work, so no time of the host is in them. `wall_` has the time until all is done by the host's clock.

Ratios: `to_large` to one copy of the same bytes (d2d: `copy_`; both: two large copies at once), `predicted` what
`copy_model.py` expects of it, `to_loop` to one cudaMemcpyAsync a piece, called from C++. `host_us_per_100` is the time
until the call returns, for a hundred pieces; `loop_host_us_per_100` the loop's. `strategy` is the calibrated table's
choice, `sms` how many multiprocessors it may take, and `strategies` the GB/s of each strategy. `compute_kept` is the
rate of matrix products on another stream while copies run, as a part of their rate alone, where copies last long enough
to tell: the median of several turns, since the device's clock changes with its load. `pool_gb_s` is the rate at which
host memory is touched and page-locked. A block's pieces are contiguous on the host, as in an engine's host pool, in
rows of up to 1 MiB; on the device each is in a separate view.

The last lines compare with the goals, which hold for copies of 64 MiB and more. Without a CUDA device it says so; that
is an error with --require.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from copy_model import to_large

from blockyard._core import Mapping
from blockyard.engine import ops
from blockyard.engine.cuda.calibrate import calibrate_device, views_and_blocks
from blockyard.engine.host_pool import HostPool
from blockyard.engine.ops.library import op_library
from blockyard.engine.ops.strategy import STRATEGIES, StrategyTable, force_strategy, use_cached

MAX_PIECE = 1 << 30
DIRECTIONS = ("d2h", "h2d", "both", "d2d")
SIZES = tuple(4096 << step for step in range(11))
GOAL_SIZES = (4096, 8192, 16384, 65536, 262144)
COUNTS = (16, 128, 1024, 8192, 50_000)
# Goals hold for copies of at least this many bytes; each names a figure, its directions and its piece sizes. A loop of
# pieces of 16 KiB has more than a tenth of the link's rate.
GOAL_BYTES = 64 << 20
GOALS = (
    ("to_large", 0.95, ("h2d", "d2h"), range(64 << 10, MAX_PIECE)),
    ("to_large", 0.85, ("h2d", "d2h", "both"), range(8 << 10, 64 << 10)),
    ("to_large", 0.85, ("d2d",), range(8 << 10, MAX_PIECE)),
    ("to_loop", 10.0, ("h2d", "d2h"), range(4 << 10, (8 << 10) + 1)),
    ("compute_kept", 0.95, DIRECTIONS, range(MAX_PIECE)),
)
MAX_BYTES = 2 << 30
# A loop of single copies over more pieces says nothing new.
MAX_LOOPED = 8192
# What copies are put beside: products of square matrices, and seconds of them.
MATRIX, COMPUTE_SECONDS, COMPUTE_TURNS = 4096, 0.05, 5
# The device waits no longer than this for the host to queue a copy.
MAX_HELD_SECONDS = 0.05
Work = Callable[[], None]
Views = list[torch.Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="the sizes of the goals, 128 pieces and 64 and 512 MiB")
    parser.add_argument("--repeat", type=int, default=7, help="turns; the best counts")
    parser.add_argument("--require", action="store_true", help="fail where there is no CUDA device")
    parser.add_argument("--no-calibrate", action="store_true", help="with the table there is, or none")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or not op_library().loaded:
        reason = "no CUDA device" if op_library().loaded else op_library().explain()
        print(f"nothing measured: {reason}")
        write(arguments.json, {"skipped": reason, "results": []})
        return 1 if arguments.require else 0
    device = torch.cuda.current_device()
    if not arguments.no_calibrate:
        calibrate_device(device, lambda line: print(f"calibrating {line}"))
    table = use_cached(device)
    results: list[dict[str, Any]] = []
    figures: dict[str, object] = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
    figures["results"] = results
    for size, count in shapes(quick=arguments.quick):
        for direction in DIRECTIONS:
            result = Case(direction, size, count, device).measure(arguments.repeat, table)
            results.append(result)
            # Now, not at the end: a driver that crashes costs one case.
            write(arguments.json, figures)
            print(" ".join(f"{name}={show(value)}" for name, value in result.items()), flush=True)
        torch.cuda.empty_cache()
    pool = pool_figures(torch.device("cuda", device))
    print(" ".join(f"{name}={show(value)}" for name, value in pool.items()))
    print("\n".join(judged(results)))
    write(arguments.json, figures | {"pool": pool})
    return 0


def pool_figures(device: torch.device, *, blocks: int = 4096, block_bytes: int = 1 << 20) -> dict[str, float]:
    """How fast host memory is made ready for a device, and when its first blocks can be used."""
    start = time.perf_counter()
    with HostPool.for_device(blocks, block_bytes, device) as pool:
        first = time.perf_counter() - start
        pool.wait(blocks)
        seconds = time.perf_counter() - start
        pinned = pool.pinned_blocks / blocks
    return {"pool_first_s": first, "pool_gb_s": blocks * block_bytes / seconds / 1e9, "pool_pinned": pinned}


def shapes(*, quick: bool) -> Iterator[tuple[int, int]]:
    """Sizes and numbers of pieces whose bytes fit."""
    for size in GOAL_SIZES if quick else SIZES:
        for count in (128, GOAL_BYTES // size, 8 * GOAL_BYTES // size) if quick else COUNTS:
            if size * count <= MAX_BYTES:
                yield size, count


def judged(results: list[dict[str, Any]]) -> list[str]:
    """One line for each goal and direction: the worst case that it holds for."""
    lines = []
    for figure, goal, directions, sizes in GOALS:
        for direction in directions:
            cases = [
                (result[figure], result["piece_bytes"], result["count"])
                for result in results
                if result["direction"] == direction
                and result["piece_bytes"] in sizes
                and result["piece_bytes"] * result["count"] >= GOAL_BYTES
                and figure in result
            ]
            if cases:
                least, size, count = min(cases)
                met = "met" if least >= goal else "missed"
                lines.append(f"goal {figure} {direction}: {least:.3f} of {goal}, {met} ({size} bytes x {count})")
    return lines


def show(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}:{show(item)}" for name, item in value.items())
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def write(path: Path | None, figures: dict[str, object]) -> None:
    if path:
        path.write_text(json.dumps(figures, indent=2) + "\n")


class Case:
    """One direction with one size and number of pieces, scattered on both sides."""

    def __init__(self, direction: str, size: int, count: int, device: int) -> None:
        self.num_views, blocks = views_and_blocks(size, count)
        self.direction, self.size, self.count, self.device = direction, size, self.num_views * blocks, device
        random = np.random.default_rng(0)
        ids = np.column_stack((random.permutation(blocks), random.permutation(blocks)))
        self.pairs = torch.from_numpy(ids)
        self.mapping = partial(Mapping, ids, src_blocks=blocks, dst_blocks=blocks, rule="swap")
        self.on_device = [torch.ones(self.count * size, dtype=torch.uint8, device="cuda") for _ in range(2)]
        hosts = 0 if direction == "d2d" else 2
        self.on_host = [torch.ones(self.count * size, dtype=torch.uint8, pin_memory=True) for _ in range(hosts)]
        self.streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        self.compute = torch.cuda.Stream()
        # Made once, as an engine makes them.
        self.bound = [ops.bind(self.views(src), self.views(dst)) for src, dst in self.routes()]

    def measure(self, repeat: int, table: StrategyTable | None) -> dict[str, object]:
        """Time ours, the large copy and the loop by turns, then each strategy, then compute beside ours."""
        self.require_copied()
        routes = self.routes()
        works: dict[str, Work] = {
            "ours": self.ours,
            "large": lambda: self.on_streams([lambda s=s, d=d: d.copy_(s, non_blocking=True) for s, d in routes]),
        }
        if self.count <= MAX_LOOPED:
            works["loop"] = lambda: self.on_streams(
                [
                    partial(torch.ops.blockyard.bench_copy_loop, self.views(s), self.views(d), self.pairs)
                    for s, d in routes
                ]
            )
        taken, wall, host = self.best(works, repeat)
        pieces = self.count * len(routes)
        moved = self.size * pieces
        result: dict[str, object] = {"direction": self.direction, "piece_bytes": self.size, "count": self.count}
        result |= {"gb_s": moved / taken["ours"] / 1e9, "to_large": taken["large"] / taken["ours"]}
        result |= {"wall_gb_s": moved / wall["ours"] / 1e9, "wall_to_large": wall["large"] / wall["ours"]}
        result["host_us_per_100"] = host["ours"] * 1e8 / pieces
        if "loop" in taken:
            result["to_loop"] = taken["loop"] / taken["ours"]
            result["loop_host_us_per_100"] = host["loop"] * 1e8 / pieces
        if self.direction != "both":
            result["predicted"] = to_large(self.direction, self.size, self.count)
        if self.direction in ("h2d", "d2h"):
            held = table or StrategyTable("", "", ())
            rule = held.rule(self.direction, self.size, self.count, host_rows=self.num_views > 1)
            sms = rule.thread_blocks if rule.strategy in ("staged", "kernel") else 0
            result |= {"strategy": rule.strategy, "sms": sms, "strategies": self.by_strategy(repeat, moved)}
        # Where calls return long before the copies end: else none would be left to run beside anything.
        if taken["ours"] > max(1e-3, 2 * host["ours"]):
            result["compute_kept"] = self.compute_kept(taken["ours"])
        return result

    def require_copied(self) -> None:
        """Fail if our copies leave other bytes than the source has."""
        device = self.on_device[0].device
        for src, dst in self.routes():
            src.copy_(torch.randint(256, src.shape, dtype=torch.uint8, device=device))
            dst.zero_()
        torch.cuda.synchronize()
        self.ours()
        torch.cuda.synchronize()
        ids = self.pairs.to(device).unbind(1)
        for route in self.routes():
            for view in zip(*map(self.views, route), strict=True):
                src, dst = (side.to(device)[blocks] for side, blocks in zip(view, ids, strict=True))
                if not torch.equal(src, dst):
                    raise SystemExit(f"{self.direction}: {self.count} pieces of {self.size} bytes have other bytes")

    def best(self, works: dict[str, Work], repeat: int) -> tuple[dict[str, float], ...]:
        """The least seconds of each on the device, until all was done, and until the call returned; by turns."""
        least: tuple[dict[str, float], ...] = tuple(dict.fromkeys(works, float("inf")) for _ in range(3))
        for _ in range(repeat):
            for name, work in works.items():
                wall, returned = self.timed(work, name)
                for best, seconds in zip(least, (self.on_device_alone(work, returned), wall, returned), strict=True):
                    best[name] = min(best[name], seconds)
        return least

    def by_strategy(self, repeat: int, moved: int) -> dict[str, float]:
        """GB/s of every strategy."""
        rates = {}
        for strategy in STRATEGIES:
            left_out = {"loop": self.count > MAX_LOOPED, "staged": self.num_views == 1}
            if left_out.get(strategy, False):
                continue
            with force_strategy(self.device, strategy):
                taken, *_ = self.best({strategy: self.ours}, repeat)
            rates[strategy] = moved / taken[strategy] / 1e9
        return rates

    def compute_kept(self, seconds: float) -> float:
        """Rate of matrix products while copies run without a pause, as a part of their rate alone."""
        matrix = torch.ones((MATRIX, MATRIX), dtype=torch.bfloat16, device="cuda")
        alone = self.products(matrix, 10) / 10
        products = max(1, int(COMPUTE_SECONDS / alone))
        kept = []
        for _ in range(COMPUTE_TURNS):
            alone = self.products(matrix, products)
            for _ in range(int(2 * alone / seconds) + 1):
                self.ours()
            kept.append(alone / self.products(matrix, products))
            torch.cuda.synchronize()
        return statistics.median(kept)

    def products(self, matrix: torch.Tensor, count: int) -> float:
        """Seconds that matrix products take on a stream of their own, by the device's clock."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.compute):
            torch.mm(matrix, matrix)
            first.record()
            for _ in range(count):
                torch.mm(matrix, matrix)
            last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def ours(self) -> None:
        """One call for each route, with its own mapping."""
        self.on_streams([lambda run=run: run(self.mapping()) for run in self.bound])

    def views(self, memory: torch.Tensor) -> Views:
        """Cut memory: contiguous in rows on the host, apart on the device."""
        if memory.is_cuda:
            return list(memory.view(self.num_views, -1, self.size).unbind())
        return list(memory.view(-1, self.num_views * self.size).split(self.size, dim=1))

    def routes(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Sources and destinations, one pair for each direction that is under way."""
        if self.direction == "d2d":
            return [(self.on_device[0], self.on_device[1])]
        out, back = (self.on_device[0], self.on_host[0]), (self.on_host[1], self.on_device[1])
        return {"d2h": [out], "h2d": [back], "both": [out, back]}[self.direction]

    def on_streams(self, works: list[Work]) -> None:
        """Queue each work on a stream of its own."""
        for stream, work in zip(self.streams, works, strict=False):
            with torch.cuda.stream(stream):
                work()

    def on_device_alone(self, work: Work, queued: float) -> float:
        """Seconds of the device from the first command to the last, which it begins once all are queued."""
        first, *last = (torch.cuda.Event(enable_timing=True) for _ in range(1 + len(self.streams)))
        torch.cuda.synchronize()
        # At about 2 GHz. Longer than the driver's queue is deep, the caller would only wait for it.
        torch.cuda._sleep(int(2e9 * min(2 * queued + 1e-4, MAX_HELD_SECONDS)))  # noqa: SLF001
        first.record()
        for stream in self.streams:
            stream.wait_event(first)
        work()
        for stream, event in zip(self.streams, last, strict=True):
            event.record(stream)
        torch.cuda.synchronize()
        return max(first.elapsed_time(event) for event in last) / 1e3

    def timed(self, work: Work, name: str) -> tuple[float, float]:
        """Seconds until all is done, and until the call returned."""
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_push(f"{self.direction} {self.size} x {self.count} {name}")
        start = time.perf_counter()
        work()
        returned = time.perf_counter() - start
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        torch.cuda.nvtx.range_pop()
        return seconds, returned


if __name__ == "__main__":
    raise SystemExit(main())
