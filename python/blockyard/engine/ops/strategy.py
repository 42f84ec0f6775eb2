"""Copy strategies to and from a device, by size and number of pieces: one table per kind of device.

`blockyard calibrate` measures the table once and writes it to the user's cache folder. The ops read that file on the
first use of a device. Without a file, `default_strategy` chooses.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal, get_args

import torch

from blockyard.engine.ops.library import op_library
from blockyard.errors import InvalidArgumentError

Direction = Literal["h2d", "d2h"]
StrategyName = Literal["batch", "loop", "kernel", "staged"]
DIRECTIONS: Final[tuple[Direction, ...]] = get_args(Direction)
STRATEGIES: Final[dict[StrategyName, int]] = {"batch": 1, "loop": 2, "kernel": 3, "staged": 4}
NO_LIMIT: Final = 2**62
# Thread blocks of the two kernels without calibration; same as kSlotBlocks and kHostBlocks in cuda/strategy.h.
_DEFAULT_THREAD_BLOCKS: Final[dict[StrategyName, int]] = {"staged": 12, "kernel": 3}
_MAX_THREAD_BLOCKS: Final = 2**16 - 1
# Without a table, at least this many pieces between host and device are staged if each is smaller than the first size,
# or copied by a kernel if smaller than the second; same as in cuda/strategy.h.
_MIN_PIECES: Final = 32
_LARGE_STAGED_PIECE: Final = 512 << 10
_LARGE_PIECE: Final = 28 << 10
# Pieces per batched call without calibration; same as kBatchPieces in cuda/strategy.h, which does not batch from
# compute capability 10.0 on. Batches longer than the maximum crashed drivers.
BATCH_PIECES: Final = 1024
MAX_BATCH_PIECES: Final = 2048
# Written to every file: tables of another version must be measured again.
_VERSION = 6


@dataclass(frozen=True)
class Rule:
    """One line of a table: it applies to at most `max_count` pieces of at most `max_bytes` on average.

    A rule for `"staged"` applies only if the host's pieces of a block are contiguous. `thread_blocks` is
    the size of a kernel's grid; other strategies have none.
    """

    direction: Direction
    max_bytes: int
    max_count: int
    strategy: StrategyName
    thread_blocks: int = 1

    @property
    def is_known(self) -> bool:
        """Whether direction and strategy exist, and the numbers are in range."""
        numbers = (self.max_bytes, self.max_count, self.thread_blocks)
        return (
            self.direction in DIRECTIONS
            and self.strategy in STRATEGIES
            and all(isinstance(number, int) for number in numbers)
            and max(self.max_bytes, self.max_count) <= NO_LIMIT
            and 1 <= self.thread_blocks <= _MAX_THREAD_BLOCKS
        )


def default_thread_blocks(strategy: StrategyName) -> int:
    """Return the thread blocks of a strategy's kernel without calibration; 1 if it has no kernel."""
    return _DEFAULT_THREAD_BLOCKS.get(strategy, 1)


def default_strategy(num_bytes: int, count: int, *, host_rows: bool) -> StrategyName:
    """Return the strategy if no rule applies, for `count` pieces of `num_bytes` each.

    Many pieces are staged if the host has several contiguous pieces per block (`host_rows`); otherwise small ones use
    the kernel. All others use the batched call.
    """
    if num_bytes >= (_LARGE_STAGED_PIECE if host_rows else _LARGE_PIECE) or count < _MIN_PIECES:
        return "batch"
    return "staged" if host_rows else "kernel"


@dataclass(frozen=True)
class StrategyTable:
    """The measurements of one kind of device.

    Attributes:
        device: the device's name.
        torch_cuda: CUDA release of torch at the time of measurement.
        rules: the first that applies decides; if none does, `default_strategy`.
        batch_pieces: pieces per batched call; 0: pieces are copied one by one.
    """

    device: str
    torch_cuda: str
    rules: tuple[Rule, ...]
    batch_pieces: int = BATCH_PIECES

    def rule(self, direction: Direction, num_bytes: int, count: int, *, host_rows: bool = False) -> Rule:
        """Return the rule that decides for `count` pieces of `num_bytes` each."""
        for rule in self.rules:
            holds = rule.direction == direction and num_bytes <= rule.max_bytes and count <= rule.max_count
            if holds and (host_rows or rule.strategy != "staged"):
                return rule
        strategy = default_strategy(num_bytes, count, host_rows=host_rows)
        return Rule(direction, num_bytes, count, strategy, default_thread_blocks(strategy))

    def save(self, path: Path) -> None:
        """Write the table to a file atomically; creates its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({"version": _VERSION, **asdict(self)}, indent=2) + "\n", encoding="utf-8")
        scratch.replace(path)


def read_table(path: Path) -> StrategyTable | None:
    """Read a table; None if there is no valid file."""
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        if written["version"] != _VERSION:
            return None
        rules = tuple(Rule(**rule) for rule in written["rules"])
        batch_pieces = written["batch_pieces"]
        known = all(rule.is_known for rule in rules)
        known = known and isinstance(batch_pieces, int) and 0 <= batch_pieces <= MAX_BATCH_PIECES
        return StrategyTable(str(written["device"]), str(written["torch_cuda"]), rules, batch_pieces) if known else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def table_path(device_name: str) -> Path:
    """Return the file for a kind of device: in BLOCKYARD_CACHE, or in `blockyard/` of the user's cache folder."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", device_name).strip("-").lower()
    folder = os.environ.get("BLOCKYARD_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(folder) if folder else Path(base) / "blockyard") / f"copy-strategy-{name}.json"


def use_rules(index: int, rules: tuple[Rule, ...]) -> None:
    """Set the rules for copies of one device; no effect without the op library.

    Args:
        index: index of the CUDA device.
        rules: the first that applies decides.

    Raises:
        InvalidArgumentError: a rule has an unknown direction or strategy, or a number out of range.
    """
    for rule in rules:
        if not rule.is_known:
            known = f"directions {', '.join(DIRECTIONS)} and strategies {', '.join(STRATEGIES)}"
            raise InvalidArgumentError(f"{rule} is not of {known}; thread_blocks must be 1 to {_MAX_THREAD_BLOCKS}")
    if op_library().loaded:
        numbers = [
            [DIRECTIONS.index(r.direction), r.max_bytes, r.max_count, STRATEGIES[r.strategy], r.thread_blocks]
            for r in rules
        ]
        torch.ops.blockyard.set_strategies(index, torch.tensor(numbers, dtype=torch.int64).view(-1, 5))


def use_batch_pieces(index: int, max_pieces: int) -> None:
    """Set the maximum pieces per batched call of a device, 0 (no batches) to `MAX_BATCH_PIECES`."""
    if op_library().loaded:
        torch.ops.blockyard.set_batch_pieces(index, max_pieces)


@cache
def use_cached(index: int) -> StrategyTable | None:
    """Apply the calibrated table for a device's kind, once per process.

    Returns:
        The table; None if there is none, or it was measured with another CUDA release.
    """
    table = read_table(table_path(torch.cuda.get_device_name(index)))
    if table is None or table.torch_cuda != str(torch.version.cuda):
        return None
    use_rules(index, table.rules)
    use_batch_pieces(index, table.batch_pieces)
    return table


@contextmanager
def force_strategy(index: int, strategy: StrategyName, thread_blocks: int | None = None) -> Iterator[None]:
    """Use one strategy for all copies of a device; afterwards the table applies again.

    Copies that it cannot handle (see `Rule`) use `default_strategy`. None means `default_thread_blocks`.
    """
    table = use_cached(index)
    if thread_blocks is None:
        thread_blocks = default_thread_blocks(strategy)
    use_rules(index, tuple(Rule(direction, NO_LIMIT, NO_LIMIT, strategy, thread_blocks) for direction in DIRECTIONS))
    try:
        yield
    finally:
        use_rules(index, table.rules if table else ())
