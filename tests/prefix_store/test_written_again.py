"""Blocks that the store did not keep, or has dropped, are stored again once a prompt has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kept_prefixes import BLOCK, WIDTH, CheckedCache, checked, tokens
from memory_stores import KeyedStore, Quotas, QuotaStore
from numpy.typing import NDArray
from paged_cache import MODELS, PROMPT, layout_of, new_cache, serve

from blockyard.errors import StoreError
from blockyard.events import export_keys
from blockyard.prefix_store import pressure
from blockyard.prefix_store import writes as writes_module
from blockyard.stores import ExternalStore, open_store

HOT = tokens(1, 8 * BLOCK)
PATIENCE = 60.0


class Failing(KeyedStore):
    """A store whose puts of blocks fail while `fails` is set; the record of the epoch is put."""

    num_slots = 1000
    fails = False

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        if self.fails and rows.shape[1] >= WIDTH:
            raise StoreError("the storage is down")
        return super().put(keys, rows)


def failing(medium: dict[bytes, NDArray[np.uint8]]) -> Failing:
    return Failing(medium, bytes_per_block=WIDTH)


def fail_puts(name: str) -> None:
    if name == "put":
        raise StoreError("the storage is down")


def num_slots(url: str) -> int:
    with open_store(url, bytes_per_block=WIDTH, use="prefix", namespace=bytes(32)) as store:
        return store.num_slots


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[CheckedCache], list[int]]:
    """Record how many blocks an engine reads for its store, in each copy."""

    def record(cache: CheckedCache) -> list[int]:
        engine, found = cache.cache.engine, []
        submit = engine.submit_read

        def counted(tier: str, blocks: NDArray[np.int64], *args: object, **options: object) -> object:
            found.append(len(blocks))
            return submit(tier, blocks, *args, **options)

        monkeypatch.setattr(engine, "submit_read", counted)
        return found

    return record


@pytest.mark.parametrize("writes", ["through", "second_use"])
@pytest.mark.parametrize("host", [12, 0])
def test_what_was_computed_while_the_store_failed_is_stored_once_a_prompt_has_it(writes: str, host: int):
    medium: dict[bytes, NDArray[np.uint8]] = {}
    store = failing(medium)
    with checked(store, host=host, device=16, prefix_writes=writes) as cache:
        store.fails = True
        for _ in range(2):
            cache.serve([*HOT, 5])
        cache.prefixes.wait(PATIENCE)
        assert cache.prefixes.stats().written_blocks == 0
        store.fails = False
        for token in (6, 7):
            assert cache.serve([*HOT, token, *tokens(2, BLOCK)]) == len(HOT)
        assert cache.prefixes.wait(PATIENCE)
    with checked(failing(medium), host=host) as cache:
        assert cache.fetch([*HOT, 8]).tokens == len(HOT)


def test_a_store_that_fails_is_not_offered_a_prefix_at_each_hit(
    reads: Callable[[CheckedCache], list[int]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pressure, "_PAUSES", (3600.0, 3600.0))
    store = failing({})
    with checked(store, device=16) as cache:
        store.fails = True
        found = reads(cache)
        cache.serve([*HOT, 5])
        assert cache.prefixes.wait(PATIENCE)
        failed = list(found)
        assert failed
        for _ in range(50):
            assert cache.serve([*HOT, 5]) == len(HOT)
            cache.prefixes.poll()
        assert found == failed
        store.fails = False
        assert cache.prefixes.wait(PATIENCE)
        assert cache.prefixes.stats().written_blocks == 8, "wait does not wait for the pause to end"


@pytest.mark.parametrize("host", [12, 0])
def test_a_prefix_that_the_store_has_dropped_is_stored_again_when_a_prompt_goes_on_from_it(tmp_path: Path, host: int):
    url = f"file://{tmp_path}/kv?size=1MiB"
    size = num_slots(url)
    with checked(url, device=16, host=host) as cache:
        cache.serve([*HOT, 5])
        for stream in range(10, 10 + size):  # twice as many blocks as the store has slots
            cache.serve(tokens(stream, 2 * BLOCK + 1))
            assert cache.serve([*HOT, 5]) == len(HOT), "the device keeps what is hit"
            assert cache.prefixes.wait(PATIENCE)
        for token in (6, 7):
            cache.serve([*HOT, token, *tokens(2, BLOCK)])
            assert cache.prefixes.wait(PATIENCE)
    with checked(url, host=host) as cache:
        assert cache.fetch([*HOT, 8]).tokens == len(HOT)


def test_of_a_chain_that_the_store_has_lost_in_part_the_part_that_is_there_is_not_read_again(
    tmp_path: Path, reads: Callable[[CheckedCache], list[int]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(writes_module, "WRITTEN_AT_ONCE", 2 * WIDTH)
    url = f"file://{tmp_path}/kv?size=1MiB"
    with checked(url, device=16) as cache:
        cache.serve([*HOT, 5])
        assert cache.prefixes.wait(PATIENCE)
        lost = np.array([list(key) for key in export_keys(HOT, block_size=BLOCK)[6:]], np.uint8)
        store = cache.prefixes.store
        assert store.wait(store.submit_delete(lost), PATIENCE).ok.all()
        cache.serve([*HOT, 6, *tokens(2, BLOCK)])
        assert cache.prefixes.wait(PATIENCE)
        found = reads(cache)
        assert cache.serve([*HOT, 7]) == len(HOT)
        assert cache.prefixes.wait(PATIENCE)
        assert found == [2], "the last two"
    with checked(url) as cache:
        assert cache.fetch([*HOT, 8]).tokens == len(HOT)


def test_what_a_store_has_no_room_for_is_not_read_for_it_at_each_hit(
    tmp_path: Path, reads: Callable[[CheckedCache], list[int]]
):
    url = f"file://{tmp_path}/kv?size=1MiB"
    size = num_slots(url)
    prompt = tokens(3, (size + 6) * BLOCK)
    with checked(url, device=2 * size + 20, host=0) as cache:
        cache.serve([*prompt, 5])
        assert cache.prefixes.wait(PATIENCE)
        assert cache.prefixes.stats().written_blocks == size
        found = reads(cache)
        for token in range(6, 12):
            assert cache.serve([*prompt, token, *tokens(token, BLOCK)]) == len(prompt)
            assert cache.prefixes.wait(PATIENCE)
        assert found == []
    with checked(url, device=2 * size + 20, host=0) as cache:
        assert cache.fetch(prompt).tokens == size * BLOCK


@pytest.mark.parametrize("model", MODELS)
def test_so_is_what_a_hybrid_models_hit_needs(model: str):
    layout, medium = layout_of(MODELS[model]), Quotas({})

    def new_store() -> ExternalStore:
        store = QuotaStore(medium, bytes_per_block=layout.bytes_per_value)
        store.num_slots = 4096
        return store

    store = new_store()
    with new_cache(store, model) as cache:
        prefixes = cache.prefix_store
        assert prefixes is not None
        store.before = fail_puts
        serve(cache, PROMPT)
        prefixes.wait(PATIENCE)
        assert prefixes.stats().written_blocks == 0
        store.before = lambda name: None
        assert serve(cache, PROMPT)[0] == 56
        assert prefixes.wait(PATIENCE)
    with new_cache(new_store(), model) as cache:
        assert serve(cache, PROMPT)[0] == 56


@pytest.mark.parametrize("calls", [{"get", "put"}, {"put"}])
@pytest.mark.parametrize("model", ["window", "state", "drafter"])
def test_no_prompt_of_a_hybrid_model_waits_for_a_store_whose_calls_fail(model: str, calls: set[str]):
    def fail(name: str) -> None:
        if name in calls:
            raise StoreError("the storage is down")

    store = QuotaStore(Quotas({}), bytes_per_block=layout_of(MODELS[model]).bytes_per_value)
    store.num_slots = 4096
    with new_cache(store, model, prefetch_timeout_base=3600.0) as cache:
        store.before = fail
        for start in (0, 1000, 2000):
            assert serve(cache, [start + token for token in PROMPT])[0] == 0
        assert store.stats().errors < 100, "it is not asked again and again"
