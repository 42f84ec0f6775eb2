"""Stores in a dictionary for tests of `ThreadedStore`: `before` runs first in each call, and may block or raise.

`Quotas` implements the quota rule in plain Python, and `QuotaStore` is a store that follows it.
"""

import hashlib
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from blockyard.stores import ExternalStore, Owners, ThreadedStore

PATIENCE = 60.0
SIZE = 512


class MemoryStore(ThreadedStore):
    """Blocks in a dictionary; `before` runs first in each call, and may block or raise."""

    num_slots = 32
    timeout_base = PATIENCE

    def __init__(
        self, url: str = "", *, bytes_per_block: int = SIZE, namespace: bytes = bytes(32), **options: Any
    ) -> None:
        super().__init__(url, bytes_per_block=bytes_per_block, namespace=namespace, **options)
        self.blocks: dict[bytes, NDArray[np.uint8]] = {}
        self.before: Callable[[str], object] = lambda name: None

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        self.before("put")
        self.blocks.update((key.tobytes(), row) for key, row in zip(keys, rows, strict=True))  # rows may be kept
        return np.ones(len(keys), np.bool_)

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        self.before("get")
        found = [self.blocks.get(key.tobytes()) for key in keys]
        for row, block in zip(out, found, strict=True):
            row[:] = 77 if block is None else block
        return np.array([block is not None for block in found])


class KeyedStore(MemoryStore):
    """A prefix store over a dictionary that outlives it; `medium` evicts in order of puts, but keeps the epoch."""

    def __init__(self, medium: dict[bytes, NDArray[np.uint8]] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.blocks = {} if medium is None else medium

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        stored = super().put(keys, rows)
        self.evict()
        return stored

    def evict(self) -> None:
        names = [name for name, row in list(self.blocks.items()) if row.nbytes > 192]
        for name in names[: max(0, len(names) - self.num_slots)]:
            self.blocks.pop(name, None)  # another thread may have evicted it

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        self.before("get")
        found = [self.blocks.get(key.tobytes()) for key in keys]
        for row, block in zip(out, found, strict=True):
            if block is not None and block.shape == row.shape:
                row[:] = block
        return np.array([block is not None for block in found])

    def delete(self, keys: NDArray[np.uint8]) -> None:
        self.before("delete")
        for key in keys:
            self.blocks.pop(key.tobytes(), None)


def tenant_of(salt: bytes | None) -> bytes:
    """The name of a tenant in stores."""
    return bytes(32) if salt is None else hashlib.sha256(salt).digest()


class Quotas:
    """The blocks and quotas of a store's tenants. Whoever puts a block, no tenant exceeds its quota.

    Args:
        blocks: the store's blocks, by name.
    """

    def __init__(self, blocks: dict[bytes, NDArray[np.uint8]]) -> None:
        self.blocks = blocks
        self.limits: dict[bytes, int] = {}
        self.lock = threading.Lock()  # locked by clients with threads
        self._parents: dict[bytes, dict[bytes, bytes]] = {}  # by tenant and name, least recently used first

    def held(self, tenant: bytes) -> dict[bytes, bytes]:
        """The names of a tenant's blocks and of their parents."""
        parents = self._parents.setdefault(tenant, {})
        for name in [name for name in parents if name not in self.blocks]:  # evicted, deleted, lost
            del parents[name]
        return parents

    def set_quota(self, tenant: bytes, num_blocks: int | None) -> None:
        self.limits.pop(tenant, None)
        if num_blocks is not None:
            self.limits[tenant] = num_blocks
            self._drop(tenant)

    def quota(self, tenant: bytes) -> tuple[int, int] | None:
        return (len(self.held(tenant)), self.limits[tenant]) if tenant in self.limits else None

    def put(self, tenant: bytes, name: bytes, parent: bytes, row: NDArray[np.uint8]) -> bool:
        """Store a block, unless it would be evicted first. Returns whether it is stored."""
        parents = self.held(tenant)
        if name in parents:
            self.use(name)
            return True
        is_reachable = not any(parent) or parent in self.blocks
        self.blocks[name] = row
        others = dict(parents)
        parents.clear()
        parents.update(others | {name: parent} if is_reachable else {name: parent} | others)
        self._drop(tenant)
        return name in parents

    def use(self, name: bytes) -> None:
        """Note that a block was used."""
        for parents in self._parents.values():
            if name in parents:
                parents[name] = parents.pop(name)

    def _drop(self, tenant: bytes) -> None:
        parents = self.held(tenant)
        while len(parents) > self.limits.get(tenant, len(parents)):
            followed = set(parents.values())
            last = next(name for name in parents if name not in followed)
            del parents[last], self.blocks[last]


class QuotaStore(KeyedStore):
    """A prefix store with quotas; stores with the same `Quotas` are clients of the same storage."""

    keeps_quotas: ClassVar[bool] = True

    def __init__(self, quotas: Quotas | None = None, **options: Any) -> None:
        self.quotas = Quotas({}) if quotas is None else quotas
        self._step = self.quotas.lock
        super().__init__(self.quotas.blocks, **options)

    def set_quota(self, tenant: bytes, num_blocks: int | None) -> None:
        with self._step:
            self.quotas.set_quota(tenant, num_blocks)

    def quota(self, tenant: bytes) -> tuple[int, int] | None:
        with self._step:
            return self.quotas.quota(tenant)

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        found = super().get(keys, out)
        with self._step:
            for key in keys:
                self.quotas.use(key.tobytes())
        return found

    def put_blocks(
        self, keys: NDArray[np.uint8], rows: NDArray[np.uint8], owners: Owners | None, damaged: set[bytes]
    ) -> NDArray[np.bool_]:
        if owners is None:
            return super().put_blocks(keys, rows, owners, damaged)
        self.before("put")
        with self._step:
            rows = rows.copy()
            stored = [
                self.quotas.put(tenant.tobytes(), name.tobytes(), parent.tobytes(), row)
                for tenant, name, parent, row in zip(owners.tenants, keys, owners.parents, rows, strict=True)
            ]
            self.evict()
        return np.array(stored)


def rows(count: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(1, 256, (count, SIZE), dtype=np.uint8)


def names(count: int) -> list[bytes]:
    return [bytes([number + 1] * 32) for number in range(count)]


def put(store: ExternalStore, count: int, seed: int = 0) -> tuple[str, ...]:
    return store.wait(store.submit_put(names(count), rows(count, seed))).reasons


def get(store: ExternalStore, count: int) -> tuple[str, ...]:
    found = store.wait(store.submit_get(names(count)))
    assert np.array_equal(found.rows[found.ok], rows(count)[found.ok]), "a wrong byte"
    assert not found.rows[~found.ok].any()
    return found.reasons
