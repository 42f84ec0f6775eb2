"""What stores on servers share: one use each, slots that go, errors without secrets, and the options of their URLs."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_stores import PATIENCE, SIZE, KeyedStore, names, rows
from numpy.typing import NDArray

from blockyard.errors import StoreError
from blockyard.stores.threaded.remote import RemoteStore, batched, count, positive, seconds
from blockyard.stores.url import StoreURL

URL = StoreURL.parse("mine://user:secret@host?size=1MiB")


class FarStore(RemoteStore):
    """A dictionary far away."""

    get = KeyedStore.get  # type: ignore[assignment]

    def __init__(self, use: Any) -> None:
        super().__init__(URL, bytes_per_block=SIZE, num_slots=8, namespace=bytes(32), use=use)
        self.blocks: dict[bytes, NDArray[np.uint8]] = {}
        self.error: Exception | None = None
        self.is_connected = True

    def before(self, name: str) -> None:
        if self.error is not None:
            raise self.error

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        self.blocks.update((key.tobytes(), row.copy()) for key, row in zip(keys, rows, strict=True))
        return np.ones(len(keys), np.bool_)

    def delete(self, keys: NDArray[np.uint8]) -> None:
        self.before("delete")
        for key in keys:
            self.blocks.pop(key.tobytes(), None)

    def _ask(self) -> None:
        self.before("ask")

    def _disconnect(self) -> None:
        self.is_connected = False


def test_slots_are_removed_on_closing_and_keys_stay():
    for use, left in (("swap", 0), ("prefix", 4)):
        with FarStore(use) as store:
            ticket = store.submit_write(np.arange(3), rows(3)) if use == "swap" else store.submit_put(names(3), rows(3))
            assert store.wait(ticket).ok.all()
            assert len(store.blocks) >= 3
        assert len(store.blocks) == left
        assert not store.is_connected


def test_a_slot_that_is_written_while_others_are_removed_goes_with_the_next_close():
    """A call that hung before it wrote."""

    store, put, begun, gate = FarStore("swap"), FarStore.put, threading.Event(), threading.Event()
    store.wait(store.submit_write(np.arange(3), rows(3)))

    def hang(keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        begun.set()
        assert gate.wait(PATIENCE)
        return put(store, keys, rows)

    store.put = hang  # type: ignore[method-assign]
    store.submit_write(np.arange(4), rows(4))
    assert begun.wait(PATIENCE)
    assert not store.close(0.0)
    until = time.monotonic() + PATIENCE
    while store.blocks and time.monotonic() < until:
        time.sleep(0.001)
    gate.set()
    assert store.close(PATIENCE)
    assert not store.blocks


def test_a_finalizer_may_close_a_store_as_the_interpreter_ends():
    program = """
        from test_remote import FarStore, np, rows

        class Engine:
            def __init__(self):
                self.store = FarStore("swap")
            def __del__(self):
                print(self.store.close(), self.store.is_connected)

        kept = Engine()
        assert kept.store.wait(kept.store.submit_write(np.arange(3), rows(3))).ok.all()
    """
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=os.environ | {"PYTHONPATH": path}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True False\n", "")


def test_a_store_has_one_use():
    with FarStore("swap") as store, pytest.raises(StoreError, match="has no keys"):
        store.contains(names(1))
    with FarStore("prefix") as store, pytest.raises(StoreError, match="has no slots"):
        store.submit_read(np.arange(1))


def test_errors_hide_secrets_and_slots_that_cannot_be_removed_are_noted():
    store = FarStore("swap")
    assert store.wait(store.submit_write(np.arange(1), rows(1))).ok.all()
    store.error = ConnectionError("no way for user:secret")
    with pytest.raises(StoreError, match=r"mine://\*\*\*@host.*no way for \*\*\*"):
        store.ping()
    assert "secret" not in repr(store)
    store.close()
    assert "no way for ***" in store.stats().last_error


def test_batches_are_split_by_rows_and_bytes():
    assert list(batched(np.zeros((5, 10), np.uint8), 2, 1000)) == [slice(0, 2), slice(2, 4), slice(4, 6)]
    assert list(batched(np.zeros((2, 10), np.uint8), 9, 5)) == [slice(0, 1), slice(1, 2)]
    assert not list(batched(np.zeros((0, 10), np.uint8), 9, 5))


def test_options_are_read_within_their_ranges():
    assert (positive("2KiB"), count(1, 4)("4"), seconds(0.5, 2)("1.5")) == (2048, 4, 1.5)
    for read, text in ((positive, "0"), (count(1, 4), "5"), (count(1, 4), "x"), (seconds(1, 2), "nan")):
        with pytest.raises(ValueError):  # noqa: PT011 (the URL's message says what it must be)
            read(text)
