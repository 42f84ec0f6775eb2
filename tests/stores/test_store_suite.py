"""The shared tier test passes a plug-in written in plain Python, and notices plug-ins that are wrong."""

import re
from typing import Any

import numpy as np
import pytest
from memory_stores import KeyedStore
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError, MappingError, StoreError, UnknownTicketError
from blockyard.stores import Completion, ExternalStore, StoreStats
from blockyard.testing.store_suite import PrefixStoreSuite, StoreSuite


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

    def submit_read(self, slots: NDArray[np.int64], rows: NDArray[np.uint8] | None = None) -> int:
        self.check(slots)
        rows = np.zeros((len(slots), self.bytes_per_block), np.uint8) if rows is None else rows
        ok = [int(slot) in self.blocks for slot in slots]
        for row, slot, good in zip(rows, slots, ok, strict=True):
            row[:] = self.blocks[int(slot)] if good else 0
        self.counts["read_blocks"] += sum(ok)
        self.missed += len(ok) - sum(ok)
        return self.finish(ok, rows)

    def poll(self) -> list[int]:
        found, self.unreported = [ticket for ticket in self.unreported if ticket in self.done], []
        return found

    def wait(self, ticket: int, timeout: float | None = None) -> Completion:
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

    def submit_read(self, slots: NDArray[np.int64], rows: NDArray[np.uint8] | None = None) -> int:
        self.check(slots)
        empty = np.zeros(self.bytes_per_block, np.uint8)
        rows = np.array([self.blocks.get(int(slot), empty) for slot in slots]).reshape(-1, self.bytes_per_block)
        return self.finish([True] * len(slots), rows)


class NeverForgets(DictStore):
    """Wrong: a ticket can be collected again."""

    def wait(self, ticket: int, timeout: float | None = None) -> Completion:
        if ticket not in self.done:
            raise UnknownTicketError(f"ticket {ticket} is not open")
        return self.done[ticket]


@pytest.mark.parametrize(
    ("store", "test"),
    [
        (KeepsReferences, "test_rows_may_change_once_their_write_is_collected"),
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


class IgnoresOld(KeyedStore):
    """Wrong: replaces the epoch's record whatever it is, so that two processes begin an epoch each."""

    def replace_epoch(
        self, key: NDArray[np.uint8], old: NDArray[np.uint8] | None, new: NDArray[np.uint8]
    ) -> NDArray[np.uint8] | None:
        self.put(key[None], new[None])
        return new


class SaysItReplaced(KeyedStore):
    """Wrong: keeps another record, but returns the new one."""

    def replace_epoch(
        self, key: NDArray[np.uint8], old: NDArray[np.uint8] | None, new: NDArray[np.uint8]
    ) -> NDArray[np.uint8] | None:
        super().replace_epoch(key, old, new)
        return new


class Compares(KeyedStore):
    """Right."""

    def replace_epoch(
        self, key: NDArray[np.uint8], old: NDArray[np.uint8] | None, new: NDArray[np.uint8]
    ) -> NDArray[np.uint8] | None:
        return super().replace_epoch(key, old, new)


class SaysTrue(KeyedStore):
    """Wrong: says whether it replaced the record, in place of returning it."""

    def replace_epoch(self, key: NDArray[np.uint8], old: NDArray[np.uint8] | None, new: NDArray[np.uint8]) -> Any:
        return super().replace_epoch(key, old, new) is new


def test_a_replacement_that_returns_no_record_is_named():
    with SaysTrue(bytes_per_block=5000, namespace=bytes(32)) as store:
        done = store.wait(store.submit_put([bytes(32)], np.zeros((1, 5000), np.uint8)), 30)
        assert not done.ok.any()
        assert "replace_epoch returned True, must return the row that is stored" in str(store.stats().last_error)


@pytest.mark.parametrize(
    ("store", "says"),
    [
        (Compares, ""),
        (IgnoresOld, "replace_epoch returns after a stale `old`: found a row of 192 bytes, all 2, expected .*, all 1$"),
        (SaysItReplaced, "replace_epoch returns after a stale `old`: found a row of 192 bytes, all 2"),
        (SaysTrue, "replace_epoch where no record was: found True, expected a row of 192 bytes, all 1"),
    ],
)
def test_a_replacement_that_ignores_the_record_is_noticed(store: type[KeyedStore], says: str):
    class Suite(PrefixStoreSuite):
        def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
            return store(bytes_per_block=self.bytes_per_block, namespace=namespace)

    test = Suite().test_a_record_is_replaced_only_if_it_is_as_expected
    if not says:
        test()
    else:
        with pytest.raises(AssertionError, match=says):
            test()


class KeyedDictStore(DictStore):
    """The smallest prefix store: `medium` is what outlives it."""

    num_slots = 16

    def __init__(self, medium: dict[bytes, NDArray[np.uint8]], namespace: bytes) -> None:
        super().__init__()
        self.medium, self.namespace = medium, namespace

    def names(self, keys: object) -> list[bytes]:
        if self.closed:
            raise StoreError("the store is closed")
        names = list(keys) if isinstance(keys, (list, np.ndarray)) else [keys]
        names = [key.tobytes() if isinstance(key, np.ndarray) and key.dtype == np.uint8 else key for key in names]
        if not all(isinstance(name, bytes) and len(name) == 32 for name in names):
            raise InvalidArgumentError("a key must have 32 bytes")
        return [self.namespace + name for name in names]

    def submit_put(self, keys: object, rows: NDArray[np.uint8]) -> int:
        names = self.names(keys)
        if rows.dtype != np.uint8 or rows.shape != (len(names), self.bytes_per_block):
            raise InvalidArgumentError(f"rows are {rows.dtype} {rows.shape}")
        for name, row in zip(names, rows, strict=True):
            if name not in self.medium:
                self.keep(name, row)
                self.counts["written_blocks"] += 1
        return self.finish([True] * len(names), np.zeros((0, self.bytes_per_block), np.uint8))

    def keep(self, name: bytes, row: NDArray[np.uint8]) -> None:
        if len(self.medium) == self.num_slots:
            del self.medium[next(iter(self.medium))]
        self.medium[name] = row.copy()

    def submit_get(self, keys: object, rows: NDArray[np.uint8] | None = None) -> int:
        names = self.names(keys)
        ok = [name in self.medium for name in names]
        rows = np.zeros((len(names), self.bytes_per_block), np.uint8) if rows is None else rows
        for row, name in zip(rows, names, strict=True):
            row[:] = self.medium.get(name, 0)
        self.counts["read_blocks"] += sum(ok)
        self.missed += len(ok) - sum(ok)
        return self.finish(ok, rows)

    def submit_delete(self, keys: object) -> int:
        names = self.names(keys)
        for name in names:
            self.medium.pop(name, None)
        return self.finish([True] * len(names), np.zeros((0, self.bytes_per_block), np.uint8))

    def contains(self, keys: object) -> NDArray[np.bool_]:
        return np.array([name in self.medium for name in self.names(keys)], dtype=bool)

    def forget(self) -> None:
        self.names([])
        self.medium.clear()

    def stats(self) -> StoreStats:
        plain = super().stats().as_dict()
        plain = {name: plain[name] for name in ("written_blocks", "read_blocks", "misses")}
        return StoreStats(**plain, cached_blocks=len(self.medium))


class TestKeyedDictStore(PrefixStoreSuite):
    @pytest.fixture(autouse=True)
    def _medium(self) -> None:
        self.medium: dict[bytes, NDArray[np.uint8]] = {}

    def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
        return KeyedDictStore(self.medium, namespace)


class DropsTheNamespace(KeyedDictStore):
    """Wrong: another model's blocks are hits."""

    def names(self, keys: object) -> list[bytes]:
        return [name[32:] for name in super().names(keys)]


class TruncatesKeys(KeyedDictStore):
    """Wrong: keys that begin alike are one."""

    def names(self, keys: object) -> list[bytes]:
        return [name[:33] for name in super().names(keys)]


class ForgetsForAWhile(KeyedDictStore):
    """Wrong: what was forgotten is back after a restart."""

    def forget(self) -> None:
        self.names([])
        self.medium = {}


class SaysHit(KeyedDictStore):
    """Wrong: a hit that no read bears out."""

    def contains(self, keys: object) -> NDArray[np.bool_]:
        return np.ones(len(self.names(keys)), dtype=bool)


class GrowsWithoutBound(KeyedDictStore):
    """Wrong: keeps every block there ever was."""

    def keep(self, name: bytes, row: NDArray[np.uint8]) -> None:
        self.medium[name] = row.copy()


class DeletesOnlyTheFirst(KeyedDictStore):
    """Wrong: the other keys of a batch stay."""

    def submit_delete(self, keys: object) -> int:
        names = self.names(keys)
        self.medium.pop(names[0], None)
        return self.finish([True] * len(names), np.zeros((0, self.bytes_per_block), np.uint8))


@pytest.mark.parametrize(
    ("store", "test"),
    [
        (DropsTheNamespace, "test_another_namespace_finds_nothing"),
        (TruncatesKeys, "test_a_full_store_takes_more_and_gives_no_wrong_block"),
        (ForgetsForAWhile, "test_forgotten_keys_stay_forgotten"),
        (SaysHit, "test_only_a_block_that_has_landed_is_contained"),
        (GrowsWithoutBound, "test_a_full_store_takes_more_and_gives_no_wrong_block"),
        (DeletesOnlyTheFirst, "test_a_deleted_key_stays_deleted"),
    ],
)
def test_a_wrong_prefix_store_is_noticed(store: type[KeyedDictStore], test: str):
    medium: dict[bytes, NDArray[np.uint8]] = {}

    class Suite(PrefixStoreSuite):
        num_slots = 160

        def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
            return store(medium, namespace)

    with pytest.raises(AssertionError):
        getattr(Suite(), test)()


class KeepsTheFirst(KeyedStore):
    """Wrong: a key that is there keeps its block."""

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        new = [index for index, key in enumerate(keys) if key.tobytes() not in self.blocks]
        super().put(keys[new], rows[new])
        return np.ones(len(keys), bool)


class FindsEverything(KeyedStore):
    """Wrong: `get` says that every key is there."""

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        super().get(keys, out)
        return np.ones(len(keys), bool)


class EvictsTheEpoch(KeyedStore):
    """Wrong: evicts the oldest row, whichever it is."""

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        ok = super().put(keys, rows)
        for name in list(self.blocks)[: -PrefixStoreSuite.num_slots]:
            del self.blocks[name]
        return ok


@pytest.mark.parametrize(
    ("kind", "test", "says"),
    [
        (EvictsTheEpoch, "test_a_full_store_takes_more_and_gives_no_wrong_block", "must not evict the epoch's record"),
        (KeepsTheFirst, "test_a_put_replaces_a_damaged_block", "reasons of a get after `put` was to replace"),
        (FindsEverything, "test_a_key_that_was_never_put_has_no_block", "`get`.* of keys that were never put"),
        (FindsEverything, "test_blocks_outlive_the_store", "`get`.* of keys that were never put"),
    ],
)
def test_a_wrong_put_or_get_is_named(kind: type[KeyedStore], test: str, says: str):
    medium: dict[bytes, NDArray[np.uint8]] = {}

    class Suite(PrefixStoreSuite):
        def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
            return kind(medium, bytes_per_block=self.bytes_per_block, namespace=namespace)

    with pytest.raises(AssertionError, match=says):
        getattr(Suite(), test)()


def test_the_suite_shows_the_stores_last_error():
    class Suite(PrefixStoreSuite):
        def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
            def fail(name: str) -> None:
                if name == "put":
                    raise RuntimeError("backend down")

            store = KeyedStore({}, bytes_per_block=self.bytes_per_block, namespace=namespace)
            store.before = fail
            return store

    with pytest.raises(AssertionError, match="the store's last error: RuntimeError: backend down"):
        Suite().test_blocks_come_back_by_key()


def test_a_store_without_keys_says_so():
    store = DictStore()
    calls = [
        lambda: store.submit_put([bytes(32)], np.zeros((1, 5000), np.uint8)),
        lambda: store.submit_get([bytes(32)]),
        lambda: store.submit_delete([bytes(32)]),
        lambda: store.contains([bytes(32)]),
        store.forget,
    ]
    for call in calls:
        with pytest.raises(StoreError, match="has no keys"):
            call()
    with pytest.raises(StoreError, match="call poll"):
        store.event_fd()


class Cuts(KeyedStore):
    """Wrong: looks at some bytes of a key only."""

    part = slice(None)

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        return super().put(keys[:, self.part], rows)

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        return super().get(keys[:, self.part], out)


@pytest.mark.parametrize(
    ("part", "ignored"), [(slice(1, 32), [0]), (slice(31), [31]), (slice(2, 28), [0, 1, 28, 29, 30, 31])]
)
def test_a_store_that_looks_at_a_part_of_each_key_is_noticed(part: slice, ignored: list[int]):
    class Suite(PrefixStoreSuite):
        def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
            store = Cuts(bytes_per_block=self.bytes_per_block, namespace=namespace)
            store.part = part
            return store

    with pytest.raises(AssertionError, match=re.escape(f"does not look at: found {ignored}, expected []")):
        Suite().test_keys_that_differ_in_one_byte_are_apart()
