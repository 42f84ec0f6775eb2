"""A prefix store in virtual time: the real `PrefixStore` over models of the copies and of the storage.

Block contents are never touched: rows are virtual memory without physical pages.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from blockyard import BlockManager
from blockyard.prefix_store import PrefixStore
from blockyard.stores.base import Completion, ExternalStore, Keys, Owners, StoreStats
from blockyard.stores.threaded.runtime import use_runtime
from blockyard.tools.virtual_time import Agenda, CopyLink, VirtualTime

__all__ = ["StoreTier"]

_KEY: Final = np.dtype("V32")


@dataclass
class _Way:
    """One direction, and when the batches that it carries for the store arrive."""

    time: VirtualTime
    link: CopyLink
    ends: Agenda[int]

    def send(self, size: int) -> float:
        """Queue a batch; return when it arrives."""
        due = self.link.send(self.time.now, size)
        self.ends.add(due, 0)
        return due

    def next_end(self) -> float:
        """Return when the next batch arrives; infinite if none is under way."""
        self.ends.take(self.time.now)
        return self.ends.next_at


@dataclass(slots=True, eq=False)
class _TimedCopy:
    """A copy between rows and blocks; it lands at `due`."""

    time: VirtualTime
    due: float
    rows: NDArray[np.uint8] | None
    error: None = None

    @property
    def done(self) -> bool:
        """Whether it has landed."""
        return self.time.now >= self.due


class _TimedEngine:
    """Copies between blocks and rows, as `CacheEngine` does."""

    def __init__(self, bytes_per_block: int, to_device: _Way, to_host: _Way) -> None:
        self._rows = np.empty((0, bytes_per_block), np.uint8)
        self.layout = SimpleNamespace(bytes_per_block=bytes_per_block)
        self.memory = SimpleNamespace(buffers=self, bytes_per_block=bytes_per_block)
        self.memories = [self.memory]
        self.transfers = SimpleNamespace(has_room=lambda *_: True, open=list)
        self._to_device, self._to_host = to_device, to_host

    def num_blocks(self, _tier: str) -> int:
        """Return no blocks: the manager knows how many it has."""
        return 0

    def take(self, count: int, size: int) -> NDArray[np.uint8]:
        """Return rows. All callers share the same ones, because nobody reads or writes them."""
        if count > len(self._rows):
            self._rows = np.empty((count, size), np.uint8)
        return self._rows[:count]

    def give(self, rows: NDArray[np.uint8]) -> None:
        """Take rows back."""

    def fence(self) -> None:
        """Return no fence: each step ends before the next one begins, so copies need not wait."""

    def poll(self) -> None:
        """Do nothing: the clock ends transfers."""

    def submit_write(self, tier: str, _blocks: object, rows: NDArray[np.uint8], **_: object) -> _TimedCopy:
        """Start copying rows to blocks."""
        return self._copy(self._to_device, tier, rows)

    def submit_read(self, tier: str, _blocks: object, rows: NDArray[np.uint8], **_: object) -> _TimedCopy:
        """Start copying blocks to rows."""
        return self._copy(self._to_host, tier, rows)

    @staticmethod
    def _copy(way: _Way, tier: str, rows: NDArray[np.uint8]) -> _TimedCopy:
        return _TimedCopy(way.time, way.send(rows.nbytes) if tier == "device" else way.time.now, rows)


class _Store(ExternalStore):
    """Storage with limited size, bandwidth and latency; evicts the least recently used block."""

    def __init__(self, num_blocks: int, bytes_per_block: int, read: _Way, write: _Way) -> None:
        self._num_blocks, self._bytes_per_block = num_blocks, bytes_per_block
        self._read, self._write = read, write
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._all = np.ones(0, np.bool_)
        self._named: tuple[Keys, list[bytes]] = ([], [])  # the last keys, which are asked for and then put, as names
        self._open: Agenda[int] = Agenda()
        self._answers: dict[int, Completion] = {}
        self._tickets = 0
        self.read_blocks = self.written_blocks = self.evicted_blocks = 0

    @property
    def num_slots(self) -> int:
        """Number of blocks that it can hold."""
        return self._num_blocks

    @property
    def bytes_per_block(self) -> int:
        """Bytes per block."""
        return self._bytes_per_block

    def submit_put(self, keys: Keys, rows: NDArray[np.uint8], owners: Owners | None = None) -> int:  # noqa: ARG002
        """Store blocks."""
        blocks, names, count = self._blocks, self._names(keys), len(keys)
        if len(blocks) + count <= self._num_blocks and blocks.keys().isdisjoint(names):
            blocks.update(dict.fromkeys(names))
            names = []
        for key in names:
            if key in blocks:
                blocks.move_to_end(key)
                continue
            if len(blocks) >= self._num_blocks:
                blocks.popitem(last=False)
                self.evicted_blocks += 1
            blocks[key] = None
        self.written_blocks += count
        due = self._write.send(count * self._bytes_per_block)
        if count > len(self._all):
            self._all = np.ones(count, np.bool_)
        return self._answer(due, self._all[:count], rows[:0], [""] * count)

    def submit_get(self, keys: Keys, rows: NDArray[np.uint8] | None = None) -> int:
        """Read blocks."""
        names = self._names(keys)
        found = np.array([name in self._blocks for name in names], np.bool_)
        for name, is_there in zip(names, found.tolist(), strict=True):
            if is_there:
                self._blocks.move_to_end(name)
        num_found = int(found.sum())
        self.read_blocks += num_found
        rows = np.empty((len(names), self._bytes_per_block), np.uint8) if rows is None else rows
        due = self._read.send(num_found * self._bytes_per_block)
        return self._answer(due, found, rows, ["" if there else "absent" for there in found.tolist()])

    def submit_write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> int:
        """Not supported: this store has keys, not slots."""
        raise NotImplementedError

    def submit_read(self, slots: NDArray[np.int64], rows: NDArray[np.uint8] | None = None) -> int:
        """Not supported: this store has keys, not slots."""
        raise NotImplementedError

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which blocks it has, bool `[n]`."""
        names = self._names(keys)
        if self._blocks.keys().isdisjoint(names):
            return np.zeros(len(names), np.bool_)
        return np.array([name in self._blocks for name in names], np.bool_)

    def lacks(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which blocks it lacks, bool `[n]`."""
        return ~self.contains(keys)

    def poll(self) -> list[int]:
        """Return the tickets of the batches that have ended."""
        return [ticket for _, ticket in self._open.take(self._read.time.now)]

    def wait(self, ticket: int, timeout: float | None = None) -> Completion:  # noqa: ARG002 (they have ended)
        """Return a batch's answer."""
        return self._answers.pop(ticket)

    def stats(self) -> StoreStats:
        """Return the counters."""
        return StoreStats(
            written_blocks=self.written_blocks,
            read_blocks=self.read_blocks,
            evicted_blocks=self.evicted_blocks,
            cached_blocks=len(self._blocks),
        )

    def close(self, timeout: float = 5.0) -> bool:  # noqa: ARG002
        """Close it."""
        return True

    def _answer(self, due: float, found: NDArray[np.bool_], rows: NDArray[np.uint8], reasons: list[str]) -> int:
        self._tickets += 1
        self._open.add(due, self._tickets)
        self._answers[self._tickets] = Completion(self._tickets, found, rows, reasons)
        return self._tickets

    def _names(self, keys: Keys) -> list[bytes]:
        if keys is not self._named[0]:
            names = keys.view(_KEY)[:, 0].tolist() if isinstance(keys, np.ndarray) else list(keys)
            self._named = (keys, names)
        return self._named[1]


class StoreTier:
    """A prefix store below an engine in virtual time.

    Args:
        manager: the engine's manager.
        num_blocks: number of blocks that the storage can hold.
        bytes_per_block: bytes per block.
        writes: which blocks are written, as for `PrefixStore`.
        storage: the links from and to the storage.
        copies: the links to and from the device, shared with swaps.
        time: the clock.

    Attributes:
        prefixes: the `PrefixStore`.
    """

    def __init__(
        self,
        manager: BlockManager,
        num_blocks: int,
        bytes_per_block: int,
        writes: str,
        *,
        storage: tuple[CopyLink, CopyLink],
        copies: tuple[CopyLink, CopyLink],
        time: VirtualTime,
    ) -> None:
        self._time, self._jobs = time, manager.prefix.store_jobs
        up, down = Agenda[int](), Agenda[int]()
        self._read, self._write = _Way(time, storage[0], up), _Way(time, storage[1], down)
        self._store = _Store(num_blocks, bytes_per_block, self._read, self._write)
        engine: Any = _TimedEngine(bytes_per_block, _Way(time, copies[0], up), _Way(time, copies[1], down))
        with use_runtime(time):
            self.prefixes = PrefixStore(
                manager, engine, self._store, writes=writes, max_staging=max(256 << 20, 4 * bytes_per_block)
            )

    def poll(self) -> None:
        """Let the `PrefixStore` make progress, if anything has ended, or may begin."""
        ended = min(self._read.ends.next_at, self._write.ends.next_at) <= self._time.now
        if ended or self._jobs.num_waiting or self.prefixes.num_open:
            self.prefixes.poll()

    @property
    def next_load(self) -> float:
        """End time of the next copy or batch of a load; infinite if none is in flight."""
        return self._read.next_end()

    @property
    def next_write(self) -> float:
        """The same for writes. While no prompt loads, a write affects only the store and which blocks follow."""
        return self._write.next_end()

    @property
    def stats(self) -> StoreStats:
        """The storage's counters."""
        return self._store.stats()
