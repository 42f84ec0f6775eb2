"""Measures which way blocks should take from host to device: `blockyard calibrate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from blockyard.errors import BlockyardError
from blockyard.transfer.cuda import op_library
from blockyard.transfer.ops import swap_blocks
from blockyard.transfer.ways import MOST, Rule, WayName, WayTable, forced, table_path, use_cached

PIECE_BYTES: Final = tuple(1 << power for power in range(10, 21))
COUNTS: Final = (16, 128, 1024, 8192, 50_000)
_MOST_BYTES = 1 << 30
_REPEAT = 5
# A kernel takes multiprocessors from compute: it has to be so much faster.
_ADVANTAGE = 1.1


def calibrate_device(index: int, say: Callable[[str], None]) -> WayTable:
    """Measure one CUDA device and keep the table for all processes of this user.

    Args:
        index: the device's.
        say: takes one line for each measured pair of size and count.

    Returns:
        The table.

    Raises:
        BlockyardError: a way delivers other bytes than the plain copy.
    """
    torch.cuda.set_device(index)

    def measure(size: int, count: int) -> dict[WayName, float]:
        taken = measure_ways(index, size, count)
        say(
            f"{size:8d} bytes x {count:6d}: "
            + ", ".join(f"{way} {size * count / s / 1e9:6.1f} GB/s" for way, s in taken.items())
        )
        return taken

    rules = choose_rules(measure, PIECE_BYTES, COUNTS)
    table = WayTable(torch.cuda.get_device_name(index), str(torch.version.cuda), rules)
    table.save(table_path(table.device))
    use_cached.cache_clear()
    use_cached(index)
    return table


def choose_rules(
    measure: Callable[[int, int], dict[WayName, float]], sizes: Sequence[int], counts: Sequence[int]
) -> tuple[Rule, ...]:
    """Make rules of what is measured: for each count the largest size up to which the kernel is worth it.

    Args:
        measure: gives the seconds of each way for (bytes of a piece, number of pieces).
        sizes: bytes of a piece, ascending.
        counts: numbers of pieces, ascending; the last stands for all larger ones.

    Returns:
        Rules for copies from host to device.
    """
    rules = []
    for place, count in enumerate(counts):
        largest = 0
        for size in sizes:
            if size * count > _MOST_BYTES:
                break
            taken = measure(size, count)
            if taken["kernel"] * _ADVANTAGE > taken["batch"]:
                break
            largest = size
        most = MOST if place == len(counts) - 1 else count
        # Larger pieces of so many must not fall to the next count's rule.
        if largest:
            rules.append(Rule("h2d", largest, most, "kernel"))
        rules.append(Rule("h2d", MOST, most, "batch"))
    return tuple(rules)


def measure_ways(index: int, size: int, count: int) -> dict[WayName, float]:
    """Time scattered pieces from page-locked memory to the device, by batch and by kernel.

    Returns:
        Seconds of each way, the best of some; by the clock of the host, its own time included.

    Raises:
        BlockyardError: a way delivers other bytes than the plain copy.
    """
    host = torch.randint(0, 256, (count, size), dtype=torch.uint8).pin_memory()
    device = torch.zeros((count, size), dtype=torch.uint8, device=f"cuda:{index}")
    random = np.random.default_rng(0)
    pairs = torch.from_numpy(np.column_stack((random.permutation(count), random.permutation(count))))
    expected = torch.empty_like(device)
    expected[pairs[:, 1].to(device.device)] = host.to(device.device)[pairs[:, 0].to(device.device)]
    taken: dict[WayName, float] = {}
    ways: tuple[WayName, ...] = ("batch", "kernel")
    for way in ways:
        device.zero_()
        with forced(index, way):
            taken[way] = _best(lambda: swap_blocks([host], [device], pairs))
        if not torch.equal(device, expected):
            raise BlockyardError(f"copying {count} pieces of {size} bytes by {way} delivers other bytes")
    return taken


def _best(work: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(_REPEAT):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def run_calibrate() -> int:
    """Calibrate every CUDA device of this machine and print what was found.

    Returns:
        The exit status, 0: nothing to calibrate is not an error.
    """
    if not torch.cuda.is_available():
        print("no CUDA device that torch can use: nothing to calibrate")
        return 0
    if not op_library().loaded:
        print(f"nothing to calibrate: {op_library().explain()}")
        return 0
    for index in range(torch.cuda.device_count()):
        table = calibrate_device(index, print)
        print(f"cuda:{index} {table.device}: written to {table_path(table.device)}")
    return 0
