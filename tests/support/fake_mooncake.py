"""Mooncake's client over a dictionary, for tests of our side; `make test-engines` has the real one.

It does what the real client was seen to do: a put keeps a value that exists and answers 0, also while another process
writes it; a repeated key fills one buffer only; calls after `close` crash, here with an error that the cluster keeps.
"""

import ctypes
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from blockyard.stores.mooncake import client

ABSENT, TOO_LONG, FAILED = -704, -600, -800


class FakeCluster:
    """What a master knows: values by key, and keys that a process is still writing."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.being_written: set[str] = set()
        self.pointers: dict[int, int] = {}  # memory that was lent to calls
        self.before: Callable[[str, list[str]], object] = lambda name, keys: None
        self.crashes: list[str] = []
        self.closed = 0

    def write_late(self) -> None:
        """Write to all memory that calls have had, as a transfer does that was given up."""
        for start, size in self.pointers.items():
            ctypes.memset(start, 0xEE, size)


class FakeClient:
    """The methods of `MooncakeDistributedStore` that the store calls."""

    cluster: FakeCluster
    is_closed = False

    def setup(self, *arguments: Any) -> int:
        return 0

    def register_buffer(self, pointer: int, size: int) -> int:
        return 0

    def close(self) -> int:
        self.is_closed = True
        self.cluster.closed += 1
        return 0

    def _begin(self, name: str, keys: list[str]) -> None:
        if self.is_closed:
            self.cluster.crashes.append(name)
        self.cluster.before(name, keys)

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self._begin("exist", keys)
        return [int(key in self.cluster.values and key not in self.cluster.being_written) for key in keys]

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        self._begin("remove", keys)
        return [0 if self.cluster.values.pop(key, None) is not None else ABSENT for key in keys]

    def batch_put_from(self, keys: list[str], starts: list[int], sizes: list[int], *config: Any) -> list[int]:
        self._begin("put", keys)
        for key, start, size in zip(keys, starts, sizes, strict=True):
            self.cluster.pointers[start] = size
            if key not in self.cluster.being_written:
                self.cluster.values.setdefault(key, ctypes.string_at(start, size))
        return [0] * len(keys)

    def batch_upsert_from(self, keys: list[str], starts: list[int], sizes: list[int], *_: Any) -> list[int]:
        self._begin("upsert", keys)
        for key, start, size in zip(keys, starts, sizes, strict=True):
            self.cluster.values[key] = ctypes.string_at(start, size)
        return [0] * len(keys)

    def batch_get_into(self, keys: list[str], starts: list[int], sizes: list[int]) -> list[int]:
        self._begin("get", keys)
        codes, last = [], dict(zip(keys, starts, strict=True))
        for key, start, size in zip(keys, starts, sizes, strict=True):
            self.cluster.pointers[start] = size
            value = self.cluster.values.get(key)
            if value is not None and len(value) <= size and last[key] == start:
                ctypes.memmove(start, value, len(value))
            codes.append(ABSENT if value is None else len(value) if len(value) <= size else TOO_LONG)
        return codes


@contextmanager
def fake_mooncake(patch: pytest.MonkeyPatch) -> Iterator[tuple[FakeCluster, str]]:
    """Install the fake client; yields the cluster and its address."""
    cluster = FakeCluster()
    module = ModuleType("mooncake.store")
    module.MooncakeDistributedStore = type("MooncakeDistributedStore", (FakeClient,), {"cluster": cluster})  # type: ignore[attr-defined]
    module.ReplicateConfig = SimpleNamespace  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    patch.setitem(sys.modules, "mooncake.store", module)
    patch.setattr(client, "_rehearse", lambda parts, setup: None)
    with socket.create_server(("127.0.0.1", 0)) as master:
        threading.Thread(target=_accept, args=(master,), daemon=True).start()
        yield cluster, f"127.0.0.1:{master.getsockname()[1]}"
        master.shutdown(socket.SHUT_RDWR)
    assert not cluster.crashes, "the client was called after it was closed"


def _accept(master: socket.socket) -> None:
    with suppress(OSError):
        while True:
            master.accept()[0].close()
