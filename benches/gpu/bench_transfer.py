"""GPU copies: GB/s over sizes and numbers of pieces, beside one large copy and a loop of single copies in the same run.

    python benches/gpu/bench_transfer.py [--json FILE] [--quick] [--require]

Directions: d2h, h2d (page-locked memory), both (d2h and h2d at once, on two streams; bytes of both count), d2d. Ratios:
`to_large` to one copy of the same bytes (d2d: `copy_`; both: two large copies at once), `to_loop` to one
cudaMemcpyAsync a piece (d2d: one `copy_` a piece, Python's time included). `host_us_per_100` is the time until the call
returns. `way` is what the calibrated table chose. Without a CUDA device it says so; that is an error with --require.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from blockyard.transfer import ops, ways
from blockyard.transfer.calibrate import calibrate_device
from blockyard.transfer.cuda import op_library

SIZES = tuple(4096 << step for step in range(11))
COUNTS = (16, 128, 1024, 8192, 50_000)
DIRECTIONS = ("d2h", "h2d", "both", "d2d")
MOST_BYTES = 2 << 30
# A loop of single copies over more pieces says nothing new.
MOST_LOOPED = 8192
Work = Callable[[], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="few sizes and numbers of pieces")
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
    table = ways.use_cached(device)
    results = []
    for size, count in shapes(quick=arguments.quick):
        for direction in DIRECTIONS:
            result = Case(direction, size, count, device).measure(arguments.repeat)
            if table and direction in {"h2d", "d2h"}:
                result["way"] = table.way(direction, size, count)
            results.append(result)
            print(" ".join(f"{name}={show(value)}" for name, value in result.items()), flush=True)
        torch.cuda.empty_cache()
    write(
        arguments.json, {"device": torch.cuda.get_device_name(device), "torch": torch.__version__, "results": results}
    )
    return 0


def shapes(*, quick: bool) -> Iterator[tuple[int, int]]:
    """Sizes and numbers of pieces whose bytes fit."""
    for size in SIZES[::5] if quick else SIZES:
        for count in COUNTS[1:4] if quick else COUNTS:
            if size * count <= MOST_BYTES:
                yield size, count


def show(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def write(path: Path | None, figures: dict[str, object]) -> None:
    if path:
        path.write_text(json.dumps(figures, indent=2) + "\n")


class Case:
    """One direction with one size and number of pieces, scattered on both sides."""

    def __init__(self, direction: str, size: int, count: int, device: int) -> None:
        self.direction, self.size, self.count, self.device = direction, size, count, device
        shape = {"size": (count, size), "dtype": torch.uint8}
        random = np.random.default_rng(0)
        self.pairs = torch.from_numpy(np.column_stack((random.permutation(count), random.permutation(count))))
        self.on_device = [torch.ones(**shape, device="cuda") for _ in range(2)]
        self.on_host = [torch.ones(**shape, pin_memory=True) for _ in range(2)] if direction != "d2d" else []
        self.streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def measure(self, repeat: int) -> dict[str, object]:
        """Time ours, the large copy and the loop by turns."""
        routes = self.routes()
        works: dict[str, Work] = {
            "ours": lambda: self.on_streams(
                [lambda s=s, d=d: ops.swap_blocks([s], [d], self.pairs) for s, d in routes]
            ),
            "large": lambda: self.on_streams([lambda s=s, d=d: d.copy_(s, non_blocking=True) for s, d in routes]),
        }
        if self.count <= MOST_LOOPED:
            works["loop"] = self.loop
        taken, host = dict.fromkeys(works, float("inf")), float("inf")
        for _ in range(repeat):
            for name, work in works.items():
                seconds, returned = self.timed(work, name)
                taken[name] = min(taken[name], seconds)
                host = min(host, returned) if name == "ours" else host
        moved = self.size * self.count * len(routes)
        result: dict[str, object] = {"direction": self.direction, "piece_bytes": self.size, "count": self.count}
        result |= {"gb_s": moved / taken["ours"] / 1e9, "to_large": taken["large"] / taken["ours"]}
        if "loop" in taken:
            result["to_loop"] = taken["loop"] / taken["ours"]
        return result | {"host_us_per_100": host * 1e8 / (self.count * len(routes))}

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

    def loop(self) -> None:
        """One call for each piece: through the op, so that Python's own time does not count."""
        routes = self.routes()
        if self.direction == "d2d":
            # Within a device torch's copies of single rows are what an engine without a kernel has.
            with torch.cuda.stream(self.streams[0]):
                for source, target in self.pairs.tolist():
                    routes[0][1][target].copy_(routes[0][0][source])
            return
        with ExitStack() as stack:
            stack.enter_context(ways.forced(self.device, "loop"))
            self.on_streams([lambda s=s, d=d: ops.swap_blocks([s], [d], self.pairs) for s, d in routes])

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
