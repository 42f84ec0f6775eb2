"""Blocks in a store: a block is a value, or equal slices of blocks of several page classes.

All values of a store have the same size. With one page class, a block is a value. With several, a block is cut into
slices; zeros fill the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError
from blockyard.layout import ArenaLayout
from blockyard.stores.checked_store import NOTHING_READ, Answer, CheckedStore, PendingBatch

if TYPE_CHECKING:
    from blockyard.engine.engine import CacheEngine

__all__ = ["Batch", "SlicedBatch", "Slices", "StoreSlots", "all_of", "bytes_per_value", "slots_per_extent"]

Rows: TypeAlias = NDArray[np.uint8]
Ids: TypeAlias = NDArray[np.int64]


def bytes_per_value(engine: CacheEngine) -> int:
    """Return the size of the values in which an engine's blocks are stored."""
    layout = engine.layout
    return layout.bytes_per_value if isinstance(layout, ArenaLayout) else layout.bytes_per_block


def slots_per_extent(layout: ArenaLayout, per_extent: list[int]) -> int:
    """Return how many values an extent takes, whichever class has it; `per_extent` are each class's blocks in it."""
    sizes = (page.bytes_per_block for page in layout.pages)
    return max(blocks * -(-size // layout.bytes_per_value) for blocks, size in zip(per_extent, sizes, strict=True))


@dataclass(slots=True, eq=False)
class SlicedBatch:
    """A batch of blocks whose slices are those of another batch; see `PendingBatch`."""

    slices: PendingBatch
    num_slices: int
    size: int
    _answer: Answer | None = None

    @property
    def since(self) -> float:
        """When it was submitted."""
        return self.slices.since

    @property
    def answer(self) -> Answer | None:
        """The outcome for whole blocks, once it has ended."""
        if self._answer is None and (found := self.slices.answer) is not None:
            self._answer = self._joined(found)
        return self._answer

    def _joined(self, found: Answer) -> Answer:
        count = self.num_slices
        ok = all_of(found.ok, count)
        rows = found.rows
        if len(rows):
            rows = rows.reshape(len(ok), -1)[:, : self.size]
        elif self.slices.out is not None:
            rows = np.empty((0, self.size), np.uint8)
        reasons = found.reasons
        if reasons:
            parts = (found.reasons[at : at + count] for at in range(0, len(reasons), count))
            reasons = tuple(map(_worst, parts))
        return Answer(ok, rows, found.error, reasons)


Batch: TypeAlias = PendingBatch | SlicedBatch


class Slices:
    """How an engine's blocks are cut into the values of a store, and the rows between both.

    Args:
        engine: owner of the blocks, and of the rows.
        store: the store; its blocks are the values.

    Attributes:
        size: bytes of a value.
        block_bytes: bytes of a block of each page class.
        num_slices: number of values that a block of each page class takes.
    """

    def __init__(self, engine: CacheEngine, store: CheckedStore) -> None:
        self.size = bytes_per_value(engine)
        self.block_bytes = np.array([memory.bytes_per_block for memory in engine.memories], np.int64)
        self.num_slices = -(-self.block_bytes // self.size)
        self._store = store
        self._buffers = [memory.buffers for memory in engine.memories]
        self._is_cut = [
            count > 1 or size != self.size for count, size in zip(self.num_slices, self.block_bytes, strict=True)
        ]

    def blocks_in(self, num_bytes: int, page_class: int) -> int:
        """Return how many blocks of a class have at most these bytes, at least 1."""
        return max(1, num_bytes // int(self.block_bytes[page_class]))

    def bytes_of(self, count: int, page_class: int) -> int:
        """Return the bytes of the rows for blocks of a class."""
        return count * int(self.num_slices[page_class]) * self.size

    def take(self, count: int, page_class: int) -> Rows:
        """Return rows for blocks of a class, uint8 `[count, bytes]`, with arbitrary contents; for the other methods."""
        slices, size = int(self.num_slices[page_class]), int(self.block_bytes[page_class])
        rows = self._buffers[page_class].take(count * slices, self.size)
        return rows.reshape(count, -1)[:, :size]

    def give(self, rows: Rows | None, page_class: int) -> None:
        """Return rows, which nobody uses any longer."""
        self._buffers[page_class].give(rows)

    def _whole(self, rows: Rows, page_class: int, *, fills: bool = False) -> Rows:
        """Return the values, uint8 `[n, size]`, whose memory `take` has returned as rows; `fills` writes the zeros."""
        slices = int(self.num_slices[page_class])
        values = np.lib.stride_tricks.as_strided(rows, (len(rows) * slices, self.size), (self.size, 1))
        if fills:
            values.reshape(len(rows), -1)[:, rows.shape[1] :] = 0
        return values


class StoreSlots(Slices):
    """Reads and writes blocks in the slots of a swap store.

    With one page class, a block's id is its slot. With several, the slots are cut into extents as the manager's
    external tier is, and a block has `num_slices` slots of its extent.

    Raises:
        InvalidArgumentError: a block's slots cannot be in flight together.
    """

    def __init__(self, engine: CacheEngine, store: CheckedStore) -> None:
        super().__init__(engine, store)
        limit, widest = store.max_blocks_in_flight, int(self.num_slices.max())
        if limit is not None and limit < widest:
            raise InvalidArgumentError(
                f"store can have {limit} values of {self.size} bytes in flight, must be at least {widest}: those of a "
                "block"
            )
        self._per_extent = [memory.per_extent for memory in engine.memories]
        self._extent = 1
        if isinstance(layout := engine.layout, ArenaLayout) and len(layout.pages) > 1:
            self._extent = slots_per_extent(layout, self._per_extent)
        self._num_extents = store.num_slots // self._extent

    def num_blocks(self, page_class: int) -> int:
        """Return how many blocks of a class the store has if that class has all extents."""
        return self._num_extents * self._per_extent[page_class]

    def read(self, blocks: Ids, rows: Rows, page_class: int) -> Batch:
        """Start to read blocks of a class; see `CheckedStore.read`."""
        if not self._is_cut[page_class]:
            return self._store.read(self._slots_of(blocks, page_class), rows)
        batch = self._store.read(self._slots_of(blocks, page_class), self._whole(rows, page_class))
        return SlicedBatch(batch, int(self.num_slices[page_class]), rows.shape[1])

    def write(self, blocks: Ids, rows: Rows, page_class: int) -> Batch:
        """Start to write blocks of a class; see `CheckedStore.write`."""
        if not self._is_cut[page_class]:
            return self._store.write(self._slots_of(blocks, page_class), rows)
        batch = self._store.write(self._slots_of(blocks, page_class), self._whole(rows, page_class, fills=True))
        return SlicedBatch(batch, int(self.num_slices[page_class]), rows.shape[1])

    def wait(self, batch: Batch) -> None:
        """Wait until a batch has an answer."""
        self._store.wait(batch.slices if isinstance(batch, SlicedBatch) else batch)

    def _slots_of(self, blocks: Ids, page_class: int) -> Ids:
        if self._extent == 1:
            return blocks
        extents, within = np.divmod(blocks, self._per_extent[page_class])
        slices = int(self.num_slices[page_class])
        first = extents * self._extent + within * slices
        slots: Ids = (first[:, None] + np.arange(slices)).reshape(-1)
        return slots


def all_of(found: NDArray[np.bool_], slices: int) -> NDArray[np.bool_]:
    """Return whether all slices of each block are found."""
    return np.asarray(found.reshape(-1, slices).all(axis=1), np.bool_)


def _worst(reasons: tuple[str, ...]) -> str:
    """Return why a block is a miss: of several reasons, one for which the store may still use its rows."""
    found = [reason for reason in reasons if reason]
    return next((reason for reason in found if reason not in NOTHING_READ), found[0] if found else "")
