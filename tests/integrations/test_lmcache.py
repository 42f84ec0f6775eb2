"""`BlockyardConnector` by itself: what each operation says, and its end. Its bytes: `test_engine_stores.py`."""

import gc
import importlib.metadata
import os
import select
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import engine_drivers
import numpy as np
import pytest
from engine_drivers import FaultyStore

from blockyard.errors import InvalidArgumentError, StoreError
from blockyard.stores import register

register("faulty")(FaultyStore)
OPTIONS = {"kv_dtype": "float16", "part": "4KiB"}


@pytest.fixture
def lmcache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with engine_drivers.lmcache() as module:
        FaultyStore.fault = ""
        FaultyStore.media.clear()
        FaultyStore.released.clear()
        yield module
        FaultyStore.released.set()


def outcome(connector: Any, ticket: int) -> tuple[bool, str, list[bool]]:
    assert select.select([connector.event_fd()], [], [], engine_drivers.SECONDS)[0]
    ((done, ok, error, found),) = connector.drain_completions()
    assert done == ticket
    assert connector.drain_completions() == []
    assert not select.select([connector.event_fd()], [], [], 0)[0]
    return ok, error, found


def test_lookups_loads_and_deletions_of_some_are_successes_and_stores_of_some_are_not(lmcache: Any):
    with closing(lmcache.BlockyardConnector(url="faulty://one", revision="1", **OPTIONS)) as connector:
        data = bytearray(b"abc" * 3000)
        assert outcome(connector, connector.submit_batch_set(["a"], [memoryview(data)])) == (True, "", [True])
        assert outcome(connector, connector.submit_batch_exists(["a", "b"])) == (True, "", [True, False])
        places = [memoryview(bytearray(9000)), memoryview(bytearray(9000))]
        assert outcome(connector, connector.submit_batch_get(["b", "a"], places)) == (True, "", [False, True])
        assert [bytes(place) for place in places] == [bytes(9000), bytes(data)]
        assert outcome(connector, connector.submit_batch_delete(["a"])) == (True, "", [True])
        assert outcome(connector, connector.submit_batch_exists(["a"])) == (True, "", [False])
        FaultyStore.fault = "raises"
        assert outcome(connector, connector.submit_batch_set(["c"], [memoryview(data)])) == (
            *(False, "1 of 1 objects were not stored"),
            [False],
        )


def test_a_chunks_objects_of_several_groups_keep_their_own_lengths(lmcache: Any):
    groups = {"model@0@0@ab": b"full" * 2000, "model@0@1@ab": b"window" * 50, "model@0@2@ab": b"state"}
    with closing(lmcache.BlockyardConnector(url="faulty://one", revision="1", **OPTIONS)) as connector:
        data = [memoryview(bytearray(each)) for each in groups.values()]
        assert outcome(connector, connector.submit_batch_set([*groups], data)) == (True, "", [True] * 3)
        places = [memoryview(bytearray(len(each))) for each in groups.values()]
        assert outcome(connector, connector.submit_batch_get([*groups], places)) == (True, "", [True] * 3)
        assert [bytes(place) for place in places] == [*groups.values()]
        other = [memoryview(bytearray(5))]
        assert outcome(connector, connector.submit_batch_get(["model@0@1@ab"], other)) == (True, "", [False])


def test_lmcaches_own_adapter_keeps_the_objects_of_each_group(tmp_path: Path):
    api = pytest.importorskip("lmcache.v1.distributed.api", exc_type=ModuleNotFoundError)
    engine = engine_drivers.LMCache({"root_dir": str(tmp_path), "size": "1MiB"})
    keys = [api.ObjectKey(b"ab", "model", 0, object_group_id=group) for group in range(4)]
    random = np.random.default_rng(0)
    data = [random.integers(0, 256, size, np.uint8) for size in (9000, 350, 5)]

    def finish(ticket: int, event: int, found: Any) -> list[bool]:
        assert select.select([event], [], [], engine_drivers.SECONDS)[0]
        return engine_drivers._bits(found(ticket), len(keys))

    adapter = engine.adapter
    held = [engine._object(each.copy()) for each in data]  # LMCache holds them until the store task ends
    ticket = adapter.submit_store_task(keys[:3], held)
    assert select.select([adapter.get_store_event_fd()], [], [], engine_drivers.SECONDS)[0]
    assert ticket in adapter.pop_completed_store_tasks()
    places = [np.full(size, 7, np.uint8) for size in (9000, 350, 5, 350)]
    ticket = adapter.submit_load_task(keys, [engine._object(place) for place in places])
    found = finish(ticket, adapter.get_load_event_fd(), adapter.query_load_result)
    assert found == [True, True, True, False]
    assert all(map(np.array_equal, places, [*data, np.full(350, 7, np.uint8)]))
    engine.close()


def test_a_load_that_hangs_keeps_no_lookup_waiting_and_a_closed_connector_takes_nothing(lmcache: Any):
    connector = lmcache.BlockyardConnector(url="faulty://one", revision="1", **OPTIONS)
    outcome(connector, connector.submit_batch_set(["a"], [memoryview(bytes(9000))]))
    FaultyStore.fault = "hangs"
    load = connector.submit_batch_get(["a"], [memoryview(bytearray(9000))])
    lookup = connector.submit_batch_exists(["a"])
    ended: list[int] = []
    while len(ended) < 2:
        assert select.select([connector.event_fd()], [], [], engine_drivers.SECONDS)[0]
        ended += [ticket for ticket, _, _, _ in connector.drain_completions()]
    assert sorted(ended) == [load, lookup]
    FaultyStore.released.set()
    connector.close()
    connector.close()
    with pytest.raises(StoreError, match="the connector is closed"):
        connector.submit_batch_exists(["a"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_dtype": ""}, "kv_dtype is ''"),
        ({"kv_dtype": "auto"}, "must be the dtype that auto stands for"),
        ({"kv_dtype": "bf16"}, "did you mean 'bfloat16'"),
        ({"revison": "x"}, "adapter_params has 'revison' .did you mean 'revision'.*, must be of kv_dtype, root_dir"),
        ({"part": "1K"}, "part: '1K' is not a size"),
        ({"part": 1024}, "must be 4KiB to 64MiB"),
        ({"url": None}, "must give exactly one of them"),
        ({"revision": ""}, "revision is empty.*LMCache tells an adapter the model's name, not its weights"),
        ({"revision": 7}, "revision is 7, must be text"),
    ],
)
def test_wrong_options_are_refused_by_name(lmcache: Any, change: dict[str, Any], message: str):
    with pytest.raises(InvalidArgumentError, match=message):
        lmcache.BlockyardConnector(**({"url": "faulty://one", "kv_dtype": "float16", "revision": "1"} | change))


def test_a_store_in_memory_needs_no_revision(lmcache: Any):
    with closing(lmcache.BlockyardConnector(url="memory://lmcache?size=1MiB", **OPTIONS)) as connector:
        assert outcome(connector, connector.submit_batch_exists(["a"])) == (True, "", [False])


def test_keys_and_memory_that_do_not_pair_are_refused_and_nothing_is_begun(lmcache: Any, tmp_path: Path):
    options = {"root_dir": str(tmp_path), "size": "8MiB", "kv_dtype": "float16", "revision": "1"}
    with closing(lmcache.BlockyardConnector(**options)) as connector:
        with pytest.raises(InvalidArgumentError, match="2 keys and 1 memoryviews"):
            connector.submit_batch_get(["a", "b"], [memoryview(bytearray(8))])
        assert connector.drain_completions() == []


def test_without_lmcache_the_import_says_what_it_needs(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    for name in [name for name in sys.modules if name.startswith("blockyard.integrations.lmcache")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"blockyard.integrations.lmcache needs LMCache 0.5.6"):
        importlib.import_module("blockyard.integrations.lmcache")


def test_after_close_each_operation_has_its_completion_and_the_descriptor_stays_the_connectors(
    lmcache: Any, tmp_path: Path
):
    connector = lmcache.BlockyardConnector(root_dir=str(tmp_path), revision="1", **OPTIONS, size="16MiB")
    descriptor = connector.event_fd()
    tickets = {
        connector.submit_batch_set([f"key {number}"], [memoryview(bytes(100_000))]): number for number in range(50)
    }
    connector.close()
    connector.close()
    assert select.select([descriptor], [], [], 0)[0]
    done = connector.drain_completions()
    assert {ticket for ticket, *_ in done} == set(tickets)
    assert len(done) == len(tickets)
    assert all(ok == all(found) and len(found) == 1 for _, ok, _, found in done)
    assert connector.drain_completions() == []
    os.fstat(descriptor)  # open: no other file has its number
    del connector
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
