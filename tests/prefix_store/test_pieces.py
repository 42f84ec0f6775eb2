"""Prompts that are read in pieces: several at a time, each copied when it has arrived, in staging rows used again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from memory_stores import KeyedStore
from numpy.typing import NDArray

from blockyard import KVCache, KVLayout

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=64, dtype="float32")
SIZE = LAYOUT.bytes_per_block
STAGED, PIECE, BLOCKS = 16, 4, 40
PATIENCE = 60.0


class GatedStore(KeyedStore):
    """Each read waits until the test lets it go on."""

    num_slots = 2 * BLOCKS
    threads = 16

    def __init__(self) -> None:
        super().__init__(bytes_per_block=SIZE)
        self.is_gated = False
        self.lock = threading.Lock()  # between a read that looks whether it is gated, and the test that opens all gates
        self.rows = np.zeros((0, SIZE), np.uint8)
        self.reads: list[tuple[list[int], threading.Event]] = []  # numbers of the blocks, and gate of each

    def number(self, name: bytes) -> int:
        """Which of `rows` a value holds."""
        return int((self.rows == self.blocks[name][-SIZE:]).all(axis=1).argmax())

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        gate, is_gated = threading.Event(), self.is_gated and out.shape[1] > SIZE  # not the store's own records
        numbers = [self.number(key.tobytes()) for key in keys] if is_gated else []
        with self.lock:
            if is_gated and self.is_gated:
                self.reads.append((numbers, gate))
            else:
                gate.set()
        assert gate.wait(PATIENCE)
        return super().get(keys, out)

    def has(self, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Look keys up at once: lookups are no reads of pieces, and may come late."""
        return np.array([key.tobytes() in self.blocks for key in keys], np.bool_)

    def open(self) -> None:
        """Let all reads go on, and those to come."""
        with self.lock:
            self.is_gated = False
        self.let_go()

    def let_go(self, first: int | None = None) -> None:
        """Let the read that begins with this block go on, or all."""
        for numbers, gate in self.reads:
            if first is None or numbers[0] == first:
                gate.set()


@pytest.fixture
def store() -> Iterator[GatedStore]:
    made = GatedStore()
    yield made
    made.open()


@pytest.fixture
def cache(store: GatedStore) -> Iterator[KVCache]:
    options = {"device_blocks": 2 * BLOCKS, "prefix_caching": True, "namespace": b"model"}
    with KVCache(
        LAYOUT, prefix_store=store, prefetch_timeout_base=PATIENCE, max_staging=STAGED * SIZE, **options
    ) as made:
        yield made
        store.open()


def prompt_of(blocks: int) -> list[int]:
    return list(range(blocks * LAYOUT.block_size + 1))


def stored(cache: KVCache, blocks: int) -> NDArray[np.uint8]:
    """Have a prompt's blocks in the store alone. Returns their bytes."""
    manager, prompt = cache.manager, prompt_of(blocks)
    rows = np.random.default_rng(0).integers(0, 256, (blocks, SIZE), dtype=np.uint8)
    sequence = manager.allocate(prompt)
    cache.engine.write("device", manager.block_table(sequence)[:blocks].astype(np.int64), rows)
    with cache.step():
        manager.mark_computed(sequence)
    manager.free(sequence)
    assert cache.prefix_store is not None
    assert cache.prefix_store.wait(PATIENCE)
    assert manager.prefix.reset()
    assert isinstance(cache.prefix_store.store, GatedStore)
    cache.prefix_store.store.rows = rows
    return rows


def poll_until(cache: KVCache, reached: Callable[[], bool]) -> None:
    assert cache.prefix_store is not None
    until = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < until
        cache.prefix_store.poll()
        time.sleep(0.001)


def check_bytes(cache: KVCache, blocks: int, rows: NDArray[np.uint8]) -> None:
    sequence = cache.manager.allocate(prompt_of(blocks))
    assert sequence.cached_tokens == blocks * LAYOUT.block_size
    found = cache.engine.read("device", cache.manager.block_table(sequence)[:blocks].astype(np.int64))
    assert np.array_equal(found, rows)


def test_one_piece_is_copied_while_others_are_read_and_each_block_is_read_once(cache: KVCache, store: GatedStore):
    rows = stored(cache, BLOCKS)
    store.is_gated = True
    assert cache.prefix_store is not None
    fetch = cache.prefix_store.prefetch(prompt_of(BLOCKS))
    pieces = STAGED // PIECE
    poll_until(cache, lambda: len(store.reads) == pieces)  # all are in flight before the first is answered
    store.let_go(0)
    # The first piece is there, and the next read has begun, while three are still being read.
    poll_until(cache, lambda: fetch.tokens == PIECE * LAYOUT.block_size and len(store.reads) == pieces + 1)
    assert cache.manager.stats().cached_blocks["device"] == PIECE
    store.let_go(2 * PIECE)  # the third has to wait for the second
    poll_until(cache, lambda: store.stats().read_blocks == 2 * PIECE)
    assert fetch.tokens == PIECE * LAYOUT.block_size
    store.open()
    poll_until(cache, lambda: fetch.done)
    assert fetch.tokens == BLOCKS * LAYOUT.block_size
    assert store.stats().read_blocks == BLOCKS
    check_bytes(cache, BLOCKS, rows)


def test_no_more_is_read_than_may_be_staged(cache: KVCache, store: GatedStore):
    stored(cache, BLOCKS)
    store.is_gated = True
    assert cache.prefix_store is not None
    fetches = [cache.prefix_store.prefetch(prompt) for prompt in (prompt_of(BLOCKS), prompt_of(BLOCKS // 2))]
    until = time.monotonic() + PATIENCE
    released = 0
    while not all(fetch.done for fetch in fetches):
        assert time.monotonic() < until
        cache.prefix_store.poll()
        assert store.stats().pending_bytes <= STAGED * SIZE
        if len(store.reads) > released:
            store.reads[released][1].set()
            released += 1
    assert sorted(number for numbers, _ in store.reads for number in numbers) == list(range(BLOCKS))
    assert [fetch.tokens for fetch in fetches] == [BLOCKS * LAYOUT.block_size, 0]


def test_what_follows_a_missing_block_is_dropped_and_its_rows_are_used_again(cache: KVCache, store: GatedStore):
    rows = stored(cache, BLOCKS)
    assert cache.prefix_store is not None
    del store.blocks[next(name for name, row in store.blocks.items() if np.array_equal(row[-SIZE:], rows[PIECE + 1]))]
    fetch = cache.prefix_store.prefetch(prompt_of(BLOCKS))
    poll_until(cache, lambda: fetch.done and not store.stats().pending_bytes)
    assert fetch.tokens == (PIECE + 1) * LAYOUT.block_size
    check_bytes(cache, PIECE + 1, rows[: PIECE + 1])
    assert not cache.prefix_store._loads._reads


def test_later_loads_make_no_staging_rows(cache: KVCache, monkeypatch: pytest.MonkeyPatch):
    stored(cache, BLOCKS)
    assert cache.prefix_store is not None
    made: list[int] = []
    staging = cache.engine.memory.staging
    monkeypatch.setattr(cache.engine.memory, "staging", lambda count: made.append(count) or staging(count))
    for _ in range(3):
        fetch = cache.prefix_store.prefetch(prompt_of(BLOCKS))
        poll_until(cache, lambda fetch=fetch: fetch.done)
        assert fetch.tokens == BLOCKS * LAYOUT.block_size
        assert cache.manager.prefix.reset()
        first = len(made)
        assert first <= STAGED // PIECE
    assert len(made) == first


def test_a_poll_looks_at_few_of_the_loads_that_wait_for_rows_and_all_end(
    cache: KVCache, store: GatedStore, monkeypatch: pytest.MonkeyPatch
):
    stored(cache, BLOCKS)
    store.is_gated = True
    prefix_store = cache.prefix_store
    assert prefix_store is not None
    fetches = [prefix_store.prefetch(prompt_of(BLOCKS))]
    others = np.random.default_rng(0).integers(1000, 9999, (300, 9 * LAYOUT.block_size))
    fetches += [prefix_store.prefetch(prompt) for prompt in others.astype(np.uint32)]
    looks = []
    with monkeypatch.context() as patch:
        advance = type(prefix_store._loads)._advance
        patch.setattr(
            prefix_store._loads, "_advance", lambda load: looks.append(load) or advance(prefix_store._loads, load)
        )
        prefix_store.poll()
    assert prefix_store.num_open > 200, "they wait"
    assert len(looks) < 30
    store.open()
    poll_until(cache, lambda: all(fetch.done for fetch in fetches))
    assert fetches[0].tokens == BLOCKS * LAYOUT.block_size
