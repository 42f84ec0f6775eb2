"""Lines in the log: what an operator reads when storage is damaged or full, the device changes, or copies are slow."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from memory_stores import KeyedStore
from numpy.typing import NDArray

from blockyard import KVCache, KVLayout
from blockyard.engine.ops import library
from blockyard.stores.log_lines import MissLog
from blockyard.workers import logs

LAYOUT = KVLayout("kv_first", num_layers=1, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
SIZE = LAYOUT.bytes_per_block
PROMPT = list(range(1, 14))  # three blocks, and a token


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """Every line of the package."""
    found: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("blockyard")
    monkeypatch.setattr(handler, "emit", found.append)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the limit of lines reads."""
    seconds = [1000.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: seconds[0])
    return seconds


def fields(record: logging.LogRecord, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(record, name) for name in names)


def serve(store: KeyedStore) -> KVCache:
    """Prefetch and compute a prompt over a prefix store."""
    options = {"prefix_caching": True, "namespace": b"test"}
    with KVCache(LAYOUT, device_blocks=16, prefix_store=store, **options) as cache:
        assert cache.prefix_store is not None
        fetch = cache.prefix_store.prefetch(PROMPT)
        assert cache.prefix_store.wait(60, until=lambda: fetch.done)
        sequence = cache.manager.allocate(PROMPT)
        with cache.step():
            cache.manager.mark_computed([sequence])
        assert cache.prefix_store.wait(60)
    return cache


def damage(medium: dict[bytes, NDArray[np.uint8]]) -> None:
    """Change a byte of every block."""
    for value in medium.values():
        if value.nbytes > SIZE:
            value[-1] ^= 1


def test_damaged_blocks_of_a_prefix_store_are_in_the_log(lines: list[logging.LogRecord]):
    medium: dict[bytes, NDArray[np.uint8]] = {}
    serve(KeyedStore(medium, bytes_per_block=SIZE))
    assert not lines
    damage(medium)
    store = KeyedStore(medium, bytes_per_block=SIZE)
    serve(store)
    (line,) = lines
    assert line.getMessage() == f"{store!r} has 3 damaged blocks, which are misses: payload_checksum"
    assert (line.name, line.levelname) == ("blockyard.stores", "WARNING")
    assert fields(line, "store", "blocks", "reason") == (str(store), 3, "payload_checksum")


def test_damaged_blocks_of_a_swap_store_are_in_the_log(lines: list[logging.LogRecord]):
    store = KeyedStore(bytes_per_block=SIZE)
    with KVCache(LAYOUT, device_blocks=16, swap_store=store) as cache:
        sequence = cache.manager.allocate(10)
        with cache.step():
            pass
        cache.manager.swap_out(sequence, to="external")
        with cache.step():
            pass
        cache.drain()
        for block in store.blocks.values():
            block[-1] ^= 1
        cache.manager.swap_in(sequence)
        with cache.step() as step:
            assert step.lost.tolist() == [int(sequence)]
    (line,) = lines
    assert line.getMessage() == f"{store!r} has 3 damaged blocks, which are misses: payload_checksum"


class Full(KeyedStore):
    """Takes nothing."""

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        stored = super().put(keys, rows)
        return stored & (rows.shape[1] <= SIZE)


def test_refused_blocks_are_in_the_log(lines: list[logging.LogRecord]):
    store = Full(bytes_per_block=SIZE)
    serve(store)
    (line,) = lines
    assert line.getMessage() == f"{store!r} refuses 3 blocks, for instance beyond a quota"
    assert fields(line, "store", "blocks", "reason") == (str(store), 3, "refused")


def test_a_reason_is_in_the_log_once_a_minute(lines: list[logging.LogRecord], clock: list[float]):
    log = MissLog("a store")
    for reasons in (("", "absent", "slot"), ("slot", "slot", "refused"), ("timeout", "io", "refused")):
        log.note(reasons)
    clock[0] += 61.0
    log.note(("slot",))
    assert [(line.reason, line.blocks) for line in lines] == [("slot", 1), ("refused", 1), ("slot", 1)]  # type: ignore[attr-defined]


def test_why_nothing_is_forgotten_is_in_the_log_once(lines: list[logging.LogRecord]):
    options = {"prefix_caching": True, "namespace": b"test"}
    with KVCache(LAYOUT, device_blocks=16, prefix_store=KeyedStore(bytes_per_block=SIZE), **options) as cache:
        assert cache.prefix_store is not None
        sequence = cache.manager.allocate(PROMPT)
        with cache.step():
            cache.manager.mark_computed([sequence])
        assert cache.prefix_store.wait(60)
        assert not cache.prefix_store.forget()
        assert not cache.prefix_store.forget()
        assert [line.getMessage() for line in lines] == [
            "nothing was forgotten, call forget again: 1 sequences are open"
        ]
        assert fields(lines[0], "cause") == ("1 sequences are open",)
        pin = cache.manager.pins.pin(sequence)
        cache.manager.free(sequence)
        assert not cache.prefix_store.forget()
        cache.manager.pins.unpin(pin)
        assert cache.prefix_store.forget()
        assert len(lines) == 1
        cache.manager.allocate(PROMPT)
        assert not cache.prefix_store.forget()
        assert len(lines) == 2, "the next attempt that clears nothing"


def test_a_resize_is_in_the_log(lines: list[logging.LogRecord]):
    with KVCache(LAYOUT, device_blocks=16, reuse_order="lowest") as cache:
        cache.manager.allocate(40)
        cache.resize(8)
    (line,) = lines
    assert line.getMessage() == "the device has 8 blocks, had 16; 2 removed ones are in use"
    assert (line.name, line.levelname) == ("blockyard.cache", "INFO")
    assert fields(line, "blocks", "blocks_before", "blocks_in_use") == (8, 16, 2)


def test_slow_copies_on_a_gpu_are_in_the_log_once(lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch):
    there = library.op_library()
    missing = library.OpLibrary(False, there.path, there.built_for, there.found, "built without it: no nvcc")
    monkeypatch.setattr(library, "op_library", lambda: missing)
    monkeypatch.setattr(library, "check_device", lambda *_: None)
    for index in (0, 1):
        library.prepare_device(torch.device("cuda", index))
    (line,) = lines
    assert line.getMessage() == f"copies on CUDA devices are slow: {missing.explain()}"
    assert (line.name, line.levelname) == ("blockyard.engine", "WARNING")
