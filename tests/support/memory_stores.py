"""Stores in a dictionary for tests of `ThreadedStore`: `before` runs first in each call, and may block or raise."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockyard.stores import ExternalStore, ThreadedStore

PATIENCE = 60.0
SIZE = 512


class MemoryStore(ThreadedStore):
    """Blocks in a dictionary; `before` runs first in each call, and may block or raise."""

    num_slots = 32
    deadline = PATIENCE

    def __init__(
        self, url: str = "", *, bytes_per_block: int = SIZE, namespace: bytes = bytes(32), **options: Any
    ) -> None:
        super().__init__(url, bytes_per_block=bytes_per_block, namespace=namespace, **options)
        self.blocks: dict[bytes, NDArray[np.uint8]] = {}
        self.before: Callable[[str], object] = lambda name: None

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        self.before("put")
        self.blocks.update((key.tobytes(), row.copy()) for key, row in zip(keys, rows, strict=True))
        return np.ones(len(keys), np.bool_)

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        self.before("get")
        found = [self.blocks.get(key.tobytes()) for key in keys]
        for row, block in zip(out, found, strict=True):
            row[:] = 77 if block is None else block
        return np.array([block is not None for block in found])


class KeyedStore(MemoryStore):
    """A prefix store over a dictionary that outlives it; `medium` evicts what was put first, but not the epoch."""

    def __init__(self, medium: dict[bytes, NDArray[np.uint8]] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.blocks = {} if medium is None else medium

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        stored = super().put(keys, rows)
        names = [name for name, row in self.blocks.items() if row.nbytes > 192]
        for name in names[: max(0, len(names) - self.num_slots)]:
            del self.blocks[name]
        return stored

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
