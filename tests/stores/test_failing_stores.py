"""Plug-ins whose functions raise: which blocks are misses, and what an operator sees of it."""

import threading

import numpy as np
import pytest
from memory_stores import KeyedStore, get, put
from numpy.typing import NDArray

from blockyard.errors import StoreError


class RaisingStore(KeyedStore):
    """`get` raises for a key that is absent, as a dict does; `put` raises what the test says."""

    error: Exception | None = None
    timeout_base = 60.0  # on a busy machine, too, each call is made

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        if self.error is not None:
            raise self.error
        return super().put(keys, rows)

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        found = super().get(keys, out)
        if not found.all():
            raise KeyError("no such key")
        return found


def test_a_get_that_raises_for_absent_keys_makes_no_put_fail():
    medium: dict[bytes, NDArray[np.uint8]] = {}
    with RaisingStore(medium) as store:
        assert put(store, 3) == ("",) * 3
        assert get(store, 3) == ("",) * 3
        store.forget()
        assert "" not in get(store, 3)
        assert put(store, 3) == ("",) * 3
    with RaisingStore(medium) as store:
        assert get(store, 3) == ("",) * 3


def test_a_record_that_cannot_be_read_is_not_replaced():
    medium: dict[bytes, NDArray[np.uint8]] = {}
    with RaisingStore(medium) as store:
        assert put(store, 3) == ("",) * 3
    before = dict(medium)
    with KeyedStore(medium) as other:

        def fail(name: str) -> None:
            if name == "get":
                raise ConnectionRefusedError(name)

        other.before = fail
        assert put(other, 3) == ("error",) * 3
        with pytest.raises(StoreError, match="ConnectionRefusedError"):
            other.forget()
        assert medium == before


def test_a_store_that_fails_logs_each_cause_once_a_minute_and_that_it_works_again(caplog: pytest.LogCaptureFixture):
    with RaisingStore() as store:
        down, again, refused = (RuntimeError(text) for text in ("port 80 is down", "port 8080 is down", "refused"))
        for error in (down, again, refused, OSError(5, "no disk")):
            store.error = error
            for _ in range(3):
                assert put(store, 2) == ("error", "error")
        store.error = None
        assert put(store, 2) == put(store, 2) == ("", "")
    assert {(record.name, record.levelname) for record in caplog.records} == {("blockyard.stores", "WARNING")}
    assert [record.getMessage() for record in caplog.records] == [
        f"{store!r} fails, blocks are misses: RuntimeError: port 80 is down",
        f"{store!r} fails, blocks are misses: RuntimeError: refused",
        f"{store!r} fails, blocks are misses: OSError: [Errno 5] no disk",
        f"{store!r} works again after 12 failures",
    ]


def test_a_store_that_fails_with_another_message_each_time_logs_eight_a_minute(caplog: pytest.LogCaptureFixture):
    with RaisingStore() as store:
        for letter in "abcdefghijkl":
            store.error = RuntimeError(letter)
            assert put(store, 1) == ("error",)
    assert len(caplog.records) == 8


def test_a_store_whose_only_thread_hangs_is_in_the_log(caplog: pytest.LogCaptureFixture):
    goes_on = threading.Event()
    with KeyedStore() as store:
        store.threads, store.timeout_base = 1, 0.05
        store.before = lambda name: goes_on.wait(60)
        try:
            assert set(put(store, 2)) <= {"timeout", "unavailable"}
            store.poll()
            assert [record.getMessage() for record in caplog.records] == [
                f"{store!r} fails, blocks are misses: it does not answer"
            ]
        finally:
            goes_on.set()
