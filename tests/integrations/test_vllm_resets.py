"""A reset of vLLM's caches: what the external store forgets, and chunks of transfers that the reset met."""

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from vllm_sides import KEYS, Engine, content

from blockyard.errors import StoreError


def test_after_a_reset_nobody_finds_what_was_stored_before_it_nor_others_what_came_after(
    engine: Callable[..., Engine],
):
    first = engine()
    first.compute(KEYS[:4])
    first.manager.reset_cache()
    first.manager.on_reset_flushed()
    assert first.found(KEYS[:4], "two") == 0
    first.settle()
    # What is stored now may be of other weights than those that are named.
    first.compute(KEYS[:2])
    assert first.tier.counts.written == 6
    first.close()
    again = engine()
    assert again.found(KEYS[:4]) == 0


def test_a_reset_leaves_the_store_alone_if_the_weights_are_fixed(engine: Callable[..., Engine]):
    first = engine(weights_fixed=True)
    first.compute(KEYS[:4])
    first.manager.reset_cache()
    first.manager.on_reset_flushed()
    first.compute(KEYS[4:5])
    assert first.lookups(KEYS[:1], first.context("two")) == ["RETRY"]
    first.settle()
    assert first.found(KEYS[:4], "three") == 4
    assert first.load(KEYS[:4])
    first.close()
    assert engine().found(KEYS[:4]) == 4


def test_writes_that_a_reset_meets_are_found_by_nobody(engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch):
    first = engine()
    first.tier._batch = 1
    began, release, contains = threading.Event(), threading.Event(), first.store.contains

    def late(keys: list[bytes]) -> Any:
        found = contains(keys)
        began.set()
        release.wait(30)
        return found

    monkeypatch.setattr(first.store, "contains", late)
    prepared = first.manager.prepare_store(KEYS[:3], first.context())
    first.manager.complete_store(prepared.keys_to_store, first.context())
    assert began.wait(30)
    # One write is about to be submitted, two wait behind it. The reset waits for none of them.
    first.manager.reset_cache()
    assert first.tier.counts.written == 0
    release.set()
    first.settle()
    assert first.tier.counts.written == 1
    first.close()
    assert engine().found(KEYS[:3]) == 0


def test_a_store_that_does_not_forget_is_not_used_until_it_does(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    first = engine()
    first.compute(KEYS[:4])
    forget, release = first.store.forget, threading.Event()

    def fail() -> None:
        release.wait(30)
        raise StoreError("the storage failed")

    monkeypatch.setattr(first.store, "forget", fail)
    first.manager.reset_cache()
    for has_answered in (False, True):
        first.compute_only(KEYS[4:6])
        assert first.found(KEYS[:4], "two") == 0
        assert (first.tier.counts.missed, first.tier.counts.written) == (0, 4)
        assert ("continues without its external store" in caplog.text) is has_answered
        release.set()
        first.settle()
    assert "another revision" in caplog.text
    monkeypatch.setattr(first.store, "forget", forget)
    first.manager.reset_cache()
    first.manager.on_reset_flushed()
    first.settle()
    first.compute(KEYS[6:8])
    assert first.tier.counts.written == 6


class Steps:
    """vLLM's connector: it submits a step's stores in the next step, and waits there for those that a reset met."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.manager, self.context = engine, engine.manager, engine.context("steps")
        self.stores: list[Any] = []
        self.stale: list[Any] = []
        self.loaded = 0

    def reset(self) -> None:
        self.manager.reset_cache()
        self.stale += self.stores
        self.stores = []

    def step(self, load: list[bytes], compute: list[bytes]) -> None:
        """Look keys up, load what is there and compute others; the copies take place after the external store's."""
        before, self.stores = self.stores, []
        hits = [key for key in load if self.manager.lookup(key, self.context).name == "HIT"]
        chunks = self.manager.prepare_load(hits, self.context) if hits else None
        self.engine.end_step()
        prepared = self.manager.prepare_store(compute, self.context)
        self.engine.settle_store()
        for job in (*self.stale, *before):
            self.copy_out(job)
        if self.stale and hasattr(self.engine.vllm.base.OffloadingManager, "on_reset_flushed"):
            self.manager.on_reset_flushed()
        self.stale.clear()
        if chunks is not None:
            self.engine.blocks[0].zero_()
            self.engine.copy("submit_load", list(range(len(hits))), chunks)
            for place, key in enumerate(hits):
                assert (self.engine.blocks[0][place] == content(key, 0)).all(), "the bytes of another prompt"
            self.loaded += len(hits)
            self.manager.complete_load(hits, self.context)
        for job in before:
            self.manager.complete_store(job.keys_to_store, self.context)
        if prepared is not None and prepared.keys_to_store:
            self.stores.append(prepared)
        self.manager.on_request_finished(self.context)

    def copy_out(self, job: Any) -> None:
        for place, key in enumerate(job.keys_to_store):
            self.engine.blocks[0][place] = content(key, 0)
        self.engine.copy("submit_store", list(range(len(job.keys_to_store))), job.store_spec)


@pytest.mark.parametrize("seed", range(3))
def test_no_load_gets_bytes_of_a_store_that_a_reset_met(engine: Callable[..., Engine], seed: int):
    """Random steps and resets: each load brings its key's bytes, whatever stores of other keys were under way."""
    writes = ("through", "second_use")[seed % 2]
    rng, one = (
        random.Random(seed),
        engine(chunks=5, weights_fixed=True, prefetch_timeout_base=600, prefix_writes=writes),
    )
    steps, keys = Steps(one), KEYS[:10]
    for _ in range(300):
        if rng.random() < 0.2:
            steps.reset()
        steps.step(rng.sample(keys, rng.randint(1, 4)), rng.sample(keys, rng.randint(0, 5)))
    assert steps.loaded > 50
    assert one.tier.counts.loaded > 20
    one.settle()
    one.manager._offload.check()


@pytest.mark.parametrize("in_flight", [[], KEYS[6:7]], ids=["idle", "a store is in flight"])
def test_chunks_come_from_the_store_right_after_a_reset(engine: Callable[..., Engine], in_flight: list[bytes]):
    one = engine(chunks=8, weights_fixed=True)
    one.compute(KEYS[:4])
    steps = Steps(one)
    steps.step([], in_flight)
    steps.reset()
    assert one.found(KEYS[:4], "again") == 4
    steps.step(KEYS[:4], [])
    assert steps.loaded == 4
    assert one.tier.counts.loaded == 4


@pytest.mark.parametrize("wanted", [KEYS[:2], KEYS[10:12]], ids=["the same keys", "other keys"])
def test_a_store_right_after_a_reset_gets_chunks_of_those_that_it_met(
    engine: Callable[..., Engine], wanted: list[bytes]
):
    """All chunks are in use by transfers that the reset met: without them no later transfer would ever start."""
    one = engine(chunks=8, weights_fixed=True)
    steps = Steps(one)
    steps.step([], KEYS[:8])
    steps.reset()
    if hasattr(one.vllm.base.OffloadingManager, "on_reset_flushed"):
        steps.step([], [])  # there vLLM reports their end first
    steps.step([], wanted)
    steps.step([], [])
    assert one.lookups([*wanted, KEYS[9]]) == ["HIT", "HIT", "MISS"]
    one.settle()
    assert one.found(wanted, "later") == 2
    one.manager._offload.check()
    assert one.manager._offload.num_free == 8
