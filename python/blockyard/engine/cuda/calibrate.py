"""Measures the fastest copy strategies to and within a device: `blockyard calibrate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from blockyard.engine.cuda.journal import Journal
from blockyard.engine.ops import swap_blocks
from blockyard.engine.ops.library import op_library
from blockyard.engine.ops.strategy import (
    ALLOWED,
    MOST,
    Direction,
    Rule,
    StrategyName,
    StrategyTable,
    force_strategy,
    table_path,
    use_batch_pieces,
    use_cached,
)
from blockyard.errors import BlockyardError

PIECE_BYTES: Final = tuple(1 << power for power in range(10, 21))
COUNTS: Final = (16, 128, 1024, 8192, 50_000)
_MOST_BYTES = 1 << 30
_REPEAT = 5
# Pieces of one batched call, and a copy of many small pieces to tell them apart by.
BATCH_SIZES: Final = (512, 1024, 2048)
_BATCHED_PIECES, _BATCHED_BYTES = 8192, 8192
# Fewer are safer with drivers that fail: more must be faster by this.
_BATCH_GAIN = 1.02
# A strategy that takes multiprocessors from compute must be this much faster. With the host, both kernels take some and
# a batch takes none; within a device, `kernel` takes all and `bulk` few.
_HANDICAP: Final[dict[Direction, dict[StrategyName, float]]] = {
    "h2d": {"batch": 1.0, "kernel": 1.1, "bulk": 1.1},
    "d2d": {"kernel": 1.1, "bulk": 1.0},
}
Measure = Callable[[int, int], dict[StrategyName, float]]


def calibrate_device(index: int, say: Callable[[str], None]) -> StrategyTable:
    """Measure one CUDA device and keep the table for all processes of this user.

    Args:
        index: the device's.
        say: takes one line for each measured pair of size and count.

    Returns:
        The table.

    Raises:
        BlockyardError: a strategy delivers other bytes than a plain copy.
    """
    torch.cuda.set_device(index)
    name, torch_cuda = torch.cuda.get_device_name(index), str(torch.version.cuda)
    journal = Journal(table_path(name).with_suffix(".partial"), {"device": name, "torch_cuda": torch_cuda})
    batch_pieces = choose_batch_pieces(
        lambda most: journal.measure(f"batches of {most}", lambda: {"batch": measure_batches(index, most)})
    )
    say(f"batches of up to {batch_pieces} pieces")
    use_batch_pieces(index, batch_pieces)
    rules: list[Rule] = []
    for direction in _HANDICAP:

        def measure(size: int, count: int, direction: Direction = direction) -> dict[StrategyName, float]:
            case = f"{direction} {size} x {count}"
            taken = journal.measure(case, lambda: measure_strategies(index, direction, size, count))
            if not taken:
                say(f"{case}: the process ended while it was measured, it is left out")
                return {ALLOWED[direction][0]: float("inf")}
            rates = ", ".join(f"{strategy} {size * count / s / 1e9:6.1f} GB/s" for strategy, s in taken.items())
            say(f"{direction} {size:8d} bytes x {count:6d}: {rates}")
            return taken

        rules += choose_rules(direction, measure, PIECE_BYTES, COUNTS)
    table = StrategyTable(name, torch_cuda, tuple(rules), batch_pieces)
    table.save(table_path(name))
    journal.close()
    use_cached.cache_clear()
    use_cached(index)
    return table


def choose_batch_pieces(measure: Callable[[int], dict[StrategyName, float]]) -> int:
    """Give the pieces of one batched call: more than the fewest only where that is faster.

    Args:
        measure: gives the seconds of a copy in batches of so many pieces, nothing where it could not be measured.
    """
    chosen, best = BATCH_SIZES[0], float("inf")
    for most in BATCH_SIZES:
        seconds = measure(most).get("batch", float("inf"))
        if seconds * _BATCH_GAIN < best:
            chosen, best = most, seconds
    return chosen


def measure_batches(index: int, most: int) -> float:
    """Time many small pieces from page-locked memory to the device in batches of so many; gives the least seconds."""
    source = torch.zeros((_BATCHED_PIECES, _BATCHED_BYTES), dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(source, device=f"cuda:{index}")
    random = np.random.default_rng(0)
    pairs = torch.from_numpy(np.column_stack([random.permutation(_BATCHED_PIECES) for _ in range(2)]))
    with force_strategy(index, "batch"):
        use_batch_pieces(index, most)
        return _best(lambda: swap_blocks([source], [device], pairs))


def choose_rules(
    direction: Direction, measure: Measure, sizes: Sequence[int], counts: Sequence[int]
) -> tuple[Rule, ...]:
    """Turn measurements into rules: for each count and size the fastest strategy, if it is worth its multiprocessors.

    Args:
        direction: what is measured.
        measure: gives the seconds of each strategy for (bytes of a piece, number of pieces).
        sizes: bytes of a piece, ascending.
        counts: numbers of pieces, ascending; the last stands for all larger ones.

    Returns:
        Rules for copies in that direction. Pieces larger than measured use the strategy that needs no rule.
    """
    handicap, rules = _HANDICAP[direction], []
    for place, count in enumerate(counts):
        most = MOST if place == len(counts) - 1 else count
        steps: list[Rule] = []
        for size in sizes:
            if size * count > _MOST_BYTES:
                break
            taken = measure(size, count)
            strategy = min(taken, key=lambda strategy: taken[strategy] * handicap[strategy])
            if steps and steps[-1].strategy == strategy:
                steps.pop()
            steps.append(Rule(direction, size, most, strategy))
        # Larger pieces of so many must not fall to the next count's rules.
        usual = ALLOWED[direction][0]
        if steps and steps[-1].strategy == usual:
            steps.pop()
        rules += [*steps, Rule(direction, MOST, most, usual)]
    return tuple(rules)


def measure_strategies(index: int, direction: Direction, size: int, count: int) -> dict[StrategyName, float]:
    """Time scattered pieces from page-locked memory or the device to the device, by each strategy that the device has.

    Returns:
        Seconds of each strategy, the best of some; by the clock of the host, its own time included.

    Raises:
        BlockyardError: a strategy delivers other bytes than a plain copy.
    """
    source = torch.randint(0, 256, (count, size), dtype=torch.uint8)
    source = source.pin_memory() if direction == "h2d" else source.to(f"cuda:{index}")
    device = torch.zeros((count, size), dtype=torch.uint8, device=f"cuda:{index}")
    random = np.random.default_rng(0)
    pairs = torch.from_numpy(np.column_stack((random.permutation(count), random.permutation(count))))
    expected = torch.empty_like(device)
    expected[pairs[:, 1].to(device.device)] = source.to(device.device)[pairs[:, 0].to(device.device)]
    taken: dict[StrategyName, float] = {}
    for strategy in _HANDICAP[direction]:
        if strategy == "bulk" and not torch.ops.blockyard.has_bulk(index):
            continue
        device.zero_()
        with force_strategy(index, strategy):
            taken[strategy] = _best(lambda: swap_blocks([source], [device], pairs))
        if not torch.equal(device, expected):
            raise BlockyardError(
                f"copying {count} pieces of {size} bytes {direction} by {strategy} delivers other bytes"
            )
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
