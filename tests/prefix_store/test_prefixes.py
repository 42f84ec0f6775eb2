"""A prefix store under a whole cache: what comes back, after a restart too, and what a store that fails may cost."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from forks import in_child
from kept_prefixes import LAYOUT, WIDTH, CheckedCache, checked, row_of, tokens
from memory_stores import KeyedStore
from numpy.typing import NDArray

from blockyard import KVCache
from blockyard.errors import ForkedError, InvalidArgumentError, StoreError
from blockyard.events import export_keys
from blockyard.layout.kv import KVLayout
from blockyard.scheduler import Request, Scheduler
from blockyard.stores.checked_store import Answer
from blockyard.testing.faults import UnrulyStore

Medium = dict[bytes, NDArray[np.uint8]]


def keyed(medium: Medium | None = None, num_slots: int = 1000) -> KeyedStore:
    store = KeyedStore(medium, bytes_per_block=WIDTH)
    store.num_slots = num_slots
    return store


@pytest.mark.parametrize("host", [12, 0])
def test_a_prompt_is_found_after_a_restart(tmp_path: Path, host: int):
    url = f"file://{tmp_path}/kv?size=1MiB"
    with checked(url, host=host) as cache:
        assert cache.fetch(tokens(1, 11)).tokens == 0
        assert cache.serve(tokens(1, 11)) == 0
        assert cache.prefixes.wait(60)
        assert (cache.prefixes.stats().written_blocks, cache.prefixes.stats().unwritten_blocks) == (2, 0)
        assert json.dumps(cache.prefixes.stats().written_blocks) == "2"
    with checked(url, host=host) as cache:
        assert cache.manager.prefix.lookup(tokens(1, 30)).tokens == 0, "nothing is promised before it is there"
        fetch = cache.fetch(tokens(1, 30))
        assert (fetch.tokens, cache.manager.prefix.lookup(tokens(1, 30)).tokens) == (8, 8)
        assert cache.serve(tokens(1, 30)) == 8
        assert cache.prefixes.stats().hit_blocks == 2


def test_blocks_that_the_store_has_given_and_the_engine_has_not_copied_are_not_found(monkeypatch: pytest.MonkeyPatch):
    medium: Medium = {}
    with checked(keyed(medium)) as cache:
        cache.serve(tokens(1, 11))
        assert cache.prefixes.wait(60)
    with checked(keyed(medium), host=0) as cache:
        failed = SimpleNamespace(done=True, error=StoreError("the copy failed"), wait=lambda: None)
        with monkeypatch.context() as patched:
            patched.setattr(cache.cache.engine, "submit_write", lambda *_, **__: failed)
            assert cache.fetch(tokens(1, 11)).tokens == 0
        assert cache.prefixes.stats().misses["copy_failed"] == 1
        assert cache.manager.prefix.lookup(tokens(1, 11)).tokens == 0
        assert cache.serve(tokens(1, 11)) == 0


def test_close_writes_the_last_computed_blocks(tmp_path: Path):
    url = f"file://{tmp_path}/kv?size=1MiB"
    with checked(url) as cache:
        cache.serve(tokens(1, 9))
    with checked(url) as cache:
        assert cache.fetch(tokens(1, 9)).tokens == 8


def test_an_idle_cache_writes_its_blocks_while_it_is_polled():
    medium: Medium = {}
    with checked(keyed(medium), device=64) as cache:
        cache.serve(tokens(1, 161))
        assert cache.prefixes.waiting_blocks == 40
        until = time.monotonic() + 60
        while cache.prefixes.waiting_blocks and time.monotonic() < until:
            assert not cache.cache.poll()
            time.sleep(0.001)
        assert (cache.prefixes.stats().written_blocks, cache.prefixes.waiting_blocks) == (40, 0)


def test_two_caches_share_one_store_while_both_run():
    medium: Medium = {}
    with checked(keyed(medium)) as one, checked(keyed(medium), host=0) as other:
        for stream in range(3):
            one.serve(tokens(stream, 17))
            assert one.prefixes.wait(60)
            assert other.fetch(tokens(stream, 17)).tokens == 16
            assert other.serve(tokens(stream, 17)) == 16
        other.serve(tokens(9, 9))
        assert other.prefixes.wait(60)
        assert one.fetch(tokens(9, 9)).tokens == 8
        assert other.prefixes.stats().written_blocks == 2, "what came from the store is not written there again"


def test_other_weights_find_nothing(tmp_path: Path):
    url = f"file://{tmp_path}/kv?size=1MiB"
    prompt = tokens(1, 9)
    found = []
    for name in (b"model at revision 1", b"model at revision 1", b"model at revision 2"):
        options = {
            "device_blocks": 8,
            "prefix_caching": True,
            "prefix_store": url,
            "namespace": name,
            "prefetch_timeout_base": 60,
        }
        with KVCache(LAYOUT, **options) as cache:  # type: ignore[arg-type]
            prefixes = cache.prefix_store
            assert prefixes is not None
            fetch = prefixes.prefetch(prompt)
            assert prefixes.wait(60, until=lambda done=fetch: done.done)  # type: ignore[misc]
            found.append(fetch.tokens)
            sequence = cache.manager.allocate(prompt)
            with cache.step():
                pass
            cache.manager.mark_computed(sequence)
    assert found == [0, 8, 0]


def test_a_block_that_was_absent_is_asked_for_again_sooner_than_one_that_failed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("blockyard.stores.threaded.known_keys.ABSENT_SECONDS", 0.0)
    monkeypatch.setattr("blockyard.stores.threaded.known_keys.FAILED_SECONDS", 1000.0)
    medium: Medium = {}
    with checked(keyed(medium)) as one, checked(keyed(medium)) as other:
        assert one.fetch(tokens(1, 11)).tokens == 0
        other.serve(tokens(1, 11))
        assert other.prefixes.wait(60)
        until = time.monotonic() + 60
        while one.fetch(tokens(1, 11)).tokens < 8:
            assert time.monotonic() < until


def test_blocks_that_a_store_refuses_are_counted_as_not_written():
    class Refusing(KeyedStore):
        def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
            return super().put(keys, rows) & (rows.shape[1] < WIDTH)  # the record of the epoch is taken

    store = Refusing(bytes_per_block=WIDTH)
    store.num_slots = 1000
    with checked(store) as cache:
        cache.serve(tokens(1, 11))
        assert cache.prefixes.wait(60)
        stats = cache.prefixes.stats()
        assert (stats.written_blocks, stats.written_bytes, stats.unwritten_blocks) == (0, 0, 2)


def test_another_layout_of_blocks_of_the_same_size_finds_nothing(tmp_path: Path):
    url, prompt, found = f"file://{tmp_path}/kv?size=1MiB", tokens(1, 9), []
    narrow, wide = (
        KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=size, dtype=dtype)
        for size, dtype in ((4, "float16"), (2, "float32"))
    )
    assert narrow.bytes_per_block == wide.bytes_per_block
    for layout in (narrow, narrow, wide):
        options = {"device_blocks": 8, "prefix_caching": True, "prefix_store": url, "prefetch_timeout_base": 60}
        with KVCache(layout, namespace=b"model", **options) as cache:  # type: ignore[arg-type]
            prefixes = cache.prefix_store
            assert prefixes is not None
            fetch = prefixes.prefetch(prompt)
            assert prefixes.wait(60, until=lambda done=fetch: done.done)  # type: ignore[misc]
            found.append(fetch.tokens)
            sequence = cache.manager.allocate(prompt)
            with cache.step():
                pass
            cache.manager.mark_computed(sequence)
    assert found == [0, 8, 0]


def test_a_damaged_block_ends_the_prefix_there_and_is_computed_again():
    medium: Medium = {}
    with checked(keyed(medium)) as cache:
        cache.serve(tokens(1, 17))
    third = row_of(export_keys(tokens(1, 17), block_size=LAYOUT.block_size)[2]).tobytes()
    (row,) = (row for row in medium.values() if third in row.tobytes())
    row[200] ^= 1
    with checked(keyed(medium)) as cache:
        assert cache.fetch(tokens(1, 17)).tokens == 8
        assert cache.prefixes.stats().misses["payload_checksum"] == 1
        assert cache.serve(tokens(1, 17)) == 8
        assert cache.prefixes.wait(60)
    with checked(keyed(medium)) as cache:
        assert cache.fetch(tokens(1, 17)).tokens == 16, "the block was written again"


def test_a_store_that_says_hit_for_ever_is_asked_once():
    """A key whose load failed is dropped at once, whatever the store says of it."""

    class Promising(KeyedStore):
        def contains(self, keys: object) -> NDArray[np.bool_]:
            return np.ones(len(keys), np.bool_)  # type: ignore[arg-type]

        def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
            self.asked = getattr(self, "asked", 0) + 1
            raise OSError("the disk is gone")

    store = Promising(bytes_per_block=WIDTH)
    with checked(store, prefix_writes="never") as cache:
        for _ in range(50):
            assert cache.fetch(tokens(1, 17)).tokens == 0
        assert cache.serve(tokens(1, 17)) == 0
        # The store's own calls read and write its epoch's row: before it is put, and after.
        assert store.asked <= 3
        assert cache.prefixes.stats().misses == {"error": 1, "absent": 49}


@pytest.mark.parametrize(("host", "busy"), [(0, 0), (0, 16), (0, 28), (8, 16), (8, 26), (16, 20)])
def test_a_prompt_longer_than_the_free_blocks_gets_its_beginning_and_the_next_one_loads(host: int, busy: int):
    medium, count = Medium(), 40
    with checked(keyed(medium), device=64) as cache:
        cache.serve(tokens(1, 4 * count + 1))
        cache.serve(tokens(2, 17))
        assert cache.prefixes.wait(60)
    with checked(keyed(medium), device=32, host=host) as cache:
        held = cache.manager.allocate(tokens(9, 4 * busy)) if busy else None
        fetch = cache.fetch(tokens(1, 4 * count + 1))
        stats = cache.prefixes.stats()
        found = cache.manager.prefix.lookup(fetch.prompt).tokens // 4
        assert stats.hit_blocks == found, "each block is loaded once, and the first ones stay"
        assert (32 - busy) // 2 <= found <= 32 - busy + host
        assert stats.misses == {"no_room": 1}
        assert cache.fetch(tokens(2, 17)).tokens == 16
        if held is not None:
            cache.manager.free(held)


def test_close_keeps_its_timeout_and_reports_unwritten_blocks(caplog: pytest.LogCaptureFixture):
    goes = threading.Event()
    store = keyed()
    with contextlib.ExitStack() as closing:
        closing.callback(goes.set)
        cache = closing.enter_context(checked(store))
        cache.serve(tokens(1, 17))
        assert cache.prefixes.wait(60)
        store.before = lambda name: goes.wait() if name == "put" else None
        cache.serve(tokens(2, 17))
        assert not cache.prefixes.close(1.0)
        (said,) = [record.getMessage() for record in caplog.records if record.name == "blockyard.prefix_store"]
        assert said.startswith("4 blocks were not written to ")
        goes.set()


@pytest.fixture
def hang() -> Iterator[tuple[Callable[[str], object], threading.Event]]:
    """What a store calls first: it hangs while the event is not set."""
    goes = threading.Event()
    goes.set()
    yield lambda name: goes.wait(60), goes
    goes.set()


def test_a_store_that_hangs_costs_one_deadline_and_then_nothing(
    hang: tuple[Callable[[str], object], threading.Event],
):
    medium: Medium = {}
    with checked(keyed(medium)) as cache:
        for stream in range(3):
            cache.serve(tokens(stream, 9))
    store = keyed(medium)
    with checked(store, prefetch_timeout_base=0.2) as cache:
        store.before, goes = hang
        goes.clear()
        assert cache.fetch(tokens(0, 9)).tokens == 0
        assert cache.prefixes.stats().misses["timeout"] == 1
        second = cache.prefixes.prefetch(tokens(1, 9))
        assert second.done
        assert second.tokens == 0
        assert cache.prefixes.stats().misses["unavailable"] == 1
        assert cache.serve(tokens(1, 9)) == 0
        goes.set()
        assert cache.prefixes.wait(60)
        until = time.monotonic() + 60
        while not cache.fetch(tokens(2, 9)).tokens:
            assert time.monotonic() < until, "the store answers again and is not used"
            time.sleep(0.01)


@pytest.mark.parametrize("where", ["file", "memory"])
def test_a_fork_raises_and_the_parent_continues(tmp_path: Path, where: str):
    with checked(f"file://{tmp_path}?size=1MiB" if where == "file" else keyed()) as cache:
        assert cache.fetch(tokens(1, 9)).tokens == 0

        def check() -> None:
            with pytest.raises(ForkedError, match="a prefix store was created by process"):
                cache.prefixes.prefetch(tokens(2, 9))

        in_child(check)
        cache.serve(tokens(1, 9))
        assert cache.prefixes.wait(60)
        assert cache.prefixes.stats().written_blocks == 2


def test_the_engines_thread_calls_no_function_that_may_block():
    threads = set()
    store = keyed()
    store.before = lambda name: threads.add(threading.current_thread())
    with checked(store) as cache:
        cache.fetch(tokens(1, 9))
        cache.serve(tokens(1, 9))
        assert cache.prefixes.wait(60)
    assert threads
    assert threading.current_thread() not in threads


def test_staged_bytes_are_limited_and_nothing_is_lost_for_it(
    hang: tuple[Callable[[str], object], threading.Event],
):
    store = keyed()
    with checked(store, max_staging=3 * WIDTH, device=40) as cache:
        store.before, goes = hang
        goes.clear()
        for stream in range(6):
            cache.serve(tokens(stream, 17))
        cache.prefixes.poll()
        assert 0 < cache.prefixes._writes.num_blocks <= 3
        goes.set()
        assert cache.prefixes.wait(60)
        assert cache.prefixes.stats().written_blocks == 24


@pytest.mark.parametrize(
    ("writes", "after_one", "after_two"), [("second_use", 0, 2), ("through", 2, 2), ("never", 0, 0)]
)
def test_each_write_policy_writes_after_the_right_use(writes: str, after_one: int, after_two: int):
    with checked(keyed(), prefix_writes=writes) as cache:
        counts = []
        for _ in range(2):
            cache.serve(tokens(1, 9))
            assert cache.prefixes.wait(60)
            counts.append(cache.prefixes.stats().written_blocks)
        assert counts == [after_one, after_two]


def test_with_write_back_blocks_are_written_before_they_are_evicted_and_come_again():
    with checked(keyed(), device=32, host=0, prefix_writes="back") as cache:
        cache.serve(tokens(0, 9))
        assert cache.prefixes.wait(60)
        assert cache.prefixes.stats().written_blocks == 0
        stream = 0
        while cache.manager.prefix.lookup(tokens(0, 9)).tokens:
            stream += 1
            cache.serve(tokens(stream, 9))
            assert cache.prefixes.wait(60)
            cache.check()
        assert cache.prefixes.stats().written_blocks
        assert cache.fetch(tokens(0, 9)).tokens == 8
        assert cache.serve(tokens(0, 9)) == 8


def found(medium: Medium, prompt: list[int]) -> list[bool]:
    """Return which blocks of a prompt a store holds."""
    with checked(keyed(medium), prefix_writes="never") as cache:
        keys, *_ = cache.manager.prefix.store_jobs.missing(prompt, 100)
        assert len(keys) == len(prompt) // 4
        store = cache.prefixes.store
        return list(store.wait(store.submit_get(keys)).ok.tolist())


@pytest.mark.parametrize("host", [16, 0])
@pytest.mark.parametrize("writes", ["through", "back"])
def test_a_store_holds_the_beginning_of_each_prompt_and_after_close_all_of_it(writes: str, host: int):
    medium: Medium = {}
    with checked(keyed(medium), device=32, host=host, prefix_writes=writes) as cache:
        prompts = [tokens(stream, 4 * length + 1) for stream, length in enumerate((7, 3, 9, 1, 8, 5))]
        prompts += [prompt[:9] + tokens(9 + stream, 17) for stream, prompt in enumerate(prompts)]
        for prompt in [*prompts, *prompts[::3]]:
            cache.serve(prompt)
            cache.prefixes.poll()
            killed = dict(medium)
            for other in prompts:
                held = found(killed, other)
                assert held == sorted(held, reverse=True), "a block is stored without those before it"
            assert cache.prefixes.wait(60)
    assert all(all(found(medium, prompt)) for prompt in prompts)


def test_forget_empties_cache_and_store(tmp_path: Path):
    with checked(f"file://{tmp_path}/kv?size=1MiB") as cache:
        cache.serve(tokens(1, 9))
        assert cache.prefixes.wait(60)
        assert cache.prefixes.forget()
        assert cache.fetch(tokens(1, 9)).tokens == 0
        assert cache.serve(tokens(1, 9)) == 0


def test_prompts_that_share_a_beginning_read_it_once():
    medium: Medium = {}
    with checked(keyed(medium)) as cache:
        cache.serve(tokens(1, 17))
    with checked(keyed(medium)) as cache:
        fetches = [cache.prefixes.prefetch([*tokens(1, 16), 7, stream]) for stream in range(4)]
        assert cache.prefixes.wait(60, until=lambda: all(fetch.done for fetch in fetches))
        assert cache.prefixes.stats().hit_blocks == 4
        assert cache.prefixes.store.stats().read_blocks == 4
        assert cache.manager.prefix.lookup([*tokens(1, 16), 7]).tokens == 16


@pytest.mark.parametrize("host", [8, 0])
def test_a_block_that_did_not_come_is_not_loaded_in_place_of_one_that_another_prompt_brought(host: int):
    """Two prompts read block 1. The longer one wants block 2, too, which the store lacks. Either may load first."""
    medium: dict[bytes, NDArray[np.uint8]] = {}
    store = KeyedStore(medium, bytes_per_block=WIDTH)
    store.num_slots = 12
    with contextlib.closing(CheckedCache(store)) as cache:
        cache.serve(tokens(0, 8))
    for _ in range(5):
        store = KeyedStore(medium, bytes_per_block=WIDTH)
        store.num_slots = 12
        with contextlib.closing(CheckedCache(store, host=host, prefix_writes="never")) as cache:
            fetches = [cache.prefixes.prefetch(tokens(0, count)) for count in (5, 9, 13)]
            assert cache.prefixes.wait(60, until=lambda fetches=fetches: all(fetch.done for fetch in fetches))  # type: ignore[misc]
            cache.check()
            assert cache.serve(tokens(0, 13)) == 8


def test_a_store_that_breaks_every_rule_costs_misses_alone():
    medium: Medium = {}
    with checked(keyed(medium)) as cache:
        for stream in range(4):
            cache.serve(tokens(stream, 17))
    for seed in range(5):
        store = UnrulyStore(keyed(medium), seed=seed, share=0.3)
        cache = CheckedCache(store, prefetch_timeout_base=0.5)
        for stream in range(6):
            cache.fetch(tokens(stream, 17))
            cache.serve(tokens(stream, 17))
            cache.check()
        cache.close()
        assert store.broken


def test_a_scheduler_loads_prompts_near_the_head_and_admits_others_meanwhile(
    hang: tuple[Callable[[str], object], threading.Event],
):
    medium: Medium = {}
    with checked(keyed(medium)) as cache:
        cache.serve(tokens(1, 17))
    store = keyed(medium)
    cache = CheckedCache(store, prefetch_timeout_base=60)
    store.before, goes = hang
    scheduler = Scheduler(cache.cache)
    goes.clear()
    scheduler.add(Request("kept", tokens(1, 17), 1))
    scheduler.add(Request("short", tokens(2, 3), 1))
    finished = []
    cached = {}
    until = time.monotonic() + 60
    while scheduler.num_unfinished:
        assert time.monotonic() < until
        with scheduler.step() as step:
            pass
        for done in scheduler.update(step, np.zeros(step.num_draws, np.uint32)):
            finished.append(done.request.request_id)
            cached[done.request.request_id] = scheduler.stats().cached_tokens
        if finished == ["short"]:
            assert scheduler.num_loading == 1
            goes.set()
        time.sleep(0.001)
    assert finished == ["short", "kept"]
    assert cached == {"short": 0, "kept": 16}
    cache.close()


def test_blocks_that_are_read_for_the_store_are_there_for_a_prompt_that_needs_them(monkeypatch: pytest.MonkeyPatch):
    medium: Medium = {}
    with checked(keyed(medium), device=16, host=0) as cache:
        cache.serve(tokens(1, 17))
        with monkeypatch.context() as patch:
            patch.setattr(cache.prefixes._writes, "_hand_over", lambda write: False)  # the copies take their time
            cache.prefixes.poll()
        assert cache.manager.pool("device").num_free == 12
        cache.serve(tokens(2, 63))
        assert cache.prefixes.wait(60)
        assert cache.prefixes.stats().unwritten_blocks == 4
    with checked(keyed(medium), device=40) as cache:
        assert cache.fetch(tokens(1, 17)).tokens == 0
        assert cache.fetch(tokens(2, 63)).tokens == cache.serve(tokens(2, 63)) == 60


@pytest.mark.parametrize(("reason", "is_used_again"), [("", True), ("timeout", False)])
def test_rows_that_were_written_are_used_again_unless_the_store_may_still_have_them(reason: str, is_used_again: bool):
    with checked(keyed({})) as cache:
        cache.serve(tokens(1, 9))
        writes = cache.prefixes._writes
        writes.advance()
        writes.wait_for_engine()
        writes.advance()
        (write,) = writes._putting
        rows = write.rows
        assert rows is not None
        assert write.batch is not None
        ok = np.full(len(rows), not reason)
        write.batch.answer = Answer(ok, rows[:0], reasons=(reason,) * len(rows))
        cache.prefixes._checked.num_answers += 1
        writes.advance()
        buffers = cache.cache.engine.memory.buffers
        assert np.shares_memory(buffers.take(*rows.shape), rows) == is_used_again


def test_hits_misses_and_times_are_counted(tmp_path: Path):
    with checked(f"file://{tmp_path}/kv?size=1MiB") as cache:
        cache.fetch(tokens(1, 9))
        cache.serve(tokens(1, 9))
        assert cache.prefixes.wait(60)
        stats = cache.prefixes.stats()
    assert stats.misses == {"absent": 1}
    assert stats.written_bytes == 2 * WIDTH
    took = stats.load_seconds
    assert sum(took.counts) == stats.prefetches == 1
    # Where the time is in its range, so is the sum.
    (place,) = [place for place, count in enumerate(took.counts) if count]
    assert (0.0, *took.bounds)[place] < took.sum <= (*took.bounds, 60.0)[place]


def test_bad_arguments_are_refused(tmp_path: Path):
    url = f"file://{tmp_path}/kv?size=1MiB"
    good = {"device_blocks": 8, "prefix_caching": True, "prefix_store": url, "namespace": b"m"}
    bad = [
        ({"namespace": b""}, "namespace is b''"),
        ({"prefix_caching": False}, "prefix_caching is False, must be True"),
        ({"prefix_writes": "sometimes"}, "prefix_writes is 'sometimes'"),
        ({"prefetch_timeout_base": 0}, "prefetch_timeout_base is 0, must be above 0"),
        ({"max_staging": WIDTH - 1}, f"max_staging is {WIDTH - 1}: .* hold no block of {WIDTH} bytes"),
    ]
    for change, message in bad:
        with pytest.raises(InvalidArgumentError, match=message):
            KVCache(LAYOUT, **{**good, **change})  # type: ignore[arg-type]
    with KVCache(LAYOUT, **good), pytest.raises(StoreError, match="in use"):  # type: ignore[arg-type]
        KVCache(LAYOUT, **good)  # type: ignore[arg-type]
