"""An in-memory store whose answers are late, out of order, wrong or missing, as a random generator decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

import numpy as np
from memory_stores import Quotas
from numpy.typing import NDArray

from blockyard.errors import StoreError, UnknownTicketError
from blockyard.stores import Completion, ExternalStore, Owners, StoreStats

Rows = NDArray[np.uint8]
MOODS = ("good", "late", "fails", "loses", "hangs", "refuses")
OLDEST_KEPT = 64
GARBAGE = 0xEE


@dataclass(slots=True, eq=False)
class _Batch:
    ticket: int
    kind: str
    names: list[Any]
    due: int
    rows: Rows | None = None  # of the caller
    copy: Rows | None = None  # contents of the rows when they were lent
    refused: int = 0  # blocks for which there was no room: the last ones, which `names` does not have
    owners: Owners | None = None
    ok: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    reason: str = ""
    ended: bool = False
    reported: bool = False


class LateStore(ExternalStore):
    """Slots that last as long as the store, and keys in a medium that outlives it.

    Args:
        slots: number of slots.
        size: bytes per block.
        random: makes all random choices.
        medium: blocks by key, and their tenants' quotas.
        room: blocks in flight and in uncollected results; others are refused.

    Attributes:
        mood: how it behaves from now on.
    """

    keeps_quotas: ClassVar[bool] = True

    def __init__(
        self, slots: int, size: int, random: Random, medium: Quotas | None = None, *, room: int = 1 << 30
    ) -> None:
        self.mood = "good"
        self.harmless = True  # whether every batch so far was executed
        self._slots, self._size, self._random, self._room = slots, size, random, room
        self._quotas = Quotas({}) if medium is None else medium
        self._medium: dict[Any, Rows] = self._quotas.blocks
        self._swap: dict[Any, Rows] = {}
        self._open: dict[int, _Batch] = {}
        self._given_up: list[_Batch] = []
        self._tickets = self._polls = 0

    @property
    def num_slots(self) -> int:
        return self._slots

    @property
    def bytes_per_block(self) -> int:
        return self._size

    def slot(self, slot: int) -> Rows | None:
        """Return a slot's contents after everything in flight has landed."""
        return self._swap.get(slot)

    def submit_write(self, slots: NDArray[np.int64], rows: Rows) -> int:
        return self._submit("write", slots.tolist(), rows)

    def submit_read(self, slots: NDArray[np.int64], rows: Rows | None = None) -> int:
        return self._submit("read", slots.tolist(), self._rows(len(slots), rows))

    def submit_delete(self, keys: Any) -> int:
        return self._submit("delete", _names(keys), None)

    def submit_put(self, keys: Any, rows: Rows, owners: Owners | None = None) -> int:
        assert owners is not None, "a store that keeps quotas is not told whose the blocks are"
        assert owners.tenants.shape == owners.parents.shape == (len(keys), 32)
        return self._submit("put", _names(keys), rows, owners)

    def submit_get(self, keys: Any, rows: Rows | None = None) -> int:
        return self._submit("get", _names(keys), self._rows(len(keys), rows))

    def _rows(self, count: int, rows: Rows | None) -> Rows:
        return np.empty((count, self._size), np.uint8) if rows is None else rows

    def contains(self, keys: Any) -> NDArray[np.bool_]:
        return np.array([name in self._medium for name in _names(keys)], np.bool_)

    def set_quota(self, tenant: bytes, num_blocks: int | None) -> None:
        self._refuse()
        self._quotas.set_quota(tenant, num_blocks)

    def quota(self, tenant: bytes) -> tuple[int, int] | None:
        self._refuse()
        return self._quotas.quota(tenant)

    def _refuse(self) -> None:
        if self.mood == "refuses":
            self.harmless = False
            raise StoreError("the storage does not answer")

    def forget(self, revision: str | None = None) -> None:
        self._refuse()
        for batch in self._open.values():
            if batch.kind == "put" and not batch.ended:
                self._end(batch, "forgotten")
        self._given_up = [batch for batch in self._given_up if batch.kind != "put"]
        self._medium.clear()

    def poll(self) -> list[int]:
        self._polls += 1
        for batch in self._given_up:
            # A thread that hung continues, in rows that it still owns.
            if batch.kind == "put":
                self._write(batch, self._medium)
            elif batch.rows is not None:
                batch.rows[:] = GARBAGE
        self._given_up.clear()
        for batch in list(self._open.values()):
            if batch.due <= self._polls:
                self._run(batch)
        found = [batch for batch in self._open.values() if batch.ended and not batch.reported]
        for batch in found:
            batch.reported = True
        return [batch.ticket for batch in found]

    def wait(self, ticket: int, timeout: float | None = None) -> Completion:
        batch = self._open.pop(ticket, None)
        if batch is None:
            raise UnknownTicketError(f"ticket {ticket} was never issued or has been collected")
        if not batch.ended and timeout != 0.0 and batch.reason != "hangs":
            self._run(batch)
        if not batch.ended:
            self._end(batch, "timeout")
            if batch.kind != "write":
                self._given_up.append(batch)
        is_read = batch.kind in {"read", "get"}
        rows = np.zeros((0, self._size), np.uint8)
        if is_read and batch.rows is not None:
            rows = batch.rows
        other = "refused" if batch.kind == "put" else "absent"
        reasons = ["" if ok else batch.reason or other for ok in batch.ok]
        ok = np.concatenate((batch.ok, np.zeros(batch.refused, np.bool_)))
        return Completion(ticket, ok, rows, [*reasons, *["queue_full"] * batch.refused])

    def stats(self) -> StoreStats:
        return StoreStats(cached_blocks=len(self._medium))

    def close(self, timeout: float = 5.0) -> bool:
        for batch in self._open.values():
            if not batch.ended:
                self._end(batch, "closed")
        return True

    @property
    def is_writing(self) -> bool:
        """Whether blocks with keys are being put."""
        return any(batch.kind == "put" and not batch.ended for batch in self._open.values())

    def kill(self) -> None:
        """End as a killed process does: some calls under way are carried out, perhaps in part, and nothing else is."""
        for batch in list(self._open.values()):
            if not batch.ended and self._random.random() < 0.5:
                batch.reason = "loses" if batch.kind == "put" and self._random.random() < 0.5 else ""
                self._run(batch)
        self.close()
        self._given_up.clear()
        self.mood = "refuses"

    def release(self) -> None:
        """Behave from now on, and let hung calls continue."""
        self.mood = "good"
        for batch in self._open.values():
            batch.due = min(batch.due, self._polls + 1)
            batch.reason = "" if batch.reason == "hangs" else batch.reason

    def _submit(self, kind: str, names: list[Any], rows: Rows | None, owners: Owners | None = None) -> int:
        self._refuse()
        self._tickets += 1
        late = 0 if self.mood == "good" else self._random.randrange(11)
        batch = _Batch(self._tickets, kind, names, self._polls + 1 + late, rows, owners=owners)
        if kind != "delete":
            self._refuse_more(batch)
        if kind in {"write", "put"} and batch.rows is not None:
            batch.copy = batch.rows.copy()
        if self.mood == "hangs":
            batch.due, batch.reason, self.harmless = 1 << 60, "hangs", False
        if self.mood == "fails" and self._random.random() < 0.5:
            batch.reason, self.harmless = "error", False
        if self.mood == "loses" and self._random.random() < 0.5:
            batch.reason, self.harmless = "loses", False
        self._open[batch.ticket] = batch
        return batch.ticket

    def _refuse_more(self, batch: _Batch) -> None:
        """Cut a batch to the blocks for which there is room."""
        count = self._room - sum(len(other.names) for other in self._open.values() if other.kind != "delete")
        batch.refused = len(batch.names) - count
        if batch.refused <= 0:
            batch.refused = 0
            return
        self.harmless = False
        batch.names = batch.names[:count]
        if batch.kind in {"write", "put"} and batch.rows is not None:
            batch.rows = batch.rows[:count]
        if batch.owners is not None:
            batch.owners = Owners(batch.owners.tenants[:count], batch.owners.parents[:count])

    def _run(self, batch: _Batch) -> None:
        """Execute a batch, after earlier batches with the same slots or keys."""
        if batch.ended:
            return
        names = set(batch.names)
        for other in [other for other in self._open.values() if other.ticket < batch.ticket]:
            if not names.isdisjoint(other.names):
                self._run(other)
        if batch.reason == "error":
            self._end(batch, "error")
            return
        blocks = self._swap if batch.kind in {"write", "read"} else self._medium
        batch.ok = np.ones(len(batch.names), np.bool_)
        if batch.kind == "delete":
            for name in batch.names:
                blocks.pop(name, None)
        elif batch.kind in {"read", "get"}:
            self._read(batch, blocks)
        else:
            self._write(batch, blocks)
            batch.rows = None
        batch.ended = True

    def _write(self, batch: _Batch, blocks: dict[Any, Rows]) -> None:
        assert batch.copy is not None
        assert batch.rows is not None
        assert np.array_equal(batch.copy, batch.rows), "rows that were lent to the store have changed"
        if batch.reason == "loses":
            self._write_lossy(batch, blocks)
            return
        if batch.owners is None:
            blocks.update(zip(batch.names, batch.copy, strict=True))
        else:
            batch.ok = self._put(batch, batch.owners)
        while len(self._medium) > OLDEST_KEPT:
            del self._medium[next(iter(self._medium))]

    def _put(self, batch: _Batch, owners: Owners) -> NDArray[np.bool_]:
        assert batch.copy is not None
        tenants, parents = map(_names, owners)
        blocks = zip(tenants, batch.names, parents, batch.copy, strict=True)
        return np.array([self._quotas.put(*block) for block in blocks], np.bool_)

    def _write_lossy(self, batch: _Batch, blocks: dict[Any, Rows]) -> None:
        """Write some blocks. Report every lost swap block; blocks with keys may be lost silently."""
        assert batch.copy is not None
        if batch.owners is not None:
            batch.ok = self._put(batch, batch.owners)
        for at, (name, row) in enumerate(zip(batch.names, batch.copy, strict=True)):
            if self._random.random() < 0.5:
                if batch.owners is None:
                    blocks[name] = row
            else:
                blocks.pop(name, None)
                batch.ok[at] &= batch.kind == "put"

    def _read(self, batch: _Batch, blocks: dict[Any, Rows]) -> None:
        assert batch.rows is not None
        for at, name in enumerate(batch.names):
            row = blocks.get(name)
            lost = batch.reason == "loses" and self._random.random() < 0.5
            batch.ok[at] = row is not None and not lost
            if batch.ok[at]:
                batch.rows[at] = row
                self._quotas.use(name)
            else:
                batch.rows[at] = GARBAGE

    def _end(self, batch: _Batch, reason: str) -> None:
        self.harmless = False
        batch.ok = np.zeros(len(batch.names), np.bool_)
        batch.reason, batch.ended = reason, True


def _names(keys: Any) -> list[bytes]:
    return [bytes(key) for key in keys]
