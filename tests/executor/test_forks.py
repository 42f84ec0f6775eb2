"""A fork of a process with a cache or ranks: its calls raise, it takes nothing, and the parent continues."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from forks import in_child
from memory_stores import PATIENCE, KeyedStore
from spans import recorded

from blockyard import CacheEngine, KVCache, KVLayout, StepExecutor
from blockyard.errors import BlockyardError, ForkedError
from blockyard.executor import ParallelExecutor, RemoteExecutor, serve_executor
from blockyard.metrics import Collector

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python's, of a fork with threads

LAYOUT = KVLayout("kv_first", num_layers=1, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")


def compute(cache: KVCache, prompt: list[int]) -> None:
    sequence = cache.manager.allocate(prompt)
    with cache.step():
        cache.manager.mark_computed([sequence])


def test_every_call_of_a_cache_raises_in_a_fork_and_close_returns(tmp_path: Path):
    gate, asked = threading.Event(), threading.Event()
    store = KeyedStore(bytes_per_block=LAYOUT.bytes_per_block)
    sizes = {"device_blocks": 8, "max_device_blocks": 16, "host_blocks": 8}
    swap = f"file://{tmp_path}/swap?size=1MiB"
    options = {"prefix_caching": True, "prefix_store": store, "namespace": b"model", "prefetch_timeout_base": PATIENCE}
    with recorded() as spans, KVCache(LAYOUT, swap_store=swap, **sizes, **options) as cache:
        compute(cache, list(range(9)))
        assert cache.prefix_store.wait(PATIENCE)
        store.before = lambda name: (asked.set(), gate.wait(PATIENCE))
        compute(cache, list(range(10, 19)))
        fetch = cache.prefix_store.prefetch(list(range(20, 29)))
        assert asked.wait(PATIENCE)
        prefixes, ended = cache.prefix_store, len(spans.ended)
        calls: list[Callable[[], object]] = [cache.step, cache.poll, cache.drain, lambda: cache.resize(4)]
        calls += [lambda: prefixes.prefetch([1] * 9), prefixes.poll, prefixes.wait, prefixes.forget]
        calls += [lambda: fetch.done, lambda: list(Collector(cache).collect())]

        def check() -> None:
            for call in calls:
                with pytest.raises((ForkedError, BlockyardError), match="process"):
                    call()
            health = cache.health()
            assert not health.ok
            assert "a cache was created by process" in health.reasons[0]
            for _ in range(2):
                cache.close()
            assert len(spans.ended) == ended, "the parent ends its spans itself"

        in_child(check)
        gate.set()
        assert cache.prefix_store.wait(PATIENCE)
        assert cache.prefix_store.wait(PATIENCE, until=lambda: fetch.done)
        assert cache.prefix_store.stats().written_blocks == 4
        assert cache.health().ok
    spans.check()


@pytest.fixture
def rank() -> Iterator[tuple[RemoteExecutor, Connection]]:
    """An executor in another thread, and this end of the connection to it."""
    ours, theirs = Pipe()
    with CacheEngine(LAYOUT, device_blocks=8, host_blocks=8) as engine:
        thread = threading.Thread(target=serve_executor, args=(theirs, StepExecutor(engine)))
        thread.start()
        yield RemoteExecutor(ours, name="rank 1"), ours
        ours.close()
        thread.join(PATIENCE)
        theirs.close()


def test_a_fork_cannot_speak_to_the_ranks_of_its_parent(rank: tuple[RemoteExecutor, Connection]):
    remote, connection = rank
    both = ParallelExecutor([remote])
    asked = remote.begin("poll")
    assert connection.poll(PATIENCE), "the answer is there: a fork must leave it to the parent"

    def check() -> None:
        for call in (both.poll, lambda: both.lost(1), lambda: remote.tell("a step"), lambda: remote.ask(1), asked):
            with pytest.raises(ForkedError, match="the connection to rank 1 was created by process"):
                call()

    in_child(check)
    assert asked() == []
    assert both.poll() == []


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_connection_to_a_rank_cannot_be_copied(
    copied: Callable[[object], object], rank: tuple[RemoteExecutor, Connection]
):
    with pytest.raises(TypeError, match="cannot copy or pickle the connection to rank 1"):
        copied(rank[0])
    assert rank[0].poll() == []
    assert np.all(rank[0].lost(1) == ())
