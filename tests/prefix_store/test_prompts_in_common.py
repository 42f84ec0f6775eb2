"""Prompts that begin alike and are loaded at the same time: each is done once all loads that bring its blocks are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from memory_stores import KeyedStore

from blockyard import CacheGroup, KVCache, KVLayout
from blockyard.prefix_store import Prefetch, PrefixStore

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=2, head_size=8, dtype="float32")
SIZE = LAYOUT.bytes_per_block
BLOCKS = 24
PROMPT = list(range(BLOCKS * LAYOUT.block_size + 1))
OWN_END = [1000 + token for token in range(3 * LAYOUT.block_size + 1)]


class Gate:
    """Holds the copies of loads but the first ones as if they were slow; `error` is what they end with."""

    def __init__(self, first: int) -> None:
        self.is_open = False
        self.held = -first
        self.error: Exception | None = None


class Held:
    def __init__(self, transfer: Any, gate: Gate) -> None:
        self._transfer, self._gate, self._is_held = transfer, gate, gate.held >= 0
        gate.held += 1

    @property
    def done(self) -> bool:
        return (self._gate.is_open or not self._is_held) and self._transfer.done

    @property
    def error(self) -> Exception | None:
        return self._gate.error or self._transfer.error


class Kept(KeyedStore):
    num_slots = 4 * BLOCKS


@contextmanager
def cache_over(blocks: dict[bytes, np.ndarray], device_blocks: int) -> Iterator[KVCache]:
    with KVCache(
        LAYOUT,
        device_blocks=device_blocks,
        prefix_caching=True,
        prefix_store=Kept(blocks, bytes_per_block=SIZE),
        namespace=b"model",
        prefetch_timeout_base=60.0,
    ) as cache:
        yield cache


def with_points(blocks: dict[bytes, np.ndarray], host_blocks: int) -> KVCache:
    """A cache of a model with a window, whose prompts continue at resume points."""
    return KVCache(
        LAYOUT,
        groups=[CacheGroup.full_attention(), CacheGroup.sliding_window(12)],
        device_blocks=8 * BLOCKS,
        host_blocks=host_blocks,
        prefix_caching=True,
        prefix_store=Kept(blocks, bytes_per_block=SIZE),
        namespace=b"model",
        prefetch_timeout_base=60.0,
        max_staging=BLOCKS * SIZE,  # reads of a quarter of the prompt
    )


def prefixes(cache: KVCache) -> PrefixStore:
    assert cache.prefix_store is not None
    return cache.prefix_store


@pytest.fixture(scope="module")
def stored() -> tuple[dict[bytes, np.ndarray], np.ndarray]:
    """A store's blocks, and the rows of the prompt's."""
    blocks: dict[bytes, np.ndarray] = {}
    with cache_over(blocks, 2 * BLOCKS) as cache:
        sequence = cache.manager.allocate(PROMPT)
        with cache.step():
            for tensor in cache.engine.tensors:
                tensor.normal_()
        cache.manager.mark_computed(sequence)
        rows = cache.engine.read("device", cache.manager.block_table(sequence).astype(np.int64)[:BLOCKS])
        assert prefixes(cache).wait(60.0)
    return blocks, rows


@contextmanager
def held(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch, *, error: Exception | None = None, after: int = 0
) -> Iterator[Gate]:
    """Let a first load of the prompt begin a copy, `after` some that land, and hold it."""
    gate, submit = Gate(after), cache.engine.submit_write
    gate.error = error
    with monkeypatch.context() as patch:
        patch.setattr(cache.engine, "submit_write", lambda *args, **options: Held(submit(*args, **options), gate))
        first = prefixes(cache).prefetch(PROMPT)
        wait_until(lambda: first.done or gate.held > 0)
        assert not first.done
    yield gate


def wait_until(is_met: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not is_met():
        assert time.monotonic() < until
        time.sleep(0)


def stays_open(fetch: Prefetch) -> bool:
    until = time.monotonic() + 0.05
    while time.monotonic() < until:
        if fetch.done:
            return False
    return True


def cached_rows(cache: KVCache, fetch: Prefetch) -> np.ndarray:
    """Rows of the blocks that the prompt finds once its load is done."""
    wait_until(lambda: fetch.done)
    sequence = cache.manager.allocate(fetch.prompt)
    with cache.step():
        pass
    table = cache.manager.block_table(sequence).astype(np.int64)
    return cache.engine.read("device", table[: sequence.cached_tokens // LAYOUT.block_size])


@pytest.mark.parametrize("end", [[], OWN_END], ids=["the_same", "own_end"])
@pytest.mark.parametrize("device_blocks", [8 * BLOCKS, 3 * BLOCKS], ids=["room", "little_room"])
def test_a_load_waits_for_blocks_that_another_is_bringing(
    stored: tuple[dict[bytes, np.ndarray], np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    end: list[int],
    device_blocks: int,
):
    """With little room, a load takes the quarter of the device that loads may take, and the other gets none."""
    blocks, rows = stored
    with cache_over(blocks, device_blocks) as cache, held(cache, monkeypatch) as gate:
        fetch = prefixes(cache).prefetch(PROMPT + end)
        assert stays_open(fetch)
        gate.is_open = True
        np.testing.assert_array_equal(cached_rows(cache, fetch), rows)
        assert set(prefixes(cache).stats().misses) <= {"absent"}


@pytest.mark.parametrize("end", [[], OWN_END], ids=["the_same", "own_end"])
@pytest.mark.parametrize("host_blocks", [8 * BLOCKS, 3 * BLOCKS], ids=["room", "little_room"])
def test_a_load_waits_for_a_point_that_another_is_bringing(
    monkeypatch: pytest.MonkeyPatch, end: list[int], host_blocks: int
):
    """With little room, it has an earlier point at once, whose blocks have landed."""
    blocks: dict[bytes, np.ndarray] = {}
    with with_points(blocks, 8 * BLOCKS) as cache:
        for length in (len(PROMPT) // 2, len(PROMPT)):
            sequence = cache.manager.allocate(PROMPT[:length])
            with cache.step():
                pass
            cache.manager.mark_computed(sequence)
            cache.manager.free(sequence)
        assert prefixes(cache).wait(60.0)
    with with_points(blocks, host_blocks) as cache, held(cache, monkeypatch, after=2) as gate:
        fetch = prefixes(cache).prefetch(PROMPT + end)
        assert stays_open(fetch)
        gate.is_open = True
        wait_until(lambda: fetch.done)
        assert cache.manager.prefix.lookup(fetch.prompt).tokens == BLOCKS * LAYOUT.block_size
        cache.manager.check()


def test_a_load_brings_the_blocks_of_another_whose_copy_failed(
    stored: tuple[dict[bytes, np.ndarray], np.ndarray], monkeypatch: pytest.MonkeyPatch
):
    blocks, rows = stored
    with cache_over(blocks, 8 * BLOCKS) as cache, held(cache, monkeypatch, error=RuntimeError("a copy fails")) as gate:
        fetch = prefixes(cache).prefetch(PROMPT)
        assert stays_open(fetch)
        gate.is_open = True
        np.testing.assert_array_equal(cached_rows(cache, fetch), rows)
        assert fetch.tokens == BLOCKS * LAYOUT.block_size
        assert dict(prefixes(cache).stats().misses) == {"copy_failed": 1}


def test_a_load_waits_for_others_until_its_deadline(
    stored: tuple[dict[bytes, np.ndarray], np.ndarray], monkeypatch: pytest.MonkeyPatch
):
    with cache_over(stored[0], 8 * BLOCKS) as cache, held(cache, monkeypatch) as gate:
        with monkeypatch.context() as patch:
            patch.setattr(prefixes(cache), "_timeout_base", 0.1)
            fetch = prefixes(cache).prefetch(PROMPT)
        wait_until(lambda: fetch.done)
        assert dict(prefixes(cache).stats().misses) == {"timeout": 1}
        gate.is_open = True
        again = prefixes(cache).prefetch(PROMPT)
        np.testing.assert_array_equal(cached_rows(cache, again), stored[1])
