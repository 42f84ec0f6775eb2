"""A store that is slow to write: writes take turns, loads go on, and writes are fast again once the store is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_stores import KeyedStore

from blockyard import KVCache, KVLayout
from blockyard.prefix_store import pressure, writes
from blockyard.prefix_store.pressure import HIGH_SECONDS, LOW_SECONDS, WritePressure

LAYOUT = KVLayout("kv_first", num_layers=1, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
SIZE, BLOCKS, AT_ONCE = LAYOUT.bytes_per_block, 40, 2
FIRST = list(range(1, BLOCKS * 4 + 2))
SECOND = [token + 1000 for token in FIRST]
PATIENCE = 60.0


class Slow(KeyedStore):
    """A store whose puts wait for `gate`."""

    num_slots = 4 * BLOCKS

    def __init__(self, medium: dict[bytes, np.ndarray]) -> None:
        super().__init__(medium, bytes_per_block=SIZE)
        self.gate = threading.Event()
        self.before = lambda name: self.gate.wait(PATIENCE) if name == "put" else None


@pytest.fixture(autouse=True)
def _small_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "WRITTEN_AT_ONCE", AT_ONCE * SIZE)


@pytest.fixture
def store() -> Iterator[Slow]:
    found = Slow({})
    yield found
    found.gate.set()


def set_marks(monkeypatch: pytest.MonkeyPatch, high: float, low: float) -> None:
    for module, name, value in ((pressure, "HIGH", high), (pressure, "LOW", low), (writes, "HIGH", high)):
        monkeypatch.setattr(module, f"{name}_SECONDS", value)


def cache_over(store: Slow) -> KVCache:
    options = {"prefix_caching": True, "namespace": b"model", "prefetch_timeout_base": PATIENCE}
    return KVCache(LAYOUT, device_blocks=2 * BLOCKS + 8, prefix_store=store, **options)


def compute(cache: KVCache, prompt: list[int]) -> None:
    sequence = cache.manager.allocate(prompt)
    with cache.step():
        cache.manager.mark_computed(sequence)
    cache.manager.free(sequence)


def be_slow(cache: KVCache, store: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the cache learn that its store is slow; from then on puts wait for the gate."""
    set_marks(monkeypatch, 0.0, -1.0)
    store.gate.set()
    compute(cache, [7] * 9)
    assert cache.prefix_store is not None
    assert cache.prefix_store.wait(PATIENCE)
    assert cache.prefix_store.stats().write_pauses == 1
    store.gate.clear()


def in_flight(cache: KVCache) -> int:
    """Poll until the number of blocks in flight stays the same; return it."""
    assert cache.prefix_store is not None
    seen = []
    while len(seen) < 20 or len(set(seen[-20:])) > 1:
        cache.prefix_store.poll()
        seen.append(cache.prefix_store._writes.num_blocks)
        time.sleep(0.001)
    return seen[-1]


def test_writes_to_a_slow_store_take_turns_and_none_is_lost(store: Slow, monkeypatch: pytest.MonkeyPatch):
    with cache_over(store) as cache:
        assert cache.prefix_store is not None
        be_slow(cache, store, monkeypatch)
        compute(cache, FIRST)
        assert in_flight(cache) == AT_ONCE
        assert cache.prefix_store.waiting_blocks == BLOCKS
        store.gate.set()
        assert cache.prefix_store.wait(PATIENCE)
        stats = cache.prefix_store.stats()
        assert (stats.written_blocks, stats.unwritten_blocks, stats.write_pauses) == (BLOCKS + 2, 0, 1)


def test_writes_to_a_fast_store_do_not_wait_for_one_another(store: Slow, monkeypatch: pytest.MonkeyPatch):
    set_marks(monkeypatch, 1e6, 1e5)
    with cache_over(store) as cache:
        assert cache.prefix_store is not None
        compute(cache, FIRST)
        assert in_flight(cache) == BLOCKS
        store.gate.set()
        assert cache.prefix_store.wait(PATIENCE)
        assert cache.prefix_store.stats().write_pauses == 0


def test_loads_go_on_beside_slow_writes(store: Slow, monkeypatch: pytest.MonkeyPatch):
    store.gate.set()
    with cache_over(store) as cache:
        assert cache.prefix_store is not None
        compute(cache, FIRST)
        assert cache.prefix_store.wait(PATIENCE)
    again = Slow(store.blocks)
    with cache_over(again) as cache:
        assert cache.prefix_store is not None
        be_slow(cache, again, monkeypatch)
        compute(cache, SECOND)
        assert in_flight(cache) == AT_ONCE < again.threads * AT_ONCE
        fetch = cache.prefix_store.prefetch(FIRST)
        until = time.monotonic() + PATIENCE
        while not fetch.done and time.monotonic() < until:
            time.sleep(0)
        assert fetch.tokens == BLOCKS * 4
        assert cache.prefix_store._writes.num_blocks == AT_ONCE
        again.gate.set()


def test_writes_go_on_at_full_rate_once_the_store_is_fast_again(store: Slow, monkeypatch: pytest.MonkeyPatch):
    with cache_over(store) as cache:
        assert cache.prefix_store is not None
        be_slow(cache, store, monkeypatch)
        compute(cache, FIRST)
        assert in_flight(cache) == AT_ONCE
        store.gate.set()
        assert cache.prefix_store.wait(PATIENCE)
        set_marks(monkeypatch, 1e6, 1e5)  # the next answer is below the low mark
        compute(cache, SECOND[: 4 * AT_ONCE + 1])
        assert cache.prefix_store.wait(PATIENCE)
        store.gate.clear()
        compute(cache, [token + 5000 for token in FIRST])
        assert in_flight(cache) == BLOCKS
        store.gate.set()


@given(st.lists(st.floats(0, 10), max_size=60))
def test_the_pressure_changes_only_at_its_marks(seconds: list[float]):
    found, average, is_high, times = WritePressure(), 0.0, False, 0
    for each in seconds:
        average = 0.7 * average + 0.3 * each
        if abs(average - HIGH_SECONDS) < 1e-9 or abs(average - LOW_SECONDS) < 1e-9:
            return  # rounding decides
        times += average > HIGH_SECONDS and not is_high
        is_high = average > HIGH_SECONDS or (is_high and average > LOW_SECONDS)
        found.note(each)
        assert (found.is_high, found.times) == (is_high, times)


def test_pauses_after_failures_double_up_to_eight_seconds_and_end_with_a_success():
    found, now = WritePressure(), 100.0
    for seconds in (0.5, 1.0, 2.0, 4.0, 8.0, 8.0):
        found.note_outcome(now, failed=True)
        assert found.paused_until == now + seconds
        found.note_outcome(now + seconds / 2, failed=True)
        assert found.paused_until == now + seconds, "a write that began before the pause"
        now += seconds
    found.note_outcome(now, failed=False)
    assert found.paused_until == now
    found.note_outcome(now, failed=True)
    assert found.paused_until == now + 0.5
