"""`Client`: Mooncake's client, made safe for a process that must not crash, and how to connect it."""

import atexit
import ctypes
import json
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any, Final

import numpy as np

from blockyard.errors import StoreError
from blockyard.stores.mooncake.url import MooncakeURL
from blockyard.stores.threaded.runtime import runtime
from blockyard.stores.url import StoreURL, hide_secrets
from blockyard.stores.value import Bytes
from blockyard.workers.extras import missing

__all__ = ["ABSENT", "AREA", "BEING_WRITTEN", "NO_ROOM", "TOO_LONG", "Client", "connect_client", "text_of_code"]

AREA: Final = 8 << 20  # bytes that one call moves, or one value
_SETUP_SECONDS: Final = 10.0  # the client itself tries for minutes
_SETUP: Final = """
import json, os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
os._exit(store.setup(*json.load(sys.stdin)) != 0)
"""
# Error codes of the client.
NO_ROOM, TOO_LONG, BEING_WRITTEN, ABSENT = -200, -600, -703, -704
_CODES: Final = {
    NO_ROOM: "no room",
    BEING_WRITTEN: "being written",
    -707: "the lease expired",
    -800: "the transfer failed",
    -900: "the master does not answer",
    -901: "the master does not answer in time",
}


class Client:
    """Mooncake's client, which crashes the process if it is closed during a call, or called after it was closed.

    Rows pass through areas of memory that live as long as the client: a call that has failed may still write to its
    area. So blocks are checked after they were copied out of it.

    Args:
        store: a `MooncakeDistributedStore`.
        pinned: the configuration of values that are never evicted.
        area_bytes: bytes of an area.
    """

    def __init__(self, store: Any, pinned: Any, area_bytes: int) -> None:
        self._store, self.pinned, self._area_bytes = store, pinned, area_bytes
        self._areas: list[Bytes] = []  # those that no call uses
        self._lock = runtime().lock()
        self.calls = 0  # in flight
        _clients.add(self)

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the client, unless it is closed."""
        with self._lock:
            if self._store is None:
                raise StoreError("the client is closed")
            store, self.calls = self._store, self.calls + 1
        try:
            return getattr(store, name)(*arguments, **options)
        finally:
            with self._lock:
                self.calls -= 1

    def write(self, verb: str, paths: list[str], values: Sequence[memoryview], *config: Any) -> list[int]:
        """Store values. Returns the client's code for each."""
        sizes = [len(value) for value in values]
        ends = list(accumulate(sizes))
        with self._area() as area:
            for value, end in zip(values, ends, strict=True):
                area[end - len(value) : end] = value
            starts = [area.ctypes.data + end - size for end, size in zip(ends, sizes, strict=True)]
            return list(self.call(verb, paths, starts, sizes, *config))

    def read(self, paths: list[str], width: int) -> list[Bytes | int]:
        """Read values of at most `width` bytes. Returns a copy of each, or the client's code."""
        with self._area() as area:
            starts = [area.ctypes.data + number * width for number in range(len(paths))]
            codes = self.call("batch_get_into", paths, starts, [width] * len(paths))
            rows = area[: len(paths) * width].reshape(len(paths), width)
            return [code if code < 0 else row[:code].copy() for row, code in zip(rows, codes, strict=True)]

    @contextmanager
    def _area(self) -> Iterator[Bytes]:
        """Lend an area to a call; there are as many as calls at a time."""
        with self._lock:
            area = self._areas.pop() if self._areas else None
        if area is None:
            area = np.zeros(self._area_bytes, np.uint8)
            if code := self.call("register_buffer", area.ctypes.data, len(area)):
                raise StoreError(f"register {len(area)} bytes: {text_of_code(code)}")
        try:
            yield area
        finally:
            with self._lock:
                self._areas.append(area)

    def close(self) -> None:
        """Close the client, unless a call is in flight or the master does not answer: it would hold Python's lock."""
        if self._store is None or self.call("batch_is_exist", ["blockyard/"])[0] < 0:
            return
        with self._lock:
            if self.calls:
                return
            store, self._store, self.calls = self._store, None, 1
        store.close()
        self.calls = 0

    def leave(self) -> None:
        """Never destroy the client, in a forked process: its threads are missing there."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))


_clients: Final[weakref.WeakSet[Client]] = weakref.WeakSet()


def _skip_destructors() -> None:
    """Let the process end with its exit status once Python has finished, without the destructors of C++ libraries.

    Those of Mooncake crash while a call hangs, and in a forked process.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc["_exit"], None)


def _end() -> None:
    if any(client.calls for client in _clients):
        _skip_destructors()


def _begin_fork() -> None:
    for client in (clients := list(_clients)):
        client.leave()
    if clients:
        _skip_destructors()


atexit.register(_end)
os.register_at_fork(after_in_child=_begin_fork)


def connect_client(found: MooncakeURL, area_bytes: int = AREA) -> Client:
    """Return a client of the master that a URL names.

    Raises:
        StoreError: the master does not answer, or the client or a library that it needs is missing.
    """
    shown = repr(found.parts.url)
    try:
        module = import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise StoreError(str(missing(shown, error))) from None
    except ImportError as error:
        raise StoreError(f"{shown}: Mooncake's client cannot be loaded: {error}") from None
    try:
        with socket.create_connection((found.host, found.port), min(2.0, found.timeout_base)) as master:
            local = found.local or master.getsockname()[0]
    except OSError as error:
        raise StoreError(f"{shown}: {error}") from None
    setup = (local, found.metadata, 0, 0, found.protocol, found.device, f"{found.host}:{found.port}")
    _rehearse(found.parts, setup)
    store, pinned = module.MooncakeDistributedStore(), module.ReplicateConfig()
    if code := store.setup(*setup):
        raise StoreError(f"{shown}: set up Mooncake's client: {text_of_code(code)}")
    pinned.with_hard_pin, pinned.replica_num = True, 2
    return Client(store, pinned, area_bytes)


def _rehearse(parts: StoreURL, setup: tuple[Any, ...]) -> None:
    """Set up a client in another process: while the master hangs, `setup` holds Python's lock, for minutes."""
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = partial(subprocess.run, [sys.executable, "-c", _SETUP], env=os.environ | paths)
    try:
        done = run(input=json.dumps(setup), capture_output=True, text=True, timeout=_SETUP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise StoreError(f"{parts.url!r}: Mooncake's client found no master in {_SETUP_SECONDS:.0f} s") from None
    if done.returncode:
        why = hide_secrets(done.stderr.strip().rpartition("\n")[2], parts.secrets)
        raise StoreError(f"{parts.url!r}: Mooncake's client cannot be set up: {why}")


def text_of_code(code: int) -> str:
    """Return what an error code of the client means."""
    return f"{_CODES[code]} ({code})" if code in _CODES else f"error {code} of Mooncake's client"
