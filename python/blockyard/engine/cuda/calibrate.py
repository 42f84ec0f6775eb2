"""Measures the fastest copy strategies to and from a device: `blockyard calibrate`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import torch

from blockyard.engine.cuda.journal import Journal
from blockyard.engine.ops import swap_blocks
from blockyard.engine.ops.library import op_library
from blockyard.engine.ops.strategy import (
    DIRECTIONS,
    NO_LIMIT,
    Direction,
    Rule,
    StrategyName,
    StrategyTable,
    default_thread_blocks,
    force_strategy,
    table_path,
    use_batch_pieces,
    use_cached,
)
from blockyard.errors import BlockyardError
from blockyard.progress import Progress

PIECE_BYTES: Final = tuple(1 << power for power in range(10, 21))
COUNTS: Final = (16, 128, 1024, 8192, 50_000)
_MAX_BYTES = 1 << 30
_REPEAT = 5
# Pieces per batched call to try, and the number and size of the pieces to compare them with.
BATCH_SIZES: Final = (512, 1024, 2048)
_BATCHED_PIECES, _BATCHED_BYTES = 8192, 8192
# Short batches are safer with faulty drivers: a longer one must be faster by this factor.
_BATCH_GAIN = 1.02
# A strategy that takes multiprocessors from compute must be faster by this factor. On an H200, concurrent compute keeps
# its full rate with batches, .98 of it with staging, and .7 with the kernel (docs/benchmarks/copies.md).
_HANDICAP: Final[dict[StrategyName, float]] = {"batch": 1.0, "staged": 1.03, "kernel": 1.3}
# For pieces larger than any measured.
_USUAL: Final[StrategyName] = "batch"
# Bytes of the host rows that hold the pieces, as in an engine's host pool, and the maximum views of one launch.
_ROW_BYTES, _MAX_VIEWS = 1 << 20, 256
# Numbers of thread blocks to try, the size and number of pieces to try them on, and how much slower than the best the
# chosen number may be.
_THREAD_BLOCKS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24)
_THREAD_BLOCKS_SHAPE: Final = (8192, 8192)
_NEARLY = 1.03
# Random bytes are drawn once and repeated, since a GiB of them would take seconds. No block size divides this length,
# so no two blocks have the same bytes.
_DRAWN = (16 << 20) + 43
Measure = Callable[[int, int], dict[StrategyName, float]]
ThreadBlocks = dict[StrategyName, int]


def calibrate_device(index: int, say: Callable[[str], None]) -> StrategyTable:
    """Measure one CUDA device and keep the table for all processes of this user.

    Args:
        index: index of the device.
        say: called with one line for each measured case.

    Returns:
        The table.

    Raises:
        BlockyardError: a strategy delivers other bytes than a plain copy.
    """
    name, torch_cuda = torch.cuda.get_device_name(index), str(torch.version.cuda)
    journal = Journal(table_path(name).with_suffix(".partial"), {"device": name, "torch_cuda": torch_cuda})
    rules: list[Rule] = []
    with torch.cuda.device(index):
        batch_pieces = choose_batch_pieces(
            lambda max_pieces: journal.measure(
                f"batches of {max_pieces}", lambda: {"batch": measure_batches(index, max_pieces)}
            )
        )
        say(f"batches of up to {batch_pieces} pieces" if batch_pieces else "no batches: a process died measuring one")
        use_batch_pieces(index, batch_pieces)
        for direction in DIRECTIONS:
            rules += _measure_direction(index, direction, journal, say)
    table = StrategyTable(name, torch_cuda, tuple(rules), batch_pieces)
    table.save(table_path(name))
    journal.close()
    use_cached.cache_clear()
    use_cached(index)
    return table


def _measure_direction(
    index: int, direction: Direction, journal: Journal, say: Callable[[str], None]
) -> tuple[Rule, ...]:
    counted = journal.measure(f"{direction} blocks", lambda: {"kernel": float(measure_thread_blocks(index, direction))})
    thread_blocks: ThreadBlocks = {"kernel": int(counted["kernel"])} if counted else {}
    say(f"{direction} thread blocks: {thread_blocks}")

    def measure(size: int, count: int) -> dict[StrategyName, float]:
        case = f"{direction} {size} x {count}"
        taken = journal.measure(case, lambda: measure_strategies(index, direction, size, count, thread_blocks))
        if not taken:
            say(f"{case}: left out, since a process died measuring it")
            return {_USUAL: float("inf")}
        rates = ", ".join(f"{strategy} {size * count / s / 1e9:6.1f} GB/s" for strategy, s in taken.items())
        say(f"{direction} {size:8d} bytes x {count:6d}: {rates}")
        return taken

    return choose_rules(direction, measure, PIECE_BYTES, COUNTS, thread_blocks)


def choose_batch_pieces(measure: Callable[[int], dict[StrategyName, float]]) -> int:
    """Return the number of pieces per batched call: the smallest, unless a larger one is faster.

    Args:
        measure: returns the seconds of a copy in batches of that length; empty if a process died measuring it.

    Returns:
        0 for no batches, if even the shortest could not be measured. Batches longer than one that failed are not tried.
    """
    chosen, best = 0, float("inf")
    for max_pieces in BATCH_SIZES:
        seconds = measure(max_pieces).get("batch")
        if seconds is None:
            break
        if seconds * _BATCH_GAIN < best:
            chosen, best = max_pieces, seconds
    return chosen


def measure_batches(index: int, max_pieces: int) -> float:
    """Return the fastest of several runs, in seconds: small pieces to the device, in batches of `max_pieces`."""
    source = torch.zeros((_BATCHED_PIECES, _BATCHED_BYTES), dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(source, device=f"cuda:{index}")
    random = np.random.default_rng(0)
    pairs = torch.from_numpy(np.column_stack([random.permutation(_BATCHED_PIECES) for _ in range(2)]))
    with force_strategy(index, "batch"):
        use_batch_pieces(index, max_pieces)
        return _best(lambda: swap_blocks([source], [device], pairs))


def choose_rules(
    direction: Direction, measure: Measure, sizes: Sequence[int], counts: Sequence[int], thread_blocks: ThreadBlocks
) -> tuple[Rule, ...]:
    """Turn measurements into rules: for each count and size the fastest strategy, if it is worth its multiprocessors.

    Args:
        direction: direction of the copies.
        measure: returns the seconds of each strategy for (bytes of a piece, number of pieces).
        sizes: bytes of a piece, ascending.
        counts: numbers of pieces, ascending; the last stands for all larger ones.
        thread_blocks: thread blocks of the strategies that do not use `default_thread_blocks`.

    Returns:
        Rules for copies in that direction. A rule for staging is followed by one for copies that cannot be staged.
        Pieces larger than measured are batched.
    """
    rules = []
    for place, count in enumerate(counts):
        max_count = NO_LIMIT if place == len(counts) - 1 else count
        steps: list[tuple[int, tuple[StrategyName, ...]]] = []
        for size in sizes:
            if size * count > _MAX_BYTES:
                break
            taken = measure(size, count)
            order = sorted(taken, key=lambda strategy: taken[strategy] * _HANDICAP[strategy])
            chosen = tuple(order[: 2 if order[0] == "staged" else 1])
            if steps and steps[-1][1] == chosen:
                steps.pop()
            steps.append((size, chosen))
        # Without this row, larger pieces would match the next one.
        if steps and steps[-1][1] == (_USUAL,):
            steps.pop()
        for size, chosen in (*steps, (NO_LIMIT, (_USUAL,))):
            rules += [
                Rule(direction, size, max_count, strategy, thread_blocks.get(strategy, default_thread_blocks(strategy)))
                for strategy in chosen
            ]
    return tuple(rules)


def choose_thread_blocks(taken: dict[int, float]) -> int:
    """Return the smallest number of thread blocks that is nearly as fast as the best, given the seconds of each."""
    best = min(taken.values())
    return min(number for number, seconds in taken.items() if seconds <= best * _NEARLY)


def measure_strategies(
    index: int, direction: Direction, size: int, count: int, thread_blocks: ThreadBlocks
) -> dict[StrategyName, float]:
    """Time copies of scattered pieces by each strategy of the device; see `_Pieces`.

    Args:
        index: index of the device.
        direction: direction of the copies.
        size: bytes of a piece.
        count: number of pieces.
        thread_blocks: thread blocks of the strategies that do not use `default_thread_blocks`.

    Returns:
        Seconds of each strategy, the best of several runs, by the host's clock; launch overhead is included.

    Raises:
        BlockyardError: a strategy delivers other bytes than a plain copy.
    """
    pieces = _Pieces(torch.device("cuda", index), direction, size, count)
    return {
        strategy: pieces.measure(strategy, thread_blocks.get(strategy, default_thread_blocks(strategy)))
        for strategy in _HANDICAP
        if strategy != "staged" or pieces.num_views > 1
    }


def measure_thread_blocks(index: int, direction: Direction) -> int:
    """Find how many thread blocks of the kernel keep the link busy.

    Args:
        index: index of the device.
        direction: direction of the copies.

    Raises:
        BlockyardError: the kernel delivers other bytes than a plain copy.
    """
    pieces = _Pieces(torch.device("cuda", index), direction, *_THREAD_BLOCKS_SHAPE)
    return choose_thread_blocks({number: pieces.measure("kernel", number) for number in _THREAD_BLOCKS})


def views_and_blocks(size: int, count: int) -> tuple[int, int]:
    """Lay out about `count` pieces of `size` bytes; return the numbers of views and blocks."""
    views = max(1, min(_MAX_VIEWS, _ROW_BYTES // size, count))
    return views, count // views


class _Pieces:
    """Scattered pieces of one size: separate views on the device, contiguous page-locked rows on the host."""

    def __init__(self, device: torch.device, direction: Direction, size: int, count: int) -> None:
        self.device, self.direction, self.size, self.count = device, direction, size, count
        self.num_views, blocks = views_and_blocks(size, count)
        self.rows = _random_bytes(torch.device("cpu"), blocks, self.num_views * size).pin_memory()
        self.apart = _random_bytes(device, self.num_views, blocks, size)
        random = np.random.default_rng(0)
        self.pairs = torch.from_numpy(np.column_stack((random.permutation(blocks), random.permutation(blocks))))
        sides: list[list[torch.Tensor]] = [list(self.rows.split(size, dim=1)), list(self.apart.unbind())]
        self.src, self.dst = reversed(sides) if direction == "d2h" else sides
        self.expected = self._written().clone()
        target = (
            self.expected.view(blocks, self.num_views, size).transpose(0, 1) if direction == "d2h" else self.expected
        )
        for source, rows_of in zip(self.src, target, strict=True):
            chosen = source[self.pairs[:, 0].to(source.device)]
            rows_of[self.pairs[:, 1].to(rows_of.device)] = chosen.to(rows_of.device)

    def measure(self, strategy: StrategyName, thread_blocks: int) -> float:
        """Return the seconds of a copy by one strategy, the best of several runs; raises BlockyardError."""
        self._written().zero_()
        with force_strategy(self.device.index, strategy, thread_blocks):
            seconds = _best(lambda: swap_blocks(self.src, self.dst, self.pairs))
        if not torch.equal(self._written(), self.expected):
            raise BlockyardError(
                f"copying {self.count} pieces of {self.size} bytes {self.direction} by {strategy} delivers other bytes"
            )
        return seconds

    def _written(self) -> torch.Tensor:
        return self.rows if self.direction == "d2h" else self.apart


@cache
def _drawn() -> torch.Tensor:
    return torch.randint(0, 256, (_DRAWN,), dtype=torch.uint8)


def _random_bytes(device: torch.device, *shape: int) -> torch.Tensor:
    num_bytes = math.prod(shape)
    return _drawn().to(device).repeat(-(-num_bytes // _DRAWN))[:num_bytes].view(shape)


def _best(work: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(_REPEAT):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


@dataclass(frozen=True)
class CalibratedDevice:
    """A calibrated device.

    Attributes:
        index: index of the device.
        path: file with its table.
        table: the table that copies of this device use from now on.
        lines: one line for each measured case.
    """

    index: int
    path: Path
    table: StrategyTable
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Calibration:
    """The result of `blockyard calibrate`.

    Attributes:
        devices: the measured devices.
        problem: why some device was not measured; empty if all were.
        exit_code: 1 if a device cannot be measured; otherwise 0, even without any device.
    """

    devices: tuple[CalibratedDevice, ...] = ()
    problem: str = ""
    exit_code: int = 0


def run_calibrate(progress: Callable[[str], AbstractContextManager[Progress]]) -> Calibration:
    """Calibrate every CUDA device of this machine.

    Args:
        progress: opens a progress view for the device of that name.
    """
    if not torch.cuda.is_available():
        return Calibration(problem="no CUDA device that torch can use: nothing was measured or saved")
    if not op_library().loaded:
        return Calibration(problem=f"nothing was measured or saved: {op_library().explain()}", exit_code=1)
    devices: list[CalibratedDevice] = []
    cases = sum(size * count <= _MAX_BYTES for size in PIECE_BYTES for count in COUNTS)
    total = 1 + len(DIRECTIONS) * (1 + cases)
    for index in range(torch.cuda.device_count()):
        lines: list[str] = []
        with progress(f"cuda:{index}") as view:

            def say(line: str, lines: list[str] = lines, view: Progress = view) -> None:
                lines.append(line)
                view.step(len(lines), total, line)

            try:
                table = calibrate_device(index, say)
            except BlockyardError as error:
                return Calibration(tuple(devices), f"cuda:{index}: {error}", exit_code=1)
        devices.append(CalibratedDevice(index, table_path(table.device), table, tuple(lines)))
    return Calibration(tuple(devices))
