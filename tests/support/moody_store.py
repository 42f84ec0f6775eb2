"""A `ThreadedStore` with real threads over a dictionary, which is slow, fails, loses, damages or hangs when told to."""

from __future__ import annotations

import threading
import time
from random import Random
from typing import Any

import numpy as np
from memory_stores import PATIENCE, Quotas, QuotaStore
from numpy.typing import NDArray

from blockyard.errors import StoreError

MOODS = ("good", "late", "fails", "loses", "damages", "hangs", "refuses")


class MoodyStore(QuotaStore):
    """A client of a storage; on release, its threads continue their hung calls.

    Args:
        slots: number of slots, and of blocks that the storage keeps.
        size: bytes of a block.
        random: decides which calls fail.
        medium: the storage, shared by all clients with this object.

    Attributes:
        mood: how calls behave from now on.
        harmless: whether every call so far was carried out in time.
    """

    timeout_base = PATIENCE

    def __init__(self, slots: int, size: int, random: Random, medium: Quotas | None = None, **options: Any) -> None:
        self.num_slots = slots
        self.mood, self.harmless, self._is_killed = "good", True, False
        self._chance = Random(random.random())  # a separate generator, because threads draw from it
        self._released = threading.Event()
        super().__init__(medium, bytes_per_block=size, **options)
        self.before = self._behave

    @property
    def is_writing(self) -> bool:
        """Whether blocks with keys are being put."""
        return any(batch.kind == "put" and not batch.ended for batch in self._batches.open.values())

    def kill(self) -> None:
        """End as a killed process does: calls that have reached the storage are carried out, and no others."""
        self._is_killed = True
        self.release()

    def _behave(self, call: str) -> None:
        self._misbehave(call)
        if self._is_killed:
            raise StoreError("the process was killed")

    def _misbehave(self, call: str) -> None:
        released = self._released  # before the mood: `release` sets the event of every call that it finds hung
        mood = self.mood
        if mood == "good" or (mood not in {"late", "refuses"} and self._chance.random() < 0.5):
            return
        if mood == "late":
            time.sleep(self._chance.random() / 500)
            return
        self.harmless = False
        if mood == "hangs":
            released.wait(PATIENCE)
        elif mood in {"fails", "refuses"}:
            raise StoreError(f"{call} fails on purpose")
        else:
            self._spoil(mood)

    def _spoil(self, mood: str) -> None:
        with self._step:
            for name in [name for name in self.blocks if self._chance.random() < 0.1]:
                if mood == "loses":
                    del self.blocks[name]
                else:
                    self.blocks[name] = self.blocks[name] ^ np.uint8(self._chance.randrange(1, 256))

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Read blocks."""
        self.before("get")
        with self._step:
            found = [self.blocks.get(key.tobytes()) for key in keys]
            for key, row, block in zip(keys, out, found, strict=True):
                self.quotas.use(key.tobytes())
                if block is not None and block.shape == row.shape:
                    row[:] = block
        return np.array([block is not None for block in found], np.bool_)

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Store blocks."""
        self.before("put")
        with self._step:
            self.blocks.update((key.tobytes(), row.copy()) for key, row in zip(keys, rows, strict=True))
        return np.ones(len(keys), np.bool_)

    def delete(self, keys: NDArray[np.uint8]) -> None:
        """Delete blocks."""
        self.before("delete")
        with self._step:
            for key in keys:
                self.blocks.pop(key.tobytes(), None)

    def read_epoch(self, key: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """Return the record of the epoch."""
        self.before("read_epoch")
        with self._step:
            return self.blocks.get(key.tobytes())

    def replace_epoch(
        self, key: NDArray[np.uint8], old: NDArray[np.uint8] | None, new: NDArray[np.uint8]
    ) -> NDArray[np.uint8] | None:
        """Replace the record, in one step."""
        self.before("replace_epoch")
        with self._step:
            stored = self.blocks.get(key.tobytes())
            if (stored is None) == (old is None) and (old is None or np.array_equal(stored, old)):
                self.blocks[key.tobytes()] = new.copy()
            return self.blocks.get(key.tobytes())

    def evict(self) -> None:
        """Drop the block that was put first."""
        names = list(self.blocks)
        for name in names[: max(0, len(names) - 2 * self.num_slots)]:
            if name != self._keyed_blocks.record.key:
                self.blocks.pop(name, None)  # another thread may have evicted it

    def slot(self, slot: int) -> NDArray[np.uint8] | None:
        """Return a slot's contents."""
        with self._step:
            return self.blocks.get(self._slot_names([slot])[0].tobytes())

    def release(self) -> None:
        """Behave from now on, and let hung calls continue."""
        self.mood = "good"
        self._released.set()
        self._released = threading.Event()

    def set_quota(self, tenant: bytes, num_blocks: int | None) -> None:
        """Set a quota, in the caller's thread."""
        self._refuse()
        super().set_quota(tenant, num_blocks)

    def quota(self, tenant: bytes) -> tuple[int, int] | None:
        """Return a quota, in the caller's thread."""
        self._refuse()
        return super().quota(tenant)

    def _refuse(self) -> None:
        if self.mood in {"fails", "refuses"}:
            raise StoreError("the storage does not answer")
