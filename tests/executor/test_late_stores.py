"""Loads that come late or not at all: what a step waits for, what is refused until then, and what is lost.

Random programs over late stores: tests/property/test_cache_machine.py.
"""

import contextlib
import time
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from simulated_device import SimulatedStore

from blockyard import KVCache, KVLayout
from blockyard.errors import SequenceStateError
from blockyard.integrations.transformers import Generator
from blockyard.stores import Completion, ExternalStore
from blockyard.tools.demo.demo_model import demo_model

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=2, num_kv_heads=1, head_size=1, dtype="int64")
SIZE = LAYOUT.bytes_per_block


class PromptStore(SimulatedStore):
    """Storage that has its answers at the next poll."""

    def poll(self) -> list[int]:
        while self._step():
            pass
        return super().poll()


class LateStore(ExternalStore):
    """A store whose answers come some polls late, unless somebody waits for them; it loses a share of what it reads."""

    def __init__(self, inner: ExternalStore, late: int, *, lose: float = 0.0) -> None:
        self.inner, self.late, self.lose, self.random = inner, late, lose, Random(late)
        self.polls, self.waits = 0, 0
        self.due: dict[int, int] = {}
        self.ready: list[int] = []

    @property
    def num_slots(self) -> int:
        return self.inner.num_slots

    @property
    def bytes_per_block(self) -> int:
        return self.inner.bytes_per_block

    def submit_write(self, slots, rows):
        return self._note(self.inner.submit_write(slots, rows))

    def submit_read(self, slots, rows=None):
        return self._note(self.inner.submit_read(slots, rows))

    def poll(self) -> list[int]:
        self.polls += 1
        self.ready += self.inner.poll()
        found = [ticket for ticket in self.ready if self.due[ticket] <= self.polls]
        self.ready = [ticket for ticket in self.ready if ticket not in found]
        return found

    def wait(self, ticket, timeout=None):
        self.waits += self.due[ticket] > self.polls
        answer = self.inner.wait(ticket, timeout)
        if not len(answer.rows) or not self.lose:
            return answer
        ok = answer.ok & [self.random.random() >= self.lose for _ in answer.ok]
        answer.rows[~ok] = 0xEE
        return Completion(ticket, ok, answer.rows, ["" if good else "absent" for good in ok])

    def stats(self):
        return self.inner.stats()

    def close(self, timeout: float = 5.0) -> bool:
        return self.inner.close(timeout)

    def _note(self, ticket: int) -> int:
        self.due[ticket] = self.polls + self.late
        return ticket


@contextlib.contextmanager
def opened(late: int, *, lose: float = 0.0) -> Iterator[KVCache]:
    store = LateStore(PromptStore(24, SIZE, seed=0), late, lose=lose)
    sizes = {"device_blocks": 24, "host_blocks": 16, "watermark": 0.0, "max_staging": 6 * SIZE}
    with KVCache(LAYOUT, swap_store=store, **sizes) as cache:
        yield cache


def coming_back(cache: KVCache) -> tuple[int, np.ndarray]:
    """A sequence of five tokens that the next step fetches, and the rows that it had."""
    handle = int(cache.manager.allocate(5))
    with cache.step():
        rows = np.random.default_rng(0).integers(0, 256, (3, SIZE), np.uint8)
        cache.engine.write("device", cache.manager.block_table(handle).astype(np.int64), rows)
    cache.manager.swap_out(handle, to="external")
    with cache.step():
        pass
    cache.drain()
    cache.manager.swap_in(handle)
    return handle, rows


def rows_of(cache: KVCache, handle: int) -> np.ndarray:
    return cache.engine.read("device", cache.manager.block_table(handle).astype(np.int64))


def test_prefetched_sequences_are_refused_until_their_ticket_has_ended():
    with opened(late=4) as cache:
        manager = cache.manager
        handle, rows = coming_back(cache)
        waits = cache.swap_store.waits
        calls = (
            lambda: manager.append(handle),
            lambda: manager.can_append(handle),
            lambda: manager.block_table(handle),
            lambda: manager.block_tables([handle]),
            lambda: manager.slot_mapping(handle, 0, 5),
            lambda: manager.fork(handle, shared_tokens=0, num_tokens=1),
            lambda: manager.swap_out(handle),
        )

        def assert_refused() -> None:
            message = rf"is still moving \(ticket {step.decision.ticket}\), 3 of its blocks have not arrived"
            for call in calls:
                with pytest.raises(SequenceStateError, match=message):
                    call()

        with cache.step(prefetch=True) as step:
            assert step.decision.prefetch
            assert_refused()
        assert step.ended == []
        assert_refused()
        assert cache.swap_store.waits == waits, "it waited for the store"
        until, ended = time.monotonic() + 300, set()
        while step.decision.ticket not in ended:
            assert time.monotonic() < until
            with cache.step() as later:
                pass
            ended |= {end.ticket for end in later.ended}
        np.testing.assert_array_equal(rows_of(cache, handle), rows)
        manager.append(handle)


@pytest.mark.parametrize("ask", ["append", "block_table", "block_tables", "slot_mapping", "fork"])
def test_a_prefetch_waits_for_what_its_own_step_computes_with(ask: str):
    with opened(late=10) as cache:
        handle, rows = coming_back(cache)
        waits = cache.swap_store.waits
        arguments = {"fork": {"shared_tokens": 0, "num_tokens": 1}, "slot_mapping": {"first": 0, "last": 1}}
        getattr(cache.manager, ask)(handle, **arguments.get(ask, {}))
        with cache.step(prefetch=True) as step:
            assert not step.decision.prefetch
            assert cache.swap_store.waits == waits + 1
            np.testing.assert_array_equal(rows_of(cache, handle), rows)


@pytest.mark.parametrize("by_layer", [False, True])
def test_missing_blocks_are_known_before_compute_and_refused(by_layer: bool):
    with opened(late=3, lose=1.0) as cache:
        manager = cache.manager
        first, second = manager.allocate(5, 5)
        with cache.step():
            pass
        manager.swap_out([first, second], to="external")
        with cache.step():
            pass
        cache.drain()
        (child,) = manager.fork(first, 1).tolist()
        manager.swap_in([first, child])
        manager.append([first, child])
        resident = manager.allocate(3)
        with cache.step(by_layer=by_layer) as step:
            assert step.lost.tolist() == sorted([int(first), child])
            for call in (manager.append, manager.block_tables, manager.fork):
                with pytest.raises(SequenceStateError, match="lost"):
                    call(int(first))
            assert len(manager.block_tables([resident])) == 1
        (end,) = step.ended
        assert (end.ticket, end.lost.tolist()) == (step.decision.ticket, step.lost.tolist())
        manager.free([first, child])
        manager.check()


def test_a_generator_gives_the_same_tokens_however_late_the_store_is():
    model = demo_model()
    prompts = [[number + 1] * 6 for number in range(3)]
    options = {"block_size": 4, "host_blocks": 0, "prefix_caching": False, "preemption_mode": "swap"}
    with Generator(model, device_blocks=200, **options) as generator:
        wanted = {output.index: output.tokens for output in generator.generate(prompts, max_new_tokens=8)}
        size = generator.cache.layout.bytes_per_block
    store = LateStore(PromptStore(100, size, seed=5), late=5)
    with Generator(model, device_blocks=6, swap_store=store, **options) as generator:
        found = {output.index: output.tokens for output in generator.generate(prompts, max_new_tokens=8)}
        assert generator.scheduler.stats().resumed_swap_external > 0
    assert found == wanted
