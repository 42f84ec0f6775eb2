"""The shared tier test passes a plug-in written in plain Python, and notices plug-ins that are wrong."""

import numpy as np
import pytest
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError, MappingError, StoreError, UnknownTicketError
from blockyard.stores import Completion, ExternalStore, StoreStats
from blockyard.testing.store_suite import StoreSuite


class DictStore(ExternalStore):
    """The smallest plug-in: slots in a dictionary, every batch done when it is submitted."""

    num_slots = 32
    bytes_per_block = 5000

    def __init__(self) -> None:
        self.blocks: dict[int, NDArray[np.uint8]] = {}
        self.done: dict[int, Completion] = {}
        self.unreported: list[int] = []
        self.tickets = 0
        self.counts = {"written_blocks": 0, "read_blocks": 0}
        self.missed = 0
        self.closed = False

    def check(self, slots: NDArray[np.int64]) -> None:
        if self.closed:
            raise StoreError("the store is closed")
        if slots.dtype != np.int64 or slots.ndim != 1:
            raise InvalidArgumentError(f"slots are {slots.dtype} {slots.shape}, must be int64 [n]")
        if ((slots < 0) | (slots >= self.num_slots)).any():
            raise MappingError(f"slots {slots} are out of range, there are {self.num_slots}")

    def finish(self, ok: list[bool], rows: NDArray[np.uint8]) -> int:
        self.tickets += 1
        reasons = ["" if good else "empty" for good in ok]
        self.done[self.tickets] = Completion(self.tickets, np.array(ok, dtype=bool), rows, reasons)
        self.unreported.append(self.tickets)
        return self.tickets

    def submit_write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> int:
        self.check(slots)
        if rows.dtype != np.uint8 or rows.shape != (len(slots), self.bytes_per_block):
            raise InvalidArgumentError(f"rows are {rows.dtype} {rows.shape}")
        if len(np.unique(slots)) < len(slots):
            raise MappingError(f"slots {slots} repeat")
        self.blocks.update({int(slot): row.copy() for slot, row in zip(slots, rows, strict=True)})
        self.counts["written_blocks"] += len(slots)
        return self.finish([True] * len(slots), np.zeros((0, self.bytes_per_block), np.uint8))

    def submit_read(self, slots: NDArray[np.int64]) -> int:
        self.check(slots)
        rows = np.zeros((len(slots), self.bytes_per_block), np.uint8)
        ok = [int(slot) in self.blocks for slot in slots]
        for row, slot, good in zip(rows, slots, ok, strict=True):
            row[:] = self.blocks[int(slot)] if good else 0
        self.counts["read_blocks"] += sum(ok)
        self.missed += len(ok) - sum(ok)
        return self.finish(ok, rows)

    def poll(self) -> list[int]:
        found, self.unreported = [ticket for ticket in self.unreported if ticket in self.done], []
        return found

    def wait(self, ticket: int, timeout: float | None = None, out: object = None) -> Completion:
        if ticket not in self.done:
            raise UnknownTicketError(f"ticket {ticket} is not open")
        return self.done.pop(ticket)

    def stats(self) -> StoreStats:
        sizes = {name.replace("blocks", "bytes"): count * self.bytes_per_block for name, count in self.counts.items()}
        return StoreStats(**self.counts, **sizes, misses={"empty": self.missed} if self.missed else {})

    def close(self, timeout: float = 5.0) -> bool:
        self.closed = True
        return True


class TestDictStore(StoreSuite):
    def open_store(self) -> ExternalStore:
        return DictStore()


class KeepsReferences(DictStore):
    """Wrong: keeps the caller's memory."""

    def submit_write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> int:
        ticket = super().submit_write(slots, rows)
        self.blocks.update({int(slot): row for slot, row in zip(slots, rows, strict=True)})
        return ticket


class InventsBlocks(DictStore):
    """Wrong: says that a slot which was never written is there."""

    def submit_read(self, slots: NDArray[np.int64]) -> int:
        self.check(slots)
        empty = np.zeros(self.bytes_per_block, np.uint8)
        rows = np.array([self.blocks.get(int(slot), empty) for slot in slots]).reshape(-1, self.bytes_per_block)
        return self.finish([True] * len(slots), rows)


class NeverForgets(DictStore):
    """Wrong: a ticket can be collected again."""

    def wait(self, ticket: int, timeout: float | None = None, out: object = None) -> Completion:
        if ticket not in self.done:
            raise UnknownTicketError(f"ticket {ticket} is not open")
        return self.done[ticket]


@pytest.mark.parametrize(
    ("store", "test"),
    [
        (KeepsReferences, "test_bytes_are_copied_before_submit_returns"),
        (InventsBlocks, "test_a_slot_never_written_is_a_miss_of_zeros"),
        (NeverForgets, "test_a_ticket_is_reported_once_and_collected_once"),
    ],
)
def test_a_wrong_store_is_noticed(store: type[DictStore], test: str):
    class Suite(StoreSuite):
        def open_store(self) -> ExternalStore:
            return store()

    with pytest.raises(AssertionError):
        getattr(Suite(), test)()
