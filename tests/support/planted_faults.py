"""Faults to plant in a fleet's processes, to show that it finds them; and transient errors that it must tolerate.

| fault | what it does |
|---|---|
| `clocks` | epochs by the processes' clocks: the greatest time wins |
| `landing` | a put gets the epoch current when it lands, not the one at its submission |
| `trim` | a client sometimes counts the blocks of a Redis server, and drops those it considers excess |
| `passing` | a block that did not arrive for a transient reason is deleted |
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

from shared_blocks import Plan

from blockyard.stores import object_store, redis, value
from blockyard.stores.redis.lists import Lists
from blockyard.stores.threaded import known_keys
from blockyard.stores.threaded.epochs import Epoch
from blockyard.stores.threaded.keyed_blocks import KeyedBlocks

__all__ = ["plant"]


def plant(fault: str, plan: Plan) -> None:
    """Change this process's library."""
    if plan.fails:
        _fail_now_and_then(random.Random(plan.seed), plan.fails)
    if fault:
        {"clocks": _clocks, "landing": _landing, "trim": _trim, "passing": _passing}[fault]()


def _fail_now_and_then(choices: random.Random, how_often: float) -> None:
    read = object_store.ObjectStore._read_whole

    def fail_or_read(self: Any, path: str, most: int) -> Any:
        if choices.random() >= how_often:
            return read(self, path, most)
        raise object_store.StoreError("the connection was reset")

    object_store.ObjectStore._read_whole = fail_or_read  # type: ignore[method-assign]


def _clocks() -> None:
    def fresh(weights: bytes, name: bytes) -> Epoch:
        return Epoch(os.urandom(16), weights, name)

    def begin(name: bytes, stored: Epoch | None, *, joins: bool) -> Epoch:
        mine = fresh(time.time_ns().to_bytes(16, "big"), name)
        return stored if stored is not None and stored.weights > mine.weights else mine

    def go_on(self: Epoch, stored: Epoch | None) -> Epoch | None:
        if stored is None:
            return fresh(self.weights, self.name)
        return max(self, stored, key=lambda epoch: epoch.weights)

    Epoch.begun = begin  # type: ignore[method-assign, assignment]
    Epoch.continued = go_on  # type: ignore[method-assign]


def _landing() -> None:
    put = KeyedBlocks._put_or_delete

    def land(self: Any, batch: Any, keys: list[bytes]) -> Any:
        batch.age = 1 << 60
        return put(self, batch, keys)

    KeyedBlocks._put_or_delete = land  # type: ignore[method-assign]


def _trim() -> None:
    """Let the server only list blocks. Blocks above the limit by a count 0.25 s old are dropped."""
    settle, put_listed = Lists.settle, redis.RedisStore.put_blocks
    counted: dict[int, tuple[float, int]] = {}

    def only_list(self: Lists, names: list[bytes], owners: list[bytes] | None = None) -> list[bytes]:
        command = settle(self, names, owners)
        command[4] = b"%d" % (1 << 30)
        return command

    def put_and_trim(self: Any, *arguments: Any) -> Any:
        stored = put_listed(self, *arguments)
        lists, size = self._lists[0], self.num_slots
        at, count = counted.get(0, (0.0, 0))
        if time.monotonic() > at + 0.25:
            at, count = time.monotonic(), self._accepted([[b"ZCARD", lists._order]])[0]
        extra = max(0, count - size)
        counted[0] = (at, count)
        if extra:
            gone = self._accepted([[b"ZRANGE", lists._order, b"0", b"%d" % (extra - 1)]])[0]
            if gone:
                self._accepted([lists.drop(gone)])
        return stored

    Lists.settle = only_list  # type: ignore[method-assign]
    redis.RedisStore.put_blocks = put_and_trim  # type: ignore[method-assign]


def _passing() -> None:
    known_keys.is_damage = lambda reason: reason == "error" or value.is_damage(reason)
    known_keys.KnownKeys.doubt = lambda self, key, seen: True  # type: ignore[method-assign]
