"""Host time of copies between host and device, over a stand-in for the driver that copies nothing.

    python benches/bench_submit.py [--repeat 7]

A call checks 160 views of 8 KiB on each side and submits a swap of 64 or of 1,000 blocks: the layers of a model of 70B
on one of four ranks. `submit_64x160_us` is the time of such a call with the strategy chosen without a table;
the other strategies are measured too. Kernel launches and the driver's time are not included. With BENCH_JSON=FILE
it also adds its figures to the flat JSON object in FILE. Without g++ or the headers of torch and CUDA it says so.
"""

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from figures import keep

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "buildsystem"), str(ROOT / "tests" / "support")]

from stand_in import build_stand_in  # noqa: E402

from blockyard._core import Mapping  # noqa: E402
from blockyard.engine.ops import compiled  # noqa: E402
from blockyard.engine.ops.strategy import STRATEGIES  # noqa: E402
from blockyard_build.toolchain import MissingError  # noqa: E402

VIEWS, WIDTH, BLOCKS = 160, 8 << 10, 1000
# Blocks per call, and calls per turn.
MOVED = {64: 50, 1000: 5}
TO_DEVICE, TO_HOST = 0, 1
# A non-default stream, no graph capture, a driver that reports memory ranges, batches of any length.
FLAGS = (True, False, True, 2**62)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7, help="turns; the best counts")
    repeat = parser.parse_args().repeat
    with tempfile.TemporaryDirectory() as folder:
        try:
            fake = build_stand_in(Path(folder), "-O2")
        except MissingError as missing:
            print(f"nothing measured: no {missing}")
            return
    fake.fake_dry(*[True])
    rows = torch.empty((BLOCKS, VIEWS * WIDTH), dtype=torch.uint8)
    host, device = list(rows.split(WIDTH, dim=1)), list(torch.empty((VIEWS, BLOCKS, WIDTH), dtype=torch.uint8).unbind())
    figures = {}
    for moved, name in [(64, ""), (64, "kernel"), (64, "batch"), (1000, "")]:
        taken = []
        for direction in (TO_DEVICE, TO_HOST):
            end = rows.data_ptr() + rows.numel()
            fake.fake_reset(rows.data_ptr(), end, *FLAGS)
            fake.fake_register(rows.data_ptr(), end, 0)
            fake.fake_map(device[0].data_ptr(), device[0].data_ptr() + rows.numel())
            fake.fake_strategy(direction, STRATEGIES.get(name, 0), 4)
            src, dst = (host, device) if direction == TO_DEVICE else (device, host)
            taken.append(best(partial(swap, src, dst, direction), moved, repeat))
            calls = fake.fake_calls().decode()
            assert ("F" in calls) == (name != "batch"), calls[:100]
        figures[f"submit_{moved}x160_{name}_us" if name else f"submit_{moved}x160_us"] = 1e6 * max(taken)
    for name, value in figures.items():
        print(f"{name:32} {value:8.1f}")
    keep(figures)


def swap(src: list[torch.Tensor], dst: list[torch.Tensor], direction: int, ids: np.ndarray) -> None:
    """Do what an engine does to swap its views, with the stand-in in place of the library's op."""

    def run(src: list[torch.Tensor], dst: list[torch.Tensor], mapping: Mapping) -> None:
        pairs = torch.from_numpy(mapping.pairs)
        compiled._run(torch.ops.blockyard_fake.swap, src, dst, pairs, direction == TO_HOST, direction == TO_DEVICE)  # noqa: SLF001

    mapping = Mapping(ids, src_blocks=BLOCKS, dst_blocks=BLOCKS, rule="swap")
    compiled._Compiled(run, compiled.BY_LIBRARY.copy_within).between(src, dst, mapping)  # noqa: SLF001


def best(work: partial[None], moved: int, repeat: int) -> float:
    """Return the thread-CPU seconds of one call, the best of several turns."""
    random = np.random.default_rng(0)
    ids = np.column_stack((random.permutation(BLOCKS), random.permutation(BLOCKS)))[:moved]
    work(ids)
    seconds = float("inf")
    for _ in range(repeat):
        start = time.thread_time()
        for _ in range(MOVED[moved]):
            work(ids)
        seconds = min(seconds, (time.thread_time() - start) / MOVED[moved])
    return seconds


if __name__ == "__main__":
    main()
