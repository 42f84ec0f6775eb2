"""Copy strategies to, from and within a device, by size and number of pieces: a table for each kind of device.

`blockyard calibrate` measures the table once and writes it to the user's cache folder. The ops read that file when they
first write to a device. Without a file, copies between host and device use batched calls to the copy engines, and
copies within a device use a kernel.
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

Direction = Literal["h2d", "d2h", "d2d"]
StrategyName = Literal["batch", "loop", "kernel", "bulk"]
STRATEGIES: Final[dict[str, int]] = {"batch": 1, "loop": 2, "kernel": 3, "bulk": 4}
# What each direction allows; the first is used where no rule holds.
ALLOWED: Final[dict[str, tuple[StrategyName, ...]]] = {
    "h2d": ("batch", "loop", "kernel", "bulk"),
    "d2h": ("batch", "loop", "kernel", "bulk"),
    "d2d": ("kernel", "bulk"),
}
MOST: Final = 2**62
# Of one batched call, where nothing was calibrated; as kBatchPieces in cuda/strategy.h. Longer batches than the most
# crashed drivers.
BATCH_PIECES: Final = 1024
MOST_BATCH_PIECES: Final = 2048
# Goes into every file: tables of another version must be measured again.
_VERSION = 4


@dataclass(frozen=True)
class Rule:
    """One line of a table: it holds for at most `max_count` pieces of at most `max_bytes` on average."""

    direction: Direction
    max_bytes: int
    max_count: int
    strategy: StrategyName


@dataclass(frozen=True)
class StrategyTable:
    """What was measured on one kind of device.

    Attributes:
        device: the device's name.
        torch_cuda: CUDA release of the torch it was measured with.
        rules: the first that holds decides; see `ALLOWED` where none does.
        batch_pieces: pieces of one batched call.
    """

    device: str
    torch_cuda: str
    rules: tuple[Rule, ...]
    batch_pieces: int = BATCH_PIECES

    def strategy(self, direction: Direction, num_bytes: int, count: int) -> StrategyName:
        """Give the strategy for `count` pieces of `num_bytes` each."""
        for rule in self.rules:
            if rule.direction == direction and num_bytes <= rule.max_bytes and count <= rule.max_count:
                return rule.strategy
        return ALLOWED[direction][0]

    def save(self, path: Path) -> None:
        """Write the table to a file, in one step; its folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({"version": _VERSION, **asdict(self)}, indent=2) + "\n", encoding="utf-8")
        scratch.replace(path)


def read_table(path: Path) -> StrategyTable | None:
    """Read a table; None if there is no file or it is not one of ours."""
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        if written["version"] != _VERSION:
            return None
        rules = tuple(Rule(**rule) for rule in written["rules"])
        known = all(
            rule.strategy in ALLOWED.get(rule.direction, ())
            and isinstance(rule.max_bytes, int)
            and isinstance(rule.max_count, int)
            and max(rule.max_bytes, rule.max_count) <= MOST
            for rule in rules
        )
        batch_pieces = written["batch_pieces"]
        known = known and isinstance(batch_pieces, int) and 1 <= batch_pieces <= MOST_BATCH_PIECES
        return StrategyTable(str(written["device"]), str(written["torch_cuda"]), rules, batch_pieces) if known else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def table_path(device_name: str) -> Path:
    """Give the file of a kind of device: under BLOCKYARD_CACHE, or `blockyard/` in the user's cache folder."""
    folder = os.environ.get("BLOCKYARD_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = re.sub(r"[^A-Za-z0-9]+", "-", device_name).strip("-").lower()
    return (Path(folder) if folder else Path(base) / "blockyard") / f"copy-strategy-{name}.json"


def use_rules(index: int, rules: tuple[Rule, ...]) -> None:
    """Set the rules for copies of one device; without the op library there is nothing to choose.

    Args:
        index: the CUDA device's.
        rules: the first that holds decides.

    Raises:
        InvalidArgumentError: a rule names an unknown direction, or a strategy that its direction does not allow.
    """
    for rule in rules:
        if rule.strategy not in ALLOWED.get(rule.direction, ()):
            allowed = "; ".join(f"{direction}: {', '.join(strategies)}" for direction, strategies in ALLOWED.items())
            raise InvalidArgumentError(f"{rule} is not of {allowed}")
    if op_library().loaded:
        places = list(ALLOWED)
        numbers = [[places.index(r.direction), r.max_bytes, r.max_count, STRATEGIES[r.strategy]] for r in rules]
        torch.ops.blockyard.set_strategies(index, torch.tensor(numbers, dtype=torch.int64).view(-1, 4))


def use_batch_pieces(index: int, most: int) -> None:
    """Set the most pieces of one batched call of a device, 1 to `MOST_BATCH_PIECES`."""
    if op_library().loaded:
        torch.ops.blockyard.set_batch_pieces(index, most)


@cache
def use_cached(index: int) -> StrategyTable | None:
    """Set what was calibrated for a device's kind, once per process.

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
def force_strategy(index: int, strategy: StrategyName) -> Iterator[None]:
    """Use one strategy for all copies of a device in directions that allow it; afterwards the table holds again."""
    table = use_cached(index)
    directions = [direction for direction in get_args(Direction) if strategy in ALLOWED[direction]]
    use_rules(index, tuple(Rule(direction, MOST, MOST, strategy) for direction in directions))
    try:
        yield
    finally:
        use_rules(index, table.rules if table else ())
