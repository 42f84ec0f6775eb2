"""The external store below `BlockyardSpec`'s host memory, over vLLM's own classes (`VLLM_SOURCE`) or stand-ins."""

import importlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from servers import serving
from vllm_sides import CHUNKS, KEYS, Engine, hint

from blockyard.errors import StoreError
from blockyard.stores import StoreStats


@pytest.mark.parametrize("world", [1, 2])
def test_chunks_come_back_after_a_restart_and_are_hits_only_when_they_are_there(
    engine: Callable[..., Engine], world: int
):
    first = engine(world=world)
    first.compute(KEYS[:6])
    assert first.tier.counts.written == 6
    first.close()
    again = engine(world=world)
    context = again.context()
    assert again.lookups(KEYS[:7], context) == ["RETRY"] * 6 + ["MISS"]
    again.settle()
    assert again.lookups(KEYS[:7], context) == ["HIT"] * 6 + ["MISS"]
    assert again.load(KEYS[:6])


def test_a_request_that_may_not_load_from_a_store_has_hits_on_the_host_alone(engine: Callable[..., Engine]):
    first = engine()
    first.compute(KEYS[:4])
    first.close()
    again = engine()
    again.compute(KEYS[4:6])
    barred, other = again.context(), again.context()
    asked: list[Any] = []
    barred.load_tier_filter = SimpleNamespace(allows=lambda medium, locality: asked.append((medium, locality)))
    assert again.lookups([*KEYS[4:6], KEYS[0]], barred) == ["HIT", "HIT", "MISS"]
    assert [(medium.name, locality) for medium, locality in asked] == [("STORAGE", None)]
    assert again.lookups(KEYS[:2], other) == ["RETRY", "RETRY"]


@pytest.mark.parametrize("url", ["file", None])
@pytest.mark.parametrize("canonical", [False, True])
def test_workers_with_the_same_bytes_keep_them_once(engine: Callable[..., Engine], url: str | None, canonical: bool):
    options = {} if url else {"prefix_store": None, "revision": None}
    fields = {"replicated_layout": True, "canonical_layout": canonical}
    first = engine(world=4, fields=fields, **options)
    assert first.manager.num_chunks == CHUNKS
    region = first.tier._region if url else first.manager.region
    assert region.is_complete
    assert not region._path.exists()
    first.compute_only(KEYS[:6])
    assert first.load(KEYS[:6])
    for written, blocks in enumerate(first.blocks):
        blocks[:] = written
    first.copy("submit_store", [0], first.manager.prepare_store(KEYS[6:7], first.context()).store_spec)
    first.manager.complete_store(KEYS[6:7], first.context())
    chunks = first.manager.prepare_load(KEYS[6:7], first.context())
    first.copy("submit_load", [1], chunks)
    assert all(bool((blocks[1] == 0).all()) for blocks in first.blocks)  # as the first worker wrote them
    if url:
        first.settle()
        first.close()
        again = engine(world=4, fields=fields)
        assert again.found(KEYS[:7]) == 7
        assert again.load(KEYS[:6])


def test_a_request_that_waits_for_the_store_has_its_hits_from_there_and_later_ones_from_the_host(
    engine: Callable[..., Engine],
):
    first = engine()
    first.compute(KEYS[:4])
    assert sources(first, KEYS[:4]) == ["HOST"] * 4
    first.close()
    again = engine()
    again.compute(KEYS[4:6])
    context, other = again.context("two"), again.context("three")
    again.lookups(KEYS[:6], context)
    again.lookups(KEYS[1:3], other)
    again.settle()
    assert again.lookups(KEYS[:6], context) == ["HIT"] * 6
    assert sources(again, KEYS[:6], context) == ["DISK"] * 4 + ["HOST"] * 2
    assert sources(again, KEYS[:4], other) == ["HOST", "DISK", "DISK", "HOST"]
    again.manager.on_request_finished(context)
    assert sources(again, KEYS[:4], again.context("four")) == ["HOST"] * 4


def test_a_chunk_that_the_store_loses_and_another_request_computes_is_from_the_host(engine: Callable[..., Engine]):
    first = engine()
    first.compute(KEYS[:1])
    first.close()
    one = engine()
    one.store.fault = "lose"
    context = one.context("two")
    assert one.lookups(KEYS[:1], context) == ["RETRY"]
    one.settle()
    one.compute(KEYS[:1], one.context("three"))
    assert one.lookups(KEYS[:1], context) == ["HIT"]
    assert sources(one, KEYS[:1], context) == ["HOST"]


def test_vllms_metrics_say_whether_the_store_answers_and_what_it_damaged(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    class Stats(dict[str, float]):
        set_gauge = dict.__setitem__
        increase_counter = dict.__setitem__

    module = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(OffloadingConnectorStats=Stats))
    one = engine()
    now = 1000.0
    monkeypatch.setattr(one.tier.__class__.health.__globals__["time"], "monotonic", lambda: now)
    answers = StoreStats(misses={"absent": 3, "queue_full": 2})
    monkeypatch.setattr(one.store, "stats", lambda: answers)

    def reported(seconds: float) -> tuple[float, float]:
        nonlocal now
        now += seconds
        found = one.manager.get_stats()
        return tuple(found[f"blockyard:kv_offload_external_{name}"] for name in ("up", "damaged_chunks"))

    assert reported(0) == (1, 0)
    answers = StoreStats(misses={"absent": 3, "payload_checksum": 2, "key": 1}, is_down=True)
    assert reported(0.5) == (1, 0), "a store is asked once a second"
    assert reported(0.6) == (0, 3)
    answers = StoreStats(misses=answers.misses, errors=1, errors_in_a_row=1)
    assert reported(2) == (0, 0), "it refuses connections"
    answers = StoreStats(misses=answers.misses, errors=3, errors_in_a_row=3)
    assert reported(2) == (0, 0)
    assert reported(2) == (1, 0), "nothing has failed since"
    answers = StoreStats(misses=answers.misses, errors=4)
    assert reported(2) == (1, 0), "something has succeeded since"
    one.tier._has_forgotten = False
    assert reported(2) == (0, 0), "until a reset is confirmed it is not used"
    one.tier._has_forgotten = True
    assert reported(2) == (1, 0)
    assert "blockyard:kv_offload_external_up" not in engine(prefix_store=None, revision=None).manager.get_stats()


def sources(engine: Engine, keys: list[bytes], context: Any = None) -> list[str]:
    context = context or engine.context()
    return [engine.manager.get_load_source(key, context).name for key in keys]


@pytest.mark.parametrize(
    ("url", "source"),
    [
        (None, "HOST"),
        ("file:///var/cache?size=1GiB", "DISK"),
        ("local:///var/cache?size=1GiB", "DISK"),
        ("memory://one?size=1GiB", "HOST"),
        ("redis://file:1?size=1GiB", "EXTERNAL_UNSPECIFIED"),
        ("s3://bucket?size=1GiB", "EXTERNAL_UNSPECIFIED"),
    ],
)
def test_vllms_label_of_a_hit_is_that_of_the_storage(vllm: SimpleNamespace, url: str | None, source: str):
    metrics = importlib.import_module("blockyard.integrations.vllm.metrics")
    assert metrics.hit_source(url).name == source


@pytest.mark.parametrize(
    ("change", "found"),
    [({}, 6), ({"revision": "b"}, 0), ({"world": 2}, 0), ({"blocks_per_chunk": 2}, 0)],
)
def test_only_the_same_weights_and_layout_find_chunks(
    engine: Callable[..., Engine], change: dict[str, Any], found: int
):
    first = engine()
    first.compute(KEYS[:6])
    first.close()
    assert engine(**change).found(KEYS[:6]) == found


@pytest.mark.parametrize("fault", ["lose", "refuse", "hang"])
def test_storage_that_fails_costs_misses_and_not_for_ever(engine: Callable[..., Engine], fault: Any):
    first = engine()
    first.compute(KEYS[:4])
    first.close()
    again = engine()
    again.store.fault = fault
    assert again.found(KEYS[:4]) == 0
    again.compute(KEYS[4:6])
    again.store.fault = ""
    assert again.found(KEYS[:4], "two") == 4
    assert again.load(KEYS[:4])
    assert again.found(KEYS[4:6], "three") == 2
    again.manager._offload.check()


def test_a_request_waits_no_longer_than_its_deadline(engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch):
    first = engine()
    first.compute(KEYS[:4])
    first.close()
    again = engine(prefetch_timeout_base=0.05)
    release = threading.Event()
    wait = again.store.wait
    monkeypatch.setattr(again.store, "wait", lambda *arguments: (release.wait(), wait(*arguments))[1])
    assert again.found(KEYS[:4]) == 0
    hinted = again.context("two", hint("blockyard.wait", {"seconds": 0}))
    assert set(again.lookups(KEYS[:4], hinted)) == {"MISS"}
    release.set()
    again.settle()
    # What came late is a hit for others.
    assert again.found(KEYS[:4], "three") == 4


def test_more_chunks_than_the_host_has_come_as_far_as_they_fit_and_the_request_goes_on(engine: Callable[..., Engine]):
    first = engine(chunks=24)
    first.compute(KEYS[:12])
    first.compute(KEYS[12:])
    first.close()
    again = engine(chunks=4)
    assert again.found(KEYS) <= 4
    again.settle()
    again.manager._offload.check()


def test_what_is_loaded_keeps_its_chunk_and_the_rest_misses(engine: Callable[..., Engine]):
    first = engine(chunks=24)
    first.compute(KEYS[:8])
    first.close()
    again = engine(chunks=4)
    assert again.found(KEYS[:4]) == 4
    again.manager.prepare_load(KEYS[:4], again.context())
    assert again.found(KEYS[4:8], "two") == 0
    again.manager.complete_load(KEYS[:4], again.context())
    assert again.found(KEYS[4:8], "three") == 4


def test_what_is_retained_makes_room_for_what_is_read(engine: Callable[..., Engine]):
    first = engine(chunks=24)
    first.compute(KEYS[:4])
    first.close()
    again = engine(chunks=8)
    again.compute(KEYS[8:16], again.context("retaining", hint("blockyard.retain", {"seconds": 600})))
    assert again.manager._offload.num_free == 0
    assert again.found(KEYS[:4], "two") == 4
    again.manager._offload.check()


def test_a_request_that_needs_more_than_the_host_has_reads_no_chunk_for_ever(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    first = engine(chunks=24)
    first.compute(KEYS[:10])
    first.close()
    again = engine(chunks=8)
    again.compute(KEYS[:6])
    monkeypatch.setattr(again.tier, "_timeout_base", 600.0)
    two = again.context("two")
    while "RETRY" in (states := again.lookups(KEYS[:10], two)):
        assert again.tier.counts.loaded <= 8
        again.settle()
    assert states[:6] == ["HIT"] * 6


def test_a_chunk_for_which_the_host_has_no_room_is_read_once_it_has_some(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    first = engine(chunks=24)
    first.compute(KEYS[:12])
    first.close()
    again = engine(chunks=8)
    assert again.found(KEYS[4:12]) == 8
    held = again.context()
    again.manager.prepare_load(KEYS[4:12], held)  # vLLM copies them, as long as that takes
    monkeypatch.setattr(again.tier, "_timeout_base", 600.0)
    two = again.context("two")
    for _ in range(3):
        assert again.lookups(KEYS[:4], two) == ["RETRY"] * 4
        again.settle()
        assert again.store.stats().read_blocks == 8
    again.manager.complete_load(KEYS[4:12], held)
    until = time.monotonic() + 60
    while (states := again.lookups(KEYS[:4], two)) != ["HIT"] * 4:
        assert "MISS" not in states
        assert time.monotonic() < until
        again.settle()


def test_chunks_evicted_before_their_requests_load_them_are_read_again_for_one_request_at_a_time(
    engine: Callable[..., Engine],
):
    first = engine(chunks=24)
    first.compute(KEYS[:8])
    first.close()
    again = engine(chunks=8)
    one, two = again.context(), again.context("two")
    assert again.lookups(KEYS[:4], one) == again.lookups(KEYS[4:8], two) == ["RETRY"] * 4
    again.settle()
    again.compute_only(KEYS[8:16])  # evicts all of them
    again.settle_store()
    assert again.lookups(KEYS[:4], one) == again.lookups(KEYS[4:8], two) == ["RETRY"] * 4
    again.settle()
    assert again.tier.counts.loaded == 8 + 4
    assert again.lookups(KEYS[:4], one) == ["HIT"] * 4
    assert again.lookups(KEYS[4:8], two) == ["RETRY"] * 4
    again.settle()
    assert again.lookups(KEYS[4:8], two) == ["HIT"] * 4
    assert again.load(KEYS[4:8])


def test_a_request_whose_chunks_would_fill_the_host_does_not_read_what_was_evicted_again(
    engine: Callable[..., Engine],
):
    first = engine(chunks=24)
    first.compute(KEYS[:4])
    first.close()
    again = engine(chunks=4)
    one = again.context()
    assert again.lookups(KEYS[:4], one) == ["RETRY"] * 4
    again.settle()
    again.compute_only(KEYS[8:12])
    again.settle_store()
    assert again.lookups(KEYS[:4], one) == ["MISS"] * 4


def test_more_chunks_than_may_be_written_at_once_are_written_as_writes_end(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    first = engine(chunks=16)
    store, begun, go_on = first.tier._store, threading.Event(), threading.Event()
    put, rows = store.submit_put, []

    def submit_put(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        rows.append(len(arguments[0]))
        return put(*arguments)

    monkeypatch.setattr(store, "submit_put", submit_put)
    first.compute_only(KEYS[:6])
    assert begun.wait(60)
    first.compute_only(KEYS[6:14])
    # Takes two free chunks, and four that wait to be written.
    assert first.manager.prepare_store(KEYS[14:20], first.context()) is not None
    go_on.set()
    first.settle_store()
    assert sum(rows) == first.tier.counts.written == 10
    assert first.tier.counts.not_written == 4
    first.close()
    assert engine(chunks=24).found(KEYS[:6]) == 6


def test_chunks_of_a_write_that_failed_are_written_once_the_store_works(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    first, now = engine(), [1000.0]
    external = importlib.import_module("blockyard.integrations.vllm.external")
    monkeypatch.setattr(external, "time", SimpleNamespace(monotonic=lambda: now[0]))
    first.store.fault = "refuse"
    first.compute(KEYS[:4])
    assert (first.tier.counts.written, first.tier.can_write) == (0, False)
    first.compute(KEYS[4:6])
    assert (first.tier.num_unwritten, first.tier.counts.not_written) == (6, 0)
    first.store.fault = ""
    now[0] += 0.6
    first.settle()
    assert (first.tier.counts.written, first.tier.num_unwritten, first.tier.can_write) == (6, 0, True)


def test_a_load_that_a_reset_meets_is_no_hit(engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch):
    first = engine()
    first.compute(KEYS[:4])
    first.close()
    again = engine()
    release = threading.Event()
    wait = again.store.wait
    monkeypatch.setattr(again.store, "wait", lambda *arguments: (release.wait(), wait(*arguments))[1])
    assert set(again.lookups(KEYS[:4])) == {"RETRY"}
    again.end_step()
    again.manager.reset_cache()
    release.set()
    again.settle()
    assert again.manager._offload.num_stored == 0


def test_pinned_chunks_stay_and_are_let_go_in_time(engine: Callable[..., Engine]):
    one = engine(chunks=4)
    pin = hint("blockyard.pin", {"seconds": 600})
    others = [
        hint("other", {}),
        hint("blockyard.pin", {"seconds": "long"}),
    ]
    one.compute(KEYS[:2], one.context("pinned", *others, pin))
    one.compute(KEYS[2:4])
    one.compute(KEYS[4:6], one.context("more", pin))
    assert one.lookups(KEYS[:2], one.context("x")) == ["HIT", "HIT"]
    assert one.manager._offload.lookup(KEYS[2:4]) == ["miss", "miss"]
    # At most every second chunk is pinned.
    one.compute(KEYS[6:8])
    assert one.manager._offload.lookup(KEYS[4:6]) == ["miss", "miss"]
    one.manager._pins.expire(1 << 60)
    one.compute(KEYS[8:12])
    assert one.manager._offload.lookup(KEYS[:2]) == ["miss", "miss"]
    one.manager.reset_cache()
    one.manager._offload.check()


def test_what_was_looked_up_can_be_loaded_though_chunks_come_meanwhile(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    first = engine()
    first.compute(KEYS[:8])
    first.close()
    again = engine(chunks=4)
    again.compute(KEYS[8:12])
    release, wait = threading.Event(), again.store.wait
    monkeypatch.setattr(again.store, "wait", lambda *arguments: (release.wait(), wait(*arguments))[1])
    assert set(again.lookups(KEYS[:4], again.context("two"))) == {"RETRY"}
    again.end_step()
    assert again.lookups(KEYS[8:11]) == ["HIT"] * 3
    release.set()
    again.settle_store()
    assert again.load(KEYS[8:11])
    # In the next step they can be evicted.
    again.end_step()
    assert again.manager._offload.num_free == 4
    again.manager._offload.check()


def test_events_say_what_comes_from_the_store_and_what_goes_for_it(engine: Callable[..., Engine]):
    first = engine()
    first.compute(KEYS[:8])
    first.close()
    again = engine(chunks=4)
    again.compute(KEYS[20:24])
    list(again.manager.take_events())
    assert again.found(KEYS[:2]) == 2
    events = [(event.removed, sorted(event.keys)) for event in again.manager.take_events()]
    assert events == [(True, KEYS[20:22]), (False, KEYS[:2])] or events == [(True, KEYS[22:24]), (False, KEYS[:2])]


def test_a_store_that_cannot_be_opened_ends_the_start(vllm: SimpleNamespace, tmp_path: Path):
    with pytest.raises(StoreError):
        Engine(vllm, tmp_path / "missing" / "folder")


def test_two_engines_share_a_server_and_go_on_without_it(engine: Callable[..., Engine], tmp_path: Path):
    with serving("valkey-server", tmp_path) as server:
        url = f"redis://127.0.0.1:{server.port}?size=1MiB&timeout_base=20"
        first, second = (
            engine(prefix_store=url, prefetch_timeout_base=30),
            engine(prefix_store=url, prefetch_timeout_base=30),
        )
        first.compute(KEYS[:4])
        # Neither knows what the server has: it is asked.
        assert second.found(KEYS[:5]) == 4
        assert second.load(KEYS[:4])
        server.process.kill()
        server.process.wait()
        first.compute(KEYS[6:8])
        assert second.found(KEYS[6:8], "two") == 0
        assert first.found(KEYS[:4], "three") == 4
        assert first.load(KEYS[:4])


def test_nothing_is_left_in_shared_memory(engine: Callable[..., Engine]):
    one = engine(world=2)
    assert one.tier._region.is_complete
    assert not one.tier._region._path.exists()


def test_second_use_writes_what_is_computed_or_found_again(engine: Callable[..., Engine]):
    one = engine(chunks=4, prefix_writes="second_use")
    one.compute(KEYS[:4])
    assert one.tier.counts.written == 0
    reader = one.context("reader")
    one.manager.prepare_load(KEYS[:2], reader)
    one.manager.complete_load(KEYS[:2], reader)
    one.manager.on_request_finished(reader)
    one.settle()
    assert one.tier.counts.written == 2, "found on the host"
    one.compute(KEYS[4:8])  # evicts all
    one.compute(KEYS[2:4])
    assert one.tier.counts.written == 4, "computed again after an eviction"
    one.close()
    again = engine(prefix_writes="second_use")
    context = again.context()
    again.lookups(KEYS[:8], context)
    again.settle()
    assert again.lookups(KEYS[:8], context) == ["HIT"] * 4 + ["MISS"] * 4
    assert again.load(KEYS[:4])
    again.manager.on_request_finished(context)
    again.settle()
    assert again.tier.counts.written == 0, "what came from the store is there"


def test_a_request_does_not_use_its_own_chunks_a_second_time(engine: Callable[..., Engine]):
    one = engine(prefix_writes="second_use")
    context = one.context()
    one.compute(KEYS[:4], context)
    one.manager.prepare_load(KEYS[:4], context)  # after a preemption
    one.manager.complete_load(KEYS[:4], context)
    one.manager.on_request_finished(context)
    one.settle()
    assert one.tier.counts.written == 0


def test_chunks_found_on_the_device_are_used_a_second_time(engine: Callable[..., Engine]):
    one = engine(prefix_writes="second_use")
    one.compute(KEYS[:2])
    other = one.context("other")
    for place, key in enumerate(KEYS[:4]):  # the device has the first two
        other._offload_key_positions[key] = 16 * place + 16
    one.compute(KEYS[2:4], other)
    one.manager.on_request_finished(other)
    one.settle()
    assert one.tier.counts.written == 2


@pytest.mark.parametrize("fixed", [True, False])
def test_other_weights_use_nothing_a_second_time(engine: Callable[..., Engine], fixed: bool):
    one = engine(prefix_writes="second_use", weights_fixed=fixed)
    one.compute(KEYS[:4])
    one.manager.reset_cache()
    one.settle()
    one.compute(KEYS[:4])
    assert one.tier.counts.written == 4 * fixed


def test_keys_used_once_are_forgotten_beyond_a_number(vllm: SimpleNamespace):
    used = importlib.import_module("blockyard.integrations.vllm.external").UsedBefore(4)
    assert used.computed(KEYS[:4]) == []
    assert used.computed(KEYS[:1]) == KEYS[:1]
    assert used.computed(KEYS[4:6]) == []
    assert used.computed(KEYS[:4]) == [KEYS[0], KEYS[3]]


def test_chunks_that_another_engine_has_written_count_as_present_and_not_as_lost(engine: Callable[..., Engine]):
    first = engine()
    first.compute(KEYS[:6])
    first.close()
    again = engine()
    again.compute(KEYS[:8])
    counts = again.tier.counts
    assert (counts.written, counts.present, counts.not_written) == (2, 6, 0)


def test_a_chunk_that_is_found_often_is_written_once(vllm: SimpleNamespace):
    used = importlib.import_module("blockyard.integrations.vllm.external").UsedBefore(4)
    assert used.found(KEYS[:2]) == KEYS[:2]
    assert used.found(KEYS[:3]) == KEYS[2:3]
    assert used.computed(KEYS[:2]) == KEYS[:2], "the host had lost them, and the store did not bring them"
    assert used.found(KEYS[:2]) == []
