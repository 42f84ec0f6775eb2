# ruff: noqa: D102 (the names of the tests are sentences)
"""Conformance tests of `ExternalStore`, as classes for a plug-in's tests to subclass.

`StoreSuite` is for swap space, `PrefixStoreSuite` for keys.

    from blockyard.testing.store_suite import StoreSuite

    class TestMyStore(StoreSuite):
        def open_store(self) -> ExternalStore:
            return open_store("mystore://...", bytes_per_block=self.bytes_per_block, num_slots=self.num_slots)

They work without pytest, too: call each method named `test_*`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError, MappingError, StoreError, UnknownTicketError
from blockyard.stores.base import Completion, ExternalStore
from blockyard.stores.threaded import ThreadedStore
from blockyard.stores.threaded.epochs import EPOCH_BYTES
from blockyard.stores.value import HEADER

__all__ = ["PrefixStoreSuite", "StoreSuite"]

PATIENCE = 30.0
RECORD_BYTES = HEADER + EPOCH_BYTES


class StoreSuite(ABC):
    """Tests of an `ExternalStore`; each one opens a store and closes it.

    Attributes:
        bytes_per_block: block size of the opened stores; deliberately not a multiple of a page.
        num_slots: number of slots in the opened stores, at least 8.
    """

    bytes_per_block = 5000
    num_slots = 32

    @abstractmethod
    def open_store(self) -> ExternalStore:
        """Open a fresh, empty store of `num_slots` slots of `bytes_per_block` bytes."""

    def rows(self, count: int, seed: int = 0) -> NDArray[np.uint8]:
        """Return random blocks, uint8 `[count, bytes_per_block]`."""
        return np.random.default_rng(seed).integers(0, 256, (count, self.bytes_per_block), dtype=np.uint8)

    def test_shape_is_what_was_asked_for(self) -> None:
        with self.open_store() as store:
            _check(isinstance(store, ExternalStore), "open_store must return an ExternalStore")
            _equal((store.num_slots, store.bytes_per_block), (self.num_slots, self.bytes_per_block), "shape")

    def test_blocks_come_back_in_any_order(self) -> None:
        with self.open_store() as store:
            slots, rows = np.arange(self.num_slots), self.rows(self.num_slots)
            written = store.wait(store.submit_write(slots, rows), PATIENCE)
            _equal(written.ok.tolist(), [True] * self.num_slots, "writes")
            _equal(written.rows.shape, (0, self.bytes_per_block), "rows of a write")
            order = np.random.default_rng(1).permutation(self.num_slots)
            _read(store, order, rows[order])

    def test_a_slot_may_be_read_twice_in_one_batch(self) -> None:
        with self.open_store() as store:
            rows = self.rows(1)
            store.wait(store.submit_write(np.array([3]), rows), PATIENCE)
            _read(store, np.array([3, 3]), np.concatenate([rows, rows]))

    def test_rows_may_change_once_their_write_is_collected(self) -> None:
        """Also when the caller gave up immediately."""
        with self.open_store() as store:
            for number in range(8):
                rows = self.rows(1, number)
                store.wait(store.submit_write(np.array([number]), rows), PATIENCE if number % 2 else 0.0)
                rows[:] = 0
            read = store.wait(store.submit_read(np.arange(8)), PATIENCE)
            _check(bool(read.ok[1::2].all()), "a block that was written must come back")
            expected = np.concatenate([self.rows(1, number) for number in range(8)])
            _check(np.array_equal(read.rows[read.ok], expected[read.ok]), "a block came back with other bytes")

    def test_a_read_sees_the_write_submitted_before_it(self) -> None:
        with self.open_store() as store:
            slots, tickets = np.arange(4), []
            for seed in range(20):
                tickets.append(store.submit_write(slots, self.rows(4, seed)))
                tickets.append(store.submit_read(slots))
            for seed, (write, read) in enumerate(zip(tickets[::2], tickets[1::2], strict=True)):
                _check(bool(store.wait(write, PATIENCE).ok.all()), f"write {seed} failed")
                _whole(store.wait(read, PATIENCE), self.rows(4, seed))

    def test_a_slot_never_written_is_a_miss_of_zeros(self) -> None:
        with self.open_store() as store:
            rows = self.rows(1)
            store.wait(store.submit_write(np.array([1]), rows), PATIENCE)
            read = store.wait(store.submit_read(np.array([0, 1])), PATIENCE)
            _equal(read.ok.tolist(), [False, True], "ok")
            _check(bool(read.reasons[0]) and not read.reasons[1], f"a miss must have a reason, found {read.reasons}")
            _check(not read.rows[0].any(), "the row of a miss must be zero")
            _check(np.array_equal(read.rows[1], rows[0]), "the block next to a miss is wrong")
            _equal(sum(store.stats().misses.values()), 1, "misses counted")

    def test_a_ticket_is_reported_once_and_collected_once(self) -> None:
        with self.open_store() as store:
            ticket = store.submit_read(np.array([0]))
            other = store.submit_read(np.array([0]))
            store.wait(other, PATIENCE)
            seen: list[int] = []
            until = time.monotonic() + PATIENCE
            while not seen and time.monotonic() < until:
                time.sleep(0.001)
                seen += store.poll()
            _equal(seen, [ticket], "poll")
            _equal(store.poll(), [], "second poll")
            _equal(store.wait(ticket, PATIENCE).ticket, ticket, "ticket")
            _raises(UnknownTicketError, lambda: store.wait(ticket))
            _raises(UnknownTicketError, lambda: store.wait(1 << 40))

    def test_an_empty_batch_is_a_batch(self) -> None:
        with self.open_store() as store:
            none = np.zeros(0, np.int64)
            _equal(store.wait(store.submit_write(none, self.rows(0)), PATIENCE).ok.tolist(), [], "write")
            _equal(store.wait(store.submit_read(none), PATIENCE).rows.shape, (0, self.bytes_per_block), "read")

    def test_a_read_may_be_given_rows(self) -> None:
        with self.open_store() as store:
            slots, rows = np.array([2, 0, 1]), self.rows(3)
            store.wait(store.submit_write(slots, rows), PATIENCE)
            out = np.full_like(rows, 7)
            read = store.wait(store.submit_read(slots, out), PATIENCE)
            _whole(read, rows)
            _check(np.shares_memory(read.rows, out), "the rows of the answer must be those that the read was given")

    def test_giving_up_at_once_raises_nothing(self) -> None:
        with self.open_store() as store:
            completion = store.wait(store.submit_write(np.arange(8), self.rows(8)), 0.0)
            _equal(len(completion.ok), 8, "entries")
            reasons = {reason for ok, reason in zip(completion.ok, completion.reasons, strict=True) if not ok}
            _check(reasons <= {"timeout"}, f"reasons must be timeout, found {reasons}")
            read = store.wait(store.submit_read(np.arange(8)), PATIENCE)
            _equal(read.ok.tolist(), completion.ok.tolist(), "a write that was given up must read as a miss")

    def test_bad_slots_are_refused_and_change_nothing(self) -> None:
        with self.open_store() as store:
            rows = self.rows(2)
            store.wait(store.submit_write(np.array([0, 1]), rows), PATIENCE)
            for bad in ([0, self.num_slots], [0, -1], [1, 1]):
                _raises(MappingError, partial(store.submit_write, np.array(bad), self.rows(2, 5)))
            _raises(MappingError, lambda: store.submit_read(np.array([0, self.num_slots])))
            _read(store, np.array([0, 1]), rows)
            _equal(store.stats().written_blocks, 2, "written blocks")

    def test_bad_arrays_are_refused(self) -> None:
        with self.open_store() as store:
            slots, rows = np.array([0, 1]), self.rows(2)
            wrong: list[object] = [rows[:, :-1], rows[:1], rows.view(np.int8), rows[0], rows.astype(np.float32)]
            for bad in cast("list[NDArray[np.uint8]]", wrong):
                _raises(InvalidArgumentError, partial(store.submit_write, slots, bad))
            wrong = [slots.astype(np.int32), slots.reshape(1, 2), slots.astype(np.float64)]
            for worse in cast("list[NDArray[np.int64]]", wrong):
                _raises(InvalidArgumentError, partial(store.submit_write, worse, rows))
                _raises(InvalidArgumentError, partial(store.submit_read, worse))

    def test_counters_count(self) -> None:
        with self.open_store() as store:
            store.wait(store.submit_write(np.arange(5), self.rows(5)), PATIENCE)
            store.wait(store.submit_read(np.arange(3)), PATIENCE)
            stats = store.stats()
            _equal((stats.written_blocks, stats.read_blocks), (5, 3), "blocks")
            _equal(stats.written_bytes, 5 * self.bytes_per_block, "bytes written")
            _equal(stats.read_bytes, 3 * self.bytes_per_block, "bytes read")
            _equal((stats.errors, stats.checksum_failures, stats.misses), (0, 0, {}), "failures")

    def test_a_closed_store_refuses_batches(self) -> None:
        store = self.open_store()
        store.close()
        store.close()
        _raises(StoreError, lambda: store.submit_read(np.array([0])))
        _raises(StoreError, lambda: store.submit_write(np.array([0]), self.rows(1)))

    def test_what_was_under_way_can_be_collected_after_closing(self) -> None:
        store = self.open_store()
        tickets = [store.submit_write(np.arange(8), self.rows(8, seed)) for seed in range(20)]
        store.close()
        for ticket in tickets:
            completion = store.wait(ticket, PATIENCE)
            reasons = {reason for ok, reason in zip(completion.ok, completion.reasons, strict=True) if not ok}
            _check(reasons <= {"closed"}, f"reasons must be closed, found {reasons}")


class PrefixStoreSuite(ABC):
    """Tests of an `ExternalStore` whose blocks have keys.

    Attributes:
        bytes_per_block: block size of the opened stores; deliberately not a multiple of a page.
        num_slots: number of blocks that they hold, at least 8.
        evicts: whether they hold no more than `num_slots` blocks; False for storage without a size, such as a bucket.
    """

    bytes_per_block = 5000
    num_slots = 16
    evicts = True

    @abstractmethod
    def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
        """Open the test's store. It is empty at first, and its blocks survive closing it."""

    def keys(self, *numbers: int) -> list[bytes]:
        """Return one key per number."""
        return [sha256(number.to_bytes(8, "little")).digest() for number in numbers]

    def rows(self, *numbers: int) -> NDArray[np.uint8]:
        """Return the block of each number, uint8 `[n, bytes_per_block]`."""
        rows = [np.random.default_rng(n).integers(0, 256, self.bytes_per_block, dtype=np.uint8) for n in numbers]
        return np.array(rows, dtype=np.uint8).reshape(len(numbers), self.bytes_per_block)

    def put(self, store: ExternalStore, *numbers: int) -> None:
        """Store the blocks of these numbers."""
        done = store.wait(store.submit_put(self.keys(*numbers), self.rows(*numbers)), PATIENCE)
        _equal(done.ok.tolist(), [True] * len(numbers), f"puts ({_why(store, done)})")
        _equal(done.rows.shape, (0, self.bytes_per_block), "rows of a put")

    def check(self, store: ExternalStore, found: list[int], absent: list[int]) -> None:
        """Check that a read finds the blocks `found`, and returns misses of zeros for `absent`."""
        read = store.wait(store.submit_get(self.keys(*found, *absent)), PATIENCE)
        _equal(read.ok.tolist(), [True] * len(found) + [False] * len(absent), f"gets ({_why(store, read)})")
        _check(np.array_equal(read.rows[: len(found)], self.rows(*found)), "a block came back with other bytes")
        _check(not read.rows[len(found) :].any(), "the rows of misses must be zero")
        _equal([bool(reason) for reason in read.reasons], [not good for good in read.ok], "reasons")

    def test_a_key_that_was_never_put_has_no_block(self) -> None:
        with self.open_store() as store:
            _refuse_liars(store)

    def test_keys_that_differ_in_one_byte_are_apart(self) -> None:
        with self.open_store() as store:
            _refuse_cut_names(store, lambda: self.put(store, 1))
            read = store.wait(store.submit_get(_variants(np.frombuffer(self.keys(1)[0], np.uint8))), PATIENCE)
            _equal(read.ok.tolist(), [False] * 32, "gets of keys that differ from a stored one in one byte")

    def test_blocks_come_back_by_key(self) -> None:
        with self.open_store() as store:
            self.put(store, *range(8))
            self.check(store, [5, 0, 7, 5], [9, 10])
            keys = np.frombuffer(b"".join(self.keys(3, 4)), np.uint8).reshape(2, 32)
            _whole(store.wait(store.submit_get(keys), PATIENCE), self.rows(3, 4))

    def test_a_get_may_be_given_rows(self) -> None:
        with self.open_store() as store:
            self.put(store, *range(8))
            out = np.full((5, self.bytes_per_block), 7, np.uint8)
            read = store.wait(store.submit_get(self.keys(5, 0, 9, 7, 5), out), PATIENCE)
            _check(np.shares_memory(read.rows, out), "the rows of the answer must be those that the get was given")
            _equal(read.ok.tolist(), [True, True, False, True, True], f"gets ({_why(store, read)})")
            _check(np.array_equal(read.rows[read.ok], self.rows(5, 0, 7, 5)), "a block came back with other bytes")

    def test_only_a_block_that_has_landed_is_contained(self) -> None:
        with self.open_store() as store:
            _equal(store.contains(self.keys(1, 2)).tolist(), [False, False], "contains in an empty store")
            self.put(store, 1)
            _equal(store.contains(self.keys(1, 2)).tolist(), [True, False], "contains")
            _equal(store.lacks(self.keys(1)).tolist(), [False], "lacks, of a key that is there")

    def test_rows_may_change_once_their_put_is_collected(self) -> None:
        """Also when the caller gave up immediately."""
        with self.open_store() as store:
            for number in range(8):
                rows = self.rows(number)
                store.wait(store.submit_put(self.keys(number), rows), PATIENCE if number % 2 else 0.0)
                rows[:] = 0
            read = store.wait(store.submit_get(self.keys(*range(8))), PATIENCE)
            _check(bool(read.ok[1::2].all()), "a block that was put must come back")
            _check(np.array_equal(read.rows[read.ok], self.rows(*range(8))[read.ok]), "a block has other bytes")

    def test_a_get_sees_the_put_submitted_before_it(self) -> None:
        with self.open_store() as store:
            tickets = []
            for number in range(8):
                tickets.append(store.submit_put(self.keys(number), self.rows(number)))
                tickets.append(store.submit_get(self.keys(number)))
            for number, (put, get) in enumerate(zip(tickets[::2], tickets[1::2], strict=True)):
                _check(bool(store.wait(put, PATIENCE).ok.all()), f"put {number} failed")
                _whole(store.wait(get, PATIENCE), self.rows(number))

    def test_a_key_put_again_keeps_its_block(self) -> None:
        with self.open_store() as store:
            self.put(store, 1, 2, 1)
            self.put(store, 2)
            self.check(store, [1, 2], [])

    def test_a_put_replaces_a_damaged_block(self) -> None:
        """A store that keeps the first block of a key would report success, and miss."""
        with self.open_store() as store:
            if not isinstance(store, ThreadedStore):
                return
            self.put(store, 1)
            put = store.put_blocks

            def damage(keys: NDArray[np.uint8], rows: NDArray[np.uint8], *more: Any) -> NDArray[np.bool_]:
                damaged = rows.copy()
                damaged[:, -1] ^= 1
                return put(keys, damaged, *more)

            store.put_blocks = damage  # type: ignore[assignment, method-assign]
            self.put(store, 2)
            store.put_blocks = put  # type: ignore[method-assign]
            store.wait(store.submit_get(self.keys(2)), PATIENCE)
            self.put(store, 2)
            read = store.wait(store.submit_get(self.keys(2)), PATIENCE)
            _equal(list(read.reasons), [""], "reasons of a get after `put` was to replace a damaged block")
            self.check(store, [1, 2], [])

    def test_a_full_store_takes_more_and_gives_no_wrong_block(self) -> None:
        with self.open_store() as store:
            numbers = range(2 * self.num_slots + 3)
            for number in numbers:
                self.put(store, number)
            lacks_epoch = _lacks_epoch(store)  # before a get puts the record again
            read = store.wait(store.submit_get(self.keys(*numbers)), PATIENCE)
            if not read.ok[-1]:
                _check(not lacks_epoch, "a full store must not evict the epoch's record, the row of 192 bytes")
            most = self.num_slots if self.evicts else len(read.ok)
            _check(int(np.count_nonzero(read.ok)) <= most, "a store must not hold more blocks than slots")
            _check(bool(read.ok[-1]), "the block that was put last must be there")
            _check(np.array_equal(read.rows[read.ok], self.rows(*numbers)[read.ok]), "a block has other bytes")

    def test_blocks_outlive_the_store(self) -> None:
        with self.open_store() as store:
            self.put(store, 1, 2)
        with self.open_store() as store:
            _refuse_liars(store)
            _soon(partial(store.contains, self.keys(1, 2, 3)), [True, True, False], "contains after opening again")
            self.check(store, [2, 1], [3])

    def test_another_namespace_finds_nothing(self) -> None:
        with self.open_store() as store:
            self.put(store, 1, 2)
        with self.open_store(bytes([1] * 32)) as store:
            _equal(store.contains(self.keys(1, 2)).tolist(), [False, False], "contains in another namespace")
            self.check(store, [], [1, 2])

    def test_a_deleted_key_stays_deleted(self) -> None:
        with self.open_store() as store:
            self.put(store, 1, 2, 3)
            done = store.wait(store.submit_delete(self.keys(1, 9, 3)), PATIENCE)
            _equal(done.ok.tolist(), [True, True, True], "deletions")
            self.check(store, [2], [1, 3])
        with self.open_store() as store:
            self.check(store, [2], [1, 3])

    def test_forgotten_keys_stay_forgotten(self) -> None:
        with self.open_store() as store:
            self.put(store, 1, 2)
            ticket = store.submit_put(self.keys(3), self.rows(3))
            store.forget()
            store.wait(ticket, PATIENCE)
            self.check(store, [], [1, 2, 3])
            self.put(store, 2)
        with self.open_store() as store:
            self.check(store, [2], [1, 3])

    def test_a_record_is_replaced_only_if_it_is_as_expected(self) -> None:
        """Processes that share the store begin an epoch at the same time; only one of them may."""
        with self.open_store() as store:
            if not isinstance(store, ThreadedStore) or type(store).replace_epoch is ThreadedStore.replace_epoch:
                return
            key = np.frombuffer(self.keys(1)[0], np.uint8)
            first, second = (np.full(RECORD_BYTES, fill, np.uint8) for fill in (1, 2))
            _equal(_text(store.replace_epoch(key, None, first)), _text(first), "replace_epoch where no record was")
            for old in (None, second, first[:-1]):
                found = store.replace_epoch(key, old, second)
                _equal(_text(found), _text(first), "what replace_epoch returns after a stale `old`")
                _equal(_text(store.read_epoch(key)), _text(first), "the record after replace_epoch with a stale `old`")
            _equal(_text(store.replace_epoch(key, first, second)), _text(second), "replace_epoch of the right `old`")
            _equal(_text(store.read_epoch(key)), _text(second), "the record after replace_epoch of the right `old`")

    def test_an_empty_batch_is_a_batch(self) -> None:
        with self.open_store() as store:
            _equal(store.wait(store.submit_put([], self.rows()), PATIENCE).ok.tolist(), [], "put")
            _equal(store.wait(store.submit_get([]), PATIENCE).rows.shape, (0, self.bytes_per_block), "get")
            _equal(store.contains([]).tolist(), [], "contains")

    def test_bad_keys_and_arrays_are_refused(self) -> None:
        with self.open_store() as store:
            rows = self.rows(1, 2)
            wrong: list[object] = [
                [b"short", b"keys"],
                np.zeros((2, 31), np.uint8),
                np.zeros(64, np.uint8),
                [1, 2],
                "k",
            ]
            for bad in cast("list[list[bytes]]", wrong):
                _raises(InvalidArgumentError, partial(store.submit_put, bad, rows))
                _raises(InvalidArgumentError, partial(store.submit_get, bad))
                _raises(InvalidArgumentError, partial(store.contains, bad))
            wrong = [rows[:, :-1], rows[:1], rows.view(np.int8), rows[0]]
            for worse in cast("list[NDArray[np.uint8]]", wrong):
                _raises(InvalidArgumentError, partial(store.submit_put, self.keys(1, 2), worse))
            self.check(store, [], [1, 2])

    def test_counters_count(self) -> None:
        with self.open_store() as store:
            self.put(store, 1, 2, 3)
            self.check(store, [1, 2], [9])
            stats = store.stats()
            _equal((stats.written_blocks, stats.read_blocks, stats.cached_blocks), (3, 2, 3), "blocks")
            _equal((stats.errors, stats.errors_in_a_row, sum(stats.misses.values())), (0, 0, 1), "failures")

    def test_a_closed_store_refuses_batches(self) -> None:
        store = self.open_store()
        store.close()
        _raises(StoreError, lambda: store.submit_get(self.keys(1)))
        _raises(StoreError, lambda: store.submit_put(self.keys(1), self.rows(1)))
        _raises(StoreError, lambda: store.submit_delete(self.keys(1)))
        _raises(StoreError, store.forget)


def _check(condition: bool, message: str) -> None:  # noqa: FBT001 (reads like an assert statement)
    if not condition:
        raise AssertionError(message)


def _refuse_liars(store: ExternalStore) -> None:
    """Fail if a store has a block for a key that was never put. The record of the epoch would then never be found."""
    if isinstance(store, ThreadedStore):
        names = np.random.default_rng(0).integers(0, 256, (2, 32), dtype=np.uint8)
        found = store.has(names).tolist()
        _equal(found, [False, False], "`get` (or `has`, if the store has its own) of keys that were never put")


def _refuse_cut_names(store: ExternalStore, put_one: Callable[[], object]) -> None:
    """Put a block, and fail if the store finds it under names that differ in one byte from what `put_blocks` got."""
    if not isinstance(store, ThreadedStore):
        put_one()
        return
    names: list[NDArray[np.uint8]] = []
    ignored: list[int] = []
    put = store.put_blocks

    def record(keys: NDArray[np.uint8], *more: Any) -> NDArray[np.bool_]:
        names.append(keys[0].copy())
        return put(keys, *more)

    store.put_blocks = record  # type: ignore[assignment, method-assign]
    put_one()
    store.put_blocks = put  # type: ignore[method-assign]
    for place, other in enumerate(_variants(names[-1])):
        with suppress(LookupError, FileNotFoundError):  # it is absent
            ignored += [place] if store.has(other[None])[0] else []
    _equal(ignored, [], "bytes of a key that `get` (or `has`, if the store has its own) does not look at")


def _variants(name: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return 32 names, each of which differs from this one in another byte."""
    return np.asarray(name ^ np.eye(32, dtype=np.uint8))


def _soon(call: Callable[[], NDArray[np.bool_]], expected: list[bool], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while (found := call().tolist()) != expected:
        _check(time.monotonic() < until, f"{what}: found {found} for {PATIENCE} s, expected {expected}")
        time.sleep(0.001)


def _equal(found: object, expected: object, what: str) -> None:
    _check(found == expected, f"{what}: found {found}, expected {expected}")


def _lacks_epoch(store: ExternalStore) -> bool:
    """Whether a store that keeps the epoch's record among its rows has lost it."""
    if isinstance(store, ThreadedStore):
        with suppress(Exception):  # of a store that keeps it elsewhere
            return store.read_epoch(np.frombuffer(store._keyed_blocks.record.key, np.uint8)) is None  # noqa: SLF001 (not public)
    return False


def _text(record: object) -> str:
    """Describe a record whose bytes are all the same."""
    if not isinstance(record, np.ndarray):
        return repr(record)
    held = sorted(set(record.tobytes()))
    return (
        f"a row of {record.nbytes} bytes, all {held[0]}" if len(held) == 1 else f"a row of {record.nbytes} other bytes"
    )


def _why(store: ExternalStore, done: Completion) -> str:
    error = store.stats().last_error
    return f"reasons {set(done.reasons)}" + (f", the store's last error: {error}" if error else "")


def _raises(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"expected {kind.__name__}, nothing was raised")


def _whole(read: Completion, rows: NDArray[np.uint8]) -> None:
    _equal(read.ok.tolist(), [True] * len(rows), f"reads (reasons {set(read.reasons)})")
    _check(np.array_equal(read.rows, rows), "a block came back with other bytes")


def _read(store: ExternalStore, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
    _whole(store.wait(store.submit_read(slots), PATIENCE), rows)
