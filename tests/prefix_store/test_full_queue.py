"""Prompts and sequences with more bytes than their store or the engine takes at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from memory_stores import KeyedStore

from blockyard import KVCache, KVLayout
from blockyard.prefix_store import Prefetch
from blockyard.stores import ExternalStore, open_store

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=2, head_size=64, dtype="float32")
SIZE = LAYOUT.bytes_per_block
AT_ONCE, BLOCKS = 6, 40
PROMPT = list(range(BLOCKS * LAYOUT.block_size + 1))


class Kept(KeyedStore):
    num_slots = 2 * BLOCKS


class Shared(Kept):
    """A store that others use, too: a cache alone stays below its bound, and yet it may refuse blocks."""

    memory = AT_ONCE * SIZE
    max_blocks_in_flight = None  # type: ignore[assignment]


def cache_over(store: ExternalStore | str, timeout_base: float = 60.0) -> KVCache:
    return KVCache(
        LAYOUT,
        device_blocks=2 * BLOCKS,
        prefix_caching=True,
        prefix_store=store,
        namespace=b"model",
        prefetch_timeout_base=timeout_base,
        max_staging=3 * BLOCKS * SIZE,
    )


@contextmanager
def busy(cache: KVCache, monkeypatch: pytest.MonkeyPatch, *streams: str) -> Iterator[None]:
    """Let the engine have as many bytes in flight on some streams as it may."""
    transfers = cache.engine.transfers
    with monkeypatch.context() as patch:
        outstanding = transfers.outstanding
        patch.setattr(transfers, "outstanding", lambda stream: 1 << 40 if stream in streams else outstanding(stream))
        yield


def compute(cache: KVCache) -> np.ndarray:
    """Compute the prompt, and wait until the store has it. Returns its rows."""
    rows = computed(cache)
    assert cache.prefix_store is not None
    assert cache.prefix_store.wait(60.0)
    return rows


def computed(cache: KVCache) -> np.ndarray:
    """Compute the prompt. Returns its rows."""
    sequence = cache.manager.allocate(PROMPT)
    with cache.step():
        for tensor in cache.engine.tensors:
            tensor.normal_()
    cache.manager.mark_computed(sequence)
    return cache.engine.read("device", cache.manager.block_table(sequence).astype(np.int64)[:BLOCKS])


def loaded(cache: KVCache, fetch: Prefetch | None = None) -> np.ndarray:
    """Load the prompt. Returns the rows of its blocks that were found."""
    assert cache.prefix_store is not None
    fetch = fetch or cache.prefix_store.prefetch(PROMPT)
    while not fetch.done:
        time.sleep(0)
    sequence = cache.manager.allocate(fetch.prompt)
    with cache.step():
        pass
    table = cache.manager.block_table(sequence).astype(np.int64)
    return cache.engine.read("device", table[: sequence.cached_tokens // LAYOUT.block_size])


def test_all_blocks_of_a_long_prompt_are_written_and_found(tmp_path: Path):
    url = f"file://{tmp_path}?size=4MiB&memory={AT_ONCE * (SIZE + 4096)}"
    with cache_over(url) as cache:
        wanted = compute(cache)
        assert cache.prefix_store is not None
        assert cache.prefix_store.stats().unwritten_blocks == 0
    with cache_over(url) as cache:
        np.testing.assert_array_equal(loaded(cache), wanted)
        assert not cache.prefix_store.stats().misses


def test_a_load_goes_on_with_what_a_store_that_others_use_has_refused():
    blocks: dict[bytes, np.ndarray] = {}
    with cache_over(Kept(blocks, bytes_per_block=SIZE)) as cache:
        wanted = compute(cache)
    with cache_over(Shared(blocks, bytes_per_block=SIZE)) as cache:
        np.testing.assert_array_equal(loaded(cache), wanted)
        assert not cache.prefix_store.stats().misses


def test_writes_and_loads_wait_for_an_engine_that_is_busy(monkeypatch: pytest.MonkeyPatch):
    blocks: dict[bytes, np.ndarray] = {}
    with cache_over(Kept(blocks, bytes_per_block=SIZE)) as cache:
        wanted = computed(cache)
        assert cache.prefix_store is not None
        with busy(cache, monkeypatch, "out"):
            for _ in range(10):
                cache.prefix_store.poll()
        assert cache.prefix_store.wait(60.0, until=lambda: not cache.prefix_store.waiting_blocks)
        assert cache.prefix_store.stats().unwritten_blocks == 0
    with cache_over(Kept(blocks, bytes_per_block=SIZE)) as cache:
        assert cache.prefix_store is not None
        with busy(cache, monkeypatch, "in", "host"):
            fetch = cache.prefix_store.prefetch(PROMPT)
            until = time.monotonic() + 0.2
            while time.monotonic() < until:
                assert not fetch.done
        np.testing.assert_array_equal(loaded(cache, fetch), wanted)
        assert not cache.prefix_store.stats().misses


def test_a_load_that_waits_too_long_for_the_engine_does_not_blame_the_store(monkeypatch: pytest.MonkeyPatch):
    blocks: dict[bytes, np.ndarray] = {}
    with cache_over(Kept(blocks, bytes_per_block=SIZE)) as cache:
        wanted = compute(cache)
    with cache_over(Kept(blocks, bytes_per_block=SIZE), timeout_base=0.2) as cache:
        assert cache.prefix_store is not None
        with busy(cache, monkeypatch, "in", "host"):
            fetch = cache.prefix_store.prefetch(PROMPT)
            while not fetch.done:
                time.sleep(0)
        assert (fetch.tokens, dict(cache.prefix_store.stats().misses)) == (0, {"timeout": 1})
        np.testing.assert_array_equal(loaded(cache), wanted)


def test_a_load_that_the_store_refuses_whole_is_a_miss():
    class Full(Shared):
        memory = SIZE - 1

    blocks: dict[bytes, np.ndarray] = {}
    with cache_over(Kept(blocks, bytes_per_block=SIZE)) as cache:
        compute(cache)
    with cache_over(Full(blocks, bytes_per_block=SIZE)) as cache:
        assert not len(loaded(cache))
        assert cache.prefix_store.stats().misses == {"queue_full": 1}


def test_swap_ins_wait_for_room_in_the_store(tmp_path: Path):
    url = f"file://{tmp_path}?size=4MiB&memory={AT_ONCE * (SIZE + 4096)}"
    with KVCache(LAYOUT, device_blocks=BLOCKS, swap_store=url, max_staging=3 * BLOCKS * SIZE) as cache:
        sequences = [cache.manager.allocate(counts=[AT_ONCE * LAYOUT.block_size])[0] for _ in range(4)]
        with cache.step():
            for tensor in cache.engine.tensors:
                tensor.normal_()
        tables = [cache.manager.block_table(sequence).astype(np.int64) for sequence in sequences]
        wanted = [cache.engine.read("device", table) for table in tables]
        for sequence in sequences:
            cache.manager.swap_out(sequence, to="external")
            with cache.step():
                pass
            assert not any(len(end.lost) for end in cache.drain())
        cache.manager.swap_in(sequences)
        with cache.step() as step:
            assert not len(step.lost)
        assert not any(len(end.lost) for end in cache.drain())
        for sequence, rows in zip(sequences, wanted, strict=True):
            found = cache.engine.read("device", cache.manager.block_table(sequence).astype(np.int64))
            np.testing.assert_array_equal(found, rows)


@pytest.mark.parametrize("disks", [1, 2, 3])
def test_a_file_store_says_how_many_blocks_it_takes_at_once(tmp_path: Path, disks: int):
    folders = ",".join(str(tmp_path / str(disk)) for disk in range(disks))
    url = f"file://{folders}?size=4MiB&memory={12 * (SIZE + 4096)}"
    with open_store(url, bytes_per_block=SIZE) as store:
        assert store.max_blocks_in_flight == (12 if disks == 1 else 6)
