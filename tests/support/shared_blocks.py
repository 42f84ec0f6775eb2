"""Conventions of the processes that share a store, and of their coordinator: keys, block contents, a board, a log.

A block's bytes identify the process that computed it, its weights, and since when the process had them. So any
reader can tell whether the block may be found. Times come from Linux's monotonic clock, which all processes of a
machine share.
"""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

__all__ = [
    "CHAINS",
    "FINAL",
    "LENGTH",
    "OWN",
    "STORM",
    "TENANTS",
    "VOID",
    "WAITING",
    "WIDTH",
    "Board",
    "Plan",
    "Row",
    "key_of",
    "name_of",
    "now",
    "own_keys",
    "read_log",
    "row_of",
    "tenant_of",
]

WIDTH: Final = 192
CHAINS: Final = 16  # prompts that all processes share and nobody deletes
LENGTH: Final = 64  # blocks of each
OWN: Final = 3  # private blocks that each process also deletes
TENANTS: Final = 3
FINAL: Final = 1 << 30  # the number of the last weights
VOID: Final = (1 << 32) - 1  # in place of weights: this block was put while the process had none
STORM, WAITING = 0, 1  # phases; `FINAL` is the last

_HEAD: Final = struct.Struct("<IIIIQ")

# The unpatched clock: Linux has one for all processes.
now = time.monotonic_ns


class Row(NamedTuple):
    """The information in a block's bytes.

    Attributes:
        key: number of the key.
        weights: number of the revision that computed it.
        writer: number of the process.
        life: which of its lives; processes are killed from time to time.
        based_at: the latest time at which the process got these weights; see `Writer`.
    """

    key: int
    weights: int
    writer: int
    life: int
    based_at: int

    def packed(self) -> bytes:
        """Return the bytes of the block."""
        head = _HEAD.pack(*self) + key_of(self.key)
        return head + hashlib.shake_128(head).digest(WIDTH - len(head))


def row_of(data: bytes) -> Row:
    """Read a block; the caller compares the whole with `packed`."""
    return Row(*_HEAD.unpack_from(data))


def key_of(number: int) -> bytes:
    """Return a key by its number."""
    return hashlib.sha256(b"key %d" % number).digest()


def own_keys(process: int) -> list[int]:
    """Return the numbers of the keys that only this process puts and deletes."""
    first = CHAINS * LENGTH + process * OWN
    return list(range(first, first + OWN))


def tenant_of(key: int) -> bytes:
    """Return the tenant of a key; most keys have none."""
    number = key // LENGTH % (2 * TENANTS + 2)
    return hashlib.sha256(b"tenant %d" % number).digest() if 1 <= number <= TENANTS else bytes(32)


def name_of(weights: int) -> str:
    """Return the revision of weights, as `open_store` and `forget` take it."""
    return f"step-{weights}" if weights else ""


class Board:
    """Numbers that all processes see: a memory-mapped file.

    Attributes:
        words: `[phase, announced weights, highest number of weights]`, then operations done and whether it waits for
            each process.
    """

    def __init__(self, path: Path, processes: int) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * (8 + 2 * processes)))
        self.words = np.memmap(path, np.int64, "r+")
        self.done = self.words[8 : 8 + processes]
        self.waits = self.words[8 + processes :]

    @property
    def phase(self) -> int:
        """The phase: a storm of `forget`, everybody waiting, or the last weights."""
        return int(self.words[0])

    @phase.setter
    def phase(self, phase: int) -> None:
        self.words[0] = phase

    @property
    def announced(self) -> int:
        """The weights that processes must load."""
        return FINAL if self.phase == FINAL else int(self.words[1])

    def announce(self, weights: int) -> None:
        """Let other processes load these weights too."""
        self.words[1] = weights
        self.words[2] = max(int(self.words[2]), weights)

    @property
    def highest(self) -> int:
        """The highest weights number so far."""
        return int(self.words[2])


@dataclass(frozen=True)
class Plan:
    """The work of one life of a process.

    Attributes:
        url: URL of the store.
        folder: folder of the board and the logs.
        process: its number.
        processes: number of processes.
        life: its number.
        storm: operations, since its first life, after which it waits for the others.
        operations: operations after which it ends.
        num_slots: slots of the store.
        most: maximum blocks per batch.
        seed: seed of its random choices.
        fails: how often a request to an object store fails transiently.
    """

    url: str
    folder: str
    process: int
    processes: int
    life: int
    storm: int
    operations: int
    num_slots: int
    most: int
    seed: int
    fails: float = 0.0

    @property
    def log(self) -> Path:
        """The log file of this life."""
        return Path(self.folder) / f"log-{self.process}-{self.life}.jsonl"

    @property
    def board(self) -> Board:
        """The numbers that all processes see."""
        return Board(Path(self.folder) / "board", self.processes)


def read_log(folder: Path) -> Iterator[dict[str, Any]]:
    """Read the logs of all lives of all processes; lines truncated by a kill are omitted."""
    for path in sorted(folder.glob("log-*.jsonl")):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield {"log": path.name, **json.loads(line)}
